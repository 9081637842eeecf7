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
def _add_tile(total: Any, addresses: Any, factors: Any, start: int) -> None:
    size, models, done = total.size, addresses.size, 0
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


@_compile(types.void(types.Array(types.float64, 1, "C"), _ADDRESSES, _FACTORS))
def add(total: Any, addresses: Any, factors: Any) -> None:
    """total += factor * the numbers at the address, one model after the other."""
    for start in range(0, total.size, _TILE):
        _add_tile(total[start : start + _TILE], addresses, factors, start)


@_compile(types.void(types.Array(types.float32, 1, "C"), _ADDRESSES, _FACTORS, types.float64))
def average(result: Any, addresses: Any, factors: Any, divisor: float) -> None:
    """result = the sum of factor * the numbers at the address over the divisor."""
    sums = np.empty(min(_TILE, result.size), np.float64)
    for start in range(0, result.size, _TILE):
        part = result[start : start + _TILE]
        total = sums[: part.size]
        total[:] = 0.0
        _add_tile(total, addresses, factors, start)
        for i in range(part.size):
            part[i] = np.float32(total[i] / divisor)
