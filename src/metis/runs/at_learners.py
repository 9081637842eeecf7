"""What a model is worth at each learner, on the learner's own test examples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metis.core.events import LearnerId
from metis.text import plural


@dataclass(frozen=True)
class AtLearners:
    """The metrics of each learner, and how fairly the model serves them."""

    metrics: Mapping[LearnerId, Mapping[str, float]]
    metric: str
    higher_is_better: bool

    @property
    def ranked(self) -> list[tuple[float, LearnerId]]:
        """The values of the metric and whose they are, the worst first."""
        values = [(found.get(self.metric, math.nan), learner) for learner, found in self.metrics.items()]
        return sorted((one for one in values if math.isfinite(one[0])), reverse=not self.higher_is_better)

    @property
    def mean(self) -> float:
        return statistics.fmean(value for value, _ in self.ranked)

    @property
    def median(self) -> float:
        return statistics.median(value for value, _ in self.ranked)

    @property
    def deviation(self) -> float:
        """The standard deviation over learners: 0 where the model is equally good for all of them."""
        return statistics.pstdev(value for value, _ in self.ranked)

    @property
    def worst(self) -> tuple[float, LearnerId]:
        return self.ranked[0]

    @property
    def best(self) -> tuple[float, LearnerId]:
        return self.ranked[-1]

    def to_json(self) -> dict[str, Any]:
        """As one plain row."""
        (low, last), (high, first) = self.worst, self.best
        return {
            "learners": len(self.ranked), "worst": low, "worst_learner": last, "median": self.median,
            "best": high, "best_learner": first, "mean": self.mean, "deviation": self.deviation,
        }  # fmt: skip

    def __repr__(self) -> str:
        (low, last), (high, first) = self.worst, self.best
        return (
            f"<{self.metric} at {plural(len(self.metrics), 'learner')}: worst {low:.4f} ({last}), "
            f"median {self.median:.4f}, best {high:.4f} ({first}), mean {self.mean:.4f}, "
            f"standard deviation {self.deviation:.4f}>"
        )
