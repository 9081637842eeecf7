"""A model of its own for each site: trained as Ditto and APFL say, measured there, never sent."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metis
from metis.core.solvers import AdamW, MomentumSGD, VanillaSGD
from metis.errors import ConfigError
from metis.experiments.build import build_federation
from metis.experiments.config.load import resolve_config
from metis.learning import Batch, TorchEngine, as_examples

RATE = 0.1


class Net(nn.Module):
    """With a parameter of its own, one that is used twice, and one in a recurrent layer, which keeps a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.memory = nn.GRU(4, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        x = self.second(torch.tanh(self.first(x + self.shift)))
        return self.head(self.memory(x.unsqueeze(1))[0].squeeze(1))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 2))


def batches(count: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 4, generator=generator), torch.randint(2, (8,), generator=generator)) for _ in range(count)]


def tensors(engine: TorchEngine, model: Any, memory: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.load(model, memory).named_parameters()}


def same(found: dict[str, torch.Tensor], prefix: str, wanted: nn.Module) -> None:
    for name, parameter in wanted.named_parameters():
        assert torch.allclose(found[prefix + name], parameter, atol=1e-6), name


def network_of(engine: TorchEngine, model: Any) -> nn.Module:
    made = Net()
    made.load_state_dict({name: torch.tensor(array) for name, array in model.tensors().items()}, strict=False)
    return made


def descend(module: nn.Module, loss: torch.Tensor) -> None:
    parameters = list(module.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.data -= RATE * gradient


def test_ditto_is_the_rule_of_its_paper() -> None:
    """Over two tasks: w by its own gradient, v by its gradient + lambda (v - w), w as it was received."""
    engine, pull = TorchEngine(Net, personal=metis.Ditto(pull=0.7)), 0.7
    received, memory = engine.initial_model(3), None
    federated = network_of(engine, received)
    own = copy.deepcopy(federated)  # a first task begins with a copy of the community model
    for task in range(2):
        trained = engine.train(received, batches(3, task), VanillaSGD(RATE), memory)
        before = copy.deepcopy(federated)
        for x, y in batches(3, task):
            descend(federated, F.cross_entropy(federated(x), y))
            pairs = zip(own.parameters(), before.parameters(), strict=True)
            distance = torch.stack([(v - w.detach()).square().sum() for v, w in pairs]).sum()
            descend(own, F.cross_entropy(own(x), y) + pull / 2 * distance)
        found = tensors(engine, trained.model, trained.memory)
        same(found, "", federated)
        same(found, "personal.", own)
        # The next community model is another one; the personal model goes on where it was.
        received, memory = trained.model.with_vector(0.5 * trained.model.vector), trained.memory
        with torch.no_grad():
            for parameter in federated.parameters():
                parameter.mul_(0.5)


@pytest.mark.parametrize("adapt", [True, False])
def test_apfl_is_the_rule_of_its_paper(adapt: bool) -> None:
    """w by its own gradient; v, and alpha if it adapts, by that of the mixture alpha v + (1 - alpha) w."""
    engine = TorchEngine(Net, personal=metis.APFL(share=0.25, adapt=adapt))
    received = engine.initial_model(3)
    federated = network_of(engine, received)
    own, share = copy.deepcopy(federated), torch.tensor(0.25, requires_grad=True)
    trained = engine.train(received, batches(4), VanillaSGD(RATE))
    for x, y in batches(4):
        mixed = {
            name: share * v + (1 - share) * w.detach()
            for (name, v), w in zip(own.named_parameters(), federated.parameters(), strict=True)
        }
        loss = F.cross_entropy(torch.func.functional_call(own, mixed, (x,)), y)
        *gradients, of_share = torch.autograd.grad(loss, [*own.parameters(), share])
        descend(federated, F.cross_entropy(federated(x), y))
        for parameter, gradient in zip(own.parameters(), gradients, strict=True):
            parameter.data -= RATE * gradient
        if adapt:
            share.data = (share - RATE * of_share).detach().clamp(0, 1)
    found = tensors(engine, trained.model, trained.memory)
    same(found, "", federated)
    same(found, "personal.", own)
    alpha = share.item()
    assert found["personal.share_of_personal"].item() == pytest.approx(alpha, abs=1e-6)
    assert (alpha != 0.25) == adapt
    x, y = batches(1, seed=9)[0]
    mixed = {
        name: share * v + (1 - share) * w
        for (name, v), w in zip(own.named_parameters(), federated.parameters(), strict=True)
    }
    wanted = F.cross_entropy(torch.func.functional_call(own, mixed, (x,)), y)
    measured = engine.evaluate(trained.model, as_examples((x.numpy(), y.numpy())), trained.memory)
    assert measured["loss"] == pytest.approx(wanted.item(), abs=1e-6), "the site uses the mixture"


@pytest.mark.parametrize("network", [Net, normed])
@pytest.mark.parametrize("personal", [metis.Ditto(pull=0.3), metis.APFL()])
def test_the_federated_model_is_what_it_would_be_without(network: Any, personal: Any) -> None:
    """Under the network's own names, to the bit where nothing is drawn; nothing of the personal one travels."""
    with_own, plain = TorchEngine(network, personal=personal), TorchEngine(network)
    assert with_own.layout == plain.layout
    start = plain.initial_model(4)
    assert with_own.initial_model(4).sha256() == start.sha256()
    x, y = batches(1)[0]
    held_out = as_examples((x.numpy(), y.numpy()))
    assert with_own.evaluate(start, held_out) == plain.evaluate(start, held_out), "a site's own begins as its copy"
    for solver in (VanillaSGD(0.1), MomentumSGD(0.1), AdamW(0.01)) if network is Net else ():
        mine = with_own.train(with_own.initial_model(4), batches(5), solver)
        other = plain.train(plain.initial_model(4), batches(5), solver)
        assert mine.model.sha256() == other.model.sha256()
        assert mine.loss == other.loss, "what is reported is the federated model's loss"


def test_normalisation_is_each_models_own() -> None:
    engine = TorchEngine(normed, personal=metis.Ditto(pull=0.0))
    first = engine.train(engine.initial_model(0), batches(4), VanillaSGD(0.5))
    second = engine.train(first.model.with_vector(first.model.vector * 0), batches(4, 1), VanillaSGD(0.5), first.memory)
    found = dict(engine.load(second.model, second.memory).named_buffers())
    assert not torch.equal(found["1.running_mean"], found["personal.1.running_mean"])
    assert int(found["personal.1.num_batches_tracked"]) == 8


def test_options_and_frozen_parts_are_those_of_both() -> None:
    """`groups` and `frozen` name parts of the network and mean the personal model's too."""
    engine = TorchEngine(normed, personal=metis.Ditto(), parameters={"frozen": ["0.*"]})
    solver = metis.TorchOptimizer(torch.optim.SGD, lr=0.5, groups=[{"parameters": ["4.*"], "lr": 0.0}])
    engine.check_solver(solver)
    start = engine.initial_model(0)
    before = tensors(engine, start, {})
    trained = engine.train(start, batches(3), solver)
    after = tensors(engine, trained.model, trained.memory)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"1.weight", "1.bias", "personal.1.weight", "personal.1.bias"}


