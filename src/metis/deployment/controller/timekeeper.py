"""What time brings to a federation: deadlines, leases that end, suspensions, pauses, and the end of waiting for all."""

from __future__ import annotations

import math

from metis.core.events import ControllerAway, DeadlinePassed, LearnerId, LearnerLeft, LearnersExpected
from metis.deployment.controller.clock import CLOCK, TICK, RunClock, read_tick, write_tick
from metis.deployment.controller.sessions import Presence, Sessions
from metis.deployment.controller.settings import DeploymentSettings, Report
from metis.deployment.controller.state import State
from metis.deployment.controller.view import View
from metis.deployment.controller.writer import Writer
from metis.system import monotonic

_LOOK_SECONDS = 0.1  # between two looks at the leases: one at every event takes N^2 in a round of N learners
_LONG_GAP = 5.0  # seconds of suspension that the operator hears of


class Timekeeper:
    """Ticks in the event loop; owns the run's clock."""

    def __init__(
        self,
        state: State,
        seconds: float,
        writer: Writer,
        view: View,
        presence: Presence,
        settings: DeploymentSettings,
        report: Report,
    ) -> None:
        self._path, self._run = state.folder / CLOCK, state.run
        self._writer, self._view, self._presence = writer, view, presence
        self._settings, self._report = settings, report
        ticked, self._away_for = read_tick(self._path, state.run)
        self.clock = RunClock(max(seconds, ticked))
        self._saved_at = self._looked_at = -math.inf
        self._deadline_posted: float | None = None  # the one that the writer knows has passed
        self._waiting_since: float | None = None

    @property
    def due(self) -> float:
        """Seconds until the next deadline; infinite if there is none, or it is being handled."""
        deadline = self._view.standing.deadline
        return math.inf if deadline == self._deadline_posted else deadline - self.clock.now()

    def begin(self) -> None:
        """Learners may have worked on while no controller ran."""
        if self._presence.awaiting and self._away_for:
            self._writer.post(ControllerAway(self._away_for))
            self._away_for = 0.0
            write_tick(self._path, self._run, self.clock.now())

    def tick(self, sessions: Sessions) -> None:
        """Do what is due."""
        self._notice_suspension(sessions)
        self.let_the_clock_go()
        if monotonic() - self._saved_at >= TICK and not self._view.standing.on_hold:
            self._saved_at = monotonic()
            write_tick(self._path, self._run, self.clock.now())
        if monotonic() - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = monotonic()
            self._end_leases(sessions)
        standing = self._view.standing
        if not standing.started:
            self._wait_for_learners(monotonic())
        if self.clock.now() >= standing.deadline != self._deadline_posted and not standing.finished:
            self._deadline_posted = standing.deadline
            self._writer.post(DeadlinePassed(), self._deadline_given_up)

    def _end_leases(self, sessions: Sessions) -> None:
        for learner in self._presence.silent(sessions.open):
            if (session := sessions.open.get(learner)) is not None:
                session.close()
            self._report("warning", f"learner '{learner}' was silent for {self._settings.lease:g} s and has left")
            self.release(learner)

    def _deadline_given_up(self) -> None:
        self._deadline_posted = None

    def applied(self) -> None:
        """An event has had its effect: it may have moved the deadline, and let the clock go."""
        if self._view.standing.deadline != self._deadline_posted:
            self._deadline_posted = None

    def _notice_suspension(self, sessions: Sessions) -> None:
        gap = self.clock.tick()
        if not gap:
            return
        if gap >= _LONG_GAP:
            text = f"this process was suspended for {gap:.0f} s, which does not make any learner late"
            self._report("warning", text)
        self._writer.post(ControllerAway(gap))
        self._presence.shift(gap)
        sessions.shift(gap)

    def let_the_clock_go(self) -> None:
        """Unless nothing was sent yet, somebody is awaited after a restart, or the federation is paused."""
        if self._view.standing.on_hold:
            self.clock.hold()
        elif self._view.standing.started and not self._presence.awaiting:
            self.clock.go()

    def held_for(self) -> float:
        """In the writer, in a pause: seconds for which the clock has stood still and that are not journaled yet."""
        seconds = self.clock.held_for()
        if seconds:  # else no tick is saved in a pause: a restart takes all since the last one for time away
            write_tick(self._path, self._run, self.clock.now())
        return seconds

    def _wait_for_learners(self, moment: float) -> None:
        """Begin with fewer learners than expected when waiting has lasted long enough."""
        joined = len(self._presence)
        if self._waiting_since is None and joined:
            self._waiting_since = moment
        waited = 0.0 if self._waiting_since is None else moment - self._waiting_since
        if waited >= self._settings.wait_seconds and joined >= self._settings.minimum:
            self._report("info", f"beginning with {joined} of {self._settings.expected} learners")
            self._waiting_since = math.inf

            def wait_again() -> None:
                self._waiting_since = moment

            self._writer.post(LearnersExpected(joined), wait_again)

    def release(self, learner: LearnerId) -> None:
        """The learner has left; if that cannot be journaled now, it leaves after another lease."""
        del self._presence.heard[learner]
        self._writer.post(LearnerLeft(learner), lambda: self._presence.heard.setdefault(learner, monotonic()))
