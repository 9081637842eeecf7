"""SCAFFOLD in whole federations: where FedAvg stops short of the optimum, it does not; what is written and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

import metis
from metis.core.events import LearnerLeft
from metis.errors import ConfigError
from metis.experiments.build import build_federation
from metis.experiments.compose import build_policy, build_solver
from metis.experiments.config.load import resolve_config
from metis.experiments.silo import build_controller_side, build_silo
from metis.planning.outlook import network_bytes

ETA = 0.05
SIZES, TIMES = (20, 40, 60, 30), (0.1, 1.0, 0.2, 0.5)
PLAIN, CORRECTED, WITH_MOMENTUM = metis.VanillaSGD(ETA), metis.Scaffold(ETA), metis.Scaffold(0.4 * ETA, 0.6)


def data() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Linear regressions that have nothing to do with each other: of every learner another law and other scales."""
    rng = np.random.default_rng(4)
    inputs, targets = [], []
    for size in SIZES:
        own = rng.normal(size=(size, 3)) * rng.uniform(0.3, 1.5, size=3)
        inputs.append(own)
        targets.append(own @ rng.normal(size=3) * 2)
    return np.concatenate(inputs).astype(np.float32), np.concatenate(targets).astype(np.float32)


def linear() -> torch.nn.Module:
    return torch.nn.Linear(3, 1, bias=False)


def federation(**options: Any) -> metis.Federation:
    """Each learner's batch is all that it has, so that there is no noise: what is missed is missed by the method."""
    ends = np.cumsum(SIZES)
    learners = [
        metis.SimulatedLearner(
            f"l{k}", np.arange(end - size, end), size, metis.Speed(seconds), **options.get(f"l{k}", {})
        )
        for k, (end, size, seconds) in enumerate(zip(ends, SIZES, TIMES, strict=True))
    ]
    return metis.Federation(network=linear, train=data(), learners=learners, solver=PLAIN, task="regression")


@pytest.fixture(scope="module")
def optimum() -> NDArray[Any]:
    """Of the mean loss over all examples."""
    inputs, targets = (array.astype(np.float64) for array in data())
    return np.linalg.lstsq(inputs, targets, rcond=None)[0]


ROUNDS, REQUESTS = {"rounds": 60}, {"update_requests": 300}
CASES: dict[str, tuple[metis.Policy, dict[str, int]]] = {
    "sync": (metis.sync_fedavg(20), ROUNDS),
    "semisync": (metis.semisync_fedavg(5), ROUNDS),
    "nova": (metis.semisync_fedavg(5).with_layers(metis.FedNova()), ROUNDS),
    "server": (metis.semisync_fedavg(5).with_layers(metis.FedAvgM(1, 0.5)), ROUNDS),
    "sample": (metis.sync_fedavg(10).with_layers(metis.Sample(learners=2)), {"rounds": 120}),
    "async": (metis.async_fedavg(10), REQUESTS),
    "fedrec": (metis.fedrec(10), REQUESTS),
    "fedasync": (metis.fedasync(10), REQUESTS),
    "fedbuff": (metis.fedbuff(10), {"update_requests": 600}),
    "rate": (metis.semisync_fedavg(5).with_layers(metis.ScheduledRate(metis.Schedule(1, 0.2, 40))), {"rounds": 80}),
}


SLOW = ("semisync", "server", "fedasync", "fedbuff", "rate")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_it_finds_the_optimum_that_fedavg_misses(name: str, optimum: NDArray[Any]) -> None:
    """Many local steps on unlike data, under every protocol and whatever is put on top of it."""
    policy, stop = CASES[name]

    def missed(solver: Any) -> float:
        run = federation().simulate(policy, solver=solver, **stop)
        return float(np.abs(run.community_model.vector - optimum).max())

    assert missed(PLAIN) > 0.1
    assert missed(CORRECTED) < 1e-3
    if name in ("semisync", "fedasync"):
        assert missed(WITH_MOMENTUM) < 1e-3


def test_it_is_still_right_when_a_learner_comes_and_goes(optimum: NDArray[Any]) -> None:
    """Who is away still counts with its last variate."""
    shaky = {"l1": {"availability": metis.RandomAvailability(30.0, 15.0)}}
    run = federation(**shaky).simulate(metis.semisync_fedavg(5), solver=CORRECTED, rounds=80)
    assert any(isinstance(item, LearnerLeft) for _, item in run.events)
    assert np.abs(run.community_model.vector - optimum).max() < 1e-3


@pytest.mark.parametrize(("kind", "most"), [("float16", 1e-3), ("int8", 0.02), ("top_k", 0.1)])
def test_compressed_it_is_as_exact_as_the_compression(kind: Any, most: float, optimum: NDArray[Any]) -> None:
    compression = metis.Compression(kind, 0.4 if kind == "top_k" else None)
    policy = metis.semisync_fedavg(5).with_layers(compression)
    run = federation().simulate(policy, solver=CORRECTED, rounds=60)
    assert np.abs(run.community_model.vector - optimum).max() < most


# --- what is written and counted ------------------------------------------------------------------------


