"""How fast learners really are: measured by a probe at a site, or taken from an earlier run's events."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis.core.events import Budget, LearnerId, LearnerJoined, UpdateRequest
from metis.core.timing import robust_time_per_batch
from metis.errors import ConfigError, DataError, MetisError, told
from metis.experiments.config.load import ExperimentConfig, did_you_mean, resolve_config
from metis.runs.run import EVENTS, SUMMARY
from metis.runs.trace import read_trace
from metis.simulation.recording import recorded_tasks

if TYPE_CHECKING:
    from metis.learning import Engine, Learner

_WARM_UP = 3  # batches; the first one also builds what the tensor library keeps
_PROBE = "metis probe"


@dataclass(frozen=True)
class Timing:
    """What was measured of one learner."""

    learner: LearnerId
    examples: int
    batch_size: int
    time_per_batch: float
    exchange: float | None  # seconds that a task took besides training; None if nothing was exchanged
    source: str


@dataclass(frozen=True)
class Timings:
    """What was measured, by learner, and the size of the model that was trained, if that is known."""

    learners: Mapping[LearnerId, Timing]
    model_bytes: int | None


def read_timings(paths: Sequence[Path]) -> Timings:
    """From folders of runs, from what `metis probe --json` printed, and from folders of that; the later one counts."""
    learners: dict[LearnerId, Timing] = {}
    sizes: dict[int, str] = {}
    for path in paths:
        found, size = _read(path)
        learners |= {timing.learner: timing for timing in found}
        if size is not None:
            sizes.setdefault(size, str(path))
    if len(sizes) > 1:
        told = ", ".join(f"{size:,} bytes in {path}" for size, path in sizes.items())
        raise ConfigError(f"the timings are of different networks: a model has {told}")
    return Timings(learners, next(iter(sizes), None))


def _read(path: Path) -> tuple[list[Timing], int | None]:
    if path.is_file():
        return _of_probes([path])
    if not path.is_dir():
        raise ConfigError(f"there is no file or directory {path} to take timings from")
    events = next((place for place in (path / EVENTS, path / "run" / EVENTS) if place.is_file()), None)
    if events is not None:
        return _of_run(events)
    probes = sorted(path.glob("*.json"))
    if not probes or (path / "comparison.json").is_file():
        raise ConfigError(
            f"{path} holds no timings: it must be the directory of one run, with {EVENTS}, or hold what "
            f"{_PROBE} --json printed, as *.json"
        )
    return _of_probes(probes)


def _of_run(events: Path) -> tuple[list[Timing], int | None]:
    recorded = list(read_trace(events))
    joined = {item.learner: item for _, item in recorded if isinstance(item, LearnerJoined)}
    found = []
    try:
        for learner, tasks in recorded_tasks(recorded).items():
            updates = [
                (task.answer, task.at - task.sent)
                for task in tasks
                if isinstance(task.answer, UpdateRequest) and not task.invalid
            ]
            if not updates:
                continue
            # The median: one update on a busy machine, or with a cold cache, is not what to plan with.
            exchange = statistics.median(max(0.0, elapsed - update.seconds) for update, elapsed in updates)
            found.append(
                Timing(
                    learner,
                    joined[learner].examples,
                    joined[learner].batch_size,
                    statistics.median(update.time_per_batch for update, _ in updates),
                    exchange if exchange > 1e-9 * recorded[-1][0] else 0.0,  # else it is the rounding of moments
                    f"{len(updates)} updates in {events.parent}",
                )
            )
    except (KeyError, TypeError) as problem:
        raise DataError(f"{events} is damaged: its events cannot follow each other") from problem
    if not found:
        raise ConfigError(f"{events.parent} tells no timings: no learner handed in an update there")
    return found, _model_bytes(events.parent / SUMMARY)


def _model_bytes(summary: Path) -> int | None:
    try:
        return int(json.loads(summary.read_text("utf-8"))["setting"]["model_bytes"])
    except (OSError, ValueError, KeyError, TypeError):  # of a run that has not ended
        return None


def _of_probes(files: Sequence[Path]) -> tuple[list[Timing], int | None]:
    found = []
    sizes = set()
    for file in files:
        try:
            document = json.loads(file.read_text("utf-8"))
            timing = Timing(
                str(document["learner"]),
                int(document["examples"]),
                int(document["batch_size"]),
                float(document["time_per_batch"]),
                None,
                f"a probe in {file}",
            )
            sizes.add(int(document["model_bytes"]))
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(f"{file} is not what {_PROBE} --json prints") from None
        if not (timing.examples > 0 and timing.batch_size > 0 and 0 < timing.time_per_batch < math.inf):
            raise ConfigError(f"{file}: examples, batch_size and time_per_batch must be greater than 0")
        found.append(timing)
    if len(sizes) > 1:
        raise ConfigError(f"the probes in {files[0].parent} are of networks of different sizes: they cannot be mixed")
    return found, sizes.pop()


# --- the probe ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """What a few batches at a site took."""

    learner: LearnerId
    examples: int
    batch_size: int
    batches_per_epoch: int
    time_per_batch: float  # without warming up and stalls, as a learner reports it
    fastest: float
    slowest: float
    batches: int  # that were timed
    parameters: int
    model_bytes: int
    device: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def snippet(self) -> str:
        """What to write into the experiment's file."""
        return (
            "[[learners]]\n"
            f"name = {json.dumps(self.learner)}\n"
            f"names = [{json.dumps(self.learner)}]\n"
            f"batch_size = {self.batch_size}\n"
            f"time_per_batch = {self.time_per_batch:.3g}"
        )


