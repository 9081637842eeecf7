"""What engines of other libraries than torch share: batches as numpy arrays, and metrics of outputs in numpy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from metis.core.layers import Memory
from metis.core.model import Layout, Model
from metis.errors import ConfigError, DataError
from metis.learning.engine import Batch, EngineJob, Examples, batches_of, measured
from metis.learning.sums import Sums
from metis.learning.torch.batches import split
from metis.learning.torch.metrics import add_batch, measures_of, sums_of, values_of

_EVALUATION_BATCH = 500

Array = NDArray[Any]


def arrays_of(batch: Batch) -> tuple[Array, Array]:
    """Inputs and targets of a batch."""
    inputs, targets = split(batch)
    if targets is None or isinstance(inputs, (dict, tuple, list)):
        raise ConfigError("this engine trains on pairs (inputs, targets) of arrays")
    return np.asarray(inputs), np.asarray(targets)


class ArrayEngine:
    """The parts of an engine that do not depend on its library; a subclass trains, and says what a network outputs.

    `name` is the engine's own, `refused` are fields of a job that it cannot take, with the value that they must have.
    """

    name = ""
    refused: tuple[str, ...] = ("step", "parameters", "precision", "dtype")
    _layout: Layout

    def __init__(self, job: EngineJob) -> None:
        plain = EngineJob()
        for field in self.refused:
            if (given := getattr(job, field)) not in (getattr(plain, field), "auto"):
                raise ConfigError(f"{field} is {given!r}, which the engine '{self.name}' does not have; leave it out")
        self._job = job
        self._regression = job.task == "regression"
        self._measures = measures_of(measured(job.task) if job.metrics is None else job.metrics, self._regression)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), self._job), ()  # another process makes its own

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def metrics(self) -> tuple[str, ...]:
        """What an evaluation measures."""
        return ("loss", *self._measures)

    def predictor(self, model: Model, memory: Memory) -> Callable[[Array], Array]:
        """What this model makes of inputs: scores of classes, whose softmax are probabilities, or numbers."""
        raise NotImplementedError

    def loss_of(self, outputs: Array, targets: Array) -> float:
        """The mean over a batch."""
        raise NotImplementedError

    def fitted(self, targets: Array, outputs: Sequence[int]) -> Array:
        """Targets in the shape of the outputs, for a regression; as whole numbers, for a classification."""
        if not self._regression:
            return targets.astype(np.int64, copy=False)
        if math.prod(outputs) != targets.size:
            raise ConfigError(f"outputs have the shape {tuple(outputs)} and targets the shape {targets.shape}")
        return targets.astype(np.float32, copy=False).reshape(tuple(outputs))

    def evaluate(self, model: Model, examples: Examples, memory: Memory | None = None) -> dict[str, float]:
        return self.evaluate_with_sums(model, examples, memory)[0]

    def evaluate_with_sums(
        self, model: Model, examples: Examples, memory: Memory | None = None
    ) -> tuple[dict[str, float], dict[str, Sums]]:
        """As `evaluate`, with the sums behind those values that have them."""
        count = len(examples)
        if count == 0:
            raise DataError("there are no examples to evaluate on")
        predict, total = self.predictor(model, memory or {}), 0.0
        measures = self._measures.values()
        for measure in measures:
            measure.reset()
        parts = np.array_split(np.arange(count), math.ceil(count / _EVALUATION_BATCH))
        for part, batch in zip(parts, batches_of(examples, parts), strict=True):
            inputs, targets = arrays_of(batch)
            outputs = np.asarray(predict(inputs))
            targets = self.fitted(targets, outputs.shape)
            total += self.loss_of(outputs, targets) * len(part)
            tensors = torch.from_numpy(np.array(outputs)), torch.from_numpy(np.array(targets))
            add_batch(self._measures, *tensors, len(part))
        values = values_of(self._measures)
        sums = {"loss": Sums("mean", (total, float(count))), **sums_of(self._measures)}
        for measure in measures:
            measure.reset()
        return {"loss": total / count, **values}, sums


def shortened(gradient: NDArray[np.float32], largest: float | None) -> None:
    """Cut a gradient to this norm, in place."""
    if largest is not None and (norm := float(np.linalg.norm(gradient))) > largest:
        gradient *= largest / norm


def together(batches: Iterable[Batch], how_many: int) -> Iterator[tuple[Batch, bool]]:
    """Each batch, and whether a step follows it; a batch is asked for when the one before is done with."""
    pending = 0
    for batch in batches:
        pending += 1
        yield batch, pending == how_many
        pending %= how_many
