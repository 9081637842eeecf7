"""`metis admin`: a running federation administered from elsewhere, over the learners' port."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from metis.cli.audit import show_audit
from metis.cli.options import JsonOption, ProxyOption
from metis.cli.output import add, deployed, print_json, say, stdout
from metis.cli.rounds import RoundOption, RoundsOption, SiteOption, show_rounds, site_table
from metis.cli.status import View, show_view, watch_views
from metis.errors import ConfigError, Unreachable
from metis.text import printable

if TYPE_CHECKING:
    from metis.deployment.administrator import RemoteController

ControllerOption = Annotated[
    str | None, typer.Option("--controller", metavar="HOST:PORT", help="Where the controller listens.")
]
IdentityOption = Annotated[
    Path | None, typer.Option("--identity", metavar="KIT", help="Your certificate, of the role admin or viewer.")
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Without encryption, to a controller on this machine only.")
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask whether you are sure.")]
_KINDS = {"warning": "yellow", "round": "dim", "evaluation": "green", "finished": "bold", "error": "red"}


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Administer a running federation from elsewhere.")
    group.callback()(_connection)
    add(group, status, "metis admin --controller federation.example.org:7443 --identity kim status --round 17")
    add(group, sites)
    add(group, pause)
    add(group, resume)
    add(group, stop)
    add(group, extend, "metis admin --controller federation.example.org:7443 --identity kim extend --rounds 40")
    add(group, rollback, "metis admin --controller federation.example.org:7443 --identity kim rollback --to 12")
    add(group, log)
    add(group, model)
    add(group, audit)
    add(group, members)
    app.add_typer(group, name="admin")


def _connection(
    context: typer.Context,
    controller: ControllerOption = None,
    identity: IdentityOption = None,
    insecure: InsecureOption = False,
    proxy: ProxyOption = None,
) -> None:
    context.obj = (controller, identity, insecure, proxy)


def connect(
    controller: str | None, identity: Path | None, insecure: bool, proxy: str | None = None
) -> RemoteController:
    """A connection to a controller, tried out."""
    if controller is None:
        raise ConfigError("name the controller: --controller HOST:PORT")
    if (identity is None) != insecure:
        raise ConfigError("give your certificate, --identity KIT, or --insecure to a controller on this machine")
    remote: RemoteController = deployed("metis.deployment.administrator").RemoteController.dial(
        controller, identity, proxy
    )
    return remote


def _remote(context: typer.Context) -> RemoteController:
    return connect(*context.obj)


def answer(document: Mapping[str, Any], as_json: bool) -> None:
    """Show what a command that changes something has led to."""
    if as_json:
        print_json(document)
    else:
        say(printable(document["text"]))


def _confirm(question: str, yes: bool) -> None:
    if not yes:
        typer.confirm(question, abort=True, err=True)


# --- reading --------------------------------------------------------------------------------------


def status(
    context: typer.Context,
    round_: RoundOption = None,
    rounds: RoundsOption = False,
    site: SiteOption = None,
    watch: Annotated[
        float | None,
        typer.Option("--watch", metavar="SECONDS", min=0.5, help="Refresh this often, until it has ended."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the federation: its learners, its model, its costs; or one round, all rounds, one site, in words."""
    with _remote(context) as remote:
        if round_ is not None or rounds or site is not None:
            show_rounds(remote.command("rounds", round=round_, site=site), as_json)
            return

        def look() -> View:
            return View({"running": True, **remote.command("status")})

        view = look()
        if watch is not None:
            watch_views(look, view, watch, as_json)
        elif as_json:
            print_json(view.document)
        else:
            show_view(view, stdout())


