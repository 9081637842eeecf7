"""Training with JAX, on parameters in one flat vector: XLA computes loss and gradient, the solver works in numpy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from metis.core.layers import Memory
from metis.core.model import Layout, Model, TensorSpec
from metis.core.solvers import Solver
from metis.errors import ConfigError
from metis.learning.arrays import Array, ArrayEngine, arrays_of, shortened, together
from metis.learning.engine import Batch, EngineJob, Trained
from metis.learning.jax import networks
from metis.learning.solvers import Optax

Vector = NDArray[np.float32]


class JaxEngine(ArrayEngine):
    """Trains networks of flax (`nnx`, `linen`) and plain functions of JAX."""

    name = "jax"
    refused = (*ArrayEngine.refused, "buffers")
    survives_fork = False  # XLA has threads

    def __init__(self, job: EngineJob) -> None:
        super().__init__(job)
        self._device = _device(job.device)
        self._make: Callable[..., Any] = job.network or functools.partial(
            getattr(networks, job.network_name), job.input_shape, job.outputs, **job.network_options
        )
        with jax.default_device(self._device):
            network = networks.functions_of(self._make, 0)
            parameters, buffers = network.start(jax.random.key(0))
        self._apply = network.apply
        self._forms = jax.tree_util.tree_structure(parameters), jax.tree_util.tree_structure(buffers)
        specs = *_specs(parameters, "parameter"), *_specs(buffers, "buffer")
        self._layout = Layout(specs)
        self._shapes = [[spec.shape for spec in specs if spec.role == role] for role in ("parameter", "buffer")]
        self._weights = sum(math.prod(shape) for shape in self._shapes[0])
        self._loss = job.loss or (_squared_error if self._regression else _cross_entropy)
        self._gradient = jax.jit(jax.value_and_grad(self._objective, has_aux=True))
        self._forward = jax.jit(lambda weights, buffers, inputs: self._outputs(weights, buffers, inputs, None)[0])

    @property
    def plain_steps(self) -> bool:
        """Whether each batch's gradient reaches the solver as it is."""
        return self._job.clip_norm is None and self._job.accumulate == 1

    def initial_model(self, seed: int) -> Model:
        with jax.default_device(self._device):
            parameters, buffers = networks.functions_of(self._make, seed).start(_key(seed))
        specs = *_specs(parameters, "parameter"), *_specs(buffers, "buffer")
        if Layout(specs) != self._layout:
            raise ConfigError("the network must have the same tensors each time that it is built")
        leaves = jax.tree_util.tree_leaves((parameters, buffers))
        return Model(self._layout, np.concatenate([np.zeros(0, np.float32), *(np.ravel(leaf) for leaf in leaves)]))

    def train(
        self,
        community_model: Model,
        batches: Iterable[Batch],
        solver: Solver,
        memory: Memory | None = None,
        seed: int = 0,
    ) -> Trained:
        weights, buffers = (part.copy() for part in np.split(community_model.vector, [self._weights]))
        community = community_model.vector[: self._weights]
        rule = self._rule(solver, weights, community, memory or {})
        gathered = np.zeros_like(weights)
        steps = examples = pending = 0
        total, accumulate, clip_norm = 0.0, self._job.accumulate, self._job.clip_norm
        with jax.default_device(self._device):
            key = _key(seed)
            for batch, step in together(batches, accumulate):
                inputs, targets = arrays_of(batch)
                (loss, buffers), gradient = self._gradient(
                    weights, buffers, inputs, targets, jax.random.fold_in(key, steps)
                )
                # Copies wait for the device, so the solver may change the weights that XLA has read.
                gathered += np.asarray(gradient)
                pending += 1
                if step:
                    gathered = self._stepped(rule, gathered, pending, clip_norm)
                    pending = 0
                steps, examples = steps + 1, examples + len(inputs)
                total += float(loss) * len(inputs)
                if not math.isfinite(float(loss)):
                    break
            if pending:
                self._stepped(rule, gathered, pending, clip_norm)
        vector = np.concatenate([rule.weights, np.asarray(buffers)])
        return Trained(community_model.with_vector(vector), steps, total / (examples or math.nan), rule.kept())

    @staticmethod
    def _stepped(rule: _Rule, gathered: Vector, batches: int, clip_norm: float | None) -> Vector:
        """A step by the mean gradient of this many batches; returns zeros for the next."""
        if batches > 1:
            gathered /= batches
        shortened(gathered, clip_norm)
        rule.step(gathered)
        gathered[:] = 0
        return gathered

    def _rule(self, solver: Solver, weights: Vector, community: Vector, memory: Memory) -> _Rule:
        if isinstance(solver, Optax):
            return _OptaxRule(solver, weights, community, memory, lambda vector: self._tree(0, vector))
        return _CoreRule(solver, weights, community, memory)

    def check_solver(self, solver: Solver) -> None:
        """Refuse a solver that this engine does not have."""
        if isinstance(solver, Optax):
            solver.transformation()
        elif type(solver).__module__.startswith("metis.learning.torch"):
            raise ConfigError(f"{solver!r} is an optimizer of torch; engine = 'jax' takes solver = 'optax'")

    def predictor(self, model: Model, memory: Memory) -> Callable[[Array], Array]:
        weights, buffers = np.split(model.vector, [self._weights])

        def predict(inputs: Array) -> Array:
            with jax.default_device(self._device):
                return np.asarray(self._forward(weights, buffers, inputs))

        return predict

    def loss_of(self, outputs: Array, targets: Array) -> float:
        with jax.default_device(self._device):
            return float(self._loss(jnp.asarray(outputs), jnp.asarray(targets)))

    # --- what XLA compiles --------------------------------------------------------------------

    def _tree(self, which: int, vector: Any) -> Any:
        """The parameters (0) or the buffers (1) from their flat vector."""
        shapes = self._shapes[which]
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        leaves = [
            vector[end - math.prod(shape) : end].reshape(shape)
            for shape, end in zip(shapes, ends.tolist(), strict=True)
        ]
        return jax.tree_util.tree_unflatten(self._forms[which], leaves)

    def _outputs(self, weights: Any, buffers: Any, inputs: Any, key: Any) -> tuple[Any, Any]:
        outputs, changed = self._apply(self._tree(0, weights), self._tree(1, buffers), inputs, key)
        return outputs, _flat(changed)

    def _objective(self, weights: Any, buffers: Any, inputs: Any, targets: Any, key: Any) -> tuple[Any, Any]:
        outputs, changed = self._outputs(weights, buffers, inputs, key)
        if self._regression:
            targets = self.fitted_shape(targets, outputs.shape)
        return self._loss(outputs, targets), changed

    def fitted_shape(self, targets: Any, outputs: tuple[int, ...]) -> Any:
        """Targets of a regression in the shape of the outputs; as `fitted`, while XLA compiles."""
        if math.prod(outputs) != targets.size:
            raise ConfigError(f"outputs have the shape {outputs} and targets the shape {targets.shape}")
        return targets.reshape(outputs)


