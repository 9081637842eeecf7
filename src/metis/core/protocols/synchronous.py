"""Synchronous: a fixed number of local epochs, then everybody waits for the slowest (Sec. 4.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from metis.core.events import Budget, LearnerId
from metis.core.protocols.protocol import Barrier
from metis.core.roster import Roster
from metis.core.sampling import Sample
from metis.core.timing import steps_of_epochs


@dataclass
class Synchronous:
    """Everybody trains the same number of local epochs; who is done idles until all are."""

    local_epochs: float = 4.0
    round_limit: float = math.inf  # seconds of training after which a learner hands in what it has
    grace: float = 0.1  # share of the round limit that the barrier waits longer
    sample: Sample | None = None  # who takes part in a round; None for everybody
    accepts_stale = False
    has_rounds = True
    fills_the_period = False
    _rounds: int = field(default=0, init=False, repr=False)
    _barrier: Barrier = field(default_factory=Barrier, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.local_epochs < math.inf:
            raise ValueError(f"local_epochs must be a number greater than 0, not {self.local_epochs}")
        if not self.round_limit > 0:
            raise ValueError(f"round_limit must be greater than 0 seconds, not {self.round_limit}")
        if not 0 <= self.grace < math.inf:
            raise ValueError(f"grace must be 0 or more, not {self.grace}")

    @property
    def deadline(self) -> float:
        return self._barrier.deadline

    def next_tasks(self, roster: Roster, now: float) -> dict[LearnerId, Budget]:
        if not self._barrier.is_open(roster, now):
            return {}
        waiting = roster.waiting
        if self.sample is not None and waiting:
            self._rounds += 1
            waiting = self.sample.draw(waiting, self._rounds)
        if waiting:
            slack = max(record.overhead + (record.time_per_batch or 0.0) for record in waiting)
            self._barrier.deadline = now + self.round_limit * (1 + self.grace) + slack
        return {
            record.learner: Budget(steps_of_epochs(self.local_epochs, record.epoch_steps), self.round_limit)
            for record in waiting
        }
