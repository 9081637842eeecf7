"""The network of a finished run with its weights, and examples to try it on: what an export needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from metis.core.model import Model
from metis.errors import ConfigError
from metis.experiments.bridges import site_path
from metis.experiments.config.load import ExperimentConfig, load_config
from metis.experiments.setup import TrainingSetup, build_training_setup
from metis.experiments.site import load_site, optional_examples, settled, site_setup

if TYPE_CHECKING:
    from metis.learning import Engine, Examples

_FEW = 2  # examples that a network is tried on; one alone would become a constant


def run_config(folder: Path) -> ExperimentConfig | None:
    """The file that the run was made from; None for a run from Python."""
    file = folder / "config.toml"
    return load_config(file) if file.is_file() else None


def trained_network(config: ExperimentConfig, model: Model, site: Path | None) -> tuple[Any, Any]:
    """The network with the weights of this model, in evaluation, and the inputs of a few examples."""
    setup, examples = _setup(config, site)
    engine: Engine = setup.engine(config)
    load: Any = getattr(engine, "load", None)
    if load is None:
        raise ConfigError(f"engine = '{config.training.engine}' has no module to export; use --to huggingface")
    if engine.layout != model.layout.network:
        raise ConfigError("the network is not the one that was trained: its tensors have other names or shapes")
    if examples is None:
        raise ConfigError(
            "there are no examples to try the network on: give --site FILE with a test_data() or training_data(site)"
        )
    from metis.learning.torch.batches import split

    inputs, _ = split(examples.batch(np.arange(min(_FEW, len(examples)))))
    return load(model.network), inputs


def _setup(config: ExperimentConfig, site: Path | None) -> tuple[TrainingSetup, Examples | None]:
    if config.site is None and site is None:
        setup = build_training_setup(config)
        return setup, setup.test
    if site is None and config.site is not None and config.site.file is None:
        raise ConfigError(f"{config.site.title} keeps its network to itself; use --to huggingface, or give --site FILE")
    found = load_site(site or site_path(config))
    config = settled(config, found)
    names = [name for group in config.learners for name in group.learner_names]
    examples = optional_examples(found, "test_data")
    for data in ("evaluation_data", "training_data"):
        examples = examples or optional_examples(found, data, names[0])
    return replace(site_setup(config, found, train=None, test=None, assignments=())), examples
