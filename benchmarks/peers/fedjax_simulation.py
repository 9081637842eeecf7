"""Seconds of each round of FedJAX's federated averaging on the small network, compiled, as its examples do it."""

from __future__ import annotations

import time

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
import simple
from fedjax.algorithms import fed_avg


def loss(params, batch, rng):
    hidden = jax.nn.relu(batch["x"] @ params["w1"] + params["b1"])
    logits = jax.nn.log_softmax(hidden @ params["w2"] + params["b2"])
    return -jnp.mean(jnp.take_along_axis(logits, batch["y"][:, None], axis=1))


def main() -> None:
    asked = simple.spec()
    rng = np.random.default_rng(1990)
    params = {
        "w1": jnp.asarray(rng.normal(0, 0.1, (64, 32)), jnp.float32), "b1": jnp.zeros(32),
        "w2": jnp.asarray(rng.normal(0, 0.1, (32, 10)), jnp.float32), "b2": jnp.zeros(10),
    }  # fmt: skip
    inputs, targets = simple.examples((64,))
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
