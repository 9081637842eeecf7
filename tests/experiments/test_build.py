"""From names in a file to learners, speeds, solvers and a federation."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metis.core.solvers import FedProx, MomentumSGD, VanillaSGD
from metis.data.partition import power_law_sizes
from metis.errors import ConfigError, DataError
from metis.experiments.build import build_federation, build_policies, build_stop
from metis.experiments.config.load import ExperimentConfig, resolve_config
from metis.experiments.data import divide
from metis.experiments.learners import MEGABIT, build_availability, build_link, build_power, build_speed
from metis.runs.storage import save_model

CONTENT: dict[str, Any] = {
    "learners": [
        {"name": "fast", "count": 3, "batch_size": 20, "time_per_batch": 0.03, "epsilon": 2},
        {"name": "slow", "count": 2, "batch_size": 10, "time_per_batch": 0.3},
    ],
    "policy": {"name": "sync_fedavg"},
    "stop": {"rounds": 2},
}


def config(**tables: Any) -> ExperimentConfig:
    return resolve_config({**copy.deepcopy(CONTENT), **tables}, "test.toml")


def test_groups_take_turns_from_the_largest_share_on() -> None:
    """alternate: fast, slow, fast, slow, ... by size, as in the paper; a group that is used up is passed over."""
    division = divide(config(partition={"sizes": "power_law"}))
    assert [assignment.name for assignment in division.assignments] == [
        "fast-1",
        "slow-1",
        "fast-2",
        "slow-2",
        "fast-3",
    ]
    assert [len(assignment.indices) for assignment in division.assignments] == power_law_sizes(1437, 5)


def test_shares_can_be_dealt_in_order() -> None:
    """in_order: the sizes as they are written, group by group."""
    sizes = [10, 20, 30, 40, 50]
    partition = {"sizes": "explicit", "explicit": sizes, "assignment": "in_order"}
    division = divide(config(partition=partition))
    assert [(assignment.name, len(assignment.indices)) for assignment in division.assignments] == list(
        zip(["fast-1", "fast-2", "fast-3", "slow-1", "slow-2"], sizes, strict=True)
    )


def test_fewer_examples_can_be_asked_for() -> None:
    """The learners share what is left; the same seed draws the same examples."""
    wanted = config(data={"train_examples": 100, "test_examples": 50})
    division, again = divide(wanted), divide(wanted)
    assert division.counts.sum() == 100
    assert len(division.dataset.y_test) == 50
    np.testing.assert_array_equal(division.dataset.x_train, again.dataset.x_train)


def test_an_impossible_partition_is_refused_with_its_numbers() -> None:
    """There are ten digits, so nobody holds eleven."""
    with pytest.raises(DataError, match=r"^partition: Non-IID\(11\) cannot be"):
        divide(config(partition={"classes": "non_iid", "classes_per_learner": 11}))


def test_a_sample_of_more_learners_than_there_are_is_refused() -> None:
    policy = {"name": "semisync_fedavg", "sample": {"learners": 50}}
    with pytest.raises(
        ConfigError, match=r"^a.toml: sample.learners of semisync_fedavg is 50, but there are \d+ learners$"
    ):
        build_federation(config(policy=policy), source="a.toml")


def test_power_link_and_drift_come_from_the_group() -> None:
    """Megabits become bytes, watts and epsilon keep their unit, drift is a profile."""
    group = {"name": "a", "batch_size": 1, "time_per_batch": 0.5, "drift": [[10, 2]], "jitter": 0.1, "watts": 90}
    made = config(learners=[{**group, "idle_watts": 30, "network": {"latency": 0.1, "upload_mbps": 8}}]).learners[0]
    assert build_power(made).unit == "watt" and build_power(made).idle == 30
    assert build_link(made).upload == 8 * MEGABIT == 1_000_000
    assert build_link(made).download == math.inf
    assert build_speed(made, "a-1").profile == ((10.0, 2.0),)


def test_traces_are_read_from_files(tmp_path: Path) -> None:
    """Speeds and absences by time; a column `learner` says whose they are."""
    (tmp_path / "speed.csv").write_text("at,time_per_batch\n0,0.1\n60,0.3\n", encoding="utf-8")
    (tmp_path / "away.csv").write_text("learner,leaves,back\na-1,5,9\na-2,1,2\n", encoding="utf-8")
    group = {
        "name": "a",
        "batch_size": 1,
        "speed_trace": str(tmp_path / "speed.csv"),
        "availability": {"kind": "trace", "file": str(tmp_path / "away.csv")},
    }
    made = config(learners=[group]).learners[0]
    speed = build_speed(made, "a-1")
    assert speed.time_per_batch == 0.1
    assert speed.profile == ((0.0, 1.0), (60.0, 0.3 / 0.1))
    assert list(build_availability(made, "a-1").absences(np.random.default_rng(0))) == [(5.0, 9.0)]

    (tmp_path / "speed.csv").write_text("at,time_per_batch\n0,quick\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"speed\.csv: line 2: at and time_per_batch must be numbers"):
        build_speed(made, "a-1")
    (tmp_path / "speed.csv").write_text("second,speed\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the first line is 'second,speed', must name at and time_per_batch"):
        build_speed(made, "a-1")


def test_a_trace_must_not_name_a_learner_that_is_not_there(tmp_path: Path) -> None:
    """A row that nobody would use is refused with the nearest name; a byte order mark does no harm."""
    away = tmp_path / "away.csv"
    away.write_text("learner,leaves,back\na-1,5,9\na-3,1,2\n", encoding="utf-8")
    group = {"name": "a", "count": 2, "batch_size": 1, "time_per_batch": 0.1}
    made = config(learners=[{**group, "availability": {"kind": "trace", "file": str(away)}}, {**group, "name": "b"}])
    with pytest.raises(ConfigError, match=r"away\.csv: row 3: there is no learner 'a-3'; did you mean 'a-1'\?"):
        divide(made)
    away.write_text("learner,leaves,back\na-2,5,9\n", encoding="utf-8-sig")
    assignment = next(assignment for assignment in divide(made).assignments if assignment.name == "a-2")
    assert list(build_availability(assignment.group, assignment.name).absences(np.random.default_rng(0))) == [
        (5.0, 9.0)
    ]


def test_a_speed_trace_needs_time(tmp_path: Path) -> None:
    """A batch that takes no time is refused with the second from which it would."""
    trace = tmp_path / "speed.csv"
    trace.write_text("at,time_per_batch\n0,0\n", encoding="utf-8")
    made = config(learners=[{"name": "a", "batch_size": 1, "speed_trace": str(trace)}])
    with pytest.raises(ConfigError, match=r"time_per_batch is 0 from second 0 on, must be greater than 0"):
        build_speed(made.learners[0], "a-1")


def test_every_policy_has_its_own_solver() -> None:
    """The base solver, or what the policy's own table says."""
    made = build_policies(
        config(
            training={"solver": "momentum", "momentum": 0.5, "learning_rate": 0.1},
            policy=[
                {"name": "sync_fedavg"},
                {"name": "fedrec", "training": {"solver": "vanilla", "learning_rate": 0.2}},
                {"name": "fedasync", "training": {"solver": "fedprox", "proximal_term": 0.3}},
            ],
        )
    )
    assert [solver for _, solver in made] == [MomentumSGD(0.1, 0.5), VanillaSGD(0.2), FedProx(0.1, 0.3)]


