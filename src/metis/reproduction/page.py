"""The paper's tables with the published numbers beside ours, in a terminal and on one self-contained page.

Everything here is made from one document of plain values, the same that `metis reproduce --json` prints.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from metis.files import write_text
from metis.text import factor, number

REPORT = "report.html"
ENERGIES = {"equation": "EC\nequation", "active": "EC\nactive", "idle_charged": "EC\n+ idle"}
_VERDICT_STYLES = {"confirmed": "green", "not confirmed": "red", "not testable here": "dim", "not run": "dim"}
COST_WORDS = (
    "PT parallel time, CT cumulative time, CC update requests, EC energy in three definitions (the paper's equation, "
    "active time only, idle time charged), EF energy of Sync w/ Vanilla over that of the row. The second line of a row "
    "is the paper's, measured on its machines; ours is virtual time, of the first evaluation that reached the target, "
    "and > the time at which the policy's budget ended (a budget of steps is not the same time for all). In its "
    "Table 3 the paper gives active time only as EC."
)


@dataclass(frozen=True)
class Cell:
    """One value of ours and what the paper says."""

    value: str
    told: str = ""
    best: bool = False
    missed: bool = False


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    label: str
    cells: list[Cell]


@dataclass(frozen=True)
class Sheet:
    """A table, for a terminal or a page."""

    title: str
    headings: list[str]
    rows: list[Row]
    note: str = ""
    foot: str = ""


@dataclass
class Section:
    """One table or figure of the paper."""

    id: str
    name: str
    title: str
    caption: str = ""
    svg: str = ""
    notes: list[str] = field(default_factory=list)
    tables: list[Sheet] = field(default_factory=list)


# --- tables -----------------------------------------------------------------------------------


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
    least = {
        key: min((row[key] for row in rows if row[key] is not None), default=None)
        for key in ("parallel_time", "communication_cost")
    }
    made = []
    for row in rows:
        told = row["published"] or {}
        missed = not row["reached"]
        cells = [
            Cell(
                "not reached" if missed and key == plain[0] else _given_up(row, key),
                _told(told.get(key)) if told.get("reached", True) else "not reached" if key == plain[0] else "",
                best=row[key] is not None and row[key] == least.get(key),
                missed=missed and key == plain[0],
            )
            for key in plain
        ]
        cells += [
            Cell(
                number(row["energy"][kind]),
                best=row["energy"][kind] is not None
                and row["energy"][kind] == min(r["energy"][kind] for r in rows if r["energy"][kind] is not None),
            )
            for kind in ENERGIES
        ]
        cells.append(Cell(number(told.get("energy")), factor(told.get("efficiency"))))
        cells.append(Cell(factor(row["efficiency"]["active"]) or "–"))
        cells.append(Cell("–" if row["best"] is None else f"{row['best']:.3f}"))
        made.append(Row(row["label"], cells))
    target = f"{table['metric']} {table['target']:g}"
    paper = "" if table["paper_target"] in (None, table["target"]) else f" (the paper's: {table['paper_target']:g})"
    missing = f" Not run yet: {', '.join(table['missing'])}." if table["missing"] else ""
    return Sheet(
        f"{table['title']}: costs until {target}{paper}",
        headings,
        made,
        table["note"] + missing,
    )


def ratio_sheet(table: Mapping[str, Any]) -> Sheet:
    """What SemiSync saves against Sync with the same solver: ours, nominal, published."""
    names = {
        "parallel_time": "PT",
        "communication_cost": "CC",
        "energy_equation": "EC equation",
        "energy_active": "EC active",
        "energy_idle_charged": "EC + idle",
    }
    rows = [
        Row(
            row["policy"],
            [
                Cell(
                    factor(row[key]["ours"]) or "–",
                    f"nominal {factor(row[key]['nominal']) or '–'}"
                    + (f", paper {factor(row[key]['published']) or '–'}" if key in _TOLD_RATIOS else ""),
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
        foot="Above 1 SemiSync is cheaper. Nominal: the paper's own numbers of rounds at its nominal times per batch; "
        "paper: the quotient of its measured values.",
    )


_TOLD_RATIOS = ("parallel_time", "communication_cost", "energy_active")


def characteristics_sheet(table: Mapping[str, Any]) -> Sheet:
    """Table 1: ours, by the same rule from the paper's numbers, and as the paper has it."""
    rows = []
    for row in table["rows"]:
        cells = []
        for key in ("parallel_time", "communication_cost", "energy"):
            ours, told = row["ours"][key], row["from_published"][key]
            value = "–" if ours["level"] is None else f"{ours['level']} (×{ours['relative']:.1f})"
            by_rule = "–" if told["level"] is None else f"{told['level']} (×{told['relative']:.1f})"
            cells.append(Cell(value, f"paper: {row['published'][key]}; its Table 3 by this rule: {by_rule}"))
        idle = "–" if row["idle_share"] is None else f"{_yes(row['idle_free'])} (at most {row['idle_share']:.1%} idle)"
        stale = (
            "–" if row["staleness"] is None else f"{_yes(row['stale_free'])} ({row['staleness']:.1f} versions behind)"
        )
        cells.append(Cell(idle, f"paper: {_yes(row['published']['idle_free'])}"))
        cells.append(Cell(stale, f"paper: {_yes(row['published']['stale_free'])}"))
        rows.append(Row(row["protocol"], cells))
    headings = ["protocol", "processing time", "communication", "energy (active)", "idle-free", "stale-free"]
    return Sheet("Characteristics, from the runs of Table 3", headings, rows, foot=table["rule"])


