"""Mixing with threads and compiled kernels: every bit as in the core's plain numpy."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from metis import kernels
from metis.core import arithmetic
from metis.core.arithmetic import CALL, Arithmetic, add_scaled, average, quotient, widened
from metis.kernels import FastArithmetic, scratch
from metis.kernels.scratch import Scratch


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    """Whatever a test chooses, the next one starts with numpy."""
    yield
    arithmetic.choose(Arithmetic())


def always_fast(patch: pytest.MonkeyPatch) -> None:
    """Threads, the compiler and kept memory also for small models."""
    for limit in ("_LARGE", "_WORTH_THREADS", "_WORTH_COMPILED_THREADS", "_WORTH_COMPILER"):
        patch.setattr(kernels, limit, 1)


def models(count: int, size: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal(size, dtype=np.float32) * np.float32(10.0 ** rng.integers(-20, 20)) for _ in range(count)
    ]


def slow_average(rows: list[np.ndarray], factors: list[float], divisor: float) -> np.ndarray:
    """One operation after the other, each rounded as IEEE says."""
    total = np.zeros(len(rows[0]))
    for row, factor in zip(rows, factors, strict=True):
        total = total + row.astype(np.float64) * factor
    return (total / divisor).astype(np.float32)


SIZES = st.sampled_from([0, 1, 7, CALL - 1, CALL, CALL + 1, 3 * CALL + 5])
FACTORS = st.floats(-1e6, 1e6, allow_nan=False)


@settings(max_examples=40)
@given(
    size=SIZES,
    factors=st.lists(FACTORS, min_size=1, max_size=11),
    divisor=st.floats(1e-3, 1e6),
    threads=st.integers(1, 3),
    compiled=st.booleans(),
    seed=st.integers(0, 5),
)
def test_every_bit_is_the_same(
    size: int, factors: list[float], divisor: float, threads: int, compiled: bool, seed: int
) -> None:
    """Any size, any number of models and threads, with and without the compiler, for models of any magnitude."""
    with pytest.MonkeyPatch.context() as patch:
        always_fast(patch)
        if not compiled:
            patch.setattr(FastArithmetic, "_compiled", lambda self, numbers: None)
        rows = models(len(factors), size, seed)
        for row in rows[::2]:
            row.flags.writeable = False
        pairs = list(zip(rows, factors, strict=True))
        start = np.random.default_rng(seed).standard_normal(size)
        results = []
        patch.setattr(scratch, "_LARGE", 1)
        in_files = FastArithmetic(threads, keeps_memory=False, scratch=Scratch(Path(tempfile.gettempdir())))
        for variant in (Arithmetic(), FastArithmetic(threads), in_files):
            arithmetic.choose(variant)
            total = widened(start)
            add_scaled(total, pairs)
            results.append((average(size, pairs, divisor), total, quotient(total, divisor)))

    for plain, *others in zip(*results, strict=True):
        for fast in others:
            np.testing.assert_array_equal(plain.view(np.uint8), fast.view(np.uint8))
    np.testing.assert_array_equal(results[0][0], slow_average(rows, factors, divisor))


def test_models_that_are_mapped_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the disk store hands them out."""
    always_fast(monkeypatch)
    rows = models(5, 1000)
    mapped = []
    for number, row in enumerate(rows):
        row.tofile(tmp_path / str(number))
        mapped.append(np.memmap(tmp_path / str(number), np.float32, "r"))
    arithmetic.choose(FastArithmetic(2))

    mixed = average(1000, [(row, 0.1) for row in mapped], 0.5)

    np.testing.assert_array_equal(mixed, slow_average(rows, [0.1] * 5, 0.5))