def probe_config(site: Path, name: LearnerId, batch_size: int) -> ExperimentConfig:
    """An experiment of one learner, for a site file that is to be timed before there is an experiment."""
    tables = {
        "site": {"file": str(site.resolve())},
        "learners": [{"name": name, "names": [name], "batch_size": batch_size, "time_per_batch": 1.0}],
        "policy": {"name": "semisync_fedavg"},
        "stop": {"rounds": 1},
    }
    return resolve_config(tables, site.name)


def probe(
    config: ExperimentConfig, site: Path | None, name: LearnerId, batches: int, device: str | None = None
) -> Probe:
    """Train a few batches with the real network and data of this learner, by the wall clock."""
    learner, engine, seed = _silo(config, site, name, device)
    budget, model = Budget(batches + _WARM_UP), engine.initial_model(seed)
    try:
        trained = learner.train_while(engine, model, 0, budget, time.perf_counter)
    except MetisError:
        raise
    except Exception as problem:  # of the user's network or data
        raise ConfigError(
            f"learner '{name}' cannot train on its {len(learner.indices)} examples in batches of "
            f"{learner.batch_size}: {told(problem)}"
        ) from problem
    # `robust_time_per_batch` leaves out the first, as warming up: it is the last of those that are left out here.
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
        parameters=engine.layout.network.size,
        model_bytes=model.nbytes,
        device=device or config.training.device,
    )


def _silo(
    config: ExperimentConfig, site: Path | None, name: LearnerId, device: str | None
) -> tuple[Learner, Engine, int]:
    from metis.experiments.build import build_solver, build_training_setup
    from metis.experiments.site import build_silo
    from metis.learning import Learner, engine_for

    if site is None and config.site is not None:
        site = Path(config.site.file)
    if site is not None:
        document = config.model_copy(update={"policy": config.policy[:1]}).to_dict()
        silo = build_silo({"experiment": document, "policy": 0}, site, name, 0, device)
        assert silo.learner is not None
        return silo.learner, silo.engine, silo.seed
    setup = build_training_setup(config)
    assignments = {assignment.name: assignment for assignment in setup.assignments}
    if name not in assignments:
        raise ConfigError(f"the experiment has no learner '{name}'; {did_you_mean(name, assignments)}")
    assignment, solver = assignments[name], build_solver(config.policy[0].training)
    learner = Learner(
        name, 0, setup.train, assignment.indices, assignment.group.batch_size, solver, config.seed, setup.augment
    )
    return learner, engine_for(setup.engine(config.training, device), solver), config.seed
