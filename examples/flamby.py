"""FLamby's Heart Disease and TCGA-BRCA: its published pooled and FedAvg figures beside ours, then SemiSync.

    METIS_DATA=folder-with-the-csv-files python examples/flamby.py heart_disease [SEEDS]

The network, the splits, the steps, the rates and the five seeds are FLamby's. A figure is the mean over the centres
of what the final model is worth on the centre's own test patients; the deviation is over the seeds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import metis
from metis.core.events import Budget
from metis.core.protocols.synchronous import Synchronous
from metis.data.flamby import FlambyName

SEEDS = range(42, 47)
PUBLISHED = {"heart_disease": (0.735, 0.685), "tcga_brca": (0.676, 0.732)}  # pooled, FedAvg
ROUNDS = {"heart_disease": 15, "tcga_brca": 5}
POOLED = {"heart_disease": (50, metis.Adam(0.001)), "tcga_brca": (30, metis.Adam(0.1))}  # epochs and solver
SPEEDS = (0.03, 0.3)  # half of the centres are ten times slower


class FixedSteps(Synchronous):
    """FLamby's FedAvg: everybody makes a hundred steps, whatever it holds."""

    def tasks(self, who, roster, moment, measure):  # type: ignore[no-untyped-def]
        budgets = super().tasks(who, roster, moment, measure)
        return {learner: Budget(100, budget.seconds) for learner, budget in budgets.items()}


def main(name: FlambyName, seeds: Sequence[int] = SEEDS, rounds: int | None = None) -> dict[str, list[float]]:
    fedavg = replace(metis.sync_fedavg(), protocol=FixedSteps(), label="FedAvg")
    found: dict[str, list[float]] = {"Pooled": [], "FedAvg": [], "SemiSync": []}
    for seed in seeds:
        federation = metis.flamby_federation(name, seed=seed, speeds=SPEEDS)
        together = metis.flamby_federation(name, seed=seed, pooled=True)
        epochs, adam = POOLED[name]
        pooled = metis.centralized(local_epochs=epochs)
        run = federation.simulate(fedavg, rounds=rounds or ROUNDS[name])
        runs = {
            "Pooled": together.simulate(pooled, rounds=1, solver=adam),
            "FedAvg": run,
            # The same time as FedAvg took, spent without waiting.
            "SemiSync": federation.simulate(metis.semisync_fedavg(1), seconds=run.costs.parallel_time),
        }
        for label, own in runs.items():
            at_centres = federation.evaluate_at_learners(own.community_model)
            found[label].append(at_centres.mean)
            print(f"seed {seed}  {label:9}{at_centres}")
    for label, published in zip(found, (*PUBLISHED[name], None), strict=True):
        mean, deviation = statistics.mean(found[label]), statistics.stdev(found[label])
        print(f"{name} {label:9}{mean:.3f} ± {deviation:.3f}  published {published or '-'}")
    return found


if __name__ == "__main__":
    chosen, count = [*sys.argv[1:], *("heart_disease", "5")[len(sys.argv) - 1 :]][:2]
    main(cast("FlambyName", chosen), range(42, 42 + int(count)))
