"""What an administrator does to a running controller: pause and resume, another stop rule, members that come and go."""

from __future__ import annotations

import math

import pytest

from core.play import Actor, Play, model
from metis.core.controller import Controller
from metis.core.costs import Power
from metis.core.events import (
    Finish,
    LearnerJoined,
    LearnersExpected,
    MemberAdded,
    MemberRemoved,
    Paused,
    Resumed,
    SendTask,
    StopRequested,
    StopRuleChanged,
    UpdateCommitted,
    UpdateRequest,
)
from metis.core.policies import async_fedavg, semisync_fedavg, sync_fedavg
from metis.core.policy import Policy
from metis.core.stop import StopRule, Target
from metis.errors import UnexpectedEvent

EVERY = pytest.mark.parametrize("policy", [sync_fedavg(1), semisync_fedavg(2), async_fedavg(1)])


def sent(actions: list[object]) -> list[str]:
    return [action.learner for action in actions if isinstance(action, SendTask)]


@EVERY
def test_a_paused_federation_keeps_what_comes_and_sends_nothing(policy: Policy) -> None:
    """Open tasks end and count; no deadline is due, not even the end of the run; resuming goes on from there."""
    play = Play(policy, gpu=0.03, cpu=0.30, stop=StopRule(rounds=3, seconds=1e6))
    play.run_until(community_version=1)
    tasks = len(play.items(SendTask))

    play.handle(Paused("kim"))
    assert play.controller.paused and play.controller.deadline == math.inf
    play.run_until()  # until nothing can happen any more

    assert len(play.items(SendTask)) == tasks and not play.controller.finished
    assert len(play.committed()) == tasks, "what was being trained counts"
    assert play.waiting() == ["gpu", "cpu"]

    assert set(sent(play.handle(Resumed("kim")))) == {"gpu", "cpu"}
    assert play.run().version == 3


def test_pausing_does_not_make_anybody_late() -> None:
    """A semi-synchronous period whose deadline passes during a pause is not over: the run's clock stood still."""
    play = Play(semisync_fedavg(2), gpu=0.03, cpu=0.30, stop=StopRule(rounds=3))
    play.run_until(community_version=1)
    due = play.controller.deadline
    play.handle(Paused())
    play.handle(Resumed())
    assert play.controller.deadline == due < math.inf
    assert not play.run().refused()


@EVERY
def test_a_finished_federation_goes_on_with_a_new_rule(policy: Policy) -> None:
    """All get new tasks at once, as what they were doing at the end was refused; it ends where the new rule says."""
    play = Play(policy, gpu=0.03, cpu=0.30, stop=StopRule(rounds=2)).run()
    assert play.version == 2 and play.controller.finished

    assert set(sent(play.handle(StopRuleChanged(StopRule(rounds=4))))) == {"gpu", "cpu"}
    assert not play.controller.finished

    play.run()
    assert play.version == 4 and play.controller.finished
    assert [end.reason for end in play.items(Finish)] == ["2 rounds are done", "4 rounds are done"]


@pytest.mark.parametrize(
    ("rule", "reason"),
    [(StopRule(rounds=1), "2 rounds are done"), (StopRule(rounds=9, seconds=1e-3), "0.001 seconds have passed")],
)
def test_a_rule_that_leaves_nothing_ends_it_again(rule: StopRule, reason: str) -> None:
    """A finished federation stays so, and says why by the new rule."""
    play = Play(sync_fedavg(1), gpu=0.03, stop=StopRule(rounds=2)).run()

    assert play.handle(StopRuleChanged(rule)) == [Finish(reason)]
    assert play.controller.finished


def test_a_rule_is_changed_while_it_runs() -> None:
    """A shorter one ends it after the open round, which still counts."""
    play = Play(sync_fedavg(1), gpu=0.03, cpu=0.30, stop=StopRule(rounds=9))
    play.run_until(community_version=2)
    assert play.handle(StopRuleChanged(StopRule(rounds=2))) == []

    assert play.run().version == 3


def test_one_that_was_stopped_goes_on_too() -> None:
    """Also in the middle of a round; what was being trained then is late, and nobody waits for it in vain."""
    play = Play(sync_fedavg(1), gpu=0.03, cpu=0.30, stop=StopRule(rounds=9))
    play.run_until(community_version=1)
    play.step()
    play.handle(StopRequested("enough", publish=True))
    assert play.version == 2

    play.handle(StopRuleChanged(StopRule(rounds=4, target=Target("accuracy", 2.0)), "kim"))

    assert play.run().version == 4


