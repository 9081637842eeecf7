"""The controller process: the wall clock around the durable controller, from the first learner to the final model.

Two threads matter. The event loop talks to learners and never waits for a disk. The writer, one thread, journals and
applies events in the order of their arrival; an update is acknowledged when it is durable, before anything is mixed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc

from metis.core.events import (
    Action,
    CommunityPublished,
    ControllerAway,
    DeadlinePassed,
    LearnerId,
    LearnerLeft,
    LearnerSetAside,
    LearnersExpected,
    SendTask,
    SpeedChanged,
    StopRequested,
    UpdateCommitted,
    UpdateRefused,
)
from metis.deployment.controller.alerts import Certificates
from metis.deployment.controller.clock import CLOCK, TICK, RunClock, read_tick, write_tick
from metis.deployment.controller.document import CoreStatus, core_status, status_document
from metis.deployment.controller.evaluation import Evaluations
from metis.deployment.controller.requests import LearnerRequests
from metis.deployment.controller.results import save_results
from metis.deployment.controller.service import Service
from metis.deployment.controller.session import Context, Refused, Session
from metis.deployment.controller.sessions import Presence, Sessions
from metis.deployment.controller.settings import Evaluator, FederationPlan, Report
from metis.deployment.controller.state import State
from metis.deployment.controller.steps import StepGuard
from metis.deployment.controller.surroundings import Surroundings
from metis.deployment.controller.view import View
from metis.deployment.controller.writer import Outcome, Writer
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.causes import sentence
from metis.deployment.wire.chunks import read_part
from metis.deployment.wire.protocol import SERVER_OPTIONS, service_handler
from metis.deployment.wire.transfer import keep_buffers
from metis.errors import ConfigError
from metis.runs.folds import RunFold
from metis.runs.trace import EVENTS

_LONG_GAP = 5.0  # seconds of suspension that the operator hears of
_FULL_DISK_SECONDS = 1.0  # that the writer has to answer while the disk is full
_UPLOADS_SECONDS = 10.0  # that updates have to become durable when the process is asked to stop


class ControllerProcess:
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
    ) -> None:
        self.plan, self.state, self.folder = plan, state, folder
        self.run, self.layout = state.run, plan.initial_model.layout
        self._settings, self._report, self._watch = plan.deployment, report, watch
        folder.mkdir(parents=True, exist_ok=True)
        plan.setting.save(folder)
        self._writer = Writer(state, folder / EVENTS)
        recovered = self._writer.recover(plan)
        self._view = View(plan.setting, recovered)
        ticked, self._away_for = read_tick(state.folder / CLOCK, state.run)
        self._clock = RunClock(max(recovered.seconds, ticked))
        present = [learner for learner, is_present in recovered.learners.items() if is_present]
        self._presence = Presence(present, recovered.standing.started, self._settings.lease)
        self._evaluations = Evaluations(
            evaluator, self._settings, self._writer, self._view, report, lambda: self._sessions, self._spawn
        )
        self._sessions = Sessions(
            plan, state.run, state.epoch, self._view, self._presence, recovered.learners, self._clock.now, report,
            self._evaluations.asked,
        )  # fmt: skip
        guard = StepGuard(self._settings.step_guard, self._settings.step_limit, state, self.layout)
        self._requests = LearnerRequests(self._writer, self._view, state, self.layout, guard, report)
        self._surroundings = Surroundings(plan, state, report, certificates)
        self.notify = self._surroundings.notifier.notify
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
        )
        self._latest_core: tuple[CoreStatus, int] | None = None
        self._clock_saved_at = -math.inf
        self._deadline_posted: float | None = None  # the one that the writer knows has passed
        self._waiting_since: float | None = None
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
        server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((service_handler(self._service, read_part),))
        self.address = _bind(server, listen, credentials)
        await server.start()
        self._report("info", f"listening on {self.address}, run {self.run}, start {self.state.epoch}")
        version = self._view.standing.version
        if self.state.epoch > 1 and not self.finished:
            self._report("info", f"resuming at {self._clock.now():.1f} s of the run with community model {version}")
        if not self._view.fold.history:
            self._evaluations.request(version)
        try:
            await self._until_the_end()
            if self.failure is not None:
                self.notify("failed", f"the controller has failed: {self.failure}")
                raise self.failure
            if self.finished:
                await self._end()
                return True
            await self._drain()
            return False
        finally:
            for task in self._background:
                task.cancel()
            await server.stop(grace=2.0)
            await self._surroundings.close()
            self._writer.close()

    def drain(self, reason: str) -> None:
        """Stop soon without losing anything: the same command resumes the run."""
        if self._stop_reason is None:
            self._stop_reason = reason
            self._sessions.stopping = self._requests.stopping = True
            self._stopping.set()

    def stop_run(self, reason: str) -> None:
        """End the federation for good, mixing what was committed to the open round."""
        self._writer.post(StopRequested(reason, publish=True))

    async def rollback(self, version: int) -> int:
        """Go on from an earlier community model, under a new number, which is returned; a ConfigError says why not."""
        now = await self._writer.rollback(version)
        text = f"rolled back: community model {now} is community model {version} again"
        self._report("warning", text)
        self.notify("rollback", text, version=now)
        return now

    async def kept_versions(self) -> list[int]:
        """The community models that `rollback` can lead back to, in ascending order."""
        return await self._writer.ask(lambda: list(self._writer.durable.kept()))

    async def _until_the_end(self) -> None:
        if self._presence.awaiting and self._away_for:
            self._writer.post(ControllerAway(self._away_for))
        self._spawn(self._surroundings.watch(self._view, self._sessions))
        evaluating = asyncio.create_task(self._evaluations.run())
        try:
            while not (self._stopping.is_set() or self.finished or self.failure):
                self._tick()
                await self._sleep()
        finally:
            evaluating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await evaluating

    async def _sleep(self) -> None:
        """Until the next deadline, or until something has changed it."""
        deadline = self._view.standing.deadline
        due = math.inf if deadline == self._deadline_posted else deadline
        seconds = min(TICK, max(0.0, due - self._clock.now()))
        self._woken.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds + 0.001)

    async def _drain(self) -> None:
        reason = self._stop_reason or "the controller stops"
        self._sessions.dismiss(pb.Farewell(kind=pb.Farewell.RETRY, reason=reason, retry_seconds=2.0))
        end = time.monotonic() + _UPLOADS_SECONDS
        while self._requests.uploads and time.monotonic() < end:
            await asyncio.sleep(0.05)
        await self._writer.snapshot()
        self.notify("stopped", f"{reason}; the same command resumes the run")
        self._report("info", "stopped; the same command resumes the run")

    async def _end(self) -> None:
        """Measure the last model, write the results, and let the learners fetch it."""
        fold, standing = self._view.fold, self._view.standing
        await self._evaluations.last(standing, self._stopping)
        await self._writer.snapshot()
        self.result = await save_results(self._writer, self._view, self.plan, self.folder)
        ended = f"the federation has ended: {fold.finish_reason}"
        self._report("finished", ended)
        self._surroundings.notifier.began("finished", "", ended, version=standing.version)
        self._sessions.dismiss(self._sessions.farewell())
        end = time.monotonic() + self._settings.linger
        while time.monotonic() < end and not (self._stopping.is_set() or self._everybody_gone()):
            await asyncio.sleep(0.1)

    def _everybody_gone(self) -> bool:
        return not (self._sessions.open or self._requests.uploads or self._presence.heard)

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

    # --- time -----------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._notice_suspension()
        self._let_the_clock_go()
        if time.monotonic() - self._clock_saved_at >= TICK:
            self._clock_saved_at = time.monotonic()
            write_tick(self.state.folder / CLOCK, self.run, self._clock.now())
        for learner in self._presence.silent(self._sessions.open):
            if (session := self._sessions.open.get(learner)) is not None:
                session.close()
            self._report("warning", f"learner '{learner}' was silent for {self._settings.lease:g} s and has left")
            self._release(learner)
        self._evaluations.conclude()
        standing = self._view.standing
        if not standing.started:
            self._wait_for_learners(time.monotonic())
        if self._clock.now() >= standing.deadline != self._deadline_posted and not standing.finished:
            self._deadline_posted = standing.deadline
            self._writer.post(DeadlinePassed(), self._deadline_given_up)

    def _deadline_given_up(self) -> None:
        self._deadline_posted = None

    def _notice_suspension(self) -> None:
        gap = self._clock.tick()
        if not gap:
            return
        if gap >= _LONG_GAP:
            text = f"this process was suspended for {gap:.0f} s, which does not make any learner late"
            self._report("warning", text)
        self._writer.post(ControllerAway(gap))
        self._presence.shift(gap)
        self._sessions.shift(gap)

    def _let_the_clock_go(self) -> None:
        if self._view.standing.started and not self._presence.awaiting:
            self._clock.go()

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

    def _release(self, learner: LearnerId) -> None:
        """The learner has left; if that cannot be journaled now, it leaves after another lease."""
        del self._presence.heard[learner]
        self._writer.post(LearnerLeft(learner), lambda: self._presence.heard.setdefault(learner, time.monotonic()))

    # --- what the writer reports ----------------------------------------------------------------

    def applied(self, outcome: Outcome) -> None:
        self._view.take(outcome)
        entry, event = outcome.entry, outcome.entry.record.get("event")
        if event == "learner_joined":
            self._presence.here(entry.record["learner"])
        if self._view.standing.deadline != self._deadline_posted:
            self._deadline_posted = None
        if entry.update is not None and not outcome.actions:  # its learner left, or its task failed, in between
            text = f"late: task {entry.update} was void when its update was mixed; it does not count"
            self._sessions.notify(entry.record["learner"], pb.Notice.REFUSED, text, entry.update)
        self._let_the_clock_go()
        for action in outcome.actions:
            self._perform(action)
        if self._watch is not None:
            self._watch(self._view.fold)
        self._woken.set()

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
                self._sessions.check_ready(session, message.ready)
                session.ready = message.ready
                self._requests.join(session, message.ready, self._resume)
            case "failed":
                self._requests.fail(session, message.failed)
            case "evaluation":
                self._evaluations.reported(session, message.evaluation)
            case "leaving":
                self._report("info", f"learner '{session.learner}' leaves: {sentence(message.leaving.cause)}")
                if session.learner in self._presence:
                    self._release(session.learner)
            case _:
                raise Refused(
                    grpc.StatusCode.INVALID_ARGUMENT, "a message of a kind that this controller does not know"
                )

    def _resume(self, session: Session) -> None:
        """A learner has reconnected that had not left."""
        self._presence.back(session.learner)
        self._let_the_clock_go()
        self._sessions.offer(session.learner)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> str:
    try:
        port = server.add_insecure_port(listen) if credentials is None else server.add_secure_port(listen, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigError(f"cannot listen on {listen}: the port is in use, or this machine does not have that address")
    return f"{listen.rpartition(':')[0]}:{port}"
