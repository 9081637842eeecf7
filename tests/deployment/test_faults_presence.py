"""Fault matrix C1, who is there: learners that vanish and come back, one of them or all, in time or too late."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from deployment.faults import HANG, busy_writer, federation, finish, journaled, play, traced, tried
from deployment.federations import Served
from deployment.scripted_learner import HonestLearner, chunk, end, local_model, move_towards
from metis.core import policies
from metis.core.events import CommunityPublished, LearnerJoined, LearnerLeft, UpdateCommitted
from metis.deployment.controller.durable import DurableController
from metis.deployment.wire import wire_pb2 as pb

LEASE = {"lease": 1.0, "heartbeat": 0.1}


def _learner(here: Served, name: str) -> HonestLearner:
    return HonestLearner(name, here.address, here.process.layout, train=move_towards(1.0), seconds_per_batch=0.002)


def _version(here: Served) -> int:
    return here.process._writer.durable.controller.community.stamp.version


async def _gone(learning: asyncio.Task[None]) -> None:
    learning.cancel()
    await asyncio.gather(learning, return_exceptions=True)


async def _state(here: Served, state: str) -> None:
    while (await here.process.status())["state"] != state:
        await asyncio.sleep(0.02)


# --- row 5: one learner vanishes ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["semisync_fedavg", "sync_fedavg"])
def test_a_learner_vanishes_in_the_middle_of_its_training(name: str, tmp_path: Path) -> None:
    """C1 row 5: without a word; its lease ends, rounds close without it, and it may join again later."""

    async def scene() -> None:
        async with federation(tmp_path, policy=getattr(policies, name)(1), expected=3, **LEASE) as here:
            others = [asyncio.create_task(_learner(here, f"l{index}").run()) for index in range(2)]
            async with here.scripted("killed") as killed:
                task = await (await killed.join()).task()
                await killed.vanish()
                await here.until(lambda: _version(here) >= 3)
                assert "killed" in {left.learner for left in traced(here, LearnerLeft)}
                assert any("learner 'killed' was silent for 1 s and has left" in text for _, text in here.reports)
                # It comes back: as a new stay, with a task on what the others have reached.
                again = await (await killed.join()).task()
                assert again.number > task.number
                assert again.version >= 3
                assert (await killed.hand_in(task.number)).verdict == pb.Receipt.REFUSED
                await killed.hand_in(again.number)
                await here.until(lambda: again.number in journaled(here))
            for other in others:
                await _gone(other)

    play(scene())


def test_a_learner_that_comes_back_in_time_has_its_task_again(tmp_path: Path) -> None:
    """C1 row 5: killed and restarted within its lease, it gets the same task with the seconds that are left."""

    async def scene() -> None:
        policy = policies.sync_fedavg(1, round_limit=50)
        async with federation(tmp_path, policy=policy, expected=2) as here, here.scripted("l1") as other:
            await other.join()
            async with here.scripted("l0", instance="before") as before:
                task = await (await before.join()).task()
            async with here.scripted("l0", instance="after") as after:
                welcome = await after.connect(run=here.process.run)
                assert welcome.task == task.number
                await after.ready()
                again = await after.task()
                assert (again.number, again.sha256, again.steps) == (task.number, task.sha256, task.steps)
                assert again.seconds < task.seconds <= 50
                assert (await after.hand_in(again.number)).verdict == pb.Receipt.COMMITTED
            assert [joined.learner for joined in traced(here, LearnerJoined)] == ["l1", "l0"]
            assert not traced(here, LearnerLeft)

    play(scene())


def test_a_learner_that_lost_only_its_connection_goes_on(tmp_path: Path) -> None:
    """C1 row 5: it says which task it is working on, is not sent it again, and hands it in."""

    async def scene() -> None:
        async with federation(tmp_path) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            await learner.vanish()
            await learner.join(run=here.process.run, task=task.number)
            assert (await learner.hand_in(task.number)).verdict == pb.Receipt.COMMITTED
            assert (await learner.task()).number == task.number + 1
            assert len(traced(here, LearnerJoined)) == 1

    play(scene())


def test_a_lease_that_ends_while_its_learner_comes_back(tmp_path: Path) -> None:
    """C1 row 5: the departure is journaled but has no effect yet when the learner is there again; it joins again."""

    async def scene() -> None:
        async with federation(tmp_path) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            await learner.vanish()
            await here.until(lambda: "l0" not in here.process._sessions.open)
            with busy_writer(here):
                here.process._presence.heard["l0"] -= 1000
                await here.until(lambda: "l0" not in here.process._presence.heard)
                await learner.join()
                await here.until(lambda: here.process._sessions.open["l0"].ready is not None)
            assert (await learner.task()).number == task.number + 1
            assert [type(item) for item in traced(here, LearnerJoined | LearnerLeft)] == [  # type: ignore[arg-type]
                LearnerJoined,
                LearnerLeft,
                LearnerJoined,
            ]

    play(scene())


def test_an_update_that_arrives_with_the_departure_of_its_learner(tmp_path: Path) -> None:
    """C1 row 5: it is durable, but void when its turn comes; the site learns that it does not count."""

    async def scene() -> None:
        async with federation(tmp_path) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            with busy_writer(here):
                await learner.send(leaving=pb.Leaving())
                await here.until(lambda: "l0" not in here.process._presence.heard)
                handing_in = asyncio.create_task(learner.hand_in(task.number))
                await here.until(lambda: here.process._requests.uploads == 1)
            assert (await handing_in).verdict == pb.Receipt.COMMITTED
            notice = await learner.notice(pb.Notice.REFUSED)
            assert (notice.task, "does not count" in notice.text) == (task.number, True)
            assert not traced(here, UpdateCommitted)

    play(scene())


def test_a_learner_that_comes_back_while_a_model_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C1 row 5: its next task is there before the file of the model is; it gets both when they are."""
    keep, publishing, go_on = DurableController._keep_version, threading.Event(), threading.Event()

    def slowly(self: DurableController, action: CommunityPublished) -> None:
        publishing.set()
        assert go_on.wait(HANG)
        keep(self, action)

    async def scene() -> None:
        async with (
            federation(tmp_path, policy=policies.sync_fedavg(1), expected=2) as here,
            here.scripted("l0") as waiting,
            here.scripted("l1") as last,
        ):
            await waiting.join()
            await last.join()
            await waiting.hand_in((await waiting.task()).number)
            task = await last.task()
            await waiting.vanish()
            monkeypatch.setattr(DurableController, "_keep_version", slowly)
            with busy_writer(here):
                await waiting.join()
                session = here.process._sessions.open["l0"]
                await here.until(lambda: session.ready is not None)
                handing_in = asyncio.create_task(last.hand_in(task.number))
                await here.until(lambda: here.process._requests.uploads == 1)
            await here.until(publishing.is_set)
            request = pb.ModelRequest(run=here.process.run, sha256=task.sha256)
            download = waiting.stub.download(request, metadata=waiting.metadata)
            assert await download.code() == grpc.StatusCode.NOT_FOUND
            go_on.set()
            await handing_in
            assert (await waiting.task()).version == (await last.task()).version == 1

    try:
        play(scene())
    finally:
        go_on.set()


