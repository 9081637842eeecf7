"""Periods that adapt to what rounds show, without lambda.

How well local models agree is measured as they are committed and published: one pass over each local model and one over
the community model. A server-side optimizer's step is not measured: its length depends on its learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import squared_distance
from metis.core.events import LearnerId, RoundMeasure
from metis.core.layers.base import Layer
from metis.core.layers.scheduled_lambda import paced_label
from metis.core.layers.wrapper import Wrapper
from metis.core.mixing import Community, Mixing, ModelStore
from metis.core.mixing.secure import SecureAverage
from metis.core.model import Model
from metis.core.protocols.pacing import Pace, TimedLearner, of_most
from metis.core.schedules import Moment
from metis.registry import Setting

if TYPE_CHECKING:
    from metis.core.protocols import CommunicationProtocol
    from metis.core.solvers import SolverFacts


@dataclass(frozen=True)
class AdaptivePeriod(
    Layer,
    key="adaptive",
    order=20,
    needs={
        "period": "chooses the periods of semi-synchronous training; {policy} has none",
        "spread": "measures how well local models agree, which nobody can under {other}",
    },
    takes={"period"},
):
    """Periods as short as learners can make use of, longer while their local models agree; beyond the paper.

    Mixing often keeps local models from drifting apart, each to its own optimum. It costs an exchange, and the steps
    in which a solver's momentum, which restarts in each task, builds up. So the shortest sensible period is given
    by the learners, not by lambda: `batches` of them (4, or 0.5 / (1 - momentum) if that is more), and twice their
    exchange. "They" are the fastest that hold `served` of all examples: one learner that is, or becomes, ten times
    slower than the others does less in a period, a batch at least, instead of making all periods ten times longer.

    After each round the period is changed by what was measured. `agreement` is the square of how far the mixture went
    over the mean square of how far the local models went: 1 where all went in the same direction, so that mixing
    changed nothing; 1/N where N learners went in N unrelated directions.

        period *= exp(gain (agreement - wanted_agreement)), at most doubled or halved

    It is never shorter than what is sensible, and at most `longest` epochs of the learners.
    """

    batches: Annotated[
        float | None,
        Setting("batches of a learner in the shortest period; 4, or 0.5 / (1 - momentum) if that is more", ge=1),
    ] = None
    served: Annotated[
        float, Setting("share of all examples whose holders must be able to do these batches in a period", gt=0, le=1)
    ] = 0.8
    longest: Annotated[float, Setting("longest period, in epochs of those learners", gt=0)] = 4.0
    wanted_agreement: Annotated[
        float,
        Setting("agreement of local models that keeps the period; 1 is complete; higher is shorter", gt=0, lt=1),
    ] = 0.5
    gain: Annotated[float, Setting("how strongly a period follows what was measured", gt=0)] = 1.0

    replaces = frozenset({"slowest_learner_epochs"})

    def relabel(self, label: str) -> str:
        return paced_label(label, "adaptive")

    def for_solver(self, facts: SolverFacts) -> Layer:
        if self.batches is not None:
            return self
        return replace(self, batches=max(_FEWEST, 0.5 / (1 - facts.momentum)))

    def set_protocol(self, protocol: CommunicationProtocol) -> CommunicationProtocol:
        return protocol.paced(self)

    def wrap(self, mixing: Mixing) -> Mixing:
        def measured(model: Model, store: ModelStore) -> Community:
            community = mixing(model, store)
            # Masked rounds are measured by their sums.
            return community if isinstance(community, SecureAverage) else Measured(community)

        return measured

    def start(self) -> Pace:
        return _Adaptive(self)


_FEWEST = 4.0  # batches, also without momentum
_EXCHANGE = 2.0  # as long as the exchange at least; ten times as long lost more by drift than it saved on the line


@dataclass
class _Adaptive:
    settings: AdaptivePeriod
    factor: float = 1.0  # of the shortest sensible period

    def period(self, learners: Sequence[TimedLearner], moment: Moment, measure: RoundMeasure | None) -> float | None:
        if not learners:
            self._follow(measure)
            return None

        def served(seconds: Callable[[TimedLearner], float]) -> float:
            return of_most(learners, seconds, self.settings.served)

        batches = _FEWEST if self.settings.batches is None else self.settings.batches
        shortest = max(
            batches * served(lambda learner: learner.time_per_batch),
            _EXCHANGE * served(lambda learner: learner.exchange),
        )
        longest = max(shortest, self.settings.longest * served(lambda learner: learner.epoch_time))
        # What a bound cut off must not accumulate: hence before and after the change.
        self._bound(longest / shortest)
        self._follow(measure)
        self._bound(longest / shortest)
        # Every learner does at least one batch, and it is better to train on than to wait for it.
        longest_batch = max(learner.time_per_batch for learner in learners)
        training = max(self.factor * shortest, min(longest_batch, longest))
        return training + served(lambda learner: learner.inside)

    def _bound(self, largest: float) -> None:
        self.factor = min(max(1.0, self.factor), largest)

    def _follow(self, measure: RoundMeasure | None) -> None:
        if measure is not None and measure.divergence > 0:
            agreement = (measure.progress / measure.divergence) ** 2
            change = math.exp(self.settings.gain * (agreement - self.settings.wanted_agreement))
            self.factor *= min(2.0, max(0.5, change))


class Measured(Wrapper):
    """Measures each round of the community inside it."""

    def __init__(self, inside: Community) -> None:
        super().__init__(inside)
        self._values: dict[LearnerId, float] = {}  # of the open round
        self._squares: dict[LearnerId, float] = {}  # ||w_k - w_c||^2
        self._measure: RoundMeasure | None = None

    @property
    def measure(self) -> RoundMeasure | None:
        """Of the last publication."""
        return self._measure

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        square = squared_distance(local_model.vector, self.model.vector, local_model.vector.size)
        super().commit(learner, local_model, value, steps, base, examples)
        self._values[learner], self._squares[learner] = value, square

    def withdraw(self, learner: LearnerId) -> None:
        super().withdraw(learner)
        self._values.pop(learner, None)
        self._squares.pop(learner, None)

    def publish(self, seconds: float = 0.0) -> bool:
        before = self.model.vector
        if not super().publish(seconds):
            return False
        total = math.fsum(self._values.values())
        spread = math.fsum(value * self._squares[learner] for learner, value in self._values.items())
        progress = math.sqrt(squared_distance(self.model.vector, before, before.size))
        self._measure = RoundMeasure(progress, math.sqrt(spread / total) if total else 0.0)
        self._values.clear()
        self._squares.clear()
        return True

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        squares = np.array([self._squares[learner] for learner in sorted(self._squares)], np.float64)
        return {**super().arrays(local_models=local_models), "measured/squares": squares}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        super().load_arrays(model, arrays, store)
        squares = (float(square) for square in arrays["measured/squares"])
        self._squares = dict(zip(sorted(self._squares), squares, strict=True))
