"""`metis audit`: the audit log of a controller, verified offline."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from metis.cli.options import JsonOption
from metis.cli.output import add, print_json, say, stderr, stdout
from metis.errors import ConfigError
from metis.text import plural, printable

BROKEN = 1


def register(app: typer.Typer) -> None:
    add(app, audit, "metis audit state", "metis audit audit.jsonl --who hospital-a --since 2026-03-01 --json")


def audit(
    path: Annotated[Path, typer.Argument(metavar="STATE_DIR|FILE", help="State folder, or a copy of its audit.jsonl.")],
    who: Annotated[str | None, typer.Option("--who", metavar="NAME", help="Only this site or administrator.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="DATE", help="Only from then on, as 2026-03-01.")
    ] = None,
    head: Annotated[
        str | None,
        typer.Option("--head", metavar="SHA256", help="A line's hash noted earlier, which the log must still contain."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify the audit log and show it.

    Every line carries the hash of the line before it. Lines that were cut off at the end show only if you noted the
    last hash: give it with --head. Exit codes: 0 the chain is whole, 1 it is broken, and the line is named.
    """
    file = path / "audit.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"there is no audit log {file}; a controller writes one into its state folder")
    if since is not None:
        _check_date(since)
    code = show_audit(file, as_json=as_json, who=who, since=since, head=head)
    if code:
        raise typer.Exit(code)


def show_audit(
    file: Path, *, as_json: bool, who: str | None = None, since: str | None = None, head: str | None = None
) -> int:
    """Print the lines that are asked for; the exit code says whether all of the chain is whole."""
    from metis.deployment.controller.audit import read_audit

    rows: list[dict[str, Any]] = []
    problem: str | None = None
    count, last, found = 0, "", head is None
    for line in read_audit(file):
        if line.problem is not None:
            problem = f"line {line.number} of {file} is broken: {line.problem}"
            break
        count, last = line.number, line.hash
        found = found or line.hash == head
        if who is not None and who not in (line.record.get("who"), line.record.get("learner")):
            continue
        if since is None or str(line.record.get("at", "")) >= since:
            rows.append(line.record)
    if problem is None and not found:
        problem = f"{file} does not contain the line with hash {printable(head)}: lines were cut off or replaced"
    if as_json:
        print_json({"lines": rows, "count": count, "head": last, "whole": problem is None, "problem": problem})
    else:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for heading in ("at (UTC)", "what", "who", "details"):
            table.add_column(heading, overflow="fold")
        for record in rows:
            table.add_row(*(Text(cell) for cell in _cells(record)))
        stdout().print(table)
        if problem is None:
            say(f"{plural(count, 'line')}, the chain is whole; the hash of the last is {last or 'none'}")
    if problem is not None:
        stderr().print(Text(f"error: {problem}", style="bold red"))
        return BROKEN
    return 0


def _cells(record: dict[str, Any]) -> tuple[str, str, str, str]:
    shown = ("n", "at", "kind", "who", "learner", "previous", "command")
    what = record.get("command") if record.get("kind") == "command" else record.get("kind")
    who = record.get("who") or record.get("learner") or ""
    details = ", ".join(f"{name} {_value(value)}" for name, value in record.items() if name not in shown)
    return printable(str(record.get("at", ""))[:19]), printable(what), printable(who), printable(details)


def _value(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}..." if len(text) == 64 and text.isalnum() else text


def _check_date(text: str) -> None:
    if not re.fullmatch(r"\d{4}(-\d\d(-\d\d(T\d\d(:\d\d(:\d\d)?)?Z?)?)?)?", text):
        raise ConfigError(f"--since is {text!r}; give a date as 2026-03-01, or a time as 2026-03-01T14:00:00")
