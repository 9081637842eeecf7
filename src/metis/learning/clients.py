"""What engines share whose training is somebody else's: a client of another system, which has its own data and loop.

A learner's batches are turns here: what the client trains on is the client's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.core.model import Layout, TensorSpec
from metis.errors import ConfigError
from metis.learning.engine import EngineJob, Examples

_FLOATS = ("float16", "float32", "float64")
_INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")


@dataclass(frozen=True)
class Turn:
    """What a learner hands out instead of a batch: whose turn it is, and how much of the data it stands for."""

    learner: str
    examples: int


class ClientExamples:
    """The data of one client as far as anybody else may know: how many examples it has."""

    def __init__(self, learner: str, count: int, batch_size: int) -> None:
        self._learner, self._count, self.batch_size = learner, count, batch_size

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: NDArray[np.int64]) -> Turn:
        return Turn(self._learner, self._count)


def layout_of(arrays: Mapping[str, NDArray[Any]], source: str) -> Layout:
    """The layout of these arrays, under their own names; integers travel alongside and are not averaged."""
    if not arrays:
        raise ConfigError(f"the model of {source} has no arrays, so there is nothing to mix")
    specs = []
    for name, array in arrays.items():
        kind = str(array.dtype)
        if kind not in _FLOATS and kind not in _INTEGERS:
            raise ConfigError(
                f"array '{name}' of {source} is of {kind}; allowed: {', '.join(_FLOATS)}, bool and integers"
            )
        specs.append(TensorSpec(name, array.shape, kind, "parameter" if kind in _FLOATS else "counter"))
    return Layout(tuple(specs))


def check_left_to_client(job: EngineJob, client: str) -> None:
    """A ConfigError if the job asks for what only the client can do."""
    if job.clip_norm is not None or job.accumulate != 1 or job.parameters is not None:
        raise ConfigError(f"clip_norm, accumulate and parameters are up to {client}; leave them out")
    if job.dtype != "float32" or job.precision != "float32":
        raise ConfigError(f"the precision is up to {client}; leave dtype and precision out")


def measured_by_clients(
    examples: Examples, measure: Callable[[Turn], tuple[Mapping[str, float], int]]
) -> dict[str, float]:
    """Each client measures on its own data, and says on how many examples; means over all of them."""
    sums: dict[str, float] = {}
    weights: dict[str, int] = {}
    start = 0
    while start < len(examples):
        turn: Turn = examples.batch(np.array([start]))
        metrics, count = measure(turn)
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + count * value
            weights[name] = weights.get(name, 0) + count
        start += turn.examples
    return {name: total / weights[name] for name, total in sums.items()}
