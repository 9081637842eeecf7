"""The bytes of a model between the wire and a file: threads process some while the next ones travel."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from metis.deployment.storage import storage
from metis.system import disk, threads

Bytes: TypeAlias = bytes | memoryview
_T = TypeVar("_T")

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of malloc.h


def in_background(work: Callable[..., _T], *arguments: object) -> Future[_T]:
    """Let a thread do it."""
    return threads().submit(work, *arguments)


def keep_buffers() -> None:
    """Let this process keep the memory of chunks that were freed, some 32 MB, for the next chunks.

    glibc would return it after each chunk and let the system clear new pages for the next: half of the time of sending.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, 16 << 20)
        mallopt(_ARENA_MAX, 2)  # of which each keeps as much; there would be one for each of many threads
        mallopt(_MMAP_THRESHOLD, 8 << 20)  # what is larger, a whole model say, comes and goes as before


class _Lane:
    def __init__(self, work: Callable[[Bytes], object]) -> None:
        self.work = work
        self.pieces: deque[Bytes] = deque()
        self.left = 0  # bytes that are not processed yet
        self.busy = False


class Intake:
    """Pieces of a model as they arrive: each function gets all of them in order, in a thread of its own."""

    def __init__(self, *works: Callable[[Bytes], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._lanes = [_Lane(work) for work in works]
        self._lock = threading.Lock()
        self._awaited: tuple[int, asyncio.Future[None]] | None = None  # until no more bytes than this are left
        self._problem: BaseException | None = None

    async def put(self, piece: Bytes, maximum: int = 0) -> None:
        """Pass on the next piece; returns when at most `maximum` bytes are left, or raises what a function raised."""
        for lane in self._lanes:
            with self._lock:
                lane.pieces.append(piece)
                lane.left += len(piece)
                idle, lane.busy = not lane.busy, True
            if idle:
                threads().submit(self._run, lane)
        await self._until(maximum)
        if self._problem is not None:
            raise self._problem

    async def finish(self) -> None:
        """Wait until every function has had every piece; raises what a function raised."""
        await self._until(0)
        if self._problem is not None:
            raise self._problem

    async def _until(self, maximum: int) -> None:
        with self._lock:
            waiting = None if self._left() <= maximum else self._loop.create_future()
            self._awaited = None if waiting is None else (maximum, waiting)
        if waiting is not None:
            await waiting

    async def end(self) -> None:
        """Wait for the functions, however they end: no file may be closed while they use it."""
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:
                await self._until(0)
                break
            except asyncio.CancelledError as again:  # a call may be cancelled more than once
                cancelled = again
        if cancelled is not None:
            raise cancelled

    def _left(self) -> int:
        return max(lane.left for lane in self._lanes)

    def _run(self, lane: _Lane) -> None:
        while True:
            with self._lock:
                if not lane.pieces:
                    lane.busy = False
                    return
                piece = lane.pieces.popleft()
            try:
                if self._problem is None:
                    lane.work(piece)
            except BaseException as problem:
                self._problem = problem
            awaited = None
            with self._lock:
                lane.left -= len(piece)
                if self._awaited is not None and self._left() <= self._awaited[0]:
                    (_, awaited), self._awaited = self._awaited, None
            del piece  # its memory is needed for the next one
            if awaited is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(_wake, awaited)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


async def read_ahead(path: Path, offset: int, end: int, size: int) -> AsyncGenerator[tuple[int, bytes], None]:
    """Offsets and bytes of a file between two of them, `size` at once; the next are read while the last are sent.

    The file is open only while it is read: one who does not take what is sent must not keep it open.
    """
    loop = asyncio.get_running_loop()

    def piece(offset: int) -> bytes:
        file = disk().open(path, os.O_RDONLY)
        try:
            return storage().read(file, min(size, max(0, end - offset)), offset)
        finally:
            disk().close(file)

    def read(offset: int) -> asyncio.Future[bytes]:
        return loop.run_in_executor(threads(), piece, offset)

    reading = read(offset)
    try:
        while data := await asyncio.shield(reading):
            reading = read(offset + len(data))
            yield offset, data
            offset += len(data)
    finally:
        await ended(reading)


async def ended(work: asyncio.Future[Any] | None) -> None:
    """Wait for it, however it ends: no file may be closed while it is used."""
    cancelled: asyncio.CancelledError | None = None
    while work is not None and not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as again:  # a call may be cancelled more than once
            cancelled = again
    if work is not None and not work.cancelled():
        work.exception()  # was raised already, or happened after the call had ended
    if cancelled is not None:
        raise cancelled


class IdleTimeout:
    """Raises a TimeoutError in the task that has entered when one `wait` lasts too long.

    As `asyncio.wait_for` around each, but without a new task and a new timer for every chunk of a model.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None  # None while nothing is waited for
        self._lost = False

    def __enter__(self) -> IdleTimeout:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._loop = task, asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._seconds, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._lost and isinstance(problem, asyncio.CancelledError):
            if hasattr(self._task, "uncancel"):  # since Python 3.11
                self._task.uncancel()
            raise asyncio.TimeoutError from problem

    async def wait(self, coming: Awaitable[_T]) -> _T:
        self._since = self._loop.time()
        try:
            return await coming
        finally:
            self._since = None

    def expire(self) -> None:
        """Do not wait any longer."""
        self._lost = True
        self._task.cancel()

    def _look(self) -> None:
        waited = 0.0 if self._since is None else self._loop.time() - self._since
        if waited >= self._seconds:
            self.expire()
        else:
            self._timer = self._loop.call_later(self._seconds - waited, self._look)
