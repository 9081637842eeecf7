"""What a solver and a personal part keep outlives the training process of a deployed learner, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import metis
from metis.core.solvers import Solver
from metis.deployment.trainer.memories import Memories
from metis.learning import Batch, TorchEngine

COSINE: Any = {"name": "CosineAnnealingLR", "T_max": 9}


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=generator), torch.randint(2, (8,), generator=generator)) for _ in range(count)]


@pytest.mark.parametrize(
    "solver",
    [
        metis.AdamW(0.01, keep_state=True),
        metis.TorchOptimizer(torch.optim.AdamW, lr=0.01, scheduler=COSINE, keep_state=True),
    ],
    ids=str,
)
def test_a_new_process_goes_on_with_what_was_kept(solver: Solver, tmp_path: Path) -> None:
    """Three batches, a new process with nothing but the folder, four more: the bits of seven in one process."""

    def engine() -> TorchEngine:
        network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        return TorchEngine(lambda: network, parameters={"local": ["2.*"]})

    torch.manual_seed(0)
    start, data, first = engine().initial_model(1), batches(7), engine()
    kept = first.train(start, data[:3], solver)
    Memories(tmp_path / "memory").keep(0, dict(kept.memory))
    again = Memories(tmp_path / "memory").before(1)
    assert again is not None and set(again) == set(kept.memory)
    assert all(np.array_equal(again[name], array) for name, array in kept.memory.items())
    assert first.train(kept.model, data[3:], solver, again).model.sha256() == (
        first.train(kept.model, data[3:], solver, kept.memory).model.sha256()
    )
