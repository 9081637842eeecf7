"""The paper's figures of runs: metric curves, active and idle time, timelines, the distribution of data.

Nothing here touches matplotlib's global state: figures are made without pyplot, in a style of their own, and
the same run always gives the same SVG, byte for byte. `*_svg` functions return SVG for one page of HTML, whose
colours are CSS variables that default to the printed colour, so that a page can have a dark mode.
"""

from __future__ import annotations

import functools
import io
import math
import re
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from metis.core.costs import Costs
from metis.core.events import CommunityPublished
from metis.errors import ConfigError
from metis.runs.folds import Span
from metis.runs.run import Run
from metis.runs.setting import LearnerInfo
from metis.text import percent, printable, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Over: TypeAlias = Literal["parallel_time", "update_requests"]
Kind: TypeAlias = Literal["training", "transfer", "idle", "away"]

# Okabe and Ito's colours, which people with any kind of colour vision can distinguish; without the yellow, which is
# lost on paper. Line styles and markers differ too, with other periods, so that no two of 28 curves look alike.
POLICY_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d")
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (1.5, 1.2)))
_MARKERS = "osD^vPX<>"
# Paul Tol's muted scheme: ten classes that stay distinct side by side.
CLASS_COLOURS = (
    "#332288", "#88ccee", "#44aa99", "#117733", "#999933", "#ddcc77", "#cc6677", "#882255", "#aa4499", "#bbbbbb",
)  # fmt: skip
# Dark for work, pale for waiting: the difference survives a black and white printer.
KIND_COLOURS: dict[Kind, str] = {
    "training": "#0a5c94",
    "transfer": "#e8a317",
    "idle": "#f6cdb4",
    "away": "#ececec",
}
KIND_WORDS: dict[Kind, str] = {"training": "training", "transfer": "transfer", "idle": "idle", "away": "away"}
INK, MUTED, GRID, PAPER, _HATCH = "#1c2126", "#5a626b", "#dfe2e6", "#fefefe", "#cf6f3c"

# What a page may restyle: printed colour -> CSS variable.
CSS_VARIABLES: dict[str, str] = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    PAPER: "--paper",
    _HATCH: "--hatch",
    **{colour: f"--{kind}" for kind, colour in KIND_COLOURS.items()},
    **{colour: f"--policy-{index}" for index, colour in enumerate(POLICY_COLOURS, 1)},
    **{colour: f"--class-{index}" for index, colour in enumerate(CLASS_COLOURS, 1)},
}

# Beyond these a figure shows shares instead of single learners, or leaves something out.
MAX_ROWS = 48
MAX_SPANS = 3000
MAX_VERSIONS = 40
SMOOTH_FROM = 60
NOTHING = 0.0005  # a share too small to be seen

FORMATS = ("png", "svg", "pdf")

_STYLE: dict[str, Any] = {
    "figure.facecolor": "white",
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 7,
    "axes.labelsize": 10,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "hatch.linewidth": 0.7,
    "savefig.dpi": 160,
    "svg.hashsalt": "metis",  # otherwise the ids in an SVG are random
}


# --- files --------------------------------------------------------------------------------------


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
    _check_format(path)
    with house_style():
        _save(_distribution_figure(counts, names, class_names, kind=kind), path)
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
        _check_format(Path(path))
    with house_style():
        figure = make(runs)
        if path is not None:
            _save(figure, Path(path))
    return figure


def _check_format(path: Path) -> None:
    if path.suffix.lower().lstrip(".") not in FORMATS:
        allowed = ", ".join(f".{name}" for name in FORMATS)
        raise ConfigError(f"{path}: a figure is written as one of {allowed}; name the file accordingly")


def save_both(figure: Figure, folder: Path, name: str, suffixes: Sequence[str] = ("png", "svg")) -> list[Path]:
    paths = [folder / f"{name}.{suffix}" for suffix in suffixes]
    for path in paths:
        _save(figure, path)
        figure.set_layout_engine("none")  # laid out once is enough
    return paths


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A creation date would make every file different.
    undated: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with any_alphabet():
        figure.savefig(path, metadata=undated.get(path.suffix.lower()))


