"""Networks that a site could bring, for the suite of engines; worker processes import them from here."""

from __future__ import annotations

from typing import Any

import numpy as np

FEATURES, CLASSES = 6, 3


def functions() -> Any:
    """The smallest network of JAX: two functions."""
    import jax

    def init(key: Any) -> Any:
        return {"w": 0.1 * jax.random.normal(key, (FEATURES, CLASSES)), "b": np.zeros(CLASSES, np.float32)}

    return init, lambda tree, inputs: inputs @ tree["w"] + tree["b"]


def normalised(seed: int = 0) -> Any:
    """Of flax.nnx, with statistics and dropout."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first, self.norm = nnx.Linear(FEATURES, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
            self.dropout, self.last = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(16, CLASSES, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))

    return Net(nnx.Rngs(seed))


def linen_normalised() -> Any:
    """Of flax.linen, with statistics and dropout."""
    import jax.numpy as jnp
    from flax import linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any, train: bool) -> Any:
            x = linen.BatchNorm(use_running_average=not train)(linen.Dense(16)(x))
            return linen.Dense(CLASSES)(linen.Dropout(0.2, deterministic=not train)(linen.relu(x)))

    return Net(), jnp.zeros((1, FEATURES))


def hinge() -> Any:
    """A classifier without probabilities."""
    from sklearn.linear_model import SGDClassifier

    return SGDClassifier(loss="hinge", learning_rate="constant", eta0=0.01), FEATURES, CLASSES


def adam_mlp() -> Any:
    from sklearn.neural_network import MLPClassifier

    return MLPClassifier((16,), learning_rate_init=0.01), FEATURES, CLASSES


def torch_normalised() -> Any:
    from torch import nn

    layers = nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES)
    return nn.Sequential(*layers)