def mixing_sheet(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    """Figure 4 in numbers."""
    learners = sorted({row["learners"] for row in rows})
    made = []
    for network in dict.fromkeys(row["network"] for row in rows):
        own = {row["learners"]: row for row in rows if row["network"] == network}
        cells = [
            Cell(f"{1000 * own[count]['cached']:.2f} ms", f"full pass {1000 * own[count]['full_pass']:.1f} ms")
            for count in learners
        ]
        first, last = own[learners[0]], own[learners[-1]]
        growth = f"full pass ×{last['full_pass'] / first['full_pass']:.0f}"
        cells.append(Cell(f"×{last['cached'] / first['cached']:.2f}", growth))
        made.append(Row(f"{network} ({own[learners[0]]['parameters']:,} numbers)", cells))
    headings = ["network", *(f"{count:,}\nlearners" for count in learners), "growth"]
    return Sheet("Time of one community model: with the cache, and with a full pass", headings, made)


def study_sheet(table: Mapping[str, Any]) -> Sheet:
    """A condition of a study: what the target cost each policy, as median and range over the seeds."""
    names = {
        "parallel_time": "PT (s)",
        "update_requests": "CC",
        "energy_equation": ENERGIES["equation"],
        "energy_active": ENERGIES["active"],
        "energy_idle_charged": ENERGIES["idle_charged"],
    }
    rows = table["rows"]
    capped = any(row["max_local_epochs"] is not None for row in rows)
    wider = any(row["against_best_of_all"] is not None for row in rows)
    least = {key: min((r[key]["median"] for r in rows if r[key]["median"] is not None), default=None) for key in names}
    made = []
    for row in rows:
        seeds = f"{row['reached']} of {row['runs']}" if row["runs"] else "not run"
        cells = [Cell(seeds, missed=row["reached"] < row["runs"])]
        for key in names:
            median, told = row[key]["median"], ""
            if row[key]["range"] is not None:
                low, high = map(number, row[key]["range"])
                told = low if low == high else f"{low} to {high}"
            cells.append(
                Cell("–" if median is None else number(median), told, best=median is not None and median == least[key])
            )
        against = (row["against_best_fixed"] or {}).get("costs", {})
        cells.append(Cell(factor(against.get("parallel_time")) or "–"))
        if capped:
            cells.append(Cell(factor(against.get("energy_active")) or "–"))
        if wider:
            cells.append(Cell(factor((row["against_best_of_all"] or {}).get("mean")) or "–"))
        made.append(Row(row["label"], cells))
    reference = "PT over that\nwithout a cap" if capped else "PT over that of\nthe best fixed λ"
    best = table["best_fixed"] or "not known: none reached the target in every seed, or not all runs are made"
    foot = f"; over a λ outside of the sweep: {table['best_of_all']}" if wider else ""
    return Sheet(
        f"{table['title']}: costs until {table['metric']} {table['target']:g}",
        [
            "policy", "reached", *names.values(), reference,
            *(["EC active over\nthat without a cap"] if capped else []),
            *(["PT over that of\nthe best λ of all"] if wider else []),
        ],
        made,
        table["note"],
        "Median over the seeds, below it the range; quotients are geometric means over the seeds. "
        + (f"Without a cap: {best}." if capped else f"Best fixed lambda in hindsight, by its mean time: {best}{foot}."),
    )  # fmt: skip


def _told(value: float | None) -> str:
    return "" if value is None else number(value)


def _given_up(row: Mapping[str, Any], key: str) -> str:
    """A cost; for one who did not reach the target, the time for which it was tried."""
    return f"> {number(row['until'])}" if key == "parallel_time" and not row["reached"] else number(row[key])


def _yes(value: bool | None) -> str:
    return "–" if value is None else "yes" if value else "no"


# --- terminal ---------------------------------------------------------------------------------


def terminal_sheet(sheet: Sheet) -> RenderableType:
    """A table for a terminal, the paper's values dim beneath ours."""
    table = Table(title=sheet.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, heading in enumerate(sheet.headings):
        table.add_column(heading, justify="right" if place else "left", overflow="fold")
    for row in sheet.rows:
        cells = [Text(row.label, style="bold")]
        for cell in row.cells:
            text = Text(cell.value, style="green" if cell.best else "red" if cell.missed else "")
            if cell.told:
                text.append(f"\n{cell.told}", style="dim")
            cells.append(text)
        table.add_row(*cells)
    notes = [Text(line, style="dim") for line in (sheet.note, sheet.foot) if line]
    return Group(table, *notes, Text())


def terminal_claims(claims: Sequence[Mapping[str, str]]) -> RenderableType:
    """The verdicts, one claim after the other."""
    table = Table(title="Claims of the paper", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("verdict", "claim", "numbers"):
        table.add_column(heading, overflow="fold", min_width=13 if heading == "verdict" else None)
    for claim in claims:
        if claim["verdict"] == "not run":
            continue
        verdict = Text(claim["verdict"], style=_VERDICT_STYLES[claim["verdict"]])
        table.add_row(verdict, Text(f"{claim['text']} ({claim['where']})"), Text(claim["sentence"]))
    return Group(table, Text(verdict_count(claims), style="bold"))


def verdict_count(claims: Sequence[Mapping[str, str]]) -> str:
    """How many claims were confirmed, not confirmed, not testable."""
    counts = Counter(claim["verdict"] for claim in claims)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in _VERDICT_STYLES if counts[verdict])


# --- page -------------------------------------------------------------------------------------


def sections_of(document: Mapping[str, Any], pictures: Mapping[str, str]) -> list[Section]:
    """What the document holds, result by result."""
    sections = []
    for name, result in document["results"].items():
        kind, _, place = (
            name.partition("e") if name.startswith("table") else ("figur", "e", name.removeprefix("figure"))
        )
        section = Section(name, f"{kind.capitalize()}e {place}", result["title"])
        section.caption, section.svg = result.get("caption", ""), pictures.get(name, "")
        section.notes = list(result.get("notes", ()))
        for table in result.get("environments", ()):
            section.tables += [cost_sheet(table)] + ([ratio_sheet(table)] if table["ratios"] else [])
        if "characteristics" in result:
            section.tables.append(characteristics_sheet(result["characteristics"]))
        if "mixing_times" in result:
            section.tables.append(mixing_sheet(result["mixing_times"]))
        if name in ("table2", "table3"):
            section.notes.append(COST_WORDS)
        sections.append(section)
    return sections


def write_paper_report(document: Mapping[str, Any], pictures: Mapping[str, str], folder: Path, command: str) -> Path:
    """Write `report.html`: every table and figure, published beside ours, and a verdict on each claim."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("metis.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = Markup  # only for pictures of our own making; their texts are escaped
    scale, wall = document["scale"], document["wall_seconds"]
    page = environment.get_template("paper.html.jinja").render(
        title=f"Semi-synchronous federated learning: the paper’s results, reproduced at {scale} scale",
        lead=document["lead"],
        claims=[claim for claim in document["claims"] if claim["verdict"] in ("confirmed", "not confirmed")],
        untested=[claim for claim in document["claims"] if claim["verdict"] in ("not testable here", "not run")],
        verdicts=verdict_count(document["claims"]),
        sections=sections_of(document, pictures),
        command=command,
        provenance=f"{document['runs']} runs, which took {wall / 60:,.0f} minutes of one processor in all. "
        f"Python {platform.python_version()}, torch {_version('torch')}, numpy {_version('numpy')}.",
        version=_version("metis-federated"),
    )
    write_text(folder / REPORT, page)
    return folder / REPORT


def write_markdown(document: Mapping[str, Any], folder: Path) -> Path:
    """Write `results.md`: the tables and verdicts as text that a repository shows; figures are named only."""
    lines = [f"# Results at {document['scale']} scale", "", document["lead"], ""]
    for section in sections_of(document, {}):
        lines += [f"## {section.name}. {section.title}", ""]
        lines += [line for note in section.notes for line in (note, "")]
        for name in document["results"][section.id].get("files", ()):
            if name.endswith(".svg"):
                lines += [f"![{section.title}](figures/{Path(name).name})", ""]
        for sheet in section.tables:
            lines += [f"**{sheet.title}**", "", *markdown_table(sheet), ""]
            lines += [line for note in (sheet.note, sheet.foot) if note for line in (note, "")]
    lines += ["## Claims", "", "| verdict | claim | numbers |", "| --- | --- | --- |"]
    for claim in document["claims"]:
        lines.append(f"| {claim['verdict']} | {claim['text']} ({claim['where']}) | {claim['sentence']} |")
    path = folder / "results.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def markdown_table(sheet: Sheet) -> list[str]:
    """The lines of a table as a repository shows it."""
    headings = [heading.replace("\n", " ") for heading in sheet.headings]
    lines = [f"| {' | '.join(headings)} |", f"| --- |{' ---: |' * (len(headings) - 1)}"]
    for row in sheet.rows:
        cells = [
            (f"**{cell.value}**" if cell.best else cell.value) + (f"<br>{cell.told}" if cell.told else "")
            for cell in row.cells
        ]
        lines.append(f"| {row.label} | {' | '.join(cells)} |")
    return lines


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of an unknown version"
