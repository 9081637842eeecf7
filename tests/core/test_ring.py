"""Fixed-point sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from metis.core import ring as ring_module
from metis.core.model import Layout, Model, TensorSpec
from metis.core.ring import BITS, Ring
from metis.errors import Diverged, Refused

LAYOUT = Layout((
    TensorSpec("a", (3,)), TensorSpec("b", (2,)), TensorSpec("steps", (1,), "int64", "counter"),
    TensorSpec("mean", (2,), role="buffer"), TensorSpec("c", (2,)), TensorSpec("nothing", (0,)),
    TensorSpec("control:a", (3,), role="control"),
))  # fmt: skip


def model(values: float | np.ndarray, layout: Layout = LAYOUT) -> Model:
    vector = np.zeros(layout.size, np.float32)
    vector[:] = values
    return Model(layout, vector, np.zeros(layout.counters, np.int64))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("learners", [1, 2, 3, 4, 7, 8, 10, 100, 999, 1000])
def test_a_sum_of_all_learners_at_the_clip_does_not_wrap(bits: int, learners: int) -> None:
    """N (2^room + 1/2) < 2^(bits - 1)."""
    room = Ring(bits, learners, 1.0).room(bits)
    assert learners * (2**room + 0.5) < 2 ** (bits - 1)
    assert room == 52 or (learners + 1) * 2 ** (room + 2) > 2 ** (bits - 1)


def test_the_rooms_of_the_design() -> None:
    """27 bits for 10 learners, 24 for 100, and never more than float64 carries."""
    assert [Ring(32, n, 1.0).room(32) for n in (10, 100)] == [27, 24]
    assert Ring(64, 10, 1.0).room(64) == 52


@pytest.mark.parametrize("bits", BITS)
def test_sections_are_apart_and_aligned(bits: int) -> None:
    """64 bits for 5 leading words and 2 of buffers, then 7 parameters in two pieces, then 3 control variates."""
    wide, main, control = Ring(bits, 4, 1.0).sections(LAYOUT)
    assert (wide.size, main.size, control.size) == (7, 7, 3)
    assert main.parts == (slice(0, 5), slice(7, 9))
    assert (wide.end, main.end) == (main.start, control.start)
    assert Ring(bits, 4, 1.0).nbytes(LAYOUT) == 56 + 10 * bits // 8
    assert len(Ring(bits, 4, 1.0).sections(LAYOUT.network)) == 2


@settings(max_examples=60)
@given(
    st.sampled_from([32, 64]),
    st.lists(st.tuples(st.floats(1, 1000), st.integers(0, 2**32)), min_size=1, max_size=9),
)
def test_the_mean_is_the_weighted_mean_within_a_rounding(bits: int, learners: list[tuple[float, int]]) -> None:
    """Each word is off by half a unit at most; so the mean is off by N/2 units over the sum of q, and float32's own."""
    ring, base = Ring(bits, len(learners), 1.0), model(np.linspace(-1, 1, LAYOUT.size))
    most = max(p for p, _ in learners)
    weights = {f"h{index}": p for index, (p, _) in enumerate(learners)}
    total, locals_ = ring.total(LAYOUT), []
    for index, (p, seed) in enumerate(learners):
        delta = np.random.default_rng(seed).uniform(-0.9, 0.9, LAYOUT.size)
        locals_.append(model((base.vector + delta).astype(np.float32)))
        quantized = ring.quantize(locals_[-1], base, p, most, (index, 2.0, -1.0))
        assert quantized.clamped == 0
        ring.add(total, quantized.body, LAYOUT)
    opened = ring.mean(total, base, weights, most)
    expected = sum(p * local.vector.astype(np.float64) for local, (p, _) in zip(locals_, learners, strict=True))
    expected = expected / sum(weights.values())
    whole = sum(weights.values()) / most
    unit = max(2.0 ** -ring.room(bits), 2.0 ** (20 - 52)) * len(learners) / whole
    assert np.abs(opened.vector - expected).max() <= unit + 3e-7
    mean_index = sum(index * p for index, (p, _) in enumerate(learners)) / sum(weights.values())
    assert opened.scalars == pytest.approx((mean_index, 2.0, -1.0), abs=unit)
    assert opened.clamped == 0


