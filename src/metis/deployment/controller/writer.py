"""The writer: the one thread that touches the core controller and its journal.

Events are journaled and applied in the order of their arrival. After each the writer hands the event loop an
`Outcome` that never changes; the loop keeps its own `View` from these and never reads the core.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from metis.core.controller import Controller
from metis.core.events import Action, Event, LearnerId, LocalTask, RoundAbandoned, RoundFailed, SendTask, SumOpened
from metis.deployment.controller.disk import writing
from metis.deployment.controller.durable import DurableController
from metis.deployment.controller.journal import Entry
from metis.deployment.controller.openings import MaskedRound, masked_round
from metis.deployment.controller.settings import FederationPlan
from metis.deployment.controller.state import State
from metis.errors import ConfigError, DataError, DiskFull, StateError
from metis.runs.trace import to_line
from metis.system import one_thread, sleep

_T = TypeVar("_T")
Recorded = tuple[float, Event | Action]  # one line of the trace
_FAILED = "the controller has failed and stops"
_MAX_TOGETHER = 128  # updates that wait for the disk together
_DISK_FULL_PAUSE = 0.2  # seconds until the next job tries the full disk again


@dataclass(frozen=True, slots=True)
class OpenTask:
    """A task that a learner may still answer, with everything that sending it takes."""

    task: LocalTask
    sent_at: float
    sha256: str  # of the community model that it is based on
    model_mac: bytes | None
    model: bytes = b""  # the community model itself, if it is small


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the federation stands after an event."""

    started: bool
    finished: bool
    on_hold: bool
    deadline: float  # on the run's clock; infinite if nothing is due
    version: int
    sha256: str  # of that community model
    available: int  # learners that a round can count on


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one journaled event led to."""

    entry: Entry
    actions: tuple[Action, ...]
    recorded: tuple[Recorded, ...]  # what was added to the trace; nothing if the core refused the event
    tasks: Mapping[LearnerId, OpenTask | None]  # of every learner that the event or its actions concern
    standing: Standing
    masked: MaskedRound | None = None  # where a masked round stands


@dataclass(frozen=True, slots=True)
class Recovered:
    """What the journal led to before this process served anybody."""

    seconds: float  # of the run, at the latest event
    recorded: tuple[Recorded, ...]
    tasks: Mapping[LearnerId, OpenTask | None]
    standing: Standing
    learners: Mapping[LearnerId, bool]  # in the order of first joining, and whether they are present
    member_changes: Mapping[LearnerId, bool]  # in the order of the first change of each: added or removed at last
    masked: MaskedRound | None = None


class Listener(Protocol):
    """Hears of the writer's work, in the event loop."""

    def applied(self, outcome: Outcome) -> None: ...

    def disk_full(self, reason: str) -> None: ...

    def failed(self, problem: BaseException) -> None: ...


