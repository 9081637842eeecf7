"""Shamir's secret sharing: any t of n shares give the secret, fewer say nothing about it.

The field is that of P = 2^256 - 189. Member i of n, counted from 1, holds the value at i of a polynomial whose constant
is the secret and whose other coefficients are uniform: the caller brings the random bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

P = 2**256 - 189


def number(data: bytes) -> int:
    """32 bytes as an element of the field."""
    return int.from_bytes(data, "big") % P


def raw(value: int) -> bytes:
    """An element of the field as 32 bytes."""
    return value.to_bytes(32, "big")


def split(secret: int, threshold: int, members: int, randomness: bytes) -> list[int]:
    """The shares of members 1, 2, ..., from 32 random bytes for each of the threshold - 1 coefficients."""
    if not 1 <= threshold <= members or len(randomness) != 32 * (threshold - 1) or not 0 <= secret < P:
        raise ValueError(f"{threshold} of {members} with {len(randomness)} random bytes is not a sharing")
    polynomial = [secret, *(number(randomness[start : start + 32]) for start in range(0, len(randomness), 32))]
    shares = []
    for member in range(1, members + 1):
        value = 0
        for coefficient in reversed(polynomial):
            value = (value * member + coefficient) % P
        shares.append(value)
    return shares


def factors(members: Sequence[int]) -> list[int]:
    """What each of these members' shares counts in the secret (Lagrange's coefficients at 0)."""
    found = []
    for one in members:
        above, below = 1, 1
        for other in members:
            if other != one:
                above, below = above * other % P, below * (other - one) % P
        found.append(above * pow(below, -1, P) % P)
    return found


def combine(shares: Iterable[int], factors: Iterable[int]) -> int:
    """The secret of these shares, with the factors of their members."""
    return sum(share * factor for share, factor in zip(shares, factors, strict=True)) % P


def recover(shares: Mapping[int, int]) -> int:
    """The secret of exactly t shares by member."""
    return combine(shares.values(), factors(list(shares)))
