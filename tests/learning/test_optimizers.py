"""Any optimizer of torch as a solver: the arithmetic of a plain torch loop, options by parameter, and kept state."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn

import metis
from metis.core.model import Model
from metis.core.solvers import AdamW, Solver, VanillaSGD
from metis.errors import ConfigError
from metis.experiments.compose import build_solver
from metis.experiments.config.load import resolve_config
from metis.learning import Batch, TorchEngine, mlp
from metis.learning.torch.optimizers import TorchOptimizer

NETWORK = partial(mlp, (5,), 3, hidden=(7,))
TABLES: dict[str, Any] = {
    "learners": [{"name": "site", "batch_size": 10, "time_per_batch": 0.1}],
    "policy": {"name": "sync_fedavg"},
    "stop": {"rounds": 1},
}


def batches(count: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 5, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)]


def bare(model: Model, steps: list[list[Batch]], make: Any, scheduler: Any = None, clip: float | None = None) -> Any:
    """The weights that a plain loop of torch reaches; each inner list is one step of the optimizer."""
    network = NETWORK()
    network.load_state_dict({name: torch.tensor(array) for name, array in model.tensors().items()})
    optimizer = make(network)
    schedule = None if scheduler is None else scheduler(optimizer)
    for step in steps:
        optimizer.zero_grad()
        for inputs, targets in step:
            (nn.functional.cross_entropy(network(inputs), targets) / len(step)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return torch.cat([p.detach().ravel() for p in network.parameters()]).numpy()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.99)}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.RMSprop, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.NAdam, {}),
    ],
)
def test_equals_a_bare_torch_loop(kind: Any, options: dict[str, Any]) -> None:
    engine = TorchEngine(NETWORK)
    start = engine.initial_model(1)
    trained = engine.train(start, batches(6), TorchOptimizer(kind, **options))
    wanted = bare(start, [[one] for one in batches(6)], lambda network: kind(network.parameters(), **options))
    assert trained.model.vector == pytest.approx(wanted, abs=1e-6)
    assert trained.memory == {}


def test_groups_schedules_clipping_and_accumulation_equal_a_bare_torch_loop() -> None:
    """No decay for biases, a rate that falls over the steps, gradients of two batches, cut to a norm."""
    cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=4)

    def make(network: nn.Module) -> torch.optim.Optimizer:
        named = dict(network.named_parameters())
        biases = [p for name, p in named.items() if name.endswith(".bias")]
        others = [p for name, p in named.items() if not name.endswith(".bias")]
        return torch.optim.AdamW(
            [{"params": others}, {"params": biases, "weight_decay": 0.0}], lr=0.02, weight_decay=0.5
        )

    solver = TorchOptimizer(
        torch.optim.AdamW,
        lr=0.02,
        weight_decay=0.5,
        groups=[{"parameters": "*.bias", "weight_decay": 0.0}],
        scheduler=cosine,
    )
    engine = TorchEngine(NETWORK, clip_norm=0.05, accumulate=2)
    start, data = engine.initial_model(1), batches(5)
    steps = [data[0:2], data[2:4], data[4:5]]  # what is left at the end of a task makes a step too
    wanted = bare(start, steps, make, cosine, clip=0.05)
    assert engine.train(start, data, solver).model.vector == pytest.approx(wanted, abs=1e-6)
    assert wanted != pytest.approx(bare(start, steps, make, cosine), abs=1e-4), "the gradients are longer than that"


SCHEDULED = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)


@pytest.mark.parametrize(
    "solver",
    [
        TorchOptimizer(torch.optim.AdamW, lr=0.01, keep_state=True),
        TorchOptimizer(torch.optim.SGD, lr=0.1, momentum=0.9, keep_state=True, scheduler=SCHEDULED),
        TorchOptimizer(torch.optim.Adagrad, lr=0.1, keep_state=True),
        AdamW(0.01, keep_state=True),
    ],
    ids=str,
)
def test_kept_state_makes_two_tasks_one(solver: Solver) -> None:
    """Three and then four batches from where the first task ended give the bits of seven; without it they do not."""
    engine = TorchEngine(NETWORK)
    data, start = batches(7), engine.initial_model(1)
    whole = engine.train(start, data, solver)
    first = engine.train(start, data[:3], solver)
    second = engine.train(first.model, data[3:], solver, copy.deepcopy(first.memory))
    assert second.model.sha256() == whole.model.sha256()
    assert engine.train(first.model, data[3:], solver).model.sha256() != whole.model.sha256()


def test_a_rate_and_a_pull_of_the_policy_reach_the_optimizer() -> None:
    """Half the rate is half the lr; without a gradient of the data the pull leads back to the community model."""
    engine = TorchEngine(NETWORK)
    start, sgd = engine.initial_model(1), TorchOptimizer(torch.optim.SGD, lr=0.1)
    assert (
        engine.train(start, batches(3), sgd.with_rate(0.5)).model.sha256()
        == engine.train(start, batches(3), TorchOptimizer(torch.optim.SGD, lr=0.05)).model.sha256()
    )
    pulled = engine.train(start, batches(3), sgd.with_pull(0.3).with_pull(0.2)).model.vector
    assert pulled == pytest.approx(engine.train(start, batches(3), VanillaSGD(0.1).with_pull(0.5)).model.vector)


def test_normalised_averaging_knows_plain_sgd_and_refuses_the_rest_by_name() -> None:
    """SGD of torch has the accumulation of Metis's own; a schedule, nesterov or another rule does not."""
    policy = metis.sync_fedavg(1).with_layers(metis.FedNova())
    own, _ = policy.for_solver(metis.MomentumSGD(0.1, 0.5).with_pull(0.2))
    same, _ = policy.for_solver(TorchOptimizer(torch.optim.SGD, lr=0.1, momentum=0.5).with_pull(0.2))
    assert own.layers == same.layers
    for solver in (
        TorchOptimizer(torch.optim.SGD, lr=0.1, momentum=0.5, nesterov=True),
        TorchOptimizer(torch.optim.SGD, lr=0.1, scheduler=SCHEDULED),
        TorchOptimizer(torch.optim.AdamW),
    ):
        with pytest.raises(ConfigError, match=r"nova divides by .* the steps of (SGD|AdamW) are not"):
            policy.for_solver(solver)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: TorchOptimizer("AdamW"), "optimizer is 'AdamW'; give a class such as torch.optim.AdamW"),
        (lambda: TorchOptimizer(nn.Linear), "give a class such as torch.optim.AdamW"),
        (lambda: TorchOptimizer(torch.optim.LBFGS), "LBFGS measures the loss several times in a step"),
        (
            lambda: TorchOptimizer(torch.optim.AdamW, beta=0.9),
            "beta is not an option of AdamW; did you mean 'betas'",
        ),
        (lambda: TorchOptimizer(torch.optim.AdamW, lr=-1), "AdamW refuses its options: Invalid learning rate: -1"),
        (lambda: TorchOptimizer(torch.optim.AdamW, groups=cast("Any", ["*.bias"])), "groups must be a list of tables"),
        (
            lambda: TorchOptimizer(torch.optim.AdamW, groups=[{"parameters": "*", "decay": 0}]),
            "decay is not an option of AdamW; did you mean 'weight_decay'",
        ),
        (lambda: TorchOptimizer(torch.optim.SGD, scheduler={"T_max": 3}), "scheduler must be a table .* key name"),
        (
            lambda: TorchOptimizer(torch.optim.SGD, scheduler={"name": "CosineAnealingLR"}),
            "did you mean 'CosineAnnealingLR'",
        ),
        (
            lambda: TorchOptimizer(torch.optim.SGD, scheduler={"name": "StepLR", "step": 3}),
            "scheduler: step is not an option of StepLR; did you mean 'step_size'",
        ),
        (
            lambda: TorchOptimizer(torch.optim.SGD, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau),
            "scheduler made a ReduceLROnPlateau; it must make a schedule of torch over steps",
        ),
        (lambda: TorchEngine(NETWORK, clip_norm=0.0), "clip_norm is 0.0; it must be finite and greater than 0"),
        (lambda: TorchEngine(NETWORK, accumulate=0), "accumulate is 0; it must be a whole number, at least 1"),
        (
            lambda: TorchEngine(NETWORK).check_solver(
                TorchOptimizer(torch.optim.SGD, groups=[{"parameters": "head.*", "lr": 0.1}])
            ),
            r"groups: the pattern 'head\.\*' matches no parameter of the network, which has ",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(build: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        build()
    assert "\n" not in str(caught.value)


# --- from a file ----------------------------------------------------------------------------------


def test_a_file_names_any_optimizer_of_torch() -> None:
    """Its options stand next to the name, and the resolved file is the same again."""
    training = {
        "solver": "AdamW",
        "learning_rate": 0.002,
        "betas": [0.8, 0.9],
        "keep_state": True,
        "groups": [{"parameters": ["*.bias"], "weight_decay": 0.0, "learning_rate": 0.01}],
        "scheduler": {"name": "StepLR", "step_size": 10},
    }
    config = resolve_config({**TABLES, "training": training}, "demo.toml")
    again = resolve_config(config.to_dict(), "demo.toml")
    assert again == config
    solver = build_solver(again.policy[0].training)
    assert isinstance(solver, TorchOptimizer)
    assert solver.optimizer is torch.optim.AdamW
    assert solver.options["betas"] == (0.8, 0.9)
    assert (solver.options["lr"], solver.keep_state) == (0.002, True)
    assert solver.divided(["a.weight", "a.bias"]) == [
        (["a.weight"], {}),
        (["a.bias"], {"weight_decay": 0.0, "lr": 0.01}),
    ]


def test_without_a_learning_rate_an_optimizer_has_its_own() -> None:
    """The default of [training] is for rules that have none."""
    for name, own in (("AdamW", 0.001), ("adamw", 0.001), ("SGD", 0.001)):
        (policy,) = resolve_config({**TABLES, "training": {"solver": name}}, "demo.toml").policy
        assert policy.training.learning_rate == own


@pytest.mark.parametrize(
    ("training", "sentence"),
    [
        ({"solver": "AdamW", "bettas": [0.9, 0.99]}, "training.bettas: unknown key; did you mean 'betas'?"),
        ({"solver": "AdamW", "amsgrad": 1}, "training.amsgrad: is 1, must be true or false"),
        ({"solver": "AdamW", "momentum": 0.9}, "training.momentum: is given, but solver = 'AdamW' does not use it"),
        ({"solver": "AdamW", "betas": [0.9, 1.5]}, "training: AdamW refuses its options: Invalid beta parameter"),
        ({"solver": "AdamW", "scheduler": {"name": "StepLR"}}, "training: AdamW refuses its options: .*step_size"),
        ({"solver": "AdamW", "groups": [{"weight_decay": 0.0}]}, "training.groups: must be a list of tables"),
        ({"solver": "LBFGS"}, "training: LBFGS measures the loss several times in a step"),
    ],
)
def test_a_wrong_optimizer_in_a_file_is_one_sentence(training: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        resolve_config({**TABLES, "training": training}, "demo.toml")
    assert "\n" not in str(caught.value)


def test_normalised_averaging_is_refused_with_an_adaptive_rule_or_accumulation() -> None:
    policy = {"name": "sync_fedavg", "nova": {}}
    with pytest.raises(ConfigError, match=r"policy\.nova: divides by the length .* the steps of AdamW are not"):
        resolve_config({**TABLES, "policy": policy, "training": {"solver": "AdamW"}}, "demo.toml")
    with pytest.raises(ConfigError, match=r"policy\.nova: takes a batch for a step"):
        resolve_config({**TABLES, "policy": policy, "training": {"accumulate": 2}}, "demo.toml")
