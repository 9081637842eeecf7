"""A probe: a few batches trained on this machine with the real network and data of one learner, by the wall clock."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from metis.core.events import Budget, LearnerId
from metis.core.timing import robust_time_per_batch
from metis.errors import ConfigError, MetisError, described
from metis.experiments.config.load import ExperimentConfig, resolve_config

_WARM_UP = 3  # batches; the first one also fills the caches of the tensor library


@dataclass(frozen=True)
class Probe:
    """How long a few batches took, and the data and network they were trained with."""

    learner: LearnerId
    examples: int
    batch_size: int
    batches_per_epoch: int
    time_per_batch: float  # without warm-up and stalls, as a learner reports it
    fastest: float
    slowest: float
    batches: int  # timed
    parameters: int
    model_bytes: int
    device: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def snippet(self) -> str:
        """The group of learners to write into the experiment's file."""
        return (
            "[[learners]]\n"
            f"name = {json.dumps(self.learner)}\n"
            f"names = [{json.dumps(self.learner)}]\n"
            f"batch_size = {self.batch_size}\n"
            f"time_per_batch = {self.time_per_batch:.3g}"
        )


def probe_config(site: Path, name: LearnerId, batch_size: int) -> ExperimentConfig:
    """An experiment with one learner, to time a site file for which no experiment exists yet."""
    tables = {
        "site": {"file": str(site.resolve())},
        "learners": [{"name": name, "names": [name], "batch_size": batch_size, "time_per_batch": 1.0}],
        "policy": {"name": "semisync_fedavg"},
        "stop": {"rounds": 1},
    }
    return resolve_config(tables, site.name)


def run_probe(
    config: ExperimentConfig, site: Path | None, name: LearnerId, batches: int, device: str | None = None
) -> Probe:
    """Train a few batches with the real network and data of this learner and time them."""
    from metis.experiments.silo import learner_silo

    if site is None and config.site is not None:
        site = Path(config.site.file)
    silo = learner_silo(config, 0, site, name, 0, device)
    assert silo.learner is not None
    learner, model, budget = silo.learner, silo.initial_model(config.seed), Budget(batches + _WARM_UP)
    try:
        trained = learner.train_while(silo.engine, model, 0, budget, time.perf_counter)
    except MetisError:
        raise
    except Exception as problem:  # in the user's network or data
        raise ConfigError(
            f"learner '{name}' cannot train on its {len(learner.indices)} examples in batches of "
            f"{learner.batch_size}: {described(problem)}"
        ) from problem
    # `robust_time_per_batch` skips the first time it gets, so it gets the last one of the warm-up.
    timed = trained.batch_times[_WARM_UP - 1 :]
    return Probe(
        learner=name,
        examples=len(learner.indices),
        batch_size=learner.batch_size,
        batches_per_epoch=learner.epoch_steps,
        time_per_batch=robust_time_per_batch(timed),
        fastest=min(timed[1:]),
        slowest=max(timed[1:]),
        batches=len(timed) - 1,
        parameters=silo.engine.layout.network.size,
        model_bytes=model.nbytes,
        device=device or config.training.device,
    )
