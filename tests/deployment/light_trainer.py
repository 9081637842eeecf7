"""The real trainer process around a learner that trains by arithmetic: it starts without torch, so quickly."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from metis.core.events import Budget
from metis.core.model import Layout, Model
from metis.deployment.trainer import process as trainer


class Engine:
    """Measures the sum of a model."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def evaluate(self, model: Model, examples: range, memory: object) -> dict[str, float]:
        return {"loss": float(model.vector.sum())}


class Learner:
    """A step makes every number a tenth smaller."""

    indices, batch_size = range(40), 10

    def train_while(
        self,
        engine: Engine,
        community_model: Model,
        task_number: int,
        budget: Budget,
        clock: Callable[[], float],
        memory: object,
        at_boundary: Callable[[int], None],
        agree: Callable[[bool], bool],
        rate: float,
    ) -> SimpleNamespace:
        started, vector, times = clock(), community_model.vector.copy(), []
        at_boundary(0)
        while not times or (len(times) != budget.steps and clock() - started < budget.seconds):
            before = clock()
            vector *= np.float32(0.9)
            at_boundary(len(times) + 1)
            times.append(clock() - before)
        model = community_model.with_vector(vector)
        return SimpleNamespace(
            model=model, payload=b"", steps=len(times), loss=1.0, memory={}, batch_times=tuple(times),
            seconds=sum(times), compression_error=math.nan,
        )  # fmt: skip


def build(command: Mapping[str, Any]) -> Any:
    engine = Engine(Layout.from_json(command["layout"]))
    return SimpleNamespace(
        engine=engine, learner=Learner(), evaluation=range(20), metric="loss", higher_is_better=False, seed=1
    )


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    trainer.main(build)
