"""Seconds of each round of FedJAX's federated averaging, compiled, as its examples do it.

The networks are those of `task`, which needs torch.
"""

from __future__ import annotations

import time

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
import simple
from fedjax.algorithms import fed_avg


def small(params, batch, rng):
    return jax.nn.relu(batch["x"] @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def medium(params, batch, rng):
    values = jnp.transpose(batch["x"], (0, 2, 3, 1))
    for layer in ("1", "2"):
        kernel = params[f"conv{layer}"]
        values = jax.lax.conv_general_dilated(
            values, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        values = jax.nn.relu(values + params[f"bias{layer}"])
    values = jax.lax.reduce_window(values, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    first, second = jax.random.split(rng)
    values = dropout(values, 0.25, first).reshape(len(values), -1)
    values = dropout(jax.nn.relu(values @ params["w1"] + params["b1"]), 0.5, second)
    return values @ params["w2"] + params["b2"]


def dropout(values, share, rng):
    return jnp.where(jax.random.bernoulli(rng, 1 - share, values.shape), values / (1 - share), 0.0)


NETWORKS = {"small": (small, (64,)), "medium": (medium, (3, 32, 32))}
SHAPES = {
    "small": {"w1": (64, 32), "b1": (32,), "w2": (32, 10), "b2": (10,)},
    "medium": {
        "conv1": (3, 3, 3, 32), "bias1": (32,), "conv2": (3, 3, 32, 64), "bias2": (64,),
        "w1": (14 * 14 * 64, 128), "b1": (128,), "w2": (128, 10), "b2": (10,),
    },
}  # fmt: skip


def main() -> None:
    asked = simple.spec()
    network, shape = NETWORKS[asked["network"]]

    def loss(params, batch, rng):
        logits = jax.nn.log_softmax(network(params, batch, rng))
        return -jnp.mean(jnp.take_along_axis(logits, batch["y"][:, None], axis=1))

    rng = np.random.default_rng(1990)
    params = {
        name: jnp.asarray(rng.normal(0, 0.05, size), jnp.float32) for name, size in SHAPES[asked["network"]].items()
    }
    inputs, targets = simple.examples(shape)
    clients = [
        (str(n).encode(), fedjax.ClientDataset({"x": inputs[part], "y": targets[part]}), key)
        for n, (part, key) in enumerate(
            zip(
                simple.parts(asked["learners"], asked["examples"]),
                jax.random.split(jax.random.PRNGKey(0), asked["learners"]),
                strict=True,
            )
        )
    ]
    algorithm = fed_avg.federated_averaging(
        jax.grad(loss), fedjax.optimizers.sgd(asked["learning_rate"]), fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=asked["batch_size"], num_epochs=1),
    )  # fmt: skip
    state = algorithm.init(params)
    moments = [time.perf_counter()]
    for _ in range(asked["rounds"] + 1):
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)
        moments.append(time.perf_counter())
    simple.answer(simple.rounds_of(moments))


if __name__ == "__main__":
    main()
