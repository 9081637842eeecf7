"""What a terminal shows: the comparison table, a partition, data sets, and the progress of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from metis.core.costs import Costs
from metis.core.stop import StopRule
from metis.reporting.paper import findings as seed_findings, paper_table, shown
from metis.runs.folds import RunFold
from metis.runs.run import Run
from metis.text import about, factor, metric, number, plural

REFRESH_SECONDS = 0.1
LINE_SECONDS = 60.0  # between two lines without a terminal


# --- comparison -------------------------------------------------------------------------------

_Columns = Sequence[tuple[str, str]]
_WORK: _Columns = (
    ("iterations", "iterations"),
    ("parallel_time", "PT (s)"),
    ("cumulative_time", "CT (s)"),
    ("update_requests", "CC"),
)
_BYTES: _Columns = (("bytes_exchanged", "bytes"),)  # where updates are compressed, update requests do not say it
_ENERGY: _Columns = (
    ("energy.equation", "EC\nequation"),
    ("energy.active", "EC\nactive"),
    ("energy.idle_charged", "EC\n+ idle"),
)


def comparison_table(comparison: Mapping[str, Any], width: int | None = None) -> Group:
    """The paper's Tables 2-3 for these runs; under each cost the factor against the first row.

    In a terminal that is too narrow for all columns, energy gets a table of its own.
    """
    target = comparison["target"]
    title = "Costs at the end of the budget"
    if target is not None:
        title = f"Costs until {target['metric']} {target['value']:g}"
    legend: Text | Group = Text(f"\n{_legend(comparison)}", style="dim")
    if any(row.get("at_learners") for row in comparison["rows"]):
        legend = Group(legend, "", _learners_table(comparison))
    worked = [*_WORK, *(_BYTES if comparison.get("compressed") else ())]
    whole = _cost_table(comparison, title, [*worked, *_ENERGY], with_metric=True)
    if width is None or Console(width=1000).measure(whole).maximum <= width:
        return Group(whole, legend)
    work = _cost_table(comparison, title, worked, with_metric=True)
    return Group(work, "", _cost_table(comparison, "", _ENERGY, with_metric=False), legend)


def _cost_table(comparison: Mapping[str, Any], title: str, columns: _Columns, *, with_metric: bool) -> Table:
    rows: Sequence[Mapping[str, Any]] = comparison["rows"]
    table = Table(
        title=Text(title, style="bold") if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    table.add_column("policy", overflow="fold")
    for _, heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    if with_metric:
        table.add_column(f"{comparison['metric']}\nbest", justify="right", no_wrap=True)
    best = {path: _least(rows, path) for path, _ in columns}
    for row in rows:
        name = Text(str(row["label"]), style="bold")
        if row["reached"] is False:
            name.append("\ndid not reach", style="red")
        cells: list[Text] = [name]
        for path, _ in columns:
            value, against = _value(row, path), row["factors"][path]
            cell = Text(number(value), style="green" if value is not None and value == best[path] else "")
            if against is not None:
                cell.append(f"\n{factor(against)}", style="dim")
            cells.append(cell)
        if with_metric:
            cells.append(Text(f"{metric(row['final'], 3)}\n{metric(row['best'], 3)}"))
        table.add_row(*cells)
    return table


def _learners_table(comparison: Mapping[str, Any]) -> Table:
    """What the last model of each policy is worth at the learners, on their own test examples."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(f"{comparison['metric']} at learners", overflow="fold")
    for heading in ("worst", "median", "best", "deviation"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in comparison["rows"]:
        if (found := row.get("at_learners")) is not None:
            worst, best = (Text(f"{metric(found[one], 3)} {found[f'{one}_learner']}") for one in ("worst", "best"))
            table.add_row(str(row["label"]), worst, metric(found["median"], 3), best, metric(found["deviation"], 3))
    return table


def _legend(comparison: Mapping[str, Any]) -> str:
    lines = [
        "PT parallel time, CT cumulative time, CC update requests, EC energy in "
        f"{comparison['energy_unit']}s by three definitions.",
    ]
    rows = comparison["rows"]
    if rows[0]["reached"] is False:
        lines.append(f"No factors: {rows[0]['label']}, the first row, did not reach the target.")
    else:
        lines.append(f"× is the cost of {rows[0]['label']} divided by that of the row: above 1 is cheaper.")
    return "\n".join(lines)


def _value(row: Mapping[str, Any], path: str) -> float | None:
    value: Any = row
    for name in path.split("."):
        value = value[name]
    return None if value is None else float(value)


def _least(rows: Sequence[Mapping[str, Any]], path: str) -> float | None:
    values = [value for row in rows if (value := _value(row, path)) is not None]
    return min(values) if len(values) > 1 else None


def seeds_table(runs: Sequence[Run]) -> Group:
    """The costs and the metric of each policy over several seeds: mean and standard deviation, factors and wins."""
    content = paper_table(runs)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("policy", overflow="fold")
    for heading in content.headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for policy, cells in zip(content.policies, content.rows, strict=True):
        texts = [Text(shown(cell), style="green" if cell.best else "") for cell in cells]
        table.add_row(Text(policy, style="bold"), *texts)
    lines = "\n".join(seed_findings(runs))
    return Group(table, Text(f"\n{content.caption}", style="dim"), Text(f"\n{lines}"))


# --- one run ----------------------------------------------------------------------------------


def run_table(run: Run) -> Table:
    """The costs of one run, until the target and at the end."""
    target, reached, end = run.setting.target, run.costs_at_target, run.costs
    unit = "J" if run.setting.learners and run.setting.learners[0].power.unit == "watt" else "ε s"
    title = f"{run.policy}: {run.finish_reason}"
    heading = Text(title, style="bold")
    table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("costs")
    columns = []
    if target is not None:
        columns.append((f"until {target.metric} {target.value:g}", reached))
    columns.append(("at the end", end))
    for name, _ in columns:
        table.add_column(name, justify="right")
    rows: dict[str, Callable[[Costs], str]] = {
        "iterations": lambda costs: number(costs.steps),
        "parallel time (s)": lambda costs: number(costs.parallel_time),
        "cumulative time (s)": lambda costs: number(costs.cumulative_time),
        "idle time (s)": lambda costs: number(costs.idle_time),
        "update requests": lambda costs: number(costs.update_requests),
        "bytes exchanged": lambda costs: number(costs.bytes_exchanged),
        f"energy, equation ({unit})": lambda costs: number(costs.energy.equation),
        f"energy, active ({unit})": lambda costs: number(costs.energy.active),
        f"energy, with idle ({unit})": lambda costs: number(costs.energy.idle_charged),
    }
    for name, show in rows.items():
        cells = ["not reached" if costs is None and name == "iterations" else "–" if costs is None else show(costs)
                 for _, costs in columns]  # fmt: skip
        table.add_row(name, *cells)
    return table


def sentence(run: Run) -> str:
    """The result in one line."""
    costs, setting = run.costs, run.setting
    parts = [
        f"{run.policy}: round {run.rounds}",
        f"t={costs.parallel_time:.1f} s",
        f"update requests {costs.update_requests:,}",
    ]
    if run.final_metric is not None:
        parts.append(f"{setting.metric} {run.final_metric:.3f}")
    return f"{'  '.join(parts)}  ({run.wall_seconds:.1f} s)"


def errors(run: Run) -> list[str]:
    """Refused updates and learners set aside: a line each, repeated ones counted."""
    lines: dict[str, int] = {}
    for _, refused in run.refused:
        if refused.kind != "late":
            line = f"refused an update from learner '{refused.learner}': {refused.reason}"
            lines[line] = lines.get(line, 0) + 1
    late = [refused.learner for _, refused in run.refused if refused.kind == "late"]
    messages = [line if count == 1 else f"{line} ({count} times)" for line, count in lines.items()]
    if late:
        messages.append(f"{plural(len(late), 'update')} came too late to be mixed, from {', '.join(sorted(set(late)))}")
    if run.finish_reason.startswith("no learner"):
        messages.append(f"{run.policy} ended before its budget was used up: {run.finish_reason}")
    if run.rounds == 0 and run.finish_reason != "interrupted":
        messages.append(f"{run.policy}: nothing was mixed, so its metric is that of the initial model")
    elif run.undefined:
        messages.append(
            f"{run.policy}: {run.setting.metric} is not a number although the loss is: it is undefined on these test "
            "examples, as the AUC where all are of one class"
        )
    elif run.diverged:
        messages.append(f"{run.policy} diverged: its last evaluation is not a finite number; try a lower learning rate")
    messages += [f"learner '{aside.learner}' was set aside: {aside.reason}" for _, aside in run.set_aside]
    return messages


class TaskProgress:
    """Shows what a learner is doing, in a terminal only."""

    def __init__(self, console: Console, name: str) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[state]}", markup=False),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(name, total=1.0, state="starting")

    def __enter__(self) -> TaskProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, words: str, share: float) -> None:
        self._progress.update(self._task, completed=share, state=words)
        self._progress.refresh()


