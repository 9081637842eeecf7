"""How long it takes, in virtual time, until the members of a closed round have opened its sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from metis.core.controller import Controller
from metis.core.events import Event, LearnerId, SumOpened
from metis.core.mixing.secure import MessageBytes
from metis.core.secure_sum import threshold
from metis.simulation.link import Link


@dataclass(slots=True)
class Opening:
    """The sum of a closed round, on its way."""

    version: int


class SumOpening(ABC):
    """The part of a simulator that opens the sums of masked rounds, in which nothing is masked."""

    controller: Controller
    now: float
    _update_bytes: int
    _opening: Opening | None = None

    @abstractmethod
    def _handle(self, event: Event) -> None: ...

    @abstractmethod
    def _push(self, at: float, occurrence: object) -> None: ...

    @abstractmethod
    def _link_of(self, learner: LearnerId) -> Link: ...

    def _open_sum(self, opening: Opening) -> None:
        self._opening = None
        if (secure := self.controller.secure) is not None:
            self._handle(SumOpened(opening.version, secure.learners, secure.total()))

    def _agree_on_sum(self) -> None:
        """As soon as enough members of a closed round are there, its sum is on its way."""
        closed = self.controller.closed
        if closed is None or self._opening is not None:
            return
        seconds = seconds_to_open(self.controller, self._link_of, self._update_bytes)
        if seconds is not None:  # otherwise until enough of them are back
            self._opening = Opening(closed.version)
            self._push(self.now + seconds, self._opening)


def seconds_to_open(controller: Controller, link_of: Callable[[LearnerId], Link], update_bytes: int) -> float | None:
    """How long members of a closed round take to vote for its sum and answer with their shares; t must do both.

    Before that, those of a window that have nothing new hand in their latest model again. None while too few are there.
    """
    closed, secure = controller.closed, controller.secure
    assert closed is not None and secure is not None
    sizes = MessageBytes.of(closed.members, len(closed.learners))
    links = [link_of(record.learner) for record in controller.roster.available if record.learner in secure.values]
    needed = threshold(closed.members)
    if len(links) < needed:
        return None
    votes = sorted(link.download_time(sizes.statement) + link.upload_time(sizes.vote) for link in links)
    answers = sorted(link.download_time(sizes.request) + link.upload_time(sizes.answer) for link in links)
    again = [link_of(learner).upload_time(update_bytes) for learner in secure.resent]
    return max(again, default=0.0) + votes[needed - 1] + answers[needed - 1]