def test_large_sums_are_in_files_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory can be given back at any time, and what was written is there again."""
    monkeypatch.setattr(scratch, "_LARGE", 1000)
    fast = FastArithmetic(1, scratch=Scratch(tmp_path))
    total, result = fast.zeros(100_000), fast.empty(100_000)
    assert list(tmp_path.iterdir()) == []
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert len(mapped) == 2
    total[:] = np.arange(100_000)
    fast.release([total[5:90_000], result, result[:0], np.ones(5)])
    assert np.array_equal(total, np.arange(100_000))
    assert fast.zeros(999).base is None


def test_without_room_on_the_disk_sums_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped file without blocks would end the process when it is written to."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(scratch, "_LARGE", 1000)
    monkeypatch.setattr(os, "posix_fallocate", full)
    total = FastArithmetic(1, scratch=Scratch(tmp_path)).zeros(2000)
    assert total.base is None
    assert not total.any()


def test_an_error_in_a_thread_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is gone while it is mixed, say."""
    always_fast(monkeypatch)

    class Gone:
        def __getitem__(self, part: slice, /) -> np.ndarray:
            raise OSError("the file is gone")

    arithmetic.choose(FastArithmetic(2))
    with pytest.raises(OSError, match="the file is gone"):
        average(4 * CALL, [(Gone(), 1.0)], 1.0)


def test_a_forked_process_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the parent do not exist in it."""
    always_fast(monkeypatch)
    kernels.use_all_processors()
    arithmetic.choose(FastArithmetic(2))
    rows = models(3, 3 * CALL)
    pairs = [(row, 1.0) for row in rows]
    expected = average(3 * CALL, pairs, 3.0)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(average(3 * CALL, pairs, 3.0), expected) else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    "look",
    [lambda result: result, lambda result: result[5:9], memoryview, torch.from_numpy,
     lambda result: torch.from_numpy(result)[3:], lambda result: result.reshape(2, -1).view(np.int32)],
    ids=["itself", "slice", "memoryview", "tensor", "slice of a tensor", "other type"],
)  # fmt: skip
def test_a_result_that_somebody_looks_at_is_not_written_over(
    look: Callable[[np.ndarray], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it is looked at, and for however many results."""
    always_fast(monkeypatch)
    fast = FastArithmetic(2)
    arithmetic.choose(fast)
    rows = models(4, 2 * CALL)
    kept = [look(average(2 * CALL, [(row, 1.0)], 1.0)) for row in rows]
    assert all(
        np.asarray(seen).tobytes() == np.asarray(look(row)).tobytes() for seen, row in zip(kept, rows, strict=True)
    )


def test_memory_of_a_forgotten_result_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not for a result of another size."""
    always_fast(monkeypatch)
    fast = FastArithmetic(1)

    def address(result: np.ndarray) -> int:
        return int(result.__array_interface__["data"][0])

    first, second = fast.empty(1000), fast.empty(1000)
    addresses = address(first), address(second)
    assert addresses[0] != addresses[1]
    del first
    assert address(fast.empty(1000)) == addresses[0]
    assert address(fast.empty(500)) not in addresses
    assert address(fast.empty(1000)) != addresses[1]
    careful = FastArithmetic(1, keeps_memory=False)
    kept = weakref.ref(careful.empty(1000))
    assert kept() is None


def test_compiled_kernels_need_no_place_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    caching = pytest.importorskip("numba.core.caching")
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])  # as where nothing can be written
    compiled = importlib.reload(importlib.import_module("metis.kernels.compiled"))
    total, row = np.ones(3), np.arange(3, dtype=np.float32)

    compiled.add(total, *kernels._addresses([(row, 2.0)]))

    assert total.tolist() == [1.0, 3.0, 5.0]


def test_the_compiler_is_loaded_when_it_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation of small models never waits for it; one that mixes for long does, once."""
    loaded: list[int] = []

    @functools.cache
    def load() -> None:
        loaded.append(1)

    monkeypatch.setattr(kernels, "_kernels", load)
    monkeypatch.setattr(kernels, "_WORTH_COMPILER", 5000)
    arithmetic.choose(FastArithmetic(1))
    rows = [(row, 1.0) for row in models(2, 1000)]
    for mixed, times in ((2000, 0), (4000, 0), (6000, 1), (8000, 1)):
        average(1000, rows, 2.0)
        assert len(loaded) == times, mixed
