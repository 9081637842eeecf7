"""`metis reproduce`: the paper's tables and figures, from its own experiments in virtual time."""

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
    results: Annotated[
        list[str], typer.Argument(metavar="RESULT...", help="table1 ... figure12, all, the name of a study, or list.")
    ],
    scale: Annotated[
        str, typer.Option("--scale", help="small takes minutes, decisive many hours, paper days without a GPU.")
    ] = "small",
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory for the runs and the report.")] = Path(
        "runs/paper"
    ),
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Number of runs at the same time; by default one per processor."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train nothing; print what every run schedules, round by round.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", min=1, help="With --dry-run: number of rounds, instead of the published number."),
    ] = None,
    set_: SetOption = [],  # noqa: B006  # typer wants a list
    force: Annotated[bool, typer.Option("--force", help="Run again what was run with other settings.")] = False,
    policy: Annotated[
        list[str],
        typer.Option(
            "--policy",
            metavar="LABEL",
            help="With --scale decisive, --dry-run or a study: only these. May be repeated.",
        ),
    ] = [],  # noqa: B006  # typer wants a list
    environment: Annotated[
        list[str],
        typer.Option(
            "--environment",
            metavar="FILE",
            help="With --scale decisive, --dry-run or a study: only these. May be repeated.",
        ),
    ] = [],  # noqa: B006  # typer wants a list
    seed: Annotated[
        list[int], typer.Option("--seed", min=0, help="With --scale decisive, or a study: only these. May be repeated.")
    ] = [],  # noqa: B006  # typer wants a list
    until: Annotated[
        float | None,
        typer.Option(
            "--until", metavar="SECONDS", help="With --scale decisive: no run goes on after this virtual second."
        ),
    ] = None,
    timings: Annotated[
        str,
        typer.Option(
            "--timings",
            help="nominal: the times per batch that the paper states; published: those of each row of its tables.",
        ),
    ] = "nominal",
    curves: Annotated[
        Path | None,
        typer.Option("--curves", metavar="DIR", help="With --scale decisive: where what runs measure is kept."),
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="With --scale decisive: train nothing, report what is kept.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Reproduce tables and figures of the paper, with the published numbers next to ours.

    Runs every policy of the experiments that a result needs, in virtual time. Finished runs are kept in DIR and used
    again; an interrupted run continues where it stopped. The report is DIR/SCALE/report.html.
    """
    from metis.reproduction.command import command, scale_named, timings_named
    from metis.reproduction.results import Request

    request = Request(
        tuple(results), scale_named(scale), out, workers, dry_run, rounds, tuple(set_), force,
        tuple(policy), tuple(environment), curves, not report_only, timings_named(timings),
        tuple(seed), until,
    )  # fmt: skip
    quiet = Console(quiet=True)
    reproduced = command(request, quiet if as_json else stdout(), quiet if as_json else stderr())
    if as_json:
        print_json(reproduced.document)
    if not reproduced.complete and not report_only:
        raise typer.Exit(INTERRUPTED)
