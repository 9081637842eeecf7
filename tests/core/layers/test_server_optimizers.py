"""Server-side optimizers: against the written-out equations, behind every mixing rule, exact after a restart."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, strategies as st

from core.play import Play, model
from metis.core.layers import server_optimizers as server_module
from metis.core.layers.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi, Optimized
from metis.core.mixing import Buffered, CachedAverage, FullPass, Interpolation, MemoryStore
from metis.core.model import Layout, Model, TensorSpec
from metis.core.policies import async_fedavg, fedasync, semisync_fedavg, sync_fedavg

RULES = [FullPass, CachedAverage, partial(Interpolation, mixing=1.0), partial(Buffered, buffer_size=1)]
rules = pytest.mark.parametrize("rule", RULES, ids=["full", "cached", "interpolation", "buffered"])
OPTIMIZERS = [FedAvgM(0.7, 0.8), FedAdagrad(0.05, 0.3), FedAdam(0.05), FedYogi(0.05, tau=0.1)]
optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each.title)

weights = st.floats(-10, 10, width=32)
vectors = st.lists(weights, min_size=3, max_size=3)


def optimized(rule, optimizer):
    """A factory, as a policy has one."""
    return lambda initial_model, store: Optimized(rule(initial_model, store), optimizer)


def written_out(optimizer, rounds: list[list[float]], start: list[float]) -> np.ndarray:
    """The slow twin: Reddi et al., Algorithm 2, a number at a time; a round proposes its vector."""
    model_now = np.array(start, np.float32)
    mean = [0.0] * len(start)
    variance = [getattr(optimizer, "tau", 0.0) ** 2] * len(start)
    for proposed in rounds:
        for i, number in enumerate(proposed):
            difference = float(np.float32(number)) - float(model_now[i])
            match optimizer:
                case FedAvgM():
                    mean[i] = optimizer.momentum * mean[i] + difference
                    step = mean[i]
                case _:
                    square = difference**2
                    mean[i] = optimizer.beta1 * mean[i] + (1 - optimizer.beta1) * difference
                    match optimizer:
                        case FedAdagrad():
                            variance[i] += square
                        case FedAdam():
                            variance[i] = optimizer.beta2 * variance[i] + (1 - optimizer.beta2) * square
                        case FedYogi():
                            sign = math.copysign(1, variance[i] - square) if variance[i] != square else 0
                            variance[i] -= (1 - optimizer.beta2) * square * sign
                    step = mean[i] / (math.sqrt(variance[i]) + optimizer.tau)
            model_now[i] = np.float32(float(model_now[i]) + optimizer.learning_rate * step)
    return model_now


@rules
@optimizers
@given(start=vectors, rounds=st.lists(vectors, min_size=1, max_size=5))
def test_every_optimizer_behind_every_rule_against_the_equations(rule, optimizer, start, rounds):
    """One learner's model is what each rule proposes; the published model is where the steps lead."""
    community = optimized(rule, optimizer)(model(*start), MemoryStore())
    for proposed in rounds:
        community.commit("a", model(*proposed), 1.0, 1, community.model)
        assert community.publish()

    np.testing.assert_allclose(community.model.vector, written_out(optimizer, rounds, start), rtol=1e-5, atol=1e-5)
    assert community.stamp.version == len(rounds)


@rules
def test_rate_one_without_momentum_is_the_plain_rule(rule):
    """The contract of a mixing rule: equal where both are defined, over rounds of several learners."""
    plain, behind = (make(model(1, 2, 3), MemoryStore()) for make in (rule, optimized(rule, FedAvgM(1.0, 0.0))))
    for number in range(1, 5):
        for learner in "abc":
            local_model = model(number, ord(learner) / 7, number * ord(learner) / 50)
            for community in (plain, behind):
                community.commit(learner, local_model, 0.5, 2, community.model)
        assert plain.publish()
        assert behind.publish()
        np.testing.assert_allclose(behind.model.vector, plain.model.vector, rtol=1e-6)
    assert behind.stamp == plain.stamp
    assert behind.committed_steps == plain.committed_steps


