"""Centred clipping (Karimireddy et al. 2021): a mean of deltas, each cut to a radius around a centre that moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from metis.core.layers.robust.geometric_median import distances
from metis.core.layers.robust.rule import Combination, Numbers, weighted_median
from metis.registry import Setting


@dataclass(frozen=True)
class CentredClipping(Combination, key="robust", order=12, choice="centred_clipping"):
    """v += sum of p_k (w_k - v) min(1, radius / ||w_k - v||), starting at the community model, a few times."""

    radius: Annotated[
        float | None, Setting("of what a model may add to a step; the median distance if not given", gt=0)
    ] = None
    iterations: Annotated[int, Setting("steps of the centre", ge=1, le=10_000)] = 5

    title = "centred clipping"

    def factors(self, products: Numbers, weights: Numbers, history: list[float]) -> Numbers:
        factors = np.zeros(len(weights))
        for _ in range(self.iterations):
            apart = distances(products, factors)
            usual = weighted_median(apart[:, np.newaxis], weights)[0]
            pull = weights / weights.sum() * clipped(apart, float(usual) if self.radius is None else self.radius)
            factors = factors * (1 - pull.sum()) + pull
        return factors


def clipped(lengths: Numbers, most: float) -> Numbers:
    """The factors that make these lengths at most `most`."""
    return np.asarray(most / np.maximum(lengths, most)) if most > 0 else np.asarray(lengths == 0, np.float64)