class StudyProgress:
    """Shows how many runs of a comparison are finished: live in a terminal, otherwise nothing."""

    def __init__(self, console: Console, runs: int, before: int, *, quiet: bool) -> None:
        self._before = before
        self._progress = Progress(
            TextColumn("{task.completed:.0f} of {task.total:.0f} runs finished"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[state]}", markup=False),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=runs, completed=before, state="")

    def __enter__(self) -> StudyProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, finished: int, running: int) -> None:
        self._progress.update(self._task, completed=self._before + finished, state=f"{running} running")
        self._progress.refresh()


class RunProgress:
    """Shows the progress of a run: live in a terminal, otherwise a plain line per minute for a log."""

    def __init__(self, console: Console, label: str, stop: StopRule, beginning: str = "starting") -> None:
        self._console, self._label, self._stop, self._beginning = console, label, stop, beginning
        self._live = console.is_terminal
        self._shown_at = time.monotonic()
        self._first: tuple[float, float] | None = None
        self._task: TaskID | None = None
        # Refreshed by the run itself: a thread would be copied into forked workers.
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[state]}", markup=False),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not self._live,
        )

    def __enter__(self) -> RunProgress:
        self._progress.start()
        self._task = self._progress.add_task(self._label, total=1.0, state=self._beginning)
        self._progress.refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, fold: RunFold) -> None:
        now = time.monotonic()
        if self._task is None or now - self._shown_at < (REFRESH_SECONDS if self._live else LINE_SECONDS):
            return
        self._shown_at = now
        costs = fold.costs
        requests = costs.update_requests
        state = f"round {fold.version}  t={fold.now:.1f} s  update requests {requests:,}"
        if fold.history:
            state += f"  {fold.setting.metric} {fold.history[-1].metrics.get(fold.setting.metric, 0.0):.3f}"
        done = self._done(fold, costs)
        if self._first is None:  # a resumed run has already done something
            self._first = (now, done)
        began, before = self._first
        if done > before and now - began > 5:
            state += f"  {about((now - began) * (1 - done) / (done - before))} left"
        if self._live:
            self._progress.update(self._task, completed=done, state=state)
            self._progress.refresh()
        else:
            self._console.print(f"{self._label}: {state}", markup=False)

    def _done(self, fold: RunFold, costs: Costs) -> float:
        """The share of the budget that is used up."""
        shares = [0.0]
        for spent, limit in (
            (fold.version, self._stop.rounds),
            (fold.now, self._stop.seconds),
            (costs.update_requests, self._stop.update_requests),
            (costs.steps, self._stop.steps),
        ):
            if limit is not None:
                shares.append(spent / limit)
        return min(1.0, max(shares))


