"""In which order the runs of scale `decisive` are made: first those that decide most.

The whole takes longer than a day on two cores. Every policy is first run for a while and with one seed, so that the
first hours show who is ahead everywhere; later ones show by how much, and with which spread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from metis.errors import DataError
from metis.reproduction.curves import curve_file, read_curve
from metis.reproduction.environments import Cell, Environment
from metis.reproduction.schedule import planned_steps
from metis.reproduction.tables import ASYNC, SYNC, protocol_of, solver_of


@dataclass(frozen=True)
class Entry:
    """A cell, to be run until some virtual second or to its end."""

    cell: Cell
    until: float | None

    def done(self, results: Path) -> bool:
        """Whether the kept curve goes as far."""
        curve = read_curve(curve_file(results, self.cell))
        return curve is not None and curve.covers(self.cell, self.until)


def queue(environments: Iterable[Environment], results: Sequence[str], *, before_targets: bool = False) -> list[Entry]:
    """Everything that these results of the paper need, the most decisive first.

    With `before_targets` also what has to wait for a target: to say how long it will take.
    """
    ranked: list[tuple[tuple[float, ...], Entry]] = []
    for position, environment in enumerate(environments):
        for seed, seeded in enumerate(environment.seeded()):
            for cell in seeded.needed_for(results):
                if not _wanted(cell, before_targets):
                    continue
                for stage, until in enumerate(_stages(cell)):
                    ranked.append((_rank(cell, seed, stage, position), Entry(cell, until)))
    ranked.sort(key=lambda pair: pair[0])
    return [entry for _, entry in ranked]


def _wanted(cell: Cell, before_targets: bool) -> bool:
    """Whether a cell is in the queue: no policy but Sync before there is a target to judge it by."""
    plan = cell.environment.plan
    return before_targets or plan is None or plan.target_fixed or protocol_of(cell) == SYNC


def _headline(cell: Cell) -> bool:
    """Whether the paper's main comparison has it."""
    return protocol_of(cell) == ASYNC or solver_of(cell) == "momentum"


def _stages(cell: Cell) -> list[float | None]:
    """Until which second it is run first, and then; None is to the end."""
    plan = cell.environment.plan
    if plan is None or cell.role != "policy":
        return [None]
    if protocol_of(cell) == SYNC:
        return [None] if plan.sync_seconds is None else [plan.sync_seconds, None]
    return [*plan.stages, None]


def _rank(cell: Cell, seed: int, stage: int, position: int) -> tuple[float, ...]:
    """Lower comes first: by what a run can decide, then the environment.

    One seed everywhere before more seeds, and every policy for a while before any for longer. Sync comes before the
    others of its environment: it sets the target.
    """
    paper = cell.environment.paper
    sync = protocol_of(cell) == SYNC
    if paper.domain == "BrainAge":
        return -1, seed, position, 0 if sync else 1  # minutes
    # Where Sync with momentum fails, Sync with vanilla SGD sets the target.
    reference = sync and solver_of(cell) == "vanilla" and "Power Law" in paper.distribution
    headline = paper.domain != "CIFAR-10" or _headline(cell) or reference
    block = (0 if headline else 1) + (0 if paper.cluster == "heterogeneous" else 2)
    block += 4 if seed else 0
    # A Sync that sets no target waits for SemiSync, which says how far it has to be run to be the slower one.
    return block + (0 if sync else 8 * stage), stage, 1 if sync and not headline else 0, position, 0 if sync else 1


def hours_left(entries: Sequence[Entry], results: Path, *, as_published: bool = False) -> float:
    """Of one core, at most: a run may reach its target sooner.

    With `as_published` those of the paper's tables reach it after as many iterations as there.
    """
    seconds = 0.0
    for cell in {entry.cell.name: entry.cell for entry in entries}.values():
        curve = read_curve(curve_file(results, cell))
        if cell.environment.plan is not None and (curve is None or not curve.covers(cell)):
            done = 0 if curve is None else curve.steps
            try:
                planned = planned_steps(cell)
            except DataError:  # who holds how much comes with the data, which is not here
                continue
            if as_published and cell.published is not None and cell.published.iterations is not None:
                planned = min(planned, cell.published.iterations)
            seconds += max(0, planned - done) * cell.environment.plan.step_seconds
    return seconds / 3600
