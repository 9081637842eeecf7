"""Real runs of two policies, and runs written down event by event for the extremes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

import metis
from metis.core.costs import Power
from metis.core.events import (
    Action,
    Budget,
    CommunityPublished,
    CommunityStamp,
    Evaluated,
    Event,
    Finish,
    LearnerJoined,
    LocalTask,
    SendTask,
    UpdateRefused,
    UpdateRequest,
)
from metis.core.model import Model
from metis.core.stop import Target
from metis.data import partition
from metis.learning import mlp
from metis.runs.run import Run
from metis.runs.setting import LearnerInfo, Setting

WrittenRun = Callable[..., Run]


@pytest.fixture(scope="session")
def runs() -> list[Run]:
    """Sync and SemiSync on the bundled digits; one learner's name would break a careless page."""
    digits = metis.load_dataset("digits")
    x, y = digits.x_train[:400].astype(np.float32) / 16, digits.y_train[:400]
    parts = partition.iid(y, partition.uniform_sizes(len(y), 4), np.random.default_rng(1990))
    names = ["fast-1", "<b>&$fast$-2", "slow-1", "slow-2"]
    federation = metis.Federation(
        network=lambda: mlp((8, 8), 10, hidden=(8,)),
        train=(x, y),
        test=(digits.x_test[:50].astype(np.float32) / 16, digits.y_test[:50]),
        learners=[
            metis.SimulatedLearner(name, part, 20, metis.Speed(0.3 if "slow" in name else 0.03), power=metis.Power(2.0))
            for name, part in zip(names, parts, strict=True)
        ],
        solver=metis.MomentumSGD(0.05, 0.75),
        class_counts=partition.describe(parts, y),
        class_names=[str(k) for k in range(10)],
        facts={"dataset": "digits", "network": "mlp <8 & 8>"},
    )
    policies = [metis.sync_fedavg(2), metis.semisync_fedavg(2)]
    return [federation.simulate(policy, seconds=12, target=0.3) for policy in policies]


@pytest.fixture
def written_run() -> WrittenRun:
    """A synchronous run of this many learners and rounds, with these values of the metric."""

    def write(
        learners: int = 2,
        rounds: int = 3,
        values: Sequence[float] = (),
        *,
        label: str = "Sync",
        seed: int = 1,
        metric: str = "accuracy",
        higher_is_better: bool = True,
        target: float | None = None,
        classes: int = 0,
        refused: str | None = None,
    ) -> Run:
        names = [f"learner-{k}" for k in range(learners)]
        setting = Setting(
            policy="sync_fedavg",
            label=label,
            seed=seed,
            learners=tuple(
                LearnerInfo(name, 100, 10, 0.1 * (1 + k % 3), Power(), (10,) * classes) for k, name in enumerate(names)
            ),
            model_bytes=8,
            fills_the_period=False,
            metric=metric,
            higher_is_better=higher_is_better,
            target=None if target is None else Target(metric, target, higher_is_better),
        )
        events: list[tuple[float, Event | Action]] = [(0.0, LearnerJoined(name, 100, 10)) for name in names]
        empty, task = Model.empty(), 0
        for number in range(rounds):
            started, ended = 3.0 * number, 3.0 * (number + 1)
            stamp = CommunityStamp(number, 10 * number)
            first = task
            for name in names:
                events.append((started, SendTask(name, LocalTask(task, stamp, Budget(10)), empty)))
                task += 1
            for k, name in enumerate(names):
                seconds = 1.0 + k % 3
                request = UpdateRequest(name, first + k, 10, seconds, seconds / 10, empty)
                events.append((started + seconds, request))
                if refused is not None and k == 0:
                    events.append((started + seconds, UpdateRefused(name, first, "invalid", refused)))
            events.sort(key=lambda event: event[0])
            events.append((ended, CommunityPublished(CommunityStamp(number + 1, 10), learners, empty)))
            if number < len(values):
                events.append((ended, Evaluated(number + 1, {metric: values[number]})))
        events.append((3.0 * rounds, Finish(f"{rounds} rounds are done")))
        return Run(setting, events, empty, 0.5)

    return write
