"""Virtual time: links, evaluation, stop rules, targets, drift, and learners that diverge."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import metis
from metis.core.events import (
    CommunityPublished,
    Evaluated,
    LearnerSetAside,
    SendTask,
    TaskFailed,
    UpdateCommitted,
    UpdateRefused,
    UpdateRequest,
)
from metis.errors import ConfigError
from simulation.federations import (
    CLASSES,
    FEATURES,
    POLICIES,
    Climbing,
    StillEngine,
    blobs,
    lively,
    still,
)


def moments(run: metis.Run, kind: type, learner: str | None = None) -> list[float]:
    return [
        at for at, item in run.events if isinstance(item, kind) and learner in (None, getattr(item, "learner", None))
    ]


# --- links ------------------------------------------------------------------------------------------


def test_transfer_takes_its_time() -> None:
    """An answer is due after the download, the training and the upload, each way with the latency."""
    size = StillEngine().initial_model(0).nbytes
    link = metis.Link(latency=0.2, upload=500, download=2000)
    run = still([4], [0.25], learner=[{"link": link}]).simulate(metis.fedrec(2), rounds=3)

    exchange = 0.2 + size / 2000 + 8 * 0.25 + 0.2 + size / 500
    assert moments(run, UpdateRequest) == pytest.approx([exchange, 2 * exchange, 3 * exchange])
    costs = run.costs.by_learner["learner0"]
    assert costs.transfer == pytest.approx(3 * (exchange - 8 * 0.25))
    assert costs.active == pytest.approx(3 * 8 * 0.25)
    assert run.costs.transfer_time == costs.transfer
    assert run.costs.bytes_exchanged == 6 * size


def test_a_link_can_be_only_slow_to_answer_or_only_thin() -> None:
    """Latency counts once each way, whatever the size; bandwidth by the size."""
    assert metis.Link(latency=0.3).download_time(10**9) == 0.3
    assert metis.Link(upload=100).upload_time(250) == 250 / 100
    assert metis.Link(upload=100).download_time(250) == 0.0


@pytest.mark.parametrize(
    "options", [{"latency": -1.0}, {"latency": math.inf}, {"upload": 0.0}, {"download": -5.0}, {"upload": math.nan}]
)
def test_impossible_links_are_refused(options: dict[str, float]) -> None:
    """Before anything starts."""
    with pytest.raises(ValueError, match="must be"):
        metis.Link(**options)


def test_far_learners_hold_up_a_synchronous_round_only() -> None:
    """Sync waits for the transfer of the farthest; the near learner of an asynchronous federation does not."""
    learners: list[dict[str, Any]] = [{}, {"link": metis.Link(latency=5.0)}]

    def answers(policy: metis.Policy) -> list[float]:
        run = still([4, 4], [0.25, 0.25], learner=learners).simulate(policy, seconds=21)
        return moments(run, UpdateRequest, "learner0")

    assert answers(metis.sync_fedavg(1)) == [1.0, 12.0]
    assert answers(metis.fedrec(1)) == [float(second) for second in range(1, 22)]


# --- evaluation -------------------------------------------------------------------------------------


def evaluations(run: metis.Run) -> list[tuple[float, int]]:
    return [(at, item.version) for at, item in run.events if isinstance(item, Evaluated)]


def published(run: metis.Run) -> list[tuple[float, int]]:
    return [(at, item.stamp.version) for at, item in run.events if isinstance(item, CommunityPublished)]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_publication_is_evaluated_by_default(policy: str) -> None:
    """And the initial model; at the very moment of the publication, for evaluation takes no virtual time."""
    run = still([4, 2], [0.25, 0.5]).simulate(POLICIES[policy](), rounds=7)

    assert evaluations(run) == [(0.0, 0), *published(run)]
    assert [point.version for point in run.history] == list(range(8))
    assert [point.at for point in run.history] == [at for at, _ in evaluations(run)]


def test_evaluate_every_so_many_seconds() -> None:
    """The first publication after each multiple of the period, and always the last model."""
    federation = still([4, 4], [0.1, 0.35])
    run = federation.simulate(metis.fedrec(1), seconds=9.9, evaluate_every=2.0)

    expected, due = [(0.0, 0)], 0.0
    for at, version in published(run):
        if at >= due:
            expected.append((at, version))
            due = (at // 2.0 + 1) * 2.0
    last = published(run)[-1][1]
    assert evaluations(run) == [*expected, *([] if expected[-1][1] == last else [(9.9, last)])]
    every = federation.simulate(metis.fedrec(1), seconds=9.9)
    assert run.community_model.sha256() == every.community_model.sha256()
    assert run.costs == every.costs


def test_without_held_out_examples_nothing_is_evaluated() -> None:
    """There are a model and costs, but no metric."""
    run = still([4, 2], [0.25, 0.5], test=None).simulate(metis.sync_fedavg(1), rounds=3)

    assert evaluations(run) == []
    assert run.final_metric is None
    assert run.summary()["metric"] == {"name": "accuracy", "final": None, "best": None, "best_version": None}


# --- the end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_stop_by_rounds(policy: str) -> None:
    """Exactly this many community models; nobody gets a task after the last."""
    run = still([4, 2], [0.25, 0.5]).simulate(POLICIES[policy](), rounds=5)

    assert (run.finish_reason, run.rounds) == ("5 rounds are done", 5)
    assert published(run)[-1][1] == 5
    assert max(item.task.based_on.version for _, item in run.events if isinstance(item, SendTask)) == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_stop_by_seconds(policy: str) -> None:
    """At that very moment, without waiting for open tasks."""
    run = still([4, 2], [0.25, 0.5]).simulate(POLICIES[policy](), seconds=7.7)

    assert run.finish_reason == "7.7 seconds have passed"
    assert run.costs.parallel_time == 7.7
    assert max(at for at, _ in run.events) == 7.7


@pytest.mark.parametrize("policy", POLICIES)
def test_stop_by_update_requests(policy: str) -> None:
    """Exactly this many, or as many as complete the round of a protocol with a barrier."""
    run = still([4, 2], [0.25, 0.5]).simulate(POLICIES[policy](), update_requests=9)

    made = 9 if policy.startswith(("async", "fed")) else 10
    assert run.finish_reason == f"{made} update requests were made"
    assert run.costs.update_requests == len(moments(run, UpdateRequest)) == made


@pytest.mark.parametrize("policy", POLICIES)
def test_stop_by_steps(policy: str) -> None:
    """The first model whose committed steps reach the limit is the last."""
    run = still([4, 2], [0.25, 0.5]).simulate(POLICIES[policy](), metis.StopRule(steps=40))

    *before, last = moments(run, UpdateRequest)
    assert run.finish_reason == f"{run.costs.steps} steps were made"
    assert run.costs.steps >= 40
    assert sum(item.steps for at, item in run.events if isinstance(item, UpdateRequest) and at < last) < 40
    assert before


@pytest.mark.parametrize("policy", POLICIES)
def test_stop_at_a_target(policy: str) -> None:
    """As soon as an evaluation reaches it; the costs of the target are the costs of that publication."""
    stop = metis.StopRule(target=metis.Target("accuracy", 0.05), rounds=1000)
    run = still([4, 2], [0.25, 0.5], engine=Climbing()).simulate(POLICIES[policy](), stop)

    assert run.finish_reason == "accuracy reached 0.05"
    assert run.metric_values[-1] >= 0.05 > max(run.metric_values[:-1])
    assert run.costs_at_target is not None
    assert run.costs_at_target.parallel_time == run.history[-1].at
    target = run.summary()["target"]
    assert (target["value"], target["reached"]) == (0.05, True)
    assert target["steps"] == run.history[-1].steps


def test_whichever_rule_comes_first() -> None:
    """Rules together."""
    federation = still([4], [0.25])

    def reason(**rules: Any) -> str:
        return federation.simulate(metis.fedrec(1), metis.StopRule(**rules)).finish_reason

    assert reason(rounds=3, seconds=100, update_requests=50) == "3 rounds are done"
    assert reason(rounds=30, seconds=2.5, update_requests=50) == "2.5 seconds have passed"
    assert reason(rounds=30, seconds=100, update_requests=5) == "5 update requests were made"


def test_a_target_is_only_reported_unless_it_is_in_the_stop_rule() -> None:
    """The run goes on to its end; the costs are those when the target was first reached."""
    run = still([4], [0.25], engine=Climbing()).simulate(metis.fedrec(1), rounds=10, target=0.04)

    assert run.finish_reason == "10 rounds are done"
    assert run.costs_at_target is not None
    assert run.costs_at_target.parallel_time == 4 * (4 * 0.25)
    assert run.costs_at_target.update_requests == 4


def test_a_target_that_is_not_reached() -> None:
    """The summary says so."""
    run = still([4], [0.25], engine=Climbing()).simulate(metis.fedrec(1), rounds=3, target=0.9)

    assert run.costs_at_target is None
    assert run.summary()["target"] == {
        "metric": "accuracy", "value": 0.9, "reached": False,
        "parallel_time": None, "update_requests": None, "steps": None,
    }  # fmt: skip


def test_a_lower_metric_may_be_better() -> None:
    """A target of a regression is reached from above."""
    federation = still([4], [0.25], engine=Climbing(), metric="accuracy", higher_is_better=False)
    run = federation.simulate(metis.fedrec(1), rounds=3, target=0.0)

    assert run.costs_at_target is not None
    assert run.costs_at_target.parallel_time == 0.0
    assert run.best_metric == 0.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "a run needs an end"),
        ({"rounds": 1, "store": "disk"}, "the disk store needs a directory"),
    ],
)
def test_impossible_runs_are_refused(options: dict[str, Any], sentence: str) -> None:
    """Before anything starts."""
    with pytest.raises(ConfigError, match=sentence):
        still([4], [0.25]).simulate(metis.fedrec(1), **options)


def test_a_target_without_held_out_examples_is_refused() -> None:
    """It could never be reached."""
    with pytest.raises(ConfigError, match="a target needs held-out examples"):
        still([4], [0.25], test=None).simulate(metis.fedrec(1), rounds=1, target=0.5)


# --- drift ------------------------------------------------------------------------------------------


def budgets(run: metis.Run, learner: str) -> list[int | None]:
    """B_k of each of its tasks."""
    return [item.task.budget.steps for _, item in run.events if isinstance(item, SendTask) and item.learner == learner]


def test_a_learner_that_becomes_slower_is_measured_anew() -> None:
    """Semi-synchronous: half as fast from second 10 on, it gets half the batches in the next round but one."""
    slowing = metis.Speed(0.1, profile=((10.0, 2.0),))
    run = still([10, 10], [slowing, 0.5]).simulate(metis.semisync_fedavg(1), rounds=6)

    period = 10 * 0.5
    assert budgets(run, "learner0") == [10, *[round(period / 0.1)] * 2, *[round(period / 0.2)] * 3]
    # The round in which it became slower ended in time nevertheless: the seconds of its budget.
    assert moments(run, CommunityPublished) == pytest.approx([period * round for round in range(1, 7)])


def test_static_timings_leave_it_at_the_old_pace() -> None:
    """As in the paper (R13): the cold start's timing holds, and only the seconds of the budget stop the learner."""
    slowing = metis.Speed(0.1, profile=((10.0, 2.0),))
    run = still([10, 10], [slowing, 0.5]).simulate(metis.semisync_fedavg(1, timings="cold_start"), rounds=6)

    budgets = [
        item.task.budget.steps for _, item in run.events if isinstance(item, SendTask) and item.learner[-1] == "0"
    ]
    assert budgets == [10, *[50] * 5]
    done = [item.steps for _, item in run.events if isinstance(item, UpdateRequest) and item.learner[-1] == "0"]
    assert done == [10, 50, 25, 25, 25, 25]


