"""What the robust rules share: the models of a round, or of FedBuff's buffer, and one pass over them in blocks.

A rule is of one of two kinds. One looks at each number of all models apart (`Elementwise`). The other decides how much
of each delta from the community model is taken (`Combination`), from their inner products alone: all distances between
points that are sums of deltas follow from these, so that an iteration costs no further pass over the models.
Parameters and buffers (BatchNorm's statistics) are judged apart there: their sizes have nothing to do with each other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import Row, average, elementwise, inner_products
from metis.core.events import LearnerId
from metis.core.layers.base import Layer
from metis.core.mixing import Buffered, FullPass, Mixing, ModelStore
from metis.core.model import Layout, Model, Role, Vector

Numbers: TypeAlias = NDArray[np.float64]

_ROLES: tuple[Role, ...] = ("parameter", "buffer")


class RobustRule(
    Layer,
    ABC,
    needs={
        "cohort": "compares the models that are mixed at a time, and {policy} adds models or differences up as they "
        "come; sync_fedavg, semisync_fedavg and fedbuff mix several",
        "models": "compares local models, which nobody can under {other}",
        "layout": "does not protect what {other} adds to a model; use a solver without it",
    },
    takes={"cohort"},
):
    """Settings and arithmetic of a rule; what it remembers of earlier rounds is an argument."""

    title: ClassVar[str]  # as tables call it
    selector = "rule"

    def relabel(self, label: str) -> str:
        return f"{label}, {self.title}"

    def set_mixing(self, mixing: Mixing) -> Mixing:
        made = getattr(mixing, "func", mixing)
        community = RobustBuffer if isinstance(made, type) and issubclass(made, Buffered) else RobustRound
        return partial(community, rule=self, **getattr(mixing, "keywords", {}))

    @abstractmethod
    def mix(
        self, rows: Sequence[Row], weights: Sequence[float], centre: Vector | None, layout: Layout, history: History
    ) -> Vector:
        """The mixture of at least one row; `centre` is the community model, None where rows are differences from it."""


class Elementwise(RobustRule):
    """A rule for each number of a model by itself."""

    @abstractmethod
    def combine(self, values: NDArray[np.float32], weights: Numbers) -> Numbers:
        """One number for each column of `values`, whose rows have these weights."""

    def mix(
        self, rows: Sequence[Row], weights: Sequence[float], centre: Vector | None, layout: Layout, history: History
    ) -> Vector:
        counts = np.array(weights, np.float64)
        return elementwise(layout.size, rows, lambda values: self.combine(values, counts))


class Combination(RobustRule):
    """A rule that takes a factor of each model's delta from the community model."""

    @abstractmethod
    def factors(self, products: Numbers, weights: Numbers, history: list[float]) -> Numbers:
        """The factor of each delta, from their inner products and weights.

        `history` is what the rule has put there in earlier rounds.
        """

    def mix(
        self, rows: Sequence[Row], weights: Sequence[float], centre: Vector | None, layout: Layout, history: History
    ) -> Vector:
        counts = np.array(weights, np.float64)
        parts = _parts(layout)
        factors = {
            role: self.factors(inner_products(rows, centre, parts[role]), counts, history.of(role)) for role in _ROLES
        }

        def pieces(role: Role) -> list[tuple[Row, float]]:
            taken = list(zip(rows, factors[role].tolist(), strict=True))
            return taken if centre is None else [(centre, 1 - math.fsum(factors[role].tolist())), *taken]

        result = average(layout.size, pieces("parameter"), 1.0)
        for part in parts["buffer"]:
            result[part] = sum(factor * row[part].astype(np.float64) for row, factor in pieces("buffer"))
        return result


def _parts(layout: Layout) -> dict[Role, list[slice]]:
    """Where the parameters lie, and where the buffers."""
    parts: dict[Role, list[slice]] = {role: [] for role in _ROLES}
    for spec in layout.tensors:
        if spec.role in parts:
            where, known = layout.slices[spec.name], parts[spec.role]
            if known and known[-1].stop == where.start:
                where = slice(known.pop().start, where.stop)
            known.append(where)
    return parts


