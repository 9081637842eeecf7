"""The coordinate-wise trimmed mean (Yin et al. 2018), by contribution values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from metis.core.layers.robust.rule import Elementwise, Numbers, ranked_by_weight
from metis.registry import Setting

_ROUNDING = 1e-9  # of the weight: what rounding leaves of a value that is cut off must not count, however large it is


@dataclass(frozen=True)
class TrimmedMean(Elementwise, key="robust", order=12, choice="trimmed_mean"):
    """Each number is the mean of what is left after a share of the weight is cut off at the top and at the bottom."""

    trim: Annotated[float, Setting("share of the weight that is cut off at each end", ge=0, lt=0.5)] = 0.2

    title = "trimmed mean"

    def combine(self, values: NDArray[np.float32], weights: Numbers) -> Numbers:
        ranked, upto = ranked_by_weight(values, weights)
        total = upto[-1]
        inside = np.clip(upto, self.trim * total, (1 - self.trim) * total)
        kept = np.diff(inside, axis=0, prepend=(self.trim * total)[np.newaxis])
        kept[kept < _ROUNDING * total] = 0
        return np.asarray((kept * ranked).sum(axis=0) / kept.sum(axis=0))
