"""WHAT BECOMES of a mixture: server-side optimizers (Reddi et al. 2021; FedAvgM: Hsu et al. 2019).

What the mixing rule proposes, less the current community model, is the (negative) gradient of a round. An optimizer
makes a step from it, under every protocol and every mixing rule. State and arithmetic are float64. Only parameters
are optimized: floating-point buffers, such as BatchNorm's statistics, become what the rule proposes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import empty, in_parts, release, widened, zeros
from metis.core.layers.base import Layer
from metis.core.layers.wrapper import Wrapper
from metis.core.mixing import Community, Mixing, ModelStore
from metis.core.model import Layout, Model, Vector
from metis.core.schedules import Changing, Moment, Schedule, factor_of
from metis.registry import Setting

_BLOCK = 32 * 1024  # numbers; what a step needs of them stays in the processor's cache

Block: TypeAlias = NDArray[np.float64]


class ServerOptimizer(
    Layer, ABC, needs={"mixture": "makes steps from what the mixing proposes, which it cannot see under {other}"}
):
    """Settings and arithmetic of an optimizer; the state is an argument."""

    title: ClassVar[str]  # as tables call it
    selector = "optimizer"
    rate: Changing | None

    @abstractmethod
    def start_state(self, size: int) -> dict[str, Block]:
        """The state before the first round: vectors as long as the model."""

    @abstractmethod
    def step(self, difference: Block, state: Mapping[str, Block]) -> Block:
        """How far to go for this proposed difference; changes the state in place."""

    def relabel(self, label: str) -> str:
        return f"{label} + {self.title}"

    def wrap(self, mixing: Mixing) -> Mixing:
        return lambda model, store: Optimized(mixing(model, store), self)


Rate = Annotated[Schedule | Changing | None, Setting("schedule of a factor of this learning rate; none if not given")]
Tau = Annotated[float, Setting("how adaptive: smaller is more adaptive", gt=0)]
Beta1 = Annotated[float, Setting("share of the mean difference that is kept", ge=0, lt=1)]
Beta2 = Annotated[float, Setting("share of the variance that is kept", ge=0, lt=1)]
LearningRate = Annotated[float, Setting("factor of a step", gt=0)]


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer, key="server", order=30, choice="momentum"):
    """m = momentum m + difference; w += learning_rate m. With learning_rate 1 and momentum 0 it is plain mixing."""

    learning_rate: LearningRate = 1.0
    momentum: Annotated[float, Setting("share of the last step that is kept", ge=0, lt=1)] = 0.9
    rate: Rate = None

    title = "FedAvgM"

    def start_state(self, size: int) -> dict[str, Block]:
        return {"momentum": zeros(size)}

    def step(self, difference: Block, state: Mapping[str, Block]) -> Block:
        momentum = state["momentum"]
        momentum *= self.momentum
        momentum += difference
        return self.learning_rate * momentum


# The three of Reddi et al. (Algorithm 2, without a correction of the bias at the start) differ in the variance v only:
# m = beta1 m + (1 - beta1) difference; w += learning_rate m / (sqrt(v) + tau), where v starts at tau squared.


def _adaptive_start(size: int, tau: float) -> dict[str, Block]:
    variance = zeros(size)
    in_parts(lambda part: part.fill(tau**2), variance)
    return {"mean": zeros(size), "variance": variance}


def _adaptive_step(
    difference: Block, state: Mapping[str, Block], variance: Block, learning_rate: float, beta1: float, tau: float
) -> Block:
    mean = state["mean"]
    mean *= beta1
    mean += (1 - beta1) * difference
    state["variance"][:] = variance
    return learning_rate * mean / (np.sqrt(variance) + tau)


@dataclass(frozen=True)
class FedAdagrad(ServerOptimizer, key="server", order=30, choice="adagrad"):
    """v += difference^2."""

    learning_rate: LearningRate = 0.1
    beta1: Beta1 = 0.0
    tau: Tau = 1e-3
    rate: Rate = None

    title = "FedAdagrad"

    def start_state(self, size: int) -> dict[str, Block]:
        return _adaptive_start(size, self.tau)

    def step(self, difference: Block, state: Mapping[str, Block]) -> Block:
        variance = state["variance"] + difference**2
        return _adaptive_step(difference, state, variance, self.learning_rate, self.beta1, self.tau)


@dataclass(frozen=True)
class FedAdam(ServerOptimizer, key="server", order=30, choice="adam"):
    """v = beta2 v + (1 - beta2) difference^2."""

    learning_rate: LearningRate = 0.1
    beta1: Beta1 = 0.9
    beta2: Beta2 = 0.99
    tau: Tau = 1e-3
    rate: Rate = None

    title = "FedAdam"

    def start_state(self, size: int) -> dict[str, Block]:
        return _adaptive_start(size, self.tau)

    def step(self, difference: Block, state: Mapping[str, Block]) -> Block:
        variance = self.beta2 * state["variance"] + (1 - self.beta2) * difference**2
        return _adaptive_step(difference, state, variance, self.learning_rate, self.beta1, self.tau)


@dataclass(frozen=True)
class FedYogi(ServerOptimizer, key="server", order=30, choice="yogi"):
    """v -= (1 - beta2) difference^2 sign(v - difference^2): it falls as slowly as it rises."""

    learning_rate: LearningRate = 0.1
    beta1: Beta1 = 0.9
    beta2: Beta2 = 0.99
    tau: Tau = 1e-3
    rate: Rate = None

    title = "FedYogi"

    def start_state(self, size: int) -> dict[str, Block]:
        return _adaptive_start(size, self.tau)

    def step(self, difference: Block, state: Mapping[str, Block]) -> Block:
        square = difference**2
        variance = state["variance"] - (1 - self.beta2) * square * np.sign(state["variance"] - square)
        return _adaptive_step(difference, state, variance, self.learning_rate, self.beta1, self.tau)


class Optimized(Wrapper):
    """A mixing whose proposals become steps of an optimizer; published is where those steps lead."""

    def __init__(self, inside: Community, optimizer: ServerOptimizer) -> None:
        super().__init__(inside)
        self._optimizer = optimizer
        self._state = optimizer.start_state(inside.model.layout.size)

    def publish(self, seconds: float = 0.0) -> bool:
        current = self.model
        if not super().publish(seconds):
            return False
        proposed, schedule = self.model, self._optimizer.rate
        # The moment of the model that is published now.
        moment = Moment(self.stamp.version, self.committed_steps, seconds)
        rate = 1.0 if schedule is None else factor_of(schedule, "the server's learning rate", moment)
        self.adopt(proposed.with_vector(self._step(current.vector, proposed.vector, current.layout, rate)))
        return True

    def _step(self, current: Vector, proposed: Vector, layout: Layout, rate: float) -> Vector:
        result = empty(layout.size)
        for start in range(0, layout.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            before = current[part].astype(np.float64)
            state = {name: vector[part] for name, vector in self._state.items()}
            result[part] = before + rate * self._optimizer.step(proposed[part] - before, state)
            release(result[part], current[part], proposed[part], *state.values())
        for spec in layout.tensors:
            if spec.role in ("buffer", "control"):
                result[layout.slices[spec.name]] = proposed[layout.slices[spec.name]]
        return result

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        own = {f"server/{name}": vector for name, vector in self._state.items()}
        return {**super().arrays(local_models=local_models), **own}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        super().load_arrays(model, arrays, store)
        self._state = {name: widened(arrays[f"server/{name}"]) for name in self._state}
