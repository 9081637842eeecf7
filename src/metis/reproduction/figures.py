"""The paper's figures in the paper's arrangement, from runs: one column per environment, one legend for all.

The colour shows the protocol of a policy, the line its solver, and asynchronous policies have markers, so that a
policy looks the same in every figure.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from metis.reporting.marks import draw_learner_bars, kinds_below, label_columns, stack_classes
from metis.reporting.style import (
    CLASS_COLOURS,
    INK,
    MUTED,
    PAPER,
    POLICY_COLOURS,
    blank_figure,
    house_style,
    inline_svg,
    save_both,
    thousands,
)
from metis.reporting.summaries import SMOOTH_FROM, distribution_of, running_median
from metis.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _VERMILION, _GREEN, _PURPLE, _ORANGE, _SKY, _GREY = POLICY_COLOURS
_SOLVER_LINES: dict[str, Any] = {
    "momentum": "solid",
    "vanilla": (0, (1.5, 1.3)),
    "fedprox": (0, (5, 1.5)),
    "scaffold": "dashdot",
}
_ASYNCHRONOUS = {
    "fedrec": (_PURPLE, "o"),
    "async_fedavg": (_ORANGE, "s"),
    "fedasync": (_GREY, "^"),
    "fedbuff": (INK, "D"),
}

_LONGEST = 3  # times the median run: where an axis of time ends

Over = Literal["parallel_time", "update_requests", "rounds"]
_OVER_WORDS: dict[Over, str] = {
    "parallel_time": "parallel processing time (s)",
    "update_requests": "update requests",
    "rounds": "federation rounds",
}


@dataclass(frozen=True)
class Curve:
    """One policy's run, and what decides how it is drawn."""

    label: str
    run: Run
    policy: str  # its name in a file
    solver: str
    slowest_learner_epochs: float | None = None  # lambda


@dataclass(frozen=True)
class Panel:
    """One environment."""

    title: str
    curves: Sequence[Curve]
    reference: float | None = None  # the metric of the centralized model


@dataclass(frozen=True)
class Holding:
    """The data of each learner: its examples by class, or their targets."""

    title: str
    names: Sequence[str]
    counts: NDArray[np.int64] | None = None
    targets: Sequence[NDArray[Any]] = ()


@dataclass(frozen=True)
class Silos:
    """The metric that each learner reaches alone, and that they reach as a federation."""

    title: str
    metric: str
    alone: dict[str, float]
    federation: dict[str, float]
    centralized: float | None = None


@dataclass(frozen=True)
class MixingCurve:
    """Seconds for one community model, by number of learners."""

    network: str
    learners: Sequence[int]
    cached: Sequence[float]
    full_pass: Sequence[float]


@dataclass
class Drawn:
    """The files of the figures, and their SVG for a page."""

    files: dict[str, list[Path]] = field(default_factory=dict)
    svg: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, folder: Path, draw: Callable[[], Figure]) -> None:
        """Draw one figure, as PNG and SVG files and for the page."""
        with house_style():
            self.files[name] = save_both(draw(), folder, name)
            self.svg[name] = inline_svg(draw(), name)


# --- Figures 7 to 11 --------------------------------------------------------------------------


def convergence_figure(panels: Sequence[Panel], second: Over = "update_requests") -> Figure:
    """(a) the metric over parallel time, (b) over update requests or rounds; one column per environment."""
    columns = max(1, len(panels))
    one_solver = len({curve.solver for panel in panels for curve in panel.curves}) == 1
    entries = len({curve.label for panel in panels for curve in panel.curves})
    figure = blank_figure(min(13.0, 2.2 + 3.7 * columns), 5.6 + 0.22 * math.ceil(entries / (2 * columns)))
    grid = figure.subplots(2, columns, squeeze=False, sharey="col")
    handles: dict[str, Any] = {}
    for column, panel in enumerate(panels):
        overs: tuple[Over, Over] = ("parallel_time", second)
        for row, over in enumerate(overs):
            axes = grid[row][column]
            handles |= _draw_panel(axes, panel, over, plain=one_solver)
            if column == 0 and panel.curves:
                setting = panel.curves[0].run.setting
                axes.set_ylabel({"mae": "mean absolute error (years)"}.get(setting.metric, setting.metric))
        grid[0][column].set_title(panel.title)
        if panel.curves:
            higher = panel.curves[0].run.setting.higher_is_better
            _draw_inset(grid[0][column].inset_axes((0.6, 0.08 if higher else 0.66, 0.37, 0.27)), panel.curves[0].run)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=min(2 * columns, 6), handlelength=3.4
    )
    return figure


