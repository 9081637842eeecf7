"""Control variates at the controller: around every mixing rule, over all learners, on every store."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from metis.core import arithmetic, policies
from metis.core.arithmetic import Row
from metis.core.layers import AdaptivePeriod, FedNova, Work
from metis.core.layers.compression import Compression
from metis.core.layers.control_variates import ControlledCommunity, ControlVariates
from metis.core.layers.server_optimizers import FedAdam
from metis.core.mixing import Buffered, CachedAverage, Community, FullPass, Interpolation, MemoryStore, ModelStore
from metis.core.model import Layout, Model, TensorSpec, Vector
from metis.core.solvers import MomentumSGD, Scaffold
from metis.errors import ConfigError
from metis.runs.storage import DiskStore

NETWORK = Layout(
    (
        TensorSpec("weight", (2, 2)),
        TensorSpec("frozen", (3,)),
        TensorSpec("mean", (2,), role="buffer"),
        TensorSpec("seen", (), "int64", "counter"),
    )
)
LAYOUT = NETWORK.with_controls(4)
LEARNERS = ("a", "b", "c", "d")
EXAMPLES = {"a": 300, "b": 100, "c": 7, "d": 55}

RULES: dict[str, Callable[..., Community]] = {
    "full": FullPass,
    "cached": partial(CachedAverage, rebuild_every=5),
    "interpolation": Interpolation,
    "buffered": partial(Buffered, buffer_size=2),
}
rules = pytest.mark.parametrize("name", RULES)

commits = st.tuples(st.sampled_from(LEARNERS), st.integers(0, 2**32 - 1), st.floats(1e-3, 1.0))
withdrawals = st.tuples(st.sampled_from(LEARNERS))
histories = st.lists(commits | withdrawals | st.just(()), max_size=40)


def random_model(seed: int, layout: Layout = LAYOUT) -> Model:
    vector = np.random.default_rng(seed).normal(size=layout.size).astype(np.float32)
    return Model(layout, vector, np.arange(layout.counters, dtype=np.int64))


def controlled(name: str, initial_model: Model, store: ModelStore) -> ControlledCommunity:
    return ControlledCommunity(initial_model, store, RULES[name])


# --- layouts -------------------------------------------------------------------------------------


def test_a_control_variate_for_each_trainable_tensor_lies_behind_the_network() -> None:
    """Not for frozen ones, buffers and counters; the network's own numbers stay where they were."""
    assert [spec.name for spec in LAYOUT.tensors if spec.role == "control"] == ["control:weight"]
    assert (LAYOUT.size, LAYOUT.counters) == (9 + 4, 1)
    assert {name: LAYOUT.slices[name] for name in NETWORK.slices} == NETWORK.slices
    assert LAYOUT.network == NETWORK
    assert NETWORK.network is NETWORK
    assert Layout.from_json(LAYOUT.to_json()) == LAYOUT
    assert LAYOUT.fingerprint != NETWORK.fingerprint


def test_a_model_shows_both_parts_without_a_copy() -> None:
    model = random_model(1)
    assert np.shares_memory(model.network.vector, model.vector)
    assert np.shares_memory(model.control, model.vector)
    assert model.network.vector.tolist() + model.control.tolist() == model.vector.tolist()
    assert model.network.counters is model.counters
    network = model.network
    assert network.network is network
    assert not network.control.size


def test_nothing_lies_behind_control_variates() -> None:
    with pytest.raises(ValueError, match="control variates must lie behind the network's own tensors"):
        Layout((TensorSpec("control:w", (2,), role="control"), TensorSpec("w", (2,))))


# --- mixing ----------------------------------------------------------------------------------------