def test_a_run_ends_with_the_network_alone_and_counts_all_that_travels(tmp_path: Path) -> None:
    """Files, hashes and Python see the network's own tensors; every exchange has twice the bytes."""
    plain = federation().simulate(metis.semisync_fedavg(5), rounds=4)
    run = federation().simulate(metis.semisync_fedavg(5), solver=CORRECTED, rounds=4, out=tmp_path)
    assert run.costs.bytes_exchanged == 2 * plain.costs.bytes_exchanged
    assert run.costs.models_exchanged == plain.costs.models_exchanged
    assert run.setting.model_bytes == 2 * 3 * 4
    assert {name: array.shape for name, array in load_file(tmp_path / "community.safetensors").items()} == {
        "weight": (1, 3)
    }
    assert run.community_model.layout == federation().engine.layout
    assert metis.Run.load(tmp_path).community_model.sha256() == run.community_model.sha256()
    assert json.loads((tmp_path / "summary.json").read_text())["community_sha256"] == run.community_model.sha256()


@pytest.mark.parametrize("kind", ["int8", "top_k"])
def test_compressed_runs_go_on_in_the_same_bits(kind: Any, tmp_path: Path) -> None:
    """What was left out and the variates are part of the checkpoint; so is what everybody handed in last."""
    policy = metis.sync_fedavg(3).with_layers(metis.Sample(learners=2)).with_layers(metis.Compression(kind))
    whole = federation().simulate(policy, solver=WITH_MOMENTUM, rounds=20)

    class Enough(Exception):
        pass

    def watch(fold: Any) -> None:
        if fold.version == 11:
            raise Enough

    with pytest.raises(Enough):
        federation().simulate(policy, solver=WITH_MOMENTUM, rounds=20, out=tmp_path, checkpoint_every=0, watch=watch)
    run = federation().simulate(policy, solver=WITH_MOMENTUM, rounds=20, out=tmp_path, resume=True, workers=2)
    assert run.community_model.sha256() == whole.community_model.sha256()


# --- configurations ---------------------------------------------------------------------------------------


def experiment(**changes: Any) -> dict[str, Any]:
    return {
        "data": {"dataset": "digits"},
        "learners": [{"name": "all", "count": 2, "batch_size": 20, "time_per_batch": 0.1}],
        "training": {"solver": "scaffold", "learning_rate": 0.1},
        "policy": {"name": "semisync_fedavg"},
        "stop": {"rounds": 2},
        **changes,
    }


def test_a_file_says_scaffold() -> None:
    config = resolve_config(experiment(), "test.toml")
    (policy,) = config.policy
    assert build_solver(policy.training) == metis.Scaffold(0.1)
    assert [layer.key for layer in build_policy(policy).layers] == ["control_variates"]
    assert resolve_config(config.to_dict(), "again.toml") == config
    with_momentum = experiment(training={"solver": "scaffold", "momentum": 0.5, "weight_decay": 0.01})
    (policy,) = resolve_config(with_momentum, "test.toml").policy
    assert build_solver(policy.training) == metis.Scaffold(0.05, 0.5, 0.01)


def test_policies_of_a_file_may_differ_in_it() -> None:
    """Each run has the models that its solver needs; momentum that was meant for another solver is not taken over."""
    config = resolve_config(
        experiment(
            training={"solver": "momentum", "momentum": 0.7},
            policy=[{"name": "sync_fedavg"}, {"name": "sync_fedavg", "training": {"solver": "scaffold"}}],
        ),
        "test.toml",
    )
    assert [policy.label for policy in config.policy] == ["Sync w/ Momentum", "Sync w/ SCAFFOLD"]
    assert [len(build_policy(policy).layers) for policy in config.policy] == [0, 1]
    assert build_solver(config.policy[1].training) == metis.Scaffold(0.05)
    made = build_federation(config)
    sizes = [
        made.simulate(build_policy(policy), rounds=1, solver=build_solver(policy.training)).setting.model_bytes
        for policy in config.policy
    ]
    assert sizes[1] == 2 * sizes[0] == network_bytes(config, "test.toml")


@pytest.mark.parametrize(
    ("training", "sentence"),
    [
        (
            {"solver": "scaffold", "keep_momentum": True},
            "training.keep_momentum: is given, but solver = 'scaffold' does not use it; 'momentum' and 'fedprox' would",
        ),
        (
            {"solver": "scaffold", "proximal_term": 0.1},
            "training.proximal_term: is given, but solver = 'scaffold' does not use it; 'fedprox' would",
        ),
        ({"solver": "scafold"}, "training.solver: .*'scaffold'"),
        ({"solver": "scaffold", "momentum": 1.0}, "training.momentum: .*less than 1"),
    ],
)
def test_mistakes_are_reported(training: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve_config(experiment(training=training), "test.toml")


def test_both_ends_of_a_deployment_agree_on_the_layout() -> None:
    """The controller's initial model is what the learners expect, with variates for all of the network."""
    settings = {"experiment": resolve_config(experiment(), "test.toml").to_dict(), "policy": 0}
    silo, side = build_silo(settings, None, "all-1", 0), build_controller_side(settings, None)
    assert silo.layout == side.layout
    assert side.layout.size == 2 * side.layout.network.size
    assert silo.learner is not None and silo.learner.solver == metis.Scaffold(0.1)
