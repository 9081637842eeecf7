"""What is measured of a round: against the written-out norms, and exact after a restart."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from core.play import model
from metis.core import arithmetic
from metis.core.layers import AdaptivePeriod
from metis.core.layers.adaptive_period import Measured
from metis.core.layers.fednova import NormalizedAverage
from metis.core.layers.server_optimizers import FedAdam, FedAvgM, Optimized
from metis.core.mixing import CachedAverage, Community, FullPass, MemoryStore
from metis.core.model import Layout, Model, TensorSpec
from metis.core.policies import semisync_fedavg

weights = st.floats(-10, 10, width=32)
vectors = st.lists(weights, min_size=3, max_size=3)
rounds = st.lists(
    st.dictionaries(st.sampled_from("abc"), st.tuples(vectors, st.floats(0.1, 10)), min_size=1), min_size=1, max_size=4
)


@given(vectors, rounds)
def test_against_the_written_out_norms(start: list[float], rounds: list[dict[str, tuple[list[float], float]]]) -> None:
    """Progress and divergence of every round; the models are those of the rule inside."""
    community, plain = Measured(FullPass(model(*start), MemoryStore())), FullPass(model(*start), MemoryStore())
    published = [np.array(start, np.float64)]
    for commits in rounds:
        current = plain.model.vector.astype(np.float64)
        for learner, (vector, value) in commits.items():
            community.commit(learner, model(*vector), value, 1, None)
            plain.commit(learner, model(*vector), value, 1, None)
        assert community.publish()
        assert plain.publish()
        assert community.model.sha256() == plain.model.sha256()
        published.append(plain.model.vector.astype(np.float64))
        total = math.fsum(value for _, value in commits.values())
        spread = math.fsum(
            value * float(np.sum((np.array(vector) - current) ** 2)) for vector, value in commits.values()
        )
        measure = community.measure
        assert measure is not None
        delta = published[-1] - published[-2]
        assert measure.progress == pytest.approx(np.linalg.norm(delta), rel=1e-9, abs=1e-12)
        assert measure.divergence == pytest.approx(math.sqrt(spread / total), rel=1e-9, abs=1e-12)
        assert measure.progress <= measure.divergence * (1 + 1e-6) + 1e-5, "no average goes further than its parts"


def test_learners_that_agree_go_as_far_as_their_mean():
    """The same direction: progress is divergence. Opposite directions: all divergence, no progress."""
    community = Measured(FullPass(model(1, 1, 1), MemoryStore()))
    community.commit("a", model(2, 1, 1), 1.0, 1, None)
    community.commit("b", model(2, 1, 1), 1.0, 1, None)
    community.publish()
    assert community.measure is not None
    assert (community.measure.progress, community.measure.divergence) == (1.0, 1.0)
    community.commit("a", model(3, 1, 1), 1.0, 1, None)
    community.commit("b", model(1, 1, 1), 1.0, 1, None)
    community.publish()
    assert (community.measure.progress, community.measure.divergence) == (0.0, 1.0)


@pytest.mark.parametrize("optimizer", [FedAvgM(1.0, 0.9), FedAvgM(0.01, 0.0), FedAdam(0.5)])
def test_an_optimizer_s_steps_are_not_taken_for_agreement(optimizer):
    """Two learners at right angles agree by a half, however far the optimizer then goes."""
    policy = semisync_fedavg().with_layers(AdaptivePeriod()).with_layers(optimizer)
    community = policy.start_community(model(1, 1, 1), MemoryStore())
    for _ in range(4):
        x, y, z = (float(number) for number in community.model.vector)
        community.commit("a", model(x + 1, y, z), 1.0, 1, None)
        community.commit("b", model(x, y + 1, z), 1.0, 1, None)
        community.publish()
        assert community.measure is not None
        assert community.measure.progress == pytest.approx(math.sqrt(0.5), rel=1e-5)
        assert community.measure.divergence == pytest.approx(1.0, rel=1e-5)


def test_a_withdrawn_learner_is_not_measured():
    community = Measured(FullPass(model(), MemoryStore()))
    community.commit("a", model(100, 0, 0), 1.0, 1, None)
    community.commit("b", model(3, 4, 0), 1.0, 1, None)
    community.withdraw("a")
    community.withdraw("stranger")
    community.publish()
    assert community.measure is not None
    assert (community.measure.progress, community.measure.divergence) == (5.0, 5.0)


def layered(initial_model: Model) -> Community:
    return Optimized(Measured(NormalizedAverage(initial_model, MemoryStore())), FedAvgM())


@pytest.mark.parametrize("make", [lambda initial: Measured(CachedAverage(initial, MemoryStore())), layered])
def test_a_replay_without_weights_and_the_saved_arrays_go_on_to_the_bit(make) -> None:
    """In the middle of a round: the squares of what was committed before it."""
    rng = np.random.default_rng(3)
    original, twin = make(model(1, 2, 3)), make(Model.empty())
    measures = []
    for number in range(12):
        if number == 7:
            saved = {name: array.copy() for name, array in original.arrays().items()}
            twin.load_arrays(original.model, saved, MemoryStore())
        local_model, count = model(*rng.normal(size=3)), int(rng.integers(1, 9))
        original.commit("abc"[number % 3], local_model, 1.0, count, None)
        twin.commit("abc"[number % 3], Model.empty() if number < 7 else local_model, 1.0, count, None)
        if number % 3 == 2:
            assert original.publish() == twin.publish()
            measures.append((original.measure, twin.measure))

    assert measures[2][0] == measures[2][1]
    assert measures[3][0] == measures[3][1]
    assert twin.model.sha256() == original.model.sha256()
    assert {n: a.tobytes() for n, a in twin.arrays().items()} == {n: a.tobytes() for n, a in original.arrays().items()}


def test_models_longer_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "BLOCK", 7)
    rng = np.random.default_rng(0)
    layout = Layout((TensorSpec("w", (50,)),))
    start, end = (rng.normal(size=50).astype(np.float32) for _ in range(2))
    community = Measured(FullPass(Model(layout, start), MemoryStore()))
    community.commit("a", Model(layout, end), 1.0, 1, None)
    community.publish()
    assert community.measure is not None
    assert community.measure.progress == pytest.approx(np.linalg.norm(end.astype(np.float64) - start))
    assert community.measure.divergence == pytest.approx(community.measure.progress)
