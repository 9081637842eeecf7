"""Bytes of a model in threads: order, backpressure, errors, cancellation, and waits that end."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import chunk_front, part_front, write_chunk, write_part
from metis.deployment.wire.transfer import Bytes, IdleTimeout, Intake, read_ahead
from metis.system import Disk

HANG = 600.0


def test_a_thread_gets_every_piece_in_order_and_several_at_once() -> None:
    async def scene() -> None:
        seen: list[list[bytes]] = []
        begun, free = threading.Event(), threading.Event()

        def take(pieces: Sequence[Bytes]) -> None:
            begun.set()
            assert free.wait(HANG)
            seen.append([bytes(piece) for piece in pieces])

        intake = Intake(take, together=40)
        pieces = [bytes([number]) * 10 for number in range(50)]
        for piece in pieces[:4]:
            await intake.put(piece, 1000)
        assert await asyncio.to_thread(begun.wait, HANG)
        for piece in pieces[4:]:
            await intake.put(piece, 1000)
        free.set()
        await intake.finish()
        assert seen == [pieces[:4], pieces[4:]]  # while some are worked on, the others come together

    asyncio.run(asyncio.wait_for(scene(), HANG))


def test_few_bytes_are_worked_on_soon_too() -> None:
    """On a slow line, or if nothing more comes: a crash would lose what is in memory only."""

    async def scene() -> None:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        intake = Intake(lambda pieces: loop.call_soon_threadsafe(done.set))
        await intake.put(b"some", 1000)
        await done.wait()
        await intake.end()

    asyncio.run(asyncio.wait_for(scene(), HANG))


def test_who_sends_faster_than_the_work_waits() -> None:
    async def scene() -> None:
        free, taken = threading.Semaphore(0), []

        def slow(pieces: Sequence[Bytes]) -> None:
            for piece in pieces:
                assert free.acquire(timeout=HANG)
                taken.append(len(piece))

        intake = Intake(slow, together=10)
        for _ in range(3):
            await asyncio.wait_for(intake.put(bytes(10), 30), HANG)
        fourth = asyncio.ensure_future(intake.put(bytes(10), 30))
        await asyncio.sleep(0.05)
        assert not fourth.done() and not taken
        free.release(4)
        await asyncio.wait_for(fourth, HANG)
        assert taken
        await asyncio.wait_for(intake.finish(), HANG)
        assert taken == [10] * 4

    asyncio.run(scene())


@pytest.mark.parametrize("at_the_end", [False, True])
def test_what_a_work_raises_is_raised_to_whoever_sends_and_nothing_is_worked_on_any_more(at_the_end: bool) -> None:
    async def scene() -> None:
        written = []

        def write(pieces: Sequence[Bytes]) -> None:
            for piece in pieces:
                if len(written) == 1:
                    raise OSError(28, "No space left on device")
                written.append(piece)

        intake = Intake(write)
        with pytest.raises(OSError, match="No space left"):
            for _ in range(2 if at_the_end else 100):
                await intake.put(bytes(10), 1000 if at_the_end else 0)
            await intake.finish()
        await intake.end()
        assert len(written) == 1

    asyncio.run(asyncio.wait_for(scene(), HANG))


def test_a_call_that_is_cancelled_again_and_again_waits_until_no_work_goes_on() -> None:
    async def scene() -> None:
        free, done = threading.Event(), []

        def write(pieces: Sequence[Bytes]) -> None:
            assert free.wait(HANG)
            done.extend(pieces)

        async def call() -> None:
            intake = Intake(write)
            try:
                await intake.put(b"first", 100)
                await intake.put(b"second", 100)
                await intake.finish()
            finally:
                await intake.end()

        calling = asyncio.ensure_future(call())
        for _ in range(3):
            await asyncio.sleep(0.02)
            calling.cancel()
        await asyncio.sleep(0.02)
        assert not calling.done()
        free.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(calling, HANG)
        assert done == [b"first", b"second"]  # a download goes on behind what came

    asyncio.run(scene())


@pytest.mark.parametrize("in_memory", ["always", "never", "at first"])
@pytest.mark.parametrize("front", [chunk_front, part_front])
def test_a_file_is_read_ahead_from_any_byte_in_pieces_of_any_size(
    front: Callable[[int, int], bytes], in_memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is in memory or a thread waits for the disk: the same messages, as protobuf writes them."""
    content = bytes(range(256)) * 10
    (tmp_path / "model").write_bytes(content)
    asked: list[int] = []

    def cached(self: Disk, descriptor: int, buffer: memoryview, offset: int) -> bool:
        asked.append(offset)
        here = in_memory == "always" or (in_memory == "at first" and len(asked) % 3 > 0)
        return here and os.preadv(descriptor, [buffer], offset) == len(buffer)

    monkeypatch.setattr(Disk, "pread_cached", cached)

    async def scene() -> None:
        for offset, end, size in ((0, 2560, 7), (1, 2560, 10_000), (255, 900, 100), (2560, 2560, 5), (2565, 9000, 5)):
            found = [piece async for piece in read_ahead(tmp_path / "model", offset, end, size, front)]
            assert b"".join(piece.data for piece in found) == content[offset:end]
            for piece in found:
                assert len(piece.data) <= size and piece.offset == offset
                chunk = pb.Chunk(offset=offset, data=bytes(piece.data))
                if front is chunk_front:
                    assert write_chunk(piece) == chunk.SerializeToString()
                else:
                    assert write_part(piece) == pb.UploadPart(chunk=chunk).SerializeToString()
                offset += len(piece.data)

    asyncio.run(asyncio.wait_for(scene(), HANG))
    assert asked


