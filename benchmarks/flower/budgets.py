"""A Flower client that knows nothing of budgets: its steps bounded, or whole calls of it until the period's end.

    python benchmarks/flower/budgets.py

The app of examples/flower on four clients, two of them ten times slower, in virtual time: how long until the target,
and how much of the time learners waited. A call of the client is one epoch, or four.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

APP = Path(__file__).parents[2] / "examples" / "flower"
PER_BATCH, TARGET, SECONDS, SEEDS = (0.1, 0.1, 1.0, 1.0), 0.9, 600.0, (1, 2, 3)


def measured(unit: str, epochs: int, policy: Any, seed: int) -> tuple[float | None, float]:
    """Seconds to the target, and the share of all learners' time in which they waited."""
    from metis.experiments.build import build_federation
    from metis.experiments.config.load import resolve_config

    batches = 18 * epochs if unit == "call" else 1  # 360 examples in batches of 20
    learners = [
        {"name": f"l{index}", "names": [f"l{index}"], "time_per_batch": batches * seconds}
        for index, seconds in enumerate(PER_BATCH)
    ]
    config = resolve_config(
        {
            "seed": seed,
            "site": {"flower": str(APP), "unit": unit, "run_config": {"local-epochs": epochs}},
            "learners": learners,
            "policy": {"name": "sync_fedavg"},
            "stop": {"seconds": SECONDS},
        },
        "budgets",
    )
    federation = build_federation(config)
    run = federation.simulate(policy, seconds=SECONDS, target=TARGET)
    reached = next((point.at for point in run.history if point.metrics["accuracy"] >= TARGET), None)
    idle = sum(learner.idle for learner in run.costs.by_learner.values())
    active = sum(learner.active for learner in run.costs.by_learner.values())
    return reached, idle / (idle + active)


def main() -> None:
    from metis.core.policies import semisync_fedavg, sync_fedavg

    for epochs in (1, 4):
        rows: list[tuple[str, str, Any]] = [
            ("call", "Sync, one call (Flower's FedAvg)", sync_fedavg(local_epochs=1)),
            ("step", "SemiSync, steps bounded, half an epoch of the slowest", semisync_fedavg(0.5)),
            ("step", "SemiSync, steps bounded, an epoch of the slowest", semisync_fedavg(1)),
            ("call", "SemiSync, whole calls, a call of the slowest", semisync_fedavg(1)),
        ]
        for unit, label, policy in rows:
            found = [measured(unit, epochs, policy, seed) for seed in SEEDS]
            times = [None if seconds is None else round(seconds, 1) for seconds, _ in found]
            idle = sum(share for _, share in found) / len(found)
            print(json.dumps({"epochs_of_a_call": epochs, "policy": label, "seconds": times, "idle": round(idle, 3)}))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
