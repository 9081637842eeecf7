"""HOW MUCH a local model counts, against the paper's formulas."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from core.play import model
from metis.core.contribution import capped, dataset_size, step_recency, steps_done, version_staleness
from metis.core.events import CommunityStamp, UpdateRequest
from metis.core.roster import LearnerRecord

LEARNER = LearnerRecord("a", examples=1234, batch_size=100)
EVERY_VALUE = [dataset_size, steps_done, step_recency, version_staleness]

counts = st.integers(0, 10**9)


def request(steps: int) -> UpdateRequest:
    return UpdateRequest("a", 0, steps, 1.0, 0.1, model())


def test_dataset_size_is_the_number_of_examples():
    """FedAvg: p_k = |D_k|, however many steps were done."""
    assert dataset_size(request(7), LEARNER, CommunityStamp(), CommunityStamp()) == 1234


def test_steps_done_is_the_number_of_steps():
    """The appendix: p_k = B_k, however many examples there are."""
    assert steps_done(request(7), LEARNER, CommunityStamp(), CommunityStamp()) == 7


@given(counts, counts, st.integers(1, 10**6))
def test_step_recency(base: int, since: int, steps: int):
    """I12: 1 if others committed no more than I did, else (s_c' - (s_c + s_k))^(-1/2)."""
    value = step_recency(request(steps), LEARNER, CommunityStamp(1, base), CommunityStamp(9, base + since))

    if since <= steps:
        assert value == 1.0
    else:
        assert value == pytest.approx(1 / math.sqrt(since - steps))


def test_step_recency_at_no_staleness():
    """R8: delta = 0 counts fully, and so does delta = 1 by the formula."""
    for since, expected in ((10, 1.0), (11, 1.0), (14, 4**-0.5)):
        assert step_recency(request(10), LEARNER, CommunityStamp(), CommunityStamp(0, since)) == expected


@given(counts, st.integers(0, 10**6))
def test_version_staleness(base: int, missed: int):
    """R14: (T - tau + 1)^(-1/2); up to date counts 1."""
    value = version_staleness(request(1), LEARNER, CommunityStamp(base, 0), CommunityStamp(base + missed, 0))

    assert value == pytest.approx(1 / math.sqrt(missed + 1))
    assert (value == 1.0) == (missed == 0)


@pytest.mark.parametrize("contribution", EVERY_VALUE)
@given(counts, counts, counts, counts, st.integers(1, 10**9))
def test_every_value_is_finite_and_positive(contribution, version, steps, versions_since, steps_since, done):
    """I2: for every legal update."""
    base = CommunityStamp(version, steps)
    current = CommunityStamp(version + versions_since, steps + steps_since)

    value = contribution(request(done), LEARNER, base, current)

    assert isinstance(value, float)
    assert math.isfinite(value)
    assert value > 0


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ((1, 1, 2), 0.5, (1, 1, 2)),
        ((1, 1, 8), 0.5, (1, 1, 2)),
        ((1, 1, 1, 100, 9), 0.3, (1, 1, 1, 9 / 4, 9 / 4)),  # c = 0.3 (2 c + 3)
        ((1, 5, 9), 1 / 3, (1, 1, 1)),
        ((4, 9), 0.3, (4, 4)),  # two cannot each have less than half
        ((7,), 0.2, (7,)),
    ],
)
def test_the_largest_values_are_lowered_to_their_share(values, share, expected):
    """And no further; those that are lowered become equal, the others keep theirs."""
    lowered = capped(dict(enumerate(values)), share)
    assert list(lowered.values()) == pytest.approx(expected)


@given(st.dictionaries(st.integers(), st.floats(1e-3, 1e9), min_size=1, max_size=9), st.floats(0.05, 1))
def test_no_value_has_more_than_its_share(values, share):
    """Unless there are too few of them, and then all are equal; none becomes larger, none 0, and the order stays."""
    lowered = capped(values, share)
    total = math.fsum(lowered.values())
    assert all(0 < lowered[key] <= values[key] for key in values)
    assert max(lowered.values()) <= max(share, 1 / len(values)) * total * (1 + 1e-6)
    ordered = [lowered[key] for key in sorted(values, key=values.__getitem__)]
    assert ordered == sorted(ordered)
