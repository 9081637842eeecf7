"""Schedules of drop-outs, lateness, crashes and restarts."""

from __future__ import annotations

from collections import Counter

import pytest

from privacy.schedules import Schedule


def play(seeds: range) -> Counter[str]:
    ends: Counter[str] = Counter()
    for seed in seeds:
        ends += Schedule(seed).play()
    return ends


def test_whatever_happens_an_opened_sum_is_the_plain_one() -> None:
    """And no member uploads, votes or answers in two ways; rounds end in every way that there is."""
    ends = play(range(60))
    assert ends["opened"] > 60
    assert {"opened", "too few uploads", "too few votes"} <= set(ends)


@pytest.mark.slow
def test_whatever_happens_a_thousand_times() -> None:
    """python tests/privacy/schedules.py 10000 plays ten times as many."""
    play(range(1000, 2000))
