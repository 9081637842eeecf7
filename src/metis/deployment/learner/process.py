"""The learner process: dials the controller, hands tasks to its child, and hands in what was trained.

It never trains itself, so that its heartbeats come whatever the site's code does, and never holds a model in memory.
A trained update stays in the work folder until the controller has acknowledged it, over any number of lost
connections, restarts of the controller and restarts of this process. An update is named by its run and task, so it
may be sent as often as it takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import signal
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc

from metis.deployment.learner.work import Update, WorkFolder, file_sha256, update_of
from metis.deployment.trainer.child import Abandoned, Child, ChildDied, ChildFailed
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.protocol import (
    CHANNEL_OPTIONS,
    CHUNK,
    PROTOCOL,
    TURN,
    ChunkSize,
    FederationStub,
    Piece,
    keep_buffers,
)
from metis.deployment.wire.transfer import Bytes, IdleTimeout, Intake, beside, read_ahead
from metis.errors import MetisError
from metis.text import size

Report = Callable[[str, str], None]  # kind and text
_T = TypeVar("_T")

# The channel is made anew for each dial, so gRPC need not remember how the last ones went.
_OPTIONS: list[tuple[str, Any]] = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]

_WELCOME_SECONDS = 60.0
_PROGRESS_SECONDS = 120.0  # a transfer may take for ever as long as something moves
_MOST_AHEAD = 3 * CHUNK  # bytes of a model that were received and are not worked on yet
_RECEIPT_SECONDS = 600.0  # the controller makes several gigabytes durable
_GRACE_SECONDS = 10.0  # for a spooled update when asked to stop, for an abandoned training to end
_FAREWELL_SECONDS = 60.0  # of trying to fetch the final model
_STEADY_SECONDS = 5.0  # a connection that lasted so long was a good one
_QUIET_SECONDS = 60.0  # between two lines about the same trouble
_MOST_DEATHS = 3
_MOST_MISMATCHES = 3
_LARGEST_SKEW = 60.0

_CODE = grpc.StatusCode
_AGAIN = {
    _CODE.UNAVAILABLE,
    _CODE.DEADLINE_EXCEEDED,
    _CODE.RESOURCE_EXHAUSTED,
    _CODE.ABORTED,
    _CODE.INTERNAL,
    _CODE.UNKNOWN,
    _CODE.CANCELLED,
}
_NOT_ALLOWED = {_CODE.PERMISSION_DENIED, _CODE.UNAUTHENTICATED, _CODE.FAILED_PRECONDITION}


class _TaskFailed(Exception):
    """The task in hand ends without a model."""


class _Cut(Exception):
    """A call ended because its channel was closed; whoever waits for it goes on."""

    def __init__(self) -> None:
        super().__init__("the connection was closed")


async def _own(work: Coroutine[Any, Any, _T]) -> _T:
    """Await calls of gRPC: when their channel closes they raise CancelledError, as if this task were cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    if task.cancelled():
        raise _Cut
    return task.result()


class _Backoff:
    """How long to wait before the next attempt: 0.2 s, doubling to 15 s, and a part of it at random."""

    shortest, longest = 0.2, 15.0

    def __init__(self) -> None:
        self._seconds = self.shortest

    def next(self) -> float:
        seconds, self._seconds = self._seconds, min(self.longest, 2 * self._seconds)
        return seconds * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._seconds = self.shortest


class _Session:
    """One stream to the controller, from its Welcome on."""

    def __init__(self, stub: FederationStub, call: Any, welcome: pb.Welcome, metadata: Any) -> None:
        self.stub, self.welcome, self.metadata = stub, welcome, metadata
        self._call = call
        self._outbox: asyncio.Queue[pb.FromLearner] = asyncio.Queue()

    @property
    def chunk_bytes(self) -> int:
        return max(4, min(self.welcome.chunk_bytes or CHUNK, CHUNK) & ~3)

    def send(self, **message: Any) -> None:
        self._outbox.put_nowait(pb.FromLearner(**message))

    async def keep_writing(self) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await self._call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader learns why
            finally:
                self._outbox.task_done()

    async def keep_beating(self, task: Callable[[], tuple[int | None, int]]) -> None:
        """Signs of life; if nothing can be written, not one more is queued."""
        seconds = min(60.0, max(0.05, self.welcome.heartbeat_seconds or 5.0))
        while True:
            if self._outbox.empty():
                number, steps = task()
                self.send(heartbeat=pb.Heartbeat(task=number, steps=steps))
            await asyncio.sleep(seconds)

    async def finish(self) -> None:
        """Write what is queued and let the controller read it."""
        await self._outbox.join()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.done_writing()

    def cut(self) -> None:
        """End the stream; the learner dials anew."""
        self._call.cancel()


