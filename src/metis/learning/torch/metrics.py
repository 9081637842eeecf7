"""What community models are measured by, over a whole set of examples.

A metric is a name (`auc`), a function of all outputs and targets, a function of scikit-learn, or an object with
`update`, `compute` and `reset`, such as those of torchmetrics. Only a `BatchMean` is averaged over batches.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from metis.errors import ConfigError, MetisError
from metis.learning.engine import SHARES
from metis.learning.sums import Sums, value_of
from metis.learning.torch.flat import to_numpy
from metis.registry import did_you_mean


class Measure(Protocol):
    """A metric at work on one evaluation."""

    def reset(self) -> None: ...

    def add(self, outputs: Any, targets: Any, examples: int) -> None: ...

    def value(self) -> Any: ...

    def sums(self) -> Sums | None:
        """What its value is computed from, if that adds up over sites."""


class BatchMean:
    """A metric that is a mean over examples, so that it may be averaged over batches, by their examples.

    - `function`: takes the outputs and the targets of a batch.
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = function
        self.reset()

    def reset(self) -> None:
        self._total, self._examples = 0.0, 0

    def add(self, outputs: Any, targets: Any, examples: int) -> None:
        self._total += number("of a batch", self.function(outputs, targets)) * examples
        self._examples += examples

    def value(self) -> float:
        return self._total / self._examples

    def sums(self) -> Sums:
        return Sums("mean", (self._total, float(self._examples)))


class _WholeSet:
    """A function of all outputs and targets; they are kept until the last batch."""

    def __init__(
        self, function: Callable[[Any, Any], Any], sums: Callable[[Any, Any], Sums | None] = lambda *_: None
    ) -> None:
        self._function, self._sums = function, sums
        self.reset()

    def reset(self) -> None:
        self._outputs: list[Any] = []
        self._targets: list[Any] = []

    def add(self, outputs: Any, targets: Any, examples: int) -> None:
        self._outputs.append(outputs.cpu() if isinstance(outputs, Tensor) else outputs)
        self._targets.append(targets.cpu() if isinstance(targets, Tensor) else targets)

    def value(self) -> Any:
        return self._function(*self._all())

    def sums(self) -> Sums | None:
        return self._sums(*self._all())

    def _all(self) -> tuple[Any, Any]:
        return _joined("outputs", self._outputs), _joined("targets", self._targets)


def _joined(what: str, parts: list[Any]) -> Any:
    try:
        return torch.cat(parts)
    except (RuntimeError, TypeError) as problem:
        raise ConfigError(
            f"the {what} of different batches cannot be put together for a metric of the whole set; use a BatchMean "
            "or an object with update, compute and reset"
        ) from problem


