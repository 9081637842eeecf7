"""Which parameters are federated: what travels, what stays in the silo, what never changes, where it is measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import metis
from metis.core.solvers import FedProx, VanillaSGD
from metis.errors import ConfigError
from metis.experiments.config.load import resolve_config
from metis.learning import Batch, TorchEngine, as_examples


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.encoder(x))


ENCODER, NORM, HEAD = 4 * 6 + 6, 2 * 6, 6 * 2 + 2


def batches(count: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 4, generator=generator), torch.randint(2, (8,), generator=generator)) for _ in range(count)]


def state(engine: TorchEngine, model: Any, memory: Any = None) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.load(model, memory).state_dict().items()}


def test_a_local_head_is_trained_kept_and_never_sent() -> None:
    """Two tasks with what was kept between them give the bits of one, as if the head had travelled."""
    engine, whole = TorchEngine(Net, parameters={"local": ["head.*"]}), TorchEngine(Net)
    start, everything = engine.initial_model(0), whole.initial_model(0)
    assert [spec.name for spec in start.layout.tensors if "head" in spec.name] == []
    assert start.nbytes == everything.nbytes - 4 * HEAD
    first = engine.train(start, batches(3), VanillaSGD(0.1))
    assert first.memory["local"].shape == (HEAD,)
    second = engine.train(first.model, batches(2, seed=1), VanillaSGD(0.1), first.memory)
    plain = whole.train(everything, batches(3), VanillaSGD(0.1))
    plain = whole.train(plain.model, batches(2, seed=1), VanillaSGD(0.1), plain.memory)
    mine, wanted = state(engine, second.model, second.memory), state(whole, plain.model, plain.memory)
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    assert not torch.equal(mine["head.weight"], state(engine, second.model)["head.weight"]), "it is the learner's own"


def test_frozen_parts_never_change_and_never_travel() -> None:
    """Neither by a gradient nor by the statistics of the batches that pass through them."""
    engine = TorchEngine(Net, parameters={"frozen": ["encoder.*"]})
    start = engine.initial_model(0)
    assert (start.layout.size, start.layout.counters) == (HEAD, 0)
    before = state(engine, start)
    trained = engine.train(start, batches(5), VanillaSGD(0.1))
    after = state(engine, trained.model, trained.memory)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("sharing", "numbers"),
    [
        ({"local": ["encoder.1.*"]}, ENCODER + HEAD),  # FedBN: neither its weights nor its statistics travel
        ({"local": "head.*", "frozen": ["encoder.0.*"]}, 2 * NORM),
        ({"federated": ["head.*"]}, HEAD),
        ({"federated": ["head.bias"], "local": ["head.*"], "frozen": ["*"]}, 2),  # the first that matches counts
        (lambda name: "federated" if name.startswith("head") else "frozen", HEAD),
    ],
)
def test_what_travels(sharing: Any, numbers: int) -> None:
    assert TorchEngine(Net, parameters=sharing).initial_model(0).layout.size == numbers


def test_a_pull_holds_local_parameters_where_the_task_began() -> None:
    """The others are held toward the community model; both are the start of the task."""
    engine, whole = TorchEngine(Net, parameters={"local": ["head.*"]}), TorchEngine(Net)
    mine = engine.train(engine.initial_model(0), batches(4), FedProx(0.1, 5.0))
    wanted = whole.train(whole.initial_model(0), batches(4), FedProx(0.1, 5.0))
    trained = state(engine, mine.model, mine.memory)
    for name, tensor in state(whole, wanted.model, wanted.memory).items():
        assert torch.allclose(trained[name].float(), tensor.float(), atol=1e-6)


def test_silos_are_measured_with_their_own_parts_and_counted_together() -> None:
    """The accuracy of all predictions of all silos, each with its own head."""
    engine = TorchEngine(Net, parameters={"local": ["head.*"]}, metrics=["accuracy", "auc"])
    model = engine.initial_model(0)
    memories = [engine.train(model, batches(6, seed), VanillaSGD(0.5)).memory for seed in (1, 2)]
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(30, 4)).astype(np.float32), rng.integers(0, 2, 30)
    parts = (np.arange(10), np.arange(10, 30))
    values = engine.evaluate_silos(model, as_examples((x, y)), list(zip(parts, memories, strict=True)))
    alone = [
        engine.evaluate(model, as_examples((x[part], y[part])), memory)
        for part, memory in zip(parts, memories, strict=True)
    ]
    for name in ("loss", "accuracy"):
        assert values[name] == pytest.approx((alone[0][name] * 10 + alone[1][name] * 20) / 30)
    assert values["auc"] != pytest.approx((alone[0]["auc"] * 10 + alone[1]["auc"] * 20) / 30), "not a mean of ratios"


def test_local_parts_begin_as_the_seed_makes_them() -> None:
    """Another seed begins with another head; what is frozen is the same for all, at every site."""
    engine = TorchEngine(Net, parameters={"local": ["head.*"], "frozen": ["encoder.0.*"]})
    made = {seed: engine.seeded(seed) for seed in (1, 2)}
    heads = {seed: one.load(one.initial_model(seed)).head.weight.clone() for seed, one in made.items()}
    torch.manual_seed(1)
    assert torch.equal(heads[1], Net().head.weight)
    assert not torch.equal(heads[1], heads[2])
    assert {one.frozen_sha256 for one in made.values()} == {engine.frozen_sha256}
    plain = TorchEngine(Net)
    assert plain.seeded(1) is plain
    first, again = (federation(parameters={"local": ["head.*"]}).with_seed(seed) for seed in (1, 2))
    starts = [one.simulate(metis.sync_fedavg(1), rounds=1).metric_values[0] for one in (first, again)]
    assert starts[0] != starts[1]


def federation(**changes: Any) -> metis.Federation:
    """Two silos that call opposite things by the same label: one head for both cannot serve them."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(400, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    y[200:] = 1 - y[200:]
    halves = [np.arange(0, 200), np.arange(200, 400)]
    learners = [
        metis.SimulatedLearner(f"site-{k}", half[:150], 25, metis.Speed(0.1), test=half[150:])
        for k, half in enumerate(halves)
    ]
    settings = {"network": Net, "train": (x, y), "test": (x, y), "solver": metis.AdamW(0.02, keep_state=True)}
    return metis.Federation(learners=learners, **{**settings, **changes})


