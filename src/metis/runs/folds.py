"""Folds over the events of a run: its history and costs, and what each learner did when."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from metis.core.costs import CostLedger, Costs, Energy, Moment
from metis.core.events import (
    Action,
    CohortFixed,
    CommunityPublished,
    Evaluated,
    Event,
    Finish,
    LearnerId,
    LearnerJoined,
    LearnerLeft,
    LearnerSetAside,
    LearnerWithdrawn,
    MemberRemoved,
    RolledBack,
    SendTask,
    StopRuleChanged,
    TaskFailed,
    UpdateRefused,
    UpdateRequest,
)
from metis.runs.setting import Setting
from metis.runs.spending import SpendingFold

VALIDATION = "validation_"  # before the name of a metric: on the validation examples
_UNEVALUATED = 100  # published models whose costs are remembered until they are evaluated, at most
_REMEMBERED = 2000  # of all learners together: fewer models where there are many learners


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One evaluation of the community model, with the costs up to its publication."""

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


class RunFold:
    """Folds events and actions into history and costs as they come."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.now = 0.0
        self.version = 0
        self.history: list[HistoryPoint] = []
        self.by_learner: dict[LearnerId, tuple[int, dict[str, float]]] = {}  # version and metrics of its latest report
        self.evaluations = 0  # more than points of the history where a model is evaluated in two places
        self.costs_at_target: Costs | None = None
        self._best: int | None = None  # index in the history
        self.refused: list[tuple[float, UpdateRefused]] = []
        self.set_aside: list[tuple[float, LearnerSetAside]] = []
        self.finish_reason: str | None = None
        self.departures, self.cuts, self.resent = 0, 0, 0  # learners that left, cut transfers, bytes that went again
        self.compression_errors: dict[LearnerId, float] = {}  # of the latest update
        self._errors, self._compressed = 0.0, 0
        self.spending = SpendingFold(setting.facts.get("privacy"))
        self._ledger = CostLedger(
            {learner.name: learner.power for learner in setting.learners},
            setting.model_bytes,
            setting.fills_the_period,
            setting.update_bytes,
        )
        # When each model was published: its costs are summed up once it is evaluated, in real time somewhat later.
        self._published: dict[int, Moment] = {0: self._ledger.moment(0.0)}

    def record(self, now: float, item: Event | Action) -> None:
        self.now = now
        self._ledger.record(now, item)
        self.spending.record(item)
        if isinstance(item, UpdateRequest):
            self.cuts, self.resent = self.cuts + item.cuts, self.resent + item.resent
        match item:
            case CommunityPublished():
                self.version = item.stamp.version
                # Before the next tasks are sent: what this model has cost.
                self._published[item.stamp.version] = self._ledger.moment(now)
                max_kept = min(_UNEVALUATED, max(2, _REMEMBERED // max(1, self._ledger.learners)))
                while len(self._published) > max_kept:
                    del self._published[next(iter(self._published))]
            case Evaluated():
                self._evaluated(item)
            case UpdateRequest(notes={"compression_error": error}) if math.isfinite(error):
                self.compression_errors[item.learner] = error
                self._errors += error
                self._compressed += 1
            case UpdateRefused():
                self.refused.append((now, item))
            case LearnerSetAside():
                self.set_aside.append((now, item))
            case LearnerLeft():
                self.departures += 1
            case Finish():
                self.finish_reason = item.reason
            case StopRuleChanged():
                self.finish_reason = None  # or `Finish` follows again
            case _:
                pass

    def _evaluated(self, item: Evaluated) -> None:
        for learner, metrics in item.by_learner.items():
            self.by_learner[learner] = (item.version, metrics)
        if not item.metrics:
            return  # too few sites for a federated value
        # Evaluated so late that its own costs are forgotten: use those of the next model, which are slightly higher.
        version = next((version for version in self._published if version >= item.version), self.version)
        moment, target = self._published[version], self.setting.target
        recent = [point.version for point in self.history[-_UNEVALUATED:]]
        if item.version in recent:  # at the controller and at the learners, say
            index = len(self.history) - len(recent) + recent.index(item.version)
            point = self.history[index]
            self.history[index] = replace(point, metrics={**point.metrics, **item.metrics})
        else:
            index, costs = len(self.history), self._ledger.totals(moment)
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
        self._compare(index, item.metrics)
        self.evaluations += 1
        reached = item.conclusive and target is not None and target.reached_by(item.metrics)
        if self.costs_at_target is None and reached:
            self.costs_at_target = self._ledger.costs(moment)

    def _compare(self, index: int, metrics: dict[str, float]) -> None:
        """Whether this point of the history is the best: by validation examples, where models are measured on any."""
        metric, sign = self.setting.metric, 1 if self.setting.higher_is_better else -1
        validated = VALIDATION + metric in metrics
        name = VALIDATION + metric if validated else metric
        value, before = metrics.get(name, math.nan), self.best
        if not math.isfinite(value) or (before is not None and not validated and VALIDATION + metric in before.metrics):
            return
        if before is None or not sign * value <= sign * before.metrics.get(name, math.nan):
            self._best = index

    @property
    def best(self) -> HistoryPoint | None:
        """The first point with the best value so far."""
        return None if self._best is None else self.history[self._best]

    @property
    def compression_error(self) -> float | None:
        """The share of an update that compression leaves for the next one, on average; None without compression."""
        return self._errors / self._compressed if self._compressed else None

    @property
    def costs(self) -> Costs:
        return self._ledger.costs(self.now)

    def costs_at(self, now: float) -> Costs:
        """The costs at this moment, which is not before the latest event."""
        return self._ledger.costs(now)


SpanKind: TypeAlias = Literal["training", "transfer", "idle", "away"]


@dataclass(frozen=True, slots=True)
class Span:
    """What one learner did from `start` to `end`."""

    learner: LearnerId
    kind: SpanKind
    start: float
    end: float


def timeline(events: Iterable[tuple[float, Event | Action]]) -> list[Span]:
    """What every learner did, from joining to the last event."""
    fold, spans = TimelineFold(), []
    for now, item in events:
        spans += fold.record(now, item)
    return [*spans, *fold.open_spans()]


class TimelineFold:
    """Folds events into spans as they come; those of one learner leave no gaps."""

    def __init__(self) -> None:
        self.now = 0.0
        self._since: dict[LearnerId, float] = {}  # where the next span of a learner starts
        self._away: set[LearnerId] = set()
        self._sent: dict[LearnerId, float] = {}
        self._waited: dict[LearnerId, tuple[float, float]] = {}  # for a window: from when until when

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
                self._waited.pop(item.learner, None)
                return ended
            case CohortFixed():
                self._waited |= {learner: (now - waited, now) for learner, waited in item.waits.items()}
                return []
            case UpdateRequest() | TaskFailed() if item.learner in self._waited:
                trained, opened = self._waited.pop(item.learner)
                del self._sent[item.learner]
                return [
                    *self._until(trained - item.seconds, item.learner, "transfer"),
                    *self._until(trained, item.learner, "training"),
                    *self._until(opened, item.learner, "idle"),
                    *self._until(now, item.learner, "transfer"),
                ]
            case UpdateRequest() | TaskFailed():
                # How a transfer splits into download and upload is not recorded: half each.
                half = max(0.0, now - self._sent.pop(item.learner) - item.seconds) / 2
                return [
                    *self._until(self._since[item.learner] + half, item.learner, "transfer"),
                    *self._until(now - half, item.learner, "training"),
                    *self._until(now, item.learner, "transfer"),
                ]
            case RolledBack():
                ended = [span for learner in self._sent for span in self._until(now, learner, "training")]
                self._sent.clear()
                return ended
            case LearnerLeft() | LearnerWithdrawn() | MemberRemoved() if item.learner in self._since:
                ended = self._until(now, item.learner, "training" if item.learner in self._sent else "idle")
                self._sent.pop(item.learner, None)
                self._away.add(item.learner)
                return ended
            case _:
                return []

    def doing(self, learner: LearnerId) -> tuple[SpanKind, float]:
        """What a learner is doing, and since when; it must have joined."""
        kind: SpanKind = "away" if learner in self._away else "training" if learner in self._sent else "idle"
        return kind, self._since[learner]

    def open_spans(self) -> list[Span]:
        """What every learner is doing, up to the latest event."""
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
