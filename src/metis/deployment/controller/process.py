"""The controller process: the wall clock around the durable controller, from the first learner to the final model.

Two threads matter. The event loop talks to learners and never waits for a disk. The writer, one thread, journals and
applies events in the order of their arrival; an update is acknowledged when it is durable, before anything is mixed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc

from metis.core.events import (
    Action,
    CommunityPublished,
    LearnerId,
    LearnerSetAside,
    SendTask,
    SpeedChanged,
    StopRequested,
    StopRuleChanged,
    UpdateCommitted,
    UpdateRefused,
)
from metis.core.stop import StopRule
from metis.deployment.controller.administration import KEPT_LINES, Administration, rule_in_words
from metis.deployment.controller.alerts import Certificates
from metis.deployment.controller.audit import AUDIT, AuditLog
from metis.deployment.controller.callers import Administrators
from metis.deployment.controller.clock import TICK
from metis.deployment.controller.document import CoreStatus, core_status, status_document
from metis.deployment.controller.evaluation import Evaluations
from metis.deployment.controller.masked import MaskedService
from metis.deployment.controller.members import Members
from metis.deployment.controller.requests import LearnerRequests
from metis.deployment.controller.results import save_results
from metis.deployment.controller.service import Service
from metis.deployment.controller.session import ChangeLimit, Context, Refused, Session
from metis.deployment.controller.sessions import Presence, Sessions
from metis.deployment.controller.settings import Evaluator, FederationPlan, Report
from metis.deployment.controller.state import State
from metis.deployment.controller.steps import StepGuard
from metis.deployment.controller.surroundings import Surroundings
from metis.deployment.controller.timekeeper import Timekeeper
from metis.deployment.controller.view import View
from metis.deployment.controller.writer import Outcome, Recovered, Writer
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.causes import sentence
from metis.deployment.wire.chunks import read_part
from metis.deployment.wire.protocol import SERVER_OPTIONS, administration_handler, network, service_handler
from metis.deployment.wire.transfer import keep_buffers
from metis.errors import ConfigError
from metis.privacy.keys import Peers
from metis.runs.folds import RunFold
from metis.runs.trace import EVENTS
from metis.system import monotonic, unix_time

_FULL_DISK_SECONDS = 1.0  # that the writer has to answer while the disk is full
_UPLOADS_SECONDS = 10.0  # that updates have to become durable when the process is asked to stop


class ControllerProcess(MaskedService):
    """One federation; `serve` may be called once."""

    def __init__(
        self,
        plan: FederationPlan,
        state: State,
        folder: Path,
        *,
        evaluator: Evaluator | None,
        identify: Callable[[Context], LearnerId],
        report: Report,
        watch: Callable[[RunFold], None] | None = None,
        certificates: Certificates = tuple,
        administrators: Administrators | None = None,  # None: nobody can administer it remotely
        peers: Peers | None = None,  # whose signatures masked rounds count
    ) -> None:
        self.plan, self.state, self.folder = plan, state, folder
        self.recent: deque[tuple[float, str, str]] = deque(maxlen=KEPT_LINES)
        report = _keeping(self.recent, report)
        self.run, self.layout = state.run, plan.initial_model.layout
        self._settings, self._report, self._watch = plan.deployment, report, watch
        folder.mkdir(parents=True, exist_ok=True)
        plan.setting.save(folder)
        self._writer = Writer(state, folder / EVENTS)
        recovered = self._writer.recover(plan)
        self._view = View(plan.setting, recovered)
        self._began_with = _rule_of_file(recovered) or plan.began_with
        present = [learner for learner, is_present in recovered.learners.items() if is_present]
        joined = [learner for learner in recovered.learners if recovered.member_changes.get(learner) is not False]
        self._presence = Presence(present, joined, recovered.standing.started, self._settings.lease)
        self._time = Timekeeper(
            state, recovered.seconds, self._writer, self._view, self._presence, self._settings, report
        )  # fmt: skip
        self._clock = self._time.clock
        self._members = Members(plan.members, recovered.member_changes, recovered.learners)
        self._evaluations = Evaluations(
            evaluator, self._settings, self._writer, self._view, report, lambda: self._sessions, self._spawn
        )
        self._sessions = Sessions(
            plan, state.run, state.epoch, self._view, self._presence, self._members, self._clock.now, report,
            self._evaluations.asked,
        )  # fmt: skip
        # Of a masked or encrypted update nobody knows how far it goes.
        guard = StepGuard(
            "off" if plan.secure_sum or plan.encrypted else self._settings.step_guard,
            self._settings.step_limit,
            state,
            self.layout,
        )
        self._requests = LearnerRequests(
            self._writer, self._view, state, self.layout, guard, self._members, report, self._time.held_for
        )  # fmt: skip
        self._make_sums(plan, state, peers, report, recovered.masked)
        self._surroundings = Surroundings(plan, state, report, certificates)
        self.notify = self._requests.notify = self._surroundings.notifier.notify
        self._audit = AuditLog(state.folder / AUDIT)
        self._service = Service(
            state,
            self.layout,
            plan.wire,
            self._sessions,
            self._hear,
            self._requests,
            identify,
            largest_number=self._settings.largest_number,
            refused=self._surroundings.refused_calls.add,
            disk_full=self._surroundings.disk_full,
            audit=self._audit,
            unread=self._sums or plan.encrypted,
        )
        self._sessions.model_sent = self._service.model_sent
        self._administration = None if administrators is None else Administration(
            self, plan, state, folder, self._writer, self._view, self._members, self._time, self._audit,
            administrators, self._service.refuse, report,
        )  # fmt: skip
        self._latest_core: tuple[CoreStatus, int] | None = None
        self._changes = ChangeLimit()
        self._extended = False  # since the latest end
        self._stop_reason: str | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._stopping, self._woken = asyncio.Event(), asyncio.Event()
        self.failure: BaseException | None = None

    @property
    def finished(self) -> bool:
        return self._view.standing.finished

    # --- the life of the process ----------------------------------------------------------------

    async def serve(self, listen: str, credentials: grpc.ServerCredentials | None) -> bool:
        """Run until the federation has ended (True) or `drain` was called (False)."""
        self._writer.attach(asyncio.get_running_loop(), self._clock.now, self)
        keep_buffers()
        if self.plan.stop not in (None, self._began_with):  # before a learner hears that it has ended
            await self._writer.perform(StopRuleChanged(self.plan.stop))
            self._report("info", f"the file has another [stop]: it ends when {rule_in_words(self.plan.stop)}")
        server = network().server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((service_handler(self._service, read_part),))
        if self._administration is not None:
            server.add_generic_rpc_handlers((administration_handler(self._administration),))
        self.address = _bind(server, listen, credentials)
        await server.start()
        self._report("info", f"listening on {self.address}, run {self.run}, start {self.state.epoch}")
        version = self._view.standing.version
        self._audit.note(
            "controller_started", run=self.run, start=self.state.epoch, address=self.address, version=version
        )
        if self.state.epoch > 1 and not self.finished:
            self._report("info", f"resuming at {self._clock.now():.1f} s of the run with community model {version}")
        if not self._view.fold.history:
            self._evaluations.request(version)
        self._serve_sums()
        try:
            while True:  # a federation that has ended may be extended
                await self._until_the_end()
                if self.failure is not None:
                    self.notify("failed", f"the controller has failed: {self.failure}")
                    raise self.failure
                if not self.finished:
                    await self._drain()
                    return False
                await self._end()
                if self._administration is not None:
                    await self._administration.settle()  # one of its commands may extend it
                if not self._extended:
                    if self._administration is not None:
                        self._administration.ended = True
                    return True
                self._presence.begin_again()
        finally:
            for task in self._background:
                task.cancel()
            await server.stop(grace=2.0)
            if self._administration is not None:
                await self._administration.close()
            await self._surroundings.close()
            self._writer.close()
            failed = None if self.failure is None else type(self.failure).__name__
            self._audit.note("controller_stopped", version=self._view.standing.version, failed=failed)
            self._audit.close()

    def drain(self, reason: str) -> None:
        """Stop soon without losing anything: the same command resumes the run."""
        if self._stop_reason is None:
            self._stop_reason = reason
            self._sessions.stopping = self._requests.stopping = True
            self._stopping.set()

    def stop_run(self, reason: str) -> None:
        """End the federation for good, mixing what was committed to the open round."""
        self._writer.post(StopRequested(reason, publish=True))

    async def rollback(self, version: int, after: int | None = None) -> int:
        """Go on from an earlier community model, under a new number, which is returned; a ConfigError says why not."""
        now = await self._writer.rollback(version, after)
        text = f"rolled back: community model {now} is community model {version} again"
        self._report("warning", text)
        self.notify("rollback", text, version=now)
        return now

    async def kept_versions(self) -> list[int]:
        """The community models that `rollback` can lead back to, in ascending order."""
        return await self._writer.ask(lambda: list(self._writer.durable.kept()))

    async def _until_the_end(self) -> None:
        self._time.begin()
        self._spawn(self._surroundings.watch(self._view, self._sessions))
        evaluating = asyncio.create_task(self._evaluations.run())
        try:
            while not (self._stopping.is_set() or self.finished or self.failure):
                self._time.tick(self._sessions)
                self._evaluations.conclude()
                await self._sleep()
        finally:
            evaluating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await evaluating

    async def _sleep(self) -> None:
        """Until the next deadline, or until something has changed it."""
        seconds = min(TICK, max(0.0, self._time.due))
        self._woken.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds + 0.001)

    async def _drain(self) -> None:
        reason = self._stop_reason or "the controller stops"
        self._sessions.dismiss(pb.Farewell(kind=pb.Farewell.RETRY, reason=reason, retry_seconds=2.0))
        end = monotonic() + _UPLOADS_SECONDS
        while self._requests.uploads and monotonic() < end:
            await asyncio.sleep(0.05)
        await self._writer.snapshot()
        self.notify("stopped", f"{reason}; the same command resumes the run")
        self._report("info", "stopped; the same command resumes the run")

    async def _end(self) -> None:
        """Measure the last model, write the results, and let the learners fetch it."""
        self._extended = False
        fold, standing = self._view.fold, self._view.standing
        await self._evaluations.last(standing, self._stopping)
        await self._writer.snapshot()
        self.result = await save_results(self._writer, self._view, self.plan, self.folder)
        ended = f"the federation has ended: {fold.finish_reason}"
        self._report("finished", ended)
        self._surroundings.notifier.began("finished", "", ended, version=standing.version)
        self._audit.note("finished", version=standing.version, sha256=standing.sha256, reason=fold.finish_reason)
        self._sessions.dismiss(self._sessions.farewell())
        end = monotonic() + self._settings.linger
        while not self._extended and monotonic() < end and not (self._stopping.is_set() or self._everybody_gone()):
            await asyncio.sleep(0.1)

    def _everybody_gone(self) -> bool:
        return not (self._sessions.open or self._requests.uploads or self._presence.owed)

    async def status(self) -> dict[str, Any]:
        """The status document; the writer and the event loop both have to answer for it.

        While the disk is full, the writer is busy trying: then the latest answer of its is used.
        """
        asking = asyncio.ensure_future(self._ask_core())
        if self._surroundings.disk.full and self._latest_core is not None:
            await asyncio.wait([asking], timeout=_FULL_DISK_SECONDS)
            if not asking.done():
                asking.cancel()
                return self._document(*self._latest_core)
        self._latest_core = await asking
        return self._document(*self._latest_core)

    async def _ask_core(self) -> tuple[CoreStatus, int]:
        return await self._writer.ask(lambda: (core_status(self._writer.controller), self.state.usage()))

    def _document(self, core: CoreStatus, disk_bytes: int) -> dict[str, Any]:
        return status_document(
            core, self._view, self.plan, self.state, self._sessions.open, self._presence, self._service.refusals,
            now=self._clock.now(), disk_bytes=disk_bytes, disk=self._surroundings.disk.document(),
            stopping=self._stop_reason is not None,
        )  # fmt: skip

    # --- what the writer reports ----------------------------------------------------------------

    def applied(self, outcome: Outcome) -> None:
        self._view.take(outcome)
        entry, event = outcome.entry, outcome.entry.record.get("event")
        if event == "learner_joined":
            self._presence.here(entry.record["learner"])
        elif event == "stop_rule_changed":
            self._extended = True
        elif event in ("member_added", "member_removed"):
            self._change_member(entry.record["learner"], event == "member_added")
        self._time.applied()
        handed_in = entry.update is not None and event != "model_resent"  # which changes nothing before its window ends
        if handed_in and not outcome.actions:  # its learner left, or its task failed, in between
            text = f"late: task {entry.update} was void when its update was mixed; it does not count"
            self._sessions.notify(entry.record["learner"], pb.Notice.REFUSED, text, entry.update)
        self._time.let_the_clock_go()
        for action in sorted(outcome.actions, key=lambda action: isinstance(action, UpdateCommitted)):
            self._perform(action)  # learners wait for tasks, and only read that an update counts
        self._sums_applied(outcome)
        if self._watch is not None:
            self._watch(self._view.fold)
        self._woken.set()

    def _change_member(self, learner: LearnerId, added: bool) -> None:
        self._members.changed(learner, added)
        self._audit.note("member_added" if added else "member_removed", learner=learner)
        if not added:
            self._presence.gone(learner)
            self._sessions.remove(learner)

    def disk_full(self, reason: str) -> None:
        self._surroundings.disk_full(reason)

    def failed(self, problem: BaseException) -> None:
        self.failure = self.failure or problem
        self._woken.set()

    def _perform(self, action: Action) -> None:
        notify = self._sessions.notify
        match action:
            case SendTask():
                self._sessions.offer(action.learner)
            case CommunityPublished():
                self._report(
                    "round",
                    f"community model {action.stamp.version} of {action.contributors} learners, "
                    f"{action.stamp.steps} steps in all",
                )
                self._evaluations.published(action.stamp.version, self._clock.now())
            case UpdateCommitted():
                notify(action.learner, pb.Notice.COMMITTED, f"the update of task {action.task} counts")
            case UpdateRefused():
                self._evaluations.excused(action.learner)
                self._report("warning", f"update of '{action.learner}' refused: {action.reason}")
                notify(action.learner, pb.Notice.REFUSED, action.reason, action.task)
            case LearnerSetAside():
                text = f"learner '{action.learner}' is set aside: {action.reason}"
                self._report("warning", text)
                self.notify("set_aside", text, learner=action.learner)
                notify(action.learner, pb.Notice.SET_ASIDE, action.reason)
            case SpeedChanged():
                text = f"a batch took {action.before:.3g} seconds and now takes {action.now:.3g}"
                self._report("warning", f"learner '{action.learner}' has changed: {text}")
                notify(action.learner, pb.Notice.INFORMATION, text)

    # --- what the learners' streams bring -------------------------------------------------------

    def _hear(self, session: Session, message: pb.FromLearner) -> None:
        if not self._sessions.current(session):
            return
        match message.WhichOneof("message"):
            case "heartbeat":
                session.steps = message.heartbeat.steps
                if session.outbox.empty():  # else the learner hears of us anyway, or does not listen
                    session.send(pulse=pb.Pulse())
                if message.heartbeat.HasField("task"):
                    session.held_task = message.heartbeat.task
            case "ready":
                self._changes.note(session.learner)
                self._sessions.check_ready(session, message.ready)
                session.ready = message.ready
                self._requests.join(session, message.ready, self._resume)
            case "failed":
                self._requests.fail(session, message.failed)
            case "evaluation":
                self._evaluations.reported(session, message.evaluation)
            case "secure":
                self._hear_sums(session.learner, message.secure)
            case "leaving":
                self._changes.note(session.learner)
                self._report("info", f"learner '{session.learner}' leaves: {sentence(message.leaving.cause)}")
                self._presence.owed.discard(session.learner)
                if session.learner in self._presence:
                    self._time.release(session.learner)
            case _:
                raise Refused(
                    grpc.StatusCode.INVALID_ARGUMENT, "a message of a kind that this controller does not know"
                )

    def _resume(self, session: Session) -> None:
        """A learner has reconnected that had not left."""
        self._presence.back(session.learner)
        self._time.let_the_clock_go()
        self._sessions.offer(session.learner)
        self._back_to_sums(session.learner)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _keeping(recent: deque[tuple[float, str, str]], report: Report) -> Report:
    """The report, which also keeps the latest lines for administrators."""

    def keep(kind: str, text: str) -> None:
        recent.append((unix_time(), kind, text))
        report(kind, text)

    return keep


def _rule_of_file(recovered: Recovered) -> StopRule | None:
    """The [stop] that the file had at the latest start which changed it."""
    changes = (item for _, item in reversed(recovered.recorded) if isinstance(item, StopRuleChanged))
    return next((change.rule for change in changes if not change.by), None)


def _bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> str:
    try:
        port = server.add_insecure_port(listen) if credentials is None else server.add_secure_port(listen, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigError(f"cannot listen on {listen}: the port is in use, or this machine does not have that address")
    return f"{listen.rpartition(':')[0]}:{port}"
