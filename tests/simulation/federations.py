"""Small federations that the tests of the simulator share; importable from other processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import metis
from metis.core.model import Layout, Model, TensorSpec
from metis.learning import ArrayExamples, Trained
from metis.runs.trace import to_line

# Every policy with its own kind of state: buffers, cached sums, mixed vectors, synchronization periods.
POLICIES: dict[str, Callable[[], metis.Policy]] = {
    "sync_fedavg": lambda: metis.sync_fedavg(local_epochs=2, round_limit=2.5),
    "semisync_fedavg": lambda: metis.semisync_fedavg(slowest_learner_epochs=1),
    "semisync_deadline": lambda: metis.semisync_fedavg(slowest_learner_epochs=1.5, budget="deadline"),
    "semisync": metis.semisync,
    "async_fedavg": lambda: metis.async_fedavg(local_epochs=1.5, rebuild_every=7),
    "fedrec": lambda: metis.fedrec(local_epochs=1),
    "fedasync": lambda: metis.fedasync(local_epochs=1),
    "fedbuff": lambda: metis.fedbuff(local_epochs=1, buffer_size=3),
    "semisync_adaptive": lambda: metis.semisync_fedavg(timings="smoothed", max_local_epochs=2).with_layers(
        metis.AdaptivePeriod()
    ),
    "semisync_nova": lambda: (
        metis.semisync_fedavg(slowest_learner_epochs=1)
        .with_layers(metis.FedNova())
        .with_layers(metis.ScheduledRate(metis.Schedule(1, 0.1, 5, "seconds")))
    ),
    "sync_sample": lambda: metis.sync_fedavg(local_epochs=1, round_limit=2.5).with_layers(metis.Sample(learners=2)),
    "fedasync_server": lambda: metis.fedasync(local_epochs=1).with_layers(metis.FedAdam()),
    "sync_sample_scaffold": lambda: metis.sync_fedavg(local_epochs=1, round_limit=2.5).with_layers(
        metis.Sample(learners=2)
    ),
    "fedrec_scaffold": lambda: metis.fedrec(local_epochs=1, rebuild_every=7),
    "fedbuff_scaffold": lambda: metis.fedbuff(local_epochs=1, buffer_size=3),
}

EXAMPLES, FEATURES, CLASSES = 150, 4, 3


def blobs(examples: int = EXAMPLES) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Points that a small network can tell apart."""
    rng = np.random.default_rng(5)
    targets = np.arange(examples) % CLASSES
    inputs = rng.normal(size=(examples, FEATURES)) + np.eye(CLASSES, FEATURES)[targets] * 2
    return inputs.astype(np.float32), targets.astype(np.int64)


def network() -> torch.nn.Module:
    """Tiny, but with what could differ between processes: dropout and counters."""
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 6),
        torch.nn.BatchNorm1d(6),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(6, CLASSES),
    )


def lively_learners() -> list[metis.SimulatedLearner]:
    """Five learners that jitter, drift, drop out, are late or far away."""
    parts = np.array_split(np.arange(EXAMPLES), [50, 85, 110, 135])
    return [
        metis.SimulatedLearner("gpu", parts[0], 10, metis.Speed(0.05), power=metis.Power(2, 0.5)),
        metis.SimulatedLearner(
            "jittery", parts[1], 10, metis.Speed(0.2, jitter=0.3), link=metis.Link(0.01, upload=20_000)
        ),
        metis.SimulatedLearner(
            "drifting", parts[2], 5, metis.Speed(0.1, profile=((2.0, 3.0), (4.0, 0.5))), link=metis.Link(0.02)
        ),
        metis.SimulatedLearner(
            "shaky/ünreliable", parts[3], 10, metis.Speed(0.1), availability=metis.RandomAvailability(1.5, 0.7)
        ),
        metis.SimulatedLearner(
            "late", parts[4], 10, metis.Speed(0.1), availability=metis.RecordedAvailability(((0.0, 1.2), (3.0, 4.0)))
        ),
    ]


