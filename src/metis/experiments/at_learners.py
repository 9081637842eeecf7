"""What a model is worth at each learner, on the learner's own test examples."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from metis.core.events import LearnerId
from metis.core.model import Model
from metis.errors import ConfigError
from metis.learning import Examples
from metis.text import plural

if TYPE_CHECKING:
    from metis.experiments.federation import Federation


@dataclass(frozen=True)
class AtLearners:
    """What a model is worth at each learner, on the learner's own test examples."""

    metrics: dict[LearnerId, dict[str, float]]
    metric: str
    higher_is_better: bool

    @property
    def ranked(self) -> list[tuple[float, LearnerId]]:
        """The values of the metric and whose they are, the worst first."""
        values = [(found[self.metric], learner) for learner, found in self.metrics.items()]
        return sorted(values, reverse=not self.higher_is_better)

    @property
    def mean(self) -> float:
        return math.fsum(value for value, _ in self.ranked) / len(self.metrics)

    @property
    def median(self) -> float:
        return statistics.median(value for value, _ in self.ranked)

    @property
    def worst(self) -> tuple[float, LearnerId]:
        return self.ranked[0]

    @property
    def best(self) -> tuple[float, LearnerId]:
        return self.ranked[-1]

    def __repr__(self) -> str:
        (low, last), (high, first) = self.worst, self.best
        return (
            f"<{self.metric} at {plural(len(self.metrics), 'learner')}: worst {low:.4f} ({last}), "
            f"median {self.median:.4f}, best {high:.4f} ({first}), mean {self.mean:.4f}>"
        )


class SomeExamples:
    """Some of the examples."""

    def __init__(self, examples: Examples, indices: NDArray[np.int64]) -> None:
        self._examples, self._indices = examples, indices

    def __len__(self) -> int:
        return len(self._indices)

    def batch(self, indices: NDArray[np.int64]) -> Any:
        return self._examples.batch(self._indices[indices])


def at_learners(federation: Federation, model: Model) -> AtLearners:
    """What a model is worth to each learner that has test examples of its own."""
    test = federation.test
    own = [setup for setup in federation.learners if setup.test is not None and len(setup.test)]
    if test is None or not own:
        raise ConfigError("no learner has test examples of its own; give each SimulatedLearner its test=indices")
    if getattr(federation.engine, "personal", False):
        raise ConfigError(
            "a community model is not whole without the local parts of a learner, which a run does not keep"
        )
    found = {setup.name: federation.engine.evaluate(model, SomeExamples(test, np.asarray(setup.test))) for setup in own}
    return AtLearners(found, federation.metric, federation.higher_is_better)