def test_sums_are_exact_in_any_order_and_in_any_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers modulo 2^bits: the same bits whichever way."""
    ring, base, random = Ring(32, 5, 0.5), model(0.0), np.random.default_rng(1)
    locals_ = [model(random.uniform(-0.4, 0.4, LAYOUT.size).astype(np.float32)) for _ in range(5)]
    bodies = [ring.quantize(local, base, 3.0 + n, 9.0, (1, 2, 3)).body for n, local in enumerate(locals_)]
    total = ring.sum(bodies, LAYOUT)
    assert np.array_equal(total, ring.sum(bodies[::-1], LAYOUT))
    weights = {str(n): 3.0 + n for n in range(5)}
    vector = ring.mean(total, base, weights, 9.0).vector
    monkeypatch.setattr(ring_module, "BLOCK", 2)
    again = [ring.quantize(local, base, 3.0 + n, 9.0, (1, 2, 3)).body for n, local in enumerate(locals_)]
    assert np.array_equal(bodies, again)
    assert np.array_equal(ring.mean(total, base, weights, 9.0).vector, vector)


def test_numbers_outside_of_the_clip_are_clamped_and_counted() -> None:
    """2 of 12 numbers lie at 5 and -5 with a clip of 1."""
    ring, base, values = Ring(32, 3, 1.0), model(0.0), np.zeros(LAYOUT.size, np.float32)
    values[:2] = 5, -5
    quantized = ring.quantize(model(values), base, 1.0, 1.0, (0, 0, 0))
    assert quantized.clamped == 2
    opened = ring.mean(quantized.body, base, {"h": 1.0}, 1.0)
    assert opened.vector[:3].tolist() == [1.0, -1.0, 0.0]
    assert opened.clamped == pytest.approx(2 / LAYOUT.size, abs=2.0**-32)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(bad: float) -> None:
    """Under masks nobody could say later whose they were."""
    ring, base, values = Ring(32, 3, 1.0), model(0.0), np.zeros(LAYOUT.size, np.float32)
    values[-1] = bad
    with pytest.raises(Diverged, match="not finite"):
        ring.quantize(model(values), base, 1.0, 1.0, (0, 0, 0))
    with pytest.raises(Diverged, match="not finite"):
        ring.quantize(base, base, 1.0, 1.0, (0, bad, 0))


@pytest.mark.parametrize("p", [0.0, -1.0, 2.1, math.nan])
def test_a_contribution_value_lies_between_zero_and_the_largest(p: float) -> None:
    with pytest.raises(Refused, match="contribution value"):
        Ring(32, 3, 1.0).quantize(model(0.0), model(0.0), p, 2.0, (0, 0, 0))


def test_the_number_of_scalars_is_fixed() -> None:
    with pytest.raises(ValueError, match="carries 3 scalars, not 1"):
        Ring(32, 3, 1.0).quantize(model(0.0), model(0.0), 1.0, 2.0, (0,))


def test_a_sum_whose_weights_are_not_the_public_ones_is_refused() -> None:
    """One learner too few, one bit too many, or bytes of another layout."""
    ring, base = Ring(32, 3, 1.0), model(0.0)
    total = ring.sum([ring.quantize(base, base, p, 3.0, (0, 0, 0)).body for p in (1.0, 3.0)], LAYOUT)
    assert ring.mean(total, base, {"a": 1.0, "b": 3.0}, 3.0).vector.tolist() == [0.0] * LAYOUT.size
    for weights in ({"a": 1.0}, {"a": 1.0, "b": 2.9999}):
        with pytest.raises(Refused, match="not the public one"):
            ring.mean(total, base, weights, 3.0)
    total[0] ^= 1
    with pytest.raises(Refused, match="not the public one"):
        ring.mean(total, base, {"a": 1.0, "b": 3.0}, 3.0)
    with pytest.raises(Refused, match="bytes here"):
        ring.mean(total[:-1], base, {"a": 1.0, "b": 3.0}, 3.0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((8, 3, 1.0), "16, 32 or 64 bits, not 8"),
        ((32, 0, 1.0), "1 to 1000 learners"),
        ((32, 1001, 1.0), "1 to 1000 learners"),
        ((32, 3, 1.0, 1.0, -1), "scalars"),
        ((32, 3, 0.0), "positive number"),
        ((32, 3, math.inf), "positive number"),
        ((32, 3, 1.0, -1.0), "positive number"),
    ],
)
def test_a_ring_that_cannot_be_is_refused(fields: tuple[float, ...], words: str) -> None:
    with pytest.raises(Refused, match=words):
        Ring(*fields)  # type: ignore[arg-type]


def test_a_ring_travels() -> None:
    assert Ring.decode(Ring(16, 7, 0.5).encode()) == Ring(16, 7, 0.5)
