"""Optuna proposes the settings of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

import metis
from metis.errors import ConfigError

optuna = pytest.importorskip("optuna")

FILE = """
[data]
train_examples = 120
test_examples = 40
[[learners]]
name = "site"
count = 2
batch_size = 20
time_per_batch = 0.1
[network]
name = "logistic"
[policy]
name = "semisync_fedavg"
[stop]
rounds = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.toml"
    path.write_text(FILE, "utf-8")
    return path


def test_a_search_finds_the_better_rate_and_repeats(file: Path) -> None:
    """Of two rates of which one learns nothing it takes the other; the same seed tries the same settings."""
    space = {"training.learning_rate": [1e-9, 0.05], "policy.slowest_learner_epochs": (0.5, 2.0)}
    studies = [metis.search(file, space, trials=6) for _ in range(2)]
    assert studies[0].best_params["training.learning_rate"] == 0.05
    assert studies[0].best_value > 0.3
    assert [trial.params for trial in studies[0].trials] == [trial.params for trial in studies[1].trials]


def test_an_own_objective_over_seeds(file: Path) -> None:
    """The mean over two seeds of what the function makes of a run."""
    seen: list[int] = []

    def seconds(run: metis.Run) -> float:
        seen.append(run.setting.seed)
        return run.costs.parallel_time

    study = metis.search(
        file, {"policy.slowest_learner_epochs": (1, 3)}, trials=2, seeds=[5, 6], objective=seconds, direction="minimize"
    )
    assert seen == [5, 6, 5, 6]
    assert study.best_value == min(trial.value for trial in study.trials)


@pytest.mark.parametrize(
    ("space", "options", "sentence"),
    [
        ({}, {}, "space is empty"),
        ({"training.learning_rat": (0.1, 0.2)}, {}, "learning_rat"),
        ({"training.learning_rate": (0.2, 0.1)}, {}, r"give \(low, high\), or a list of choices"),
        ({"training.learning_rate": (0.1, 0.2)}, {"objective": len}, "objective needs a direction"),
        ({"training.learning_rate": (0.1, 0.2)}, {"direction": "up"}, "allowed: maximize, minimize"),
    ],
)
def test_a_search_that_is_not_described_right(file: Path, space: dict, options: dict, sentence: str) -> None:  # type: ignore[type-arg]
    """One sentence."""
    with pytest.raises(ConfigError, match=sentence):
        metis.search(file, space, **options)
