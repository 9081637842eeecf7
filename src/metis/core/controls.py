"""SCAFFOLD at the controller (Karimireddy et al. 2020): the server's control variate beside the community model.

What a learner hands in is its network and behind it its control variate c_k, the mean gradient of its last task. The
network is mixed as the policy says. The server's variate is c = sum n_k c_k / sum n_k over the latest c_k of ALL
learners, by their numbers of examples, also of those that had no part in the last round. So c is the gradient of the
objective, the mean loss over all examples, and where it vanishes each learner stays where it is: correcting by c - c_k
leads there under every policy, however it weighs models. Hence c is no part of a round's average, of a weight that
falls with staleness, of FedAsync's interpolation or of an optimizer's step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import Row
from metis.core.community import CachedAverage, CommunityFactory, FullPass, ModelStore
from metis.core.events import LearnerId
from metis.core.layer import Layer
from metis.core.model import Layout, Model, Vector


class LatestAverage(FullPass):
    """Weighted average of every learner's latest model by a full pass, so that arrival order cannot change a bit."""

    def publish(self) -> bool:
        values = dict(self._values)
        published = super().publish()
        self._values = values
        return published


class ControlVariates(Layer):
    """A community whose models have control variates; the one inside sees the network alone."""

    def __init__(
        self,
        initial_model: Model,
        store: ModelStore,
        inside: CommunityFactory,
        examples: Callable[[LearnerId], float],
        *,
        by_round: bool,
    ) -> None:
        network, control = self._share(initial_model.layout, store)
        super().__init__(inside(initial_model.network, network))
        average = LatestAverage if by_round else CachedAverage
        self._controls: FullPass | CachedAverage = average(_control_of(initial_model), control)
        self._learners: set[LearnerId] = set()  # whose models are stored
        self._model = initial_model
        self._examples = examples

    def _share(self, layout: Layout, store: ModelStore) -> tuple[_Part, _Part]:
        """Let both communities work on the same stored models, each on its part of them."""
        size = layout.network.size
        self._store = store
        self._parts = _Part(store, 0, size), _Part(store, size, layout.size)
        return self._parts

    def _settle(self) -> None:
        """The whole models are in the store."""
        for part in self._parts:
            part.fresh.clear()

    @property
    def model(self) -> Model:
        return self._model

    @model.setter
    def model(self, model: Model) -> None:
        self._model, self.inside.model, self._controls.model = model, model.network, _control_of(model)

    def commit(self, learner: LearnerId, local_model: Model, value: float, steps: int, base: Model | None) -> None:
        self.inside.commit(learner, local_model.network, value, steps, None if base is None else base.network)
        self._controls.commit(learner, _control_of(local_model), float(self._examples(learner)), steps, None)
        self._store.put(learner, local_model.vector)
        self._settle()
        self._learners.add(learner)

    def withdraw(self, learner: LearnerId) -> None:
        self.inside.withdraw(learner)
        self._controls.withdraw(learner)
        self._store.remove(learner)
        self._learners.discard(learner)

    def publish(self) -> bool:
        if not self.inside.publish():
            return False
        self._controls.publish()
        network = self.inside.model
        vector = np.concatenate((network.vector, self._controls.model.vector))
        self._model = Model(self._model.layout, vector, network.counters)
        return True

    def adopt(self, model: Model) -> None:
        self.inside.adopt(model.network)
        self._controls.adopt(_control_of(model))
        self._model = model

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        own = {f"control/{name}": array for name, array in self._controls.arrays(local_models=False).items()}
        stored = (
            {f"local/{k}": np.asarray(self._store.get(k)[:]) for k in sorted(self._learners)} if local_models else {}
        )
        return {**self.inside.arrays(local_models=False), **own, **stored}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        network, control = self._share(model.layout, store)
        for learner in self._learners:
            store.put(learner, arrays[f"local/{learner}"])
        self._model = model
        self.inside.load_arrays(model.network, arrays, network)
        own = {name.removeprefix("control/"): array for name, array in arrays.items() if name.startswith("control/")}
        # Where the local models are is known already; the mapping must only not fail for them.
        self._controls.load_arrays(_control_of(model), defaultdict(_nothing, own), control)
        self._settle()


def _control_of(model: Model) -> Model:
    """The control variates as a model of their own."""
    return Model(model.layout.control, model.control)


def _nothing() -> Vector:
    return np.zeros(0, np.float32)


class _Part:
    """A store that shows a part of each model of another; what is put is there until the whole model is."""

    def __init__(self, store: ModelStore, start: int, end: int) -> None:
        self._store, self._start, self._end = store, start, end
        self.fresh: dict[LearnerId, Vector] = {}

    def put(self, learner: LearnerId, vector: Vector) -> None:
        self.fresh[learner] = vector

    def get(self, learner: LearnerId) -> Row:
        if learner in self.fresh:
            return self.fresh[learner]
        whole = self._store.get(learner)
        if isinstance(whole, np.ndarray):
            return whole[self._start : self._end]
        return _PartOfRow(whole, self._start, self._end)

    def remove(self, learner: LearnerId) -> None:
        """Nothing: the whole model is removed by whoever put it there."""


class _PartOfRow:
    def __init__(self, whole: Row, start: int, end: int) -> None:
        self._whole, self._start, self._end = whole, start, end

    def __getitem__(self, part: slice, /) -> NDArray[np.float32]:
        start, end, _ = part.indices(self._end - self._start)
        return self._whole[self._start + start : self._start + end]
