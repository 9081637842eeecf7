"""What a federation is measured against: all data in one place, or a learner without the others."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from metis.core.policy import Baseline
from metis.errors import ConfigError

if TYPE_CHECKING:
    from metis.experiments.federation import Federation, SimulatedLearner


def federation_of_one(federation: Federation, baseline: Baseline) -> Federation:
    """The federation of the one learner that trains; same network, start, solver, seed and test examples."""
    other = copy.copy(federation)
    if baseline.pooled:
        fastest = min(federation.learners, key=lambda learner: learner.speed.time_per_batch)
        indices = np.sort(np.concatenate([learner.indices for learner in federation.learners]))
        only = replace(fastest, name="everybody", indices=indices, test=None)
    else:
        only = _learner(federation, baseline.learner)
    other.learners, other.own_sites = (only,), federation.sites
    if federation.class_counts is not None:
        rows = [index for index, own in enumerate(federation.learners) if baseline.pooled or own is only]
        other.class_counts = federation.class_counts[rows].sum(axis=0, keepdims=True)
    return other


def _learner(federation: Federation, name: str | None) -> SimulatedLearner:
    if name is None:
        return max(federation.learners, key=lambda learner: len(learner.indices))
    found = [learner for learner in federation.learners if learner.name == name]
    if not found:
        names = ", ".join(learner.name for learner in federation.learners)
        raise ConfigError(f"there is no learner '{name}' to train alone; the learners are {names}")
    return found[0]
