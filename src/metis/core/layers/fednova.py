"""Normalised averaging (FedNova, Wang et al. 2020): learners that did more steps do not pull more.

Under semi-synchronous training a fast learner does tens of times as many steps as a slow one, so a plain average of
their models follows the fast ones. Here each learner's delta from the community model is divided by the length
that its steps give it (||a_k||_1 of the paper), and all deltas are made as long as the average one:

    w_c += sum_k p_k f_k (w_k - w_c)   with   f_k = sum_j p_j ||a_j|| / ||a_k||, at most `largest_amplification`.

Without the bound the noise of a learner that did one step would count a thousandfold. With the default of 1 no learner
is amplified and those with many steps are held back; the mixture stays between the models that it is made of, and so
cannot diverge. If all did equally many steps, f_k = 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import accumulated_steps, add_scaled, in_parts, widened
from metis.core.events import LearnerId
from metis.core.layers.base import Layer
from metis.core.mixing import FullPass, Mixing, ModelStore
from metis.core.model import Model
from metis.errors import ArgumentError
from metis.registry import Setting

if TYPE_CHECKING:
    from metis.core.solvers import SolverFacts


@dataclass(frozen=True)
class FedNova(
    Layer,
    key="nova",
    order=10,
    needs={
        "average": "mixes rounds by a normalised average, and {policy} does not average rounds; sync_fedavg and "
        "semisync_fedavg do",
    },
    takes={"average", "cohort", "linear"},
):
    """Normalised averaging: a learner that did more steps does not pull more; beyond the paper."""

    largest_amplification: Annotated[
        float, Setting("largest factor by which the delta of a learner with few steps is lengthened", ge=1)
    ] = 1.0
    momentum: Annotated[
        float | None, Setting("of a solver whose momentum restarts in each task", ge=0, lt=1, in_files=False)
    ] = None
    pull: Annotated[float | None, Setting("learning rate times proximal term", ge=0, lt=1, in_files=False)] = None

    def relabel(self, label: str) -> str:
        return f"{label} FedNova"

    def for_solver(self, facts: SolverFacts) -> Layer:
        if facts.adaptive:
            raise ArgumentError(
                f"nova divides by the length of a sum of gradients, which the steps of {facts.adaptive} are not; "
                "use vanilla, momentum, fedprox or scaffold",
                "nova",
            )
        return replace(
            self,
            momentum=facts.momentum if self.momentum is None else self.momentum,
            pull=facts.pull if self.pull is None else self.pull,
        )

    def set_mixing(self, mixing: Mixing) -> Mixing:
        return partial(NormalizedAverage, settings=self)

    def factors(self, values: Mapping[LearnerId, float], steps: Mapping[LearnerId, int]) -> dict[LearnerId, float]:
        """f_k of each learner."""
        total = math.fsum(values.values())
        lengths = {k: accumulated_steps(steps[k], self.momentum or 0.0, self.pull or 0.0) for k in values}
        average = math.fsum(values[k] / total * lengths[k] for k in sorted(values))
        return {k: min(self.largest_amplification, average / lengths[k]) for k in values}


class NormalizedAverage(FullPass):
    """The models committed since the last publication, each delta scaled by f_k; buffers are averaged as they are."""

    def __init__(self, initial_model: Model, store: ModelStore, settings: FedNova | None = None) -> None:
        super().__init__(initial_model, store)
        self._settings = FedNova() if settings is None else settings
        self._steps: dict[LearnerId, int] = {}

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        super().commit(learner, local_model, value, steps, base, examples)
        self._steps[learner] = steps

    def publish(self, seconds: float = 0.0) -> bool:
        if not self._values:
            return False
        weights = self.weights(self._values)
        total = math.fsum(weights.values())
        shares = {k: weights[k] / total for k in sorted(weights)}
        factors = self._settings.factors(weights, self._steps)
        vector = self._mixture({k: share * factors[k] for k, share in shares.items()})
        layout = self.model.layout
        for spec in layout.tensors:
            if spec.role == "buffer":
                part = layout.slices[spec.name]
                vector[part] = sum(share * self._store.get(k)[part].astype(np.float64) for k, share in shares.items())
        self._values.clear()
        self._steps.clear()
        self._stamp_new(vector)
        return True

    def _mixture(self, weights: Mapping[LearnerId, float]) -> NDArray[np.float64]:
        """The current model with what the weights leave to it, plus the weighted local ones, in learner order."""
        result, left = widened(self.model.vector), 1 - math.fsum(weights.values())
        in_parts(lambda part: np.multiply(part, left, out=part), result)
        add_scaled(result, [(self._store.get(learner), weight) for learner, weight in weights.items()])
        return result