@contextmanager
def house_style() -> Iterator[None]:
    """Our style on matplotlib's defaults: a user's own settings do not change what a report looks like."""
    from matplotlib import style

    with style.context(["default", _STYLE]):
        yield


@contextmanager
def any_alphabet() -> Iterator[None]:
    """Without matplotlib's warnings for each letter that the font lacks; it draws a box instead."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


@functools.cache
def _figure_class() -> type[Figure]:
    from matplotlib.figure import Figure

    class Drawing(Figure):
        """A figure that a notebook can show without pyplot."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            with house_style(), any_alphabet():
                self.savefig(buffer, format="png", dpi=110)  # a notebook stores its pictures
            return buffer.getvalue()

    return Drawing


def blank_figure(width: float, height: float) -> Figure:
    return _figure_class()(figsize=(width, height), layout="constrained")


# --- SVG for a page ---------------------------------------------------------------------------


def curve_svg(runs: Sequence[Run], over: Over, identity: str) -> str:
    """One curve per run: the metric over parallel time or over update requests."""
    with house_style():
        figure = blank_figure(5.4, 3.7 + 0.2 * math.ceil(len(runs) / 2))
        axes = figure.add_subplot()
        _draw_curves(axes, runs, over)
        if len(runs) > 1:
            legend_below(figure, axes, columns=2)
        return inline_svg(figure, identity)


def policies_svg(runs: Sequence[Run], identity: str) -> str:
    """One bar per run: how all learners together spent their time."""
    with house_style():
        figure = blank_figure(7.0, 0.75 + 0.34 * len(runs))
        _draw_policy_bars(figure.add_subplot(), runs)
        return inline_svg(figure, identity)


def active_idle_svg(run: Run, until: float, identity: str) -> str:
    """One bar per learner: training, transfer, waiting and absence over the whole run."""
    with house_style():
        figure = blank_figure(5.4, _rows_height(run))
        draw_learner_bars(figure.add_subplot(), run, until)
        return inline_svg(figure, identity)


def timeline_svg(run: Run, until: float, identity: str) -> str:
    """One row per learner, or shares of many learners: what they did from the start until then."""
    with house_style():
        figure = blank_figure(11.0, _rows_height(run))
        _draw_timeline(figure.add_subplot(), run, until)
        return inline_svg(figure, identity)


def distribution_svg(run: Run, identity: str) -> str:
    """How many examples of each class every learner has."""
    with house_style():
        return inline_svg(_distribution_figure(*distribution_of(run), width=11.0 if wide(run) else 7.0), identity)


