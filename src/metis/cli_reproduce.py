"""`metis reproduce`: the paper's tables and figures, from its own experiments in virtual time."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from metis.errors import ConfigError
from metis.experiments.cells import SCALES, Environment, Scale, load_environments
from metis.experiments.compare import compare
from metis.experiments.config import did_you_mean
from metis.experiments.plan import Plan, make_plan
from metis.experiments.reproduce import Board, CellState, load_finished, run_cells
from metis.reporting.console import comparison_table, number

RESULTS = ("table2", "table3", "figure7", "figure8", "figure9", "figure10", "figure11", "figure12")


def chosen_environments(wanted: Sequence[str], environments: dict[str, Environment]) -> list[Environment]:
    """The environments that these results need, in the order of the paper."""
    for name in wanted:
        if name != "all" and name not in RESULTS:
            raise ConfigError(f"there is no result '{name}'; {did_you_mean(name, [*RESULTS, 'all'])}")
    names = set(RESULTS) if "all" in wanted else set(wanted)
    return [environment for environment in environments.values() if names & set(environment.paper.results)]


def usual_workers(cells: int) -> int:
    """As many as there are processors for this process, but no more than cells."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(processors, cells))


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    results: tuple[str, ...]
    scale: str = "small"
    out: Path = Path("runs/paper")
    workers: int | None = None
    dry_run: bool = False
    rounds: int | None = None
    overrides: tuple[str, ...] = ()
    anew: bool = False


@dataclass(frozen=True)
class Done:
    """The document for --json, and whether everything that was asked for is there."""

    document: Any
    complete: bool = True


def command(request: Request, stdout: Console, stderr: Console) -> Done:
    """Do what was asked for; results go to one console, progress to the other."""
    if request.scale not in SCALES:
        raise ConfigError(f"--scale is '{request.scale}', must be one of {', '.join(SCALES)}")
    scale: Scale = request.scale
    if request.rounds is not None and not request.dry_run:
        raise ConfigError("--rounds is for --dry-run; how long a run takes is in its file, or --set stop.rounds=...")
    environments = chosen_environments(request.results, load_environments(scale, overrides=request.overrides))
    if request.dry_run:
        made = [(there, [make_plan(cell, request.rounds) for cell in there.cells]) for there in environments]
        for environment, plans in made:
            stdout.print(plan_table(environment, plans))
        return Done([plan.to_json() for _, plans in made for plan in plans])
    return reproduce(request, environments, stdout, stderr)


def reproduce(request: Request, environments: Sequence[Environment], stdout: Console, stderr: Console) -> Done:
    """Run what is missing, then show what is there."""
    wanted = RESULTS if "all" in request.results else request.results
    cells = [cell for environment in environments for cell in environment.needed_for(wanted)]
    with BoardDisplay(stderr) as display:
        workers = request.workers or usual_workers(len(cells))
        board = run_cells(cells, request.out, workers, display, anew=request.anew)
    runs = load_finished(cells, request.out)
    tables = {}
    for environment in environments:
        there = [runs[cell.name] for cell in environment.cells if cell.name in runs]
        if there:
            tables[environment.name] = compare(there)
            stdout.print(Text(environment.paper.title, style="bold"))
            stdout.print(comparison_table(tables[environment.name]))
    complete = board.count("done") == len(cells)
    if not complete:
        again = ["metis", "reproduce", *request.results, "--scale", request.scale, "--out", str(request.out)]
        stderr.print(f"{board.count('done')} of {len(cells)} cells are done; go on with: {escape(shlex.join(again))}")
    return Done({"scale": request.scale, "complete": complete, "environments": tables}, complete)


def plan_table(environment: Environment, made: Sequence[Plan]) -> Table:
    """One row a policy: a round, and everything up to the published number of rounds."""
    table = Table(title=environment.paper.title, title_justify="left", title_style="bold")
    for heading in ("policy", "R", "cold start\nsteps", "round\nsteps", "round\nCC", "round\ns", "iterations",
                    "published", "fast", "slow", "CC", "PT (s)", "EC eq.", "EC active", "EC + idle"):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for plan in made:
        document = plan.to_json()
        published = plan.cell.published
        told = "" if published is None else "–" if published.iterations is None else f"{published.iterations:,}"
        table.add_row(
            plan.cell.label,
            "–" if plan.rounds is None else str(plan.rounds),
            "–" if plan.first is None else f"{plan.first.steps:,}",
            "–" if plan.each is None else f"{plan.each.steps:,}",
            "–" if plan.each is None else str(plan.each.update_requests),
            "–" if plan.each is None else f"{plan.each.seconds:.2f}",
            f"{plan.iterations:,}",
            told,
            f"{document['fast']:,}",
            f"{document['slow']:,}",
            f"{document['update_requests']:,}",
            number(document["parallel_time"]),
            *(number(document["energy"][kind]) for kind in ("equation", "active", "idle_charged")),
        )
    return table


class BoardDisplay:
    """Shows the cells on their way: a live table in a terminal, else a line when a cell ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._told: set[str] = set()
        self._told_at = time.monotonic()

    def __enter__(self) -> BoardDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *problem: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, board: Board) -> None:
        ended = [state for state in board.states if state.status == "done" and not state.kept]
        fresh = [state for state in ended if state.cell.name not in self._told]
        for state in fresh:
            self._told.add(state.cell.name)
            self._console.print(f"{self._place(board)}  {escape(_words(state))}  {_left(board)}", highlight=False)
        if self._live is not None:
            self._live.update(self._picture(board), refresh=True)
        elif not fresh and time.monotonic() - self._told_at > 60:
            going = "; ".join(_words(state) for state in board.states if state.status == "running")
            self._console.print(f"{self._place(board)}  {escape(going)}  {_left(board)}", highlight=False)
        else:
            if fresh:
                self._told_at = time.monotonic()
            return
        self._told_at = time.monotonic()

    def _place(self, board: Board) -> str:
        return f"[{board.count('done')}/{len(board.states)}]".replace("[", "\\[")

    def _picture(self, board: Board) -> Table:
        table = Table.grid(padding=(0, 2))
        for state in board.states:
            if state.status == "running":
                share = min(1.0, state.steps / state.planned_steps) if state.planned_steps else 0.0
                bar = "█" * round(20 * share) + "░" * (20 - round(20 * share))
                table.add_row(Text(bar, style="cyan"), Text(_words(state)))
        table.add_row(Text(f"{board.count('done')} of {len(board.states)} cells"), Text(_left(board), style="dim"))
        return table


def _words(state: CellState) -> str:
    metric = "" if state.metric is None else f"  {state.metric:.3f}"
    return f"{state.cell.name}  t={state.at:.0f} s  {state.steps:,} steps{metric}"


def _left(board: Board) -> str:
    left = board.seconds_left
    return "" if left is None else f"(at most {duration(left)} left)"


def duration(seconds: float) -> str:
    """A time in words: 48 s, 12 min, 3.1 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