def curve_style(curve: Curve) -> dict[str, Any]:
    """Colour by protocol, line by solver, markers for asynchronous policies."""
    if curve.policy in _ASYNCHRONOUS:
        colour, marker = _ASYNCHRONOUS[curve.policy]
        return {"color": colour, "linestyle": _SOLVER_LINES.get(curve.solver, "solid"), "marker": marker}
    colour = _VERMILION
    if curve.policy == "semisync_fedavg":
        colour = _SKY if curve.slowest_learner_epochs == 4 else _GREEN if curve.slowest_learner_epochs == 3 else _BLUE
    return {"color": colour, "linestyle": _SOLVER_LINES.get(curve.solver, "solid")}


def _draw_panel(axes: Axes, panel: Panel, over: Over, *, plain: bool) -> dict[str, Any]:
    from matplotlib.ticker import MaxNLocator

    handles: dict[str, Any] = {}
    for curve in panel.curves:
        history = curve.run.history
        x = [
            point.at
            if over == "parallel_time"
            else point.update_requests
            if over == "update_requests"
            else point.version
            for point in history
        ]
        y = [value if math.isfinite(value) else math.nan for value in curve.run.metric_values]
        if sum(map(math.isfinite, y)) > SMOOTH_FROM:
            # How much a model may differ from the one before it stays visible behind the median.
            axes.plot(x, y, color=curve_style(curve)["color"], linewidth=0.5, alpha=0.35, zorder=1.2)
            y = running_median(y)
        (line,) = axes.plot(
            x,
            y,
            linewidth=1.6,
            markersize=4.5,
            markevery=max(1, math.ceil(len(x) / 8)),
            markeredgecolor=PAPER,
            markeredgewidth=0.5,
            **(curve_style(curve) | ({"linestyle": "solid"} if plain else {})),
        )
        handles[curve.label] = line
    if panel.curves:
        setting = panel.curves[0].run.setting
        if setting.target is not None:
            axes.axhline(setting.target.value, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
        if not setting.higher_is_better:
            _zoom_in(axes, panel)
        elif setting.target is not None and setting.target.value > 0.9:
            axes.set_ylim(1 - 10 * (1 - setting.target.value), 1)  # who is ahead there would not be seen from 0 on
    if panel.reference is not None:
        handles["Centralized"] = axes.axhline(panel.reference, color=INK, linewidth=1.4, zorder=1.5)
    axes.set_xlabel(_OVER_WORDS[over])
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=over != "parallel_time"))
    axes.xaxis.set_major_formatter(thousands)
    axes.set_xlim(left=0)
    if over == "parallel_time" and panel.curves:
        # A run that takes many times longer would squeeze all others into a corner; by requests it is seen whole.
        ends = [curve.run.history[-1].at for curve in panel.curves if curve.run.history]
        axes.set_xlim(right=min(axes.get_xlim()[1], _LONGEST * statistics.median(ends)))
    return handles


def _zoom_in(axes: Axes, panel: Panel) -> None:
    """Leave out the first values of an error, which are so large that the rest would look flat."""
    values = [value for curve in panel.curves for value in curve.run.metric_values if math.isfinite(value)]
    values += [] if panel.reference is None else [panel.reference]
    if values:
        low, middle = min(values), float(np.quantile(values, 0.9))
        axes.set_ylim(low - 0.08 * (middle - low), low + 1.6 * (middle - low) + 1e-9)


def _draw_inset(axes: Axes, run: Run) -> None:
    counts, names, _ = distribution_of(run)
    stack_classes(axes, counts)
    for patch in axes.patches:
        patch.set_linewidth(0.0 if counts.shape[1] > len(CLASS_COLOURS) else 0.2)
    axes.set_yticks([])
    letters = [name[:1].upper() for name in names]
    axes.set_xticks(range(len(names)), letters if len(names) <= 12 else [""] * len(names), fontsize=6)
    axes.tick_params(length=0, pad=1)
    axes.set_title("examples by learner", fontsize=7, fontweight="normal", loc="center", pad=2)
    axes.grid(visible=False)
    axes.patch.set_alpha(0.85)


# --- Figure 2 ---------------------------------------------------------------------------------


def active_idle_figure(panels: Sequence[tuple[str, Run]]) -> Figure:
    """One bar per learner, one panel per policy: dark is training, pale and hatched is waiting."""
    figure = blank_figure(12.6, 3.4)
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, run) in zip(grid, panels, strict=True):
        draw_learner_bars(axes, run, run.costs.parallel_time, title)
    for before, axes in itertools.pairwise(grid):
        # Learners are named once if the panel to the left has the same ones.
        left, own = ([label.get_text() for label in panel.get_yticklabels()] for panel in (before, axes))
        axes.tick_params(labelleft=left != own)
    kinds_below(figure, [run for _, run in panels])
    return figure


# --- Figure 4 ---------------------------------------------------------------------------------