def inline_svg(figure: Figure, identity: str) -> str:
    """SVG for use inside HTML: with unique ids, text as text, and colours that the page can change."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}), any_alphabet():
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", text)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'\bid="', f'id="{identity}-', text)
    text = text.replace("url(#", f"url(#{identity}-").replace('href="#', f'href="#{identity}-')
    text = re.sub(r' fill="(#[0-9a-f]{6})"', r' style="fill: \1"', text)  # an attribute cannot hold a variable
    text = re.sub(r": (#[0-9a-f]{6})\b", _themed, text)
    width, height = (72 * inches for inches in figure.get_size_inches())
    return re.sub(r"<svg[^>]*>", f'<svg viewBox="0 0 {width:g} {height:g}" aria-hidden="true">', text, count=1)


def _themed(match: re.Match[str]) -> str:
    colour = match.group(1)
    variable = CSS_VARIABLES.get(colour)
    return match.group() if variable is None else f": var({variable}, {colour})"


# --- words and numbers that figures and report share -----------------------------------------


def labels(runs: Sequence[Run]) -> list[str]:
    """The name of each run: its policy, made unique where several runs share it."""
    plain = [_shown(run.policy) for run in runs]
    unique = []
    for index, (label, run) in enumerate(zip(plain, runs, strict=True)):
        alike = [other.setting.seed for other, name in zip(runs, plain, strict=True) if name == label]
        if len(alike) == 1:
            unique.append(label)
        elif len(set(alike)) == len(alike):
            unique.append(f"{label}, seed {run.setting.seed}")
        else:
            unique.append(f"{label} ({plain[: index + 1].count(label)})")
    return unique


def shares(costs: Costs) -> dict[Kind, float]:
    """How all learners together spent their time; adds up to 1."""
    spent = _seconds(costs)
    total = sum(float(part.sum()) for part in spent.values())
    return {kind: float(part.sum()) / total if total else 0.0 for kind, part in spent.items()}


def by_speed(learners: Sequence[LearnerInfo]) -> list[LearnerInfo]:
    """Fastest first; equally fast learners stay in their order."""
    return sorted(learners, key=lambda learner: learner.time_per_batch)


def timeline_window(runs: Sequence[Run]) -> float:
    """From the start until about four rounds of the slowest policy: enough to see its rhythm."""
    end = max((run.costs.parallel_time for run in runs), default=0.0)
    turn = 0.0
    for run in runs:
        training: dict[str, list[float]] = {}
        for span in run.spans():
            if span.kind == "training":
                training.setdefault(span.learner, []).append(span.end - span.start)
        turn = max([turn, *(statistics.median(lengths) for lengths in training.values())])
        published = _publications(run, math.inf)
        if len(published) > 1:
            turn = max(turn, statistics.median(np.diff([0.0, *published]).tolist()))
    window = 4.25 * turn
    return window if 0 < 1.4 * window < end else end


def wide(run: Run) -> bool:
    """Whether the figure of the data needs the whole width of a page."""
    return len(run.setting.learners) > 16


def smoothed(runs: Sequence[Run]) -> bool:
    """Whether a curve has enough points for a running median drawn over them."""
    return any(sum(map(math.isfinite, run.metric_values)) > SMOOTH_FROM for run in runs)


def versions_drawn(run: Run, until: float) -> bool:
    """Whether the timeline has a line for each community model: not if there are too many."""
    return 0 < len(_publications(run, until)) <= MAX_VERSIONS


def rows_drawn(run: Run, until: float) -> bool:
    """Whether the timeline has a row for each learner: not if there are too many."""
    return len(run.setting.learners) <= MAX_ROWS and len(_spans(run, until)) <= MAX_SPANS


def _publications(run: Run, until: float) -> list[float]:
    return [at for at, item in run.events if isinstance(item, CommunityPublished) and 0 < at <= until]


def _spans(run: Run, until: float) -> list[Span]:
    return [span for span in run.spans() if span.start < until]


def _seconds(costs: Costs) -> dict[Kind, NDArray[np.float64]]:
    by_learner = costs.by_learner.values()
    return {
        "training": np.array([learner.active for learner in by_learner], dtype=float),
        "transfer": np.array([learner.transfer for learner in by_learner], dtype=float),
        "idle": np.array([learner.idle for learner in by_learner], dtype=float),
        "away": np.array([learner.away for learner in by_learner], dtype=float),
    }


def distribution_of(run: Run) -> tuple[NDArray[np.int64], list[str], list[str]]:
    """Counts by learner and class; one column where there are no classes."""
    learners = run.setting.learners
    names = [learner.name for learner in learners]
    widths = {len(learner.class_counts) for learner in learners}
    if len(widths) == 1 and 0 not in widths:
        counts = np.array([learner.class_counts for learner in learners], dtype=np.int64)
        return counts, names, [str(name) for name in run.setting.class_names]
    return np.array([[learner.examples] for learner in learners], dtype=np.int64), names, []


def _shown(name: str, longest: int = 40) -> str:
    """A name that fits and is valid in an XML file."""
    clean = printable(name)
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


def _learner_label(learner: LearnerInfo) -> str:
    return f"{_shown(learner.name, 16)}  ({seconds(learner.time_per_batch)})"


# --- whole figures ----------------------------------------------------------------------------


def curves_figure(runs: Sequence[Run], *, inset: bool = False) -> Figure:
    columns = min(5, max(1, len(runs)))
    figure = blank_figure(9.2, 3.7 + (0.24 * math.ceil(len(runs) / columns) if len(runs) > 1 else 0.0))
    time_axes, request_axes = figure.subplots(1, 2, sharey=True)
    _draw_curves(time_axes, runs, "parallel_time")
    _draw_curves(request_axes, runs, "update_requests")
    request_axes.set_ylabel("")
    request_axes.tick_params(labelleft=False)
    if len(runs) == 1:
        figure.suptitle(labels(runs)[0], x=0.01, ha="left", fontsize=11, fontweight="bold")
    elif runs:
        legend_below(figure, time_axes, columns)
    if inset and runs:
        lower = 0.1 if runs[0].setting.higher_is_better else 0.62
        _draw_inset(time_axes.inset_axes((0.62, lower, 0.35, 0.32)), runs[0])
    return figure


def _active_idle_figure(runs: Sequence[Run]) -> Figure:
    columns = min(3, len(runs))
    rows = math.ceil(len(runs) / columns)
    figure = blank_figure(max(5.6, 3.6 * columns + 1.2), 0.3 + _rows_height(runs[0]) * rows)
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
    figure = blank_figure(9.2, 0.3 + sum(_rows_height(run) for run in runs))
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for panel, run, label in zip(panels, runs, labels(runs), strict=True):
        _draw_timeline(panel, run, until, label)
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
    _draw_distribution(figure, np.atleast_2d(counts), names, class_names, kind)
    return figure


def _rows_height(run: Run) -> float:
    """Inches for a figure with one row per learner, or for one with shares."""
    learners = len(run.setting.learners)
    return 2.6 if learners > MAX_ROWS else 1.0 + 0.2 * max(2, learners)


def legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    handles, names = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=columns, handlelength=3.2, columnspacing=1.8)


def kinds_below(figure: Figure, runs: Sequence[Run]) -> None:
    from matplotlib.patches import Patch

    there = {kind for run in runs for kind, share in shares(run.costs).items() if share > NOTHING}
    handles = [Patch(label=KIND_WORDS[kind], **_fill(kind)) for kind in KIND_COLOURS if kind in there]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


# --- parts of figures -------------------------------------------------------------------------


def _draw_curves(axes: Axes, runs: Sequence[Run], over: Over) -> None:
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
        _say(axes, "no evaluation gave a finite number" if evaluated else "the community model was not evaluated")


def line_look(index: int) -> dict[str, Any]:
    """The colour, dashes and marker of the policy with this index."""
    return {
        "color": POLICY_COLOURS[index % len(POLICY_COLOURS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markeredgecolor": PAPER,
        "markeredgewidth": 0.6,
    }


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
        axes.set_ylabel(_shown(setting.metric) + ("" if setting.higher_is_better else " (lower is better)"))
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


def running_median(values: Sequence[float]) -> list[float]:
    """Each value's median with its neighbours; what is not a number stays so."""
    half = max(2, len(values) // 50)
    result = []
    for index, value in enumerate(values):
        near = [other for other in values[max(0, index - half) : index + half + 1] if math.isfinite(other)]
        # Few neighbours at the ends: the first and last evaluation are kept as they are.
        ends = index in (0, len(values) - 1)
        result.append(value if ends or not math.isfinite(value) else statistics.median(near))
    return result


def _draw_policy_bars(axes: Axes, runs: Sequence[Run]) -> None:
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
    _label_rows(axes, labels(runs))
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of all learners' time (%)")


def draw_learner_bars(axes: Axes, run: Run, until: float, title: str = "") -> None:
    learners = by_speed(run.setting.learners)
    position = {name: index for index, name in enumerate(run.costs.by_learner)}
    spent = _seconds(run.costs)
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
                left + width, np.arange(len(learners) + 1), baseline=left, fill=True, **_fill(kind, hatched=False)
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
        _label_rows(axes, [_learner_label(learner) for learner in learners])
        axes.set_xlim(0, until or 1)
        axes.set_xlabel("time (s)")
        axes.xaxis.set_major_formatter(thousands)


def _draw_timeline(axes: Axes, run: Run, until: float, title: str = "") -> None:
    spans = _spans(run, until)
    if rows_drawn(run, until):
        learners = by_speed(run.setting.learners)
        row = {learner.name: float(index) for index, learner in enumerate(learners)}
        for kind in KIND_COLOURS:
            chosen = [span for span in spans if span.kind == kind and span.learner in row]
            starts = np.array([span.start for span in chosen])
            ends = np.array([min(span.end, until) for span in chosen])
            _rectangles(axes, kind, starts, ends, np.array([row[span.learner] for span in chosen]))
        _label_rows(axes, [_learner_label(learner) for learner in learners])
    else:
        _draw_shares_over_time(axes, spans, until, len(run.setting.learners))
    if versions_drawn(run, until):
        for at in _publications(run, until):
            axes.axvline(at, color=INK, linewidth=0.9, zorder=4)
    if title:
        axes.set_title(title)
    axes.set_xlim(0, until or 1)
    axes.set_xlabel("time (s)")
    axes.xaxis.set_major_formatter(thousands)


def _draw_shares_over_time(axes: Axes, spans: Sequence[Span], until: float, learners: int, bins: int = 400) -> None:
    """For more learners than rows fit: the share of them in each state, over time."""
    edges = np.linspace(0.0, until or 1.0, bins + 1)
    bottom = np.zeros(bins)
    for kind in KIND_COLOURS:
        chosen = [span for span in spans if span.kind == kind]
        before = _elapsed([span.start for span in chosen], edges) - _elapsed([span.end for span in chosen], edges)
        share = 100 * np.diff(before) / (np.diff(edges) * max(1, learners))
        axes.stairs(bottom + share, edges, baseline=bottom, fill=True, **_fill(kind, hatched=False))
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


def _draw_distribution(
    figure: Figure, counts: NDArray[np.int64], names: Sequence[str], class_names: Sequence[str], kind: str
) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    learners, classes = counts.shape
    axes = figure.add_subplot()
    shown = [_shown(str(name), 14) for name in class_names] or [str(k) for k in range(classes)]
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


def _draw_inset(axes: Axes, run: Run) -> None:
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
    axes.add_patch(PathPatch(Outline(corners.reshape(-1, 2), codes), zorder=3, **_fill(kind)))


def _fill(kind: Kind, *, hatched: bool = True) -> dict[str, Any]:
    """How one kind of time looks; hatching distinguishes idle without colour."""
    look: dict[str, Any] = {"facecolor": KIND_COLOURS[kind], "edgecolor": PAPER, "linewidth": 0.4}
    if not hatched:
        return {"facecolor": KIND_COLOURS[kind], "edgecolor": "none", "linewidth": 0}
    if kind == "idle":
        look |= {"hatch": "////", "edgecolor": _HATCH, "linewidth": 0.0}
    return look


def _label_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), list(names))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")


def label_columns(axes: Axes, names: Sequence[str]) -> None:
    if len(names) > MAX_ROWS:
        return
    shown = [_shown(name, 12) for name in names]
    crowded = sum(len(name) + 1 for name in shown) > 90
    axes.set_xticks(range(len(names)), shown, rotation=60 if crowded else 0, ha="right" if crowded else "center")
    axes.tick_params(axis="x", length=0)


def thousands(value: float, position: float) -> str:
    return f"{value:,.10g}"


def _say(axes: Axes, words: str) -> None:
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=MUTED)
