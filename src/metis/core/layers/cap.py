"""HOW MANY local epochs a task has at most: a learner with little data need not train on it over and over again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from metis.core.events import Budget, LearnerId
from metis.core.layers.base import Layer
from metis.core.roster import Roster
from metis.core.schedules import Moment
from metis.core.timing import steps_of_epochs
from metis.registry import Setting


@dataclass(frozen=True)
class Cap(Layer, key="cap", order=2):
    """A limit on the local epochs of a task; a learner that reaches it idles; beyond the paper."""

    local_epochs: Annotated[float, Setting("maximum passes over its own data that a learner makes in a task", gt=0)]

    leaves_idle = True

    def relabel(self, label: str) -> str:
        cap = f", at most {self.local_epochs:g} epoch{'' if self.local_epochs == 1 else 's'}"
        name, closing, rest = label.partition(")")  # right behind "SemiSync (λ=2)"
        return f"{name}{closing}{cap}{rest}" if closing else f"{label}{cap}"

    def limit(self, budgets: dict[LearnerId, Budget], roster: Roster, moment: Moment) -> dict[LearnerId, Budget]:
        return {
            learner: replace(budget, steps=cap if budget.steps is None else min(budget.steps, cap))
            for learner, budget in budgets.items()
            for cap in [steps_of_epochs(self.local_epochs, roster[learner].epoch_steps)]
        }
