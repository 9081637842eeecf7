"""A model: one vector, its layout, and counters that are never averaged."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from core.play import LAYOUT, model
from metis.core.mixing import CachedAverage, FullPass, Interpolation, MemoryStore
from metis.core.model import Layout, Model, TensorSpec, mixable_problem

NETWORK = Layout(
    (
        TensorSpec("conv.weight", (2, 3, 1)),
        TensorSpec("norm.running_mean", (2,), role="buffer"),
        TensorSpec("norm.num_batches_tracked", (), "int64", "counter"),
        TensorSpec("head.bias", (4,), "float64"),
        TensorSpec("mask", (3,), "bool", "counter"),
    )
)


def tensors() -> dict[str, np.ndarray]:
    """One array for each tensor of NETWORK, all different."""
    return {
        "conv.weight": np.arange(6, dtype=np.float32).reshape(2, 3, 1),
        "norm.running_mean": np.array([0.5, -0.5], np.float32),
        "norm.num_batches_tracked": np.array(17),
        "head.bias": np.array([1.0, 2.0, 3.0, 4.0]),
        "mask": np.array([True, False, True]),
    }


specs = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
        st.sampled_from([("float32", "parameter"), ("float64", "buffer"), ("int64", "counter")]),
    ),
    max_size=5,
)


@given(specs, st.data())
def test_round_trip(rows, data):
    """Named tensors to one vector and back, for any shapes; float64 tensors pass through float32."""
    layout = Layout(tuple(TensorSpec(f"t{k}", shape, dtype, role) for k, (shape, (dtype, role)) in enumerate(rows)))
    arrays = {}
    for spec in layout.tensors:
        numbers = (
            st.integers(-(2**62), 2**62) if spec.role == "counter" else st.integers(-1000, 1000).map(lambda n: n / 8)
        )
        dtype = np.int64 if spec.role == "counter" else np.float32
        arrays[spec.name] = data.draw(hnp.arrays(dtype, spec.shape, elements=numbers))

    back = Model.from_tensors(arrays, layout).tensors()

    assert back.keys() == arrays.keys()
    for spec in layout.tensors:
        assert back[spec.name].shape == spec.shape
        assert back[spec.name].dtype == spec.dtype
        np.testing.assert_array_equal(back[spec.name], arrays[spec.name])


def test_layout_says_where_each_tensor_lies():
    """Vector and counters are numbered apart, in the order of the layout."""
    assert NETWORK.size == 6 + 2 + 4
    assert NETWORK.counters == 1 + 3
    assert NETWORK.slices == {
        "conv.weight": slice(0, 6),
        "norm.running_mean": slice(6, 8),
        "norm.num_batches_tracked": slice(0, 1),
        "head.bias": slice(8, 12),
        "mask": slice(1, 4),
    }


def test_layout_survives_json_and_has_a_fingerprint():
    """Two sites agree on a layout by one hash; any difference changes it."""
    assert Layout.from_json(NETWORK.to_json()) == NETWORK
    assert Layout.from_json(NETWORK.to_json()).fingerprint == NETWORK.fingerprint
    fingerprints = {
        Layout((TensorSpec(*row),)).fingerprint
        for row in [
            ("w", (2, 3)),
            ("w", (3, 2)),
            ("v", (2, 3)),
            ("w", (2, 3), "float64"),
            ("w", (2, 3), "float32", "buffer"),
        ]
    }
    assert len(fingerprints) == 5


def test_tensors_are_views():
    """Reading a tensor of the vector's own dtype copies nothing."""
    whole = Model.from_tensors(tensors(), NETWORK)

    assert np.shares_memory(whole.tensors()["conv.weight"], whole.vector)
    assert np.shares_memory(whole.tensors()["norm.num_batches_tracked"], whole.counters)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_tensors_come_as_float32(dtype: str):
    """A mixture of them has more digits than they hold."""
    layout = Layout((TensorSpec("w", (2,), dtype),))

    assert Model(layout, np.ones(2, np.float32)).tensors()["w"].dtype == np.float32


@pytest.mark.parametrize("rule", [FullPass, CachedAverage, Interpolation])
def test_counters_are_never_averaged(rule):
    """R10: the community model keeps its own counters, whatever the learners' are."""
    initial = Model.from_tensors(tensors(), NETWORK)
    local = tensors() | {"norm.num_batches_tracked": np.array(99), "mask": np.zeros(3, bool)}
    community = rule(initial, MemoryStore())

    community.commit("a", Model.from_tensors(local, NETWORK), 1.0, 1, None)
    community.publish()

    mixed = community.model.tensors()
    assert mixed["norm.num_batches_tracked"] == 17
    assert mixed["mask"].tolist() == [True, False, True]


