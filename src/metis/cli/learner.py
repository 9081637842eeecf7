"""`metis learner`: one site of a real federation, from its start to the final model.

Registered by `metis.cli.app`, whose guard it uses; grpc and cryptography are loaded only when the command runs.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from metis import __version__
from metis.errors import ConfigError, needs_package
from metis.net import host_and_port, is_loopback

EXAMPLES = (
    "[bold]metis learner --controller federation.example.org:7443 --identity kits/hospital-a --site site.py[/]\n\n"
    "[bold]metis learner --controller 127.0.0.1:7443 --insecure --name north --pace 0.1[/]"
)

_TRAINER = (sys.executable, "-m", "metis.cli.trainer")
_STYLES = {
    "warning": "yellow", "failed": "red", "refused": "red", "set_aside": "bold red", "error": "bold red",
    "committed": "green", "evaluated": "green", "finished": "bold",
}  # fmt: skip


def learner(
    controller: Annotated[str, typer.Option("--controller", metavar="HOST:PORT", help="Where the controller listens.")],
    identity: Annotated[
        Path | None, typer.Option("--identity", metavar="DIR", help="This site's kit: certificate, key and CA.")
    ] = None,
    site: Annotated[
        Path | None,
        typer.Option("--site", metavar="FILE", help="Python file with this site's network and data; without it, the "
                     "built-in data set and network of the experiment."),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option("--work", metavar="DIR", help="Keeps what is trained until the controller has it; by default "
                     "learner-NAME."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where the final model goes; by default to --work.")
    ] = None,
    pace: Annotated[
        float | None,
        typer.Option("--pace", metavar="SECONDS", help="Let each batch take at least so long, as on a slower machine."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Where to train, as in cuda:0; by default as the experiment says.")
    ] = None,
    processes: Annotated[
        int,
        typer.Option("--processes", min=1, help="Train in so many processes as one: a batch is divided over them, each "
                     "with a GPU of its own if --device is cuda."),
    ] = 1,
    insecure: Annotated[bool, typer.Option("--insecure", help="Plain text, to a controller on this machine.")] = False,
    name: Annotated[str | None, typer.Option("--name", help="With --insecure: this learner's name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")] = False,
) -> None:  # fmt: skip
    """Take part in a real federation as one of its learners.

    Dials the controller and keeps dialling for as long as it takes; trains what it is given; ends with the
    federation, leaving community.safetensors. Kill it and start it again as you like: what was trained and not yet
    acknowledged is handed in first. Exit codes: 0 the federation has ended or a signal came, 2 the controller refuses
    or something must be mended here, 1 the rest.
    """
    host, port = host_and_port(controller, "federation.example.org:7443")
    if pace is not None and not 0 <= pace < float("inf"):
        raise ConfigError(f"--pace is {pace:g}; it must be 0 seconds or more")
    if site is not None and not site.is_file():
        raise ConfigError(f"there is no site file {site}")
    report = Reporter(Console(stderr=True, highlight=False, emoji=False, soft_wrap=True), as_json)
    deployment = _deployment("metis.deployment.learner.process")
    who: dict[str, Any]
    if insecure:
        who = _plainly(host, port, identity, name)
    else:
        who = _by_certificate(host, port, identity, name, report)
    called = who.pop("called")
    process = deployment.LearnerProcess(
        controller,
        work=work or Path(f"learner-{called}"),
        child=_TRAINER if processes == 1 else (*_TRAINER, "--processes", str(processes)),
        report=report,
        site=None if site is None else site.resolve(),
        device=device,
        pace=pace,
        out=out,
        software=f"metis {__version__}",
        **who,
    )
    code = asyncio.run(_taking_part(process, called, report))
    if code:
        raise typer.Exit(code)


async def _taking_part(process: Any, name: str, report: Reporter) -> int:
    """Run the learner, and show in a terminal what it is doing."""
    from metis.reporting.console import REFRESH_SECONDS, TaskProgress

    with TaskProgress(report.live, name) as progress:
        running = asyncio.create_task(process.run())
        while not running.done():
            progress(*process.doing())
            await asyncio.wait([running], timeout=REFRESH_SECONDS if report.live.is_terminal else None)
    return int(await running)


class Reporter:
    """Tells what happens, one line each: for people with the time of day, for machines as JSON."""

    def __init__(self, console: Console, as_json: bool) -> None:
        self._console, self._as_json = console, as_json
        # Where a line may be shown that changes: a terminal that people read, else nowhere.
        self.live = console if console.is_terminal and not as_json else Console(quiet=True, force_terminal=False)

    def __call__(self, kind: str, text: str) -> None:
        if self._as_json:
            sys.stdout.write(json.dumps({"at": time.time(), "kind": kind, "text": text}) + "\n")
            sys.stdout.flush()
            return
        style = _STYLES.get(kind)
        words = f"error: {text}" if kind == "error" else text
        line = escape(words) if style is None else f"[{style}]{escape(words)}[/]"
        self._console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {line}")


def _deployment(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as problem:
        if problem.name is None or problem.name.startswith("metis"):
            raise
        raise ConfigError(needs_package("a real federation", problem.name, "deploy")) from None


def _plainly(host: str, port: int, identity: Path | None, name: str | None) -> dict[str, Any]:
    preflight = _deployment("metis.deployment.preflight")
    if identity is not None:
        raise ConfigError("--insecure and --identity exclude each other: with certificates nothing is plain text")
    if name is None:
        raise ConfigError("with --insecure there is no certificate to say who this is: give --name NAME")
    if not is_loopback(host):
        raise ConfigError(
            f"--insecure is for a controller on this machine, but {host} is not it; give --identity DIR, or dial "
            f"127.0.0.1:{port}"
        )
    return {"called": name, "name": name, "preflight": _checked(lambda: preflight.preflight(host, port, None))}


def _by_certificate(host: str, port: int, identity: Path | None, name: str | None, report: Reporter) -> dict[str, Any]:
    kits, preflight = _deployment("metis.deployment.security.identity"), _deployment("metis.deployment.preflight")
    if identity is None:
        raise ConfigError(
            "a learner needs its certificate: --identity DIR (made by metis certificates issue), or --insecure --name "
            "NAME for a controller on this machine"
        )
    kit = kits.load_kit(identity)
    kits.check_kit(kit, "learner")
    if name is not None and name != kit.name:
        raise ConfigError(f"--name is '{name}', but the certificate in {identity} is of '{kit.name}'; leave it out")
    for warning in kits.warnings(kit):
        report("warning", warning)

    def check() -> None:
        preflight.preflight(host, port, kits.load_kit(identity))  # read again: it may have been renewed

    return {
        "called": kit.name,
        "credentials": lambda: kits.channel_credentials(kits.load_kit(identity)),
        "preflight": _checked(check),
    }


def _checked(check: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    """The preflight beside the event loop; what may pass becomes an OSError, so that it is tried again."""
    unreachable = _deployment("metis.deployment.preflight").Unreachable

    async def preflight() -> None:
        try:
            await asyncio.to_thread(check)
        except unreachable as problem:
            raise ConnectionError(str(problem)) from None

    return preflight
