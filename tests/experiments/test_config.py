"""One TOML file, checked as a whole: what it may contain, and the sentence for everything that is wrong with it."""

# ruff: noqa: E501  # a message stands in one line, as the user sees it

from __future__ import annotations

import copy
import math
import os
from pathlib import Path
from typing import Any

import pytest

from metis.core.policies import POLICIES
from metis.errors import ConfigError
from metis.experiments.config.load import ExperimentConfig, config_schema, load_config, resolve_config, slug

EXAMPLES = Path(__file__).parents[2] / "examples"

CONTENT: dict[str, Any] = {
    "data": {"dataset": "digits"},
    "learners": [
        {"name": "fast", "count": 2, "batch_size": 20, "time_per_batch": 0.03, "epsilon": 2},
        {"name": "slow", "count": 2, "batch_size": 20, "time_per_batch": 0.3},
    ],
    "policy": {"name": "semisync_fedavg"},
    "stop": {"rounds": 3},
}


def resolved(*overrides: str, **tables: Any) -> ExperimentConfig:
    return resolve_config({**copy.deepcopy(CONTENT), **tables}, "demo.toml", overrides)


def fault(*overrides: str, **tables: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(*overrides, **tables)
    return str(caught.value)


# --- what it may say --------------------------------------------------------------------------


def test_defaults_are_written_out() -> None:
    """A resolved configuration holds every parameter of its policy and the settings of its solver."""
    (policy,) = resolved().policy
    assert policy.parameters == {
        "slowest_learner_epochs": 2.0,
        "cold_start_limit": math.inf,
        "timings": "every_round",
        "budget": "steps",
        "grace": 0.1,
        "weighting": "examples",
        "longest_period": math.inf,
        "returning": None,
        "max_local_epochs": None,
        "exchange": None,
    }
    assert policy.label == "SemiSync (λ=2)"
    assert policy.training.solver == "vanilla"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.stem)
def test_a_resolved_example_loads_to_itself(file: Path, tmp_path: Path) -> None:
    """What is written back as TOML says the same, infinities and paths included."""
    config = load_config(file)
    again = tmp_path / "config.toml"
    again.write_text(config.to_toml(), encoding="utf-8")
    assert load_config(again) == config
    assert load_config(again).to_toml() == config.to_toml()


def test_one_policy_may_be_a_table_of_its_own() -> None:
    """[policy] is one policy, [[policy]] is a list of them."""
    assert resolved(policy=[{"name": "semisync_fedavg"}]) == resolved()


def test_equal_policies_are_labelled_by_their_solver() -> None:
    """The paper compares solvers: the label then names the solver."""
    config = resolved(policy=[{"name": "sync_fedavg"}, {"name": "sync_fedavg", "training": {"solver": "momentum"}}])
    assert [policy.label for policy in config.policy] == ["Sync w/ Vanilla", "Sync w/ Momentum"]


def test_a_policy_takes_over_only_what_its_solver_uses() -> None:
    """Momentum set for some policies does not apply to the others; the paper's FedProx has none."""
    config = resolved(
        training={"solver": "vanilla", "learning_rate": 0.05, "momentum": 0.75, "proximal_term": 0.01},
        policy=[
            {"name": "sync_fedavg", "label": "v"},
            {"name": "sync_fedavg", "label": "m", "training": {"solver": "momentum"}},
            {"name": "sync_fedavg", "label": "p", "training": {"solver": "fedprox"}},
        ],
    )
    vanilla, momentum, fedprox = (policy.training.parameters for policy in config.policy)
    assert vanilla == {}
    assert momentum == {"momentum": 0.75, "keep_momentum": False}
    assert fedprox == {"proximal_term": 0.01, "momentum": 0.0, "keep_momentum": False}


def test_overrides_use_the_syntax_of_toml_and_need_no_quotes() -> None:
    """Numbers, lists and tables as in the file; anything else is a text."""
    config = resolved(
        "learners.0.count=3",
        "policy.name=fedrec",
        "learners.1.drift=[[10, 2.0]]",
        "evaluation.target = 0.9",
        "learners.1.network={latency = 0.5}",
    )
    assert config.learner_count == 5
    assert config.policy[0].name == "fedrec"
    assert config.learners[1].drift == [[10.0, 2.0]]
    assert config.learners[1].network.latency == 0.5
    assert config.evaluation.target == 0.9