# --- data -------------------------------------------------------------------------------------


def partition_table(
    counts: NDArray[np.int64], names: Sequence[str], class_names: Sequence[str], width: int, *, ranges: bool = False
) -> Table:
    """Examples by learner and class, or range of the target; only the extremes where not all columns fit."""
    learners, classes = counts.shape
    labels = [str(name) for name in class_names] or [str(k) for k in range(classes)]
    cell = max(len(label) for label in [*labels, str(int(counts.max(initial=0)))]) + 2
    fits = max(len(name) for name in names) + 22 + classes * cell <= width
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("learner", no_wrap=True)
    table.add_column("examples", justify="right")
    table.add_column("ranges" if ranges else "classes", justify="right")
    kind = "range" if ranges else "class"
    for label in labels if fits else [f"largest {kind}", f"smallest {kind}"]:
        table.add_column(Text(label), justify="right", no_wrap=True)
    for learner in range(learners):
        row = counts[learner]
        held = np.flatnonzero(row)
        shown = [f"{count:,}" if count else "·" for count in row]
        if not fits:
            most, least = held[np.argmax(row[held])], held[np.argmin(row[held])]
            shown = [f"{labels[k]} ({row[k]:,})" for k in (most, least)]
        table.add_row(Text(names[learner]), f"{int(row.sum()):,}", str(len(held)), *map(Text, shown))
    total = counts.sum(axis=0)
    table.add_section()
    sums = [f"{count:,}" for count in total] if fits else ["", ""]
    table.add_row("all", f"{int(total.sum()):,}", str(int((total > 0).sum())), *sums)
    return table


def plain_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A small table of texts."""
    heading = Text(title, style="bold")
    table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in headings:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def run_progress(label: str, stop: StopRule) -> RunProgress:
    """The progress of a run that was started from Python."""
    return RunProgress(Console(stderr=True, highlight=False, emoji=False), label, stop)
