"""Asynchronous mixing from sums: learners hand in when they like, and what they hand in is opened in windows.

A single update must not be opened, so a new community model waits until enough different learners have something new:
their sum is a window. Each learner is in a window once; when it has handed in, it waits until the window is opened.

In the community cache (Sec. 5) a learner counts by its latest model. It forms the difference from what already counts
of it by itself, in the ring: the running sum of these differences is, to the bit, the sum of everybody's latest
models. A window shows the sum of at least `least` differences. Who comes new, and who hands in what it handed in
before, leaves fewer unknowns to the others of its window. FedBuff's buffer is a window as it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from metis.core.events import LearnerId
from metis.core.mixing.secure import SecureAverage, scalars
from metis.core.mixing.store import ModelStore, stored_models
from metis.core.model import Model
from metis.core.ring import MOST_MEMBERS, Body, Opened, Ring
from metis.errors import ArgumentError

if TYPE_CHECKING:
    from metis.core.layers.secure_sum import SecureSum

_WIDER = 1024.0  # numbers themselves, not how far they moved in a round, fit into so many clips
_LARGER = 4.0  # contribution values may grow by so much after the start


class Windows(SecureAverage):
    """What both have: who has handed in, to which window it belongs, and that it is opened once."""

    averages_rounds = False
    windowed = True

    def __init__(self, initial_model: Model, store: ModelStore, secure_sum: SecureSum) -> None:
        super().__init__(initial_model, store, secure_sum)
        self._fresh: dict[LearnerId, float] = {}  # p_k of those that have handed in something new
        self._closing: tuple[LearnerId, ...] = ()  # of these, those in the window that is being opened
        self.expected: dict[LearnerId, int] = {}  # where members agree on keys: who hands in which task

    @property
    def learners(self) -> tuple[LearnerId, ...]:
        return self._closing or tuple(sorted(self._fresh))

    def begin(self, weights: Mapping[LearnerId, float], steps: Mapping[LearnerId, int]) -> None:
        self.values = {**self.values, **weights}

    def fix_window(self, tasks: Mapping[LearnerId, int]) -> None:
        """The window is of these learners, each with the task that it has trained."""
        self.expected, self.fixed = dict(tasks), True

    def value(self, learner: LearnerId, contribution: float) -> float:
        return 1.0 if self._secure_sum.weights == "equal" else min(contribution, self.most)

    def counted(self, learner: LearnerId) -> float:
        return self._fresh[learner]

    def note_loss(self, learner: LearnerId, loss: float) -> None:
        """Rounds are measured by it, and there are none."""

    def close(self, present: Collection[LearnerId] = ()) -> None:
        self._closing = self.learners
        self.values = dict.fromkeys(sorted({*present, *self._closing}), 1.0)

    def open(self, learners: Collection[LearnerId], total: Body | None) -> None:
        for learner in self._closing:
            if learner not in learners:
                self._drop(learner)
        self._closing = tuple(sorted(learners))
        self._opened, self._total = True, total

    def _drop(self, learner: LearnerId) -> None:
        del self._fresh[learner]

    def publish(self, seconds: float = 0.0) -> bool:
        if not self._opened:
            return False
        opened = None if self._total is None else self.mean(self._total)
        self._stamp_new(self.model.vector if opened is None else opened.vector)
        self.clear()
        return True

    def clear(self) -> None:
        for learner in self.learners:
            self._drop(learner)
        self._closing, self._total, self._opened = (), None, False
        self.expected, self.fixed = {}, False


class CachedWindows(Windows):
    """The weighted average of everybody's latest models, from a running sum of differences in a ring of 64 bits."""

    weighs_learners = True

    def __init__(self, initial_model: Model, store: ModelStore, secure_sum: SecureSum) -> None:
        super().__init__(initial_model, store, secure_sum)
        self._counted: dict[LearnerId, float] = {}  # p_k of the models in the running sum
        self._most = 0.0
        self._sum = self.ring.total(initial_model.layout)  # W

    @property
    def ring(self) -> Ring:
        return Ring(64, MOST_MEMBERS, _WIDER * self._secure_sum.clip)

    @property
    def most(self) -> float:
        return self._most or 1.0

    @property
    def contributors(self) -> int:
        return len(self._counted | self._fresh)

    def begin(self, weights: Mapping[LearnerId, float], steps: Mapping[LearnerId, int]) -> None:
        super().begin(weights, steps)
        if not self._most:  # once: words of different windows add up
            largest = 1.0 if self._secure_sum.weights == "equal" else max(weights.values())
            self._most = 2.0 ** math.ceil(math.log2(_LARGER * max(1.0, largest)))

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        self._store.put(_new(learner), local_model.vector)
        self._fresh[learner] = value
        self.committed_steps += steps

    def withdraw(self, learner: LearnerId) -> None:
        """Take back what is not in a closed window; what was opened is part of the sum for good."""
        if learner in self._fresh and learner not in self._closing:
            self._drop(learner)

    def _drop(self, learner: LearnerId) -> None:
        super()._drop(learner)
        self._store.remove(_new(learner))

    def total(self) -> Body:
        layout, ring = self.model.layout, self.ring
        total = ring.total(layout)
        for learner in self.learners:
            ring.add(total, self._body(_new(learner), self._fresh[learner]), layout)
            if learner in self._counted:
                ring.subtract(total, self._body(learner, self._counted[learner]), layout)
        return total

    def _body(self, stored: str, p: float) -> Body:
        local = self.model.with_vector(np.asarray(self._store.get(stored)[:]))
        return self.ring.quantize(local, self._nothing, p, self.most, (0.0,) * 3).body

    @property
    def _nothing(self) -> Model:
        return self.model.with_vector(np.zeros_like(self.model.vector))

    def open(self, learners: Collection[LearnerId], total: Body | None) -> None:
        super().open(learners, total)
        for learner in learners:
            self._counted[learner] = self._fresh[learner]
            self._store.put(learner, np.array(self._store.get(_new(learner))[:]))
        if total is not None:
            self.ring.add(self._sum, total, self.model.layout)

    def mean(self, total: Body) -> Opened:
        weights = {learner: self._counted[learner] for learner in sorted(self._counted)}
        return self.ring.mean(self._sum, self._nothing, weights, self.most)

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        kept = {**self._counted, **dict.fromkeys(map(_new, self._fresh))}
        return {"windows/sum": self._sum, **(stored_models(self._store, kept) if local_models else {})}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.model, self._store, self._sum = model, store, np.array(arrays["windows/sum"])
        for kept in (*self._counted, *map(_new, self._fresh)):
            self._store.put(kept, arrays[f"local/{kept}"])


