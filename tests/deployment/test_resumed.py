"""Models that travel over lines that are cut, slow or dead: they arrive, and hardly a byte is sent twice."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from deployment.faults import federation, files, journaled, play, status_of, tried
from deployment.federations import Served
from deployment.proxy import Proxy
from deployment.scripted_learner import chunk, end, parts, receipt_of
from metis.core.model import Layout, TensorSpec
from metis.deployment.learner.connection import Calls, Connection, ConnectionLost, Session
from metis.deployment.learner.downloads import Downloads
from metis.deployment.learner.process import LearnerProcess
from metis.deployment.learner.site_log import SiteLog
from metis.deployment.learner.supervisor import Supervisor
from metis.deployment.learner.uploads import Uploads
from metis.deployment.learner.work import Update, WorkFolder
from metis.deployment.route import Route
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import Stretch
from metis.deployment.wire.protocol import CHANNEL_OPTIONS, FederationStub
from metis.net import host_and_port

LAYOUT = Layout((TensorSpec("w", (256, 1024)),))  # 1 MiB
MODEL = np.random.default_rng(7).normal(size=LAYOUT.size).astype("<f4").tobytes()
SHA256 = hashlib.sha256(MODEL).hexdigest()
FIRST = 1 << 16  # bytes of the first stretch
LIGHT = [sys.executable, str(Path(__file__).with_name("light_learner.py"))]
_CODE = grpc.StatusCode


def _silently(kind: str, text: str) -> None:
    """A learner whose output nobody reads."""


class Side:
    """A learner's own code for models, as a process that has just been started has it."""

    def __init__(self, here: Served, folder: Path, address: str, task: int) -> None:
        self._folder, self._address, self._run = folder, address, here.process.run
        self.update = Update(self._run, task, 1, 0.001, 0.001, 0.5, SHA256, len(MODEL))

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[tuple[Session, Uploads, Downloads]]:
        options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            session = Session(Calls(FederationStub(channel), (("metis-learner", "l0"),)), None, pb.Welcome())
            with WorkFolder(self._folder) as work:
                work.begin(self._run, "l0", "layout")
                supervisor, connection = Supervisor(_silently), Connection()
                log = SiteLog(self._folder, _silently)
                uploads = Uploads(supervisor, connection, work, log, Stretch(0.5))
                yield session, uploads, Downloads(supervisor, connection, work, Stretch(0.5))

    async def upload(self) -> pb.Receipt | None:
        """Hand in once; None if the line was cut."""
        async with self._started() as (session, uploads, _):
            path = uploads._work.update_file(self.update.task)
            if not path.exists():
                path.write_bytes(MODEL)
            try:
                return await uploads.upload(session, self.update)
            except (grpc.aio.AioRpcError, ConnectionLost) as problem:
                assert isinstance(problem, ConnectionLost) or problem.code() in (
                    _CODE.UNAVAILABLE, _CODE.INTERNAL, _CODE.CANCELLED, _CODE.UNKNOWN,
                ), problem  # fmt: skip
                return None

    async def download(self, sha256: str) -> bytes | None:
        """Fetch once; None if the line was cut."""
        async with self._started() as (session, _, downloads):
            try:
                if await downloads.obtain(session.calls, sha256, len(MODEL)):
                    return downloads._work.model_file(sha256).read_bytes()
            except grpc.aio.AioRpcError:
                pass
        return None


def _partial(here: Served) -> list[Path]:
    return sorted((here.state.folder / "blobs").glob("partial.*"))


async def _half(here: Served, learner: Any, task: int, share: int = 2) -> None:
    """Send the first half of the model, and no end."""
    half = len(MODEL) // share
    code, _ = await status_of(
        learner.upload(_messages(learner.header(task, sha256=SHA256), chunk(0, MODEL[:half])))
    )  # fmt: skip
    assert code == _CODE.ABORTED
    await here.until(lambda: bool(_partial(here)) and _partial(here)[0].stat().st_size == half)


async def _messages(header: pb.UploadHeader, *messages: pb.UploadPart) -> AsyncIterator[pb.UploadPart]:
    yield pb.UploadPart(header=header)
    for message in messages:
        yield message


# --- uploads ----------------------------------------------------------------------------------------


