"""Local solvers: how one gradient changes the weights (Sec. 3.2 of the paper).

Every rule works in place on one flat vector of trainable parameters, a torch tensor or a numpy array alike.
A step may use `gradient` as scratch space; it must not write to `community`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from metis.errors import ConfigError

Array: TypeAlias = Any  # torch.Tensor or numpy.ndarray: this module knows neither the device nor the library


class Solver(Protocol):
    """An update rule; frozen, so that all learners may share one."""

    @property
    def keeps_memory(self) -> bool:
        """Whether the memory outlives a task (R5)."""

    def start(self, weights: Array) -> Array | None:
        """The memory at the start of a task, of the shape of the weights; None if the rule needs none."""

    def step(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        """Change the weights, and the memory, in place; `community` is what the task started from."""


def _add_scaled(target: Array, source: Array, factor: float) -> None:
    """target += factor * source; torch does it in one pass, without a temporary of the size of the model."""
    if isinstance(target, np.ndarray):
        target += factor * source
    else:
        target.add_(source, alpha=factor)


def _zeros_like(weights: Array) -> Array:
    return np.zeros_like(weights) if isinstance(weights, np.ndarray) else weights.new_zeros(weights.shape)


def _check(solver: str, name: str, value: float, *, above: float | None = None, below: float = math.inf) -> None:
    fits = math.isfinite(value) and value < below and (value > above if above is not None else value >= 0)
    if not fits:
        least = f"above {above:g}" if above is not None else "at least 0"
        most = f" and below {below:g}" if math.isfinite(below) else ""
        raise ConfigError(f"{name} of {solver} is {value}; it must be {least}{most}")


@dataclass(frozen=True)
class VanillaSGD:
    """w -= eta grad."""

    learning_rate: float
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check("VanillaSGD", "learning_rate", self.learning_rate, above=0)
        _check("VanillaSGD", "weight_decay", self.weight_decay)

    @property
    def keeps_memory(self) -> bool:
        return False

    def start(self, weights: Array) -> Array | None:
        return None

    def step(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        if self.weight_decay:
            _add_scaled(gradient, weights, self.weight_decay)
        _add_scaled(weights, gradient, -self.learning_rate)


@dataclass(frozen=True)
class MomentumSGD:
    """u = gamma u + grad; w -= eta u (Eq. 3, R6); u starts at zero in each task unless it is kept (R5)."""

    learning_rate: float
    momentum: float
    keep_momentum: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check("MomentumSGD", "learning_rate", self.learning_rate, above=0)
        _check("MomentumSGD", "momentum", self.momentum, below=1)
        _check("MomentumSGD", "weight_decay", self.weight_decay)

    @property
    def keeps_memory(self) -> bool:
        return self.keep_momentum

    def start(self, weights: Array) -> Array | None:
        return _zeros_like(weights)

    def step(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        assert memory is not None, "start() made it"
        if self.weight_decay:
            _add_scaled(gradient, weights, self.weight_decay)
        memory *= self.momentum
        memory += gradient
        _add_scaled(weights, memory, -self.learning_rate)


@dataclass(frozen=True)
class FedProx:
    """w -= eta grad + eta mu (w - w_c); with momentum, the whole bracket enters the memory."""

    learning_rate: float
    proximal_term: float  # mu
    momentum: float = 0.0
    keep_momentum: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check("FedProx", "learning_rate", self.learning_rate, above=0)
        _check("FedProx", "proximal_term", self.proximal_term)
        _check("FedProx", "momentum", self.momentum, below=1)
        _check("FedProx", "weight_decay", self.weight_decay)

    @property
    def keeps_memory(self) -> bool:
        return self.keep_momentum and self.momentum > 0

    def start(self, weights: Array) -> Array | None:
        return _zeros_like(weights) if self.momentum else None

    def step(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        _add_scaled(gradient, weights, self.proximal_term + self.weight_decay)
        _add_scaled(gradient, community, -self.proximal_term)
        if memory is None:
            _add_scaled(weights, gradient, -self.learning_rate)
        else:
            memory *= self.momentum
            memory += gradient
            _add_scaled(weights, memory, -self.learning_rate)


@dataclass(frozen=True)
class Scaffold:
    """w -= eta (grad + c - c_k), with a momentum that starts anew in each task if there is one.

    c is the server's control variate, c_k the learner's; both are zero until `corrected` says otherwise.
    """

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal_term: float = 0.0  # mu; what FedAsync asks for

    def __post_init__(self) -> None:
        _check("Scaffold", "learning_rate", self.learning_rate, above=0)
        _check("Scaffold", "momentum", self.momentum, below=1)
        _check("Scaffold", "weight_decay", self.weight_decay)
        _check("Scaffold", "proximal_term", self.proximal_term)

    @property
    def keeps_memory(self) -> bool:
        return False

    def start(self, weights: Array) -> Array | None:
        return _zeros_like(weights) if self.momentum else None

    def step(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        if self.weight_decay:
            _add_scaled(gradient, weights, self.weight_decay)
        self.descend(weights, gradient, memory, community)

    def descend(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        """A step along what is the gradient of the objective already."""
        if self.proximal_term:
            _add_scaled(gradient, weights, self.proximal_term)
            _add_scaled(gradient, community, -self.proximal_term)
        if memory is not None:
            memory *= self.momentum
            memory += gradient
        _add_scaled(weights, gradient if memory is None else memory, -self.learning_rate)

    def corrected(self, correction: Array) -> Corrected:
        """For one task: with c - c_k, a numpy vector as long as the weights."""
        return Corrected(self, correction)


class Corrected:
    """One task of SCAFFOLD: adds the correction to each gradient and remembers the mean of what came before it.

    That mean is the learner's next c_k. For plain SGD it is what the paper's option II works out from the weights,
    c_k - c + (w_c - w_k) / (K eta); taken from the gradients it is also right with momentum or a proximal term, where
    K eta is not the length of the way, and no digits are lost where the learning rate is small.
    """

    keeps_memory = False

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
            self._total = _zeros_like(weights if weights.element_size() > 2 else weights.float())
        return self._solver.start(weights)

    def step(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        if self._solver.weight_decay:
            _add_scaled(gradient, weights, self._solver.weight_decay)
        self._total += gradient
        self._steps += 1
        gradient += self._correction
        self._solver.descend(weights, gradient, memory, community)

    def mean_gradient(self) -> Array:
        """Of the steps done, as a numpy vector."""
        mean = self._total / max(1, self._steps)
        return np.asarray(mean if isinstance(mean, np.ndarray) else mean.cpu().numpy(), np.float32)


def accumulation(solver: Solver) -> tuple[float, float]:
    """How a task's steps add up, for normalised averaging: the momentum that starts anew, and eta * mu."""
    match solver:
        case MomentumSGD():
            # Momentum that is kept is in full swing from the first step: the way is as long as the steps are many.
            return (0.0 if solver.keep_momentum else solver.momentum), 0.0
        case FedProx():
            momentum = 0.0 if solver.keep_momentum else solver.momentum
            return momentum, solver.learning_rate * solver.proximal_term
        case Scaffold():
            return solver.momentum, solver.learning_rate * solver.proximal_term
        case _:
            return 0.0, 0.0


def with_rate(solver: Solver, factor: float) -> Solver:
    """The same solver with its learning rate times this, as a task may ask."""
    match solver:
        case VanillaSGD() | MomentumSGD() | FedProx() | Scaffold():
            return replace(solver, learning_rate=factor * solver.learning_rate)
        case _:
            raise ConfigError(
                f"{type(solver).__name__} cannot be given another learning rate; "
                "use vanilla, momentum, fedprox or scaffold"
            )


def with_proximal_term(solver: Solver, proximal_term: float) -> Solver:
    """The same solver, held toward the received community model as FedAsync asks (R14)."""
    match solver:
        case VanillaSGD():
            return FedProx(solver.learning_rate, proximal_term, weight_decay=solver.weight_decay)
        case MomentumSGD():
            return FedProx(
                solver.learning_rate, proximal_term, solver.momentum, solver.keep_momentum, solver.weight_decay
            )
        case FedProx() | Scaffold():
            return replace(solver, proximal_term=solver.proximal_term + proximal_term)
        case _:
            raise ConfigError(
                f"{type(solver).__name__} cannot be given a proximal term; use vanilla, momentum, fedprox or scaffold"
            )
