"""Mixing by differences: each model counts by what it has changed of the community model that it started from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import accumulated_steps, add_scaled, in_parts, squared_distance
from metis.core.events import LearnerId, RoundMeasure
from metis.core.mixing.full_pass import FullPass
from metis.core.mixing.store import ModelStore, weighted_sum
from metis.core.model import Layout, Model, Vector

Extrapolation: TypeAlias = Literal["lengths", "fedexp", "none"]


class DifferenceAverage(FullPass):
    """w_c + eta sum_k p_k Delta_k, where Delta_k is the difference from the model that a task started from.

    Without late models and with eta = 1 it is the weighted average of the round. With `lengths`, eta is
    sum p ||Delta||^2 / (sum p ||Delta||)^2: 1 if all went equally far, more if some that count much went a short way,
    because they are slow, and dilute what the others found. `fedexp` is that of Jhunjhunwala et al. 2023,
    sum p ||Delta||^2 / (2 ||sum p Delta||^2), at least 1.

    A learner that is ten times as fast goes ten times as far, so that its data would count ten times as much. With
    `equalize`, Delta_k is scaled by (mean a / a_k)^equalize, where a_k is how far its steps lead along a constant
    gradient (`accumulated_steps`): 0 leaves it as it is, 1 lets all go equally far, as FedNova does (Wang et al. 2020).
    No difference is made more than `largest` times as long. Buffers are averaged without all this.
    """

    averages_rounds = False
    mixes_cohorts = False  # a late model is compared with others by its difference, not by where it is
    uses_base = True

    def __init__(
        self,
        initial_model: Model,
        store: ModelStore,
        extrapolation: Extrapolation = "lengths",
        largest: float = 4.0,
        equalize: float = 0.0,
        momentum: float = 0.0,
        pull: float = 0.0,
    ) -> None:
        super().__init__(initial_model, store)
        self._extrapolation, self._largest = extrapolation, largest
        self._equalize, self._momentum, self._pull = equalize, momentum, pull
        self._reaches: dict[LearnerId, float] = {}  # a_k
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
        self._reaches[learner] = accumulated_steps(steps, self._momentum, self._pull)
        self._squares[learner] = math.fsum(
            squared_distance(local_model.vector[part], base.vector[part], part.stop - part.start)
            for part in parameter_parts(self.model.layout)
            if local_model.vector.size
        )

    def withdraw(self, learner: LearnerId) -> None:
        super().withdraw(learner)
        self._bases.pop(learner, None)
        self._squares.pop(learner, None)
        self._reaches.pop(learner, None)

    def publish(self, seconds: float = 0.0) -> bool:
        if not self._values:
            return False
        weights, layout = self.weights(self._values), self.model.layout
        total = math.fsum(weights.values())
        shares = {k: weights[k] / total for k in sorted(weights)}
        factors = self._factors(shares)
        mean = self._mean({k: share * factors[k] for k, share in shares.items()})
        squares = {k: factors[k] ** 2 * self._squares[k] for k in shares}
        spread = math.fsum(share * squares[k] for k, share in shares.items())
        length = math.fsum(share * math.sqrt(squares[k]) for k, share in shares.items())
        progress = squared_length(mean, layout)
        unrelated = math.fsum(share**2 * squares[k] for k, share in shares.items())
        sizes = (math.sqrt(progress), math.sqrt(spread))
        self.measure = RoundMeasure(*sizes, unrelated=math.sqrt(unrelated)) if unrelated else None
        eta = extrapolated(self._extrapolation, spread, length, progress, self._largest)
        parameters = parameter_parts(layout)
        for part in parameters if eta != 1 else ():
            in_parts(lambda numbers: np.multiply(numbers, eta, out=numbers), mean[part])
        if self._equalize and sum(part.stop - part.start for part in parameters) < layout.size:
            plain = self._mean(shares)
            for part in parameters:
                plain[part] = mean[part]
            mean = plain
        in_parts(lambda numbers, before: np.add(numbers, before, out=numbers), mean, self.model.vector)
        for kept in (self._values, self._bases, self._squares, self._reaches):
            kept.clear()
        self._stamp_new(mean)
        return True

    def _mean(self, weights: Mapping[LearnerId, float]) -> NDArray[np.float64]:
        """The weighted sum of the differences."""
        mean = weighted_sum(self.model.layout.size, self._store, weights)
        late = [(self._bases[k].vector, -weights[k]) for k in sorted(self._bases)]
        on_time = math.fsum(weights[k] for k in weights if k not in self._bases)
        add_scaled(mean, [*late, (self.model.vector, -on_time)])
        return mean

    def _factors(self, shares: Mapping[LearnerId, float]) -> dict[LearnerId, float]:
        return equalizing(shares, self._reaches, self._equalize, self._largest)

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        squares = np.array([self._squares[learner] for learner in sorted(self._squares)], np.float64)
        bases: dict[str, NDArray[Any]] = {f"started/{k}": base.vector for k, base in self._bases.items()}
        return {**super().arrays(local_models=local_models), **bases, "differences/squares": squares}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        super().load_arrays(model, arrays, store)
        squares = (float(square) for square in arrays["differences/squares"])
        self._squares = dict(zip(sorted(self._squares), squares, strict=True))
        self._bases = {k: model.with_vector(_vector(arrays[f"started/{k}"])) for k in self._bases}


def equalizing(
    shares: Mapping[LearnerId, float], reaches: Mapping[LearnerId, float], equalize: float, largest: float
) -> dict[LearnerId, float]:
    """How much longer each difference is made: (mean a / a_k)^equalize, at most `largest`."""
    if not equalize:
        return dict.fromkeys(shares, 1.0)
    average = math.fsum(share * reaches[k] for k, share in shares.items())
    return {k: min(largest, (average / reaches[k]) ** equalize) for k in shares}


def equalizing_steps(
    values: Mapping[LearnerId, float],
    steps: Mapping[LearnerId, int],
    equalize: float,
    largest: float,
    momentum: float,
    pull: float,
) -> dict[LearnerId, float]:
    """The same from contribution values and steps."""
    total = math.fsum(values.values())
    reaches = {k: accumulated_steps(steps[k], momentum, pull) for k in values}
    return equalizing({k: values[k] / total for k in sorted(values)}, reaches, equalize, largest)


def extrapolated(kind: Extrapolation, spread: float, length: float, progress: float, largest: float) -> float:
    """eta, from sum p ||Delta||^2, sum p ||Delta|| and ||sum p Delta||^2."""
    if kind == "none" or not spread:
        return 1.0
    if kind == "lengths":
        return min(largest, spread / length**2)
    return min(largest, max(1.0, spread / (2 * progress))) if progress else 1.0


def squared_length(difference: NDArray[np.float64], layout: Layout) -> float:
    """That of the parameters."""
    return math.fsum(
        squared_distance(difference[part], None, part.stop - part.start) for part in parameter_parts(layout)
    )


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
