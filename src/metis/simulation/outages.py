"""Faults of a simulated line, disk or controller: what takes time takes longer while something is out."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from metis.errors import ConfigError
from metis.simulation.availability import Always, Availability

_ATTEMPTS = 10_000


@dataclass(frozen=True)
class ControllerFaults:
    """What a rehearsal expects of the controller's machine: a slow disk, one that stalls, and restarts.

    - `write_seconds`: of the disk for each update; updates wait for each other.
    - `stalls`: when nothing can be written.
    - `restarts`: when it is down; transfers are cut, learners train on.
    """

    write_seconds: float = 0.0
    stalls: Availability = field(default_factory=Always)
    restarts: Availability = field(default_factory=Always)

    def __post_init__(self) -> None:
        if not 0 <= self.write_seconds < math.inf:
            raise ValueError(f"write_seconds must be 0 or more, not {self.write_seconds}")


class Done(NamedTuple):
    """When something has ended, how often it was cut, and how many of its seconds had to be repeated."""

    at: float
    cuts: int = 0
    repeated: float = 0.0


class Outages:
    """The spans in which something is out, from one or several sources, remembered as far as they were needed."""

    def __init__(self, *sources: Iterator[tuple[float, float]]) -> None:
        # Most things never fail: what has no first outage need not be asked for the next with every transfer.
        self._sources: list[tuple[Iterator[tuple[float, float]], list[tuple[float, float]]]] = [
            (source, [first]) for source in sources if (first := next(source, None)) is not None
        ]

    def finish(self, start: float, seconds: float, resumed: bool = True) -> Done:
        """What takes so long and begins now; after an outage it goes on, or begins again if it is not `resumed`."""
        if not self._sources:
            return Done(start + seconds if seconds else start)  # a time keeps its type, as in traces
        now, left, cuts, repeated = start, seconds, 0, 0.0
        for _ in range(_ATTEMPTS):
            begins, ends = self._next(now)
            if now < begins and now + left <= begins:
                return Done(now + left if left else now, cuts, repeated)
            if now < begins:
                cuts += 1
                if resumed:
                    left -= begins - now
                else:
                    repeated, left = repeated + (begins - now), seconds
            now = ends
            if now == math.inf:
                return Done(math.inf, cuts, repeated)
        raise ConfigError(
            f"a transfer of {seconds:.6g} s was cut {cuts:,} times and did not get through; "
            "let transfers resume, or cut the line less often"
        )

    def _next(self, now: float) -> tuple[float, float]:
        """The outage at this moment, or the next one."""
        return min(self._next_of(source, known, now) for source, known in self._sources)

    @staticmethod
    def _next_of(
        source: Iterator[tuple[float, float]], known: list[tuple[float, float]], now: float
    ) -> tuple[float, float]:
        while known[-1][1] <= now:
            span = next(source, None)
            if span is None:
                return math.inf, math.inf
            known.append(span)
        # A task that was given up may be followed by one that begins before the first would have ended.
        return known[bisect.bisect_right(known, now, key=lambda span: span[1])]
