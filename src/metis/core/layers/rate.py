"""The learners' learning rate over the course of a run."""

from __future__ import annotations

from dataclasses import dataclass

from metis.core.layers.scheduled import Scheduled
from metis.core.schedules import Changing, Moment, factor_of


@dataclass(frozen=True)
class ScheduledRate(Scheduled, key="rate", order=35):
    """The learners' learning rate times a `Schedule`, or a function of the `Moment`; beyond the paper.

    - `schedule`: the factor at a moment of the run.
    """

    schedule: Changing

    def relabel(self, label: str) -> str:
        return f"{label}, η scheduled"

    def scale_rate(self, moment: Moment) -> float:
        return factor_of(self.schedule, "the learning rate", moment)
