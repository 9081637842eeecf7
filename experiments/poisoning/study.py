"""What each mixing withstands: four attacks by 20 % of the sites, on two data sets, against no attack.

    METIS_DATA=... python experiments/poisoning/study.py            # what is missing; kept after each run
    python experiments/poisoning/study.py --table                   # the table of what is there, as Markdown

Ten sites of unequal size, two of them poisoned (the second and the seventh largest). MNIST: 3,000 images with classes
drawn for each site from Dirichlet(1). Heart disease: the 4 hospitals' records, divided over ten sites. Semi-synchronous
rounds, half of the sites four times as fast. One JSON object a line in results.jsonl; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import metis
from metis.data import partition
from metis.learning import mlp

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
ATTACKS = ("none", "sign_flip", "scale", "label_flip", "collusion")
RULES: dict[str, tuple[metis.Layer, ...]] = {
    "average": (),
    "median": (metis.Median(),),
    "trimmed_mean": (metis.TrimmedMean(0.25),),
    "geometric_median": (metis.GeometricMedian(),),
    "multi_krum": (metis.MultiKrum(0.2),),
    "centred_clipping": (metis.CentredClipping(),),
    "norm_bound": (metis.NormBound(),),
}
SEEDS = (1, 2, 3)
POISONED = (1, 6)
SHARES = np.array([0.16, 0.14, 0.12, 0.11, 0.10, 0.09, 0.08, 0.08, 0.06, 0.06])


def federation(data: str, attack: str, seed: int) -> tuple[metis.Federation, int]:
    """The sites with their data, of whom two attack, and how many rounds they train."""
    rng = np.random.default_rng(seed)
    loaded = metis.load_dataset(data)
    x_train, y_train, x_test, y_test = loaded.x_train, loaded.y_train, loaded.x_test, loaded.y_test
    if data == "mnist":
        kept = rng.permutation(len(y_train))[:3000]
        scale = np.float32(1 / 255) if x_train.max() > 2 else np.float32(1)
        x_train, y_train = x_train[kept].astype(np.float32) * scale, y_train[kept]
        x_test, y_test = x_test[:2000].astype(np.float32) * scale, y_test[:2000]
    sizes = _sizes(len(y_train))
    if data == "mnist":
        parts = partition.dirichlet(y_train, sizes, 1.0, rng)
    else:
        parts = partition.iid(y_train, sizes, rng)
    shape, outputs = tuple(x_train.shape[1:]), 10 if data == "mnist" else 2
    learners = [
        metis.SimulatedLearner(
            f"site-{index}",
            part,
            batch_size=20 if data == "mnist" else 8,
            speed=metis.Speed(0.1 if index % 2 else 0.025),
            poison=metis.Poison(attack) if attack != "none" and index in POISONED else None,  # type: ignore[arg-type]
        )
        for index, part in enumerate(parts)
    ]
    made = metis.Federation(
        network=lambda: mlp(shape, outputs, hidden=(32,) if data == "mnist" else (16,)),
        train=(x_train, y_train),
        test=(x_test, y_test),
        learners=learners,
        solver=metis.MomentumSGD(0.03 if data == "mnist" else 0.01, 0.5),
        seed=seed,
    )
    return made, 20


def _sizes(examples: int) -> list[int]:
    sizes = [int(examples * share) for share in SHARES]
    sizes[0] += examples - sum(sizes)
    return sizes


def cells() -> Iterator[tuple[str, str, str, int]]:
    for seed in SEEDS:
        for data in ("heart_disease", "mnist"):
            for rule in RULES:
                for attack in ATTACKS:
                    yield data, rule, attack, seed


def run(data: str, rule: str, attack: str, seed: int) -> float:
    """The mean accuracy of the last five community models."""
    made, rounds = federation(data, attack, seed)
    done = made.simulate(metis.semisync_fedavg(1).with_layers(*RULES[rule]), rounds=rounds, progress=False)
    return float(np.mean([row.metrics["accuracy"] for row in done.history[-5:]]))


def known() -> dict[tuple[str, str, str, int], float]:
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return {(row["data"], row["rule"], row["attack"], row["seed"]): row["accuracy"] for row in rows}


def table() -> str:
    """Mean accuracy over the seeds that are there, a block for each data set."""
    found = known()
    blocks = []
    for data, title in (("mnist", "MNIST"), ("heart_disease", "heart disease")):
        lines = [f"| {title} | no attack | sign flip | x 100 | label flip | collusion |", "|---" * 6 + "|"]
        for rule in RULES:
            row = []
            for attack in ATTACKS:
                values = [value for key, value in found.items() if key[:3] == (data, rule, attack)]
                row.append(f"{100 * np.mean(values):.1f}" if values else "-")
            lines.append(f"| `{rule}` | {' | '.join(row)} |" if rule != "average" else f"| plain | {' | '.join(row)} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print the table instead of running")
    if parser.parse_args().table:
        sys.stdout.write(table() + "\n")
        return
    torch.set_num_threads(1)
    done = known()
    for data, rule, attack, seed in cells():
        if (data, rule, attack, seed) in done:
            continue
        accuracy = run(data, rule, attack, seed)
        row = {"data": data, "rule": rule, "attack": attack, "seed": seed, "accuracy": round(accuracy, 4)}
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
