"""Local solvers: how one gradient changes the weights (Sec. 3.2 of the paper).

Every rule works in place on one flat vector of trainable parameters, a torch tensor or a numpy array alike.
A step may use `gradient` as scratch space; it must not write to `community`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeAlias, cast

import numpy as np

from metis.core.layers.base import Layer
from metis.core.layers.control_variates import ControlVariates
from metis.errors import ConfigError, InternalError
from metis.registry import Registry, Setting, check_settings

Array: TypeAlias = Any  # torch.Tensor or numpy.ndarray: this module knows neither the device nor the library


@dataclass(frozen=True)
class SolverFacts:
    """How the steps of a task add up, for normalised averaging and for pacing."""

    momentum: float = 0.0  # that restarts in each task; momentum that is kept is at full strength from the first step
    pull: float = 0.0  # learning rate times proximal term
    adaptive: str = ""  # the rule's name, if a step is not a sum of gradients times the learning rate


class Solver:
    """An update rule; subclasses are frozen dataclasses, so that all learners may share one.

    Registered under a name by `@SOLVERS.register("name")`; its fields are the keys of [training] then.
    """

    title: ClassVar[str] = ""  # as labels call it
    # Settings that a policy's own solver takes over from [training] where that names another solver; None: all.
    inherits: ClassVar[frozenset[str] | None] = None
    layers: ClassVar[tuple[Layer, ...]] = ()  # that training with this solver needs

    @property
    def keeps_memory(self) -> bool:
        """Whether the memory outlives a task (R5)."""
        return False

    def start(self, weights: Array) -> Array | None:
        """The memory at the start of a task; None if the rule needs none."""
        return None

    def step(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        """Change the weights, and the memory, in place; `community` is what the task started from."""
        raise InternalError(f"{type(self).__name__} has no step")

    @property
    def facts(self) -> SolverFacts:
        """How its steps add up; plain gradient descent unless the rule says otherwise."""
        return SolverFacts()

    def with_rate(self, factor: float) -> Solver:
        """The same solver with its learning rate times this, as a task may ask."""
        rate = getattr(self, "learning_rate", None)
        if rate is None:
            raise ConfigError(f"{type(self).__name__} has no learning_rate, so no schedule can change it")
        changed: Solver = replace(cast("Any", self), learning_rate=factor * rate)
        return changed

    def with_pull(self, proximal_term: float) -> Solver:
        """The same solver, held toward the received community model as FedAsync asks (R14)."""
        return Pulled(self, proximal_term)


SOLVERS: Registry[type[Solver]] = Registry("solver", "metis.solvers")


def add_scaled(target: Array, source: Array, factor: float) -> None:
    """target += factor * source; torch does it in one pass, without a temporary of the size of the model."""
    if isinstance(target, np.ndarray):
        target += factor * source
    else:
        target.add_(source, alpha=factor)


def zeros_like(weights: Array) -> Array:
    """Zeros of the same shape, in the same library."""
    return np.zeros_like(weights) if isinstance(weights, np.ndarray) else weights.new_zeros(weights.shape)


LearningRate = Annotated[float, Setting("eta", gt=0)]
Momentum = Annotated[float, Setting("gamma", ge=0, lt=1)]
KeepMomentum = Annotated[bool, Setting("whether the momentum outlives a task (R5)")]
ProximalTerm = Annotated[float, Setting("mu: pull toward the received community model", ge=0)]
WeightDecay = Annotated[float, Setting("added to the gradient, times the weights", ge=0)]
KeepState = Annotated[bool, Setting("whether the optimizer's state outlives a task")]
Beta = Annotated[float, Setting("how slowly a running mean forgets", ge=0, lt=1)]


@dataclass(frozen=True)
class Pulled(Solver):
    """Any other solver, with a pull toward the received community model in each gradient."""

    inside: Solver
    proximal_term: ProximalTerm

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def keeps_memory(self) -> bool:
        return self.inside.keeps_memory

    def start(self, weights: Array) -> Array | None:
        return self.inside.start(weights)

    def step(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        add_scaled(gradient, weights, self.proximal_term)
        add_scaled(gradient, community, -self.proximal_term)
        self.inside.step(weights, gradient, memory, community)

    @property
    def facts(self) -> SolverFacts:
        facts, rate = self.inside.facts, float(getattr(self.inside, "learning_rate", 0.0))
        return replace(facts, pull=facts.pull + self.proximal_term * rate)

    def with_rate(self, factor: float) -> Solver:
        return replace(self, inside=self.inside.with_rate(factor))

    def with_pull(self, proximal_term: float) -> Solver:
        return replace(self, proximal_term=self.proximal_term + proximal_term)


@SOLVERS.register("vanilla")
@dataclass(frozen=True)
class VanillaSGD(Solver):
    """w -= eta grad."""

    learning_rate: LearningRate
    weight_decay: WeightDecay = 0.0

    title = "Vanilla"

    def __post_init__(self) -> None:
        check_settings(self)

    def step(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        if self.weight_decay:
            add_scaled(gradient, weights, self.weight_decay)
        add_scaled(weights, gradient, -self.learning_rate)

    def with_pull(self, proximal_term: float) -> Solver:
        return FedProx(self.learning_rate, proximal_term, weight_decay=self.weight_decay)


@SOLVERS.register("momentum")
@dataclass(frozen=True)
class MomentumSGD(Solver):
    """u = gamma u + grad; w -= eta u (Eq. 3, R6); u starts at zero in each task unless it is kept (R5)."""

    learning_rate: LearningRate
    momentum: Momentum = 0.9
    keep_momentum: KeepMomentum = False
    weight_decay: WeightDecay = 0.0

    title = "Momentum"

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def keeps_memory(self) -> bool:
        return self.keep_momentum

    def start(self, weights: Array) -> Array | None:
        return zeros_like(weights)

    def step(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        assert memory is not None, "start() made it"
        if self.weight_decay:
            add_scaled(gradient, weights, self.weight_decay)
        memory *= self.momentum
        memory += gradient
        add_scaled(weights, memory, -self.learning_rate)

    @property
    def facts(self) -> SolverFacts:
        return SolverFacts(momentum=0.0 if self.keep_momentum else self.momentum)

    def with_pull(self, proximal_term: float) -> Solver:
        return FedProx(self.learning_rate, proximal_term, self.momentum, self.keep_momentum, self.weight_decay)


@SOLVERS.register("fedprox")
@dataclass(frozen=True)
class FedProx(Solver):
    """w -= eta grad + eta mu (w - w_c); with momentum, the whole bracket enters the memory."""

    learning_rate: LearningRate
    proximal_term: ProximalTerm = 0.001
    momentum: Momentum = 0.0
    keep_momentum: KeepMomentum = False
    weight_decay: WeightDecay = 0.0

    title = "FedProx"
    inherits = frozenset({"proximal_term"})  # the paper's FedProx has no momentum

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def keeps_memory(self) -> bool:
        return self.keep_momentum and self.momentum > 0

    def start(self, weights: Array) -> Array | None:
        return zeros_like(weights) if self.momentum else None

    def step(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        add_scaled(gradient, weights, self.proximal_term + self.weight_decay)
        add_scaled(gradient, community, -self.proximal_term)
        if memory is None:
            add_scaled(weights, gradient, -self.learning_rate)
        else:
            memory *= self.momentum
            memory += gradient
            add_scaled(weights, memory, -self.learning_rate)

    @property
    def facts(self) -> SolverFacts:
        return SolverFacts(0.0 if self.keep_momentum else self.momentum, self.learning_rate * self.proximal_term)

    def with_pull(self, proximal_term: float) -> Solver:
        return replace(self, proximal_term=self.proximal_term + proximal_term)


@SOLVERS.register("adam")
@dataclass(frozen=True)
class Adam(Solver):
    """m and v are running means of the gradient and of its square; w -= eta m' / (sqrt(v') + eps), both unbiased."""

    learning_rate: LearningRate = 0.001
    beta1: Beta = 0.9
    beta2: Beta = 0.999
    eps: Annotated[float, Setting("keeps the divisor from 0", gt=0)] = 1e-8
    weight_decay: WeightDecay = 0.0
    keep_state: KeepState = False

    title = "Adam"

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def keeps_memory(self) -> bool:
        return self.keep_state

    def start(self, weights: Array) -> Array | None:
        size = 2 * len(weights) + 1  # m, v and the number of steps
        if isinstance(weights, np.ndarray):
            return np.zeros(size, weights.dtype)
        return (weights if weights.element_size() > 2 else weights.float()).new_zeros(size)  # steps are counted in it

    def step(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        assert memory is not None, "start() made it"
        self._decay(weights, gradient)
        size = len(weights)
        mean, square = memory[:size], memory[size:-1]
        memory[-1] += 1
        steps = float(memory[-1])
        mean *= self.beta1
        add_scaled(mean, gradient, 1 - self.beta1)
        gradient *= gradient
        square *= self.beta2
        add_scaled(square, gradient, 1 - self.beta2)
        divisor = square**0.5
        divisor /= (1 - self.beta2**steps) ** 0.5
        divisor += self.eps
        add_scaled(weights, mean / divisor, -self.learning_rate / (1 - self.beta1**steps))

    def _decay(self, weights: Array, gradient: Array) -> None:
        if self.weight_decay:
            add_scaled(gradient, weights, self.weight_decay)

    @property
    def facts(self) -> SolverFacts:
        return SolverFacts(adaptive=self.title)


@SOLVERS.register("adamw")
@dataclass(frozen=True)
class AdamW(Adam):
    """Adam whose weight decay does not pass through the running means: w -= eta decay w, then Adam's step."""

    weight_decay: Annotated[float, Setting("times the learning rate and the weights, taken from the weights", ge=0)] = (
        0.01
    )

    title = "AdamW"

    def _decay(self, weights: Array, gradient: Array) -> None:
        weights *= 1 - self.learning_rate * self.weight_decay


