"""What a process takes from its machine: the time, chance, threads, the disk, the network, child processes.

A deployment calls these functions instead of the modules behind them, so that a simulation of the whole system can put
its own machine in their place: `SYSTEM` holds the machine of the context that runs. Reading a file needs no seam;
whatever changes one goes through `disk()` or the methods of its path.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import os
import random
import secrets
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

_THREADS = ThreadPoolExecutor(max(4, os.cpu_count() or 1), "metis-bytes")
_KEEP_SIZE = 1  # of fallocate
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of malloc.h
_FALLOCATE: Any = None  # the function of the C library; False if it has none


Lock: TypeAlias = AbstractContextManager[Any]


class Clock:
    """The clocks of this machine."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Chance:
    """Random numbers that no seed determines."""

    def uniform(self, low: float, high: float) -> float:
        return random.uniform(low, high)

    def token(self, count: int) -> bytes:
        return secrets.token_bytes(count)


class Threads:
    """Where work is done beside the event loop."""

    def one(self, name: str) -> Executor:
        """A thread that does one thing after the other."""
        return ThreadPoolExecutor(1, name)

    def many(self) -> Executor:
        """The threads that all share."""
        return _THREADS

    def lock(self) -> Lock:
        """A lock that its holder may take again."""
        return threading.RLock()


class Disk:
    """What changes files, apart from the methods of a path."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags, mode)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def pread(self, descriptor: int, count: int, offset: int) -> bytes:
        return os.pread(descriptor, count, offset)

    def pread_cached(self, descriptor: int, buffer: memoryview, offset: int) -> bool:
        """Fill the buffer from memory alone; False if the disk would have to be waited for, or nobody knows."""
        try:
            return os.preadv(descriptor, [buffer], offset, os.RWF_NOWAIT) == len(buffer)
        except (AttributeError, OSError):  # another system, or another file system
            return False

    def pwrite(self, descriptor: int, data: bytes, offset: int) -> int:
        return os.pwrite(descriptor, data, offset)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def reserve(self, descriptor: int, size: int) -> None:
        """Find room for so many bytes now, where the system can; the file stays as long as it is."""
        global _FALLOCATE  # noqa: PLW0603  # found once
        if _FALLOCATE is None:
            _FALLOCATE = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", False) if os.name == "posix" else False
        if _FALLOCATE and _FALLOCATE(descriptor, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size)):
            number = ctypes.get_errno()
            if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):  # else the file system cannot
                raise OSError(number, os.strerror(number))

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def file(self, descriptor: int, mode: str = "wb") -> Any:
        """A file to write to, which closes the descriptor."""
        return os.fdopen(descriptor, mode)

    def lock(self, descriptor: int) -> bool:
        """Take the lock of a file for this process; whether that was possible."""
        if sys.platform == "win32":  # without such locks it is up to the user not to use a folder twice
            return True
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def connect(self, path: Path) -> sqlite3.Connection:
        """An SQLite database in which each statement is a transaction."""
        return sqlite3.connect(path, timeout=1, isolation_level=None, check_same_thread=False)

    def space(self, folder: Path) -> tuple[int, int]:
        """Bytes of the file system that holds this folder: all, and those that are free."""
        usage = shutil.disk_usage(folder)
        return usage.total, usage.free

    def end_process(self, code: int, text: str) -> NoReturn:
        """At once, without another write."""
        os.write(2, text.encode())
        os._exit(code)


@dataclass(frozen=True)
class System:
    """One machine."""

    clock: Clock = field(default_factory=Clock)
    chance: Chance = field(default_factory=Chance)
    threads: Threads = field(default_factory=Threads)
    disk: Disk = field(default_factory=Disk)
    network: Any = None  # with the functions of grpc.aio; None for these themselves
    spawn: Callable[..., Any] = asyncio.create_subprocess_exec


REAL = System()
SYSTEM: ContextVar[System] = ContextVar("system", default=REAL)


def monotonic() -> float:
    """Seconds that never run backwards."""
    return SYSTEM.get().clock.monotonic()


def unix_time() -> float:
    """Seconds since 1970, as this machine believes."""
    return SYSTEM.get().clock.time()


def utc_now() -> datetime:
    """The date and time that this machine believes it is."""
    return datetime.fromtimestamp(unix_time(), timezone.utc)


def sleep(seconds: float) -> None:
    """Keep this thread waiting."""
    SYSTEM.get().clock.sleep(seconds)


def uniform(low: float, high: float) -> float:
    """A random number between the two."""
    return SYSTEM.get().chance.uniform(low, high)


def token_hex(count: int) -> str:
    """So many random bytes, in hexadecimal digits."""
    return SYSTEM.get().chance.token(count).hex()


def random_bytes(count: int) -> bytes:
    """So many bytes that nobody can guess."""
    return SYSTEM.get().chance.token(count)


def one_thread(name: str) -> Executor:
    """A thread of its own, which does one thing after the other."""
    return SYSTEM.get().threads.one(name)


def threads() -> Executor:
    """The threads that all share."""
    return SYSTEM.get().threads.many()


def new_lock() -> Lock:
    """A lock between threads, which its holder may take again."""
    return SYSTEM.get().threads.lock()


def disk() -> Disk:
    """The disk of the process that runs."""
    return SYSTEM.get().disk


async def spawn(*command: str, **options: Any) -> Any:
    """Start a child process, as `asyncio.create_subprocess_exec` does."""
    return await SYSTEM.get().spawn(*command, **options)


def keep_what_is_loaded() -> None:
    """Spare the collector of garbage what a service has made until it begins to serve: all of it stays.

    With a thousand learners it would otherwise look through it many times a round.
    """
    gc.freeze()
    gc.set_threshold(5_000, 20, 20)


def keep_freed_memory(at_most: int, *, pieces: int, arenas: int | None = None) -> None:
    """Let this process keep so many bytes that were freed, in pieces smaller than `pieces`, for what comes next.

    glibc would return them to the system, which clears new pages for the next piece: that can take as long as the work.
    Threads share so many arenas, of which each keeps as much; there would be one for each of many threads.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library, or Windows
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, at_most)
        mallopt(_MMAP_THRESHOLD, pieces)
        if arenas is not None:
            mallopt(_ARENA_MAX, arenas)
