"""Several seeds of the same policies: what is computed over them."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

import metis
from metis.runs.run import Run
from metis.runs.seeds import Estimate, decisive, factor, grouped, has_seeds, measured, summarise, wins
from simulation.federations import lively


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [
        lively().with_seed(seed).simulate(policy, seconds=2, target=0.4)
        for policy in (metis.sync_fedavg(1), metis.semisync_fedavg(1))
        for seed in (1, 2, 3)
    ]


def test_an_estimate_has_mean_deviation_and_a_repeatable_interval() -> None:
    """The deviation is the sample's; the interval covers the mean, lies within the values, and never changes."""
    values = (0.8, 0.9, 0.7, 0.95)
    estimate = Estimate(values)
    assert estimate.mean == pytest.approx(statistics.mean(values))
    assert estimate.deviation == pytest.approx(statistics.stdev(values))
    low, high = estimate.interval or (math.nan, math.nan)
    assert min(values) <= low < statistics.mean(values) < high <= max(values)
    assert Estimate(values).interval == (low, high)


@pytest.mark.parametrize("values", [(), (None, None), (math.nan,)])
def test_an_estimate_of_nothing_is_unknown(values: tuple[Any, ...]) -> None:
    """A target that no seed reached, or a metric that is not a number, has no mean."""
    estimate = Estimate(values)
    assert (estimate.mean, estimate.deviation, estimate.interval) == (None, None, None)


def test_one_value_has_a_mean_but_no_deviation() -> None:
    """Nothing can be said about the spread of a single run."""
    estimate = Estimate((None, 3.0))
    assert (estimate.mean, estimate.deviation, estimate.interval) == (3.0, None, None)


def test_runs_are_grouped_by_policy(runs: list[Run]) -> None:
    """One group per policy with all its seeds; a single seed, or one seed twice, is not several seeds."""
    groups = grouped(runs)
    assert [(group.label, group.seeds) for group in groups] == [("Sync", [1, 2, 3]), ("SemiSync (λ=1)", [1, 2, 3])]
    assert has_seeds(runs) and not has_seeds(runs[::3]) and not has_seeds([*runs, runs[0]])


def test_a_win_is_the_best_value_of_a_seed(runs: list[Run]) -> None:
    """Counted by hand: the lower cost or the better metric of each seed, ties for both."""
    groups = grouped(runs)
    assert decisive(groups) == "parallel_time"
    for measure, best in (("parallel_time", min), ("final", max)):
        expected = [0, 0]
        for one, other in zip(groups[0].runs, groups[1].runs, strict=True):
            values = [measured(one, measure), measured(other, measure)]
            known = [value for value in values if value is not None]
            for index, value in enumerate(values):
                expected[index] += bool(known) and value == best(known)
        assert wins(groups, measure) == expected
        assert sum(expected) >= 3
    assert wins(groups[:1], "final") == [None]  # nobody to win against


def test_factors_are_paired_by_seed(runs: list[Run]) -> None:
    """The geometric mean over the seeds of the first policy's cost divided by the policy's own."""
    first, second = grouped(runs)
    assert factor(first, first, "iterations") == pytest.approx(1)
    pairs = [
        (measured(one, "iterations"), measured(other, "iterations"))
        for one, other in zip(first.runs, second.runs, strict=True)
    ]
    ratios = [one / other for one, other in pairs if one and other]
    assert ratios  # both reached the target in some seed
    assert factor(first, second, "iterations") == pytest.approx(statistics.geometric_mean(ratios))


def test_the_summary_has_every_measure_of_every_policy(runs: list[Run]) -> None:
    """One row per policy, with the values of the seeds behind each mean."""
    rows = summarise(runs)
    assert [row["label"] for row in rows] == ["Sync", "SemiSync (λ=1)"]
    assert rows[0]["final"]["values"] == [run.final_metric for run in runs[:3]]
    assert rows[0]["reached"] == sum(run.costs_at_target is not None for run in runs[:3])