def test_personal_heads_serve_silos_that_disagree() -> None:
    shared = federation().simulate(metis.sync_fedavg(2), rounds=8)
    personal = federation(parameters={"local": ["head.*"]}).simulate(metis.sync_fedavg(2), rounds=8)
    assert shared.final_metric is not None and shared.final_metric < 0.75
    assert personal.final_metric is not None and personal.final_metric > 0.9
    assert personal.setting.model_bytes == shared.setting.model_bytes - 4 * HEAD
    assert personal.costs.bytes_exchanged < shared.costs.bytes_exchanged


def test_a_model_without_its_local_parts_is_not_measured() -> None:
    personal = federation(parameters={"local": ["head.*"]})
    with pytest.raises(ConfigError, match="a community model is not whole without the local parts of a learner"):
        personal.evaluate_at_learners(personal.initial_model)


def test_scaffold_has_no_local_parameters() -> None:
    with pytest.raises(ConfigError, match="scaffold corrects every parameter that is trained, so none of them can be"):
        federation(parameters={"local": ["head.*"]}).simulate(
            metis.sync_fedavg(1), rounds=1, solver=metis.Scaffold(0.1)
        )


@pytest.mark.parametrize(
    ("sharing", "sentence"),
    [
        (
            {"local": ["haed.*"]},
            r"parameters\.local: the pattern 'haed\.\*' matches nothing in the network: enc",
        ),
        ({"lokal": ["head.*"]}, "parameters has the key 'lokal'; did you mean 'local'"),
        ({"local": 3}, "parameters.local is 3; it must be a list of patterns such as"),
        (
            ["head.*"],
            r"parameters is \['head\.\*'\]; it must be a table such as .*, or a function that says for a name",
        ),
        ({"local": ["*"]}, "parameters leaves nothing to federate"),
        (
            lambda name: "shared",
            "the function returned 'shared' for 'encoder.0.weight'; allowed: federated, local",
        ),
    ],
)
def test_what_cannot_be_shared_so_is_refused_in_one_sentence(sharing: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        TorchEngine(Net, parameters=sharing)
    assert "\n" not in str(caught.value)


def test_a_file_says_which_parameters_are_federated() -> None:
    tables: dict[str, Any] = {
        "learners": [{"name": "site", "batch_size": 10, "time_per_batch": 0.1}],
        "policy": {"name": "sync_fedavg"},
        "stop": {"rounds": 1},
    }
    training = {"parameters": {"local": ["head.*"], "frozen": ["encoder.*"]}}
    config = resolve_config({**tables, "training": training}, "demo.toml")
    assert config.training.parameters is not None
    assert config.training.parameters.to_patterns() == training["parameters"]
    assert resolve_config(config.to_dict(), "demo.toml") == config
    with pytest.raises(ConfigError, match=r"training\.parameters\.lokal: unknown key; did you mean 'local'"):
        resolve_config({**tables, "training": {"parameters": {"lokal": ["x"]}}}, "demo.toml")
