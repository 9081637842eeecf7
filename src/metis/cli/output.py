"""What every command shares: exit codes, the guard that turns an error into one line, and where output goes.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 2 the user's mistake, 75 a disk is full (try again
when there is room), 130 interrupted, 1 ours.
"""

from __future__ import annotations

import errno
import functools
import importlib
import inspect
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from metis.errors import ConfigError, DiskFull, InternalError, MetisError, needs_package
from metis.text import json_text

USER_ERROR, INTERRUPTED, OUR_ERROR, DISK_FULL = 2, 130, 1, 75
REPORTS = "metis.report"  # the logger of what a log file gets; without one it has no handlers
_PLAIN_WIDTH = 140  # without a terminal there is no width to keep to, and a table must not be folded to 80 columns

_debug = False


def show_tracebacks(wanted: bool) -> None:
    """With --debug an error is raised instead of being summarized in a line."""
    global _debug  # noqa: PLW0603  # one process runs one command
    _debug = wanted


def stdout() -> Console:
    return Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def stderr() -> Console:
    return Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


def say(text: str) -> None:
    """One line of a result, never folded, so that a path in it can be copied."""
    stdout().print(text, soft_wrap=True, markup=False)


def note(text: str, console: Console | None = None) -> None:
    """Something worth knowing that is not an error."""
    (console or stderr()).print(f"[yellow]note:[/] {escape(text)}")


def print_json(document: Any) -> None:
    sys.stdout.write(json_text(document) + "\n")


# --- errors ---------------------------------------------------------------------------------------

_Command = TypeVar("_Command", bound=Callable[..., None])


def guarded(command: _Command) -> _Command:
    """The command with every error turned into one clear line and an exit code."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt:
            stderr().print("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader of our output has closed it
            sys.stderr.close()
            raise typer.Exit(0) from None
        except (typer.Exit, typer.Abort):
            raise
        except Exception as problem:
            if _debug:
                raise
            _fail(*_explained(problem))

    # A help text is as wide as the terminal, not as the source.
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    run.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return run  # type: ignore[return-value]


def _explained(problem: Exception) -> tuple[str, int]:
    """What to print and the exit code."""
    if isinstance(problem, InternalError):
        return f"{problem} (this is a bug in Metis; please report it)", OUR_ERROR
    user_error = DISK_FULL if _by_full_disk(problem) else USER_ERROR
    if isinstance(problem, MetisError):
        return str(problem), user_error
    if isinstance(problem, OSError):
        path = f"{problem.filename}: " if problem.filename else ""
        return f"{path}{problem.strerror or problem}", user_error
    text = " ".join(str(problem).split()) or type(problem).__name__
    again = shlex.join(["metis", "--debug", *sys.argv[1:]])
    return f"unexpected {type(problem).__name__}: {text}; for the traceback, run: {again}", OUR_ERROR


def _by_full_disk(problem: BaseException | None) -> bool:
    while problem is not None:
        if isinstance(problem, DiskFull) or getattr(problem, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            return True
        problem = problem.__cause__
    return False


def _fail(message: str, code: int) -> None:
    console, log = stderr(), logging.getLogger(REPORTS)
    if log.handlers:
        log.error("%s", message, extra={"kind": "error"})
    for line in message.splitlines() or [""]:
        console.print(f"[bold red]error:[/] {escape(line)}")
    raise typer.Exit(code)


def add(app: typer.Typer, command: Callable[..., None], *examples: str, name: str | None = None) -> None:
    """Add a guarded command; the examples end its help."""
    epilog = "\n\n".join(f"[bold]{example}[/]" for example in examples)
    app.command(name or command.__name__.rstrip("_"), epilog=epilog or None)(guarded(command))


# --- real federations -----------------------------------------------------------------------------


def deployed(module: str) -> Any:
    """A module that needs the extra `deploy`, imported; one sentence says what is missing without it."""
    # gRPC prints every failed handshake, so that a port scanner could fill a log; GRPC_VERBOSITY=INFO shows them.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as problem:
        if problem.name is None or problem.name.startswith("metis"):
            raise
        raise ConfigError(needs_package("a real federation", problem.name, "deploy")) from None


class Reporter:
    """Reports what happens, one line each: with the time of day for people, as JSON for programs, and in a log file."""

    def __init__(
        self,
        console: Console,
        as_json: bool,
        styles: Mapping[str, str],
        log: Callable[[str, str], None] | None = None,
    ) -> None:
        self._console, self._as_json, self._styles, self._log = console, as_json, styles, log
        # Where a line may be shown that changes: a terminal that people read, else nowhere.
        self.live = console if console.is_terminal and not as_json else Console(quiet=True, force_terminal=False)

    def __call__(self, kind: str, text: str) -> None:
        if self._log is not None:
            self._log(kind, text)
        if self._as_json:
            sys.stdout.write(json.dumps({"at": time.time(), "kind": kind, "text": text}) + "\n")
            sys.stdout.flush()
            return
        style = self._styles.get(kind)
        words = escape(f"error: {text}" if kind == "error" else text)
        self._console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {words if style is None else f'[{style}]{words}[/]'}")
