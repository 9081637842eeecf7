"""On the disk store, memory does not grow with the number of learners."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import metis
from simulation.children import child
from simulation.federations import FEATURES, blobs

MODEL_MB = 0.15


def resident_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def measure(folder: Path, learners: int, store: Any, policy: str, update_requests: int) -> None:
    """How much a run adds to this process at most, in MB."""
    import resource

    # The usual limit of open files, wherever the test runs.
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    inputs, targets = blobs(learners)
    hidden = int(MODEL_MB * 2**20 / 4 / (FEATURES + 1 + 3))
    federation = metis.Federation(
        network=lambda: torch.nn.Sequential(torch.nn.Linear(FEATURES, hidden), torch.nn.Linear(hidden, 3)),
        train=(inputs, targets),
        learners=[metis.SimulatedLearner(f"{n}", np.array([n]), 1, metis.Speed(0.1)) for n in range(learners)],
        solver=metis.VanillaSGD(0.01),
    )
    before = peak = resident_mb()

    def watch(fold: object) -> None:
        nonlocal peak
        peak = max(peak, resident_mb())

    federation.simulate(
        getattr(metis, policy)(1), update_requests=update_requests, store=store, out=folder, watch=watch
    )
    (folder / "growth").write_text(json.dumps(peak - before))


def growth(folder: Path, *arguments: Any) -> float:
    folder.mkdir()
    with child(measure, folder, *arguments) as process:
        process.join()
        assert process.exitcode == 0
    return float(json.loads((folder / "growth").read_text()))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to look at memory")
@pytest.mark.parametrize(
    ("policy", "few", "many", "updates"), [("sync_fedavg", 100, 1000, 1000), ("fedrec", 50, 250, 250)]
)
def test_memory_is_flat_in_the_number_of_learners(
    policy: str, few: int, many: int, updates: int, tmp_path: Path
) -> None:
    """Every further learner would add its model of 0.15 MB in memory; on disk it adds less than a fifth of that."""
    on_disk = [
        growth(tmp_path / f"disk {learners}", learners, "disk", policy, min(updates, learners))
        for learners in (few, many)
    ]

    assert (on_disk[1] - on_disk[0]) / (many - few) < MODEL_MB / 5
    in_memory = growth(tmp_path / "memory", 200, "memory", policy, 200)
    assert in_memory > 0.8 * MODEL_MB * 200  # the test can tell