def test_files_are_named_relative_to_the_configuration(tmp_path: Path) -> None:
    """A trace next to the file is found from anywhere, and the resolved file names it in full."""
    (tmp_path / "speed.csv").write_text("at,time_per_batch\n0,0.1\n", encoding="utf-8")
    file = tmp_path / "a.toml"
    file.write_text(resolved().to_toml(), encoding="utf-8")
    text = file.read_text("utf-8").replace("time_per_batch = 0.03", 'speed_trace = "speed.csv"')
    file.write_text(text, encoding="utf-8")
    assert load_config(file).learners[0].speed_trace == str((tmp_path / "speed.csv").resolve())


def test_the_schema_names_every_policy_and_says_what_every_key_means() -> None:
    """The documentation is made from it; what a setting means is written where it is defined."""
    schema = config_schema()
    assert set(schema["policies"]) == set(POLICIES)
    assert "slowest_learner_epochs" in schema["policies"]["semisync_fedavg"]["properties"]
    layers = {f"{key} {choice}": table for key, tables in schema["layers"].items() for choice, table in tables.items()}
    tables = {**schema["$defs"], **schema["policies"], **schema["operations"], **schema["solvers"], **layers}
    keys = {(table, key): rule for table, rules in tables.items() for key, rule in rules["properties"].items()}
    assert [path for path, rule in keys.items() if not ("description" in rule or "$ref" in rule)] == []


def test_labels_make_folder_names() -> None:
    """The paper's symbols are spelled out."""
    assert slug("SemiSync (λ=2) w/ Momentum") == "semisync-lambda-2-w-momentum"


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("日本", "日本"),
        ("Größe_1", "größe-1"),
        ("cafe\u0301", "caf\u00e9"),
        ("हिन्दी", "हिन्दी"),
        ("../a", "a"),
        ("?!", "policy"),
    ],
)
def test_folder_names_keep_the_letters_of_every_alphabet(label: str, name: str) -> None:
    """With their marks, an accent in one way only; nothing that means something in a path is left."""
    assert slug(label) == name


def test_labels_in_other_alphabets_are_labels_of_their_own() -> None:
    labels = ["日本", "中文"]
    policies = [{"name": "fedrec", "label": label} for label in labels]
    assert [policy.label for policy in resolved(policy=policies).policy] == labels


