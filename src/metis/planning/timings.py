"""How fast learners really are: read from the events of an earlier run, or from what `metis probe --json` printed."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from metis.core.events import LearnerId, LearnerJoined, UpdateRequest
from metis.errors import ConfigError, DataError
from metis.runs.run import SUMMARY
from metis.runs.trace import EVENTS, read_trace
from metis.simulation.recording import recorded_tasks

_PROBE = "metis probe"


@dataclass(frozen=True)
class LearnerTiming:
    """What was measured for one learner."""

    learner: LearnerId
    examples: int
    batch_size: int
    time_per_batch: float
    exchange: float | None  # seconds of a task that were not training; None if nothing was exchanged
    source: str


@dataclass(frozen=True)
class Timings:
    """The measurements by learner, and the size of the model that was trained, if it is known."""

    learners: Mapping[LearnerId, LearnerTiming]
    model_bytes: int | None


def read_timings(paths: Sequence[Path]) -> Timings:
    """Read directories of runs, files that `metis probe --json` printed and directories of those; later ones win."""
    learners: dict[LearnerId, LearnerTiming] = {}
    sizes: dict[int, str] = {}
    for path in paths:
        found, size = _read(path)
        learners |= {timing.learner: timing for timing in found}
        if size is not None:
            sizes.setdefault(size, str(path))
    if len(sizes) > 1:
        differing = ", ".join(f"{size:,} bytes in {path}" for size, path in sizes.items())
        raise ConfigError(f"the timings are those of different networks: a model has {differing}")
    return Timings(learners, next(iter(sizes), None))


def _read(path: Path) -> tuple[list[LearnerTiming], int | None]:
    if path.is_file():
        return _from_probes([path])
    if not path.is_dir():
        raise ConfigError(f"there is no file or directory {path} to read timings from")
    events = next((file for file in (path / EVENTS, path / "run" / EVENTS) if file.is_file()), None)
    if events is not None:
        return _from_run(events)
    probes = sorted(path.glob("*.json"))
    if not probes or (path / "comparison.json").is_file():
        raise ConfigError(
            f"{path} has no timings: it must be the directory of one run, with {EVENTS}, or contain *.json files that "
            f"{_PROBE} --json printed"
        )
    return _from_probes(probes)


def _from_run(events: Path) -> tuple[list[LearnerTiming], int | None]:
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
            # The median, because one update may have met a busy machine or a cold cache.
            exchange = statistics.median(max(0.0, elapsed - update.seconds) for update, elapsed in updates)
            found.append(
                LearnerTiming(
                    learner,
                    joined[learner].examples,
                    joined[learner].batch_size,
                    statistics.median(update.time_per_batch for update, _ in updates),
                    exchange if exchange > 1e-9 * recorded[-1][0] else 0.0,  # less is rounding
                    f"{len(updates)} updates in {events.parent}",
                )
            )
    except (KeyError, TypeError) as problem:
        raise DataError(f"{events} is damaged: its events contradict each other") from problem
    if not found:
        raise ConfigError(f"{events.parent} has no timings: no learner sent an update in that run")
    return found, _model_bytes(events.parent / SUMMARY)


def _model_bytes(summary: Path) -> int | None:
    try:
        return int(json.loads(summary.read_text("utf-8"))["setting"]["model_bytes"])
    except (OSError, ValueError, KeyError, TypeError):  # the run has not ended
        return None


def _from_probes(files: Sequence[Path]) -> tuple[list[LearnerTiming], int | None]:
    found = []
    sizes = set()
    for file in files:
        try:
            document = json.loads(file.read_text("utf-8"))
            timing = LearnerTiming(
                str(document["learner"]),
                int(document["examples"]),
                int(document["batch_size"]),
                float(document["time_per_batch"]),
                None,
                f"a probe in {file}",
            )
            sizes.add(int(document["model_bytes"]))
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(f"{file} is not a file that {_PROBE} --json printed") from None
        if not (timing.examples > 0 and timing.batch_size > 0 and 0 < timing.time_per_batch < math.inf):
            raise ConfigError(f"{file}: examples, batch_size and time_per_batch must be greater than 0")
        found.append(timing)
    if len(sizes) > 1:
        raise ConfigError(f"the probes in {files[0].parent} are those of networks of different sizes")
    return found, sizes.pop()
