"""What a run measured, in one small file: with its schedule, which needs no training, that is the whole run again.

Files are written while a run goes on, so that one that was cut short still says how far it came. They are kept in the
repository, and the report is made from them without training.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from metis.core.events import Action, CommunityPublished, Evaluated, Event
from metis.core.model import Model
from metis.core.stop import StopRule, Target
from metis.errors import DataError
from metis.experiments.data import Assignment
from metis.files import write_text
from metis.reproduction.environments import Cell
from metis.reproduction.kept import decisive_settings
from metis.reproduction.schedule import dry_run
from metis.reproduction.tables import Evidence
from metis.runs.folds import RunFold
from metis.runs.run import Run

_DIGITS = 6  # of a metric
# A model that reaches the target counts if what was measured in so many seconds before it, by the median, is close.
STEADY_SECONDS, STEADY_WITHIN = 30.0, 0.02


class Steady:
    """Whether a target is reached by more than a lucky model: a fold over evaluations.

    Asynchronous community models may jump by 0.2 from one to the next. A policy that publishes seldom has one model in
    that time, which counts. An error in years does not jump.
    """

    def __init__(
        self, target: Target | None, *, seconds: float = STEADY_SECONDS, within: float = STEADY_WITHIN
    ) -> None:
        self._target, self._seconds, self._within = target, seconds, within
        self._recent: deque[tuple[float, float]] = deque()

    def note(self, at: float, metrics: dict[str, float]) -> bool:
        """Take an evaluation; whether the target is reached by it, and not by chance."""
        target = self._target
        if target is None or target.metric not in metrics:
            return False
        self._recent.append((at, metrics[target.metric]))
        while self._recent[0][0] <= at - self._seconds:
            self._recent.popleft()
        typical = statistics.median(value for _, value in self._recent)
        return target.reached_by(metrics) and (target.metric != "accuracy" or typical >= target.value - self._within)


@dataclass(frozen=True)
class Curve:
    """The metrics of a run by the version of its community models."""

    settings: str  # a digest of what decides the numbers
    metrics: tuple[str, ...]
    measured: tuple[tuple[int, tuple[float, ...]], ...]  # version and metrics
    at: float  # virtual seconds of the last of them
    steps: int  # until then
    ended: str  # why, or nothing if the run was cut short
    wall_seconds: float
    learners: tuple[tuple[str, int, tuple[int, ...]], ...] = ()  # name, examples, and those of each class
    class_names: tuple[str, ...] = ()
    made_by: str = ""

    def reached(self, target: Target) -> bool:
        """Whether one of the models is as good as the target."""
        return any(target.reached_by(dict(zip(self.metrics, values, strict=True))) for _, values in self.measured)

    def covers(self, cell: Cell, until: float | None = None) -> bool:
        """Whether the run went as far as the cell asks for, or as `until` does."""
        if self.settings != settings_digest(cell):
            return False
        target = target_of(cell)
        # A run that has gone far enough need not be looked at for luck.
        at_a_target = target is not None and self.ended.startswith(f"{target.metric} reached")
        if (self.ended and not at_a_target) or (until is not None and self.at >= until):
            return True
        reached = cell.config.stop.at_target and target is not None and self.reached(target)
        return reached and self.at >= cell.least_seconds and run_of(cell, self).costs_at_target is not None


def curve_file(folder: Path, cell: Cell) -> Path:
    """Where the curve of a cell is kept."""
    return folder / cell.environment.scale / f"{cell.name}.json"


def settings_digest(cell: Cell) -> str:
    """Of what decides the numbers of a run: neither where it ends, nor the target that it is judged by."""
    content = decisive_settings(cell.config)
    del content["stop"]
    content["evaluation"].pop("target", None)
    content["only"] = cell.only
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def target_of(cell: Cell, value: float | None = None) -> Target | None:
    """The target of a cell, or one of another value."""
    from metis.experiments.config.load import METRICS, task_of

    value = cell.config.evaluation.target if value is None else value
    metric = cell.config.evaluation.metric or "accuracy"
    return None if value is None else Target(metric, value, METRICS[task_of(cell.config)][metric])


def curve_of(cell: Cell, fold: RunFold, wall_seconds: float) -> Curve:
    """What a run has measured so far."""
    points = fold.history
    metrics = tuple(points[-1].metrics) if points else ()
    setting, reason = fold.setting, fold.finish_reason
    return Curve(
        settings_digest(cell),
        metrics,
        tuple((point.version, tuple(round(point.metrics[name], _DIGITS) for name in metrics)) for point in points),
        points[-1].at if points else 0.0,
        points[-1].steps if points else 0,
        "" if reason in (None, "interrupted") else str(reason),
        round(wall_seconds, 1),
        tuple((learner.name, learner.examples, learner.class_counts) for learner in setting.learners),
        tuple(map(str, setting.class_names)),
        f"metis {version('metis-federated')}, torch {version('torch')}, {platform.machine()}",
    )


def write_curve(file: Path, cell: Cell, curve: Curve) -> None:
    """Write it whole or not at all."""
    content: dict[str, Any] = {
        "run": cell.name,
        "policy": cell.label,
        "seed": cell.config.seed,
        "settings": curve.settings,
        "made_by": curve.made_by,
        "ended": curve.ended,
        "at": curve.at,
        "steps": curve.steps,
        "wall_seconds": curve.wall_seconds,
        "class_names": curve.class_names,
        "learners": curve.learners,
        "metrics": curve.metrics,
        "measured": [[number, *values] for number, values in curve.measured],
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in content.items()]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "{\n" + ",\n".join(lines) + "\n}\n")


def read_curve(file: Path) -> Curve | None:
    """None if there is no such file."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        raise DataError(f"{file} is damaged; delete it to run it again") from None
    try:
        metrics = tuple(content["metrics"])
        return Curve(
            content["settings"],
            metrics,
            tuple(_measured(row, len(metrics)) for row in content["measured"]),
            float(content["at"]),
            int(content["steps"]),
            content["ended"],
            float(content["wall_seconds"]),
            tuple((name, int(examples), tuple(counts)) for name, examples, counts in content["learners"]),
            tuple(content["class_names"]),
            content["made_by"],
        )
    except (KeyError, TypeError, ValueError) as problem:
        missing = f"it has no {problem}" if isinstance(problem, KeyError) else problem
        raise DataError(f"{file} is not the curve of a run: {missing}; delete it to run it again") from None


