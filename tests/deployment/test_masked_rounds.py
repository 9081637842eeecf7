"""Masked rounds with real processes and mTLS: the model is the simulated one to the bit, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from deployment.consortium import Consortium
from deployment.tiny import write_site

pytestmark = pytest.mark.slow

NAMES = ("a", "b", "c", "d")
_FILE = """
[site]
file = "site.py"
[[learners]]
name = "all"
names = ["a", "b", "c", "d"]
batch_size = 10
time_per_batch = 0.1
[training]
learning_rate = 0.1
[policy]
name = "sync_fedavg"
local_epochs = 1
[policy.secure_sum]
[stop]
rounds = 3
[deployment]
heartbeat = 1
linger = 5
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(folder: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.out").open("ab") as out:
        command = [sys.executable, "-m", "metis.cli.app", *arguments]
        return subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ))


def test_processes_open_sums_under_masks_though_the_controller_is_killed(tmp_path: Path) -> None:
    """Killed and started again in the middle, it ends with the bits of a simulation, and nothing stays behind."""
    consortium, port = Consortium(tmp_path / "ca"), _free_port()
    consortium.controller()
    for name in NAMES:
        kit = consortium.kit(name)
        (kit.folder / "site-policy.toml").write_text(f"peers = {json.dumps(NAMES)}\nmin_masked_members = 4\n")
    site = write_site(tmp_path)
    (tmp_path / "federation.toml").write_text(_FILE)
    serve = (
        "controller", "federation.toml", "--state", "state", "--identity", "ca/main", "--listen", f"127.0.0.1:{port}",
        "--site", str(site),
    )  # fmt: skip
    controller = _start(tmp_path, "controller", *serve)
    learners = [
        _start(
            tmp_path,
            name,
            "learner",
            "--controller",
            f"localhost:{port}",
            "--identity",
            f"ca/{name}",
            "--site",
            str(site),
            "--work",
            f"work-{name}",
        )
        for name in reversed(NAMES)
    ]
    events = tmp_path / "state" / "run" / "events.jsonl"
    try:
        _until(lambda: events.exists() and b"round_closed" in events.read_bytes(), controller, tmp_path)
        controller.send_signal(signal.SIGKILL)
        controller.wait()
        controller = _start(tmp_path, "controller", *serve)
        assert controller.wait(600) == 0, (tmp_path / "controller.out").read_text()[-3000:]
        assert [learner.wait(300) for learner in learners] == [0, 0, 0, 0]
    finally:
        for process in (controller, *learners):
            if process.poll() is None:
                process.kill()
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    assert len([line for line in lines if line.get("action") == "community_published"]) >= 3
    assert all(line["loss"] is None for line in lines if line.get("event") == "update_request")
    models = [load_file(tmp_path / f"work-{name}" / "community.safetensors") for name in NAMES]
    assert all(np.array_equal(models[0][key], other[key]) for other in models for key in models[0])
    _start(tmp_path, "simulation", "simulate", "federation.toml", "--out", "simulated").wait(300)
    simulated = load_file(tmp_path / "simulated" / "community.safetensors")
    assert {key: value.tobytes() for key, value in simulated.items()} == {
        key: value.tobytes() for key, value in models[0].items()
    }, "the simulated model has other bits"
    for name in NAMES:  # keys and shares are gone
        kept = [path.name for path in (tmp_path / f"work-{name}" / "sums").iterdir()]
        assert not any(path.endswith("-body") for path in kept)


def _until(condition: object, process: subprocess.Popen[bytes], folder: Path) -> None:
    assert callable(condition)
    end = time.monotonic() + 600
    while not condition():
        assert process.poll() is None and time.monotonic() < end, (folder / "controller.out").read_text()[-3000:]
        time.sleep(0.02)
