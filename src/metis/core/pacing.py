"""HOW LONG the periods of semi-synchronous training are, where lambda is not one number for the whole run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from metis.core.events import RoundMeasure
from metis.core.schedules import Changing, Moment, factor_of


@dataclass(frozen=True, slots=True)
class Timed:
    """A learner as pacing sees it; seconds."""

    examples: int
    epoch_time: float
    time_per_batch: float
    exchange: float  # what a task takes besides training
    inside: float = 0.0  # what of that is a part of the period


class Pace(Protocol):
    """The state of one run's pacing."""

    def period(self, learners: Sequence[Timed]) -> float:
        """Seconds that the next period lasts, for these learners."""
        ...

    def learn(self, moment: Moment, measure: RoundMeasure | None) -> None:
        """A round is over: where the run is now, and what was measured of the round if a model came out of it."""
        ...


class Pacing(Protocol):
    """Settings; frozen."""

    @property
    def measures(self) -> bool:
        """Whether rounds must be measured for it."""
        ...

    def start(self) -> Pace:
        """The state before the first period."""
        ...

    def for_solver(self, momentum: float) -> Pacing:
        """With what is not given taken from the local solver, whose momentum starts anew in each task."""
        ...


@dataclass(frozen=True)
class ScheduledLambda:
    """Lambda as a function of the rounds, steps or seconds that have passed."""

    slowest_learner_epochs: Changing
    measures = False

    def start(self) -> Pace:
        return _Scheduled(self.slowest_learner_epochs)

    def for_solver(self, momentum: float) -> ScheduledLambda:
        return self


@dataclass
class _Scheduled:
    schedule: Changing
    moment: Moment = field(default_factory=Moment)

    def period(self, learners: Sequence[Timed]) -> float:
        epochs = factor_of(self.schedule, "lambda", self.moment)
        return max(epochs * learner.epoch_time + learner.inside for learner in learners)

    def learn(self, moment: Moment, measure: RoundMeasure | None) -> None:
        self.moment = moment


@dataclass(frozen=True)
class AdaptivePeriod:
    """As short as the learners can make use of; longer as long as their local models agree.

    Mixing often keeps local models from running apart, each into its own optimum. It costs an exchange, and the steps
    in which a solver's momentum, which starts anew in each task, gets going. So the shortest sensible period is given
    by the learners, not by lambda: `batches` of them (4, or 0.5 / (1 - momentum) if that is more), and twice their
    exchange. "They" are the fastest that hold `served` of all examples: one learner that is, or becomes, ten times
    slower than the others does less in a period, a batch at least, instead of making all periods ten times longer.

    After each round the period is changed by what was measured. `agreement` is the square of how far the mixture went
    over the mean square of how far the local models went: 1 where all went the same way, so that mixing changed
    nothing; 1/N where N learners went N unrelated ways.

        period *= exp(gain (agreement - wanted_agreement)), at most doubled or halved

    It is never shorter than what is sensible, and at most `longest` epochs of the learners.
    """

    batches: float | None = None
    served: float = 0.8
    longest: float = 4.0
    wanted_agreement: float = 0.5
    gain: float = 1.0
    measures = True

    def __post_init__(self) -> None:
        if self.batches is not None and not 1 <= self.batches < math.inf:
            raise ValueError(f"batches must be 1 or more, not {self.batches}")
        if not 0 < self.served <= 1:
            raise ValueError(f"served must be greater than 0 and at most 1, not {self.served}")
        for name in ("longest", "gain"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number greater than 0, not {getattr(self, name)}")
        if not 0 < self.wanted_agreement < 1:
            raise ValueError(f"wanted_agreement must lie between 0 and 1, not {self.wanted_agreement}")

    def start(self) -> Pace:
        return _Adaptive(self)

    def for_solver(self, momentum: float) -> AdaptivePeriod:
        return self if self.batches is not None else replace(self, batches=max(_FEWEST, 0.5 / (1 - momentum)))


_FEWEST = 4.0  # batches, also without momentum
_EXCHANGE = 2.0  # as long as the exchange at least; ten times as long lost more by drift than it saved on the line


@dataclass
class _Adaptive:
    settings: AdaptivePeriod
    factor: float = 1.0  # of the shortest sensible period

    def period(self, learners: Sequence[Timed]) -> float:
        def of_most(seconds: Callable[[Timed], float]) -> float:
            return _served(learners, seconds, self.settings.served)

        batches = _FEWEST if self.settings.batches is None else self.settings.batches
        shortest = max(
            batches * of_most(lambda learner: learner.time_per_batch),
            _EXCHANGE * of_most(lambda learner: learner.exchange),
        )
        longest = max(shortest, self.settings.longest * of_most(lambda learner: learner.epoch_time))
        # What a bound cut off must not pile up.
        self.factor = min(max(1.0, self.factor), longest / shortest)
        # Everybody does a batch at least, and it is better to train on than to wait for it.
        longest_batch = max(learner.time_per_batch for learner in learners)
        training = max(self.factor * shortest, min(longest_batch, longest))
        return training + of_most(lambda learner: learner.inside)

    def learn(self, moment: Moment, measure: RoundMeasure | None) -> None:
        if measure is not None and measure.divergence > 0:
            agreement = (measure.progress / measure.divergence) ** 2
            change = math.exp(self.settings.gain * (agreement - self.settings.wanted_agreement))
            self.factor *= min(2.0, max(0.5, change))


def _served(learners: Sequence[Timed], seconds: Callable[[Timed], float], share: float) -> float:
    """So long that the quickest learners with this share of all examples need no longer."""
    wanted = share * sum(learner.examples for learner in learners) * (1 - 1e-9)
    held = 0
    for learner in sorted(learners, key=seconds):
        held += learner.examples
        if held >= wanted:
            return seconds(learner)
    raise ValueError("there are no learners")
