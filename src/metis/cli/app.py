"""The command `metis`: every command group, in the order of the help."""

from __future__ import annotations

import gc
import sys
from typing import Annotated

import typer

from metis import __version__
from metis.cli import (
    admin,
    audit,
    certificates,
    compare,
    controller,
    dashboard,
    data,
    doctor,
    export,
    init,
    learner,
    members,
    plan,
    report,
    reproduce,
    simulate,
    status,
    storage,
)
from metis.cli.output import say, show_tracebacks

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated learning over learners of different speeds: simulate training policies in virtual time, compare "
    "what they cost in time, communication and energy, and run real federations.",
    epilog="Start here: [bold]metis init first.toml[/], then [bold]metis simulate first.toml[/].",
)


def _version(asked: bool) -> None:
    if asked:
        say(f"metis {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    show_tracebacks(debug)


for group in (
    init,
    simulate,
    compare,
    report,
    export,
    plan,
    data,
    dashboard,
    reproduce,
    controller,
    learner,
    status,
    doctor,
    certificates,
    admin,
    members,
    audit,
    storage,
):
    group.register(app)


def _leave_only(name: str) -> None:
    """Forget the other commands if this is the name of one: making the options of all takes longer than the imports."""
    commands = [info for info in app.registered_commands if info.name == name]
    groups = [info for info in app.registered_groups if info.name == name]
    if commands or groups:
        app.registered_commands, app.registered_groups = commands, groups


def main() -> None:
    """The entry point `metis`."""
    _leave_only("".join(sys.argv[1:2]))
    try:
        app(prog_name="metis")
    finally:
        gc.freeze()  # the process ends: looking once more for garbage among all that torch made takes 0.2 s


if __name__ == "__main__":
    main()
