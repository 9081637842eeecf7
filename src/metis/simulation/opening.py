"""How long it takes, in virtual time, until the members of a closed round have opened its sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
        """Members of a closed round vote for its sum, then answer with their shares; t of them are needed for both.

        Before that, those of a window that have nothing new hand in their latest model again.
        """
        closed, secure = self.controller.closed, self.controller.secure
        if closed is None or secure is None or self._opening is not None:
            return
        sizes = MessageBytes.of(closed.members, len(closed.learners))
        links = [
            self._link_of(record.learner)
            for record in self.controller.roster.available
            if record.learner in secure.values
        ]
        needed = threshold(closed.members)
        if len(links) < needed:
            return  # until enough of them are back
        votes = sorted(link.download_time(sizes.statement) + link.upload_time(sizes.vote) for link in links)
        answers = sorted(link.download_time(sizes.request) + link.upload_time(sizes.answer) for link in links)
        again = [self._link_of(learner).upload_time(self._update_bytes) for learner in secure.resent]
        self._opening = Opening(closed.version)
        self._push(self.now + max(again, default=0.0) + votes[needed - 1] + answers[needed - 1], self._opening)
