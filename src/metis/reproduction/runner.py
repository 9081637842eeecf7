"""Run the cells of the paper, several at the same time; each is kept when it is done, and all can be resumed.

Cells run in processes with one torch thread each. After Ctrl-C, or whatever else stopped the machine, a cell continues
from its last checkpoint the next time and ends in the same bits.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from metis.errors import ConfigError, InternalError, MetisError
from metis.reproduction.curves import curve_file, read_curve
from metis.reproduction.environments import Cell
from metis.reproduction.kept import cell_folder, check_kept, finished
from metis.reproduction.queue import Entry
from metis.reproduction.schedule import planned_steps
from metis.reproduction.worker import REPORT_SECONDS, Job, work
from metis.runs.run import CONFIG

_SAME_INTERRUPT = 1.0  # seconds in which a second signal is the same Ctrl-C, also sent to the process group


@dataclass
class CellState:
    """The progress of one cell."""

    cell: Cell
    folder: Path
    planned_steps: int  # at most: the target may be reached earlier
    status: Literal["waiting", "running", "done", "interrupted"] = "waiting"
    steps: int = 0
    steps_before: int = 0  # done in an earlier session
    at: float = 0.0  # virtual seconds
    rounds: int = 0
    metric: float | None = None
    seconds: float = 0.0  # real time in this session
    kept: bool = False  # finished in an earlier session
    curve: Path | None = None  # what it measured is kept there

    @property
    def steps_left(self) -> int:
        return 0 if self.status == "done" else max(0, self.planned_steps - self.steps)


@dataclass
class Board:
    """All cells of a session, to be displayed."""

    states: list[CellState]
    workers: int
    started: float = field(default_factory=time.perf_counter)

    def count(self, status: str) -> int:
        return sum(state.status == status for state in self.states)

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    @property
    def seconds_left(self) -> float | None:
        """An upper bound, estimated from the speed so far; None before anything was trained."""
        busy = sum(state.seconds for state in self.states)
        done = sum(state.steps - state.steps_before for state in self.states if not state.kept)
        if not busy or done <= 0:
            return None
        left = [state.steps_left for state in self.states]
        return max(sum(left) / self.workers, max(left, default=0)) * busy / done


Watch = Callable[[Board], None]


def run_cells(cells: Sequence[Cell], out: Path, workers: int, watch: Watch, *, force: bool = False) -> Board:
    """Run what is not finished yet; an interruption keeps everything and shows as a status on the board.

    A folder with the run of another configuration is refused, or with `force` overwritten.
    """
    if workers < 1:
        raise ConfigError(f"workers must be at least 1, not {workers}")
    states = [CellState(cell, cell_folder(out, cell), 0) for cell in cells]
    check_kept(cells, out, force=force)
    for state in states:
        if finished(state.folder):
            state.status, state.kept = "done", True
        else:
            state.planned_steps = planned_steps(state.cell)
    board = Board(states, workers)
    # The longest first, so that no long one runs alone at the end.
    waiting = [Turn(state) for state in states if state.status == "waiting"]
    waiting.sort(key=lambda turn: turn.state.planned_steps, reverse=True)
    _Session(board, watch, waiting, out).run()
    return board


def run_queue(entries: Sequence[Entry], out: Path, results: Path, workers: int, watch: Watch) -> Board:
    """Run what the kept curves do not show yet, in this order; a run's state stays in `out` between its turns."""
    open_ = [entry for entry in entries if not entry.done(results)]
    states: dict[str, CellState] = {}
    waiting = []
    for entry in open_:
        cell = entry.cell
        if cell.name not in states:
            curve = curve_file(results, cell)
            states[cell.name] = CellState(cell, cell_folder(out, cell), 0, curve=curve)  # planned when its turn comes
        waiting.append(Turn(states[cell.name], entry.until))
    board = Board(list(states.values()), workers)
    _Session(board, watch, waiting, out).run()
    return board


@dataclass
class Turn:
    """What a worker does next: a whole run, or its part until some virtual second."""

    state: CellState
    until: float | None = None


@dataclass
class _Worker:
    """A worker process as the session sees it."""

    process: Any
    connection: Connection
    started: bool = False  # it is running and handles SIGINT
    state: CellState | None = None
    since: float = 0.0


