"""Fault matrix C1, what happens to an update on its way: cut, doubled, reordered, changed, or not acknowledged."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import metis.deployment.controller.blobs as blobs_module
from deployment import killed_controller
from deployment.faults import (
    HANG,
    community_hash,
    federation,
    files,
    finish,
    in_order,
    journaled,
    play,
    refusal,
    status_of,
    traced,
    tried,
)
from deployment.federations import Served, served
from deployment.proxy import Proxy
from deployment.scripted_learner import (
    LAYOUT,
    HonestLearner,
    ScriptedLearner,
    chunk,
    end,
    local_model,
    move_towards,
    parts,
)
from metis.core import policies
from metis.core.events import CommunityPublished, LearnerSetAside, UpdateCommitted
from metis.core.model import Layout, TensorSpec
from metis.deployment.controller.blobs import Blobs
from metis.deployment.controller.upload import in_thread
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.model_mac import checker
from metis.deployment.wire.transfer import ended
from metis.errors import StateError

TESTS = Path(__file__).parents[1]
_CODE = grpc.StatusCode

# --- row 2: killed between commit and receipt ---------------------------------------------------------


async def _three_learners(address: str, layout: Layout) -> list[HonestLearner]:
    learners = [HonestLearner(f"l{index}", address, layout, train=move_towards(index)) for index in range(3)]
    await asyncio.gather(*(learner.run() for learner in learners))
    return learners


def test_an_update_that_was_committed_but_not_acknowledged_is_there_already(tmp_path: Path) -> None:
    """C1 row 2: the controller is killed between commit and receipt; the learner sends again and hears ALREADY."""
    updates = 5  # in the middle of the second of four rounds
    terms, policy, stop = killed_controller.TERMS, killed_controller.POLICY, killed_controller.STOP

    async def unharmed() -> str:
        async with served(tmp_path / "unharmed", policy, stop, terms=terms) as here:
            await _three_learners(here.address, here.process.layout)
            await here.serving
            return community_hash(here)

    async def scene() -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
        script = [sys.executable, str(TESTS / "deployment" / "killed_controller.py"), str(tmp_path / "killed")]
        child = await asyncio.create_subprocess_exec(
            *script, str(updates), env=environment, stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        address = (await child.stdout.readline()).decode().strip()
        learning = asyncio.create_task(_three_learners(address, LAYOUT))
        assert await child.wait() == -signal.SIGKILL
        tried()
        async with served(tmp_path / "killed", policy, stop, terms=terms, listen=address) as here:
            committed = journaled(here)
            assert len(committed) == updates
            learners = await learning
            assert await here.serving
            answers = Counter((task, receipt.verdict) for learner in learners for task, receipt in learner.receipts)
            assert answers[committed[-1], pb.Receipt.ALREADY] == 1
            assert answers[committed[-1], pb.Receipt.COMMITTED] == 0
            assert sorted(journaled(here)) == list(range(12))  # 3 learners, 4 rounds, each update once
            assert len(traced(here, UpdateCommitted)) == 12
            assert community_hash(here) == await unharmed()

    play(scene())


# --- rows 4 and 9: uploads that end too early -----------------------------------------------------------

LARGE = Layout((TensorSpec("w", (64, 1000)),))
PIECE = 16_000  # bytes: a sixteenth of a large model


async def _nothing_came(here: Served, before: set[str]) -> None:
    """No update, and what was received of it is gone."""
    assert journaled(here) == []
    await here.until(lambda: files(here) == before)


def test_an_upload_without_its_end_never_was(tmp_path: Path) -> None:
    """C1 row 9: a clean end of the stream after every sixteenth, also after the last byte, is not a model."""

    async def scene() -> None:
        async with federation(tmp_path, layout=LARGE) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            model, before = local_model(layout=LARGE), files(here)
            for count in range(17):
                tried()
                pieces = [chunk(offset, model[offset : offset + PIECE]) for offset in range(0, count * PIECE, PIECE)]
                code, reason = await refusal(learner, pb.UploadPart(header=learner.header(task.number)), *pieces)
                assert code == _CODE.ABORTED
                assert f"after {count * PIECE} of {len(model)} bytes" in reason
            await _nothing_came(here, before)
            assert (await learner.hand_in(task.number, model)).verdict == pb.Receipt.COMMITTED

    play(scene())


def test_an_upload_that_is_called_off_never_was(tmp_path: Path) -> None:
    """C1 row 4: the call is cancelled after every sixteenth; the next whole one counts."""

    async def scene() -> None:
        async with federation(tmp_path, layout=LARGE) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            model, before = local_model(layout=LARGE), files(here)
            for count in range(17):
                tried()
                call = learner.stub.upload(metadata=learner.metadata)
                await call.write(pb.UploadPart(header=learner.header(task.number)))
                for offset in range(0, count * PIECE, PIECE):
                    await call.write(chunk(offset, model[offset : offset + PIECE]))
                call.cancel()
            await _nothing_came(here, before)
            assert (await learner.hand_in(task.number, model)).verdict == pb.Receipt.COMMITTED

    play(scene())


def test_an_upload_whose_connection_is_cut_never_was(tmp_path: Path) -> None:
    """C1 rows 4 and 9: the connection is cut after every sixteenth of the bytes, in the middle of chunks too."""

    async def scene() -> None:
        async with federation(tmp_path, layout=LARGE) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            model, before = local_model(layout=LARGE), files(here)
            for count in range(16):
                tried()
                limit = 200 + count * PIECE + (count % 3) * 77
                with Proxy(here.address) as proxy:
                    proxy.up.cut_at = limit
                    async with here.scripted(address=proxy.address) as cut_off:
                        upload = parts(learner.header(task.number), model, size=PIECE * 3 // 4)
                        code, _ = await status_of(cut_off.upload(upload))
                    assert code in (_CODE.UNAVAILABLE, _CODE.INTERNAL)  # as the learner's own gRPC calls it
            await _nothing_came(here, before)
            assert (await learner.hand_in(task.number, model)).verdict == pb.Receipt.COMMITTED

    play(scene())


def test_an_upload_that_is_called_off_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C1 row 4: the learner dies while its model is given its name on the disk; nobody takes the file away there."""
    adopt, lost = Blobs.adopt, []

    def slowly(self: Blobs, path: Path, *arguments: Any) -> None:
        time.sleep(0.1)
        adopt(self, path, *arguments)

    def failed(path: Path, problem: object) -> None:
        lost.append((path, problem))
        raise OSError(f"{path}: {problem}")

    async def scene() -> None:
        async with federation(tmp_path) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            monkeypatch.setattr(Blobs, "adopt", slowly)
            monkeypatch.setattr(blobs_module, "end_process", failed)  # would end this process
            for delay in (0.02, 0.05, 0.08):
                tried()
                call = learner.stub.upload(parts(learner.header(task.number), local_model()), metadata=learner.metadata)
                await here.until(lambda: any(name.startswith("tmp.") for name in files(here)))
                await asyncio.sleep(delay)
                call.cancel()
                await here.until(lambda: not any(name.startswith("tmp.") for name in files(here)))
            monkeypatch.undo()
            assert (await learner.hand_in(task.number)).verdict in (pb.Receipt.COMMITTED, pb.Receipt.ALREADY)
            assert journaled(here) == [task.number]
        assert not lost

    play(scene())


