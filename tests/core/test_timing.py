"""Time becomes steps, measured batches become a time per batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from metis.core.timing import MAX_STEPS, TypicalTime, robust_time_per_batch, steps_of_epochs, steps_within


@given(st.integers(1, 10_000), st.sampled_from([0.03, 0.3, 0.05, 0.8, 0.06, 2.0, 0.12, 0.1, 0.7]))
def test_whole_batches_are_not_lost_to_rounding(batches: int, time_per_batch: float):
    """R1: the slowest learner gets exactly the batches that made the period (68.4 / 0.3 is 228)."""
    assert steps_within(batches * time_per_batch, time_per_batch) == batches
    assert steps_within(2 * (batches * time_per_batch), time_per_batch) == 2 * batches


def test_a_bare_floor_would_lose_a_batch():
    """The number of the paper's power-law rows: two epochs of 114 batches of 0.3 seconds."""
    period = 2 * (114 * 0.3)
    assert math.floor(period / 0.3) == 227
    assert steps_within(period, 0.3) == 228


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e3))
def test_steps_fit_and_one_more_does_not(seconds: float, time_per_batch: float):
    """B_k batches take no longer than the period; at least one is done all the same."""
    steps = steps_within(seconds, time_per_batch)

    assert steps >= 1
    assert (steps + 1) * time_per_batch > seconds
    assert steps == 1 or steps * time_per_batch <= seconds * (1 + 1e-8)


@pytest.mark.parametrize(("seconds", "time_per_batch"), [(1.0, 5e-324), (math.inf, 0.3), (1e308, 1e-308)])
def test_absurd_times_stay_countable(seconds: float, time_per_batch: float):
    """No claim of a learner overflows."""
    assert steps_within(seconds, time_per_batch) == MAX_STEPS


@pytest.mark.parametrize(
    ("epochs", "epoch_steps", "steps"),
    [
        (4, 50, 200),
        (0.5, 51, 25),
        (0.5, 50, 25),
        (0.001, 50, 1),
        (1.1, 10, 11),
        (0.7, 10, 7),
        (0.29, 100, 29),
        (0.57, 100, 57),
    ],
)
def test_fractional_epochs(epochs: float, epoch_steps: int, steps: int):
    """Rounded down to whole batches, but not by a rounding error of the product, and never to none."""
    assert steps_of_epochs(epochs, epoch_steps) == steps


def test_the_warm_up_batch_is_ignored():
    """The first batch of a task loads, compiles and allocates."""
    assert robust_time_per_batch([9.0, 1.0, 2.0, 3.0]) == (1.0 + 2.0 + 3.0) / 3


def test_a_single_batch_is_all_there_is():
    """A task of one batch gives its time, warm-up or not."""
    assert robust_time_per_batch([9.0]) == 9.0


def test_stalls_are_ignored():
    """A batch beyond three times the median was something else's doing."""
    assert robust_time_per_batch([1.0, 1.0, 1.2, 0.8, 100.0]) == pytest.approx((1.0 + 1.2 + 0.8) / 3)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1))
def test_the_estimate_is_among_the_measurements(times: list[float]):
    """Whatever is left out, something remains."""
    estimate = robust_time_per_batch(times)

    assert min(times) * (1 - 1e-9) <= estimate <= max(times) * (1 + 1e-9)


# --- over several tasks -----------------------------------------------------------------------


def test_a_typical_time_averages_what_is_alike():
    """The geometric mean of what was known and what is measured."""
    typical = TypicalTime()
    assert [typical.note(seconds) for seconds in (0.1, 0.2)] == [None, None]
    assert typical.value == pytest.approx(math.sqrt(0.1 * 0.2))


def test_a_single_odd_task_is_ignored_and_two_in_a_row_are_a_change():
    """Odd is beyond a factor of 2; two odd ones in opposite directions are no change."""
    typical = TypicalTime()
    for seconds in (0.1, 1.0, 0.1, 0.01, 1.0, 0.1):
        assert typical.note(seconds) is None
        assert typical.value == pytest.approx(0.1)
    assert typical.note(1.0) is None
    assert typical.note(1.2) == pytest.approx(0.1)
    assert typical.value == 1.2


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30))
def test_a_typical_time_stays_among_what_was_measured(times: list[float]):
    typical = TypicalTime()
    for seconds in times:
        typical.note(seconds)
    assert min(times) * (1 - 1e-9) <= typical.value <= max(times) * (1 + 1e-9)


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_a_typical_time_finds_a_constant_one_within_a_few_tasks(before: float, after: float):
    """However far it has changed: within a tenth after six tasks."""
    typical = TypicalTime(before)
    for _ in range(6):
        typical.note(after)
    assert typical.value == pytest.approx(after, rel=0.1)
