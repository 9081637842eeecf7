"""Mixing on all processors of this machine, and without temporaries where numba is installed (the extra `fast`).

The core computes in numpy and in one thread. This does the same operations on the same elements in the same order, so
that every bit is the same, at the speed of the memory.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import CALL, Arithmetic, choose
from metis.kernels.scratch import Scratch, release

_LARGE = 1 << 20  # numbers of all models; below, new memory is cheap
_WORTH_THREADS = 1 << 19  # numbers of all models; below, waking a thread takes longer than numpy's work
_WORTH_COMPILED_THREADS = 1 << 21  # the same for compiled work
_WORTH_COMPILER = 1 << 27  # numbers mixed so far; by then numpy has taken as long as loading the compiler takes
_MAX_THREADS = 8  # more would only wait for memory
_LIST = [object()]
_UNUSED = sys.getrefcount(_LIST[0])  # references to what nobody but a list has

Pieces = Sequence[tuple[NDArray[np.float32], float]]


class FastArithmetic(Arithmetic):
    """A contiguous share of the numbers for each thread."""

    def __init__(
        self, threads: int | None = None, *, keeps_memory: bool = True, scratch: Scratch | None = None
    ) -> None:
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = threads or min(processors, _MAX_THREADS)
        self._mixed = 0
        self._keeps_memory, self._scratch = keeps_memory, scratch
        self._results: list[NDArray[np.float32]] = []

    def empty(self, size: int) -> NDArray[np.float32]:
        """Memory of an earlier result that is no longer used: new memory takes longer than a model's average."""
        if self._scratch is not None and (made := self._scratch.zeros(size, np.float32)) is not None:
            return made
        if size < _LARGE or not self._keeps_memory:
            return super().empty(size)
        for index in range(len(self._results)):
            # Every user of a result holds a view of it, and every view holds a reference to what it views.
            if self._results[index].size == size and sys.getrefcount(self._results[index]) == _UNUSED:
                return self._results[index][:]
        self._results = [super().empty(size), *self._results[:1]]
        return self._results[0][:]

    def zeros(self, size: int) -> NDArray[np.float64]:
        made = None if self._scratch is None else self._scratch.zeros(size, np.float64)
        return super().zeros(size) if made is None else made

    def release(self, pieces: Iterable[NDArray[Any]]) -> None:
        release(pieces)

    def add(self, total: NDArray[np.float64], pieces: Pieces) -> None:
        if (kernels := self._compiled(total.size * len(pieces))) is None:
            super().add(total, pieces)
        else:
            kernels.add(total, *_addresses(pieces))

    def average(self, result: NDArray[np.float32], pieces: Pieces, divisor: float) -> None:
        if (kernels := self._compiled(result.size * len(pieces))) is None:
            super().average(result, pieces, divisor)
        else:
            kernels.average(result, *_addresses(pieces), divisor)

    def _compiled(self, numbers: int) -> ModuleType | None:
        """The kernels, once they are worth loading."""
        self._mixed += numbers
        return _kernels() if self._mixed >= _WORTH_COMPILER or _kernels.cache_info().currsize else None

    def each_part(self, size: int, models: int, work: Callable[[int, int], None]) -> None:
        worth = _WORTH_THREADS if self._compiled(0) is None else _WORTH_COMPILED_THREADS
        if size * models < worth or self.threads == 1:
            super().each_part(size, models, work)
            return
        edges = [size * thread // self.threads for thread in range(self.threads + 1)]

        def share(thread: int) -> None:
            for start in range(edges[thread], edges[thread + 1], CALL):
                work(start, min(start + CALL, edges[thread + 1]))

        others = [_threads(self.threads - 1).submit(share, thread) for thread in range(1, self.threads)]
        try:
            share(0)
        finally:
            wait(others)  # they write into the same memory
        for other in others:
            other.result()


def use_all_processors(*, in_service: bool = False, scratch: Path | None = None) -> None:
    """Let this process mix with all its processors.

    In service, as a controller is, what the first large mixing would wait for is loaded now, no memory is kept between
    two mixings, and large sums are in files without a name in the folder `scratch`, if there is one.
    """
    choose(FastArithmetic(keeps_memory=not in_service, scratch=None if scratch is None else Scratch(scratch)))
    if in_service:
        _kernels()


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="mixing")


# Threads do not survive a fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)


@functools.cache
def _kernels() -> ModuleType | None:
    """Compiled `add` and `average`; None without a compiler."""
    try:
        return importlib.import_module("metis.kernels.compiled")
    except ImportError:
        return None


def _addresses(pieces: Pieces) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Where the pieces begin, and their factors; an address is quicker to hand over than an array."""
    addresses = [piece.__array_interface__["data"][0] for piece, _ in pieces]
    return np.array(addresses, np.int64), np.array([factor for _, factor in pieces], np.float64)