class TraceFile:
    """The lines of events.jsonl; what finds no room on the disk is written as soon as there is some."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=0)
        self._unwritten = bytearray()

    def write(self, line: str) -> None:
        """With the next `flush`."""
        self._unwritten += line.encode() + b"\n"

    def flush(self) -> None:
        with writing(self._path):
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]

    def close(self) -> None:
        self._file.close()


class Writer:
    """Journals events, then applies them; methods marked "in the writer" are called by its own jobs only."""

    durable: DurableController  # the writer's own; nobody else reads it while the thread runs

    def __init__(self, state: State, trace: Path) -> None:
        self._state = state
        self._trace = TraceFile(trace)
        self._recorded: list[Recorded] = []
        self._unapplied: deque[tuple[Entry, asyncio.Future[Entry] | None]] = deque()
        self._undecided: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._deciding = False  # a job will look at these
        self._together: list[tuple[Entry, asyncio.Future[Entry] | None]] | None = None  # journaled, not durable yet
        self._calls: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()  # for the event loop
        self._called = False  # it will look at these
        self._thread = one_thread("metis-writer")
        self._failure: BaseException | None = None  # an event may be half applied: nothing may follow it

    def recover(self, plan: FederationPlan) -> Recovered:
        """Be again what the journal says; before anything else."""
        try:
            return self._thread.submit(self._recover, plan).result()
        except BaseException:
            self.close()
            raise

    def _recover(self, plan: FederationPlan) -> Recovered:
        self.durable = DurableController(
            plan.make, plan.initial_model, self._state, self._record, keep_models=plan.deployment.keep_models,
            update_size=None if plan.encrypted is None else plan.encrypted.numbers,
        )  # fmt: skip
        roster = self.durable.controller.roster
        return Recovered(
            self.durable.now,
            self._take_recorded(),
            self._tasks(record.learner for record in roster),
            self._standing(),
            {record.learner: record.present for record in roster},
            dict(self.durable.controller.member_changes),
            self._masked(),
        )

    def attach(self, loop: asyncio.AbstractEventLoop, now: Callable[[], float], listener: Listener) -> None:
        """Say which loop hears of outcomes and what the run's clock is; before the first event."""
        self._loop, self.now, self._listener = loop, now, listener

    def close(self) -> None:
        """Finish what was submitted, and end the thread."""
        self._thread.shutdown(wait=True)
        self._trace.close()

    # --- from the event loop --------------------------------------------------------------------

    def submit(self, job: Callable[[], object], or_else: Callable[[], object] | None = None) -> None:
        """Do the job in the writer; if the disk was full, do `or_else` in the event loop."""
        self._thread.submit(self._guard, job, or_else)

    def post(self, event: Event, or_else: Callable[[], object] | None = None) -> None:
        """Let an event happen that nobody waits for."""
        self.submit(lambda: self.journal(event, self.now()), or_else)

    async def perform(self, event: Event) -> Entry:
        """Journal and apply an event, and wait for both."""
        return await self._perform(lambda: (event, None))

    async def rollback(self, version: int, after: int | None = None) -> int:
        """Go on from an earlier community model; returns the version that it has now, or raises a ConfigError."""
        latest = await self.ask(lambda: max(self.durable.hashes))
        blob = (await self._perform(lambda: self.durable.rollback(version, after))).blob
        now = await self.ask(lambda: max(known for known, name in self.durable.hashes.items() if name == blob))
        if now <= latest:
            raise ConfigError("the federation has ended; there is nothing to roll back")
        return now

    async def _perform(self, decide: Callable[[], tuple[Event, str | None]]) -> Entry:
        done: asyncio.Future[Entry] = self._loop.create_future()

        def job() -> None:
            try:
                event, blob = decide()
                self.journal(event, self.now(), blob, done=done)
            except ConfigError as problem:  # the caller's mistake, not this process's
                self.in_loop(_answer, done, problem)
            except BaseException as problem:
                self.in_loop(_answer, done, problem)
                raise

        self.submit(job, lambda: _answer(done, StateError(_FAILED)))
        return await done

    async def commit(self, decide: Callable[[], _T]) -> _T:
        """What `decide` answers in the writer, when everything that it has journaled is on the disk.

        All that wait at the same time share one wait for the disk.
        """
        answer: asyncio.Future[_T] = self._loop.create_future()
        self._undecided.append((decide, answer))
        if not self._deciding:
            self._deciding = True
            self._thread.submit(self._decide)
        return await answer

    async def ask(self, question: Callable[[], _T]) -> _T:
        """The answer to a question that only the writer can answer, behind the jobs that were submitted before."""
        return await asyncio.wrap_future(self._thread.submit(self._unless_failed, question))

    async def snapshot(self) -> None:
        with contextlib.suppress(DiskFull):  # then a restart replays more
            await self.ask(self.durable.snapshot)

    async def pin(self, versions: Collection[int]) -> dict[int, Path]:
        """Protect the files of these community models, and no others, from collection; those that are still there."""
        return await self.ask(lambda: self._pin(versions))

    def _pin(self, versions: Collection[int]) -> dict[int, Path]:
        found, blobs = {}, set()
        for version in versions:
            with contextlib.suppress(DataError):
                found[version] = self._state.blob_path(self.durable.hashes[version])
                blobs.add(self.durable.hashes[version])
        self.durable.pinned = blobs
        return found

    # --- in the writer --------------------------------------------------------------------------

    @property
    def controller(self) -> Controller:
        """The core, for jobs in the writer."""
        return self.durable.controller

    def flush_trace(self) -> None:
        """In the writer: have every line of the trace on the disk, or raise `DiskFull`."""
        self._trace.flush()

    def in_loop(self, call: Callable[..., object], *arguments: object) -> None:
        """In the writer: have something done in the event loop, in this order; it is not woken for each."""
        self._calls.append((call, arguments))
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._call)

    def _call(self) -> None:
        """In the event loop."""
        self._called = False
        try:
            for _ in range(len(self._calls)):
                call, arguments = self._calls.popleft()
                call(*arguments)
        finally:
            if self._calls and not self._called:
                self._called = True
                self._loop.call_soon(self._call)

    def _decide(self) -> None:
        """In the writer: answer those who wait."""
        self._deciding = False
        waiting = [self._undecided.popleft() for _ in range(min(len(self._undecided), _MAX_TOGETHER))]
        if not self._decide_together(waiting):
            for one in waiting:  # what is wrong with one of them must not keep the others out
                self._decide_together([one])
        if self._undecided and not self._deciding:
            self._deciding = True
            self._thread.submit(self._decide)

    def _decide_together(self, waiting: Sequence[tuple[Callable[[], Any], asyncio.Future[Any]]]) -> bool:
        """Whether they were answered; one alone always is."""
        answers: list[tuple[asyncio.Future[Any], Any]] = []
        self._together = []
        try:
            with self._state.together():
                answers = [(answer, self._unless_failed(decide)) for decide, answer in waiting]
            journaled = self._together
        except Exception as problem:
            self.durable.contents.clear()  # some were never journaled; the others are read from the journal
            if len(waiting) > 1:
                return False
            journaled, answers = [], [(answer, problem) for _, answer in waiting]
        finally:
            self._together = None
        for answer in answers:
            self.in_loop(_answer, *answer)
        for one in journaled:
            self._unapplied.append(one)
            self.submit(self._apply_first)
        return True

    def journal(
        self,
        event: Event,
        now: float,
        blob: str | None = None,
        content: bytes | None = None,
        *,
        done: asyncio.Future[Entry] | None = None,
    ) -> Entry:
        """In the writer: make the event durable, and apply it after everything that was journaled before.

        It is durable when this returns, or when all that are decided together are.
        """
        entry = self.durable.journal(event, now, blob, content)
        if self._together is not None:
            self._together.append((entry, done))
        else:
            self._unapplied.append((entry, done))
            self.submit(self._apply_first)
        return entry

    def _unless_failed(self, job: Callable[[], _T]) -> _T:
        if self._failure is not None:
            raise StateError(_FAILED)
        return job()

    def _guard(self, job: Callable[[], object], or_else: Callable[[], object] | None) -> None:
        try:
            self._unless_failed(job)
        except DiskFull as problem:
            self.in_loop(self._listener.disk_full, str(problem))
            if or_else is not None:
                self.in_loop(or_else)
            sleep(_DISK_FULL_PAUSE)
        except BaseException as problem:  # nobody waits for this job, so nobody else would learn of it
            if self._failure is None:
                self._failure = problem
                self.in_loop(self._listener.failed, problem)
                for _, done in self._unapplied:
                    if done is not None:
                        self.in_loop(_answer, done, problem)
            elif or_else is not None:
                self.in_loop(or_else)

    def _apply_first(self) -> None:
        entry, done = self._unapplied[0]
        try:
            actions = self.durable.apply(entry)
        except DiskFull:
            with contextlib.suppress(RuntimeError):  # the process is ending: the next one applies it
                self.submit(self._apply_first)
            raise
        self._unapplied.popleft()
        concerned = {action.learner for action in actions if isinstance(action, SendTask)}
        if "learner" in entry.record:
            concerned.add(entry.record["learner"])
        void = any(isinstance(action, RoundAbandoned) for action in actions)
        if void or entry.record.get("event") in ("rolled_back", "cohort_fixed"):  # tasks of many may be void
            concerned.update(record.learner for record in self.controller.roster)
        outcome = Outcome(
            entry, tuple(actions), self._take_recorded(), self._tasks(sorted(concerned)), self._standing(),
            self._masked(),
        )  # fmt: skip
        self.in_loop(self._listener.applied, outcome)
        if done is not None:
            self.in_loop(_answer, done, entry)

    def _record(self, now: float, item: Event | Action) -> None:
        self._trace.write(to_line(now, item))
        self._recorded.append((now, item))

    def _take_recorded(self) -> tuple[Recorded, ...]:
        with contextlib.suppress(DiskFull):
            self._trace.flush()
        recorded, self._recorded = tuple(self._recorded), []
        return recorded

    def _tasks(self, learners: Iterable[LearnerId]) -> dict[LearnerId, OpenTask | None]:
        return {learner: self._open_task(learner) for learner in learners}

    def _open_task(self, learner: LearnerId) -> OpenTask | None:
        task, durable = self.durable.open_task(learner), self.durable
        if task is None:
            return None
        version, sent_at = task.based_on.version, durable.controller.roster[learner].task_sent_at
        mac = durable.model_macs.get(version)
        return OpenTask(task, sent_at, durable.hashes[version], mac, durable.small_model(version))

    def _masked(self) -> MaskedRound | None:
        return masked_round(self.controller, self.durable.hashes, self.durable.local_blobs)

    def open_sum(self, event: Event, content: memoryview) -> None:
        """In the writer: journal the sum of a closed round; one that does not fit the public weights fails it."""
        secure, closed = self.controller.secure, self.controller.closed
        if not isinstance(event, SumOpened) or secure is None or closed is None or closed.version != event.version:
            return
        if secure.fits(np.frombuffer(content, np.uint8), event.learners):
            self.journal(event, self.now(), self._state.put_blob([content]))
        else:
            reason = "the sum of the weights is not the public one: a member has masked something else"
            self.journal(RoundFailed(event.version, reason), self.now())

    def _standing(self) -> Standing:
        controller = self.durable.controller
        version = controller.community.stamp.version
        return Standing(
            controller.started,
            controller.finished,
            controller.on_hold,
            controller.deadline,
            version,
            self.durable.hashes[version],
            controller.roster.available_count,
        )


def _answer(done: asyncio.Future[Any], answer: Any) -> None:
    if done.done():  # its waiter may have been cancelled meanwhile
        return
    if isinstance(answer, BaseException):
        done.set_exception(answer)
    else:
        done.set_result(answer)
