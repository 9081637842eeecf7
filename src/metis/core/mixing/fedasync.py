"""FedAsync's mixing: each local model is blended into the community model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import add_scaled, in_parts, widened
from metis.core.events import LearnerId
from metis.core.mixing.community import Published
from metis.core.mixing.store import ModelStore
from metis.core.model import Model
from metis.errors import ArgumentError


class Interpolation(Published):
    """FedAsync: w_c = (1 - alpha) w_c + alpha w_k with alpha = a * S_k; keeps no local model (R14)."""

    def __init__(self, initial_model: Model, store: ModelStore, mixing: float = 0.5) -> None:
        super().__init__(initial_model)
        if not 0 < mixing <= 1:
            raise ArgumentError(f"mixing is {mixing}; it must be greater than 0 and at most 1", "mixing")
        self._mixing = mixing
        self._vector = widened(initial_model.vector)
        self._changed = False
        self.contributors = 0

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        alpha = self._mixing * value
        in_parts(lambda part: np.multiply(part, 1 - alpha, out=part), self._vector)
        add_scaled(self._vector, [(local_model.vector, alpha)])
        self.committed_steps += steps
        self.contributors += 1
        self._changed = True

    def withdraw(self, learner: LearnerId) -> None:
        """Nothing: past contributions are blended in and cannot be separated."""

    def publish(self, seconds: float = 0.0) -> bool:
        if not self._changed:
            return False
        self._changed, self.contributors = False, 0
        self._stamp_new(self._vector)
        return True

    def adopt(self, model: Model) -> None:
        super().adopt(model)
        self._vector = widened(model.vector)

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        return {"vector": self._vector}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.model = model
        self._vector = widened(arrays["vector"])