def _measured(row: Sequence[float], metrics: int) -> tuple[int, tuple[float, ...]]:
    """A version and its metrics."""
    number, *values = row
    if len(values) != metrics or not all(map(math.isfinite, values)):
        raise ValueError(f"version {number} has {values}, which must be {metrics} finite numbers")
    return int(number), tuple(map(float, values))


def run_of(cell: Cell, curve: Curve, judged: Run | None = None) -> Run:
    """The run again: its schedule, with what was measured put where it was.

    If it was `judged` by another target before, the schedule is taken from there.
    """
    last = curve.measured[-1][0] if curve.measured else 0
    if judged is not None:
        scheduled = [(now, item) for now, item in judged.events if not isinstance(item, Evaluated)]
        setting = replace(judged.setting, target=target_of(cell))
        return Run(setting, _with_measures(scheduled, curve, setting.target), Model.empty(), curve.wall_seconds)
    dry = dry_run(cell.config, StopRule(rounds=max(1, last)), _assignments(cell, curve))
    counts = {name: classes for name, _, classes in curve.learners}
    learners = tuple(replace(learner, class_counts=counts[learner.name]) for learner in dry.setting.learners)
    setting = replace(dry.setting, learners=learners, class_names=curve.class_names)
    events = _with_measures(dry.events, curve, target_of(cell))
    run = Run(setting, events, Model.empty(), curve.wall_seconds)
    if run.history and run.history[-1].steps != curve.steps:
        raise DataError(
            f"{cell.name}: its schedule has {run.history[-1].steps} steps until version {last}, its curve {curve.steps}"
        )
    return run


def _assignments(cell: Cell, curve: Curve) -> Sequence[Assignment]:
    """Who held how much, as the curve says: sizes that come with the data are known without it."""
    groups = {name: group for group in cell.config.learners for name in group.learner_names}
    first = cell.config.learners[0]
    return [Assignment(name, groups.get(name, first), np.arange(count)) for name, count, _ in curve.learners]


def _with_measures(
    events: Sequence[tuple[float, Event | Action]], curve: Curve, target: Target | None
) -> list[tuple[float, Event | Action]]:
    """A model that reaches the target by chance is not conclusive: the run has not reached it yet."""
    measured = {number: dict(zip(curve.metrics, values, strict=True)) for number, values in curve.measured}
    steady = Steady(target)
    result: list[tuple[float, Event | Action]] = []
    if 0 in measured:
        result.append((0.0, Evaluated(0, measured[0], conclusive=steady.note(0.0, measured[0]))))
    for now, item in events:
        result.append((now, item))
        if isinstance(item, CommunityPublished) and item.stamp.version in measured and item.stamp.version > 0:
            metrics = measured[item.stamp.version]
            result.append((now, Evaluated(item.stamp.version, metrics, conclusive=steady.note(now, metrics))))
    return result


def load_runs(cells: Sequence[Cell], folder: Path, judged: Mapping[str, Run] | None = None) -> dict[str, Run]:
    """The runs of these cells whose curves are kept, finished or not, by the names of the cells."""
    judged = {} if judged is None else judged
    runs = {}
    for cell in cells:
        curve = read_curve(curve_file(folder, cell))
        if curve is not None and curve.settings == settings_digest(cell) and len(curve.measured) > 1:
            runs[cell.name] = run_of(cell, curve, judged.get(cell.name))
    return runs


def at_other_targets(evidence: Evidence, results: Collection[str], folder: Path) -> Evidence:
    """The same runs, judged by the second targets of the environments that have one."""
    environments = {name: one.at_other_target() for name, one in evidence.environments.items()}
    judged = [one for one in environments.values() if one is not None]
    cells = [cell for one in judged for seeded in one.seeded() for cell in seeded.needed_for(results)]
    changed = {name: one or evidence.environments[name] for name, one in environments.items()}
    return Evidence(
        evidence.scale, changed, evidence.runs | load_runs(cells, folder, evidence.runs), evidence.mixing_times
    )
