"""Which arithmetic a process computes with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from metis.core import arithmetic
from metis.core.arithmetic import Arithmetic, add_scaled, squared_distance


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    """Whatever a test chooses, the next one starts with numpy."""
    yield
    arithmetic.choose(Arithmetic())


def test_what_a_runtime_chooses_does_the_work() -> None:
    """Here: parts in descending order, which changes no result."""

    class Backward(Arithmetic):
        parts: list[tuple[int, int]] = []

        def each_part(self, size: int, models: int, work: Callable[[int, int], None]) -> None:
            super().each_part(size, models, lambda start, end: self.parts.append((start, end)))
            for start, end in reversed(self.parts):
                work(start, end)

    rows = [(np.arange(arithmetic.CALL + 5, dtype=np.float32), 0.1), (np.ones(arithmetic.CALL + 5, np.float32), 0.7)]
    expected, total = np.zeros(arithmetic.CALL + 5), np.zeros(arithmetic.CALL + 5)
    add_scaled(expected, rows)

    arithmetic.choose(Backward())
    add_scaled(total, rows)

    assert Backward.parts == [(0, arithmetic.CALL), (arithmetic.CALL, arithmetic.CALL + 5)]
    assert total.tobytes() == expected.tobytes()


def test_the_square_of_a_distance_is_summed_in_float64() -> None:
    """Over any number of parts; squares of float32 are exact in float64."""
    size = 2 * arithmetic.BLOCK + 3
    to, start = np.arange(size, dtype=np.float32), np.full(size, 2, np.float32)

    assert squared_distance(to, start, size) == sum((n - 2) ** 2 for n in range(size))
    assert squared_distance(to, None, 5) == 0 + 1 + 4 + 9 + 16
