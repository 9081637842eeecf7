"""Numbers that change over the course of a run."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from metis.core.schedules import Cadence, Moment, Schedule

numbers = st.floats(1e-3, 1e3)


@given(numbers, numbers, numbers, st.sampled_from(["step", "linear", "cosine", "exponential"]), st.floats(0, 5000))
def test_a_schedule_goes_from_its_start_to_its_end_and_stays(start, end, length, shape, seconds):
    """And never leaves what lies between them."""
    schedule = Schedule(start, end, length, "seconds", shape, jumps=3)

    assert schedule(Moment()) == pytest.approx(start)
    assert schedule(Moment(seconds=length)) == pytest.approx(end)
    assert schedule(Moment(rounds=9, steps=9, seconds=1e9)) == pytest.approx(end)
    low, high = min(start, end), max(start, end)
    assert low * (1 - 1e-9) <= schedule(Moment(seconds=seconds)) <= high * (1 + 1e-9)


@pytest.mark.parametrize(
    ("shape", "half"),
    [
        ("linear", (4 + 0.25) / 2),
        ("cosine", (4 + 0.25) / 2),
        ("exponential", math.sqrt(4 * 0.25)),
        ("step", math.sqrt(4 * 0.25)),
    ],
)
@pytest.mark.parametrize(("over", "moment"), [("rounds", Moment(rounds=10)), ("steps", Moment(steps=10))])
def test_half_way(shape, half, over, moment):
    """By rounds or by steps; a step schedule of two jumps has made one."""
    assert Schedule(4, 0.25, 20, over, shape, jumps=2)(moment) == pytest.approx(half)


def test_no_jump_is_late_by_rounding():
    """With a jump in each round, round r has made r of them."""
    for jumps in range(1, 60):
        schedule = Schedule(1, 0.5, jumps, shape="step", jumps=jumps)
        for rounds in range(jumps + 1):
            assert schedule(Moment(rounds=rounds)) == pytest.approx(0.5 ** (rounds / jumps), rel=1e-12)


def test_a_step_schedule_waits_for_its_jump():
    schedule = Schedule(1, 0.1, 10, shape="step")
    assert [schedule(Moment(rounds=number)) for number in (0, 9, 10)] == pytest.approx([1, 1, 0.1])


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ((0, 1, 1), "start of a schedule is 0; it must be greater than 0"),
        ((1, math.inf, 1), "end of a schedule is inf; it must be finite and greater than 0"),
        ((1, 1, -2), "length of a schedule is -2; it must be greater than 0"),
        ((1, 1, 1, "minutes"), "over of a schedule is 'minutes'; it must be one of rounds, steps, seconds"),
        (
            (1, 1, 1, "rounds", "wave"),
            "shape of a schedule is 'wave'; it must be one of step, linear, cosine, exponential",
        ),
        ((1, 1, 1, "rounds", "step", 0), "jumps of a schedule is 0; it must be at least 1"),
    ],
)
def test_impossible_schedules_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=f"^{complaint}$"):
        Schedule(*settings)


def test_a_cadence_is_due_once_in_each_interval():
    """At the first opportunity in it; intervals start at multiples, however late the previous one was used."""
    cadence = Cadence(10)
    assert [now for now in (0, 3, 9.9, 10, 10, 19, 35, 39, 40, 49) if cadence.due(now)] == [0, 10, 35, 40]


def test_a_cadence_of_zero_is_always_due():
    cadence = Cadence(0)
    assert all(cadence.due(now) for now in (0.0, 0.0, 1.5, 1.5))
