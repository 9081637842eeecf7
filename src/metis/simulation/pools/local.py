"""Where simulated learners train: in this process, or in worker processes with the same result.

A task's virtual end is known when it starts, so the simulator asks for results in that order and the
order in which workers finish cannot leak into a run.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from metis.core.layers import Memory
from metis.core.model import Layout, Model
from metis.errors import InternalError
from metis.learning import Trained
from metis.simulation.pools.settings import PoolSettings
from metis.simulation.pools.workplace import Measured as Measured, Memories as Memories, Workplace as Workplace  # noqa: PLC0414

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


def outcome_of(workplace: Workplace, work: str, arguments: Sequence[Any]) -> Any:
    """The result of this work, or the exception to be raised when it is asked for."""
    try:
        return getattr(workplace, work)(*arguments)
    except Exception as problem:
        return problem


class Ticket(Protocol[Result_co]):
    """A result that is wanted at a known virtual moment."""

    def result(self) -> Result_co:
        """Wait for it; raises what the work raised."""

    def cancel(self) -> None:
        """It is no longer wanted."""


Fetch: TypeAlias = Callable[[], Model]  # gets a model when the work on it begins, so that it need not be kept in memory


class Pool(Protocol):
    """Where learners train; `due` is the virtual moment at which the result will be asked for."""

    def train(
        self, due: float, learner: int, model: Fetch, task: int, steps: int, memory: Memory | None, rate: float = 1.0,
        batches_per_step: int = 1,
    ) -> Ticket[Trained]: ...  # fmt: skip

    def evaluate(
        self, due: float, model: Model, memories: Memories | None = None
    ) -> Ticket[Measured]: ...  # memories, by learner, only if the engine keeps parts for itself

    def close(self) -> None: ...


class RealPool(Pool, Protocol):
    """A pool whose learners really train, and can do so as one computation."""

    def train_batched(
        self, due: float, learners: Sequence[int], model: Fetch, tasks: Sequence[int], steps: int, rate: float
    ) -> Ticket[list[Trained | Exception]]:
        """The result of each learner, or why there is none."""


class Known(Generic[Result]):
    """A result, or an exception instead of it, that is known without any work."""

    def __init__(self, result: Result | Exception) -> None:
        self._result = result

    def result(self) -> Result:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def cancel(self) -> None:
        pass


class _Deferred(Generic[Result]):
    """Work that is done when its result is asked for, so that no local model is kept before it is needed."""

    def __init__(self, workplace: Workplace, work: str, model: Fetch, arguments: tuple[Any, ...] = ()) -> None:
        self._workplace, self._work, self._model, self._arguments = workplace, work, model, arguments

    def result(self) -> Result:
        return cast(Result, getattr(self._workplace, self._work)(self._model(), *self._arguments))

    def cancel(self) -> None:
        self._model = Model.empty


class InlinePool:
    """Trains in this process, one task at a time."""

    def __init__(self, workplace: Workplace) -> None:
        self._workplace = workplace

    def train(
        self, due: float, learner: int, model: Fetch, task: int, steps: int, memory: Memory | None, rate: float = 1.0,
        batches_per_step: int = 1,
    ) -> Ticket[Trained]:  # fmt: skip
        return _Deferred(self._workplace, "train", model, (learner, task, steps, memory, rate, batches_per_step))

    def train_batched(
        self, due: float, learners: Sequence[int], model: Fetch, tasks: Sequence[int], steps: int, rate: float
    ) -> Ticket[list[Trained | Exception]]:
        return _Deferred(self._workplace, "train_batched", model, (learners, tasks, steps, rate))

    def evaluate(self, due: float, model: Model, memories: Memories | None = None) -> Ticket[Measured]:
        return _Deferred(self._workplace, "evaluate", lambda: model, (memories,))

    def close(self) -> None:
        pass


class Job(Generic[Result]):
    """A piece of work for a worker."""

    def __init__(self, pool: WorkerPool, due: float, work: str, model: Fetch, arguments: tuple[Any, ...] = ()) -> None:
        self._pool = pool
        self.due, self.work, self.model, self.arguments = due, work, model, arguments
        self.state = "queued"  # then running, done, and at last taken or cancelled
        self.attempts = 0
        self.outcome: Any = None

    def result(self) -> Result:
        return cast(Result, self._pool.take(self))

    def cancel(self) -> None:
        self._pool.drop(self)


class WorkerPool:
    """Workers that train in the background; the task that is due first goes first.

    At most two results per worker are made ahead of time, which bounds memory whatever the number of
    learners. One thread of this process feeds each worker; all bookkeeping is under one lock.
    """

    def __init__(self, workers: int) -> None:
        self._changed = threading.Condition()
        self._queue: list[tuple[float, int, Job[Any]]] = []
        self._sequence = itertools.count()
        self._ahead = 0  # jobs running or done but not taken
        self._max_ahead = 2 * workers
        self._closed = False
        self._problem: Exception | None = None  # why there will never be a worker
        self._threads: list[threading.Thread] = []

    def train(
        self, due: float, learner: int, model: Fetch, task: int, steps: int, memory: Memory | None, rate: float = 1.0,
        batches_per_step: int = 1,
    ) -> Ticket[Trained]:  # fmt: skip
        return self._submit(Job(self, due, "train", model, (learner, task, steps, memory, rate, batches_per_step)))

    def train_batched(
        self, due: float, learners: Sequence[int], model: Fetch, tasks: Sequence[int], steps: int, rate: float
    ) -> Ticket[list[Trained | Exception]]:
        return self._submit(Job(self, due, "train_batched", model, (learners, tasks, steps, rate)))

    def evaluate(self, due: float, model: Model, memories: Memories | None = None) -> Ticket[Measured]:
        return self._submit(Job(self, due, "evaluate", lambda: model, (memories,)))

    def take(self, job: Job[Any]) -> Any:
        """Wait for this job and hand its result over."""
        with self._changed:
            if job.state in ("queued", "running"):
                # Somebody waits for it: nothing goes before it, and the bound does not hold it back.
                job.due = -1.0
                if job.state == "queued":
                    self._enqueue(job)
                self._max_ahead += 1
                try:
                    self._changed.wait_for(
                        lambda: job.state not in ("queued", "running") or self._closed or self._problem is not None
                    )
                finally:
                    self._max_ahead -= 1
            if job.state != "done":
                raise self._problem or InternalError(
                    "a result was asked for that was handed over or cancelled before, or too late"
                )
            job.state = "taken"
            self._ahead -= 1
            self._changed.notify_all()
        # The queue may hold the job a little longer, but must not hold its model.
        outcome, job.outcome = job.outcome, None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def drop(self, job: Job[Any]) -> None:
        """Forget this job; if a worker has it already, its result is thrown away."""
        with self._changed:
            if job.state == "done":
                self._ahead -= 1
                job.outcome = None
            if job.state != "taken":
                job.state = "cancelled"
            self._changed.notify_all()

    # --- for the threads that feed the workers ----------------------------------------------------

    def _start(self, feeders: Sequence[Callable[[], None]]) -> None:
        self._threads = [threading.Thread(target=feed, daemon=True) for feed in feeders]
        for thread in self._threads:
            thread.start()

    def _next_job(self) -> Job[Any] | None:
        """The job that is due first, as soon as it may run; None when the pool is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._closed or (self._queue and self._ahead < self._max_ahead))
                if self._closed:
                    return None
                job = heapq.heappop(self._queue)[2]
                if job.state == "queued":
                    job.state = "running"
                    job.attempts += 1
                    self._ahead += 1
                    self._changed.notify_all()
                    return job

    def _done(self, job: Job[Any], outcome: Any) -> None:
        with self._changed:
            if job.state == "running":
                job.outcome, job.state = outcome, "done"
            else:
                self._ahead -= 1
            job.model, job.arguments = Model.empty, ()
            self._changed.notify_all()

    def _put_back(self, job: Job[Any]) -> None:
        """The worker is gone: let another one do it."""
        with self._changed:
            self._ahead -= 1
            if job.state == "running":
                job.state = "queued"
                self._enqueue(job)
            self._changed.notify_all()

    def _give_up(self, problem: Exception) -> None:
        """Raise this wherever a result is waited for."""
        with self._changed:
            self._problem = problem
            self._changed.notify_all()

    def _end_feeding(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _submit(self, job: Job[Result]) -> Job[Result]:
        with self._changed:
            self._enqueue(job)
        return job

    def _enqueue(self, job: Job[Any]) -> None:
        heapq.heappush(self._queue, (job.due, next(self._sequence), job))
        self._changed.notify_all()


class _SharedModels:
    """Memory that the simulator and one worker share: the model to work on, and the trained model."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        both = np.frombuffer(mmap.mmap(-1, max(1, 8 * layout.size)), np.float32, 2 * layout.size)
        self._incoming, self._outgoing = both[: layout.size], both[layout.size :]
        self._written: Model | None = None

    def write(self, model: Model) -> Model | NDArray[np.int64]:
        """Write the model unless it is there already; returns what must still be sent over the pipe."""
        if model.layout is not self.layout and model.layout != self.layout:
            return model
        if model is not self._written:
            self._incoming[:], self._written = model.vector, model
        return model.counters

    def read(self, received: Model | NDArray[np.int64]) -> Model:
        """The model to work on."""
        return received if isinstance(received, Model) else Model(self.layout, self._incoming, received)

    def write_outcome(self, outcome: Any) -> Any:
        """Write the trained model; returns what must still be sent over the pipe."""
        if not isinstance(outcome, Trained) or outcome.model.layout != self.layout:
            return outcome
        self._outgoing[:] = outcome.model.vector
        return replace(outcome, model=Model.empty()), outcome.model.counters

    def read_outcome(self, received: Any) -> Any:
        """The outcome, with a copy of the trained model."""
        if not isinstance(received, tuple) or not isinstance(received[0], Trained):
            return received
        return replace(received[0], model=Model(self.layout, self._outgoing.copy(), received[1]))


class ProcessPool(WorkerPool):
    """Worker processes on this machine, with one torch thread each."""

    def __init__(self, workplace: Workplace, workers: int) -> None:
        super().__init__(workers)
        # Forked workers share the data and need no importable network; a GPU does not survive a fork, nor does JAX.
        engine = workplace.engine
        forkable = sys.platform == "linux" and getattr(engine, "device", "cpu") == "cpu"
        forkable = forkable and getattr(engine, "survives_fork", True)
        context: Any = multiprocessing.get_context("fork" if forkable else "spawn")
        self._processes = []
        self._connections: list[Connection] = []
        layout = workplace.layout or getattr(workplace.engine, "layout", None)
        shared_models = [_SharedModels(layout) if forkable and layout is not None else None for _ in range(workers)]
        for shared in shared_models:
            ours, theirs = context.Pipe()
            self._connections.append(ours)
            inherited = self._connections if forkable else []
            process = context.Process(target=_work, args=(workplace, theirs, inherited, shared), daemon=True)
            with warnings.catch_warnings():
                # Python 3.12 and JAX warn of other threads; a worker waits for nothing that they could hold.
                warnings.filterwarnings("ignore", ".* is multi-threaded", DeprecationWarning)
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                process.start()
            theirs.close()
            self._processes.append(process)
        self._start(
            [functools.partial(self._feed, *pair) for pair in zip(self._connections, shared_models, strict=True)]
        )

    def _feed(self, connection: Connection, shared: _SharedModels | None) -> None:
        while (job := self._next_job()) is not None:
            outcome: Any
            try:
                model = job.model()
                connection.send((job.work, model if shared is None else shared.write(model), job.arguments))
                outcome = connection.recv()
                if shared is not None:
                    outcome = shared.read_outcome(outcome)
            except (EOFError, OSError):
                outcome = InternalError("a worker process died; try fewer workers if memory is short")
            except Exception as problem:  # whatever it is, the job must get an answer
                outcome = InternalError(f"what a worker process answered cannot be read: {problem!r}")
            self._done(job, outcome)

    def close(self) -> None:
        """End the workers, in the middle of a task if need be."""
        self._end_feeding()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for thread in self._threads:
            thread.join()
        for connection in self._connections:
            connection.close()


def _work(
    workplace: Workplace, connection: Connection, inherited: Sequence[Connection], shared: _SharedModels | None
) -> None:
    """The life of a worker process: take a piece of work, send back its result or its exception."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the simulator's to answer
    for other_end in inherited:  # as long as a worker holds them, no worker would notice that the simulator died
        other_end.close()
    while True:
        try:
            work, received, arguments = connection.recv()
        except (EOFError, OSError):
            return
        outcome = outcome_of(workplace, work, (received if shared is None else shared.read(received), *arguments))
        try:
            connection.send(outcome if shared is None else shared.write_outcome(outcome))
        except (EOFError, OSError):
            return
        except Exception:  # some exceptions cannot cross the boundary
            connection.send(InternalError(f"a worker process failed: {outcome!r}"))


# Called before processes are forked, to shut down what would not survive it.
before_processes: list[Callable[[], None]] = []


def make_pool(workplace: Workplace, settings: PoolSettings) -> Pool:
    """The pool of these settings, with no more workers than learners."""
    pool = _make_pool(workplace, settings)
    if settings.batched < 2:
        return pool
    from metis.simulation.pools.batched import BatchedPool

    return BatchedPool(pool, workplace, settings.batched)


def _make_pool(workplace: Workplace, settings: PoolSettings) -> RealPool:
    if settings.kind == "inline":
        return InlinePool(workplace)
    if settings.kind == "processes":
        for leave in before_processes:
            leave()
        return ProcessPool(workplace, min(settings.workers or os.cpu_count() or 1, len(workplace.learners)))
    from metis.simulation.pools.ray import RayPool

    return RayPool(workplace, settings)
