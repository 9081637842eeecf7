"""Events that the runtime of a real federation brings, and what a controller believes of a claimed speed."""

from __future__ import annotations

import pytest

from core.play import Actor, Play, model
from metis.core.controller import Controller, claim_problem, within_elapsed
from metis.core.events import (
    Budget,
    CommunityStamp,
    ControllerAway,
    LearnerJoined,
    LearnersExpected,
    LocalTask,
    SendTask,
    UpdateRequest,
)
from metis.core.policies import semisync_fedavg, sync_fedavg


def test_a_federation_begins_once_it_is_known_how_many_are_enough() -> None:
    """Until then everybody waits; the number may come after the learners."""
    controller = Controller(sync_fedavg(), model(), learners_expected=None)
    assert not controller.handle(LearnerJoined("a", 100, 10), 0.0)
    assert not controller.handle(LearnerJoined("b", 100, 10), 1.0)
    assert not controller.handle(LearnersExpected(3), 2.0)
    assert not controller.started

    actions = controller.handle(LearnersExpected(2), 3.0)

    assert [action.learner for action in actions if isinstance(action, SendTask)] == ["a", "b"]


@pytest.mark.parametrize("away", [0.0, 7.0])
def test_training_goes_on_while_the_controller_is_away(away: float) -> None:
    """Its clock stood still: what a learner did meanwhile is neither too quick nor without an exchange."""
    play = Play(semisync_fedavg(), Actor("a", 0.5, transfer=2.0))
    play.step()
    play.handle(ControllerAway(away))
    record = play.controller.roster["a"]
    assert record.unclocked == away

    play.run_until(community_version=1)

    assert record.overhead == pytest.approx(2.0 + away)
    assert record.unclocked == 0


@pytest.mark.parametrize(("elapsed", "believed"), [(0.0, 9.0), (10.0, pytest.approx(2 * 10.0 / 49))])
def test_a_claimed_time_per_batch_is_bounded_by_the_time_that_has_passed(elapsed: float, believed: float) -> None:
    """Except where none has passed on the controller's clock, which then proves nothing."""
    controller = Controller(semisync_fedavg(), model())
    task = next(a.task for a in controller.handle(LearnerJoined("a", 500, 10), 5.0) if isinstance(a, SendTask))

    controller.handle(UpdateRequest("a", task.number, 50, elapsed, 9.0, model()), 5.0 + elapsed)

    assert controller.roster["a"].time_per_batch == believed


@pytest.mark.parametrize(("steps", "counted"), [(1, 1), (3000, 3000), (100_000, 3300), (2**53, 3300)])
def test_steps_count_as_far_as_they_fit_into_the_time_that_has_passed(steps: int, counted: int) -> None:
    """By the learner's own time per batch: three times what passed, and a second that a clock may have stood still."""
    update = UpdateRequest("a", 0, steps, 1e9, 0.01, model())

    believed = within_elapsed(update, elapsed=10.0)

    assert (believed.steps, believed.seconds) == (counted, 10.0)


def test_a_task_without_a_number_of_steps_does_not_allow_any_number() -> None:
    """More steps than can be counted are refused, whatever the budget says."""
    task = LocalTask(0, CommunityStamp(), Budget(None, 10.0))
    assert claim_problem(UpdateRequest("a", 0, 2**53, 1.0, 0.1, model()), task) is None
    problem = claim_problem(UpdateRequest("a", 0, 2**63, 1.0, 0.1, model()), task)
    assert problem == f"it claims {2**63} steps, the task allows 1 to {2**53}"
