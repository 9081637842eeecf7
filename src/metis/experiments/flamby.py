"""FLamby's tables as ready federations: its centres, splits, networks, losses and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from metis.core.solvers import VanillaSGD
from metis.data.flamby import FlambyName, load_flamby
from metis.errors import ArgumentError
from metis.experiments.federation import Federation, SimulatedLearner
from metis.learning import TorchEngine, logistic
from metis.learning.torch.flamby import binary_accuracy, binary_loss, concordance, cox_loss
from metis.simulation.speed import Speed

BATCH = {"heart_disease": 4, "tcga_brca": 8}
RATE = {"heart_disease": 0.001, "tcga_brca": 0.1}  # of FLamby's FedAvg


def flamby_federation(
    name: FlambyName,
    *,
    speeds: Sequence[float] = (0.1,),
    seed: int = 42,
    folder: Path | str | None = None,
    pooled: bool = False,
) -> Federation:
    """Fed-Heart-Disease (4 hospitals, accuracy) or Fed-TCGA-BRCA (6 regions, C-index) as in FLamby's benchmark.

    - `name`: `"heart_disease"` or `"tcga_brca"`.
    - `speeds`: seconds for a batch; the centres take them in turn, the largest first.
    - `seed`: of the initial model and the order of batches; FLamby uses 42 to 46. The split is FLamby's own.
    - `folder`: where the CSV file is; without it the folder that METIS_DATA names.
    - `pooled`: for FLamby's pooled baseline, `metis.centralized()`: training inputs are standardized by all patients
      instead of at each centre, test inputs at each centre as before.

    Every learner has its own test examples: `evaluate_at_learners`.
    """
    if not speeds:
        raise ArgumentError("speeds is empty; give the seconds that a batch takes, as in [0.03, 0.3]", "speeds")
    data = load_flamby(name, folder)
    names, counts = np.unique(data.sites_train, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    survival = name == "tcga_brca"
    features = data.x_train.shape[1]
    return Federation(
        engine=TorchEngine(
            lambda: logistic((features,), 1),
            "classification" if survival else "regression",  # a regression has one output for each target
            loss=cox_loss if survival else binary_loss,
            metrics={"c_index": concordance} if survival else {"accuracy": binary_accuracy},
        ),
        train=(data.x_pooled if pooled else data.x_train, data.y_train),
        test=(data.x_test, data.y_test),
        learners=[
            SimulatedLearner(
                str(names[k]),
                np.flatnonzero(data.sites_train == names[k]),
                BATCH[name],
                Speed(speeds[rank % len(speeds)]),
                test=np.flatnonzero(data.sites_test == names[k]),
            )
            for rank, k in enumerate(order)
        ],
        solver=VanillaSGD(RATE[name]),
        metric="c_index" if survival else "accuracy",
        higher_is_better=True,
        seed=seed,
        facts={"dataset": f"FLamby {name}", "network": "logistic"},
    )
