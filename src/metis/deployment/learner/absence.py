"""Staying away from the federation while the site policy, or a full disk, does not let a learner take part."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from metis.deployment.learner.connection import Connection, Session
from metis.deployment.learner.site_log import SiteLog
from metis.deployment.learner.site_policy import PolicyFile, Refusal, SitePolicy, at_this_hour
from metis.deployment.learner.supervisor import Supervisor
from metis.deployment.wire import wire_pb2 as pb
from metis.system import monotonic

_GRACE_SECONDS = 10.0  # for a goodbye


class Absence:
    """Whether the learner is away, and until when: the hours begin, the policy changes, or some time has passed."""

    look_seconds = 5.0  # between two looks at the clock and at the policy
    away_seconds = 300.0  # after which a learner whose policy refused something comes back
    room_seconds = 30.0  # after which one that could not write to its disk does

    def __init__(
        self,
        supervisor: Supervisor,
        connection: Connection,
        policy: PolicyFile,
        log: SiteLog,
        target: str,
        authority: str | None,
    ) -> None:
        self._supervisor, self._connection, self._policy, self._log = supervisor, connection, policy, log
        self._target, self._authority = target, authority
        self._until: tuple[float, SitePolicy] | None = None  # when to come back, and the policy that is in the way
        self.cause = pb.Cause()  # that the controller is given

    @property
    def away(self) -> bool:
        return self._until is not None

    def begin(self, cause: pb.Cause, seconds: float | None = None) -> None:
        self.cause = cause
        until = monotonic() + (self.away_seconds if seconds is None else seconds)
        self._until = (until, self._policy.ask()[0])

    async def end(self) -> bool:
        """Wait until the site policy lets the learner dial; False if it never will."""
        shown = ""
        while True:
            policy, refusal = self._policy.ask(lambda rules: rules.refuses_controller(self._target), at_this_hour)
            if refusal is not None and refusal.rule == pb.Cause.CONTROLLER:
                self._supervisor.end(2, "error", f"this learner does not dial: {refusal.text}")
                return False
            waits = self._until is not None and monotonic() < self._until[0] and policy == self._until[1]
            if refusal is None and not waits:
                self._until = None
                return True
            if refusal is not None and refusal.text != shown:
                shown = refusal.text
                self._supervisor.report("info", f"staying away: {refusal.text}")
            await asyncio.sleep(self.look_seconds)

    async def keep_hours(self, refuse: Callable[[Refusal], None]) -> None:
        """Call `refuse` when the hours of the site are over."""
        while True:
            await asyncio.sleep(self.look_seconds)
            _, refusal = self._policy.ask(at_this_hour)
            if refusal and refusal.rule == pb.Cause.HOURS and self._connection.session and not self.away:
                refuse(refusal)

    async def keeps_out_of(self, session: Session) -> bool:
        """Whether this federation is not for this site; then it leaves, and nothing but the rule is sent."""
        run, members = session.welcome.run, session.welcome.members
        _, refusal = self._policy.ask(lambda rules: rules.refuses_federation(run, self._authority, members))
        if refusal is None:
            return False
        cause = self._log.failed(pb.Cause.SITE_POLICY, f"not taking part: {refusal.text}", rule=refusal.rule)
        self.begin(cause)
        session.send(leaving=pb.Leaving(cause=cause))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(session.finish(), _GRACE_SECONDS)
        if refusal.rule == pb.Cause.FEDERATION:  # waiting would not change it
            self._supervisor.end(2, "error", f"this learner does not take part: {refusal.text}")
        return True
