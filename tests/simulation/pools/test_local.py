"""Worker processes: the right result for each ticket, whatever is cancelled, dies or is closed meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import metis
from metis.core.model import Layout, Model, TensorSpec
from metis.errors import ConfigError, DataError, Diverged, InternalError, MetisError
from metis.simulation.pools.local import InlinePool, ProcessPool, make_pool
from metis.simulation.pools.settings import PoolSettings
from simulation.federations import blobs, lively


def model(value: float, size: int = 3) -> Model:
    return Model(Layout((TensorSpec("w", (size,)),)), np.full(size, value, np.float32))


class Office:
    """A workplace in which the number of steps is the microseconds that a task takes; some tasks fail."""

    engine = SimpleNamespace(device="cpu")
    layout: Layout | None = None

    def train(self, community: Model, learner: int, task: int, steps: int, memory: Any, *rates: float) -> Any:
        time.sleep(steps / 1e6)
        if learner == -1:
            raise Diverged(f"task {task} diverged")
        return learner, task, float(community.vector[0]), os.getpid()

    def evaluate(self, community: Model, memories: Any = None) -> dict[str, float]:
        return {"loss": float(community.vector[0])}


@contextmanager
def never_hangs(seconds: float = 60.0) -> Iterator[None]:
    """A wait that never ends becomes an error that says where."""

    def ring(number: int, frame: object) -> None:
        raise TimeoutError(f"still waiting after {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


JOBS = st.lists(
    st.tuples(
        st.floats(0, 10),  # due
        st.sampled_from([0, 0, 100, 1000, 5000]),  # microseconds
        st.sampled_from(["take", "take", "take", "cancel", "cancel twice", "cancel later", "fail", "evaluate"]),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=25)
@given(jobs=JOBS, workers=st.integers(1, 3), burst=st.integers(1, 40))
def test_every_ticket_gets_its_own_result(jobs: list[tuple[float, int, str]], workers: int, burst: int) -> None:
    """Submitted in bursts, taken in the order of their dues, some cancelled before, during or after they ran."""
    with never_hangs(), closing(ProcessPool(Office(), workers)) as pool:  # type: ignore[arg-type]
        for start in range(0, len(jobs), burst):
            open_jobs = []
            for number, (due, duration, fate) in enumerate(jobs[start : start + burst], start=start):
                if fate == "evaluate":
                    ticket: Any = pool.evaluate(due, model(number))
                else:
                    learner = -1 if fate == "fail" else number
                    ticket = pool.train(due, learner, lambda n=number: model(n + 0.5), number, duration, None)
                open_jobs.append((due, number, fate, ticket))
                if fate.startswith("cancel") and fate != "cancel later":
                    ticket.cancel()
            for _, number, fate, ticket in sorted(open_jobs, key=lambda job: job[:2]):
                if fate.startswith("cancel"):
                    ticket.cancel()
                    if fate == "cancel twice":
                        ticket.cancel()
                elif fate == "evaluate":
                    assert ticket.result() == {"loss": number}
                elif fate == "fail":
                    with pytest.raises(Diverged, match=f"task {number} diverged"):
                        ticket.result()
                else:
                    assert ticket.result()[:3] == (number, number, number + 0.5)
                assert pool._ahead <= 2 * workers + 1
        with pool._changed:
            assert pool._changed.wait_for(lambda: pool._ahead == 0, timeout=600)  # cancelled ones may still run
            assert pool._max_ahead == 2 * workers


@settings(max_examples=15)
@given(tasks=st.integers(0, 12), workers=st.integers(1, 3), wait=st.floats(0, 0.01), size=st.sampled_from([3, 300_000]))
def test_close_at_any_moment(tasks: int, workers: int, wait: float, size: int) -> None:
    """Closing ends the workers in the middle of a task, also while a large model is being sent to one."""
    with never_hangs():
        pool = ProcessPool(Office(), workers)  # type: ignore[arg-type]
        tickets = [pool.train(float(n), n, lambda: model(1.0, size), n, 2_000, None) for n in range(tasks)]
        time.sleep(wait)
        pool.close()

        assert not any(process.is_alive() for process in pool._processes)
        assert not any(thread.is_alive() for thread in pool._threads)
        for ticket in tickets:
            with suppress(InternalError):  # unless it was done before the close: then it is still to be had
                ticket.result()


def test_close_while_somebody_waits() -> None:
    """Waiting for a result ends with an error when the pool closes."""
    for _ in range(5):
        pool = ProcessPool(Office(), 1)  # type: ignore[arg-type]
        tickets = [pool.train(float(n), n, lambda: model(1.0), n, 10_000_000, None) for n in range(3)]
        closer = threading.Timer(random.uniform(0, 0.05), pool.close)
        with never_hangs():
            closer.start()
            with pytest.raises(InternalError):
                tickets[-1].result()
            closer.join()


def test_a_result_is_handed_over_once() -> None:
    """Asking again, or for what was cancelled, is an error and no wait for ever."""
    with never_hangs(), closing(ProcessPool(Office(), 1)) as pool:  # type: ignore[arg-type]
        taken = pool.train(0.0, 1, lambda: model(1.0), 1, 0, None)
        cancelled = pool.train(0.0, 2, lambda: model(1.0), 2, 0, None)
        taken.result()
        cancelled.cancel()

        for ticket in (taken, cancelled):
            with pytest.raises(InternalError, match="handed over or cancelled before"):
                ticket.result()


def test_what_is_waited_for_goes_first() -> None:
    """A task that is due late but asked for now overtakes all that wait, and is not run twice."""
    with never_hangs(), closing(ProcessPool(Office(), 1)) as pool:  # type: ignore[arg-type]
        others = [pool.train(float(n), n, lambda: model(1.0), n, 1_000, None) for n in range(30)]
        last = pool.train(99.0, 99, lambda: model(1.0), 99, 0, None)

        assert last.result()[0] == 99
        assert sum(job.state == "queued" for job in others) > 20  # type: ignore[attr-defined]
        assert [ticket.result()[0] for ticket in others] == list(range(30))


def test_at_most_two_results_a_worker_are_made_ahead() -> None:
    """Memory stays bounded however many tasks are open; a model is fetched only when its task begins."""
    fetched = []

    def fetch(number: int) -> Model:
        fetched.append(number)
        return model(number)

    with never_hangs(), closing(ProcessPool(Office(), 2)) as pool:  # type: ignore[arg-type]
        tickets = [pool.train(float(n), n, lambda n=n: fetch(n), n, 0, None) for n in range(100)]
        with pool._changed:
            pool._changed.wait_for(lambda: sum(ticket.state == "done" for ticket in tickets) == 4, timeout=600)  # type: ignore[attr-defined]
        time.sleep(0.05)

        assert sorted(fetched) == [0, 1, 2, 3]
        assert [ticket.result()[0] for ticket in tickets] == list(range(100))


def test_work_is_spread_over_processes() -> None:
    """Two workers are two processes, neither of them this one."""
    with closing(ProcessPool(Office(), 2)) as pool:  # type: ignore[arg-type]
        tickets = [pool.train(float(n), n, lambda: model(1.0), n, 50_000, None) for n in range(6)]
        processes = {ticket.result()[3] for ticket in tickets}

    assert len(processes) == 2
    assert os.getpid() not in processes


def test_inline_work_is_done_when_asked_for() -> None:
    """No worker, no process: the task runs here, when its result is wanted, and not if it is cancelled."""
    pool = make_pool(Office(), PoolSettings())  # type: ignore[arg-type]
    assert isinstance(pool, InlinePool)

    assert pool.train(0.0, 1, lambda: model(2.0), 5, 0, None).result() == (1, 5, 2.0, os.getpid())
    assert pool.evaluate(0.0, model(3.0)).result() == {"loss": 3.0}
    pool.train(0.0, 1, lambda: pytest.fail("it was cancelled"), 5, 0, None).cancel()
    pool.close()


# --- what goes wrong in a worker --------------------------------------------------------------------


def test_a_killed_worker_is_one_clear_error() -> None:
    """kill -9 of a worker in the middle of a run: an error, no hang, and no process left over."""

    def kill_one(fold: Any) -> None:
        if fold.costs.update_requests == 3:
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    with never_hangs(), pytest.raises(InternalError, match="a worker process died; try fewer workers"):
        lively().simulate(metis.fedrec(1), seconds=50, workers=2, watch=kill_one)

    assert multiprocessing.active_children() == []


class Odd(MetisError):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("odd")


class Troubled:
    """Examples that cannot be read."""

    def __init__(self, problem: Exception) -> None:
        self.problem = problem

    def __len__(self) -> int:
        return len(blobs()[1])

    def batch(self, indices: object) -> Any:
        raise self.problem


def unpicklable() -> Exception:
    problem = DataError("disk on fire")
    problem.lock = threading.Lock()  # type: ignore[attr-defined]
    return problem


@pytest.mark.parametrize(
    ("problem", "kind", "sentence"),
    [
        (ValueError("not a picture"), ConfigError, "cannot train on its .* ValueError: not a picture"),
        (Odd(1, 2), InternalError, "cannot be read: .*Odd"),
        (unpicklable(), InternalError, "a worker process failed: DataError.'disk on fire'"),
    ],
)
def test_an_exception_in_a_worker_is_raised_here(problem: Exception, kind: type[Exception], sentence: str) -> None:
    """Also one that cannot cross between processes; the run does not wait for an answer that never comes."""
    with never_hangs(), pytest.raises(kind, match=sentence):
        lively(train=Troubled(problem)).simulate(metis.sync_fedavg(1), rounds=2, workers=2)

    assert multiprocessing.active_children() == []


def test_workers_have_one_thread_each() -> None:
    """More would not give the same bits, and would hang after a fork; the default is one."""
    with pytest.raises(ConfigError, match="one torch thread each: set threads to 1, or workers to 0"):
        lively(threads=2).simulate(metis.sync_fedavg(1), rounds=1, workers=2)
    with pytest.raises(ConfigError, match="workers must be a whole number, 0 or more"):
        lively().simulate(metis.sync_fedavg(1), rounds=1, workers=-1)
