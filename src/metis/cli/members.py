"""`metis members`: who belongs to a federation, changed while it runs or while it is stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from metis.cli.admin import ControllerOption, IdentityOption, InsecureOption, answer, connect, show_members
from metis.cli.options import JsonOption, ProxyOption
from metis.cli.output import add as add_command, deployed
from metis.errors import ConfigError

StateOption = Annotated[
    Path | None, typer.Option("--state", metavar="DIR", help="State folder of a controller that does not run.")
]
MemberArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the site, as in its certificate.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        no_args_is_help=True,
        help="Change who belongs to a federation: of a running controller with --controller, of a stopped one with "
        "--state.",
    )
    at = "--controller federation.example.org:7443 --identity kim"
    add_command(group, add, f"metis members add hospital-c {at}", "metis members add hospital-c --state state")
    add_command(group, remove, f"metis members remove hospital-c {at} --withdraw")
    add_command(group, list_, f"metis members list {at}", "metis members list --state state")
    app.add_typer(group, name="members")


def _change(
    command: str,
    state: Path | None,
    controller: str | None,
    identity: Path | None,
    insecure: bool,
    proxy: str | None,
    **arguments: Any,
) -> dict[str, Any]:
    if (state is None) == (controller is None):
        raise ConfigError("name either a running controller, --controller HOST:PORT, or the folder of a stopped one")
    given = {name: value for name, value in arguments.items() if value is not None}
    if state is not None:
        changed: dict[str, Any] = deployed("metis.deployment.controller.offline").change_member(state, command, given)
        return changed
    with connect(controller, identity, insecure, proxy) as remote:
        return remote.command(command, **given)


def add(
    name: MemberArgument,
    state: StateOption = None,
    controller: ControllerOption = None,
    identity: IdentityOption = None,
    insecure: InsecureOption = False,
    proxy: ProxyOption = None,
    watts: Annotated[float | None, typer.Option("--watts", min=0, help="Power while training.")] = None,
    idle_watts: Annotated[float | None, typer.Option("--idle-watts", min=0, help="Power while idle.")] = None,
    epsilon: Annotated[float | None, typer.Option("--epsilon", min=0, help="Relative power, instead of watts.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Let a site join, for the first time or again; its learner needs a certificate with this name."""
    found = _change(
        "add",
        state,
        controller,
        identity,
        insecure,
        proxy,
        learner=name,
        watts=watts,
        idle_watts=idle_watts,
        epsilon=epsilon,
    )
    answer(found, as_json)


def remove(
    name: MemberArgument,
    state: StateOption = None,
    controller: ControllerOption = None,
    identity: IdentityOption = None,
    insecure: InsecureOption = False,
    proxy: ProxyOption = None,
    withdraw: Annotated[
        bool, typer.Option("--withdraw", help="Also take its last contribution out of the community model.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove a site at once: it is disconnected, its open task is void, and it may not join any more."""
    arguments = {"learner": name, "withdraw": withdraw or None}
    answer(_change("remove", state, controller, identity, insecure, proxy, **arguments), as_json)


def list_(
    state: StateOption = None,
    controller: ControllerOption = None,
    identity: IdentityOption = None,
    insecure: InsecureOption = False,
    proxy: ProxyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the members: those of the file, with what was changed since."""
    if state is not None:
        if not (state / "controller.db").is_file():
            raise ConfigError(f"{state} is not the state folder of a controller: it has no controller.db")
        show_members(deployed("metis.deployment.controller.offline").members_of(state), as_json)
        return
    show_members(_change("members", None, controller, identity, insecure, proxy), as_json)
