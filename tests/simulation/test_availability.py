"""Learners that are away: at the start, in the middle of a task, now and then, or for good."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import metis
from metis.core.events import LearnerJoined, LearnerLeft, SendTask, UpdateRequest
from metis.simulation.availability import Always, RandomAvailability, RecordedAvailability
from simulation.federations import POLICIES, still


def events_of(run: metis.Run, learner: str, *kinds: type) -> list[tuple[float, type]]:
    """When these things happened to this learner."""
    return [
        (at, type(item))
        for at, item in run.events
        if isinstance(item, kinds) and getattr(item, "learner", "") == learner
    ]


def shaky(policy: metis.Policy, *away: tuple[float, float], **stop: Any) -> metis.Run:
    """The second of three learners is away in the given spans."""
    absent = {"availability": RecordedAvailability(away)}
    return still([4, 4, 4], [0.25, 0.25, 0.5], learner=[{}, absent, {}]).simulate(policy, **stop)


def test_a_learner_that_is_always_there_is_never_away() -> None:
    """The default."""
    assert list(Always().absences(np.random.default_rng(0))) == []


def test_random_absences_are_endless_in_order_and_have_the_asked_means() -> None:
    """Exponential times: the means of n spans are the asked ones within five standard errors."""
    spans = list(itertools.islice(RandomAvailability(3.0, 0.5).absences(np.random.default_rng(1)), 5000))

    edges = [edge for span in spans for edge in span]
    assert edges == sorted(edges)
    away = np.array([back - leaves for leaves, back in spans])
    present = np.diff([0.0, *edges])[::2]
    assert away.mean() == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(5000))
    assert present.mean() == pytest.approx(3.0, abs=5 * 3.0 / math.sqrt(5000))


@pytest.mark.parametrize(
    "away", [((2.0, 1.0),), ((1.0, 1.0),), ((1.0, 3.0), (2.0, 4.0)), ((-5.0, -1.0),), ((math.nan, 1.0),)]
)
def test_impossible_records_are_refused(away: tuple[tuple[float, float], ...]) -> None:
    """Spans end after they begin, do not overlap, and time begins at 0."""
    with pytest.raises(ValueError, match="absences are spans"):
        RecordedAvailability(away)


@pytest.mark.parametrize("means", [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (math.inf, 1.0)])
def test_impossible_means_are_refused(means: tuple[float, float]) -> None:
    """Both must be real spans of time."""
    with pytest.raises(ValueError, match="must be greater than 0 seconds"):
        RandomAvailability(*means)


@pytest.mark.parametrize("policy", POLICIES)
def test_away_at_the_start(policy: str) -> None:
    """The others start at once, the absent one joins when it is there and gets a task."""
    run = shaky(POLICIES[policy](), (0.0, 3.0), seconds=12)

    assert events_of(run, "learner0", LearnerJoined, SendTask)[:2] == [(0.0, LearnerJoined), (0.0, SendTask)]
    joined, sent, *_ = events_of(run, "learner1", LearnerJoined, SendTask)
    assert joined == (3.0, LearnerJoined)
    assert sent[1] is SendTask
    assert run.costs.by_learner["learner1"].away == 3.0


@pytest.mark.parametrize("policy", POLICIES)
def test_leaving_in_the_middle_of_a_task_loses_the_task(policy: str) -> None:
    """Its answer never comes, the others go on, and after the return there is a new task."""
    run = shaky(POLICIES[policy](), (0.4, 2.3), seconds=12)

    tasks = [item.task.number for _, item in run.events if isinstance(item, SendTask) and item.learner == "learner1"]
    answers = [item.task for _, item in run.events if isinstance(item, UpdateRequest) and item.learner == "learner1"]
    assert tasks[0] not in answers
    assert answers
    assert answers == tasks[1 : 1 + len(answers)]
    assert (0.4, LearnerLeft) in events_of(run, "learner1", LearnerLeft)
    assert (2.3, LearnerJoined) in events_of(run, "learner1", LearnerJoined)
    costs = run.costs.by_learner["learner1"]
    assert costs.away == pytest.approx(2.3 - 0.4)
    # It worked in vain until it left, but it worked.
    first = next(span for span in run.spans() if span.learner == "learner1")
    assert (first.kind, first.start, first.end) == ("training", 0.0, 0.4)


@pytest.mark.parametrize("policy", POLICIES)
def test_gone_for_good_in_the_middle_of_a_task(policy: str) -> None:
    """A learner that never comes back stalls nobody."""
    run = shaky(POLICIES[policy](), (0.4, math.inf), rounds=6)

    assert run.finish_reason == "6 rounds are done"
    assert events_of(run, "learner1", UpdateRequest) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_when_all_are_gone_the_run_ends_and_says_why(policy: str) -> None:
    """No hang, also without any limit of time."""
    gone = {"availability": RecordedAvailability(((1.1, math.inf),))}
    run = still([4, 4], [0.25, 0.5], learner=[gone, gone]).simulate(POLICIES[policy](), rounds=1000)

    assert run.finish_reason == "no learner is left that could go on"
    assert run.events[-1][0] >= 1.1


@pytest.mark.parametrize("policy", POLICIES)
def test_when_nobody_ever_comes_the_run_ends_and_says_why(policy: str) -> None:
    """The initial model is what comes out."""
    never = {"availability": RecordedAvailability(((0.0, math.inf),))}
    run = still([4, 4], [0.25, 0.5], learner=[never, never]).simulate(POLICIES[policy](), rounds=5)

    assert (run.finish_reason, run.rounds) == ("no learner is left that could go on", 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_when_all_are_away_for_a_while_it_goes_on_afterwards(policy: str) -> None:
    """The federation waits for the first that returns."""
    pause = [
        {"availability": RecordedAvailability(((0.3, 5.0),))},
        {"availability": RecordedAvailability(((0.0, 7.0),))},
    ]
    run = still([4, 4], [0.25, 0.5], learner=pause).simulate(POLICIES[policy](), rounds=6)

    assert run.finish_reason == "6 rounds are done"
    assert min(at for at, item in run.events if isinstance(item, UpdateRequest)) > 5.0


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_works_while_away(policy: str) -> None:
    """Under random drop-outs of all learners: no task is given to and no answer comes from one that is away."""
    unsteady = {"availability": RandomAvailability(2.0, 1.0)}
    run = still([4, 3, 5, 2], [0.1, 0.3, 0.2, 0.1], learner=[unsteady] * 4).simulate(POLICIES[policy](), seconds=60)

    present: set[str] = set()
    for _, item in run.events:
        match item:
            case LearnerJoined():
                assert item.learner not in present
                present.add(item.learner)
            case LearnerLeft():
                present.remove(item.learner)
            case SendTask() | UpdateRequest():
                assert item.learner in present
    assert run.rounds > 10
    assert run.finish_reason == "60 seconds have passed"


def test_who_leaves_and_when_depends_on_the_seed_only() -> None:
    """Not on the policy: comparisons are fair."""
    unsteady = {"availability": RandomAvailability(2.0, 1.0)}

    def departures(policy: metis.Policy, seed: int) -> list[tuple[float, str]]:
        federation = still([4, 3], [0.1, 0.3], learner=[unsteady] * 2, seed=seed)
        events = federation.simulate(policy, seconds=30).events
        return [(at, item.learner) for at, item in events if isinstance(item, LearnerLeft)]

    assert departures(metis.sync_fedavg(1), 1) == departures(metis.fedrec(2), 1) != departures(metis.fedrec(2), 2)
