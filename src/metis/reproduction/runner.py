"""Run the cells of the paper: several at the same time, each kept when it is done, all of it resumable.

Cells run in processes of one torch thread. Stopped by Ctrl-C, or by whatever stops a machine, it
goes on from its last checkpoint the next time, and ends in the same bits.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from metis.errors import ConfigError, InternalError, MetisError
from metis.experiments.build import build_federation, build_stop
from metis.experiments.compose import build_policy, build_solver
from metis.experiments.config.load import ExperimentConfig, SolverConfig, read_toml, resolve_config
from metis.experiments.data import Division, divide, dry_assignments
from metis.files import LockHeld, take_lock
from metis.reproduction.environments import Cell
from metis.reproduction.schedule import dry_run
from metis.runs.checkpoint import CHECKPOINT
from metis.runs.folds import RunFold
from metis.runs.run import CONFIG, SUMMARY, Run
from metis.runs.trace import EVENTS

_LOCK = "lock"
_LOCK_PATIENCE = 120.0  # seconds: a task that an orphan is at may take that long
_TELL_SECONDS = 0.5  # how often a cell tells how far it is
_SAME_INTERRUPT = 1.0  # seconds within which a second signal is the same Ctrl-C, sent to the group as well


@dataclass
class CellState:
    """How far one cell is."""

    cell: Cell
    folder: Path
    planned_steps: int  # at most: a target may be reached before
    status: Literal["waiting", "running", "done", "interrupted"] = "waiting"
    steps: int = 0
    steps_before: int = 0  # done in an earlier session
    at: float = 0.0  # virtual seconds
    rounds: int = 0
    metric: float | None = None
    seconds: float = 0.0  # of real time, in this session
    kept: bool = False  # it was done before

    @property
    def steps_left(self) -> int:
        return 0 if self.status == "done" else max(0, self.planned_steps - self.steps)


@dataclass
class Board:
    """All cells of a session, for whoever shows them."""

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
        """At most, as far as one can tell from the speed so far; None before anything was trained."""
        busy = sum(state.seconds for state in self.states)
        done = sum(state.steps - state.steps_before for state in self.states if not state.kept)
        if not busy or done <= 0:
            return None
        left = [state.steps_left for state in self.states]
        return max(sum(left) / self.workers, max(left, default=0)) * busy / done


Watch = Callable[[Board], None]


def cell_folder(out: Path, cell: Cell) -> Path:
    """Where the run of a cell is kept."""
    return out / cell.environment.scale / cell.name


def finished(folder: Path) -> bool:
    """Whether a folder holds a run that came to its end."""
    try:
        summary = json.loads((folder / SUMMARY).read_text("utf-8"))
        return bool(summary["finish_reason"] != "interrupted")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def kept(cell: Cell, out: Path) -> bool:
    """Whether the cell was run to its end with the settings that it has now."""
    folder = cell_folder(out, cell)
    try:
        same = _settings_of(folder) == _essence(cell.config.to_dict())
    except ConfigError:
        return False
    return same and finished(folder)


def load_finished(cells: Sequence[Cell], out: Path) -> dict[str, Run]:
    """The runs that are there, by the name of the cell."""
    return {cell.name: Run.load(cell_folder(out, cell)) for cell in cells if kept(cell, out)}


def run_cells(cells: Sequence[Cell], out: Path, workers: int, watch: Watch, *, anew: bool = False) -> Board:
    """Run what is not finished yet; an interruption keeps everything and shows as status on the board.

    A folder with the run of another configuration is refused, or with `anew` overwritten.
    """
    if workers < 1:
        raise ConfigError(f"workers must be at least 1, not {workers}")
    states = [CellState(cell, cell_folder(out, cell), 0) for cell in cells]
    _check_kept(states, anew)
    for state in states:
        if finished(state.folder):
            state.status, state.kept = "done", True
        else:
            state.planned_steps = _planned_steps(state.cell)
    board = Board(states, workers)
    _Session(board, watch).run()
    return board


def _planned_steps(cell: Cell) -> int:
    if cell.only is None:
        return dry_run(cell.config).costs.steps
    assignments = dry_assignments(cell.config)
    return dry_run(cell.config, assignments=assignments[cell.only : cell.only + 1]).costs.steps


def _check_kept(states: Sequence[CellState], anew: bool) -> None:
    for state in states:
        before, now = state.folder / CONFIG, _essence(state.cell.config.to_dict())
        if not before.exists() or (then := _settings_of(state.folder)) == now:
            continue
        if not anew:
            changed = ", ".join(_differences(then, now))
            raise ConfigError(
                f"{state.folder} was made with other settings ({changed}); choose another --out, or run what has "
                "changed anew with --force"
            )
        for name in (SUMMARY, EVENTS, CHECKPOINT, CONFIG):
            (state.folder / name).unlink(missing_ok=True)


def _settings_of(folder: Path) -> dict[str, Any]:
    """What a kept run was made with; keys that came into being since then have what they are by default."""
    content = read_toml(folder / CONFIG)
    try:
        return _essence(resolve_config(content, CONFIG, folder=folder, elsewhere=True).to_dict())
    except ConfigError:
        return _essence(content)  # it says something that is no longer understood


def _essence(content: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the result of a run: not where its data lies, how it is run, or what its policy says anyway."""
    essence = {key: value for key, value in content.items() if key not in ("run", "deployment")}
    essence["data"] = {key: value for key, value in essence.get("data", {}).items() if key != "folder"}
    shared = {key: value for key, value in essence.get("training", {}).items() if key not in SolverConfig.model_fields}
    essence["training"] = shared
    essence["learners"] = [_without_folders(group) for group in essence.get("learners", [])]
    return json.loads(json.dumps(essence))  # type: ignore[no-any-return]


