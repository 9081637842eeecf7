"""The arithmetic of mixing, in pieces whose float64 sums stay in the processor's cache.

An element of a result depends on that element of the models alone, and is added up in the order given. So the parts
may be worked off in any order and by any number of threads, and a process that has a faster way than numpy's may use
it: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

BLOCK = 128 * 1024  # numbers; sums over a whole model are made of sums over these, so their bits depend on it
# Numbers that one call of the arithmetic works off. With fewer, threads that call numpy wait for each other longer than
# the sums, which then stay in a nearer cache, take less time.
CALL = 256 * 1024
_PIECE = 16 * 1024  # numbers whose float64 values stay in the processor's cache; inner products depend on it
_READ = 128 * 1024  # numbers of a model that are read from its file at a time
_ROWS_AT_ONCE = 32  # models of which so much is in memory at the same time


class Row(Protocol):
    """A stored local model that can be read piece by piece, so that a store may leave it on disk."""

    def __getitem__(self, part: slice, /) -> NDArray[np.float32]: ...


class Arithmetic:
    """One part after the other, by numpy."""

    def empty(self, size: int) -> NDArray[np.float32]:
        """Memory for a result."""
        return np.empty(size, np.float32)

    def zeros(self, size: int) -> NDArray[np.float64]:
        """Memory for a sum."""
        return np.zeros(size, np.float64)

    def release(self, pieces: Iterable[NDArray[Any]]) -> None:
        """These were worked off: what is in a file as well need not stay in memory."""

    def add(self, total: NDArray[np.float64], pieces: Sequence[tuple[NDArray[np.float32], float]]) -> None:
        """total += factor * piece, one piece after the other."""
        product = np.empty(total.size, np.float64)
        for piece, factor in pieces:
            product[:] = piece  # first: float32 times a Python float is float32
            product *= factor
            total += product

    def average(
        self, result: NDArray[np.float32], pieces: Sequence[tuple[NDArray[np.float32], float]], divisor: float
    ) -> None:
        """result = the sum of factor * piece, one piece after the other, over the divisor."""
        total = np.zeros(result.size, np.float64)
        Arithmetic.add(self, total, pieces)
        np.divide(total, divisor, out=total)
        result[:] = total

    def each_part(self, size: int, models: int, work: Callable[[int, int], None]) -> None:
        """Call `work` with start and end of every part of a vector of this size, the sum of this many models."""
        for start in range(0, size, CALL):
            work(start, min(start + CALL, size))


_chosen = Arithmetic()


def choose(arithmetic: Arithmetic) -> None:
    """Use this arithmetic in this process from now on; for a runtime with threads, which the core does not have."""
    global _chosen  # noqa: PLW0603  # it changes no result, and a process has its processors only once
    _chosen = arithmetic


def add_scaled(total: NDArray[np.float64], rows: Sequence[tuple[Row, float]]) -> None:
    """total += sum of factor * row, element by element in the order given."""

    def work(start: int, end: int) -> None:
        for part in _readable(rows, start, end):
            _add(total[part], rows, part)
            _chosen.release([total[part]])

    _chosen.each_part(total.size, len(rows), work)


def average(size: int, rows: Sequence[tuple[Row, float]], divisor: float) -> NDArray[np.float32]:
    """The sum of factor * row over the divisor, with no more than the result in memory."""
    result = _chosen.empty(size)
    few = _in_memory(rows) or len(rows) <= _ROWS_AT_ONCE

    def work(start: int, end: int) -> None:
        for part in _readable(rows, start, end):
            if few:
                pieces = [(row[part], factor) for row, factor in rows]
                _chosen.average(result[part], pieces, divisor)
                _chosen.release([piece for piece, _ in pieces])
            else:
                total = np.zeros(part.stop - part.start)
                _add(total, rows, part)
                np.divide(total, divisor, out=result[part], casting="same_kind")
            _chosen.release([result[part]])

    _chosen.each_part(size, len(rows), work)
    return result


def _in_memory(rows: Sequence[tuple[Row, float]]) -> bool:
    return all(type(row) is np.ndarray for row, _ in rows)


def _readable(rows: Sequence[tuple[Row, float]], start: int, end: int) -> Iterator[slice]:
    """Parts of a size to be read from files, if that is where the rows are."""
    at_once = CALL if _in_memory(rows) else _READ
    for begin in range(start, end, at_once):
        yield slice(begin, min(begin + at_once, end))


def _add(total: NDArray[np.float64], rows: Sequence[tuple[Row, float]], part: slice) -> None:
    """total += this part of the rows, of which a few are in memory at a time, if they are read from files."""
    at_once = len(rows) if _in_memory(rows) else _ROWS_AT_ONCE
    for begin in range(0, len(rows), max(1, at_once)):
        pieces = [(row[part], factor) for row, factor in rows[begin : begin + at_once]]
        _chosen.add(total, pieces)
        _chosen.release([piece for piece, _ in pieces])


def in_parts(work: Callable[..., object], *vectors: NDArray[Any]) -> None:
    """Call `work` with the same part of all these vectors, which are equally long, for every part of them."""

    def each(start: int, end: int) -> None:
        pieces = [vector[start:end] for vector in vectors]
        work(*pieces)
        _chosen.release(pieces)

    _chosen.each_part(vectors[0].size, len(vectors), each)


def release(*pieces: NDArray[Any]) -> None:
    """These were worked off: what is in a file as well need not stay in memory."""
    _chosen.release(pieces)


def empty(size: int) -> NDArray[np.float32]:
    """Memory for a model."""
    return _chosen.empty(size)


def zeros(size: int) -> NDArray[np.float64]:
    """The beginning of a sum that is as long as a model."""
    return _chosen.zeros(size)


def widened(numbers: NDArray[Any]) -> NDArray[np.float64]:
    """A copy in float64, to be changed in place."""
    copy = _chosen.zeros(numbers.size)
    in_parts(np.copyto, copy, numbers)
    return copy


def quotient(total: NDArray[np.float64], divisor: float) -> NDArray[np.float32]:
    """total / divisor as float32, with no more than the result in memory."""
    result = _chosen.empty(total.size)
    in_parts(lambda part, out: np.divide(part, divisor, out=out, casting="same_kind"), total, result)
    return result


def largest(row: Row | NDArray[np.float64], size: int) -> float:
    """The largest absolute value; 0 of nothing."""
    found = 0.0
    for begin in range(0, size, BLOCK):
        part = row[begin : min(begin + BLOCK, size)]
        found = max(found, float(part.max()), -float(part.min()))
        _chosen.release([part])
    return found


def squared_distance(to: Row | NDArray[np.float64], start: Row | None, size: int) -> float:
    """||to - start||^2 in float64, or ||to||^2; the same bits on every processor, which a dot product does not have."""
    total = 0.0
    for begin in range(0, size, BLOCK):
        part = slice(begin, min(begin + BLOCK, size))
        ahead = to[part]
        delta = ahead.astype(np.float64)
        if start is not None:
            behind = start[part]
            delta -= behind
            _chosen.release([behind])
        _chosen.release([ahead])
        total += float(np.add.reduce(np.square(delta, out=delta)))
    return total


def elementwise(
    size: int, rows: Sequence[Row], combine: Callable[[NDArray[np.float32]], NDArray[np.float64]]
) -> NDArray[np.float32]:
    """What `combine` makes of the numbers of all rows (models x elements), element by element, a piece at a time."""
    result = _chosen.empty(size)

    def work(start: int, end: int) -> None:
        for begin in range(start, end, _PIECE):
            part = slice(begin, min(begin + _PIECE, end))
            pieces = [row[part] for row in rows]
            result[part] = combine(np.stack(pieces))
            _chosen.release([result[part], *pieces])

    _chosen.each_part(size, len(rows), work)
    return result


def inner_products(rows: Sequence[Row], start: Row | None, parts: Iterable[slice]) -> NDArray[np.float64]:
    """The sums over these parts of (row_i - start) (row_j - start), for all i and j.

    Each row is read once. A piece has a fixed length and they are added up in order, so that the bits depend neither
    on threads nor, as those of a matrix product would, on the processor.
    """
    total = np.zeros((len(rows), len(rows)))
    for whole in parts:
        for begin in range(whole.start, whole.stop, _PIECE):
            part = slice(begin, min(begin + _PIECE, whole.stop))
            pieces = [row[part] for row in rows]
            deltas = np.stack(pieces).astype(np.float64)
            _chosen.release(pieces)
            if start is not None:
                deltas -= start[part]
            for i in range(len(rows)):
                total[i, : i + 1] += np.add.reduce(deltas[i] * deltas[: i + 1], axis=1)
    return np.asarray(np.tril(total) + np.tril(total, -1).T)


def accumulated_steps(steps: int, momentum: float = 0.0, pull: float = 0.0) -> float:
    """||a||_1: how many times eta * gradient this many steps cover along a constant gradient.

    u = momentum u + gradient - pull y; y += u, where `pull` is eta * mu of a proximal term. It is `steps` for plain
    SGD; (steps - rho (1 - rho^steps) / (1 - rho)) / (1 - rho) with momentum rho; (1 - (1 - pull)^steps) / pull with
    a proximal term. By repeated squaring, because a learner that claims 2^53 steps must not keep the controller busy.
    """
    if not momentum and not pull:
        return float(steps)
    power = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    square = ((1 - pull, momentum, 1.0), (-pull, momentum, 1.0), (0.0, 0.0, 1.0))  # of (y, u, 1)
    while steps:
        if steps & 1:
            power = _product(power, square)
        square = _product(square, square)
        steps >>= 1
    return power[0][2]


_Row = tuple[float, float, float]
_Matrix = tuple[_Row, _Row, _Row]


def _product(left: _Matrix, right: _Matrix) -> _Matrix:
    def row(index: int) -> _Row:
        a, b, c = left[index]
        x, y, z = right
        return (
            a * x[0] + b * y[0] + c * z[0],
            a * x[1] + b * y[1] + c * z[1],
            a * x[2] + b * y[2] + c * z[2],
        )

    return row(0), row(1), row(2)
