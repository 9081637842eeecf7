"""Mixing by differences: each model counts by what it has changed of the community model that it started from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import add_scaled, squared_distance
from metis.core.events import LearnerId
from metis.core.mixing.full_pass import FullPass
from metis.core.mixing.store import ModelStore, weighted_sum
from metis.core.model import Layout, Model, Vector

Extrapolation: TypeAlias = Literal["lengths", "fedexp", "none"]


class DifferenceAverage(FullPass):
    """w_c + eta sum_k p_k Delta_k, where Delta_k is the difference from the model that a task started from.

    Without late models and with eta = 1 it is the weighted average of the round. With `lengths`, eta is
    sum p ||Delta||^2 / (sum p ||Delta||)^2: 1 if all went equally far, more if some that count much went a short way,
    because they are slow, and dilute what the others found. `fedexp` is that of Jhunjhunwala et al. 2023,
    sum p ||Delta||^2 / (2 ||sum p Delta||^2), at least 1. Buffers are averaged without it.
    """

    averages_rounds = False
    mixes_cohorts = False  # a late model is compared with others by its difference, not by where it is
    uses_base = True

    def __init__(
        self, initial_model: Model, store: ModelStore, extrapolation: Extrapolation = "lengths", largest: float = 4.0
    ) -> None:
        super().__init__(initial_model, store)
        self._extrapolation, self._largest = extrapolation, largest
        self._bases: dict[LearnerId, Model] = {}  # of models that came late
        self._squares: dict[LearnerId, float] = {}  # ||Delta_k||^2 of the parameters

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        assert base is not None
        self._bases.pop(learner, None)
        if base is not self.model:
            self._bases[learner] = base
        super().commit(learner, local_model, value, steps, base, examples)
        self._squares[learner] = math.fsum(
            squared_distance(local_model.vector[part], base.vector[part], part.stop - part.start)
            for part in parameter_parts(self.model.layout)
            if local_model.vector.size
        )

    def withdraw(self, learner: LearnerId) -> None:
        super().withdraw(learner)
        self._bases.pop(learner, None)
        self._squares.pop(learner, None)

    def publish(self, seconds: float = 0.0) -> bool:
        if not self._values:
            return False
        weights = self.weights(self._values)
        total = math.fsum(weights.values())
        before, layout = self.model.vector, self.model.layout
        mean = weighted_sum(layout.size, self._store, weights)
        late = [(self._bases[k].vector, -weights[k]) for k in sorted(self._bases)]
        on_time = math.fsum(weights[k] for k in weights if k not in self._bases)
        add_scaled(mean, [*late, (before, -on_time)])
        mean /= total
        shares = {k: weights[k] / total for k in sorted(weights)}
        eta = extrapolated(
            self._extrapolation,
            math.fsum(share * self._squares[k] for k, share in shares.items()),
            math.fsum(share * math.sqrt(self._squares[k]) for k, share in shares.items()),
            mean,
            layout,
            self._largest,
        )
        for part in parameter_parts(layout) if eta != 1 else ():
            mean[part] *= eta
        mean += before
        self._values.clear()
        self._bases.clear()
        self._squares.clear()
        self._stamp_new(mean)
        return True

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        squares = np.array([self._squares[learner] for learner in sorted(self._squares)], np.float64)
        bases: dict[str, NDArray[Any]] = {f"started/{k}": base.vector for k, base in self._bases.items()}
        return {**super().arrays(local_models=local_models), **bases, "differences/squares": squares}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        super().load_arrays(model, arrays, store)
        squares = (float(square) for square in arrays["differences/squares"])
        self._squares = dict(zip(sorted(self._squares), squares, strict=True))
        self._bases = {k: model.with_vector(_vector(arrays[f"started/{k}"])) for k in self._bases}


def extrapolated(
    kind: Extrapolation, spread: float, length: float, mean: NDArray[np.float64], layout: Layout, largest: float
) -> float:
    """eta, from sum p ||Delta||^2, sum p ||Delta|| and sum p Delta."""
    if kind == "none" or not spread:
        return 1.0
    if kind == "lengths":
        return min(largest, spread / length**2)
    progress = math.fsum(float(np.add.reduce(np.square(mean[part]))) for part in parameter_parts(layout))
    return min(largest, max(1.0, spread / (2 * progress))) if progress else 1.0


def _vector(array: NDArray[Any]) -> Vector:
    return np.asarray(array, np.float32)


def parameter_parts(layout: Layout) -> list[slice]:
    """Where the parameters lie, neighbours together."""
    parts: list[slice] = []
    for spec in layout.tensors:
        if spec.role != "parameter":
            continue
        own = layout.slices[spec.name]
        if parts and parts[-1].stop == own.start:
            own = slice(parts.pop().start, own.stop)
        parts.append(own)
    return parts
