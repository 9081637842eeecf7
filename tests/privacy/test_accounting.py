"""What steps cost, and how many a budget allows."""

from __future__ import annotations

import pytest

from metis.privacy import accounting
from metis.privacy.accounting import Steps
from metis.privacy.records import Privacy, coarse


@pytest.mark.parametrize(
    ("lam", "slow", "fast", "epsilons", "rounds"),
    [
        (0.5, 25, 250, (4.3, 15.4), (130, 13)),
        (1, 50, 500, (6.2, 23.6), (65, 6)),
        (2, 100, 1000, (9.0, 37.6), (32, 3)),
        (4, 200, 2000, (13.4, 63.0), (16, 1)),
    ],
)
def test_semi_synchronous_training_spends_the_fast_sites_budget(
    lam: float, slow: int, fast: int, epsilons: tuple[float, float], rounds: tuple[int, int]
) -> None:
    """5,000 records in batches of 100 with noise 1: epsilon after 40 rounds, and the rounds until it is 8 (RDP)."""
    rate, noise, delta = 100 / 5000, 1.0, 1e-5
    assert slow * 2 / lam == 100 and fast == 10 * slow  # an epoch of the slow site has 50 batches
    for steps, epsilon, lasts in zip((slow, fast), epsilons, rounds, strict=True):
        assert accounting.epsilon([Steps(rate, noise, 40 * steps)], delta) == pytest.approx(epsilon, abs=0.06)
        assert accounting.max_steps(rate, noise, 8.0, delta) // steps == lasts


def test_the_budget_is_used_up_and_not_exceeded() -> None:
    """S_k steps are within the budget, by RDP and by the tighter PLD; one in a hundred more is not."""
    rate, noise, budget, delta = 0.02, 1.0, 3.0, 1e-5
    steps = accounting.max_steps(rate, noise, budget, delta)
    spent = accounting.epsilon([Steps(rate, noise, steps)], delta)
    assert spent <= budget < accounting.epsilon([Steps(rate, noise, steps + steps // 100)], delta)
    assert accounting.tight_epsilon([Steps(rate, noise, steps)], delta) < spent


def test_larger_batches_cost_the_same_and_have_less_noise() -> None:
    """Ten times as large: noise 7.3 of the clip, so 27 % less in the mean of a step, at the same epsilon."""
    privacy = Privacy(noise=1.0, budget=8.0)
    noise = privacy.noise_at(0.02, 10)
    assert noise == pytest.approx(7.3, abs=0.1)
    steps = accounting.max_steps(0.02, 1.0, 8.0, 1e-5)
    assert accounting.max_steps(0.2, noise, 8.0, 1e-5) == pytest.approx(steps, rel=0.02)
    assert accounting.epsilon([Steps(0.2, noise, steps)], 1e-5) <= 8.0
    assert privacy.noise_at(0.02, 1) == 1.0


def test_nothing_is_left_of_a_budget_that_is_too_small() -> None:
    """A budget that no order can keep allows no step."""
    assert accounting.max_steps(1.0, 0.5, 0.01, 1e-5) == 0


def test_of_two_settings_the_strictest_count() -> None:
    """A site may demand more than the federation proposes, and the other way round."""
    ours = Privacy(noise=1.0, clip=2.0, budget=8.0, delta=1e-5)
    theirs = Privacy(noise=1.5, clip=3.0, budget=None, delta=1e-6, larger_batches=False)
    assert ours.strictest(theirs) == Privacy(noise=1.5, clip=2.0, budget=8.0, delta=1e-6, larger_batches=False)


@pytest.mark.parametrize(("steps", "told"), [(0, 0), (7, 7), (99, 99), (101, 100), (3456, 3400), (123_456, 120_000)])
def test_the_number_of_steps_is_told_coarsely(steps: int, told: int) -> None:
    """Two digits: the exact number would reveal how many records there are."""
    assert coarse(steps) == told
