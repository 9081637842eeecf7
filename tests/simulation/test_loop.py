"""The loop without weights against the simulator, and a measured pace against a simulated speed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import metis
from metis.core.controller import Controller
from metis.core.events import Budget, LearnerJoined, LearnerLeft, LearnersExpected, SendTask, UpdateRequest
from metis.core.model import Model
from metis.core.stop import StopRule
from metis.planning.forecast import PlannedLearner
from metis.runs.trace import to_record
from metis.simulation.loop import Pace, ScheduledEvent, Stretch, play
from simulation.federations import POLICIES, still

LINK = metis.Link(latency=0.03, upload=2_000, download=5_000)
MODEL_BYTES = 1000  # of `still`
BATCHES, SPEEDS = [7, 5, 3, 9], [0.1, 0.4, 0.03, 0.2]


def members() -> list[PlannedLearner]:
    links = [metis.Link(), LINK, metis.Link(), LINK]
    return [
        PlannedLearner(
            f"learner{k}", 2 * count, 2, speed, link.download_time(MODEL_BYTES), link.upload_time(MODEL_BYTES)
        )
        for k, (count, speed, link) in enumerate(zip(BATCHES, SPEEDS, links, strict=True))
    ]


def as_json(events: Any) -> list[dict[str, Any]]:
    hidden = ("loss", "contribution_value")  # of weights
    return [{key: value for key, value in to_record(*event).items() if key not in hidden} for event in events]


@pytest.mark.parametrize("name", POLICIES)
def test_the_course_is_the_simulators_to_the_last_bit(name: str) -> None:
    """Every event and action of a simulated run, at the same moments, without weights."""
    federation = still(BATCHES, SPEEDS, test=None, learner=[{}, {"link": LINK}, {}, {"link": LINK}])
    run = federation.simulate(POLICIES[name](), rounds=15, seconds=60)

    crew = {member.name: member for member in members()}
    controller = Controller(POLICIES[name](), Model.empty(), stop=StopRule(15, 60), learners_expected=4)
    joins = [
        ScheduledEvent(0.0, LearnerJoined(member.name, member.examples, member.batch_size)) for member in crew.values()
    ]
    trace = list(play(controller, joins, lambda action, now: crew[action.learner].work(action, now)))

    assert as_json(trace) == as_json(run.events)


def test_no_task_is_sent_before_the_beginning() -> None:
    """A federation that waited for others begins when it did, however many were there before."""
    crew = {member.name: member for member in members()}
    joins = [ScheduledEvent(float(k), LearnerJoined(f"learner{k}", 6, 2)) for k in range(4)]
    controller = Controller(metis.sync_fedavg(1), Model.empty(), stop=StopRule(rounds=1), learners_expected=None)
    scheduled = [*joins, ScheduledEvent(7.0, LearnersExpected(2))]
    trace = list(play(controller, scheduled, lambda action, now: crew[action.learner].work(action, now)))

    assert {at for at, item in trace if isinstance(item, SendTask)} == {7.0}


def test_what_cannot_be_any_more_is_left_out() -> None:
    """A second joining, a leaving of nobody, and the answer of one that has left change nothing."""
    joined = LearnerJoined("learner0", 6, 2)
    scheduled = [
        ScheduledEvent(0.0, joined),
        ScheduledEvent(0.1, joined),
        ScheduledEvent(0.1, LearnerLeft("nobody")),
        ScheduledEvent(0.2, LearnerLeft("learner0")),
    ]
    controller = Controller(metis.sync_fedavg(1), Model.empty(), stop=StopRule(rounds=1))
    trace = list(play(controller, scheduled, members()[0].work))

    assert [type(item) for _, item in trace] == [LearnerJoined, SendTask, LearnerLeft]


def test_a_task_without_an_answer_holds_only_its_learner() -> None:
    """A learner without a known answer stays at work; the others go on if the policy lets them."""
    crew = {member.name: member for member in members()}
    joins = [ScheduledEvent(0.0, LearnerJoined(name, 6, 2)) for name in crew]

    def work(action: SendTask, now: float) -> ScheduledEvent | None:
        return None if action.learner == "learner1" else crew[action.learner].work(action, now)

    controller = Controller(metis.fedrec(1), Model.empty(), stop=StopRule(update_requests=40), learners_expected=4)
    trace = list(play(controller, joins, work))
    assert {item.learner for _, item in trace if isinstance(item, UpdateRequest)} == set(crew) - {"learner1"}


paces = st.floats(0.01, 2.0)
budgets = st.builds(
    Budget, st.none() | st.integers(1, 60), st.floats(0.01, 20.0)
) | st.builds(Budget, st.integers(1, 60))  # fmt: skip


@given(paces, budgets)
def test_a_constant_pace_is_a_constant_speed(pace: float, budget: Budget) -> None:
    """The same steps and seconds, to the last bit."""
    speed = metis.Speed(pace).spend(budget, 0.0, np.random.default_rng(0))
    assert Pace([Stretch(0.0, pace, pace, 0.0)]).spend(budget, 0.0) == speed


@given(st.lists(st.tuples(st.floats(0.1, 5.0), paces), min_size=1, max_size=6), budgets, st.floats(0.0, 12.0))
def test_a_changing_pace_is_a_changing_speed(changes: list[tuple[float, float]], budget: Budget, start: float) -> None:
    """Batch by batch as slow as when it begins."""
    since, stretches = 0.0, []
    for length, pace in changes:
        stretches.append(Stretch(since, pace, pace, 0.0))
        since += length
    first = stretches[0].pace
    profile = tuple((stretch.since, stretch.pace / first) for stretch in stretches)
    speed = metis.Speed(first, profile=profile).spend(budget, start, np.random.default_rng(0))
    pace_spent = Pace(stretches).spend(budget, start)

    # A batch that begins within a rounding of a change may fall on either side of it.
    assert pace_spent.steps == pytest.approx(speed.steps, abs=1)
    if pace_spent.steps == speed.steps:
        assert pace_spent.seconds == pytest.approx(speed.seconds, abs=max(pace for _, pace in changes))


def test_a_budget_without_an_end_is_refused() -> None:
    """Neither steps nor seconds: nobody could ever be done."""
    with pytest.raises(ValueError, match="without an end"):
        Pace([Stretch(0.0, 1.0, 1.0, 0.0)]).spend(Budget(None, math.inf), 0.0)
