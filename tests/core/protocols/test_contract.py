"""What every protocol promises to the controller."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from core.play import Actor, Play
from metis.core.events import Budget, LearnerId, RoundMeasure, SendTask
from metis.core.layers import AcceptLate, AdaptivePeriod, Probe, ScheduledLambda
from metis.core.policies import POLICIES, semisync_fedavg
from metis.core.policy import Policy
from metis.core.protocols import CommunicationProtocol
from metis.core.roster import LearnerRecord, Roster
from metis.core.schedules import Moment, Schedule
from metis.errors import InternalError

CASES = {
    **{name: make() for name, make in POLICIES.items()},
    "deadline": semisync_fedavg(1, budget="deadline", cold_start_limit=2.0),
    "scheduled": semisync_fedavg().with_layers(ScheduledLambda(Schedule(2, 1, 3))),
    "adaptive": semisync_fedavg(timings="smoothed", exchange="inside").with_layers(AdaptivePeriod()),
}
every_case = pytest.mark.parametrize("policy", CASES.values(), ids=CASES)


class Watched:
    """A protocol that is asked `ready` three times instead of once, and whose answers are counted."""

    def __init__(self, protocol: CommunicationProtocol) -> None:
        self.protocol = protocol
        self.ready_answers: list[bool] = []
        self.tasks_asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.protocol, name)

    def ready(self, roster: Roster, now: float) -> bool:
        answers = {(self.protocol.ready(roster, now), self.protocol.deadline) for _ in range(3)}
        assert len(answers) == 1, "ready may be asked any number of times"
        self.ready_answers.append(next(iter(answers))[0])
        return self.ready_answers[-1]

    def tasks(
        self, who: Sequence[LearnerRecord], roster: Roster, moment: Moment, measure: RoundMeasure | None
    ) -> dict[LearnerId, Budget]:
        self.tasks_asked += 1
        assert self.tasks_asked == sum(self.ready_answers), "once for each time that it was ready"
        return self.protocol.tasks(who, roster, moment, measure)


def federation(policy: Policy) -> Play:
    """Learners of different speed, one far away, one that leaves and returns, and one that joins late."""
    play = Play(policy, Actor("a", 0.03), Actor("b", 0.1, transfer=0.4), Actor("c", 0.3, examples=900))
    play.leave("b", at=12.0)
    play.join("b", at=16.0)
    play.cast(Actor("d", 0.05), at=9.0)
    return play


@every_case
def test_ready_is_repeatable_and_tasks_are_asked_once_a_round(policy: Policy) -> None:
    plain, play = federation(policy), federation(policy)
    play.controller.protocol = watched = Watched(play.controller.protocol)
    for each in (plain, play):
        each.run_until(time=60.0)
    assert play.log == plain.log
    assert watched.tasks_asked == sum(watched.ready_answers) > 3
    sent = play.items(SendTask)
    assert {item.learner for item in sent} == set("abcd")
    assert all(item.task.budget.steps is None or item.task.budget.steps >= 1 for item in sent)
    assert all(item.task.budget.seconds > 0 for item in sent)


@every_case
def test_nobody_to_give_a_task_to(policy: Policy) -> None:
    """A layer may choose nobody: no task, no error, and a moment to wake up that is a number."""
    protocol = policy.start_protocol()
    assert protocol.tasks([], Roster(), Moment(seconds=3.0), None) == {}
    assert protocol.deadline >= 3.0


@every_case
def test_a_copy_of_a_used_protocol_is_a_fresh_one(policy: Policy) -> None:
    play = federation(policy).run_until(time=20.0)
    fresh = replace(play.controller.protocol)  # type: ignore[type-var]
    assert repr(fresh) == repr(policy.start_protocol())
    assert fresh.deadline == math.inf


@every_case
def test_what_a_protocol_says_of_itself_fits_together(policy: Policy) -> None:
    """Periods are those of rounds; only they can be paced, or filled."""
    protocol = policy.protocol
    assert protocol.has_rounds or not protocol.has_period
    assert protocol.has_period or not protocol.fills_the_period
    if protocol.has_period:
        assert protocol.paced(AdaptivePeriod()).has_period
        assert protocol.at_least("mine", lambda learners: 1.0).has_period
        assert protocol.probing(Probe()).has_period
        assert protocol.accepting_late(AcceptLate()).accepts_stale
    else:
        with pytest.raises(InternalError, match=f"{type(protocol).__name__} has no periods"):
            protocol.at_least("mine", lambda learners: 1.0)
        with pytest.raises(InternalError, match=f"{type(protocol).__name__} has no cold start"):
            protocol.probing(Probe())
        with pytest.raises(InternalError, match=f"{type(protocol).__name__} has no periods"):
            protocol.accepting_late(AcceptLate())
        with pytest.raises(InternalError, match=f"{type(protocol).__name__} has no periods"):
            protocol.paced(AdaptivePeriod())
