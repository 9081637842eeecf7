"""Policies with what is put on top of the paper's: from a file's tables to what runs."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metis
from metis.core.events import UpdateRequest
from metis.core.layers.adaptive_period import AdaptivePeriod
from metis.core.layers.scheduled_lambda import ScheduledLambda
from metis.core.layers.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi, Optimized
from metis.core.mixing import MemoryStore
from metis.core.protocols import SemiSynchronous
from metis.core.schedules import Schedule
from metis.errors import ConfigError
from metis.experiments.build import build_federation, build_policies, build_stop
from metis.experiments.compose import build_policy, build_solver
from metis.experiments.config.load import ExperimentConfig, load_config, resolve_config
from metis.experiments.deploy import check_deployment

DOCS = Path(__file__).parents[2] / "docs" / "beyond.md"

CONTENT: dict[str, Any] = {
    "data": {"dataset": "digits", "train_examples": 200, "test_examples": 50},
    "learners": [
        {"name": "fast", "count": 2, "batch_size": 20, "time_per_batch": 0.03},
        {"name": "slow", "count": 2, "batch_size": 20, "time_per_batch": 0.3},
    ],
    "network": {"name": "mlp", "hidden": [8]},
    "policy": {"name": "semisync_fedavg"},
    "stop": {"rounds": 3},
}


def resolved(**policy: Any) -> ExperimentConfig:
    content = copy.deepcopy(CONTENT)
    content["policy"] = {**content["policy"], **policy}
    return resolve_config(content, "demo.toml")


def fault(**policy: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(**policy)
    return str(caught.value)


def layer_of(policy: metis.Policy, key: str) -> object:
    """The one layer of this key."""
    (layer,) = (layer for layer in policy.layers if layer.key == key)
    return layer


def again(config: ExperimentConfig, tmp_path: Path) -> ExperimentConfig:
    """Written as a file and read back."""
    (tmp_path / "again.toml").write_text(config.to_toml(), encoding="utf-8")
    return load_config(tmp_path / "again.toml")


# --- server-side optimizers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "optimizer", "label"),
    [
        ({"optimizer": "momentum"}, FedAvgM(), "SemiSync (λ=2) + FedAvgM"),
        ({"optimizer": "adagrad", "learning_rate": 0.5}, FedAdagrad(0.5), "SemiSync (λ=2) + FedAdagrad"),
        ({"optimizer": "adam", "beta1": 0.5, "beta2": 0.9}, FedAdam(0.1, 0.5, 0.9), "SemiSync (λ=2) + FedAdam"),
        ({"optimizer": "yogi", "tau": 0.01}, FedYogi(tau=0.01), "SemiSync (λ=2) + FedYogi"),
    ],
)
def test_a_table_becomes_an_optimizer(table: dict[str, Any], optimizer: object, label: str, tmp_path: Path) -> None:
    """The defaults are written out, the file written from it loads to the same, the label distinguishes it."""
    config = resolved(server=table)

    assert config.policy[0].label == label
    assert layer_of(build_policy(config.policy[0]), "server") == optimizer
    assert config.policy[0].layers["server"] == {"optimizer": table["optimizer"], **vars(optimizer)}
    assert again(config, tmp_path) == config
    federation = build_federation(config)
    assert isinstance(
        build_policy(config.policy[0]).start_community(federation.initial_model, MemoryStore()), Optimized
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "optimizer: missing; it must be one of momentum, adagrad, adam, yogi"),
        (
            {"optimizer": "adm"},
            "optimizer: is 'adm', must be one of momentum, adagrad, adam, yogi; did you mean 'adam'?",
        ),
        (
            {"optimizer": "adam", "momentum": 0.5},
            "momentum: is given, but optimizer = 'adam' does not use it; 'momentum' would",
        ),
        (
            {"optimizer": "adagrad", "beta2": 0.5},
            "beta2: is given, but optimizer = 'adagrad' does not use it; 'adam' and 'yogi' would",
        ),
        ({"optimizer": "adam", "beta_1": 0.5}, "beta_1: unknown key; did you mean 'beta1'?"),
        ({"optimizer": "adam", "learning_rate": 0.0}, "learning_rate: is 0.0, must be greater than 0"),
        ({"optimizer": "yogi", "beta1": 1.0}, "beta1: is 1.0, must be less than 1"),
    ],
)
def test_what_is_wrong_with_an_optimizer_is_reported(table: dict[str, Any], message: str) -> None:
    assert fault(server=table) == f"demo.toml: policy.server.{message}"


# --- normalised averaging ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("training", "momentum", "pull"),
    [
        ({"solver": "vanilla"}, 0.0, 0.0),
        ({"solver": "momentum", "momentum": 0.75}, 0.75, 0.0),
        ({"solver": "momentum", "momentum": 0.75, "keep_momentum": True}, 0.0, 0.0),
        ({"solver": "fedprox", "proximal_term": 0.1, "learning_rate": 0.2, "momentum": 0.5}, 0.5, 0.2 * 0.1),
    ],
)
def test_normalised_averaging_knows_the_solver(
    training: dict[str, Any], momentum: float, pull: float, tmp_path: Path
) -> None:
    """From the file, and from a solver that a user hands to `simulate`: the same policy."""
    config = resolved(nova={"largest_amplification": 3}, training=training)
    made = build_policy(config.policy[0])

    assert config.policy[0].label == "SemiSync (λ=2) FedNova"
    assert layer_of(made, "nova") == metis.FedNova(3.0, momentum, pull)
    assert again(config, tmp_path) == config
    by_hand = metis.semisync_fedavg(2).with_layers(metis.FedNova(3.0))
    assert by_hand.for_solver(build_solver(config.policy[0].training))[0].layers == made.layers


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            {"name": "fedrec", "nova": {}},
            "nova: mixes rounds by a normalised average, and fedrec does not average rounds; sync_fedavg and "
            "semisync_fedavg do",
        ),
        ({"nova": {"largest_amplification": 0.5}}, "nova.largest_amplification: is 0.5, must be at least 1"),
        ({"nova": {"amplification": 2}}, "nova.amplification: unknown key; did you mean 'largest_amplification'?"),
    ],
)
def test_what_is_wrong_with_normalised_averaging_is_reported(policy: dict[str, Any], message: str) -> None:
    assert fault(**policy) == f"demo.toml: policy.{message}"


# --- periods ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "pacing", "label"),
    [
        (
            {"schedule": {"start": 4, "end": 0.5, "length": 20}},
            ScheduledLambda(Schedule(4, 0.5, 20, "rounds", "cosine")),
            "SemiSync (λ scheduled)",
        ),
        (
            {"schedule": {"start": 4, "end": 1, "length": 60, "over": "seconds", "shape": "step", "jumps": 2}},
            ScheduledLambda(Schedule(4, 1, 60, "seconds", "step", 2)),
            "SemiSync (λ scheduled)",
        ),
        ({"adaptive": {}}, AdaptivePeriod(batches=5), "SemiSync (adaptive)"),
        (
            {"adaptive": {"batches": 6, "served": 0.5, "longest": 2, "wanted_agreement": 0.3, "gain": 2}},
            AdaptivePeriod(6, 0.5, 2, 0.3, 2),
            "SemiSync (adaptive)",
        ),
    ],
)
def test_a_table_says_how_long_periods_are(policy: dict[str, Any], pacing: object, label: str, tmp_path: Path) -> None:
    """The shortest adaptive period comes from the solver's momentum where it is not given."""
    config = resolved(**policy, training={"solver": "momentum", "momentum": 0.9})
    (made,) = build_policy(config.policy[0]).layers
    if isinstance(made, AdaptivePeriod):
        assert isinstance(pacing, AdaptivePeriod)
        assert made.batches == pytest.approx(pacing.batches)
        made = replace(made, batches=pacing.batches)
    assert made == pacing
    assert config.policy[0].label == label
    assert again(config, tmp_path) == config


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            {"schedule": {"start": 1, "end": 2, "length": 3}, "adaptive": {}},
            "schedule: is given together with adaptive; keep one of them",
        ),
        (
            {"adaptive": {}, "slowest_learner_epochs": 2},
            "slowest_learner_epochs: is given together with adaptive; keep one of them",
        ),
        (
            {"name": "fedrec", "adaptive": {}},
            "adaptive: chooses the periods of semi-synchronous training; fedrec has none",
        ),
        (
            {"name": "sync_fedavg", "schedule": {"start": 1, "end": 2, "length": 3}},
            "schedule: changes lambda, which is for semi-synchronous training; sync_fedavg has none",
        ),
        ({"schedule": {"start": 1, "end": 2}}, "schedule.length: missing; it must be given"),
        ({"schedule": {"start": 0, "end": 2, "length": 3}}, "schedule.start: is 0, must be greater than 0"),
        ({"adaptive": {"served": 1.5}}, "adaptive.served: is 1.5, must be at most 1"),
        ({"adaptive": {"batch": 2}}, "adaptive.batch: unknown key; did you mean 'batches'?"),
        ({"max_local_epochs": 0.0}, "max_local_epochs: is 0.0, must be greater than 0"),
    ],
)
def test_what_is_wrong_with_periods_is_reported(policy: dict[str, Any], message: str) -> None:
    assert fault(**policy) == f"demo.toml: policy.{message}"


