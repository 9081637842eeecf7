"""The learners' streams: who is connected, who is present, and what is sent to them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import grpc

from metis.core.events import LearnerId
from metis.core.model import Layout
from metis.deployment.controller.members import Members
from metis.deployment.controller.session import Refused, Session
from metis.deployment.controller.settings import FederationPlan, Report
from metis.deployment.controller.view import View
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import CHUNK
from metis.deployment.wire.models import model_bytes
from metis.system import monotonic, unix_time

_CODE = grpc.StatusCode
_MAX_SKEW = 60.0  # seconds between two machines' clocks that nobody is warned of


class Presence:
    """When each learner on the roster was last heard, and for whom the run's clock waits after a restart."""

    def __init__(
        self, present: Collection[LearnerId], joined: Collection[LearnerId], started: bool, lease: float
    ) -> None:
        self._began, self._lease = monotonic(), lease
        self.owed = set(joined)  # who takes part, present or not, and does not have the final model yet
        self.heard = dict.fromkeys(present, self._began)  # after a restart everybody has a whole lease to come back
        # The clock waits for those who were there when the last process ended: they cannot know that it is back.
        self._awaited = set(present) if started else set()

    def __contains__(self, learner: LearnerId) -> bool:
        return learner in self.heard

    def __len__(self) -> int:
        return len(self.heard)

    def here(self, learner: LearnerId) -> None:
        """It has joined, or is still on the roster though it was about to leave."""
        self.heard[learner] = monotonic()
        self.owed.add(learner)

    def back(self, learner: LearnerId) -> None:
        """It has reconnected."""
        self.here(learner)
        self._awaited.discard(learner)

    def gone(self, learner: LearnerId) -> None:
        """It was removed, and takes no part any more."""
        self.heard.pop(learner, None)
        self.owed.discard(learner)

    def served(self, learner: LearnerId) -> None:
        """The federation has ended, and it has the final model."""
        self.owed.discard(learner)

    def begin_again(self) -> None:
        """The federation goes on after its end: everybody who took part has a whole lease to come back."""
        self.heard = dict.fromkeys(self.heard, monotonic())
        self.owed |= self.heard.keys()

    def last_heard(self, learner: LearnerId, session: Session | None) -> float:
        """On the monotonic clock; minus infinity for a learner that is neither present nor connected."""
        return max(self.heard.get(learner, -math.inf), -math.inf if session is None else session.last_heard)

    def silent(self, sessions: Mapping[LearnerId, Session]) -> list[LearnerId]:
        """Whose lease has ended."""
        oldest = monotonic() - self._lease
        return [learner for learner in self.heard if self.last_heard(learner, sessions.get(learner)) < oldest]

    def shift(self, seconds: float) -> None:
        """This process was suspended: nobody could be heard meanwhile."""
        self.heard = {learner: heard + seconds for learner, heard in self.heard.items()}

    @property
    def awaiting(self) -> bool:
        """Whether somebody may still come back whom the clock waits for."""
        self._awaited &= self.heard.keys()
        if monotonic() - self._began > self._lease:
            self._awaited.clear()
        return bool(self._awaited)


