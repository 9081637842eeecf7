"""Where the latest local model of each learner is kept, and sums over what is kept there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import Row, add_scaled, average, quotient
from metis.core.events import LearnerId
from metis.core.model import Vector

_ROWS_AT_ONCE = 32  # local models mapped at the same time, which bounds memory on a disk store


class ModelStore(Protocol):
    """Keeps the latest local model of each learner."""

    def put(self, learner: LearnerId, vector: Vector) -> None: ...
    def get(self, learner: LearnerId) -> Row: ...
    def remove(self, learner: LearnerId) -> None: ...


class MemoryStore:
    """Local models in memory, without copying them."""

    def __init__(self) -> None:
        self._vectors: dict[LearnerId, Vector] = {}

    def put(self, learner: LearnerId, vector: Vector) -> None:
        self._vectors[learner] = vector

    def get(self, learner: LearnerId) -> Vector:
        return self._vectors[learner]

    def remove(self, learner: LearnerId) -> None:
        self._vectors.pop(learner, None)


def weighted_sum(size: int, store: ModelStore, values: Mapping[LearnerId, float]) -> NDArray[np.float64]:
    """Full pass over the stored models in learner order, so that arrival order cannot change a bit."""
    total = np.zeros(size, np.float64)
    order, at_once = sorted(values), _models_per_pass(store, len(values))
    for start in range(0, len(order), at_once):
        add_scaled(total, [(store.get(k), values[k]) for k in order[start : start + at_once]])
    return total


def stored_average(size: int, store: ModelStore, values: Mapping[LearnerId, float]) -> Vector:
    """The same numbers as the weighted sum over its weight, with no more than the result in memory where possible."""
    normalization = math.fsum(values.values())
    if len(values) > _models_per_pass(store, len(values)):
        return quotient(weighted_sum(size, store, values), normalization)
    return average(size, [(store.get(learner), values[learner]) for learner in sorted(values)], normalization)


def _models_per_pass(store: ModelStore, models: int) -> int:
    """How many models are added in one pass: all, unless they are read from a disk."""
    return max(1, models) if isinstance(store, MemoryStore) else _ROWS_AT_ONCE


def stored_models(store: ModelStore, learners: Iterable[LearnerId]) -> dict[str, NDArray[Any]]:
    return {f"local/{learner}": np.asarray(store.get(learner)[:]) for learner in learners}