# --- row 16: a slow line ------------------------------------------------------------------------------


def test_an_upload_in_progress_is_a_sign_of_life(tmp_path: Path) -> None:
    """C1 row 16: on a slow line heartbeats wait behind the model; its pieces count as well."""

    async def scene() -> None:
        async with federation(tmp_path, **LEASE) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            model = local_model()
            tried()

            async def slowly() -> AsyncIterator[pb.UploadPart]:
                yield pb.UploadPart(header=learner.header(task.number))
                size = len(model) // 80 * 8
                for offset in range(0, len(model), size):
                    await asyncio.sleep(0.25)
                    yield chunk(offset, model[offset : offset + size])
                yield end(model)

            assert (await learner.upload(slowly())).verdict == pb.Receipt.COMMITTED  # after two leases and more
            assert not traced(here, LearnerLeft)

    play(scene())


# --- row 35: all learners vanish ----------------------------------------------------------------------------


def test_all_learners_vanish_and_come_back(tmp_path: Path) -> None:
    """C1 row 35: the run is paused, keeps its state, also over a restart, and resumes to its end."""

    async def scene() -> None:
        policy = policies.semisync_fedavg(1)
        async with federation(tmp_path, policy=policy, expected=2, rounds=30, **LEASE) as here:
            learning = [asyncio.create_task(_learner(here, f"l{index}").run()) for index in range(2)]
            await here.until(lambda: _version(here) >= 2)
            for learner in learning:
                await _gone(learner)
            await _state(here, "paused")
            version = _version(here)
            assert here.process._writer.durable.controller.deadline == float("inf")
        async with federation(tmp_path, policy=policy, expected=2, rounds=version + 3, **LEASE) as here:
            await _state(here, "paused")
            assert _version(here) == version
            learners = await finish(here, "l0", "l1", seconds_per_batch=0.002)
            assert _version(here) == version + 3
            assert min(learner.tasks[0].version for learner in learners) == version

    play(scene())


