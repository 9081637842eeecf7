"""Whole runs in processes of their own, several at a time; each writes to its own directory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from metis.errors import InternalError, MetisError
from metis.simulation.pools.local import before_processes

Work = Callable[[Callable[[], None]], None]  # runs to its end; calls its argument now and then
Watch = Callable[[int, int], None]  # runs that are finished, and those that are running


def can_fork(device: str = "cpu") -> bool:
    """Whether runs can have processes of their own here; a GPU does not survive a fork."""
    return sys.platform == "linux" and device == "cpu"


def processors() -> int:
    """How many runs this machine can do at the same time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_in_processes(works: Sequence[Work], processes: int, watch: Watch | None = None) -> bool:
    """Do all the work, at most so many at a time; False if Ctrl-C ended it, after every run has saved what it has.

    The first error ends all of it. Forked processes share the data that is loaded already and need nothing that can
    be sent to them.
    """
    for leave in before_processes:
        leave()
    waiting, running = list(works), dict[Connection, Any]()
    finished, interrupted = 0, False
    problem: Exception | None = None
    try:
        while running or (waiting and not interrupted and problem is None):
            try:
                while waiting and len(running) < processes and not interrupted and problem is None:
                    process, connection = _start(waiting.pop(0), list(running))
                    running[connection] = process
                if watch is not None:
                    watch(finished, len(running))
                ready = wait(list(running), timeout=1.0)
                for connection in [own for own in running if own in ready]:
                    outcome = _outcome(connection, running.pop(connection))
                    finished += outcome is None
                    interrupted = interrupted or isinstance(outcome, KeyboardInterrupt)
                    if isinstance(outcome, Exception) and problem is None:
                        problem = outcome
                        _interrupt(running.values())
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                _interrupt(running.values())
    finally:
        for process in running.values():
            process.terminate()
    if problem is not None:
        raise problem
    return not interrupted


def _start(work: Work, others: Sequence[Connection]) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(work, theirs, [ours, *others], os.getpid()))
    with warnings.catch_warnings():
        # Python 3.12 warns of other threads; a run waits for nothing that they could hold.
        warnings.filterwarnings("ignore", ".* is multi-threaded", DeprecationWarning)
        process.start()
    theirs.close()
    return process, ours


def _child(work: Work, connection: Connection, inherited: Sequence[Connection], parent: int) -> None:
    """Do the work and send None, or what ended it."""
    os.setpgid(0, 0)  # Ctrl-C in the terminal reaches the parent, which passes it on once
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for other in inherited:
        other.close()

    def alive() -> None:
        if os.getppid() != parent:  # killed: the next start must find the directories free
            raise KeyboardInterrupt

    outcome = None  # or what ended it: as text, because some exceptions cannot cross the boundary
    try:
        work(alive)
    except KeyboardInterrupt:
        outcome = ("interrupted", "")
    except InternalError as problem:
        outcome = ("internal", str(problem))
    except MetisError as problem:
        outcome = ("error", str(problem))
    except Exception as problem:
        outcome = ("internal", f"a run failed: {type(problem).__name__}: {problem}")
    connection.send(outcome)


def _outcome(connection: Connection, process: Any) -> BaseException | None:
    try:
        received = connection.recv()
    except (EOFError, OSError):
        process.join()
        received = ("internal", f"the process of a run ended with exit code {process.exitcode}")
    process.join()
    connection.close()
    if received is None:
        return None
    kind, text = received
    return (
        KeyboardInterrupt()
        if kind == "interrupted"
        else InternalError(text)
        if kind == "internal"
        else MetisError(text)
    )


def _interrupt(processes: Any) -> None:
    """Let every process save its run and end."""
    for process in processes:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGINT)
