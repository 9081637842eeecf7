"""Claims about accuracies and errors instead of costs: who is ahead at some moment, and who is best."""

from __future__ import annotations

import math
import statistics

from metis.core.events import CommunityPublished
from metis.reproduction import lookup
from metis.reproduction.environments import Cell
from metis.reproduction.tables import ASYNC, SEMISYNC, Evidence, slowest_learner_epochs
from metis.reproduction.verdicts import Finding, Outcome, Part, Source, combined, deviations
from metis.runs.run import Run
from metis.text import plural

APART = 0.02  # accuracies that are closer do not decide
LAST_SECONDS = 60.0  # of which the median is a final accuracy: asynchronous models jump


def _metric_at(run: Run, moment: float) -> float:
    """The last value measured until then."""
    return [math.nan, *(v for point, v in zip(run.history, run.metric_values, strict=True) if point.at <= moment)][-1]


def asynchronous_lead_early(evidence: Evidence, source: Source) -> Finding:
    lookup.ours_only(source)
    parts = []
    for environment in lookup.environments(evidence, "figure10"):
        semi = evidence.seeds(lookup.one(environment, SEMISYNC))
        for seed, run in semi.items():
            first = next((at for at, item in run.events if isinstance(item, CommunityPublished) and at > 0), math.nan)
            own = _metric_at(run, first)
            early = {
                cell.label: _metric_at(evidence.seeds(cell)[seed], first)
                for cell in lookup.pick(environment, ASYNC)
                if seed in evidence.seeds(cell)
            }
            if early:
                shown = ", ".join(f"{label} {value:.3f}" for label, value in early.items())
                text = f"{environment.paper.distribution} at {first:.0f} s: {shown}, SemiSync {own:.3f}"
                parts.append(Part(lookup.outcome(min(early.values()) > own), text, seeds=len(semi)))
    if not parts:
        raise lookup.NoEvidence("its runs have not been made")
    return Finding(parts, "when SemiSync's first round ends")


def _bests(evidence: Evidence, cell: Cell) -> dict[int, float]:
    return {seed: run.best_metric for seed, run in evidence.seeds(cell).items() if run.best_metric is not None}


_STUDENT = {3: 4.31, 4: 3.19, 5: 2.78, 6: 2.58}  # for 95 %, by the number of seeds, where no expansion is good


def _difference(first: dict[int, float], second: dict[int, float]) -> tuple[float, float, int]:
    """Mean of the first minus the second over common seeds, half of a 95 % interval, and how many there are."""
    values = [first[seed] - second[seed] for seed in first if seed in second]
    if not values:
        raise lookup.NoEvidence("its runs have not been made")
    seeds = len(values)
    if seeds < min(_STUDENT):
        return statistics.mean(values), math.inf, seeds
    quantile = _STUDENT.get(seeds) or deviations(1, seeds - 1)
    half = quantile * statistics.stdev(values) / math.sqrt(seeds)
    return statistics.mean(values), half, seeds


def _spelled(mean: float, half: float) -> str:
    return f"{mean:+.2f}" + (f" ± {half:.2f}" if math.isfinite(half) else "")


def brainage_error(evidence: Evidence, source: Source) -> Finding:
    lookup.ours_only(source)
    parts = []
    for environment in lookup.environments(evidence, "figure11"):
        if environment.config.partition.classes != "iid":
            continue
        own = _bests(evidence, lookup.one(environment, SEMISYNC, epochs=3.0))
        for cell in environment.cells:
            if slowest_learner_epochs(cell) != 3.0:
                mean, half, seeds = _difference(_bests(evidence, cell), own)
                outcome: Outcome = "holds" if mean - half > 0 else "fails" if mean + half < 0 else "open"
                if outcome == "open" and seeds > 2 and abs(mean) + half < 0.1:
                    outcome = "tie"
                size = f"{cell.label} minus λ=3: {_spelled(mean, half)} years"
                parts.append(Part(outcome, f"{size} ({plural(seeds, 'seed')})", seeds=seeds, size=size))
        for cell in environment.centralized:
            mean, half, seeds = _difference(own, _bests(evidence, cell))
            parts.append(Part(lookup.outcome(mean < 0.25), f"λ=3 minus centralized: {_spelled(mean, half)}"))
    return Finding(parts, "least error in years; close to the centralized model is within a quarter of a year")