def test_the_quorum_is_lost_and_back(tmp_path: Path) -> None:
    """C1 row 35: with fewer learners than the minimum no round is closed; with enough of them it goes on."""

    async def scene() -> None:
        policy = policies.sync_fedavg(1)
        async with federation(tmp_path, policy=policy, expected=2, minimum=2, **LEASE) as here:
            staying = asyncio.create_task(_learner(here, "l0").run())
            leaving = asyncio.create_task(_learner(here, "l1").run())
            await here.until(lambda: _version(here) >= 2)
            await _gone(leaving)
            await _state(here, "paused")
            version, published = _version(here), len(traced(here, CommunityPublished))
            await asyncio.sleep(0.3)
            assert (_version(here), len(traced(here, CommunityPublished))) == (version, published)
            back = asyncio.create_task(_learner(here, "l1").run())
            await here.until(lambda: _version(here) >= version + 2)
            for learner in (staying, back):
                await _gone(learner)

    play(scene())


# --- the end ------------------------------------------------------------------------------------------


def test_the_controller_waits_until_the_final_model_was_fetched(tmp_path: Path) -> None:
    """A learner that takes its time after the farewell still gets the model; who hangs up is not waited for."""

    async def scene() -> None:
        async with federation(tmp_path, rounds=1, linger=30) as here, here.scripted() as learner:
            await learner.hand_in((await (await learner.join()).task()).number)
            farewell = await learner.expect("farewell")
            assert farewell.kind == pb.Farewell.FINISHED
            await asyncio.sleep(0.5)
            assert not here.serving.done()
            request = pb.ModelRequest(run=here.process.run, sha256=farewell.sha256)
            model = b"".join([part.data async for part in learner.stub.download(request, metadata=learner.metadata)])
            assert hashlib.sha256(model).hexdigest() == farewell.sha256
            await learner.vanish()
            assert await here.serving

    play(scene())


def test_the_controller_waits_at_the_end_for_a_learner_whose_lease_had_ended(tmp_path: Path) -> None:
    """It took part and does not have the final model; one that said that it leaves is not waited for."""

    async def scene() -> None:
        async with federation(tmp_path, rounds=1, expected=3, linger=600) as here:
            async with here.scripted("l0") as stays, here.scripted("l1") as silent, here.scripted("l2") as leaves:
                for learner in (stays, silent, leaves):
                    await learner.join()
                number = (await stays.task()).number
                await leaves.send(leaving=pb.Leaving())
                await silent.vanish()
                here.process._time.release("l1")  # as a lease that ends does
                await leaves.vanish()
                await stays.hand_in(number)
                await stays.expect("farewell")
                await stays.vanish()
                await here.until(lambda: here.process._presence.owed == {"l1"})
                assert not here.serving.done()
                await silent.greet()
                await silent.expect("farewell")
                await silent.vanish()
                assert await here.serving

    play(scene())