# --- what is wrong with it --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.slowest_learner_epoch=2", "policy.slowest_learner_epoch: unknown key; did you mean 'slowest_learner_epochs'?"),
        ("policy.lambda=2", "policy.lambda: unknown key; did you mean 'slowest_learner_epochs'?"),
        ("policy.slowest_learner_epochs=0", "policy.slowest_learner_epochs: is 0, must be greater than 0"),
        ("policy.slowest_learner_epochs=two", "policy.slowest_learner_epochs: is 'two', must be a number"),
        ("policy.buffer_size=2", "policy.buffer_size: is given, but semisync_fedavg does not use it; 'fedbuff' would"),
        ("policy.most_local_epochs=2", "policy.most_local_epochs: was renamed; write 'max_local_epochs'"),
        ("run.together=2", "run.together: was renamed; write 'batched'"),
        ("deployment.most_examples=2", "deployment.most_examples: was renamed; write 'max_examples'"),
        ("policy.timings=once", "policy.timings: is 'once', must be one of every_round, cold_start, smoothed"),
        ("policy.name=semisink", "policy.name: there is no policy 'semisink'; did you mean 'semisync'?"),
        ("sede=1", "sede: unknown key; did you mean 'seed'?"),
        ("trainign.learning_rate=0.1", "trainign: unknown key; did you mean 'training'?"),
        ("learners.0.netwrk.latency=1", "learners.0.netwrk: unknown key; did you mean 'network'?"),
        ("seed=1.5", "seed: is 1.5, must be a whole number"),
        ("seed=99999999999999999999999999", "seed: is 99999999999999999999999999, must be at most 9,223,372,036,854,775,807"),
        ("policy=fedrec", "policy: is a table; write policy.name=fedrec"),
        ("learners.0.name=''", "learners.0.name: must not be empty"),
        ("learners.0.jitter=2.5", "learners.0.jitter: is 2.5, must be at most 2"),
        ("training.threads=100000", f"training.threads: is 100000, but this machine has {os.cpu_count()} processors"),
        ("seed=true", "seed: is true, must be a whole number"),
        ("data=1", "data: is 1, must be a table"),
        ("data.dataset=cifar", "data.dataset: there is no data set 'cifar'; did you mean 'cifar10'?"),
        ("data.augment=['random_crop']", "data.augment.0.size: missing; it must be given"),
        ("data.augment=[{name = ['flip']}]", "data.augment.0.name: is ['flip'], must be one of random_crop, horizontal_flip, random_contrast, standardize"),
        ("policy.grace=inf", "policy.grace: is inf, must be a finite number"),
        ("data.augment=['flip']", "data.augment.0.name: is 'flip', must be one of random_crop, horizontal_flip, random_contrast, standardize; did you mean 'horizontal_flip'?"),
        ("learners.0.cout=1", "learners.0.cout: unknown key; did you mean 'count'?"),
        ("learners.0.batch_size=0", "learners.0.batch_size: is 0, must be at least 1"),
        ("learners.0.time_per_batch=0", "learners.0.time_per_batch: is 0, must be greater than 0"),
        ("learners.0.network.upload=1", "learners.0.network.upload: unknown key; did you mean 'upload_mbps'?"),
        ("learners.0.drift=[[1]]", "learners.0.drift.0: is [1], must be a pair [second, factor]"),
        ("training.lr=1", "training.lr: unknown key; did you mean 'learning_rate'?"),
        ("training.solver=AdmW", "training.solver: there is no solver 'AdmW'; did you mean 'adamw'?"),
        ("training.solver=adagrat", "training.solver: there is no solver 'adagrat'; did you mean 'Adagrad'?"),
        ("training.clip_norm=0", "training.clip_norm: is 0, must be greater than 0"),
        ("training.accumulate=0", "training.accumulate: is 0, must be at least 1"),
        ("training.momentum=0.5", "training.momentum: is given, but solver = 'vanilla' does not use it; 'momentum', 'fedprox' and 'scaffold' would"),
        ("partition.classes_per_learner=[1, 'a']", "partition.classes_per_learner.1: is 'a', must be a whole number"),
        ("partition.classes_per_learner=x", "partition.classes_per_learner: is 'x', must be a whole number or a list"),
        ("evaluation.metric=r2", "evaluation.metric: is 'r2', must be one of accuracy, loss, auc, f1, precision, recall, balanced_accuracy, dice for classification"),
        ("evaluation.metrics=['aux']", "evaluation.metrics.0: is 'aux', must be one of accuracy, loss, auc, f1, precision, recall, balanced_accuracy, dice; did you mean 'auc'?"),
        ("evaluation.target=90", "evaluation.target: is 90, but accuracy lies between 0 and 1"),
        ("stop.seconds=-1", "stop.seconds: is -1, must be greater than 0"),
        ("learners={name = 'x'}", "learners: is a table, must be a list: write [[learners]], with two brackets"),
    ],
)  # fmt: skip
def test_an_override_is_refused_by_its_path(override: str, message: str) -> None:
    """One sentence: where, what was given, what is allowed."""
    assert fault(override) == f"--set {message}"