# --- divergence -------------------------------------------------------------------------------------

REAL_POLICIES = {name: make for name, make in POLICIES.items() if name != "semisync_deadline"}


def with_poison(*poisoned: str, poison: float = math.nan, **changes: Any) -> metis.Federation:
    """Three learners; the data of the poisoned ones hold numbers that no training survives."""
    inputs, targets = blobs(90)
    names = ["ann", "bob", "cid"]
    for index, name in enumerate(names):
        if name in poisoned:
            inputs[30 * index : 30 * (index + 1)] *= np.float32(poison)
    learners = [
        metis.SimulatedLearner(name, np.arange(30 * index, 30 * (index + 1)), 10, metis.Speed(0.1 * (index + 1)))
        for index, name in enumerate(names)
    ]
    settings: dict[str, Any] = {
        "network": lambda: torch.nn.Linear(FEATURES, CLASSES),
        "train": (inputs, targets),
        "test": blobs(30),
        "learners": learners,
        "solver": metis.VanillaSGD(0.1),
    }
    return metis.Federation(**{**settings, **changes})


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("policy", REAL_POLICIES)
def test_a_learner_with_poisoned_data_is_refused_by_name_and_the_run_goes_on(policy: str, workers: int) -> None:
    """After repeated failures in a row it is set aside; the others reach the end without it."""
    federation = with_poison("bob")
    run = federation.simulate(REAL_POLICIES[policy](), update_requests=30, workers=workers, refusals_allowed=2)

    made = run.costs.update_requests  # a round is completed
    assert 30 <= made < 33 and run.finish_reason == f"{made} update requests were made"
    assert {item.learner for _, item in run.refused if item.kind == "failed"} == {"bob"}
    failed = [item for _, item in run.events if isinstance(item, TaskFailed)]
    assert len(failed) == 2 + 1
    assert all("learner 'bob' cannot train" in item.reason for item in failed)
    assert [item.learner for _, item in run.set_aside] == ["bob"]
    (_, aside), *_ = run.set_aside
    assert aside.reason.startswith("3 refused updates in a row: learner 'bob' cannot train")
    assert np.isfinite(run.community_model.vector).all()
    assert all(math.isfinite(value) for value in run.metric_values)
    committed = {item.learner for _, item in run.events if isinstance(item, UpdateCommitted)}
    assert committed == {"ann", "cid"}


