"""A recorded run under its own policy and under others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import metis
from metis.core.controller import Controller
from metis.core.events import (
    CommunityPublished,
    Evaluated,
    Finish,
    LearnerJoined,
    LearnerSetAside,
    LearnersExpected,
    SendTask,
    UpdateRequest,
)
from metis.core.model import Layout, Model, TensorSpec
from metis.core.policy import Policy
from metis.core.stop import StopRule
from metis.planning.counterfactual import decisions
from metis.planning.forecast import PlannedLearner
from metis.runs.trace import without_weights
from metis.simulation.loop import ScheduledEvent, Trace, play
from metis.simulation.recording import RecordedLearners, recorded_tasks, replay_otherwise
from simulation.federations import POLICIES, simulate_lively, still

LINK = metis.Link(latency=0.05, upload=4_000)
ABSENCES = [
    {},
    {"availability": metis.RecordedAvailability(((3.0, 7.5), (20.0, 26.0)))},
    {"link": LINK},
    {"availability": metis.RecordedAvailability(((0.0, 4.0),))},
]


def again(events: Trace, policy: Policy) -> Trace:
    controller = Controller(policy, Model.empty(), stop=StopRule(seconds=events[-1][0]), learners_expected=None)
    return replay_otherwise(events, controller)


# Their periods follow from the models, which a record does not hold.
MEASURED = ("semisync_adaptive", "semisync")


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in MEASURED])
def test_the_recorded_policy_gives_the_recorded_course(name: str) -> None:
    """Jitter, drift, dropouts, links, late learners: every event and decision comes out again."""
    events = simulate_lively(name).events
    trace = again(events, POLICIES[name]())

    end = events[-1][0]
    assert decisions(trace, end) == decisions(events, end)
    # And each at its own moment, but for what the end of the record cuts off.
    kept = [(at, type(item)) for at, item in events if not isinstance(item, (Finish, Evaluated))]
    made = [(at, type(item)) for at, item in trace if not isinstance(item, (Finish, LearnersExpected))]
    assert [moment for moment in made if moment[0] < end] == [moment for moment in kept if moment[0] < end]


def direct(policy: Policy, seconds: float = 40.0) -> Trace:
    return still([12, 6, 8, 5], [0.05, 0.3, 0.1, 0.2], test=None, learner=ABSENCES).simulate(
        policy, seconds=seconds
    ).events  # fmt: skip


def schedule(trace: Trace) -> dict[str, list[tuple[Any, ...]]]:
    """Every learner's tasks and updates; which of two at one moment comes first is left open."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for at, item in trace:
        if isinstance(item, SendTask):
            found.setdefault(item.learner, []).append(("task", round(at, 6), item.task.budget.steps))
        elif isinstance(item, UpdateRequest):
            found.setdefault(item.learner, []).append(("update", round(at, 6), item.steps, round(item.seconds, 6)))
    return found


@pytest.mark.parametrize("recorded", ["sync_fedavg", "semisync_fedavg", "fedrec"])
@pytest.mark.parametrize("other", ["sync_fedavg", "semisync_fedavg", "semisync_deadline", "async_fedavg", "fedbuff"])
def test_another_policy_gives_what_a_simulation_of_it_gives(recorded: str, other: str) -> None:
    """With constant speeds, links and absences the record holds all that the other policy depends on."""
    trace = again(direct(POLICIES[recorded]()), POLICIES[other]())
    wanted = direct(POLICIES[other]())

    assert schedule(trace) == schedule(wanted)
    versions = [[item.stamp.version for _, item in c if isinstance(item, CommunityPublished)] for c in (trace, wanted)]
    assert versions[0] == versions[1]


def test_a_task_takes_what_the_learner_took_at_that_time() -> None:
    """A learner that becomes three times as slow is so under another policy as well, from the same moment on."""
    federation = still([10, 10], [metis.Speed(0.1, profile=((20.0, 3.0),)), 0.1], test=None)
    events = federation.simulate(metis.fedrec(1), seconds=60).events
    trace = again(events, metis.sync_fedavg(2))

    rounds = [at for at, item in trace if isinstance(item, CommunityPublished)]
    lengths = [round(after - before, 6) for before, after in zip([0.0, *rounds], rounds, strict=False)]
    assert lengths[:10] == [2.0] * 10
    assert set(lengths[11:]) == {6.0}


def test_a_learner_that_handed_nothing_in_works_as_the_file_says_or_not_at_all() -> None:
    """Without an update there is nothing to know its speed by."""
    federation = still([10, 1000], [0.1, 0.1], test=None)
    events = federation.simulate(metis.fedrec(1), seconds=20).events
    assert [task.answer for task in recorded_tasks(events)["learner1"]] == [None]

    def updates(nominal: dict[str, float]) -> set[str]:
        controller = Controller(
            metis.semisync_fedavg(1, cold_start_limit=1.0),
            Model.empty(),
            stop=StopRule(seconds=20),
            learners_expected=None,
        )
        trace = replay_otherwise(events, controller, nominal)
        return {item.learner for _, item in trace if isinstance(item, UpdateRequest)}

    assert updates({}) == {"learner0"}
    assert updates({"learner1": 0.1}) == {"learner0", "learner1"}


def test_an_invalid_update_is_refused_again() -> None:
    """Its weights are not in the record, but that they were unfit is; three in a row set the learner aside."""
    unfit = Model(Layout((TensorSpec("w", (1,)),)), np.zeros(1, np.float32))
    crew = {name: PlannedLearner(name, 6, 2, pace) for name, pace in (("good", 0.1), ("bad", 0.15))}

    def work(action: SendTask, now: float) -> ScheduledEvent:
        answer = crew[action.learner].work(action, now)
        assert isinstance(answer.event, UpdateRequest)
        if action.learner == "good":
            return answer
        return ScheduledEvent(answer.at, replace(answer.event, local_model=unfit))

    joins = [ScheduledEvent(0.0, LearnerJoined(name, 6, 2)) for name in crew]
    controller = Controller(metis.sync_fedavg(1), Model.empty(), stop=StopRule(seconds=5), learners_expected=2)
    events = [(at, without_weights(item)) for at, item in play(controller, joins, work)]
    assert [item.learner for _, item in events if isinstance(item, LearnerSetAside)] == ["bad"]

    assert decisions(again(events, metis.sync_fedavg(1)), 5.0) == decisions(events, 5.0)


def test_a_record_without_tasks_gives_an_empty_course() -> None:
    """Learners that came and never began."""
    events: Trace = [(0.0, LearnerJoined("a", 5, 1))]
    assert replay_otherwise(events, Controller(metis.fedrec(), Model.empty())) == []
    assert RecordedLearners(events, {})
