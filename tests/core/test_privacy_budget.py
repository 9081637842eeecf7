"""A privacy budget as one more limit of B_k."""

from __future__ import annotations

import math

import pytest

from core.play import model
from metis.core.controller import Controller
from metis.core.events import (
    Action,
    Budget,
    Finish,
    LearnerJoined,
    LearnerLeft,
    LearnerSetAside,
    RolledBack,
    SendTask,
    TaskFailed,
    UpdateRequest,
)
from metis.core.policies import async_fedavg, semisync_fedavg, sync_fedavg
from metis.core.policy import Policy
from metis.core.privacy_budget import BY_DEADLINE, SPENT, rounds_left, within_privacy
from metis.core.roster import Roster
from metis.core.stop import StopRule


def roster_of(*joined: LearnerJoined) -> Roster:
    roster = Roster()
    for one in joined:
        roster.admit(one)
    return roster


def test_the_budget_is_divided_over_the_rounds_that_are_left() -> None:
    """B_k = min(t_max / t_beta, (S_k - done) / rounds left), at least one; other learners keep theirs."""
    roster = roster_of(
        LearnerJoined("free", 500, 10), LearnerJoined("tight", 500, 10, 100), LearnerJoined("ample", 500, 10, 5000),
        LearnerJoined("poor", 500, 10, 3),
    )  # fmt: skip
    budgets = {name: Budget(40, 7.0) for name in ("free", "tight", "ample", "poor")}
    limited = within_privacy(budgets, roster, 10)
    assert {name: budget.steps for name, budget in limited.items()} == {"free": 40, "tight": 10, "ample": 40, "poor": 1}
    assert all(budget.seconds == 7.0 and budget.batches_per_step == 1 for budget in limited.values())
    whatever = {"tight": Budget(None, 7.0)}
    assert within_privacy(whatever, roster, 10) == whatever


def test_a_period_is_filled_with_larger_batches() -> None:
    """As many batches in a step as fit, never more than the learner has records for; only if it wants it so."""
    roster = roster_of(
        LearnerJoined("large", 500, 10, 100, True), LearnerJoined("small", 30, 10, 100, True),
        LearnerJoined("ample", 500, 10, 5000, True),
    )  # fmt: skip
    limited = within_privacy({name: Budget(45) for name in ("large", "small", "ample")}, roster, 10)
    assert limited == {"large": Budget(10, math.inf, 4), "small": Budget(10, math.inf, 3), "ample": Budget(45)}


@pytest.mark.parametrize(
    ("stop", "left"),
    [
        (StopRule(rounds=40), 30),
        (StopRule(seconds=1000.0), 45),
        (StopRule(update_requests=60), 20),
        (StopRule(rounds=40, seconds=200.0), 5),
        (StopRule(steps=5), 1),
        (StopRule(rounds=10), 1),
    ],
)
def test_how_many_rounds_are_left(stop: StopRule, left: int) -> None:
    """By whichever limit ends first; without one that says it, everything may be used at once."""
    assert rounds_left(stop, 10, 20, 100.0, 20.0, 2, 2) == left


def test_without_a_barrier_a_community_model_is_one_learners_turn() -> None:
    """Of 40 models, each of 4 learners makes ten; a period that is not known says nothing."""
    assert rounds_left(StopRule(rounds=40), 0, 0, 0.0, math.inf, 4, 1) == 10
    assert rounds_left(StopRule(seconds=40.0), 0, 0, 0.0, math.inf, 4, 1) == 1


# --- in a federation ----------------------------------------------------------------------------


def played(
    policy: Policy, stop: StopRule, *joined: LearnerJoined, times: dict[str, float]
) -> tuple[Controller, list[tuple[float, Action]]]:
    """The actions of a run with these learners, which make exactly the steps that they are asked for."""
    controller = Controller(policy, model(), stop=stop, learners_expected=len(joined))
    log: list[tuple[float, Action]] = []
    due: list[tuple[float, SendTask]] = []

    def note(actions: list[Action], now: float) -> None:
        for action in actions:
            log.append((now, action))
            if isinstance(action, SendTask):
                budget = action.task.budget
                assert budget.steps is not None
                due.append((now + budget.steps * budget.batches_per_step * times[action.learner], action))

    for one in joined:
        note(controller.handle(one, 0.0), 0.0)
    while due and not controller.finished:
        due.sort(key=lambda item: item[0])
        now, action = due.pop(0)
        budget, pace = action.task.budget, times[action.learner]
        assert budget.steps is not None
        seconds = budget.steps * budget.batches_per_step * pace
        update = UpdateRequest(action.learner, action.task.number, budget.steps, seconds, pace, model(1.0, 1.0, 1.0))
        note(controller.handle(update, now), now)
    return controller, log


