"""One run as the page shows it: folded event by event, and sent in increments that a page adds up.

Everything is bounded, however long a run lasts: curves keep every second point when they grow too long, and the older
half of a learner's timeline is merged in pairs, into spans with the time of each kind.

An increment is a dictionary of plain values; `snapshot` is the same for a new page. A page that has added all
increments has what a snapshot would give it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from metis.core.costs import CostLedger, Costs
from metis.core.events import (
    Action,
    CommunityPublished,
    Evaluated,
    Event,
    Finish,
    LearnerJoined,
    LearnerLeft,
    LearnerSetAside,
    LearnerWithdrawn,
    MemberRemoved,
    SendTask,
    StopRuleChanged,
    TaskFailed,
    UpdateCommitted,
    UpdateRefused,
    UpdateRequest,
)
from metis.reporting.dashboard.problems import Problem, problems
from metis.reporting.dashboard.series import KINDS, Series, merged, short
from metis.reporting.spending import left_and_spent
from metis.runs.folds import Span, TimelineFold
from metis.runs.periods import PeriodsFold
from metis.runs.setting import Setting
from metis.runs.spending import SpendingFold
from metis.runs.trace import from_line

Increment = dict[str, Any]

# The columns of a learner's row, in the order in which they are sent.
COLUMNS = (
    "index", "examples", "time_per_batch", "steps", "seconds", "contribution", "seen", "bytes", "state", "since",
    "updates", "refused", "steps_left", "rounds_left", "epsilon",
    "equation", "active", "idle_charged", "equation_rate", "active_rate", "idle_charged_rate",
)  # fmt: skip
STATES = ("expected", "training", "idle", "away", "set aside", "withdrawn", "late")
MIXED = len(KINDS)  # the kind of a merged span

MAX_SPANS = 120_000  # of all learners of a run
_MIN, _MAX = 64, 4096  # of one learner
MAX_VERSIONS = 20_000
_COSTS_EVERY = 0.02  # share of the run's time between two points of the costs
_CHANGES = 50  # of the length of periods that a page lists
_PART = 4000  # spans in one part of a snapshot
_UNEVALUATED = 100  # published models that may still be evaluated
_GRACE = 0.1  # share of its time that a learner may exceed before it is late
_TOLERANCE = 2.0  # times the expected time, for a learner whose task has no time limit


@dataclass(slots=True)
class LearnerRow:
    index: int
    name: str
    examples: int | None = None
    time_per_batch: float | None = None
    steps: int | None = None  # B_k: of its latest task
    seconds: float | None = None
    contribution: float | None = None
    seen: float | None = None
    exchanged: int = 0  # bytes
    updates: int = 0
    refused: int = 0
    joined: bool = False
    withdrawn: float | None = None
    aside: tuple[float, str] | None = None
    refusal: tuple[float, UpdateRefused] | None = None  # since its last update that was mixed
    sent_at: float | None = None
    overhead: float = 0.0
    late: bool = False
    spans: list[tuple[float, Any]] = field(default_factory=list)  # end, and the kind or the seconds of each kind


class RunView:
    """Folds the events of one run, and gives what is new since the last increment."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.metric = setting.metric
        self.now = 0.0  # of the latest event
        self.events = self.version = 0
        self.damage: str | None = None
        self.finish_reason: str | None = None
        self.history, self.costs = Series(), Series()
        self.periods = Series()  # when each began, and its length
        self.rhythm = PeriodsFold()
        self._changes_sent = -1.0  # when the latest one of them was
        self._ledger = CostLedger(
            {learner.name: learner.power for learner in setting.learners},
            setting.model_bytes,
            setting.fills_the_period,
            setting.update_bytes,
        )
        self._update_bytes = setting.model_bytes if setting.update_bytes is None else setting.update_bytes
        self._timeline = TimelineFold()
        self._spending = SpendingFold(setting.facts.get("privacy"))
        self._learners: dict[str, LearnerRow] = {}
        self.learners: list[LearnerRow] = []
        self._update_requests = 0
        self._costs_until = 0.0
        self._published: dict[int, tuple[float, int]] = {0: (0.0, 0)}  # version: when, and update requests by then
        self._versions: list[tuple[int, float]] = []
        self.latest: tuple[int, float] | None = None  # version and metric of the last evaluated model
        self._first = True
        self._names_sent = 0
        self._touched: set[int] = set()
        self._new_spans: dict[int, list[float]] = {}
        self._new_versions: list[float] = []
        self._problems_sent: list[Problem] | None = None
        self._sent: tuple[int, str | None] | None = None  # events and damage
        for learner in setting.learners:
            known = self._learner(learner.name)
            known.examples = learner.examples or None
            known.time_per_batch = learner.time_per_batch if math.isfinite(learner.time_per_batch) else None

    # --- folding --------------------------------------------------------------------------------

    def feed(self, lines: Sequence[bytes]) -> None:
        """Read lines of `events.jsonl`; the view stops at one that is not valid."""
        for line in lines:
            if self.damage is not None:
                return
            try:
                self.record(*from_line(line.decode()))
            except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
                self.damage = f"line {self.events + 1} of its events is not valid; what came before it is shown"

    def record(self, now: float, item: Event | Action) -> None:
        self._ledger.record(now, item)
        self._spending.record(item)
        for span in self._timeline.record(now, item):
            self._add_span(span)
        begun = self.rhythm.record(now, item)
        if begun is not None and math.isfinite(begun.seconds):
            self.periods.add([short(now), short(begun.seconds)])
        self.events += 1
        self.now = max(self.now, now)
        match item:
            case UpdateRequest() | TaskFailed():
                self._handed_in(now, item)
            case SendTask():
                learner = self._touch(item.learner)
                budget = item.task.budget
                learner.steps = budget.steps
                learner.seconds = budget.seconds if math.isfinite(budget.seconds) else None
                learner.sent_at = now
                learner.exchanged += self.setting.model_bytes
            case UpdateCommitted():
                learner = self._touch(item.learner)
                learner.contribution, learner.refusal = item.contribution_value, None
            case CommunityPublished():
                self._publish(now, item)
            case Evaluated():
                self._evaluate(item)
            case UpdateRefused():
                learner = self._touch(item.learner)
                learner.refused += 1
                learner.refusal = (now, item)
            case LearnerJoined():
                learner = self._touch(item.learner)
                learner.joined, learner.examples, learner.seen = True, item.examples, now
                learner.withdrawn = learner.aside = None
            case LearnerLeft() | LearnerWithdrawn() | MemberRemoved():
                learner = self._touch(item.learner)
                learner.sent_at, learner.seen = None, now
                learner.withdrawn = None if isinstance(item, LearnerLeft) else now
            case LearnerSetAside():
                self._touch(item.learner).aside = (now, item.reason)
            case Finish() | StopRuleChanged():
                self.finish_reason = item.reason if isinstance(item, Finish) else None
                self._touched.update(range(len(self.learners)))
            case _:
                pass

    def _learner(self, name: str) -> LearnerRow:
        learner = self._learners.get(name)
        if learner is None:
            learner = self._learners[name] = LearnerRow(len(self.learners), name)
            self.learners.append(learner)
            self._touched.add(learner.index)
        return learner

    def _touch(self, name: str) -> LearnerRow:
        learner = self._learner(name)
        self._touched.add(learner.index)
        return learner

    def _handed_in(self, now: float, item: UpdateRequest | TaskFailed) -> None:
        learner = self._touch(item.learner)
        learner.seen = now
        if learner.sent_at is not None and math.isfinite(item.seconds):
            learner.overhead = max(0.0, now - learner.sent_at - item.seconds)
        learner.sent_at = None
        if isinstance(item, UpdateRequest):
            self._update_requests += 1
            learner.updates += 1
            learner.exchanged += self._update_bytes
            if math.isfinite(item.time_per_batch):
                learner.time_per_batch = item.time_per_batch

    def _publish(self, now: float, item: CommunityPublished) -> None:
        version = self.version = item.stamp.version
        self._published[version] = (now, self._update_requests)
        self._published.pop(version - _UNEVALUATED, None)
        self._versions.append((version, now))
        self._new_versions += [version, now]
        if len(self._versions) > MAX_VERSIONS:
            half = MAX_VERSIONS // 2
            self._versions = [*self._versions[:half:2], *self._versions[half:]]
        # The costs of a thousand learners take milliseconds: not with every model, but as time goes by.
        if now >= self._costs_until:
            self._costs_until = now * (1 + _COSTS_EVERY)
            self.costs.add(self._cost_point(now, self._ledger.costs(now)))

    def _cost_point(self, now: float, costs: Costs) -> list[float | None]:
        energy = costs.energy
        return [*map(short, (now, energy.equation, energy.active, energy.idle_charged)), costs.update_requests]

    def _evaluate(self, item: Evaluated) -> None:
        self.metric = self.metric or next(iter(item.metrics), "")
        if self.metric not in item.metrics or item.version not in self._published:
            return
        at, requests = self._published[item.version]
        value = item.metrics[self.metric]
        point = [short(at), requests, item.version, short(value)]
        if self.history.points and self.history.points[-1][2] == item.version:
            self.history.replace_last(point)
        else:
            self.history.add(point)
        self.latest = (item.version, value)

    def _add_span(self, span: Span) -> None:
        learner = self._learner(span.learner)
        kind, end = KINDS.index(span.kind), float(f"{span.end:.9g}")
        if end <= (learner.spans[-1][0] if learner.spans else 0.0):  # only a rounding error
            return
        learner.spans.append((end, kind))
        self._new_spans.setdefault(learner.index, []).extend((kind, end))
        room = min(_MAX, max(_MIN, MAX_SPANS // len(self.learners)))
        if len(learner.spans) > room:
            learner.spans = merged(learner.spans, room // 4 * 2)

    # --- sending --------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """Whether an increment would contain more than the time."""
        return self._first or self._sent != (self.events, self.damage) or bool(self._touched)

    def skip(self) -> None:
        """Forget what is new, because no page is open; the next one gets a snapshot."""
        self._touched.clear()
        self._new_spans.clear()
        self._new_versions.clear()

    def increment(self, now: float | None = None) -> Increment:
        """What is new since the last increment, at this second of the run (by default at the latest event)."""
        now = self.now if now is None or self.finish_reason is not None else max(now, self.now)
        news: Increment = {"now": short(now)}
        if self._first:
            news["head"] = self._head()
            self._first = False
        self._note_late(now)
        if self._names_sent < len(self.learners):
            news["names"] = [self._names_sent, *(learner.name for learner in self.learners[self._names_sent :])]
            self._names_sent = len(self.learners)
        costs = self._ledger.costs(now)
        if self._touched:
            news["rows"] = self._rows(sorted(self._touched), costs, self._ledger.costs(now + 1.0))
            self._touched.clear()
        if self._new_spans:
            news["spans"] = [[index, *spans] for index, spans in self._new_spans.items()]
            self._new_spans.clear()
        if self._new_versions:
            news["versions"] = [short(value) for value in self._new_versions]
            self._new_versions.clear()
        for name, series in (("history", self.history), ("costs", self.costs), ("periods", self.periods)):
            points = series.increment()
            if points is not None:
                news[name] = points
        if self.rhythm.changes and self.rhythm.changes[-1].at > self._changes_sent:
            self._changes_sent = self.rhythm.changes[-1].at
            news["changes"] = self._changes_of_periods()
        news["totals"] = self._totals(costs)
        wrong = problems(self)
        if wrong != self._problems_sent:
            news["problems"] = self._problems_sent = wrong
        self._sent = (self.events, self.damage)
        return news

    def snapshot(self, now: float | None = None) -> Iterator[Increment]:
        """Everything that a page needs, in parts; call it right after `increment`, so that nothing is sent twice."""
        now = self.now if now is None or self.finish_reason is not None else max(now, self.now)
        costs = self._ledger.costs(now)
        yield {
            "now": short(now),
            "head": self._head(),
            "names": [0, *(learner.name for learner in self.learners)],
            "rows": self._rows(range(len(self.learners)), costs, self._ledger.costs(now + 1.0)),
            "versions": [short(value) for pair in self._versions for value in pair],
            "history": [0, *self.history.points],
            "costs": [0, *self.costs.points],
            "periods": [0, *self.periods.points],
            **({"changes": changes} if (changes := self._changes_of_periods()) else {}),
            "totals": self._totals(costs),
            "problems": problems(self),
        }
        part: list[list[float]] = []
        held = 0
        for learner in self.learners:
            flat: list[float] = [learner.index]
            for end, kind in learner.spans:
                flat += [kind, end] if isinstance(kind, int) else [MIXED, end, *kind]
            if learner.spans:
                part.append(flat)
                held += len(learner.spans)
            if held >= _PART:
                yield {"now": short(now), "spans": part}
                part, held = [], 0
        if part:
            yield {"now": short(now), "spans": part}

    def _changes_of_periods(self) -> list[list[Any]]:
        """Why periods changed: when and what, the latest ones."""
        return [[short(change.at), change.text] for change in self.rhythm.changes[-_CHANGES:]]

    def _head(self) -> Increment:
        setting = self.setting
        unit = setting.learners[0].power.unit if setting.learners else "epsilon"
        return {
            "label": setting.label,
            "policy": setting.policy,
            "seed": setting.seed,
            "metric": self.metric or "metric",
            "higher": setting.higher_is_better,
            "target": None if setting.target is None else setting.target.value,
            "unit": "J" if unit == "watt" else "ε s",
            "model_bytes": setting.model_bytes,
            "facts": {key: str(value) for key, value in setting.facts.items() if key in ("dataset", "network")},
        }

    def _rows(self, indices: Sequence[int], costs: Costs, later: Costs) -> list[list[Any]]:
        rows = []
        for index in indices:
            learner = self.learners[index]
            state, since = self.state_of(learner)
            energy, rate = [0.0] * 3, [0.0] * 3
            if learner.name in costs.by_learner:
                spent, soon = costs.by_learner[learner.name].energy, later.by_learner[learner.name].energy
                energy = [spent.equation, spent.active, spent.idle_charged]
                if self.finish_reason is None:
                    # Between two events energy grows evenly, so that the page knows it at any time.
                    rate = [soon.equation - energy[0], soon.active - energy[1], soon.idle_charged - energy[2]]
            rows.append(
                [
                    index,
                    learner.examples,
                    short(learner.time_per_batch),
                    learner.steps,
                    short(learner.seconds),
                    short(learner.contribution),
                    short(learner.seen),
                    learner.exchanged,
                    STATES.index(state),
                    short(since),
                    learner.updates,
                    learner.refused,
                    *left_and_spent(self.setting.facts, self._spending, learner.name),
                    *map(short, energy),
                    *(short(round(value, 9)) for value in rate),
                ]
            )
        return rows

    def state_of(self, learner: LearnerRow) -> tuple[str, float | None]:
        if not learner.joined:
            return "expected", None
        doing, since = self._timeline.doing(learner.name)
        if learner.withdrawn is not None:
            return "withdrawn", since
        if doing == "idle" and learner.aside is not None:
            return "set aside", since
        return "late" if learner.late else doing, since

    def _note_late(self, now: float) -> None:
        for learner in self.learners:
            late = self.finish_reason is None and learner.sent_at is not None and self._overdue(learner, now)
            if late != learner.late:
                learner.late = late
                self._touched.add(learner.index)

    def _allowed(self, learner: LearnerRow) -> float:
        """Seconds after its task was sent at which a learner is late, as a barrier would wait for it."""
        batch = learner.time_per_batch or 0.0
        if learner.seconds is not None:
            return learner.seconds * (1 + _GRACE) + learner.overhead + batch
        if learner.steps is None or learner.time_per_batch is None:
            return math.inf
        return learner.steps * batch * _TOLERANCE + learner.overhead + batch

    def _overdue(self, learner: LearnerRow, now: float) -> bool:
        assert learner.sent_at is not None
        return now - learner.sent_at > self._allowed(learner) + 1e-6 * now

    def _totals(self, costs: Costs) -> Increment:
        learners = costs.by_learner.values()
        energy = costs.energy
        return {
            "version": self.version,
            "events": self.events,
            "requests": costs.update_requests,
            "refused": costs.refused,
            "models": costs.models_exchanged,
            "bytes": costs.bytes_exchanged,
            "steps": costs.steps,
            "training": short(costs.cumulative_time),
            "transfer": short(costs.transfer_time),
            "idle": short(costs.idle_time),
            "away": short(math.fsum(learner.away for learner in learners)),
            "energy": [short(energy.equation), short(energy.active), short(energy.idle_charged)],
            "learners": len(self.learners),
            "finished": self.finish_reason,
        }
