"""What the training process of one learner, or of the controller, works with in a deployment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from metis.core.layers.ckks import envelope
from metis.core.model import Layout, Model
from metis.core.policy import Policy
from metis.errors import ConfigError
from metis.experiments.bridges import site_path
from metis.experiments.compose import policy_and_solver
from metis.experiments.config.load import METRICS, ExperimentConfig, LearnerGroup, did_you_mean, resolve_config
from metis.experiments.private import build_privacy
from metis.experiments.setup import TrainingSetup, build_training_setup
from metis.experiments.site import (
    load_site,
    optional_examples,
    settled,
    site_examples,
    site_setup,
    with_batches_of,
)
from metis.privacy.encrypted import enveloped

if TYPE_CHECKING:
    from metis.learning import Engine, Examples, Learner


@dataclass(frozen=True)
class TrainingSilo:
    """An engine, the policy, and a learner with its data; the controller's has no learner."""

    engine: Engine
    policy: Policy
    learner: Learner | None
    evaluation: Examples | None
    validation: Examples | None  # of the controller, to choose the best model by
    metric: str
    higher_is_better: bool
    seed: int

    @property
    def layout(self) -> Layout:
        """Of every model that travels."""
        layout = self.policy.extend_layout(self.engine.layout, _trainable(self.engine))
        return layout if self.policy.ckks is None else envelope(layout)

    def initial_model(self, seed: int) -> Model:
        """Where the federation starts from, as it travels."""
        model = self.policy.extend_model(self.engine.initial_model(seed), _trainable(self.engine))
        return model if self.policy.ckks is None else enveloped(model)


def _trainable(engine: Engine) -> int:
    from metis.learning.engine import trainable_of

    return trainable_of(engine)


def read_settings(settings: Any) -> tuple[ExperimentConfig, int]:
    """The experiment and the index of its policy in the settings that the controller sent, all checked."""
    source = "the controller's settings"
    if not isinstance(settings, Mapping) or settings.keys() - {"frozen"} != {"experiment", "policy"}:
        raise ConfigError(f"{source} are not valid: they must have the keys experiment and policy")
    experiment, policy = settings["experiment"], settings["policy"]
    if not isinstance(experiment, Mapping):
        raise ConfigError(f"{source} are not valid: experiment must be a table")
    try:
        config = resolve_config(experiment, source, elsewhere=True)
    except ConfigError as problem:
        raise ConfigError("; ".join(str(problem).splitlines())) from None
    if type(policy) is not int or not 0 <= policy < len(config.policy):
        raise ConfigError(f"{source} are not valid: policy is {policy!r}, but there are {len(config.policy)} policies")
    # Paths and processors of this machine count: the data set is in the folder where this machine keeps it.
    data = config.data.model_copy(update={"folder": None})
    threads = min(config.training.threads, os.cpu_count() or 1)
    training = config.training.model_copy(update={"threads": threads})
    return config.model_copy(update={"data": data, "training": training}), policy


def build_silo(
    settings: Mapping[str, Any], site_file: Path | None, name: str, index: int, device: str | None = None
) -> TrainingSilo:
    """The silo of this learner, from the settings that the controller sent."""
    config, policy = read_settings(settings)
    return learner_silo(config, policy, site_file, name, index, device)


def learner_silo(
    config: ExperimentConfig, policy: int, site_file: Path | None, name: str, index: int, device: str | None = None
) -> TrainingSilo:
    """What the learner of this name trains with: its own site file, or its share of the built-in data set."""
    from metis.learning import Learner
    from metis.learning.engine import SomeExamples

    evaluation: Examples | None = None
    if site_file is None:
        _refuse_without_site(config)
        setup = build_training_setup(config)
        assignments = {assignment.name: assignment for assignment in setup.assignments}
        if name not in assignments:
            raise ConfigError(f"the experiment has no learner '{name}'; {did_you_mean(name, assignments)}")
        group, examples, indices = assignments[name].group, setup.train, assignments[name].indices
        own = assignments[name].test
        if own is not None and len(own) and setup.test is not None:
            evaluation = SomeExamples(setup.test, own)
    else:
        site = load_site(site_path(config, site_file))
        config = settled(config, site)
        group = _group_of(config, name)
        examples = site_examples(site.path, "training_data", name)
        group = with_batches_of(group, examples)
        indices = np.arange(len(examples), dtype=np.int64)
        evaluation = optional_examples(site, "evaluation_data", name)
        setup = site_setup(config, site, train=examples, test=None, assignments=())
    chosen, solver = policy_and_solver(config.policy[policy])
    learner = Learner(
        name,
        index,
        examples,
        indices,
        group.batch_size,
        solver,
        config.seed,
        setup.augment,
        layers=chosen.learner_layers,
        privacy=build_privacy(group),
    )
    return _silo(config, setup, chosen, learner, evaluation, None, device)


def build_controller_side(
    settings: Mapping[str, Any], site_file: Path | None, device: str | None = None
) -> TrainingSilo:
    """What the controller makes the initial model with and, if it has held-out data, evaluates models on."""
    config, policy = read_settings(settings)
    if site_file is None:
        _refuse_without_site(config)
        setup = build_training_setup(config)
    else:
        site = load_site(site_path(config, site_file))
        config = settled(config, site)
        held = {name: optional_examples(site, f"{name}_data") for name in ("test", "validation")}
        setup = site_setup(config, site, train=None, assignments=(), **held)
    chosen, _ = policy_and_solver(config.policy[policy])
    if setup.test is None:  # whatever is held out is what models are measured on
        setup = replace(setup, test=setup.validation, validation=None)
    return _silo(config, setup, chosen, None, setup.test, setup.validation, device)


def _silo(
    config: ExperimentConfig,
    setup: TrainingSetup,
    policy: Policy,
    learner: Learner | None,
    evaluation: Examples | None,
    validation: Examples | None,
    device: str | None,
) -> TrainingSilo:
    metric, higher = config.evaluation.metric, config.evaluation.higher_is_better
    assert metric is not None, "the configuration is complete"
    if higher is None:
        higher = METRICS[setup.task].get(metric, True)
    from metis.learning.engine import seeded

    engine = seeded(setup.engine(config, device), config.seed)
    if learner is not None and hasattr(engine, "check_solver"):
        engine.check_solver(learner.solver)
    return TrainingSilo(engine, policy, learner, evaluation, validation, metric, higher, config.seed)


def _refuse_without_site(config: ExperimentConfig) -> None:
    if config.site is not None:
        raise ConfigError("the sites of this federation have their own network and data: give --site FILE")


def _group_of(config: ExperimentConfig, name: str) -> LearnerGroup:
    """The group of [[learners]] that this learner belongs to; a single group takes every name."""
    for group in config.learners:
        if name in group.learner_names or len(config.learners) == 1:
            return group
    names = [name for group in config.learners for name in group.learner_names]
    raise ConfigError(f"the experiment has no learner '{name}'; {did_you_mean(name, names)}")
