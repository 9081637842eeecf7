"""Asynchronous mixing from sums: learners hand in when they like, and what they hand in is opened in windows.

A single update must not be opened, so a new community model waits until enough different learners have something new:
their sum is a window. Each learner is in a window once; when it has handed in, it waits until the window is opened.

In the community cache (Sec. 5) a learner counts by its latest model. A window is the sum of everybody's latest models:
of those that have something new, and again of all others that are there, which mask theirs once more. Nothing is
carried from one window to the next. FedBuff's buffer is a window as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from metis.core.events import LearnerId
from metis.core.mixing.secure import SecureAverage, scalars
from metis.core.mixing.store import ModelStore, stored_models
from metis.core.model import Model
from metis.core.ring import MOST_MEMBERS, Body, Opened, Ring
from metis.core.secure_sum import WIDER
from metis.errors import ArgumentError

if TYPE_CHECKING:
    from metis.core.layers.secure_sum import SecureSum

_LEAST = 1e-3  # of a value that falls from 1 with staleness: sites refuse weights that are further apart


class Windows(SecureAverage):
    """What both have: who has handed in, to which window it belongs, and that it is opened once."""

    averages_rounds = False
    windowed = True

    def __init__(self, initial_model: Model, store: ModelStore, secure_sum: SecureSum) -> None:
        super().__init__(initial_model, store, secure_sum)
        self._fresh: dict[LearnerId, float] = {}  # p_k of those that have handed in something new
        self._closing: dict[LearnerId, float] = {}  # of these, those in the window that is being opened
        self.expected: dict[LearnerId, int] = {}  # where members agree on keys: who hands in which task

    @property
    def learners(self) -> tuple[LearnerId, ...]:
        return tuple(sorted(self._closing or self._fresh))

    @property
    def fresh(self) -> tuple[LearnerId, ...]:
        return tuple(sorted(self._fresh))

    def begin(self, weights: Mapping[LearnerId, float], steps: Mapping[LearnerId, int]) -> None:
        self.values = {**self.values, **weights}

    def fix_window(self, tasks: Mapping[LearnerId, int], values: Mapping[LearnerId, float]) -> tuple[LearnerId, ...]:
        """The window is of these learners, each with the task that it has trained; who hands one in again."""
        self.expected, self.fixed = dict(tasks), True
        return ()

    def value(self, learner: LearnerId, contribution: float) -> float:
        return 1.0 if self._secure_sum.weights == "equal" else contribution

    def counted(self, learner: LearnerId) -> float:
        return (self._closing or self._fresh)[learner]

    def note_loss(self, learner: LearnerId, loss: float) -> None:
        """Rounds are measured by it, and there are none."""

    def close(self, present: Collection[LearnerId] = ()) -> None:
        self._closing, self._fresh = self._fresh, {}
        self.values = dict.fromkeys(sorted({*present, *self._closing}), 1.0)

    def open(self, learners: Collection[LearnerId], total: Body | None) -> None:
        for learner in self._closing.keys() - set(learners):
            self._store.remove(learner)  # what it has masked is not needed
        self._closing = {learner: p for learner, p in self._closing.items() if learner in learners}
        self._opened, self._total = True, total

    def publish(self, seconds: float = 0.0) -> bool:
        if not self._opened:
            return False
        opened = None if self._total is None else self.mean(self._total)
        self._stamp_new(self.model.vector if opened is None else opened.vector)
        self.clear()
        return True

    def clear(self) -> None:
        for learner in self.learners:
            self._store.remove(learner)  # what was masked
        if not self._closing:
            self._fresh = {}
        self._closing, self._total, self._opened = {}, None, False
        self.expected, self.fixed = {}, False


class CachedWindows(Windows):
    """The weighted average of everybody's latest models, each time from the sum of all of them."""

    weighs_learners = True

    def __init__(self, initial_model: Model, store: ModelStore, secure_sum: SecureSum) -> None:
        super().__init__(initial_model, store, secure_sum)
        self.latest: dict[LearnerId, tuple[int, float]] = {}  # the task and p_k of everybody's latest model
        self._again: dict[LearnerId, float] = {}  # p_k of those that have handed in their latest model again
        self.resends: dict[LearnerId, int] = {}  # where members agree on keys: who does so, under which number
        self._places: dict[LearnerId, float] = {}  # p_k of all that were to hand in to the window
        self._held: set[LearnerId] = set()  # where nothing is masked: whose latest model is in the store
        self._plain: Body | None = None  # the sum of a closed window, if one of its models was replaced since

    @property
    def ring(self) -> Ring:
        return Ring(64, MOST_MEMBERS, WIDER * self._secure_sum.clip)

    def value(self, learner: LearnerId, contribution: float) -> float:
        return max(super().value(learner, contribution), _LEAST)

    @property
    def learners(self) -> tuple[LearnerId, ...]:
        return tuple(sorted(self._closing or self._fresh | self._again))

    @property
    def most(self) -> float:
        return max(self._places.values())

    @property
    def contributors(self) -> int:
        return len(self.learners)

    @property
    def resent(self) -> tuple[LearnerId, ...]:
        return tuple(sorted(self._again))

    def fix_window(self, tasks: Mapping[LearnerId, int], values: Mapping[LearnerId, float]) -> tuple[LearnerId, ...]:
        super().fix_window(tasks, values)
        again = tuple(sorted(k for k, task in tasks.items() if k in self.latest and self.latest[k][0] == task))
        self._places = {k: self.latest[k][1] if k in again else values[k] for k in tasks}
        return again

    @property
    def missing(self) -> Mapping[LearnerId, int]:
        return {} if self._closing else {k: number for k, number in self.resends.items() if k not in self._again}

    def take_again(self, learner: LearnerId) -> None:
        """A learner has handed in its latest model again."""
        self._store.put(learner, Model.empty().vector)
        self._again[learner] = self.latest[learner][1]

    def forget(self, learner: LearnerId) -> None:
        """A learner does not have its latest model any more."""
        self.resends.pop(learner, None)
        self.latest.pop(learner, None)

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
            self._keep_sum()
            self._store.put(_plain(learner), local_model.vector)
            self._held.add(learner)
        else:  # masked
            self._store.put(learner, local_model.vector)
        self._fresh[learner] = value
        self.latest[learner] = self.expected.get(learner, -1), value
        self.committed_steps += steps

    def withdraw(self, learner: LearnerId) -> None:
        """What a closed window has of it is opened with that; nothing of it is in the next one."""
        if learner not in self._closing:
            self._store.remove(_plain(learner))
            self._store.remove(learner)
            self._held.discard(learner)
        self._fresh.pop(learner, None)
        self._again.pop(learner, None)
        self.forget(learner)

    def close(self, present: Collection[LearnerId] = ()) -> None:
        if not self.fixed:  # nothing is masked: who is there takes part
            self._again = {k: p for k, (_, p) in self.latest.items() if k in present and k not in self._fresh}
        again, self._fresh = self._again, self._fresh | self._again
        super().close(present)
        self._again, self._places = again, self._places or dict(self._closing)

    def _keep_sum(self) -> None:
        """Before one of its models is replaced."""
        if self._closing and self._plain is None:
            self._plain = self.total()

    def total(self) -> Body:
        if self._plain is not None:
            return self._plain
        layout, ring = self.model.layout, self.ring
        total, most = ring.total(layout), self.most
        for learner, p in self._closing.items():
            local = self.model  # without numbers, in a replay that has none
            if learner in self._held:
                local = self.model.with_vector(np.asarray(self._store.get(_plain(learner))[:]))
            ring.add(total, whole_body(ring, local, p, most), layout)
        return total

    def mean(self, total: Body) -> Opened:
        return self.ring.mean(total, _nothing(self.model), self._closing, self.most)

    def too_few(self) -> str:
        return (
            f"{len(self.fresh)} of {len(self.values)} members handed in something new, and a window needs {self.least}"
        )

    def clear(self) -> None:
        super().clear()
        self._again, self.resends, self._places, self._plain = {}, {}, {}, None

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        kept = {} if self._plain is None else {"windows/sum": self._plain}
        return {**kept, **(stored_models(self._store, map(_plain, sorted(self._held))) if local_models else {})}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.model, self._store = model, store
        self._plain = np.array(arrays["windows/sum"]) if "windows/sum" in arrays else None
        self._held = {learner for learner in self.latest if f"local/{_plain(learner)}" in arrays}
        for kept in map(_plain, self._held):
            self._store.put(kept, arrays[f"local/{kept}"])


def whole_body(ring: Ring, local: Model, p: float, most: float) -> Body:
    """A whole local model in the ring; nothing is measured besides."""
    return ring.quantize(local, _nothing(local), p, most, (0.0,) * ring.scalars).body


def _nothing(model: Model) -> Model:
    return model.with_vector(np.zeros_like(model.vector))


def _plain(learner: LearnerId) -> str:
    """Under which name the store has a model that is not masked; no learner's name has a line break."""
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

    def value(self, learner: LearnerId, contribution: float) -> float:
        return min(super().value(learner, contribution), self.most)

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

    def total(self) -> Body:
        total = self.ring.total(self.model.layout)
        total += self._sums[0]
        return total

    def mean(self, total: Body) -> Opened:
        divisor = len(self._closing) / self._server_learning_rate
        return self.ring.mean(total, self.model, self._closing, self.most, divisor)

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
