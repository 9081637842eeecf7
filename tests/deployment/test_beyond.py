"""What goes beyond the paper, in real federations on loopback: each piece does there what it does in a simulation."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metis.core.layers import AdaptivePeriod, ScheduledLambda, ScheduledRate

pytest.importorskip("grpc")

from deployment.federations import Served, served
from deployment.scripted_learner import HonestLearner, move_towards
from metis.core import policies
from metis.core.events import Action, CommunityPublished, Event, LearnersExpected, SendTask, SpeedChanged
from metis.core.layers.fednova import FedNova
from metis.core.layers.sample import Sample
from metis.core.layers.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi, ServerOptimizer
from metis.core.policy import Policy
from metis.core.schedules import Schedule
from metis.core.stop import StopRule
from metis.deployment.controller.settings import DeploymentSettings
from metis.runs.trace import read_trace

BATCH = 0.01  # seconds
PATIENT = 100.0  # periods that a round waits for a late learner, however busy the machine is


class Steady(HonestLearner):
    """Says of each batch that it took exactly as long as it should, whatever else the machine does."""

    upload_seconds = 0.0

    async def deliver(self, number: int) -> None:
        steps, *_ = self.timing[number]
        self.timing[number] = (steps, steps * self.seconds_per_batch, self.seconds_per_batch)
        await asyncio.sleep(self.upload_seconds)
        await super().deliver(number)


Cast = Callable[[Served], Sequence[HonestLearner]]


def steady(*paces: float, uploads: Sequence[float] = (), examples: Sequence[int] = ()) -> Cast:
    """Learners with these seconds a batch; all move from 1 towards 5."""

    def make(federation: Served) -> list[HonestLearner]:
        learners = [
            Steady(
                f"l{index}",
                federation.address,
                federation.process.layout,
                train=move_towards(5),
                seconds_per_batch=pace,
            )
            for index, pace in enumerate(paces)
        ]
        for learner, seconds in zip(learners, uploads, strict=False):
            learner.upload_seconds = seconds
        for learner, count in zip(learners, examples, strict=False):
            learner.examples = count
        return learners  # type: ignore[return-value]

    return make


def federate(
    folder: Path, policy: Policy, cast: Cast, rounds: int
) -> tuple[list[HonestLearner], list[tuple[float, Event | Action]], np.ndarray]:
    """Run to the end: the learners, the record, the final model as they got it."""

    async def run() -> Sequence[HonestLearner]:
        terms = DeploymentSettings(expected=1, minimum=1, lease=60, heartbeat=0.5, linger=5)
        async with served(folder, policy, StopRule(rounds=rounds), terms=terms) as federation:
            learners = cast(federation)
            federation.process._writer.post(LearnersExpected(len(learners)))
            await asyncio.wait_for(asyncio.gather(*(learner.run() for learner in learners)), 600)
            assert await federation.serving
            return learners

    learners = list(asyncio.run(run()))
    assert learners[0].final is not None
    vector = np.frombuffer(learners[0].final, np.float32)[:-2]  # a counter follows
    return learners, list(read_trace(folder / "run" / "events.jsonl")), vector


def steps_by_round(trace: Sequence[tuple[float, Event | Action]], learner: str) -> list[int | None]:
    return [item.task.budget.steps for _, item in trace if isinstance(item, SendTask) and item.learner == learner]


TAU, D = 1e-3, 2.0  # the learners go from 1 to 3
OPTIMIZERS: list[tuple[ServerOptimizer, float]] = [
    (FedAvgM(learning_rate=0.5, momentum=0.9), 0.5 * D),
    (FedAdagrad(learning_rate=0.1), 0.1 * D / (math.sqrt(TAU**2 + D**2) + TAU)),
    (FedAdam(learning_rate=0.1), 0.1 * 0.1 * D / (math.sqrt(0.99 * TAU**2 + 0.01 * D**2) + TAU)),
    (FedYogi(learning_rate=0.1), 0.1 * 0.1 * D / (math.sqrt(TAU**2 + 0.01 * D**2) + TAU)),
]


@pytest.mark.parametrize(("optimizer", "way"), OPTIMIZERS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("policy", [policies.sync_fedavg(1), policies.fedrec(1)], ids=lambda each: each.name)
def test_server_optimizers_step_from_what_the_learners_propose(
    optimizer: ServerOptimizer, way: float, policy: Policy, tmp_path: Path
) -> None:
    _, _, vector = federate(tmp_path, policy.with_layers(optimizer), steady(BATCH), 1)
    assert vector == pytest.approx(np.full_like(vector, 1 + way), rel=1e-5)


def test_the_servers_rate_follows_its_schedule(tmp_path: Path) -> None:
    policy = policies.sync_fedavg(1).with_layers(FedAvgM(1.0, 0.0, rate=Schedule(1, 0.25, 2, shape="step", jumps=1)))
    _, _, vector = federate(tmp_path, policy, steady(BATCH), 3)
    where = 1.0
    for rate in (1.0, 0.25, 0.25):  # at the server a round is over when its models are mixed
        where += rate * ((where + 5) / 2 - where)
    assert vector == pytest.approx(np.full_like(vector, where), rel=1e-5)


def test_fednova_holds_back_who_did_many_steps(tmp_path: Path) -> None:
    """Ten steps against one: the long way is scaled to the average length, the short one is not amplified."""
    cast = steady(BATCH, BATCH, examples=(100, 10))
    plain = federate(tmp_path / "plain", policies.sync_fedavg(1), cast, 1)[2]
    nova = federate(tmp_path / "nova", policies.sync_fedavg(1).with_layers(FedNova()), cast, 1)[2]
    assert plain == pytest.approx(np.full_like(plain, 3.0), rel=1e-5)
    most, few = 100 / 110, 10 / 110
    average = most * 10 + few * 1
    assert nova == pytest.approx(np.full_like(nova, 1 + most * (average / 10) * D + few * D), rel=1e-5)


@pytest.mark.parametrize(("goals", "agree"), [((5, 5), True), ((6, -4), False)], ids=["agree", "disagree"])
def test_an_adaptive_period_goes_by_what_the_controller_measures(
    goals: tuple[float, float], agree: bool, tmp_path: Path
) -> None:
    """No lambda: a round's lengths are measured and recorded, for a restart, and the period is not the cold start's."""

    def cast(federation: Served) -> list[HonestLearner]:
        learners = list(steady(BATCH, 2 * BATCH, examples=(400, 400))(federation))
        for learner, goal in zip(learners, goals, strict=True):
            learner.train = move_towards(goal)
        return learners

    policy = policies.semisync_fedavg(timings="smoothed", grace=PATIENT).with_layers(AdaptivePeriod())
    _, trace, _ = federate(tmp_path, policy, cast, 5)
    cold_start, *later = steps_by_round(trace, "l0")
    assert cold_start == 40
    assert any(steps != 80 for steps in later)  # which lambda = 1 would have given
    measures = [item.measure for _, item in trace if isinstance(item, CommunityPublished)]
    agreements = [(measure.progress / measure.divergence) ** 2 for measure in measures if measure is not None]
    assert len(agreements) == 5
    assert agreements == pytest.approx([1.0] * 5, abs=0.01) if agree else max(agreements) < 0.5


def test_a_learner_that_becomes_slower_is_noticed(tmp_path: Path) -> None:
    """Two odd tasks in a row: the new time counts, and it is reported."""

    class Throttled(Steady):
        async def work(self, task: Any) -> None:
            self.seconds_per_batch = BATCH if len(self.tasks) <= 2 else 6 * BATCH
            await super().work(task)

    def cast(federation: Served) -> list[HonestLearner]:
        return [Throttled("l0", federation.address, federation.process.layout, train=move_towards(5))]

    _, trace, _ = federate(tmp_path, policies.semisync_fedavg(1, timings="smoothed", grace=PATIENT), cast, 6)
    assert [item.learner for _, item in trace if isinstance(item, SpeedChanged)] == ["l0"]


def test_lambda_follows_its_schedule(tmp_path: Path) -> None:
    """Of a single learner a period is lambda epochs to the batch."""
    policy = policies.semisync_fedavg(grace=PATIENT).with_layers(ScheduledLambda(Schedule(3, 1, 2, shape="linear")))
    _, trace, _ = federate(tmp_path, policy, steady(BATCH), 5)
    cold_start, *later = steps_by_round(trace, "l0")
    assert cold_start == 10
    assert later == [20, 10, 10, 10]


def test_tasks_carry_the_learning_rate_of_their_moment(tmp_path: Path) -> None:
    policy = policies.sync_fedavg(1).with_layers(ScheduledRate(Schedule(1, 0.25, 2, shape="linear")))
    (learner,), _, _ = federate(tmp_path, policy, steady(BATCH), 4)
    assert [task.rate if task.HasField("rate") else 1.0 for task in learner.tasks] == [1.0, 0.625, 0.25, 0.25]


def test_each_round_has_its_sample(tmp_path: Path) -> None:
    """Two of four a round, in time all of them."""
    policy = policies.sync_fedavg(1).with_layers(Sample(learners=2, seed=3))
    _, trace, _ = federate(tmp_path, policy, steady(BATCH, BATCH, BATCH, BATCH), 8)
    assert [item.contributors for _, item in trace if isinstance(item, CommunityPublished)] == [2] * 8
    assert {item.learner for _, item in trace if isinstance(item, SendTask)} == {"l0", "l1", "l2", "l3"}


def test_a_period_with_room_for_the_exchange_gives_the_far_fewer_steps(tmp_path: Path) -> None:
    """Equally fast, but one needs half a second for its upload: both hand in at the same moment."""
    policy = policies.semisync_fedavg(4, exchange="inside", grace=PATIENT)
    _, trace, _ = federate(tmp_path, policy, steady(BATCH, BATCH, uploads=(0.0, 0.5)), 4)
    near, far = (steps_by_round(trace, name)[1:] for name in ("l0", "l1"))
    assert far and all(mine is not None and theirs is not None for mine, theirs in zip(far, near, strict=True))
    assert sum(filter(None, far)) + 30 * len(far) < sum(filter(None, near))


def test_a_cap_limits_what_is_trained_in_a_period(tmp_path: Path) -> None:
    """Ten times as fast, but at most three passes; what is not worked is not charged."""
    policy = policies.semisync_fedavg(2, max_local_epochs=3, grace=PATIENT)
    _, trace, _ = federate(tmp_path, policy, steady(BATCH / 2, 5 * BATCH), 3)
    assert steps_by_round(trace, "l0")[1:] == [30, 30]
    assert steps_by_round(trace, "l1")[1:] == [20, 20]
