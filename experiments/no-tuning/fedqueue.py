"""FedQueue (Li et al. 2026, arXiv 2605.02125) as a policy in one file.

Rounds of a fixed length T. How long a learner's task waits before and after training (its queue, here the exchange of
models) is predicted by an exponential average; it is given as many steps as fit into what is left of T after that and a
safety margin. What is not there when the round ends is kept, and mixed in the next one with less weight,
s(u) = 1 / (1 + beta u) for u rounds behind. So that learners with many steps do not dominate, each trains with a
learning rate that is smaller by E_min / E_k. Metis has one rate for all learners of a round, so the differences are
scaled by that instead, which is the same to first order; `equalize = false` leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from metis import Policy
from metis.core.events import Budget, CommunityStamp, LearnerId, RoundMeasure, UpdateRequest
from metis.core.mixing.fedbuff import Buffered
from metis.core.mixing.store import ModelStore
from metis.core.model import Model
from metis.core.policies import POLICIES
from metis.core.protocols import BaseProtocol
from metis.core.protocols.barrier import Barrier
from metis.core.roster import LearnerRecord, Roster
from metis.core.schedules import Moment
from metis.core.timing import steps_within
from metis.registry import Setting, check_settings

Sync = Annotated[float, Setting("seconds of a round (T)", gt=0)]
WarmUp = Annotated[int, Setting("steps of a learner whose speed is not known, and fewest of every task", ge=1)]
Margin = Annotated[float, Setting("share of a round that is kept free (delta)", ge=0, lt=1)]
Equalize = Annotated[bool, Setting("whether learners with many steps go as far as the one with the fewest")]

_FRESH = 0.5  # weight of the latest wait in the prediction
_BETA = 0.5  # how much less a model counts for each round that it is behind


@dataclass
class Queued(BaseProtocol):
    """Rounds of a fixed length, with budgets that leave room for each learner's predicted wait."""

    sync_seconds: Sync = 10.0
    warm_up: WarmUp = 10
    margin: Margin = 0.2

    has_rounds = True
    _barrier: Barrier = field(default_factory=Barrier, init=False, repr=False)
    _waits: dict[LearnerId, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def deadline(self) -> float:
        return self._barrier.deadline

    def ready(self, roster: Roster, now: float) -> bool:
        return self._barrier.is_open(roster, now) and bool(roster.waiting)

    def tasks(
        self, who: Sequence[LearnerRecord], roster: Roster, moment: Moment, measure: RoundMeasure | None
    ) -> dict[LearnerId, Budget]:
        self._barrier.deadline = moment.seconds + self.sync_seconds
        return {one.learner: Budget(self._steps(one)) for one in who}

    def _steps(self, one: LearnerRecord) -> int:
        if one.time_per_batch is None:
            return self.warm_up
        before = self._waits.get(one.learner, one.overhead)
        wait = self._waits[one.learner] = _FRESH * one.overhead + (1 - _FRESH) * before
        left = self.sync_seconds * (1 - self.margin) - wait
        return max(self.warm_up, steps_within(max(0.0, left), one.time_per_batch))


def harmonic(
    request: UpdateRequest, learner: LearnerRecord, based_on: CommunityStamp, current: CommunityStamp
) -> float:
    """|D_k| / (1 + beta u) for u versions behind."""
    return learner.examples / (1 + _BETA * (current.version - based_on.version))


class QueueMixing(Buffered):
    """w += the weighted mean of the differences, each scaled by E_min / E_k."""

    def __init__(self, initial_model: Model, store: ModelStore, equalize: bool = True) -> None:
        super().__init__(initial_model, store, buffer_size=1)
        self._equalize = equalize
        self._weight = 0.0
        self._fewest = 0

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        self._weight += value
        self._fewest = steps if not self.contributors else min(self._fewest, steps)
        super().commit(learner, local_model, value / steps if self._equalize else value, steps, base, examples)

    def publish(self, seconds: float = 0.0) -> bool:
        if not self.contributors:
            return False
        self._server_learning_rate = self.contributors / self._weight * (self._fewest if self._equalize else 1)
        self._weight = 0.0
        return super().publish(seconds)

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        return {**super().arrays(local_models=local_models), "queue": np.array([self._weight, self._fewest])}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        super().load_arrays(model, arrays, store)
        self._weight, self._fewest = float(arrays["queue"][0]), int(arrays["queue"][1])


@POLICIES.register("fedqueue")
def fedqueue(
    sync_seconds: Sync = 10.0, warm_up: WarmUp = 10, margin: Margin = 0.2, equalize: Equalize = True
) -> Policy:
    """FedQueue: rounds of a fixed length, budgets that leave room for the predicted wait."""
    mixing = partial(QueueMixing, equalize=equalize)
    label = f"FedQueue ({sync_seconds:g} s)"
    return Policy("fedqueue", Queued(sync_seconds, warm_up, margin), harmonic, mixing, label=label)
