"""A solver: only the sign of the gradient counts, with or without momentum (Signum, Bernstein et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from metis.core.solvers import SOLVERS, Solver, zeros_like
from metis.registry import Setting, check_settings


@SOLVERS.register("sign")
@dataclass(frozen=True)
class SignSGD(Solver):
    """u = beta u + (1 - beta) grad; w -= eta sign(u)."""

    learning_rate: Annotated[float, Setting("eta: how far each weight moves in a step", gt=0)]
    beta: Annotated[float, Setting("share of the mean gradient that is kept", ge=0, lt=1)] = 0.9

    title = "SignSGD"

    def __post_init__(self) -> None:
        check_settings(self)

    def start(self, weights: Any) -> Any:
        return zeros_like(weights)

    def step(self, weights: Any, gradient: Any, memory: Any, community: Any) -> None:
        memory *= self.beta
        memory += (1 - self.beta) * gradient
        weights -= self.learning_rate * (np.sign(memory) if isinstance(memory, np.ndarray) else memory.sign())
