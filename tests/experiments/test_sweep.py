"""Seeds and grids: what the options mean, and the sentence for each mistake."""

from __future__ import annotations

from typing import Any

import pytest

from metis.errors import ConfigError
from metis.experiments.config.load import ExperimentConfig, resolve_config
from metis.experiments.sweep import parse_axes, parse_seeds, seeds_from, variants

CONTENT: dict[str, Any] = {
    "data": {"train_examples": 200, "test_examples": 60},
    "learners": [{"name": "site", "count": 2, "batch_size": 10, "time_per_batch": 0.03}],
    "network": {"name": "logistic"},
    "policy": [{"name": "sync_fedavg", "local_epochs": 2}, {"name": "semisync_fedavg"}],
    "stop": {"rounds": 2},
}


def config(**tables: Any) -> ExperimentConfig:
    return resolve_config({**CONTENT, **tables}, "test.toml")


def grid(*texts: str, **tables: Any) -> list[ExperimentConfig]:
    content = {**CONTENT, **tables}
    return variants(
        resolve_config(content, "test.toml"),
        parse_axes(texts),
        lambda changes: resolve_config(content, "test.toml", changes),
        numbered=isinstance(content["policy"], list),
    )


def labels(configs: list[ExperimentConfig]) -> list[str | None]:
    return [found.policy[0].label for found in configs]


def test_seeds_are_a_number_or_a_list() -> None:
    """So many from the file's own seed on, those listed, or those of the file; one seed otherwise."""
    assert parse_seeds("3", config()) == [1990, 1991, 1992]
    assert parse_seeds("3,1", config()) == [3, 1]
    assert parse_seeds(None, config(seeds=[4, 5])) == [4, 5]
    assert parse_seeds(None, config()) == [1990]
    assert seeds_from(2, 7) == [7, 8] and seeds_from([9, 2], 7) == [9, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("many", "--seeds is 'many'; write how many, as in 5, or which, as in 1,2,3"),
        ("0", "seeds is 0; it must be a number from 1 to 10,000, or a list of seeds"),
        ("1,-2", "--seeds is '1,-2'; write how many, as in 5, or which, as in 1,2,3"),
        ("1,2,1", "seeds has 1 twice; a run with the same seed is the same run"),
    ],
)
def test_wrong_seeds_are_one_sentence(text: str, message: str) -> None:
    """What is wrong and what is allowed."""
    with pytest.raises(ConfigError) as raised:
        parse_seeds(text, config())
    assert str(raised.value) == message


def test_a_grid_has_every_combination_and_shows_it_in_the_labels() -> None:
    """An axis of one policy is for that policy, a shared one for all; a label that shows a value stays as it is."""
    found = grid("policy.slowest_learner_epochs=0.5,1", "training.learning_rate=0.01,0.05")
    assert labels(found) == [
        "Sync, learning_rate=0.01",
        "Sync, learning_rate=0.05",
        "SemiSync (λ=0.5), learning_rate=0.01",
        "SemiSync (λ=0.5), learning_rate=0.05",
        "SemiSync (λ=1), learning_rate=0.01",
        "SemiSync (λ=1), learning_rate=0.05",
    ]
    assert [item.policy[0].training.learning_rate for item in found] == [0.01, 0.05] * 3
    assert found[2].policy[0].parameters["slowest_learner_epochs"] == 0.5


def test_a_single_policy_and_a_numbered_one_can_be_swept() -> None:
    """A table [policy] is not numbered; in a list a number chooses one."""
    assert labels(grid("policy.local_epochs=1,2", policy={"name": "sync_fedavg"})) == [
        "Sync, local_epochs=1",
        "Sync, local_epochs=2",
    ]
    assert labels(grid("policy.0.local_epochs=1,2")) == [
        "Sync, local_epochs=1",
        "Sync, local_epochs=2",
        "SemiSync (λ=2)",
    ]


def test_values_may_be_lists_and_axes_one_text() -> None:
    """Commas in brackets belong to the value; spaces separate axes."""
    axes = parse_axes(["network.hidden=[8, 4],[16] training.learning_rate=0.1"])
    assert [(axis.path, axis.values) for axis in axes] == [
        ("network.hidden", ("[8, 4]", "[16]")),
        ("training.learning_rate", ("0.1",)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training.learning_rate", "write KEY=VALUE,VALUE,..., as in training.learning_rate=0.01,0.05"),
        ("training.learning_rate=", "write KEY=VALUE,VALUE,..., as in training.learning_rate=0.01,0.05"),
        ("seed=1,2", "seeds are not swept, they are averaged; use --seeds 1,2"),
        ("run.workers=1,2", "[run] does not change the result"),
        ("stop.rounds=1,1", "has the value 1 twice"),
        ("policy.slowest_learner_epoch=1,2", "no policy of the file takes it; did you mean 'slowest_learner_epochs'?"),
        ("training.learning_rat=1", "--sweep training.learning_rat: unknown key; did you mean 'learning_rate'?"),
        ("training.learning_rate=0.1,-1", "must be greater than 0"),
        ("policy.label=a,a.", "two variants would be called"),
    ],
)
def test_a_wrong_sweep_is_one_sentence_before_anything_runs(text: str, message: str) -> None:
    """What is wrong, with the option that it came from."""
    with pytest.raises(ConfigError) as raised:
        grid(text)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_one_axis_is_given_once() -> None:
    """Two lists for one key would be ambiguous."""
    with pytest.raises(ConfigError, match="is given twice; write all its values in one list"):
        parse_axes(["stop.rounds=1", "stop.rounds=2"])
