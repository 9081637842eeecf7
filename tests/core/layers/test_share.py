"""No learner counts for more than its share, however it is mixed."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from core.play import model
from metis.core.layers import FedAvgM, FedNova, LargestShare
from metis.core.layers.fednova import NormalizedAverage
from metis.core.mixing import CachedAverage, Community, FullPass, MemoryStore, Mixing
from metis.core.model import Model
from metis.core.policies import async_fedavg, fedasync, fedbuff, fedrec, semisync_fedavg, sync_fedavg
from metis.core.policy import Policy
from metis.core.solvers import Scaffold
from metis.errors import ArgumentError

AVERAGES: dict[str, Mixing] = {
    "FullPass": FullPass,
    "CachedAverage": partial(CachedAverage, rebuild_every=2),
    "NormalizedAverage": NormalizedAverage,
}
HONEST, POISON = model(1, 1, 1), model(9, 9, 9)


def _mixed(community: Community, *values: float) -> Model:
    """What is published when the first learner hands in poison and the others honest models, of these values."""
    for index, value in enumerate(values):
        community.commit(str(index), POISON if index == 0 else HONEST, value, 4)
    assert community.publish()
    return community.model


@pytest.mark.parametrize("mixing", AVERAGES.values(), ids=AVERAGES.keys())
def test_a_claim_of_a_billion_examples_counts_for_the_largest_share(mixing: Mixing) -> None:
    """Three honest learners of 100 examples: the liar counts for 40 %, and for what is due to it when it is honest."""

    def community() -> Community:
        return LargestShare(0.4).wrap(mixing)(model(0, 0, 0), MemoryStore())

    np.testing.assert_allclose(_mixed(community(), 1e9, 100, 100, 100).vector, 1 + 8 * 0.4, rtol=1e-6)
    np.testing.assert_allclose(_mixed(community(), 100, 100, 100, 100).vector, 1 + 8 * 0.25, rtol=1e-6)
    np.testing.assert_allclose(_mixed(mixing(model(0, 0, 0), MemoryStore()), 1e9, 100, 100).vector, 9, rtol=1e-5)


@pytest.mark.parametrize("mixing", AVERAGES.values(), ids=AVERAGES.keys())
def test_with_too_few_learners_they_count_equally(mixing: Mixing) -> None:
    """Two cannot each have at most 40 %."""
    community = LargestShare(0.4).wrap(mixing)(model(0, 0, 0), MemoryStore())
    np.testing.assert_allclose(_mixed(community, 1e9, 100).vector, 5, rtol=1e-6)


def test_it_reaches_the_mixing_through_whatever_is_around_it() -> None:
    """Optimizers, measurements and control variates, whose own average is limited too."""
    policy = sync_fedavg(1).with_layers(LargestShare(0.25), FedAvgM(1.0, 0.0)).for_solver(Scaffold(0.1))[0]
    start = policy.extend_model(model(0, 0, 0), 3)
    community = policy.start_community(start, MemoryStore())
    handed_in = {"a": (9, 8, 10**9), "b": (1, 4, 1), "c": (1, 4, 1), "d": (1, 4, 1)}
    for name, (number, control, examples) in handed_in.items():
        vector = np.array([number] * 3 + [control] * 3, np.float32)
        community.commit(name, start.with_vector(vector), float(examples), 4, examples=examples)
    community.publish()
    np.testing.assert_allclose(community.model.vector, [3.0] * 3 + [5.0] * 3, rtol=1e-6)


AVERAGING = [sync_fedavg(1), semisync_fedavg(2), async_fedavg(1), fedrec(1)]


@pytest.mark.parametrize("policy", AVERAGING, ids=lambda policy: policy.name)
def test_policies_that_average_take_it(policy: Policy) -> None:
    """Also together with FedNova, which replaces the average."""
    limited = policy.with_layers(LargestShare(0.3))
    assert limited.label == f"{policy.label}, at most 30 % each"
    if policy.protocol.has_rounds:
        limited.with_layers(FedNova())


@pytest.mark.parametrize("policy", [fedasync(1), fedbuff(1)], ids=lambda policy: policy.name)
def test_policies_that_add_up_are_refused_by_name(policy: Policy) -> None:
    """What is blended in or summed cannot be weighed again."""
    with pytest.raises(ArgumentError, match=f"share limits .* and {policy.name} adds models up as they come"):
        policy.with_layers(LargestShare(0.3))
