"""Semi-synchronous: everybody trains until the same moment, so nobody idles (Sec. 4.3, Eq. 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from metis.core.events import Budget, LearnerId, RoundMeasure
from metis.core.pacing import Pace, Pacing, Timed
from metis.core.protocols.protocol import Barrier
from metis.core.roster import LearnerRecord, Roster
from metis.core.sampling import Sample
from metis.core.schedules import Moment
from metis.core.timing import steps_of_epochs, steps_within

Timings = Literal["every_round", "cold_start", "smoothed"]
BudgetUnit = Literal["steps", "deadline"]


@dataclass
class SemiSynchronous:
    """Each round lasts t_max = lambda * max_k t_k^e; a learner does B_k = t_max / t_beta_k batches in it.

    The first round is the cold start: one epoch each, at most `cold_start_limit` seconds, to measure
    t_beta_k. A learner that joins later gets its own cold start inside the current period.
    """

    slowest_learner_epochs: float = 2.0  # lambda
    cold_start_limit: float = math.inf  # seconds
    timings: Timings = "every_round"  # "cold_start": static, as in the paper (R13); "smoothed": see `TypicalTime`
    budget: BudgetUnit = "steps"  # or "deadline": train for t_max seconds, hand in what there is
    grace: float = 0.1  # share of the period that the barrier waits longer
    longest_period: float = math.inf  # seconds; no learner, however slow or untruthful, stretches a round beyond
    pacing: Pacing | None = None  # how long periods are, instead of lambda epochs of the slowest learner
    max_local_epochs: float | None = None  # in a period; who has little data need not go round and round in it
    sample: Sample | None = None  # who takes part in a round; None for everybody
    exchange: Literal["inside"] | None = None  # "inside": a period has room for download, training and upload
    accepts_stale = False
    has_rounds = True
    synchronization_period: float | None = field(default=None, init=False)  # t_max; None in the cold start
    _barrier: Barrier = field(default_factory=Barrier, init=False, repr=False)
    _rounds: int = field(default=0, init=False, repr=False)
    _pace: Pace | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._pace = None if self.pacing is None else self.pacing.start()
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
        if self.exchange not in (None, "inside"):
            raise ValueError(f"exchange must be inside, or be left out, not '{self.exchange}'")
        if self.max_local_epochs is not None and not 0 < self.max_local_epochs < math.inf:
            raise ValueError(f"max_local_epochs must be a number greater than 0, not {self.max_local_epochs}")

    @property
    def deadline(self) -> float:
        return self._barrier.deadline

    @property
    def fills_the_period(self) -> bool:
        return self.max_local_epochs is None and self.sample is None

    @property
    def measures(self) -> bool:
        return self.pacing is not None and self.pacing.measures

    def pace(
        self, roster: Roster, moment: Moment, measure: RoundMeasure | None, budgets: dict[LearnerId, Budget]
    ) -> dict[LearnerId, Budget]:
        if self._pace is None:
            return budgets
        self._pace.learn(moment, measure)
        return self.next_tasks(roster, moment.seconds)

    def next_tasks(self, roster: Roster, now: float) -> dict[LearnerId, Budget]:
        if not self._barrier.is_open(roster, now):
            return {}
        waiting, others = roster.waiting, roster.training
        if not waiting:
            return {}
        if self.sample is not None:
            self._rounds += 1
            waiting = self.sample.draw(waiting, self._rounds)
        # Late ones included: the period must fit a late learner as well.
        self.synchronization_period = self._next_period([*waiting, *others])
        length = self.cold_start_limit if self.synchronization_period is None else self.synchronization_period
        slack = max(record.overhead + (record.time_per_batch or 0.0) for record in waiting)
        self._barrier.deadline = now + length * (1 + self.grace) + slack
        return {record.learner: self._budget_of(record) for record in waiting}

    def _next_period(self, records: Sequence[LearnerRecord]) -> float | None:
        """t_max of a round with these learners; None if none of them was measured yet."""
        timed = [
            (record, time_per_batch)
            for record in records
            if (time_per_batch := self._time_per_batch(record)) is not None
        ]
        if not timed:
            return None
        if self._pace is None:
            epochs = self.slowest_learner_epochs
            longest = max(
                epochs * (record.epoch_steps * time_per_batch) + self._inside(record)
                for record, time_per_batch in timed
            )
            return min(longest, self.longest_period)
        learners = [
            Timed(
                record.examples,
                record.epoch_steps * time_per_batch,
                time_per_batch,
                self._exchange(record),
                self._inside(record),
            )
            for record, time_per_batch in timed
        ]
        return min(self._pace.period(learners), self.longest_period)

    def _exchange(self, record: LearnerRecord) -> float:
        """What a task takes besides training."""
        return record.typical_overhead if self.timings == "smoothed" else record.overhead

    def _inside(self, record: LearnerRecord) -> float:
        """What of a period is not for training."""
        return self._exchange(record) if self.exchange == "inside" else 0.0

    def _time_per_batch(self, record: LearnerRecord) -> float | None:
        match self.timings:
            case "cold_start":
                return record.first_time_per_batch
            case "smoothed":
                return record.typical_time.value
            case "every_round":
                return record.time_per_batch

    def _budget_of(self, record: LearnerRecord) -> Budget:
        time_per_batch, period = self._time_per_batch(record), self.synchronization_period
        most = None
        if self.max_local_epochs is not None:
            most = steps_of_epochs(self.max_local_epochs, record.epoch_steps)
        if period is None or time_per_batch is None:
            epoch = record.epoch_steps if most is None else min(record.epoch_steps, most)
            return Budget(epoch, self.cold_start_limit if period is None else min(self.cold_start_limit, period))
        if self.exchange == "inside":
            period = max(period - self._inside(record), time_per_batch)
        steps = None if self.budget == "deadline" else steps_within(period, time_per_batch)
        if most is not None:
            steps = most if steps is None else min(steps, most)
        # The seconds bind only a learner that has become slower than its timing says, or that has no steps given.
        return Budget(steps, period)
