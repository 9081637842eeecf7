"""Solvers that only some engines take: `own`, the rule of a site's own library, and `optax`, of the engine 'jax'."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from metis.core.solvers import Array, KeepState, LearningRate, Solver, SolverFacts
from metis.errors import ArgumentError, ConfigError
from metis.registry import Setting, check_settings


@dataclass(frozen=True)
class Own(Solver):
    """The rule of an estimator of scikit-learn, or of the client of another system, as the site has set it up."""

    keep_state: KeepState = False

    title = "Own"

    @property
    def keeps_memory(self) -> bool:
        return self.keep_state

    def step(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        raise ConfigError("solver = 'own' is for engines that train by a rule of their own; choose another solver")

    @property
    def facts(self) -> SolverFacts:
        return SolverFacts(adaptive="the site's own rule")

    def with_rate(self, factor: float) -> Solver:
        raise ConfigError("the site's own rule has a learning rate of its own, which no schedule can change")

    def with_pull(self, proximal_term: float) -> Solver:
        raise ConfigError("the site's own rule takes no pull toward the community model; leave proximal out")


def check_own(engine: str, solver: Solver) -> None:
    """Refuse a solver that an engine with a rule of its own would ignore."""
    if not isinstance(solver, Own):
        raise ConfigError(
            f"the engine '{engine}' trains by a rule of its own and would ignore {type(solver).__name__}; "
            "write: solver = 'own'"
        )


@dataclass(frozen=True)
class Optax(Solver):
    """`Optax("lion", learning_rate=0.0003, options={"weight_decay": 0.1})`: any optimizer of optax."""

    optimizer: Annotated[str, Setting("function of optax that makes the optimizer")] = "adam"
    learning_rate: LearningRate = 0.001
    options: Annotated[dict[str, Any], Setting("its other arguments")] = field(default_factory=dict)
    keep_state: KeepState = False
    proximal_term: Annotated[float, Setting("mu; what FedAsync asks for", ge=0, in_files=False)] = 0.0

    title = "Optax"

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def keeps_memory(self) -> bool:
        return self.keep_state

    def transformation(self) -> Any:
        """What optax makes of these settings."""
        import optax

        make = getattr(optax, self.optimizer, None)
        if not callable(make):
            raise ArgumentError(f"optax has no optimizer '{self.optimizer}'", "optimizer")
        try:
            made = make(learning_rate=self.learning_rate, **self.options)
        except (TypeError, ValueError) as problem:
            raise ArgumentError(f"optax.{self.optimizer} refuses its options: {problem}", "options") from problem
        if not isinstance(made, optax.GradientTransformation):
            raise ArgumentError(f"optax.{self.optimizer} does not make an optimizer", "optimizer")
        return made

    def step(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        raise ConfigError("solver = 'optax' needs engine = 'jax'")

    @property
    def facts(self) -> SolverFacts:
        return SolverFacts(adaptive=f"optax.{self.optimizer}")

    def with_pull(self, proximal_term: float) -> Solver:
        return replace(self, proximal_term=self.proximal_term + proximal_term)
