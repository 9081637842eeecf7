"""Semi-synchronous: everybody trains until the same moment, so nobody idles (Sec. 4.3, Eq. 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from metis.core.events import Budget, LearnerId
from metis.core.protocols.protocol import Barrier
from metis.core.roster import LearnerRecord, Roster
from metis.core.timing import steps_within

Timings = Literal["every_round", "cold_start"]
BudgetUnit = Literal["steps", "deadline"]


@dataclass
class SemiSynchronous:
    """Each round lasts t_max = lambda * max_k t_k^e; a learner does B_k = t_max / t_beta_k batches in it.

    The first round is the cold start: one epoch each, at most `cold_start_limit` seconds, to measure
    t_beta_k. A learner that joins later gets its own cold start inside the current period.
    """

    slowest_learner_epochs: float = 2.0  # lambda
    cold_start_limit: float = math.inf  # seconds
    timings: Timings = "every_round"  # or "cold_start": static, as in the paper (R13)
    budget: BudgetUnit = "steps"  # or "deadline": train for t_max seconds, hand in what there is
    grace: float = 0.1  # share of the period that the barrier waits longer
    longest_period: float = math.inf  # seconds; no learner, however slow or untruthful, stretches a round beyond
    accepts_stale = False
    fills_the_period = True
    synchronization_period: float | None = field(default=None, init=False)  # t_max; None in the cold start
    _barrier: Barrier = field(default_factory=Barrier, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.slowest_learner_epochs < math.inf:
            raise ValueError(
                f"slowest_learner_epochs (lambda) must be a number greater than 0, not {self.slowest_learner_epochs}"
            )
        if not self.cold_start_limit > 0:
            raise ValueError(f"cold_start_limit must be greater than 0 seconds, not {self.cold_start_limit}")
        if self.timings not in get_args(Timings):
            raise ValueError(f"timings must be one of {', '.join(get_args(Timings))}, not '{self.timings}'")
        if self.budget not in get_args(BudgetUnit):
            raise ValueError(f"budget must be one of {', '.join(get_args(BudgetUnit))}, not '{self.budget}'")
        if not 0 <= self.grace < math.inf:
            raise ValueError(f"grace must be 0 or more, not {self.grace}")
        if not self.longest_period > 0:
            raise ValueError(f"longest_period must be greater than 0 seconds, not {self.longest_period}")

    @property
    def deadline(self) -> float:
        return self._barrier.deadline

    def next_tasks(self, roster: Roster, now: float) -> dict[LearnerId, Budget]:
        if not self._barrier.is_open(roster, now):
            return {}
        waiting = roster.waiting
        if not waiting:
            return {}
        # Over all who are there, late ones included: the period must fit a late learner as well.
        epoch_times = [
            record.epoch_steps * time_per_batch
            for record in roster.available
            if (time_per_batch := self._time_per_batch(record)) is not None
        ]
        self.synchronization_period = (
            min(self.slowest_learner_epochs * max(epoch_times), self.longest_period) if epoch_times else None
        )
        length = self.cold_start_limit if self.synchronization_period is None else self.synchronization_period
        slack = max(record.overhead + (record.time_per_batch or 0.0) for record in waiting)
        self._barrier.deadline = now + length * (1 + self.grace) + slack
        return {record.learner: self._budget_of(record) for record in waiting}

    def _time_per_batch(self, record: LearnerRecord) -> float | None:
        return record.first_time_per_batch if self.timings == "cold_start" else record.time_per_batch

    def _budget_of(self, record: LearnerRecord) -> Budget:
        time_per_batch, period = self._time_per_batch(record), self.synchronization_period
        if period is None:
            return Budget(record.epoch_steps, self.cold_start_limit)
        if time_per_batch is None:
            return Budget(record.epoch_steps, min(self.cold_start_limit, period))
        if self.budget == "deadline":
            return Budget(None, period)
        # The seconds bind only a learner that has become slower than its timing says.
        return Budget(steps_within(period, time_per_batch), period)
