"""Parts of figures: curves, bars of time, timelines, the distribution of data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from metis.reporting.style import (
    CLASS_COLOURS,
    INK,
    KIND_COLOURS,
    KIND_WORDS,
    MUTED,
    PAPER,
    POLICY_COLOURS,
    Kind,
    Over,
    fill,
    label_rows,
    line_look,
    say,
    thousands,
)
from metis.reporting.summaries import (
    MAX_ROWS,
    MAX_SPANS,
    NOTHING,
    SMOOTH_FROM,
    by_speed,
    distribution_of,
    labels,
    learner_label,
    publications,
    rows_drawn,
    running_median,
    shares,
    short_name,
    smoothed,
    spans_until,
    time_spent,
    versions_drawn,
)
from metis.runs.folds import Span
from metis.runs.run import Run
from metis.text import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def rows_height(run: Run) -> float:
    """Inches for a figure with one row per learner, or for one with shares."""
    learners = len(run.setting.learners)
    return 2.6 if learners > MAX_ROWS else 1.0 + 0.2 * max(2, learners)


def kinds_below(figure: Figure, runs: Sequence[Run]) -> None:
    from matplotlib.patches import Patch

    there = {kind for run in runs for kind, share in shares(run.costs).items() if share > NOTHING}
    handles = [Patch(label=KIND_WORDS[kind], **fill(kind)) for kind in KIND_COLOURS if kind in there]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def draw_curves(axes: Axes, runs: Sequence[Run], over: Over) -> None:
    drawn: list[float] = []
    for index, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
        x = [point.at if over == "parallel_time" else point.update_requests for point in run.history]
        y = [value if math.isfinite(value) else math.nan for value in run.metric_values]
        finite = [value for value in y if math.isfinite(value)]
        if not finite:
            label += " (never finite)" if y else " (not evaluated)"
        drawn += finite
        look: dict[str, Any] = {"color": POLICY_COLOURS[index % len(POLICY_COLOURS)]}
        line = y
        if len(finite) > SMOOTH_FROM:
            # Asynchronous policies publish so often that their curves would be a smear over the others.
            axes.plot(x, y, linewidth=0.6, alpha=0.35, zorder=1.5, **look)
            line = running_median(y)
        axes.plot(x, line, label=label, markevery=max(1, math.ceil(len(x) / 10)), **line_look(index))
    curve_axes(axes, runs, over, drawn)
    if smoothed(runs):
        axes.set_title("thin: every evaluation, thick: running median", fontsize=8.5, fontweight="normal", color=MUTED)
    if not drawn:
        axes.set_yticks([])
        evaluated = any(run.history for run in runs)
        say(axes, "no evaluation gave a finite number" if evaluated else "the community model was not evaluated")


def curve_axes(axes: Axes, runs: Sequence[Run], over: Over, drawn: Sequence[float]) -> None:
    """Labels, the target and the scale for curves of the metric with the values `drawn`."""
    from matplotlib import rcParams
    from matplotlib.ticker import MaxNLocator, NullFormatter

    axes.set_xlabel("parallel time (s)" if over == "parallel_time" else "update requests")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=over == "update_requests"))
    axes.xaxis.set_major_formatter(thousands)
    axes.set_xlim(left=0)
    if runs:
        setting = runs[0].setting
        axes.set_ylabel(short_name(setting.metric) + ("" if setting.higher_is_better else " (lower is better)"))
        targets = sorted({run.setting.target.value for run in runs if run.setting.target is not None})
        for target in targets:
            axes.axhline(target, color=MUTED, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
            axes.annotate(
                f"target\n{target:g}",
                (1, target),
                xycoords=("axes fraction", "data"),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=0.85 * rcParams["font.size"],
                color=MUTED,
            )
        if drawn and min([*drawn, *targets]) > 0 and max(drawn) > 200 * min(drawn):
            axes.set_yscale("log")  # one bad start must not flatten everything else
            axes.yaxis.set_major_formatter(thousands)
            axes.yaxis.set_minor_formatter(NullFormatter())


def draw_policy_bars(axes: Axes, runs: Sequence[Run]) -> None:
    rows = np.arange(len(runs), dtype=float)
    left = np.zeros(len(runs))
    parts = [shares(run.costs) for run in runs]
    for kind in KIND_COLOURS:
        width = np.array([100 * part[kind] for part in parts])
        _rectangles(axes, kind, left, left + width, rows)
        left += width
    for row, part in zip(rows, parts, strict=True):
        text = f"{percent(part['idle'])} idle"
        axes.annotate(text, (100, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)
    label_rows(axes, labels(runs))
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of all learners' time (%)")


def draw_learner_bars(axes: Axes, run: Run, until: float, title: str = "") -> None:
    learners = by_speed(run.setting.learners)
    position = {name: index for index, name in enumerate(run.costs.by_learner)}
    spent = time_spent(run.costs)
    # A learner that never joined was away all the time.
    order = [position.get(learner.name, -1) for learner in learners]
    absent = {"away": run.costs.parallel_time}
    stacked = {
        kind: np.array([spent[kind][index] if index >= 0 else absent.get(kind, 0.0) for index in order])
        for kind in KIND_COLOURS
    }
    many = len(learners) > MAX_ROWS
    left = np.zeros(len(learners))
    for kind, width in stacked.items():
        if many:
            axes.stairs(
                left + width, np.arange(len(learners) + 1), baseline=left, fill=True, **fill(kind, hatched=False)
            )
        else:
            _rectangles(axes, kind, left, left + width, np.arange(len(learners), dtype=float))
        left = left + width
    if title:
        axes.set_title(f"{title}: {percent(shares(run.costs)['idle'])} idle")
    if many:
        axes.set_xlim(0, len(learners))
        axes.set_ylim(0, until or 1)
        axes.set_ylabel("time (s)")
        axes.set_xlabel(f"{len(learners):,} learners, fastest first")
        axes.xaxis.set_major_formatter(thousands)
    else:
        label_rows(axes, [learner_label(learner) for learner in learners])
        axes.set_xlim(0, until or 1)
        axes.set_xlabel("time (s)")
        axes.xaxis.set_major_formatter(thousands)


def draw_timeline(axes: Axes, run: Run, until: float, title: str = "") -> None:
    spans = spans_until(run, until)
    if rows_drawn(run, until):
        learners = by_speed(run.setting.learners)
        row = {learner.name: float(index) for index, learner in enumerate(learners)}
        for kind in KIND_COLOURS:
            chosen = [span for span in spans if span.kind == kind and span.learner in row]
            starts = np.array([span.start for span in chosen])
            ends = np.array([min(span.end, until) for span in chosen])
            _rectangles(axes, kind, starts, ends, np.array([row[span.learner] for span in chosen]))
        label_rows(axes, [learner_label(learner) for learner in learners])
    else:
        draw_shares_over_time(axes, spans, until, len(run.setting.learners))
    if versions_drawn(run, until):
        for at in publications(run, until):
            axes.axvline(at, color=INK, linewidth=0.9, zorder=4)
    if title:
        axes.set_title(title)
    axes.set_xlim(0, until or 1)
    axes.set_xlabel("time (s)")
    axes.xaxis.set_major_formatter(thousands)


def draw_shares_over_time(axes: Axes, spans: Sequence[Span], until: float, learners: int, bins: int = 400) -> None:
    """For more learners than rows fit: the share of them in each state, over time."""
    edges = np.linspace(0.0, until or 1.0, bins + 1)
    bottom = np.zeros(bins)
    for kind in KIND_COLOURS:
        chosen = [span for span in spans if span.kind == kind]
        before = _elapsed([span.start for span in chosen], edges) - _elapsed([span.end for span in chosen], edges)
        share = 100 * np.diff(before) / (np.diff(edges) * max(1, learners))
        axes.stairs(bottom + share, edges, baseline=bottom, fill=True, **fill(kind, hatched=False))
        bottom = bottom + share
    axes.set_ylim(0, 100)
    axes.set_ylabel(f"% of {learners:,} learners")


def _elapsed(moments: Sequence[float], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum over all moments of the time that has passed since, at each of these times."""
    ordered = np.sort(np.asarray(moments, dtype=float))
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    passed = np.searchsorted(ordered, at)
    result: NDArray[np.float64] = passed * at - sums[passed]
    return result


