"""The paper's tables with the published numbers next to ours, as rows of text for a terminal, a page or Markdown.

They are made from the plain values that `metis reproduce --json` prints.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metis.text import factor, number

ENERGIES = {"equation": "EC\nequation", "active": "EC\nactive", "idle_charged": "EC\n+ idle"}


@dataclass(frozen=True)
class SheetCell:
    """A value of ours, and below it the paper's or a detail."""

    value: str
    below: str = ""
    best: bool = False
    missed: bool = False


@dataclass(frozen=True)
class SheetRow:
    """One row of a table."""

    label: str
    cells: list[SheetCell]


@dataclass(frozen=True)
class Sheet:
    """A table, for a terminal or a page."""

    title: str
    headings: list[str]
    rows: list[SheetRow]
    note: str = ""
    foot: str = ""


def cost_sheet(table: Mapping[str, Any]) -> Sheet:
    """Tables 2 and 3: costs until the target."""
    split = bool(table["split"])
    headings = ["policy", *(["iter.\nfast", "iter.\nslow"] if split else []), "iter.", "PT (s)",
                "CT (s)", "CC", *ENERGIES.values(), "EC, EF\n(paper)", "EF\nactive", "best"]  # fmt: skip
    rows: Sequence[Mapping[str, Any]] = table["rows"]
    plain = [
        *(["fast", "slow"] if split else []),
        "iterations",
        "parallel_time",
        "cumulative_time",
        "communication_cost",
    ]
    lowest = {
        key: min((row[key] for row in rows if row[key] is not None), default=None)
        for key in ("parallel_time", "communication_cost")
    }
    made = []
    for row in rows:
        published = row["published"] or {}
        missed = not row["reached"]
        cells = [
            SheetCell(
                "not reached" if missed and key == plain[0] else _cost(row, key),
                _published(published.get(key))
                if published.get("reached", True)
                else "not reached"
                if key == plain[0]
                else "",
                best=row[key] is not None and row[key] == lowest.get(key),
                missed=missed and key == plain[0],
            )
            for key in plain
        ]
        cells += [
            SheetCell(
                number(row["energy"][kind]),
                best=row["energy"][kind] is not None
                and row["energy"][kind] == min(r["energy"][kind] for r in rows if r["energy"][kind] is not None),
            )
            for kind in ENERGIES
        ]
        cells.append(SheetCell(number(published.get("energy")), factor(published.get("efficiency"))))
        cells.append(SheetCell(factor(row["efficiency"]["active"]) or "–"))
        cells.append(SheetCell("–" if row["best"] is None else f"{row['best']:.3f}"))
        made.append(SheetRow(row["label"], cells))
    target = f"{table['metric']} {table['target']:g}"
    paper = "" if table["paper_target"] in (None, table["target"]) else f" (the paper's: {table['paper_target']:g})"
    missing = f" Not run yet: {', '.join(table['missing'])}." if table["missing"] else ""
    return Sheet(
        f"{table['title']}: costs until {target}{paper}",
        headings,
        made,
        table["note"] + missing,
    )


_PUBLISHED_RATIOS = ("parallel_time", "communication_cost", "energy_active")


def ratio_sheet(table: Mapping[str, Any]) -> Sheet:
    """Sync's costs over those of SemiSync with the same solver: ours, nominal, published."""
    names = {
        "parallel_time": "PT",
        "communication_cost": "CC",
        "energy_equation": "EC equation",
        "energy_active": "EC active",
        "energy_idle_charged": "EC + idle",
    }
    rows = [
        SheetRow(
            row["policy"],
            [
                SheetCell(
                    factor(row[key]["ours"]) or "–",
                    f"nominal {factor(row[key]['nominal']) or '–'}"
                    + (f", paper {factor(row[key]['published']) or '–'}" if key in _PUBLISHED_RATIOS else ""),
                )
                for key in names
            ],
        )
        for row in table["ratios"]
    ]
    return Sheet(
        f"{table['title']}: Sync's cost over that of SemiSync with the same solver",
        ["policy", *names.values()],
        rows,
        foot="Above 1, SemiSync is cheaper. Nominal: from the paper's own numbers of rounds and its nominal times per "
        "batch; paper: the ratio of its measured values.",
    )


def characteristics_sheet(table: Mapping[str, Any]) -> Sheet:
    """Table 1: ours, from the paper's numbers by the same rule, and as published."""
    rows = []
    for row in table["rows"]:
        cells = []
        for key in ("parallel_time", "communication_cost", "energy"):
            ours, published = row["ours"][key], row["from_published"][key]
            value, by_rule = (
                "–" if one["relative"] is None else f"×{one['relative']:.2f}" for one in (ours, published)
            )
            cells.append(SheetCell(value, f"paper: {row['published'][key]}; from its Table 3: {by_rule}"))
        idle = "–" if row["idle_share"] is None else f"{_yes(row['idle_free'])} (at most {row['idle_share']:.1%} idle)"
        stale = (
            "–" if row["staleness"] is None else f"{_yes(row['stale_free'])} ({row['staleness']:.1f} versions behind)"
        )
        cells.append(SheetCell(idle, f"paper: {_yes(row['published']['idle_free'])}"))
        cells.append(SheetCell(stale, f"paper: {_yes(row['published']['stale_free'])}"))
        rows.append(SheetRow(row["protocol"], cells))
    headings = ["protocol", "processing time", "communication", "energy (active)", "idle-free", "stale-free"]
    return Sheet("Characteristics, from the runs of Table 3", headings, rows, foot=table["rule"])