# --- learning rates -------------------------------------------------------------------------------


def test_tables_of_schedules_become_rates(tmp_path: Path) -> None:
    """At the learners and at the server, by rounds, steps or seconds."""
    config = resolved(
        rate={"start": 1, "end": 0.1, "length": 30, "over": "seconds", "shape": "exponential"},
        server={"optimizer": "adam", "rate": {"start": 1, "end": 0.5, "length": 10, "shape": "step", "jumps": 2}},
    )
    policy = build_policy(config.policy[0])

    assert layer_of(policy, "rate") == metis.ScheduledRate(Schedule(1, 0.1, 30, "seconds", "exponential"))
    assert layer_of(policy, "server") == FedAdam(rate=Schedule(1, 0.5, 10, "rounds", "step", 2))
    assert config.policy[0].label == "SemiSync (λ=2) + FedAdam, η scheduled"
    assert again(config, tmp_path) == config
    assert (
        fault(rate={"start": 1, "end": -1, "length": 3}) == "demo.toml: policy.rate.end: is -1, must be greater than 0"
    )
    assert fault(rate={"start": 1, "stop": 1, "end": 1, "length": 3}).startswith(
        "demo.toml: policy.rate.stop: unknown key"
    )


def test_a_learner_trains_with_the_rate_of_its_task() -> None:
    """A tiny rate moves the model by so much less, in the same direction."""
    config = resolved()
    federation = build_federation(config)
    deltas = []
    for factor in (1.0, 1e-3):
        run = federation.simulate(
            metis.sync_fedavg(1).with_layers(metis.ScheduledRate(lambda moment, factor=factor: factor)), rounds=1
        )
        deltas.append(run.community_model.vector.astype(float) - federation.initial_model.vector)
    ratio = np.linalg.norm(deltas[1]) / np.linalg.norm(deltas[0])
    assert 0.5e-3 < ratio < 2e-3
    assert deltas[0] @ deltas[1] > 0.8 * np.linalg.norm(deltas[0]) * np.linalg.norm(deltas[1])


