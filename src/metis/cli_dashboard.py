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

from metis.errors import ConfigError

DashboardOption = Annotated[
    bool, typer.Option("--dashboard", help="Serve the live dashboard on this machine meanwhile; prints its address.")
]


def _check_installed() -> None:
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"the dashboard needs the package {package}: pip install 'metis[dashboard]'")


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
        if problem is not None:
            console.print(f"[yellow]note:[/] the dashboard failed: {escape(problem)}")


EXAMPLES = (
    "[bold]metis dashboard runs/demo --open[/]\n\n"
    "[bold]metis dashboard state --listen 0.0.0.0:8484 --token-file token[/]"
)


def dashboard(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Of a run, a comparison, a controller's state, or one above them.")
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
    if not folder.is_dir() and re.fullmatch(r"(https?:/+)?[\w.-]+:\d+/?", str(folder)):
        raise ConfigError(
            f"{folder} is an address; the dashboard is served where the files of the run are. On that machine: metis "
            "dashboard DIR, and to look from here --listen HOST:PORT there, or ssh -L 8484:127.0.0.1:8484 HOST here"
        )
    if not folder.is_dir():
        again = shlex.quote(str(folder))
        raise ConfigError(f"there is no directory {folder}; make a run with: metis simulate FILE --out {again}")
    _check_installed()
    from metis.deployment.status import read_token
    from metis.reporting.dashboard.listening import bind, is_loopback, new_token
    from metis.reporting.dashboard.server import DashboardServer

    token = None if token_file is None else read_token(token_file)
    bound = bind(listen)
    if token is None and not is_loopback(bound):
        token = new_token()
    out, notes = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    with DashboardServer(folder, bound, token) as server:
        out.print(server.url, markup=False)
        if not is_loopback(bound):
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
