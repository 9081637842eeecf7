"""The weighted average of a round from the sum of its local models in a ring (`ring.py`), and from nothing else.

The sum is exact, whatever the order, so a simulation, which adds the local models themselves, and a deployment, which
adds them under masks that cancel, end in the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import squared_distance
from metis.core.events import LearnerId, RoundMeasure
from metis.core.mixing.community import Published
from metis.core.mixing.differences import (
    Extrapolation,
    equalizing_steps,
    extrapolated,
    parameter_parts,
    squared_length,
)
from metis.core.mixing.store import ModelStore, stored_models
from metis.core.model import Layout, Model, Vector
from metis.core.ring import Body, Opened, Ring
from metis.core.secure_sum import FEWEST, max_colluders, min_learners, threshold

if TYPE_CHECKING:
    from metis.core.layers.fednova import FedNova
    from metis.core.layers.secure_sum import SecureSum


def scalars(local: Model, base: Model, loss: float, factor: float = 1.0) -> tuple[float, float, float]:
    """What is summed besides the model: loss, ||delta||^2 and ||delta|| of the parameters, for measures of rounds.

    `factor` is by how much its delta is lengthened.
    """
    square = factor**2 * _squared_distance(local.vector, base.vector, base.layout)
    return loss if math.isfinite(loss) else 0.0, square, math.sqrt(square)


def _squared_distance(one: Vector, other: Vector, layout: Layout) -> float:
    return math.fsum(
        squared_distance(one[part], other[part], part.stop - part.start) for part in parameter_parts(layout)
    )


class MessageBytes(NamedTuple):
    """Sizes of what travels besides models in one round, for each member; near enough for costs."""

    key: int
    opening: int
    tail: int  # of an upload
    statement: int
    vote: int
    request: int
    answer: int

    @staticmethod
    def of(members: int, learners: int) -> MessageBytes:
        """In a round of so many members whose sum has so many learners' models."""
        box = 32 * members + 33
        votes = threshold(members) * 230
        return MessageBytes(
            key=800,
            opening=300 + 860 * members,
            tail=300 + members * (box + 74),
            statement=60 + 60 * learners,
            vote=230,
            request=150 + votes + learners * (box + 97),
            answer=230 + learners * (32 * members + 5),
        )

    def of_round(self, members: int, learners: int) -> int:
        """Bytes of all of them together."""
        return members * (sum(self) - self.tail) + learners * self.tail


def largest_weight(values: Mapping[LearnerId, float], factors: Mapping[LearnerId, float]) -> float:
    """Of a round, with the factors by which deltas are lengthened."""
    return max(value * max(1.0, factors[learner]) for learner, value in values.items())


def fewest_members(colluders: int) -> int:
    """The smallest cohort that tolerates so many colluders and one member that drops out."""
    members = FEWEST + 1
    while max_colluders(members) < colluders:
        members += 1
    return members