def test_an_upload_that_is_cut_again_and_again_goes_on_where_it_was(tmp_path: Path) -> None:
    """C1 row 41: cut after every eighth of the model, in the middle of chunks too; the learner is new each time."""

    async def scene() -> None:
        async with federation(tmp_path / "state", layout=LAYOUT) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            with Proxy(here.address) as proxy:
                side, cuts, receipt = Side(here, tmp_path / "work", proxy.address, task.number), 0, None
                while receipt is None:
                    proxy.up.cut_at = proxy.up.bytes + len(MODEL) // 8 + 321 * cuts
                    receipt = await asyncio.wait_for(side.upload(), 300)
                    tried()
                    cuts += receipt is None
                    assert cuts < 40
                assert receipt.verdict == pb.Receipt.COMMITTED and cuts >= 6
                assert proxy.up.bytes < 1.6 * len(MODEL) + cuts * FIRST
            assert journaled(here) == [task.number] and not _partial(here)
            (entry,) = (entry for entry in here.state.entries() if entry.blob is not None)
            assert entry.blob == SHA256

    play(scene())


def test_an_upload_goes_on_after_a_restart_of_the_controller(tmp_path: Path) -> None:
    """C1 row 41: half of it was received by the process before; only the other half is sent."""

    async def scene() -> None:
        async with federation(tmp_path / "state", layout=LAYOUT) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            await _half(here, learner, task.number)
        async with federation(tmp_path / "state", layout=LAYOUT) as here, here.scripted() as learner:
            await learner.join(run=here.process.run, task=task.number)
            with Proxy(here.address) as proxy:
                tried()
                receipt = await Side(here, tmp_path / "work", proxy.address, task.number).upload()
                assert receipt is not None and receipt.verdict == pb.Receipt.COMMITTED
                assert proxy.up.bytes < 0.6 * len(MODEL)
            assert not _partial(here)

    play(scene())


def test_what_was_received_before_and_is_damaged_since_is_received_again(tmp_path: Path) -> None:
    """A bit flips in the half that waits: DATA_LOSS, nothing of it stays, and the whole model counts afterwards."""

    async def scene() -> None:
        async with federation(tmp_path / "state", layout=LAYOUT) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            await _half(here, learner, task.number)
            content = bytearray(_partial(here)[0].read_bytes())
            content[1000] ^= 1
            _partial(here)[0].write_bytes(content + b"xyz")  # and it was cut in the middle of a number
            tried()
            side = Side(here, tmp_path / "work", here.address, task.number)
            try:
                await side.upload()
                raise AssertionError("it was accepted")
            except AssertionError as problem:
                assert "DATA_LOSS" in str(problem)
            assert not _partial(here) and journaled(here) == []
            receipt = await side.upload()
            assert receipt is not None and receipt.verdict == pb.Receipt.COMMITTED

    play(scene())


def test_of_each_open_task_at_most_one_beginning_is_kept(tmp_path: Path) -> None:
    """Of other bytes for the same task the first ones go; with the task the rest goes; without a hash nothing stays."""

    async def scene() -> None:
        async with federation(tmp_path / "state", layout=LAYOUT) as here, here.scripted() as learner:
            task = (await (await learner.join()).task()).number
            before = files(here)
            for letter in "abc":
                header = learner.header(task, sha256=letter * 64)
                assert (await status_of(learner.upload(_messages(header, chunk(0, MODEL[:4000])))))[0] == _CODE.ABORTED
                assert [path.name for path in _partial(here)] == [f"partial.{task}.{letter * 64}"]
            for wrong in ("", "x" * 64, "../" * 20, "a" * 63):
                header = learner.header(task, sha256=wrong)
                await status_of(learner.upload(_messages(header, chunk(0, MODEL[:4000]))))
            assert len(_partial(here)) == 1
            other = await status_of(learner.upload(parts(learner.header(task, sha256="d" * 64), MODEL)))
            assert other[0] == _CODE.INVALID_ARGUMENT and not _partial(here)
            await _half(here, learner, task)
            await learner.send(leaving=pb.Leaving())
            await here.until(lambda: not here.process._view.tasks)
            late = await learner.hand_in(task, MODEL, sha256=SHA256)
            assert late.verdict == pb.Receipt.REFUSED
        assert {path.name for path in (tmp_path / "state" / "blobs").iterdir()} == before

    play(scene())


def test_an_update_that_is_known_is_answered_from_its_hash(tmp_path: Path) -> None:
    """The receipt was lost: not a byte of the model is sent again."""

    async def scene() -> None:
        async with federation(tmp_path / "state", layout=LAYOUT) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            assert (await learner.hand_in(task.number, MODEL)).verdict == pb.Receipt.COMMITTED
            with Proxy(here.address) as proxy:
                receipt = await Side(here, tmp_path / "work", proxy.address, task.number).upload()
                assert receipt is not None and receipt.verdict == pb.Receipt.ALREADY
                assert proxy.up.bytes < 10_000

    play(scene())


