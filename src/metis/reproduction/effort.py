"""What an undecided claim still needs: which policies must be run further, or with how many seeds, and for how long.

An estimate, by what the runs so far say: that means and spreads stay as they are, and that a run that has not reached
its target does not reach it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from metis.errors import DataError
from metis.reproduction.environments import Cell
from metis.reproduction.schedule import planned_steps
from metis.reproduction.tables import Evidence
from metis.reproduction.verdicts import Comparison, Finding
from metis.text import plural

_NAMED = 3  # policies of an environment; of more the number says enough
_MANY = 100  # seeds; to say how many more would be of no use


def effort(finding: Finding, evidence: Evidence) -> str:
    """What would decide a finding, in a sentence; nothing if that cannot be said."""
    seeds: dict[str, tuple[Cell, int]] = {}
    steps: dict[str, tuple[Cell, float]] = {}
    close = 0
    for one in finding.open:
        if one.ratio.kind == "exact":
            needed = one.ratio.seeds_to_decide(one.least, among=one.among)
            if needed is None or needed > _MANY:
                close += 1
                continue
            for cell in (one.own, one.rival):
                seeds[cell.name] = cell, max(needed, seeds.get(cell.name, (cell, 0))[1])
        else:
            for cell, more in _further(one, evidence):
                steps[cell.name] = cell, max(more, steps.get(cell.name, (cell, 0.0))[1])
    hours = sum(more * _step_hours(cell) for cell, more in steps.values())
    for cell, needed in seeds.values():
        runs = list(evidence.seeds(cell).values())
        if (missing := needed - len(runs)) > 0:
            hours += missing * statistics.mean(run.costs.steps for run in runs) * _step_hours(cell)
    sentences = [part.needs for part in finding.parts if part.needs]
    if steps:
        sentences.append(f"to be run further: {_listed([cell for cell, _ in steps.values()])}")
    if seeds:
        most = max(needed for _, needed in seeds.values())
        sentences.append(f"up to {plural(most, 'seed')} of {_listed([cell for cell, _ in seeds.values()])}")
    if hours:
        sentences.append(f"about {max(hours, 0.1):.1f} hours of one core")
    if close:
        sentences.append(f"{plural(close, 'comparison')} too close for {_MANY} seeds")
    return "; ".join(sentences)


def reason(finding: Finding) -> str:
    """Why a finding is open: how many of its comparisons are too close, and how many have runs that end too early."""
    compared = [one for part in finding.parts for one in part.compared]
    close = sorted(one.ratio.mean for one in finding.open if one.ratio.kind == "exact")
    early = len(finding.open) - len(close)
    sentences = [part.why for part in finding.parts if part.why]
    if close:
        least = max(one.least for one in finding.open)
        span = f"×{close[0]:.2f}" if len(close) == 1 else f"×{close[0]:.2f} to ×{close[-1]:.2f}"
        few = f"too close to ×{least:g} for so few seeds ({span})"
        sentences.append(f"{len(close)} of {plural(len(compared), 'comparison')} {few}")
    if early:
        sentences.append(
            f"{early} of {plural(len(compared), 'comparison')} with runs that end too early or were not made"
        )
    return "; ".join(sentences) or "; ".join(part.text for part in finding.parts if part.outcome == "open")


def _further(one: Comparison, evidence: Evidence) -> Sequence[tuple[Cell, float]]:
    """The runs that say too little as yet, and how many steps they take to say enough."""
    found = []
    for cell, kind in ((one.rival, "at least"), (one.own, "at most")):
        runs = list(evidence.seeds(cell).values())
        short = [run for run in runs if run.costs_at_target is None]
        try:
            whole = planned_steps(cell)
        except DataError:  # who holds how much comes with the data, which is not here
            whole = 0
        if one.ratio.kind == kind:
            times = one.ratio.short_of(one.least, among=one.among)
            found.append((cell, sum(min(run.costs.steps * times, max(whole, run.costs.steps)) for run in short)))
        elif one.ratio.kind == "unknown" and (short or not runs):
            found.append((cell, float(whole * max(len(short), 1))))
    return found


def _step_hours(cell: Cell) -> float:
    plan = cell.environment.plan
    return 0.0 if plan is None else plan.step_seconds / 3600


def _listed(cells: Sequence[Cell]) -> str:
    by_environment: dict[str, list[str]] = {}
    for cell in cells:
        by_environment.setdefault(cell.environment.name, []).append(cell.label)
    return ", ".join(
        f"{' and '.join(labels) if len(labels) <= _NAMED else f'{len(labels)} policies'} ({where})"
        for where, labels in by_environment.items()
    )
