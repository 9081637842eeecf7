"""Log files: what a controller or a learner reports, as lines or as JSON, in UTC, rotated before it is too large."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from enum import Enum
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Annotated, Any

import typer

from metis.cli.output import REPORTS
from metis.errors import ConfigError
from metis.text import printable

_BYTES, _KEPT = 10_000_000, 5  # of a file, and files that are kept next to it
_QUIET_SECONDS = 60.0  # between two notes that the log cannot be written
_LEVELS_OF_KINDS = {
    "warning": logging.WARNING, "refused": logging.WARNING, "failed": logging.WARNING, "set_aside": logging.WARNING,
    "error": logging.ERROR,
}  # fmt: skip

Log = Callable[[str, str], None]  # kind and text


class Level(str, Enum):
    DEBUG, INFO, WARNING, ERROR = "debug", "info", "warning", "error"


class Format(str, Enum):
    TEXT, JSON = "text", "json"


LogFileOption = Annotated[
    Path | None,
    typer.Option("--log-file", metavar="FILE", help="Also write what is reported to this file; at 10 MB it is rotated, "
                 "and five older ones are kept."),
]  # fmt: skip
LogLevelOption = Annotated[Level, typer.Option("--log-level", help="The least that the log file gets.")]
LogFormatOption = Annotated[Format, typer.Option("--log-format", help="Lines for people, or one JSON object each.")]


class LogFile(RotatingFileHandler):
    """A rotated file that only its owner can read, opened again when another program has moved it away."""

    def __init__(self, path: Path, format_: Format) -> None:
        self._warned_at = -_QUIET_SECONDS
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            super().__init__(path, maxBytes=_BYTES, backupCount=_KEPT, encoding="utf-8")
        except OSError as problem:
            raise ConfigError(f"the log file {path} cannot be written: {problem.strerror}") from None
        self.setFormatter(_Json() if format_ is Format.JSON else _Lines())

    def _open(self) -> Any:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return os.fdopen(descriptor, "a", encoding=self.encoding)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.stream is not None and self._moved(self.stream.fileno()):
                self.stream.close()
                self.stream = self._open()
        except OSError:
            self.handleError(record)
        else:
            super().emit(record)

    def _moved(self, descriptor: int) -> bool:
        try:
            there, open_ = Path(self.baseFilename).stat(), os.fstat(descriptor)
        except FileNotFoundError:
            return True
        return (there.st_dev, there.st_ino) != (open_.st_dev, open_.st_ino)

    def handleError(self, record: logging.LogRecord) -> None:
        """A log that cannot be written, as on a full disk, stops nothing; the terminal says it once a minute."""
        problem, stream, self.stream = sys.exc_info()[1], self.stream, None  # opened again for the next line
        with contextlib.suppress(OSError, AttributeError):
            stream.close()  # type: ignore[union-attr]
        if time.monotonic() - self._warned_at >= _QUIET_SECONDS:
            self._warned_at = time.monotonic()
            sys.stderr.write(f"the log file {self.baseFilename} cannot be written: {problem}\n")


def _moment(record: logging.LogRecord) -> str:
    return (
        datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def _text(record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info and record.exc_info[1] is not None:
        text += f": {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
    return text


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{_moment(record)} {record.levelname.lower():7} {printable(_text(record))}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        kind = getattr(record, "kind", record.name)
        line = {"at": _moment(record), "level": record.levelname.lower(), "kind": kind, "text": _text(record)}
        return json.dumps(line)  # in ASCII: what a learner sent cannot forge a line


def log_to(command: typer.Context, path: Path | None, level: Level, format_: Format) -> Log | None:
    """Where reports go besides the terminal until the command ends, also the error that ends it."""
    return None if path is None else command.with_resource(logged(path, level, format_))


@contextlib.contextmanager
def logged(path: Path, level: Level, format_: Format) -> Iterator[Log]:
    """Where reports go besides the terminal during the block; what libraries log goes there too."""
    handler, reports, root = LogFile(path, format_), logging.getLogger(REPORTS), logging.getLogger()
    handler.setLevel(level.name)
    before = root.level, list(root.handlers)
    reports.propagate = False
    reports.addHandler(handler)
    reports.setLevel(logging.DEBUG)
    root.addHandler(handler)
    root.setLevel(min(logging.WARNING, handler.level))
    if logging.lastResort is not None and not before[1]:
        root.addHandler(logging.lastResort)  # warnings reach the terminal as they do without a log file
    try:
        yield lambda kind, text: reports.log(_LEVELS_OF_KINDS.get(kind, logging.INFO), "%s", text, extra={"kind": kind})
    finally:
        reports.removeHandler(handler)
        root.level, root.handlers = before
        handler.close()
