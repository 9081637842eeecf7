"""Local training held toward the model that it started from (FedProx; FedAsync's regularization)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from metis.core.layers.base import Layer
from metis.registry import Setting

if TYPE_CHECKING:
    from metis.core.solvers import Solver


@dataclass(frozen=True)
class ProximalPull(Layer, key="proximal", order=0):
    """A pull toward the received community model, added to whatever solver learners use."""

    term: Annotated[float, Setting("mu: strength of the pull", ge=0)]

    def adapt_solver(self, solver: Solver) -> Solver:
        return solver.with_pull(self.term) if self.term else solver
