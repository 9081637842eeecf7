"""A policy: the next round begins as soon as a share of the learners has answered; nobody is interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from metis.core.contribution import version_staleness
from metis.core.events import Budget, LearnerId, RoundMeasure
from metis.core.mixing import CachedAverage
from metis.core.policies import POLICIES
from metis.core.policy import Policy
from metis.core.protocols import BaseProtocol
from metis.core.roster import LearnerRecord, Roster
from metis.core.schedules import Moment
from metis.core.timing import steps_of_epochs
from metis.registry import Setting, check_settings

Share = Annotated[float, Setting("share of the learners that must have answered", ge=0, le=1)]
LocalEpochs = Annotated[float, Setting("passes over its own data that a learner does in a task", gt=0)]


@dataclass
class Quorum(BaseProtocol):
    """WHEN: a round begins for those that wait, once they are a quorum of those that are present."""

    share: Share = 0.5
    local_epochs: LocalEpochs = 1.0

    has_rounds = True

    def __post_init__(self) -> None:
        check_settings(self)

    def ready(self, roster: Roster, now: float) -> bool:
        waiting = len(roster.waiting)
        return waiting > 0 and waiting >= self.share * roster.available_count

    def tasks(
        self, who: Sequence[LearnerRecord], roster: Roster, moment: Moment, measure: RoundMeasure | None
    ) -> dict[LearnerId, Budget]:
        return {record.learner: Budget(steps_of_epochs(self.local_epochs, record.epoch_steps)) for record in who}


@POLICIES.register("quorum")
def quorum(share: Share = 0.5, local_epochs: LocalEpochs = 1.0) -> Policy:
    """Quorum: a round does not wait for the last learners; late models count less."""
    label = f"Quorum ({share:.0%})"
    return Policy("quorum", Quorum(share, local_epochs), version_staleness, CachedAverage, label=label)
