"""The interface of a communication protocol."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from metis.core.events import Budget, LearnerId, PeriodBegun, RoundMeasure
from metis.core.protocols.pacing import Floor, Lateness, Pacing, Probing
from metis.core.roster import LearnerRecord, Roster
from metis.core.schedules import Moment
from metis.errors import InternalError


class CommunicationProtocol(Protocol):
    """Decides when learners train next and for how long; it never mentions mixing.

    An implementation is a dataclass whose `init` fields are settings and whose other fields are state,
    so that `dataclasses.replace(protocol)` is a fresh one. Subclass `BaseProtocol` for the usual answers.
    """

    has_rounds: bool  # do learners begin together, so that an idle time between two rounds is a barrier's?
    has_period: bool  # do rounds last as long as a pacing says (`paced`)?

    @property
    def accepts_stale(self) -> bool:
        """May an update be based on an older community model than the current one?"""
        ...

    @property
    def by_deadline(self) -> bool:
        """Do tasks end with the time, however many steps were made?"""
        ...

    @property
    def reports_speed(self) -> bool:
        """Should it be reported when a learner has become slower or faster for good?"""
        ...

    @property
    def fills_the_period(self) -> bool:
        """Is every learner at work all the time? Then the paper charges energy for all of it."""
        ...

    @property
    def deadline(self) -> float:
        """Wake me then, even if nothing happens; math.inf for never."""
        ...

    def ready(self, roster: Roster, now: float) -> bool:
        """Whether waiting learners should train now. May be asked any number of times."""
        ...

    def tasks(
        self, who: Sequence[LearnerRecord], roster: Roster, moment: Moment, measure: RoundMeasure | None
    ) -> dict[LearnerId, Budget]:
        """How long each of these learners trains; asked once after `ready`, with the round published and measured."""
        ...

    def begun(self) -> PeriodBegun | None:
        """What `tasks` has just begun and why, if the protocol explains itself."""
        ...

    def joining(self, back: Sequence[LearnerRecord], now: float) -> dict[LearnerId, Budget]:
        """How long each of these learners, which have no task and are not `ready`, trains in the round that goes on."""
        ...

    def paced(self, pacing: Pacing) -> CommunicationProtocol:
        """The same protocol with periods that this pacing chooses; only where `has_period`."""
        ...

    def at_least(self, setting: str, floor: Floor) -> CommunicationProtocol:
        """The same protocol with periods never shorter than this, by a setting of this name; if `has_period`."""
        ...

    def probing(self, probe: Probing) -> CommunicationProtocol:
        """The same protocol with this probe in place of its cold start; only where `has_period`."""
        ...

    def accepting_late(self, lateness: Lateness) -> CommunicationProtocol:
        """The same protocol, which mixes what comes late and does not wait for some; only where `has_period`."""
        ...


class BaseProtocol:
    """What most protocols answer: no rounds, no periods, no deadline."""

    accepts_stale = True
    has_rounds = False
    has_period = False
    by_deadline = False
    reports_speed = False
    fills_the_period = False

    @property
    def deadline(self) -> float:
        return math.inf

    def begun(self) -> PeriodBegun | None:
        return None

    def joining(self, back: Sequence[LearnerRecord], now: float) -> dict[LearnerId, Budget]:
        return {}

    def paced(self, pacing: Pacing) -> CommunicationProtocol:
        raise InternalError(f"{type(self).__name__} has no periods")

    def at_least(self, setting: str, floor: Floor) -> CommunicationProtocol:
        raise InternalError(f"{type(self).__name__} has no periods")

    def probing(self, probe: Probing) -> CommunicationProtocol:
        raise InternalError(f"{type(self).__name__} has no cold start")

    def accepting_late(self, lateness: Lateness) -> CommunicationProtocol:
        raise InternalError(f"{type(self).__name__} has no periods")
