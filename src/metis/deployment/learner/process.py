"""The learner process: dials the controller, passes tasks to its child, and hands in what was trained.

It never trains itself, so its heartbeats continue whatever the site's code does, and it never holds a model in memory.
A trained update stays in the work folder until the controller has acknowledged it, over any number of lost
connections, restarts of the controller and restarts of this process. An update is named by its run and task, so it
may be sent as often as necessary.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc

from metis.deployment.learner import outgoing
from metis.deployment.learner.absence import Absence
from metis.deployment.learner.connection import (
    RETRIED,
    SILENCE_SECONDS,
    Backoff,
    Calls,
    Connection,
    ConnectionLost,
    Endpoint,
    Session,
    detached,
    read,
    reason_of,
)
from metis.deployment.learner.downloads import Downloads, TaskFailed
from metis.deployment.learner.site_log import SiteLog, kind_of
from metis.deployment.learner.site_policy import PolicyFile
from metis.deployment.learner.sums import Sums
from metis.deployment.learner.supervisor import Report, Supervisor
from metis.deployment.learner.tasks import Tasks
from metis.deployment.learner.training import Training
from metis.deployment.learner.uploads import Uploads
from metis.deployment.learner.work import WorkFolder
from metis.deployment.route import Route
from metis.deployment.storage import storage
from metis.deployment.trainer.child import Child
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import Stretch
from metis.deployment.wire.protocol import PROTOCOL
from metis.deployment.wire.transfer import keep_buffers
from metis.errors import ChildDied, ChildFailed, MetisError
from metis.system import monotonic, token_hex, uniform, unix_time

_WELCOME_SECONDS = 60.0
_GRACE_SECONDS = 10.0  # for a spooled update when asked to stop
_FAREWELL_SECONDS = 60.0  # of attempts to fetch the final model in which nothing of it arrives
_STEADY_SECONDS = 5.0  # a connection that lasted this long was a good one
_LARGEST_SKEW = 60.0


_NOTICES = {
    pb.Notice.COMMITTED: ("committed", "{}"),
    pb.Notice.REFUSED: ("refused", "refused: {}"),
    pb.Notice.SET_ASIDE: ("set_aside", "set aside: {}; restart this learner to join again"),
}


class LearnerProcess:
    """One learner, from its start to the end of the federation."""

    def __init__(
        self,
        route: Route,
        *,
        work: Path,
        child: Sequence[str],
        report: Report,
        credentials: Callable[[], grpc.ChannelCredentials] | None = None,
        preflight: Callable[[], Awaitable[None]] | None = None,
        name: str | None = None,
        site: Path | None = None,
        device: str | None = None,
        pace: float | None = None,
        out: Path | None = None,
        policy: PolicyFile | None = None,
        authority: str | None = None,
        software: str = "metis",
        kit: Path | None = None,
        ckks_key: Path | None = None,
        silence: float = SILENCE_SECONDS,
        stretch_seconds: float = 2.0,
    ) -> None:
        """Without `credentials` it speaks plain text under this `name`.

        `preflight` is called before each dial: an OSError from it means that dialling is worth another attempt, a
        MetisError that it is not. `out` is where the final model goes, by default the work folder. `authority` is the
        fingerprint of the site's CA, which its policy may name. A connection on which nothing arrives for `silence`
        seconds is dead; models travel in stretches of `stretch_seconds`.
        """
        self._endpoint = Endpoint(route, credentials, preflight, name)
        self._out, self._software, self._silence = out or work, software, silence
        self._instance = token_hex(16)
        self._supervisor = Supervisor(report)
        self.work = WorkFolder(work)
        self._policy = policy or PolicyFile()
        self.child = Child(child)
        self.connection = Connection()
        self.downloads = Downloads(self._supervisor, self.connection, self.work, Stretch(stretch_seconds))
        self._log = SiteLog(work, self._supervisor.report)
        self._absence = Absence(self._supervisor, self.connection, self._policy, self._log, route.where, authority)
        self.uploads = Uploads(self._supervisor, self.connection, self.work, self._log, Stretch(stretch_seconds))
        self.training = Training(
            self._supervisor,
            self.connection,
            self.work,
            self.child,
            self._log,
            site=site,
            device=device,
            pace=pace,
            policy=self._policy,
            ckks_key=ckks_key,
        )
        self._sums = Sums(self._supervisor, self.connection, self.work, self._policy, kit, self._log, self.uploads.look)
        self._tasks = Tasks(
            self._supervisor, self.connection, self.work, self.downloads, self.training, self.uploads, self._log,
            self._policy, self._step_back, self._sums,
        )  # fmt: skip
        self._getting_ready: asyncio.Task[None] | None = None
        self._set_aside = False
        self._stopping = False
        self._skew_reported = False

    # --- from start to end ------------------------------------------------------------------------

    async def run(self) -> int:
        """Take part until the federation ends, the controller refuses, or a signal; returns the exit code."""
        loop = asyncio.get_running_loop()
        keep_buffers()
        self._supervisor.begin()
        with self.work:
            self.work.tidy()
            self._sums.erase(only_old=True)
            self.uploads.look()
            for number in (signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # not in the main thread
                    loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
            self._supervisor.start(self._keep_attending())
            self._supervisor.start(self.uploads.keep_handing_in())
            self._supervisor.start(self._absence.keep_hours(self._tasks.refuse))
            try:
                return await self._supervisor.exit_code()
            finally:
                await self._supervisor.close()
                self.child.kill()
                await self.child.close()
                for number in (signal.SIGTERM, signal.SIGINT):
                    with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                        loop.remove_signal_handler(number)

    def stop(self, cause: str = "stopped") -> None:
        """As by a signal: hand in what is trained, say goodbye, end; the second time at once."""
        if self._stopping:
            os._exit(130)
        self._stopping = True
        self._supervisor.start(self._leave(cause))

    async def _leave(self, cause: str) -> None:
        self._tasks.cancel()
        if self._getting_ready is not None:
            self._getting_ready.cancel()
        self.child.kill()
        if self.work.updates():
            self._report("info", f"{cause}: handing in what is trained; once more to end at once")
            try:
                await asyncio.wait_for(self.uploads.empty.wait(), _GRACE_SECONDS)
            except asyncio.TimeoutError:
                kept = ", ".join(str(update.task) for update in self.work.updates())
                self._report("warning", f"the update of task {kept} stays in {self.work.folder} and is handed in later")
        await self.connection.leave(pb.Cause(kind=pb.Cause.STOPPED))
        self._end(0, "info", f"{cause}: the learner has left the federation")

    def _report(self, kind: str, text: str) -> None:
        self._supervisor.report(kind, text)

    def _end(self, code: int, kind: str, text: str) -> None:
        self._supervisor.end(code, kind, text)

    def doing(self) -> tuple[str, float]:
        """What it does at this moment, in a few words, and the share of its task that is done."""
        task, steps = self._tasks.current, self._tasks.steps
        if task is not None:
            of = f" of {task.steps}" if task.HasField("steps") else ""
            share = min(1.0, steps / task.steps) if task.HasField("steps") and task.steps else 0.0
            return f"task {task.number}: {steps}{of} batches from community model {task.version}", share
        if self.uploads.task is not None:
            return f"task {self.uploads.task}: handing in", 1.0
        return ("not connected" if self.connection.session is None else "waiting for a task"), 0.0

    def _progress(self) -> tuple[int | None, int]:
        """The task that is being trained, or else waits to be handed in, and the steps done in it."""
        task = self._tasks.current
        return self.uploads.task if task is None else task.number, self._tasks.steps

    # --- the stream -------------------------------------------------------------------------------

    async def _keep_attending(self) -> None:
        backoff, target = Backoff(), self._endpoint.target
        while not (self._supervisor.ended or self.connection.leaving):
            if self._absence.away:
                self._set_aside = False  # it joins again
            if not await self._absence.end():
                return
            began, wait = monotonic(), None
            try:
                wait = await detached(self._attend())
            except MetisError as problem:  # of the preflight
                self._end(2, "error", str(problem))
                return
            except grpc.aio.AioRpcError as problem:
                if problem.code() not in RETRIED:
                    self._end(2, "error", f"the controller refuses: {reason_of(problem)}")
                    return
                self._supervisor.retrying(f"no connection to {target}: {reason_of(problem)}")
            except asyncio.TimeoutError:
                self._supervisor.retrying(f"{target} does not answer")
            except (OSError, ConnectionLost) as problem:
                self._supervisor.retrying(str(problem))
            if monotonic() - began >= min(_STEADY_SECONDS, self.connection.heartbeat):
                backoff.reset()
            await asyncio.sleep(backoff.next(self.connection.heartbeat) if wait is None else wait * uniform(1.0, 1.5))

    async def _attend(self) -> float | None:
        """One stream, to its end; how long to stay away if the controller asked for it."""
        target = self._endpoint.target
        async with await self._endpoint.dial() as channel:
            calls = self._endpoint.calls(channel)
            stream = calls.attend()
            hello = pb.Hello(
                protocol=PROTOCOL,
                software=self._software,
                instance=self._instance,
                run=self.work.run,
                task=self._progress()[0],
                unix_time=unix_time(),
            )
            with contextlib.suppress(asyncio.InvalidStateError):  # already ended: reading shows why
                await asyncio.wait_for(stream.write(pb.FromLearner(hello=hello)), _WELCOME_SECONDS)
            first = await asyncio.wait_for(read(stream), _WELCOME_SECONDS)
            if first is None:
                return None
            if first.HasField("farewell"):
                return await self._part(first.farewell, calls)
            if not first.HasField("welcome"):
                self._end(2, "error", f"what answers at {target} does not greet as a controller of Metis does")
                return None
            session = Session(calls, stream, first.welcome)
            writing = asyncio.ensure_future(session.keep_writing())
            beating = asyncio.ensure_future(session.keep_beating(self._progress))
            watching = asyncio.ensure_future(self._watch(session))
            try:
                await self._meet(session)
                while (message := await read(stream)) is not None:
                    session.heard()
                    if message.HasField("farewell"):
                        self.connection.lose(session)
                        watching.cancel()  # nothing more arrives here
                        return await self._part(message.farewell, calls)
                    self._hear(message)
                if not (self._supervisor.ended or self.connection.leaving or self._absence.away):
                    self._supervisor.retrying(f"the controller at {target} ended the connection")
                return None
            finally:
                self.connection.lose(session)
                for task in (writing, beating, watching):
                    task.cancel()
                await asyncio.gather(writing, beating, watching, return_exceptions=True)

    def _step_back(self, cause: pb.Cause, seconds: float | None = None) -> None:
        """Leave, and come back when the hours begin, the policy changes, or after a while."""
        self._absence.begin(cause, seconds)
        self._supervisor.start(self._leave_for_a_while())

    async def _leave_for_a_while(self) -> None:
        if self._getting_ready is not None:
            self._getting_ready.cancel()
        await self._tasks.abandon()
        session = self.connection.session
        while session is not None and session is self.connection.session and self.work.updates():
            await asyncio.sleep(0.2)  # handing in is not training
        if session is self.connection.session:
            await self.connection.leave(self._absence.cause, for_good=False)

    async def _watch(self, session: Session) -> None:
        await session.watch(self._silence)
        self._supervisor.retrying(f"nothing arrives from {self._endpoint.target} any more")
        session.cut()

    async def _meet(self, session: Session) -> None:
        """After the Welcome: the same run continues, another one begins."""
        welcome = session.welcome
        if await self._absence.keeps_out_of(session):
            return
        skew = unix_time() - welcome.unix_time
        if abs(skew) > _LARGEST_SKEW and not self._skew_reported:
            self._skew_reported = True
            self._report("warning", f"the clock of this machine is off by {skew:+.0f} s from the controller's")
        if (welcome.run, welcome.learner) != (self.work.run, self.work.learner):
            for update in self.work.updates():
                belongs = f"it belongs to run {update.run or 'unknown'}"
                self._report("warning", f"the update of task {update.task} is dropped: {belongs}")
            await self._tasks.abandon()
        try:
            self.work.begin(welcome.run, welcome.learner, welcome.layout)
        except OSError as problem:
            self._end(1, "error", f"the work folder {self.work.folder} cannot be written: {problem.strerror}")
            return
        self.uploads.look()
        self._supervisor.recovered()
        where = self._endpoint.target
        self._report("connected", f"connected to {where} as '{welcome.learner}', run {welcome.run}")
        self.connection.open(session)
        if self._absence.away:  # since it dialled; there was nobody to say goodbye to
            self._supervisor.start(self._leave_for_a_while())
        elif not (self._set_aside or self._stopping):
            if self._getting_ready is not None:
                self._getting_ready.cancel()
            self._getting_ready = self._supervisor.start(self._get_ready(session))

    async def _get_ready(self, session: Session) -> None:
        try:
            facts = await self.training.prepare(session.welcome)
        except ChildFailed as problem:
            text = f"this learner cannot take part: {problem}"
            await self.connection.leave(self._log.keep(kind_of(problem), text, problem.details))
            self._end(2, "error", text)
            return
        if facts is None:
            return
        policy, refusal = self._policy.ask()
        if refusal is not None:
            self._tasks.refuse(refusal)
            return
        session.send(ready=outgoing.ready(facts, policy))
        self._tasks.send_unsent(session)

    def _hear(self, message: pb.ToLearner) -> None:
        match message.WhichOneof("message"):
            case "task":
                if not (self._stopping or self._absence.away):
                    self._tasks.take(message.task)
            case "evaluate":
                self._tasks.measure(message.evaluate)
            case "notice":
                self._show(message.notice)
            case "secure":
                self._sums.hear(message.secure)
            case _:
                pass  # a pulse, or of a later version; what must be understood comes with a new protocol number

    def _show(self, notice: pb.Notice) -> None:
        self._set_aside |= notice.kind == pb.Notice.SET_ASIDE
        kind, text = _NOTICES.get(notice.kind, ("info", "{}"))
        self._report(kind, text.format(notice.text))

    # --- farewell ---------------------------------------------------------------------------------

    async def _part(self, farewell: pb.Farewell, calls: Calls) -> float | None:
        """The controller ended the stream; how long to stay away."""
        match farewell.kind:
            case pb.Farewell.FINISHED:
                await self._tasks.abandon()
                self._sums.erase()
                await self._finish(farewell, calls)
            case pb.Farewell.REFUSED:
                self._end(2, "error", f"the controller refuses this learner: {farewell.reason}")
            case _:
                again = f"; back in {farewell.retry_seconds:.0f} s" if farewell.retry_seconds else ""
                self._report("info", f"the controller says goodbye for a while: {farewell.reason}{again}")
        return float(farewell.retry_seconds) or None

    async def _finish(self, farewell: pb.Farewell, calls: Calls) -> None:
        """Fetch the final community model, then end."""
        ended = f"the federation has ended: {farewell.reason}"
        if not (farewell.sha256 and self.work.run and self.work.layout):
            self._end(0, "finished", f"{ended}; this learner took no part in it and has no model of it")
            return
        _, refusal = self._policy.ask(lambda rules: rules.refuses_download(farewell.bytes))
        if refusal is not None:
            self._end(0, "finished", f"{ended}; its community model is not fetched: {refusal.text}")
            return
        until, backoff, received = monotonic() + _FAREWELL_SECONDS, Backoff(), 0
        target = self._out / "community.safetensors"
        problem = "the controller did not send it"
        while monotonic() < until:
            try:
                if await detached(self.downloads.obtain(calls, farewell.sha256, farewell.bytes)):
                    await self.training.save(self.work.model_file(farewell.sha256), target, farewell.version)
                    self.work.forget_models(set())
                    self._end(
                        0, "finished", f"{ended}; community model {farewell.version} is in {storage().named(target)}"
                    )
                    return
                problem = "its bytes are not those that were announced"
            except grpc.aio.AioRpcError as refused:
                problem = reason_of(refused)
                if refused.code() not in RETRIED:
                    break
            except (ChildFailed, ChildDied, TaskFailed) as failed:
                problem = str(failed)
                break
            except (asyncio.TimeoutError, ConnectionLost):
                problem = "the connection was lost"
            if self.downloads.received > received:  # a slow line is not a reason to give up
                until, received = monotonic() + _FAREWELL_SECONDS, self.downloads.received
            await asyncio.sleep(backoff.next())
        self._end(1, "error", f"{ended}; but its community model could not be fetched: {problem}")
