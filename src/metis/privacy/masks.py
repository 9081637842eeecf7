"""Masks: the keystream of AES-256-CTR under a seed, added to the words of a body.

Each section of a body has a keystream of its own: with one for two sections their difference would be in the clear. A
keystream is made in pieces that stay in the processor's cache, which is several times faster than all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from metis.core.ring import Body, Section, Words
from metis.privacy.keys import derive

PIECE = 1 << 17  # bytes
_ZEROS = bytes(PIECE)


class Masks:
    """Adds the keystreams of some seeds to one section's words and subtracts those of others, piece after piece."""

    def __init__(self, section: Section, plus: Iterable[bytes], minus: Iterable[bytes]) -> None:
        self._streams = [
            (_keystream(derive(seed, "mask", section.number, section.bits)), ufunc)
            for ufunc, seeds in ((np.add, plus), (np.subtract, minus))
            for seed in seeds
        ]
        self._buffer = bytearray(PIECE + 15)
        self._keystream = np.frombuffer(self._buffer, section.dtype, PIECE * 8 // section.bits)

    def add_to(self, words: Words) -> None:
        """The next words of the section, whose keystream fills at most a piece."""
        zeros = memoryview(_ZEROS)[: words.nbytes]
        for stream, ufunc in self._streams:
            stream.update_into(zeros, self._buffer)
            ufunc(words, self._keystream[: words.size], out=words)


def _keystream(key: bytes) -> CipherContext:
    # A key makes one keystream only, so that its counter may start at zero.
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()


def pieces(section: Section) -> Iterator[slice]:
    """The words of a section, a piece after the other."""
    step = PIECE * 8 // section.bits
    for start in range(0, section.size, step):
        yield slice(start, min(start + step, section.size))


def mask(body: Body, sections: Sequence[Section], plus: Sequence[bytes], minus: Sequence[bytes]) -> None:
    """body += masks of `plus` - masks of `minus`, in place."""
    for section in sections:
        masks, words = Masks(section, plus, minus), section.view(body)
        for piece in pieces(section):
            masks.add_to(words[piece])


def unmasked_sum(
    bodies: Mapping[str, Body], sections: Sequence[Section], plus: Sequence[bytes], minus: Sequence[bytes]
) -> Body:
    """The sum of bodies, which may lie on disk, + masks of `plus` - masks of `minus`; only the sum is in memory."""
    total = np.zeros(sections[-1].end, np.uint8)
    for section in sections:
        masks, words = Masks(section, plus, minus), section.view(total)
        views = [section.view(body) for body in bodies.values()]
        for piece in pieces(section):
            part = words[piece]
            for view in views:
                np.add(part, view[piece], out=part)
            masks.add_to(part)
    return total