def test_a_published_model_never_changes_again():
    """Later steps leave it alone."""
    community = optimized(partial(Interpolation, mixing=0.5), FedAdam())(model(1, 2, 3), MemoryStore())
    published = []
    for number in range(3):
        community.commit("a", model(number, 5, -1), 1.0, 1, None)
        community.publish()
        published.append((community.model, community.model.sha256()))

    assert [each.sha256() for each, _ in published] == [sha for _, sha in published]


@optimizers
def test_buffers_are_mixed_and_not_optimized(optimizer):
    """A variance of BatchNorm must stay a variance: it becomes what the rule proposes, to the bit."""
    layout = Layout((TensorSpec("weight", (2,)), TensorSpec("variance", (2,), role="buffer"), TensorSpec("last", (1,))))
    community = optimized(FullPass, optimizer)(Model(layout, np.array([1, 1, 9, 8, 1], np.float32)), MemoryStore())
    for proposed in ([2, 3, 0.25, 0.5, 4], [1, 1, 0.125, 0.0625, 1]):
        community.commit("a", Model(layout, np.array(proposed, np.float32)), 1.0, 1, None)
        community.publish()

    expected = written_out(optimizer, [[2, 3, 4], [1, 1, 1]], [1, 1, 1])
    assert community.model.vector[2:4].tolist() == [0.125, 0.0625]
    np.testing.assert_allclose(community.model.vector[[0, 1, 4]], expected, rtol=1e-6)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch):
    """A model longer than a block gives the same bits."""
    rng = np.random.default_rng(0)
    layout = Layout((TensorSpec("w", (50,)),))
    start, *proposed = (Model(layout, rng.normal(size=50).astype(np.float32)) for _ in range(4))
    results = []
    for block in (7, 1000):
        monkeypatch.setattr(server_module, "_BLOCK", block)
        community = optimized(FullPass, FedYogi())(start, MemoryStore())
        for local_model in proposed:
            community.commit("a", local_model, 1.0, 1, None)
            community.publish()
        results.append(community.model.sha256())
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (partial(FedAvgM, learning_rate=0.0), "learning_rate of server is 0.0; it must be greater than 0"),
        (partial(FedAvgM, momentum=1.0), "momentum of server is 1.0; it must be at least 0 and less than 1"),
        (partial(FedAdagrad, tau=0.0), "tau of server is 0.0; it must be greater than 0"),
        (partial(FedAdam, beta2=-0.1), "beta2 of server is -0.1; it must be at least 0 and less than 1"),
        (partial(FedYogi, beta1=math.nan), "beta1 of server is nan; it must be at least 0 and less than 1"),
        (
            partial(FedYogi, learning_rate=math.inf),
            "learning_rate of server is inf; it must be finite and greater than 0",
        ),
    ],
)
def test_impossible_settings_are_refused(make, complaint):
    """The sentence names the setting, its table and the value."""
    with pytest.raises(ValueError, match=f"^{complaint}$"):
        make()


@pytest.mark.parametrize("policy", [sync_fedavg(1), semisync_fedavg(2), async_fedavg(1), fedasync(1)])
def test_a_server_optimizer_leaves_the_course_of_events_alone(policy):
    """WHEN and WHO are not its business: only the models differ, and the label says so."""
    plays = [Play(each, gpu=0.03, cpu=0.3) for each in (policy, policy.with_layers(FedAdam()))]
    for play in plays:
        play.run_until(community_version=5)

    plain, behind = plays
    assert behind.log == plain.log
    assert plain.controller.community.model.sha256() != behind.controller.community.model.sha256()
    assert policy.with_layers(FedAdam()).label == f"{policy.label} + FedAdam"
