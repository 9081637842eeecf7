"""A policy from its table: one of the paper's by name, and what the tables inside it put on top."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from metis.core.compression import Compression
from metis.core.nova import FedNova
from metis.core.pacing import AdaptivePeriod
from metis.core.policies import Policy
from metis.core.sampling import Sample
from metis.core.schedules import Schedule
from metis.core.server import FedAdagrad, FedAdam, FedAvgM, FedYogi, ServerOptimizer
from metis.experiments.config.schema import POLICIES, PolicyConfig, ScheduleConfig, ServerConfig, SolverConfig

SERVER_OPTIMIZERS: dict[str, Callable[..., ServerOptimizer]] = {
    "momentum": FedAvgM,
    "adagrad": FedAdagrad,
    "adam": FedAdam,
    "yogi": FedYogi,
}


def compose(table: PolicyConfig) -> Policy:
    """The policy that a table describes; a ValueError says which setting is impossible."""
    policy = POLICIES[table.name](**table.parameters)
    if table.schedule is not None:
        policy = policy.with_lambda(schedule_of(table.schedule))
    if table.adaptive is not None:
        policy = policy.with_adaptive_period(AdaptivePeriod(**table.adaptive.model_dump()))
    if table.sample is not None:
        policy = policy.with_sample(Sample(**table.sample.model_dump()))
    if table.nova is not None:
        policy = policy.with_nova(FedNova(table.nova.largest_amplification))
    if table.server is not None:
        rate = table.server.rate
        policy = policy.with_server(server_optimizer(table.server), None if rate is None else schedule_of(rate))
    if table.rate is not None:
        policy = policy.with_rate(schedule_of(table.rate))
    if table.compression is not None:
        policy = policy.with_compression(Compression(**table.compression.model_dump()))
    return policy.for_solver(*_accumulation(table.training), controls=table.training.solver == "scaffold")


def _accumulation(solver: SolverConfig) -> tuple[float, float]:
    """What `metis.learning.accumulation` says of this solver, without loading torch."""
    momentum = 0.0 if solver.keep_momentum else solver.momentum or 0.0
    return momentum, (solver.learning_rate or 0.0) * (solver.proximal_term or 0.0)


def schedule_of(table: ScheduleConfig) -> Schedule:
    """A schedule from its table."""
    return Schedule(**table.model_dump())


def server_optimizer(table: ServerConfig) -> ServerOptimizer:
    """The optimizer of a table [policy.server]."""
    given = table.model_dump(exclude_none=True, exclude={"optimizer", "rate"})
    return SERVER_OPTIMIZERS[table.optimizer](**given)


def server_settings(optimizer: str) -> set[str]:
    """The keys that an optimizer takes."""
    return {item.name for item in fields(SERVER_OPTIMIZERS[optimizer])}  # type: ignore[arg-type]


def completed_server(table: ServerConfig) -> ServerConfig:
    """With every default written out."""
    settings: dict[str, Any] = asdict(server_optimizer(table))  # type: ignore[call-overload]
    return ServerConfig(optimizer=table.optimizer, rate=table.rate, **settings)
