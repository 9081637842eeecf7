"""What each of the eight hospitals brings: its share of scikit-learn's digits, and a small engine in NumPy.

The digits stand in for records that cannot be published; they are divided as in the consortium that this plays. The
large hospital has twenty times the batches of any other, but mostly of the digits 0 to 6: what the model knows of 7, 8
and 9 it learns from the seven small ones. With an engine in NumPy no process imports torch, so seventeen of them start
in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

import metis
from metis.core.layers import Memory
from metis.core.model import Layout, Model, TensorSpec
from metis.core.solvers import Solver
from metis.learning.engine import ENGINES, Batch, EngineJob, Examples, Trained

LARGE, SMALL = "large", tuple(f"small-{number}" for number in range(1, 8))
BATCH = 4
LARGE_BATCHES, SMALL_BATCHES = 200, 10
RARE = 7  # digits from this one on are rare at the large hospital
PIXELS, CLASSES = 64, 10


class Records:
    """Arrays that can hand out any of their examples."""

    def __init__(self, inputs: NDArray[np.float32], targets: NDArray[np.int64]) -> None:
        self._inputs, self._targets = inputs, targets

    def __len__(self) -> int:
        return len(self._targets)

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        return self._inputs[indices], self._targets[indices]


def _divided() -> dict[str, NDArray[np.int64]]:
    """Which of the training digits each hospital has."""
    targets = np.asarray(metis.load_dataset("digits").y_train, np.int64)
    shuffled = np.random.default_rng(1990).permutation(len(targets))
    common, rare = (shuffled[targets[shuffled] < RARE], shuffled[targets[shuffled] >= RARE])
    wanted = LARGE_BATCHES * BATCH
    few = wanted // 50  # 2 % of what it has
    owned = {LARGE: np.concatenate([common[: wanted - few], rare[:few]])}
    left = np.concatenate([common[wanted - few :], rare[few:]])
    left = np.random.default_rng(1991).permutation(left)
    size = SMALL_BATCHES * BATCH
    owned |= {name: left[number * size : (number + 1) * size] for number, name in enumerate(SMALL)}
    return owned


def training_data(site: str) -> Records:
    digits = metis.load_dataset("digits")
    own = _divided()[site]
    return Records(_scaled(digits.x_train[own]), np.asarray(digits.y_train[own], np.int64))


def test_data() -> Records:
    digits = metis.load_dataset("digits")
    return Records(_scaled(digits.x_test), np.asarray(digits.y_test, np.int64))


def _scaled(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    return images.reshape(len(images), PIXELS).astype(np.float32) / np.float32(16)


def network() -> None:
    """The engine below has a network of its own."""


@ENGINES.register("hospital")
class HospitalEngine:
    """A softmax regression."""

    layout = Layout((TensorSpec("weight", (PIXELS, CLASSES)), TensorSpec("bias", (CLASSES,))))
    metrics = ("accuracy", "loss")

    def __init__(self, job: EngineJob) -> None:
        pass

    def initial_model(self, seed: int) -> Model:
        return Model(self.layout, np.zeros(self.layout.size, np.float32))

    def train(
        self,
        community_model: Model,
        batches: Iterable[Batch],
        solver: Solver,
        memory: Memory | None = None,
        seed: int = 0,
    ) -> Trained:
        weights, community = community_model.vector.copy(), community_model.vector
        state, steps, examples, total = solver.start(weights), 0, 0, 0.0
        for x, y in batches:
            probabilities = _probabilities(weights, x)
            total += _loss(probabilities, y)
            probabilities[np.arange(len(y)), y] -= 1
            gradient = np.concatenate([(x.T @ probabilities).ravel(), probabilities.sum(axis=0)]) / len(y)
            solver.step(weights, gradient.astype(np.float32), state, community)
            steps, examples = steps + 1, examples + len(y)
        return Trained(Model(self.layout, weights), steps, total / max(1, examples))

    def evaluate(self, model: Model, examples: Examples, memory: Memory | None = None) -> dict[str, float]:
        x, y = examples.batch(np.arange(len(examples)))
        probabilities = _probabilities(model.vector, x)
        right = int((probabilities.argmax(axis=1) == y).sum())
        return {"accuracy": right / len(y), "loss": _loss(probabilities, y) / len(y)}


def _probabilities(vector: NDArray[np.float32], x: NDArray[np.float32]) -> NDArray[np.float32]:
    scores = x @ vector[:-CLASSES].reshape(PIXELS, CLASSES) + vector[-CLASSES:]
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (exponentials / exponentials.sum(axis=1, keepdims=True)).astype(np.float32)


def _loss(probabilities: NDArray[np.float32], targets: NDArray[np.int64]) -> float:
    return -float(np.log(probabilities[np.arange(len(targets)), targets] + 1e-12).sum())
