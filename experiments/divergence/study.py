"""The appendix's proposition: how far is the community model from a centralized twin, and how does it grow with B_max?

    python experiments/divergence/study.py            # measures, about a minute; writes results.json
    python experiments/divergence/study.py --table    # what is there, as Markdown

Ten learners of equal size, five fast and five slow (a tenth of the steps), on the built-in digits with a multinomial
logistic regression, whose gradient has a known Lipschitz constant, so that the bound is a number. In one round every
learner starts from the same model and does B_k steps of vanilla SGD; their models are weighted by their steps, as in
the proof. The centralized twin does B_max steps on all examples. Start, data and rate are the same, so the first term
of the bound is zero, and what is left is eta sum_k B_max / B sum_c |p_k(c) - p(c)| sum_j alpha^j g_max.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import metis
from metis.core.solvers import VanillaSGD
from metis.data import partition
from metis.learning import ArrayExamples, Learner, TorchEngine
from metis.learning.torch.networks import logistic

RESULTS = Path(__file__).parent / "results.json"
RATE, BATCH, SEEDS = 0.05, 50, (1, 2, 3)
STEPS = (10, 20, 40, 80, 160, 320)  # of a fast learner: B_max
CLASSES = (10, 5, 3, 2)  # of each learner; 10 is IID


def network() -> Any:
    return logistic((8, 8), 10)


def measure(classes: int, seed: int) -> list[dict[str, float]]:
    """One row for each B_max."""
    data = metis.load_dataset("digits")
    inputs = data.x_train.reshape(len(data.y_train), -1).astype(np.float32) / 16
    labels = data.y_train.astype(np.int64)
    rng = np.random.default_rng(seed)
    sizes = partition.uniform_sizes(len(labels), 10)
    parts = partition.iid(labels, sizes, rng) if classes == 10 else partition.non_iid(labels, sizes, classes, rng)
    examples = ArrayExamples(inputs.reshape(-1, 8, 8), labels, images=False)
    engine, solver = TorchEngine(network), VanillaSGD(RATE)
    start = engine.initial_model(seed)

    def trained(indices: NDArray[np.int64], index: int, steps: int) -> NDArray[np.float64]:
        learner = Learner(f"learner-{index}", index, examples, indices, BATCH, solver, seed)
        return learner.train(engine, start, 1, steps).model.vector.astype(np.float64)

    share = np.bincount(labels, minlength=10) / len(labels)
    skew = [float(np.abs(np.bincount(labels[part], minlength=10) / len(part) - share).sum()) for part in parts]
    rows = []
    for fast in STEPS:
        steps = [fast if index % 2 == 0 else max(1, fast // 10) for index in range(10)]
        models = [trained(part, index, count) for index, (part, count) in enumerate(zip(parts, steps, strict=True))]
        community = np.average(models, axis=0, weights=steps)
        twin = trained(np.arange(len(labels)), 10, fast)
        alpha = 1 + RATE * lipschitz(inputs)
        powers = float(sum(alpha**power for power in range(fast)))
        steepest = steepest_class(inputs, labels, start.vector.astype(np.float64))
        bound = RATE * fast / sum(steps) * sum(skew) * powers * steepest
        rows.append(
            {
                "fast_steps": fast,
                "divergence": float(np.linalg.norm(community - twin)),
                "way": float(np.linalg.norm(twin - start.vector)),
                "bound": bound,
            }
        )
    return rows


def lipschitz(inputs: NDArray[np.float32]) -> float:
    """Of the gradient of a softmax's cross entropy: half of the largest eigenvalue of the inputs' second moments."""
    extended = np.hstack([inputs, np.ones((len(inputs), 1), np.float32)]).astype(np.float64)
    return 0.5 * float(np.linalg.eigvalsh(extended.T @ extended / len(inputs))[-1])


def steepest_class(inputs: NDArray[np.float32], labels: NDArray[np.int64], vector: NDArray[np.float64]) -> float:
    """g_max at the start: the largest norm of a class's mean gradient."""
    weights, bias = vector[:640].reshape(10, 64), vector[640:]
    logits = inputs @ weights.T + bias
    chances = np.exp(logits - logits.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    error = chances - np.eye(10)[labels]
    extended = np.hstack([inputs, np.ones((len(inputs), 1))])
    norms = [np.linalg.norm(error[labels == c].T @ extended[labels == c] / (labels == c).sum()) for c in range(10)]
    return float(max(norms))


def _times(factor: float) -> str:
    """Two digits, as a number or as a power of ten."""
    digits = float(f"{factor:.2g}")
    if digits < 1e5:
        return f"{digits:,g}"
    power = math.floor(math.log10(digits))
    return f"{digits / 10**power:.2g} · 10^{power}"


def table(results: dict[str, list[list[dict[str, float]]]]) -> str:
    """Divergence over the way that the twin went, and the bound over the divergence."""
    lines = ["| B_max | " + " | ".join(f"Non-IID({c})" if c < 10 else "IID" for c in CLASSES) + " |"]
    lines.append("| ---: |" + " ---: |" * len(CLASSES))
    for number, fast in enumerate(STEPS):
        cells = []
        for classes in CLASSES:
            rows = [seed[number] for seed in results[str(classes)]]
            distance = np.mean([row["divergence"] for row in rows])
            spread = np.std([row["divergence"] for row in rows], ddof=1)
            over = np.exp(np.mean([np.log(row["bound"] / row["divergence"]) for row in rows]))
            cells.append(f"{distance:.3f} ± {spread:.3f} (bound ×{_times(over)})")
        lines.append(f"| {fast} | " + " | ".join(cells) + " |")
    slopes = []
    for classes in CLASSES:
        means = [np.mean([seed[n]["divergence"] for seed in results[str(classes)]]) for n in range(len(STEPS))]
        slopes.append(f"{np.polyfit(np.log(STEPS), np.log(means), 1)[0]:.2f}")
    lines.append("| grows as B_max to the power of | " + " | ".join(slopes) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print what was measured")
    if not parser.parse_args().table:
        results = {str(classes): [measure(classes, seed) for seed in SEEDS] for classes in CLASSES}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(table(json.loads(RESULTS.read_text("utf-8"))) + "\n")


if __name__ == "__main__":
    main()
