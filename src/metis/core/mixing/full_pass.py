"""The weighted average of a round, by a full pass over its models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from metis.core.events import LearnerId
from metis.core.mixing.community import Published
from metis.core.mixing.store import ModelStore, stored_average, stored_models
from metis.core.model import Model


class FullPass(Published):
    """Weighted average of the models committed since the last publication: O(MN) (Sec. 5)."""

    averages_rounds = True
    weighs_learners = True
    mixes_cohorts = True

    def __init__(self, initial_model: Model, store: ModelStore) -> None:
        super().__init__(initial_model)
        self._store = store
        self._values: dict[LearnerId, float] = {}

    @property
    def contributors(self) -> int:
        return len(self._values)

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        self._store.put(learner, local_model.vector)
        self._values[learner] = value
        self.committed_steps += steps

    def withdraw(self, learner: LearnerId) -> None:
        self._values.pop(learner, None)
        self._store.remove(learner)

    def publish(self, seconds: float = 0.0) -> bool:
        if not self._values:
            return False
        average = stored_average(self.model.layout.size, self._store, self.weights(self._values))
        self._values.clear()
        self._stamp_new(average)
        return True

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        return stored_models(self._store, self._values) if local_models else {}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.model, self._store = model, store
        for learner in self._values:
            self._store.put(learner, arrays[f"local/{learner}"])
