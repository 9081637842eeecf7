"""What masks cost in accuracy: the same federations plain and from sums in the ring, over five seeds.

    METIS_DATA=FOLDER python examples/privacy/masked.py [RESULTS.jsonl]

Ten sites of unequal size, half of them four times as fast; MNIST with classes by Dirichlet(1), and the records of four
hospitals over ten sites. Rounds and periods differ from plain ones by the rounding of a ring of 32 bits and by the
batches that tasks draw. In windows (asynchronous policies) a learner that has handed in waits until enough others have,
which is another course of events.
Every finished run is a line of the file, so that the same command continues after a break.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import metis

SEEDS, MODELS = (1, 2, 3, 4, 5), 5  # the accuracy of a run is the mean over its last models
SETTINGS: dict[str, dict[str, Any]] = {
    "mnist": {
        "learners": 10, "train_examples": 3000, "sizes": "skewed", "classes": "dirichlet", "alpha": 1.0,
        "network": "mlp", "network_options": {"hidden": [32]}, "batch_size": 20, "speeds": (0.05, 0.2),
    },
    "heart_disease": {
        "learners": 10, "sizes": "skewed", "network": "logistic", "batch_size": 16, "speeds": (0.05, 0.2),
    },
}  # fmt: skip
RATES = {"mnist": 0.1, "heart_disease": 0.05}
POLICIES = {
    "SyncFedAvg": (lambda: metis.sync_fedavg(1), {"rounds": 20}),
    "SemiSync, lambda 1": (lambda: metis.semisync_fedavg(1), {"rounds": 20}),
    "AsyncFedAvg": (lambda: metis.async_fedavg(1), {"update_requests": 200}),
    "FedRec": (lambda: metis.fedrec(1), {"update_requests": 200}),
    "FedBuff, K 4": (lambda: metis.fedbuff(1, buffer_size=4), {"update_requests": 200}),
}


def run(dataset: str, name: str, masked: bool, seed: int) -> dict[str, Any]:
    """One federation."""
    solver = metis.VanillaSGD(learning_rate=RATES[dataset])
    federation = metis.Federation.from_dataset(dataset, seed=seed, solver=solver, **SETTINGS[dataset])
    make, stop = POLICIES[name]
    policy = make().with_layers(metis.SecureSum(colluders=1)) if masked else make()
    result = federation.simulate(policy, **stop, progress=False)
    last = [entry.metrics["accuracy"] for entry in result.history[-MODELS:]]
    return {"dataset": dataset, "policy": name, "masked": masked, "seed": seed, "accuracy": statistics.mean(last)}


def table(rows: list[dict[str, Any]]) -> str:
    """Mean accuracy over the seeds, its standard deviation, and the mean difference of the same seeds."""
    lines = ["| data | policy | plain | masked | masked - plain, same seed |", "|---|---|---|---|---|"]
    for dataset in SETTINGS:
        for name in POLICIES:
            found = [
                {row["seed"]: 100 * row["accuracy"] for row in rows
                 if (row["dataset"], row["policy"], row["masked"]) == (dataset, name, masked)}
                for masked in (False, True)
            ]  # fmt: skip
            cells = [_spread(list(values.values())) for values in found]
            both = sorted(found[0].keys() & found[1].keys())
            cells.append(_spread([found[1][seed] - found[0][seed] for seed in both]))
            lines.append(f"| {dataset} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}" if len(values) > 1 else "–"


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "masked-accuracy.jsonl")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    done = {(row["dataset"], row["policy"], row["masked"], row["seed"]) for row in rows}
    for seed in SEEDS:
        for dataset in SETTINGS:
            for name in POLICIES:
                for masked in (False, True):
                    if (dataset, name, masked, seed) not in done:
                        rows.append(run(dataset, name, masked, seed))
                        with path.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