def steps_of(log: list[tuple[float, Action]], learner: str) -> list[Budget]:
    return [action.task.budget for _, action in log if isinstance(action, SendTask) and action.learner == learner]


FAST_AND_SLOW = {"fast": 0.1, "slow": 1.0}


def test_a_fast_site_never_exceeds_its_budget_and_lasts_until_the_end() -> None:
    """Semi-synchronous, ten times as fast: without the limit it would make 20,000 steps in 40 rounds."""
    joined = (LearnerJoined("fast", 5000, 100, 3200), LearnerJoined("slow", 5000, 100))
    _, log = played(semisync_fedavg(1), StopRule(rounds=40), *joined, times=FAST_AND_SLOW)
    made = [budget.steps or 0 for budget in steps_of(log, "fast")]
    assert sum(made) <= 3200 and len(made) == 40 and max(made) <= 82
    assert [budget.steps for budget in steps_of(log, "slow")] == [50] * 40
    assert not [action for _, action in log if isinstance(action, LearnerSetAside) and action.reason != SPENT]


def test_larger_batches_keep_the_fast_site_busy() -> None:
    """The same steps, and batches of nearly the whole period."""
    joined = (LearnerJoined("fast", 5000, 100, 3200, True), LearnerJoined("slow", 5000, 100))
    _, log = played(semisync_fedavg(1), StopRule(rounds=40), *joined, times=FAST_AND_SLOW)
    budgets = steps_of(log, "fast")[1:]
    assert sum(budget.steps or 0 for budget in budgets) <= 3200
    assert all((budget.steps or 0) * budget.batches_per_step > 0.9 * 500 for budget in budgets)


@pytest.mark.parametrize(
    "policy", [sync_fedavg(1), semisync_fedavg(1), async_fedavg(1)], ids=lambda policy: policy.name
)
def test_at_the_budget_a_learner_gets_no_more_tasks_and_the_federation_goes_on(policy: Policy) -> None:
    """It is set aside with the reason; the others train until the end."""
    joined = (LearnerJoined("fast", 5000, 100, 3), LearnerJoined("slow", 5000, 100))
    controller, log = played(policy, StopRule(rounds=8), *joined, times=FAST_AND_SLOW)
    assert sum(budget.steps or 0 for budget in steps_of(log, "fast")) == 3
    assert [action for _, action in log if isinstance(action, LearnerSetAside)] == [LearnerSetAside("fast", SPENT)]
    assert controller.rounds == 8 and isinstance(log[-1][1], Finish)


def test_a_spent_learner_joins_for_nothing_and_a_deadline_is_refused() -> None:
    """Both are set aside when they join; one whose budget was renewed trains."""
    controller = Controller(sync_fedavg(1), model())
    assert controller.handle(LearnerJoined("site", 500, 10, 0), 0.0) == [LearnerSetAside("site", SPENT)]
    assert isinstance(controller.handle(LearnerJoined("site", 500, 10, 9), 1.0)[0], SendTask)
    by_deadline = Controller(semisync_fedavg(1, budget="deadline"), model())
    assert by_deadline.handle(LearnerJoined("site", 500, 10, 9), 0.0) == [LearnerSetAside("site", BY_DEADLINE)]


def test_a_task_is_spent_whatever_becomes_of_it() -> None:
    """Failed, lost with a departure, or void after a rollback: the site has reserved its steps."""
    controller = Controller(sync_fedavg(1), model(), stop=StopRule(rounds=4))
    sent = controller.handle(LearnerJoined("site", 500, 10, 60), 0.0)[0]
    assert isinstance(sent, SendTask) and sent.task.budget.steps == 15
    failed = controller.handle(TaskFailed("site", 0, "out of memory"), 1.0)
    assert controller.roster["site"].steps_left == 60 - 15 - 11 and isinstance(failed[-1], SendTask)
    controller.handle(LearnerLeft("site"), 2.0)
    assert controller.handle(LearnerJoined("site", 500, 10, 1), 3.0)
    assert controller.roster["site"].steps_left == 0
    assert controller.handle(RolledBack(0, model()), 4.0)[-1] == LearnerSetAside("site", SPENT)


def test_a_learner_that_was_set_aside_for_something_else_is_not_set_aside_twice() -> None:
    """Too many failures come first."""
    controller = Controller(sync_fedavg(1), model(), refusals_allowed=0)
    controller.handle(LearnerJoined("site", 500, 10, 1), 0.0)
    actions = controller.handle(TaskFailed("site", 0, "out of memory"), 1.0)
    assert [type(action) for action in actions].count(LearnerSetAside) == 1
