"""A community around another: what a layer wraps around a mixing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from metis.core.events import CommunityStamp, LearnerId, RoundMeasure
from metis.core.mixing import Community, ModelStore
from metis.core.model import Model


def innermost(community: Community) -> Community:
    """The mixing that everything else is wrapped around."""
    while isinstance(community, Wrapper):
        community = community.inside
    return community


class Wrapper:
    """Passes everything on to the community inside; a subclass overrides what it changes."""

    def __init__(self, inside: Community) -> None:
        self.inside = inside

    @property
    def model(self) -> Model:
        return self.inside.model

    @model.setter
    def model(self, model: Model) -> None:
        self.inside.model = model

    @property
    def stamp(self) -> CommunityStamp:
        return self.inside.stamp

    @property
    def committed_steps(self) -> int:
        return self.inside.committed_steps

    @property
    def uses_base(self) -> bool:
        return self.inside.uses_base

    @property
    def averages_rounds(self) -> bool:
        return self.inside.averages_rounds

    @property
    def contributors(self) -> int:
        return self.inside.contributors

    @property
    def measure(self) -> RoundMeasure | None:
        return self.inside.measure

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        self.inside.commit(learner, local_model, value, steps, base, examples)

    def withdraw(self, learner: LearnerId) -> None:
        self.inside.withdraw(learner)

    def publish(self, seconds: float = 0.0) -> bool:
        return self.inside.publish(seconds)

    def adopt(self, model: Model) -> None:
        self.inside.adopt(model)

    def limit_shares(self, largest: float) -> None:
        self.inside.limit_shares(largest)

    def continue_from(self, stamp: CommunityStamp) -> None:
        self.inside.continue_from(stamp)

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        return self.inside.arrays(local_models=local_models)

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.inside.load_arrays(model, arrays, store)