def draw_distribution(
    figure: Figure, counts: NDArray[np.int64], names: Sequence[str], class_names: Sequence[str], kind: str
) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    learners, classes = counts.shape
    axes = figure.add_subplot()
    shown = [short_name(str(name), 14) for name in class_names] or [str(k) for k in range(classes)]
    axes.set_xlabel(f"{learners:,} learners" if learners > MAX_ROWS else "learner")
    if classes > 1 and learners * classes > MAX_SPANS:
        # A column per learner, a row per class: an image stays small, however many there are.
        image = axes.imshow(counts.T, aspect="auto", origin="lower", cmap="cividis", interpolation="nearest", vmin=0)
        figure.colorbar(image, ax=axes, label="examples", pad=0.01, ticks=MaxNLocator(6, integer=True))
        axes.set_ylabel(kind)
        axes.grid(visible=False)
        label_columns(axes, names)
        return
    stack_classes(axes, counts)
    axes.set_ylabel("examples")
    axes.yaxis.set_major_formatter(thousands)
    axes.grid(visible=False, axis="x")
    label_columns(axes, names)
    if 1 < classes <= len(CLASS_COLOURS):
        handles = axes.get_legend_handles_labels()[0]
        figure.legend(
            handles[::-1], shown[::-1], loc="outside right center", title=kind, handlelength=1, handleheight=1
        )
    elif classes > 1:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        scale = ScalarMappable(Normalize(0, classes - 1), colormaps["viridis"])
        figure.colorbar(scale, ax=axes, label=kind, pad=0.01)