def test_the_writing_thread_is_waited_for_however_often_a_call_is_called_off() -> None:
    """C1 row 4: a call that is cancelled again while it waits still does not take the file away."""

    async def scene() -> None:
        free = threading.Event()
        writing = in_thread(free.wait, HANG)
        call = asyncio.create_task(ended(writing))
        for _ in range(3):
            await asyncio.sleep(0.01)
            call.cancel()
        tried()
        await asyncio.sleep(0.01)
        assert not call.done()
        free.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert writing.done()

    play(scene())


_KILLED_LEARNER = """
import os, signal, sys, grpc
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.protocol import UPLOAD

address, run, task = sys.argv[1:]

def half():
    yield pb.UploadPart(header=pb.UploadHeader(run=run, task=int(task), steps=1, bytes=256_000))
    for offset in range(0, 128_000, 16_000):
        yield pb.UploadPart(chunk=pb.Chunk(offset=offset, data=bytes(16_000)))
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)

channel = grpc.insecure_channel(address)
upload = channel.stream_stream(UPLOAD, pb.UploadPart.SerializeToString, pb.UploadAnswer.FromString)
list(upload(half(), metadata=[("metis-learner", "l0")]))
"""


def test_a_learner_that_is_killed_in_the_middle_of_an_upload(tmp_path: Path) -> None:
    """C1 row 4: kill -9 of a real process looks like a normal end of the stream, and is none (trap T1)."""

    async def scene() -> None:
        async with federation(tmp_path, layout=LARGE) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            before = files(here)
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _KILLED_LEARNER, here.address, here.process.run, str(task.number),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, stdin=subprocess.PIPE,
            )  # fmt: skip
            assert child.stdin is not None
            blobs = here.state.folder / "blobs"
            await here.until(lambda: any(path.stat().st_size == 128_000 for path in blobs.glob("tmp.*")))
            child.stdin.write(b"now\n")
            assert await child.wait() == -signal.SIGKILL
            tried()
            await _nothing_came(here, before)
            assert (await learner.hand_in(task.number, local_model(layout=LARGE))).verdict == pb.Receipt.COMMITTED

    play(scene())


