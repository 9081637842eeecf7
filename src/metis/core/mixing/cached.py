"""The community cache: the weighted average of all learners' latest models, updated in O(M) (Sec. 5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import Row, add_scaled, largest, quotient, widened, zeros
from metis.core.events import LearnerId
from metis.core.mixing.community import Published
from metis.core.mixing.store import ModelStore, stored_models, weighted_sum
from metis.core.model import Model
from metis.errors import ArgumentError

_SWAMPED = 1e6  # float64 has 16 digits: this leaves ten


class CachedAverage(Published):
    """Weighted average of every learner's latest local model, in O(M) a commit (Sec. 5).

    W' = W + p'_k w'_k - p_k w_k and P' = P + p'_k - p_k. The sum is float64 and is rebuilt exactly
    from the stored models every `rebuild_every` commits, so that rounding cannot pile up (R11).
    """

    weighs_learners = True

    def __init__(self, initial_model: Model, store: ModelStore, rebuild_every: int = 1000) -> None:
        super().__init__(initial_model)
        if rebuild_every < 1:
            raise ArgumentError(f"rebuild_every is {rebuild_every}; it must be at least 1 commit", "rebuild_every")
        self._store = store
        self._rebuild_every = rebuild_every
        self._values: dict[LearnerId, float] = {}  # p_k
        self._sum = zeros(initial_model.layout.size)  # W
        self._peak = 0.0  # the largest term of W since it was last exact
        self._commits = 0
        self._changed = False

    @property
    def contributors(self) -> int:
        return len(self._values)

    @property
    def normalization(self) -> float:
        """P, summed again from the p_k, so it cannot drift."""
        return math.fsum(self._values.values())

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        rows: list[tuple[Row, float]] = [(local_model.vector, value)]
        if learner in self._values:
            rows.append((self._store.get(learner), -self._values[learner]))
        add_scaled(self._sum, rows)
        term, replaced = value * largest(local_model.vector, local_model.vector.size), learner in self._values
        self._peak = max(self._peak, term)
        self._store.put(learner, local_model.vector)
        self._values[learner] = value
        self.committed_steps += steps
        self._commits += 1
        self._changed = True
        if self._commits % self._rebuild_every == 0 or (replaced and self._swamped(term)):
            self.rebuild()

    def _swamped(self, term: float) -> bool:
        """Whether a term, now replaced, was so large that what is left has lost its digits."""
        return self._peak > _SWAMPED * term and self._peak > _SWAMPED * largest(self._sum, self._sum.size)

    def withdraw(self, learner: LearnerId) -> None:
        if learner not in self._values:
            return
        del self._values[learner]
        self._store.remove(learner)
        # Rare, so exact: no rounding of the departed model stays behind.
        self.rebuild()
        self._changed = bool(self._values)

    def rebuild(self) -> None:
        """Sum the stored models again."""
        self._sum = weighted_sum(self.model.layout.size, self._store, self._values)
        self._peak = largest(self._sum, self._sum.size)

    def publish(self, seconds: float = 0.0) -> bool:
        if not self._changed:
            return False
        self._changed = False
        weights = self.weights(self._values)
        # With another weight of one learner the cached sum is of no use.
        exact = (
            self._sum
            if weights is self._values or weights == self._values
            else weighted_sum(self.model.layout.size, self._store, weights)
        )
        self._stamp_new(quotient(exact, math.fsum(weights.values())))
        return True

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        return {
            "sum": self._sum,
            "peak": np.array([self._peak]),
            **(stored_models(self._store, self._values) if local_models else {}),
        }

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.model, self._store = model, store
        self._sum = widened(arrays["sum"])
        self._peak = float(arrays["peak"].sum()) if "peak" in arrays else 0.0  # earlier versions did not keep it
        for learner in self._values:
            self._store.put(learner, arrays[f"local/{learner}"])