def test_huge_numbers_diverge_as_well() -> None:
    """Not only NaN in the data: a learner whose inputs are in another unit altogether."""
    run = with_poison("cid", poison=1e30).simulate(metis.sync_fedavg(1), rounds=6)

    assert {item.learner for _, item in run.refused} == {"cid"}
    assert run.rounds == 6


def test_a_failure_in_between_is_forgiven() -> None:
    """Only failures in a row count: with all of them allowed, the learner is asked again in every round."""
    run = with_poison("bob").simulate(metis.sync_fedavg(1), rounds=8, refusals_allowed=100)

    assert len([item for _, item in run.events if isinstance(item, TaskFailed)]) == 8
    assert run.set_aside == []


def test_a_learner_that_was_set_aside_may_come_back() -> None:
    """When it joins again it is trusted again, and set aside again."""
    federation = with_poison("bob")
    away = metis.RecordedAvailability(((5.0, 6.0),))
    ann, bob, cid = federation.learners
    bob = metis.SimulatedLearner(bob.name, bob.indices, bob.batch_size, bob.speed, away)
    run = with_poison("bob", learners=[ann, bob, cid]).simulate(metis.fedrec(1), seconds=12)

    first, second = (at for at, item in run.events if isinstance(item, LearnerSetAside))
    assert first < 5.0
    assert second > 6.0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("policy", REAL_POLICIES)
