"""The mean of a normal distribution of which some values are only known to be beyond a bound (a Tobit model)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_STEPS, _ENOUGH = 10_000, 1e-9


def censored_normal(
    exact: Sequence[float], at_least: Sequence[float], at_most: Sequence[float], deviation: float | None = None
) -> tuple[float, float, float]:
    """The likeliest mean and deviation, unless that is given, and how many exact values would say as much of the mean.

    Expectation and maximization: what is beyond a bound takes the value and the square that it has on average. A bound
    that is far below what is known anyway changes nothing and counts as no value; one far beyond it counts as one.
    """
    mean = statistics.mean(exact)
    given, count = deviation, len(exact) + len(at_least) + len(at_most)
    if deviation is None:
        deviation = statistics.pstdev([*exact, *at_least, *at_most])
    if not deviation:
        return mean, 0.0, float(count)
    certain = 0.0
    for _ in range(_STEPS):
        beyond = [(1, _beyond((bound - mean) / deviation)) for bound in at_least]
        beyond += [(-1, _beyond((mean - bound) / deviation)) for bound in at_most]
        certain = sum(certainty for _, (_, certainty) in beyond)
        values = [*exact, *(mean + side * deviation * distance for side, (distance, _) in beyond)]
        new = statistics.fmean(values)
        # The variance of what is beyond a bound, besides that of its average.
        left = deviation**2 * sum(1 - certainty for _, (_, certainty) in beyond)
        spread = math.sqrt((sum((value - new) ** 2 for value in values) + left) / count) if given is None else given
        moved, mean, deviation = max(abs(new - mean), abs(spread - deviation)), new, spread
        if moved < _ENOUGH or not deviation:
            break
    return mean, deviation, len(exact) + certain


def _beyond(bound: float) -> tuple[float, float]:
    """The mean of a standard normal variable above a bound, and by how much that is less uncertain than the whole."""
    tail = math.erfc(bound / math.sqrt(2)) / 2
    if tail < 1e-200:  # far out it is close to the bound
        return bound + 1 / bound, 1 - 1 / bound**2
    mean = statistics.NormalDist().pdf(bound) / tail
    return mean, mean * (mean - bound)
