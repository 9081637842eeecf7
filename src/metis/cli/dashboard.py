"""`metis dashboard`: the live dashboard of a folder, also in the background of a run that was just started."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
import signal
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from metis.cli.output import add, deployed, note, say, stderr
from metis.errors import ConfigError, needs_package
from metis.net import is_served_locally

DashboardOption = Annotated[
    bool,
    typer.Option("--dashboard", help="Serve the live dashboard on this machine meanwhile, and print its address."),
]


def _check_installed() -> None:
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(needs_package("the dashboard", package, "dashboard"))


@contextlib.contextmanager
def in_background(folder: Path, wanted: bool, console: Console) -> Iterator[str | None]:
    """Serve the dashboard of a folder, if wanted, while a run writes there; the value is its address."""
    if not wanted:
        yield None
        return
    _check_installed()
    from metis.reporting.dashboard.listening import DashboardProcess, bind

    dashboard = DashboardProcess(folder, bind(None))
    console.print(f"dashboard: [link={dashboard.url}]{dashboard.url}[/link]")
    try:
        yield dashboard.url
    finally:
        problem = dashboard.end()
        again = escape(f"metis dashboard {shlex.quote(str(folder))}")
        if problem is not None:
            console.print(f"[yellow]note:[/] the dashboard failed: {escape(problem)}")
        else:
            console.print(f"the dashboard has ended too; to see it again: [bold]{again}[/]", soft_wrap=True)


def register(app: typer.Typer) -> None:
    add(
        app,
        dashboard,
        "metis dashboard runs/demo --open",
        "metis dashboard state --listen 0.0.0.0:8484 --token-file token",
        "metis dashboard controller.example.org:8484 --token-file token --open",
        "metis dashboard --controller federation.example.org:7443 --identity kim --open",
    )


def dashboard(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR|HOST:PORT",
            help="Directory of a run, of a comparison, a state folder, or one above; or the address of a dashboard.",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", metavar="HOST:PORT", help="Address to serve on; by default 127.0.0.1:8484, or a free port."
        ),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="FILE", help="File with the token; without it, one is generated where needed."
        ),
    ] = None,
    controller: Annotated[
        str | None,
        typer.Option("--controller", metavar="HOST:PORT", help="Instead of a directory: a controller, over TLS."),
    ] = None,
    identity: Annotated[
        Path | None,
        typer.Option("--identity", metavar="KIT", help="With --controller: your certificate (viewer or admin)."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="With --controller: without encryption, on this machine only.")
    ] = False,
) -> None:
    """Show runs in the browser, live or finished.

    Reads the events that every run writes, so it can be started and ended at any time and never disturbs a run.
    Other machines can connect only with --listen, and only with the token that is printed.
    """
    if controller is not None:
        if folder is not None:
            raise ConfigError("give a directory or --controller, not both")
        _mirrored(controller, identity, insecure, listen, open_, token_file)
        return
    if folder is None:
        raise ConfigError("name the directory of a run, the address of a dashboard, or --controller HOST:PORT")
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; give the directory of a run")
    # A path has lost one of the slashes of an address.
    address = re.fullmatch(r"(https?:)?/*([\w.-]+|\[[\da-fA-F:]+\])(:\d+)?/?", str(folder))
    if not folder.is_dir() and address is not None and (address[1] or address[3]):
        _look(f"{address[1] or 'http:'}//{address[2]}{address[3] or ''}/", listen, open_, token_file)
        return
    if not folder.is_dir():
        again = shlex.quote(str(folder))
        a_host = address is not None and ("." in address[2] or address[2] == "localhost")
        served = f"; for a dashboard that {folder} serves, add its port: {folder}:8484" if a_host else ""
        raise ConfigError(f"there is no directory {folder}; make a run with: metis simulate FILE --out {again}{served}")
    _serve(folder, listen, open_, token_file)


def _mirrored(
    controller: str, identity: Path | None, insecure: bool, listen: str | None, open_: bool, token_file: Path | None
) -> None:
    """Serve the dashboard of a federation elsewhere, from a copy of its trace that is kept up to date."""
    import tempfile

    from metis.cli.admin import connect

    _check_installed()
    with connect(controller, identity, insecure) as remote, tempfile.TemporaryDirectory(prefix="metis-") as temporary:
        folder, ended = Path(temporary) / "federation", threading.Event()
        folder.mkdir()
        mirror = deployed("metis.deployment.mirror").Mirror(remote, folder)
        following = threading.Thread(target=mirror.follow, args=(ended, note), daemon=True)
        following.start()
        try:
            _serve(folder, listen, open_, token_file)
        finally:
            ended.set()
            following.join(10)


def _serve(folder: Path, listen: str | None, open_: bool, token_file: Path | None) -> None:
    _check_installed()
    from metis.deployment.controller.status import read_token
    from metis.reporting.dashboard.listening import bind, new_token
    from metis.reporting.dashboard.server import DashboardServer

    token = None if token_file is None else read_token(token_file)
    bound = bind(listen)
    if token is None and not is_served_locally(bound):
        token = new_token()
    with DashboardServer(folder, bound, token) as server:
        say(server.url)
        if not is_served_locally(bound):
            note("the connection is not encrypted; on a network you do not trust, use an SSH tunnel or a TLS proxy")
        stderr().print("stop it with Ctrl-C")
        if open_:
            webbrowser.open(server.url)
        asked = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # SIGTERM where a script has started it
            signal.signal(number, lambda *_: asked.set())
        asked.wait()


def _look(url: str, listen: str | None, open_: bool, token_file: Path | None) -> None:
    """Print or open the address of a dashboard on another machine, if it answers and accepts the token."""
    if listen is not None:
        raise ConfigError(f"--listen is for a directory; {url} is served already")
    from metis.deployment.controller.status import read_token
    from metis.reporting.dashboard.listening import visit

    with_token = visit(url, None if token_file is None else read_token(token_file))
    say(with_token)
    if open_:
        webbrowser.open(with_token)