def test_what_the_file_itself_has_wrong_is_not_blamed_on_an_override() -> None:
    """Also if the override changes something in the same table."""
    assert fault("trainign.b=2", trainign={"a": 1}) == "demo.toml: trainign: unknown key; did you mean 'training'?"
    assert fault("stop.at_target=false", stop={"secs": 1}).startswith("demo.toml: stop.secs: unknown key")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"stop": {}}, "stop: the run would not end; give rounds, seconds, update_requests or steps"),
        ({"stop": {"at_target": True}, "evaluation": {"target": 0.9}}, "stop: at_target alone may never come true; the run would not end; give rounds, seconds, update_requests or steps"),
        ({"stop": {"rounds": 1, "at_target": True}}, "evaluation.target: missing; stop.at_target needs it"),
        ({"partition": {"sizes": "explicit", "explicit": [5, 5]}}, "partition.explicit: has 2 entries, must have one for each of the 4 learners"),
        ({"partition": {"sizes": "explicit", "explicit": [5, 5, 5, 0]}}, "partition.explicit.3: is 0, must be at least 1"),
        ({"partition": {"sizes": "explicit", "explicit": [500, 500, 500, 5]}}, "partition.explicit: adds up to 1,505, but there are 1,437 examples"),
        ({"partition": {"sizes": "explicit"}}, "partition.explicit: missing; sizes = 'explicit' needs it"),
        ({"partition": {"alpha": 0.5}}, "partition.alpha: is given, but classes = 'iid' does not use it; dirichlet or class_dirichlet would"),
        ({"partition": {"classes": "non_iid"}}, "partition.classes_per_learner: missing; classes = 'non_iid' needs it"),
        ({"partition": {"classes": "random_classes"}}, "partition.classes_per_learner: missing; classes = 'random_classes' needs it"),
        ({"data": {"train_examples": 3}}, "learners: are 4, but there are 3 examples: each needs at least one"),
        ({"data": {"train_examples": 5000}}, "data.train_examples: is 5000, but digits has 1,437"),
        ({"policy": []}, "policy: is empty; choose one of sync_fedavg, semisync_fedavg, semisync, async_fedavg, fedrec, fedasync, fedbuff, centralized, alone in a table [policy]"),
        ({"policy": [{"name": "sync_fedavg", "label": "a"}, {"name": "fedrec", "label": "A"}]}, "policy.1.label: is 'A', so its folder would have the same name as that of policy.0, 'a': a; give each a label of its own"),
        ({"policy": [{"name": "fedrec", "label": "Mine!"}, {"name": "fedrec", "label": "Mine?"}]}, "policy.1.label: is 'Mine?', so its folder would have the same name as that of policy.0, 'Mine!': mine; give each a label of its own"),
        ({"policy": [{"name": "fedrec", "label": "a"}, {"name": "fedasync", "label": "a"}]}, "policy.1.label: would be 'a', as that of policy.0; give each a label of its own"),
        ({"policy": [{"name": "fedrec"}, {"name": "fedasync", "mixing": 2.0}]}, "policy.1.mixing: is 2.0, must be at most 1"),
    ],
)  # fmt: skip
def test_what_depends_on_several_keys_is_checked_too(tables: dict[str, Any], message: str) -> None:
    """Impossible combinations are refused before anything starts."""
    assert fault(**tables) == f"demo.toml: {message}"


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"watts": 100}, {}, "learners.1.watts: missing; other learners have watts, and watts and epsilon cannot be added up"),
        ({"watts": 100, "epsilon": 1}, {"watts": 50}, "learners.0.epsilon: is given together with watts; keep one of them"),
        ({"idle_watts": 10}, {}, "learners.0.idle_watts: is given without watts"),
        ({"name": "b"}, {"name": "b"}, "learners.1.name: is 'b', which another group is called already"),
        ({"time_per_batch": None}, {}, "learners.0.time_per_batch: missing; give it in seconds, or a speed_trace"),
        ({"speed_trace": "x.csv"}, {}, "learners.0.speed_trace: is given together with time_per_batch; the trace says it all"),
        ({"availability": {"kind": "trace"}}, {}, "learners.0.availability.file: missing; kind = 'trace' needs it"),
        ({"availability": {"mean_away": 1.0}}, {}, "learners.0.availability.mean_away: is given, but kind = 'always' does not use it"),
        ({"drift": [[5, 2], [1, 3]]}, {}, "learners.0.drift: must be in order of time"),
    ],
)  # fmt: skip
def test_learners_are_checked_together(first: dict[str, Any], second: dict[str, Any], message: str) -> None:
    """Watts and epsilon do not add up, names are unique, each learner has exactly one speed."""
    base = {"batch_size": 10, "time_per_batch": 0.1}
    groups = [{**base, "name": "a", **first}, {**base, "name": "c", **second}]
    groups = [{key: value for key, value in group.items() if value is not None} for group in groups]
    assert fault(learners=groups) == f"demo.toml: {message}"


