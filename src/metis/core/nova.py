"""Normalised averaging (FedNova, Wang et al. 2020): learners that did more steps do not pull more.

Under semi-synchronous training a fast learner does tens of times as many steps as a slow one, so a plain average of
their models goes where the fast ones go. Here each learner's way from the community model is divided by the length
that its steps give it (||a_k||_1 of the paper), and all ways are made as long as the average one:

    w_c += sum_k p_k f_k (w_k - w_c)   with   f_k = sum_j p_j ||a_j|| / ||a_k||, at most `largest_amplification`.

Without the bound a learner that did one step would count a thousandfold: its noise, not what it has to say. With the
default of 1 nobody is amplified and those with many steps are held back; the mixture stays between the models that it
is made of, and so cannot diverge. If all did equally many steps, f_k = 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from metis.core.community import FullPass, ModelStore
from metis.core.events import LearnerId
from metis.core.model import Model

_BLOCK = 32 * 1024  # numbers


def accumulated_steps(steps: int, momentum: float = 0.0, pull: float = 0.0) -> float:
    """||a||_1: how many times eta * gradient so many steps go along a constant gradient.

    u = momentum u + gradient - pull y; y += u, where `pull` is eta * mu of a proximal term. It is `steps` for plain
    SGD; (steps - rho (1 - rho^steps) / (1 - rho)) / (1 - rho) with momentum rho; (1 - (1 - pull)^steps) / pull with
    a proximal term. By repeated squaring, because whoever claims 2^53 steps must not keep the controller busy.
    """
    if not momentum and not pull:
        return float(steps)
    power = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    square = ((1 - pull, momentum, 1.0), (-pull, momentum, 1.0), (0.0, 0.0, 1.0))  # of (y, u, 1)
    while steps:
        if steps & 1:
            power = _product(power, square)
        square = _product(square, square)
        steps >>= 1
    return power[0][2]


_Row = tuple[float, float, float]
_Matrix = tuple[_Row, _Row, _Row]


def _product(left: _Matrix, right: _Matrix) -> _Matrix:
    def row(place: int) -> _Row:
        a, b, c = left[place]
        x, y, z = right
        return (
            a * x[0] + b * y[0] + c * z[0],
            a * x[1] + b * y[1] + c * z[1],
            a * x[2] + b * y[2] + c * z[2],
        )

    return row(0), row(1), row(2)


@dataclass(frozen=True)
class FedNova:
    """Settings of normalised averaging; what it must know of the local solver is filled in when a run starts."""

    largest_amplification: float = 1.0
    momentum: float | None = None  # of a solver whose momentum starts anew in each task
    pull: float | None = None  # learning rate times proximal term

    def __post_init__(self) -> None:
        if not 1 <= self.largest_amplification < math.inf:
            raise ValueError(f"largest_amplification must be a number from 1 on, not {self.largest_amplification}")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, not {self.momentum}")
        if self.pull is not None and not 0 <= self.pull < 1:
            raise ValueError(f"pull must be at least 0 and below 1, not {self.pull}")

    def for_solver(self, momentum: float, pull: float) -> FedNova:
        """With what is not given taken from the solver."""
        return replace(
            self,
            momentum=momentum if self.momentum is None else self.momentum,
            pull=pull if self.pull is None else self.pull,
        )

    def factors(self, values: Mapping[LearnerId, float], steps: Mapping[LearnerId, int]) -> dict[LearnerId, float]:
        """f_k of each learner."""
        total = math.fsum(values.values())
        lengths = {k: accumulated_steps(steps[k], self.momentum or 0.0, self.pull or 0.0) for k in values}
        average = math.fsum(values[k] / total * lengths[k] for k in sorted(values))
        return {k: min(self.largest_amplification, average / lengths[k]) for k in values}


class NormalizedAverage(FullPass):
    """The models committed since the last publication, each way scaled by f_k; buffers are averaged as they are."""

    def __init__(self, initial_model: Model, store: ModelStore, settings: FedNova | None = None) -> None:
        super().__init__(initial_model, store)
        self._settings = FedNova() if settings is None else settings
        self._steps: dict[LearnerId, int] = {}

    def commit(self, learner: LearnerId, local_model: Model, value: float, steps: int, base: Model | None) -> None:
        super().commit(learner, local_model, value, steps, base)
        self._steps[learner] = steps

    def publish(self) -> bool:
        if not self._values:
            return False
        total = math.fsum(self._values.values())
        shares = {k: self._values[k] / total for k in sorted(self._values)}
        factors = self._settings.factors(self._values, self._steps)
        vector = self._mixture({k: share * factors[k] for k, share in shares.items()})
        layout = self.model.layout
        for spec in layout.tensors:
            if spec.role == "buffer":
                place = layout.slices[spec.name]
                vector[place] = sum(share * self._store.get(k)[place].astype(np.float64) for k, share in shares.items())
        self._values.clear()
        self._steps.clear()
        self._stamp_new(vector)
        return True

    def _mixture(self, weights: Mapping[LearnerId, float]) -> NDArray[np.float64]:
        """The current model with what the weights leave to it, plus the weighted local ones, in learner order."""
        result = self.model.vector.astype(np.float64)
        result *= 1 - math.fsum(weights.values())
        for learner, weight in weights.items():
            row = self._store.get(learner)
            for start in range(0, result.size, _BLOCK):
                product = row[start : start + _BLOCK].astype(np.float64)
                product *= weight
                result[start : start + _BLOCK] += product
        return result
