"""The wall clock around the durable controller: streams, leases, deadlines, evaluation, the end of a run.

Two threads matter. The event loop talks to learners and never waits for a disk. The writer, one thread, journals and
applies events in the order of their arrival; an update is acknowledged when it is durable, before anything is mixed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import grpc

from metis.core.compression import Compression
from metis.core.controller import Controller
from metis.core.costs import Power
from metis.core.events import (
    Action,
    CommunityPublished,
    ControllerAway,
    DeadlinePassed,
    Evaluated,
    Event,
    Finish,
    LearnerId,
    LearnerJoined,
    LearnerLeft,
    LearnerSetAside,
    SendTask,
    SpeedChanged,
    StopRequested,
    TaskFailed,
    UpdateCommitted,
    UpdateRefused,
    UpdateRequest,
)
from metis.core.model import Model
from metis.core.timing import MOST_STEPS
from metis.deployment.controller.durable import DurableController, MakeController
from metis.deployment.controller.service import Context, Handed, Refused, Service, Session, claimed_error, plausible
from metis.deployment.controller.state import EXHAUSTED, DiskFull, Entry, State
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.protocol import (
    CHUNK,
    SERVER_OPTIONS,
    keep_buffers,
    model_bytes,
    read_model,
    read_part,
    service_handler,
)
from metis.errors import ConfigError, DataError
from metis.runs.folds import RunFold
from metis.runs.run import Run
from metis.runs.setting import LearnerInfo, Setting
from metis.runs.storage import save_model
from metis.runs.trace import EVENTS, read_trace, to_line

BEST = "best.safetensors"
_TICK = 0.5  # seconds; how soon a missed deadline or an ended lease is noticed at the latest
_CLOCK = "clock"  # file with the run, its clock and the time of day at the latest tick, and a checksum
_CLOCK_BYTES = 120  # of that, whatever the numbers
_STALL = 1.0  # a longer gap between ticks means that this process did not run
_LARGEST_METRIC = 1e100
_CODE = grpc.StatusCode


@dataclass(frozen=True)
class DeploymentSettings:
    """How the controller treats its learners; the table [deployment] of a file."""

    expected: int = 1  # learners to wait for before the first round
    minimum: int = 1  # enough to begin with after `wait_seconds`, and too few to go on with if there are less
    wait_seconds: float = math.inf
    lease: float = 30.0  # a learner that is silent for so long has left
    heartbeat: float = 5.0
    largest_number: float = 1e10  # no weight of a sound model is beyond
    max_examples: int = 10**9
    evaluate_every: float = 0.0
    evaluate_at_learners: bool = False
    linger: float = 30.0  # how long learners may still fetch the final model

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.expected:
            raise ConfigError(
                f"deployment.minimum is {self.minimum}, must be 1 to the {self.expected} learners that are expected"
            )
        if self.lease < 2 * self.heartbeat:
            raise ConfigError(
                f"deployment.lease is {self.lease:g} s, must be at least twice deployment.heartbeat, "
                f"{self.heartbeat:g} s"
            )


@dataclass(frozen=True)
class Plan:
    """What is to be run: made from the file, and the same after a restart."""

    make: MakeController
    initial_model: Model
    settings: str  # JSON for the learners, opaque here
    setting: Setting  # what folds the events into a run; learners as far as they are known
    members: Mapping[LearnerId, Power] | None  # who may join, in order; None for everybody with a certificate
    terms: DeploymentSettings = field(default_factory=DeploymentSettings)
    compression: Compression | None = None  # of what learners hand in


class Evaluator(Protocol):
    """Measures a community model on the controller's held-out examples, outside this process."""

    async def evaluate(self, model: Path) -> dict[str, float]: ...


Report = Callable[[str, str], None]  # kind ("info", "warning", "round", ...), sentence


class _RunClock:
    """Seconds of the run; it stands still until the first task and while the controller does not run."""

    def __init__(self, begin: float) -> None:
        self._begin, self._start = begin, math.inf
        self._seen = time.monotonic()
        self._lost = 0.0
        self._lock = threading.Lock()

    def go(self) -> None:
        self._start = min(self._start, time.monotonic())

    def now(self) -> float:
        # Here too: a model may come before the first tick after a stop, and is not late either.
        with self._lock:
            return self._begin + max(0.0, self._notice() - self._start)

    def tick(self) -> float:
        """Say that the process runs; returns for how long it did not since the last tick."""
        with self._lock:
            self._seen = self._notice()
            lost, self._lost = self._lost, 0.0
            return lost

    def _notice(self) -> float:
        moment = time.monotonic()
        gap = moment - self._seen - _TICK
        if gap >= _STALL:
            self._start += gap
            self._lost += gap
            self._seen = moment
        return moment


