"""Curves and timelines of bounded size, however long a run lasts."""

from __future__ import annotations

import math
from typing import Any

KINDS = ("training", "transfer", "idle", "away")
MAX_POINTS = 600


def short(value: float | None) -> float | None:
    """Nine digits are more than a screen can show; JSON has no infinity."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.9g}")


class Series:
    """A curve of bounded length: when it is full, every second point is dropped, and of new points equally many.

    The first and the latest point are always kept.
    """

    def __init__(self, limit: int = MAX_POINTS) -> None:
        assert limit % 2 == 0  # so that the point that exceeds it is kept
        self.points: list[list[float | None]] = []
        self._limit, self._stride, self._count = limit, 1, 0
        self._provisional = False  # whether the last point is kept only because it is the latest
        self._sent = 0

    def add(self, point: list[float | None]) -> None:
        if self._provisional:
            self._pop()
        self._provisional = self._count % self._stride != 0
        self.points.append(point)
        self._count += 1
        if len(self.points) > self._limit and not self._provisional:
            self.points = self.points[::2]
            self._stride *= 2
            self._sent = 0

    def replace_last(self, point: list[float | None]) -> None:
        self._pop()
        self.points.append(point)

    def _pop(self) -> None:
        self.points.pop()
        self._sent = min(self._sent, len(self.points))

    def increment(self) -> list[Any] | None:
        """The index from which the page must replace its points, then the points; None if nothing changed."""
        if self._sent == len(self.points):
            return None
        start, self._sent = self._sent, len(self.points)
        return [start, *self.points[start:]]


def merged(spans: list[tuple[float, Any]], count: int) -> list[tuple[float, Any]]:
    """The first `count` spans merged in pairs, the rest unchanged."""
    pairs: list[tuple[float, Any]] = []
    start = 0.0
    for (middle, first), (end, second) in zip(spans[:count:2], spans[1:count:2], strict=True):
        seconds = [0.0] * len(KINDS)
        for kind, length in ((first, middle - start), (second, end - middle)):
            if isinstance(kind, int):
                seconds[kind] += length
            else:
                seconds = [a + b for a, b in zip(seconds, kind, strict=True)]
        pairs.append((end, tuple(float(f"{value:.6g}") for value in seconds)))
        start = end
    return pairs + spans[count:]
