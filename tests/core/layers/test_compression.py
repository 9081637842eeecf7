"""Updates in fewer bytes: what arrives, what is left out, and that nothing is lost over the rounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from metis.core.layers.compression import Compression
from metis.core.model import Layout, Model, TensorSpec

KINDS = [
    Compression("float16"),
    Compression("bfloat16"),
    Compression("int8"),
    Compression("top_k", 0.1),
    Compression("top_k"),
]
kinds = pytest.mark.parametrize("compression", KINDS, ids=lambda each: each.label)
deltas = arrays.arrays(np.float32, st.integers(1, 200), elements=st.floats(-100, 100, width=32))


def layout_of(size: int) -> Layout:
    return Layout((TensorSpec("w", (size,)), TensorSpec("n", (), "int64", "counter")))


def model(vector: np.ndarray, counter: int = 0) -> Model:
    return Model(layout_of(vector.size), vector.astype(np.float32), np.array([counter]))


@kinds
@given(delta=deltas, start=st.floats(-3, 3, width=32))
def test_the_controller_restores_what_the_learner_expects_to_arrive(compression, delta, start):
    """To the bit, counters included, in as many bytes as were announced."""
    base = model(np.full(delta.size, start))
    compressed = compression.compress(model(base.vector + delta, 7), base, None)

    assert len(compressed.payload) == compression.nbytes(base.layout)
    restored = compression.restore(compressed.payload, base)
    assert restored.sha256() == compressed.local_model.sha256()
    assert restored.counters.tolist() == [7]
    arrived = restored.vector.astype(np.float64) - base.vector
    went = (base.vector + delta).astype(np.float64) - base.vector
    assert compressed.left_out == pytest.approx(went - arrived, abs=1e-4)
    assert 0 <= compressed.error <= 1


@pytest.mark.parametrize(
    ("compression", "bound"),
    [
        (Compression("float16"), lambda delta: np.abs(delta) * 2.0**-11 + 2.0**-25),
        (Compression("bfloat16"), lambda delta: np.abs(delta) * 2.0**-8),
        (Compression("int8"), lambda delta: np.abs(delta).max() / 127 / 2 * (1 + 1e-5)),
    ],
    ids=["float16", "bfloat16", "int8"],
)
@given(delta=deltas)
def test_what_is_left_out_is_half_a_step_at_most(compression, bound, delta):
    left_out = delta - compression._decode(compression._encode(delta), delta.size)
    assert (np.abs(left_out) <= bound(delta) + 1e-38).all()


@given(deltas, st.floats(0.01, 1))
def test_the_largest_numbers_arrive_as_they_are(delta, share):
    compression = Compression("top_k", share)
    arrives = compression._decode(compression._encode(delta), delta.size)
    kept = min(delta.size, math.ceil(share * delta.size * (1 - 1e-9)))

    assert np.count_nonzero(arrives) <= kept
    assert ((arrives == delta) | (arrives == 0)).all()
    left_out = np.abs(delta[arrives != delta])
    assert left_out.size == 0 or left_out.max() <= np.sort(np.abs(delta))[delta.size - kept]


@kinds
def test_nothing_is_lost_over_the_rounds(compression):
    """Error feedback: what arrives in all is what went in all, but for what the last round left out."""
    rng = np.random.default_rng(5)
    base = model(np.zeros(300))
    left_out, went, arrived = None, np.zeros(300), np.zeros(300)
    for _ in range(60):
        delta = (rng.normal(size=300) * 0.01 + 0.003).astype(np.float32)
        compressed = compression.compress(model(delta), base, left_out)
        left_out = compressed.left_out
        went += delta
        arrived += compressed.local_model.vector

    assert arrived + left_out == pytest.approx(went, abs=1e-4)
    without = sum(
        compression._decode(compression._encode(np.full(300, 1e-3, np.float32)), 300).astype(float) for _ in range(3)
    )
    assert without.shape == (300,)


def test_bytes_are_counted():
    """Of 10,000 numbers and a counter: 4 bytes a number become 2, about 1, or 8 for each that is kept."""
    layout = layout_of(10_000)
    assert Compression("float16").nbytes(layout) == 2 * 10_000 + 8
    assert Compression("bfloat16").nbytes(layout) == 2 * 10_000 + 8
    assert Compression("int8").nbytes(layout) == 10_000 + 4 * math.ceil(10_000 / 4096) + 8
    assert Compression("int8").nbytes(layout_of(9_999)) == Compression("int8").nbytes(layout), "whole fours"
    assert Compression("top_k", 0.02).nbytes(layout) == 8 * 200 + 8
    assert Compression("top_k").nbytes(layout) == 8 * 100 + 8


@kinds
def test_statistics_arrive_as_they_are(compression):
    """Two learners whose variances fall from 100 to 1: rounding, or what was left out before, must not go below 0."""
    layout = Layout(
        (
            TensorSpec("w", (300,)),
            TensorSpec("mean", (3,), role="buffer"),
            TensorSpec("variance", (3,), role="buffer"),
            TensorSpec("n", (), "int64", "counter"),
            TensorSpec("control:w", (300,), role="control"),
        )
    )
    rng = np.random.default_rng(7)
    base = Model(layout, np.full(606, 100, np.float32), np.array([0]))
    left_out: list[np.ndarray | None] = [None, None]
    assert compression.nbytes(layout) >= 4 * 6 + 8
    for _ in range(4):
        arrived = []
        for learner in range(2):
            vector = base.vector + rng.normal(size=606).astype(np.float32)
            vector[300:306] = [-3, 0, 1e-6, 1e-6, 1, 2]
            compressed = compression.compress(Model(layout, vector, np.array([7])), base, left_out[learner])
            left_out[learner] = compressed.left_out
            restored = compression.restore(compressed.payload, base)
            assert restored.sha256() == compressed.local_model.sha256()
            assert restored.vector[300:306].tolist() == vector[300:306].tolist()
            assert not compressed.left_out[300:].any()
            assert 0 < compressed.error < 1
            arrived.append(restored.vector)
        base = base.with_vector(np.mean(arrived, axis=0))


@pytest.mark.parametrize("compression", KINDS[:2], ids=["float16", "bfloat16"])
def test_a_way_beyond_the_numbers_stays_finite(compression):
    delta = np.array([3.4e38, -3.4e38, 1e5, -1e5], np.float32)
    assert np.isfinite(compression._decode(compression._encode(delta), 4)).all()


def test_rounding_to_bfloat16_is_to_the_nearest_even():
    """1 + 2^-8 lies between 1 and 1 + 2^-7 and goes to the even one; 1 + 3 * 2^-8 goes up."""
    numbers = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1.0, 0.0], np.float32)
    compression = Compression("bfloat16")
    assert compression._decode(compression._encode(numbers), 4).tolist() == [1.0, 1 + 2**-6, -1.0, 0.0]


@kinds
def test_a_model_without_weights_stays_one(compression):
    empty = Model.empty()
    assert compression.compress(empty, empty, None).local_model.vector.size == 0


def test_what_no_learner_would_send_is_refused():
    compression, base = Compression("top_k", 0.5), model(np.zeros(4))
    good = compression.compress(model(np.arange(4)), base, None).payload
    for indices in ([1, 9], [2, 1], [1, 1]):
        bad = np.array(indices, "<u4").tobytes() + good[8:]
        with pytest.raises(
            ValueError, match="indices of a sparse update are not in order, or lie outside of the model"
        ):
            compression.restore(bad, base)
    with pytest.raises(ValueError, match=f"an update has {len(good)} bytes here, not {len(good) - 1}"):
        compression.restore(good[:-1], base)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (("int4",), "kind of compression is 'int4'; it must be one of float16, bfloat16, int8, top_k"),
        (("int8", 0.5), "share is given, but kind = 'int8' does not use it; 'top_k' would"),
        (("top_k", 0.0), "share of compression is 0.0; it must be greater than 0 and at most 1"),
    ],
)
def test_impossible_settings_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=f"^{complaint}$"):
        Compression(*settings)