# --- samples and far learners -----------------------------------------------------------------------


def test_a_table_draws_a_sample(tmp_path: Path) -> None:
    config = resolved(sample={"share": 0.5}, exchange="inside")
    policy = build_policy(config.policy[0])

    assert layer_of(policy, "sample") == metis.Sample(share=0.5)
    assert isinstance(policy.protocol, SemiSynchronous)
    assert policy.protocol.exchange == "inside"
    assert config.policy[0].label == "SemiSync (λ=2), exchange inside, 50% of the learners"
    assert again(config, tmp_path) == config


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"sample": {}}, "sample: needs either learners or share, not both"),
        (
            {"sample": {"learners": 2, "share": 0.5}},
            "sample: needs either learners or share, not both",
        ),
        ({"sample": {"learners": 0}}, "sample.learners: is 0, must be at least 1"),
        ({"sample": {"share": 2}}, "sample.share: is 2, must be at most 1"),
        (
            {"name": "fedrec", "sample": {"learners": 2}},
            "sample: is drawn for each round, and fedrec has none; sync_fedavg and semisync_fedavg do",
        ),
        ({"exchange": "outside"}, "exchange: is 'outside', must be 'inside'"),
    ],
)
def test_what_is_wrong_with_a_sample_is_reported(policy: dict[str, Any], message: str) -> None:
    assert fault(**policy) == f"demo.toml: policy.{message}"


@pytest.mark.parametrize(
    ("table", "label"),
    [
        ({"max_local_epochs": 5}, "SemiSync (λ=2), at most 5 epochs"),
        ({"max_local_epochs": 1, "exchange": "inside"}, "SemiSync (λ=2), at most 1 epoch, exchange inside"),
        ({"max_local_epochs": 0.5, "adaptive": {}}, "SemiSync (adaptive), at most 0.5 epochs"),
        ({"exchange": "inside", "sample": {"learners": 2}}, "SemiSync (λ=2), exchange inside, 2 learners"),
    ],
)
def test_what_is_on_top_of_a_policy_shows_in_its_label(table: dict[str, Any], label: str) -> None:
    """So that a comparison can include it and the plain one without labels by hand."""
    assert resolved(**table).policy[0].label == label


# --- compression ----------------------------------------------------------------------------------


