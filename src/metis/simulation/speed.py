"""How fast a simulated learner is."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import numpy as np

from metis.core.events import Budget
from metis.core.timing import TOLERANCE, robust_time_per_batch


@dataclass(frozen=True, slots=True)
class Spent:
    """What a learner did with a budget."""

    steps: int
    seconds: float
    time_per_batch: float  # as the learner would measure it


@dataclass(frozen=True)
class Speed:
    """Seconds per batch: constant, with jitter from batch to batch, and with changes over time.

    - `time_per_batch`: seconds of virtual time.
    - `jitter`: standard deviation of the logarithm; the mean stays `time_per_batch`.
    - `profile`: pairs of a second and a factor: from then on batches take this many times as long.
    """

    time_per_batch: float
    jitter: float = 0.0
    profile: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.time_per_batch < math.inf:
            raise ValueError(f"time_per_batch must be greater than 0 seconds, not {self.time_per_batch}")
        if not 0 <= self.jitter <= 2:  # at 2 one batch in twenty takes fifty times as long as another
            raise ValueError(f"jitter must be from 0 to 2, not {self.jitter}")
        if list(self.profile) != sorted(self.profile, key=lambda change: change[0]):
            raise ValueError("the changes of a speed must be in order of time")
        if not all(math.isfinite(at) and 0 < factor < math.inf for at, factor in self.profile):
            raise ValueError("each change of a speed is (second, factor) with a finite factor greater than 0")

    def spend(self, budget: Budget, start: float, rng: np.random.Generator | None) -> Spent:
        """Train until the budget ends: finish a batch that has begun, do at least one (R3); `rng` is for the jitter."""
        if not self.jitter and not self.profile:
            fitting = (
                math.ceil(budget.seconds / self.time_per_batch * (1 - TOLERANCE))
                if (budget.seconds < math.inf)
                else math.inf
            )
            steps = int(max(1, min(fitting, math.inf if budget.steps is None else budget.steps)))
            return Spent(steps, steps * self.time_per_batch, self.time_per_batch)
        times: list[float] = []
        elapsed = 0.0
        while not times or (elapsed < budget.seconds * (1 - TOLERANCE) and len(times) != budget.steps):
            noise = 1.0
            if self.jitter:
                assert rng is not None
                noise = math.exp(rng.normal(-(self.jitter**2) / 2, self.jitter))
            times.append(self.time_per_batch * self._factor(start + elapsed) * noise)
            elapsed += times[-1]
        return Spent(len(times), elapsed, robust_time_per_batch(times))

    def _factor(self, now: float) -> float:
        past = bisect.bisect_right(self.profile, now, key=lambda change: change[0])
        return self.profile[past - 1][1] if past else 1.0
