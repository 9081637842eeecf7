"""Baselines, what a model is worth at each learner, and FLamby's tables as ready federations."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import metis
from cli.test_app import FILE, TWO, metis as command
from metis.data.flamby import load_flamby
from metis.data.partition import alike
from metis.errors import ConfigError, DataError
from metis.experiments.config.load import resolve_config
from metis.experiments.deploy import check_deployment
from metis.learning.torch.flamby import concordance, cox_loss
from simulation.federations import lively

SMALL = {"learners": 3, "train_examples": 200, "test_examples": 60}
HERE = bool(os.environ.get("METIS_DATA")) and (Path(os.environ["METIS_DATA"]) / "tcga_brca.csv").is_file()
needs_data = pytest.mark.skipif(not HERE, reason="needs heart_disease.csv and tcga_brca.csv in METIS_DATA")


def test_baselines_are_compared_with_policies() -> None:
    """All data in one place, and one learner without the others: the same start, solver and test examples."""
    federation = metis.Federation.from_dataset("digits", **SMALL)  # type: ignore[arg-type]
    entries = [metis.centralized(), metis.alone("site-2"), metis.sync_fedavg(1)]
    comparison = federation.compare(entries, seeds=2, rounds=2, workers=0)
    assert [run.policy for run in comparison.runs[::2]] == ["Centralized", "Alone (site-2)", "Sync"]
    assert [info.examples for info in comparison.runs[0].setting.learners] == [200]
    own = {learner.name: len(learner.indices) for learner in federation.learners}
    assert [(info.name, info.examples) for info in comparison.runs[2].setting.learners] == [("site-2", own["site-2"])]
    assert len({run.history[0].metrics["loss"] for run in comparison.runs[::2]}) == 1  # the same initial model


def test_baselines_of_a_file_are_rows_of_its_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the distribution over learners, where each has test examples of its own, also of one that trains alone."""
    monkeypatch.chdir(tmp_path)
    policies = '[[policy]]\nname = "centralized"\n[[policy]]\nname = "alone"\nlearner = "slow-1"\n' + TWO
    Path("all.toml").write_text(FILE.format(policies=policies) + '[partition]\ntest = "own"\n', encoding="utf-8")
    result = command("compare", "all.toml", "--out", "c")
    assert result.exit_code == 0, result.output
    assert "at learners" in result.stdout and "deviation" in result.stdout
    document = json.loads(Path("c/comparison.json").read_text("utf-8"))
    assert [row["label"] for row in document["rows"]] == ["Centralized", "Alone (slow-1)", "Sync", "FedRec"]
    for row in document["rows"]:
        found = row["at_learners"]
        assert found["learners"] == 3 and found["worst"] <= found["median"] <= found["best"]
    assert "at the worst (" in Path("c/report.html").read_text("utf-8")
    assert metis.Run.load("c/centralized").setting.learners[0].name == "everybody"
    rows = metis.Run.load("c/sync").learners_to_records()
    assert all(0 <= row["accuracy"] <= 1 for row in rows)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"name": "alone", "learner": "cpu-9"}, "policy.learner: there is no learner 'cpu-9'"),
        ({"name": "centralized", "learner": "cpu-1"}, "policy.learner: "),
        ({"name": "alone", "local_epochs": 0}, "policy.local_epochs: is 0, must be greater than 0"),
    ],
)
def test_wrong_baselines_of_a_file_are_refused(policy: dict[str, Any], words: str) -> None:
    content = {
        "learners": [{"name": "cpu", "count": 2, "batch_size": 10, "time_per_batch": 1.0}],
        "policy": policy,
        "stop": {"rounds": 1},
    }
    with pytest.raises(ConfigError) as refusal:
        resolve_config(content, "x.toml")
    assert words in str(refusal.value)


def test_a_baseline_is_not_deployed_planned_or_replayed() -> None:
    """One sentence each."""
    content = {
        "learners": [{"name": "cpu", "count": 2, "batch_size": 10, "time_per_batch": 1.0}],
        "policy": {"name": "centralized"},
        "stop": {"rounds": 1},
    }
    with pytest.raises(ConfigError, match="'centralized' is a baseline, which only simulations have"):
        check_deployment(resolve_config(content, "x.toml"))


def test_test_examples_are_divided_like_the_training_examples() -> None:
    """Each goes to one learner that holds training examples of its class; of a regression, of the nearest target."""
    rng = np.random.default_rng(3)
    targets, others = np.repeat([0, 1, 2], 40), np.repeat([0, 1, 2], 30)
    parts = [np.arange(0, 40), np.arange(40, 100), np.arange(100, 120)]
    found = alike(parts, targets, others, rng)
    assert sorted(np.concatenate(found).tolist()) == list(range(90))
    assert set(others[found[0]]) == {0} and set(others[found[1]]) == {1, 2} and set(others[found[2]]) == {2}
    assert len(found[0]) == 30
    near = alike(
        [np.array([0, 1]), np.array([2, 3])], np.array([0.0, 1.0, 9.0, 10.0]), np.array([0.4, 9.6, -5, 99]), rng
    )
    assert [part.tolist() for part in near] == [[0, 2], [1, 3]]