class _Rule:
    """How gradients change the weights."""

    weights: Vector

    def step(self, gradient: Vector) -> None:
        raise NotImplementedError

    def kept(self) -> Memory:
        raise NotImplementedError


class _CoreRule(_Rule):
    """A rule of Metis, in numpy."""

    def __init__(self, solver: Solver, weights: Vector, community: Vector, memory: Memory) -> None:
        self._solver, self.weights, self._community = solver, weights, community
        self._memory = solver.start(weights)
        if solver.keeps_memory and self._memory is not None and "solver" in memory:
            self._memory[:] = memory["solver"]

    def step(self, gradient: Vector) -> None:
        self._solver.step(self.weights, gradient, self._memory, self._community)

    def kept(self) -> Memory:
        return {"solver": self._memory} if self._solver.keeps_memory and self._memory is not None else {}


class _OptaxRule(_Rule):
    """An optimizer of optax on the tree of parameters."""

    def __init__(
        self, solver: Optax, weights: Vector, community: Vector, memory: Memory, tree: Callable[[Any], Any]
    ) -> None:
        self._solver, self.weights, self._community = solver, weights, community
        made = solver.transformation()
        self._state = made.init(tree(jnp.asarray(weights)))
        leaves, form = jax.tree_util.tree_flatten(self._state)
        if solver.keep_state and "optax/0" in memory:
            leaves = [jnp.asarray(memory[f"optax/{number}"], leaf.dtype) for number, leaf in enumerate(leaves)]
            self._state = jax.tree_util.tree_unflatten(form, leaves)

        def change(gradient: Any, state: Any, weights: Any) -> tuple[Any, Any]:
            updates, state = made.update(tree(gradient), state, tree(weights))
            return weights + _flat(updates), state

        self._change = jax.jit(change)

    def step(self, gradient: Vector) -> None:
        if self._solver.proximal_term:
            gradient += self._solver.proximal_term * (self.weights - self._community)
        changed, self._state = self._change(gradient, self._state, self.weights)
        self.weights[:] = np.asarray(changed)

    def kept(self) -> Memory:
        if not self._solver.keep_state:
            return {}
        leaves = jax.tree_util.tree_leaves(self._state)
        return {f"optax/{number}": np.array(leaf) for number, leaf in enumerate(leaves)}


def _device(name: str) -> Any:
    kind, _, number = name.partition(":")
    try:
        return jax.devices("gpu" if kind == "cuda" else kind)[int(number or 0)]
    except (RuntimeError, IndexError, ValueError) as problem:
        raise ConfigError(f"device '{name}' cannot be used: {str(problem).splitlines()[0]}") from problem


def _key(seed: int) -> Any:
    """A key of all 64 bits of a seed."""
    return jax.random.fold_in(jax.random.key(seed >> 32), seed & 0xFFFFFFFF)


def _flat(tree: Any) -> Any:
    return jnp.concatenate([jnp.zeros(0, jnp.float32), *(jnp.ravel(leaf) for leaf in jax.tree_util.tree_leaves(tree))])


def _specs(tree: Any, role: Any) -> list[TensorSpec]:
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = ".".join(
            str(getattr(part, "key", getattr(part, "idx", getattr(part, "name", part))))
            for part in path
            if getattr(part, "name", "") != "value"  # of flax's variables
        )
        if jnp.result_type(leaf) != jnp.float32:
            raise ConfigError(f"tensor '{name}' of the network is {jnp.result_type(leaf)}; engine = 'jax' has float32")
        found.append(TensorSpec(name or role, tuple(jnp.shape(leaf)), role=role))
    return found


def _cross_entropy(outputs: Any, targets: Any) -> Any:
    scores = jax.nn.log_softmax(outputs)
    return -jnp.take_along_axis(scores, targets[:, None], 1).mean()


def _squared_error(outputs: Any, targets: Any) -> Any:
    return ((outputs - targets) ** 2).mean()
