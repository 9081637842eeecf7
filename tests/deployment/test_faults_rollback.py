"""What an administrator undoes: the federation goes on from an earlier community model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deployment.faults import federation, play, traced, tried
from deployment.scripted_learner import HonestLearner
from metis.core import policies
from metis.core.events import CommunityPublished, RolledBack, UpdateCommitted
from metis.deployment.wire import wire_pb2 as pb
from metis.errors import ConfigError


@pytest.mark.parametrize("name", ["async_fedavg", "sync_fedavg"])
def test_learners_go_on_from_the_earlier_model(name: str, tmp_path: Path) -> None:
    """C1 row 43: they get its very bits under a new number, their open tasks are void, and the run comes to its end."""

    async def scene() -> None:
        policy = getattr(policies, name)(1)
        async with federation(tmp_path, policy=policy, expected=2, rounds=12) as here:
            learners: list[HonestLearner] = here.learners(2)
            running = [asyncio.create_task(learner.run()) for learner in learners]
            await here.until(lambda: here.process._view.standing.version >= 4)
            version = (await here.process.kept_versions())[1]  # which ones are kept depends on how far it came
            tried()
            now = await here.process.rollback(version)
            hashes = here.process._writer.durable.hashes
            assert (now > version, hashes[now]) == (True, hashes[version])
            await here.serving
            await asyncio.gather(*running)
            assert [event.version for event in traced(here, RolledBack)] == [version]
            published = traced(here, CommunityPublished)
            assert [action.stamp.version for action in published] == list(range(1, len(published) + 1))
            assert published[now - 1].contributors == 0
            assert len(published) == 12 + 1, "a rollback is not a round"
            based = {task.version: task.sha256 for learner in learners for task in learner.tasks}
            assert based[now] == hashes[version]
            assert all(learner.final is not None for learner in learners)

    play(scene())


def test_what_was_trained_before_a_rollback_is_late(tmp_path: Path) -> None:
    """C1 row 43: an update to a task that the rollback has ended is refused; the learner has its next one already."""

    async def scene() -> None:
        async with federation(tmp_path) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            await learner.hand_in(task.number)
            void = await learner.task()
            tried()
            now = await here.process.rollback(0)
            following = await learner.task()
            assert (following.version, following.sha256) == (now, task.sha256)
            late = await learner.hand_in(void.number)
            assert (late.verdict, "late" in late.reason) == (pb.Receipt.REFUSED, True)
            assert (await learner.hand_in(following.number)).verdict == pb.Receipt.COMMITTED
            await here.until(lambda: len(traced(here, UpdateCommitted)) == 2)

    play(scene())


def test_what_is_not_kept_is_refused_with_what_is(tmp_path: Path) -> None:
    """C1 row 43: the sentence lists the models that are kept; nothing is journaled and the federation goes on."""

    async def scene() -> None:
        async with federation(tmp_path) as here, here.scripted() as learner:
            await learner.join()
            task = await learner.task()
            for version in (-1, 1000):
                tried()
                with pytest.raises(ConfigError, match=f"community model {version} is not kept; .*: 0$"):
                    await here.process.rollback(version)
            assert (await learner.hand_in(task.number)).verdict == pb.Receipt.COMMITTED
            assert not traced(here, RolledBack)

    play(scene())