def mixing_figure(curves: Sequence[MixingCurve]) -> Figure:
    """Seconds for a community model over the number of learners, without and with the cache; both axes logarithmic."""
    figure = blank_figure(9.2, 3.6)
    grid = figure.subplots(1, 2, sharey=True)
    for axes, title, key in ((grid[0], "full pass", "full_pass"), (grid[1], "with the cache", "cached")):
        for index, curve in enumerate(curves):
            axes.plot(
                curve.learners,
                [1000 * seconds for seconds in getattr(curve, key)],
                label=curve.network,
                color=POLICY_COLOURS[index % len(POLICY_COLOURS)],
                marker="osD^vPX"[index % 7],
                markersize=4.5,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(title)
        axes.set_xlabel("learners")
        axes.xaxis.set_major_formatter(thousands)
        axes.yaxis.set_major_formatter(thousands)
    grid[0].set_ylabel("time to compute a community model (ms)")
    grid[1].legend(loc="upper left")
    return figure


# --- Figures 5 and 6 --------------------------------------------------------------------------


def class_figure(holdings: Sequence[Holding]) -> Figure:
    """Examples by learner and class, one panel per domain."""
    figure = blank_figure(3.7 * len(holdings) + 0.4, 3.2)
    for axes, holding in zip(figure.subplots(1, len(holdings), squeeze=False)[0], holdings, strict=True):
        assert holding.counts is not None
        stack_classes(axes, holding.counts)
        if holding.counts.shape[1] > len(CLASS_COLOURS):
            for patch in axes.patches:
                patch.set_linewidth(0.0)
        axes.set_title(holding.title)
        axes.yaxis.set_major_formatter(thousands)
        axes.grid(visible=False, axis="x")
        label_columns(axes, _short_names(holding.names))
    figure.axes[0].set_ylabel("examples")
    return figure


def age_figure(holdings: Sequence[Holding], buckets: int = 6) -> Figure:
    """Top: examples by learner and age range; bottom: the distribution of ages at each learner."""
    everything = np.concatenate([targets for holding in holdings for targets in holding.targets])
    edges = np.linspace(math.floor(everything.min()), math.ceil(everything.max()), buckets + 1)
    figure = blank_figure(3.7 * len(holdings) + 0.4, 5.4)
    grid = figure.subplots(2, len(holdings), squeeze=False)
    for column, holding in enumerate(holdings):
        counts = np.array([np.histogram(targets, edges)[0] for targets in holding.targets], dtype=np.int64)
        stack_classes(grid[0][column], counts)
        grid[0][column].set_title(holding.title)
        grid[0][column].grid(visible=False, axis="x")
        label_columns(grid[0][column], _short_names(holding.names))
        for index, targets in enumerate(holding.targets):
            share, steps = np.histogram(targets, np.linspace(edges[0], edges[-1], 16), density=True)
            colour = POLICY_COLOURS[index % len(POLICY_COLOURS)]
            line = "solid" if index < len(POLICY_COLOURS) else (0, (3, 1.2))
            grid[1][column].stairs(100 * share, steps, color=colour, linestyle=line, label=holding.names[index])
        grid[1][column].set_xlabel("age (years)")
    grid[0][0].set_ylabel("examples")
    grid[1][0].set_ylabel("% of a learner's examples per year of age")
    ages = [f"{low:.0f} to {high:.0f}" for low, high in itertools.pairwise(edges)]
    grid[0][-1].legend(grid[0][-1].containers[::-1], ages[::-1], title="age", fontsize=7, title_fontsize=8)
    grid[1][-1].legend(fontsize=7, ncols=2)
    return figure


# --- Figure 12 --------------------------------------------------------------------------------


def silos_figure(panels: Sequence[Silos]) -> Figure:
    """A bar for each silo alone and for the federation, and a line for the centralized model."""
    widths = [len(panel.alone) + len(panel.federation) for panel in panels]
    figure = blank_figure(min(13.0, 2.0 + 0.4 * sum(widths)), 4.0)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True, width_ratios=widths)[0]
    handles: dict[str, Any] = {}
    for axes, panel in zip(grid, panels, strict=True):
        values: list[float] = [*panel.alone.values(), *panel.federation.values()]
        colours = [_SKY] * len(panel.alone) + [_BLUE] * len(panel.federation)
        bars = axes.bar(range(len(values)), values, 0.75, color=colours, edgecolor=PAPER, linewidth=0.5)
        for bar in bars[len(panel.alone) :]:
            bar.set_hatch("//")
            bar.set_edgecolor(PAPER)
        handles = {"silo alone": bars[0], "federation": bars[-1]}
        if panel.centralized is not None:
            handles["centralized"] = axes.axhline(panel.centralized, color=INK, linewidth=1.4)
        names = [*_short_names(list(panel.alone)), *panel.federation]
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
        axes.set_title(panel.title)
        axes.grid(visible=False, axis="x")
    grid[0].set_ylabel("mean absolute error (years)")
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3)
    return figure


def _short_names(names: Sequence[str]) -> list[str]:
    """The paper's G:1 and C:1."""
    return [re.sub(r"^(gpu|cpu)-", lambda kind: f"{kind.group(1)[0].upper()}:", name) for name in names]