@SOLVERS.register("scaffold")
@dataclass(frozen=True)
class Scaffold(Solver):
    """w -= eta (grad + c - c_k), with a momentum that restarts in each task if there is one.

    c is the server's control variate, c_k the learner's; both are zero until `corrected` says otherwise.
    """

    learning_rate: LearningRate
    momentum: Momentum = 0.0
    weight_decay: WeightDecay = 0.0
    proximal_term: Annotated[float, Setting("mu; what FedAsync asks for", ge=0, in_files=False)] = 0.0

    title = "SCAFFOLD"
    inherits = frozenset()  # SCAFFOLD has no momentum unless it is given
    layers = (ControlVariates(),)

    def __post_init__(self) -> None:
        check_settings(self)

    def start(self, weights: Array) -> Array | None:
        return zeros_like(weights) if self.momentum else None

    def step(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        if self.weight_decay:
            add_scaled(gradient, weights, self.weight_decay)
        self.descend(weights, gradient, memory, community)

    def descend(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        """A step along what is the gradient of the objective already."""
        if self.proximal_term:
            add_scaled(gradient, weights, self.proximal_term)
            add_scaled(gradient, community, -self.proximal_term)
        if memory is not None:
            memory *= self.momentum
            memory += gradient
        add_scaled(weights, gradient if memory is None else memory, -self.learning_rate)

    @property
    def facts(self) -> SolverFacts:
        return SolverFacts(self.momentum, self.learning_rate * self.proximal_term)

    def with_pull(self, proximal_term: float) -> Solver:
        return replace(self, proximal_term=self.proximal_term + proximal_term)

    def corrected(self, correction: Array) -> Corrected:
        """For one task: with c - c_k, a numpy vector as long as the weights."""
        return Corrected(self, correction)


class Corrected(Solver):
    """One task of SCAFFOLD: adds the correction to each gradient and remembers the mean of what came before it.

    That mean is the learner's next c_k. For plain SGD it is what the paper's option II works out from the weights,
    c_k - c + (w_c - w_k) / (K eta); taken from the gradients it is also right with momentum or a proximal term, where
    K eta is not the length of the delta, and no digits are lost where the learning rate is small.
    """

    def __init__(self, solver: Scaffold, correction: Array) -> None:
        self._solver, self._given = solver, correction
        self._correction = self._total = correction[:0]
        self._steps = 0

    def start(self, weights: Array) -> Array | None:
        if isinstance(weights, np.ndarray):
            self._correction, self._total = self._given.astype(weights.dtype), np.zeros_like(weights)
        else:
            self._correction = weights.new_tensor(self._given)
            # Sums of 16-bit numbers need more than 16 bits.
            self._total = zeros_like(weights if weights.element_size() > 2 else weights.float())
        return self._solver.start(weights)

    def step(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        if self._solver.weight_decay:
            add_scaled(gradient, weights, self._solver.weight_decay)
        self._total += gradient
        self._steps += 1
        gradient += self._correction
        self._solver.descend(weights, gradient, memory, community)

    def mean_gradient(self) -> Array:
        """Of the steps done, as a numpy vector."""
        mean = self._total / max(1, self._steps)
        return np.asarray(mean if isinstance(mean, np.ndarray) else mean.cpu().numpy(), np.float32)
