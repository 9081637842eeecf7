"""What steps of DP-SGD cost, by dp-accounting: Renyi divergences (RDP), epsilon, and the tighter PLD.

A step draws each record with probability `rate`, clips its gradient, and adds Gaussian noise of `noise` times the clip.
Costs add up by order. A site that may choose steps, noise and batches as it goes (a Renyi filter, Feldman and Zrnic
2021) keeps one order for good: then epsilon holds whatever was chosen, as long as the sum stays within `allowance`.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metis.errors import ConfigError

# Those of dp-accounting, without the ones that no useful budget ever needs.
ORDERS = (*(1 + tenth / 10 for tenth in range(1, 100)), *map(float, range(11, 64)), 96.0, 128.0, 256.0, 512.0)
_LARGEST_NOISE = 1e6


class Steps(NamedTuple):
    """So many steps of DP-SGD with the same settings."""

    rate: float  # probability with which a step draws a record
    noise: float  # standard deviation over the clip
    steps: int


def _library() -> Any:
    """dp-accounting, the only place where it is imported."""
    try:
        import dp_accounting
    except ImportError:
        raise ConfigError("privacy budgets need the extra 'privacy': pip install 'metis-federated[privacy]'") from None
    # It warns of orders that it cannot compute and leaves out, which only makes epsilon larger.
    logging.getLogger("absl").setLevel(logging.ERROR)
    return dp_accounting


@functools.lru_cache(maxsize=4096)
def _costs(rate: float, noise: float, orders: tuple[float, ...] = ORDERS) -> NDArray[np.float64]:
    """Renyi divergence of one step, by order."""
    library = _library()
    accountant = library.rdp.RdpAccountant(list(orders))
    accountant.compose(library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(noise)))
    costs: NDArray[np.float64] = np.array(accountant.rdp)
    costs.setflags(write=False)
    return costs


def cost(order: float, rate: float, noise: float) -> float:
    """Of one step at this order."""
    return float(_costs(rate, noise, (order,))[0])


def allowance(order: float, budget: float, delta: float) -> float:
    """The sum of costs at this order that is still (budget, delta)-DP; nothing is below 0."""
    return budget - (math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


def epsilon(done: Iterable[Steps], delta: float) -> float:
    """Of all these steps, by RDP at the best order."""
    total = np.zeros(len(ORDERS))
    for part in done:
        total += part.steps * _costs(part.rate, part.noise)
    if not total.any():
        return 0.0
    return float(_library().rdp.compute_epsilon(list(ORDERS), total.tolist(), delta)[0])


def tight_epsilon(done: Iterable[Steps], delta: float) -> float:
    """Of all these steps, by their privacy loss distributions (PLD); holds for settings that were fixed beforehand."""
    library = _library()
    accountant = library.pld.PLDAccountant()
    merged: dict[tuple[float, float], int] = {}
    for part in done:
        merged[part.rate, part.noise] = merged.get((part.rate, part.noise), 0) + part.steps
    for (rate, noise), steps in merged.items():
        step = library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(noise))
        accountant.compose(library.SelfComposedDpEvent(step, steps))
    return float(accountant.get_epsilon(delta)) if merged else 0.0


@functools.lru_cache(maxsize=1024)
def best_order(rate: float, noise: float, budget: float, delta: float) -> float:
    """The order at which the budget lasts for the most steps of this kind."""
    lasting = [allowance(order, budget, delta) / each for order, each in zip(ORDERS, _costs(rate, noise), strict=True)]
    return ORDERS[int(np.argmax(lasting))]


def max_steps(rate: float, noise: float, budget: float, delta: float) -> int:
    """S_k: how many such steps the budget lasts for."""
    order = best_order(rate, noise, budget, delta)
    return steps_within(allowance(order, budget, delta), cost(order, rate, noise))


def steps_within(left: float, each: float) -> int:
    """Whole steps of this cost."""
    return max(0, math.floor(left / each * (1 - 1e-12))) if left > 0 else 0


@functools.lru_cache(maxsize=1024)
def noise_of_cost(order: float, rate: float, wanted: float) -> float:
    """The least noise, to about six digits, with which a step of this rate costs no more than `wanted`."""
    low, high = 0.0, 1.0
    while cost(order, rate, high) > wanted:
        low, high = high, 2 * high
        if high > _LARGEST_NOISE:
            raise ConfigError(f"no noise up to {_LARGEST_NOISE:g} makes a step cost as little as {wanted:g}")
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        if middle > 0.01 and cost(order, rate, middle) <= wanted:
            high = middle
        else:
            low = middle
    return high
