"""When a federation ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from metis.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Target:
    """A metric worth reaching."""

    metric: str
    value: float
    higher_is_better: bool = True

    def reached_by(self, metrics: dict[str, float]) -> bool:
        measured = metrics.get(self.metric, math.nan)
        return measured >= self.value if self.higher_is_better else measured <= self.value


@dataclass(frozen=True, slots=True)
class StopRule:
    """The federation ends at whichever comes first, between two rounds unless time is up; None for never."""

    rounds: int | None = None  # published community models
    seconds: float | None = None
    update_requests: int | None = None
    target: Target | None = None
    steps: int | None = None  # committed local steps of all learners: a budget of computing

    def __post_init__(self) -> None:
        for name in ("rounds", "seconds", "update_requests", "steps"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ArgumentError(f"{name} is {limit}; it must be greater than 0", name)
            if name != "seconds" and not isinstance(limit, (int, type(None))):
                raise ArgumentError(f"{name} is {limit}; it must be a whole number", name)

    def out_of_time(self, now: float) -> bool:
        return self.seconds is not None and now >= self.seconds

    def spent(self, rounds: int, update_requests: int, steps: int) -> str | None:
        """Which limit is used up, in words; None while there is something left."""
        if self.rounds is not None and rounds >= self.rounds:
            return f"{rounds} rounds are done"
        if self.update_requests is not None and update_requests >= self.update_requests:
            return f"{update_requests} update requests were made"
        if self.steps is not None and steps >= self.steps:
            return f"{steps} steps were made"
        return None
