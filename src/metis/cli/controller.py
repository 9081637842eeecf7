"""`metis controller`: the command; `controller_process.py`, which needs grpc, runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from metis.cli import running, track
from metis.cli.dashboard import DashboardOption, in_background
from metis.cli.log import Format, Level, LogFileOption, LogFormatOption, LogLevelOption, log_to
from metis.cli.options import FileArgument, PolicyOption, SetOption
from metis.cli.output import OUR_ERROR, Reporter, add, deployed, say, stderr
from metis.cli.storage import KeyOption, choose

_STYLES = {"warning": "yellow", "round": "dim", "evaluation": "green", "finished": "bold"}


def register(app: typer.Typer) -> None:
    add(
        app,
        controller,
        "metis controller federation.toml --state state --identity kits/controller",
        "metis controller federation.toml --state state --insecure --listen 127.0.0.1:7443",
    )


def controller(
    context: typer.Context,
    file: FileArgument,
    state: Annotated[
        Path, typer.Option("--state", metavar="DIR", help="State folder: everything that must survive a restart.")
    ],
    identity: Annotated[
        Path | None, typer.Option("--identity", metavar="DIR", help="The controller's certificates.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without encryption, on loopback only.")] = False,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Address to listen on; by default the file's.")
    ] = None,
    http: Annotated[
        str | None, typer.Option("--http", metavar="HOST:PORT", help="Address of status and metrics; '' for none.")
    ] = None,
    site: Annotated[
        Path | None,
        typer.Option("--site", metavar="FILE", help="Site file with the network; by default the one in \\[site]."),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="Device to evaluate on, as in cuda:0.")] = None,
    storage_key: KeyOption = None,
    ckks_key: Annotated[
        Path | None,
        typer.Option(
            "--ckks-key",
            metavar="FILE",
            help="With \\[policy.ckks]: the controller's part of the keys, as made by metis certificates ckks.",
        ),
    ] = None,
    policy: PolicyOption = None,
    set_: SetOption = [],  # noqa: B006  # typer wants a list
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line to stdout.")] = False,
    tracking: track.TrackOption = [],  # noqa: B006
    dashboard: DashboardOption = False,
    log_file: LogFileOption = None,
    log_level: LogLevelOption = Level.INFO,
    log_format: LogFormatOption = Format.TEXT,
    test_notification: Annotated[
        bool, typer.Option("--test-notification", help="Send one notification as the file configures it, and end.")
    ] = False,
) -> None:
    """Run a real federation: wait for its learners, train, and end with the community model.

    Stop it with SIGTERM or Ctrl-C, or kill it: the same command continues where it stopped. [bold]metis status DIR[/]
    shows it from another terminal. The results are in DIR/run, like those of a simulation.
    """
    from metis.experiments.bridges import site_path
    from metis.experiments.config.load import load_config

    process = deployed("metis.cli.controller_process")
    choose(storage_key, state)
    config = track.tracked(running.with_policy(load_config(file, set_), file.name, policy), tracking)
    if test_notification:
        problems = process.send_test_notification(config, state)
        say("\n".join(problems) or "the notification was delivered")
        raise typer.Exit(OUR_ERROR if problems else 0)
    if site is None and config.site is not None:
        site = site_path(config)
    report = Reporter(stderr(), as_json, _STYLES, log_to(context, log_file, log_level, log_format))
    with (
        in_background(state, dashboard, stderr()),
        track.following(config, state / "run", state.resolve().name, None, stderr()) as follow,
    ):
        run = process.run_controller(
            config,
            state,
            identity=identity,
            insecure=insecure,
            listen=listen,
            http=http,
            site=site,
            device=device,
            report=report,
            watch=follow,
            ckks_key=ckks_key,
        )
    if run is not None:
        running.finish(run, state / "run", as_json, with_report=True, one_line=True)
