"""Privacy budgets in reports: steps and rounds that are left, and epsilon where a simulation knows the noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metis.core.events import LearnerId
from metis.errors import ConfigError
from metis.privacy.accounting import Steps, epsilon
from metis.privacy.records import Privacy, rate_at, sampling_rate
from metis.runs.spending import Spending, SpendingFold

HEADINGS = ("steps", "steps left", "rounds left", "epsilon spent", "budget", "delta")


def epsilon_spent(facts: Mapping[str, Any], learner: LearnerId, spent: Spending) -> float | None:
    """Of what tasks have asked a simulated site for; None of a real one, which keeps it to itself."""
    own = facts.get("privacy", {}).get(learner)
    if own is None:
        return None
    try:
        privacy = Privacy(own["noise"], 1.0, own["budget"], own["delta"])
        rate = sampling_rate(own["batch_size"], own["examples"])
        done = [
            Steps(rate_at(rate, batches), privacy.noise_at(rate, batches), steps)
            for batches, steps in spent.steps.items()
        ]
        return epsilon(done, privacy.delta)
    except (ConfigError, KeyError, TypeError):  # without dp-accounting, or a setting that was changed
        return None


def spending_row(facts: Mapping[str, Any], learner: LearnerId, spent: Spending) -> list[str]:
    """One site, as `HEADINGS` says."""
    own, found = facts.get("privacy", {}).get(learner, {}), epsilon_spent(facts, learner, spent)
    return [
        f"{spent.steps.total():,}",
        "–" if spent.left is None else f"{spent.left:,}",
        "–" if spent.rounds_left is None else f"{spent.rounds_left:,}",
        "kept at the site" if found is None else f"{found:.3g}",
        "–" if own.get("budget") is None else f"{own['budget']:g}",
        f"{own['delta']:g}" if "delta" in own else "–",
    ]


def left_and_spent(
    facts: Mapping[str, Any], fold: SpendingFold, learner: LearnerId
) -> tuple[int | None, int | None, float | None]:
    """Steps and rounds that are left of a site's budget, and epsilon so far; None for what is not known."""
    spent = fold.by_learner.get(learner)
    if spent is None:
        return None, None, None
    found = epsilon_spent(facts, learner, spent)
    return spent.left, spent.rounds_left, None if found is None else float(f"{found:.4g}")
