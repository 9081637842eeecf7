"""What a user gives from Python, checked before anything is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metis.core.solvers import Solver
from metis.core.stop import StopRule, Target
from metis.errors import ArgumentError, ConfigError
from metis.learning.engine import Engine, Examples
from metis.simulation.speed import Speed


def check_whole(name: str, value: Any) -> None:
    """Refuse what is not a whole number, 0 or more."""
    if not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} must be a whole number, 0 or more, not {value!r}")


def check_solver(solver: Any) -> None:
    """Refuse what is not a solver; people also write the name of one, or what torch trains with."""
    if not isinstance(solver, Solver):
        raise ArgumentError(
            f"solver is {shown(solver)}; it must be a solver such as metis.AdamW(learning_rate=0.001), or "
            "metis.TorchOptimizer(torch.optim.AdamW, lr=0.001) for an optimizer of torch",
            "solver",
        )


def check_learners(learners: Any, kind: type) -> None:
    """Refuse what is not a list of learners of this `kind`, each with a speed."""
    if not isinstance(learners, Sequence) or not all(isinstance(one, kind) for one in learners):
        raise ArgumentError(
            f"learners is {shown(learners)}; it must be a list of metis.SimulatedLearner, each with the indices of the "
            "training examples that it holds",
            "learners",
        )
    if not learners:
        raise ConfigError("a federation needs at least one learner")
    for one in learners:
        if not isinstance(one.speed, Speed):
            raise ArgumentError(
                f"the speed of learner '{one.name}' is {shown(one.speed)}; it must be a metis.Speed, such as "
                "metis.Speed(0.03) for 0.03 seconds a batch",
                "speed",
            )


def check_target(target: Target, engine: Engine, test: Examples | None) -> None:
    """Refuse one that nothing is measured for, and a percentage where the metric is a share."""
    if test is None:
        raise ConfigError("a target needs held-out examples to be measured on: give test=...")
    if target.metric in getattr(engine, "shares", ()) and not 0 < target.value <= 1:
        raise ArgumentError(f"target is {target.value:g}, but {target.metric} lies between 0 and 1", "target")


def stop_rule(stop: StopRule | None, by_name: StopRule) -> StopRule:
    """The one that was given; a run needs one."""
    if stop is not None and by_name != StopRule():
        raise ConfigError("give either a StopRule or rounds, seconds, update_requests, steps by name, not both")
    if (stop or by_name) == StopRule():
        raise ConfigError("a run needs an end: give rounds, seconds, update_requests, steps or a StopRule")
    return stop or by_name


def shown(value: Any) -> str:
    """A wrong value in a sentence: its own words where they are short, else what it is."""
    words = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
    return words if len(words) <= 60 and "\n" not in words else f"of the type {type(value).__name__}"
