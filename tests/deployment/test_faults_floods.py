"""One site with an admitted certificate that asks for too much: it is refused, and nobody else notices."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import grpc
import pytest

from deployment.faults import federation, play, status_of
from deployment.scripted_learner import ScriptedLearner
from metis.core.model import Layout, TensorSpec
from metis.deployment.controller import service as service_module
from metis.deployment.controller.audit import AUDIT, read_audit
from metis.deployment.controller.disk import with_a_file
from metis.deployment.controller.session import MAX_CHANGES
from metis.deployment.controller.site_reports import SiteReports
from metis.deployment.wire import wire_pb2 as pb

CODE = grpc.StatusCode
LARGE = Layout((TensorSpec("w", (10_000_000,)),))  # far more than gRPC sends without being read (16 MB)
_MAX = service_module._MAX_CALLS


def _open_models(folder: Path) -> list[str]:
    """Model files of this folder that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            path = str(descriptor.readlink())
        except OSError:  # closed meanwhile
            continue
        if path.startswith(f"{folder}/blobs/"):
            found.append(path)
    return found


async def _fetch(learner: ScriptedLearner, sha256: str) -> tuple[int, Any]:
    """The bytes that arrive, and the code with which the call ends."""
    call: Any = learner.stub.download(
        pb.ModelRequest(run=learner.run_id, sha256=sha256), metadata=learner.metadata
    )  # fmt: skip
    received = 0
    try:
        async for part in call:
            received += len(part.data)
    except grpc.aio.AioRpcError as problem:
        return received, problem.code()
    return received, CODE.OK


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_downloads_that_nobody_reads_hold_no_file_and_are_few(tmp_path: Path) -> None:
    """A site may begin eight; the next is refused, another site is served, and a new connection begins again."""

    async def scene() -> None:
        async with federation(tmp_path, layout=LARGE, expected=2, lease=600) as here:
            async with here.scripted("greedy") as greedy, here.scripted("other") as other:
                await greedy.join()
                await other.join()
                mine, theirs = await greedy.task(), await other.task()
                request = pb.ModelRequest(run=here.process.run, sha256=mine.sha256)
                stalled: list[Any] = []
                for _ in range(_MAX):
                    stalled.append(greedy.stub.download(request, metadata=greedy.metadata))
                    await stalled[-1].read()  # and nothing more
                await here.until(lambda: here.process._service._downloads == _MAX)
                await here.until(lambda: not _open_models(tmp_path))
                assert await _fetch(greedy, mine.sha256) == (0, CODE.RESOURCE_EXHAUSTED)
                assert await _fetch(other, theirs.sha256) == (theirs.bytes, CODE.OK)
                async with here.scripted("greedy", instance="second") as again:
                    await again.connect()
                    assert await _fetch(again, mine.sha256) == (mine.bytes, CODE.OK)
                for call in stalled:
                    while await call.read() is not grpc.aio.EOF:
                        pass
                await here.until(lambda: here.process._service._downloads == 0)

    play(scene())


def test_uploads_that_wait_for_their_turn_are_few(tmp_path: Path) -> None:
    """One is in progress and seven wait; the ninth is refused at once, and the learner may send it later."""

    async def scene() -> None:
        async with federation(tmp_path, lease=600) as here, here.scripted() as learner:
            task = (await (await learner.join()).task()).number
            begun: list[Any] = []
            for _ in range(_MAX):
                begun.append(learner.stub.upload(metadata=learner.metadata))
                await begun[-1].write(pb.UploadPart(header=learner.header(task)))
            await here.until(lambda: here.process._service._uploading["l0"] == _MAX)
            code, reason = await status_of(learner.hand_in(task))
            assert code == CODE.RESOURCE_EXHAUSTED and "8 uploads in progress" in reason
            for call in begun:
                call.cancel()
            await here.until(lambda: here.process._service._uploading["l0"] == 0)
            assert (await learner.hand_in(task)).verdict == pb.Receipt.COMMITTED

    play(scene())


def test_a_learner_that_comes_and_goes_all_the_time_is_sent_away(tmp_path: Path) -> None:
    """The journal does not grow with every message of one that is ready, and leaves, and is ready."""

    async def scene() -> None:
        async with federation(tmp_path) as here, here.scripted() as learner:
            await learner.connect()
            for _ in range(MAX_CHANGES):
                here.process._changes.note("l0")  # as each of its messages does
            await learner.ready()
            assert await learner.stream.code() == CODE.RESOURCE_EXHAUSTED
            assert "times a minute" in await learner.stream.details()
            here.process._changes.note("l1")
            assert here.state.last_seq() == 0

    play(scene())


def test_the_final_model_is_for_members(tmp_path: Path) -> None:
    """Somebody else with a certificate, who knows its hash, is refused; the audit log names who was refused, once."""

    async def scene() -> None:
        async with federation(tmp_path, rounds=1, lease=600, linger=600, members=["l0"]) as here:
            async with here.scripted("l0") as member, here.scripted("stranger") as stranger:
                await member.hand_in((await (await member.join()).task()).number)
                final = (await member.expect("farewell")).sha256
                assert (await _fetch(stranger, final))[1] == CODE.NOT_FOUND
                assert (await _fetch(member, final))[1] == CODE.OK
                for software in ("one", "two", "three"):
                    await stranger.greet(protocol=1, software=software)
                    assert await stranger.stream.code() == CODE.FAILED_PRECONDITION
                await member.vanish()
                await here.serving
        lines = [line.record for line in read_audit(tmp_path / AUDIT) if line.record["kind"] == "refused"]
        assert [line["who"] for line in lines] == ["stranger"]

    play(scene())


def test_a_site_without_the_usual_metrics_is_left_out() -> None:
    """It does not keep the others from a federated value, and is named; a second report of a model is ignored."""
    reports = SiteReports(patience=60.0)
    for name, accuracy in (("a", 0.5), ("b", 0.7)):
        reports.add(name, 3, 10, {"accuracy": accuracy, "loss": 1.0}, now=0.0)
    reports.add("c", 3, 10, {"accuracy": float("nan"), "own": 1.0}, now=0.0)

    collected = reports.collect({"a", "b", "c"})

    assert collected.metrics == {"accuracy": pytest.approx(0.6), "loss": 1.0}
    assert collected.left_out == {"c": ["accuracy", "loss"]} and collected.by_learner.keys() == {"a", "b"}
    assert reports.has_later("a", 3) and not reports.has_later("a", 4) and not reports.has_later("d", 0)


def test_work_waits_while_no_more_files_can_be_opened() -> None:
    """The writer does not end the controller because somebody uses up its files; other errors are raised."""
    attempts = 0

    def work() -> int:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return 7

    assert with_a_file(work) == 7 and attempts == 3
    with pytest.raises(FileNotFoundError):
        with_a_file(lambda: Path("/nowhere/at/all").stat())
