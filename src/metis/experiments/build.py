"""A federation from a file."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from metis import __version__
from metis.core.policy import Policy
from metis.core.stop import StopRule, Target
from metis.errors import ConfigError
from metis.experiments.compose import build_policy, build_solver
from metis.experiments.config.load import METRICS, ExperimentConfig, task_of
from metis.experiments.data import Division
from metis.experiments.learners import (
    build_availability,
    build_faults,
    build_link,
    build_poison,
    build_power,
    build_speed,
)
from metis.experiments.private import build_privacy
from metis.experiments.setup import TrainingSetup, build_training_setup

if TYPE_CHECKING:
    from metis.core.solvers import Solver
    from metis.experiments.federation import Federation


def build_federation(
    config: ExperimentConfig,
    *,
    source: str = "",
    division: Division | None = None,
    solver: Solver | None = None,
    overridden: Sequence[str] = (),
) -> Federation:
    """The federation that the file describes; the solver is that of its first policy unless one is given.

    `overridden` are the keys that came by --set, which is then blamed for a fault in them.
    """
    from metis.experiments.federation import Federation, SimulatedLearner

    if config.site is None:
        setup = build_training_setup(config, source=source, division=division, overridden=overridden)
    else:
        from metis.experiments.bridges import site_path
        from metis.experiments.site import load_site, rehearsal

        setup = rehearsal(config, load_site(site_path(config)))
    training = config.training
    for policy in config.policy:
        wanted = policy.layers.get("sample", {}).get("learners") or 0
        if wanted > len(setup.assignments):
            raise ConfigError(
                f"{source or 'policy'}: sample.learners of {policy.name} is {wanted}, "
                f"but there are {len(setup.assignments)} learners"
            )
    learners = [
        SimulatedLearner(
            name=assignment.name,
            indices=assignment.indices,
            batch_size=assignment.group.batch_size,
            speed=build_speed(assignment.group, assignment.name),
            availability=build_availability(assignment.group, assignment.name),
            link=build_link(assignment.group),
            power=build_power(assignment.group),
            test=assignment.test,
            privacy=build_privacy(assignment.group),
            poison=build_poison(assignment.group),
        )
        for assignment in setup.assignments
    ]
    return Federation(
        engine=setup.engine(config),
        train=setup.train,
        test=setup.test,
        validation=setup.validation,
        learners=learners,
        solver=solver if solver is not None else build_solver(config.policy[0].training),
        task=setup.task,
        metric=setup.metric,
        higher_is_better=setup.higher_is_better,
        augment=setup.augment,
        threads=training.threads,
        seed=config.seed,
        class_counts=setup.class_counts,
        class_names=setup.class_names,
        facts=_facts(config, setup),
        initial_model=training.initial_model,
        faults=build_faults(config.faults),
    )


def build_policies(config: ExperimentConfig) -> list[tuple[Policy, Solver]]:
    """Every policy of the file with its own solver."""
    return [(build_policy(policy), build_solver(policy.training)) for policy in config.policy]


def build_stop(config: ExperimentConfig) -> StopRule:
    """When the run ends; patience is for the federation, which knows what it measures."""
    stop, evaluation = config.stop, config.evaluation
    target = None
    if stop.at_target and evaluation.target is not None and evaluation.metric is not None:
        higher = evaluation.higher_is_better
        if higher is None:
            higher = METRICS[task_of(config)].get(evaluation.metric, True)
        target = Target(evaluation.metric, evaluation.target, higher)
    return StopRule(stop.rounds, stop.seconds, stop.update_requests, target, stop.steps)


def _facts(config: ExperimentConfig, setup: TrainingSetup) -> dict[str, Any]:
    """What a reader of a report wants to know about the setting."""
    solvers = {policy.training.solver: policy.training for policy in config.policy}
    shared = next(iter(solvers.values())).model_dump(exclude_none=True) if len(solvers) == 1 else {}
    return {
        **setup.facts,
        **shared,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of Metis and of what its results depend on, here and now."""
    return {
        "metis": __version__,
        "Python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("numpy", "torch")},
    }