# --- rows 6 and 7: the same task again --------------------------------------------------------------------


def test_the_same_update_a_hundred_times_at_once_counts_once(tmp_path: Path) -> None:
    """C1 row 6: one effect, and one sequence number in all answers, then and after a restart."""

    async def insist(learner: ScriptedLearner, task: int) -> pb.Receipt:
        """Try again where too many of this learner's uploads are on their way."""
        while True:
            try:
                return await learner.hand_in(task)
            except grpc.aio.AioRpcError as problem:
                if problem.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                await asyncio.sleep(0.01)

    async def scene() -> None:
        async with federation(tmp_path) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            receipts = await asyncio.gather(*(insist(learner, task.number) for _ in range(100)))
            tried(len(receipts))
            verdicts = Counter(receipt.verdict for receipt in receipts)
            assert verdicts == {pb.Receipt.COMMITTED: 1, pb.Receipt.ALREADY: 99}
            assert len({receipt.sequence for receipt in receipts}) == 1
            assert (await learner.task()).version == 1
            assert journaled(here) == [task.number]
            assert len(traced(here, UpdateCommitted)) == len(traced(here, CommunityPublished)) == 1
        async with federation(tmp_path) as here, here.scripted() as learner:
            again = await learner.hand_in(task.number)
            tried()
            assert (again.verdict, again.sequence) == (pb.Receipt.ALREADY, receipts[0].sequence)

    play(scene())


def test_the_same_task_with_other_bytes_is_refused(tmp_path: Path) -> None:
    """C1 row 7: ALREADY_EXISTS; the first stays, the operator hears of the others, which leave nothing on disk."""

    async def scene() -> None:
        async with federation(tmp_path) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            first = await learner.hand_in(task.number, local_model(2.0))
            await learner.task()
            community, before = community_hash(here), files(here)
            for value in range(3, 23):
                tried()
                code, reason = await status_of(learner.hand_in(task.number, local_model(value)))
                assert code == _CODE.ALREADY_EXISTS
                assert f"task {task.number}" in reason
            assert community_hash(here) == community
            assert journaled(here) == [task.number]
            assert files(here) == before
            assert ("warning", f"learner 'l0' sent task {task.number} again with other bytes") in here.reports
            again = await learner.hand_in(task.number, local_model(2.0))
            assert (again.verdict, again.sequence) == (pb.Receipt.ALREADY, first.sequence)

    play(scene())


# --- row 8: too late, out of order --------------------------------------------------------------------


def test_an_update_after_its_round_was_closed_is_told_to_rebase(tmp_path: Path) -> None:
    """C1 row 8: round r's update comes when r+1 is open; it does not count, its learner gets the next task."""

    async def scene() -> None:
        policy = policies.sync_fedavg(1, round_limit=0.3)
        async with (
            federation(tmp_path, policy=policy, expected=2) as here,
            here.scripted("l0") as quick,
            here.scripted("l1") as slow,
        ):
            await quick.join()
            await slow.join()
            mine, late = await quick.task(), await slow.task()
            await quick.hand_in(mine.number, local_model(2.0))
            following = await quick.task()  # the barrier did not wait for the slow one
            assert following.version == 1
            community = community_hash(here)
            receipt = await slow.hand_in(late.number, local_model(50.0))
            tried()
            assert receipt.verdict == pb.Receipt.COMMITTED  # it is safe; whether it counts, the policy says
            notice = await slow.notice(pb.Notice.REFUSED)
            assert (notice.task, "rebase onto 1" in notice.text) == (late.number, True)
            assert community_hash(here) == community
            again = await slow.task()  # with the next round
            assert again.version == 1
            await slow.hand_in(again.number, local_model(3.0))
            await here.until(lambda: any(each.task == again.number for each in traced(here, UpdateCommitted)))
            assert not traced(here, LearnerSetAside)

    play(scene())


def test_an_update_of_a_task_that_is_void_is_told_to_rebase(tmp_path: Path) -> None:
    """C1 row 8: its learner has left meanwhile, so nobody waits for the update; joined again it has another task."""

    async def scene() -> None:
        async with federation(tmp_path, rounds=3) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            await learner.send(leaving=pb.Leaving())
            await here.until(lambda: not here.process._writer.durable.controller.roster["l0"].present)
            receipt = await learner.hand_in(task.number)
            tried()
            assert receipt.verdict == pb.Receipt.REFUSED
            assert "rebase onto community model 0" in receipt.reason
            await learner.vanish()
            await finish(here, "l0")
            assert task.number not in journaled(here)

    play(scene())


