"""The coordinate-wise median (Yin et al. 2018), by contribution values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from metis.core.layers.robust.rule import Elementwise, Numbers, weighted_median


@dataclass(frozen=True)
class Median(Elementwise, key="robust", order=12, choice="median"):
    """Each number is the weighted median of that number of all models; below half of the weight nobody decides."""

    title = "median"

    def combine(self, values: NDArray[np.float32], weights: Numbers) -> Numbers:
        return weighted_median(values, weights)
