"""WHAT BECOMES of a mixture: server-side optimizers (Reddi et al. 2021; FedAvgM: Hsu et al. 2019).

What the mixing rule proposes, less the current community model, is the (negative) gradient of a round. An optimizer
makes a step from it, under every protocol and every mixing rule. State and arithmetic are float64. Only parameters
are optimized: floating-point buffers, such as BatchNorm's statistics, become what the rule proposes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from metis.core.community import Community, ModelStore
from metis.core.layer import Layer
from metis.core.model import Layout, Model, Vector
from metis.core.schedules import Changing, Moment, factor_of

_BLOCK = 32 * 1024  # numbers; what a step needs of them stays in the processor's cache

Block: TypeAlias = NDArray[np.float64]


class ServerOptimizer(Protocol):
    """Settings and arithmetic of an optimizer; frozen, the state is handed in."""

    @property
    def name(self) -> str:
        """As tables call it."""
        ...

    def start(self, size: int) -> dict[str, Block]:
        """The state before the first round: vectors as long as the model."""
        ...

    def step(self, difference: Block, state: Mapping[str, Block]) -> Block:
        """How far to go for this proposed difference; changes the state in place."""
        ...


def _check(optimizer: str, **settings: float) -> None:
    for name, value in settings.items():
        if name in ("learning_rate", "tau"):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} of {optimizer} must be a number greater than 0, not {value}")
        elif not 0 <= value < 1:
            raise ValueError(f"{name} of {optimizer} must be at least 0 and below 1, not {value}")


@dataclass(frozen=True)
class FedAvgM:
    """m = momentum m + difference; w += learning_rate m. With learning_rate 1 and momentum 0 it is plain mixing."""

    learning_rate: float = 1.0
    momentum: float = 0.9
    name = "FedAvgM"

    def __post_init__(self) -> None:
        _check(self.name, learning_rate=self.learning_rate, momentum=self.momentum)

    def start(self, size: int) -> dict[str, Block]:
        return {"momentum": np.zeros(size)}

    def step(self, difference: Block, state: Mapping[str, Block]) -> Block:
        momentum = state["momentum"]
        momentum *= self.momentum
        momentum += difference
        return self.learning_rate * momentum


# The three of Reddi et al. (Algorithm 2, without a correction of the bias at the start) differ in the variance v only:
# m = beta1 m + (1 - beta1) difference; w += learning_rate m / (sqrt(v) + tau), where v starts at tau squared.


def _adaptive_start(size: int, tau: float) -> dict[str, Block]:
    return {"mean": np.zeros(size), "variance": np.full(size, tau**2)}


def _adaptive_step(
    difference: Block, state: Mapping[str, Block], variance: Block, learning_rate: float, beta1: float, tau: float
) -> Block:
    mean = state["mean"]
    mean *= beta1
    mean += (1 - beta1) * difference
    state["variance"][:] = variance
    return learning_rate * mean / (np.sqrt(variance) + tau)


@dataclass(frozen=True)
class FedAdagrad:
    """v += difference^2."""

    learning_rate: float = 0.1
    beta1: float = 0.0
    tau: float = 1e-3
    name = "FedAdagrad"

    def __post_init__(self) -> None:
        _check(self.name, learning_rate=self.learning_rate, beta1=self.beta1, tau=self.tau)

    def start(self, size: int) -> dict[str, Block]:
        return _adaptive_start(size, self.tau)

    def step(self, difference: Block, state: Mapping[str, Block]) -> Block:
        variance = state["variance"] + difference**2
        return _adaptive_step(difference, state, variance, self.learning_rate, self.beta1, self.tau)


@dataclass(frozen=True)
class FedAdam:
    """v = beta2 v + (1 - beta2) difference^2."""

    learning_rate: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    name = "FedAdam"

    def __post_init__(self) -> None:
        _check(self.name, learning_rate=self.learning_rate, beta1=self.beta1, beta2=self.beta2, tau=self.tau)

    def start(self, size: int) -> dict[str, Block]:
        return _adaptive_start(size, self.tau)

    def step(self, difference: Block, state: Mapping[str, Block]) -> Block:
        variance = self.beta2 * state["variance"] + (1 - self.beta2) * difference**2
        return _adaptive_step(difference, state, variance, self.learning_rate, self.beta1, self.tau)


@dataclass(frozen=True)
class FedYogi:
    """v -= (1 - beta2) difference^2 sign(v - difference^2): it falls as slowly as it rises."""

    learning_rate: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    name = "FedYogi"

    def __post_init__(self) -> None:
        _check(self.name, learning_rate=self.learning_rate, beta1=self.beta1, beta2=self.beta2, tau=self.tau)

    def start(self, size: int) -> dict[str, Block]:
        return _adaptive_start(size, self.tau)

    def step(self, difference: Block, state: Mapping[str, Block]) -> Block:
        square = difference**2
        variance = state["variance"] - (1 - self.beta2) * square * np.sign(state["variance"] - square)
        return _adaptive_step(difference, state, variance, self.learning_rate, self.beta1, self.tau)


class Optimized(Layer):
    """A mixing rule whose proposals become steps of an optimizer; published is where those steps lead."""

    def __init__(
        self,
        inside: Community,
        optimizer: ServerOptimizer,
        rate: Changing | None = None,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        super().__init__(inside)
        self._optimizer = optimizer
        self._rate, self._now = rate, now
        self._state = optimizer.start(inside.model.layout.size)

    def publish(self) -> bool:
        current = self.model
        if not super().publish():
            return False
        proposed = self.model
        # The moment of the model that comes out now, as if it were published.
        moment = Moment(self.stamp.version, self.committed_steps, self._now())
        rate = 1.0 if self._rate is None else factor_of(self._rate, "the server's learning rate", moment)
        self.adopt(proposed.with_vector(self._step(current.vector, proposed.vector, current.layout, rate)))
        return True

    def _step(self, current: Vector, proposed: Vector, layout: Layout, rate: float) -> Vector:
        result = np.empty(layout.size, np.float32)
        for start in range(0, layout.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            before = current[part].astype(np.float64)
            state = {name: vector[part] for name, vector in self._state.items()}
            result[part] = before + rate * self._optimizer.step(proposed[part] - before, state)
        for spec in layout.tensors:
            if spec.role == "buffer":
                result[layout.slices[spec.name]] = proposed[layout.slices[spec.name]]
        return result

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        own = {f"server/{name}": vector for name, vector in self._state.items()}
        return {**super().arrays(local_models=local_models), **own}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        super().load_arrays(model, arrays, store)
        self._state = {name: np.array(arrays[f"server/{name}"], np.float64) for name in self._state}