def _without_folders(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group of learners; of its recordings the names, wherever they lie."""
    group = dict(group)
    if group.get("speed_trace"):
        group["speed_trace"] = Path(group["speed_trace"]).name
    presence = group.get("availability")
    if isinstance(presence, dict) and presence.get("file"):
        group["availability"] = {**presence, "file": Path(presence["file"]).name}
    return group


def _differences(then: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in {**then, **now}:
            yield from _differences(then.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for place, (old, new) in enumerate(zip(then, now, strict=True)):
            yield from _differences(old, new, f"{path}.{place}")
    elif then != now:
        yield f"{path} was {then}, is {now}"


@dataclass
class _Worker:
    """A process that runs one cell after the other."""

    process: Any
    connection: Connection
    begun: bool = False  # it is up, and Ctrl-C is heard
    state: CellState | None = None
    since: float = 0.0


class _Session:
    """The processes of one call of `run_cells`."""

    def __init__(self, board: Board, watch: Watch) -> None:
        self._board, self._watch = board, watch
        self._workers: list[_Worker] = []
        self._problems: list[tuple[str, MetisError]] = []
        self._stopping = False

    def run(self) -> None:
        # The longest first, so that no long one is left alone at the end.
        waiting = [state for state in self._board.states if state.status == "waiting"]
        waiting.sort(key=lambda state: state.planned_steps, reverse=True)
        with _one_interrupt(self._stop):
            try:
                for _ in range(min(self._board.workers, len(waiting))):
                    if not self._stopping:
                        self._workers.append(_start_worker())
                while self._workers:
                    self._hand_out(waiting)
                    self._listen()
                    self._watch(self._board)
            finally:
                for worker in self._workers:
                    worker.process.terminate()
        if self._problems:
            name, problem = self._problems[0]
            raise type(problem)(f"{name}: {problem}")

    def _hand_out(self, waiting: list[CellState]) -> None:
        for worker in [worker for worker in self._workers if worker.state is None]:
            if not waiting or self._stopping:
                worker.connection.close()
                worker.process.join(0 if self._stopping and not worker.begun else None)
                self._workers.remove(worker)
                continue
            state = waiting.pop(0)
            state.folder.mkdir(parents=True, exist_ok=True)
            cell = state.cell
            head = f"# {cell.environment.paper.title}, scale {cell.environment.scale}: {cell.name}\n\n"
            (state.folder / CONFIG).write_text(head + cell.config.to_toml(), encoding="utf-8")
            worker.connection.send((cell.config, cell.only, state.folder))
            worker.state, worker.since, state.status = state, time.perf_counter(), "running"

    def _listen(self) -> None:
        ready = wait([worker.connection for worker in self._workers], timeout=_TELL_SECONDS)
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            try:
                self._hear(worker, worker.connection.recv())
            except (EOFError, OSError):
                self._lost(worker)
        for worker in self._workers:
            if worker.state is not None:
                worker.state.seconds = time.perf_counter() - worker.since

    def _hear(self, worker: _Worker, message: Any) -> None:
        state = worker.state
        if message == "up":
            worker.begun = True
        elif isinstance(message, MetisError):
            self._problems.append(("a cell" if state is None else state.cell.name, message))
            self._stop()
        elif isinstance(message, dict) and state is not None:
            for name, value in message.items():
                setattr(state, name, value)
        elif message == "ended" and state is not None:
            state.seconds = time.perf_counter() - worker.since
            state.status = "done" if finished(state.folder) else "interrupted"
            worker.state = None

    def _lost(self, worker: _Worker) -> None:
        """The process is gone, because we stopped it or because something else did."""
        worker.process.join()
        worker.connection.close()
        self._workers.remove(worker)
        if worker.state is not None:
            worker.state.status = "interrupted"
            if not self._stopping:
                code = worker.process.exitcode
                problem = InternalError(f"its process ended with {code} before the run did")
                self._problems.append((worker.state.cell.name, problem))
                self._stop()

    def _stop(self) -> None:
        """Let every process keep what it has and end."""
        if self._stopping:
            return
        self._stopping = True
        for worker in self._workers:
            if os.name == "posix" and worker.begun:
                os.kill(worker.process.pid, signal.SIGINT)
            else:
                worker.process.terminate()  # the last checkpoint stays


def _start_worker() -> _Worker:
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    with _deaf():
        process.start()
    theirs.close()
    return _Worker(process, ours)


@contextmanager
def _one_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `stop`; a later one raises as usual."""
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
    except ValueError:  # not the main thread: nobody sends us signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _deaf() -> Iterator[None]:
    """A process that is started in here ignores Ctrl-C until it is up."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(connection: Connection) -> None:
    """The life of a worker process: one cell after the other, until there are no more or it is told to stop."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # the terminal's Ctrl-C goes to the session, which tells us once
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(KeyboardInterrupt, EOFError, OSError):  # the session has gone, or wants us to go
        connection.send("up")
        divisions = _Divisions()
        while True:
            config, only, folder = connection.recv()
            try:
                _run_cell(connection, divisions, config, only, folder)
            except MetisError as problem:
                connection.send(problem)
            except Exception as problem:  # so that the session can name the cell
                connection.send(InternalError(f"{type(problem).__name__}: {problem}"))
            connection.send("ended")


def _run_cell(
    connection: Connection, divisions: _Divisions, config: ExperimentConfig, only: int | None, folder: Path
) -> None:
    last = 0.0
    before: int | None = None

    def tell(fold: RunFold) -> None:
        nonlocal last, before
        now = time.perf_counter()
        if now - last < _TELL_SECONDS:
            return
        last = now
        steps = fold.costs.steps
        before = steps if before is None else before
        metric = fold.history[-1].metrics.get(fold.setting.metric) if fold.history else None
        try:
            connection.send(
                {"steps": steps, "steps_before": before, "at": fold.now, "rounds": fold.version, "metric": metric}
            )
        except OSError:  # nobody listens any more
            raise KeyboardInterrupt from None

    division = divisions.get(config)
    if only is not None:
        division = replace(division, assignments=division.assignments[only : only + 1])
    with _alone_in(folder):
        run = execute(config, folder, division=division, resume=(folder / CHECKPOINT).exists(), watch=tell)
    end = run.costs
    connection.send({"steps": end.steps, "at": end.parallel_time, "rounds": run.rounds, "metric": run.final_metric})


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two processes that write one run would spoil it: wait a while for the other one, which may be about to end."""
    try:
        lock = take_lock(folder / _LOCK, wait=_LOCK_PATIENCE)
    except LockHeld:
        raise ConfigError(f"another process is at work in {folder}; wait for it or end it") from None
    try:
        yield
    finally:
        os.close(lock)


class _Divisions:
    """The division that was asked for last: cells of one environment share it."""

    def __init__(self) -> None:
        self._key = ""
        self._division: Division | None = None

    def get(self, config: ExperimentConfig) -> Division:
        content = config.to_dict()
        key = json.dumps([content.get(table) for table in ("seed", "data", "partition", "learners")])
        if self._division is None or key != self._key:
            self._division = None  # not two data sets in memory
            self._key, self._division = key, divide(config)
        return self._division


def execute(
    config: ExperimentConfig,
    out: Path,
    *,
    division: Division | None = None,
    resume: bool = False,
    watch: Callable[[RunFold], None] | None = None,
) -> Run:
    """Run the first policy of a configuration in this process and keep it in a folder."""
    policy = config.policy[0]
    return build_federation(config, source=str(out / CONFIG), division=division).simulate(
        build_policy(policy),
        build_stop(config),
        target=config.evaluation.target,
        solver=build_solver(policy.training),
        evaluate_every=config.evaluation.every_seconds,
        store=config.run.store,
        refusals_allowed=config.run.refusals_allowed,
        checkpoint_every=config.run.checkpoint_every,
        out=out,
        resume=resume,
        watch=watch,
    )