class SecureAverage(Published):
    """Weighted average of a round whose local models nobody sees; it is published when its sum is opened."""

    averages_rounds = True
    windowed = False  # whether learners hand in when they like, instead of in rounds

    def __init__(self, initial_model: Model, store: ModelStore, secure_sum: SecureSum) -> None:
        super().__init__(initial_model)
        self._store, self._secure_sum = store, secure_sum
        self.values: Mapping[LearnerId, float] = {}  # p_k of the members of the open round; none: it has not begun
        self._begun: Mapping[LearnerId, float] = {}  # the same before any share is limited
        self.steps: Mapping[LearnerId, int] = {}  # B_k of the members, as they were asked for
        self._losses: dict[LearnerId, float] = {}  # of those that have handed in a model; NaN where it is not known
        self.fixed = False  # whether the members have agreed on keys, where they need any
        self._closed = False
        self._total: Body | None = None
        self._opened = False

    @property
    def fewest(self) -> int:
        """Members without which no round is begun."""
        return fewest_members(self._secure_sum.colluders)

    @property
    def least(self) -> int:
        """Local models without which no sum is opened."""
        return min_learners(self._secure_sum.colluders, self.extra_vectors)

    @property
    def wanted(self) -> int:
        """Local models with which a sum is opened, although more learners are training."""
        return self.least

    @property
    def extra_vectors(self) -> int:
        """Vectors besides the model whose sum is opened: control variates."""
        return int(self.model.layout.control.size > 0)

    @property
    def contributors(self) -> int:
        return len(self._losses)

    @property
    def learners(self) -> tuple[LearnerId, ...]:
        """Who has handed in a model, in ascending order."""
        return tuple(sorted(self._losses))

    @property
    def fresh(self) -> tuple[LearnerId, ...]:
        """Whose model is in no other sum."""
        return self.learners

    @property
    def resent(self) -> tuple[LearnerId, ...]:
        """Who has handed in again what an earlier sum had."""
        return ()

    @property
    def missing(self) -> Mapping[LearnerId, int]:
        """Who is to hand in again what an earlier sum had, and has not yet; under which number."""
        return {}

    @property
    def ring(self) -> Ring:
        """Of the open round."""
        return self._secure_sum.ring(len(self.values))

    def begin(self, weights: Mapping[LearnerId, float], steps: Mapping[LearnerId, int]) -> None:
        """A round of these members begins; before it, what each counts and how many steps it makes is known."""
        equal = self._secure_sum.weights == "equal"
        self._begun = {learner: 1.0 if equal else weights[learner] for learner in sorted(weights)}
        self.values, self.steps = self.weights(self._begun), steps

    def value(self, learner: LearnerId, contribution: float) -> float:
        """What the model of this learner counts: as was fixed when the round began, before anybody trained."""
        return self.values[learner]

    def counted(self, learner: LearnerId) -> float:
        """What a model that was handed in counts."""
        return self.values[learner]

    def fix(self, learners: Collection[LearnerId]) -> None:
        """Only these members take part."""
        self._begun = {learner: p for learner, p in self._begun.items() if learner in learners}
        self.values, self.fixed = self.weights(self._begun), True

    def factors(self, values: Mapping[LearnerId, float], steps: Mapping[LearnerId, int]) -> Mapping[LearnerId, float]:
        """By how much the delta of each member is lengthened, from what is public of all of them."""
        return dict.fromkeys(values, 1.0)

    def too_few(self) -> str:
        return f"{self.contributors} of {len(self.values)} members handed in a model, and a sum needs {self.least}"

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        self._store.put(learner, local_model.vector)
        self._losses[learner] = math.nan
        self.committed_steps += steps

    def note_loss(self, learner: LearnerId, loss: float) -> None:
        """It is known where nothing is masked."""
        self._losses[learner] = loss

    def withdraw(self, learner: LearnerId) -> None:
        if not self._closed:  # what is closed is opened as it is, or never
            self._losses.pop(learner, None)
            self._store.remove(learner)

    def close(self, present: Collection[LearnerId] = ()) -> None:
        """The sum will be that of exactly these learners; in a window, with those that are present as its members."""
        self._closed = True

    def total(self) -> Body:
        """The sum of the local models themselves, where nothing is masked."""
        ring, base, most = self.ring, self.model, self.most
        total, factors = ring.total(base.layout), self.factors(self.values, self.steps)
        for learner in self.learners:
            local = base.with_vector(np.asarray(self._store.get(learner)[:]))
            numbers = scalars(local, base, self._losses[learner], factors[learner])
            body = ring.quantize(local, base, self.values[learner], most, numbers, factors[learner]).body
            ring.add(total, body, base.layout)
        return total

    @property
    def most(self) -> float:
        """The largest weight of the open round: what is worth 1 in the ring."""
        return largest_weight(self.values, self.factors(self.values, self.steps))

    def mean(self, total: Body) -> Opened:
        """What the sum of the closed round says; Refused if it cannot be that sum."""
        return self.ring.mean(
            total, self.model, {learner: self.values[learner] for learner in self.learners}, self.most
        )

    def fits(self, total: Body, learners: Collection[LearnerId]) -> bool:
        """Whether the first number of a sum is the public sum of these learners' weights."""
        most, nothing = self.most, Model.empty()
        bodies = (self.ring.quantize(nothing, nothing, self.counted(k), most, (0.0,) * 3) for k in learners)
        head = self.ring.sum((body.body for body in bodies), nothing.layout)
        return bytes(head[:8]) == bytes(total[:8])

    def open(self, learners: Collection[LearnerId], total: Body | None) -> None:
        """The sum of these learners' models is known; None where only the sequence of events matters."""
        for learner in self.learners:
            if learner not in learners:
                del self._losses[learner]
                self._store.remove(learner)
        self._opened, self._total = True, total

    def publish(self, seconds: float = 0.0) -> bool:
        if not self._opened:
            return False
        before, self.measure = self.model, None
        if self._total is None:
            self._stamp_new(before.vector)
        else:
            opened = self.mean(self._total)
            self._stamp_new(self._mixture(opened))
            progress = _squared_distance(self.model.vector, before.vector, before.layout)
            loss, spread, _ = opened.scalars
            self.measure = RoundMeasure(math.sqrt(progress), math.sqrt(max(0.0, spread)), loss, opened.clamped)
        self.clear()
        return True

    def _mixture(self, opened: Opened) -> Vector:
        return opened.vector

    def clear(self) -> None:
        """Nothing of the round is needed any more."""
        for learner in self._losses:
            self._store.remove(learner)
        self._losses, self.values, self._begun, self._total = {}, {}, {}, None
        self._opened = self._closed = self.fixed = False

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        return stored_models(self._store, self._losses) if local_models else {}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.model, self._store = model, store
        for learner in self._losses:
            self._store.put(learner, arrays[f"local/{learner}"])


class SecureNormalized(SecureAverage):
    """FedNova from a sum: each learner scales its own delta, by a factor of the steps that all were asked for."""

    def __init__(self, initial_model: Model, store: ModelStore, secure_sum: SecureSum, settings: FedNova) -> None:
        super().__init__(initial_model, store, secure_sum)
        self._nova = settings

    def factors(self, values: Mapping[LearnerId, float], steps: Mapping[LearnerId, int]) -> Mapping[LearnerId, float]:
        return self._nova.factors(values, steps)


class SecureDifferences(SecureAverage):
    """Differences from a sum: how far to go along their mean follows from the summed lengths."""

    def __init__(
        self,
        initial_model: Model,
        store: ModelStore,
        secure_sum: SecureSum,
        extrapolation: Extrapolation = "lengths",
        largest: float = 4.0,
        equalize: float = 0.0,
        momentum: float = 0.0,
        pull: float = 0.0,
    ) -> None:
        super().__init__(initial_model, store, secure_sum)
        self._extrapolation: Extrapolation = extrapolation
        self._largest = largest
        self._scaling = (equalize, largest, momentum, pull)

    def factors(self, values: Mapping[LearnerId, float], steps: Mapping[LearnerId, int]) -> Mapping[LearnerId, float]:
        return equalizing_steps(values, steps, *self._scaling)

    def _mixture(self, opened: Opened) -> Vector:
        mixed: Vector = opened.vector.copy()
        before, layout = self.model.vector, self.model.layout
        difference = opened.vector.astype(np.float64) - before
        _, spread, length = opened.scalars
        eta = extrapolated(self._extrapolation, spread, length, squared_length(difference, layout), self._largest)
        for part in parameter_parts(layout):
            mixed[part] = before[part] + eta * difference[part]
        return mixed
