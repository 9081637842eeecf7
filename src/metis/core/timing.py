"""How time becomes steps, and measured batches become a time per batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# t_max / t_beta is a hair under a whole number for the slowest learner itself (68.4 / 0.3);
# floor alone would cost it a batch every round (R1).
TOLERANCE = 1e-9
# Less than the tick of any clock that times batches, so no honest learner reports it. Periods, which are made from the
# times that learners report, keep every digit: far below this, floats lose them.
SHORTEST_BATCH = 1e-9
# The quotient of a period and a time per batch must stay a number that can be counted.
MAX_STEPS = 2**53


def steps_within(seconds: float, time_per_batch: float) -> int:
    """B_k: whole batches that fit in `seconds`, at least one (Eq. 5, R1)."""
    return max(1, math.floor(min(seconds / time_per_batch * (1 + TOLERANCE), MAX_STEPS)))


def steps_of_epochs(epochs: float, epoch_steps: int) -> int:
    """Batches in a possibly fractional number of epochs, at least one."""
    return max(1, math.floor(epochs * epoch_steps * (1 + TOLERANCE)))


_ODD = 2.0  # a time per batch beyond this factor is odd
_FRESH = 0.5  # weight of a fresh measurement, in the logarithm


@dataclass(slots=True)
class TypicalTime:
    """A learner's time per batch over its tasks: averaged, without single odd ones, quick to follow a real change.

    A measurement within a factor of 2 is averaged in. One beyond it is ignored, until a second one in a row is odd in
    the same direction: then the learner has changed, and the fresh measurement counts alone.
    """

    value: float | None = None
    odd: int = 0  # 1 after an oddly slow task, -1 after an oddly fast one

    def note(self, measured: float) -> float | None:
        """Add a measurement; returns the earlier time per batch if it proves that the learner has changed."""
        before = self.value
        if before is None:
            self.value = measured
        elif 1 / _ODD <= measured / before <= _ODD:
            self.value, self.odd = before * (measured / before) ** _FRESH, 0
        elif self.odd == (side := 1 if measured > before else -1):
            self.value, self.odd = measured, 0
            return before
        else:
            self.odd = side
        return None


def robust_time_per_batch(batch_times: Sequence[float]) -> float:
    """t_beta of one task: the mean without the warm-up batch and without stalls beyond thrice the median."""
    times = np.asarray(batch_times[1:] if len(batch_times) > 1 else batch_times, dtype=np.float64)
    kept = times[times <= 3 * np.median(times)]
    return float(kept.mean())