def test_an_upload_on_a_dead_connection_does_not_keep_the_next_one_waiting(tmp_path: Path) -> None:
    """Its learner has dialled again: the new upload goes on where the old one stands still, and counts."""

    async def scene() -> None:
        async with federation(tmp_path / "state", layout=LAYOUT) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            call = learner.stub.upload(metadata=learner.metadata)
            await call.write(pb.UploadPart(header=learner.header(task.number, sha256=SHA256)))
            await call.write(chunk(0, MODEL[: len(MODEL) // 2]))
            await here.until(lambda: bool(_partial(here)) and _partial(here)[0].stat().st_size == len(MODEL) // 2)
            async with here.scripted() as again:
                await again.connect(run=here.process.run, task=task.number)
                rest: Any = again.stub.upload(metadata=again.metadata)
                await rest.write(pb.UploadPart(header=again.header(task.number, sha256=SHA256)))
                assert (await rest.read()).received == len(MODEL) // 2
                await rest.write(chunk(len(MODEL) // 2, MODEL[len(MODEL) // 2 :]))
                await rest.write(pb.UploadPart(acknowledge=True))
                await rest.write(end(MODEL))
                await rest.done_writing()
                assert (await rest.read()).received == len(MODEL)
                assert (await receipt_of(rest)).verdict == pb.Receipt.COMMITTED
                assert (await status_of(receipt_of(call)))[0] == _CODE.DEADLINE_EXCEEDED

    play(scene())


# --- downloads --------------------------------------------------------------------------------------


def test_a_download_that_is_cut_again_and_again_goes_on_where_it_was(tmp_path: Path) -> None:
    """C1 row 41: cut after every eighth of the model; the learner is new each time."""

    async def scene() -> None:
        async with federation(tmp_path / "state", layout=LAYOUT) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            with Proxy(here.address) as proxy:
                side, cuts, model = Side(here, tmp_path / "work", proxy.address, task.number), 0, None
                while model is None:
                    proxy.down.cut_at = proxy.down.bytes + len(MODEL) // 8 + 321 * cuts
                    model = await asyncio.wait_for(side.download(task.sha256), 300)
                    tried()
                    cuts += model is None
                    assert cuts < 40
                assert hashlib.sha256(model).hexdigest() == task.sha256 and cuts >= 6
                assert proxy.down.bytes < 1.6 * len(MODEL) + cuts * FIRST

    play(scene())


# --- lines that are slow, and lines that are dead ---------------------------------------------------


@contextlib.asynccontextmanager
async def _taking_part(here: Served, folder: Path, address: str, **options: Any) -> AsyncIterator[list[str]]:
    """A real learner process; what it reports."""
    lines: list[str] = []
    process = LearnerProcess(
        Route(*host_and_port(address)), work=folder, child=LIGHT, name="l0",
        report=lambda kind, text: lines.append(f"{kind}: {text}"), **options,
    )  # fmt: skip
    running = asyncio.ensure_future(process.run())
    try:
        yield lines
    finally:
        process.stop()
        await asyncio.wait_for(running, 300)


@pytest.mark.slow
def test_a_model_gets_through_a_relay_that_buffers_and_is_slow(tmp_path: Path) -> None:
    """Scaled: one model takes several times as long as the line may be silent, and the relay would take all of it.

    Were it not acknowledged on the way and continued, the line would be declared dead, and it would begin again.
    """

    async def scene() -> None:
        async with federation(tmp_path / "state", layout=LAYOUT, lease=60) as here:
            with Proxy(here.address) as proxy:
                for way in (proxy.up, proxy.down):
                    way.rate, way.buffers = 250_000.0, True
                async with _taking_part(
                    here, tmp_path / "work", proxy.address, silence=1.5, stretch_seconds=0.2
                ) as lines:  # fmt: skip
                    await here.until(lambda: bool(journaled(here)), 300)
                    sent, received, connections = proxy.up.bytes, proxy.down.bytes, proxy.connections
                    tried()
                assert sent < 1.6 * len(MODEL) + connections * FIRST, lines
                assert received < 2.6 * len(MODEL) + connections * FIRST, lines  # and some of the next model

    play(scene())


def test_a_line_on_which_nothing_arrives_is_dead(tmp_path: Path) -> None:
    """Open for TCP, but held up: the learner dials again by itself, and goes on when the line is back."""

    async def scene() -> None:
        async with federation(tmp_path / "state", lease=60) as here:
            with Proxy(here.address) as proxy:
                async with _taking_part(here, tmp_path / "work", proxy.address, silence=1.0) as lines:
                    await here.until(lambda: len(journaled(here)) > 2, 300)
                    proxy.vanish()
                    await here.until(lambda: any("nothing arrives from" in line for line in lines), 300)
                    tried()
                    counted = len(journaled(here))
                    await here.until(lambda: len(journaled(here)) > counted + 2, 300)

    play(scene())
