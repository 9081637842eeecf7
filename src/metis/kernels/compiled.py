"""Mixing compiled by numba; imported only by `kernels`, and only where it is worth loading a compiler.

Neither fused nor reassociated: the compiler may only do what the equation says, so that every bit is that of the core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_TILE = 1 << 16  # numbers of each model that are read before the next models are
_ADDRESSES, _FACTORS = types.Array(types.int64, 1, "C"), types.Array(types.float64, 1, "C")


def _compile(signature: Any = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        ready: Callable[..., Any]
        try:
            ready = njit(signature, nogil=True, fastmath=False, cache=True)(function)
        except RuntimeError:  # numba has nowhere to cache it: every folder is read-only
            ready = njit(signature, nogil=True, fastmath=False)(function)
        return ready

    return compiled


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(context: Any, address: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), code


@_compile()
def _row(address: int, start: int, size: int) -> Any:
    return carray(_pointer(address + 4 * start), (size,), np.float32)


@_compile()
def _add_tile(total: Any, addresses: Any, factors: Any, models: int, start: int) -> None:
    """total += the first so many models."""
    size, done = total.size, 0
    while models - done >= 4:  # a processor reads ahead best in a few streams
        a, b = _row(addresses[done], start, size), _row(addresses[done + 1], start, size)
        c, d = _row(addresses[done + 2], start, size), _row(addresses[done + 3], start, size)
        by_a, by_b, by_c, by_d = factors[done], factors[done + 1], factors[done + 2], factors[done + 3]
        for i in range(size):
            total[i] = (
                ((total[i] + np.float64(a[i]) * by_a) + np.float64(b[i]) * by_b) + np.float64(c[i]) * by_c
            ) + np.float64(d[i]) * by_d
        done += 4
    if models - done >= 2:
        a, b = _row(addresses[done], start, size), _row(addresses[done + 1], start, size)
        by_a, by_b = factors[done], factors[done + 1]
        for i in range(size):
            total[i] = (total[i] + np.float64(a[i]) * by_a) + np.float64(b[i]) * by_b
        done += 2
    if models - done == 1:
        a, by_a = _row(addresses[done], start, size), factors[done]
        for i in range(size):
            total[i] += np.float64(a[i]) * by_a


@_compile()
def _begin_four(total: Any, addresses: Any, factors: Any, start: int) -> None:
    """total = the first four models."""
    size = total.size
    a, b = _row(addresses[0], start, size), _row(addresses[1], start, size)
    c, d = _row(addresses[2], start, size), _row(addresses[3], start, size)
    by_a, by_b, by_c, by_d = factors[0], factors[1], factors[2], factors[3]
    for i in range(size):
        so_far = (0.0 + np.float64(a[i]) * by_a) + np.float64(b[i]) * by_b
        total[i] = (so_far + np.float64(c[i]) * by_c) + np.float64(d[i]) * by_d


# Where a sum ends, it is divided and rounded in the same pass. `total` is None where it also begins, which the compiler
# sees; 0.0 is added all the same, as it makes a 0.0 of a -0.0.


@_compile()
def _end_four(result: Any, total: Any, addresses: Any, factors: Any, at: int, start: int, divisor: float) -> None:
    size = result.size
    a, b = _row(addresses[at], start, size), _row(addresses[at + 1], start, size)
    c, d = _row(addresses[at + 2], start, size), _row(addresses[at + 3], start, size)
    by_a, by_b, by_c, by_d = factors[at], factors[at + 1], factors[at + 2], factors[at + 3]
    for i in range(size):
        so_far = 0.0 if total is None else total[i]
        so_far = (
            ((so_far + np.float64(a[i]) * by_a) + np.float64(b[i]) * by_b) + np.float64(c[i]) * by_c
        ) + np.float64(d[i]) * by_d
        result[i] = np.float32(so_far / divisor)


@_compile()
def _end_two(result: Any, total: Any, addresses: Any, factors: Any, at: int, start: int, divisor: float) -> None:
    size = result.size
    a, b = _row(addresses[at], start, size), _row(addresses[at + 1], start, size)
    by_a, by_b = factors[at], factors[at + 1]
    for i in range(size):
        so_far = 0.0 if total is None else total[i]
        result[i] = np.float32(((so_far + np.float64(a[i]) * by_a) + np.float64(b[i]) * by_b) / divisor)


@_compile()
def _end_one(result: Any, total: Any, addresses: Any, factors: Any, at: int, start: int, divisor: float) -> None:
    size = result.size
    a, by_a = _row(addresses[at], start, size), factors[at]
    for i in range(size):
        so_far = 0.0 if total is None else total[i]
        result[i] = np.float32((so_far + np.float64(a[i]) * by_a) / divisor)


@_compile()
def _average_tile(result: Any, total: Any, addresses: Any, factors: Any, start: int, divisor: float) -> None:
    models = addresses.size
    if models == 1:
        _end_one(result, None, addresses, factors, 0, start, divisor)
    elif models == 2:
        _end_two(result, None, addresses, factors, 0, start, divisor)
    elif models == 4:
        _end_four(result, None, addresses, factors, 0, start, divisor)
    else:
        last = 4 if models % 4 == 0 else 2 if models % 4 == 2 else 1
        if models - last >= 4:  # one pass over the sum less than from zero
            _begin_four(total, addresses, factors, start)
            _add_tile(total, addresses[4:], factors[4:], models - last - 4, start)
        else:
            total[:] = 0.0
            _add_tile(total, addresses, factors, models - last, start)
        if last == 4:
            _end_four(result, total, addresses, factors, models - 4, start, divisor)
        elif last == 2:
            _end_two(result, total, addresses, factors, models - 2, start, divisor)
        else:
            _end_one(result, total, addresses, factors, models - 1, start, divisor)


@_compile(types.void(types.Array(types.float64, 1, "C"), _ADDRESSES, _FACTORS))
def add(total: Any, addresses: Any, factors: Any) -> None:
    """total += factor * the numbers at the address, one model after the other."""
    for start in range(0, total.size, _TILE):
        _add_tile(total[start : start + _TILE], addresses, factors, addresses.size, start)


@_compile(types.void(types.Array(types.float32, 1, "C"), _ADDRESSES, _FACTORS, types.float64))
def average(result: Any, addresses: Any, factors: Any, divisor: float) -> None:
    """result = the sum of factor * the numbers at the address over the divisor, of at least one model."""
    sums = np.empty(min(_TILE, result.size), np.float64)
    for start in range(0, result.size, _TILE):
        part = result[start : start + _TILE]
        _average_tile(part, sums[: part.size], addresses, factors, start, divisor)
