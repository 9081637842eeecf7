"""What can be put around a mixing rule, and around what is around it already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from metis.core.community import Community, ModelStore
from metis.core.events import CommunityStamp, LearnerId, RoundMeasure
from metis.core.model import Model


class Layer:
    """A community that hands everything on to the one inside; a kind of layer says what it does otherwise."""

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
    def contributors(self) -> int:
        return self.inside.contributors

    @property
    def measure(self) -> RoundMeasure | None:
        """What a layer inside measured of the last round, if one does."""
        return getattr(self.inside, "measure", None)

    def commit(self, learner: LearnerId, local_model: Model, value: float, steps: int, base: Model | None) -> None:
        self.inside.commit(learner, local_model, value, steps, base)

    def withdraw(self, learner: LearnerId) -> None:
        self.inside.withdraw(learner)

    def publish(self) -> bool:
        return self.inside.publish()

    def adopt(self, model: Model) -> None:
        self.inside.adopt(model)

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        return self.inside.arrays(local_models=local_models)

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.inside.load_arrays(model, arrays, store)
