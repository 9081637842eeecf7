"""HOW LONG the periods of semi-synchronous training are, where lambda is not one number for the whole run."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from metis.core.events import LearnerId, RoundMeasure
from metis.core.schedules import Moment


@dataclass(frozen=True, slots=True)
class TimedLearner:
    """A learner as pacing sees it; seconds."""

    examples: int
    epoch_time: float
    time_per_batch: float
    exchange: float  # the part of a task that is not training
    inside: float = 0.0  # how much of that counts as part of the period
    typical_exchange: float = 0.0  # the median of its latest three
    learner: LearnerId = ""


# Seconds that a period of these learners lasts at least.
Floor: TypeAlias = Callable[[Sequence[TimedLearner]], float]


def of_most(learners: Sequence[TimedLearner], seconds: Callable[[TimedLearner], float], share: float) -> float:
    """Long enough for the quickest learners that hold this share of all examples."""
    quickest = sorted(learners, key=seconds)
    held = list(itertools.accumulate(learner.examples for learner in quickest))
    return seconds(quickest[bisect.bisect_left(held, share * held[-1] * (1 - 1e-9))])


class Pace(Protocol):
    """The state of one run's pacing; its attribute `reason`, if it has one, says why the latest period is that long."""

    def period(self, learners: Sequence[TimedLearner], moment: Moment, measure: RoundMeasure | None) -> float | None:
        """Seconds that the next period lasts for these learners; None, a cold start, if none was timed yet.

        Asked once a round. `measure` is what was measured of the round that ended, if a model came out of it.
        """
        ...


class Probing(Protocol):
    """What a cold start is instead of an epoch of everybody."""

    @property
    def batches(self) -> int:
        """Of each learner."""
        ...

    def latest_end(self, began: float, now: float, answered: int, examples: int) -> float:
        """When the others are no longer waited for, if learners with `answered` of all `examples` have answered now."""
        ...


class Lateness(Protocol):
    """Whose batches take so long that no period waits for them."""

    def not_awaited(self, learners: Sequence[TimedLearner], period: float) -> frozenset[LearnerId]:
        """Those of these learners that do one batch, however long it takes; it is mixed when it comes."""
        ...


class Pacing(Protocol):
    """Settings; frozen."""

    def start(self) -> Pace:
        """The state before the first period."""
        ...
