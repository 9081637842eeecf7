"""Where the latest local model of each learner is kept, and sums over what is kept there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import Row, add_scaled, average, zeros
from metis.core.events import LearnerId
from metis.core.model import Vector


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
    total = zeros(size)
    add_scaled(total, _rows(store, values))
    return total


def stored_average(size: int, store: ModelStore, values: Mapping[LearnerId, float]) -> Vector:
    """The same numbers as the weighted sum over its weight, with no more than the result in memory."""
    return average(size, _rows(store, values), math.fsum(values.values()))


class _Stored:
    """A stored model that is opened for each part, so that any number of them can be mixed at the same time."""

    def __init__(self, store: ModelStore, learner: LearnerId) -> None:
        self._store, self._learner = store, learner

    def __getitem__(self, part: slice, /) -> Vector:
        return self._store.get(self._learner)[part]


def _rows(store: ModelStore, values: Mapping[LearnerId, float]) -> list[tuple[Row, float]]:
    in_memory = isinstance(store, MemoryStore)
    return [(store.get(k) if in_memory else _Stored(store, k), values[k]) for k in sorted(values)]


def stored_models(store: ModelStore, learners: Iterable[LearnerId]) -> dict[str, NDArray[Any]]:
    return {f"local/{learner}": np.asarray(store.get(learner)[:]) for learner in learners}
