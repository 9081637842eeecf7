"""HOW differences are mixed: what each learner has changed, and how far to go along their average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from metis.core.events import LearnerId
from metis.core.layers.base import Layer
from metis.core.mixing import Mixing
from metis.core.mixing.differences import DifferenceAverage, Extrapolation, equalizing_steps
from metis.registry import Setting

if TYPE_CHECKING:
    from metis.core.solvers import SolverFacts


@dataclass(frozen=True)
class Differences(
    Layer,
    key="differences",
    order=11,
    needs={
        "average": "replaces the average of a round, and {policy} does not average rounds; sync_fedavg and "
        "semisync_fedavg do",
    },
    takes={"average", "cohort", "linear"},
):
    """Rounds are mixed by the differences from the models that tasks started from; beyond the paper."""

    extrapolation: Annotated[
        Extrapolation,
        Setting(
            "how far to go along the average difference: lengths undoes the dilution by those that went a short way, "
            "fedexp follows their disagreement, none goes as far as the average"
        ),
    ] = "lengths"
    largest: Annotated[float, Setting("largest factor of the average difference, and of each of them", ge=1)] = 4.0
    equalize: Annotated[
        float,
        Setting(
            "0: a learner that did more steps counts as much as it went further; 1: as if all had done equally many "
            "(FedNova); between them, a share of that in the logarithm",
            ge=0,
            le=1,
        ),
    ] = 0.5
    momentum: Annotated[
        float | None, Setting("of a solver whose momentum restarts in each task", ge=0, lt=1, in_files=False)
    ] = None
    pull: Annotated[float | None, Setting("learning rate times proximal term", ge=0, lt=1, in_files=False)] = None

    def relabel(self, label: str) -> str:
        return f"{label} differences" if self.extrapolation == "none" else f"{label} η"

    def for_solver(self, facts: SolverFacts) -> Layer:
        return replace(
            self,
            momentum=facts.momentum if self.momentum is None else self.momentum,
            pull=facts.pull if self.pull is None else self.pull,
        )

    def factors(self, values: Mapping[LearnerId, float], steps: Mapping[LearnerId, int]) -> dict[LearnerId, float]:
        """How much longer the difference of each learner is made."""
        return equalizing_steps(values, steps, self.equalize, self.largest, self.momentum or 0.0, self.pull or 0.0)

    def set_mixing(self, mixing: Mixing) -> Mixing:
        return partial(
            DifferenceAverage,
            extrapolation=self.extrapolation,
            largest=self.largest,
            equalize=self.equalize,
            momentum=self.momentum or 0.0,
            pull=self.pull or 0.0,
        )
