"""In which order the runs of scale `decisive` are made: first those that decide most.

The whole takes far longer than a day on two cores. Every policy is first run for a while, then for longer, so that the
first hours show who is ahead everywhere; later ones show by how much, and with which spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from metis.reproduction.curves import curve_file, read_curve
from metis.reproduction.environments import Cell, Environment
from metis.reproduction.schedule import dry_run
from metis.reproduction.tables import ASYNC, SYNC, protocol_of, solver_of

STEP_SECONDS = 0.014  # of one core, for a batch of the 2-CNN of width 16 in bf16, with its share of the evaluations


@dataclass(frozen=True)
class Entry:
    """A cell, to be run until some virtual second or to its end."""

    cell: Cell
    until: float | None

    def done(self, results: Path) -> bool:
        """Whether the kept curve goes as far."""
        curve = read_curve(curve_file(results, self.cell))
        return curve is not None and curve.covers(self.cell, self.until)


def queue(environments: Iterable[Environment], results: Sequence[str]) -> list[Entry]:
    """Everything that these results of the paper need, the most decisive first."""
    ranked: list[tuple[tuple[float, ...], Entry]] = []
    for position, environment in enumerate(environments):
        for index, seeded in enumerate(environment.seeded()):
            for cell in seeded.needed_for(results):
                stages: list[float | None] = [*(environment.plan.stages if environment.plan else ()), None]
                if cell.role != "policy" or protocol_of(cell) == SYNC:
                    stages = [None]  # cheap, and the others are judged by it
                for stage, until in enumerate(stages):
                    ranked.append(((*_rank(cell, index, stage), position), Entry(cell, until)))
    ranked.sort(key=lambda pair: pair[0])
    return [entry for _, entry in ranked]


def _rank(cell: Cell, seed: int, stage: int) -> tuple[float, ...]:
    """Lower comes first; the same within a protocol, so that environments take turns."""
    headline = protocol_of(cell) == ASYNC or solver_of(cell) == "momentum"
    if cell.environment.paper.domain == "BrainAge":
        block = 1.0  # minutes
    elif cell.environment.paper.cluster == "homogeneous":
        block = 4.0 if headline else 6.0
    elif not headline and cell.environment.paper.domain == "CIFAR-10":
        block = 5.0
    else:
        block = 2.0
    if seed and block > 1:
        block += 1 if block == 2 else 5
    # Sync is cheap and sets the target, so it comes before everything else of its block.
    return block, 0 if protocol_of(cell) == SYNC else 1 + stage


def steps_left(entries: Sequence[Entry], results: Path) -> int:
    """Local steps that the queue still needs, at most: a run may reach its target sooner."""
    left = 0
    seen: set[str] = set()
    for entry in entries:
        cell = entry.cell
        if cell.name in seen or cell.role == "alone":
            continue
        seen.add(cell.name)
        curve = read_curve(curve_file(results, cell))
        if curve is None or not curve.covers(cell):
            left += max(0, dry_run(cell.config).costs.steps - (0 if curve is None else curve.steps))
    return left


def hours_left(entries: Sequence[Entry], results: Path) -> float:
    """Of one core, at most."""
    return steps_left(entries, results) * STEP_SECONDS / 3600 if entries else math.nan