def test_a_chunk_out_of_order_names_the_byte_that_was_expected(tmp_path: Path) -> None:
    """C1 row 8: swapped, skipped and repeated chunks are OUT_OF_RANGE; in order they are a model."""

    async def scene() -> None:
        async with federation(tmp_path, layout=LARGE) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            model, before = local_model(layout=LARGE), files(here)
            header = pb.UploadPart(header=learner.header(task.number))
            pieces = [chunk(offset, model[offset : offset + PIECE]) for offset in range(0, len(model), PIECE)]
            for order, expected, came in (([1, 0], 0, 1), ([0, 2], 1, 2), ([0, 0], 1, 0), ([0, 1, 2, 1], 3, 1)):
                tried()
                code, reason = await refusal(learner, header, *(pieces[which] for which in order), end(model))
                assert code == _CODE.OUT_OF_RANGE
                assert reason.endswith(f"byte {came * PIECE} came where byte {expected * PIECE} was expected")
            await _nothing_came(here, before)
            assert (await learner.upload(in_order(header, *pieces, end(model)))).verdict == pb.Receipt.COMMITTED

    play(scene())


# --- row 10: flipped bits -----------------------------------------------------------------------------


def test_a_bit_that_flips_in_transit_is_found(tmp_path: Path) -> None:
    """C1 row 10: below every check of TCP and gRPC, anywhere in the model; DATA_LOSS names both hashes."""
    marker = np.linspace(1, 2, LARGE.size, dtype="<f4").tobytes()

    async def scene() -> None:
        async with federation(tmp_path, layout=LARGE) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            before = files(here)
            found = 0
            for offset in range(100, len(marker) - 100, len(marker) // 12):
                flipped = []

                def flip(data: bytes, offset: int = offset, flipped: list[int] = flipped) -> bytes:
                    where = data.find(marker[offset : offset + 64])
                    if where < 0:
                        return data
                    flipped.append(where)
                    # The lowest bit: the number stays finite and nearly what it was.
                    return data[:where] + bytes([data[where] ^ 1]) + data[where + 1 :]

                with Proxy(here.address) as proxy:
                    proxy.up.change = flip
                    try:
                        async with here.scripted(address=proxy.address) as unlucky:
                            receipt = await unlucky.hand_in(task.number, marker)
                    except grpc.aio.AioRpcError as problem:
                        assert flipped
                        tried()
                        assert problem.code() == _CODE.DATA_LOSS
                        assert hashlib.sha256(marker).hexdigest() in (problem.details() or "")
                        found += 1
                    else:  # the 64 bytes came in two pieces of the connection: nothing was flipped
                        assert not flipped
                        assert receipt.verdict in (pb.Receipt.COMMITTED, pb.Receipt.ALREADY)
            assert found > 6
            assert files(here) - before <= {hashlib.sha256(marker).hexdigest()}

    play(scene())


def test_a_task_brings_the_mac_of_its_model(tmp_path: Path) -> None:
    """Which learners check instead of the hash; the initial model has none."""

    async def scene() -> None:
        async with federation(tmp_path) as here, here.scripted() as learner:
            first = await (await learner.join()).task()
            assert first.seal == b""
            await learner.hand_in(first.number)
            task = await learner.task()
            request = pb.ModelRequest(run=here.process.run, sha256=task.sha256)
            chunks = [chunk.data async for chunk in learner.stub.download(request, metadata=learner.metadata)]
            check, right = checker("", task.seal)
            check.update(b"".join(chunks))
            assert check.digest() == right == task.seal

    play(scene())


def test_a_bit_that_flips_on_the_disk_is_found_at_the_restart(tmp_path: Path) -> None:
    """C1 row 10: the stored model is put in quarantine and named; the controller does not start from wrong bytes."""

    async def first() -> str:
        async with federation(tmp_path, policy=policies.async_fedavg(1)) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            await learner.hand_in(task.number)
            await learner.task()
            return next(entry.blob for entry in here.state.entries() if entry.blob is not None)

    async def second() -> None:
        async with federation(tmp_path, policy=policies.async_fedavg(1)):
            raise AssertionError("it started from a damaged model")

    blob = play(first())
    path = tmp_path / "blobs" / blob
    content = bytearray(path.read_bytes())
    content[1234] ^= 1
    path.write_bytes(content)
    tried()
    with pytest.raises(StateError, match=f"blobs/{blob}.*damaged"):
        play(second())
    assert not path.exists()
    assert (tmp_path / "quarantine" / blob).read_bytes() == content
    # A good copy from a backup, and it goes on.
    content[1234] ^= 1
    path.write_bytes(content)

    async def third() -> None:
        async with federation(tmp_path, policy=policies.async_fedavg(1), rounds=3) as here:
            await finish(here, "l0")

    play(third())
