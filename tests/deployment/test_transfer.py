"""Bytes of a model in threads: order, backpressure, errors, cancellation, and waits that end."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from metis.deployment.wire.transfer import IdleTimeout, Intake, read_ahead

HANG = 600.0


def test_every_work_gets_every_piece_in_order_and_beside_the_others() -> None:
    together = threading.Barrier(2, timeout=HANG)

    async def scene() -> None:
        seen: tuple[list[bytes], list[bytes]] = ([], [])

        def work(which: int) -> None:
            def take(piece: bytes | memoryview) -> None:
                together.wait()  # one after the other, they would wait for ever
                time.sleep(0.0001 * which)
                seen[which].append(bytes(piece))

            return take  # type: ignore[return-value]

        intake = Intake(work(0), work(1))  # type: ignore[arg-type]
        pieces = [bytes([number]) * 10 for number in range(50)]
        for piece in pieces:
            await intake.put(piece, 40)
        await intake.finish()
        assert list(seen) == [pieces, pieces]

    asyncio.run(asyncio.wait_for(scene(), HANG))


def test_whoever_sends_faster_than_the_slowest_work_waits() -> None:
    async def scene() -> None:
        free, taken = threading.Semaphore(0), []

        def slow(piece: bytes | memoryview) -> None:
            assert free.acquire(timeout=HANG)
            taken.append(len(piece))

        intake = Intake(len, slow)
        for _ in range(3):
            await asyncio.wait_for(intake.put(bytes(10), 30), HANG)
        fourth = asyncio.ensure_future(intake.put(bytes(10), 30))
        await asyncio.sleep(0.05)
        assert not fourth.done() and not taken
        free.release()
        await asyncio.wait_for(fourth, HANG)
        assert taken == [10]
        free.release(3)
        await asyncio.wait_for(intake.finish(), HANG)
        assert taken == [10] * 4

    asyncio.run(scene())


@pytest.mark.parametrize("at_the_end", [False, True])
def test_what_a_work_raises_is_raised_to_whoever_sends_and_nothing_is_worked_on_any_more(at_the_end: bool) -> None:
    async def scene() -> None:
        written = []

        def write(piece: bytes | memoryview) -> None:
            if len(written) == 1:
                raise OSError(28, "No space left on device")
            written.append(piece)

        intake = Intake(len, write)
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

        def write(piece: bytes | memoryview) -> None:
            assert free.wait(HANG)
            done.append(piece)

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


def test_a_file_is_read_ahead_from_any_byte_in_pieces_of_any_size(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10
    (tmp_path / "model").write_bytes(content)

    async def scene() -> None:
        for offset, end, size in ((0, 2560, 7), (1, 2560, 10_000), (255, 900, 100), (2560, 2560, 5), (2565, 9000, 5)):
            found = [piece async for piece in read_ahead(tmp_path / "model", offset, end, size)]
            assert b"".join(data for _, data in found) == content[offset:end]
            assert all(len(data) <= size for _, data in found)
            assert [offset for offset, _ in found] == [
                offset + sum(len(data) for _, data in found[:number]) for number in range(len(found))
            ]

    asyncio.run(asyncio.wait_for(scene(), HANG))


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
