"""Which conditions an operator is notified of: sites that stay away, the quorum, the disk, certificates that end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from datetime import datetime, timedelta

from metis.core.events import LearnerId
from metis.deployment.controller.notify import Notifier
from metis.deployment.controller.space import DiskSpace
from metis.deployment.controller.writer import Standing
from metis.deployment.security.identity import moment, now_utc, span
from metis.system import monotonic
from metis.text import about

Certificates = Callable[[], Iterable[tuple[str, datetime]]]  # whose, and when each ends
_SOON = timedelta(days=14)
_CERTIFICATES_SECONDS = 3600.0  # between two looks at the certificates


class Alerts:
    """Looks at everything once a second; the notifier sees to it that each condition is notified once."""

    def __init__(
        self,
        notifier: Notifier,
        disk: DiskSpace,
        *,
        away_after: float,
        minimum: int,
        certificates: Certificates = tuple,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._notifier, self._disk, self._clock = notifier, disk, clock
        self._away_after, self._minimum, self._certificates = away_after, minimum, certificates
        self._seen: dict[LearnerId, float] = {}
        self._next_certificates = 0.0
        self._connected: set[LearnerId] = set()

    def look(self, standing: Standing, members: Iterable[LearnerId], connected: Collection[LearnerId]) -> None:
        if not standing.finished:
            self._away(members, connected)
            self._quorum(standing)
        self._room()
        if self._clock() >= self._next_certificates or not self._connected >= set(connected):
            self._next_certificates = self._clock() + _CERTIFICATES_SECONDS
            self._ending()
        self._connected = set(connected)

    def _away(self, members: Iterable[LearnerId], connected: Collection[LearnerId]) -> None:
        now = self._clock()
        for learner in members:
            if learner in connected:
                self._seen[learner] = now
                if self._notifier.over("away", learner):
                    self._notifier.notify("back", f"learner '{learner}' is back", learner=learner)
            elif (absent := now - self._seen.setdefault(learner, now)) >= self._away_after:
                text = f"learner '{learner}' is away for {about(absent)}"
                self._notifier.began("away", learner, text, learner=learner, seconds=round(absent))

    def _quorum(self, standing: Standing) -> None:
        facts = {"learners": standing.available, "minimum": self._minimum}
        there = f"{standing.available} of at least {self._minimum} learners are there"
        if standing.started and standing.available < self._minimum:
            self._notifier.began("quorum_lost", "", f"the federation waits: {there}", **facts)
        elif self._notifier.over("quorum_lost", ""):
            self._notifier.notify("quorum_regained", f"the federation continues: {there}", **facts)

    def _room(self) -> None:
        disk, notifier = self._disk, self._notifier
        if disk.full:
            notifier.began("disk_full", "", disk.sentence, free_bytes=disk.free)
        elif notifier.over("disk_full", ""):
            notifier.notify("disk_free", "the disk has room again: the federation continues", free_bytes=disk.free)
        if disk.nearly_full and not disk.full:
            notifier.began("disk_nearly_full", "", disk.sentence, free_bytes=disk.free)
        elif not disk.nearly_full:
            notifier.over("disk_nearly_full", "")

    def _ending(self) -> None:
        now = now_utc()
        for owner, end in self._certificates():
            if end - now < _SOON:
                text = f"{owner} {'ends in ' + span(end - now) if end > now else 'has ended'}, on {moment(end)}"
                self._notifier.began("certificate", owner, text, owner=owner, ends=end.isoformat())
            else:
                self._notifier.over("certificate", owner)
