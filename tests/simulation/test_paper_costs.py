"""The simulated costs against the closed formulas of the paper, for its heterogeneous environments (30 / 300 ms)."""

from __future__ import annotations

import math

import pytest

import metis
from simulation.federations import still

FAST, SLOW = 0.03, 0.30  # seconds a batch
GPU, CPU = 2.0, 1.0  # epsilon

BATCHES = {
    "uniform": [50] * 10,
    "skewed": [81, 78, 77, 57, 57, 42, 40, 28, 27, 18],
    "power law": [170, 114, 76, 51, 34, 23, 15, 10, 7, 5],
}

# environment, the paper's rounds of Sync and SemiSync (CC / N), and nominal PT and active-only EC of both
TABLE = [
    ("uniform", 24, 10, 1440, 285, 8640, 4140),
    ("uniform", 11, 5, 660, 135, 3960, 1890),
    ("uniform", 24, 9, 1440, 255, 8640, 3690),
    ("skewed", 25, 22, 2340, 1006, 8382, 14826),
    ("skewed", 25, 13, 2340, 585, 8382, 8508),
    ("skewed", 26, 28, 2434, 1287, 8717, 19038),
    ("power law", 8, 8, 1094, 513, 2529, 7261),
    ("power law", 11, 10, 1505, 650, 3477, 9313),
]


def heterogeneous(environment: str) -> metis.Federation:
    """Fast and slow learners in turn, by size."""
    powers = [{"power": metis.Power(GPU if index % 2 == 0 else CPU)} for index in range(10)]
    speeds = [FAST if index % 2 == 0 else SLOW for index in range(10)]
    return still(BATCHES[environment], speeds, learner=powers, test=None)


def epoch_times(environment: str) -> list[float]:
    """t_k^e of all learners."""
    return [batches * (FAST if index % 2 == 0 else SLOW) for index, batches in enumerate(BATCHES[environment])]


EPSILON = [GPU if index % 2 == 0 else CPU for index in range(10)]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}, {row[1]} rounds")
def test_the_bill_of_sync(row: tuple[str, int, int, int, int, int, int]) -> None:
    """PT = R * 4 epochs of the slowest, EC = R * 4 * sum of eps_k t_k^e, idle charged EC = PT * sum of eps_k."""
    environment, rounds, _, parallel_time, _, energy, _ = row
    run = heterogeneous(environment).simulate(metis.sync_fedavg(local_epochs=4), rounds=rounds)

    epochs = epoch_times(environment)
    active = rounds * 4 * math.fsum(eps * t for eps, t in zip(EPSILON, epochs, strict=True))
    costs = run.costs
    assert costs.parallel_time == pytest.approx(rounds * 4 * max(epochs))
    assert costs.energy.active == costs.energy.equation == pytest.approx(active)
    assert costs.energy.idle_charged == pytest.approx(costs.parallel_time * sum(EPSILON))
    assert costs.cumulative_time == pytest.approx(rounds * 4 * math.fsum(epochs))
    assert costs.update_requests == 10 * rounds
    assert costs.models_exchanged == 2 * 10 * rounds
    assert costs.steps == rounds * 4 * sum(BATCHES[environment])
    assert (round(costs.parallel_time), round(costs.energy.active)) == (parallel_time, energy)


@pytest.mark.parametrize("timings", ["cold_start", "every_round"])
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}, {row[2]} rounds")
def test_the_bill_of_semisync(row: tuple[str, int, int, int, int, int, int], timings: str) -> None:
    """PT = cold start + (R - 1) t_max; EC = PT * sum of eps_k, but for who was done early in the cold start."""
    environment, _, rounds, _, parallel_time, _, energy = row
    policy = metis.semisync_fedavg(slowest_learner_epochs=2, timings=timings)  # type: ignore[arg-type]
    run = heterogeneous(environment).simulate(policy, rounds=rounds)

    epochs = epoch_times(environment)
    period = 2 * max(epochs)
    active = math.fsum(eps * t for eps, t in zip(EPSILON, epochs, strict=True)) + (rounds - 1) * period * sum(EPSILON)
    costs = run.costs
    assert costs.parallel_time == pytest.approx(max(epochs) + (rounds - 1) * period)
    assert costs.energy.equation == pytest.approx(costs.parallel_time * sum(EPSILON))
    assert costs.energy.active == pytest.approx(active)
    assert costs.energy.idle_charged == pytest.approx(costs.parallel_time * sum(EPSILON))
    assert costs.update_requests == 10 * rounds
    assert round(costs.parallel_time) == parallel_time
    # The nominal values are sums of rounded parts: one unit of the last digit.
    assert costs.energy.active == pytest.approx(energy, abs=1)


def test_nobody_idles_in_a_semisync_round_after_the_cold_start() -> None:
    """Idle time is what the cold start leaves, and nothing after it."""
    run = heterogeneous("uniform").simulate(metis.semisync_fedavg(2), rounds=10)

    epochs = epoch_times("uniform")
    assert run.costs.idle_time == pytest.approx(math.fsum(max(epochs) - t for t in epochs))


def test_the_bill_of_an_asynchronous_run() -> None:
    """EC = sum of eps_k over the epochs that each learner did; nobody idles."""
    run = heterogeneous("uniform").simulate(metis.fedrec(local_epochs=4), seconds=600)

    epochs = epoch_times("uniform")
    assert run.costs.idle_time == pytest.approx(0.0, abs=1e-6)
    assert run.costs.energy.active == pytest.approx(600 * sum(EPSILON))
    # Learners hand in at multiples of four epochs.
    assert run.costs.update_requests == sum(math.floor(600 / (4 * t) * (1 + 1e-9)) for t in epochs)


def test_watts_give_joules() -> None:
    """Power in watts, with less of it when idle: the three energies of R12."""
    learners = [{"power": metis.Power(180, 20, "watt")}, {"power": metis.Power(90, 10, "watt")}]
    run = still([10, 10], [0.1, 0.4], learner=learners).simulate(metis.sync_fedavg(1), rounds=3)

    assert run.costs.energy.active == pytest.approx(3 * (180 * 1.0 + 90 * 4.0))
    assert run.costs.energy.idle_charged == pytest.approx(3 * (180 * 1.0 + 20 * 3.0 + 90 * 4.0))
    assert run.summary()["energy_unit"] == "joule"
