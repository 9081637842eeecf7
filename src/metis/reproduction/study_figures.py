"""Figures of a study: when policies reached the target, and what a cap on local epochs saves.

A dot is a run; runs that never reached the target are crosses at the right edge.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis.reporting.style import INK, MUTED, POLICY_COLOURS, blank_figure, house_style, save_both, thousands

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _VERMILION, _GREEN, _PURPLE, *_ = POLICY_COLOURS
_SMALL = 8.0  # points
_TICKS = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)


def draw_study(name: str, tables: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw the figure of a study as PNG and SVG; none if no run reached the target."""
    tables = [table for table in tables if any(row["reached"] for row in table["rows"])]
    if not tables:
        return []
    capped = any(row["max_local_epochs"] is not None for table in tables for row in table["rows"])
    with house_style():
        return save_both(_trade_off(tables) if capped else _times(tables), folder, name)


def _title(table: Mapping[str, Any]) -> str:
    distribution = table["distribution"].replace(", ", "\n")
    return f"{distribution}\nuntil {table['metric']} {table['target']:g}"


# --- times to the target ------------------------------------------------------------------------


def _times(tables: Sequence[Mapping[str, Any]]) -> Figure:
    labels = list(dict.fromkeys(row["label"] for table in tables for row in table["rows"]))
    figure = blank_figure(2.2 * len(tables) + 1.9, 0.26 * len(labels) + 1.4)
    grid = figure.subplots(1, len(tables), squeeze=False, sharey=True)[0]
    for axes, table in zip(grid, tables, strict=True):
        _times_of(axes, table, labels)
    grid[0].set_yticks(range(len(labels)), labels)
    grid[0].set_ylim(len(labels) - 0.5, -0.5)
    words = "parallel time to the target (s); dots: seeds, bars: their median, crosses: seeds that did not reach it"
    figure.supxlabel(words, fontsize=_SMALL)
    return figure


def _times_of(axes: Axes, table: Mapping[str, Any], labels: Sequence[str]) -> None:
    known = [value for row in table["rows"] for value in row["parallel_time"]["values"] if value is not None]
    low, high = min(known) / 1.3, max(known) * 1.3
    missed = max(row["runs"] - row["reached"] for row in table["rows"])
    high *= (high / low) ** (0.07 * missed)  # room for the crosses
    for row in table["rows"]:
        line = labels.index(row["label"])  # panels share their rows, of which a condition need not have all
        times = [value for value in row["parallel_time"]["values"] if value is not None]
        colour = _GREEN if row["in_sweep"] else MUTED if row["fixed_lambda"] is not None else _VERMILION
        axes.plot(times, [line] * len(times), "o", color=colour, markersize=4.5, alpha=0.75)
        if row["parallel_time"]["median"] is not None:
            axes.vlines(statistics.median(times), line - 0.33, line + 0.33, color=colour, linewidth=1.6)
        crosses = [0.97 - 0.05 * number for number in range(row["runs"] - row["reached"])]
        axes.plot(
            crosses, [line] * len(crosses), "x", color=colour, markersize=4.5, transform=axes.get_yaxis_transform()
        )
    best = next((row for row in table["rows"] if row["label"] == table["best_fixed"]), None)
    if best is not None:
        axes.axvline(best["parallel_time"]["median"], color=INK, linewidth=0.7, linestyle=(0, (1, 2)))
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xticks([tick for tick in _TICKS if low <= tick <= high])
    axes.xaxis.set_major_formatter(thousands)
    axes.xaxis.set_minor_formatter(lambda value, position: "")
    axes.tick_params(axis="y", length=0)
    axes.set_title(_title(table), fontsize=_SMALL)


# --- time against energy ------------------------------------------------------------------------


def _trade_off(tables: Sequence[Mapping[str, Any]]) -> Figure:
    figure = blank_figure(3.1 * len(tables) + 0.6, 3.7)
    grid = figure.subplots(1, len(tables), squeeze=False)[0]
    for axes, table in zip(grid, tables, strict=True):
        _trade_off_of(axes, table)
    grid[0].set_ylabel("energy to the target (ε s)")
    grid[-1].legend(loc="best", fontsize=7)
    words = "parallel time to the target (s), mean over the seeds; numbers are caps on the local epochs"
    figure.supxlabel(words, fontsize=_SMALL)
    return figure


def _trade_off_of(axes: Axes, table: Mapping[str, Any]) -> None:
    rows = [row for row in table["rows"] if row["parallel_time"]["mean"] is not None]
    for key, words, colour, marker in (
        ("energy_idle_charged", "idle machines draw full power", _BLUE, "s"),
        ("energy_active", "idle machines sleep", _VERMILION, "o"),
    ):
        times, energies = ([row[cost]["mean"] for row in rows] for cost in ("parallel_time", key))
        axes.plot(times, energies, marker=marker, color=colour, markersize=4.5, linewidth=1.0, label=words)
        if key == "energy_active":
            caps: dict[tuple[float, float], list[str]] = {}  # several caps share a point where they change nothing
            for row, duration, energy in zip(rows, times, energies, strict=True):
                cap = row["max_local_epochs"]
                caps.setdefault((round(duration, 6), round(energy, 6)), []).append(
                    "no cap" if cap is None else f"{cap:g}"
                )
            for point, labels in caps.items():
                axes.annotate(", ".join(labels), point, (6, 3), textcoords="offset points", fontsize=7, color=MUTED)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.18)
    axes.yaxis.set_major_formatter(thousands)
    axes.set_title(_title(table), fontsize=_SMALL)
