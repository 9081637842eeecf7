"""Where noise and samples come from: the operating system in a deployment, a seed in a simulation."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from metis.system import random_bytes


class Chance(Protocol):
    """Random numbers for one task."""

    def uniform(self, count: int) -> NDArray[np.float64]:
        """From 0 on, below 1."""
        ...

    def normal(self, count: int) -> NDArray[np.float64]:
        """Of mean 0 and standard deviation 1."""
        ...


class SystemChance:
    """The operating system's generator: different each time, and known to nobody.

    Long draws are the keystream of AES-256 under a key from it that is used once, which is ten times as fast.
    """

    def uniform(self, count: int) -> NDArray[np.float64]:
        numbers: NDArray[np.float64] = self._bits(count) * 2.0**-53
        return numbers

    def normal(self, count: int) -> NDArray[np.float64]:
        half = -(-count // 2)
        radius = self._bits(half)
        radius += 1.0  # never the logarithm of 0
        radius *= 2.0**-53
        np.sqrt(-2.0 * np.log(radius, out=radius), out=radius)
        angle = np.frombuffer(_stream(4 * half), np.uint32) * (2.0**-31 * np.pi)
        numbers = np.empty(2 * half)
        np.multiply(radius, np.cos(angle), out=numbers[:half])
        np.multiply(radius, np.sin(angle), out=numbers[half:])
        return numbers[:count]

    @staticmethod
    def _bits(count: int) -> NDArray[np.float64]:
        """Whole numbers of 53 bits."""
        numbers = np.frombuffer(_stream(8 * count), np.uint64) >> np.uint64(11)
        whole: NDArray[np.float64] = numbers.view(np.int64).astype(np.float64)  # signed ones are converted faster
        return whole


def _stream(count: int) -> bytes:
    """So many bytes that nobody can guess."""
    if count > 4096:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError:  # comes with the extra 'deploy'
            return random_bytes(count)
        secret = random_bytes(48)
        return Cipher(algorithms.AES(secret[:32]), modes.CTR(secret[32:])).encryptor().update(bytes(count))
    return random_bytes(count)


class SeededChance:
    """A simulation's: the same for the same seed, so that a run can be repeated; it protects nobody."""

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self._generator = np.random.default_rng(seed)

    def uniform(self, count: int) -> NDArray[np.float64]:
        return self._generator.random(count)

    def normal(self, count: int) -> NDArray[np.float64]:
        return self._generator.standard_normal(count)
