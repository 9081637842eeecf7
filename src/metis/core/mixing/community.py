"""The interface of a mixing: it takes committed local models and publishes the community model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import quotient
from metis.core.contribution import capped
from metis.core.events import CommunityStamp, LearnerId, RoundMeasure
from metis.core.mixing.store import ModelStore
from metis.core.model import Model


class Community(Protocol):
    """Takes committed local models and publishes the community model."""

    model: Model  # as last published

    @property
    def stamp(self) -> CommunityStamp:
        """Of `model`."""
        ...

    @property
    def committed_steps(self) -> int:
        """s_c: all local steps committed so far (R7)."""
        ...

    @property
    def uses_base(self) -> bool:
        """Does `commit` need the community model that the learner started from?"""
        ...

    @property
    def averages_rounds(self) -> bool:
        """Is what is published the weighted average of the models of one round?"""
        ...

    @property
    def measure(self) -> RoundMeasure | None:
        """What was measured of the last round, if anything measures rounds."""
        ...

    @property
    def contributors(self) -> int:
        """How many learners' models the next publication would hold."""
        ...

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        """Take a valid local model; learners do not see it before `publish`.

        `base` is the community model that it started from, if `uses_base`; `examples` the size of the learner's data.
        """
        ...

    def withdraw(self, learner: LearnerId) -> None:
        """Remove the learner's contribution, as far as the rule remembers it."""
        ...

    def publish(self, seconds: float = 0.0) -> bool:
        """Make and stamp a new community model, `seconds` into the run; False if there is nothing new to publish."""
        ...

    def adopt(self, model: Model) -> None:
        """Go on from this model instead of the one just published, under the same stamp."""
        ...

    def limit_shares(self, largest: float) -> None:
        """Let no learner count for more than this share of a mixture; asked before the first commit."""
        ...

    def continue_from(self, stamp: CommunityStamp) -> None:
        """Count on from this stamp, which its model has from now on; asked before the first commit."""
        ...

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        """The numbers that a replay of events cannot bring back: for checkpoints.

        `local_models` can be left out, named "local/...", where the store itself keeps them.
        """
        ...

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        """Put back the published model and what `arrays` gave, after a replay of the same events without weights."""
        ...


# How the mixing of a run starts: a class of communities, or a function that makes one.
Mixing: TypeAlias = Callable[[Model, ModelStore], Community]


def averages_rounds(mixing: Mixing) -> bool:
    """Whether the communities that this makes publish weighted averages of rounds, which a layer may then replace."""
    return bool(getattr(getattr(mixing, "func", mixing), "averages_rounds", False))


def weighs_learners(mixing: Mixing) -> bool:
    """Whether the communities that this makes keep the weight of each learner's model until they mix."""
    return bool(getattr(getattr(mixing, "func", mixing), "weighs_learners", False))


def mixes_cohorts(mixing: Mixing) -> bool:
    """Whether the communities that this makes mix several local models at a time."""
    return bool(getattr(getattr(mixing, "func", mixing), "mixes_cohorts", False))


class Published:
    """What every mixing rule has: a published model, its stamp, and the step counter."""

    uses_base = False
    averages_rounds = False
    weighs_learners = False
    mixes_cohorts = False
    largest_share = 1.0  # of one learner, where `weighs_learners`
    measure: RoundMeasure | None = None

    def __init__(self, initial_model: Model) -> None:
        self.model = initial_model
        self.stamp = CommunityStamp()
        self.committed_steps = 0

    def _stamp_new(self, vector: NDArray[np.float32] | NDArray[np.float64]) -> None:
        exact = vector.dtype == np.float32
        rounded = vector.astype(np.float32, copy=False) if exact else quotient(vector.astype(np.float64, copy=False), 1)
        self.model = self.model.with_vector(rounded)
        self.stamp = CommunityStamp(self.stamp.version + 1, self.committed_steps)

    def adopt(self, model: Model) -> None:
        self.model = model

    def limit_shares(self, largest: float) -> None:
        self.largest_share = largest

    def weights(self, values: Mapping[LearnerId, float]) -> Mapping[LearnerId, float]:
        """What the models of these contribution values count for."""
        return values if self.largest_share >= 1 else capped(values, self.largest_share)

    def continue_from(self, stamp: CommunityStamp) -> None:
        self.stamp, self.committed_steps = stamp, stamp.steps