def test_a_removed_member_leaves_at_once() -> None:
    """Its open task is void, the round goes on without it, and it may not come back before it is added again."""
    play = Play(sync_fedavg(1), gpu=0.03, cpu=0.30, stop=StopRule(rounds=4))
    play.run_until(community_version=1)
    play.handle(MemberRemoved("cpu"))
    assert play.tasks().keys() == {"gpu"}

    with pytest.raises(UnexpectedEvent, match="'cpu' joined, but it was removed from this federation"):
        play.handle(LearnerJoined("cpu", 500, 100))
    play.run_until(community_version=2)
    play.handle(MemberAdded("cpu"))
    play.handle(LearnerJoined("cpu", 500, 100))

    play.run()
    assert {"cpu", "gpu"} == {committed.learner for committed in play.committed()[-2:]}


@pytest.mark.parametrize("withdraw", [False, True])
def test_a_removed_member_takes_its_contribution_along_if_it_shall(withdraw: bool) -> None:
    """As a learner that withdraws; otherwise its last local model stays in the mixture."""
    play = Play(async_fedavg(1), Actor("a", 0.1), Actor("b", 0.2), stop=StopRule(rounds=20))
    play.run_until(community_version=6)
    assert play.controller.community.contributors == 2

    play.handle(MemberRemoved("b", withdraw))

    assert play.controller.community.contributors == 2 - withdraw


def test_the_federation_waits_for_as_many_as_are_members() -> None:
    """Before the first task: one more, or one less, and never none; twice the same changes nothing."""
    controller = Controller(sync_fedavg(1), model(), learners_expected=2)
    assert controller.handle(MemberAdded("c"), 0.0) == []
    assert controller.handle(MemberAdded("c"), 0.0) == []
    assert controller.learners_expected == 3
    for name in ("a", "b"):
        assert controller.handle(LearnerJoined(name, 10, 1), 0.0) == []

    assert sent(controller.handle(MemberRemoved("c"), 1.0)) == ["a", "b"]

    for name in ("a", "b", "d"):
        controller.handle(MemberRemoved(name), 2.0)
    assert controller.learners_expected == 1


def test_a_number_that_is_not_known_yet_stays_so() -> None:
    """In a replay the number of learners comes later."""
    controller = Controller(sync_fedavg(1), model(), learners_expected=None)
    controller.handle(MemberAdded("a"), 0.0)
    assert controller.learners_expected is None
    controller.handle(LearnersExpected(1), 0.0)
    assert sent(controller.handle(LearnerJoined("a", 10, 1), 0.0)) == ["a"]


def test_what_a_new_member_draws_is_charged() -> None:
    """The power that it was added with counts; a removed one is away from then on, and one that never came costs
    nothing."""
    play = Play(sync_fedavg(1), Actor("a", 1.0, 1, 1), stop=StopRule(rounds=2), powers={"a": Power(1.0)})
    play.handle(MemberAdded("b", 5.0, 2.0, "watt"))
    play.cast(Actor("b", 1.0, 1, 1), 0.0)
    play.run_until(community_version=1)
    energy = play.costs().by_learner["b"].energy
    assert energy.active == 5 * play.costs().by_learner["a"].energy.active > 0

    play.handle(MemberRemoved("nobody"))
    play.handle(MemberRemoved("b"))
    before = play.costs().by_learner["b"]
    play.run()
    after = play.costs().by_learner["b"]
    assert (after.active, after.idle) == (before.active, before.idle) and after.away > before.away


def test_updates_of_a_removed_member_are_void() -> None:
    """Nobody commits what it hands in afterwards."""
    controller = Controller(async_fedavg(1), model(), learners_expected=1)
    (task,) = controller.handle(LearnerJoined("a", 10, 1), 0.0)
    assert isinstance(task, SendTask)
    controller.handle(MemberRemoved("a"), 1.0)
    with pytest.raises(UnexpectedEvent, match="it has no open task"):
        controller.handle(UpdateRequest("a", task.task.number, 1, 1.0, 1.0, model()), 2.0)
    controller.handle(MemberAdded("a"), 3.0)
    again = controller.handle(LearnerJoined("a", 10, 1), 3.0)
    assert sent(again) == ["a"] and not any(isinstance(action, UpdateCommitted) for action in again)
