"""The paper's figures of runs: metric curves, active and idle time, timelines, the distribution of data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from metis.errors import ConfigError
from metis.reporting.marks import (
    draw_curves,
    draw_distribution,
    draw_inset,
    draw_learner_bars,
    draw_policy_bars,
    draw_timeline,
    kinds_below,
    rows_height,
)
from metis.reporting.style import (
    Over,
    blank_figure,
    check_format,
    house_style,
    inline_svg,
    legend_below,
    save,
    save_both,
)
from metis.reporting.summaries import distribution_of, labels, timeline_window, wide
from metis.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_run_figures(run: Run, folder: Path, suffixes: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write curves, active and idle time, timeline and distribution of data of one run; by default as PNG and SVG."""
    with house_style():
        figures = {
            "curves": curves_figure([run]),
            "active_idle": _active_idle_figure([run]),
            "timeline": _timeline_figure([run]),
            "data": _distribution_figure(*distribution_of(run)),
        }
        return [path for name, figure in figures.items() for path in save_both(figure, folder, name, suffixes)]


def save_comparison_figures(
    runs: Sequence[Run], folder: Path, suffixes: Sequence[str] = ("png", "svg"), *, inset: bool = False
) -> list[Path]:
    """Write the paper's two curves of all policies, active and idle time and timelines as PNG and SVG.

    With `inset` the curve over time has a small picture of the distribution of data, as in the paper.
    """
    if not runs:
        raise ConfigError("a comparison needs at least one run")
    with house_style():
        figures = {
            "curves": curves_figure(runs, inset=inset),
            "active_idle": _active_idle_figure(runs),
            "timelines": _timeline_figure(runs),
            "data": _distribution_figure(*distribution_of(runs[0])),
        }
        return [path for name, figure in figures.items() for path in save_both(figure, folder, name, suffixes)]


def partition_figure(
    counts: NDArray[np.int64], names: Sequence[str], class_names: Sequence[str], path: str | Path, kind: str = "class"
) -> Path:
    """Draw how many examples of each class, or of another kind, every learner has (the paper's Figure 5)."""
    path = Path(path)
    check_format(path)
    with house_style():
        save(_distribution_figure(counts, names, class_names, kind=kind), path)
    return path


def draw(runs: Sequence[Run], path: str | Path | None = None) -> Figure:
    """The metric over parallel time and over update requests; saved if a path is given."""
    return drawn(curves_figure, runs, path)


def draw_timelines(runs: Sequence[Run], path: str | Path | None = None) -> Figure:
    """What every learner did in the first few rounds, one panel per run; saved if a path is given."""
    return drawn(_timeline_figure, runs, path)


def drawn(make: Callable[[Sequence[Run]], Figure], runs: Sequence[Run], path: str | Path | None) -> Figure:
    """The figure that a function makes of the runs; saved if a path is given."""
    if path is not None:
        check_format(Path(path))
    with house_style():
        figure = make(runs)
        if path is not None:
            save(figure, Path(path))
    return figure


def curve_svg(runs: Sequence[Run], over: Over, identity: str) -> str:
    """One curve per run: the metric over parallel time or over update requests."""
    with house_style():
        figure = blank_figure(5.4, 3.7 + 0.2 * math.ceil(len(runs) / 2))
        axes = figure.add_subplot()
        draw_curves(axes, runs, over)
        if len(runs) > 1:
            legend_below(figure, axes, columns=2)
        return inline_svg(figure, identity)


def policies_svg(runs: Sequence[Run], identity: str) -> str:
    """One bar per run: how all learners together spent their time."""
    with house_style():
        figure = blank_figure(7.0, 0.75 + 0.34 * len(runs))
        draw_policy_bars(figure.add_subplot(), runs)
        return inline_svg(figure, identity)


def active_idle_svg(run: Run, until: float, identity: str) -> str:
    """One bar per learner: training, transfer, waiting and absence over the whole run."""
    with house_style():
        figure = blank_figure(5.4, rows_height(run))
        draw_learner_bars(figure.add_subplot(), run, until)
        return inline_svg(figure, identity)


def timeline_svg(run: Run, until: float, identity: str) -> str:
    """One row per learner, or shares of many learners: what they did from the start until then."""
    with house_style():
        figure = blank_figure(11.0, rows_height(run))
        draw_timeline(figure.add_subplot(), run, until)
        return inline_svg(figure, identity)


def distribution_svg(run: Run, identity: str) -> str:
    """How many examples of each class every learner has."""
    with house_style():
        return inline_svg(_distribution_figure(*distribution_of(run), width=11.0 if wide(run) else 7.0), identity)


def curves_figure(runs: Sequence[Run], *, inset: bool = False) -> Figure:
    columns = min(5, max(1, len(runs)))
    figure = blank_figure(9.2, 3.7 + (0.24 * math.ceil(len(runs) / columns) if len(runs) > 1 else 0.0))
    time_axes, request_axes = figure.subplots(1, 2, sharey=True)
    draw_curves(time_axes, runs, "parallel_time")
    draw_curves(request_axes, runs, "update_requests")
    request_axes.set_ylabel("")
    request_axes.tick_params(labelleft=False)
    if len(runs) == 1:
        figure.suptitle(labels(runs)[0], x=0.01, ha="left", fontsize=11, fontweight="bold")
    elif runs:
        legend_below(figure, time_axes, columns)
    if inset and runs:
        lower = 0.1 if runs[0].setting.higher_is_better else 0.62
        draw_inset(time_axes.inset_axes((0.62, lower, 0.35, 0.32)), runs[0])
    return figure


def _active_idle_figure(runs: Sequence[Run]) -> Figure:
    columns = min(3, len(runs))
    rows = math.ceil(len(runs) / columns)
    figure = blank_figure(max(5.6, 3.6 * columns + 1.2), 0.3 + rows_height(runs[0]) * rows)
    grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
    until = max(run.costs.parallel_time for run in runs)
    for index, panel in enumerate(grid.flat):
        if index >= len(runs):
            panel.set_visible(False)
            continue
        draw_learner_bars(panel, runs[index], until, labels(runs)[index])
        if index % columns:
            panel.tick_params(labelleft=False)
        last = index + columns >= len(runs)
        panel.tick_params(labelbottom=last)
        if not last:
            panel.set_xlabel("")
    kinds_below(figure, runs)
    return figure


def _timeline_figure(runs: Sequence[Run]) -> Figure:
    until = timeline_window(runs)
    figure = blank_figure(9.2, 0.3 + sum(rows_height(run) for run in runs))
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for panel, run, label in zip(panels, runs, labels(runs), strict=True):
        draw_timeline(panel, run, until, label)
        if panel is not panels[-1]:
            panel.set_xlabel("")
    kinds_below(figure, runs)
    return figure


def _distribution_figure(
    counts: NDArray[np.int64],
    names: Sequence[str],
    class_names: Sequence[str],
    width: float = 9.2,
    kind: str = "class",
) -> Figure:
    figure = blank_figure(width, 3.6)
    draw_distribution(figure, np.atleast_2d(counts), names, class_names, kind)
    return figure