def stack_classes(axes: Axes, counts: NDArray[np.int64]) -> None:
    from matplotlib import colormaps

    learners, classes = counts.shape
    gradual = colormaps["viridis"]
    bottom = np.zeros(learners)
    for k in range(classes):
        colour: Any = POLICY_COLOURS[0]
        if classes > len(CLASS_COLOURS):
            colour = gradual(k / (classes - 1))
        elif classes > 1:
            colour = CLASS_COLOURS[k]
        height = counts[:, k].astype(float)
        if learners > MAX_ROWS:
            axes.stairs(
                bottom + height,
                np.arange(learners + 1) - 0.5,
                baseline=bottom,
                fill=True,
                color=colour,
                linewidth=0,
                label=str(k),
            )
        else:
            axes.bar(
                np.arange(learners), height, 0.8, bottom, color=colour, edgecolor=PAPER, linewidth=0.5, label=str(k)
            )
        bottom = bottom + height
    axes.set_xlim(-0.6, learners - 0.4)


def draw_inset(axes: Axes, run: Run) -> None:
    counts = distribution_of(run)[0]
    if counts.size <= MAX_SPANS:
        stack_classes(axes, counts)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title("examples by learner", fontsize=8, fontweight="normal", pad=3)


def _rectangles(
    axes: Axes, kind: Kind, starts: NDArray[np.float64], ends: NDArray[np.float64], rows: NDArray[np.float64]
) -> None:
    """All bars of one kind as a single path: thousands of them stay a small file."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    wide = ends > starts
    starts, ends, rows = starts[wide], ends[wide], rows[wide]
    if not len(starts):
        return
    low, high = rows - 0.38, rows + 0.38
    corners = np.stack(
        [
            np.stack([starts, low], -1),
            np.stack([ends, low], -1),
            np.stack([ends, high], -1),
            np.stack([starts, high], -1),
            np.stack([starts, low], -1),
        ],
        axis=1,
    )
    codes = np.tile([Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY], len(starts))
    axes.add_patch(PathPatch(Outline(corners.reshape(-1, 2), codes), zorder=3, **fill(kind)))


def label_columns(axes: Axes, names: Sequence[str]) -> None:
    if len(names) > MAX_ROWS:
        return
    shown = [short_name(name, 12) for name in names]
    crowded = sum(len(name) + 1 for name in shown) > 90
    axes.set_xticks(range(len(names)), shown, rotation=60 if crowded else 0, ha="right" if crowded else "center")
    axes.tick_params(axis="x", length=0)
