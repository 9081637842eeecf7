"""Synchronous: a fixed number of local epochs, then everybody waits for the slowest (Sec. 4.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from metis.core.events import Budget, LearnerId, RoundMeasure
from metis.core.protocols.asynchronous import LocalEpochs
from metis.core.protocols.barrier import Barrier
from metis.core.protocols.protocol import BaseProtocol
from metis.core.roster import LearnerRecord, Roster
from metis.core.schedules import Moment
from metis.core.timing import steps_of_epochs
from metis.registry import Setting, check_settings

RoundLimit = Annotated[
    float, Setting("seconds of training after which a learner hands in what it has", gt=0, infinite=True)
]
Grace = Annotated[
    float,
    Setting(
        "share of the period, or of round_limit, that a barrier waits longer before it goes on without the late", ge=0
    ),
]


@dataclass
class Synchronous(BaseProtocol):
    """Everybody trains the same number of local epochs; a learner that is done idles until all are."""

    local_epochs: LocalEpochs = 4.0
    round_limit: RoundLimit = math.inf
    grace: Grace = 0.1

    accepts_stale = False
    has_rounds = True
    _barrier: Barrier = field(default_factory=Barrier, init=False, repr=False)

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
        slack = max((record.overhead + (record.time_per_batch or 0.0) for record in who), default=0.0)
        self._barrier.deadline = moment.seconds + self.round_limit * (1 + self.grace) + slack
        return {
            record.learner: Budget(steps_of_epochs(self.local_epochs, record.epoch_steps), self.round_limit)
            for record in who
        }
