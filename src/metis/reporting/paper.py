"""Tables and figures that go into a paper as they are: LaTeX, Markdown, CSV, and figures as wide as a column.

One row per policy; with several seeds the mean and the standard deviation over them, and bands in the curves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from metis.files import write_text
from metis.reporting import marks, style, summaries
from metis.reporting.findings import energy_unit
from metis.reporting.tables import Row, write_csv
from metis.runs import seeds
from metis.runs.run import Run
from metis.text import decimals_of, factor, listed, plural, plus_minus

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN_INCHES = 3.35  # a column of the two-column styles of IEEE, ACM and Elsevier
_GRID = 200  # points of a mean curve

_PAPER_STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.2,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.5,
    "pdf.fonttype": 42,  # publishers refuse Type 3 fonts
}


@dataclass(frozen=True)
class Cell:
    """One entry of the table: text, or a mean with its deviation."""

    text: str = ""
    mean: float | None = None
    deviation: float | None = None
    best: bool = False
    note: str = ""  # after the number, as (3/5)
    decimals: int = 0  # the same in all of a column


@dataclass(frozen=True)
class PaperTable:
    """Headings and one row per policy, and what a reader must know to read them."""

    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    policies: tuple[str, ...]


def paper_table(runs: Sequence[Run]) -> PaperTable:
    """The costs until the target, or at the end if there is none, and the final metric of each policy."""
    groups = seeds.grouped(runs)
    setting = runs[0].setting
    several = max(len(group.runs) for group in groups)
    columns = {"parallel_time": "PT (s)", "cumulative_time": "CT (s)", "update_requests": "CC"}
    if any(run.setting.update_bytes is not None for run in runs):
        columns["bytes_exchanged"] = "bytes"
    columns["energy.equation"] = f"EC ({energy_unit(runs[0])})"
    fixed = all(len({seeds.measured(run, name) for run in runs}) == 1 for name in ("parallel_time",))
    if fixed and setting.target is None:
        del columns["parallel_time"]  # the budget, the same for all
    estimates = {name: [group.estimate(name) for group in groups] for name in (*columns, "final")}
    best = {name: _best(name, found, setting.higher_is_better) for name, found in estimates.items()}
    decimals = {name: decimals_of([(own.mean, own.deviation) for own in found]) for name, found in estimates.items()}
    if all(abs(own.mean or 0.0) <= 1 for own in estimates["final"]):
        decimals["final"] = max(3, decimals["final"])  # also where all deviations are 0
    decisive = seeds.decisive(groups)
    won = seeds.wins(groups, decisive)
    with_factors = setting.target is not None and len(groups) > 1
    rows = []
    for index, group in enumerate(groups):
        cells: list[Cell] = []
        for name in columns:
            own = estimates[name][index]
            short = f"({len(own.known)}/{several})" if 0 < len(own.known) < len(group.runs) and not cells else ""
            cells.append(Cell("", own.mean, own.deviation, index in best[name], short, decimals[name]))
        if with_factors:
            cells.insert(1, Cell(factor(seeds.factor(groups[0], group, "parallel_time")) or "–"))
        own = estimates["final"][index]
        cells.append(Cell("", own.mean, own.deviation, index in best["final"], decimals=decimals["final"]))
        if several > 1 and len(groups) > 1:
            cells.append(Cell(f"{won[index]}/{several}"))
        rows.append(tuple(cells))
    headings = list(columns.values())
    if with_factors:
        headings.insert(1, "faster")
    headings.append(setting.metric)
    if several > 1 and len(groups) > 1:
        headings.append("wins")
    return PaperTable(
        _caption(runs, groups, decisive, columns.values()),
        tuple(headings),
        tuple(rows),
        tuple(group.label for group in groups),
    )


def _best(name: str, found: Sequence[seeds.Estimate], higher: bool) -> set[int]:
    """Which policies have the best mean, among those that have the number in every seed; none where all are equal."""
    means = {index: own.mean for index, own in enumerate(found) if own.mean is not None and None not in own.values}
    if len(found) < 2 or len(set(means.values())) < 2:
        return set()
    best = (max if name == "final" and higher else min)(means.values())
    return {index for index, mean in means.items() if mean == best}


_ABBREVIATIONS = {"PT": "parallel time", "CT": "cumulative time", "CC": "update requests", "EC": "energy"}


def _caption(runs: Sequence[Run], groups: Sequence[seeds.Group], decisive: str, columns: Iterable[str]) -> str:
    setting, facts = runs[0].setting, runs[0].setting.facts
    data = f" on {facts['dataset']}" if "dataset" in facts else ""
    several = max(len(group.runs) for group in groups)
    until = "at the end of the budget"
    if setting.target is not None:
        until = f"until {setting.metric} {setting.target.value:g}"
    words = [f"Costs {until}{data} with {plural(len(setting.learners), 'learner')}"]
    if several > 1:
        words[0] += f", mean ± standard deviation over {several} seeds"
    words[0] += "."
    shown_here = {column.partition(" ")[0] for column in columns}
    words.append(", ".join(f"{key}: {word}" for key, word in _ABBREVIATIONS.items() if key in shown_here) + ".")
    if any(0 < (group.reached or 0) < len(group.runs) for group in groups):
        words.append("(k/n): the target was reached in k of n seeds, over which the mean is taken.")
    if setting.target is not None and len(groups) > 1:
        words.append(f"Faster: the parallel time of {groups[0].label} divided by that of the row.")
    if several > 1 and len(groups) > 1:
        what = "reached the target first" if decisive == "parallel_time" else f"had the best final {setting.metric}"
        words.append(f"Wins: seeds in which the policy {what}.")
    return " ".join(words)


# --- text ---------------------------------------------------------------------------------------


def shown(cell: Cell, sign: str = "±") -> str:
    """A cell as plain text."""
    text = cell.text or plus_minus(cell.mean, cell.deviation, sign, cell.decimals)
    return f"{text} {cell.note}".strip()


def latex(table: PaperTable, label: str = "tab:comparison") -> str:
    """A table environment for the package booktabs, as wide as the page: `table*` spans both columns."""
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table*}",
        "  \\centering\\small\\setlength{\\tabcolsep}{5pt}",
        f"  \\caption{{{_tex(table.caption)}}}",
        f"  \\label{{{label}}}",
        "  \\vspace{0.5ex}",
        f"  \\begin{{tabular}}{{l{'r' * len(table.headings)}}}",
        "    \\toprule",
        "    "
        + " & ".join(["Policy", *(_tex(heading[:1].upper() + heading[1:]) for heading in table.headings)])
        + " \\\\",
        "    \\midrule",
    ]
    for policy, row in zip(table.policies, table.rows, strict=True):
        lines.append("    " + " & ".join([_tex(policy), *map(_tex_cell, row)]) + " \\\\")
    lines += ["    \\bottomrule", "  \\end{tabular}", "\\end{table*}", ""]
    return "\n".join(lines)


_TEX = {
    "\\": "\\textbackslash{}", "&": "\\&", "%": "\\%", "$": "\\$", "#": "\\#", "_": "\\_", "{": "\\{", "}": "\\}",
    "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "λ": "$\\lambda$", "ε": "$\\varepsilon$", "±": "$\\pm$",
    "×": "$\\times$", "–": "--", "≤": "$\\le$", "<": "$<$", ">": "$>$", "|": "$|$",
}  # fmt: skip


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)


def _tex_cell(cell: Cell) -> str:
    if cell.text or cell.mean is None or not math.isfinite(cell.mean):
        return _tex(shown(cell))
    value = plus_minus(cell.mean, cell.deviation, "\\pm", cell.decimals).replace(",", "{,}")
    return f"$\\mathbf{{{value}}}$" if cell.best else f"${value}$" + (f" {cell.note}" if cell.note else "")


def markdown(table: PaperTable) -> str:
    """The table as Markdown; the best of each column is bold."""

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    lines = [row(["policy", *table.headings]), "| --- |" + " ---: |" * len(table.headings)]
    for policy, cells in zip(table.policies, table.rows, strict=True):
        lines.append(row([policy, *(f"**{shown(cell)}**" if cell.best else shown(cell) for cell in cells)]))
    return "\n".join([*lines, "", table.caption, ""])


def summary_rows(runs: Sequence[Run]) -> list[Row]:
    """One row per policy and measure: mean, deviation, interval, seeds, wins."""
    rows: list[Row] = []
    for policy in seeds.summarise(runs):
        for measure in (*seeds.COSTS, *seeds.METRICS):
            found = policy[measure]
            low, high = found["interval"] or (None, None)
            rows.append(
                {
                    "policy": policy["label"],
                    "measure": measure,
                    "mean": found["mean"],
                    "deviation": found["deviation"],
                    "interval_low": low,
                    "interval_high": high,
                    "seeds": len(policy["seeds"]),
                    "known": sum(value is not None for value in found["values"]),
                    "wins": policy["wins"][measure],
                    "factor": policy["factors"].get(measure),
                }
            )
    return rows


def findings(runs: Sequence[Run]) -> list[str]:
    """What came out over the seeds, in sentences."""
    groups = seeds.grouped(runs)
    setting = runs[0].setting
    several = max(len(group.runs) for group in groups)
    sentences = []
    for group in groups:
        final = group.estimate("final")
        sentence = f"{group.label} ended with {setting.metric} {plus_minus(final.mean, final.deviation)}"
        if final.interval is not None:
            sentence += f" (95 % interval of the mean {final.interval[0]:.4g} to {final.interval[1]:.4g})"
        if setting.target is not None:
            sentence += f" and reached {setting.target.value:g} in {group.reached} of {plural(several, 'seed')}"
        sentences.append(sentence + ".")
    if len(groups) > 1:
        decisive = seeds.decisive(groups)
        won = seeds.wins(groups, decisive)
        most = max(count or 0 for count in won)
        first = [group.label for group, count in zip(groups, won, strict=True) if count == most]
        what = "reached the target first" if decisive == "parallel_time" else f"had the best final {setting.metric}"
        sentences.append(
            f"{listed(first)}{' each' if len(first) > 1 else ''} {what} in {most} of {plural(several, 'seed')}."
        )
    return sentences


# --- figures ------------------------------------------------------------------------------------


def save_column_figures(runs: Sequence[Run], folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Write the metric over parallel time and over update requests, each as a figure for one column."""
    axes: dict[str, style.Over] = {"curves-time": "parallel_time", "curves-requests": "update_requests"}
    with style.house_style(_PAPER_STYLE):
        return [
            path
            for name, over in axes.items()
            for path in style.save_both(_column_figure(runs, over), folder, name, suffixes)
        ]


