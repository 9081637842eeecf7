"""The model case in numbers: who is how fast, how bad the lines are, and how times are divided."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SCALE = 1440  # seconds of the consortium in one of this machine: three hours are 7.5 s
HOUR = 3600 / SCALE
GROUPS = (  # as in federation.toml
    ("large",),
    ("small-1", "small-2", "small-3", "small-4"),
    ("small-5", "small-6", "small-7"),
)
PACES = {  # seconds a batch
    name: pace for names, pace in zip(GROUPS, (0.0375, 0.0625, 0.125), strict=True) for name in names
}
BATCH, TARGET = 4, 0.85  # examples, accuracy; as in federation.toml
POLICIES = {"sync_fedavg": "Sync", "semisync_fedavg": "SemiSync, λ = 0.3", "semisync": "SemiSync without λ"}
SHORTER = {"semisync": 2}  # its rounds are several times shorter: it gets so many times as many


@dataclass(frozen=True)
class Faults:
    """How bad the lines are; seconds."""

    between: float  # mean time from one cut of a line to the next
    cut: float  # how long a line is dead
    reset: float  # all connections are reset as often as this

    def cuts(self, seed: int, site: str) -> Iterator[tuple[float, bool]]:
        """Of one line: seconds until it is cut after it was last well, and whether nobody is told."""
        draw = random.Random(f"{seed}/{site}")
        while True:
            yield draw.expovariate(1 / self.between), draw.random() < 0.5

    def first_reset(self, seed: int) -> float:
        return random.Random(f"{seed}").uniform(0, self.reset)


FAULTS = Faults(between=6 * HOUR, cut=0.1 * HOUR, reset=24 * HOUR)


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
