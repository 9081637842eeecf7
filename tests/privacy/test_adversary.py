"""An adversarial controller never sees the sum of fewer than least - c honest learners."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from privacy.adversary import STRATEGIES, attack, honest_round, settings


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.__name__)
def test_no_strategy_shows_fewer_learners_than_promised(strategy: Callable[..., None]) -> None:
    """For all N up to 6, c and least; and for N = 10 and 13, where split views pay most."""
    for count, colluders, least in [*settings(range(3, 7)), (10, 1, 4), (13, 0, 3)]:
        attack(count, colluders, least, strategy, 0)


def test_the_harness_sees_what_is_opened_by_the_rules() -> None:
    """Otherwise it would prove nothing: an honest round shows exactly one sum."""
    assert [attack(*chosen, honest_round, 0) for chosen in [(4, 0, 3), (7, 2, 5), (10, 3, 6)]] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.__name__)
def test_no_strategy_shows_fewer_learners_than_promised_up_to_13(strategy: Callable[..., None]) -> None:
    """For all N up to 13, c and least."""
    for count, colluders, least in settings(range(7, 14)):
        attack(count, colluders, least, strategy, 1)
