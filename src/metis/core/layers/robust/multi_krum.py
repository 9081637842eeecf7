"""Multi-Krum (Blanchard et al. 2017): the models that are closest to their neighbours are averaged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from metis.core.layers.robust.rule import Combination, Numbers
from metis.registry import Setting


@dataclass(frozen=True)
class MultiKrum(Combination, key="robust", order=12, choice="multi_krum"):
    """The weighted average of the n - f models with the smallest sums of squared distances to n - f - 2 others.

    Of n models f are presumed poisoned. The published guarantee needs n >= 2 f + 3; with fewer, as after drop-outs, the
    rule goes on with at least one neighbour and one model.
    """

    attackers: Annotated[
        float, Setting("share of the learners that may be poisoned; f is rounded up", ge=0, lt=0.5)
    ] = 0.2

    title = "Multi-Krum"

    def factors(self, products: Numbers, weights: Numbers, history: list[float]) -> Numbers:
        count = len(weights)
        poisoned = math.ceil(self.attackers * count - 1e-9)
        squares = products.diagonal()
        apart = np.maximum(squares[:, np.newaxis] + squares - 2 * products, 0)
        nearest = np.sort(apart, axis=1)[:, 1 : 1 + max(1, count - poisoned - 2)]  # the first is the model itself
        chosen = np.argsort(nearest.sum(axis=1), kind="stable")[: max(1, count - poisoned)]
        factors = np.zeros(count)
        factors[chosen] = weights[chosen] / weights[chosen].sum()
        return factors