def test_sha256_names_every_bit_and_the_layout():
    """Equal models, equal names; one bit, one counter, or another layout, and the name differs."""
    whole = Model.from_tensors(tensors(), NETWORK)
    assert whole.sha256() == Model.from_tensors(tensors(), NETWORK).sha256()
    nudged = whole.vector.copy()
    nudged[0] = np.nextafter(nudged[0], np.float32(1))
    others = [
        whole.with_vector(nudged),
        Model(NETWORK, whole.vector, whole.counters + 1),
        Model(
            Layout((TensorSpec("flat", (12,)), TensorSpec("n", (4,), "int64", "counter"))), whole.vector, whole.counters
        ),
    ]

    assert len({each.sha256() for each in [whole, *others]}) == 4


def test_bytes_that_travel():
    """Four for a number, eight for a counter; none for the empty model."""
    assert Model.from_tensors(tensors(), NETWORK).nbytes == 4 * NETWORK.size + 8 * NETWORK.counters
    assert Model.empty().nbytes == 0


@pytest.mark.parametrize(
    ("vector", "counters"),
    [
        (np.zeros(11, np.float32), np.zeros(4, np.int64)),
        (np.zeros((12, 1), np.float32), np.zeros(4, np.int64)),
        (np.zeros(12, np.float64), np.zeros(4, np.int64)),
        (np.zeros(12, np.float32), np.zeros(3, np.int64)),
        (np.zeros(12, np.float32), np.zeros(4, np.int32)),
    ],
)
def test_a_vector_that_does_not_fit_its_layout_is_no_model(vector, counters):
    """The sentence says what was expected."""
    with pytest.raises(ValueError, match="a model of this layout"):
        Model(NETWORK, vector, counters)


def test_tensors_that_do_not_fit_the_layout():
    """Missing, unknown and misshapen tensors are named."""
    missing = tensors()
    del missing["mask"]
    with pytest.raises(ValueError, match=r"^tensors missing: mask; tensors unknown: more$"):
        Model.from_tensors(missing | {"more": np.zeros(1)}, NETWORK)
    with pytest.raises(ValueError, match=r"'head.bias' has shape \(5,\), not \(4,\)"):
        Model.from_tensors(tensors() | {"head.bias": np.zeros(5)}, NETWORK)


def test_impossible_layouts():
    """Twice the same name, a negative side, and a dtype that the role does not allow."""
    with pytest.raises(ValueError, match=r"names must differ: \['w', 'w'\]"):
        Layout((TensorSpec("w", (1,)), TensorSpec("w", (2,)), TensorSpec("v", (2,))))
    with pytest.raises(ValueError, match="impossible shape"):
        TensorSpec("w", (2, -1))
    with pytest.raises(ValueError, match="'w' is a counter of dtype float32; allowed: bool, uint8"):
        TensorSpec("w", (1,), "float32", "counter")
    with pytest.raises(ValueError, match="'w' is a parameter of dtype int64; allowed: float16"):
        TensorSpec("w", (1,), "int64")


@given(st.lists(st.floats(width=32), min_size=3, max_size=3))
def test_mixable_exactly_if_every_number_is_finite(numbers):
    """The quick test by a sum of squares never lets a bad number pass nor refuses a large one."""
    problem = mixable_problem(model(*numbers), LAYOUT)

    assert (problem is None) == all(math.isfinite(number) for number in numbers)


def test_mixable_problem_names_the_first_bad_tensor():
    """Which tensor, how many numbers; large finite numbers are no problem; counters are not looked at."""
    whole = Model.from_tensors(tensors(), NETWORK)
    vector = whole.vector.copy()
    vector[6] = np.inf
    vector[9:11] = np.nan

    assert mixable_problem(whole, NETWORK) is None
    assert mixable_problem(whole.with_vector(np.full(12, 3e38, np.float32)), NETWORK) is None
    assert "'norm.running_mean' holds 1 of 2" in str(mixable_problem(whole.with_vector(vector), NETWORK))
    vector[6] = 0.0
    assert "'head.bias' holds 2 of 4" in str(mixable_problem(whole.with_vector(vector), NETWORK))


def test_mixable_problem_of_another_layout():
    """An equal layout will do, it need not be the same object; another one is refused."""
    assert mixable_problem(Model.from_tensors(tensors(), Layout.from_json(NETWORK.to_json())), NETWORK) is None
    assert "its layout (3 numbers) is not the federation's (12 numbers)" in str(mixable_problem(model(), NETWORK))
