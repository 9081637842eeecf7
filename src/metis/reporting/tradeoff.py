"""What time costs: how soon policies reached their target against their messages and energy; how long periods were.

Policies on the line are worth choosing: no other one was sooner with fewer messages, or with less energy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from metis.reporting import style
from metis.reporting.charts import Chart
from metis.runs.periods import PeriodChange, periods_in_short, periods_of
from metis.runs.run import Run
from metis.runs.seeds import grouped
from metis.text import listed, number, plural, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AGAINST = {"update_requests": "update requests", "energy.equation": "energy (equation)"}
_MAX_CHANGES = 12  # that a page lists


@dataclass(frozen=True, slots=True)
class Point:
    """What a policy took until the target, on average over its seeds."""

    index: int  # of the policy, for its colour
    label: str
    time: float
    costs: tuple[float, ...]  # in the order of _AGAINST


def points(runs: Sequence[Run]) -> list[Point]:
    """Of the policies that reached the target with every seed; none if there is no target."""
    found = []
    for index, group in enumerate(grouped(runs)):
        if group.reached != len(group.runs):
            continue
        time = group.estimate("parallel_time").mean
        costs = tuple(group.estimate(measure).mean for measure in _AGAINST)
        if time is not None and None not in costs:
            found.append(Point(index, group.label, time, tuple(float(cost or 0) for cost in costs)))
    return found


def front(found: Sequence[Point], which: int) -> list[Point]:
    """Those that no other one beats in time and in this cost, the quickest first."""
    ordered = sorted(found, key=lambda point: (point.time, point.costs[which]))
    kept: list[Point] = []
    for point in ordered:
        if not kept or point.costs[which] < kept[-1].costs[which]:
            kept.append(point)
    return kept


def tradeoff_figure(runs: Sequence[Run]) -> Figure | None:
    """Time to the target against update requests and against energy; None for fewer than two policies."""
    found = points(runs)
    if len(found) < 2:
        return None
    figure = style.blank_figure(9.2, 4.0)
    panels = figure.subplots(1, 2, sharey=True)
    for which, panel in enumerate(panels):
        _draw(panel, found, which)
    panels[0].set_ylabel("time to the target (s)")
    panels[1].tick_params(labelleft=False)
    style.legend_below(figure, panels[0], columns=min(4, len(found)))
    return figure


def _draw(axes: Axes, found: Sequence[Point], which: int) -> None:
    best = front(found, which)
    corners = [(best[0].costs[which], best[0].time)]
    for earlier, point in itertools.pairwise(best):
        corners += [(earlier.costs[which], point.time), (point.costs[which], point.time)]
    axes.plot(*zip(*corners, strict=True), color=style.MUTED, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    for point in found:
        look = {**style.line_look(point.index), "linestyle": "none", "markersize": 8}
        axes.plot([point.costs[which]], [point.time], label=point.label, **look)
    axes.set_xlabel(list(_AGAINST.values())[which])
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(style.thousands)
        axis.set_minor_formatter(style.thousands if _narrow(found, which, axis is axes.yaxis) else "")


def _narrow(found: Sequence[Point], which: int, time: bool) -> bool:
    """Whether a logarithmic axis would have hardly any power of ten to label."""
    values = [point.time if time else point.costs[which] for point in found]
    return max(values) < 20 * max(min(values), 1e-12)


def save_tradeoff(runs: Sequence[Run], folder: Path, suffixes: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write `tradeoff.*`, if there is anything to choose between."""
    with style.house_style():
        figure = tradeoff_figure(runs)
        return [] if figure is None else style.save_both(figure, folder, "tradeoff", suffixes)


def words(runs: Sequence[Run]) -> str:
    """Which policies are worth choosing, in a sentence or two; empty if there is nothing to choose between."""
    found = points(runs)
    if len(found) < 2:
        return ""
    sentences = []
    for which, what in enumerate(("fewer update requests", "less energy")):
        best = front(found, which)
        shown = [f"{point.label} ({seconds(point.time)}, {number(point.costs[which])})" for point in best]
        if len(best) == 1:
            sentences.append(f"Nobody needs {what} than {shown[0]}, which is also the quickest.")
        else:
            sentences.append(f"From quick to {what}: {listed(shown)}; every other policy is worse than one of these.")
    return " ".join(sentences)


def tradeoff_chart(runs: Sequence[Run]) -> Chart | None:
    with style.house_style():
        figure = tradeoff_figure(runs)
        if figure is None:
            return None
        svg = style.inline_svg(figure, "tradeoff")
    caption = (
        "Further down is sooner, further left is cheaper; the dotted line joins the policies that no other one beats "
        f"in both. {words(runs)}"
    )
    return Chart(svg, f"Time to the target against update requests and against energy. {words(runs)}", caption)


# --- periods ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Periods:
    """The periods of one run: a picture, and the reasons in words."""

    chart: Chart
    changes: list[tuple[str, str]]  # when, and what
    left_out: int


def period_charts(runs: Sequence[Run], names: Sequence[str]) -> list[Periods]:
    """Of the runs whose policy chooses its periods and says why."""
    found = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        lengths, changes = periods_of(run.events)
        if not lengths:
            continue
        svg = _periods_svg(index, lengths, changes, run.costs.parallel_time)
        in_short = periods_in_short(lengths)
        chart = Chart(
            svg, f"Step chart of the length of periods under {name}: {in_short}.", title=f"{name}: {in_short}"
        )
        shown = [(seconds(change.at), change.text) for change in changes[:_MAX_CHANGES]]
        found.append(Periods(chart, shown, len(changes) - len(shown)))
    return found


def _periods_svg(
    index: int, lengths: Sequence[tuple[float, float]], changes: Sequence[PeriodChange], end: float
) -> str:
    with style.house_style():
        figure = style.blank_figure(11.0, 2.4)
        axes = figure.add_subplot()
        when = [at for at, _ in lengths] + [end]
        length = [value for _, value in lengths] + [lengths[-1][1]]
        axes.plot(when, length, drawstyle="steps-post", color=style.POLICY_COLOURS[index % len(style.POLICY_COLOURS)])
        for change in changes:
            if change.number > 1:
                axes.axvline(change.at, color=style.MUTED, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
        axes.set_xlabel("parallel time (s)")
        axes.set_ylabel("period (s)")
        axes.set_xlim(0, max(end, when[-1]))
        axes.set_ylim(bottom=0)
        if max(length) > 20 * min(length):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(style.thousands)
        return style.inline_svg(figure, f"periods-{index}")


def change_lines(run: Run) -> list[str]:
    """The changes of a run's periods as lines of text; none if its policy does not choose them."""
    lengths, changes = periods_of(run.events)
    if not lengths:
        return []
    lines = [f"at {seconds(change.at)}: {change.text}" for change in changes[:_MAX_CHANGES]]
    more = len(changes) - len(lines)
    return [*lines, *([f"and {plural(more, 'more change')}"] if more else [])]
