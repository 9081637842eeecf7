"""The likeliest mean of values of which some are only known to be beyond a bound."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, strategies as st

from metis.reproduction.censored import censored_normal

VALUES = st.lists(st.floats(-2, 2), min_size=2, max_size=9)
BOUNDS = st.lists(st.floats(-3, 3), max_size=4)
DEVIATION = 0.5


def likelihood(mean: float, deviation: float, exact: list[float], at_least: list[float], at_most: list[float]) -> float:
    """ln of it."""

    def beyond(distance: float) -> float:
        return math.log(max(math.erfc(distance / deviation / math.sqrt(2)) / 2, 1e-300))

    found = sum(-(((value - mean) / deviation) ** 2) / 2 - math.log(deviation) for value in exact)
    return found + sum(beyond(b - mean) for b in at_least) + sum(beyond(mean - b) for b in at_most)


@given(VALUES, BOUNDS, BOUNDS)
def test_no_mean_is_likelier(exact: list[float], at_least: list[float], at_most: list[float]) -> None:
    mean, deviation, values = censored_normal(exact, at_least, at_most, DEVIATION)
    assert deviation == DEVIATION
    assert len(exact) <= values <= len(exact) + len(at_least) + len(at_most)
    best = likelihood(mean, deviation, exact, at_least, at_most)
    for other in (mean - 0.01, mean + 0.01, 0.0, statistics.mean(exact)):
        assert likelihood(other, deviation, exact, at_least, at_most) <= best + 1e-6


@given(VALUES.filter(lambda values: statistics.stdev(values) > 0.1), BOUNDS.map(lambda bounds: bounds[:1]))
def test_no_deviation_is_likelier(exact: list[float], at_least: list[float]) -> None:
    mean, deviation, _ = censored_normal(exact, at_least, [])
    best = likelihood(mean, deviation, exact, at_least, [])
    for other in (deviation * 0.98, deviation * 1.02):
        assert likelihood(mean, other, exact, at_least, []) <= best + 1e-6


@given(VALUES)
def test_without_bounds_it_is_the_mean(exact: list[float]) -> None:
    mean, deviation, values = censored_normal(exact, [], [])
    assert mean == pytest.approx(statistics.mean(exact), abs=1e-9) and values == len(exact)
    assert deviation == pytest.approx(statistics.pstdev(exact), abs=1e-9)


def test_how_much_a_bound_says() -> None:
    """Nothing far below what is known anyway; far beyond it as much as a value."""
    exact = [0.0, 0.1, 0.2, 0.3]
    assert censored_normal(exact, [-90.0], [90.0], 0.1) == pytest.approx((0.15, 0.1, 4.0))
    mean, _, values = censored_normal(exact, [9.0], [], 0.1)
    assert mean == pytest.approx((0.6 + 9) / 5, rel=0.01) and values == pytest.approx(5.0, abs=0.01)


def test_values_that_are_all_the_same_have_no_spread_to_tell_what_a_bound_says() -> None:
    assert censored_normal([1.0, 1.0], [1.0], []) == (1.0, 0.0, 3.0)
