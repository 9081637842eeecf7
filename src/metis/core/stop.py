"""When a federation ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from metis.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Target:
    """A metric worth reaching.

    - `metric`: its name.
    - `value`: what is to be reached.
    - `higher_is_better`: whether a larger value is a better one.
    """

    metric: str
    value: float
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        if not hasattr(self.value, "__float__") or math.isnan(self.value):
            raise ArgumentError(f"target is {self.value!r}; it must be a number", "target")

    def reached_by(self, metrics: dict[str, float]) -> bool:
        measured = metrics.get(self.metric, math.nan)
        return measured >= self.value if self.higher_is_better else measured <= self.value


@dataclass(frozen=True, slots=True)
class Patience:
    """How many newer community models may be measured without one that is better by this metric."""

    metric: str
    evaluations: int
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        if type(self.evaluations) is not int or self.evaluations < 1:
            raise ArgumentError(f"patience is {self.evaluations}; it must be a whole number, 1 or more", "patience")


@dataclass(slots=True)
class Stagnation:
    """Since when a metric has not improved: a fold over evaluations."""

    best: float = math.nan
    evaluations: int = 0  # since the best one
    version: int = 0  # the newest that was counted; the initial model is not

    def note(self, version: int, metrics: dict[str, float], patience: Patience) -> bool:
        """Take an evaluation; whether patience has run out. An older model, or another metric, changes nothing."""
        if version <= self.version or patience.metric not in metrics:
            return False
        self.version, value = version, metrics[patience.metric]
        better = value > self.best if patience.higher_is_better else value < self.best
        if better or (math.isnan(self.best) and not math.isnan(value)):
            self.best, self.evaluations = value, 0
        else:
            self.evaluations += 1
        return self.evaluations >= patience.evaluations


@dataclass(frozen=True, slots=True)
class StopRule:
    """The federation ends at whichever comes first, between two rounds unless time is up; None for never.

    - `rounds`: published community models.
    - `seconds`: time of the run, virtual in a simulation.
    - `update_requests`: of all learners together.
    - `target`: the metric to stop at.
    - `steps`: committed local steps of all learners: a budget of computing.
    - `patience`: early stopping.
    """

    rounds: int | None = None
    seconds: float | None = None
    update_requests: int | None = None
    target: Target | None = None
    steps: int | None = None
    patience: Patience | None = None

    def __post_init__(self) -> None:
        for name in ("rounds", "seconds", "update_requests", "steps"):
            limit = getattr(self, name)
            if limit is not None and not hasattr(limit, "__float__"):
                raise ArgumentError(f"{name} is {limit!r}; it must be a number", name)
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
