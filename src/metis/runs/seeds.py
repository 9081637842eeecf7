"""Several seeds of the same policies: mean, deviation, interval and wins, all from finished runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from metis.core.costs import Costs
from metis.runs.run import Run

_RESAMPLES = 10_000
_COVERAGE = 95.0  # percent of an interval

# What is summarised, as paths into a row of a comparison. Costs are until the target, if there is one.
COSTS: dict[str, Callable[[Costs], float]] = {
    "iterations": lambda costs: costs.steps,
    "parallel_time": lambda costs: costs.parallel_time,
    "cumulative_time": lambda costs: costs.cumulative_time,
    "idle_time": lambda costs: costs.idle_time,
    "update_requests": lambda costs: costs.update_requests,
    "bytes_exchanged": lambda costs: costs.bytes_exchanged,
    "energy.equation": lambda costs: costs.energy.equation,
    "energy.active": lambda costs: costs.energy.active,
    "energy.idle_charged": lambda costs: costs.energy.idle_charged,
}
METRICS = ("final", "best")


@dataclass(frozen=True)
class Estimate:
    """A number over several seeds; a seed without the number, such as one that missed the target, has None."""

    values: tuple[float | None, ...]

    @cached_property
    def known(self) -> list[float]:
        return [value for value in self.values if value is not None and math.isfinite(value)]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.known) if self.known else None

    @property
    def deviation(self) -> float | None:
        """The sample's standard deviation; None for fewer than two values."""
        return statistics.stdev(self.known) if len(self.known) > 1 else None

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % bootstrap interval of the mean, from a fixed seed: the same values give the same interval."""
        if len(self.known) < 2:
            return None
        drawn = np.random.default_rng(0).integers(len(self.known), size=(_RESAMPLES, len(self.known)))
        tail = (100 - _COVERAGE) / 2
        low, high = np.percentile(np.asarray(self.known)[drawn].mean(axis=1), [tail, 100 - tail])
        return float(low), float(high)

    def to_json(self) -> dict[str, Any]:
        interval = self.interval
        return {
            "mean": self.mean,
            "deviation": self.deviation,
            "interval": None if interval is None else list(interval),
            "values": list(self.values),
        }


@dataclass(frozen=True)
class Group:
    """One policy with every seed that it was run with."""

    label: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> list[int]:
        return [run.setting.seed for run in self.runs]

    @property
    def reached(self) -> int | None:
        """In how many seeds it reached the target; None if there is none."""
        if self.runs[0].setting.target is None:
            return None
        return sum(run.costs_at_target is not None for run in self.runs)

    def estimate(self, measure: str) -> Estimate:
        """A cost or `final` or `best`, over the seeds."""
        return Estimate(tuple(measured(run, measure) for run in self.runs))


def measured(run: Run, measure: str) -> float | None:
    """One of `COSTS`, until the target if there is one, or the final or best metric of a run."""
    if measure in METRICS:
        return run.final_metric if measure == "final" else run.best_metric
    costs = run.costs if run.setting.target is None else run.costs_at_target
    return None if costs is None else float(COSTS[measure](costs))


def grouped(runs: Sequence[Run]) -> list[Group]:
    """One group per policy, in the order of their first runs, each in the order of the seeds."""
    labels = dict.fromkeys(run.policy for run in runs)
    return [Group(label, tuple(run for run in runs if run.policy == label)) for label in labels]


def has_seeds(runs: Sequence[Run]) -> bool:
    """Whether the runs are several seeds of their policies, one run for each."""
    pairs = {(run.policy, run.setting.seed) for run in runs}
    return len(pairs) == len(runs) and len({run.setting.seed for run in runs}) > 1


def wins(groups: Sequence[Group], measure: str) -> list[int | None]:
    """In how many seeds each policy was the best, or shared it; None where there is nothing to win."""
    higher = measure in METRICS and groups[0].runs[0].setting.higher_is_better
    won: list[int | None] = [0 if len(groups) > 1 else None for _ in groups]
    for seed in dict.fromkeys(seed for group in groups for seed in group.seeds):
        found = [
            next((measured(run, measure) for run in group.runs if run.setting.seed == seed), None) for group in groups
        ]
        known = [value for value in found if value is not None and math.isfinite(value)]
        best = (max if higher else min)(known, default=None)
        won = [
            count if count is None or best is None or value != best else count + 1
            for count, value in zip(won, found, strict=True)
        ]
    return won


def factor(first: Group, group: Group, measure: str) -> float | None:
    """The first policy's cost divided by this one's: the geometric mean over the seeds in which both have it."""
    own = {run.setting.seed: measured(run, measure) for run in group.runs}
    pairs = [(measured(run, measure), own.get(run.setting.seed)) for run in first.runs]
    ratios = [base / cost for base, cost in pairs if base and cost]
    return statistics.geometric_mean(ratios) if ratios else None


def decisive(groups: Sequence[Group]) -> str:
    """What a win is about: the time to the target where some run reached it, else the final metric."""
    return "parallel_time" if any(group.reached for group in groups) else "final"


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per policy: every measure over the seeds, the factors against the first policy, and the wins."""
    groups = grouped(runs)
    won = {measure: wins(groups, measure) for measure in (*COSTS, *METRICS)}
    return [
        {
            "label": group.label,
            "seeds": group.seeds,
            "reached": group.reached,
            **{measure: group.estimate(measure).to_json() for measure in (*COSTS, *METRICS)},
            "factors": {measure: factor(groups[0], group, measure) for measure in COSTS},
            "wins": {measure: counts[index] for measure, counts in won.items()},
        }
        for index, group in enumerate(groups)
    ]