class Sessions:
    """One open stream for each connected learner, by name."""

    def __init__(
        self,
        plan: FederationPlan,
        run: str,
        epoch: int,
        view: View,
        presence: Presence,
        members: Members,
        now: Callable[[], float],
        report: Report,
        asked: Callable[[LearnerId], None],  # it was asked to measure a community model too
    ) -> None:
        self._asked = asked
        self._plan, self._run, self._epoch = plan, run, epoch
        self._view, self._presence, self._now, self._report = view, presence, now, report
        self.open: dict[LearnerId, Session] = {}
        self.stopping = False
        self.opening_of: Callable[[int], bytes | None] | None = None  # of masked rounds, by version
        self.model_sent: Callable[[LearnerId, int, str], None] = lambda learner, version, sha256: None
        self._members = members

    @property
    def known(self) -> Collection[LearnerId]:
        """The members of the federation and everybody who has joined."""
        return self._members.known

    @property
    def members(self) -> int:
        """How many belong to the federation; where everybody may join, those who have."""
        return len(self._members.names) or 1

    @property
    def _layout(self) -> Layout:
        return self._plan.initial_model.layout

    # --- coming and going -----------------------------------------------------------------------

    def admit(self, session: Session, hello: pb.Hello) -> None:
        learner, members = session.learner, self._members
        if learner not in members:
            if members.removed(learner):
                raise Refused(_CODE.PERMISSION_DENIED, f"learner '{learner}' was removed from this federation")
            shown = ", ".join(members.names[:10]) + (", ..." if len(members.names) > 10 else "")
            raise Refused(
                _CODE.PERMISSION_DENIED,
                f"learner '{learner}' does not belong to this federation; its learners are {shown}",
            )
        if self.stopping:
            raise Refused(_CODE.UNAVAILABLE, "the controller is stopping; come back in a while")
        if (old := self.open.get(learner)) is not None:
            self._replace(old, session, hello)
        self.open[learner] = session
        session.epoch = self._epoch
        session.held_task = hello.task if hello.HasField("task") and hello.run == self._run else None
        if self._view.standing.finished:
            session.send(farewell=self.farewell())
            return
        skew = hello.unix_time - unix_time() if hello.unix_time else 0.0
        if abs(skew) > _MAX_SKEW:
            self._report("warning", f"the clock of '{learner}' differs by {skew:+.6g} s from this machine's")
        opened = self._view.tasks.get(learner)
        session.send(
            welcome=pb.Welcome(
                run=self._run,
                epoch=self._epoch,
                learner=learner,
                index=self._members.index(learner),
                settings=self._settings(learner),
                layout=json.dumps(self._layout.to_json()),
                unix_time=unix_time(),
                heartbeat_seconds=self._plan.deployment.heartbeat,
                chunk_bytes=CHUNK,
                task=None if opened is None else opened.task.number,
                members=self.members,
                metrics=self._plan.metrics,
            )
        )

    def _settings(self, learner: LearnerId) -> str:
        named, of_added = self._members.of_file, self._plan.settings_of_added
        return (
            self._plan.learner_settings if named is None or learner in named or of_added is None else of_added(learner)
        )

    def _replace(self, old: Session, session: Session, hello: pb.Hello) -> None:
        if old.instance == hello.instance:
            old.close()
            return
        learner = session.learner
        self._report(
            "warning",
            f"a second process with the certificate of '{learner}' came from {session.address}; the one from "
            f"{old.address} is sent away",
        )
        reason = f"another process with the certificate of '{learner}' has connected from {session.address}"
        old.send(farewell=pb.Farewell(kind=pb.Farewell.REFUSED, reason=reason))

    def current(self, session: Session) -> bool:
        """Whether this is the learner's latest stream, which alone speaks for it."""
        return self.open.get(session.learner) is session

    def alive(self, learner: LearnerId) -> None:
        if (session := self.open.get(learner)) is not None:
            session.last_heard = monotonic()

    def part(self, session: Session) -> None:
        learner, heard = session.learner, self._presence.heard
        if not self.current(session):
            return
        del self.open[learner]
        if session.ready is None and learner not in heard:
            self._report("warning", f"'{learner}' disconnected before it was ready; its own output says why")
        if learner in heard:
            heard[learner] = session.last_heard
        if self._view.standing.finished:
            self._presence.served(learner)

    def check_ready(self, session: Session, ready: pb.Ready) -> None:
        """Refuse a learner whose network or numbers do not fit."""
        layout, own = self._layout, self._plan.max_examples.get(session.learner)
        limit, key = (self._plan.deployment.max_examples, "deployment") if own is None else (own, "its [[learners]]")
        if ready.layout != layout.fingerprint:
            raise Refused(
                _CODE.FAILED_PRECONDITION,
                f"the network of '{session.learner}' is a different one: its layout is {ready.layout[:12]}..., that of "
                f"this federation {layout.fingerprint[:12]}... ({layout.size} numbers in {len(layout.tensors)} "
                "tensors)",
            )
        if not (1 <= ready.examples <= limit and 1 <= ready.batch_size <= limit):
            raise Refused(
                _CODE.FAILED_PRECONDITION,
                f"learner '{session.learner}' has {ready.examples} examples in batches of {ready.batch_size}; both "
                f"must be between 1 and {limit} ({key}.max_examples)",
            )
        if ready.evaluation_examples > limit:
            raise Refused(
                _CODE.FAILED_PRECONDITION,
                f"learner '{session.learner}' has {ready.evaluation_examples} examples to evaluate on, and may have at "
                f"most {limit} ({key}.max_examples)",
            )

    def shift(self, seconds: float) -> None:
        """This process was suspended: nobody could be heard meanwhile."""
        for session in self.open.values():
            session.last_heard += seconds

    # --- what is sent ---------------------------------------------------------------------------

    def notify(self, learner: LearnerId, kind: Any, text: str, task: int | None = None) -> None:
        if (session := self.open.get(learner)) is not None:
            session.send(notice=pb.Notice(kind=kind, text=text, task=task))

    def secure(self, learner: LearnerId, message: pb.SecureSum) -> None:
        """Ask a member of a masked round for something."""
        if (session := self.open.get(learner)) is not None:
            session.send(secure=message)

    def remove(self, learner: LearnerId) -> None:
        """It does not belong to the federation any more."""
        if (session := self.open.get(learner)) is not None:
            reason = f"learner '{learner}' was removed from this federation"
            session.send(farewell=pb.Farewell(kind=pb.Farewell.REFUSED, reason=reason))

    def dismiss(self, farewell: pb.Farewell) -> None:
        for session in self.open.values():
            session.send(farewell=farewell)

    def farewell(self) -> pb.Farewell:
        """The end of the federation, and where its last model is."""
        return pb.Farewell(
            kind=pb.Farewell.FINISHED,
            reason=self._view.fold.finish_reason or "the federation has ended",
            version=self._view.standing.version,
            sha256=self._view.standing.sha256,
            bytes=model_bytes(self._layout),
        )

    def last_evaluation(self) -> pb.Evaluate:
        """The request to measure the model with which the federation has ended."""
        standing = self._view.standing
        return pb.Evaluate(version=standing.version, sha256=standing.sha256, bytes=model_bytes(self._layout))

    def offer(self, learner: LearnerId) -> None:
        """Send the learner its open task, with the seconds that are left of it, unless it is working on it."""
        session, opened = self.open.get(learner), self._view.tasks.get(learner)
        if session is None or session.ready is None or opened is None or session.held_task == opened.task.number:
            return
        task = opened.task
        opening = b"" if self.opening_of is None else self.opening_of(task.based_on.version)
        if opening is None:
            return  # a masked round, whose members have not agreed on keys yet
        seconds = task.budget.seconds - max(0.0, self._now() - opened.sent_at)
        session.held_task, session.steps = task.number, 0
        evaluate = self._plan.deployment.evaluate_at_learners and session.evaluates
        if evaluate:
            self._asked(learner)
        session.send(
            task=pb.Task(
                number=task.number,
                epoch=self._epoch,
                version=task.based_on.version,
                version_steps=task.based_on.steps,
                steps=task.budget.steps,
                seconds=max(0.0, seconds) if math.isfinite(seconds) else None,
                rate=None if task.rate == 1 else task.rate,
                batches_per_step=None if task.budget.batches_per_step == 1 else task.budget.batches_per_step,
                sha256=opened.sha256,
                bytes=model_bytes(self._layout),
                seal=opened.model_mac,
                evaluate=evaluate,
                opening=opening,
                window=self.opening_of is not None and not opening,
                model=opened.model,
            )
        )
        if opened.model:
            self.model_sent(learner, task.based_on.version, opened.sha256)
