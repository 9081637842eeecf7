"""A model measured at each learner, on the learner's own test examples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metis.core.model import Model
from metis.errors import ConfigError
from metis.learning.engine import SomeExamples
from metis.runs.at_learners import AtLearners

if TYPE_CHECKING:
    from metis.experiments.federation import Federation


def at_learners(federation: Federation, model: Model) -> AtLearners:
    """What a model is worth to each learner that has test examples of its own."""
    test = federation.test
    if test is None or not federation.sites:
        raise ConfigError("no learner has test examples of its own; give each SimulatedLearner its test=indices")
    if getattr(federation.engine, "personal", False):
        raise ConfigError(
            "a community model is not whole without the local parts of a learner, which a run does not keep"
        )
    found = {name: federation.engine.evaluate(model, SomeExamples(test, own)) for name, own in federation.sites.items()}
    return AtLearners(found, federation.metric, federation.higher_is_better)