def disagreeing(**changes: Any) -> metis.Federation:
    """Two sites that mostly disagree about what a label means."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(400, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    y[200:] = 1 - y[200:]
    halves = [np.arange(0, 200), np.arange(200, 400)]
    given: dict[str, Any] = {
        "network": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
        "train": (x, y),
        "test": (x, y),
        "learners": [
            metis.SimulatedLearner(f"site-{k}", half[:150], 25, metis.Speed(0.1), test=half[150:])
            for k, half in enumerate(halves)
        ],
        "solver": metis.AdamW(0.02, keep_state=True),
    }
    return metis.Federation(**given | changes)


@pytest.mark.parametrize("personal", [metis.Ditto(pull=0.01), metis.APFL(share=0.9)])
def test_sites_that_disagree_are_served_by_their_own_models(personal: Any) -> None:
    plain, own = (disagreeing(personal=which).simulate(metis.sync_fedavg(2), rounds=6) for which in (None, personal))
    assert plain.final_metric < 0.7
    assert own.final_metric > 0.85
    assert own.community_model.sha256() == plain.community_model.sha256()
    assert own.setting.model_bytes == plain.setting.model_bytes


def test_a_file_says_the_same() -> None:
    file: dict[str, Any] = {
        "learners": [{"name": "a", "count": 2, "batch_size": 20, "time_per_batch": 0.1}],
        "data": {"train_examples": 100, "test_examples": 40},
        "training": {"personal": {"name": "ditto", "pull": 0.25}},
        "policy": [{"name": "sync_fedavg"}],
        "stop": {"rounds": 1},
    }
    federation = build_federation(resolve_config(file, "test"))
    assert federation.engine.personal  # type: ignore[attr-defined]
    assert any(name.startswith("personal.") for name, _ in federation.engine.module.named_parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"name": "dito"}, "training.personal.name: there is no personal model 'dito'; did you mean 'ditto'?"),
        ({"name": "ditto", "pull": -1}, "training.personal.pull: is -1, must be at least 0"),
        ({"name": "apfl", "pull": 1}, "training.personal.pull: unknown key"),
        ({"name": "apfl", "share": 1.5}, "training.personal.share: is 1.5, must be at most 1"),
        ({"pull": 1}, "training.personal.name: missing"),
    ],
)
def test_a_wrong_table_is_refused_in_a_sentence(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_config(
            {
                "learners": [{"name": "a", "batch_size": 20, "time_per_batch": 0.1}],
                "training": {"personal": table},
                "policy": [{"name": "sync_fedavg"}],
                "stop": {"rounds": 1},
            },
            "test",
        )
    assert sentence in str(refused.value)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.personal = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.personal(x)


def test_what_does_not_fit_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match="pull of Ditto is -1; it must be at least 0"):
        metis.Ditto(pull=-1)
    with pytest.raises(ConfigError, match="share of APFL is 2; it must be at least 0 and at most 1"):
        metis.APFL(share=2)
    with pytest.raises(ConfigError, match=r"personal is 'ditto'; it must be metis.Ditto\(...\) or metis.APFL"):
        disagreeing(personal="ditto")
    with pytest.raises(ConfigError, match="a part called 'personal', which is the name of the personal model"):
        TorchEngine(Named, personal=metis.Ditto())
    with pytest.raises(ConfigError, match="scaffold corrects every parameter"):
        disagreeing(personal=metis.Ditto(), solver=metis.Scaffold(0.1)).simulate(metis.sync_fedavg(1), rounds=1)
    with pytest.raises(ConfigError, match="personal cannot be combined with privacy"):
        TorchEngine(Net, personal=metis.Ditto()).check_private()