def _column_figure(runs: Sequence[Run], over: style.Over) -> Figure:
    columns = 2
    rows = math.ceil(len(seeds.grouped(runs)) / columns)
    figure = style.blank_figure(COLUMN_INCHES, 2.1 + 0.15 * rows)
    axes = figure.add_subplot()
    draw_bands(axes, runs, over)
    style.legend_below(figure, axes, columns)
    return figure


def seed_curves(runs: Sequence[Run]) -> Figure:
    """The metric over parallel time and over update requests: the mean over the seeds and a band of one deviation."""
    with style.house_style():
        groups = seeds.grouped(runs)
        columns = min(5, len(groups))
        figure = style.blank_figure(9.2, 3.7 + 0.24 * math.ceil(len(groups) / columns))
        time_axes, request_axes = figure.subplots(1, 2, sharey=True)
        draw_bands(time_axes, runs, "parallel_time")
        draw_bands(request_axes, runs, "update_requests")
        request_axes.set_ylabel("")
        request_axes.tick_params(labelleft=False)
        style.legend_below(figure, time_axes, columns)
    return figure


def draw_bands(axes: Axes, runs: Sequence[Run], over: style.Over) -> None:
    """One curve per policy: the mean over its seeds, and a band of one standard deviation around it."""
    drawn: list[float] = []
    for index, group in enumerate(seeds.grouped(runs)):
        x, mean, deviation = band(group, over)
        drawn += mean.tolist()
        colour = style.POLICY_COLOURS[index % len(style.POLICY_COLOURS)]
        axes.plot(x, mean, label=group.label, markevery=max(1, len(x) // 8), **style.line_look(index))
        if len(group.runs) > 1 and len(x):
            axes.fill_between(x, mean - deviation, mean + deviation, color=colour, alpha=0.18, linewidth=0)
    marks.curve_axes(axes, runs, over, drawn)


def band(group: seeds.Group, over: style.Over) -> tuple[NDArray[np.float64], ...]:
    """Where the curves of all seeds overlap: the axis, the mean and the standard deviation of the metric there."""
    curves = []
    for run in group.runs:
        points = [
            (point.at if over == "parallel_time" else float(point.update_requests), value)
            for point, value in zip(run.history, run.metric_values, strict=True)
            if math.isfinite(value)
        ]
        if points:
            curves.append(np.array(points, np.float64).T)
    if not curves:
        nothing = np.empty(0)
        return nothing, nothing, nothing
    if len(curves) == 1:
        x, y = curves[0]
        return (
            x,
            np.array(summaries.running_median(y.tolist())) if len(y) > summaries.SMOOTH_FROM else y,
            np.zeros(len(y)),
        )
    start, end = max(curve[0][0] for curve in curves), min(curve[0][-1] for curve in curves)
    x = np.linspace(start, max(start, end), min(_GRID, max(2, *(len(curve[0]) for curve in curves))))
    values = np.stack([np.interp(x, *curve) for curve in curves])
    return x, values.mean(axis=0), values.std(axis=0, ddof=1)


# --- files --------------------------------------------------------------------------------------


def write_paper(runs: Sequence[Run], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write the table and the figures in these formats: latex, markdown, csv, pdf, svg, png."""
    folder.mkdir(parents=True, exist_ok=True)
    table = paper_table(runs)
    written = []
    for name in formats:
        if name == "latex":
            write_text(folder / "table.tex", latex(table))
            written.append(folder / "table.tex")
        elif name == "markdown":
            write_text(folder / "table.md", markdown(table))
            written.append(folder / "table.md")
        elif name == "csv":
            write_csv(summary_rows(runs), folder / "summary.csv")
            written.append(folder / "summary.csv")
    suffixes = [name for name in formats if name in style.FORMATS]
    return [*written, *(save_column_figures(runs, folder, suffixes) if suffixes else ())]
