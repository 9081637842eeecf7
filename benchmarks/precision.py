"""The paper's CIFAR-10 network in float32 and in bf16: the time of a step, and the accuracy after the same steps.

    METIS_DATA=FOLDER python benchmarks/precision.py [--steps 2000] [--seeds 3] [--width 64] [--quick]

One learner with all 50,000 training images trains both precisions from the same weights on the same batches (100
images, 24x24 crops, momentum 0.75, rate 0.05) with one thread, in turns of 100 steps. A step's time is the processor
time of this process, so that other programs on the machine count less. Each turn is kept: the same command continues
where it was cut off.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from _bench import ROOT, arguments, report

from metis.core.events import Budget
from metis.experiments.config.load import resolve_config
from metis.experiments.silo import TrainingSilo, build_controller_side, learner_silo
from metis.files import write_text

PRECISIONS = ("float32", "bf16")
TURN = 100  # steps


def experiment(seed: int, width: int, precision: str, quick: bool) -> dict[str, Any]:
    """The paper's environment with a single learner; a quick one trains on the bundled digits."""
    cifar = {"dataset": "cifar10", "normalise": False,
             "augment": [{"name": "random_crop", "size": 24}, "horizontal_flip", "standardize"]}  # fmt: skip
    return {
        "seed": seed,
        "data": {"dataset": "digits"} if quick else cifar,
        "learners": [{"name": "one", "names": ["one"], "batch_size": 100, "time_per_batch": 1.0}],
        "network": {"name": "small_cnn"} if quick else {"name": "cifar10_cnn", "width": width},
        "training": {"solver": "momentum", "learning_rate": 0.05, "momentum": 0.75, "precision": precision},
        "policy": {"name": "sync_fedavg"},
        "stop": {"rounds": 1},
    }


def turn(silo: TrainingSilo, weights: Any, number: int, steps: int) -> tuple[Any, list[float]]:
    """So many steps from these weights on, and the processor time of each."""
    assert silo.learner is not None
    trained = silo.learner.train_while(silo.engine, weights, number, Budget(steps), time.process_time)
    return trained.model, list(trained.batch_times)


def study(seed: int, options: Any, kept: Path) -> Mapping[str, Any]:
    """Both precisions of one seed, in turns; what is found after each is written down."""
    record = kept / f"seed-{seed}-width-{options.width}-steps-{options.steps}.json"
    found = json.loads(record.read_text("utf-8")) if record.exists() else {"turns": 0, "times": {}, "accuracy": {}}
    silos = {p: learner_silo(resolve_config(experiment(seed, options.width, p, options.quick), "precision"), 0, None,
                             "one", 0) for p in PRECISIONS}  # fmt: skip
    test = build_controller_side({"experiment": experiment(seed, options.width, "float32", options.quick), "policy": 0},
                                 None)  # fmt: skip
    length = min(TURN, options.steps)
    for number in range(found["turns"], options.steps // length):
        for precision, silo in silos.items():
            weights = silo.initial_model(seed)
            file = kept / f"{record.stem}-{precision}-{number}.npy"
            if number:
                weights = weights.with_vector(np.load(file))
            weights, times = turn(silo, weights, number, length)
            np.save(kept / f"{record.stem}-{precision}-{number + 1}.npy", weights.vector)
            # The first steps of a process also choose its kernels.
            found["times"].setdefault(precision, []).extend(times[5:])
            if number + 1 == options.steps // length:
                found["accuracy"][precision] = test.engine.evaluate(weights, test.evaluation)["accuracy"]
        found["turns"] = number + 1
        write_text(record, json.dumps(found))
        for precision in PRECISIONS:
            (kept / f"{record.stem}-{precision}-{number}.npy").unlink(missing_ok=True)
        print(f"seed {seed}: {(number + 1) * length} of {options.steps} steps", flush=True)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3, help="from 1990 on")
    parser.add_argument("--width", type=int, default=64, help="of the network; the paper's has 64")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.seeds = 20, 1
    kept = ROOT / ".cache" / "benchmarks" / ("precision-quick" if options.quick else "precision")
    kept.mkdir(parents=True, exist_ok=True)
    with report(options, __doc__) as sheet:
        runs = {seed: study(seed, options, kept) for seed in range(1990, 1990 + options.seeds)}
        rows: list[list[Any]] = [["seed", *(f"accuracy, {p}" for p in PRECISIONS), *(f"ms a step, {p}" for p in
                                 PRECISIONS), "float32 / bf16"]]  # fmt: skip
        ratios = []
        for seed, found in runs.items():
            middle = [1000 * statistics.median(found["times"][p]) for p in PRECISIONS]
            ratios.append(middle[0] / middle[1])
            accuracies = [f"{found['accuracy'][p]:.4f}" for p in PRECISIONS]
            rows.append([str(seed), *accuracies, *(f"{ms:.1f}" for ms in middle), f"{ratios[-1]:.2f}"])
        means = [statistics.mean(found["accuracy"][p] for found in runs.values()) for p in PRECISIONS]
        rows.append(["mean", *(f"{mean:.4f}" for mean in means), "", "", f"{statistics.mean(ratios):.2f}"])
        sheet.say(f"Width {options.width}, {options.steps:,} steps, one thread; medians of processor time.")
        sheet.table(rows)
        sheet.figures.update(ratios=ratios, accuracy=dict(zip(PRECISIONS, means, strict=True)))
        sheet.goal("bf16 against float32, step of the CIFAR-10 network", "at least 1.8 times as fast with avx512_bf16",
                  f"{min(ratios):.2f} to {max(ratios):.2f} times", min(ratios) >= 1.8)  # fmt: skip


if __name__ == "__main__":
    main()