class History:
    """Numbers of earlier rounds that a rule needs, for parameters and for buffers."""

    def __init__(self) -> None:
        self._numbers: dict[Role, list[float]] = {role: [] for role in _ROLES}

    def of(self, role: Role) -> list[float]:
        return self._numbers[role]

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {f"robust/{role}": np.array(numbers, np.float64) for role, numbers in self._numbers.items()}

    def load_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._numbers = {role: arrays[f"robust/{role}"].tolist() for role in _ROLES}


def weighted_median(values: NDArray[np.float32] | Numbers, weights: Numbers) -> Numbers:
    """Of each column: half of the weight lies on either side; the middle of two values if that is between them."""
    ranked, below = ranked_by_weight(values, weights)
    half = below[-1] / 2
    lower = (below < half).sum(axis=0, keepdims=True)
    upper = (below <= half).sum(axis=0, keepdims=True)
    return np.asarray(np.take_along_axis(ranked, lower, 0)[0] + np.take_along_axis(ranked, upper, 0)[0]) / 2


def ranked_by_weight(values: NDArray[np.float32] | Numbers, weights: Numbers) -> tuple[Numbers, Numbers]:
    """Each column in ascending order, and the weight up to and with each value."""
    order = np.argsort(values, axis=0, kind="stable")
    return np.take_along_axis(values, order, 0).astype(np.float64), np.cumsum(weights[order], axis=0)


class RobustRound(FullPass):
    """The models committed since the last publication, mixed by a robust rule in the order of the learners' names."""

    def __init__(self, initial_model: Model, store: ModelStore, *, rule: RobustRule) -> None:
        super().__init__(initial_model, store)
        self._rule, self._history = rule, History()

    def publish(self, seconds: float = 0.0) -> bool:
        if not self._values:
            return False
        weights = self.weights(self._values)
        order = sorted(weights)
        rows, counts = [self._store.get(k) for k in order], [weights[k] for k in order]
        mixed = self._rule.mix(rows, counts, self.model.vector, self.model.layout, self._history)
        self._values.clear()
        self._stamp_new(mixed)
        return True

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        return {**super().arrays(local_models=local_models), **self._history.arrays()}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        super().load_arrays(model, arrays, store)
        self._history.load_arrays(arrays)


class RobustBuffer(Buffered):
    """FedBuff whose step is a robust rule of the buffered differences, as long as their weights make the plain one."""

    def __init__(
        self,
        initial_model: Model,
        store: ModelStore,
        buffer_size: int = 3,
        server_learning_rate: float = 1.0,
        *,
        rule: RobustRule,
    ) -> None:
        super().__init__(initial_model, store, buffer_size, server_learning_rate)
        self._rule, self._history = rule, History()
        self._buffer: list[tuple[LearnerId, float, Vector]] = []
        del self._differences

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        assert base is not None
        self._buffer.append((learner, value, local_model.vector - base.vector))
        self.committed_steps += steps
        self.contributors += 1

    def withdraw(self, learner: LearnerId) -> None:
        self._buffer = [each for each in self._buffer if each[0] != learner]
        self.contributors = len(self._buffer)

    def publish(self, seconds: float = 0.0) -> bool:
        if self.contributors < self._buffer_size:
            return False
        values = [value for _, value, _ in self._buffer]
        rows = [difference for _, _, difference in self._buffer]
        step = self._rule.mix(rows, values, None, self.model.layout, self._history)
        self._vector += self._server_learning_rate * math.fsum(values) / len(values) * step.astype(np.float64)
        self._buffer.clear()
        self.contributors = 0
        self._stamp_new(self._vector)
        return True

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        buffered = {f"buffer/{index}": difference for index, (_, _, difference) in enumerate(self._buffer)}
        return {"vector": self._vector, **buffered, **self._history.arrays()}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.model = model
        self._vector = np.array(arrays["vector"], np.float64)
        self._buffer = [
            (learner, value, np.array(arrays[f"buffer/{index}"], np.float32))
            for index, (learner, value, _) in enumerate(self._buffer)
        ]
        self._history.load_arrays(arrays)
