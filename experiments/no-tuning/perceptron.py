"""A network of one hidden layer in NumPy: for batches of ten examples, several times as fast as a tensor library."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.core.layers import Memory
from metis.core.model import Layout, Model, TensorSpec, Vector
from metis.core.solvers import Solver
from metis.learning import Trained

Array = NDArray[np.float32]


class Pairs:
    """Inputs and targets in memory, as batches of arrays."""

    def __init__(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        self.x = np.ascontiguousarray(x.reshape(len(x), -1), np.float32)
        self.y = y

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Array, NDArray[Any]]:
        return self.x[indices], self.y[indices]


class Perceptron:
    """Cross-entropy over `outputs` classes, or squared error of one number if there is one output."""

    def __init__(self, inputs: int, outputs: int, hidden: int) -> None:
        self.sizes = inputs, hidden, outputs
        shapes: dict[str, tuple[int, ...]] = {
            "hidden.weight": (inputs, hidden),
            "hidden.bias": (hidden,),
            "out.weight": (hidden, outputs),
            "out.bias": (outputs,),
        }
        self.layout = Layout(tuple(TensorSpec(name, shape) for name, shape in shapes.items()))
        self.metrics = ("accuracy",) if outputs > 1 else ("mae",)

    def initial_model(self, seed: int) -> Model:
        """Uniform within one over the square root of the inputs of a layer, as PyTorch does."""
        rng, (inputs, hidden, outputs) = np.random.default_rng(seed), self.sizes
        bounds = [1 / math.sqrt(inputs)] * 2 + [1 / math.sqrt(hidden)] * 2
        counts = inputs * hidden, hidden, hidden * outputs, outputs
        parts = [rng.uniform(-bound, bound, count) for bound, count in zip(bounds, counts, strict=True)]
        return Model(self.layout, np.concatenate(parts).astype(np.float32))

    def _views(self, vector: Vector) -> tuple[Array, Array, Array, Array]:
        inputs, hidden, outputs = self.sizes
        a, b = inputs * hidden, inputs * hidden + hidden
        c = b + hidden * outputs
        return vector[:a].reshape(inputs, hidden), vector[a:b], vector[b:c].reshape(hidden, outputs), vector[c:]

    def train(
        self,
        community_model: Model,
        batches: Iterable[Any],
        solver: Solver,
        memory: Memory | None = None,
        seed: int = 0,
    ) -> Trained:
        weights, community = community_model.vector.copy(), community_model.vector
        gradient = np.empty_like(weights)
        w1, b1, w2, b2 = self._views(weights)
        g1, h1, g2, h2 = self._views(gradient)
        kept = solver.start(weights)
        total, examples, steps = 0.0, 0, 0
        for x, y in batches:
            inner = x @ w1
            inner += b1
            np.maximum(inner, 0, out=inner)
            error, loss = self._error(inner @ w2 + b2, y)
            np.matmul(inner.T, error, out=g2)
            np.add.reduce(error, 0, out=h2)
            back = error @ w2.T
            back *= inner > 0
            np.matmul(x.T, back, out=g1)
            np.add.reduce(back, 0, out=h1)
            solver.step(weights, gradient, kept, community)
            total, examples, steps = total + loss * len(y), examples + len(y), steps + 1
        return Trained(community_model.with_vector(weights), steps, total / examples)

    def _error(self, scores: Array, y: NDArray[Any]) -> tuple[Array, float]:
        """The gradient of the mean loss by the scores, and the loss."""
        if self.sizes[2] == 1:
            error = scores - y.reshape(-1, 1).astype(np.float32)
            return error * np.float32(2 / len(y)), float(np.mean(error**2))
        scores -= scores.max(1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(1, keepdims=True)
        rows = np.arange(len(y))
        loss = float(-np.log(np.maximum(scores[rows, y], 1e-12)).mean())
        scores[rows, y] -= 1
        scores /= np.float32(len(y))
        return scores, loss

    def evaluate(self, model: Model, examples: Any, memory: Memory | None = None) -> dict[str, float]:
        x, y = examples.batch(np.arange(len(examples)))
        w1, b1, w2, b2 = self._views(model.vector)
        scores = np.maximum(x @ w1 + b1, 0) @ w2 + b2
        if self.sizes[2] == 1:
            return {"loss": float(np.mean((scores[:, 0] - y) ** 2)), "mae": float(np.mean(np.abs(scores[:, 0] - y)))}
        hits = scores.argmax(1) == y
        return {"loss": self._error(scores, y)[1], "accuracy": float(hits.mean())}