def mixing_sheet(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    """Figure 4 in numbers."""
    learners = sorted({row["learners"] for row in rows})
    made = []
    for network in dict.fromkeys(row["network"] for row in rows):
        own = {row["learners"]: row for row in rows if row["network"] == network}
        cells = [
            SheetCell(f"{1000 * own[count]['cached']:.2f} ms", f"full pass {1000 * own[count]['full_pass']:.1f} ms")
            for count in learners
        ]
        first, last = own[learners[0]], own[learners[-1]]
        growth = f"full pass ×{last['full_pass'] / first['full_pass']:.0f}"
        cells.append(SheetCell(f"×{last['cached'] / first['cached']:.2f}", growth))
        made.append(SheetRow(f"{network} ({own[learners[0]]['parameters']:,} parameters)", cells))
    headings = ["network", *(f"{count:,}\nlearners" for count in learners), "growth"]
    return Sheet("Time to compute a community model, with the cache and with a full pass", headings, made)


def _metrics(values: Sequence[float | None]) -> SheetCell:
    """The median of what the runs had, and their range."""
    known = [value for value in values if value is not None]
    if not known:
        return SheetCell("–")
    spread = f"{min(known):.4g} to {max(known):.4g}" if len(known) > 1 else ""
    return SheetCell(f"{statistics.median(known):.4g}", spread)


def study_sheet(table: Mapping[str, Any]) -> Sheet:
    """A condition of a study: what each policy cost until the target, as median and range over the seeds."""
    names = {
        "parallel_time": "PT (s)",
        "iterations": "iter.",
        "update_requests": "CC",
        "slow_update_requests": "CC of slow\nlearners",
        "energy_equation": ENERGIES["equation"],
        "energy_active": ENERGIES["active"],
        "energy_idle_charged": ENERGIES["idle_charged"],
    }
    rows = table["rows"]
    capped = any(row["max_local_epochs"] is not None for row in rows)
    fixed = any(row["fixed_lambda"] is not None for row in rows)
    wider = any(row["against_best_of_all"] is not None for row in rows)
    lowest = {
        key: min((r[key]["median"] for r in rows if r[key]["median"] is not None), default=None)
        for key in names
        if key not in ("iterations", "slow_update_requests")
    }
    made = []
    for row in rows:
        seeds = f"{row['reached']} of {row['runs']}" if row["runs"] else "not run"
        cells = [SheetCell(seeds, missed=row["reached"] < row["runs"]), _metrics(row["best"])]
        cells += [] if table["at_target"] else [_metrics(row["final"])]
        for key in names:
            median, spread = row[key]["median"], ""
            if row[key]["range"] is not None:
                low, high = map(number, row[key]["range"])
                spread = low if low == high else f"{low} to {high}"
            cells.append(
                SheetCell(
                    "–" if median is None else number(median),
                    spread,
                    best=median is not None and median == lowest.get(key),
                )
            )
        against = (row["against_best_fixed"] or {}).get("costs", {})
        if fixed:
            cells.append(SheetCell(factor(against.get("parallel_time")) or "–"))
        if capped:
            cells.append(SheetCell(factor(against.get("energy_active")) or "–"))
        if wider:
            cells.append(SheetCell(factor((row["against_best_of_all"] or {}).get("mean")) or "–"))
        made.append(SheetRow(row["label"], cells))
    reference = "PT relative to\nno cap" if capped else "PT relative to\nthe best fixed λ"
    best = table["best_fixed"] or "unknown, because none reached the target with every seed or not all runs are done"
    foot = f"; the best λ of all, outside of the sweep: {table['best_of_all']}" if wider else ""
    hindsight = f"Without a cap: {best}." if capped else f"Best fixed λ in hindsight, by its mean time: {best}{foot}."
    return Sheet(
        f"{table['title']}: costs until {table['metric']} {table['target']:g}",
        [
            "policy", "reached", f"best {table['metric']}",
            *([] if table["at_target"] else [f"final {table['metric']}"]),
            *names.values(),
            *([reference] if fixed else []),
            *(["EC active relative\nto no cap"] if capped else []),
            *(["PT relative to\nthe best λ of all"] if wider else []),
        ],
        made,
        table["note"],
        f"Median over the seeds, and below it the range; ratios are geometric means over the seeds. {hindsight}"
        if fixed
        else "Median over the seeds, and below it the range.",
    )  # fmt: skip


def _published(value: float | None) -> str:
    return "" if value is None else number(value)


def _cost(row: Mapping[str, Any], key: str) -> str:
    """A cost; without the target, the time at which the budget ended."""
    return f"> {number(row['until'])}" if key == "parallel_time" and not row["reached"] else number(row[key])


def _yes(value: bool | None) -> str:
    return "–" if value is None else "yes" if value else "no"
