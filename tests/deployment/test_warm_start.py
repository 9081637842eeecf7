"""A federation that starts from a model file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from deployment.chaos.harness import Process, until

FILE = Path(__file__).parents[2] / "examples" / "consortium" / "federation.toml"


def controller(folder: Path, log: str) -> Process:
    words = ["controller", str(FILE), "--policy", "sync_fedavg", "--state", str(folder / "state"), "--insecure"]
    words += ["--listen", "127.0.0.1:0", "--set", f"training.initial_model={folder / 'start.safetensors'}", "--json"]
    return Process(words, folder / f"{log}.log")


def write(path: Path, **tensors: Any) -> None:
    weight = np.zeros((64, 10), np.float32)
    save_file({"weight": weight, "bias": np.eye(10, dtype=np.float32)[3], **tensors}, path)


@pytest.mark.slow
def test_a_controller_starts_from_a_file_and_goes_on_without_it(tmp_path: Path) -> None:
    """The file is checked against the network, its model is evaluated as model 0, and a restart does not need it."""
    start, events = tmp_path / "start.safetensors", tmp_path / "state" / "run" / "events.jsonl"
    write(start, bias=np.zeros(9, np.float32))
    with controller(tmp_path, "wrong") as refused:
        assert refused.wait() == 2
        assert "tensor 'bias' is [9] of float32, the network's is [10] of float32" in refused.text()
    write(start)
    with controller(tmp_path, "first") as first:
        first.wait_for("starting from ")
        until(lambda: events.exists() and '"evaluated"' in events.read_text(), "the evaluation of model 0")
        first.kill()
    (measured,) = [json.loads(line) for line in events.read_text().splitlines() if '"evaluated"' in line]
    assert measured["metrics"]["loss"] == pytest.approx(2.362, abs=0.05), "it answers 3, a little more often"
    start.unlink()
    with controller(tmp_path, "second") as second:
        second.wait_for("listening on")
        assert "starting from" not in second.text()
        second.kill()
