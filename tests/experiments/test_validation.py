"""Validation examples: the best model, early stopping, and what of it is on disk."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metis
from metis.core.stop import Patience, StopRule
from metis.errors import ConfigError
from metis.experiments.build import build_federation
from metis.experiments.config.load import resolve_config
from metis.experiments.data import dry_assignments
from metis.runs.folds import VALIDATION
from metis.runs.trace import from_line, to_line

FILE: dict[str, Any] = {
    "data": {"dataset": "digits", "validation": 0.2},
    "learners": [{"name": "site", "count": 3, "batch_size": 20, "time_per_batch": 0.1}],
    "network": {"name": "logistic"},
    "training": {"learning_rate": 0.1},
    "policy": {"name": "sync_fedavg"},
    "stop": {"rounds": 4},
}


def federation(**options: Any) -> metis.Federation:
    return metis.Federation.from_dataset(
        "digits", learners=3, network="logistic", solver=metis.VanillaSGD(learning_rate=0.5), **options
    )


def test_validation_examples_are_nobodys() -> None:
    """A fifth of the training examples is held out; test examples and the rest of the file are as they were."""
    plain, held = federation(), federation(validation=0.2)
    assert held.validation is not None and held.test is not None and plain.test is not None
    total = sum(len(learner.indices) for learner in plain.learners)
    assert len(held.validation) == int(np.ceil(total * 0.2))
    assert len(held.validation) + sum(len(learner.indices) for learner in held.learners) == total
    assert len(held.test) == len(plain.test)


def test_sizes_without_the_data_are_those_with_it() -> None:
    """A plan that does not load the data set counts without the validation examples too."""
    config = resolve_config(FILE, "demo.toml")
    sizes = [len(assignment.indices) for assignment in dry_assignments(config)]
    assert sizes == [len(learner.indices) for learner in build_federation(config).learners]


def test_the_best_model_is_chosen_by_validation_and_kept(tmp_path: Path) -> None:
    """Its weights are those that were measured, also after the run was loaded from its directory."""
    made = federation(validation=0.2)
    run = made.simulate(metis.sync_fedavg(1), rounds=6, out=tmp_path)
    values = [point.metrics[VALIDATION + "accuracy"] for point in run.history]
    best = run.history[int(np.argmax(values))]
    assert (run.best_version, run.best_metric) == (best.version, best.metrics["accuracy"])
    again = metis.Run.load(tmp_path)
    for found in (run, again):
        assert found.best_model is not None and made.test is not None
        assert made.engine.evaluate(found.best_model, made.test)["accuracy"] == best.metrics["accuracy"]
    assert again.summary() == run.summary()
    assert run.summary()["metric"]["best_version"] == best.version


def test_without_validation_the_metric_itself_decides() -> None:
    run = federation().simulate(metis.sync_fedavg(1), rounds=4)
    assert run.best_metric == max(run.metric_values)
    assert VALIDATION + "accuracy" not in run.history[-1].metrics


def stubborn() -> metis.Federation:
    """A rate so low that nothing gets better."""
    made = federation(validation=0.2)
    made.solver = metis.VanillaSGD(learning_rate=1e-12)
    return made


def test_early_stopping_ends_at_the_evaluation_that_uses_up_patience() -> None:
    run = stubborn().simulate(metis.sync_fedavg(1), rounds=50, patience=3)
    assert run.finish_reason == f"{VALIDATION}accuracy has not improved in 3 evaluations"
    assert run.rounds == 4, "the first is the best, three more are not better"


@pytest.mark.parametrize("after", [5, 9, 12])
def test_interrupted_it_ends_at_the_same_evaluation_with_the_same_best_model(tmp_path: Path, after: int) -> None:
    """What patience has counted comes back from the events, the best weights from the checkpoint."""

    def watch(fold: Any) -> None:
        nonlocal after
        after -= 1
        if after == 0:
            signal.raise_signal(signal.SIGINT)

    options: dict[str, Any] = {"rounds": 50, "patience": 3}
    whole = stubborn().simulate(metis.sync_fedavg(1), **options)
    cut = stubborn().simulate(metis.sync_fedavg(1), out=tmp_path, watch=watch, **options)
    assert cut.finish_reason == "interrupted"
    resumed = stubborn().simulate(metis.sync_fedavg(1), out=tmp_path, resume=True, **options)
    assert [to_line(*event) for event in resumed.events] == [to_line(*event) for event in whole.events]
    assert resumed.best_model is not None and whole.best_model is not None
    assert resumed.best_model.sha256() == whole.best_model.sha256()


def test_a_rule_with_patience_survives_the_trace() -> None:
    """An administrator's change is an event like any other."""
    from metis.core.events import StopRuleChanged

    event = StopRuleChanged(StopRule(rounds=3, patience=Patience("f1", 2, higher_is_better=False)), "ada")
    assert from_line(to_line(1.0, event)) == (1.0, event)


def test_a_validation_set_without_a_test_set_is_what_is_measured() -> None:
    x, y = np.eye(4, dtype=np.float32).repeat(5, 0), np.arange(4).repeat(5)
    learners = [metis.SimulatedLearner("a", np.arange(20), 5, metis.Speed(0.1))]
    made = metis.Federation(
        network=lambda: __import__("torch").nn.Linear(4, 4),
        train=(x, y), validation=(x, y), learners=learners, solver=metis.VanillaSGD(learning_rate=1.0),
    )  # fmt: skip
    run = made.simulate(metis.sync_fedavg(1), rounds=3, patience=2)
    assert made.validation is None and run.final_metric is not None


def test_patience_without_anything_to_measure_is_refused() -> None:
    made = federation()
    made.test = None
    with pytest.raises(ConfigError, match="patience needs held-out examples"):
        made.simulate(metis.sync_fedavg(1), rounds=3, patience=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"validation": 1.0}}, "data.validation: is 1.0, must be less than 1"),
        ({"data": {"validation": 0.9999}}, "learners: are 3, but there are 0 examples"),
        ({"stop": {"patience": 0, "rounds": 3}}, "stop.patience: is 0, must be at least 1"),
        ({"stop": {"patience": 3}}, "patience alone may never come true; the run would not end"),
    ],
)
def test_impossible_values_in_a_file_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        resolve_config({**FILE, **changes}, "demo.toml")
    assert words in str(refusal.value)
