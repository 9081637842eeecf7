"""SCAFFOLD (Karimireddy et al. 2020): control variates, which travel behind the network and correct for drift.

What a learner hands in is its network and behind it its control variate c_k, the mean gradient of its last task. The
network is mixed as the policy says. The server's variate is c = sum n_k c_k / sum n_k over the latest c_k of ALL
learners, by their numbers of examples, also of those that had no part in the last round. So c is the gradient of the
objective, the mean loss over all examples, and where it vanishes each learner stays where it is: correcting by c - c_k
leads there under every policy, however it weighs models. Hence c is not part of a round's average, of a weight that
falls with staleness, of FedAsync's interpolation or of an optimizer's step.

A model that reaches a learner is the network and behind it c; one that leaves is the local network and behind it c_k,
which the learner remembers. BatchNorm's statistics have no gradient and are not corrected.

Under a secure sum nobody keeps the c_k of single learners: c is the mean over those that had a part in the last round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import Row
from metis.core.events import LearnerId
from metis.core.layers.base import Layer, Memory, Outgoing, Work
from metis.core.layers.wrapper import Wrapper, innermost
from metis.core.mixing import CachedAverage, Community, FullPass, Mixing, ModelStore
from metis.core.mixing.secure import SecureAverage
from metis.core.model import Layout, Model, Vector
from metis.errors import ConfigError

if TYPE_CHECKING:
    from metis.core.solvers import Corrected

_CONTROL = "control"  # in a learner's memory: its own c_k


@dataclass(frozen=True)
class ControlVariates(
    Layer,
    key="control_variates",
    order=40,
    in_files=False,
    needs={
        "variates": "sums control variates up with the models of a masked round, and {policy} has no rounds",
        "layout": "adds tensors to what travels, and so does {other}",
    },
    takes={"layout"},
):
    """SCAFFOLD's control variates, which travel behind the network; the solver `Scaffold` puts this layer on."""

    def extend_layout(self, layout: Layout, trainable: int) -> Layout:
        return layout.with_controls(trainable)

    def wrap(self, mixing: Mixing) -> Mixing:
        def controlled(model: Model, store: ModelStore) -> Community:
            whole = mixing(model, store)
            # Masked rounds sum control variates up as they do the network.
            return whole if isinstance(innermost(whole), SecureAverage) else ControlledCommunity(model, store, mixing)

        return controlled

    def prepare(self, work: Work) -> Work:
        corrected = getattr(work.solver, "corrected", None)
        if corrected is None:
            raise ConfigError(
                f"{type(work.solver).__name__} was given a model with control variates; "
                "either all learners of a federation train with scaffold or none"
            )
        control = work.base.control
        own = work.memory.get(_CONTROL)
        if own is None or own.shape != control.shape:  # none yet, or lost with the learner's disk
            own = np.zeros_like(control)
        return Work(work.base.network, corrected(control - own), work.memory)

    def encode(self, out: Outgoing, received: Work, prepared: Work) -> Outgoing:
        vector = np.concatenate((out.model.vector, cast("Corrected", prepared.solver).mean_gradient()))
        return replace(out, model=Model(received.base.layout, vector, out.model.counters))

    def sent(self, arrives: Model, memory: Memory) -> Memory:
        # A control variate is not a sum of deltas that a later one could complete: the learner's is what arrives.
        return {**memory, _CONTROL: arrives.control}


class LatestAverage(FullPass):
    """Weighted average of every learner's latest model by a full pass, so that arrival order cannot change a bit."""

    def publish(self, seconds: float = 0.0) -> bool:
        values = dict(self._values)
        published = super().publish(seconds)
        self._values = values
        return published


class ControlledCommunity(Wrapper):
    """A community whose models have control variates; the one inside sees the network alone."""

    def __init__(self, initial_model: Model, store: ModelStore, inside: Mixing) -> None:
        network, control = self._share(initial_model.layout, store)
        super().__init__(inside(initial_model.network, network))
        average = LatestAverage if self.averages_rounds else CachedAverage
        self._controls: FullPass | CachedAverage = average(_control_of(initial_model), control)
        self._learners: set[LearnerId] = set()  # whose models are stored
        self._model = initial_model

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

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        network = self.inside.model if base is self._model else None if base is None else base.network
        self.inside.commit(learner, local_model.network, value, steps, network, examples)
        self._controls.commit(learner, _control_of(local_model), float(examples), steps)
        self._store.put(learner, local_model.vector)
        self._settle()
        self._learners.add(learner)

    def withdraw(self, learner: LearnerId) -> None:
        self.inside.withdraw(learner)
        self._controls.withdraw(learner)
        self._store.remove(learner)
        self._learners.discard(learner)

    def publish(self, seconds: float = 0.0) -> bool:
        if not self.inside.publish(seconds):
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

    def limit_shares(self, largest: float) -> None:
        super().limit_shares(largest)
        self._controls.limit_shares(largest)

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
        """Nothing: the whole model is removed by the one that put it there."""


class _PartOfRow:
    def __init__(self, whole: Row, start: int, end: int) -> None:
        self._whole, self._start, self._end = whole, start, end

    def __getitem__(self, part: slice, /) -> NDArray[np.float32]:
        start, end, _ = part.indices(self._end - self._start)
        return self._whole[self._start + start : self._start + end]