def test_missing_files_are_named(tmp_path: Path) -> None:
    """A trace that is not there is refused with its full path."""
    group = {"name": "a", "batch_size": 1, "speed_trace": str(tmp_path / "no.csv")}
    assert fault(learners=[group]) == f"demo.toml: learners.0.speed_trace: there is no file {tmp_path / 'no.csv'}"


def test_all_faults_are_listed_at_once() -> None:
    """One line each, so that a file is fixed in one go."""
    lines = fault(
        "seed=x",
        "stop.second=1",
        policy={"name": "fedrec", "local_epoch": 1},
        training={"solver": "fedprx", "device_": "cpu"},
    ).splitlines()
    assert sorted(lines) == [
        "--set seed: is 'x', must be a whole number",
        "--set stop.second: unknown key; did you mean 'seconds'?",
        "demo.toml: policy.local_epoch: unknown key; did you mean 'local_epochs'?",
        "demo.toml: training.device_: unknown key; did you mean 'device'?",
        "demo.toml: training.solver: there is no solver 'fedprx'; did you mean 'fedprox'?",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "--set seed: write key.path=value, as in learners.0.count=3"),
        ("a..b=1", "--set a..b=1: write key.path=value, as in learners.0.count=3"),
        ("learners.7.count=1", "--set learners.7.count: learners is a list, so its entries are numbered 0 to 1, as in learners.0.count"),
        ("learners.count=1", "--set learners.count: learners is a list, so its entries are numbered 0 to 1, as in learners.0.count"),
        ("learners.7=1", "--set learners.7: learners is a list, so its entries are numbered 0 to 1, as in learners.0"),
        ("learners.x.count=1", "--set learners.x.count: learners is a list, so its entries are numbered 0 to 1, as in learners.0.count"),
        ("learners.slow.count=1", "--set learners.slow.count: learners is a list, so its entries are numbered 0 to 1, as in learners.1.count"),
        ("learners.network.latency=1", "--set learners.network.latency: learners is a list, so its entries are numbered 0 to 1, as in learners.0.network.latency"),
        ("policy.name.x=1", "--set policy.name.x: policy.name is 'semisync_fedavg', so it has no keys"),
    ],
)  # fmt: skip
def test_an_override_that_leads_nowhere_is_refused(override: str, message: str) -> None:
    """The message shows how to write it."""
    assert fault(override) == message


def test_syntax_errors_say_the_line(tmp_path: Path) -> None:
    """TOML that cannot be read is refused with line and column."""
    file = tmp_path / "bad.toml"
    file.write_text("seed = 1\n[data\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^bad\.toml: line 2, column \d+: expected ']'"):
        load_config(file)
    with pytest.raises(ConfigError, match=r"there is no file .*no\.toml; write an example with: metis init"):
        load_config(tmp_path / "no.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"^binary\.toml: not a text file in UTF-8"):
        load_config(tmp_path / "binary.toml")


def test_faults_of_all_kinds_are_listed_together() -> None:
    """A typo does not hide an impossible value or a missing rule."""
    lines = fault(
        policy=[{"name": "fedrec", "local_epoch": 1}, {"name": "semisync_fedavg", "slowest_learner_epochs": 0}],
        stop={},
        data={"dataset": "digit"},
    ).splitlines()
    assert sorted(lines) == [
        "demo.toml: data.dataset: there is no data set 'digit'; did you mean 'digits'?",
        "demo.toml: policy.0.local_epoch: unknown key; did you mean 'local_epochs'?",
        "demo.toml: policy.1.slowest_learner_epochs: is 0, must be greater than 0",
        "demo.toml: stop: the run would not end; give rounds, seconds, update_requests or steps",
    ]
