"""Semi-synchronous: everybody trains until the same moment, so nobody idles (Sec. 4.3, Eq. 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from metis.core.events import Budget, LearnerId, PeriodBegun, RoundMeasure
from metis.core.protocols.barrier import Barrier
from metis.core.protocols.pacing import Floor, Lateness, Pace, Pacing, Probing, TimedLearner
from metis.core.protocols.protocol import BaseProtocol
from metis.core.protocols.synchronous import Grace
from metis.core.roster import LearnerRecord, Roster
from metis.core.schedules import Moment
from metis.core.timing import steps_within
from metis.registry import Setting, check_settings

Lambda = Annotated[
    float, Setting("lambda: a period lasts as many epochs of the slowest learner; may be a fraction", gt=0)
]
ColdStartLimit = Annotated[
    float,
    Setting("seconds; a learner that has not done its first epoch by then hands in what it has", gt=0, infinite=True),
]
Timings = Annotated[
    Literal["every_round", "cold_start", "smoothed"],
    Setting(
        "every_round uses the latest time per batch; cold_start keeps the first, as the paper does (R13); smoothed "
        "averages, ignores single outliers and reports when a learner has changed"
    ),
]
BudgetUnit = Annotated[
    Literal["steps", "deadline", "all_steps"],
    Setting(
        "steps: B_k batches, or as many as the period has room for; deadline: whatever a learner gets done in the "
        "period; all_steps: B_k batches however long they take, as in the paper (R13)"
    ),
]
LongestPeriod = Annotated[
    float,
    Setting("seconds; no learner, however slow or untruthful, makes a period longer", gt=0, infinite=True),
]
Exchange = Annotated[
    Literal["inside"] | None,
    Setting("inside: a period has room for download, training and upload, so that distant learners are not late"),
]

Returning = Annotated[
    Literal["wait", "train"] | None,
    Setting(
        "what a learner does that was late or away and is back in the middle of a period: wait for the next one, or "
        "train for the rest of this one; without it, wait in a simulation and train in a deployment"
    ),
]


@dataclass
class SemiSynchronous(BaseProtocol):
    """Each round lasts t_max = lambda * max_k t_k^e; a learner does B_k = t_max / t_beta_k batches in it.

    The first round is the cold start: one epoch each, at most `cold_start_limit` seconds, to measure
    t_beta_k. A learner that joins later gets its own cold start inside the current period.

    Layers put other parts in: how long periods are, a probe in place of the cold start, whom nobody waits for.
    """

    slowest_learner_epochs: Lambda = 2.0
    cold_start_limit: ColdStartLimit = math.inf
    timings: Timings = "every_round"
    budget: BudgetUnit = "steps"
    grace: Grace = 0.1
    longest_period: LongestPeriod = math.inf
    exchange: Exchange = None
    returning: Returning = None
    pacing: Pacing | None = None  # how long periods are, instead of lambda epochs of the slowest learner
    floors: tuple[tuple[str, Floor], ...] = field(default=(), repr=False)  # how long a period is at least, by setting
    probe: Probing | None = None  # what everybody does first, instead of an epoch
    lateness: Lateness | None = None  # whom a period does not wait for; then what comes late is mixed too

    has_rounds = True
    has_period = True
    fills_the_period = True
    synchronization_period: float | None = field(default=None, init=False)  # t_max; None in the cold start
    bounded_by: str = field(default="", init=False)  # the setting that made this period longer or shorter; "" for none
    not_awaited: frozenset[LearnerId] = field(default=frozenset(), init=False)  # in this period
    _began: float = field(default=-math.inf, init=False, repr=False)
    _probed: tuple[LearnerId, ...] = field(default=(), init=False, repr=False)  # in the round that goes on
    _heard: tuple[int, int] = field(default=(0, 0), init=False, repr=False)  # examples of who answered, and of all
    _ends: float = field(default=math.inf, init=False, repr=False)  # when training in this period does
    _barrier: Barrier = field(default_factory=Barrier, init=False, repr=False)
    _pace: Pace | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_settings(self)
        self._pace = None if self.pacing is None else self.pacing.start()

    @property
    def deadline(self) -> float:
        return self._barrier.deadline

    @property
    def by_deadline(self) -> bool:  # type: ignore[override]
        return self.budget == "deadline"

    @property
    def reports_speed(self) -> bool:  # type: ignore[override]
        return self.timings == "smoothed"

    @property
    def accepts_stale(self) -> bool:  # type: ignore[override]
        return self.lateness is not None

    def paced(self, pacing: Pacing) -> SemiSynchronous:
        return replace(self, pacing=pacing)

    def at_least(self, setting: str, floor: Floor) -> SemiSynchronous:
        return replace(self, floors=(*self.floors, (setting, floor)))

    def probing(self, probe: Probing) -> SemiSynchronous:
        return replace(self, probe=probe)

    def accepting_late(self, lateness: Lateness) -> SemiSynchronous:
        return replace(self, lateness=lateness)

    def ready(self, roster: Roster, now: float) -> bool:
        if self.probe is not None and self._probed:
            asked = [roster[learner] for learner in self._probed if roster[learner].available]
            answered = sum(record.examples for record in asked if record.task is None)
            heard = answered, sum(record.examples for record in asked)
            if heard != self._heard:
                self._heard = heard
                end = self.probe.latest_end(self._began, now, *heard)
                self._barrier.deadline = min(self._barrier.deadline, end)
        return self._barrier.is_open(roster, now) and bool(roster.waiting)

    def tasks(
        self, who: Sequence[LearnerRecord], roster: Roster, moment: Moment, measure: RoundMeasure | None
    ) -> dict[LearnerId, Budget]:
        # Late ones included: the period must fit a late learner as well.
        learners = self._timed([*who, *roster.training])
        period = self.synchronization_period = self._next_period(learners, moment, measure)
        length = self.cold_start_limit if period is None else math.inf if self.budget == "all_steps" else period
        if self.lateness is not None:
            known = () if period is None else self.lateness.not_awaited(learners, period)
            self.not_awaited = self._barrier.not_awaited = frozenset(known)
        self._began = moment.seconds
        self._probed = tuple(record.learner for record in who) if period is None else ()
        self._heard = (0, 0)
        # A line that was cut once, for minutes, must not hold up the next round for as long.
        slack = max(
            (
                record.typical_overhead + (record.time_per_batch or 0.0)
                for record in who
                if record.learner not in self.not_awaited
            ),
            default=0.0,
        )
        if self.floors and period is None and length < math.inf:
            slack = max(slack, length)  # an exchange takes time, and how much is not known yet
        self._ends = moment.seconds + length
        self._barrier.deadline = moment.seconds + length * (1 + self.grace) + slack
        return {record.learner: self._budget_of(record) for record in who}

    def begun(self) -> PeriodBegun | None:
        period = self.synchronization_period
        if period is None:
            if self.probe is None:
                return None
            return PeriodBegun(math.inf, f"everybody does {self.probe.batches} batches, by which they are timed")
        reason = str(getattr(self._pace, "reason", ""))
        if not reason:
            return None
        if self.bounded_by:
            reason = f"that is the limit set by {self.bounded_by}"
        return PeriodBegun(period, reason, tuple(sorted(self.not_awaited)))

    def joining(self, back: Sequence[LearnerRecord], now: float) -> dict[LearnerId, Budget]:
        if self.returning != "train" or self._ends == math.inf:
            return {}
        budgets = {}
        for record in back:
            left = self._ends - now - record.typical_overhead
            time_per_batch = self._time_per_batch(record)
            if time_per_batch is None:
                steps: int | None = self._first_steps(record)
                left = min(left, self.cold_start_limit)
            else:
                steps = None if self.budget == "deadline" else steps_within(max(left, 0.0), time_per_batch)
            if left > (time_per_batch or 0.0):  # else it would be late again
                budgets[record.learner] = Budget(steps, left)
        return budgets

    def _timed(self, records: Sequence[LearnerRecord]) -> list[TimedLearner]:
        """Those of these learners that were measured."""
        return [
            TimedLearner(
                record.examples,
                record.epoch_steps * time_per_batch,
                time_per_batch,
                self._exchange(record),
                self._inside(record),
                record.typical_overhead,
                record.learner,
            )
            for record in records
            if (time_per_batch := self._time_per_batch(record)) is not None
        ]

    def _next_period(
        self, learners: Sequence[TimedLearner], moment: Moment, measure: RoundMeasure | None
    ) -> float | None:
        """t_max of a round with these learners; None if there are none."""
        if self._pace is not None:
            period = self._pace.period(learners, moment, measure)
        else:
            epochs = self.slowest_learner_epochs
            period = max((epochs * learner.epoch_time + learner.inside for learner in learners), default=None)
        self.bounded_by = ""
        if period is None:
            return None
        for setting, floor in self.floors:
            if (shortest := floor(learners)) > period:
                self.bounded_by, period = setting, shortest
        if self.longest_period < period:
            self.bounded_by, period = "longest_period", self.longest_period
        return period

    def _exchange(self, record: LearnerRecord) -> float:
        """The part of a task that is not training."""
        return record.typical_overhead if self.timings == "smoothed" else record.overhead

    def _inside(self, record: LearnerRecord) -> float:
        """The part of a period that is not for training."""
        return self._exchange(record) if self.exchange == "inside" else 0.0

    def _time_per_batch(self, record: LearnerRecord) -> float | None:
        match self.timings:
            case "cold_start":
                return record.first_time_per_batch
            case "smoothed":
                return record.typical_time.value
            case "every_round":
                return record.time_per_batch

    def _first_steps(self, record: LearnerRecord) -> int:
        """Batches by which a learner is timed: an epoch, or those of a probe."""
        return record.epoch_steps if self.probe is None else min(self.probe.batches, record.epoch_steps)

    def _budget_of(self, record: LearnerRecord) -> Budget:
        time_per_batch, period = self._time_per_batch(record), self.synchronization_period
        if period is None or time_per_batch is None:
            limit = self.cold_start_limit if period is None else min(self.cold_start_limit, period)
            return Budget(self._first_steps(record), limit)
        if record.learner in self.not_awaited:
            return Budget(1, period)
        if self.exchange == "inside":
            period = max(period - self._inside(record), time_per_batch)
        steps = None if self.budget == "deadline" else steps_within(period, time_per_batch)
        # The seconds bind only a learner that has become slower than its timing says, or that has no steps given.
        return Budget(steps, math.inf if self.budget == "all_steps" else period)
