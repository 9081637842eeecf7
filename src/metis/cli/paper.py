"""`metis reproduce`: the command; what it does is in `cli/reproduce.py`, which takes long to load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from metis.cli.options import JsonOption, SetOption
from metis.cli.output import INTERRUPTED, add, print_json, stderr, stdout


def register(app: typer.Typer) -> None:
    add(
        app,
        reproduce,
        "metis reproduce list",
        "metis reproduce table3 --scale small",
        "metis reproduce table2 table3 --scale paper --dry-run",
    )


def reproduce(
    results: Annotated[list[str], typer.Argument(metavar="RESULT...", help="table1 ... figure12, all, or list.")],
    scale: Annotated[str, typer.Option("--scale", help="small takes minutes, paper days without a GPU.")] = "small",
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the runs and the report are kept.")] = Path(
        "runs/paper"
    ),
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Cells that run at the same time; by default the processors.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train nothing; print what every cell schedules, round by round.")
    ] = False,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="With --dry-run: up to so many rounds, not the published.")
    ] = None,
    set_: SetOption = [],  # noqa: B006  # typer wants a list
    force: Annotated[bool, typer.Option("--force", help="Run anew what was run with other settings.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Reproduce tables and figures of the paper, with the published numbers beside ours.

    Runs every policy of the experiments that a result needs, in virtual time. Finished runs are kept in DIR and
    used again; a run that was cut off goes on where it was. It ends with one report, DIR/SCALE/report.html.
    """
    from metis.cli import reproduce as cli_reproduce

    quiet = Console(quiet=True)
    done = cli_reproduce.command(
        cli_reproduce.Request(
            results=tuple(results),
            scale=cli_reproduce.scale_named(scale),
            out=out,
            workers=workers,
            dry_run=dry_run,
            rounds=rounds,
            overrides=tuple(set_),
            anew=force,
        ),
        quiet if as_json else stdout(),
        quiet if as_json else stderr(),
    )
    if as_json:
        print_json(done.document)
    if not done.complete:
        raise typer.Exit(INTERRUPTED)