def test_what_is_in_memory_is_read_without_waiting_for_the_disk(tmp_path: Path) -> None:
    """By the real system, where it can tell."""
    (tmp_path / "model").write_bytes(bytes(range(100)))
    descriptor, buffer = os.open(tmp_path / "model", os.O_RDONLY), bytearray(10)
    try:
        if Disk().pread_cached(descriptor, memoryview(buffer), 20):
            assert buffer == bytes(range(20, 30))
        assert not Disk().pread_cached(descriptor, memoryview(buffer), 95)  # beyond its end
    finally:
        os.close(descriptor)


def test_room_is_found_before_the_bytes_come(tmp_path: Path) -> None:
    """The file stays as long as it is, and what is appended begins at its end."""
    with (tmp_path / "model").open("a+b", buffering=0) as file:
        file.write(b"begun")
        Disk().reserve(file.fileno(), 1 << 20)
        assert os.fstat(file.fileno()).st_size == 5
        file.write(b" and ended")
    assert (tmp_path / "model").read_bytes() == b"begun and ended"


def test_patience_ends_with_one_long_wait_but_not_with_many_short_ones() -> None:
    async def scene() -> None:
        with IdleTimeout(0.2) as idle_timeout:
            for _ in range(10):
                await idle_timeout.wait(asyncio.sleep(0.05))
                await asyncio.sleep(0.05)  # nothing is waited for meanwhile
            await asyncio.sleep(0.4)
            with pytest.raises(asyncio.CancelledError):
                await idle_timeout.wait(asyncio.sleep(HANG))
                raise AssertionError
        with pytest.raises(asyncio.TimeoutError), IdleTimeout(0.05) as idle_timeout:
            await idle_timeout.wait(asyncio.sleep(HANG))
        await asyncio.sleep(0)  # the task itself goes on

    asyncio.run(asyncio.wait_for(scene(), HANG))


def test_a_task_that_others_cancel_is_not_out_of_patience() -> None:
    async def scene() -> None:
        async def call() -> None:
            with IdleTimeout(HANG) as idle_timeout:
                await idle_timeout.wait(asyncio.sleep(HANG))

        calling = asyncio.ensure_future(call())
        await asyncio.sleep(0.02)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    asyncio.run(asyncio.wait_for(scene(), HANG))
