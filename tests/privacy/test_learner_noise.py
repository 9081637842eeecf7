"""Noise for whole learners, split over the members of a sum."""

from __future__ import annotations

import math

import numpy as np
import pytest

from metis.errors import ConfigError
from metis.privacy.chance import SeededChance
from metis.privacy.learner_noise import (
    add_noise,
    add_ring_noise,
    clipped,
    discrete_gaussian,
    noise_over_clip,
    share_of_noise,
)


def chance(seed: int = 1) -> SeededChance:
    return SeededChance(np.random.SeedSequence(seed))


@pytest.mark.parametrize("deviation", [0.4, 1.0, 3.7, 120.0])
def test_the_discrete_gaussian_has_its_probabilities(deviation: float) -> None:
    """Compared number by number with exp(-x^2 / 2 s^2), normalized."""
    drawn = discrete_gaussian(deviation, 200_000, chance())
    around = np.arange(-int(10 * deviation) - 5, int(10 * deviation) + 6)
    weights = np.exp(-(around**2) / (2 * deviation**2))
    weights /= weights.sum()
    assert abs(drawn.mean()) < 5 * deviation / math.sqrt(200_000)
    assert drawn.std() == pytest.approx(math.sqrt(float((weights * around**2).sum())), rel=0.01)
    for number in (0, 1, -1, 2):
        expected = float(weights[around == number][0])
        error = 5 * math.sqrt(expected * (1 - expected) / 200_000) + 1e-6
        assert abs(float((drawn == number).mean()) - expected) < error
    assert len(discrete_gaussian(0.0, 3, chance())) == 3 and len(discrete_gaussian(1.0, 0, chance())) == 0


def test_the_honest_learners_of_the_smallest_sum_add_up_to_the_noise() -> None:
    """Ten in a sum, three collude: seven shares make the whole."""
    share = share_of_noise(2.0, least=10, colluding=3)
    shares = [discrete_gaussian(share * 50, 50_000, chance(seed)) for seed in range(7)]
    assert np.sum(shares, axis=0).std() == pytest.approx(100.0, rel=0.02)
    with pytest.raises(ConfigError, match="at least one must be honest"):
        share_of_noise(2.0, least=3, colluding=3)


def test_noise_adds_up_inside_the_ring() -> None:
    """Words modulo 2^32 with noise, summed and read as signed: the sum of the words and the noise."""
    words = np.array([5, -7, 0, 100], np.int64)
    noisy = [add_ring_noise(words & 0xFFFFFFFF, 10.0, 0.5, 32, chance(seed)) for seed in range(3)]
    total = np.sum(noisy, axis=0) & 0xFFFFFFFF
    signed = np.where(total >= 1 << 31, total - (1 << 32), total)
    noise = sum(discrete_gaussian(5.0, 4, chance(seed)) for seed in range(3))
    assert np.array_equal(signed, 3 * words + noise)


def test_an_update_is_no_longer_than_the_clip() -> None:
    """Longer ones are cut, broken ones count nothing, and noise is added to what is left."""
    update = np.full(100, 3.0, np.float32)
    assert float(np.linalg.norm(clipped(update, 1.0))) == pytest.approx(1.0, rel=1e-5)
    assert np.array_equal(clipped(update, 1e9), update)
    assert not clipped(np.full(3, np.nan, np.float32), 1.0).any()
    moved = add_noise(np.zeros(20_000, np.float32), 2.0, 0.5, chance())
    assert float(moved.std()) == pytest.approx(1.0, rel=0.03)


def test_ten_hospitals_cannot_use_it() -> None:
    """Noise 0.5 of the clip in each of 10^5 parameters is 158 clips long, and their mean is at most one."""
    assert noise_over_clip(0.5, 100_000) == pytest.approx(158, abs=0.2)
