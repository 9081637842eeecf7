"""What a plan spends of the sites' privacy budgets, if nothing limited their steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metis.planning.forecast import Forecast, PlannedLearner
from metis.privacy import accounting
from metis.privacy.accounting import Steps
from metis.privacy.records import Privacy, sampling_rate


def spending(learners: Sequence[PlannedLearner], forecasts: Sequence[Forecast], rounds: int | None) -> dict[str, Any]:
    """By policy and learner: epsilon at the end of the run, and the rounds until a budget is spent.

    Also the lambda with which the slowest learner that has a budget spends exactly that by the end of the run.
    """
    private = {one.name: (one, one.privacy) for one in learners if one.privacy is not None}
    if not private:
        return {}
    policies = []
    for found in forecasts:
        if found.kind == "asynchronous":
            continue  # a round is not a task of each learner there
        rows = []
        for one in found.learners:
            if one.learner in private:
                learner, privacy = private[one.learner]
                rows.append({"learner": one.learner, **_spent(learner, privacy, one.steps, rounds)})
        policies.append({"label": found.policy.label, "learners": rows})
    return {"rounds": rounds, "policies": policies, "lambda_of_slowest": _exact_lambda(learners, rounds)}


def _spent(learner: PlannedLearner, privacy: Privacy, steps: int, rounds: int | None) -> dict[str, Any]:
    rate = sampling_rate(learner.batch_size, learner.examples)
    allowed = privacy.max_steps(rate)
    return {
        "steps_per_round": steps,
        "epsilon": None
        if rounds is None
        else accounting.epsilon([Steps(rate, privacy.noise, rounds * steps)], privacy.delta),
        "budget": privacy.budget,
        "delta": privacy.delta,
        "rounds_until_spent": None if allowed is None else allowed // max(1, steps),
    }


def _exact_lambda(learners: Sequence[PlannedLearner], rounds: int | None) -> float | None:
    slowest = max(learners, key=lambda one: one.epoch_time)
    if rounds is None or slowest.privacy is None:
        return None
    allowed = slowest.privacy.max_steps(sampling_rate(slowest.batch_size, slowest.examples))
    return None if allowed is None else allowed / (rounds * slowest.batches)
