"""Baselines among the policies: who trains, and what they are called."""

from __future__ import annotations

import pytest

from metis.core.policies import POLICIES, alone, centralized, semisync_fedavg
from metis.core.policy import Baseline, Policy


@pytest.mark.parametrize(
    ("policy", "baseline", "label"),
    [
        (centralized(), Baseline(pooled=True), "Centralized"),
        (alone(), Baseline(), "Alone (largest)"),
        (alone("zurich", 2.0), Baseline(learner="zurich"), "Alone (zurich)"),
    ],
)
def test_a_baseline_says_who_trains(policy: Policy, baseline: Baseline, label: str) -> None:
    """It is synchronous training of one learner, under a name of its own."""
    assert (policy.baseline, policy.label) == (baseline, label)
    assert POLICIES[policy.name]().name == policy.name
    assert policy.protocol.has_rounds and semisync_fedavg().baseline is None
