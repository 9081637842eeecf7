"""A disk that is slow, full or broken: deadlines are journaled once, and nothing is built on what was never written."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

import metis.deployment.controller.disk as disk_module
from deployment.faults import busy_writer, federation, journaled, play
from deployment.federations import Served, served
from metis.core import policies
from metis.core.events import Action, CommunityPublished, DeadlinePassed
from metis.core.stop import StopRule
from metis.deployment.controller.journal import Entry
from metis.deployment.controller.settings import DeploymentSettings
from metis.deployment.controller.state import State
from metis.deployment.learner.work import Update, WorkFolder
from metis.deployment.wire import wire_pb2 as pb
from metis.errors import ConfigError, DiskFull, StateError
from metis.files import write_durable
from metis.runs.trace import read_trace

TWO = DeploymentSettings(expected=2, lease=20, heartbeat=0.2, linger=0.2)

# --- deadlines --------------------------------------------------------------------------------------


def _deadlines(here: Served) -> int:
    return sum(entry.record.get("event") == "deadline_passed" for entry in here.state.entries())


async def _ticks(here: Served, count: int) -> None:
    """Have the process look at its clock so often."""
    for _ in range(count):
        here.process._woken.set()
        await asyncio.sleep(0.002)


def test_a_deadline_is_posted_once_however_long_the_writer_takes(tmp_path: Path) -> None:
    """While the journal stands still the clock is looked at a hundred times; one entry waits, and one is written."""

    async def scene() -> None:
        policy = policies.sync_fedavg(1, round_limit=0.2)
        async with federation(tmp_path, policy=policy, expected=2) as here:
            async with here.scripted("l0") as quick, here.scripted("l1") as silent:
                await quick.join()
                await silent.join()
                mine, _ = await quick.task(), await silent.task()
                await quick.hand_in(mine.number)
                await here.until(lambda: here.process._view.standing.deadline < float("inf"))
                deadline = here.process._view.standing.deadline
                with busy_writer(here):
                    await here.until(lambda: here.process._time.clock.now() > deadline)
                    await _ticks(here, 100)
                    assert vars(here.process._writer._thread)["_work_queue"].qsize() < 10
                assert (await quick.task()).version == 1
                assert _deadlines(here) == 1

    play(scene())


def test_a_deadline_that_could_not_be_journaled_is_posted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The disk is full for three attempts; the round ends with the fourth, and one entry says so."""
    append, refused = State.append, 0

    def full(self: State, at: float, record: dict[str, Any], **more: Any) -> int:
        nonlocal refused
        if record.get("event") == "deadline_passed" and refused < 3:
            refused += 1
            raise DiskFull("no room")
        return append(self, at, record, **more)

    monkeypatch.setattr(State, "append", full)

    async def scene() -> None:
        policy = policies.sync_fedavg(1, round_limit=0.2)
        async with federation(tmp_path, policy=policy, expected=2) as here:
            async with here.scripted("l0") as quick, here.scripted("l1") as silent:
                await quick.join()
                await silent.join()
                mine, _ = await quick.task(), await silent.task()
                await quick.hand_in(mine.number)
                assert (await quick.task()).version == 1
                assert (_deadlines(here), refused) == (1, 3)

    play(scene())


def test_a_slow_journal_does_not_fill_itself_with_deadlines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 ms a commit, rounds that a silent learner ends at their limit: about one deadline for each round."""
    append = State.append

    def slowly(self: State, at: float, record: dict[str, Any], **more: Any) -> int:
        time.sleep(0.02)
        return append(self, at, record, **more)

    monkeypatch.setattr(State, "append", slowly)

    async def scene() -> None:
        policy = policies.sync_fedavg(1, round_limit=0.1)
        async with federation(tmp_path, policy=policy, expected=2, rounds=8) as here:
            async with here.scripted("silent") as silent:
                await silent.join()
                (learner,) = here.learners(1)
                await asyncio.wait_for(learner.run(), 300)
                assert await here.serving
                rounds = len([item for _, item in read_trace(tmp_path / "run" / "events.jsonl")
                              if isinstance(item, CommunityPublished)])  # fmt: skip
                posted = len([item for _, item in read_trace(tmp_path / "run" / "events.jsonl")
                              if isinstance(item, DeadlinePassed)])  # fmt: skip
                assert rounds == 8 and posted <= 2 * rounds

    play(scene())


# --- a failure ----------------------------------------------------------------------------------------


def test_nothing_follows_an_event_that_is_half_applied(tmp_path: Path) -> None:
    """The writer fails in the middle of an update: whatever comes behind it is refused, and nothing more is applied."""

    async def scene() -> None:
        async with served(tmp_path, policies.async_fedavg(1), StopRule(rounds=1000), terms=TWO) as here:
            writer, applied = here.process._writer, list[int]()

            def broken(entry: Entry) -> list[Action]:
                applied.append(entry.seq)
                raise RuntimeError("broken in the middle")

            async with here.scripted("l0") as first, here.scripted("l1") as second:
                await first.join()
                await second.join()
                one, two = await first.task(), await second.task()
                with busy_writer(here):
                    writer.durable.apply = broken  # type: ignore[method-assign]
                    handing_in = asyncio.create_task(first.hand_in(one.number))
                    await here.until(lambda: here.process._requests.uploads == 1)
                assert (await handing_in).verdict == pb.Receipt.COMMITTED
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    while True:
                        await second.hand_in(two.number)
                assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
                with pytest.raises(RuntimeError, match="broken in the middle"):
                    await here.serving
                assert len(applied) == 1 and journaled(here)[0] == one.number
                with pytest.raises(StateError, match="has failed and stops"):
                    writer._unless_failed(lambda: None)

    play(scene())


# --- what was never written -------------------------------------------------------------------------


def test_nothing_is_built_on_the_wal_of_an_earlier_process(tmp_path: Path) -> None:
    """F3: after a crash the database itself has every entry, and is synced, before anything new is written."""
    state = State.open(tmp_path / "state")
    state.begin({})
    for number in range(5):
        state.append(float(number), {"number": number})
    crashed = tmp_path / "crashed"
    shutil.copytree(tmp_path / "state", crashed)  # as kill -9 leaves it
    state.close()
    assert (crashed / "controller.db-wal").stat().st_size > 0
    again = State.open(crashed)
    shutil.copy(crashed / "controller.db", tmp_path / "alone.db")  # without its WAL
    with sqlite3.connect(tmp_path / "alone.db") as database:
        assert database.execute("SELECT count(*) FROM journal").fetchone() == (5,)
    again.close()


def test_a_beginning_whose_sync_failed_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may show bytes that never reached the disk; a second sync would call them written."""
    content, sha256 = bytes(4000), "a" * 64

    class Ended(BaseException):
        """Instead of the end of the process."""

    def end(path: Path, problem: object) -> None:
        raise Ended

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with State.open(tmp_path / "state") as state:
        monkeypatch.setattr(disk_module, "end_process", end)
        with pytest.raises(Ended), state.incoming(3, sha256) as incoming:
            incoming.write(content)
            monkeypatch.setattr(os, "fsync", broken)
            incoming.commit(len(content), incoming.checksum)
        assert not list((tmp_path / "state" / "blobs").iterdir())
        monkeypatch.undo()


