"""The learners' learning rate over the course of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from metis.core.layers.base import Layer
from metis.core.schedules import Changing, Moment, Schedule, factor_of


@dataclass(frozen=True)
class ScheduledRate(Layer, key="rate", order=35):
    """The learners' learning rate times a `Schedule`, or a function of the `Moment`; beyond the paper."""

    schedule: Changing

    @classmethod
    def definition(cls) -> Callable[..., Any]:
        return Schedule

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Layer:
        return cls(Schedule(**table))

    def relabel(self, label: str) -> str:
        return f"{label}, η scheduled"

    def scale_rate(self, moment: Moment) -> float:
        return factor_of(self.schedule, "the learning rate", moment)
