"""Homomorphic encryption (CKKS, by TenSEAL): learners share a key, and the controller adds what it cannot read.

    secret, public = new_keys()                 secret: for the learners only; public: for the controller
    KeyHolder(secret).encrypt(vector)           -> blocks, as bytes, one after the other
    Adder(public).scaled(block, p)              -> p times a block; scaled blocks can be added and subtracted
    Adder(public).add(one, other), .subtract(one, other)
    KeyHolder(secret).decrypt(blocks, size, sum_of_p)

So all protocols keep their arithmetic, the asynchronous cache too: the running sum gets p' w' and loses p w, both
encrypted. What it costs and whom one must trust, beside the secure sum:

| | secure sum | CKKS |
|---|---|---|
| upload over float32 | 1.00 | 14.4, and 8 once it is scaled |
| a learner's work for 1e6 numbers, ten learners | 0.01 s | 0.9 s |
| accuracy of the mean | exact sum of numbers rounded to 2^-27 of the clip | about 1e-7 |
| messages of a learner in a round | one large, two small | one large |
| who can read a learner's model | the controller with more than c members | **the controller with ONE learner** |
| who can read the community model | everybody | the learners; the controller cannot evaluate it |
| asynchronous protocols | in windows of c + 3 learners | after every update |

The controller must never get what was decrypted, not even rounded a little: CKKS's rounding errors depend on the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from metis.core.layers.ckks import SLOTS
from metis.core.model import Vector
from metis.errors import ConfigError, Diverged, Refused, needs_package

_DEGREE, _PRIMES, _SCALE = 2 * SLOTS, [60, 40, 60], 2.0**40  # 128 bits of security, one multiplication
LARGEST_BLOCK = 1 << 18
LARGEST_NUMBER = 2.0**18  # of a sum: above it the numbers would wrap


def _tenseal() -> Any:
    try:
        import tenseal
    except ImportError as problem:
        raise ConfigError(needs_package("homomorphic encryption", problem.name, "ckks")) from None
    return tenseal


def new_keys() -> tuple[bytes, bytes]:
    """The learners' key, and what the controller needs to add; the second does not contain the first."""
    tenseal = _tenseal()
    context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, _DEGREE, coeff_mod_bit_sizes=_PRIMES)
    context.global_scale = _SCALE
    secret = context.serialize(save_secret_key=True, save_galois_keys=False, save_relin_keys=False)
    context.make_context_public()
    return bytes(secret), bytes(context.serialize(save_galois_keys=False, save_relin_keys=False))


class _Context:
    """Reads and writes blocks."""

    def __init__(self, key: bytes, *, private: bool) -> None:
        self._tenseal = _tenseal()
        try:
            self._context = self._tenseal.context_from(key)
            right = self._context.is_private() == private and self._context.global_scale == _SCALE
        except (ValueError, RuntimeError):
            right = False
        if not right:
            whose = "a learner's key" if private else "the controller's part of the keys"
            raise ConfigError(f"this is not {whose} for homomorphic encryption, as made by metis")

    def _read(self, block: bytes) -> Any:
        try:
            if len(block) <= LARGEST_BLOCK:
                vector = self._tenseal.ckks_vector_from(self._context, block)
                if vector.size() == SLOTS:
                    return vector
        except (ValueError, RuntimeError):
            pass
        raise Refused(f"{len(block)} bytes are not an encrypted block of {SLOTS} numbers under this key")

    def encrypt(self, vector: Vector) -> Iterator[bytes]:
        """The blocks of a model, one after the other; Diverged if a number is not finite or too large."""
        for start in range(0, vector.size, SLOTS):
            part = np.zeros(SLOTS, np.float64)
            part[: vector.size - start] = vector[start : start + SLOTS]
            if not np.abs(part).max() < LARGEST_NUMBER:
                raise Diverged(f"the update has numbers that are not finite, or not below {LARGEST_NUMBER:g}")
            yield bytes(self._tenseal.ckks_vector(self._context, part).serialize())


class KeyHolder(_Context):
    """A learner: encrypts its model and decrypts the sum."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret, private=True)

    def decrypt(self, blocks: Iterable[bytes], size: int, divisor: float = 1.0) -> Vector:
        """The numbers of a sum over the divisor; Refused if a block is missing, too much or not one."""
        result, start = np.empty(size, np.float32), 0
        for block in blocks:
            if start >= size:
                raise Refused(f"a model of {size} numbers has {-(-size // SLOTS)} encrypted blocks, not more")
            numbers = np.array(self._read(block).decrypt(), np.float64)[: size - start]
            result[start : start + SLOTS] = numbers / divisor
            start += SLOTS
        if start < size:
            raise Refused(f"a model of {size} numbers has {-(-size // SLOTS)} encrypted blocks, not {start // SLOTS}")
        return result


class Adder(_Context):
    """The controller: adds blocks that it cannot read."""

    def __init__(self, public: bytes) -> None:
        super().__init__(public, private=False)

    def check(self, block: bytes) -> None:
        """Refuse what cannot be scaled and added up."""
        self._read(block)

    def scaled(self, block: bytes, factor: float) -> bytes:
        """factor * block; a block can be scaled once, and every block of a sum must be."""
        if not 2.0**-20 <= factor < LARGEST_NUMBER:
            raise Refused(f"an encrypted block can be scaled by 2^-20 to {LARGEST_NUMBER:g}, not by {factor!r}")
        try:
            return bytes((self._read(block) * factor).serialize())
        except ValueError:
            raise Refused("an encrypted block can be scaled only once") from None

    def add(self, one: bytes, other: bytes) -> bytes:
        """The sum of two blocks."""
        return self._combined(one, other, "__add__")

    def subtract(self, one: bytes, other: bytes) -> bytes:
        """The difference of two blocks."""
        return self._combined(one, other, "__sub__")

    def _combined(self, one: bytes, other: bytes, operation: str) -> bytes:
        try:
            return bytes(getattr(self._read(one), operation)(self._read(other)).serialize())
        except ValueError:
            raise Refused("a scaled and an unscaled encrypted block do not add up") from None