def _new(learner: LearnerId) -> str:
    """Under which name the store has a model that does not count yet; no learner's name has a line break."""
    return f"{learner}\n"


class BufferedWindows(Windows):
    """FedBuff: the weighted differences of `buffer_size` learners make one step of the community model."""

    uses_base = True

    def __init__(
        self,
        initial_model: Model,
        store: ModelStore,
        secure_sum: SecureSum,
        buffer_size: int = 3,
        server_learning_rate: float = 1.0,
    ) -> None:
        super().__init__(initial_model, store, secure_sum)
        if buffer_size < self.least:
            raise ArgumentError(
                f"buffer_size is {buffer_size}; under secure_sum with {secure_sum.colluders} colluders a buffer holds "
                f"the updates of at least {self.least} learners",
                "buffer_size",
            )
        self._buffer_size, self._server_learning_rate = buffer_size, server_learning_rate
        self._sums = [self.ring.total(initial_model.layout) for _ in range(2)]  # of the window, and of the next

    @property
    def ring(self) -> Ring:
        return Ring(self._secure_sum.bits, MOST_MEMBERS, self._secure_sum.clip)

    @property
    def most(self) -> float:
        return 1.0  # of a weight that falls with staleness

    @property
    def wanted(self) -> int:
        return self._buffer_size

    @property
    def contributors(self) -> int:
        return len(self.learners)

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        if local_model.vector.size:
            assert base is not None
            body = self.ring.quantize(local_model, base, value, self.most, scalars(local_model, base, 0.0)).body
            self.ring.add(self._sums[bool(self._closing)], body, local_model.layout)
        else:  # masked
            self._store.put(learner, local_model.vector)
        self._fresh[learner] = value
        self.committed_steps += steps

    def withdraw(self, learner: LearnerId) -> None:
        """Nothing: differences are summed as they come and cannot be separated."""

    def _drop(self, learner: LearnerId) -> None:
        super()._drop(learner)
        self._store.remove(learner)

    def total(self) -> Body:
        total = self.ring.total(self.model.layout)
        total += self._sums[0]
        return total

    def mean(self, total: Body) -> Opened:
        weights = {learner: self._fresh[learner] for learner in self._closing}
        divisor = len(weights) / self._server_learning_rate
        return self.ring.mean(total, self.model, weights, self.most, divisor)

    def clear(self) -> None:
        self._sums = [self._sums[1], self.ring.total(self.model.layout)]
        super().clear()

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        # Where updates are masked there are none.
        return {f"windows/sum{index}": total for index, total in enumerate(self._sums) if total.any()}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.model, self._store = model, store
        nothing = self.ring.total(model.layout)
        self._sums = [np.array(arrays.get(f"windows/sum{index}", nothing)) for index in range(2)]
