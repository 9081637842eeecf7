"""`metis simulate`: one policy of an experiment in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from metis.cli import running, track
from metis.cli.dashboard import DashboardOption, in_background
from metis.cli.options import (
    FileArgument,
    ForceOption,
    JsonOption,
    OutOption,
    PolicyOption,
    PoolOption,
    RayAddressOption,
    SetOption,
    WorkersOption,
    overrides,
)
from metis.cli.output import add, note, stderr
from metis.text import listed


def register(app: typer.Typer) -> None:
    add(
        app,
        simulate,
        "metis simulate first.toml",
        "metis simulate first.toml --set learners.1.time_per_batch=0.9 --out runs/slower",
        "metis simulate demo.toml --policy FedRec --workers 2 --json > fedrec.json",
    )


def simulate(
    file: FileArgument,
    set_: SetOption = [],  # noqa: B006  # typer wants a list
    out: OutOption = None,
    policy: PolicyOption = None,
    workers: WorkersOption = None,
    pool: PoolOption = None,
    ray_address: RayAddressOption = None,
    as_json: JsonOption = False,
    force: ForceOption = False,
    tracking: track.TrackOption = [],  # noqa: B006
    dashboard: DashboardOption = False,
    with_report: Annotated[
        bool, typer.Option("--report", help="Also draw the figures and write the report, as metis report does later.")
    ] = False,
) -> None:
    """Run one policy of an experiment in virtual time.

    The run is written to a directory, by default runs/FILE-POLICY: the events, the resolved configuration, a
    summary and the community model. [bold]metis report DIR[/] makes figures and a page of it. Ctrl-C keeps the run
    so far; [bold]metis resume DIR[/] continues it.
    """
    changes = overrides(set_, workers, pool, ray_address)
    config = track.tracked(running.with_policy(running.load(file, changes), file.name, policy), tracking)
    chosen = any(change.partition("=")[0].strip() == "seed" for change in changes)
    if config.seeds and config.seeds != [config.seed] and not chosen and not as_json:
        seeds = listed([str(seed) for seed in config.seeds], 5)
        note(
            f"the seeds {seeds} of {file.name} are for metis compare; this run has seed {config.seed}, choose another "
            "with --set seed=..."
        )
    (job,) = running.jobs_of(config, file.name, lambda name: out or Path("runs") / f"{file.stem}-{name}")
    federation = running.federation_of(config, file.name, as_json, changes)
    with running.new_folder(job.out, force):
        running.prepare(job)
        with in_background(job.out, dashboard, stderr()):
            run = running.execute(federation, job, resume=False, quiet=as_json)
        running.finish(run, job.out, as_json, with_report=with_report)
