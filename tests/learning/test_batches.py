"""Items and batches of any shape: what the network is called with, how a batch is made, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import metis
from metis.errors import ConfigError
from metis.learning import JoinedExamples, TorchEngine, as_examples

RNG = np.random.default_rng(3)
X = RNG.normal(size=(60, 4)).astype(np.float32)
Z = RNG.normal(size=(60, 2)).astype(np.float32)
Y = (X.sum(1) + Z.sum(1) > 0).astype(np.int64)
INDICES = np.array([5, 0, 7])


@dataclass
class Patient:
    x: Any
    z: Any
    label: Any


class Row(NamedTuple):
    x: Any
    z: Any
    y: Any


class TwoInputs(nn.Module):
    """Called by position or by name; the same outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: Tensor, z: Tensor) -> Any:
        return self.layer(torch.cat([x, z], 1))


class WithLogits(TwoInputs):
    """As a network of transformers: it takes any keyword and returns an object."""

    def forward(self, x: Tensor, z: Tensor, **others: Any) -> Any:
        class Outputs:
            logits = self.layer(torch.cat([x, z], 1))

        return Outputs


SHAPES: dict[str, list[Any]] = {
    "tuple": [(x, z, y) for x, z, y in zip(X, Z, Y, strict=True)],
    "nested": [((x, z), y) for x, z, y in zip(X, Z, Y, strict=True)],
    "names": [{"x": x, "z": z, "labels": y, "id": k} for k, (x, z, y) in enumerate(zip(X, Z, Y, strict=True))],
    "dataclass": [Patient(x, z, y) for x, z, y in zip(X, Z, Y, strict=True)],
    "named tuple": [Row(x, z, y) for x, z, y in zip(X, Z, Y, strict=True)],
}


def federation(train: Any, network: Any = TwoInputs, **changes: Any) -> metis.Federation:
    settings: dict[str, Any] = {"test": train, "solver": metis.VanillaSGD(0.1)}
    learners = [
        metis.SimulatedLearner(name, part, 10, metis.Speed(0.1))
        for name, part in (("a", np.arange(30)), ("b", np.arange(30, 60)))
    ]
    return metis.Federation(network=network, train=train, learners=learners, **{**settings, **changes})


def sha(federation: metis.Federation) -> str:
    return federation.simulate(metis.sync_fedavg(1), rounds=2).community_model.sha256()


@pytest.fixture(scope="module")
def reference() -> str:
    return sha(federation(SHAPES["tuple"]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("network", [TwoInputs, WithLogits])
def test_the_shape_of_items_changes_no_bit(shape: str, network: Any, reference: str) -> None:
    assert sha(federation(SHAPES[shape], network)) == reference


def test_a_loss_of_the_batch_and_an_own_step_give_the_same_bits(reference: str) -> None:
    """A loss whose second parameter is `batch` gets all of it; a step does the forward pass itself."""

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch["labels"])

    def step(module: nn.Module, batch: Any) -> Any:
        outputs = module(batch["x"], batch["z"])
        return nn.functional.cross_entropy(outputs, batch["labels"]), outputs, batch["labels"]

    assert sha(federation(SHAPES["names"], loss=loss)) == reference
    assert sha(federation(SHAPES["names"], step=step)) == reference


def test_a_step_may_hide_what_metrics_need() -> None:
    """Then the loss is measured, and a metric is refused in a sentence."""

    def step(module: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(module(batch["x"], batch["z"]), batch["labels"])

    run = federation(SHAPES["names"], step=step, metrics={}).simulate(metis.sync_fedavg(1), rounds=2)
    assert run.metric_values[-1] < run.metric_values[0]
    with pytest.raises(ConfigError, match="returned a loss only, but metrics need"):
        sha(federation(SHAPES["names"], step=step))


def test_lengths_may_vary_with_a_collate_of_the_users() -> None:
    """Padding in collate; a batch from several silos is made of their items."""
    rows = [(torch.tensor(x[: 2 + k % 3]), int(y)) for k, (x, y) in enumerate(zip(X, Y, strict=True))]

    def pad(items: list[Any]) -> tuple[Tensor, Tensor]:
        inputs, targets = zip(*items, strict=True)
        padded = nn.utils.rnn.pad_sequence(list(inputs), batch_first=True)
        return nn.functional.pad(padded, (0, 4 - padded.shape[1])), torch.tensor(targets)

    assert sha(federation(rows, lambda: nn.Linear(4, 2), collate=pad))
    joined = JoinedExamples([as_examples(rows[:6], pad), as_examples(rows[6:], pad)])
    whole = as_examples(rows, pad)
    for one, other in zip(joined.batch(INDICES), whole.batch(INDICES), strict=True):
        assert torch.equal(one, other)


def test_a_dataclass_stays_one() -> None:
    batch = as_examples(SHAPES["dataclass"]).batch(INDICES)
    assert isinstance(batch, Patient)
    assert torch.equal(batch.x, torch.tensor(X[INDICES]))


def without_targets(item: Any) -> Any:
    return [item for _ in range(60)]


@pytest.mark.parametrize(
    ("train", "changes", "sentence"),
    [
        ([(torch.zeros(1 + k % 2), 0) for k in range(60)], {}, "cannot be stacked into a batch, so give collate="),
        (SHAPES["tuple"], {"collate": lambda items: items[0][5]}, "collate failed on 10 items: IndexError"),
        (SHAPES["tuple"], {"collate": lambda items: None}, "collate returned a NoneType without any tensor"),
        (SHAPES["tuple"], {"collate": lambda items: "ab"}, "collate returned a str without any tensor"),
        (without_targets(torch.zeros(4)), {}, "a batch has no targets: items must be pairs"),
        (without_targets({"x": torch.zeros(4)}), {}, "or have one of the names targets, target, labels"),
        (without_targets({"a": torch.zeros(4), "y": 1}), {}, r"forward\(x, z\) of the network takes none of the names"),
        (SHAPES["tuple"], {"loss": lambda outputs, targets: outputs}, r"loss returned a tensor of shape \(10, 2\)"),
        (
            SHAPES["tuple"],
            {"step": lambda module, batch: 0.5},
            "step returned a float; it must return a tensor",
        ),
        (SHAPES["names"], {"augment": lambda inputs, generator: inputs}, "augment changes the inputs of pairs"),
    ],
)
def test_what_cannot_be_a_batch_is_refused_in_one_sentence(train: Any, changes: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        sha(federation(train, **{"test": None, **changes}))
    assert "\n" not in str(caught.value)


def test_examples_that_make_batches_take_no_collate() -> None:
    with pytest.raises(ConfigError, match="collate is given together with examples that make batches themselves"):
        as_examples(as_examples((X, Y)), lambda items: items)


def test_an_engine_may_measure_examples_of_any_shape() -> None:
    engine = TorchEngine(TwoInputs, metrics=["accuracy"])
    model = engine.initial_model(1)
    values = [engine.evaluate(model, as_examples(items)) for items in SHAPES.values()]
    assert all(value == values[0] for value in values)
