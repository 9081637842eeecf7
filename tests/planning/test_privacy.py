"""What a plan spends of the sites' privacy, and what a run makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import metis
from metis.core.events import SendTask
from metis.core.policies import semisync_fedavg
from metis.errors import ConfigError
from metis.experiments.federation import Federation
from metis.planning.forecast import PlannedLearner, forecast
from metis.planning.privacy import spending
from metis.privacy import accounting
from metis.privacy.accounting import Steps
from metis.privacy.records import Privacy

PRIVACY = Privacy(noise=1.0, budget=8.0)


def test_a_plan_shows_what_lambda_spends() -> None:
    """5,000 records in batches of 100, ten times apart in speed, 40 rounds: as the documentation has it."""
    learners = [
        PlannedLearner("fast", 5000, 100, 0.1, privacy=PRIVACY),
        PlannedLearner("slow", 5000, 100, 1.0, privacy=PRIVACY),
    ]
    found = spending(learners, [forecast(semisync_fedavg(lam), learners, lam) for lam in (0.5, 1.0)], 40)
    half, one = ({row["learner"]: row for row in policy["learners"]} for policy in found["policies"])
    assert (half["slow"]["epsilon"], half["fast"]["epsilon"]) == pytest.approx((4.3, 15.4), abs=0.06)
    assert (one["slow"]["rounds_until_spent"], one["fast"]["rounds_until_spent"]) == (65, 6)
    lam = found["lambda_of_slowest"]
    spent = accounting.epsilon([Steps(0.02, 1.0, round(40 * 50 * lam))], 1e-5)
    assert spent == pytest.approx(8.0, abs=0.02)
    assert spending([replace(one, privacy=None) for one in learners], [], 40) == {}


def private_federation(**settings: object) -> Federation:
    federation = metis.Federation.from_dataset("digits", learners=2, speeds=[0.01, 0.1], batch_size=20, seed=3)
    privacy = Privacy(**{"noise": 1.0, "budget": 8.0, **settings})  # type: ignore[arg-type]
    federation.learners = tuple(replace(one, privacy=privacy) for one in federation.learners)
    return federation


@pytest.mark.parametrize("larger", [False, True])
def test_a_run_of_forty_rounds_ends_within_the_budget_of_its_fast_site(larger: bool) -> None:
    """The fast site would spend far more than 8; it ends at or below it, by all the batches that it really drew."""
    federation = private_federation(larger_batches=larger)
    run = federation.simulate(semisync_fedavg(0.25), rounds=40, evaluate_every=1e9, progress=False)
    for learner in federation.learners:
        tasks = [
            item.task.budget for _, item in run.events if isinstance(item, SendTask) and item.learner == learner.name
        ]
        rate = learner.batch_size / len(learner.indices)
        assert learner.privacy is not None
        made = [
            Steps(
                min(1.0, rate * one.batches_per_step),
                learner.privacy.noise_at(rate, one.batches_per_step),
                one.steps or 0,
            )
            for one in tasks
        ]
        assert 0 < accounting.epsilon(made, 1e-5) <= 8.0
    assert run.rounds == 40


def test_a_private_run_can_be_repeated_and_excludes_deadlines() -> None:
    """A simulation's noise comes from its seed; how many batches fit into a period must not depend on records."""
    first, again = (
        private_federation().simulate(semisync_fedavg(0.2), rounds=2, evaluate_every=1e9, progress=False)
        for _ in range(2)
    )
    assert first.community_model.sha256() == again.community_model.sha256()
    with pytest.raises(ConfigError, match="budget = 'deadline' cannot be combined with privacy"):
        private_federation().simulate(semisync_fedavg(1, budget="deadline"), rounds=2, progress=False)
