"""`metis dashboard`: the live dashboard of a folder, and the same beside a run that has just been started."""

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

from metis.errors import ConfigError, needs_package
from metis.net import is_served_locally

DashboardOption = Annotated[
    bool, typer.Option("--dashboard", help="Serve the live dashboard on this machine meanwhile; prints its address.")
]


def _check_installed() -> None:
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(needs_package("the dashboard", package, "dashboard"))


@contextlib.contextmanager
def beside(folder: Path, wanted: bool, console: Console) -> Iterator[str | None]:
    """Serve the dashboard of a folder while something runs that writes there, if it is wanted; gives its address."""
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


EXAMPLES = (
    "[bold]metis dashboard runs/demo --open[/]\n\n"
    "[bold]metis dashboard state --listen 0.0.0.0:8484 --token-file token[/]\n\n"
    "[bold]metis dashboard controller.example.org:8484 --token-file token --open[/]"
)


def dashboard(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|HOST:PORT",
            help="Of a run, a comparison, a controller's state, or one above them; or where a dashboard is served.",
        ),
    ],
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="By default 127.0.0.1:8484, or a free port.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="Its line is the token; else one is made where needed."),
    ] = None,
) -> None:
    """Show runs in the browser while they go on, or after.

    Follows the events that are written anyway, so it can be started and ended at any time and never disturbs a run.
    It only reads. Other machines can look only with --listen, and then only with the token that is printed.
    """
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
    _check_installed()
    from metis.deployment.controller.status import read_token
    from metis.reporting.dashboard.listening import bind, new_token
    from metis.reporting.dashboard.server import DashboardServer

    token = None if token_file is None else read_token(token_file)
    bound = bind(listen)
    if token is None and not is_served_locally(bound):
        token = new_token()
    out, notes = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    with DashboardServer(folder, bound, token) as server:
        out.print(server.url, markup=False)
        if not is_served_locally(bound):
            notes.print(
                "note: the connection is not encrypted; over a network that you do not trust, use an SSH tunnel or a "
                "proxy with TLS"
            )
        notes.print("end it with Ctrl-C")
        if open_:
            webbrowser.open(server.url)
        asked = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # also where a script has started it in the background
            signal.signal(number, lambda *_: asked.set())
        asked.wait()


def _look(url: str, listen: str | None, open_: bool, token_file: Path | None) -> None:
    """Say, or show, how a browser gets to a dashboard that another machine serves, if it is there and lets us in."""
    if listen is not None:
        raise ConfigError(f"--listen is for a directory; {url} is served already")
    from metis.deployment.controller.status import read_token
    from metis.reporting.dashboard.listening import visit

    with_token = visit(url, None if token_file is None else read_token(token_file))
    Console(highlight=False, soft_wrap=True).print(with_token, markup=False)
    if open_:
        webbrowser.open(with_token)