class _Updated:
    """An object that is updated with each batch."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self.reset = metric.reset

    def add(self, outputs: Any, targets: Any, examples: int) -> None:
        self._metric.update(outputs, targets)

    def value(self) -> Any:
        return self._metric.compute()

    def sums(self) -> None:
        return None


def _of_torchmetrics(metric: Any) -> Callable[[Any, Any], Any]:
    """A classification metric of torchmetrics, updated once with everything.

    It takes outputs within 0 and 1 for probabilities and others for logits, which it must not decide batch by batch,
    and wants whole targets, where a loss such as binary cross-entropy has them as floating-point numbers.
    """

    def measure(outputs: Tensor, targets: Tensor) -> Any:
        metric.reset()
        if targets.is_floating_point() and bool((targets == targets.round()).all()):
            targets = targets.long()
        metric.update(outputs, targets)
        value = metric.compute()
        metric.reset()
        return value

    return measure


def measure_of(name: str, metric: Any, regression: bool = False) -> Measure:
    """What measures this metric: a name, a function or an object."""
    if isinstance(metric, str):
        if metric not in NAMED:
            raise ConfigError(f"there is no metric '{metric}'; {did_you_mean(metric, NAMED)}")
        return NAMED[metric]()
    if isinstance(metric, type):
        raise ConfigError(f"the metric '{name}' is the class {metric.__name__}; give an object: {metric.__name__}(...)")
    if isinstance(metric, (BatchMean, _WholeSet, _Counts)):
        return metric
    if any(kind.__module__.startswith("torchmetrics.classification") for kind in type(metric).__mro__):
        return _WholeSet(_of_torchmetrics(metric))
    if all(hasattr(metric, method) for method in ("update", "compute", "reset")):
        return _Updated(metric)
    if not callable(metric):
        raise ConfigError(
            f"the metric '{name}' is {metric!r}; it must be a name, a function of (outputs, targets) or an object "
            "with update, compute and reset"
        )
    try:
        parameters = [*inspect.signature(metric).parameters]
    except (TypeError, ValueError):  # the signature of a builtin is not known
        parameters = []
    if parameters[:1] == ["y_true"]:
        return _WholeSet(_of_sklearn(metric, parameters[1], regression))
    if len(parameters) == 1 and parameters[0] not in ("args", "arguments"):
        raise ConfigError(f"the metric '{name}' takes {parameters[0]} only; it must take (outputs, targets)")
    return _WholeSet(metric)


def measures_of(metrics: Mapping[str, Any] | Iterable[str], regression: bool) -> dict[str, Measure]:
    """Each metric by name; a list of names is enough for those that Metis knows."""
    named = metrics if isinstance(metrics, Mapping) else {name: name for name in metrics}
    return {name: measure_of(name, metric, regression) for name, metric in named.items()}


def shares_of(given: Mapping[str, Any] | Iterable[str] | None, measured: Iterable[str]) -> tuple[str, ...]:
    """Which metrics lie between 0 and 1; of a function of the user's that is not known."""
    named = given if isinstance(given, Mapping) else {name: name for name in measured}
    return tuple(name for name, metric in named.items() if isinstance(metric, str) and metric in SHARES)


def add_batch(measures: Mapping[str, Measure], outputs: Any, targets: Any, examples: int) -> None:
    """Give every metric the outputs and targets of a batch."""
    for name, measure in measures.items():
        with _naming(name):
            measure.add(outputs, targets, examples)


def values_of(measures: Mapping[str, Measure]) -> dict[str, float]:
    """What each metric is by now."""
    values = {}
    for name, measure in measures.items():
        with _naming(name):
            values[name] = number(f"'{name}'", measure.value())
    return values


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """What goes wrong in a metric is said of that metric."""
    try:
        yield
    except MetisError:
        raise
    except Exception as problem:
        raise ConfigError(f"the metric '{name}' failed: {type(problem).__name__}: {problem}") from problem


def sums_of(measures: Mapping[str, Measure]) -> dict[str, Sums]:
    """The sums behind those metrics that have them."""
    found = {name: measure.sums() for name, measure in measures.items()}
    return {name: sums for name, sums in found.items() if sums is not None}


def number(name: str, value: Any) -> float:
    """What a metric returned, as a number."""
    size = value.numel() if isinstance(value, Tensor) else np.size(value) if value is not None else 0
    try:
        if size != 1:
            raise TypeError
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError):
        kind = f"a {type(value).__name__}"
        if hasattr(value, "shape"):
            kind += f" of shape {tuple(value.shape)}"
        raise ConfigError(f"the metric {name} returned {kind}; it must return one number") from None


def _of_sklearn(metric: Callable[..., Any], second: str, regression: bool) -> Callable[[Any, Any], Any]:
    """A function of scikit-learn: targets come first, and it wants labels or probabilities."""

    def measure(outputs: Tensor, targets: Tensor) -> Any:
        if regression:
            guess = to_numpy(outputs)
        else:
            guess = predictions(outputs) if second == "y_pred" else scores(outputs)
        return metric(to_numpy(targets), guess)

    return measure


def predictions(outputs: Tensor) -> NDArray[Any]:
    """The class of each example: that of the largest output, or 1 where a single one is above 0."""
    if outputs.ndim > 1 and outputs.shape[1] > 1:
        return to_numpy(outputs.argmax(1))
    return to_numpy((outputs.squeeze(1) if outputs.ndim > 1 else outputs) > 0).astype(np.int64)


def scores(outputs: Tensor) -> NDArray[Any]:
    """Probabilities: of class 1 where there are two, else of each class."""
    outputs = outputs.double()
    if outputs.ndim < 2 or outputs.shape[1] == 1:
        return to_numpy(torch.sigmoid(outputs.reshape(-1)))
    probabilities = torch.softmax(outputs, 1)
    return to_numpy(probabilities[:, 1] if outputs.shape[1] == 2 else probabilities)


