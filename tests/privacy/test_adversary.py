"""An adversarial controller never sees the sum of fewer than least - c honest learners."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from metis.privacy.store import MemoryStore
from privacy.adversary import STRATEGIES, attack, honest_round, settings
from privacy.window_adversary import STRATEGIES as WINDOW_STRATEGIES, WindowAdversary, attack_windows, by_the_rules


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


# --- windows --------------------------------------------------------------------------------------

_SMALL = [(count, colluders) for count, colluders, least in settings(range(4, 7)) if least == colluders + 3]


@pytest.mark.parametrize("whole", [False, True], ids=["differences", "whole models"])
@pytest.mark.parametrize("strategy", WINDOW_STRATEGIES, ids=lambda strategy: strategy.__name__)
def test_no_strategy_computes_something_of_two_learners_from_windows(
    strategy: Callable[..., None], whole: bool
) -> None:
    """From all windows together, of FedBuff and of the cache."""
    for count, colluders in _SMALL:
        attack_windows(count, colluders, whole, strategy)


def test_the_harness_sees_the_windows_that_are_opened_by_the_rules() -> None:
    """And it would notice: a window without one of its learners shows that learner."""
    assert [attack_windows(*chosen, by_the_rules) for chosen in [(4, 0, True), (6, 2, False)]] == [5, 5]
    adversary = WindowAdversary(5, 0, whole=True, seed=0)
    known = adversary.train(*adversary.cohort.names)
    adversary.open_window(adversary.window(known))
    adversary.cohort.stores = {name: MemoryStore() for name in adversary.cohort.names}  # a backup was restored
    adversary.cohort.members = {name: adversary.cohort.restarted(name) for name in adversary.cohort.names}
    adversary.open_window(adversary.window({name: known[name] for name in adversary.honest[1:]}))
    assert adversary.fewest() == 1


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["differences", "whole models"])
@pytest.mark.parametrize("strategy", WINDOW_STRATEGIES, ids=lambda strategy: strategy.__name__)
def test_no_strategy_computes_something_of_two_learners_from_windows_up_to_13(
    strategy: Callable[..., None], whole: bool
) -> None:
    for count, colluders, least in settings(range(7, 14)):
        if least == colluders + 3:
            attack_windows(count, colluders, whole, strategy, 1)
