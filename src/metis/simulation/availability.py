"""When a simulated learner is there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Availability(Protocol):
    """When a learner is away."""

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
    """Drops out and comes back after exponentially distributed times."""

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
class RecordedAvailability:
    """Away in the given spans, from a file or by hand."""

    away: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        edges = [edge for span in self.away for edge in span]
        if edges != sorted(edges) or not all(0 <= leaves < back for leaves, back in self.away):
            raise ValueError(
                "absences are spans (leaves, is back) from second 0 on, in order of time, that do not overlap"
            )

    def absences(self, rng: np.random.Generator) -> Iterator[tuple[float, float]]:
        return iter(self.away)
