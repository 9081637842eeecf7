"""A policy from its table: one by name, and the layers that the tables inside it put on top."""

from __future__ import annotations

from dataclasses import replace

from metis.core.policies import POLICIES
from metis.core.policy import Policy
from metis.core.solvers import SOLVERS, Solver
from metis.experiments.config.errors import ConfigErrors
from metis.experiments.config.schema import PolicyConfig, SolverConfig
from metis.experiments.config.tables import check_layer, make_layer, solver_settings
from metis.registry import parameters_of


def compose(table: PolicyConfig) -> Policy:
    """The policy that a table describes, without its solver; an ArgumentError names the impossible setting."""
    policy = POLICIES[table.name](**table.parameters)
    errors = ConfigErrors("policy")
    layers = [check_layer(key, given, errors, [key]) for key, given in table.layers.items()]
    errors.raise_if_any()
    return policy.with_layers(*(make_layer(*layer) for layer in layers if layer is not None))


def build_solver(settings: SolverConfig) -> Solver:
    """The local solver of a policy; its settings are complete once the configuration is loaded."""
    assert settings.solver is not None, "the configuration is complete"
    definition = SOLVERS.named(settings.solver)
    known = parameters_of(definition)
    general = {"learning_rate": settings.learning_rate, "weight_decay": settings.weight_decay}
    given = {name: value for name, value in general.items() if value is not None and name in known}
    own = {name: value for name, value in settings.parameters.items() if name in solver_settings(settings.solver)}
    return definition(**given, **own)


def build_policy(table: PolicyConfig) -> Policy:
    """The policy as its solver needs it, with the label that tables and figures call it by."""
    return policy_and_solver(table)[0]


def policy_and_solver(table: PolicyConfig) -> tuple[Policy, Solver]:
    """A policy and its local solver, as they need each other."""
    policy, solver = compose(table).for_solver(build_solver(table.training))
    return replace(policy, label=table.label or policy.label), solver