class LearnerProcess:
    """One learner, from its start to the end of the federation."""

    def __init__(
        self,
        target: str,
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
        software: str = "metis",
    ) -> None:
        """Without `credentials` it speaks plain text under this `name`.

        `preflight` is called before each dial: an OSError from it means that dialling is worth another attempt, a
        MetisError that it is not. `out` is where the final model goes, the work folder if it is not given.
        """
        self._target, self._credentials, self._preflight, self._name = target, credentials, preflight, name
        self._work = WorkFolder(work)
        self._child = Child(child)
        self._report = report
        self._site, self._device, self._pace = site, device, pace
        self._out, self._software = out or work, software
        self._instance = uuid.uuid4().hex
        self._session: _Session | None = None
        self._welcome = pb.Welcome()  # the latest
        self._welcomed = asyncio.Event()  # a session is there
        self._spooled = asyncio.Event()  # there may be something to hand in
        self._spool_empty = asyncio.Event()
        self._spooled_task: int | None = None
        self._task: pb.Task | None = None  # being fetched or trained
        self._steps = 0
        self._job: asyncio.Task[None] | None = None
        self._getting_ready: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._unsent: list[pb.FromLearner] = []  # measured while nobody listened
        self._preparing = asyncio.Lock()
        self._prepared: tuple[Any, ...] | None = None
        self._prepared_pid: int | None = None
        self._evaluating = ""  # SHA-256 of the model
        self._facts: dict[str, Any] = {}
        self._deaths = 0
        self._set_aside = False
        self._stopping = False
        self._parting = False  # goodbye is said: no more dialling
        self._skew_told = False
        self._trouble: tuple[str, float] = ("", 0.0)

    # --- the life of the process ------------------------------------------------------------------

    async def run(self) -> int:
        """Take part until the federation ends, the controller refuses, or a signal; returns the exit code."""
        loop = asyncio.get_running_loop()
        keep_buffers()
        self._ending: asyncio.Future[int] = loop.create_future()
        with self._work:
            self._work.tidy()
            self._note_spool()
            for number in (signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # not in the main thread
                    loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
            self._start(self._keep_attending())
            self._start(self._keep_handing_in())
            try:
                return await self._ending
            finally:
                for task in list(self._background):
                    task.cancel()
                await asyncio.gather(*self._background, return_exceptions=True)
                self._child.kill()
                await self._child.close()
                for number in (signal.SIGTERM, signal.SIGINT):
                    with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                        loop.remove_signal_handler(number)

    def stop(self, cause: str = "stopped") -> None:
        """As by a signal: hand in what is trained, say goodbye, end; the second time at once."""
        if self._stopping:
            os._exit(130)
        self._stopping = True
        self._start(self._leave(cause))

    async def _leave(self, cause: str) -> None:
        for task in (self._job, self._getting_ready):
            if task is not None:
                task.cancel()
        self._child.kill()
        if self._work.updates():
            self._report("info", f"{cause}: handing in what is trained; once more to end at once")
            try:
                await asyncio.wait_for(self._spool_empty.wait(), _GRACE_SECONDS)
            except asyncio.TimeoutError:
                kept = ", ".join(str(update.task) for update in self._work.updates())
                self._report(
                    "warning", f"the update of task {kept} stays in {self._work.folder} and is handed in later"
                )
        await self._say_goodbye(f"stopped by its operator ({cause})")
        self._end(0, "info", f"{cause}: the learner has left the federation")

    async def _say_goodbye(self, reason: str) -> None:
        self._parting = True
        if self._session is not None:
            self._session.send(leaving=pb.Leaving(reason=reason[:500]))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._session.finish(), 2.0)
                await asyncio.sleep(0.2)  # what was written must leave the machine before the channel closes

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None and not self._ending.done():
            self._ending.set_exception(problem)  # a mistake in here: no learner that only seems to be alive

    def _end(self, code: int, kind: str, text: str) -> None:
        if not self._ending.done():
            self._report(kind, text)
            self._ending.set_result(code)

    def _complain(self, text: str) -> None:
        """About what is tried again for ever: the first time, when it changes, and once a minute."""
        last, at = self._trouble
        now = time.monotonic()
        if text != last or now - at >= _QUIET_SECONDS:
            self._trouble = (text, now)
            self._report("warning", text)

    # --- the stream -------------------------------------------------------------------------------

    async def _keep_attending(self) -> None:
        backoff = _Backoff()
        while not (self._ending.done() or self._parting):
            began, wait = time.monotonic(), None
            try:
                wait = await _own(self._attend())
            except MetisError as problem:  # of the preflight
                self._end(2, "error", str(problem))
                return
            except grpc.aio.AioRpcError as problem:
                if problem.code() not in _AGAIN:
                    self._end(2, "error", f"the controller refuses: {problem.details() or problem.code().name}")
                    return
                self._complain(f"no connection to {self._target}: {_reason(problem)}; trying again")
            except asyncio.TimeoutError:
                self._complain(f"{self._target} does not answer; trying again")
            except (OSError, _Cut) as problem:
                self._complain(f"{problem}; trying again")
            if time.monotonic() - began >= _STEADY_SECONDS:
                backoff.reset()
            await asyncio.sleep(backoff.next() if wait is None else wait * random.uniform(1.0, 1.5))

    async def _attend(self) -> float | None:
        """One stream, to its end; how long to stay away if the controller said so."""
        if self._preflight is not None:
            await self._preflight()
        metadata = () if self._name is None else (("metis-learner", self._name),)
        if self._credentials is None:
            channel = grpc.aio.insecure_channel(self._target, [*_OPTIONS, ("grpc.enable_http_proxy", 0)])
        else:
            channel = grpc.aio.secure_channel(self._target, self._credentials(), _OPTIONS)
        async with channel:
            stub = FederationStub(channel)
            call = stub.attend(metadata=metadata)
            number, _ = self._in_hand()
            hello = pb.Hello(
                protocol=PROTOCOL,
                software=self._software,
                instance=self._instance,
                run=self._work.run,
                task=number,
                unix_time=time.time(),
            )
            with contextlib.suppress(asyncio.InvalidStateError):  # already ended: reading says why
                await asyncio.wait_for(call.write(pb.FromLearner(hello=hello)), _WELCOME_SECONDS)
            first = await asyncio.wait_for(_read(call), _WELCOME_SECONDS)
            if first is None:
                return None
            if first.HasField("farewell"):
                return await self._part(first.farewell, stub, metadata)
            if not first.HasField("welcome"):
                self._end(2, "error", f"what answers at {self._target} does not greet as a controller of Metis does")
                return None
            session = _Session(stub, call, first.welcome, metadata)
            writing = asyncio.ensure_future(session.keep_writing())
            beating = asyncio.ensure_future(session.keep_beating(self._in_hand))
            try:
                await self._meet(session)
                while (message := await _read(call)) is not None:
                    if message.HasField("farewell"):
                        self._lose(session)
                        return await self._part(message.farewell, stub, metadata)
                    self._hear(session, message)
                if not (self._ending.done() or self._parting):
                    self._complain(f"the controller at {self._target} ended the connection; trying again")
                return None
            finally:
                self._lose(session)
                for task in (writing, beating):
                    task.cancel()
                await asyncio.gather(writing, beating, return_exceptions=True)

    async def _meet(self, session: _Session) -> None:
        """After the Welcome: the same run goes on, another one begins anew."""
        welcome = session.welcome
        skew = time.time() - welcome.unix_time
        if abs(skew) > _LARGEST_SKEW and not self._skew_told:
            self._skew_told = True
            self._report("warning", f"the clock of this machine is off by {skew:+.0f} s from the controller's")
        if (welcome.run, welcome.learner) != (self._work.run, self._work.learner):
            for update in self._work.updates():
                self._report(
                    "warning",
                    f"the update of task {update.task} is dropped: it belongs to run {update.run or 'unknown'}",
                )
            await self._abandon()
        try:
            self._work.begin(welcome.run, welcome.learner, welcome.layout)
        except OSError as problem:
            self._end(1, "error", f"the work folder {self._work.folder} cannot be written: {problem.strerror}")
            return
        self._note_spool()
        self._trouble = ("", 0.0)
        self._report("connected", f"connected to {self._target} as '{welcome.learner}', run {welcome.run}")
        self._session, self._welcome = session, welcome
        self._welcomed.set()
        if not (self._set_aside or self._stopping):
            if self._getting_ready is not None:
                self._getting_ready.cancel()
            self._getting_ready = self._start(self._get_ready(session))

    def _lose(self, session: _Session) -> None:
        if self._session is session:
            self._session = None
            self._welcomed.clear()

    def doing(self) -> tuple[str, float]:
        """What it does at this moment, in a few words, and the share of its task that is done."""
        task = self._task
        if task is not None:
            of = f" of {task.steps}" if task.HasField("steps") else ""
            share = min(1.0, self._steps / task.steps) if task.HasField("steps") and task.steps else 0.0
            return f"task {task.number}: {self._steps}{of} batches from community model {task.version}", share
        if self._spooled_task is not None:
            return f"task {self._spooled_task}: handing in", 1.0
        return ("not connected" if self._session is None else "waiting for a task"), 0.0

    def _in_hand(self) -> tuple[int | None, int]:
        """The task that is being trained, or else waits to be handed in, and the steps done in it."""
        if self._task is not None:
            return self._task.number, self._steps
        return self._spooled_task, self._steps

    def _hear(self, session: _Session, message: pb.ToLearner) -> None:
        match message.WhichOneof("message"):
            case "task":
                self._take(message.task)
            case "notice":
                self._tell(message.notice)
            case _:
                pass  # of a later version; what must be understood comes with a new protocol number

    def _tell(self, notice: pb.Notice) -> None:
        match notice.kind:
            case pb.Notice.COMMITTED:
                self._report("committed", notice.text)
            case pb.Notice.REFUSED:
                self._report("refused", f"refused: {notice.text}")
            case pb.Notice.SET_ASIDE:
                self._set_aside = True
                self._report("set_aside", f"set aside: {notice.text}; restart this learner to join again")
            case _:
                self._report("info", notice.text)

    # --- the end ----------------------------------------------------------------------------------

    async def _part(self, farewell: pb.Farewell, stub: FederationStub, metadata: Any) -> float | None:
        match farewell.kind:
            case pb.Farewell.FINISHED:
                await self._abandon()
                await self._finish(farewell, stub, metadata)
            case pb.Farewell.REFUSED:
                self._end(2, "error", f"the controller refuses this learner: {farewell.reason}")
            case _:
                again = f"; back in {farewell.retry_seconds:.0f} s" if farewell.retry_seconds else ""
                self._report("info", f"the controller says goodbye for a while: {farewell.reason}{again}")
        return float(farewell.retry_seconds) or None

    async def _finish(self, farewell: pb.Farewell, stub: FederationStub, metadata: Any) -> None:
        ended = f"the federation has ended: {farewell.reason}"
        if not (farewell.sha256 and self._work.run and self._work.layout):
            self._end(0, "finished", f"{ended}; this learner took no part in it and has no model of it")
            return
        until, backoff = time.monotonic() + _FAREWELL_SECONDS, _Backoff()
        path = self._work.model_file(farewell.sha256)
        problem = "the controller did not send it"
        while time.monotonic() < until:
            try:
                if await _own(self._obtain(stub, metadata, farewell.sha256, farewell.bytes)):
                    target = self._out / "community.safetensors"
                    await self._child.call(
                        "save",
                        model=str(path),
                        layout=json.loads(self._work.layout),
                        out=str(target),
                        metadata={"run": self._work.run, "version": str(farewell.version)},
                    )
                    self._work.forget_models(set())
                    self._end(0, "finished", f"{ended}; community model {farewell.version} is in {target}")
                    return
                problem = "its bytes are not those that were announced"
            except grpc.aio.AioRpcError as refused:
                problem = _reason(refused)
                if refused.code() not in _AGAIN:
                    break
            except (ChildFailed, ChildDied, _TaskFailed) as failed:
                problem = str(failed)
                break
            except (asyncio.TimeoutError, _Cut):
                problem = "the connection was lost"
            await asyncio.sleep(backoff.next())
        self._end(1, "error", f"{ended}; but its community model could not be fetched: {problem}")

    # --- being ready ------------------------------------------------------------------------------

    async def _get_ready(self, session: _Session) -> None:
        try:
            facts = await self._prepare(session.welcome)
        except ChildFailed as problem:
            await self._say_goodbye(str(problem))
            self._end(2, "error", f"this learner cannot take part: {problem}")
            return
        if facts is None:
            return
        session.send(
            ready=pb.Ready(
                examples=facts["examples"],
                batch_size=facts["batch_size"],
                evaluation_examples=facts["evaluation_examples"],
                layout=facts["fingerprint"],
            )
        )
        for message in self._unsent:
            session.send(evaluation=message.evaluation)
        self._unsent.clear()

    async def _prepare(self, welcome: pb.Welcome) -> dict[str, Any] | None:
        """Let the child make network and data, unless it has; None if it cannot be kept alive."""
        async with self._preparing:
            return await self._prepare_alone(welcome)

    async def _prepare_alone(self, welcome: pb.Welcome) -> dict[str, Any] | None:
        wanted = (welcome.run, welcome.learner, welcome.index, welcome.settings, welcome.layout)
        while not (self._child.alive and self._child.pid == self._prepared_pid and self._prepared == wanted):
            try:
                settings, layout = json.loads(welcome.settings), json.loads(welcome.layout)
            except ValueError:
                raise ChildFailed("the controller's settings are no JSON") from None
            if self._prepared is None:
                self._report("info", "preparing network and data")
            try:
                self._facts = await self._child.call(
                    "prepare",
                    settings=settings,
                    site=None if self._site is None else str(self._site),
                    name=welcome.learner,
                    index=welcome.index,
                    layout=layout,
                    memory=str(self._work.memory),
                    device=self._device,
                    pace=self._pace,
                )
            except ChildDied as problem:
                if await self._bury(problem):
                    continue
                return None
            facts = self._facts
            self._report(
                "ready",
                f"ready: {facts['examples']} examples in batches of {facts['batch_size']}"
                + (f", {facts['evaluation_examples']} to evaluate on" if facts["evaluation_examples"] else ""),
            )
            self._prepared, self._prepared_pid = wanted, self._child.pid
        return self._facts

    async def _bury(self, problem: ChildDied) -> bool:
        """The child died; whether another one is worth a try."""
        self._deaths += 1
        self._prepared_pid = None
        if self._deaths < _MOST_DEATHS:
            self._report("warning", f"{problem}; starting another one")
            return True
        await self._say_goodbye(f"{problem}, {self._deaths} times in a row")
        self._end(1, "error", f"{problem}, {self._deaths} times in a row; mend that and start the learner again")
        return False

    # --- tasks ------------------------------------------------------------------------------------

    def _take(self, task: pb.Task) -> None:
        if self._stopping:
            return
        if any(update.task == task.number for update in self._work.updates()):
            self._spooled.set()  # trained already; it is on its way
            return
        if self._task is not None and self._task.number == task.number:
            return
        before, given_up = self._job, self._task is not None
        if before is not None and self._task is not None:  # an evaluation, in contrast, is finished first
            self._report("info", f"task {self._task.number}: given up, the controller has another one")
            before.cancel()
        self._task, self._steps = task, 0
        limits = [f"{task.steps} batches"] if task.HasField("steps") else []
        limits += [f"{task.seconds:.1f} s"] if task.HasField("seconds") else []
        budget = " or ".join(limits) or "no limit"
        self._report("task", f"task {task.number}: {budget} from community model {task.version}")
        self._job = self._start(self._do(task, time.monotonic(), before, given_up))

    async def _abandon(self) -> None:
        """Let go of the task in hand, and of the child if it does not."""
        job, self._job, self._task = self._job, None, None
        if job is not None and not job.done():
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)
            await self._await_idle()

    async def _await_idle(self) -> None:
        """A training that was given up ends at its next batch; one that does not is ended with its process."""
        if not self._child.alive:
            return
        try:
            await asyncio.wait_for(self._child.call("ping"), _GRACE_SECONDS)
        except asyncio.TimeoutError:
            self._child.kill()
            await self._child.close()
        except ChildDied:
            pass

    async def _do(self, task: pb.Task, received: float, before: asyncio.Task[None] | None, given_up: bool) -> None:
        """Fetch, train, keep, and evaluate while the update is being handed in."""
        try:
            model = await self._fetch(task)
            if before is not None:
                await asyncio.gather(before, return_exceptions=True)
                if given_up:
                    await self._await_idle()
            update = await self._train(task, received, model)
        except ChildFailed as problem:
            self._fail(task, str(problem), problem.steps, problem.seconds)
        except Abandoned:
            self._fail(task, "the training was given up", self._steps, time.monotonic() - received)
        except _TaskFailed as problem:
            self._fail(task, str(problem), self._steps, time.monotonic() - received)
        except ChildDied as problem:
            self._fail(task, str(problem), self._steps, time.monotonic() - received)
            if await self._bury(problem):
                with contextlib.suppress(ChildFailed):
                    await self._prepare(self._welcome)
        else:
            self._deaths = 0
            self._evaluating = task.sha256 if task.evaluate else ""
            self._task = None
            self._note_spool()
            self._report(
                "trained",
                f"task {task.number}: trained {update.steps} batches in {update.seconds:.1f} s "
                f"({update.time_per_batch:.3g} s each), loss {update.loss:.4g}{_left_out(update)}",
            )
            if task.evaluate:
                await self._evaluate(task)

    async def _train(self, task: pb.Task, received: float, model: Path) -> Update:
        if await self._prepare(self._welcome) is None:
            raise _TaskFailed("the training process cannot be kept alive")
        run, seconds = self._work.run, None
        if task.HasField("seconds"):
            seconds = max(0.0, task.seconds - (time.monotonic() - received))

        def progress(steps: int) -> None:
            self._steps = steps

        answer = await self._child.call(
            "train",
            task=task.number,
            model=str(model),
            steps=task.steps if task.HasField("steps") else None,
            seconds=seconds,
            rate=task.rate if task.HasField("rate") else 1.0,
            out=str(self._work.update_file(task.number)),
            progress=progress,
        )
        update = update_of(run, answer)
        self._steps = update.steps
        try:
            await asyncio.to_thread(self._work.keep, update)
        except OSError as problem:
            self._work.drop(task.number)
            raise _TaskFailed(f"the update cannot be kept in {self._work.folder}: {problem.strerror}") from problem
        return update

    def _fail(self, task: pb.Task, reason: str, steps: int, seconds: float) -> None:
        """Without a connection nothing need be said: the next Hello shows that the task is not in hand."""
        self._task = None
        self._report("failed", f"task {task.number}: failed: {reason}")
        if self._session is not None:
            self._session.send(
                failed=pb.Failed(task=task.number, reason=reason[:1000], steps=max(0, steps), seconds=max(0.0, seconds))
            )

    async def _evaluate(self, task: pb.Task) -> None:
        try:
            answer = await self._child.call("evaluate", model=str(self._work.model_file(task.sha256)))
        except ChildFailed as problem:
            self._report("warning", f"community model {task.version} cannot be evaluated here: {problem}")
            return
        except ChildDied as problem:
            await self._bury(problem)
            return
        finally:
            self._evaluating = ""
        values = ", ".join(f"{name} {value:.4f}" for name, value in answer["metrics"].items())
        self._report("evaluated", f"community model {task.version} here: {values} ({answer['examples']} examples)")
        evaluation = pb.Evaluation(version=task.version, examples=answer["examples"], metrics=answer["metrics"])
        if self._session is not None:
            self._session.send(evaluation=evaluation)
        else:
            self._unsent = [*self._unsent[-15:], pb.FromLearner(evaluation=evaluation)]

    # --- community models -------------------------------------------------------------------------

    async def _connected(self) -> _Session:
        while self._session is None:
            await self._welcomed.wait()
        return self._session

    async def _fetch(self, task: pb.Task) -> Path:
        """The community model of the task, as a file whose every bit was checked."""
        backoff, mismatches = _Backoff(), 0
        path = self._work.model_file(task.sha256)
        while True:
            session = await self._connected()
            try:
                if await _own(self._obtain(session.stub, session.metadata, task.sha256, task.bytes, task.seal)):
                    return path
                mismatches += 1
                if mismatches >= _MOST_MISMATCHES:
                    raise _TaskFailed(f"community model {task.version} did not arrive as it was announced")
            except grpc.aio.AioRpcError as problem:
                if problem.code() == _CODE.NOT_FOUND:
                    raise _TaskFailed(
                        f"community model {task.version} cannot be fetched: {problem.details()}"
                    ) from problem
                if problem.code() not in _AGAIN:
                    session.cut()  # the stream, when it is opened anew, says whether this learner may stay
                self._complain(f"community model {task.version}: {_reason(problem)}; trying again")
            except asyncio.TimeoutError:
                self._complain(f"community model {task.version}: nothing came for too long; trying again")
            except _Cut:
                pass  # with the stream, which is dialled anew
            await asyncio.sleep(backoff.next())

    async def _obtain(
        self, stub: FederationStub, metadata: Any, sha256: str, length: int, seal: bytes = b""
    ) -> bool:  # fmt: skip
        """Have the model in its file; False if what came is something else."""
        if not (len(sha256) == 64 and set(sha256) <= set("0123456789abcdef")):
            raise _TaskFailed("the controller names a model by something that is no SHA-256")
        try:
            incoming = await asyncio.to_thread(self._work.incoming, sha256, length, seal)
        except OSError as problem:
            raise _TaskFailed(self._no_room(problem)) from problem
        if incoming is None:
            return True
        making_room = beside(self._work.forget_models, {sha256, self._evaluating})

        def append(data: Bytes) -> None:
            making_room.result()  # takes a while, in which the first bytes may come
            incoming.append(data)

        intake = Intake(incoming.check, append)
        try:
            if incoming.received < length:
                request = pb.ModelRequest(run=self._work.run, sha256=sha256, offset=incoming.received)
                call = stub.download(request, metadata=metadata)
                expected = incoming.received
                try:
                    with IdleTimeout(_PROGRESS_SECONDS) as idle_timeout:
                        while expected < length:
                            chunk = await idle_timeout.wait(_read(call))
                            if chunk is None or chunk.offset != expected or expected + len(chunk.data) > length:
                                break
                            expected += len(chunk.data)
                            await intake.put(chunk.data, _MOST_AHEAD)
                finally:
                    call.cancel()
            await intake.finish()
            return await asyncio.to_thread(incoming.commit)
        except asyncio.TimeoutError:  # nothing came; since Python 3.11 it is an OSError too
            raise
        except OSError as problem:
            self._work.forget_models(set())  # half a model on a full disk helps nobody
            raise _TaskFailed(self._no_room(problem)) from problem
        finally:
            await intake.end()
            incoming.close()

    def _no_room(self, problem: OSError) -> str:
        full = ": the disk of the learner is full" if problem.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"the community model cannot be kept in {self._work.folder}{full} ({problem.strerror})"

    # --- updates ----------------------------------------------------------------------------------

    def _note_spool(self) -> None:
        updates = self._work.updates()
        self._spooled_task = updates[-1].task if updates else None
        if updates:
            self._spool_empty.clear()
            self._spooled.set()
        else:
            self._spool_empty.set()

    async def _keep_handing_in(self) -> None:
        while True:
            await self._spooled.wait()
            self._spooled.clear()
            for update in self._work.updates():
                await self._hand_in(update)
            self._note_spool()

    async def _hand_in(self, update: Update) -> None:
        """Send the update until it is answered for good, however long that takes."""
        backoff, not_allowed = _Backoff(), 0
        while True:
            session = await self._connected()
            if update.run != session.welcome.run or not self._work.update_file(update.task).exists():
                return  # dropped meanwhile, with its run
            began, reason = time.monotonic(), ""
            try:
                receipt = await _own(self._upload(session, update))
            except grpc.aio.AioRpcError as problem:
                code, reason = problem.code(), _reason(problem)
                if code in (_CODE.INVALID_ARGUMENT, _CODE.ALREADY_EXISTS):
                    self._give_up(update, reason)
                    return
                if code == _CODE.DATA_LOSS and await self._damaged(update):
                    self._give_up(update, f"its file in {self._work.folder} is damaged")
                    return
                if code in _NOT_ALLOWED:
                    not_allowed += 1
                    if not_allowed > 1:
                        self._end(2, "error", f"the controller refuses the update of task {update.task}: {reason}")
                        return
                    session.cut()
            except asyncio.TimeoutError:
                reason = "nothing moved for too long"
            except _Cut as problem:
                reason = str(problem)
            except OSError as problem:
                self._give_up(update, f"its file cannot be read: {problem.strerror}")
                return
            else:
                self._receive(update, receipt, time.monotonic() - began)
                return
            self._complain(f"task {update.task}: the update is not handed in yet: {reason}; trying again")
            await asyncio.sleep(backoff.next())

    def _receive(self, update: Update, receipt: pb.Receipt, seconds: float) -> None:
        match receipt.verdict:
            case pb.Receipt.REFUSED:
                self._report("refused", f"task {update.task}: the update does not count: {receipt.reason}")
            case pb.Receipt.ALREADY:
                self._report("handed_in", f"task {update.task}: the controller had the update already")
            case _:
                self._report("handed_in", f"task {update.task}: handed in, {size(update.bytes)} in {seconds:.1f} s")
        self._forget(update)

    def _forget(self, update: Update) -> None:
        self._work.drop(update.task)
        if self._spooled_task == update.task:
            self._spooled_task = None

    def _give_up(self, update: Update, reason: str) -> None:
        self._forget(update)
        self._report("failed", f"task {update.task}: the update is dropped: {reason}")
        if self._session is not None:
            failed = pb.Failed(task=update.task, reason=reason[:1000], steps=update.steps, seconds=update.seconds)
            self._session.send(failed=failed)

    async def _damaged(self, update: Update) -> bool:
        try:
            return await asyncio.to_thread(file_sha256, self._work.update_file(update.task)) != update.sha256
        except OSError:
            return True

    async def _upload(self, session: _Session, update: Update) -> pb.Receipt:
        header = pb.UploadHeader(
            run=update.run,
            task=update.task,
            steps=update.steps,
            seconds=update.seconds,
            time_per_batch=update.time_per_batch,
            loss=update.loss,
            bytes=update.bytes,
            compression_error=update.compression_error,
        )
        call = session.stub.upload(metadata=session.metadata)
        try:
            await asyncio.wait_for(call.write(pb.UploadPart(header=header)), _PROGRESS_SECONDS)
            # Its turn, or the answer already; one more write would then hide what the answer is.
            if TURN[0] in tuple(await asyncio.wait_for(call.initial_metadata(), _RECEIPT_SECONDS)):
                await self._send(call, session, update)
                await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # it was answered before its end: the answer says why
        except BaseException:
            call.cancel()
            raise
        return await asyncio.wait_for(_answer(call), _RECEIPT_SECONDS)

    async def _send(self, call: Any, session: _Session, update: Update) -> None:
        """Chunks and end."""
        chunk_size = ChunkSize(session.chunk_bytes)
        reading = read_ahead(self._work.update_file(update.task), 0, lambda: chunk_size.bytes, chunk_size.took)
        with IdleTimeout(_PROGRESS_SECONDS) as idle_timeout:
            async with contextlib.aclosing(reading) as pieces:
                async for offset, data in pieces:
                    await idle_timeout.wait(call.write(Piece(offset, data)))
            end = pb.UploadEnd(bytes=update.bytes, sha256=update.sha256)
            await idle_timeout.wait(call.write(pb.UploadPart(end=end)))


async def _read(call: Any) -> Any:
    """The next message of a stream; None at its end."""
    message = await call.read()
    return None if message is grpc.aio.EOF else message


async def _answer(call: Any) -> pb.Receipt:
    receipt: pb.Receipt = await call
    return receipt


def _reason(problem: grpc.aio.AioRpcError) -> str:
    return problem.details() or problem.code().name


def _left_out(update: Update) -> str:
    error = update.compression_error
    return "" if error is None else f"; {100 * error:.2g} % of it waits for the next update"
