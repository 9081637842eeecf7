"""Metrics of the whole set: equal to scikit-learn's on all predictions, however the examples are batched."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from torch import Tensor, nn

from metis.errors import ConfigError
from metis.learning import BatchMean, TorchEngine, as_examples
from metis.learning.sums import merged_value, sums_problem
from metis.learning.torch.metrics import measures_of, predictions, scores

RNG = np.random.default_rng(7)


def measured(metrics: Any, outputs: Any, targets: Any, batch: int = 7, **options: Any) -> dict[str, float]:
    """By an engine whose network is the identity, in batches of this size."""
    engine = TorchEngine(nn.Identity, metrics=metrics, evaluation_batch=batch, **options)
    return engine.evaluate(engine.initial_model(0), as_examples((outputs, targets)))


RARE = (RNG.random(101) < 0.1).astype(np.int64)
BINARY = (RNG.normal(size=(101, 2)) + 0.8 * np.eye(2)[RARE]).astype(np.float32)
THREE = RNG.integers(0, 3, 101)
SCORES = (RNG.normal(size=(101, 3)) + np.eye(3)[THREE]).astype(np.float32)
AGES = RNG.normal(60, 10, 101).astype(np.float32)
GUESSES = (AGES + RNG.normal(0, 5, 101)).astype(np.float32)
NAMES = ("auc", "f1", "precision", "recall", "balanced_accuracy", "accuracy")


@pytest.mark.parametrize("batch", [7, 101])
def test_two_classes(batch: int) -> None:
    """Of the rare class 1; batches without any of it do not count as 0."""
    found, score = BINARY.argmax(1), torch.softmax(torch.tensor(BINARY).double(), 1)[:, 1].numpy()
    wanted = {
        "auc": sk.roc_auc_score(RARE, score),
        "f1": sk.f1_score(RARE, found),
        "precision": sk.precision_score(RARE, found),
        "recall": sk.recall_score(RARE, found),
        "balanced_accuracy": sk.balanced_accuracy_score(RARE, found),
        "accuracy": sk.accuracy_score(RARE, found),
    }
    values = measured(NAMES, BINARY, RARE, batch)
    assert {name: values[name] for name in NAMES} == pytest.approx(wanted, abs=1e-12)


def test_three_classes_are_averaged() -> None:
    found, score = SCORES.argmax(1), torch.softmax(torch.tensor(SCORES).double(), 1).numpy()
    wanted = {
        "auc": sk.roc_auc_score(THREE, score, multi_class="ovr"),
        "f1": sk.f1_score(THREE, found, average="macro"),
        "precision": sk.precision_score(THREE, found, average="macro"),
        "recall": sk.recall_score(THREE, found, average="macro"),
        "balanced_accuracy": sk.balanced_accuracy_score(THREE, found),
        "accuracy": sk.accuracy_score(THREE, found),
    }
    values = measured(NAMES, SCORES, THREE)
    assert {name: values[name] for name in NAMES} == pytest.approx(wanted, abs=1e-12)


def test_regression() -> None:
    values = measured(["mae", "mse", "rmse", "r2"], GUESSES, AGES, task="regression")
    assert values["mae"] == pytest.approx(sk.mean_absolute_error(AGES, GUESSES), rel=1e-6)
    assert values["mse"] == pytest.approx(sk.mean_squared_error(AGES, GUESSES), rel=1e-6)
    assert values["rmse"] == pytest.approx(math.sqrt(sk.mean_squared_error(AGES, GUESSES)), rel=1e-6)
    assert values["r2"] == pytest.approx(sk.r2_score(AGES, GUESSES), rel=1e-6)


def test_functions_of_scikit_learn_work_unchanged() -> None:
    """Targets first, labels or probabilities as each wants them; `partial` gives them further arguments."""
    metrics = {
        "auc": sk.roc_auc_score,
        "f1": sk.f1_score,
        "brier": sk.brier_score_loss,
        "macro": partial(sk.f1_score, average="macro"),
    }
    values = measured(metrics, BINARY, RARE)
    found, score = predictions(torch.tensor(BINARY)), scores(torch.tensor(BINARY))
    assert values["auc"] == sk.roc_auc_score(RARE, score)
    assert values["f1"] == sk.f1_score(RARE, found)
    assert values["brier"] == sk.brier_score_loss(RARE, score)
    assert values["macro"] == sk.f1_score(RARE, found, average="macro")
    assert measured({"r2": sk.r2_score}, GUESSES, AGES, task="regression")["r2"] == pytest.approx(
        sk.r2_score(AGES, GUESSES)
    )


class Largest:
    """A metric as torchmetrics has them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.largest = torch.tensor(-math.inf)
        self.updates = 0

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.largest = torch.maximum(self.largest, preds.max())
        self.updates += 1

    def compute(self) -> Tensor:
        assert self.updates == 15, "one for each batch, from the start again in each evaluation"
        return self.largest


