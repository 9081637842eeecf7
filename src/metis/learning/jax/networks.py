"""Networks for JAX: what a site may give, and small ones by name.

A site's `network()` returns one of these; `def network(seed=0)` gets the seed of the experiment:

    a module of flax.nnx            which has its parameters already
    (module, inputs)                a module of flax.linen, and inputs of the shape that it is for
    (init, apply)                   functions: init(key) -> parameters, apply(parameters, inputs) -> outputs
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx

from metis.errors import ConfigError

Tree = Any  # of arrays, as jax has them


class Functions(NamedTuple):
    """A network as functions of its parameters and of its buffers, such as the statistics of BatchNorm."""

    start: Callable[[Any], tuple[Tree, Tree]]  # of a key: parameters and buffers
    apply: Callable[[Tree, Tree, Any, Any], tuple[Any, Tree]]  # of both, inputs and a key, which is None to evaluate


def functions_of(make: Callable[..., Any], seed: int) -> Functions:
    """The network that a site makes, as functions."""
    made = make(seed) if [*inspect.signature(make).parameters][:1] == ["seed"] else make()
    if isinstance(made, nnx.Module):
        return _of_nnx(made)
    if isinstance(made, tuple) and len(made) == 2:
        if isinstance(made[0], linen.Module):
            return _of_linen(*made)
        if all(callable(part) for part in made):
            init, apply = made
            return Functions(lambda key: (init(key), {}), lambda tree, _, inputs, key: (apply(tree, inputs), {}))
    raise ConfigError(
        "network must return a module of flax.nnx, a pair (module, inputs) of flax.linen, or a pair of functions "
        f"(init, apply), not {type(made).__name__}"
    )


def _of_nnx(module: Any) -> Functions:
    definition, parameters, statistics, rest = nnx.split(module, nnx.Param, nnx.BatchStat, ...)

    def apply(parameters: Tree, statistics: Tree, inputs: Any, key: Any) -> tuple[Any, Tree]:
        own = nnx.merge(definition, parameters, statistics, rest if key is None else _seeded(rest, key))
        own.eval() if key is None else own.train()
        outputs = own(inputs)
        return outputs, nnx.state(own, nnx.BatchStat)

    return Functions(lambda _: (parameters, statistics), apply)


def _seeded(tree: Tree, key: Any) -> Tree:
    """The same tree with other keys of random numbers, each of its own."""
    leaves, form = jax.tree_util.tree_flatten(tree)
    keys = [
        jax.random.fold_in(key, number) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for number, leaf in enumerate(leaves)
    ]
    return jax.tree_util.tree_unflatten(form, keys)


def _of_linen(module: Any, inputs: Any) -> Functions:
    known = inspect.signature(type(module).__call__).parameters

    def mode(training: bool) -> dict[str, bool]:
        modes = {"train": training, "training": training, "deterministic": not training}
        return {name: value for name, value in modes.items() if name in known}

    def start(key: Any) -> tuple[Tree, Tree]:
        variables = dict(module.init(key, inputs, **mode(False)))
        return variables.pop("params", {}), variables

    def apply(parameters: Tree, buffers: Tree, inputs: Any, key: Any) -> tuple[Any, Tree]:
        variables = {"params": parameters, **buffers}
        if key is None:
            return module.apply(variables, inputs, **mode(False)), buffers
        outputs, changed = module.apply(variables, inputs, **mode(True), rngs={"dropout": key}, mutable=[*buffers])
        return outputs, {**buffers, **changed}

    return Functions(start, apply)


# --- by name ------------------------------------------------------------------------------------


class _Mlp(linen.Module):  # type: ignore[misc]
    widths: Sequence[int]
    dropout: float = 0.0

    @linen.compact  # type: ignore[untyped-decorator]
    def __call__(self, inputs: Any, train: bool = False) -> Any:
        x = inputs.reshape(len(inputs), -1)
        for width in self.widths[:-1]:
            x = linen.relu(linen.Dense(width)(x))
            if self.dropout:
                x = linen.Dropout(self.dropout, deterministic=not train)(x)
        return linen.Dense(self.widths[-1])(x)


class _SmallCnn(linen.Module):  # type: ignore[misc]
    outputs: int
    channels: Sequence[int]
    kernel: int

    @linen.compact  # type: ignore[untyped-decorator]
    def __call__(self, inputs: Any) -> Any:
        x = jnp.moveaxis(inputs, 1, -1)  # examples come with the channels first
        for filters in self.channels:
            x = linen.relu(linen.Conv(filters, (self.kernel, self.kernel))(x))
            x = linen.max_pool(x, (2, 2), strides=(2, 2))
        return linen.Dense(self.outputs)(x.reshape(len(x), -1))


def _for(module: Any, input_shape: Sequence[int]) -> tuple[Any, Any]:
    return module, jnp.zeros((1, *input_shape), jnp.float32)


def logistic(input_shape: Sequence[int], outputs: int) -> Any:
    """One linear layer: multinomial logistic regression, or linear regression with one output."""
    return _for(_Mlp((outputs,)), input_shape)


def mlp(input_shape: Sequence[int], outputs: int, hidden: Sequence[int] = (64,), dropout: float = 0.0) -> Any:
    """Fully connected layers with ReLU between them."""
    return _for(_Mlp((*hidden, outputs), dropout), input_shape)


def small_cnn(input_shape: Sequence[int], outputs: int, channels: Sequence[int] = (16, 32), kernel: int = 5) -> Any:
    """Convolutions that keep the size, each followed by ReLU and 2x2 pooling; then one linear layer."""
    if len(input_shape) != 3:
        shape = " x ".join(map(str, input_shape))
        raise ConfigError(f"small_cnn takes images (channels, height, width), and these examples are {shape}")
    if min(input_shape[1:]) >> len(channels) < 1:
        raise ConfigError(
            f"small_cnn: {len(channels)} poolings leave nothing of images of {math.prod(input_shape[1:])} points"
        )
    return _for(_SmallCnn(outputs, tuple(channels), kernel), input_shape)
