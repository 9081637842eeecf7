"""A run or a comparison as Markdown, which a repository shows."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from metis.errors import ConfigError
from metis.files import write_text
from metis.reporting import summaries
from metis.reporting.cost_tables import Row, cost_tables
from metis.reporting.findings import energy_unit, findings, lead
from metis.reporting.provenance import configuration_file, facts, provenance, repeating, versions
from metis.runs.run import Run

MARKDOWN = "report.md"

_HEADINGS = ("iterations", "PT (s)", "CT (s)", "CC", "EC, equation", "EC, active", "EC, idle charged", "idle share")
_LEGEND = (
    "PT parallel time, CT cumulative time, CC update requests, EC energy in {unit} by three definitions (the paper's "
    "equation, active time only, idle time charged)."
)


def write_markdown(
    runs: Sequence[Run], folder: Path, title: str, pictures: Sequence[Path] = (), command: str | None = None
) -> Path:
    """Write `report.md`: the same findings, tables and provenance, with links to the figures."""
    if not runs:
        raise ConfigError("a report needs at least one run")
    runs = list(runs)
    names = summaries.labels(runs)
    files = [configuration_file(run, folder) for run in runs]
    command = repeating(runs, files, folder) if command is None else command
    lines = [f"# {_plain(title)}", "", _plain(lead(runs)), ""]
    lines += [f"- {_plain(finding)}" for finding in findings(runs, names)]
    lines += ["", "## What it cost", ""]
    headings = [*_HEADINGS, *(f"{runs[0].setting.metric}, {which}" for which in ("final", "best"))]
    for table in cost_tables(runs, names):
        lines += [f"{_plain(table['caption'])}:", "", *_markdown_table("policy", headings, map(_cells, table["rows"]))]
        if table["first"]:
            lines += ["", f"× is the cost of {_plain(table['first'])} divided by that of the row: above 1 is cheaper."]
        lines.append("")
    lines += [_LEGEND.format(unit=energy_unit(runs[0])), ""]
    for picture in pictures:
        link = quote(Path(os.path.relpath(picture, folder)).as_posix())
        lines += [f"![{picture.stem.replace('_', ' ')}]({link})", ""]
    lines += ["## How to repeat it", ""]
    if command:
        lines += ["In the folder of this report:", "", "```", command, "```", ""]
    origins = [
        (row[0], [f"`{row[1]}`", row[2], row[3], _plain(row[4]), f"`{row[6]}`"]) for row in provenance(runs, names)
    ]
    columns = ["policy", "seed", "community models", "reason for the end", "SHA-256 of the final community model"]
    lines += [*_markdown_table("run", columns, origins, words={"policy", *columns[3:]}), ""]
    lines += [
        f"- {_plain(name)}: {_plain(value)}" for name, value in [*facts(runs[0]), ("versions", versions(runs[0]))]
    ]
    write_text(folder / MARKDOWN, "\n".join(lines) + "\n")
    return folder / MARKDOWN


def _cells(row: Row) -> tuple[str, list[str]]:
    missing = [row.note, *[""] * (len(_HEADINGS) - 1)] if row.note else []
    values = [f"**{cell.value}**" if cell.best else cell.value for cell in row.cells]
    factors = [f" {cell.factor}" if cell.factor else "" for cell in row.cells]
    return row.label, [*missing, *(value + factor for value, factor in zip(values, factors, strict=True))]


def _markdown_table(
    first: str, headings: Sequence[str], rows: Iterable[tuple[str, list[str]]], words: Collection[str] = ()
) -> list[str]:
    """Numbers are aligned to the right, the columns of words to the left."""
    sides = ("---" if heading in words else "---:" for heading in headings)
    lines = [f"| {first} | {' | '.join(headings)} |", f"| --- | {' | '.join(sides)} |"]
    return [*lines, *(f"| {_plain(name)} | {' | '.join(cells)} |" for name, cells in rows)]


def _plain(text: str) -> str:
    """Text without characters that have a meaning in Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>|#$])", r"\\\1", " ".join(text.split()))