def sites(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show the sites and the history of each: drops, refusals, time per batch, transfer speed, metric."""
    with _remote(context) as remote:
        learners = remote.command("status")["learners"]
    if as_json:
        print_json(learners)
    elif learners:
        stdout().print(site_table(learners))
    else:
        say("no learner has joined yet")


def log(
    context: typer.Context,
    lines: Annotated[int, typer.Option("--lines", min=1, max=1000, help="How many of the latest.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Show what the controller has reported since it was started."""
    with _remote(context) as remote:
        found = remote.command("log", lines=lines)["lines"]
    if as_json:
        print_json(found)
        return
    console = stdout()
    for line in found:
        at, style = datetime.fromtimestamp(line["at"]).astimezone(), _KINDS.get(line["kind"], "default")
        console.print(f"[dim]{at:%m-%d %H:%M:%S}[/] [{style}]{escape(printable(line['text']))}[/]", soft_wrap=True)


def model(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write it.")] = Path("model.safetensors"),
    version: Annotated[int | None, typer.Option("--version", min=0, help="Instead of the latest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The best so far, by its metric.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Fetch a community model as a safetensors file; needs the role admin, and is audited."""
    with _remote(context) as remote:
        about = remote.save_model(out, version, best)
    if as_json:
        print_json({**about, "file": str(out)})
    else:
        say(f"community model {about['version']} is in {out}")


def audit(context: typer.Context, as_json: JsonOption = False) -> None:
    """Fetch the audit log, verify its chain, and show it."""
    import tempfile

    with _remote(context) as remote, tempfile.TemporaryDirectory(prefix="metis-audit-") as folder:
        path, offset = Path(folder) / "audit.jsonl", 0
        with path.open("wb") as file:
            while True:
                before = offset
                for data in remote.read("audit", offset=offset):
                    offset += file.write(data)
                if offset == before:
                    break
        code = show_audit(path, as_json=as_json)
    if code:
        raise typer.Exit(code)


def members(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the members; [bold]metis members add | remove[/] changes them."""
    with _remote(context) as remote:
        show_members(remote.command("members"), as_json)


def show_members(document: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    if document.get("everybody"):
        say("everybody with a certificate of the CA may join")
    for member in document["members"]:
        say(f"{printable(member['name'])}{' (added)' if member['added'] else ''}")
    for name in document["removed"]:
        say(f"{printable(name)} (removed)")


# --- changing -------------------------------------------------------------------------------------


def pause(context: typer.Context, as_json: JsonOption = False) -> None:
    """Send no new tasks; what is being trained may end and counts, and the run's clock stands still."""
    with _remote(context) as remote:
        answer(remote.command("pause"), as_json)


def resume(context: typer.Context, as_json: JsonOption = False) -> None:
    """Go on after a pause."""
    with _remote(context) as remote:
        answer(remote.command("resume"), as_json)


def stop(context: typer.Context, yes: YesOption = False, as_json: JsonOption = False) -> None:
    """End the federation now: what was committed to the open round is mixed, and everybody gets the final model."""
    _confirm("End the federation for all sites?", yes)
    with _remote(context) as remote:
        answer(remote.command("stop"), as_json)


def extend(
    context: typer.Context,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Community models in all.")] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", help="Seconds of the run in all.")] = None,
    update_requests: Annotated[int | None, typer.Option("--update-requests", min=1, help="Updates in all.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Steps of all learners together.")] = None,
    no_target: Annotated[bool, typer.Option("--no-target", help="Do not end when the target is reached.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Change when the federation ends; one that has ended, and whose controller still serves, goes on."""
    with _remote(context) as remote:
        found = remote.command(
            "extend", rounds=rounds, seconds=seconds, update_requests=update_requests, steps=steps,
            no_target=no_target or None,
        )  # fmt: skip
        answer(found, as_json)


def rollback(
    context: typer.Context,
    to: Annotated[
        int | None, typer.Option("--to", metavar="VERSION", min=0, help="Without it: which are kept.")
    ] = None,
    after: Annotated[
        int | None,
        typer.Option(
            "--after", metavar="VERSION", min=0, help="Not if there was a rollback since this one; default: the latest."
        ),
    ] = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go on from an earlier community model: it is published again, and what was trained since does not count."""
    with _remote(context) as remote:
        kept = remote.command("versions")
        if to is None:
            if as_json:
                print_json(kept)
            else:
                say(f"community model {kept['version']} is the latest; kept are {', '.join(map(str, kept['kept']))}")
            return
        _confirm(f"Go back to community model {to} in all of the federation?", yes)
        after = kept["version"] if after is None else after
        try:
            answer(remote.command("rollback", version=to, after=after), as_json)
        except Unreachable as problem:
            raise Unreachable(f"{problem}; it may have happened: give --after {after} to try again") from None
