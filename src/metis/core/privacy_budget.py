"""A privacy budget as one more limit of B_k.

A site says how many steps its budget still allows, S_k - done; these are divided over the rounds that are left:
B_k = min(t_max / t_beta, (S_k - done) / rounds left). What that leaves of a period is filled with larger batches, if
the site wants it so, at the same cost in privacy.
"""

from __future__ import annotations

import math
from dataclasses import replace

from metis.core.events import Budget, LearnerId
from metis.core.roster import Roster
from metis.core.stop import StopRule

SPENT = "its privacy budget is spent"
BY_DEADLINE = (
    "it has a privacy budget, and budget = 'deadline' makes the number of steps depend on its records; use 'steps'"
)


def rounds_left(
    stop: StopRule, rounds: int, update_requests: int, now: float, period: float, learners: int, turns: int
) -> int:
    """How often each learner still trains, as far as the stop rule says; 1 if it does not.

    A round lasts `period` seconds, infinity if that is not known. One community model is published for `turns` learners
    that train: for all of them under a barrier, for one without.
    """
    ends = []
    if stop.rounds is not None:
        ends.append(math.ceil((stop.rounds - rounds) * turns / learners))
    if stop.update_requests is not None:
        ends.append(math.ceil((stop.update_requests - update_requests) / learners))
    if stop.seconds is not None and period < math.inf:
        ends.append(math.ceil((stop.seconds - now) / period))
    return max(1, min(ends, default=1))


def within_privacy(budgets: dict[LearnerId, Budget], roster: Roster, rounds: int) -> dict[LearnerId, Budget]:
    """The budgets with no more steps than the learners may still make in each of so many rounds."""
    return {learner: _limited(budget, roster, learner, rounds) for learner, budget in budgets.items()}


def _limited(budget: Budget, roster: Roster, learner: LearnerId, rounds: int) -> Budget:
    record = roster[learner]
    if record.steps_left is None or budget.steps is None:
        return budget
    steps = min(budget.steps, max(1, record.steps_left // rounds))
    larger = min(budget.steps // steps, record.epoch_steps) if record.larger_batches else 1
    return replace(budget, steps=steps, batches_per_step=larger)
