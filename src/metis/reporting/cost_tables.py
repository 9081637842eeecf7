"""Tables of costs, of learners and of refused updates, as cells that a page or a text arranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from metis.core.costs import Costs
from metis.reporting import style, summaries
from metis.reporting.spending import spending_row
from metis.runs.run import Run
from metis.text import factor, metric, number, percent, seconds

# Beyond these a table says how many more there are and where to find them.
_MAX_LEARNERS = 200
_MAX_REFUSALS = 40


@dataclass(frozen=True)
class Cell:
    """One number of a table, with its factor against the first row."""

    value: str
    factor: str = ""
    best: bool = False


@dataclass(frozen=True)
class Row:
    """One policy's line in a table of costs."""

    label: str
    colour: int
    cells: list[Cell]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """The learners of one policy, or their refused updates."""

    label: str
    colour: int
    rows: list[list[str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    note: str = ""


def colour(index: int) -> int:
    """Which of the policies' colours a run has, as in the figures."""
    return index % len(style.POLICY_COLOURS) + 1


_COSTS: tuple[Callable[[Costs], float], ...] = (
    lambda costs: costs.steps,
    lambda costs: costs.parallel_time,
    lambda costs: costs.cumulative_time,
    lambda costs: costs.update_requests,
    lambda costs: costs.energy.equation,
    lambda costs: costs.energy.active,
    lambda costs: costs.energy.idle_charged,
)


def cost_tables(runs: list[Run], names: list[str]) -> list[dict[str, Any]]:
    """The costs until the target, where there is one, and the costs of the whole run."""
    tables = []
    target = runs[0].setting.target
    if target is not None:
        caption = f"Cost until {target.metric} {target.value:g} was first reached"
        tables.append(_cost_table(runs, names, [run.costs_at_target for run in runs], caption))
    tables.append(_cost_table(runs, names, [run.costs for run in runs], "Cost of the whole run"))
    return tables


def _cost_table(runs: list[Run], names: list[str], costs_of: Sequence[Costs | None], caption: str) -> dict[str, Any]:
    first = costs_of[0]
    lowest = [min((cost(costs) for costs in costs_of if costs is not None), default=math.inf) for cost in _COSTS]
    rows = []
    for index, (run, name, costs) in enumerate(zip(runs, names, costs_of, strict=True)):
        results = [Cell(metric(run.final_metric)), Cell(metric(run.best_metric))]
        if costs is None:
            rows.append(Row(name, colour(index), results, "not reached"))
            continue
        cells = []
        for cost, least in zip(_COSTS, lowest, strict=True):
            value = cost(costs)
            times = ""
            if first is not None and index > 0 and value > 0 and cost(first) > 0:
                times = factor(cost(first) / value)
            cells.append(Cell(number(value), times, best=len(runs) > 1 and value == least))
        cells.append(Cell(percent(summaries.shares(costs)["idle"])))
        rows.append(Row(name, colour(index), [*cells, *results]))
    return {"caption": caption, "rows": rows, "first": None if first is None or len(runs) == 1 else names[0]}


def learner_sections(runs: list[Run], names: list[str]) -> list[Section]:
    sections = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        rows = []
        by_learner = run.costs.by_learner
        for learner in run.setting.learners[:_MAX_LEARNERS]:
            row = [learner.name, f"{learner.examples:,}", seconds(learner.time_per_batch)]
            costs = by_learner.get(learner.name)
            if costs is None:
                rows.append([*row, *["–"] * 7])
                continue
            energy = costs.energy
            rows.append(
                [
                    *row,
                    f"{costs.steps:,}",
                    f"{costs.update_requests:,}",
                    number(costs.active),
                    number(costs.idle),
                    number(energy.equation),
                    number(energy.active),
                    number(energy.idle_charged),
                ]
            )
        more = len(run.setting.learners) - len(rows)
        note = f"{more:,} more learners are in the events of the run." if more > 0 else ""
        sections.append(Section(name, colour(index), rows=rows, note=note))
    return sections


def privacy_sections(runs: list[Run], names: list[str]) -> list[Section]:
    """What the sites with protected records have spent."""
    sections = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        spent = list(run.spending.by_learner.items())
        rows = [[who, *spending_row(run.setting.facts, who, mine)] for who, mine in spent[:_MAX_LEARNERS]]
        if rows:
            sections.append(Section(name, colour(index), rows=rows))
    return sections


def refusal_sections(runs: list[Run], names: list[str]) -> list[Section]:
    """Refused updates and excluded learners, in words; repeated ones are counted."""
    sections = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        alike: dict[tuple[str, str, str], list[float]] = {}
        for at, refused in run.refused:
            alike.setdefault((refused.learner, refused.kind, refused.reason), []).append(at)
        lines = []
        for (learner, kind, reason), times in alike.items():
            when = f"at {number(times[0])} s"
            if len(times) > 1:
                when = f"{len(times):,} times from {number(times[0])} s to {number(times[-1])} s"
            lines.append(f"{learner}, {when} ({kind}): {reason}")
        lines += [f"{aside.learner}, at {number(at)} s (set aside): {aside.reason}" for at, aside in run.set_aside]
        more = len(lines) - _MAX_REFUSALS
        note = f"{more:,} more are in the events of the run." if more > 0 else ""
        if lines:
            sections.append(Section(name, colour(index), lines=lines[:_MAX_REFUSALS], note=note))
    return sections