def test_the_largest_learner_trains_alone_unless_one_is_named() -> None:
    federation = metis.Federation.from_dataset("digits", sizes="power_law", **SMALL)  # type: ignore[arg-type]
    run = federation.simulate(metis.alone(), rounds=1)
    assert [info.examples for info in run.setting.learners] == [max(len(one.indices) for one in federation.learners)]


def test_a_learner_that_is_not_there_cannot_train_alone() -> None:
    """The sentence lists those that are."""
    with pytest.raises(ConfigError, match="there is no learner 'x' to train alone; the learners are"):
        lively().compare([metis.alone("x")], rounds=1)


def test_a_model_is_judged_at_each_learner() -> None:
    """Worst, median and best are those of the learners' own examples; without any a sentence says what is missing."""
    federation = metis.Federation.from_dataset("digits", **SMALL)  # type: ignore[arg-type]
    model = federation.initial_model
    with pytest.raises(ConfigError, match="no learner has test examples of its own"):
        federation.evaluate_at_learners(model)
    parts = np.array_split(np.arange(60), 3)
    learners = [
        metis.SimulatedLearner(own.name, own.indices, own.batch_size, own.speed, test=part)
        for own, part in zip(federation.learners, parts, strict=True)
    ]
    federation.learners = tuple(learners)
    found = federation.evaluate_at_learners(model)
    values = [metrics["accuracy"] for metrics in found.metrics.values()]
    assert (found.worst[0], found.median, found.best[0]) == tuple(sorted(values))
    whole = federation.engine.evaluate(model, federation.test)  # type: ignore[arg-type]
    assert found.mean == pytest.approx(whole["accuracy"])
    assert "worst" in repr(found) and "at 3 learners" in repr(found)


def test_the_concordance_is_that_of_counted_pairs() -> None:
    """A higher risk for whoever died first; ties count half, censored patients only as those who lived longer."""
    times = torch.tensor([[1.0, 1.0], [1.0, 2.0], [0.0, 3.0]])
    assert concordance(torch.tensor([[3.0], [2.0], [1.0]]), times) == 1
    assert concordance(torch.tensor([[1.0], [2.0], [3.0]]), times) == 0
    assert concordance(torch.tensor([[1.0], [1.0], [1.0]]), times) == 0.5
    assert np.isnan(concordance(torch.tensor([[1.0]]), torch.tensor([[0.0, 1.0]])))


def test_the_cox_loss_is_that_of_its_definition() -> None:
    """For each event the logarithm of the sum over those that lived at least as long, computed by hand."""
    scores, targets = torch.tensor([[0.3], [-0.2], [1.0]]), torch.tensor([[1.0, 5.0], [0.0, 9.0], [1.0, 2.0]])
    first = np.log(np.exp(0.3) + np.exp(-0.2)) - 0.3
    second = np.log(np.exp(0.3) + np.exp(-0.2) + np.exp(1.0)) - 1.0
    assert float(cox_loss(scores, targets)) == pytest.approx((first + second) / 3, abs=1e-6)


@needs_data
def test_flambys_splits_are_its_own() -> None:
    """Training and test patients of each centre, as published."""
    heart, brca = load_flamby("heart_disease"), load_flamby("tcga_brca")
    assert heart.x_train.shape == (486, 13) and heart.x_test.shape == (254, 13)
    counts = {site: int((heart.sites_test == site).sum()) for site in np.unique(heart.sites_test)}
    assert counts == {"cleveland": 104, "hungarian": 89, "switzerland": 16, "va": 45}
    assert brca.x_train.shape == (866, 39) and brca.x_test.shape == (222, 39)
    federation = metis.flamby_federation("tcga_brca", speeds=[0.03, 0.3])
    assert len(federation.learners[0].indices) == 248
    assert federation.simulate(metis.sync_fedavg(1), rounds=1).final_metric is not None


def test_a_missing_or_unknown_table_is_one_sentence(tmp_path: Path) -> None:
    """What is missing and where to put it."""
    with pytest.raises(DataError, match=r"FLamby's tcga_brca needs tcga_brca\.csv"):
        load_flamby("tcga_brca", tmp_path)
    with pytest.raises(DataError, match="there is no FLamby set 'isic'"):
        load_flamby("isic")  # type: ignore[arg-type]