def test_a_table_compresses_updates(tmp_path: Path) -> None:
    """Fewer bytes are counted, and every update reports what was left out."""
    config = resolved(compression={"kind": "int8"})
    policy = build_policy(config.policy[0])
    assert policy.wire == metis.Compression("int8")
    assert config.policy[0].label == "SemiSync (λ=2), int8"
    assert again(config, tmp_path) == config
    federation = build_federation(config)
    plain, compressed = (federation.simulate(each, rounds=3) for each in (metis.semisync_fedavg(2), policy))
    layout = federation.initial_model.layout
    saved = plain.costs.update_requests * (federation.initial_model.nbytes - metis.Compression("int8").nbytes(layout))
    assert plain.costs.bytes_exchanged - compressed.costs.bytes_exchanged == saved
    errors = [item.notes["compression_error"] for _, item in compressed.events if isinstance(item, UpdateRequest)]
    assert all(0 < error < 0.1 for error in errors)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "compression.kind: missing; it must be one of float16, bfloat16, int8, top_k"),
        ({"kind": "top_k", "share": 0}, "compression.share: is 0, must be greater than 0"),
        ({"kind": "int8", "shares": 0.5}, "compression.shares: unknown key; did you mean 'share'?"),
    ],
)
def test_what_is_wrong_with_a_compression_is_reported(table: dict[str, Any], message: str) -> None:
    assert fault(compression=table) == f"demo.toml: policy.{message}"


# --- the page -----------------------------------------------------------------------------------


def test_the_files_of_the_page_run(tmp_path: Path) -> None:
    """Every TOML example of docs/beyond.md is a whole file that simulates; each round moves the model."""
    examples = re.findall(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert examples
    for number, text in enumerate(examples):
        file = tmp_path / f"example-{number}.toml"
        file.write_text(text, encoding="utf-8")
        config = load_config(file, ["stop.rounds=2", "data.train_examples=200", "data.test_examples=50"])
        federation = build_federation(config, source=file.name)
        for policy, solver in build_policies(config):
            run = federation.simulate(policy, build_stop(config), solver=solver)
            assert run.rounds == 2
            assert run.community_model.sha256() != federation.initial_model.sha256()


def test_python_examples_of_the_page_make_policies() -> None:
    """Every Python block of the page makes a policy, or a solver for one."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        names: dict[str, Any] = {}
        exec(block, names)
        assert any(isinstance(value, (metis.Policy, metis.Scaffold)) for value in names.values())


def test_a_step_guard_is_refused_for_masked_rounds() -> None:
    """By name, if the file asks for it; the default is off where nothing can be measured."""
    masked = {**CONTENT, "policy": {"name": "sync_fedavg", "secure_sum": {}}}
    for fine in ({}, {"step_guard": "off"}):
        check_deployment(resolve_config({**masked, "deployment": fine}, "x.toml"))
    guarded = {"deployment": {"step_guard": "clip"}}
    with pytest.raises(ConfigError, match=r"deployment\.step_guard: 'clip' measures each local model"):
        check_deployment(resolve_config({**masked, **guarded}, "x.toml"))
    check_deployment(resolve_config({**CONTENT, **guarded}, "x.toml"))


def test_a_deployment_masks_in_windows_but_not_single_updates() -> None:
    windows = {"name": "fedbuff", "buffer_size": 4, "secure_sum": {}}
    check_deployment(resolve_config({**CONTENT, "policy": windows}, "x.toml"))
    for name in ("async_fedavg", "fedrec"):
        check_deployment(resolve_config({**CONTENT, "policy": {"name": name, "secure_sum": {}}}, "x.toml"))
    with pytest.raises(ConfigError, match="fedasync publishes after every single update"):
        check_deployment(resolve_config({**CONTENT, "policy": {"name": "fedasync", "secure_sum": {}}}, "x.toml"))


@pytest.mark.parametrize(("name", "colluders", "fewest"), [("sync_fedavg", 0, 4), ("async_fedavg", 1, 5)])
def test_masks_need_members(name: str, colluders: int, fewest: int) -> None:
    """Too few would wait for ever."""
    content = {**CONTENT, "policy": {"name": name, "secure_sum": {"colluders": colluders}}}
    few = [{**CONTENT["learners"][0], "count": fewest - 1}]
    sentence = f"secure_sum: with colluders = {colluders} needs {fewest} learners or more, there are {fewest - 1}"
    with pytest.raises(ConfigError, match=sentence):
        resolve_config({**content, "learners": few}, "x.toml")
    resolve_config({**content, "learners": [{**few[0], "count": fewest}]}, "x.toml")
