"""Fixed-point numbers in a ring of 16, 32 or 64 bits, whose sums are exact in any order.

A learner's body is one buffer of three sections, each a keystream of its own under masks:

| section | words | bits | clip |
|---|---|---|---|
| 0, wide | 1, the clamped share, the scalars, then buffers' differences | 64 | 2^20 |
| 1, parameters | differences from the base model | `bits` | `clip` |
| 2, control variates | differences, only where the layout has them | `bits` | `control_clip` |

A word is rint(q * clamp(value, +-clip) / clip * 2^room) with q = p / (largest p). `room` leaves N words enough space
not to wrap, so `mean` gives base + clip * sum / sum of q. The first word sums to the public sum of q: if it does not,
something is wrong with the masks and the sum is refused.

Use: `ring.quantize(local, base, p, most, scalars) -> Quantized`, `ring.add(total, body)`,
`ring.mean(total, base, weights, most) -> Opened`. The simulator does only this; a deployment masks the bodies between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.core.canonical import Message
from metis.core.model import Layout, Model, Vector
from metis.errors import Diverged, Refused

BLOCK = 1 << 16  # numbers; half a MiB of float64 stays in the cache
WIDE = 2.0**20  # clip of buffers, losses and norms
BITS = (16, 32, 64)
MOST_MEMBERS = 1000

Body = NDArray[np.uint8]
Words = NDArray[Any]  # unsigned, little-endian


@dataclass(frozen=True)
class Section:
    """A part of a body: its words, where they lie, and which numbers of the vector they are."""

    number: int
    bits: int
    clip: float
    leading: int  # words before the vector's
    parts: tuple[slice, ...]  # of the vector
    start: int  # byte

    @property
    def size(self) -> int:
        """How many words."""
        return self.leading + sum(int(part.stop - part.start) for part in self.parts)

    @property
    def end(self) -> int:
        return self.start + self.size * self.bits // 8

    @property
    def dtype(self) -> str:
        return f"<u{self.bits // 8}"

    def view(self, body: Body) -> Words:
        """The words of this section; not a copy."""
        return body[self.start : self.end].view(self.dtype)


@dataclass(frozen=True, eq=False)
class Quantized:
    """A local model in the ring."""

    body: Body
    clamped: int  # how many of its numbers lay outside of the clip


@dataclass(frozen=True, eq=False)
class Opened:
    """What a sum says."""

    vector: Vector
    clamped: float  # weighted mean of the share of numbers that were clamped
    scalars: tuple[float, ...]  # weighted means


@dataclass(frozen=True)
class Ring(Message):
    """How numbers become words, for a cohort of so many learners."""

    bits: int
    learners: int
    clip: float
    control_clip: float = 1.0
    scalars: int = 3

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise Refused(f"a ring has 16, 32 or 64 bits, not {self.bits}")
        if not 1 <= self.learners <= MOST_MEMBERS or not 0 <= self.scalars <= 1000:
            raise Refused(f"a ring is for 1 to {MOST_MEMBERS} learners and 0 to 1000 scalars")
        if not all(math.isfinite(clip) and clip > 0 for clip in (self.clip, self.control_clip)):
            raise Refused(f"a clip is a positive number, not {self.clip!r} or {self.control_clip!r}")

    def sections(self, layout: Layout) -> tuple[Section, ...]:
        """The parts of a body for models of this layout; the widest comes first, so that all are aligned."""
        roles = {"buffer": 0, "parameter": 1, "control": 2}
        parts: tuple[list[slice], ...] = ([], [], [])
        for spec in layout.tensors:
            if spec.role != "counter" and spec.size:
                mine, part = parts[roles[spec.role]], layout.slices[spec.name]
                if mine and mine[-1].stop == part.start:
                    part = slice(mine.pop().start, part.stop)
                mine.append(part)
        wide = Section(0, 64, WIDE, 2 + self.scalars, tuple(parts[0]), 0)
        main = Section(1, self.bits, self.clip, 0, tuple(parts[1]), wide.end)
        control = Section(2, self.bits, self.control_clip, 0, tuple(parts[2]), main.end)
        return (wide, main, control) if control.size else (wide, main)

    def nbytes(self, layout: Layout) -> int:
        """Bytes of a body."""
        return self.sections(layout)[-1].end

    def room(self, bits: int) -> int:
        """Bits of a word's largest value: learners * (2^room + 1/2) < 2^(bits - 1), so that a sum cannot wrap."""
        return min(bits - 1 - self.learners.bit_length(), 52)

    def quantize(
        self, local: Model, base: Model, p: float, most: float, scalars: Sequence[float], factor: float = 1.0
    ) -> Quantized:
        """The difference of a local model from its base, weighted by p / most; Diverged if a number is not finite.

        Parameters also count by the factor, buffers, control variates and scalars do not.
        """
        if not 0 < p * max(1.0, factor) <= most * (1 + 1e-12):
            raise Refused(f"a contribution value must lie above 0 and not above the largest, {most:g}, not at {p!r}")
        if len(scalars) != self.scalars:
            raise ValueError(f"this ring carries {self.scalars} scalars, not {len(scalars)}")
        q, layout, clamped = p / most, local.layout, 0
        body = np.zeros(self.nbytes(layout), np.uint8)
        sections = self.sections(layout)
        for section in sections:
            words, at = section.view(body), section.leading
            for part in section.parts:
                for start in range(part.start, part.stop, BLOCK):
                    stop = min(start + BLOCK, part.stop)
                    delta = local.vector[start:stop].astype(np.float64)
                    delta -= base.vector[start:stop]
                    own = q * factor if section.number == 1 else q
                    clamped += self._write(words[at : at + stop - start], delta, own, section)
                    at += stop - start
        head = np.array([1.0, clamped / max(1, layout.size), *scalars], np.float64)
        self._write(sections[0].view(body)[: head.size], head, q, sections[0])
        return Quantized(body, clamped)

    def _write(self, words: Words, values: NDArray[np.float64], q: float, section: Section) -> int:
        if not np.isfinite(np.add.reduce(values)):  # an infinity or NaN anywhere shows in the sum
            raise Diverged("the update has numbers that are not finite; it is neither masked nor sent")
        outside = np.count_nonzero(np.abs(values) > section.clip)
        if outside:
            np.clip(values, -section.clip, section.clip, out=values)
        values *= q * 2.0 ** self.room(section.bits) / section.clip
        words.view(f"<i{section.bits // 8}")[:] = np.rint(values, out=values)
        return int(outside)

    def total(self, layout: Layout) -> Body:
        """The sum of nothing."""
        return np.zeros(self.nbytes(layout), np.uint8)

    def add(self, total: Body, body: Body, layout: Layout) -> None:
        """total += body, word by word."""
        for section in self.sections(layout):
            into = section.view(total)
            np.add(into, section.view(body), out=into)

    def sum(self, bodies: Iterable[Body], layout: Layout) -> Body:
        """The sum of bodies."""
        total = self.total(layout)
        for body in bodies:
            self.add(total, body, layout)
        return total

    def mean(
        self, total: Body, base: Model, weights: Mapping[str, float], most: float, divisor: float | None = None
    ) -> Opened:
        """The weighted mean of the local models whose contribution values these are; Refused if they do not fit.

        With a divisor the sum is divided by that number instead of the sum of the contribution values.
        """
        layout = base.layout
        if total.size != self.nbytes(layout):
            raise Refused(f"a sum has {self.nbytes(layout)} bytes here, not {total.size}")
        sections = self.sections(layout)
        head = sections[0].view(total)[: sections[0].leading].view("<i8")
        one = np.zeros(1, "<u8")
        expected = 0
        for p in weights.values():
            self._write(one, np.ones(1), p / most, sections[0])
            expected += int(one[0])
        if int(head[0]) != expected:
            raise Refused("the sum of the contribution values is not the public one; masks or bodies are wrong")
        whole = math.fsum(p / most for p in weights.values())
        vector = base.vector.copy()
        for section in sections:
            words, at = section.view(total).view(f"<i{section.bits // 8}"), section.leading
            factor = self._factor(section, whole if divisor is None else divisor / most)
            for part in section.parts:
                for start in range(part.start, part.stop, BLOCK):
                    stop = min(start + BLOCK, part.stop)
                    values = words[at : at + stop - start].astype(np.float64)
                    values *= factor
                    values += vector[start:stop]
                    vector[start:stop] = values
                    at += stop - start
        means = head.astype(np.float64) * self._factor(sections[0], whole)
        return Opened(vector, float(means[1]), tuple(map(float, means[2:])))

    def _factor(self, section: Section, whole: float) -> float:
        return section.clip / (whole * 2.0 ** self.room(section.bits))
