"""A learner that is slower than its machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Pace:
    """Makes a batch last as long as on a slower machine; ends at once when the budget does."""

    def __init__(self, seconds_per_batch: float, ends: float, unwanted: Callable[[float], bool]) -> None:
        self._seconds, self._ends, self._unwanted = seconds_per_batch, ends, unwanted
        self._batch_began = math.nan
        self.cut_short = False  # whether the last batch ended with the budget, not with the pace

    def wait(self, steps: int) -> bool:
        """At a batch boundary: wait for the rest of the batch; whether the task is unwanted."""
        rest = 0.0
        if self._seconds and steps:
            due = self._batch_began + self._seconds
            self.cut_short = self._ends < due
            rest = min(due, self._ends) - time.monotonic()
        unwanted = self._unwanted(rest)
        self._batch_began = time.monotonic()
        return unwanted
