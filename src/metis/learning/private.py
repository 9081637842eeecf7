"""One step of DP-SGD as a learner asks an engine for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from metis.privacy.chance import Chance


@dataclass(frozen=True)
class PrivateStep:
    """The records that a step drew, in parts that fit into memory; perhaps none: then it is all noise."""

    parts: Iterator[Any]  # batches
    clip: float  # largest norm of a record's gradient
    noise: float  # standard deviation of the noise over the clip of a unit
    unit_clip: float  # the most that a unit, such as a patient, adds to the sum: that of all its records
    expected: float  # records that a step draws on average, by which the sum is divided
    chance: Chance


def draw(units: NDArray[np.int64], count: int, rate: float, chance: Chance) -> NDArray[np.int64]:
    """Poisson sampling: which records a step has, if each of `count` units is drawn with this probability."""
    drawn = chance.uniform(count) < rate
    return np.flatnonzero(drawn[units])
