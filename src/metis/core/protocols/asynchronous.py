"""Asynchronous: no barrier; a learner that hands in a model trains on at once (Sec. 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from metis.core.events import Budget, LearnerId, RoundMeasure
from metis.core.protocols.protocol import BaseProtocol
from metis.core.roster import LearnerRecord, Roster
from metis.core.schedules import Moment
from metis.core.timing import steps_of_epochs
from metis.registry import Setting, check_settings

LocalEpochs = Annotated[
    float, Setting("passes over its own data that a learner does in a task; may be a fraction", gt=0)
]


@dataclass
class Asynchronous(BaseProtocol):
    """Every waiting learner gets a fixed number of local epochs immediately."""

    local_epochs: LocalEpochs = 4.0

    def __post_init__(self) -> None:
        check_settings(self)

    def ready(self, roster: Roster, now: float) -> bool:
        return bool(roster.waiting)

    def tasks(
        self, who: Sequence[LearnerRecord], roster: Roster, moment: Moment, measure: RoundMeasure | None
    ) -> dict[LearnerId, Budget]:
        return {record.learner: Budget(steps_of_epochs(self.local_epochs, record.epoch_steps)) for record in who}
