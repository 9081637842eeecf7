"""HOW models are mixed: from committed local models to the community model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import Row, add_scaled, average, quotient
from metis.core.events import CommunityStamp, LearnerId
from metis.core.model import Model, Vector

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


class Community(Protocol):
    """Takes committed local models in and publishes the community model."""

    model: Model  # as last published

    @property
    def stamp(self) -> CommunityStamp:
        """Of `model`."""
        ...

    @property
    def committed_steps(self) -> int:
        """s_c: all local steps committed so far (R7)."""
        ...

    @property
    def uses_base(self) -> bool:
        """Does `commit` need the community model that the learner started from?"""
        ...

    @property
    def contributors(self) -> int:
        """How many learners' models the next publication would hold."""
        ...

    def commit(self, learner: LearnerId, local_model: Model, value: float, steps: int, base: Model | None) -> None:
        """Take a valid local model in; learners do not see it before `publish`."""
        ...

    def withdraw(self, learner: LearnerId) -> None:
        """Take the learner's contribution out again, as far as the rule remembers it."""
        ...

    def publish(self) -> bool:
        """Make and stamp a new community model; False if nothing was committed since the last one."""
        ...

    def adopt(self, model: Model) -> None:
        """Go on from this model instead of the one just published, under the same stamp."""
        ...

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        """The numbers that a replay of events cannot bring back: for checkpoints.

        `local_models` can be left out, named "local/...", where the store itself keeps them.
        """
        ...

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        """Put back the published model and what `arrays` gave, after a replay of the same events without weights."""
        ...


CommunityFactory: TypeAlias = Callable[[Model, ModelStore], Community]


def _weighted_sum(size: int, store: ModelStore, values: Mapping[LearnerId, float]) -> NDArray[np.float64]:
    """Full pass over the stored models in learner order, so that arrival order cannot change a bit."""
    total = np.zeros(size, np.float64)
    order, together = sorted(values), _together(store, len(values))
    for start in range(0, len(order), together):
        add_scaled(total, [(store.get(k), values[k]) for k in order[start : start + together]])
    return total


def _average(size: int, store: ModelStore, values: Mapping[LearnerId, float]) -> Vector:
    """The same numbers as the weighted sum over its weight, with no more than the result in memory where possible."""
    normalization = math.fsum(values.values())
    if len(values) > _together(store, len(values)):
        return quotient(_weighted_sum(size, store, values), normalization)
    return average(size, [(store.get(learner), values[learner]) for learner in sorted(values)], normalization)


def _together(store: ModelStore, models: int) -> int:
    """How many models are added in one pass: all, unless they are read from a disk."""
    return max(1, models) if isinstance(store, MemoryStore) else _ROWS_AT_ONCE


def _stored(store: ModelStore, learners: Iterable[LearnerId]) -> dict[str, NDArray[Any]]:
    return {f"local/{learner}": np.asarray(store.get(learner)[:]) for learner in learners}


class _Published:
    """What every mixing rule has: a published model, its stamp, and the step counter."""

    uses_base = False

    def __init__(self, initial_model: Model) -> None:
        self.model = initial_model
        self.stamp = CommunityStamp()
        self.committed_steps = 0

    def _stamp_new(self, vector: NDArray[np.float32] | NDArray[np.float64]) -> None:
        self.model = self.model.with_vector(vector.astype(np.float32, copy=vector.dtype != np.float32))
        self.stamp = CommunityStamp(self.stamp.version + 1, self.committed_steps)

    def adopt(self, model: Model) -> None:
        self.model = model


class FullPass(_Published):
    """Weighted average of the models committed since the last publication: O(MN) (Sec. 5)."""

    def __init__(self, initial_model: Model, store: ModelStore) -> None:
        super().__init__(initial_model)
        self._store = store
        self._values: dict[LearnerId, float] = {}

    @property
    def contributors(self) -> int:
        return len(self._values)

    def commit(self, learner: LearnerId, local_model: Model, value: float, steps: int, base: Model | None) -> None:
        self._store.put(learner, local_model.vector)
        self._values[learner] = value
        self.committed_steps += steps

    def withdraw(self, learner: LearnerId) -> None:
        self._values.pop(learner, None)
        self._store.remove(learner)

    def publish(self) -> bool:
        if not self._values:
            return False
        average = _average(self.model.layout.size, self._store, self._values)
        self._values.clear()
        self._stamp_new(average)
        return True

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        return _stored(self._store, self._values) if local_models else {}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.model, self._store = model, store
        for learner in self._values:
            self._store.put(learner, arrays[f"local/{learner}"])