def test_an_object_is_updated_and_starts_again() -> None:
    engine = TorchEngine(nn.Identity, metrics={"largest": Largest()}, evaluation_batch=7)
    for shift in (0, -5):
        examples = as_examples((BINARY + np.float32(shift), RARE))
        value = engine.evaluate(engine.initial_model(0), examples)["largest"]
        assert value == pytest.approx(float(BINARY.max()) + shift)


def test_metrics_of_torchmetrics_are_used_unchanged() -> None:
    """Objects and functions of the package, over batches of which most have none of the rare class."""
    made = pytest.importorskip("torchmetrics")
    functions = pytest.importorskip("torchmetrics.functional.classification")
    found, score = SCORES.argmax(1), torch.softmax(torch.tensor(SCORES), 1).numpy()
    metrics = {
        "auc": made.AUROC(task="multiclass", num_classes=3),
        "f1": made.F1Score(task="multiclass", num_classes=3, average="macro"),
        "kappa": made.CohenKappa(task="multiclass", num_classes=3),
        "recall": partial(functions.multiclass_recall, num_classes=3, average="macro"),
    }
    wanted = {
        "auc": sk.roc_auc_score(THREE, score, multi_class="ovr"),
        "f1": sk.f1_score(THREE, found, average="macro"),
        "kappa": sk.cohen_kappa_score(THREE, found),
        "recall": sk.recall_score(THREE, found, average="macro"),
    }
    values = measured(metrics, SCORES, THREE)
    assert {name: values[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)
    # Logits of which whole batches lie within 0 and 1, and targets as binary cross-entropy wants them.
    logits = np.sort(RNG.normal(0.5, 0.6, 101)).astype(np.float32)
    binary = {"auc": made.AUROC(task="binary"), "f1": made.F1Score(task="binary"), "acc": made.Accuracy(task="binary")}
    values = measured(binary, logits, RARE.astype(np.float32), loss=nn.BCEWithLogitsLoss())
    wanted = {
        "auc": sk.roc_auc_score(RARE, logits),
        "f1": sk.f1_score(RARE, logits > 0),
        "acc": sk.accuracy_score(RARE, logits > 0),
    }
    assert {name: values[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(ConfigError, match=r"the metric 'all' returned a dict; it must return one number"):
        measured({"all": made.MetricCollection({"f1": metrics["f1"]})}, SCORES, THREE)


def test_a_function_gets_all_outputs_and_targets_unless_it_is_a_batch_mean() -> None:
    """The recall of a rare class is not the mean over batches, of which most have none of it."""

    def recall(outputs: Tensor, targets: Tensor) -> Tensor:
        found = (outputs.argmax(1) == 1) & (targets == 1)
        return found.double().sum() / (targets == 1).sum().clamp(min=1)

    values = measured({"whole": recall, "mean": BatchMean(recall), "recall": "recall"}, BINARY, RARE)
    assert values["whole"] == pytest.approx(values["recall"])
    assert values["mean"] < values["whole"]


def test_dice_is_of_all_voxels_without_the_background() -> None:
    """2 |A and B| / (|A| + |B|), the mean over the classes above 0; one output above 0 is class 1."""
    truth = RNG.integers(0, 3, (20, 6, 6))
    outputs = (RNG.normal(size=(20, 3, 6, 6)) + 2 * np.moveaxis(np.eye(3)[truth], -1, 1)).astype(np.float32)
    found = outputs.argmax(1)
    wanted = [2 * ((found == k) & (truth == k)).sum() / ((found == k).sum() + (truth == k).sum()) for k in (1, 2)]
    assert measured(["dice"], outputs, truth)["dice"] == pytest.approx(np.mean(wanted))
    mask, logits = (truth > 0).astype(np.int64), outputs[:, 1:2]
    both = ((logits[:, 0] > 0) & (mask == 1)).sum()
    sums = (logits > 0).sum() + mask.sum()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], targets.float())

    assert measured(["dice"], logits, mask, loss=loss)["dice"] == pytest.approx(2 * both / sums)


def test_an_auc_of_one_class_is_not_a_number() -> None:
    assert math.isnan(measured(["auc"], BINARY, np.ones(101, np.int64))["auc"])


def test_equal_scores_share_their_ranks() -> None:
    coarse = np.round(BINARY)
    score = torch.softmax(torch.tensor(coarse).double(), 1)[:, 1].numpy()
    assert measured(["auc"], coarse, RARE)["auc"] == pytest.approx(sk.roc_auc_score(RARE, score), abs=1e-12)


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        (["acuracy"], "there is no metric 'acuracy'; did you mean 'accuracy'"),
        ({"own": 3}, r"the metric 'own' is 3; it must be a name, a function of \(outputs, targets\) or an object"),
        ({"own": Largest}, r"the metric 'own' is the class Largest; give an object: Largest\(\.\.\.\)"),
        ({"own": lambda outputs: 1.0}, r"the metric 'own' takes outputs only; it must take \(outputs, targets\)"),
        ({"own": lambda outputs, targets: outputs}, r"the metric 'own' returned a Tensor of shape \(101, 2\); it must"),
        (
            {"own": lambda outputs, targets: outputs.nope},
            "the metric 'own' failed: AttributeError: 'Tensor' object has no",
        ),
        ({"own": lambda outputs, targets: None}, "the metric 'own' returned a NoneType; it must return one number"),
        ({"own": lambda outputs, targets: {"a": 1}}, "the metric 'own' returned a dict; it must return one number"),
        ({"own": BatchMean(lambda outputs, targets: targets)}, "the metric of a batch returned a Tensor of shape"),
    ],
)
def test_what_is_not_a_metric_is_refused_in_one_sentence(metrics: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        measured(metrics, BINARY, RARE)
    assert "\n" not in str(caught.value)


def test_outputs_that_cannot_be_put_together_are_refused() -> None:
    (measure,) = measures_of({"own": lambda outputs, targets: 1.0}, False).values()
    for length in (2, 3):
        measure.add(torch.zeros(4, length), torch.zeros(4), 4)
    with pytest.raises(ConfigError, match="the outputs of different batches cannot be put together"):
        measure.value()


def test_counts_need_one_class_for_each_target() -> None:
    with pytest.raises(ConfigError, match=r"outputs of shape \(4, 2\) and targets of shape \(4, 5\) do not name"):
        measures_of(["f1"], False)["f1"].add(torch.zeros(4, 2), torch.zeros(4, 5), 4)


# --- over sites -----------------------------------------------------------------------------------------

SITES = (slice(0, 60), slice(60, 90), slice(90, 101))  # of unequal sizes


def pooled(metrics: Any, outputs: Any, targets: Any, **options: Any) -> dict[str, float]:
    """From the sums of three sites, each of which the controller would take."""
    engine = TorchEngine(nn.Identity, metrics=metrics, evaluation_batch=7, **options)
    found = []
    for site in SITES:
        values, sums = engine.evaluate_with_sums(engine.initial_model(0), as_examples((outputs[site], targets[site])))
        examples = len(targets[site])
        assert not [problem for name in sums if (problem := sums_problem(sums[name], values[name], examples))]
        found.append((sums, examples))
    together = {name: merged_value([(sums[name], examples) for sums, examples in found]) for name in found[0][0]}
    return {name: value for name, value in together.items() if value is not None}


@pytest.mark.parametrize(("outputs", "targets"), [(BINARY, RARE), (SCORES, THREE)])
def test_counts_of_sites_give_the_metric_of_all_their_examples(outputs: Any, targets: Any) -> None:
    """Exactly, though the sites' own values average to something else; AUC needs single scores and has no sums."""
    counted = ("f1", "precision", "recall", "balanced_accuracy", "dice")
    wanted, found = (
        measured((*counted, "accuracy"), outputs, targets),
        pooled((*counted, "accuracy", "auc"), outputs, targets),
    )
    assert {name: found[name] for name in counted} == {name: wanted[name] for name in counted}
    assert found == pytest.approx(wanted, abs=1e-6)  # losses are of float32
    mean = (
        sum(measured(["recall"], outputs[site], targets[site])["recall"] * len(targets[site]) for site in SITES) / 101
    )
    assert abs(mean - wanted["recall"]) > 1e-3


def test_sums_of_sites_give_the_errors_of_a_regression() -> None:
    names = ("mae", "mse", "rmse", "r2")
    wanted = measured(names, GUESSES[:, None], AGES, task="regression")
    assert pooled(names, GUESSES[:, None], AGES, task="regression") == pytest.approx(wanted, rel=1e-5)


def test_metrics_of_the_users_have_sums_if_they_are_means() -> None:
    """A function of the whole set, of scikit-learn, or an object has none."""
    metrics = {
        "own": lambda outputs, targets: 1.0,
        "sk": sk.recall_score,
        "mean": BatchMean(lambda outputs, targets: 0.5),
    }
    assert pooled(metrics, BINARY, RARE).keys() == {"loss", "mean"}
