"""The bytes of a model between the wire and a file: threads process some while the next ones travel."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from metis.deployment.storage import storage
from metis.deployment.wire.chunks import Piece, chunk_front
from metis.system import disk, keep_freed_memory, threads

Bytes: TypeAlias = bytes | memoryview
_T = TypeVar("_T")

_TOGETHER = 4 << 20  # bytes that are worth a thread
_WAIT_SECONDS = 0.25  # after which fewer are
_BUFFER = bytearray()


def in_background(work: Callable[..., _T], *arguments: object) -> Future[_T]:
    """Let a thread do it."""
    return threads().submit(work, *arguments)


def keep_buffers() -> None:
    """Let this process keep the memory of chunks that were freed, some 32 MB, for the next chunks.

    Half of the time of sending would go into new pages. What is larger, a whole model say, comes and goes as before.
    """
    keep_freed_memory(16 << 20, pieces=8 << 20, arenas=2)


class Intake:
    """Pieces of a model as they arrive: a thread gets them in order, several at once.

    A thread for each piece would cost more than what is done with it.
    """

    def __init__(self, work: Callable[[Sequence[Bytes]], object], together: int = _TOGETHER) -> None:
        self._loop = asyncio.get_running_loop()
        self._work, self._together = work, together
        self._lock = threading.Lock()
        self._pieces: list[Bytes] = []  # that no thread has yet
        self._left = self._waiting = 0  # bytes that are not processed yet; of them those in `_pieces`
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._awaited: tuple[int, asyncio.Future[None]] | None = None  # until no more bytes than this are left
        self._problem: BaseException | None = None

    async def put(self, piece: Bytes, maximum: int = 0) -> None:
        """Pass on the next piece; returns when at most `maximum` bytes are left, or raises what the work raised."""
        with self._lock:
            self._pieces.append(piece)
            self._left += len(piece)
            self._waiting += len(piece)
        await self._until(maximum, self._together)
        if self._problem is not None:
            raise self._problem

    async def finish(self) -> None:
        """Wait until every piece was worked on; raises what the work raised."""
        await self._until(0)
        if self._problem is not None:
            raise self._problem

    async def _until(self, maximum: int, together: int = 1) -> None:
        with self._lock:
            waiting = None if self._left <= maximum else self._loop.create_future()
            self._awaited = None if waiting is None else (maximum, waiting)
            enough = waiting is not None or self._waiting >= together
        if enough:
            self._start()
        elif self._pieces and self._timer is None:  # on a slow line a crash would lose what is in memory
            self._timer = self._loop.call_later(_WAIT_SECONDS, self._start)
        if waiting is not None:
            await waiting

    def _start(self) -> None:
        """Have a thread work on what is here."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            start = not self._busy and bool(self._pieces)
            self._busy = self._busy or start
        if start:
            threads().submit(self._run)

    async def end(self) -> None:
        """Wait for the work, however it ends: no file may be closed while it is used."""
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:
                await self._until(0)
                break
            except asyncio.CancelledError as again:  # a call may be cancelled more than once
                cancelled = again
        if cancelled is not None:
            raise cancelled

    def _run(self) -> None:
        while True:
            with self._lock:
                pieces, length = self._pieces, self._waiting
                if not pieces:
                    self._busy = False
                    return
                self._pieces, self._waiting = [], 0
            try:
                if self._problem is None:
                    self._work(pieces)
            except BaseException as problem:
                self._problem = problem
            awaited = None
            with self._lock:
                self._left -= length
                if self._awaited is not None and self._left <= self._awaited[0]:
                    (_, awaited), self._awaited = self._awaited, None
            del pieces  # their memory is needed for the next ones
            if awaited is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(_wake, awaited)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


async def read_ahead(
    path: Path, offset: int, end: int, size: int, front: Callable[[int, int], bytes] = chunk_front
) -> AsyncGenerator[Piece, None]:
    """The pieces of a file between two offsets, `size` bytes each, with what is in front of them on the wire.

    What is in memory is read at once; from where the disk must be waited for, a thread reads the next piece while the
    last one is sent. The file is open only while it is read: one who does not take what is sent must not keep it open.
    """
    loop = asyncio.get_running_loop()

    def read(offset: int) -> bytes:
        file = disk().open(path, os.O_RDONLY)
        try:
            return storage().read(file, min(size, max(0, end - offset)), offset)
        finally:
            disk().close(file)

    def in_thread(offset: int) -> asyncio.Future[bytes]:
        return loop.run_in_executor(threads(), read, offset)

    reading: asyncio.Future[bytes] | None = None
    try:
        while offset < end:
            piece = None if reading is not None else _read_cached(path, offset, min(size, end - offset), front)
            if piece is None:
                reading = in_thread(offset) if reading is None else reading
                data = await asyncio.shield(reading)
                if not data:
                    return
                piece, reading = Piece(offset, data), in_thread(offset + len(data))
            yield piece
            offset += len(piece.data)
    finally:
        await ended(reading)


def _read_cached(path: Path, offset: int, length: int, front: Callable[[int, int], bytes]) -> Piece | None:
    """The piece of a file if it is in memory, without a thread; only in the event loop, for there is one buffer."""
    head = front(offset, length)
    buffer = _buffer(len(head) + length)
    file = disk().open(path, os.O_RDONLY)
    try:
        if not storage().read_cached(file, buffer[len(head) :], offset):
            return None
    finally:
        disk().close(file)
    buffer[: len(head)] = head
    message = bytes(buffer)
    return Piece(offset, memoryview(message)[len(head) :], message)


def _buffer(length: int) -> memoryview:
    """Memory that stays in the processor's cache."""
    if len(_BUFFER) < length:
        _BUFFER.extend(bytes(length - len(_BUFFER)))
    return memoryview(_BUFFER)[:length]


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
