"""The real learner process and the real trainer process around training by arithmetic: they start without torch.

python light_learner.py                              the trainer, as a child of a learner
python light_learner.py ADDRESS WORK_FOLDER PACE     `metis learner` with this trainer and without its command line
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from metis.core.events import Budget
from metis.core.model import Layout, Model
from metis.core.policies import sync_fedavg
from metis.deployment.trainer import process as trainer
from metis.net import host_and_port

TRAINER = [sys.executable, __file__]


class Engine:
    """Measures the sum of a model."""

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
            seconds=sum(times), notes={},
        )  # fmt: skip


def build(command: Mapping[str, Any]) -> Any:
    layout = Layout.from_json(command["layout"])
    return SimpleNamespace(
        engine=Engine(), policy=sync_fedavg(), layout=layout, learner=Learner(), evaluation=range(20), metric="loss",
        higher_is_better=False, seed=1, validation=None,
    )  # fmt: skip


def report(kind: str, text: str) -> None:
    print(json.dumps({"kind": kind, "text": text}), flush=True)


async def learn(address: str, folder: Path, pace: float) -> int:
    from metis.deployment.learner.process import LearnerProcess
    from metis.deployment.route import Route

    route = Route(*host_and_port(address))
    return await LearnerProcess(route, work=folder, child=TRAINER, report=report, name="zurich", pace=pace).run()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    if len(sys.argv) > 1:
        sys.exit(asyncio.run(learn(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))))
    trainer.main(build)
