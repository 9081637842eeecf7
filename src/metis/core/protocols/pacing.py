"""HOW LONG the periods of semi-synchronous training are, where lambda is not one number for the whole run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from metis.core.events import RoundMeasure
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


# Seconds that a period of these learners lasts at least.
Floor: TypeAlias = Callable[[Sequence[TimedLearner]], float]


class Pace(Protocol):
    """The state of one run's pacing."""

    def period(self, learners: Sequence[TimedLearner], moment: Moment, measure: RoundMeasure | None) -> float | None:
        """Seconds that the next period lasts for these learners; None, a cold start, if none was timed yet.

        Asked once a round. `measure` is what was measured of the round that ended, if a model came out of it.
        """
        ...


class Pacing(Protocol):
    """Settings; frozen."""

    def start(self) -> Pace:
        """The state before the first period."""
        ...
