"""One thread, one virtual clock, many processes: an event loop in which each callback belongs to a process.

A *boot* is one incarnation of a process. It is found in the context of whatever runs, so that what a dead boot still
wanted to do is dropped, what a stopped one wants waits, and which of the others goes on is drawn from the seed.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from greenlet import getcurrent, greenlet

BOOT: contextvars.ContextVar[Boot | None] = contextvars.ContextVar("boot", default=None)
EPOCH = 1.8e9  # the date at which every simulation begins
_ENDLESS = 100_000  # steps of a seed; most take four thousand
_FLOOD = 300  # jobs that wait for one thread: a queue that only grows


class Crashed(BaseException):
    """Unwinds what still runs of a dead process; nothing that it does has an effect."""


class Stuck(Exception):
    """Nothing is left that could happen."""


class Violation(Exception):
    """The system did what it must never do."""


class Boot:
    """One incarnation of a process; its callbacks, files and connections end with it."""

    def __init__(self, world: World, name: str, number: int) -> None:
        self.world, self.name, self.number = world, name, number
        self.rng = random.Random(f"{world.seed} {name} {number}")
        self.dead = self.stopped = False
        self.deferred: list[_Handle] = []  # while it is stopped
        self.monotonic_offset = self.rng.uniform(10, 1e5)
        self.wall_offset = 0.0
        self.at_death: list[Callable[[bool], object]] = []  # with whether its machine lost its power
        self.exit_code: int | None = None
        self.machine: Any = None  # whose disk it has
        self._text = f"{name}.{number}"
        self.context = world.context.copy()
        self.context.run(BOOT.set, self)

    def __repr__(self) -> str:
        return self._text


class _Task(asyncio.Task[Any]):
    """The order of a set of tasks must not depend on their addresses."""

    count = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _Task.count += 1
        self._number = _Task.count
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Handle:
    """What `asyncio.Handle` and `TimerHandle` are to their users."""

    __slots__ = ("_arguments", "_callback", "_cancelled", "_when", "boot", "context")

    def __init__(self, when: float, callback: Any, arguments: tuple[Any, ...], context: Any) -> None:
        self._when, self._callback, self._arguments, self._cancelled = when, callback, arguments, False
        if context is None:
            self.context: contextvars.Context = contextvars.copy_context()
            self.boot = BOOT.get()
        else:
            self.context, self.boot = context, context.get(BOOT)

    def cancel(self) -> None:
        self._cancelled, self._callback, self._arguments = True, None, ()

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        return self._when


class VirtualLoop(asyncio.BaseEventLoop):
    """Time jumps to the next timer; among the processes that can go on one is drawn."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world, self._rng, self.now = world, random.Random(f"loop {world.seed}"), 0.0
        self._queues: dict[Boot | None, deque[_Handle]] = {}
        self._timers: list[tuple[float, int, _Handle]] = []
        self._count = itertools.count()  # timers of one time come in their order
        self._ready_boots: list[Boot | None] = []
        self.kept: list[Any] = []  # tasks and generators: none is closed by whichever process happens to run then
        self.steps = 0
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._escaped)

    def _make_task(self, loop: Any, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = _Task(work, loop=loop, **{name: value for name, value in options.items() if value is not None})
        self.kept.append(task)
        return task

    def _escaped(self, loop: Any, context: dict[str, Any]) -> None:
        boot, problem = BOOT.get(), context.get("exception")
        if not (isinstance(problem, Crashed) or (boot is not None and boot.dead) or self._world.over):
            self._world.violated(f"nobody caught: {context.get('message')}: {problem!r}")

    # --- what the base class wants --------------------------------------------------------------

    def _process_events(self, event_list: Any) -> None: ...

    def _write_to_self(self) -> None: ...

    def _timer_handle_cancelled(self, handle: Any) -> None: ...

    async def shutdown_asyncgens(self) -> None: ...

    def _asyncgen_firstiter_hook(self, generator: Any) -> None:
        self.kept.append(generator)

    def _asyncgen_finalizer_hook(self, generator: Any) -> None: ...

    def add_signal_handler(self, *arguments: Any) -> None:
        raise NotImplementedError

    def remove_signal_handler(self, *arguments: Any) -> bool:
        raise NotImplementedError

    def time(self) -> float:
        return self.now

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def call_soon(self, callback: Any, *arguments: Any, context: Any = None) -> _Handle:  # type: ignore[override]
        handle = _Handle(0.0, callback, arguments, context)
        boot = handle.boot
        queue = self._queues.get(boot)
        if queue is None:
            queue = self._queues[boot] = deque()
        if not queue:
            self._ready_boots.append(boot)
        queue.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(self, when: float, callback: Any, *arguments: Any, context: Any = None) -> _Handle:  # type: ignore[override]
        handle = _Handle(when, callback, arguments, context)
        heapq.heappush(self._timers, (when, next(self._count), handle))
        return handle

    def call_later(self, delay: float, callback: Any, *arguments: Any, context: Any = None) -> _Handle:  # type: ignore[override]
        # A clock that stands still must not be waited for: less than this is lost in the sum.
        when = self.now + (delay if delay > 1e-6 else 1e-6)
        handle = _Handle(when, callback, arguments, context)
        heapq.heappush(self._timers, (when, next(self._count), handle))
        return handle

    def run_in_executor(self, executor: Any, work: Any, *arguments: Any) -> Any:
        if executor is not None and not isinstance(executor, Workers):
            return asyncio.wrap_future(executor.submit(work, *arguments), loop=self)
        boot, future = BOOT.get(), self.create_future()
        assert boot is not None
        self.call_later(self._world.thread_delay(), _do, work, arguments, future, context=boot.context.copy())
        return future

    # --- who goes on ----------------------------------------------------------------------------

    def _push(self, handle: _Handle) -> None:
        boot = handle.boot
        queue = self._queues.get(boot)
        if queue is None:
            queue = self._queues[boot] = deque()
        if not queue:
            self._ready_boots.append(boot)
        queue.append(handle)

    def go_on(self, boot: Boot) -> None:
        """After SIGCONT."""
        boot.stopped, waiting, boot.deferred = False, boot.deferred, []
        for handle in waiting:
            self._push(handle)

    def _run_once(self) -> None:
        timers, ready, queues, draw = self._timers, self._ready_boots, self._queues, self._rng.random
        if not ready:
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if not timers:
                raise Stuck("nothing is left that could happen")
            self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= self.now:
            handle = heapq.heappop(timers)[2]
            if not handle._cancelled:
                self._push(handle)
        while ready and not self._stopping:  # type: ignore[attr-defined]
            chosen = int(draw() * len(ready)) if len(ready) > 1 else 0
            boot = ready[chosen]
            queue = queues[boot]
            handle = queue.popleft()
            if not queue:
                ready[chosen] = ready[-1]
                ready.pop()
            if handle._cancelled or (boot is not None and boot.dead):
                continue
            if boot is not None and boot.stopped:
                boot.deferred.append(handle)
                continue
            self.steps += 1
            if self.steps == _ENDLESS:
                raise Stuck(f"I18: {_ENDLESS} steps and no end: something goes round in circles")
            try:
                handle.context.run(handle._callback, *handle._arguments)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as problem:
                handle.context.run(
                    self.call_exception_handler,
                    {"message": f"Exception in callback {handle._callback}", "exception": problem},
                )


def _do(work: Callable[..., Any], arguments: tuple[Any, ...], future: asyncio.Future[Any]) -> None:
    """A job of one of several threads, as one step of the loop; what became of it, unless nobody waits any more."""
    if future.cancelled():
        return
    try:
        answer = work(*arguments)
    except Crashed:
        raise
    except BaseException as problem:
        if not future.cancelled():
            future.set_exception(problem)
    else:
        if not future.cancelled():
            future.set_result(answer)


class _Job(Future[Any]):
    """Work of a thread, done as one step of the loop."""

    def __init__(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self._work: Any = (work, arguments)

    def do(self) -> None:
        job, self._work = self._work, None
        if job is None or not self.set_running_or_notify_cancel():
            return
        try:
            answer = job[0](*job[1])
        except Crashed:
            raise
        except BaseException as problem:
            self.set_exception(problem)
        else:
            self.set_result(answer)

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.do()  # a thread that is waited for runs
        return super().result(0)


class Workers(Executor):
    """Several threads: jobs end in any order."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        job, world = _Job(work, arguments), self._boot.world
        world.loop.call_later(world.thread_delay(), job.do, context=self._boot.context.copy())
        return job


class Worker(Executor):
    """One thread: a job after the other, each after a delay; between two calls of the disk others may go on."""

    def __init__(self, boot: Boot) -> None:
        self._boot, self._queue = boot, deque[_Job]()
        self._busy = self._closed = False
        self._slept, self._free_at = 0.0, 0.0
        self._running: greenlet | None = None

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        job, world = _Job(work, arguments), self._boot.world
        self._queue.append(job)
        if len(self._queue) == _FLOOD:
            world.violated(f"I19: {_FLOOD} jobs wait for one thread of {self._boot.name}")
        if not self._busy:
            self._busy = True
            self._later(self._next, world.thread_delay() + max(0.0, self._free_at - world.loop.now))
        return job

    def _later(self, call: Callable[[], None], seconds: float) -> None:
        self._boot.world.loop.call_later(seconds, call, context=self._boot.context.copy())

    def _next(self) -> None:
        if self._queue and self._running is None:
            self._running = greenlet(self._queue.popleft().do)
            self._running.gr_context = self._boot.context.copy()
            self.proceed()

    def proceed(self) -> None:
        """Let the job go on until it ends or pauses."""
        running, world = self._running, self._boot.world
        if running is None or running is getcurrent():
            return
        running.parent, before, world.worker = getcurrent(), world.worker, self
        try:
            pause = running.switch()
        finally:
            world.worker = before
        if not running.dead:
            self._later(self.proceed, pause)
            return
        self._running, slept, self._slept = None, self._slept, 0.0
        self._busy, self._free_at = bool(self._queue), world.loop.now + slept
        if self._busy:
            self._later(self._next, world.thread_delay() + slept)

    def maybe_pause(self) -> None:
        """In a job: perhaps another thread is quicker."""
        world = self._boot.world
        if getcurrent() is self._running and world.rng.random() < world.interleaving:
            assert self._running.parent is not None
            self._running.parent.switch(world.thread_delay())
            if self._boot.dead or world.over:
                raise Crashed

    def sleep(self, seconds: float) -> None:
        """The job that runs keeps its thread for longer."""
        self._slept += seconds

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        while self._running is not None and self._running is not getcurrent():
            self.proceed()
        while self._queue:
            self._queue.popleft().do()


class ThreadLock:
    """A lock between the threads of a process; one that waits for it lets its holder go on."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self._holder: greenlet | None = None
        self._worker: Worker | None = None
        self._depth = 0

    def __enter__(self) -> None:
        while self._holder is not None and self._holder is not getcurrent():
            assert self._worker is not None, "only a job of a thread can pause while it holds a lock"
            self._boot.world.sometimes("a thread waited for a lock")
            self._worker.proceed()
        self._holder, self._depth, self._worker = getcurrent(), self._depth + 1, self._boot.world.worker

    def __exit__(self, *reason: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None


class World:
    """One seed: its loop, what was drawn, what happened, and what was found wrong."""

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.seed, self.over = seed, False
        self.rng = random.Random(f"world {seed}")
        self.context = contextvars.copy_context()
        self.context.run(BOOT.set, None)
        self.loop = VirtualLoop(self)
        self.worker: Worker | None = None  # whose job runs
        self.dawdling: dict[str, float] = {}  # processes whose batches take longer, and by which factor
        self.interleaving = 0.0  # probability that a job pauses at a call of the disk
        self.slowness = 0.003  # seconds that a thread takes at most to begin
        self._traced = traced
        self.events: list[tuple[float, str, str, str]] = []  # virtual time, process, kind, text; if it is traced
        self.violation_at: float | None = None
        self.reached: Counter[str] = Counter()
        self.problem: asyncio.Future[None] = self.loop.create_future()
        self._noted: list[str] = []

    def thread_delay(self) -> float:
        return self.rng.random() * self.slowness

    def note(self, kind: str, text: str) -> None:
        """One line of the trace: virtual time, process, what happened."""
        boot = BOOT.get()
        who = "-" if boot is None else boot._text
        self._noted.append(f"{self.loop.now!r} {who} {kind} {text}")
        if self._traced:
            self.events.append((self.loop.now, who, kind, text))

    @property
    def lines(self) -> list[str]:
        """The trace as people read it."""
        return [f"{at:11.6f} {boot:>6} {kind:<9} {text}" for at, boot, kind, text in self.events]

    @property
    def digest(self) -> str:
        """Of the whole trace; equal for equal seeds, whether or not the lines were kept."""
        return hashlib.blake2b("\n".join(self._noted).encode(), digest_size=8).hexdigest()

    def sometimes(self, what: str) -> None:
        """A rare branch was reached; over many seeds each must be."""
        self.reached[what] += 1

    def violated(self, text: str) -> None:
        self.note("VIOLATED", text)
        self.violation_at = self.loop.now if self.violation_at is None else self.violation_at
        if not self.problem.done():
            self.problem.set_exception(Violation(text))
