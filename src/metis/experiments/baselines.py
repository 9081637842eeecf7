"""What a federation is measured against: all data in one place, or a learner without the others."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from metis.core.policies import sync_fedavg
from metis.core.policy import Policy
from metis.errors import ConfigError

if TYPE_CHECKING:
    from metis.experiments.federation import Federation


@dataclass(frozen=True)
class Baseline:
    """A policy of one learner, and who that is: the one with this name, or somebody who holds everything."""

    policy: Policy
    learner: str | None

    @property
    def label(self) -> str:
        return self.policy.label

    def of(self, federation: Federation) -> Federation:
        """The federation of this one learner; same network, start, solver, seed and test examples."""
        fastest = min(federation.learners, key=lambda learner: learner.speed.time_per_batch)
        if self.learner is None:
            indices = np.sort(np.concatenate([learner.indices for learner in federation.learners]))
            only = replace(fastest, name="everybody", indices=indices)
        else:
            found = [learner for learner in federation.learners if learner.name == self.learner]
            if not found:
                names = ", ".join(learner.name for learner in federation.learners)
                raise ConfigError(f"there is no learner '{self.learner}' to train alone; the learners are {names}")
            only = found[0]
        other = copy.copy(federation)
        other.learners = (only,)
        if federation.class_counts is not None:
            rows = [index for index, own in enumerate(federation.learners) if self.learner in (None, own.name)]
            other.class_counts = federation.class_counts[rows].sum(axis=0, keepdims=True)
        return other


def centralized(local_epochs: float = 1.0) -> Baseline:
    """All data in one place, on the fastest machine; evaluated after every `local_epochs`."""
    return Baseline(replace(sync_fedavg(local_epochs), label="Centralized"), None)


def alone(learner: str, local_epochs: float = 1.0) -> Baseline:
    """One learner without the others; evaluated after every `local_epochs`."""
    return Baseline(replace(sync_fedavg(local_epochs), label=f"Alone ({learner})"), learner)
