"""Lambda over the course of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metis.core.events import RoundMeasure
from metis.core.layers.scheduled import Scheduled
from metis.core.protocols.pacing import Pace, TimedLearner
from metis.core.schedules import Changing, Moment, factor_of

if TYPE_CHECKING:
    from metis.core.protocols import CommunicationProtocol


@dataclass(frozen=True)
class ScheduledLambda(
    Scheduled,
    key="schedule",
    order=1,
    needs={"period": "changes lambda, which is for semi-synchronous training; {policy} has none"},
    takes={"period"},
):
    """Lambda as a `Schedule`, or as a function of the `Moment`, instead of one number; beyond the paper.

    - `slowest_learner_epochs`: lambda at a moment of the run.
    """

    slowest_learner_epochs: Changing

    replaces = frozenset({"slowest_learner_epochs"})

    def relabel(self, label: str) -> str:
        return paced_label(label, "λ scheduled")

    def set_protocol(self, protocol: CommunicationProtocol) -> CommunicationProtocol:
        return protocol.paced(self)

    def start(self) -> Pace:
        return _Scheduled(self.slowest_learner_epochs)


@dataclass
class _Scheduled:
    schedule: Changing

    def period(self, learners: Sequence[TimedLearner], moment: Moment, measure: RoundMeasure | None) -> float | None:
        if not learners:
            return None
        epochs = factor_of(self.schedule, "lambda", moment)
        return max(epochs * learner.epoch_time + learner.inside for learner in learners)


def paced_label(label: str, pacing: str) -> str:
    """SemiSync (pacing) instead of SemiSync (λ=2), with whatever follows it."""
    name, closing, rest = label.partition(")")
    return f"SemiSync ({pacing}){rest if name.startswith('SemiSync (') and closing else ''}"
