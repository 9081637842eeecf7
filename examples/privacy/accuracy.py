"""What epsilon costs in accuracy, with and without larger batches: heart disease at four hospitals, and MNIST.

    METIS_DATA=FOLDER python examples/privacy/accuracy.py [RESULTS.jsonl]

Half of the sites are ten times as fast as the others. Each site's budget is the epsilon of the row, and its noise is as
large as the slow sites need to spend exactly that in all rounds (semi-synchronous, lambda 1). Without larger batches
the fast sites idle for nine tenths of a period; with them each of their steps has up to ten batches. Every finished run
is a line of the file, so that the same command continues after a break; the table is printed at the end.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import metis
from metis.privacy import accounting
from metis.privacy.records import Privacy, sampling_rate

ROUNDS, DELTA, SEEDS = 20, 1e-5, (1, 2, 3)
EPSILONS = (1.0, 3.0, 8.0)
SETTINGS: dict[str, dict[str, Any]] = {
    "heart_disease": {"sizes": "natural", "network": "logistic", "batch_size": 16, "speeds": (0.1, 1.0)},
    "mnist": {
        "learners": 4, "train_examples": 8000, "network": "mlp", "network_options": {"hidden": [32]}, "batch_size": 50,
        "speeds": (0.1, 1.0),
    },
}  # fmt: skip
RATES = {"heart_disease": 0.1, "mnist": 0.25}


def run(dataset: str, epsilon: float | None, larger: bool, seed: int) -> dict[str, Any]:
    """One federation, private if there is an epsilon."""
    solver = metis.VanillaSGD(learning_rate=RATES[dataset])
    federation = metis.Federation.from_dataset(dataset, seed=seed, solver=solver, **SETTINGS[dataset])
    if epsilon is not None:
        federation.learners = tuple(
            replace(learner, privacy=privacy_of(learner, epsilon, larger)) for learner in federation.learners
        )
    policy = metis.semisync_fedavg(slowest_learner_epochs=1)
    result = federation.simulate(policy, rounds=ROUNDS, evaluate_every=1e9, progress=False)
    tasks = [item.task.budget for _, item in result.events if type(item).__name__ == "SendTask"]
    return {
        "dataset": dataset,
        "epsilon": epsilon,
        "larger": larger,
        "seed": seed,
        "accuracy": result.history[-1].metrics["accuracy"],
        "steps": sum(budget.steps or 0 for budget in tasks),
        "batches": sum((budget.steps or 0) * budget.batches_per_step for budget in tasks),
    }


def privacy_of(learner: Any, epsilon: float, larger: bool) -> Privacy:
    """The least noise with which an epoch in each round stays within epsilon."""
    rate = sampling_rate(learner.batch_size, len(learner.indices))
    wanted = ROUNDS * -(-len(learner.indices) // learner.batch_size)
    low, high = 0.3, 60.0
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if accounting.max_steps(rate, middle, epsilon, DELTA) >= wanted else (middle, high)
    return Privacy(noise=high, clip=1.0, budget=epsilon, delta=DELTA, larger_batches=larger)


def table(rows: list[dict[str, Any]]) -> str:
    """Mean accuracy over the seeds, in percent, and its standard deviation."""
    lines = ["| data | epsilon | plain batches | larger batches |", "|---|---|---|---|"]
    for dataset in SETTINGS:
        for epsilon in (*EPSILONS, None):
            cells = []
            for larger in (False, True):
                found = [
                    100 * row["accuracy"]
                    for row in rows
                    if (row["dataset"], row["epsilon"], row["larger"]) == (dataset, epsilon, larger)
                ]
                spread = statistics.stdev(found) if len(found) > 1 else 0.0
                cells.append(f"{statistics.mean(found):.1f} ± {spread:.1f}" if found else "–")
            lines.append(f"| {dataset} | {'no privacy' if epsilon is None else f'{epsilon:g}'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "privacy-accuracy.jsonl")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    done = {(row["dataset"], row["epsilon"], row["larger"], row["seed"]) for row in rows}
    for seed in SEEDS:
        for dataset in SETTINGS:
            for epsilon, larger in [(None, False), *((e, way) for e in EPSILONS for way in (False, True))]:
                if (dataset, epsilon, larger, seed) in done:
                    continue
                rows.append(run(dataset, epsilon, larger, seed))
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                sys.stderr.write(f"{rows[-1]}\n")
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    main()