class CachedAverage(_Published):
    """Weighted average of every learner's latest local model, in O(M) a commit (Sec. 5).

    W' = W + p'_k w'_k - p_k w_k and P' = P + p'_k - p_k. The sum is float64 and is rebuilt exactly
    from the stored models every `rebuild_every` commits, so that rounding cannot pile up (R11).
    """

    def __init__(self, initial_model: Model, store: ModelStore, rebuild_every: int = 1000) -> None:
        super().__init__(initial_model)
        if rebuild_every < 1:
            raise ValueError(f"rebuild_every must be 1 commit or more, not {rebuild_every}")
        self._store = store
        self._rebuild_every = rebuild_every
        self._values: dict[LearnerId, float] = {}  # p_k
        self._sum = np.zeros(initial_model.layout.size, np.float64)  # W
        self._commits = 0
        self._changed = False

    @property
    def contributors(self) -> int:
        return len(self._values)

    @property
    def normalization(self) -> float:
        """P, summed anew from the p_k, so it cannot drift."""
        return math.fsum(self._values.values())

    def commit(self, learner: LearnerId, local_model: Model, value: float, steps: int, base: Model | None) -> None:
        rows: list[tuple[Row, float]] = [(local_model.vector, value)]
        if learner in self._values:
            rows.append((self._store.get(learner), -self._values[learner]))
        add_scaled(self._sum, rows)
        self._store.put(learner, local_model.vector)
        self._values[learner] = value
        self.committed_steps += steps
        self._commits += 1
        self._changed = True
        if self._commits % self._rebuild_every == 0:
            self.rebuild()

    def withdraw(self, learner: LearnerId) -> None:
        if learner not in self._values:
            return
        del self._values[learner]
        self._store.remove(learner)
        # Rare, so exact: no rounding of the departed model stays behind.
        self.rebuild()
        self._changed = bool(self._values)

    def rebuild(self) -> None:
        """Sum the stored models anew."""
        self._sum = _weighted_sum(self.model.layout.size, self._store, self._values)

    def publish(self) -> bool:
        if not self._changed:
            return False
        self._changed = False
        self._stamp_new(quotient(self._sum, self.normalization))
        return True

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        return {"sum": self._sum, **(_stored(self._store, self._values) if local_models else {})}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.model, self._store = model, store
        self._sum = np.array(arrays["sum"], np.float64)
        for learner in self._values:
            self._store.put(learner, arrays[f"local/{learner}"])


class Interpolation(_Published):
    """FedAsync: w_c = (1 - alpha) w_c + alpha w_k with alpha = a * S_k; keeps no local model (R14)."""

    def __init__(self, initial_model: Model, store: ModelStore, mixing: float = 0.5) -> None:
        super().__init__(initial_model)
        if not 0 < mixing <= 1:
            raise ValueError(f"mixing must be greater than 0 and at most 1, not {mixing}")
        self._mixing = mixing
        self._vector = initial_model.vector.astype(np.float64)
        self._changed = False
        self.contributors = 0

    def commit(self, learner: LearnerId, local_model: Model, value: float, steps: int, base: Model | None) -> None:
        alpha = self._mixing * value
        self._vector *= 1 - alpha
        add_scaled(self._vector, [(local_model.vector, alpha)])
        self.committed_steps += steps
        self.contributors += 1
        self._changed = True

    def withdraw(self, learner: LearnerId) -> None:
        """Nothing: past contributions are blended in and cannot be told apart."""

    def publish(self) -> bool:
        if not self._changed:
            return False
        self._changed, self.contributors = False, 0
        self._stamp_new(self._vector)
        return True

    def adopt(self, model: Model) -> None:
        super().adopt(model)
        self._vector = model.vector.astype(np.float64)

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        return {"vector": self._vector}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.model = model
        self._vector = np.array(arrays["vector"], np.float64)


class Buffered(_Published):
    """FedBuff (Nguyen et al. 2022): K weighted differences make one step of the community model."""

    uses_base = True

    def __init__(
        self, initial_model: Model, store: ModelStore, buffer_size: int = 3, server_learning_rate: float = 1.0
    ) -> None:
        super().__init__(initial_model)
        if buffer_size < 1:
            raise ValueError(f"buffer_size must be 1 or more, not {buffer_size}")
        if not 0 < server_learning_rate < math.inf:
            raise ValueError(f"server_learning_rate must be greater than 0, not {server_learning_rate}")
        self._buffer_size = buffer_size
        self._server_learning_rate = server_learning_rate
        self._vector = initial_model.vector.astype(np.float64)
        self._differences = np.zeros(initial_model.layout.size, np.float64)
        self.contributors = 0

    def commit(self, learner: LearnerId, local_model: Model, value: float, steps: int, base: Model | None) -> None:
        assert base is not None
        add_scaled(self._differences, [(local_model.vector, value), (base.vector, -value)])
        self.committed_steps += steps
        self.contributors += 1

    def withdraw(self, learner: LearnerId) -> None:
        """Nothing: differences are summed as they come and cannot be told apart."""

    def publish(self) -> bool:
        if self.contributors < self._buffer_size:
            return False
        self._vector += self._server_learning_rate / self.contributors * self._differences
        self._differences[:] = 0.0
        self.contributors = 0
        self._stamp_new(self._vector)
        return True

    def adopt(self, model: Model) -> None:
        super().adopt(model)
        self._vector = model.vector.astype(np.float64)

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        return {"vector": self._vector, "differences": self._differences}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.model = model
        self._vector = np.array(arrays["vector"], np.float64)
        self._differences = np.array(arrays["differences"], np.float64)