def test_when_all_diverge_the_run_ends_and_says_why(policy: str, workers: int) -> None:
    """No hang: the initial model is what is left."""
    federation = with_poison("ann", "bob", "cid")
    run = federation.simulate(REAL_POLICIES[policy](), rounds=100, workers=workers)

    assert run.finish_reason == "no learner is left that could go on"
    assert run.rounds == 0
    assert {item.learner for _, item in run.set_aside} == {"ann", "bob", "cid"}
    assert run.community_model.sha256() == federation.initial_model.sha256()


# --- any run at all ---------------------------------------------------------------------------------

SPANS = st.lists(st.floats(0.0, 20.0), max_size=6, unique=True).map(
    lambda edges: tuple(zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False))
)
SPEEDS = st.builds(
    metis.Speed,
    st.floats(0.05, 1.0),
    st.sampled_from([0.0, 0.0, 0.4]),
    st.sampled_from([(), ((3.0, 2.0),), ((2.0, 0.5), (8.0, 4.0))]),
)
MACHINES = st.fixed_dictionaries(
    {
        "availability": st.builds(metis.RecordedAvailability, SPANS),
        "link": st.builds(metis.Link, st.sampled_from([0.0, 0.1]), st.sampled_from([math.inf, 5000.0])),
        "power": st.builds(metis.Power, st.sampled_from([1.0, 2.0]), st.sampled_from([None, 0.5])),
    }
)
FEDERATIONS: st.SearchStrategy[list[tuple[int, metis.Speed, dict[str, Any]]]] = st.lists(
    st.tuples(st.integers(1, 6), SPEEDS, MACHINES), min_size=1, max_size=4
)


