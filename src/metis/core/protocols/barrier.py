"""The barrier that protocols with rounds share."""

from __future__ import annotations

import math

from metis.core.events import LearnerId
from metis.core.roster import Roster


class Barrier:
    """Holds everybody until all awaited learners have answered or the deadline has passed."""

    def __init__(self) -> None:
        self.deadline = math.inf
        self.not_awaited: frozenset[LearnerId] = frozenset()  # learners whose tasks hold nobody up
        self._late: set[int] = set()  # open tasks that a barrier no longer waits for

    def is_open(self, roster: Roster, now: float) -> bool:
        """Whether the next round may start; a learner that is still training at the deadline becomes late."""
        self._late &= roster.open_tasks
        for learner in self.not_awaited:
            if (task := roster[learner].task) is not None:
                self._late.add(task.number)
        if len(roster.open_tasks) > len(self._late) and now < self.deadline:
            return False
        self._late |= roster.open_tasks
        self.deadline = math.inf
        return True