@rules
@given(history=histories)
def test_the_network_is_mixed_as_ever_and_the_variate_is_the_mean_of_the_latest(
    name: str, history: list[tuple[Any, ...]]
) -> None:
    """Against the rule alone, and against the mean by examples written out over all that have not been withdrawn."""
    start = random_model(0)
    community, alone = controlled(name, start, MemoryStore()), RULES[name](start.network, MemoryStore())
    latest: dict[str, np.ndarray[Any, Any]] = {}
    for event in history:
        match event:
            case (learner, seed, value):
                local = random_model(seed)
                community.commit(learner, local, value, 3, start, EXAMPLES[learner])
                alone.commit(learner, local.network, value, 3, start.network)
                latest[learner] = local.control.astype(np.float64)
            case (learner,):
                community.withdraw(learner)
                alone.withdraw(learner)
                latest.pop(learner, None)
            case _:
                published = community.publish()
                assert published == alone.publish()
                if published and latest:
                    total = sum(EXAMPLES[learner] for learner in latest)
                    mean = sum(EXAMPLES[learner] * control for learner, control in latest.items()) / total
                    assert community.model.control == pytest.approx(mean, rel=1e-5, abs=1e-6)
        assert community.model.network.sha256() == alone.model.sha256()
        assert community.stamp == alone.stamp
        assert community.contributors == alone.contributors
        assert community.committed_steps == alone.committed_steps


def test_who_had_no_part_in_a_round_still_counts_in_the_variate() -> None:
    """Otherwise the variate would be that of the sample, and no fixed point of the federation's."""
    community = controlled("full", random_model(0), MemoryStore())
    away, there = random_model(1), random_model(2)
    community.commit("a", away, 0.1, 1, None, EXAMPLES["a"])
    community.commit("b", there, 0.9, 1, None, EXAMPLES["b"])
    community.publish()
    later = random_model(3)
    community.commit("b", later, 1.0, 1, None, EXAMPLES["b"])
    community.publish()
    assert community.model.network.vector.tolist() == later.network.vector.tolist()
    assert community.model.control == pytest.approx((3 * away.control + later.control) / 4, rel=1e-6)


def test_order_of_arrival_cannot_change_a_bit_of_a_round() -> None:
    locals_ = {learner: random_model(index) for index, learner in enumerate(LEARNERS)}
    vectors = set()
    for order in itertools.permutations(LEARNERS):
        community = controlled("full", random_model(9), MemoryStore())
        for learner in order:
            community.commit(learner, locals_[learner], 0.1 + 1e8 * (learner == "c"), 1, None, EXAMPLES[learner])
        community.publish()
        vectors.add(community.model.vector.tobytes())
    assert len(vectors) == 1


@rules
def test_a_published_model_never_changes_again(name: str) -> None:
    community = controlled(name, random_model(0), MemoryStore())
    handed_in = [random_model(1), random_model(2)]
    before = [each.sha256() for each in handed_in]
    for k in range(6):
        community.commit("ab"[k % 2], handed_in[k % 2], 0.5, 1, random_model(0))
        if k == 1:
            community.publish()
            published, sha = community.model, community.model.sha256()
    community.publish()
    assert published.sha256() == sha
    assert [each.sha256() for each in handed_in] == before


@pytest.mark.parametrize("store", ["memory", "disk"])
@rules
def test_a_replay_without_weights_and_the_saved_arrays_go_on_to_the_bit(name: str, store: str, tmp_path: Path) -> None:
    """As every mixing rule does; the disk store holds whole models, of which each side reads its part."""

    def stored(folder: str) -> ModelStore:
        return DiskStore(tmp_path / folder) if store == "disk" else MemoryStore()

    rng = np.random.default_rng(3)
    script = [(LEARNERS[rng.integers(4)], float(rng.uniform(0.1, 1))) for _ in range(40)]
    start = random_model(0)
    original, twin = controlled(name, start, stored("a")), controlled(name, Model.empty(), MemoryStore())
    for k, (learner, value) in enumerate(script):
        if k == 26:
            saved = {each: array.copy() for each, array in original.arrays().items()}
            twin.load_arrays(original.model, saved, stored("b"))
        replayed = k < 26
        local = random_model(100 + k)
        examples = EXAMPLES[learner]
        original.commit(learner, local, value, 1, start, examples)
        given = (Model.empty(), Model.empty()) if replayed else (local, start)
        twin.commit(learner, given[0], value, 1, given[1], examples)
        if k % 3 == 0:
            assert original.publish() == twin.publish()
        if k == 30:
            original.withdraw("b")
            twin.withdraw("b")
    assert original.publish() == twin.publish()
    assert twin.model.sha256() == original.model.sha256()
    assert twin.stamp == original.stamp
    assert {n: a.tobytes() for n, a in twin.arrays().items()} == {n: a.tobytes() for n, a in original.arrays().items()}


