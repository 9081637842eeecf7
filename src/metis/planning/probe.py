"""A probe: a few batches trained on this machine with the real network and data of one learner, by the wall clock."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis.core.events import Budget, LearnerId
from metis.core.timing import robust_time_per_batch
from metis.errors import ConfigError, MetisError, described
from metis.experiments.bridges import site_path
from metis.experiments.config.load import ExperimentConfig, resolve_config

if TYPE_CHECKING:
    from metis.experiments.silo import TrainingSilo

_WORTH_IT = 1.1  # times as fast
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
    precisions: dict[str, float] = field(default_factory=dict)  # time per batch in float32 and in bf16

    @property
    def advice(self) -> str:
        """Whether bf16 pays on this machine; empty if it was not measured."""
        if len(self.precisions) < 2:
            return ""
        ratio = self.precisions["float32"] / self.precisions["bf16"]
        if ratio > _WORTH_IT:
            return f'bf16 is {ratio:.1f} times as fast as float32 here: training.precision = "bf16" pays'
        return f'bf16 is not faster than float32 here ({ratio:.2f} times as fast): keep training.precision = "float32"'

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "advice": self.advice}

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
        site = site_path(config)
    silo = learner_silo(config, 0, site, name, 0, device)
    assert silo.learner is not None
    learner, timed = silo.learner, _timed(silo, config.seed, batches)
    precision, precisions = getattr(silo.engine, "precision", None), {}
    if precision in ("float32", "bf16") and config.training.dtype == "float32":
        other = "bf16" if precision == "float32" else "float32"
        training = config.training.model_copy(update={"precision": other})
        again = learner_silo(config.model_copy(update={"training": training}), 0, site, name, 0, device)
        found = {precision: timed, other: _timed(again, config.seed, batches)}
        precisions = {each: robust_time_per_batch(found[each]) for each in ("float32", "bf16")}
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
        model_bytes=silo.initial_model(config.seed).nbytes,
        device=device or config.training.device,
        precisions=precisions,
    )


def _timed(silo: TrainingSilo, seed: int, batches: int) -> Sequence[float]:
    """The last time of the warm-up, which `robust_time_per_batch` skips, and that of each batch."""
    learner, budget = silo.learner, Budget(batches + _WARM_UP)
    assert learner is not None
    try:
        trained = learner.train_while(silo.engine, silo.initial_model(seed), 0, budget, time.perf_counter)
    except MetisError:
        raise
    except Exception as problem:  # in the user's network or data
        raise ConfigError(
            f"learner '{learner.name}' cannot train on its {len(learner.indices)} examples in batches of "
            f"{learner.batch_size}: {described(problem)}"
        ) from problem
    return trained.batch_times[_WARM_UP - 1 :]
