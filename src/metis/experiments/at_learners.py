"""What a run needs to know of its learners, and a model measured at each, on the learner's own test examples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from metis.core.events import LearnerId
from metis.core.model import Model
from metis.core.policy import Policy
from metis.core.stop import Target
from metis.errors import ConfigError
from metis.experiments.start import name_of
from metis.learning.engine import SomeExamples
from metis.runs.at_learners import AtLearners
from metis.runs.setting import LearnerInfo, Setting
from metis.runs.storage import initial_fact

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


def own_tests(federation: Federation) -> dict[LearnerId, NDArray[np.int64]]:
    """Which test examples are whose, of the learners that have any of their own."""
    if federation.own_sites is not None:
        return federation.own_sites
    own = {one.name: np.asarray(one.test, np.int64) for one in federation.learners if one.test is not None}
    return {name: test for name, test in own.items() if len(test)}


def setting_of(federation: Federation, policy: Policy, target: Target | None, travels: Model) -> Setting:
    """What folds the events of a run into a result; `travels` is a model as it is sent."""
    start = federation._start
    learners = [
        LearnerInfo(
            setup.name,
            len(setup.indices),
            setup.batch_size,
            setup.speed.time_per_batch,
            setup.power,
            () if federation.class_counts is None else tuple(int(n) for n in federation.class_counts[index]),
        )
        for index, setup in enumerate(federation.learners)
    ]
    protected = {
        setup.name: {
            "noise": setup.privacy.noise,
            "budget": setup.privacy.budget,
            "delta": setup.privacy.delta,
            "batch_size": setup.batch_size,
            "examples": len(setup.indices),
        }
        for setup in federation.learners
        if setup.privacy is not None
    }
    return Setting.of(
        policy,
        travels,
        learners,
        seed=federation.seed,
        metric=federation.metric,
        higher_is_better=federation.higher_is_better,
        target=target,
        class_names=federation.class_names,
        facts=federation.facts
        | ({"privacy": protected} if protected else {})
        | ({} if start is None else initial_fact(name_of(start), travels)),
    )
