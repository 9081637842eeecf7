"""Asynchronous: no barrier; whoever hands in a model trains on at once (Sec. 4.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from metis.core.events import Budget, LearnerId
from metis.core.roster import Roster
from metis.core.timing import steps_of_epochs


@dataclass
class Asynchronous:
    """Every waiting learner gets a fixed number of local epochs immediately."""

    local_epochs: float = 4.0
    accepts_stale = True
    has_rounds = False
    fills_the_period = False
    deadline = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.local_epochs < math.inf:
            raise ValueError(f"local_epochs must be a number greater than 0, not {self.local_epochs}")

    def next_tasks(self, roster: Roster, now: float) -> dict[LearnerId, Budget]:
        return {
            record.learner: Budget(steps_of_epochs(self.local_epochs, record.epoch_steps)) for record in roster.waiting
        }