class _Session:
    """The processes of one call of `run_cells`."""

    def __init__(self, board: Board, watch: Watch, waiting: list[Turn], out: Path) -> None:
        self._board, self._watch, self._waiting, self._out = board, watch, waiting, out
        self._workers: list[_Worker] = []
        self._errors: list[tuple[str, MetisError]] = []
        self._stopping = False

    def run(self) -> None:
        waiting = self._waiting
        with _one_interrupt(self._stop):
            try:
                for _ in range(min(self._board.workers, len(waiting))):
                    if not self._stopping:
                        self._workers.append(_start_worker())
                while self._workers:
                    self._assign()
                    self._listen()
                    self._watch(self._board)
            finally:
                for worker in self._workers:
                    worker.process.terminate()
        if self._errors:
            name, problem = self._errors[0]
            raise type(problem)(f"{name}: {problem}")

    def _assign(self) -> None:
        for worker in [worker for worker in self._workers if worker.state is None]:
            self._waiting = [turn for turn in self._waiting if turn.state.status != "done"]
            turn = next((turn for turn in self._waiting if turn.state.status != "running"), None)
            if turn is None or self._stopping:
                worker.connection.close()
                worker.process.join(0 if self._stopping and not worker.started else None)
                self._workers.remove(worker)
                continue
            self._waiting.remove(turn)
            state = turn.state
            if state.curve is not None and not state.planned_steps:
                check_kept([state.cell], self._out, force=True)
                state.planned_steps = planned_steps(state.cell)
            state.folder.mkdir(parents=True, exist_ok=True)
            cell = state.cell
            head = f"# {cell.environment.paper.title}, scale {cell.environment.scale}: {cell.name}\n\n"
            (state.folder / CONFIG).write_text(head + cell.config.to_toml(), encoding="utf-8")
            worker.connection.send(Job(cell, state.folder, turn.until, state.curve))
            worker.state, worker.since, state.status = state, time.perf_counter(), "running"

    def _listen(self) -> None:
        ready = wait([worker.connection for worker in self._workers], timeout=REPORT_SECONDS)
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            try:
                self._receive(worker, worker.connection.recv())
            except (EOFError, OSError):
                self._lost(worker)
        for worker in self._workers:
            if worker.state is not None:
                worker.state.seconds = time.perf_counter() - worker.since

    def _receive(self, worker: _Worker, message: Any) -> None:
        state = worker.state
        if message == "started":
            worker.started = True
        elif isinstance(message, MetisError):
            self._errors.append(("a cell" if state is None else state.cell.name, message))
            self._stop()
        elif isinstance(message, dict) and state is not None:
            for name, value in message.items():
                setattr(state, name, value)
        elif message == "ended" and state is not None:
            state.seconds = time.perf_counter() - worker.since
            more = any(turn.state is state for turn in self._waiting) and not self._stopping
            state.status = "done" if self._has_ended(state) else "waiting" if more else "interrupted"
            worker.state = None

    def _has_ended(self, state: CellState) -> bool:
        """By its own rule, or at its target, which is in its curve."""
        curve = None if state.curve is None else read_curve(state.curve)
        return finished(state.folder) or (curve is not None and curve.covers(state.cell))

    def _lost(self, worker: _Worker) -> None:
        """The process has ended, because we stopped it or because something else did."""
        worker.process.join()
        worker.connection.close()
        self._workers.remove(worker)
        if worker.state is not None:
            worker.state.status = "interrupted"
            if not self._stopping:
                code = worker.process.exitcode
                problem = InternalError(f"its process ended with exit code {code} before the run was finished")
                self._errors.append((worker.state.cell.name, problem))
                self._stop()

    def _stop(self) -> None:
        """Let every process save its run and end."""
        if self._stopping:
            return
        self._stopping = True
        for worker in self._workers:
            if os.name == "posix" and worker.started:
                os.kill(worker.process.pid, signal.SIGINT)
            else:
                worker.process.terminate()  # its last checkpoint stays


def _start_worker() -> _Worker:
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs,), daemon=True)
    with _ignoring_interrupts():
        process.start()
    theirs.close()
    return _Worker(process, ours)


@contextmanager
def _one_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `stop`; a second one, later, raises as usual."""
    first: list[float] = []

    def interrupt(number: int, frame: object) -> None:
        if not first:
            first.append(time.perf_counter())
            stop()
        elif time.perf_counter() - first[0] > _SAME_INTERRUPT:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, interrupt)
    except ValueError:  # not the main thread, which alone receives signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """A process started in here ignores Ctrl-C until it handles SIGINT itself."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