class SlowExamples(ArrayExamples):
    """The same examples, but a batch takes a moment of the wall clock, so that a process can be killed in between."""

    def batch(self, indices: NDArray[np.int64]) -> Any:
        time.sleep(0.001)
        return super().batch(indices)


def lively(slow: bool = False, **changes: Any) -> metis.Federation:
    """A federation in which everything happens that can happen."""
    inputs, targets = blobs()
    train = SlowExamples(inputs, targets) if slow else (inputs, targets)
    settings: dict[str, Any] = {
        "network": network,
        "train": train,
        "test": (inputs[:30], targets[:30]),
        "learners": lively_learners(),
        "solver": metis.MomentumSGD(0.05, 0.5, keep_momentum=True),
        "buffers": "local",
    }
    return metis.Federation(**{**settings, **changes})


def simulate_lively(policy: str, *, slow: bool = False, seconds: float = 5.0, **options: Any) -> metis.Run:
    solver = metis.Scaffold(0.05, 0.5) if policy.endswith("_scaffold") else None
    return lively(slow).simulate(POLICIES[policy](), solver=solver, seconds=seconds, **options)


def fingerprint(run: metis.Run) -> tuple[str, list[str]]:
    """Everything that must be equal: the weights and the sequence of events."""
    return run.community_model.sha256(), [to_line(*event) for event in run.events]


def steady(record: dict[str, Any]) -> dict[str, Any]:
    """A record of a trace without what the processor could change."""
    return {
        key: float(f"{value:.9g}") if isinstance(value, float) else value
        for key, value in record.items()
        if key not in {"loss", "metrics"}
    }


def victim(policy: str, out: Path, workers: int, resume: bool, checkpoint_every: float, seconds: float) -> None:
    """What a process does that is about to be interrupted or killed; it leads its own group, as in a shell."""
    os.setsid()
    run = simulate_lively(
        policy,
        slow=True,
        seconds=seconds,
        out=out,
        workers=workers,
        resume=resume,
        checkpoint_every=checkpoint_every,
    )
    (out / "returned").write_text(run.finish_reason)


class StillEngine:
    """Trains nothing: for tests of time and costs, in which weights do not matter."""

    layout = Layout((TensorSpec("w", (250,)),))

    def initial_model(self, seed: int) -> Model:
        return Model(self.layout, np.zeros(250, np.float32))

    def train(
        self, community_model: Model, batches: Iterable[Any], solver: Any, memory: Any = None, seed: int = 0
    ) -> Trained:
        return Trained(community_model, 1, 0.5, {})

    def evaluate(self, model: Model, examples: Any) -> dict[str, float]:
        return {"loss": 0.5, "accuracy": 0.5}


class Climbing(StillEngine):
    """Its metric is the number of mixtures that a model has gone through, in hundredths."""

    def train(self, community_model: Model, *args: Any, **options: Any) -> Trained:
        return Trained(community_model.with_vector(community_model.vector + np.float32(1)), 1, 0.5, {})

    def evaluate(self, model: Model, examples: Any) -> dict[str, float]:
        return {"accuracy": float(model.vector[0]) / 100}


def still(
    batches: Sequence[int], speeds: Sequence[metis.Speed | float], batch_size: int = 2, **changes: Any
) -> metis.Federation:
    """A federation of learners with this many batches an epoch, whose training costs nothing real."""
    examples = batch_size * sum(batches)
    ends = np.cumsum([batch_size * count for count in batches])
    options = changes.pop("learner", [{}] * len(batches))
    learners = [
        metis.SimulatedLearner(
            f"learner{index}",
            np.arange(end - batch_size * count, end),
            batch_size,
            speed if isinstance(speed, metis.Speed) else metis.Speed(speed),
            **extra,
        )
        for index, (end, count, speed, extra) in enumerate(zip(ends, batches, speeds, options, strict=True))
    ]
    arrays = np.zeros((examples, 1), np.float32), np.zeros(examples, np.int64)
    settings: dict[str, Any] = {
        "engine": StillEngine(),
        "train": arrays,
        "test": arrays,
        "learners": learners,
        "solver": metis.VanillaSGD(0.1),
    }
    return metis.Federation(**{**settings, **changes})
