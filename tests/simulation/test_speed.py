"""How a budget becomes batches and seconds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from metis.core.events import Budget
from metis.simulation.speed import Speed, Spent


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_a_budget_of_steps() -> None:
    """Constant speed: as many batches, each as long."""
    assert Speed(0.3).spend(Budget(7), 0.0, rng()) == Spent(7, 7 * 0.3, 0.3)


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(1.0, 4), (0.9, 3), (0.91, 4), (0.05, 1), (68.4, 228)],
    ids=["in the middle of a batch", "whole batches", "just over", "less than one", "a hair over a whole number"],
)
def test_a_budget_of_seconds_ends_with_the_current_batch(seconds: float, steps: int) -> None:
    """At least one batch, and the one that is begun before the end (R3)."""
    spent = Speed(0.3).spend(Budget(None, seconds), 0.0, rng())

    assert spent == Spent(steps, steps * 0.3, 0.3)


@pytest.mark.parametrize("speed", [Speed(0.3), Speed(0.3, profile=((1e9, 2.0),))], ids=["closed form", "by batch"])
def test_whichever_ends_first(speed: Speed) -> None:
    """Steps and seconds together."""
    assert speed.spend(Budget(3, 10.0), 0.0, rng()).steps == 3
    assert speed.spend(Budget(100, 1.0), 0.0, rng()).steps == 4


@given(
    time_per_batch=st.floats(1e-3, 10),
    steps=st.none() | st.integers(1, 300),
    seconds=st.floats(1e-3, 10) | st.just(math.inf),
)
def test_the_closed_form_equals_the_loop_over_batches(time_per_batch: float, steps: int | None, seconds: float) -> None:
    """A change that never comes switches to the loop; it must not switch the result."""
    if steps is None and (math.isinf(seconds) or seconds / time_per_batch > 500):
        seconds = 500 * time_per_batch
    budget = Budget(steps, seconds)

    closed = Speed(time_per_batch).spend(budget, 0.0, rng())
    looped = Speed(time_per_batch, profile=((1e9, 2.0),)).spend(budget, 0.0, rng())

    assert closed.steps == looped.steps
    assert closed.seconds == pytest.approx(looped.seconds)
    assert closed.time_per_batch == pytest.approx(looped.time_per_batch)


def test_the_mean_of_jitter_is_the_time_per_batch() -> None:
    """Log-normal noise with mean 1: the sum of n batches is n times the nominal, within five standard errors."""
    batches, jitter = 20_000, 0.5
    spent = Speed(0.2, jitter).spend(Budget(batches), 0.0, rng())

    standard_error = 0.2 * math.sqrt(math.exp(jitter**2) - 1) / math.sqrt(batches)
    assert spent.seconds / batches == pytest.approx(0.2, abs=5 * standard_error)


def test_jitter_is_fixed_by_the_generator() -> None:
    """The same stream of chance, the same seconds; another one, others."""
    one, again, other = (Speed(0.2, 0.5).spend(Budget(10), 0.0, rng(seed)) for seed in (1, 1, 2))

    assert one == again
    assert one != other


def test_a_jittery_learner_reports_a_robust_time_per_batch() -> None:
    """Measured without the first batch, so it is not simply seconds over steps."""
    spent = Speed(0.2, 0.5).spend(Budget(1000), 0.0, rng())

    assert spent.time_per_batch == pytest.approx(0.2, rel=0.1)
    assert spent.time_per_batch != spent.seconds / spent.steps


def test_a_profile_changes_the_speed_on_the_way() -> None:
    """A batch takes what the moment says at which it begins."""
    speed = Speed(1.0, profile=((3.0, 2.0), (6.0, 0.5)))

    assert speed.spend(Budget(3), 0.0, rng()).seconds == 3 * 1.0
    assert speed.spend(Budget(4), 0.0, rng()).seconds == 3 * 1.0 + 2.0
    assert speed.spend(Budget(7), 0.0, rng()).seconds == 3 * 1.0 + 2 * 2.0 + 2 * 0.5
    assert speed.spend(Budget(2), 4.0, rng()).seconds == 2.0 + 0.5
    assert speed.spend(Budget(None, 4.0), 0.0, rng()).steps == 4
    assert speed.spend(Budget(4), 100.0, rng()).time_per_batch == 0.5


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((0.0,), "time_per_batch must be greater than 0"),
        ((math.nan,), "time_per_batch must be greater than 0"),
        ((math.inf,), "time_per_batch must be greater than 0"),
        ((0.1, -0.1), "jitter must be from 0 to 2"),
        ((0.1, 0.0, ((5.0, 1.0), (2.0, 1.0))), "in order of time"),
        ((0.1, 0.0, ((5.0, 0.0),)), "finite factor greater than 0"),
        ((0.1, 0.0, ((math.inf, 1.0),)), "finite factor greater than 0"),
    ],
)
def test_impossible_speeds_are_refused(arguments: tuple[object, ...], sentence: str) -> None:
    """Before anything starts."""
    with pytest.raises(ValueError, match=sentence):
        Speed(*arguments)  # type: ignore[arg-type]
