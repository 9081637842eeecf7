"""A pool that trains nothing: what a policy schedules, without what training would give."""

from __future__ import annotations

from metis.core.layers import Memory
from metis.core.model import Model
from metis.learning import Trained
from metis.simulation.pools.local import Known, Measured, Ticket


class DryPool:
    """Answers every task with a model without weights and all its steps done; evaluations measure nothing."""

    def train(
        self,
        due: float,
        learner: int,
        model: object,
        task: int,
        steps: int,
        memory: Memory | None,
        rate: float = 1.0,
        batches_per_step: int = 1,
    ) -> Ticket[Trained]:
        return Known(Trained(Model.empty(), steps, 0.0))

    def evaluate(self, due: float, model: object, memories: object = None) -> Ticket[Measured]:
        return Known(({}, {}))

    def close(self) -> None:
        pass
