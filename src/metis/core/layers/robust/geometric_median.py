"""The geometric median by smoothed Weiszfeld steps (RFA, Pillutla et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from metis.core.layers.robust.rule import Combination, Numbers, weighted_median
from metis.registry import Setting

_TINY = 1e-200  # instead of a division by zero where all models are equal


@dataclass(frozen=True)
class GeometricMedian(Combination, key="robust", order=12, choice="geometric_median"):
    """The model with the least sum of weighted distances to all; below half of the weight nobody carries it away."""

    iterations: Annotated[int, Setting("steps of the search, from the community model on", ge=1, le=10_000)] = 64
    smoothing: Annotated[
        float, Setting("distance, of the median delta, below which a model does not attract more strongly", gt=0)
    ] = 1e-6

    title = "geometric median"

    def factors(self, products: Numbers, weights: Numbers, history: list[float]) -> Numbers:
        lengths = np.sqrt(products.diagonal())
        least = self.smoothing * float(weighted_median(lengths[:, np.newaxis], weights)[0])
        factors = np.zeros(len(weights))
        for _ in range(self.iterations):
            attraction = weights / np.maximum(distances(products, factors), max(least, _TINY))
            factors = attraction / attraction.sum()
        return factors


def distances(products: Numbers, factors: Numbers) -> Numbers:
    """How far each delta is from the sum of all with these factors."""
    # Not by a matrix product, whose bits depend on the processor.
    along = (products * factors).sum(axis=1)
    return np.asarray(np.sqrt(np.maximum(products.diagonal() - 2 * along + (factors * along).sum(), 0)))
