"""Shamir's secret sharing."""

from __future__ import annotations

import hashlib
from itertools import combinations

import pytest
from hypothesis import given, strategies as st

from metis.core.shamir import P, factors, number, raw, recover, split


def randomness(count: int, seed: int = 0) -> bytes:
    return b"".join(hashlib.sha256(f"{seed} {index}".encode()).digest() for index in range(count))


@given(st.integers(0, P - 1), st.integers(1, 6), st.integers(0, 3), st.integers(0, 100))
def test_any_t_shares_give_the_secret(secret: int, threshold: int, more: int, seed: int) -> None:
    """Whichever t members they are of."""
    shares = split(secret, threshold, threshold + more, randomness(threshold - 1, seed))
    for members in combinations(range(1, threshold + more + 1), threshold):
        assert recover({member: shares[member - 1] for member in members}) == secret


def test_fewer_than_t_shares_fit_every_secret() -> None:
    """For two shares of 3, and any secret, there is a polynomial: two shares say nothing."""
    shares = split(7, 3, 5, randomness(2))
    for secret in (0, 7, P - 1):
        # The quadratic through (0, secret), (1, share 1) and (2, share 2) exists: its value at 3 is another share.
        third = sum(f * y for f, y in zip(_at_three(), (secret, shares[0], shares[1]), strict=True)) % P
        assert recover({1: shares[0], 2: shares[1], 3: third}) == secret


def _at_three() -> list[int]:
    """Lagrange's coefficients of the values at 0, 1, 2 for the value at 3: 1, -3, 3."""
    return [1, -3, 3]


def test_factors_of_two_members_by_hand() -> None:
    """The line through (1, a) and (2, b) is 2a - b at 0."""
    assert factors([1, 2]) == [2, P - 1]


def test_an_element_of_the_field_has_32_bytes_and_lies_below_p() -> None:
    assert number(raw(5)) == 5
    assert number(b"\xff" * 32) == 188
    assert len(raw(P - 1)) == 32


@pytest.mark.parametrize(
    ("secret", "threshold", "members", "count"), [(1, 0, 3, 0), (1, 4, 3, 3), (1, 2, 3, 0), (P, 2, 3, 1), (-1, 2, 3, 1)]
)
def test_what_is_not_a_sharing_is_refused(secret: int, threshold: int, members: int, count: int) -> None:
    with pytest.raises(ValueError, match="not a sharing"):
        split(secret, threshold, members, randomness(count))
