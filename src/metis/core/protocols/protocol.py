"""The interface of a communication protocol, and the barrier that two of them share."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

from metis.core.events import Budget, LearnerId, RoundMeasure
from metis.core.roster import Roster
from metis.core.schedules import Moment


class CommunicationProtocol(Protocol):
    """Decides who trains next; it never mentions mixing.

    An implementation is a dataclass whose `init` fields are settings and whose other fields are state,
    so that `dataclasses.replace(protocol)` is a fresh one.
    """

    accepts_stale: bool  # may an update be based on an older community model than the current one?
    has_rounds: bool  # is a community model published only when learners have waited for each other?

    @property
    def fills_the_period(self) -> bool:
        """Is everybody at work all the time? Then the paper charges energy for all of it."""
        ...

    @property
    def deadline(self) -> float:
        """Wake me then, even if nothing happens; math.inf for never."""
        ...

    def next_tasks(self, roster: Roster, now: float) -> dict[LearnerId, Budget]:
        """Who trains next and for how long; empty while the federation should wait."""
        ...


@runtime_checkable
class Paced(Protocol):
    """What a protocol also has if a round tells it how long the next one should be."""

    @property
    def measures(self) -> bool:
        """Must each round be measured?"""
        ...

    def pace(
        self, roster: Roster, moment: Moment, measure: RoundMeasure | None, budgets: dict[LearnerId, Budget]
    ) -> dict[LearnerId, Budget]:
        """The budgets that `next_tasks` has just given, or others now that the round is published and measured."""
        ...


class Barrier:
    """Holds everybody until all awaited learners have answered or the deadline has passed."""

    def __init__(self) -> None:
        self.deadline = math.inf
        self._late: set[int] = set()  # open tasks that a barrier no longer waits for

    def is_open(self, roster: Roster, now: float) -> bool:
        """Whether the next round may start; whoever is still training at the deadline becomes late."""
        self._late &= roster.open_tasks
        if len(roster.open_tasks) > len(self._late) and now < self.deadline:
            return False
        self._late |= roster.open_tasks
        self.deadline = math.inf
        return True
