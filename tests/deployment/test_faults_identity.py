"""Fault matrix C1, who says it: stolen names, other learners' tasks, words from an earlier round, start or run."""

from __future__ import annotations

import hashlib
from pathlib import Path

import grpc

from deployment.faults import community_hash, federation, finish, journaled, play, status_of, traced, tried
from deployment.scripted_learner import local_model
from metis.core import policies
from metis.core.events import LearnerLeft, UpdateCommitted
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.protocol import PROTOCOL

_CODE = grpc.StatusCode

# --- row 28: stolen identities --------------------------------------------------------------------------


def test_of_two_processes_with_one_name_the_older_is_sent_away(tmp_path: Path) -> None:
    """C1 row 28: it gets the reason and leaves, the operator is warned, the newer one has the open task."""

    async def scene() -> None:
        async with federation(tmp_path, rounds=3) as here, here.scripted(instance="old") as old:
            task = await (await old.join()).task()
            session = here.process._sessions.open["l0"]
            async with here.scripted(instance="new") as new:
                tried()
                welcome = await new.connect()
                assert welcome.task == task.number
                farewell = await old.expect("farewell")
                assert farewell.kind == pb.Farewell.REFUSED
                assert "another process with the certificate of 'l0' has connected" in farewell.reason
                assert await old.ended() == _CODE.OK
                alarms = [text for kind, text in here.reports if kind == "warning"]
                assert any("a second process with the certificate of 'l0'" in text for text in alarms)
                # The last message of the old one may arrive when the new one is there already.
                here.process._hear(session, pb.FromLearner(leaving=pb.Leaving()))
                await new.ready()
                assert (await new.task()).number == task.number
                assert (await new.hand_in(task.number)).verdict == pb.Receipt.COMMITTED
                assert not traced(here, LearnerLeft)
            await finish(here, "l0")

    play(scene())


def test_the_task_of_another_learner_cannot_be_handed_in(tmp_path: Path) -> None:
    """C1 row 28: PERMISSION_DENIED before and after its own learner has answered it; nothing of the other changes."""

    async def scene() -> None:
        async with (
            federation(tmp_path, policy=policies.sync_fedavg(1), expected=2) as here,
            here.scripted("anna") as anna,
            here.scripted("ben") as ben,
        ):
            await anna.join()
            await ben.join()
            mine, bens = await anna.task(), await ben.task()
            for _ in range(2):
                tried()
                code, reason = await status_of(anna.hand_in(bens.number, local_model(99.0)))
                assert code == _CODE.PERMISSION_DENIED
                assert reason == f"task {bens.number} does not belong to learner 'anna'"
                if not journaled(here):
                    assert (await ben.hand_in(bens.number, local_model(3.0))).verdict == pb.Receipt.COMMITTED
            alarm = f"learner 'anna' tried to hand in task {bens.number}, which belongs to another learner"
            assert here.reports.count(("warning", alarm)) == 2
            await anna.send(failed=pb.Failed(task=bens.number))
            tried()
            await anna.hand_in(mine.number, local_model(5.0))
            assert (await ben.task()).version == 1
            assert [action.learner for action in traced(here, UpdateCommitted)] == ["ben", "anna"]
            model = here.process._writer.durable.controller.community.model
            assert set(model.vector.tolist()) == {4.0}  # the mean of 3 and 5

    play(scene())


def test_whoever_does_not_belong_to_the_federation_stays_out(tmp_path: Path) -> None:
    """C1 row 28: a good certificate of the same CA is not enough; every call says so."""

    async def scene() -> None:
        async with federation(tmp_path, members=["anna", "ben"], rounds=2) as here:
            async with here.scripted("anna") as anna, here.scripted("eve") as eve:
                task = await (await anna.join()).task()
                stream = eve.stub.attend(metadata=eve.metadata)
                await stream.write(pb.FromLearner(hello=pb.Hello(protocol=PROTOCOL, instance="eve")))
                assert await stream.code() == _CODE.PERMISSION_DENIED
                assert "its learners are anna, ben" in await stream.details()
                assert (await status_of(eve.hand_in(task.number)))[0] == _CODE.PERMISSION_DENIED
                small = anna.header(
                    task.number, content=local_model(), sha256=hashlib.sha256(local_model()).hexdigest()
                )
                assert (await status_of(eve.hand_in_small(small)))[0] == _CODE.PERMISSION_DENIED
                request = pb.ModelRequest(run=here.process.run, sha256=task.sha256)
                assert await eve.stub.download(request, metadata=eve.metadata).code() == _CODE.NOT_FOUND
                tried(4)
            await finish(here, "anna")
            assert {action.learner for action in traced(here, UpdateCommitted)} == {"anna"}

    play(scene())


# --- row 29: replays --------------------------------------------------------------------------------------


def test_what_was_said_before_has_no_second_effect(tmp_path: Path) -> None:
    """C1 row 29: uploads of an earlier round, of an earlier start of the controller, and of another run."""

    async def scene() -> None:
        recorded: list[tuple[int, bytes]] = []  # what an eavesdropper has
        async with federation(tmp_path / "one") as here, here.scripted() as learner:
            first_run = here.process.run
            await learner.join()
            for value in (2.0, 3.0, 4.0):
                task = await learner.task()
                recorded.append((task.number, local_model(value)))
                await learner.hand_in(*recorded[-1])
            open_task = await learner.task()
            community = community_hash(here)
            for number, model in recorded:
                tried()
                assert (await learner.hand_in(number, model)).verdict == pb.Receipt.ALREADY
            assert community_hash(here) == community
        async with federation(tmp_path / "one") as here, here.scripted() as learner:
            assert here.state.epoch == 2
            for number, model in recorded:
                tried()
                assert (await learner.hand_in(number, model)).verdict == pb.Receipt.ALREADY
            assert community_hash(here) == community
            # The task that was open before the restart still is, and is the only one that can be answered.
            welcome = await learner.connect(run=first_run, task=open_task.number)
            assert (welcome.task, welcome.epoch) == (open_task.number, 2)
            assert (await learner.hand_in(open_task.number + 1)).verdict == pb.Receipt.REFUSED
            assert (await learner.hand_in(open_task.number)).verdict == pb.Receipt.COMMITTED
            assert len(journaled(here)) == 4
        async with federation(tmp_path / "two", rounds=2) as here:
            async with here.scripted() as learner:
                # It says that it holds task 0, but of the other run: so it gets this run's.
                await learner.connect(run=first_run, task=0)
                await learner.ready()
                assert (await learner.task()).number == 0
                tried()
                for number, model in recorded:
                    tried()
                    code, reason = await status_of(learner.hand_in(number, model, run=first_run))
                    assert code == _CODE.FAILED_PRECONDITION
                    assert first_run in reason
                    assert here.process.run in reason
                request = pb.ModelRequest(run=first_run, sha256=open_task.sha256)
                download = learner.stub.download(request, metadata=learner.metadata)
                assert await download.code() == _CODE.FAILED_PRECONDITION
                tried()
                assert journaled(here) == []
            await finish(here, "l0")

    play(scene())
