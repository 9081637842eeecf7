"""The audit log `audit.jsonl`: who was let in, what was asked for and done, and which model went to whom.

One JSON object per line; each carries the SHA-256 of the line before it, so that no line can be changed, left out or
moved without all later ones showing it. A line is on the disk when `flushed` returns.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metis.deployment.controller.disk import writing
from metis.errors import DataError, DiskFull
from metis.files import sync
from metis.system import disk, one_thread, utc_now

AUDIT = "audit.jsonl"
FIRST = "0" * 64  # what the first line carries
MAX_LINE = 1 << 16
_MAX_WAITING = 10_000  # lines that wait for room on a full disk; later ones are counted and left out
_MAX_TEXT = 500
_MAX_KEYS = 10_000


def line_hash(line: bytes) -> str:
    """Of one line, without its end."""
    return hashlib.sha256(line).hexdigest()


class AuditLog:
    """Appends to the log of one state folder; one controller at a time holds the folder."""

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self._path, self._durable = path, durable
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        self._left_out = 0
        self._latest: dict[str, object] = {}
        self._flushing: Future[bool] | None = None
        self._file = disk().open(path, os.O_RDWR | os.O_CREAT, 0o600)
        torn = self._recover()
        if durable:
            sync(path.parent)
        self._thread = one_thread("metis-audit")
        if torn:
            self.note("repaired", bytes_cut=torn, text="the last line was incomplete: the machine or process had ended")

    def _recover(self) -> int:
        """Find the end of the chain; returns how many bytes of an incomplete line were cut off."""
        self.lines, self.head = 0, FIRST
        size = os.fstat(self._file).st_size
        whole = self._first_zero(size)
        start = max(0, whole - 2 * MAX_LINE)
        tail = disk().pread(self._file, whole - start, start)
        tail = tail[: tail.rfind(b"\n") + 1]
        self._end = end = start + len(tail)
        with suppress(DiskFull), writing(self._path):
            if end < size:
                disk().truncate(self._file, end)
            # After a failed write the system may show what it never wrote, and call it written: write it again.
            self._write(tail, start)
        if tail:
            last = tail[:-1].rpartition(b"\n")[2]
            self.head = line_hash(last)
            with suppress(ValueError, KeyError, TypeError):  # a damaged one shows when the chain is verified
                self.lines = int(json.loads(last)["n"])
        return size - end

    def _first_zero(self, size: int) -> int:
        """Where the first byte is that no line has: after a loss of power what was not synced may be missing."""
        for at in range(0, size, 1 << 20):
            if (found := disk().pread(self._file, 1 << 20, at).find(b"\0")) >= 0:
                return at + found
        return size

    def note(self, kind: str, **facts: Any) -> None:
        """Append a line soon; never waits for the disk."""
        with self._lock:
            if len(self._waiting) >= _MAX_WAITING:
                self._left_out += 1
                return
            if self._left_out:
                missing, self._left_out = self._left_out, 0
                self._append("left_out", {"lines": missing, "text": "the disk was full"})
            self._append(kind, facts)
            if self._flushing is None or self._flushing.done():
                self._flushing = self._thread.submit(self._flush)

    def note_change(self, key: str, value: object, kind: str, **facts: Any) -> None:
        """Append a line unless the latest one for this key was for the same value."""
        if self._latest.get(key) != value:
            if len(self._latest) >= _MAX_KEYS:
                self._latest.clear()
            self._latest[key] = value
            self.note(kind, **facts)

    def _append(self, kind: str, facts: dict[str, Any]) -> None:
        self.lines += 1
        at = utc_now().isoformat(timespec="milliseconds")
        known = {name: _short(value) for name, value in facts.items() if value not in (None, "")}
        record = {"n": self.lines, "at": at, "kind": kind, **known, "previous": self.head}
        line = json.dumps(record, separators=(",", ":"), ensure_ascii=True, default=str).encode()
        self.head = line_hash(line)
        self._waiting.append(line)

    def _flush(self) -> bool:
        """In the thread: write all that waits; what finds no room on the disk stays and is tried at the next line."""
        while True:
            with self._lock:
                lines = list(_first_lines(self._waiting))
                if not lines:
                    return not self._left_out
            data = b"".join(line + b"\n" for line in lines)
            try:
                with writing(self._path):
                    self._write(data, self._end)
            except DiskFull:
                with suppress(OSError):
                    disk().truncate(self._file, self._end)
                return False
            self._end += len(data)
            with self._lock:
                del self._waiting[: len(lines)]

    def _write(self, data: bytes, offset: int) -> None:
        written = 0
        while written < len(data):
            written += disk().pwrite(self._file, data[written:], offset + written)
        if self._durable:
            disk().fsync(self._file)

    async def flushed(self) -> bool:
        """Wait until every line noted so far is on the disk; False if it is full and some are not."""
        return await asyncio.wrap_future(self._thread.submit(self._flush))

    def close(self) -> None:
        self._thread.submit(self._flush)
        self._thread.shutdown(wait=True)
        disk().close(self._file)


def _first_lines(waiting: list[bytes]) -> Iterator[bytes]:
    """Not more at once than a start looks at, and writes again."""
    size = 0
    for line in waiting:
        if size and size + len(line) + 1 > 2 * MAX_LINE:
            return
        size += len(line) + 1
        yield line


def _short(value: Any) -> Any:
    return value[:_MAX_TEXT] if isinstance(value, str) else value


# --- verifying ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One line of a log, and what is wrong with it."""

    number: int
    record: dict[str, Any]
    hash: str
    problem: str | None = None


def read_audit(path: Path) -> Iterator[Line]:
    """All lines in order; the chain is checked on the way, and reading ends with the first line that is broken."""
    try:
        with path.open("rb") as file:
            previous = FIRST
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), start=1):
                problem, record = None, {}
                if not line.endswith(b"\n"):
                    yield Line(number, {}, "", "it is not complete: more may have been written behind it, or cut off")
                    return
                try:
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise ValueError
                    if record["n"] != number:
                        problem = f"it says that it is line {record['n']}: lines were left out, added or moved"
                    elif record["previous"] != previous:
                        problem = f"it does not continue line {number - 1}, or that line was changed"
                except (ValueError, KeyError, TypeError):
                    problem = "it is not a line of an audit log"
                previous = line_hash(line[:-1])
                yield Line(number, record, previous, problem)
                if problem is not None:
                    return
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror}") from problem