class Rows:
    """A store that hands out rows, of which a slice is read, as the controller's files are."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self.put, self.remove = self._store.put, self._store.remove

    def get(self, learner: str) -> _Row:
        return _Row(self._store.get(learner))


class _Row:
    def __init__(self, vector: Row) -> None:
        self._vector = vector

    def __getitem__(self, part: slice, /) -> Vector:
        return np.array(self._vector[part])


@rules
def test_rows_that_are_read_in_slices_give_the_same_bits(name: str) -> None:
    """Blocks shorter than either part of a model, so that slices start and end inside of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic, "BLOCK", 3)
        there, elsewhere = (controlled(name, random_model(0), store) for store in (MemoryStore(), Rows()))
        for k in range(12):
            for community in (there, elsewhere):
                learner = LEARNERS[k % 3]
                community.commit(learner, random_model(k), 0.5, 1, random_model(0), EXAMPLES[learner])
                community.publish()
            assert elsewhere.model.sha256() == there.model.sha256()
        assert elsewhere.stamp.version > 1


@rules
def test_an_adopted_model_is_gone_on_from_in_both_parts(name: str) -> None:
    """As the rule alone goes on from the network."""
    community, alone = (
        controlled(name, random_model(0), MemoryStore()),
        RULES[name](random_model(0).network, MemoryStore()),
    )
    for number, learner in enumerate("abab"):
        local, base = random_model(10 + number), random_model(0)
        community.commit(learner, local, 0.5, 1, base, EXAMPLES[learner])
        alone.commit(learner, local.network, 0.5, 1, base.network)
        assert community.publish() == alone.publish()
        assert community.model.network.sha256() == alone.model.sha256()
        community.adopt(random_model(number))
        alone.adopt(random_model(number).network)
        assert community.model.sha256() == random_model(number).sha256()
        assert community.stamp == alone.stamp


def test_a_solver_without_a_correction_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="MomentumSGD was given a model with control variates; either all learners"):
        ControlVariates().prepare(Work(random_model(0), MomentumSGD(0.1), {}))


# --- what is put on top of a policy sees the network alone ---------------------------------------------


def test_progress_divergence_optimizer_and_normalised_averaging_see_the_network_alone() -> None:
    """The same numbers as for the network without control variates."""
    policy = policies.semisync_fedavg().with_layers(FedNova()).with_layers(FedAdam()).with_layers(AdaptivePeriod())
    plain, with_controls = (policy.for_solver(kind(0.1, 0.5))[0] for kind in (MomentumSGD, Scaffold))
    start = random_model(0)
    alone = plain.start_community(start.network, MemoryStore())
    community = with_controls.start_community(start, MemoryStore())
    for index, learner in enumerate("abab"):
        local = random_model(10 + index)
        alone.commit(learner, local.network, 1.0 + index, 5 + index, None)
        community.commit(learner, local, 1.0 + index, 5 + index, None)
        if index % 2:
            assert alone.publish() and community.publish()
            assert community.model.network.sha256() == alone.model.sha256()
            assert community.measure == alone.measure
    assert community.measure is not None


# --- compression -----------------------------------------------------------------------------------------


KINDS = [Compression("float16"), Compression("bfloat16"), Compression("int8"), Compression("top_k", 0.4)]


@pytest.mark.parametrize("compression", KINDS, ids=lambda each: each.kind)
def test_each_part_is_compressed_for_itself(compression: Compression) -> None:
    """Control variates a million times as large leave the network's delta as it would be without them."""
    base, local = random_model(1), random_model(2)
    local = Model(LAYOUT, np.concatenate((local.network.vector, 1e6 * local.control)), local.counters)
    made = compression.compress(local, base, None)
    assert len(made.payload) == compression.nbytes(LAYOUT)
    assert compression.restore(made.payload, base).sha256() == made.local_model.sha256()
    alone = compression.compress(local.network, base.network, None)
    assert made.local_model.network.sha256() == alone.local_model.sha256()
    assert made.error == alone.error
    assert made.left_out[:9].tolist() == alone.left_out.tolist()
    assert not made.left_out[9:].any(), "a variate is handed in whole again each time, not summed up"
    assert made.local_model.control.any()
