"""Rounds and sites as `metis status` and `metis admin` show them: why a round was slow, and how each site has done."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from metis.cli.output import print_json, stdout
from metis.errors import ConfigError
from metis.text import number, printable, size

Document = dict[str, Any]

RoundOption = Annotated[
    int | None, typer.Option("--round", metavar="N", min=1, help="Why this round lasted as long as it did, in words.")
]
RoundsOption = Annotated[bool, typer.Option("--rounds", help="A table of the latest rounds.")]
SiteOption = Annotated[str | None, typer.Option("--site", metavar="NAME", help="The rounds of one site.")]


def lasting(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours == 0:
        return f"{minutes} min {int(seconds % 60):02d} s"
    return f"{hours} h {minutes % 60:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def by_number(name: str) -> list[str]:
    """Sorts clinic-2 before clinic-10."""
    return [part.rjust(20, "0") if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def round_report_of(folder: Path, version: int | None, site: str | None) -> Document:
    from metis.runs.rounds import round_report
    from metis.runs.trace import EVENTS, read_trace

    for path in (folder / "run" / EVENTS, folder / EVENTS):
        if path.is_file():
            return round_report(read_trace(path), version, site)
    raise ConfigError(f"{folder} has no run: there is neither {EVENTS} nor run/{EVENTS} in it")


def show_rounds(document: Mapping[str, Any], as_json: bool) -> None:
    """What `rounds.round_report` has made."""
    if as_json:
        print_json(document)
        return
    console = stdout()
    for sentence in document.get("text", ()):
        console.print(Text(printable(sentence)), soft_wrap=True)
    if "rounds" in document:
        console.print(_plain_table(document["rounds"]))


_TIMES = ("began", "seconds", "training", "transfer", "waited")


def _plain_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in rows[0] if rows else ("round",):
        table.add_column("lasted" if name == "seconds" else name, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(_cell(name, value)) for name, value in row.items()))
    return table


def _cell(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if name in _TIMES:
        return "–" if value is None else lasting(value)
    return "–" if value is None else printable(value)


def site_table(learners: Sequence[Mapping[str, Any]]) -> Table:
    """The history of each site."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("site", *_HISTORY):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("site", "state") else "right")
    for learner in sorted(learners, key=lambda learner: by_number(learner["name"])):
        cells = (show(learner) for show in _HISTORY.values())
        table.add_row(Text(printable(learner["name"])), *map(Text, cells))
    return table


def _metric_of(learner: Mapping[str, Any]) -> str:
    report = learner.get("report") or {}
    values = [f"{printable(name)} {number(value)}" for name, value in report.items() if name != "version"]
    return f"{', '.join(values)} (model {report['version']})" if values else "–"


_HISTORY: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "state": lambda learner: printable(learner["state"]),
    "updates": lambda learner: f"{learner['updates']:,}",
    "refused": lambda learner: f"{learner['refused']:,}",
    "late": lambda learner: f"{learner['late']:,}",
    "failed": lambda learner: f"{learner['failed']:,}",
    "drops": lambda learner: f"{learner['drops']:,}",
    "s/batch": lambda learner: number(learner["time_per_batch"]),
    "at first": lambda learner: number(learner["first_time_per_batch"]),
    "transfer": lambda learner: "–" if not learner["bytes_per_second"] else f"{size(learner['bytes_per_second'])}/s",
    "metric": _metric_of,
}
