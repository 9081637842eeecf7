"""Mixing on all processors of this machine, and without temporaries where numba is installed (the extra `fast`).

The core computes in numpy and in one thread. This does the same operations on the same elements in the same order, so
that every bit is the same, at the speed of the memory.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import BLOCK, Arithmetic, choose

_LARGE = 1 << 20  # numbers of all models; below, starting threads and a compiler takes longer than the work
_MAX_THREADS = 8  # more would only wait for memory
_LIST = [object()]
_UNUSED = sys.getrefcount(_LIST[0])  # references to what nobody but a list has
_TOGETHER = 4  # models added in one pass over a block


class FastArithmetic(Arithmetic):
    """A contiguous part of the blocks for each thread."""

    def __init__(self, threads: int | None = None, *, keeps_memory: bool = True) -> None:
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = threads or min(processors, _MAX_THREADS)
        self._large = False
        self._keeps_memory = keeps_memory
        self._results: list[NDArray[np.float32]] = []

    def empty(self, size: int) -> NDArray[np.float32]:
        """Memory of an earlier result that is no longer used: new memory takes longer than a model's average."""
        if size < _LARGE or not self._keeps_memory:
            return super().empty(size)
        for index in range(len(self._results)):
            # Every user of a result holds a view of it, and every view holds a reference to what it views.
            if self._results[index].size == size and sys.getrefcount(self._results[index]) == _UNUSED:
                return self._results[index][:]
        self._results = [super().empty(size), *self._results[:1]]
        return self._results[0][:]

    def add(self, block: NDArray[np.float64], pieces: Iterable[tuple[NDArray[np.float32], float]]) -> None:
        kernels = _kernels() if self._large else None
        if kernels is None:
            super().add(block, pieces)
            return
        one, several = kernels
        waiting = iter(pieces)
        while group := list(itertools.islice(waiting, _TOGETHER)):
            rows, factors = [_readonly(row) for row, _ in group], [factor for _, factor in group]
            if len(group) == _TOGETHER:
                several(block, *rows, *factors)
            else:
                for row, factor in zip(rows, factors, strict=True):
                    one(block, row, factor)

    def each_block(self, size: int, models: int, work: Callable[[int, int], None]) -> None:
        self._large = size * models >= _LARGE
        if not self._large or self.threads == 1:
            super().each_block(size, models, work)
            return
        edges = [size * thread // self.threads for thread in range(self.threads + 1)]

        def part(thread: int) -> None:
            for start in range(edges[thread], edges[thread + 1], BLOCK):
                work(start, min(start + BLOCK, edges[thread + 1]))

        for _ in _threads(self.threads).map(part, range(self.threads)):
            pass


def use_all_processors(*, in_service: bool = False) -> None:
    """Let this process mix with all its processors.

    In service, as a controller is, what the first large mixing would wait for is loaded now, and no memory is kept
    between two mixings.
    """
    choose(FastArithmetic(keeps_memory=not in_service))
    if in_service:
        _kernels()


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="mixing")


# Threads do not survive a fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)


@functools.cache
def _kernels() -> tuple[Callable[..., None], Callable[..., None]] | None:
    """Compiled, for one model and for several; None without a compiler."""
    try:
        from numba import njit, types
    except ImportError:
        return None

    def one(total: Any, a: Any, by_a: float) -> None:
        for i in range(total.size):
            total[i] += np.float64(a[i]) * by_a

    def four(total: Any, a: Any, b: Any, c: Any, d: Any, by_a: float, by_b: float, by_c: float, by_d: float) -> None:
        for i in range(total.size):
            total[i] = (
                ((total[i] + np.float64(a[i]) * by_a) + np.float64(b[i]) * by_b) + np.float64(c[i]) * by_c
            ) + np.float64(d[i]) * by_d

    total = types.Array(types.float64, 1, "C")
    row = types.Array(types.float32, 1, "C", readonly=True)

    def compiled(kernel: Callable[..., None], rows: int) -> Callable[..., None]:
        signature = types.void(total, *[row] * rows, *[types.float64] * rows)
        # Neither fused nor reassociated: the compiler may only do what the equation says.
        ready: Callable[..., None]
        try:
            ready = njit(signature, nogil=True, fastmath=False, cache=True)(kernel)
        except RuntimeError:  # numba has nowhere to cache it: every folder is read-only
            ready = njit(signature, nogil=True, fastmath=False)(kernel)
        return ready

    return compiled(one, 1), compiled(four, _TOGETHER)


def _readonly(piece: NDArray[np.float32]) -> NDArray[np.float32]:
    """A plain view, so that arrays, memory-mapped files and borrowed memory look alike to the compiled kernels."""
    view: NDArray[np.float32] = np.asarray(piece).view()
    view.flags.writeable = False
    return view
