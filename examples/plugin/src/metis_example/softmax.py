"""An engine: softmax regression in NumPy, without any tensor library of its own."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from metis.core.layers import Memory
from metis.core.model import Layout, Model, TensorSpec
from metis.core.solvers import Solver
from metis.errors import ConfigError
from metis.learning.engine import ENGINES, Batch, EngineJob, Examples, Trained

_EVALUATION_BATCH = 500


@ENGINES.register("softmax")
class SoftmaxEngine:
    """One linear layer and cross-entropy; a batch is a pair of arrays, or of tensors that NumPy can read."""

    def __init__(self, job: EngineJob) -> None:
        if job.task != "classification" or job.network is not None:
            raise ConfigError("the engine 'softmax' trains one network only, a classifier of its own")
        if job.device != "cpu" or job.dtype != "float32":
            raise ConfigError("the engine 'softmax' computes on the processor in float32")
        self._features, self._classes = int(np.prod(job.input_shape)), job.outputs
        weight = TensorSpec("weight", (self._features, self._classes))
        self._layout = Layout((weight, TensorSpec("bias", (self._classes,))))

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("accuracy", "loss")

    def initial_model(self, seed: int) -> Model:
        vector = np.random.default_rng(seed).normal(0, 0.01, self._layout.size)
        return Model(self._layout, vector.astype(np.float32))

    def train(
        self,
        community_model: Model,
        batches: Iterable[Batch],
        solver: Solver,
        memory: Memory | None = None,
        seed: int = 0,
    ) -> Trained:
        weights, community = community_model.vector.copy(), community_model.vector
        kept = (memory or {}).get("solver") if solver.keeps_memory else None
        state = solver.start(weights) if kept is None else kept.copy()
        steps, examples, total = 0, 0, 0.0
        for inputs, targets in batches:
            x, y = self._flat(inputs), np.asarray(targets)
            probabilities = self._probabilities(weights, x)
            total -= float(np.log(probabilities[np.arange(len(y)), y] + 1e-12).sum())
            probabilities[np.arange(len(y)), y] -= 1
            gradient = np.concatenate([(x.T @ probabilities).ravel(), probabilities.sum(axis=0)]) / len(y)
            solver.step(weights, gradient.astype(np.float32), state, community)
            steps, examples = steps + 1, examples + len(y)
        remembered: Memory = {"solver": state} if solver.keeps_memory else {}
        return Trained(Model(self._layout, weights), steps, total / max(1, examples), remembered)

    def evaluate(self, model: Model, examples: Examples, memory: Memory | None = None) -> dict[str, float]:
        right, total, count = 0, 0.0, len(examples)
        for start in range(0, count, _EVALUATION_BATCH):
            inputs, targets = examples.batch(np.arange(start, min(start + _EVALUATION_BATCH, count)))
            y = np.asarray(targets)
            probabilities = self._probabilities(model.vector, self._flat(inputs))
            right += int((probabilities.argmax(axis=1) == y).sum())
            total -= float(np.log(probabilities[np.arange(len(y)), y] + 1e-12).sum())
        return {"accuracy": right / count, "loss": total / count}

    def _flat(self, inputs: Batch) -> NDArray[np.float32]:
        return np.asarray(inputs, np.float32).reshape(len(inputs), self._features)

    def _probabilities(self, vector: NDArray[np.float32], x: NDArray[np.float32]) -> NDArray[np.float32]:
        scores = x @ vector[: -self._classes].reshape(self._features, self._classes) + vector[-self._classes :]
        exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
        return (exponentials / exponentials.sum(axis=1, keepdims=True)).astype(np.float32)