def any_run(learners: list[tuple[int, metis.Speed, dict[str, Any]]], make: Callable[[], metis.Policy]) -> metis.Run:
    federation = still(
        [batches for batches, _, _ in learners],
        [speed for _, speed, _ in learners],
        learner=[extra for _, _, extra in learners],
    )
    return federation.simulate(make(), seconds=25, update_requests=60)


@settings(max_examples=50)
@given(learners=FEDERATIONS, policy=st.sampled_from(sorted(POLICIES)))
def test_the_timeline_tiles_the_time_and_agrees_with_the_bill(
    learners: list[tuple[int, metis.Speed, dict[str, Any]]], policy: str
) -> None:
    """For every learner spans without gaps or overlaps from 0 to the end, whose sums are its costs."""
    run = any_run(learners, POLICIES[policy])
    end = run.costs.parallel_time

    for name, costs in run.costs.by_learner.items():
        spans = [span for span in run.spans() if span.learner == name]
        if end > 0:
            assert (spans[0].start, spans[-1].end) == (0.0, end)
        assert all(one.end == other.start for one, other in pairwise(spans))
        sums = dict.fromkeys(("training", "transfer", "idle", "away"), 0.0)
        for span in spans:
            assert span.end > span.start
            sums[span.kind] += span.end - span.start
        expected = {"training": costs.active, "transfer": costs.transfer, "idle": costs.idle, "away": costs.away}
        assert sums == pytest.approx(expected, abs=1e-9)


@settings(max_examples=50)
@given(learners=FEDERATIONS, policy=st.sampled_from(sorted(POLICIES)))
def test_any_run_is_in_order(learners: list[tuple[int, metis.Speed, dict[str, Any]]], policy: str) -> None:
    """Time never goes back, every answer is to an open task, every run ends with a reason."""
    run = any_run(learners, POLICIES[policy])

    times = [at for at, _ in run.events]
    assert times == sorted(times)
    open_tasks: dict[str, int] = {}
    versions = [0]
    for _, item in run.events:
        match item:
            case SendTask():
                assert item.task.based_on.version == versions[-1]
                open_tasks[item.learner] = item.task.number
            case UpdateRequest():
                assert open_tasks.pop(item.learner) == item.task
            case CommunityPublished():
                versions.append(item.stamp.version)
            case UpdateRefused():
                assert item.kind == "late"
            case _:
                pass
    assert versions == list(range(run.rounds + 1))
    assert run.finish_reason != "not finished"
    costs = run.costs
    assert costs.energy.active <= costs.energy.idle_charged + 1e-9
    assert costs.energy.active <= costs.energy.equation + 1e-9


def test_a_late_learner_is_refused_and_rebased() -> None:
    """It became ten times slower within one batch: the others do not wait, and its next task is the latest model."""
    stalling = metis.Speed(0.5, profile=((5.0, 100.0), (9.0, 1.0)))
    run = still([10, 10], [stalling, 0.5]).simulate(metis.semisync_fedavg(1), rounds=14)

    late = [item for _, item in run.refused if item.kind == "late"]
    assert [item.learner for item in late] == ["learner0"]
    assert "late: it is based on community model" in late[0].reason
    assert run.rounds == 14


def test_learners_of_one_federation_have_names_of_their_own() -> None:
    """And there is at least one."""
    with pytest.raises(ConfigError, match="learners need different names"):
        lively(learners=[*lively().learners, lively().learners[0]])
    with pytest.raises(ConfigError, match="at least one learner"):
        lively(learners=[])