def test_the_stop_rule_may_include_the_target() -> None:
    """at_target puts the target into the rule; without it the target is only reported."""
    evaluation = {"target": 0.9}
    assert build_stop(config(evaluation=evaluation)).target is None
    with_target = build_stop(config(evaluation=evaluation, stop={"rounds": 2, "at_target": True}))
    assert with_target.target is not None and with_target.target.value == 0.9


@pytest.mark.parametrize(
    ("network", "complaint"),
    [
        ({"name": "mpl"}, "test.toml: network.name: there is no network 'mpl'; did you mean 'mlp'?"),
        ({"name": "mlp", "hiden": [3]}, "test.toml: network.hiden: unknown key; did you mean 'hidden'?"),
        ({"name": "mlp", "hidden": "x"}, "test.toml: network.hidden: is 'x', must be a list"),
    ],
)
def test_network_options_are_checked_against_the_network(network: dict[str, Any], complaint: str) -> None:
    """A typo in an option of the network never becomes a default."""
    with pytest.raises(ConfigError) as caught:
        build_federation(config(network=network), source="test.toml")
    assert str(caught.value) == complaint


def test_images_are_normalised_as_measured_in_training() -> None:
    """The training images have mean 0 and standard deviation 1 as the network sees them."""
    federation = build_federation(config())
    inputs, _ = federation.train.batch(np.arange(len(federation.train), dtype=np.int64))
    assert float(inputs.mean()) == pytest.approx(0, abs=1e-5)
    assert float(inputs.std(correction=0)) == pytest.approx(1, abs=1e-5)


def test_an_evaluation_sees_images_of_the_size_that_training_sees() -> None:
    """Random crops in training are centre crops in the evaluation."""
    data = {"augment": [{"name": "random_crop", "size": 6}, "horizontal_flip", "standardize"]}
    federation = build_federation(config(data=data, network={"name": "small_cnn", "channels": [4]}))
    assert federation.test is not None
    inputs, _ = federation.test.batch(np.arange(3, dtype=np.int64))
    assert tuple(inputs.shape) == (3, 1, 6, 6)


@pytest.mark.parametrize("classes", ["iid", "target_ranges"])
def test_a_regression_runs_on_the_labels_as_numbers(classes: str) -> None:
    """task = "regression": one output, the mean absolute error as the metric."""
    made = config(
        training={"task": "regression", "learning_rate": 0.001},
        partition={"classes": classes},
        data={"train_examples": 100, "test_examples": 40},
    )
    federation = build_federation(made)
    ((policy, solver),) = build_policies(made)
    run = federation.simulate(policy, build_stop(made), solver=solver)
    assert run.setting.metric == "mae"
    assert run.final_metric is not None and math.isfinite(run.final_metric)


def test_runs_begin_with_the_weights_of_a_file(tmp_path: Path) -> None:
    """Every policy and seed starts from it; the run says so, with the digest of the run that it came from."""
    first = build_federation(config(network={"name": "logistic"})).simulate(build_policies(config())[0][0], rounds=1)
    save_model(tmp_path / "start.safetensors", first.community_model)
    content = {**copy.deepcopy(CONTENT), "network": {"name": "logistic"}}
    content["training"] = {"initial_model": "start.safetensors"}
    again = build_federation(resolve_config(content, "test.toml", folder=tmp_path))
    assert again.initial_model.sha256() == first.community_model.sha256()
    second = again.with_seed(7).simulate(build_policies(config())[0][0], rounds=1)
    assert second.history[0].metrics == first.history[-1].metrics
    assert second.setting.facts["initial model"] == f"start.safetensors, sha256 {first.community_model.sha256()}"
    with pytest.raises(DataError, match=r"does not fit the network: tensor .1.weight. is"):
        build_federation(resolve_config({**content, "network": {"name": "mlp"}}, "test.toml", folder=tmp_path))
