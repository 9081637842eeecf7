"""FedBuff's mixing: a buffer of weighted differences makes one step of the community model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import add_scaled, in_parts, widened, zeros
from metis.core.events import LearnerId
from metis.core.mixing.community import Published
from metis.core.mixing.store import ModelStore
from metis.core.model import Model
from metis.errors import ArgumentError


class Buffered(Published):
    """FedBuff (Nguyen et al. 2022): K weighted differences make one step of the community model."""

    uses_base = True
    mixes_cohorts = True

    def __init__(
        self, initial_model: Model, store: ModelStore, buffer_size: int = 3, server_learning_rate: float = 1.0
    ) -> None:
        super().__init__(initial_model)
        if buffer_size < 1:
            raise ArgumentError(f"buffer_size is {buffer_size}; it must be at least 1", "buffer_size")
        if not 0 < server_learning_rate < math.inf:
            raise ArgumentError(
                f"server_learning_rate is {server_learning_rate}; it must be a number greater than 0",
                "server_learning_rate",
            )
        self._buffer_size = buffer_size
        self._server_learning_rate = server_learning_rate
        self._vector = widened(initial_model.vector)
        self._differences = zeros(initial_model.layout.size)
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
        assert base is not None
        add_scaled(self._differences, [(local_model.vector, value), (base.vector, -value)])
        self.committed_steps += steps
        self.contributors += 1

    def withdraw(self, learner: LearnerId) -> None:
        """Nothing: differences are summed as they come and cannot be separated."""

    def publish(self, seconds: float = 0.0) -> bool:
        if self.contributors < self._buffer_size:
            return False
        rate = self._server_learning_rate / self.contributors

        def step(vector: NDArray[np.float64], differences: NDArray[np.float64]) -> None:
            vector += rate * differences
            differences[:] = 0.0

        in_parts(step, self._vector, self._differences)
        self.contributors = 0
        self._stamp_new(self._vector)
        return True

    def adopt(self, model: Model) -> None:
        super().adopt(model)
        self._vector = widened(model.vector)

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        return {"vector": self._vector, "differences": self._differences}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.model = model
        self._vector = widened(arrays["vector"])
        self._differences = widened(arrays["differences"])
