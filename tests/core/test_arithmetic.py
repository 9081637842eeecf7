"""Which arithmetic a process computes with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest

from metis.core import arithmetic
from metis.core.arithmetic import Arithmetic, add_scaled, average, squared_distance


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


@pytest.mark.parametrize("models", [1, 32, 33, 70])
def test_models_in_files_are_read_in_parts_and_a_few_at_a_time(models: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit what models in memory give; what was worked off is given back."""
    size, held, most = 1000, 0, 0

    class Row:
        def __init__(self, numbers: np.ndarray) -> None:
            self._numbers = numbers

        def __getitem__(self, part: slice, /) -> np.ndarray:
            nonlocal held, most
            held += 1
            most = max(most, held)
            assert part.stop - part.start <= 64
            return self._numbers[part]

    class Counting(Arithmetic):
        def release(self, pieces: Iterable[np.ndarray]) -> None:
            nonlocal held
            held -= sum(piece.dtype == np.float32 and piece.base is not result for piece in pieces)

        def empty(self, size: int) -> np.ndarray:
            return result

    monkeypatch.setattr(arithmetic, "_READ", 64)
    rng = np.random.default_rng(models)
    rows = [rng.normal(size=size).astype(np.float32) for _ in range(models)]
    factors = rng.uniform(0.1, 9, models).tolist()
    expected, total = np.zeros(size), np.zeros(size)
    add_scaled(expected, list(zip(rows, factors, strict=True)))
    mean = average(size, list(zip(rows, factors, strict=True)), 3.0)

    result = np.empty(size, np.float32)
    arithmetic.choose(Counting())
    in_files = [(Row(row), factor) for row, factor in zip(rows, factors, strict=True)]
    add_scaled(total, in_files)
    average(size, in_files, 3.0)

    assert total.tobytes() == expected.tobytes()
    assert result.tobytes() == mean.tobytes()
    assert (held, most) == (0, min(models, 32))
