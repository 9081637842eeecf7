"""The clock of a run: its seconds, and the file that carries them over a restart."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import threading
from pathlib import Path

from metis.system import disk, monotonic, unix_time

TICK = 0.5  # seconds between two ticks: a missed deadline or an expired lease is noticed at most this late
CLOCK = "clock"  # file with the run, its clock and the time of day at the latest tick, and a checksum
_BYTES = 120  # length of its line, so that it can be overwritten in place
_STALL = 1.0  # a gap between ticks that is longer by this means that the process was suspended


class RunClock:
    """Seconds of the run; it stands still until the first task, in a pause and while the controller does not run."""

    def __init__(self, begin: float) -> None:
        self._begin, self._start = begin, math.inf
        self._seen = monotonic()
        self._lost = 0.0
        self._held_since: float | None = None
        self._lock = threading.Lock()

    def go(self) -> None:
        with self._lock:
            self._start, self._held_since = min(self._start, monotonic()), None

    def hold(self) -> None:
        """Stand still until `go`."""
        with self._lock:
            if self._held_since is None:
                self._held_since = moment = self._notice()
                self._begin, self._start = self._begin + max(0.0, moment - self._start), math.inf

    def held_for(self) -> float:
        """Seconds since the last call, or since `hold`, in which it stood still while learners worked on."""
        with self._lock:
            if self._held_since is None:
                return 0.0
            moment = monotonic()
            seconds, self._held_since = moment - self._held_since, moment
            return seconds

    def now(self) -> float:
        # A model may arrive before the first tick after a suspension, and is not late either.
        with self._lock:
            return self._begin + max(0.0, self._notice() - self._start)

    def tick(self) -> float:
        """Note that the process is running; returns for how long it was not since the last tick."""
        with self._lock:
            self._seen = self._notice()
            lost, self._lost = self._lost, 0.0
            return lost

    def _notice(self) -> float:
        moment = monotonic()
        gap = moment - self._seen - TICK
        if gap >= _STALL:
            self._start += gap
            self._lost += gap if self._held_since is None else 0.0
            self._seen = moment
        return moment


def write_tick(path: Path, run: str, seconds: float) -> None:
    """Save how far the run's clock has come; not synced, since after a loss of power the journal is enough."""
    text = f"{run} {seconds!r} {unix_time()!r}"
    with contextlib.suppress(OSError):
        # In place: a file that is truncated and rewritten is flushed to the disk at once, and the event loop waits.
        file = disk().open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            disk().pwrite(file, f"{text} {_checksum(text)}".ljust(_BYTES).encode() + b"\n", 0)
        finally:
            disk().close(file)


def read_tick(path: Path, run: str) -> tuple[float, float]:
    """Where the clock of the last process on this folder ended, and how many seconds ago."""
    try:
        *words, checksum = path.read_text("utf-8").split()
        if words[0] == run and checksum == _checksum(" ".join(words)):
            return float(words[1]), max(0.0, unix_time() - float(words[2]))
    except (OSError, ValueError, IndexError):
        pass  # there was none, or it is damaged
    return 0.0, 0.0


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
