"""When a simulated learner is there, a line works, a disk answers, a controller runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Availability(Protocol):
    """When a learner is away, or whatever else may fail for a time."""

    def absences(self, rng: np.random.Generator) -> Iterator[tuple[float, float]]:
        """Spans (leaves, is back) in order of time; the last may end at infinity."""
        ...


@dataclass(frozen=True, slots=True)
class Always:
    """Never away."""

    def absences(self, rng: np.random.Generator) -> Iterator[tuple[float, float]]:
        return iter(())


@dataclass(frozen=True, slots=True)
class RandomAvailability:
    """Drops out and comes back after exponentially distributed times.

    - `mean_present`, `mean_away`: seconds.
    """

    mean_present: float
    mean_away: float

    def __post_init__(self) -> None:
        for name in ("mean_present", "mean_away"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be greater than 0 seconds, not {getattr(self, name)}")

    def absences(self, rng: np.random.Generator) -> Iterator[tuple[float, float]]:
        now = 0.0
        while True:
            leaves = now + rng.exponential(self.mean_present)
            now = leaves + rng.exponential(self.mean_away)
            yield leaves, now


@dataclass(frozen=True, slots=True)
class DailyAvailability:
    """There from one hour of every day to another, over midnight if the second is the smaller; a run begins at 0:00.

    - `opens`, `closes`: hours, from 0 to 24.
    - `day`: seconds of a day.
    """

    opens: float
    closes: float
    day: float = 86_400.0

    def __post_init__(self) -> None:
        for name in ("opens", "closes"):
            if not 0 <= getattr(self, name) <= 24:
                raise ValueError(f"{name} must be an hour from 0 to 24, not {getattr(self, name)}")
        if self.opens % 24 == self.closes % 24:
            raise ValueError(f"opens and closes are both {self.opens:g}: give two different hours")
        if not 0 < self.day < math.inf:
            raise ValueError(f"day must be greater than 0 seconds, not {self.day}")

    def absences(self, rng: np.random.Generator) -> Iterator[tuple[float, float]]:
        leaves, back = (hour % 24 / 24 * self.day for hour in (self.closes, self.opens))
        if back < leaves:  # open until the evening: away over midnight
            if back > 0:
                yield 0.0, back
            back += self.day
        for number in itertools.count():
            yield number * self.day + leaves, number * self.day + back


@dataclass(frozen=True, slots=True)
class RecordedAvailability:
    """Away in the given spans, from a file or by hand.

    - `away`: pairs of seconds, (leaves, is back), in order of time.
    """

    away: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        edges = [edge for span in self.away for edge in span]
        if edges != sorted(edges) or not all(0 <= leaves < back for leaves, back in self.away):
            raise ValueError(
                "absences are spans (leaves, is back) from second 0 on, in order of time, that do not overlap"
            )

    def absences(self, rng: np.random.Generator) -> Iterator[tuple[float, float]]:
        return iter(self.away)
