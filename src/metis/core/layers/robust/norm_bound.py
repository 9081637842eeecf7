"""Norm bounds (Sun et al. 2019), against the running median of how far models usually go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from metis.core.layers.robust.centred_clipping import clipped
from metis.core.layers.robust.rule import Combination, Numbers, weighted_median
from metis.registry import Setting


@dataclass(frozen=True)
class NormBound(Combination, key="robust", order=12, choice="norm_bound"):
    """The weighted average, each delta shortened to a multiple of the median length over the latest rounds."""

    multiple: Annotated[float, Setting("longest delta, in median lengths", gt=0)] = 1.0
    rounds: Annotated[int, Setting("rounds whose median lengths are remembered", ge=1, le=1000)] = 10

    title = "norm bound"

    def factors(self, products: Numbers, weights: Numbers, history: list[float]) -> Numbers:
        lengths = np.sqrt(products.diagonal())
        history.append(float(weighted_median(lengths[:, np.newaxis], weights)[0]))
        del history[: -self.rounds]
        return np.asarray(weights / weights.sum() * clipped(lengths, self.multiple * float(np.median(history))))
