"""A run: what happened, what it cost and what came out, all folded from its events."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeAlias

from metis.core.controller import Target
from metis.core.costs import CostLedger, Costs, Energy, Moment, Power
from metis.core.events import (
    Action,
    CommunityPublished,
    Evaluated,
    Event,
    Finish,
    LearnerId,
    LearnerJoined,
    LearnerLeft,
    LearnerSetAside,
    LearnerWithdrawn,
    SendTask,
    TaskFailed,
    UpdateRefused,
    UpdateRequest,
)
from metis.core.model import Model
from metis.errors import DataError
from metis.files import write_text
from metis.runs.storage import load_model, save_model
from metis.runs.trace import plain_number, read_trace

_UNMEASURED = 100  # published models whose costs are remembered until they are measured, at most
_REMEMBERED = 2000  # of all learners together: with many learners fewer models
EVENTS, SUMMARY, COMMUNITY, CONFIG = "events.jsonl", "summary.json", "community.safetensors", "config.toml"
SETTING = "setting.json"


@dataclass(frozen=True)
class LearnerInfo:
    """A learner as the federation was set up."""

    name: LearnerId
    examples: int
    batch_size: int
    time_per_batch: float  # nominal; NaN if nobody knows it
    power: Power = field(default_factory=Power)
    class_counts: tuple[int, ...] = ()  # examples of each class, for a picture of the partition


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """The community model measured once, with the costs up to its publication."""

    at: float  # parallel time
    version: int
    update_requests: int
    steps: int
    cumulative_time: float
    idle_time: float
    models_exchanged: int
    bytes_exchanged: int
    energy: Energy
    metrics: dict[str, float]

    def to_record(self) -> dict[str, Any]:
        """As one plain row, the metrics by their own names."""
        return {
            "parallel_time": self.at,
            "version": self.version,
            "update_requests": self.update_requests,
            "steps": self.steps,
            "cumulative_time": self.cumulative_time,
            "idle_time": self.idle_time,
            "models_exchanged": self.models_exchanged,
            "bytes_exchanged": self.bytes_exchanged,
            "energy_equation": self.energy.equation,
            "energy_active": self.energy.active,
            "energy_idle_charged": self.energy.idle_charged,
            **self.metrics,
        }


SpanKind: TypeAlias = Literal["training", "transfer", "idle", "away"]


@dataclass(frozen=True, slots=True)
class Span:
    """What one learner did for a while."""

    learner: LearnerId
    kind: SpanKind
    start: float
    end: float


@dataclass(frozen=True)
class Setting:
    """What must be known besides the events to fold them into a run."""

    policy: str  # as written in a configuration
    label: str  # as shown
    seed: int
    learners: tuple[LearnerInfo, ...]
    model_bytes: int
    fills_the_period: bool
    metric: str
    higher_is_better: bool = True
    target: Target | None = None
    class_names: tuple[str, ...] = ()
    real_time: bool = False  # learners are real sites and the clock is the wall's
    update_bytes: int | None = None  # of what learners hand in, if it is compressed
    facts: dict[str, Any] = field(default_factory=dict)  # dataset, network, versions: shown in reports

    def to_json(self) -> dict[str, Any]:
        return {
            "model_bytes": self.model_bytes,
            **({} if self.update_bytes is None else {"update_bytes": self.update_bytes}),
            "fills_the_period": self.fills_the_period,
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
            "target": None if self.target is None else self.target.value,
            "class_names": list(self.class_names),
            "real_time": self.real_time,
            "facts": self.facts,
            "learners": [
                {
                    "name": learner.name,
                    "examples": learner.examples,
                    "batch_size": learner.batch_size,
                    "time_per_batch": learner.time_per_batch if math.isfinite(learner.time_per_batch) else None,
                    "power": [learner.power.active, learner.power.idle, learner.power.unit],
                    "class_counts": list(learner.class_counts),
                }
                for learner in self.learners
            ],
        }

    @staticmethod
    def from_summary(summary: dict[str, Any]) -> Setting:
        """What `to_json` wrote; raises ValueError, KeyError or TypeError if it did not."""
        setting = summary["setting"]
        metric, higher = _checked(setting["metric"], str), setting["higher_is_better"]
        target = _checked(setting["target"], int, float, NoneType)
        return Setting(
            policy=_checked(summary["policy"], str),
            label=_checked(summary["label"], str),
            seed=summary["seed"],
            learners=tuple(
                LearnerInfo(
                    _checked(row["name"], str),
                    _checked(row["examples"], int),
                    _checked(row["batch_size"], int),
                    math.nan if row["time_per_batch"] is None else _checked(row["time_per_batch"], int, float),
                    Power(*row["power"]),
                    tuple(_checked(count, int) for count in row["class_counts"]),
                )
                for row in setting["learners"]
            ),
            model_bytes=_checked(setting["model_bytes"], int),
            update_bytes=_checked(setting.get("update_bytes"), int, NoneType),
            fills_the_period=setting["fills_the_period"],
            metric=metric,
            higher_is_better=higher,
            target=None if target is None else Target(metric, target, higher),
            class_names=tuple(setting["class_names"]),
            real_time=setting.get("real_time", False),
            facts=_checked(setting["facts"], dict),
        )

    def save(self, folder: Path) -> None:
        """Write it before the first event, so that a run can be watched from outside while it goes on."""
        _write_json(
            folder / SETTING,
            {"policy": self.policy, "label": self.label, "seed": self.seed, "setting": self.to_json()},
        )


def _checked(value: Any, *kinds: type) -> Any:
    """The value, if it is of one of these types and no number beyond those that a run can have."""
    if not isinstance(value, kinds) or (isinstance(value, (int, float)) and not abs(value) < 1e18):
        raise TypeError(f"{value!r} should be {' or '.join(kind.__name__ for kind in kinds)}")
    return value


class RunFold:
    """Folds events and actions into history and costs as they come."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.now = 0.0
        self.version = 0
        self.history: list[HistoryPoint] = []
        self.evaluations = 0  # taken into the history; more than its points where one model is measured twice
        self.costs_at_target: Costs | None = None
        self.refused: list[tuple[float, UpdateRefused]] = []
        self.set_aside: list[tuple[float, LearnerSetAside]] = []
        self.finish_reason: str | None = None
        self.compression_errors: dict[LearnerId, float] = {}  # of the latest update
        self._errors, self._compressed = 0.0, 0
        self._ledger = CostLedger(
            {learner.name: learner.power for learner in setting.learners},
            setting.model_bytes,
            setting.fills_the_period,
            setting.update_bytes,
        )
        # When each model was published: its bill is made if it is measured, under the wall clock some time later.
        self._published: dict[int, Moment] = {0: self._ledger.moment(0.0)}

    def record(self, now: float, item: Event | Action) -> None:
        self.now = now
        self._ledger.record(now, item)
        match item:
            case CommunityPublished():
                self.version = item.stamp.version
                # Before the tasks that follow are sent: what this model has cost.
                self._published[item.stamp.version] = self._ledger.moment(now)
                most = min(_UNMEASURED, max(2, _REMEMBERED // max(1, self._ledger.learners)))
                while len(self._published) > most:
                    del self._published[next(iter(self._published))]
            case Evaluated():
                self._evaluated(item)
            case UpdateRequest() if math.isfinite(item.compression_error):
                self.compression_errors[item.learner] = item.compression_error
                self._errors += item.compression_error
                self._compressed += 1
            case UpdateRefused():
                self.refused.append((now, item))
            case LearnerSetAside():
                self.set_aside.append((now, item))
            case Finish():
                self.finish_reason = item.reason
            case _:
                pass

    def _evaluated(self, item: Evaluated) -> None:
        # Measured so late that its own costs are forgotten: those of the next that is remembered, which is a bit more.
        version = next((version for version in self._published if version >= item.version), self.version)
        moment, target = self._published[version], self.setting.target
        recent = [point.version for point in self.history[-_UNMEASURED:]]
        if item.version in recent:  # measured before at another place: at the controller and at the learners, say
            place = recent.index(item.version) - len(recent)
            point = self.history[place]
            self.history[place] = replace(point, metrics={**point.metrics, **item.metrics})
        else:
            costs = self._ledger.totals(moment)
            self.history.append(
                HistoryPoint(
                    costs.parallel_time,
                    item.version,
                    costs.update_requests,
                    costs.steps,
                    costs.cumulative_time,
                    costs.idle_time,
                    costs.models_exchanged,
                    costs.bytes_exchanged,
                    costs.energy,
                    item.metrics,
                )
            )
        self.evaluations += 1
        if self.costs_at_target is None and target is not None and target.reached_by(item.metrics):
            self.costs_at_target = self._ledger.costs(moment)

    @property
    def compression_error(self) -> float | None:
        """What the compression of an update left for the next one, as a share of it, on average; None without any."""
        return self._errors / self._compressed if self._compressed else None

    @property
    def costs(self) -> Costs:
        return self._ledger.costs(self.now)

    def costs_at(self, now: float) -> Costs:
        """The bill at this moment, which is not before the latest event."""
        return self._ledger.costs(now)


@dataclass
class Run:
    """The result of a federation: history, costs, the community model, tables and pictures."""

    setting: Setting
    events: list[tuple[float, Event | Action]]  # without weights
    community_model: Model
    wall_seconds: float
    folder: Path | None = None
    folded: InitVar[RunFold | None] = None  # the events, where somebody has folded them already

    def __post_init__(self, folded: RunFold | None) -> None:
        fold = folded
        if fold is None:
            fold = RunFold(self.setting)
            for now, item in self.events:
                fold.record(now, item)
        self._fold = fold

    # --- what came out ------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        return self.setting.label

    @property
    def history(self) -> list[HistoryPoint]:
        """One point for each evaluation of the community model."""
        return self._fold.history

    @property
    def costs(self) -> Costs:
        """The bill at the end."""
        return self._fold.costs

    @property
    def costs_at_target(self) -> Costs | None:
        """The bill when the target was first reached; None if it was not."""
        return self._fold.costs_at_target

    @property
    def compression_error(self) -> float | None:
        """What the compression of an update left for the next one, as a share of it, on average; None without any."""
        return self._fold.compression_error

    @property
    def rounds(self) -> int:
        """Community models published."""
        return self._fold.version

    @property
    def refused(self) -> list[tuple[float, UpdateRefused]]:
        return self._fold.refused

    @property
    def set_aside(self) -> list[tuple[float, LearnerSetAside]]:
        return self._fold.set_aside

    @property
    def finish_reason(self) -> str:
        return self._fold.finish_reason or "not finished"

    @property
    def metric_values(self) -> list[float]:
        """The metric at each point of the history."""
        return [point.metrics.get(self.setting.metric, math.nan) for point in self.history]

    @property
    def final_metric(self) -> float | None:
        return self.metric_values[-1] if self.history else None

    @property
    def best_metric(self) -> float | None:
        finite = [value for value in self.metric_values if math.isfinite(value)]
        if not finite:
            return None
        return max(finite) if self.setting.higher_is_better else min(finite)

    def spans(self) -> list[Span]:
        """The timeline of every learner, without gaps from its joining to the end."""
        return timeline(self.events)

    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds; the names are a contract."""
        reached, target = self.costs_at_target, self.setting.target
        costs = self.costs.to_json()
        unit = self.setting.learners[0].power.unit if self.setting.learners else "epsilon"
        return {
            "policy": self.setting.policy,
            "label": self.setting.label,
            "seed": self.setting.seed,
            "learners": len(self.setting.learners),
            "rounds": self.rounds,
            **costs,
            **({} if self.compression_error is None else {"compression_error": self.compression_error}),
            "energy_unit": "joule" if unit == "watt" else "epsilon second",
            "metric": {
                "name": self.setting.metric,
                # JSON knows no infinity: a model that predicts beyond the numbers has no metric.
                "final": self.final_metric if math.isfinite(self.final_metric or 0.0) else None,
                "best": self.best_metric,
            },
            "target": {
                "metric": self.setting.metric,
                "value": None if target is None else target.value,
                "reached": reached is not None,
                "parallel_time": None,
                "update_requests": None,
                "steps": None,
                **({} if reached is None else reached.to_json()),
            },
            "finish_reason": self.finish_reason,
            "wall_seconds": self.wall_seconds,
            "community_sha256": self.community_model.sha256(),
            "setting": self.setting.to_json(),
        }

    def to_records(self) -> list[dict[str, Any]]:
        """The history as plain rows."""
        return [{"policy": self.policy, **point.to_record()} for point in self.history]

    def to_pandas(self) -> Any:
        """The history as a pandas table; needs the extra `tables`."""
        import pandas

        return pandas.DataFrame(self.to_records())

    def learners_to_records(self) -> list[dict[str, Any]]:
        """One plain row a learner: what it holds, how it spent its time, its energy."""
        known = {learner.name: learner for learner in self.setting.learners}
        rows = []
        for name, costs in self.costs.by_learner.items():
            learner = known.get(name)
            rows.append(
                {
                    "policy": self.policy,
                    "learner": name,
                    "examples": None if learner is None else learner.examples,
                    "batch_size": None if learner is None else learner.batch_size,
                    "time_per_batch": None if learner is None else learner.time_per_batch,
                    "steps": costs.steps,
                    "update_requests": costs.update_requests,
                    "refused_updates": costs.refused,
                    "active": costs.active,
                    "transfer": costs.transfer,
                    "idle": costs.idle,
                    "away": costs.away,
                    "energy_equation": costs.energy.equation,
                    "energy_active": costs.energy.active,
                    "energy_idle_charged": costs.energy.idle_charged,
                }
            )
        return rows

    def learners_to_pandas(self) -> Any:
        """`learners_to_records` as a pandas table; needs the extra `tables`."""
        import pandas

        return pandas.DataFrame(self.learners_to_records())

    def plot(self, path: str | Path | None = None) -> Any:
        """The metric over parallel time and over update requests; saved if a path is given."""
        # A layer above this one can draw; the package itself, which is always loaded, knows it.
        return sys.modules["metis"].draw([self], path)

    def _repr_html_(self) -> str:
        """In a notebook: the costs and the curves."""
        return str(sys.modules["metis"].show(self))

    def __repr__(self) -> str:
        final = "not evaluated" if self.final_metric is None else f"{self.setting.metric} {self.final_metric:.4f}"
        costs = self.costs
        return (
            f"<Run {self.policy}: {final} after {self.rounds} rounds, {costs.parallel_time:g} s parallel time, "
            f"{costs.update_requests} update requests, {costs.steps} steps>"
        )

    # --- directories ----------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write the summary and the community model; the events were written as they came."""
        save_model(folder / COMMUNITY, self.community_model, {"policy": self.setting.policy})
        _write_json(folder / SUMMARY, self.summary())
        self.folder = folder

    @staticmethod
    def load(folder: str | Path) -> Run:
        """Read a finished run back from its directory."""
        folder = Path(folder)
        try:
            summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
            setting = Setting.from_summary(summary)
        except FileNotFoundError:
            raise DataError(f"{folder} has no {SUMMARY}: it is not the directory of a finished run") from None
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise DataError(f"{folder / SUMMARY} is not the summary of a run: {problem!r}") from problem
        events = list(read_trace(folder / EVENTS))
        model = load_model(folder / COMMUNITY)
        try:
            run = Run(setting, events, model, summary["wall_seconds"], folder)
            told = run.summary()
        except (KeyError, TypeError, AssertionError) as problem:
            raise DataError(f"{folder / EVENTS} is damaged: its events cannot follow each other") from problem
        for key in ("rounds", "steps", "update_requests", "finish_reason", "community_sha256"):
            if told[key] != summary.get(key):
                raise DataError(
                    f"the files in {folder} are not of one run: {SUMMARY} says {key} {summary.get(key)}, "
                    f"the others {told[key]}"
                )
        return run


def timeline(events: Iterable[tuple[float, Event | Action]]) -> list[Span]:
    """What every learner did, from its joining to the end of the events."""
    fold, spans = TimelineFold(), []
    for now, item in events:
        spans += fold.record(now, item)
    return [*spans, *fold.open_spans()]


class TimelineFold:
    """Folds events into spans as they come; those of one learner follow each other without a gap."""

    def __init__(self) -> None:
        self.now = 0.0
        self._since: dict[LearnerId, float] = {}  # where the next span of a learner starts
        self._away: set[LearnerId] = set()
        self._sent: dict[LearnerId, float] = {}

    def record(self, now: float, item: Event | Action) -> list[Span]:
        """The spans that have ended with this event."""
        self.now = max(self.now, now)
        match item:
            case LearnerJoined():
                self._since.setdefault(item.learner, 0.0)
                ended = self._until(now, item.learner, "away")
                self._away.discard(item.learner)
                return ended
            case SendTask():
                ended = self._until(now, item.learner, "idle")
                self._sent[item.learner] = now
                return ended
            case UpdateRequest() | TaskFailed():
                # How a transfer splits into download and upload is not recorded: half each.
                half = max(0.0, now - self._sent.pop(item.learner) - item.seconds) / 2
                return [
                    *self._until(self._since[item.learner] + half, item.learner, "transfer"),
                    *self._until(now - half, item.learner, "training"),
                    *self._until(now, item.learner, "transfer"),
                ]
            case LearnerLeft() | LearnerWithdrawn() if item.learner in self._since:
                ended = self._until(now, item.learner, "training" if item.learner in self._sent else "idle")
                self._sent.pop(item.learner, None)
                self._away.add(item.learner)
                return ended
            case _:
                return []

    def doing(self, learner: LearnerId) -> tuple[SpanKind, float]:
        """What a learner does at the moment, and since when; it must have joined."""
        kind: SpanKind = "away" if learner in self._away else "training" if learner in self._sent else "idle"
        return kind, self._since[learner]

    def open_spans(self) -> list[Span]:
        """What every learner does at the moment, cut off at the latest event."""
        spans = []
        for learner in self._since:
            kind, since = self.doing(learner)
            if self.now > since:
                spans.append(Span(learner, kind, since, self.now))
        return spans

    def _until(self, end: float, learner: LearnerId, kind: SpanKind) -> list[Span]:
        start = self._since[learner]
        if not end > start:
            return []
        self._since[learner] = end
        return [Span(learner, kind, start, end)]


def _write_json(path: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False, default=plain_number)
    write_text(path, text + "\n")
