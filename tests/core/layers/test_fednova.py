"""Normalised averaging: the published lengths, the plain average where steps are equal, and the bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from core.play import Play, model
from metis.core.layers.fednova import FedNova, NormalizedAverage, accumulated_steps
from metis.core.mixing import FullPass, MemoryStore
from metis.core.model import Layout, Model, TensorSpec
from metis.core.policies import semisync_fedavg

weights = st.floats(-10, 10, width=32)
vectors = st.lists(weights, min_size=3, max_size=3)
values = st.floats(1e-3, 1e3)
steps = st.integers(1, 2000)
momenta = st.floats(0, 0.99)


def step_by_step(count: int, momentum: float, pull: float) -> float:
    """The slow twin: take this many steps along a gradient of 1 with a learning rate of 1."""
    distance = velocity = 0.0
    for _ in range(count):
        velocity = momentum * velocity + 1 - pull * distance
        distance += velocity
    return distance


# --- how far steps lead -----------------------------------------------------------------------


@given(steps, momenta)
def test_length_with_momentum_is_the_published_one(count: int, rho: float):
    """||a||_1 = (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)."""
    published = (count - rho * (1 - rho**count) / (1 - rho)) / (1 - rho)
    assert accumulated_steps(count, rho) == pytest.approx(published, rel=1e-9)


@given(steps, st.floats(1e-3, 0.9))
def test_length_with_a_proximal_term_is_the_published_one(count: int, pull: float):
    """||a||_1 = (1 - (1 - eta mu)^tau) / (eta mu)."""
    assert accumulated_steps(count, 0.0, pull) == pytest.approx((1 - (1 - pull) ** count) / pull, rel=1e-9)


@given(st.integers(1, 300), st.floats(0, 0.9), st.floats(0, 0.5))
def test_length_of_both_is_that_of_the_steps_one_by_one(count: int, momentum: float, pull: float):
    assert accumulated_steps(count, momentum, pull) == pytest.approx(step_by_step(count, momentum, pull), rel=1e-8)


@given(st.integers(1, 2**53))
def test_plain_sgd_goes_as_far_as_it_has_steps(count: int):
    assert accumulated_steps(count) == count


def test_a_boundless_claim_is_digested_at_once():
    """A learner that claims 2^53 steps does not keep the controller busy."""
    assert accumulated_steps(2**53, 0.5) == pytest.approx(2**54, rel=1e-9)


# --- the mixture ------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(vectors, values), min_size=1), steps, momenta, vectors)
def test_equal_steps_give_the_plain_average(commits, count, momentum, start):
    """The contract of a mixing rule: equal to the plain average where both are defined."""
    plain = FullPass(model(*start), MemoryStore())
    nova = NormalizedAverage(model(*start), MemoryStore(), FedNova(4.0, momentum))
    for learner, (vector, value) in commits.items():
        for community in (plain, nova):
            community.commit(learner, model(*vector), value, count, None)
    assert plain.publish()
    assert nova.publish()
    np.testing.assert_allclose(nova.model.vector, plain.model.vector, rtol=1e-5, atol=1e-5)
    assert nova.stamp == plain.stamp


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(vectors, values, steps), min_size=1), momenta, vectors)
def test_against_the_published_formula(commits, momentum, start):
    """w - tau_eff sum p_k (w - w_k) / ||a_k||, with tau_eff = sum p_k ||a_k||, where the bound does not bind."""
    nova = NormalizedAverage(model(*start), MemoryStore(), FedNova(1e9, momentum))
    for learner, (vector, value, count) in commits.items():
        nova.commit(learner, model(*vector), value, count, None)
    total = math.fsum(value for _, value, _ in commits.values())
    share = {learner: value / total for learner, (_, value, _) in commits.items()}
    length = {learner: step_by_step(count, momentum, 0.0) for learner, (_, _, count) in commits.items()}
    effective = math.fsum(share[learner] * length[learner] for learner in commits)
    expected = np.array(start, np.float64)
    for learner, (vector, _, _) in commits.items():
        expected = expected - effective * share[learner] * (np.array(start) - np.array(vector)) / length[learner]

    assert nova.publish()
    np.testing.assert_allclose(nova.model.vector, expected, rtol=1e-4, atol=1e-3)


def test_few_steps_are_amplified_no_more_than_allowed():
    """One step against a thousand would count 500-fold."""
    settings = FedNova(largest_amplification=4.0)
    factors = settings.factors({"few": 1.0, "many": 1.0}, {"few": 1, "many": 1000})

    assert factors == {"few": 4.0, "many": (1 + 1000) / 2 / 1000}


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(vectors, values, steps), min_size=1), vectors)
def test_by_default_the_mixture_stays_between_the_models(commits, start):
    """No number leaves the range of the community model and the local ones, whatever the steps."""
    nova = NormalizedAverage(model(*start), MemoryStore())
    for learner, (vector, value, count) in commits.items():
        nova.commit(learner, model(*vector), value, count, None)
    nova.publish()
    everything = np.array([start, *(vector for vector, _, _ in commits.values())])
    assert (nova.model.vector >= everything.min(axis=0) - 1e-4).all()
    assert (nova.model.vector <= everything.max(axis=0) + 1e-4).all()


def test_order_of_arrival_cannot_change_a_bit():
    shas = set()
    for order in ("abc", "cba", "bca"):
        nova = NormalizedAverage(model(1, 2, 3), MemoryStore(), FedNova(momentum=0.9))
        for learner in order:
            code = ord(learner)
            nova.commit(learner, model(1e30 / code, 1 / code, -code), code, code % 7 + 1, None)
        nova.publish()
        shas.add(nova.model.sha256())
    assert len(shas) == 1


def test_buffers_are_averaged_and_not_normalised():
    """A variance that were lengthened could become negative."""
    layout = Layout((TensorSpec("weight", (1,)), TensorSpec("variance", (1,), role="buffer")))
    nova = NormalizedAverage(Model(layout, np.array([0, 9], np.float32)), MemoryStore(), FedNova(100.0))
    nova.commit("few", Model(layout, np.array([1, 1], np.float32)), 1.0, 1, None)
    nova.commit("many", Model(layout, np.array([10, 3], np.float32)), 3.0, 9, None)
    nova.publish()

    average = (1 * 1 + 3 * 9) / 4
    assert nova.model.vector.tolist() == pytest.approx(
        [1 / 4 * average / 1 * 1 + 3 / 4 * average / 9 * 10, (1 * 1 + 3 * 3) / 4]
    )


def test_a_policy_with_normalised_averaging_keeps_its_course():
    """WHEN and WHO are not its business; the slow learner counts for more."""
    plays = [
        Play(policy, gpu=0.03, cpu=0.3) for policy in (semisync_fedavg(2), semisync_fedavg(2).with_layers(FedNova(4.0)))
    ]
    plain, nova = (play.run_until(community_version=4) for play in plays)

    assert nova.log == plain.log
    assert (nova.controller.community.model.vector > plain.controller.community.model.vector).all()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"largest_amplification": 0.5}, "largest_amplification of nova is 0.5; it must be at least 1"),
        ({"largest_amplification": math.nan}, "largest_amplification of nova is nan; it must be at least 1"),
        ({"momentum": 1.0}, "momentum of nova is 1.0; it must be at least 0 and less than 1"),
        ({"pull": -0.1}, "pull of nova is -0.1; it must be at least 0 and less than 1"),
    ],
)
def test_impossible_settings_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=f"^{complaint}$"):
        FedNova(**settings)
