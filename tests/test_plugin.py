"""The example plugin in a fresh environment: each of its pieces by name in a file, in a plan, in a deployment."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import metis

pytest.importorskip("hatchling", reason="hatchling builds the example plugin")

PLUGIN = Path(__file__).parents[1] / "examples" / "plugin"
FILE = PLUGIN / "federation.toml"
HANG = 300  # seconds; only a test that hangs takes longer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * HANG)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An environment with the plugin, which sees Metis and what it needs where they are installed already."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    )
    seen = [str(Path(metis.__file__).parents[1]), sysconfig.get_path("purelib")]
    (Path(site.stdout.strip()) / "metis.pth").write_text("\n".join(seen) + "\n", "utf-8")
    options = ["--disable-pip-version-check", "-qq", "--python", str(python), "install"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *options, "--no-deps", "--no-build-isolation", str(PLUGIN)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    yield python


def run(python: Path, *arguments: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100"}
    command = [python, "-c", "from metis.cli.app import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=HANG)


def document(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_its_pieces_are_simulated_by_name(python: Path, tmp_path: Path) -> None:
    """Policy, solver, layer, data set and engine stand in one file; training with them learns something."""
    done = run(python, "compare", FILE, "--set", "stop.seconds=20", "--out", tmp_path / "runs", "--json")
    rows = document(done)["rows"]
    assert [row["label"] for row in rows] == ["Quorum (60%)", "SemiSync (λ=1), clipped at 0.5", "Sync"]
    assert all(row["best"] > 0.75 for row in rows)


def test_its_policy_is_planned(python: Path) -> None:
    """The planner plays the policy's own protocol."""
    planned = document(run(python, "plan", FILE, "--json"))
    assert any("Quorum" in policy["label"] for policy in planned["policies"])


def test_a_typo_names_the_nearest(python: Path, tmp_path: Path) -> None:
    """As for what comes with Metis."""
    for wrong, right in (
        ("policy.0.name=quorun", "did you mean 'quorum'?"),
        ("training.solver=sing", "did you mean 'sign'?"),
        ("policy.1.clip.nrom=1", "did you mean 'norm'?"),
        ("policy.1.clip.norm=0", "must be greater than 0"),
        ("data.dataset=moon", "did you mean 'moons'?"),
        ("training.engine=softmx", "did you mean 'softmax'?"),
        ("training.beta=1", "must be less than 1"),
    ):
        done = run(python, "simulate", FILE, "--set", wrong, "--out", tmp_path / "run")
        assert done.returncode == 2 and right in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_its_pieces_are_deployed_by_name(python: Path, tmp_path: Path) -> None:
    """A controller and two learners as processes, each of which finds the plugin by itself."""
    learners = ["--set", "learners.0.count=1", "--set", "learners.1.count=1"]
    port = _free_port()
    base = [str(python), "-c", "from metis.cli.app import main; main()"]
    options = [*learners, "--policy", "SemiSync (λ=1), clipped at 0.5", "--set", "stop.rounds=3", "--http", ""]
    address = f"127.0.0.1:{port}"
    commands = [
        ["controller", str(FILE), "--state", "state", "--insecure", "--listen", address, *options],
        *(
            ["learner", "--controller", address, "--insecure", "--name", name, "--pace", "0.002"]
            for name in ("fast-1", "slow-1")
        ),
    ]
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context((tmp_path / f"{number}.log").open("w+")) for number in range(len(commands))]
        processes = [
            stack.enter_context(subprocess.Popen([*base, *command], cwd=tmp_path, stdout=output, stderr=output))
            for command, output in zip(commands, outputs, strict=True)
        ]
        try:
            codes = [processes[0].wait(HANG)]
            if codes == [0]:  # else its learners wait for it in vain
                codes += [process.wait(HANG) for process in processes[1:]]
        finally:
            for process in processes:
                process.kill()
    logs = [(tmp_path / f"{number}.log").read_text("utf-8") for number in range(len(commands))]
    assert codes == [0, 0, 0], "\n".join(logs)
    assert (tmp_path / "state" / "run" / "community.safetensors").exists()


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