# --- by name ------------------------------------------------------------------------------------


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of examples whose largest output is that of their class."""
    if outputs.ndim < 2 or outputs.shape[1] == 1:
        return ((outputs.reshape(-1) > 0) == targets.reshape(-1)).double().mean()
    return (outputs.argmax(1) == targets).double().mean()


def _auc(outputs: Tensor, targets: Tensor) -> float:
    """The area under the ROC curve; of more than two classes, the mean over each against the rest."""
    found, truth = scores(outputs), to_numpy(targets).reshape(-1)
    if found.ndim == 1:
        return _binary_auc(found, truth == 1)
    return float(np.mean([_binary_auc(found[:, label], truth == label) for label in range(found.shape[1])]))


def _binary_auc(found: NDArray[Any], positive: NDArray[np.bool_]) -> float:
    """By ranks; equal scores share theirs. Not a number if all examples are of one class."""
    positives = int(positive.sum())
    if positives in (0, len(positive)):
        return math.nan
    _, inverse, counts = np.unique(found, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    above = ranks[positive].sum() - positives * (positives + 1) / 2
    return float(above / (positives * (len(positive) - positives)))


def _numbers(outputs: Tensor, targets: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return to_numpy(outputs).astype(np.float64).reshape(-1), to_numpy(targets).astype(np.float64).reshape(-1)


def _r2(outputs: Tensor, targets: Tensor) -> float:
    guess, truth = _numbers(outputs, targets)
    spread = float(((truth - truth.mean()) ** 2).sum())
    return 1 - float(((truth - guess) ** 2).sum()) / spread if spread else math.nan


class _Counts:
    """Metrics of how often each class is found where it is: from counts, which add up over batches and sites."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.reset()

    def reset(self) -> None:
        self._counts = np.zeros((3, 0))  # found where it is, found, there

    def add(self, outputs: Any, targets: Any, examples: int) -> None:
        guess, truth = predictions(outputs).reshape(-1), to_numpy(targets).reshape(-1).astype(np.int64)
        if guess.shape != truth.shape:
            raise ConfigError(
                f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)} do not name one "
                "class each"
            )
        before = self._counts.shape[1]
        classes = max(2, outputs.shape[1] if outputs.ndim > 1 else 2, int(truth.max(initial=0)) + 1, before)
        new = [np.bincount(labels, minlength=classes) for labels in (guess[guess == truth], guess, truth)]
        self._counts = np.pad(self._counts, ((0, 0), (0, classes - before))) + new

    def value(self) -> float:
        return value_of(self.sums())

    def sums(self) -> Sums:
        return Sums(self._kind, tuple(self._counts.reshape(-1).tolist()))


def _rmse(outputs: Tensor, targets: Tensor) -> float:
    return math.sqrt(float(F.mse_loss(outputs.double(), targets.double())))


def _rmse_sums(outputs: Tensor, targets: Tensor) -> Sums:
    guess, truth = _numbers(outputs, targets)
    return Sums("rmse", (float(((truth - guess) ** 2).sum()), float(len(truth))))


def _r2_sums(outputs: Tensor, targets: Tensor) -> Sums:
    guess, truth = _numbers(outputs, targets)
    errors = float(((truth - guess) ** 2).sum())
    return Sums("r2", (errors, float(truth.sum()), float((truth**2).sum()), float(len(truth))))


NAMED: dict[str, Callable[[], Measure]] = {
    "accuracy": lambda: BatchMean(accuracy),
    "auc": lambda: _WholeSet(_auc),
    "f1": lambda: _Counts("f1"),
    "precision": lambda: _Counts("precision"),
    "recall": lambda: _Counts("recall"),
    "balanced_accuracy": lambda: _Counts("balanced_accuracy"),
    "dice": lambda: _Counts("dice"),
    "mae": lambda: BatchMean(F.l1_loss),
    "mse": lambda: BatchMean(F.mse_loss),
    "rmse": lambda: _WholeSet(_rmse, _rmse_sums),
    "r2": lambda: _WholeSet(_r2, _r2_sums),
}
