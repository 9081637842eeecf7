"""Differential privacy of a site's records: the settings of DP-SGD, and what they allow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from metis.privacy import accounting
from metis.registry import Setting, check_settings

_DIGITS = 2  # of the number of steps that a site tells; the exact one reveals its number of records


@dataclass(frozen=True)
class Privacy:
    """How a site protects its records, and how much of them it gives away at most."""

    noise: Annotated[float, Setting("standard deviation of the noise in a step, as a multiple of clip", gt=0)]
    clip: Annotated[float, Setting("largest norm of one record's gradient; longer ones are cut to it", gt=0)] = 1.0
    budget: Annotated[
        float | None, Setting("epsilon that this data set may spend, over all runs; without it there is no limit", gt=0)
    ] = None
    delta: Annotated[float, Setting("of (epsilon, delta); well below 1 / records", gt=0, lt=1)] = 1e-5
    larger_batches: Annotated[
        bool, Setting("fill a period that the budget leaves empty with larger batches, at the same epsilon")
    ] = True
    order: float | None = None  # of the site's ledger; None: the one at which the budget lasts longest

    def __post_init__(self) -> None:
        check_settings(self, "privacy")

    def strictest(self, other: Privacy) -> Privacy:
        """The site's own settings, with more noise, a shorter clip or a smaller budget where the federation asks."""
        budgets = [each.budget for each in (self, other) if each.budget is not None]
        return replace(
            self,
            noise=max(self.noise, other.noise),
            clip=min(self.clip, other.clip),
            budget=min(budgets, default=None),
            delta=min(self.delta, other.delta),
            larger_batches=self.larger_batches and other.larger_batches,
        )

    def max_steps(self, rate: float) -> int | None:
        """S_k of a data set of which nothing is spent; None without a budget."""
        return None if self.budget is None else accounting.max_steps(rate, self.noise, self.budget, self.delta)

    def noise_at(self, rate: float, batches_per_step: int) -> float:
        """The noise with which a step of larger batches costs no more than one of single batches."""
        larger = rate_at(rate, batches_per_step)
        if self.budget is None or larger == rate:
            return self.noise
        order = self.order or accounting.best_order(rate, self.noise, self.budget, self.delta)
        return accounting.noise_of_cost(order, larger, accounting.cost(order, rate, self.noise))


def sampling_rate(batch_size: int, examples: int) -> float:
    """The probability with which a step draws a record."""
    return min(1.0, batch_size / examples)


def rate_at(rate: float, batches_per_step: int) -> float:
    """The same for a step of several batches."""
    return min(1.0, batches_per_step * rate)


def coarse(steps: int) -> int:
    """Rounded down to two digits."""
    unit: int = 10 ** max(0, len(str(steps)) - _DIGITS)
    return steps // unit * unit
