"""Numbers that change over the course of a run: by rounds, by committed steps or by seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from metis.errors import ConfigError
from metis.registry import Setting, check_settings

Unit = Literal["rounds", "steps", "seconds"]
Shape = Literal["step", "linear", "cosine", "exponential"]


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a run is.

    - `rounds`: community models published.
    - `steps`: local steps in them.
    - `seconds`: since the run began.
    - `begun`: rounds begun, with the one that begins now.
    """

    rounds: int = 0
    steps: int = 0
    seconds: float = 0.0
    begun: int = 0


class Cadence:
    """How often something is done: at every multiple of `every` seconds; each time for 0."""

    def __init__(self, every: float) -> None:
        self._every, self._next = every, 0.0

    def due(self, now: float) -> bool:
        """Whether it is time again; asked whenever it could be done."""
        if now < self._next:
            return False
        self._next = (math.floor(now / self._every) + 1) * self._every if self._every else 0.0
        return True


@dataclass(frozen=True)
class Schedule:
    """From `start` to `end` over `length` rounds, steps or seconds; afterwards it stays at the end."""

    start: Annotated[float, Setting("value at the beginning", gt=0)]
    end: Annotated[float, Setting("value once the length is over", gt=0)]
    length: Annotated[float, Setting("from the start to the end, in the unit that `over` names", gt=0)]
    over: Annotated[Unit, Setting("published community models, local steps of all learners, or seconds of the run")] = (
        "rounds"
    )
    shape: Annotated[Shape, Setting("how it gets there; step: in jumps of equal factors")] = "cosine"
    jumps: Annotated[int, Setting("number of jumps of a step schedule, equally spaced; the last at the end", ge=1)] = 1

    def __post_init__(self) -> None:
        check_settings(self, "a schedule")

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
                done = math.floor(passed * self.jumps * (1 + 1e-9))
                return self.start * math.pow(self.end / self.start, done / self.jumps)


Changing: TypeAlias = Callable[[Moment], float]  # a Schedule, or any function of the moment


def factor_of(schedule: Changing, what: str, moment: Moment) -> float:
    """The value of a schedule now; a user's function may return anything, so it is checked."""
    value = schedule(moment)
    if not 0 < value < math.inf:
        raise ConfigError(
            f"the schedule of {what} gives {value} after {moment.rounds} rounds; it must be a number greater than 0"
        )
    return value
