"""A policy from its table: one by name, and the layers that the tables inside it put on top."""

from __future__ import annotations

from dataclasses import replace

from metis.core.policies import POLICIES
from metis.core.policy import Policy
from metis.core.solvers import Solver
from metis.errors import ConfigError, DefinitionError
from metis.experiments.config.schema import PolicyConfig, SolverConfig
from metis.experiments.config.tables import build_layer
from metis.learning.engine import SOLVERS
from metis.registry import parameters_of


def named(table: PolicyConfig) -> Policy:
    """The policy that a table names, without its layers; an ArgumentError names the impossible setting."""
    policy = POLICIES[table.name](**table.parameters)
    if not isinstance(policy, Policy):
        raise DefinitionError(f"the function of the policy '{table.name}' returned {policy!r}; it must return a Policy")
    return policy


def compose(table: PolicyConfig) -> Policy:
    """The policy that a table describes, without its solver; an ArgumentError names the impossible setting."""
    return named(table).with_layers(*(build_layer(key, given) for key, given in table.layers.items()))


def build_solver(settings: SolverConfig) -> Solver:
    """The local solver of a policy; its settings are complete once the configuration is loaded."""
    assert settings.solver is not None, "the configuration is complete"
    general = {"learning_rate": settings.learning_rate, "weight_decay": settings.weight_decay}
    definition = SOLVERS.named(settings.solver)
    known = parameters_of(definition)
    if settings.weight_decay and "weight_decay" not in known:
        raise ConfigError(f"weight_decay is given, but solver = '{settings.solver}' does not use it")
    given = {name: value for name, value in general.items() if value is not None and name in known}
    return definition(**given, **settings.parameters)


def build_policy(table: PolicyConfig) -> Policy:
    """The policy, as its solver needs it if one is named, with the label that tables and figures call it by."""
    if table.training.solver is not None:
        return policy_and_solver(table)[0]
    policy = compose(table)
    return replace(policy, label=table.label or policy.label)


def policy_and_solver(table: PolicyConfig) -> tuple[Policy, Solver]:
    """A policy and its local solver, as they need each other."""
    policy, solver = compose(table).for_solver(build_solver(table.training))
    return replace(policy, label=table.label or policy.label), solver