def write_tick(path: Path, run: str, seconds: float) -> None:
    """Note how far the run's clock has come. Not synced: after a loss of power the journal alone says it."""
    text = f"{run} {seconds!r} {time.time()!r}"
    with contextlib.suppress(OSError):
        # In place: a file that is emptied and written anew is sent to the disk at once, and the event loop waits.
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(file, f"{text} {_checksum(text)}".ljust(_CLOCK_BYTES).encode() + b"\n", 0)
        finally:
            os.close(file)


def read_tick(path: Path, run: str) -> tuple[float, float]:
    """Where the clock of the last process on this folder ended, and for how long there has been none."""
    try:
        *words, checksum = path.read_text("utf-8").split()
        if words[0] == run and checksum == _checksum(" ".join(words)):
            return float(words[1]), max(0.0, time.time() - float(words[2]))
    except (OSError, ValueError, IndexError):
        pass  # there was none, or it is damaged
    return 0.0, 0.0


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class _Trace:
    """The lines of events.jsonl; what finds no room on the disk is written when there is some."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=0)
        self._unwritten = bytearray()

    def write(self, line: str) -> None:
        self._unwritten += line.encode() + b"\n"
        with contextlib.suppress(DiskFull):
            self.flush()

    def flush(self) -> None:
        try:
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as problem:
            if problem.errno not in EXHAUSTED:
                raise
            raise DiskFull(f"no room to write {self._path}: {problem.strerror}") from problem

    def close(self) -> None:
        self._file.close()


class ControllerProcess:
    """One federation from the first learner to the final model; `run` may be called once."""

    def __init__(
        self,
        plan: Plan,
        state: State,
        folder: Path,
        *,
        evaluator: Evaluator | None,
        identify: Callable[[Context], LearnerId],
        report: Report,
        watch: Callable[[RunFold], None] | None = None,
    ) -> None:
        self.plan, self.state, self.folder = plan, state, folder
        self.run, self.layout = state.run, plan.initial_model.layout
        self.compression = plan.compression
        self._evaluator, self._report, self._watch = evaluator, report, watch
        self._settings = plan.terms
        folder.mkdir(parents=True, exist_ok=True)
        plan.setting.save(folder)
        self._events = _Trace(folder / EVENTS)
        self._fold = RunFold(plan.setting)
        try:
            self._durable = DurableController(plan.make, plan.initial_model, state, self._record)
        except BaseException:
            self._events.close()
            raise
        ticked, self._away_for = read_tick(state.folder / _CLOCK, state.run)
        self._clock = _RunClock(max(self._durable.now, ticked))
        self._writer = ThreadPoolExecutor(1, "metis-writer")
        self._unapplied: deque[tuple[Entry, asyncio.Future[Entry] | None]] = deque()  # journaled; the writer's
        self._full_told = -math.inf
        self._service = Service(
            self, identify, largest_number=self._settings.largest_number, report=lambda text: report("warning", text)
        )
        self._sessions: dict[LearnerId, Session] = {}
        # When each learner on the roster was last heard; after a restart everybody has a whole lease to come back.
        self._heard = {r.learner: time.monotonic() for r in self._durable.controller.roster if r.present}
        # The clock waits for those who were there when the last process ended: they cannot know that it is back.
        self._awaited = set(self._heard) if self._durable.controller.started else set()
        self._began = time.monotonic()
        self._noted = -math.inf  # when the clock was written down
        self._assignments: dict[LearnerId, int] = {name: i for i, name in enumerate(plan.members or ())}
        for record in self._durable.controller.roster:
            self._assignments.setdefault(record.learner, len(self._assignments))
        self._measured: dict[LearnerId, tuple[int, int, dict[str, float]]] = {}  # federated evaluation, latest
        self._reported: set[LearnerId] = set()
        self._to_judge: int | None = None
        self._next_judgement = 0.0
        self._waiting_since: float | None = None
        self._draining: str | None = None
        self._uploads = 0
        self._background: set[asyncio.Task[Any]] = set()
        self.failure: BaseException | None = None
        # As the event loop sees it: when the writer's controller has finished, its last model may still be on its way.
        self.finished = self._durable.controller.finished

    # --- the life of the process ------------------------------------------------------------------

    async def serve(self, listen: str, credentials: grpc.ServerCredentials | None) -> bool:
        """Run until the federation has ended (True) or `drain` was called (False)."""
        self._loop = asyncio.get_running_loop()
        keep_buffers()
        self._stopping = asyncio.Event()
        self._judge_wanted = asyncio.Event()
        self._woken = asyncio.Event()
        server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((service_handler(self._service, read_part),))
        try:
            port = (
                server.add_insecure_port(listen) if credentials is None else server.add_secure_port(listen, credentials)
            )
        except RuntimeError:
            port = 0
        if port == 0:
            raise ConfigError(f"cannot listen on {listen}: the port is in use, or the address is not of this machine")
        self.address = f"{listen.rpartition(':')[0]}:{port}"
        await server.start()
        self._report("info", f"listening on {self.address}, run {self.run}, start {self.state.epoch}")
        version = self._durable.controller.community.stamp.version
        if self.state.epoch > 1 and not self.finished:
            self._report("info", f"going on at {self._durable.now:.1f} s of the run with community model {version}")
        if not self._fold.history:
            self._ask_for_judgement(version)
        try:
            await self._until_the_end()
            if self.failure is not None:
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
            self._writer.shutdown(wait=True)
            self._events.close()

    def drain(self, reason: str) -> None:
        """Stop soon, losing nothing: the same command goes on with the run."""
        if self._draining is None:
            self._draining = reason
            self._stopping.set()

    def _let_the_clock_go(self) -> None:
        if self._durable.controller.started and not self._awaited:
            self._clock.go()

    async def _until_the_end(self) -> None:
        if self._awaited and self._away_for:
            self._post(ControllerAway(self._away_for))
        judging = asyncio.create_task(self._keep_judging())
        try:
            while not (self._stopping.is_set() or self.finished or self.failure):
                self._tick()
                await self._sleep()
        finally:
            judging.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await judging

    async def _sleep(self) -> None:
        """Until the next deadline, or until something has changed it."""
        seconds = min(_TICK, max(0.0, self._durable.controller.deadline - self._clock.now()))
        self._woken.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds + 0.001)

    def _tick(self) -> None:
        gap = self._clock.tick()
        if gap:
            if gap >= 5:
                self._report("warning", f"this process stood still for {gap:.0f} s; nobody is late for that")
            self._post(ControllerAway(gap))
            self._heard = {learner: heard + gap for learner, heard in self._heard.items()}
            for session in self._sessions.values():
                session.last_heard += gap
        moment, controller = time.monotonic(), self._durable.controller
        self._awaited &= self._heard.keys()
        if self._awaited and moment - self._began > self._settings.lease:
            self._awaited.clear()
        self._let_the_clock_go()
        if moment - self._noted >= _TICK:
            self._noted = moment
            write_tick(self.state.folder / _CLOCK, self.run, self._clock.now())
        for learner, heard in list(self._heard.items()):
            stream = self._sessions.get(learner)
            if moment - (heard if stream is None else max(heard, stream.last_heard)) > self._settings.lease:
                if stream is not None:
                    stream.close()
                self._report("warning", f"learner '{learner}' was silent for {self._settings.lease:g} s and has left")
                self._let_go(learner)
        if not controller.started:
            self._wait_for_learners(moment)
        if self._clock.now() >= controller.deadline and not controller.finished:
            self._post(DeadlinePassed())

    def _wait_for_learners(self, moment: float) -> None:
        """Begin with fewer learners than expected when waiting has lasted long enough."""
        joined = len(self._heard)
        if self._waiting_since is None and joined:
            self._waiting_since = moment
        waited = 0.0 if self._waiting_since is None else moment - self._waiting_since
        if waited >= self._settings.wait_seconds and joined >= self._settings.minimum:
            self._report("info", f"beginning with {joined} of {self._settings.expected} learners")
            self._waiting_since = math.inf

            def wait_again() -> None:
                self._waiting_since = moment

            self._in_writer(lambda: self._apply_later(self._durable.start_with(joined, self._clock.now())), wait_again)

    def _let_go(self, learner: LearnerId) -> None:
        """The learner has left; if that cannot be written down now, it leaves after another lease."""
        del self._heard[learner]
        self._post(LearnerLeft(learner), lambda: self._heard.setdefault(learner, time.monotonic()))

    async def _drain(self) -> None:
        reason = self._draining or "the controller stops"
        farewell = pb.Farewell(kind=pb.Farewell.RETRY, reason=reason, retry_seconds=2.0)
        for session in self._sessions.values():
            session.send(farewell=farewell)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wait_for_uploads(), 10.0)
        await self._snapshot()
        self._report("info", "stopped; the same command goes on with the run")

    async def _snapshot(self) -> None:
        with contextlib.suppress(DiskFull):  # then more is replayed
            await asyncio.wrap_future(self._writer.submit(self._durable.snapshot))

    async def _wait_for_uploads(self) -> None:
        while self._uploads:
            await asyncio.sleep(0.05)

    async def _end(self) -> None:
        """Measure the last model, write the results, and let the learners fetch it."""
        version = self._durable.controller.community.stamp.version
        last = self._fold.history[-1].version if self._fold.history else None
        if self._evaluator is not None and last != version:
            await self._judge_one(version)
        await self._snapshot()
        self.result = await asyncio.to_thread(self._save)
        self._report("finished", f"the federation has ended: {self._fold.finish_reason}")
        for session in list(self._sessions.values()):
            session.send(farewell=self._farewell())
        end = time.monotonic() + self._settings.linger
        while time.monotonic() < end and not (self._stopping.is_set() or self._all_told()):
            await asyncio.sleep(0.1)

    def _all_told(self) -> bool:
        return not self._sessions and self._uploads == 0 and not self._heard

    def _farewell(self) -> pb.Farewell:
        version = self._durable.controller.community.stamp.version
        return pb.Farewell(
            kind=pb.Farewell.FINISHED,
            reason=self._fold.finish_reason or "the federation has ended",
            version=version,
            sha256=self._durable.hashes[version],
            bytes=model_bytes(self.layout),
        )

    def _save(self) -> Run:
        self._events.flush()
        roster = self._durable.controller.roster
        members = self.plan.members or {}
        learners = tuple(
            LearnerInfo(
                record.learner,
                record.examples,
                record.batch_size,
                record.time_per_batch or math.nan,
                members.get(record.learner, Power()),
            )
            for record in roster
        )
        setting = replace(self.plan.setting, learners=learners)
        events = list(read_trace(self.folder / EVENTS))
        run = Run(setting, events, self._durable.controller.community.model.network, self._durable.now)
        run.save(self.folder)
        best = self._best_version()
        if best is not None:
            model = read_model(self.state.blob_path(self._durable.hashes[best]), self.layout)
            save_model(self.folder / BEST, model, {"version": str(best)})
        return run

    # --- events: journaled, then applied, in one order ----------------------------------------------

    def _post(self, event: Event, or_else: Callable[[], object] | None = None) -> None:
        """Let an event happen of which nobody waits to hear that it is durable."""
        self._in_writer(lambda: self._apply_later(self._durable.journal(event, self._clock.now())), or_else)

    def _in_writer(self, job: Callable[[], object], or_else: Callable[[], object] | None = None) -> None:
        """Do the job in the writer; `or_else`, in the event loop, if the disk was full."""
        self._writer.submit(self._guard, job, or_else)

    def _guard(self, job: Callable[[], object], or_else: Callable[[], object] | None) -> None:
        try:
            job()
        except DiskFull:
            # The journal could not take it. A deadline is asked for again at the next tick.
            self._loop.call_soon_threadsafe(self._tell_of_full_disk)
            if or_else is not None:
                self._loop.call_soon_threadsafe(or_else)
            time.sleep(0.2)
        except BaseException as problem:  # nobody else would hear of it
            self._loop.call_soon_threadsafe(self._fail, problem)

    def _tell_of_full_disk(self) -> None:
        if time.monotonic() - self._full_told > 30:
            self._full_told = time.monotonic()
            self._report("warning", "the disk is full: the federation stands still until there is room")

    def _fail(self, problem: BaseException) -> None:
        self.failure = self.failure or problem
        self._woken.set()

    def _apply_later(self, entry: Entry, done: asyncio.Future[Entry] | None = None) -> None:
        """In the writer: behind whatever was journaled before; a receipt need not wait for it."""
        self._unapplied.append((entry, done))
        self._in_writer(self._apply_first)

    def _apply_first(self) -> None:
        entry, done = self._unapplied[0]
        try:
            actions = self._durable.apply(entry)
        except DiskFull:
            with contextlib.suppress(RuntimeError):  # the process ends: the next one applies it
                self._in_writer(self._apply_first)
            raise
        except BaseException as problem:
            if done is not None:
                self._loop.call_soon_threadsafe(_answer, done, problem)
            raise
        self._unapplied.popleft()
        self._let_the_clock_go()
        self._loop.call_soon_threadsafe(self._perform, entry, actions)
        if done is not None:
            self._loop.call_soon_threadsafe(_answer, done, entry)

    def _record(self, now: float, item: Event | Action) -> None:
        self._events.write(to_line(now, item))
        self._fold.record(now, item)

    # --- actions ------------------------------------------------------------------------------------

    def _perform(self, entry: Entry, actions: list[Action]) -> None:
        if entry.record.get("event") == "learner_joined":
            self._heard[entry.record["learner"]] = time.monotonic()
        if entry.update is not None and not actions:  # its learner left, or its task failed, between its two moments
            text = f"late: task {entry.update} was void when its update was mixed; it does not count"
            self._tell(entry.record["learner"], pb.Notice.REFUSED, text, entry.update)
        for action in actions:
            match action:
                case SendTask():
                    self._offer(action.learner)
                case CommunityPublished():
                    self._report(
                        "round",
                        f"community model {action.stamp.version} of {action.contributors} learners, "
                        f"{action.stamp.steps} steps in all",
                    )
                    if self._clock.now() >= self._next_judgement:
                        every = self._settings.evaluate_every
                        self._next_judgement = (math.floor(self._clock.now() / every) + 1) * every if every else 0.0
                        self._ask_for_judgement(action.stamp.version)
                case UpdateCommitted():
                    self._tell(action.learner, pb.Notice.COMMITTED, f"the update of task {action.task} counts")
                case UpdateRefused():
                    self._report("warning", f"update of '{action.learner}' refused: {action.reason}")
                    self._tell(action.learner, pb.Notice.REFUSED, action.reason, action.task)
                case LearnerSetAside():
                    self._report("warning", f"learner '{action.learner}' is set aside: {action.reason}")
                    self._tell(action.learner, pb.Notice.SET_ASIDE, action.reason)
                case SpeedChanged():
                    what = f"a batch took {action.before:.3g} seconds and now takes {action.now:.3g}"
                    self._report("warning", f"learner '{action.learner}' has changed: {what}")
                    self._tell(action.learner, pb.Notice.INFORMATION, what)
                case Finish():
                    self.finished = True
        if self._watch is not None:
            self._watch(self._fold)
        self._woken.set()

    def _tell(self, learner: LearnerId, kind: Any, text: str, task: int | None = None) -> None:
        session = self._sessions.get(learner)
        if session is not None:
            session.send(notice=pb.Notice(kind=kind, text=text, task=task))

    def _offer(self, learner: LearnerId) -> None:
        """Send the learner its open task, unless it has it in hand; with the seconds that are left of it."""
        session, task = self._sessions.get(learner), self._durable.open_task(learner)
        if session is None or session.ready is None or task is None or session.held_task == task.number:
            return
        blob = self._durable.hashes.get(task.based_on.version)
        if blob is None:
            return  # the writer is about to publish that model; its actions offer the task
        record = self._durable.controller.roster[learner]
        seconds = task.budget.seconds - max(0.0, self._clock.now() - record.task_sent_at)
        session.held_task, session.steps = task.number, 0
        session.send(
            task=pb.Task(
                number=task.number,
                epoch=self.state.epoch,
                version=task.based_on.version,
                version_steps=task.based_on.steps,
                steps=task.budget.steps,
                seconds=max(0.0, seconds) if math.isfinite(seconds) else None,
                rate=None if task.rate == 1 else task.rate,
                sha256=blob,
                bytes=model_bytes(self.layout),
                seal=self._durable.seals.get(task.based_on.version),
                evaluate=self._settings.evaluate_at_learners and session.ready.evaluation_examples > 0,
            )
        )

    # --- the service's host -------------------------------------------------------------------------

    def admit(self, session: Session, hello: pb.Hello) -> None:
        learner, members = session.learner, self.plan.members
        if members is not None and learner not in members:
            shown = ", ".join(list(members)[:10]) + (", ..." if len(members) > 10 else "")
            raise Refused(
                _CODE.PERMISSION_DENIED,
                f"learner '{learner}' does not belong to this federation; its learners are {shown}",
            )
        if self._draining is not None:
            raise Refused(_CODE.UNAVAILABLE, "the controller is stopping; come back in a while")
        old = self._sessions.get(learner)
        if old is not None:
            if old.instance != hello.instance:
                self._report(
                    "warning",
                    f"a second process with the certificate of '{learner}' came from {session.address}; the one from "
                    f"{old.address} is sent away",
                )
                reason = f"another process with the certificate of '{learner}' has connected from {session.address}"
                old.send(farewell=pb.Farewell(kind=pb.Farewell.REFUSED, reason=reason))
            else:
                old.close()
        self._sessions[learner] = session
        session.epoch = self.state.epoch
        session.held_task = hello.task if hello.HasField("task") and hello.run == self.run else None
        if self.finished:
            session.send(farewell=self._farewell())
            return
        skew = hello.unix_time - time.time() if hello.unix_time else 0.0
        if abs(skew) > 60:
            self._report("warning", f"the clock of '{learner}' is off by {skew:+.0f} s from this machine's")
        task = self._durable.open_task(learner)
        session.send(
            welcome=pb.Welcome(
                run=self.run,
                epoch=self.state.epoch,
                learner=learner,
                index=self._assignments.setdefault(learner, len(self._assignments)),
                settings=self.plan.settings,
                layout=json.dumps(self.layout.to_json()),
                unix_time=time.time(),
                heartbeat_seconds=self._settings.heartbeat,
                chunk_bytes=CHUNK,
                task=None if task is None else task.number,
            )
        )

    def hear(self, session: Session, message: pb.FromLearner) -> None:
        if self._sessions.get(session.learner) is not session:
            return  # another stream has taken its place, and speaks for the learner
        match message.WhichOneof("message"):
            case "heartbeat":
                session.steps = message.heartbeat.steps
                if message.heartbeat.HasField("task"):
                    session.held_task = message.heartbeat.task
            case "ready":
                self._ready(session, message.ready)
            case "failed":
                self._failed(session, message.failed)
            case "evaluation":
                self._evaluated_at(session, message.evaluation)
            case "leaving":
                if session.learner in self._heard:
                    self._report("info", f"learner '{session.learner}' leaves: {message.leaving.reason[:200]}")
                    self._let_go(session.learner)
            case _:
                raise Refused(_CODE.INVALID_ARGUMENT, "a message of a kind that this controller does not know")

    def alive(self, learner: LearnerId) -> None:
        if (session := self._sessions.get(learner)) is not None:
            session.last_heard = time.monotonic()

    def part(self, session: Session) -> None:
        if self._sessions.get(session.learner) is session:
            del self._sessions[session.learner]
            if session.ready is None and session.learner not in self._heard:
                self._report("warning", f"'{session.learner}' has gone before it was ready; its own terminal says why")
            if session.learner in self._heard:
                self._heard[session.learner] = session.last_heard
            if self.finished:
                self._heard.pop(session.learner, None)

    def _ready(self, session: Session, ready: pb.Ready) -> None:
        if ready.layout != self.layout.fingerprint:
            raise Refused(
                _CODE.FAILED_PRECONDITION,
                f"the network of '{session.learner}' is another one: its layout is {ready.layout[:12]}..., that of "
                f"this federation {self.layout.fingerprint[:12]}... ({self.layout.size} numbers in "
                f"{len(self.layout.tensors)} tensors)",
            )
        most = self._settings.max_examples
        if not (1 <= ready.examples <= most and 1 <= ready.batch_size <= most):
            raise Refused(
                _CODE.FAILED_PRECONDITION,
                f"learner '{session.learner}' brings {ready.examples} examples in batches of {ready.batch_size}; both "
                f"must be 1 to {most} (deployment.max_examples)",
            )
        session.ready = ready
        # Behind the effects of what was journaled before: a lease that has just ended must not end this stay too.
        # If it cannot be written down, the learner comes again.
        self._in_writer(lambda: self._in_writer(lambda: self._join(session, ready), session.close))

    def _join(self, session: Session, ready: pb.Ready) -> None:
        """In the writer: a learner that is new or was away joins; one that only lost its connection goes on."""
        learner = session.learner
        record = self._durable.controller.roster.get(learner)
        joined = LearnerJoined(learner, ready.examples, ready.batch_size)
        if record is not None and record.present:
            same = (record.examples, record.batch_size) == (ready.examples, ready.batch_size)
            if same and not record.set_aside:
                self._loop.call_soon_threadsafe(self._resume, session)
                return
            self._apply_later(self._durable.journal(LearnerLeft(learner), self._clock.now()))
        if not self._durable.controller.finished:
            self._loop.call_soon_threadsafe(
                self._report,
                "info",
                f"learner '{learner}' joins with {ready.examples} examples, batches of {ready.batch_size}",
            )
            self._apply_later(self._durable.journal(joined, self._clock.now()))

    def _resume(self, session: Session) -> None:
        self._heard[session.learner] = time.monotonic()
        self._awaited.discard(session.learner)
        self._let_the_clock_go()
        self._offer(session.learner)

    def _failed(self, session: Session, failed: pb.Failed) -> None:
        learner = session.learner

        def job() -> None:
            task = self._durable.open_task(learner)
            if task is not None and task.number == failed.task and not self._durable.controller.finished:
                seconds = failed.seconds if math.isfinite(failed.seconds) else 0.0
                steps = min(failed.steps, task.budget.steps or MOST_STEPS)
                event = TaskFailed(learner, failed.task, failed.reason[:1000], steps, max(0.0, seconds))
                self._apply_later(self._durable.journal(event, self._clock.now()))

        self._in_writer(job, session.close)  # it comes again, without this task, and is given it anew

    def check_upload(self, learner: LearnerId, header: pb.UploadHeader) -> pb.Receipt | None:
        known = self.state.find(header.task)
        if known is not None:
            if known.record["learner"] != learner:
                raise self._not_yours(learner, header.task)
            return None  # received again and compared: the same bytes get the same answer
        if self._draining is not None:
            raise Refused(_CODE.UNAVAILABLE, "the controller is stopping; keep the update and come back")
        task = self._durable.open_task(learner)
        if task is not None and task.number == header.task:
            return None
        if any(self._holds(other, header.task) for other in list(self._assignments) if other != learner):
            raise self._not_yours(learner, header.task)
        return self._too_late(header.task)

    def base_model(self, learner: LearnerId, task: int) -> Model | None:
        opened = self._durable.open_task(learner)
        blob = None if opened is None else self._durable.hashes.get(opened.based_on.version)
        if opened is None or opened.number != task or blob is None:
            return None
        return read_model(self.state.blob_path(blob), self.layout)

    def _holds(self, learner: LearnerId, number: int) -> bool:
        task = self._durable.open_task(learner)
        return task is not None and task.number == number

    def _not_yours(self, learner: LearnerId, task: int) -> Refused:
        text = f"learner '{learner}' tried to hand in task {task}, which is another learner's"
        self._loop.call_soon_threadsafe(self._report, "warning", text)
        return Refused(_CODE.PERMISSION_DENIED, f"task {task} is not a task of learner '{learner}'")

    def _too_late(self, task: int) -> pb.Receipt:
        version = self._durable.controller.community.stamp.version
        return pb.Receipt(
            verdict=pb.Receipt.REFUSED,
            reason=f"late: task {task} is not open any more; rebase onto community model {version}",
        )

    async def hand_in(self, handed: Handed) -> pb.Receipt:
        self._uploads += 1
        try:
            return await asyncio.wrap_future(self._writer.submit(self._hand_in, handed))
        finally:
            self._uploads -= 1

    def _hand_in(self, handed: Handed) -> pb.Receipt:
        """In the writer: what it returns is durable."""
        learner, header = handed.learner, handed.header
        known = self.state.find(header.task)
        if known is not None:
            if known.record["learner"] != learner:
                raise self._not_yours(learner, header.task)
            if known.blob != handed.blob:
                self._loop.call_soon_threadsafe(
                    self._report, "warning", f"learner '{learner}' sent task {header.task} again with other bytes"
                )
                raise Refused(
                    _CODE.ALREADY_EXISTS, f"task {header.task} was handed in before with other bytes; the first counts"
                )
            return pb.Receipt(verdict=pb.Receipt.ALREADY, sequence=known.seq)
        task, now = self._durable.open_task(learner), self._clock.now()
        if task is None or task.number != header.task or self._durable.controller.finished:
            return self._too_late(header.task)
        problem = handed.problem or plausible(header)
        if problem is not None:
            event: Event = TaskFailed(learner, header.task, problem)
            self._apply_later(self._durable.journal(event, now))
            return pb.Receipt(verdict=pb.Receipt.REFUSED, reason=problem)
        # The run's clock may have stood still while the learner trained on; more than passed is not charged.
        record = self._durable.controller.roster[learner]
        elapsed = max(0.0, now - record.task_sent_at + record.unclocked)
        event = UpdateRequest(
            learner,
            header.task,
            header.steps,
            min(header.seconds, elapsed),
            header.time_per_batch,
            Model.empty(),
            header.loss,
            claimed_error(header),
        )
        entry = self._durable.journal(event, now, handed.blob)
        self._apply_later(entry)
        return pb.Receipt(verdict=pb.Receipt.COMMITTED, sequence=entry.seq)

    def downloadable(self, learner: LearnerId, sha256: str) -> bool:
        hashes = self._durable.hashes
        task = self._durable.open_task(learner)
        if task is not None and hashes.get(task.based_on.version) == sha256:
            return True
        return self.finished and hashes[self._durable.controller.community.stamp.version] == sha256

    # --- evaluation -----------------------------------------------------------------------------------

    def _ask_for_judgement(self, version: int) -> None:
        if self._evaluator is not None:
            self._to_judge = version  # only the latest: a slow evaluator must not fall behind
            self._judge_wanted.set()

    async def _keep_judging(self) -> None:
        while True:
            await self._judge_wanted.wait()
            self._judge_wanted.clear()
            version, self._to_judge = self._to_judge, None
            if version is not None:
                await self._judge_one(version)

    async def _judge_one(self, version: int) -> None:
        assert self._evaluator is not None
        blob = self._durable.hashes[version]
        try:
            path = self.state.blob_path(blob)
            self._durable.pinned = self._pinned() | {blob}
            metrics = await self._evaluator.evaluate(path)
        except DataError:
            return  # a newer model has taken its place, and this one was collected
        except Exception as problem:
            self._report("warning", f"community model {version} could not be evaluated: {problem}")
            return
        await self._evaluated(version, metrics)

    async def _evaluated(self, version: int, metrics: dict[str, float]) -> None:
        try:
            entry = await self._entry_of(Evaluated(version, metrics))
        except DiskFull:
            return  # a later one will be
        values = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._report("evaluation", f"community model {version}: {values} at {entry.at:.1f} s")
        self._durable.pinned = self._pinned()

    async def _entry_of(self, event: Event) -> Entry:
        """Journal and apply an event, and wait for both."""
        done: asyncio.Future[Entry] = self._loop.create_future()

        def job() -> None:
            try:
                self._apply_later(self._durable.journal(event, self._clock.now()), done)
            except BaseException as problem:
                self._loop.call_soon_threadsafe(_answer, done, problem)
                raise

        self._in_writer(job)
        return await done

    def _best_version(self) -> int | None:
        setting = self.plan.setting
        measured = [
            (point.metrics[setting.metric], point.version)
            for point in self._fold.history
            if math.isfinite(point.metrics.get(setting.metric, math.nan))
        ]
        if not measured:
            return None
        value = (max if setting.higher_is_better else min)(value for value, _ in measured)
        return next(version for found, version in measured if found == value)

    def _pinned(self) -> set[str]:
        best = self._best_version()
        return set() if best is None else {self._durable.hashes[best]}

    def _evaluated_at(self, session: Session, evaluation: pb.Evaluation) -> None:
        """Federated evaluation: the mean over the learners, weighted by their examples, once all have reported."""
        if session.ready is None or not session.ready.evaluation_examples:
            return  # nobody asked it
        if not 1 <= evaluation.examples <= self._settings.max_examples or len(evaluation.metrics) > 50:
            raise Refused(_CODE.INVALID_ARGUMENT, "an evaluation needs examples and at most 50 metrics")
        # Sums of what is kept are finite, so that one learner's number cannot spoil the mean for all.
        metrics = {name[:60]: value for name, value in evaluation.metrics.items() if abs(value) <= _LARGEST_METRIC}
        self._measured[session.learner] = (evaluation.version, evaluation.examples, metrics)
        self._reported.add(session.learner)
        asked = {
            name
            for name, other in self._sessions.items()
            if other.ready is not None and other.ready.evaluation_examples
        }
        if not asked <= self._reported:
            return
        reports = [self._measured[name] for name in asked]
        self._reported.clear()
        version = max(report[0] for report in reports)
        if version > self._durable.controller.community.stamp.version:
            return
        shared = set.intersection(*(set(report[2]) for report in reports))
        prefix = "federated_" if self._evaluator is not None else ""
        total = sum(examples for _, examples, _ in reports)
        means = {
            prefix + name: math.fsum(examples * found[name] for _, examples, found in reports) / total
            for name in sorted(shared)
        }
        if means:
            self._spawn(self._evaluated(version, means))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # --- status ---------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """What a person wants to know of a running federation, as plain values."""
        return await asyncio.wrap_future(self._writer.submit(self._status))

    def _status(self) -> dict[str, Any]:
        controller, now, fold = self._durable.controller, self._clock.now(), self._fold
        costs = fold.costs_at(now)
        moment = time.monotonic()
        learners = []
        for record in controller.roster:
            session = self._sessions.get(record.learner)
            heard = max(self._heard.get(record.learner, -math.inf), session.last_heard if session else -math.inf)
            overdue = (
                record.task is not None
                and now - record.task_sent_at > record.task.budget.seconds + self._settings.lease
            )
            state = (
                "set aside" if record.set_aside
                else "away" if not record.present
                else "disconnected" if session is None
                else "late" if overdue
                else "training" if record.task is not None
                else "waiting"
            )  # fmt: skip
            bill = costs.by_learner.get(record.learner)
            learners.append(
                {
                    "name": record.learner,
                    "state": state,
                    "connected": session is not None,
                    "address": session.address if session else None,
                    "examples": record.examples,
                    "batch_size": record.batch_size,
                    "time_per_batch": record.time_per_batch,
                    "task": None if record.task is None else record.task.number,
                    "steps_of_task": session.steps if session else 0,
                    "budget_steps": None if record.task is None else record.task.budget.steps,
                    "silent_seconds": moment - heard if math.isfinite(heard) else None,
                    "updates": bill.update_requests if bill else 0,
                    "compression_error": fold.compression_errors.get(record.learner),
                    "refused": bill.refused if bill else 0,
                    "active": bill.active if bill else 0.0,
                    "idle": bill.idle if bill else 0.0,
                    "transfer": bill.transfer if bill else 0.0,
                }
            )
        best = self._best_version()
        points = {point.version: point for point in fold.history}
        latest = fold.history[-1].version if fold.history else None

        def measured(version: int | None) -> dict[str, float] | None:
            point = points.get(-1 if version is None else version)
            return None if point is None else {"version": point.version, "at": point.at, **point.metrics}

        state = (
            "finished" if controller.finished
            else "stopping" if self._draining is not None
            else "waiting for learners" if not controller.started
            else "paused" if controller.paused
            else "running"
        )  # fmt: skip
        return {
            "run": self.run,
            "state": state,
            "policy": self.plan.setting.label,
            "start": self.state.epoch,
            "version": controller.community.stamp.version,
            "steps": controller.community.committed_steps,
            "update_requests": controller.update_requests,
            "seconds": now,
            "deadline": controller.deadline if math.isfinite(controller.deadline) else None,
            "expected": controller.learners_expected,
            "metric": self.plan.setting.metric,
            "target": self.plan.setting.target.value if self.plan.setting.target else None,
            "latest": measured(latest),
            "best_version": best,
            "best": measured(best),
            "learners": learners,
            "costs": costs.to_json(),
            "compression_error": fold.compression_error,
            "refused_calls": dict(self._service.refusals),
            "disk_bytes": self.state.usage(),
            "finish_reason": fold.finish_reason,
        }

    def stop_run(self, reason: str) -> None:
        """End the federation for good, mixing what was committed to the open round."""
        self._post(StopRequested(reason, publish=True))


def _answer(done: asyncio.Future[Entry], answer: Entry | BaseException) -> None:
    if done.done():  # whoever asked may have been cancelled meanwhile
        return
    if isinstance(answer, BaseException):
        done.set_exception(answer)
    else:
        done.set_result(answer)


def make_core(
    policy: Any, stop: Any, terms: DeploymentSettings, refusals_allowed: int
) -> Callable[[Model, Any], Controller]:
    """The core's controller as this federation wants it."""

    def make(model: Model, store: Any) -> Controller:
        return Controller(
            policy,
            model,
            stop=stop,
            learners_expected=terms.expected,
            quorum=terms.minimum,
            refusals_allowed=refusals_allowed,
            store=store,
            models_checked=True,  # as they came over the wire; once more would only map a whole file
        )

    return make