def test_the_names_of_new_work_folders_survive_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: every folder in which one was made is synced, and none if nothing was made."""
    synced: list[Path] = []
    monkeypatch.setattr("metis.files.sync", synced.append)
    folder = tmp_path / "a" / "b" / "work"
    with WorkFolder(folder):
        pass
    assert synced[:3] == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    assert set(synced[3:]) == {folder}
    synced.clear()
    with WorkFolder(folder):
        pass
    assert not synced


def test_a_full_disk_at_the_start_of_a_learner_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConfigError, match=f"work folder {tmp_path}/work cannot be used: No space left.*make room"):
        WorkFolder(tmp_path / "work").__enter__()


# --- small updates that wait at a learner -------------------------------------------------------------


def _small_update(work: WorkFolder, task: int, content: bytes) -> Update:
    work.update_file(task).write_bytes(content)
    return Update("run", task, 1, 1.0, 1.0, 0.5, hashlib.sha256(content).hexdigest(), len(content))


def test_a_small_update_is_synced_when_it_must_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model and note, once; not if it was answered before; and all that wait at the end of the process."""
    written: list[str] = []

    def write(path: Path, content: bytes) -> None:
        write_durable(path, content)
        written.append(path.name)

    with WorkFolder(tmp_path / "work") as work:
        monkeypatch.setattr("metis.deployment.learner.work.write_durable", write)
        for task in (1, 2, 3):
            work.keep(_small_update(work, task, b"four" * task), synced=False)
        assert not written
        assert work.unsynced == {1, 2, 3}
        work.sync(1)
        work.sync(1)
        assert written == ["1.model", "1.json"]
        work.drop(2)
        work.sync(2)
        assert work.unsynced == {3}
        written.clear()
    assert written == ["3.model", "3.json"]
    with WorkFolder(tmp_path / "work") as work:
        assert [update.task for update in work.updates()] == [1, 3]


@pytest.mark.parametrize("during", ["1.model", "1.json"])
def test_an_update_that_is_answered_while_it_is_synced_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    def write(path: Path, content: bytes) -> None:
        if path.name == during:
            work.drop(1)
        write_durable(path, content)

    monkeypatch.setattr("metis.deployment.learner.work.write_durable", write)
    with WorkFolder(tmp_path / "work") as work:
        work.keep(_small_update(work, 1, b"four"), synced=False)
        work.sync(1)
        assert not list((work.folder / "spool").iterdir())
        assert not work.unsynced


def test_an_update_that_cannot_be_synced_is_written_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is still there, and not called synced."""

    def broken(path: Path, content: bytes) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with WorkFolder(tmp_path / "work") as work:
        work.keep(_small_update(work, 1, b"four"), synced=False)
        with monkeypatch.context() as patch:
            patch.setattr("metis.deployment.learner.work.write_durable", broken)
            with pytest.raises(OSError, match="Input/output"):
                work.sync(1)
        assert work.unsynced == {1}
        before = work.update_file(1).stat().st_ino
        work.sync(1)
        assert not work.unsynced
        assert work.update_file(1).read_bytes() == b"four"
        assert work.update_file(1).stat().st_ino != before


def test_what_a_loss_of_power_has_left_of_a_small_update_is_not_taken_for_one(tmp_path: Path) -> None:
    """Its length may be right and its content not; the whole one beside it stays."""
    with WorkFolder(tmp_path / "work") as work:
        for task in (1, 2):
            work.keep(_small_update(work, task, b"whole"))
    work.update_file(1).write_bytes(b"who\0\0")
    with WorkFolder(tmp_path / "work") as work:
        work.tidy()
        assert [update.task for update in work.updates()] == [2]
        assert sorted(path.name for path in (work.folder / "spool").iterdir()) == ["2.json", "2.model"]
