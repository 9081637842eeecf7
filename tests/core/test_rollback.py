"""Going on from an earlier community model, under every policy."""

from __future__ import annotations

import numpy as np
import pytest

from core.play import LAYOUT, Actor, Play, community_snapshot, model, snapshot
from metis.core.controller import Controller
from metis.core.events import (
    CommunityPublished,
    CommunityStamp,
    Finish,
    LearnerJoined,
    LearnerLeft,
    RolledBack,
    SendTask,
    StopRequested,
    UpdateCommitted,
)
from metis.core.layers import AdaptivePeriod, FedNova, Median, NormBound, Sample
from metis.core.layers.server_optimizers import FedAvgM, FedYogi
from metis.core.model import Model
from metis.core.policies import async_fedavg, fedasync, fedbuff, fedrec, semisync_fedavg, sync_fedavg
from metis.core.policy import Policy
from metis.core.solvers import Scaffold
from metis.core.stop import StopRule
from metis.errors import UnexpectedEvent

POLICIES = {
    "sync": sync_fedavg(1),
    "semisync": semisync_fedavg(2),
    "async": async_fedavg(1, rebuild_every=7),
    "fedrec": fedrec(1),
    "fedasync": fedasync(1),
    "fedbuff": fedbuff(1, buffer_size=2),
    "semisync-adaptive": semisync_fedavg(timings="smoothed").with_layers(AdaptivePeriod()),
    "sync-nova-yogi": sync_fedavg(1).with_layers(FedNova(), FedYogi()),
    "semisync-norm-bound": semisync_fedavg(2).with_layers(NormBound()),
    "fedbuff-median": fedbuff(1, buffer_size=2).with_layers(Median()),
    "fedasync-momentum": fedasync(1).with_layers(FedAvgM()),
    "sync-scaffold": sync_fedavg(1).for_solver(Scaffold(0.1))[0],
    "async-scaffold": async_fedavg(1).for_solver(Scaffold(0.1))[0],
}
THREE = (Actor("anna", 0.1, examples=50), Actor("ben", 0.2, examples=70), Actor("carl", 0.3, examples=30))


def _played(policy: Policy, versions: int = 4) -> Play:
    return Play(policy, *THREE).run_until(community_version=versions)


@pytest.mark.parametrize("name", POLICIES)
def test_it_goes_on_from_the_old_model_as_from_a_first_one(name: str) -> None:
    """The old bits under a new number; tasks are void, and nothing that was committed or remembered is mixed again."""
    play = _played(POLICIES[name])
    old = play.published()[1]
    void = {record.task.number for record in play.controller.roster.training}
    steps, latest = play.controller.community.committed_steps, play.version
    actions = play.handle(RolledBack(old.stamp.version, old.community_model))

    assert actions[0] == CommunityPublished(CommunityStamp(latest + 1, steps), 0, old.community_model)
    assert actions[0].community_model.sha256() == play.controller.community.model.sha256()
    fresh = Controller(POLICIES[name], old.community_model)
    assert community_snapshot(play.controller)["arrays"] == community_snapshot(fresh)["arrays"]
    sent = [action for action in actions if isinstance(action, SendTask)]
    assert {action.learner for action in sent} == {"anna", "ben", "carl"}
    assert all(action.task.based_on == CommunityStamp(latest + 1, steps) for action in sent)
    assert not void & {action.task.number for action in sent}

    play.run_until(community_version=latest + 3)
    assert [action.stamp.version for action in play.published()] == list(range(1, latest + 4))
    assert np.isfinite(play.controller.community.model.vector).all()


@pytest.mark.parametrize("name", POLICIES)
def test_learners_that_are_away_or_set_aside_stay_so(name: str) -> None:
    """A rollback gives tasks to those who are there; it makes nobody join."""
    play = _played(POLICIES[name])
    play.handle(LearnerLeft("ben"))
    play.handle(RolledBack(0, _first(play)))
    assert play.controller.roster["ben"].task is None
    assert {record.learner for record in play.controller.roster.training} == {"anna", "carl"}


def _first(play: Play) -> Model:
    return play.controller.policy.extend_model(model(), LAYOUT.size)


def test_what_cannot_be_rolled_back_changes_nothing() -> None:
    """A model that does not exist yet, and a federation that has ended."""
    play = _played(POLICIES["sync"])
    before = snapshot(play.controller)
    for version in (-1, play.version + 1):
        with pytest.raises(UnexpectedEvent, match=f"there is no community model {version} yet; the latest is 4"):
            play.handle(RolledBack(version, model()))
    assert snapshot(play.controller) == before
    play.handle(StopRequested())
    with pytest.raises(UnexpectedEvent, match="has ended"):
        play.handle(RolledBack(0, model()))


def test_a_rollback_is_not_a_round_of_the_stop_rule() -> None:
    """Five rounds are five mixtures; the number that the old model gets is not counted."""
    play = Play(POLICIES["sync"], *THREE, stop=StopRule(rounds=5)).run_until(community_version=4)
    assert not any(isinstance(action, Finish) for action in play.handle(RolledBack(0, model())))
    assert play.controller.latest_rollback == 5
    play.run()
    assert (play.version, play.finish_reason()) == (6, "5 rounds are done")


def test_what_was_committed_to_the_open_round_is_dropped() -> None:
    """One of three has handed in; the next mixture is of what comes after the rollback only."""
    play = _played(POLICIES["sync"], versions=2)
    committed = len(play.committed())
    while len(play.committed()) == committed:
        play.step()
    play.handle(RolledBack(0, model(5, 5, 5)))
    play.run_until(community_version=4)
    after = [item for _, item in play.log[_index(play, RolledBack) :] if isinstance(item, UpdateCommitted)]
    assert [action.learner for action in after] == ["anna", "ben", "carl"]
    assert play.published()[-1].contributors == 3


def _index(play: Play, kind: type) -> int:
    return next(index for index, (_, item) in enumerate(play.log) if isinstance(item, kind))


def test_before_the_start_and_with_a_sample_nobody_new_gets_a_task() -> None:
    """Without enough learners nothing is sent; with a sample only those who are drawn train."""
    controller = Controller(sync_fedavg(1), model(), learners_expected=2)
    controller.handle(LearnerJoined("anna", 10, 10), 0.0)
    actions = controller.handle(RolledBack(0, model()), 1.0)
    assert [type(action) for action in actions] == [CommunityPublished]
    play = Play(sync_fedavg(1).with_layers(Sample(learners=1)), *THREE).run_until(community_version=2)
    sent = [action for action in play.handle(RolledBack(1, model())) if isinstance(action, SendTask)]
    assert len(sent) == len(play.controller.roster.training) == 1


def test_work_that_was_in_vain_is_charged() -> None:
    """The costs of the tasks that a rollback ends are those of a learner that left."""
    play = Play(POLICIES["sync"], *THREE)
    play.run_until(time=1.0)
    play.now = 2.0
    training = [record.learner for record in play.controller.roster.training]
    before = play.costs().by_learner
    play.handle(RolledBack(0, model()))
    after = play.costs().by_learner
    assert training
    assert all(after[name].active == pytest.approx(before[name].active) for name in before)
    assert all(row.active + row.transfer + row.idle + row.away == pytest.approx(2.0) for row in after.values())
