"""Finding what a claim is checked with: environments and rows, what they spent, and comparisons of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from metis.reproduction.environments import Cell, Environment
from metis.reproduction.tables import Evidence, protocol_of, slowest_learner_epochs, solver_of
from metis.reproduction.verdicts import Finding, Outcome, Part, Source

Check = Callable[[Evidence, Source], Finding]
BY_CONSTRUCTION = "by construction"  # a schedule shows it, and no training could show otherwise


class NoEvidence(Exception):
    """There is nothing to check a claim with; the message says what is missing."""


def environments(evidence: Evidence, *results: str) -> list[Environment]:
    found = evidence.of(*results)
    if not found:
        raise NoEvidence("no run of it was made")
    return found


def in_tables(evidence: Evidence, *results: str) -> list[Environment]:
    """The environments of these results that the tables have rows for."""
    return [one for one in environments(evidence, *results) if any(cell.published for cell in one.cells)]


def ours_only(source: Source) -> None:
    if source.name != "ours":
        raise NoEvidence("the tables do not say")


def pick(environment: Environment, protocol: str, solver: str | None = None, epochs: float | None = None) -> list[Cell]:
    return [
        cell
        for cell in environment.cells
        if protocol_of(cell) == protocol
        and (solver is None or solver_of(cell) == solver)
        and (epochs is None or slowest_learner_epochs(cell) == epochs)
    ]


def one(environment: Environment, protocol: str, solver: str | None = None, epochs: float | None = None) -> Cell:
    found = pick(environment, protocol, solver, epochs)
    if not found:
        raise NoEvidence(f"{environment.paper.title} does not have this policy")
    return found[0]


def where(environment: Environment) -> str:
    paper = environment.paper
    return paper.distribution if paper.domain == "CIFAR-10" else f"{paper.domain} {paper.distribution}"


def amount(source: Source, cell: Cell, name: str, unit: str = "") -> str:
    """The mean over the seeds that reached the target, or how long it was tried."""
    costs = source.costs(cell, name).values()
    reached = [cost.value for cost in costs if cost.reached]
    if not costs:
        return "not run"
    if len(reached) < len(costs):
        tried = min(cost.value for cost in costs if not cost.reached)
        how_often = f" with {len(costs) - len(reached)} of {len(costs)} seeds" if len(costs) > 1 else ""
        return f"not reached{how_often}" + (f" by {tried:,.0f}{unit}" if math.isfinite(tried) else "")
    mean = statistics.mean(reached)
    return f"{mean:,.0f}{unit}" if mean >= 100 else f"{mean:.3g}{unit}"


def against(
    source: Source, own: Cell, rivals: Sequence[Cell], name: str, unit: str, words: str, *, environments: int
) -> Part:
    """Whether one policy costs less than each of the others, in one of so many environments."""
    compared = [source.compare(own, rival, name, among=len(rivals) * environments) for rival in rivals]
    ratios = {one.rival.label: one.ratio for one in compared}
    outcomes = {one.rival.label: one.outcome for one in compared}
    order: tuple[Outcome, ...] = ("fails", "open", "tie", "holds")
    worst: Outcome = next((outcome for outcome in order if outcome in outcomes.values()), "open")
    known = {label: ratio for label, ratio in ratios.items() if ratio.kind != "unknown"}
    closest = sorted(known, key=lambda label: known[label].mean)[:2]
    shown = ", ".join(f"{label} ×{known[label]}" for label in closest)
    open_ = [label for label, outcome in outcomes.items() if outcome == "open" and label not in closest]
    rest = f"; of {len(rivals)} policies undecided against {len(open_)} more" if open_ else ""
    text = f"{words}: {own.label} {amount(source, own, name, unit)}; {shown or 'nothing to compare with'}{rest}"
    # With ties among clear wins it is not beaten anywhere.
    return Part("holds" if worst == "tie" and "holds" in outcomes.values() else worst, text, compared)


def outcome(holds: bool) -> Outcome:
    return "holds" if holds else "fails"
