"""Numbers that change in the course of a run: by rounds, by committed steps or by seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from metis.errors import ConfigError

Unit = Literal["rounds", "steps", "seconds"]
Shape = Literal["step", "linear", "cosine", "exponential"]


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a run is."""

    rounds: int = 0  # community models published
    steps: int = 0  # local steps in them
    seconds: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """From `start` to `end` over `length` rounds, steps or seconds; afterwards it stays at the end."""

    start: float
    end: float
    length: float
    over: Unit = "rounds"
    shape: Shape = "cosine"
    jumps: int = 1  # of a step schedule: in equal factors, at equal distances

    def __post_init__(self) -> None:
        for name in ("start", "end", "length"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number greater than 0, not {getattr(self, name)}")
        if self.over not in get_args(Unit):
            raise ValueError(f"over must be one of {', '.join(get_args(Unit))}, not '{self.over}'")
        if self.shape not in get_args(Shape):
            raise ValueError(f"shape must be one of {', '.join(get_args(Shape))}, not '{self.shape}'")
        if self.jumps < 1:
            raise ValueError(f"jumps must be 1 or more, not {self.jumps}")

    def __call__(self, moment: Moment) -> float:
        passed: float = min(1.0, getattr(moment, self.over) / self.length)
        match self.shape:
            case "linear":
                return self.start + (self.end - self.start) * passed
            case "cosine":
                return self.end + (self.start - self.end) * (1 + math.cos(math.pi * passed)) / 2
            case "exponential":
                return self.start * math.pow(self.end / self.start, passed)
            case "step":
                # 15 / 22 * 22 is a hair under 15; floor alone would make the jump a round late.
                made = math.floor(passed * self.jumps * (1 + 1e-9))
                return self.start * math.pow(self.end / self.start, made / self.jumps)


Changing: TypeAlias = Callable[[Moment], float]  # a Schedule, or any function of the moment


def factor_of(schedule: Changing, what: str, moment: Moment) -> float:
    """What a schedule says now; a function of a user may say what cannot be."""
    value = schedule(moment)
    if not 0 < value < math.inf:
        raise ConfigError(
            f"the schedule of {what} gives {value} after {moment.rounds} rounds; it must be a number greater than 0"
        )
    return value
