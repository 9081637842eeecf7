"""What sites report of community models: which numbers are believed, what they weigh, and when enough have spoken.

A report weighs by the evaluation examples that the site declared when it joined, never by what the report says. Of
three sites or more the federated value is their weighted median, in which none weighs more than a third: one site
cannot decide it. Of fewer it is the weighted mean. Where all sites report the sums behind a metric, the value over all
their examples is known too: it is `pooled_` and the metric's name, and of fewer than three sites the metric itself.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from metis.core.contribution import capped
from metis.core.events import LearnerId
from metis.learning.sums import Sums, merged_value, sums_problem

MAX_METRICS = 50
POOLED = "pooled_"
_LARGEST = 1e6  # of a metric whose range is not known
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.@-]{0,59}")
_SHARES = (
    "accuracy", "balanced_accuracy", "top5_accuracy", "auc", "roc_auc", "pr_auc", "average_precision", "f1",
    "precision", "recall", "sensitivity", "specificity", "dice", "iou", "jaccard", "brier", "ece",
)  # fmt: skip
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_SHARES, (0.0, 1.0)),
    **dict.fromkeys(("mae", "mse", "rmse", "perplexity"), (0.0, _LARGEST)),
    **dict.fromkeys(("mcc", "kappa", "correlation", "spearman", "pearson"), (-1.0, 1.0)),
    "r2": (-_LARGEST, 1.0),
}
_ANY = (-_LARGEST, _LARGEST)  # loss too: some are negative
_ROUNDING = 1e-6  # a mean of float32 may be this far outside


def report_problem(
    metrics: Mapping[str, float], sums: Mapping[str, Sums] | None = None, examples: int = 0
) -> str | None:
    """Why a site cannot have measured this on its declared examples; None if it can. What is not finite is left out."""
    if not 1 <= len(metrics) <= MAX_METRICS:
        return f"it has {len(metrics)} metrics; 1 to {MAX_METRICS} are allowed"
    for name, value in metrics.items():
        if not _NAME.fullmatch(name):
            return "the name of a metric has other characters than letters, digits and _.@-, or is longer than 60"
        low, high = RANGES.get(name, _ANY)
        if math.isfinite(value) and not low - _ROUNDING <= value <= high + _ROUNDING:
            return f"{name} is {value:g}, which must be between {low:g} and {high:g}"
    for name, own in (sums or {}).items():
        if name not in metrics:
            return "it has sums of a metric that it does not report"
        if problem := sums_problem(own, metrics[name], examples):
            return f"its sums of {name} {problem}"
    return None


def federated_value(reports: Mapping[LearnerId, tuple[float, float]]) -> float:
    """One number from (weight, value) of each site."""
    if len(reports) < 3:
        total = math.fsum(weight for weight, _ in reports.values())
        return math.fsum(weight * value for weight, value in reports.values()) / total
    weights = capped({name: weight for name, (weight, _) in reports.items()}, 1 / 3)
    ordered = sorted((value, weights[name]) for name, (_, value) in reports.items())
    half, passed = math.fsum(weights.values()) / 2, 0.0
    for index, (value, weight) in enumerate(ordered[:-1]):
        passed += weight
        if math.isclose(passed, half, rel_tol=1e-9):
            return (value + ordered[index + 1][0]) / 2
        if passed > half:
            return value
    return ordered[-1][0]


class _Report(NamedTuple):
    version: int
    weight: float
    metrics: dict[str, float]
    sums: Mapping[str, Sums]


@dataclass(frozen=True)
class Collected:
    """What the sites' latest reports say together."""

    version: int  # the newest that one of them measured
    metrics: dict[str, float]  # federated values of what all of them measured
    by_learner: dict[LearnerId, dict[str, float]]
    left_out: dict[LearnerId, list[str]]  # who did not report what most did, and what


@dataclass
class SiteReports:
    """The latest report of each site, and for whom the next federated value still waits.

    Sites measure a model after they have trained on it, so a slow one may report long after the others. Waited for is a
    site that was asked and is connected, for `patience` seconds from the first report on; one that let this pass is not
    waited for again before it has reported. Each site's latest report counts, unless it is older than as many
    community models as there are sites.
    """

    patience: float
    latest: dict[LearnerId, _Report] = field(default_factory=dict)
    fresh: set[LearnerId] = field(default_factory=set)  # reported since the last federated value
    asked: set[LearnerId] = field(default_factory=set)  # and have not reported since
    slow: set[LearnerId] = field(default_factory=set)  # are not waited for
    since: float = math.inf  # when the first fresh report came

    def ask(self, learner: LearnerId) -> None:
        self.asked.add(learner)

    def excuse(self, learner: LearnerId) -> None:
        """It cannot report now: its task has ended without a model, or it has left."""
        self.asked.discard(learner)

    def has_later(self, learner: LearnerId, version: int) -> bool:
        """Whether the site has reported of this model or a later one already."""
        return learner in self.latest and self.latest[learner].version >= version

    def add(
        self,
        learner: LearnerId,
        version: int,
        weight: float,
        metrics: Mapping[str, float],
        now: float,
        sums: Mapping[str, Sums] | None = None,
    ) -> None:
        """Take a report that has no problem."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.latest[learner] = _Report(version, weight, finite, sums or {})
        self.asked.discard(learner)
        self.slow.discard(learner)
        self.fresh.add(learner)
        self.since = min(self.since, now)

    def waiting(self, connected: Collection[LearnerId], now: float) -> bool:
        """Whether somebody may still report in time."""
        return now - self.since < self.patience and bool(self._awaited(connected))

    def due(self, connected: Collection[LearnerId], now: float) -> bool:
        """Whether nobody is waited for any more, though somebody has reported."""
        return bool(self.fresh) and not self.waiting(connected, now)

    def collect(self, connected: Collection[LearnerId]) -> Collected:
        """The federated values, after `due`; those that were waited for in vain are slow."""
        self.slow |= self._awaited(connected)
        self.fresh.clear()
        self.since = math.inf
        there = {name: report for name, report in self.latest.items() if name in connected}
        version = max((report.version for report in there.values()), default=0)
        recent = {name: report for name, report in there.items() if report.version > version - max(2, len(there))}
        usual = Counter(metric for report in recent.values() for metric in report.metrics)
        most = {metric for metric, sites in usual.items() if 2 * sites > len(recent)}
        missing = {name: sorted(most - report.metrics.keys()) for name, report in recent.items()}
        left_out = {name: metrics for name, metrics in missing.items() if metrics}
        counted = {name: report for name, report in sorted(recent.items()) if name not in left_out}
        by_learner = {name: report.metrics for name, report in counted.items()}
        return Collected(version, _together(counted), by_learner, left_out)

    def _awaited(self, connected: Collection[LearnerId]) -> set[LearnerId]:
        return (self.asked - self.slow - self.fresh) & set(connected)


def _together(reports: Mapping[LearnerId, _Report]) -> dict[str, float]:
    """The federated values of what all have measured, and the pooled ones of what all have sums of."""
    shared = set.intersection(*(set(report.metrics) for report in reports.values())) if reports else set()
    values, pooled = {}, {}
    for metric in sorted(shared):
        values[metric] = federated_value({name: (own.weight, own.metrics[metric]) for name, own in reports.items()})
        if all(metric in report.sums for report in reports.values()):
            exact = merged_value([(report.sums[metric], report.weight) for report in reports.values()])
            if exact is not None:
                pooled[POOLED + metric] = exact
                values[metric] = exact if len(reports) < 3 else values[metric]
    return values | pooled
