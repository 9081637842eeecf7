"""Small learners that are trained as one computation."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import metis
from metis.errors import ConfigError, DataError
from metis.learning import ArrayExamples, TorchEngine
from simulation.federations import CLASSES, FEATURES, blobs, fingerprint


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES + 1))


def with_dropout() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 6), torch.nn.Dropout(0.2), torch.nn.Linear(6, CLASSES))


def odd() -> torch.nn.Module:
    """Whose matrices begin anywhere in memory, and come out with other last bits there."""
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 129), torch.nn.Tanh(), torch.nn.Linear(129, CLASSES))


class Branching(torch.nn.Module):
    """Looks harmless, but what it does depends on its inputs, which cannot be computed for many at once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs if inputs.sum() > 0 else -inputs)


def federation(**changes: Any) -> metis.Federation:
    """Eleven learners of three kinds: by the number of their examples and the size of their batches."""
    inputs, targets = blobs(300)
    sizes = [20] * 5 + [31] * 4 + [24] * 2
    ends = np.cumsum(sizes)
    settings: dict[str, Any] = {
        "network": network,
        "train": (inputs, targets),
        "test": (inputs[:60], targets[:60]),
        "learners": [
            metis.SimulatedLearner(
                f"learner-{n:02}", np.arange(end - size, end), 10 if size < 24 else 12, metis.Speed(0.05 * (1 + n % 3))
            )
            for n, (size, end) in enumerate(zip(sizes, ends, strict=True))
        ],
        "solver": metis.MomentumSGD(0.05, 0.5),
    }
    return metis.Federation(**{**settings, **changes})


POLICIES = {
    "sync": lambda: metis.sync_fedavg(local_epochs=2),
    "semisync": lambda: metis.semisync_fedavg(2).with_layers(metis.ScheduledRate(metis.Schedule(1, 0.1, 5))),
    "async": lambda: metis.async_fedavg(local_epochs=1),
    "fedasync": lambda: metis.fedasync(local_epochs=1),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_who_trains_with_whom_and_where_does_not_change_a_bit(policy: str) -> None:
    def run(**options: Any) -> tuple[str, list[str]]:
        return fingerprint(federation().simulate(POLICIES[policy](), seconds=4, **options))

    together = run(batched=100)
    for options in ({"batched": 2}, {"batched": 3}, {"batched": 4, "workers": 2}, {"batched": 100, "workers": 3}):
        assert run(**options) == together


@pytest.mark.parametrize("solver", [metis.VanillaSGD(0.1, 0.01), metis.MomentumSGD(0.05, 0.5), metis.FedProx(0.1, 0.2)])
def test_it_is_what_each_alone_does_up_to_rounding(solver: Any) -> None:
    alone, together = (federation().simulate(metis.semisync_fedavg(2), rounds=4, solver=solver, batched=most)
                       for most in (1, 50))  # fmt: skip
    np.testing.assert_allclose(together.community_model.vector, alone.community_model.vector, rtol=1e-4, atol=1e-6)
    assert not np.array_equal(together.community_model.vector, federation().initial_model.vector)
    assert together.summary()["update_requests"] == alone.summary()["update_requests"]


def test_learners_are_really_trained_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    really = TorchEngine.train_batched

    def watched(engine: TorchEngine, model: Any, batches: Any, solver: Any) -> Any:
        trained = really(engine, model, batches, solver)
        sizes.append(len(trained))
        return trained

    monkeypatch.setattr(TorchEngine, "train_batched", watched)
    federation().simulate(metis.sync_fedavg(local_epochs=2), rounds=1, batched=4)
    assert sorted(sizes) == [2, 2, 4, 4]  # five of the first kind: the fifth trains with itself, by the same means


@pytest.mark.parametrize(
    "changes",
    [
        {"network": with_dropout},
        {"network": Branching},
        {"network": odd},
        {"solver": metis.MomentumSGD(0.05, 0.5, keep_momentum=True)},
        {"solver": metis.Scaffold(0.05)},
        {"train": ArrayExamples(*blobs(300), transform=lambda inputs: inputs + 1)},
    ],
    ids=["dropout", "branching", "odd", "kept momentum", "scaffold", "transform"],
)
def test_who_cannot_train_together_trains_alone_to_the_same_bits(changes: dict[str, Any]) -> None:
    alone, together = (
        fingerprint(federation(**changes).simulate(metis.sync_fedavg(local_epochs=1), rounds=2, batched=most))
        for most in (1, 50)
    )
    assert alone == together


def test_one_that_diverges_takes_nobody_with_it() -> None:
    inputs, targets = blobs(300)
    inputs[20:40] = np.nan  # of the second learner
    run = federation(train=(inputs, targets)).simulate(metis.sync_fedavg(local_epochs=1), rounds=2, batched=50)
    failed = {event.learner for _, event in run.events if type(event).__name__ == "TaskFailed"}
    assert failed == {"learner-01"}
    assert run.rounds == 2
    assert np.isfinite(run.community_model.vector).all()


def test_who_leaves_in_the_middle_of_a_task_is_not_waited_for() -> None:
    away = metis.RecordedAvailability(((0.1, 0.5), (1.0, 2.0)))
    learners = [
        metis.SimulatedLearner(f"learner-{n}", np.arange(20 * n, 20 * n + 20), 10, metis.Speed(0.1), availability=away)
        for n in range(3)
    ] + [metis.SimulatedLearner("stays", np.arange(60, 80), 10, metis.Speed(0.2))]
    runs = [
        fingerprint(federation(learners=learners).simulate(metis.async_fedavg(local_epochs=2), seconds=4, **options))
        for options in ({"batched": 50}, {"batched": 50, "workers": 2})
    ]
    assert runs[0] == runs[1]
    assert any('"stays"' in line and "update_request" in line for line in runs[0][1])


def test_a_resumed_run_ends_in_the_same_bits_and_cannot_change_its_way(tmp_path: Path) -> None:
    whole = federation().simulate(metis.semisync_fedavg(2), rounds=5, batched=50, out=tmp_path / "whole")

    steps: list[Any] = []

    def interrupt(fold: Any) -> None:
        steps.append(fold)
        if len(steps) == 30:  # in the middle of a round, so that of a group only some are left
            signal.raise_signal(signal.SIGINT)

    federation().simulate(metis.semisync_fedavg(2), rounds=5, batched=50, out=tmp_path / "cut", watch=interrupt)
    with pytest.raises(DataError, match="started with a different way of training"):
        federation().simulate(metis.semisync_fedavg(2), rounds=5, out=tmp_path / "cut", resume=True)
    resumed = federation().simulate(
        metis.semisync_fedavg(2), rounds=5, batched=50, workers=2, out=tmp_path / "cut", resume=True
    )
    assert resumed.community_model.sha256() == whole.community_model.sha256()
    assert (tmp_path / "cut/events.jsonl").read_bytes() == (tmp_path / "whole/events.jsonl").read_bytes()


@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_an_impossible_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="batched"):
        federation().simulate(metis.sync_fedavg(), rounds=1, batched=value)
