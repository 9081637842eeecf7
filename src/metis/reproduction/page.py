"""The reproduced results in a terminal, on one self-contained page, and as Markdown."""

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
from metis.reproduction.sheets import Sheet, characteristics_sheet, cost_sheet, mixing_sheet, ratio_sheet

REPORT = "report.html"


_VERDICT_STYLES = {"confirmed": "green", "contradicted": "red", "tie": "yellow", "undecided": "dim"}


SECOND_LINE = "The second line of a row is the paper's."
COST_WORDS = (
    "PT: parallel time; CT: cumulative time; CC: update requests; EC: energy by three definitions (the paper's "
    "equation, active time only, idle time charged); EF: energy of Sync w/ Vanilla divided by that of the row. The "
    "second line of a row is the paper's, measured on its machines. Ours is virtual time, until the first evaluation "
    "that reached the target; > is the time at which the policy's budget ended (a budget of steps takes some policies "
    "longer than others). EC in the paper's Table 3 is active time only."
)


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


def terminal_sheet(sheet: Sheet) -> RenderableType:
    """A table for a terminal, the paper's values dim below ours."""
    table = Table(title=sheet.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column, heading in enumerate(sheet.headings):
        table.add_column(heading, justify="right" if column else "left", overflow="fold")
    for row in sheet.rows:
        cells = [Text(row.label, style="bold")]
        for cell in row.cells:
            text = Text(cell.value, style="green" if cell.best else "red" if cell.missed else "")
            if cell.below:
                text.append(f"\n{cell.below}", style="dim")
            cells.append(text)
        table.add_row(*cells)
    notes = [Text(line, style="dim") for line in (sheet.note, sheet.foot) if line]
    return Group(table, *notes, Text())


def terminal_claims(claims: Sequence[Mapping[str, str]]) -> RenderableType:
    """The verdict on each claim, with its numbers."""
    table = Table(title="Claims of the paper", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("verdict", "claim", "numbers"):
        table.add_column(heading, overflow="fold", min_width=13 if heading == "verdict" else None)
    for claim in claims:
        verdict = Text(claim["verdict"], style=_VERDICT_STYLES[claim["verdict"]])
        table.add_row(verdict, Text(f"{claim['text']} ({claim['where']})"), Text(_numbers(claim)))
    return Group(table, Text(verdict_count(claims), style="bold"))


def verdict_count(claims: Sequence[Mapping[str, str]]) -> str:
    """How many claims are confirmed, contradicted, ties, undecided."""
    counts = Counter(claim["verdict"] for claim in claims)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in _VERDICT_STYLES if counts[verdict])


def sections_of(document: Mapping[str, Any], pictures: Mapping[str, str]) -> list[Section]:
    """The sections of a document, one for each result."""
    sections = []
    for name, result in document["results"].items():
        kind = "Table" if name.startswith("table") else "Figure"
        section = Section(name, f"{kind} {name.removeprefix(kind.lower())}", result["title"])
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
    """Write `report.html`: every table and figure, published next to ours, and a verdict on each claim."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("metis.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = Markup  # only for our own figures, whose texts are escaped
    scale, wall = document["scale"], document["wall_seconds"]
    page = environment.get_template("paper.html.jinja").render(
        title=f"Semi-synchronous federated learning: the paper’s results, reproduced at {scale} scale",
        lead=document["lead"],
        claims=[claim for claim in document["claims"] if claim["verdict"] != "undecided"],
        untested=[claim for claim in document["claims"] if claim["verdict"] == "undecided"],
        verdicts=verdict_count(document["claims"]),
        paper_words=PAPER_WORDS,
        sections=sections_of(document, pictures),
        command=command,
        provenance=f"{document['runs']} runs, which took {wall / 60:,.0f} minutes of processor time in total. "
        f"Python {platform.python_version()}, torch {_version('torch')}, numpy {_version('numpy')}.",
        version=_version("metis-federated"),
    )
    write_text(folder / REPORT, page)
    return folder / REPORT


def write_markdown(document: Mapping[str, Any], folder: Path) -> Path:
    """Write `results.md`: tables and verdicts as Markdown, with links to the figures."""
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
    if document["claims"]:
        lines += ["## Claims", "", *claims_table(document["claims"])]
    path = folder / "results.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


PAPER_WORDS = {"holds": "holds", "fails": "does not hold", "tie": "tie", "open": "open", "": "–"}


def claims_table(claims: Sequence[Mapping[str, str]]) -> list[str]:
    """The verdicts as the lines of a Markdown table."""
    lines = ["| verdict | claim | numbers | by the paper's own tables |", "| --- | --- | --- | --- |"]
    for claim in claims:
        own = PAPER_WORDS[claim["paper"]] + (f": {claim['paper_sentence']}" if claim["paper"] else "")
        lines.append(f"| {claim['verdict']} | {claim['text']} ({claim['where']}) | {_numbers(claim)} | {own} |")
    return lines


def _numbers(claim: Mapping[str, Any]) -> str:
    """What was found, and if that does not decide, what would."""
    marks = f" ({', '.join(claim['marks'])})" if claim["marks"] else ""
    return f"{claim['sentence']}{marks}" + (f". Needs: {claim['open']}" if claim["open"] else "")


def markdown_table(sheet: Sheet) -> list[str]:
    """The lines of a Markdown table."""
    headings = [heading.replace("\n", " ") for heading in sheet.headings]
    lines = [f"| {' | '.join(headings)} |", f"| --- |{' ---: |' * (len(headings) - 1)}"]
    for row in sheet.rows:
        cells = [
            (f"**{cell.value}**" if cell.best else cell.value) + (f"<br>{cell.below}" if cell.below else "")
            for cell in row.cells
        ]
        lines.append(f"| {row.label} | {' | '.join(cells)} |")
    return lines


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(unknown version)"
