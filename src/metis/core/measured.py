"""What a round tells about itself: how far the mixture is from the community model, and how far local models are.

Of a server-side optimizer's step it tells nothing: its length is a matter of the optimizer's learning rate.

One pass over a local model as it is committed and one over the community model as it is published; no model is read
for this alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.core.community import Community, ModelStore
from metis.core.events import LearnerId, RoundMeasure
from metis.core.layer import Layer
from metis.core.model import Model, Vector

_BLOCK = 32 * 1024  # numbers


def _square(to: Vector, start: Vector) -> float:
    """||to - start||^2 in float64, block by block in order."""
    total = 0.0
    for place in range(0, to.size, _BLOCK):
        way = to[place : place + _BLOCK].astype(np.float64) - start[place : place + _BLOCK]
        total += float(way @ way)
    return total


class Measured(Layer):
    """Measures each round of the community inside it."""

    def __init__(self, inside: Community) -> None:
        super().__init__(inside)
        self._values: dict[LearnerId, float] = {}  # of the open round
        self._squares: dict[LearnerId, float] = {}  # ||w_k - w_c||^2
        self._measure: RoundMeasure | None = None

    @property
    def measure(self) -> RoundMeasure | None:
        """Of the last publication."""
        return self._measure

    def commit(self, learner: LearnerId, local_model: Model, value: float, steps: int, base: Model | None) -> None:
        square = _square(local_model.vector, self.model.vector)
        super().commit(learner, local_model, value, steps, base)
        self._values[learner], self._squares[learner] = value, square

    def withdraw(self, learner: LearnerId) -> None:
        super().withdraw(learner)
        self._values.pop(learner, None)
        self._squares.pop(learner, None)

    def publish(self) -> bool:
        before = self.model.vector
        if not super().publish():
            return False
        total = math.fsum(self._values.values())
        spread = math.fsum(value * self._squares[learner] for learner, value in self._values.items())
        progress = math.sqrt(_square(self.model.vector, before))
        self._measure = RoundMeasure(progress, math.sqrt(spread / total) if total else 0.0)
        self._values.clear()
        self._squares.clear()
        return True

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        squares = np.array([self._squares[learner] for learner in sorted(self._squares)], np.float64)
        return {**super().arrays(local_models=local_models), "measured/squares": squares}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        super().load_arrays(model, arrays, store)
        squares = (float(square) for square in arrays["measured/squares"])
        self._squares = dict(zip(sorted(self._squares), squares, strict=True))