def federation_beats_silos(evidence: Evidence, source: Source) -> Finding:
    lookup.ours_only(source)
    parts = []
    for environment in lookup.environments(evidence, "figure12"):
        alone = [_bests(evidence, cell) for cell in environment.alone]
        federation = [_bests(evidence, cell) for cell in environment.cells]
        for seed in sorted(federation[0]):
            silos = [best[seed] for best in alone if seed in best]
            together = [best[seed] for best in federation if seed in best]
            if len(silos) < len(alone) or not together:
                continue
            beaten = sum(min(together) < value for value in silos)
            parts.append(
                Part(
                    lookup.outcome(beaten == len(silos)),
                    f"{environment.paper.distribution}: {min(together):.2f} together, {min(silos):.2f} to "
                    f"{max(silos):.2f} alone",
                )
            )
    if not parts:
        raise lookup.NoEvidence("its runs have not been made")
    return Finding(parts, "least error in years, for each seed")


def head_of_power_law(evidence: Evidence, source: Source) -> Finding:
    """The best accuracy of SemiSync with Momentum on Power Law & Non-IID(5), minus that on Skewed & Non-IID(5)."""
    lookup.ours_only(source)
    parts = []
    for cluster in ("homogeneous", "heterogeneous"):
        found = {
            environment.paper.distribution: evidence.seeds(lookup.one(environment, SEMISYNC, "momentum", 2))
            for environment in lookup.environments(evidence, "figure7", "figure8")
            if environment.paper.cluster == cluster
        }
        power, skewed = found.get("Power Law & Non-IID(5)", {}), found.get("Skewed & Non-IID(5)", {})
        differences, ends = [], []
        for seed in power.keys() & skewed.keys():
            runs = power[seed], skewed[seed]
            ends.append(min(run.history[-1].at for run in runs))
            first, second = (
                max(value for point, value in zip(run.history, run.metric_values, strict=True) if point.at <= ends[-1])
                for run in runs
            )
            differences.append(first - second)
        if differences:
            mean = statistics.mean(differences)
            outcome: Outcome = "open" if abs(mean) < APART else lookup.outcome(mean > 0)
            seeds = plural(len(ends), "seed")
            size = f"{mean:+.3f} within {min(ends):.0f} s"
            parts.append(Part(outcome, f"{cluster}: {size} ({seeds})", seeds=len(ends), size=size))
    if not parts:
        raise lookup.NoEvidence("its runs have not been made")
    note = "one of two clusters, early in training" if len(parts) == 1 else ""
    return Finding(parts, f"at least {APART:g} apart, in the time that both were run", note=note)


def final_accuracy(evidence: Evidence, source: Source) -> Finding:
    """SemiSync's accuracy at the moment of the plan against that of every other policy, over the seeds of both."""
    lookup.ours_only(source)
    parts = []
    for environment in lookup.environments(evidence, "figure9"):
        moment = None if environment.plan is None else environment.plan.final_seconds
        if moment is None:
            raise lookup.NoEvidence("its plan does not say when an accuracy is final")
        ahead, shown, missing, seeds = [], [], [], []
        own_cell = lookup.one(environment, SEMISYNC)
        own = _finals(evidence, own_cell, moment)
        for cell in environment.cells:
            theirs = _finals(evidence, cell, moment)
            common = sorted(own.keys() & theirs.keys())
            if not theirs or not common:
                missing.append(cell.label)
                continue
            shown.append(f"{cell.label} {statistics.mean(theirs[seed] for seed in common):.3f}")
            if cell is not own_cell:
                ahead.append(statistics.mean(own[seed] - theirs[seed] for seed in common))
                seeds.append(len(common))
        outcome: Outcome = "holds" if not missing and min(ahead) >= APART else "open"
        outcome = "fails" if min(ahead, default=0.0) <= -APART else outcome
        text = f"{environment.paper.distribution} at {moment:.0f} s: {', '.join(shown) or 'nothing to compare'}"
        text += f"; not run as far: {', '.join(missing)}" if missing else f" ({plural(min(seeds), 'seed')})"
        size = "" if missing else f"{min(ahead):+.3f} at {moment:.0f} s, {environment.paper.distribution}"
        parts.append(Part(outcome, text, seeds=min(seeds, default=0), size=size))
    rule = f"the median accuracy of the last {LAST_SECONDS:.0f} s, at least {APART:g} above that of every other policy"
    decided = combined(part.outcome for part in parts) != "open"
    return Finding(parts, rule, note="early: Sync has had one round or two" if decided else "")


def _finals(evidence: Evidence, cell: Cell, moment: float) -> dict[int, float]:
    """The median of what was measured in the last minute before a moment, by seed, of the runs that went as far."""
    found = {}
    for seed, run in evidence.seeds(cell).items():
        points = [(p.at, v) for p, v in zip(run.history, run.metric_values, strict=True) if p.at <= moment]
        if points and run.costs.parallel_time >= moment:
            found[seed] = statistics.median(value for at, value in points if at > points[-1][0] - LAST_SECONDS)
    return found
