"""One run as the page shows it: folded event by event, and told in increments that a page can add up.

Everything is bounded, however long a run lasts: curves keep every second point when they grow too long, and the older
half of a learner's timeline is merged pairwise into spans that tell how much of each kind they hold.

An increment is a dictionary of plain values; `snapshot` is the same for a page that knows nothing yet. A page that has
added all increments has what a snapshot would give it.
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
    SendTask,
    TaskFailed,
    UpdateCommitted,
    UpdateRefused,
    UpdateRequest,
)
from metis.runs.folds import Span, TimelineFold
from metis.runs.setting import Setting
from metis.runs.trace import from_line

Increment = dict[str, Any]

# The columns of a learner's row, in the order in which they are sent.
COLUMNS = (
    "index", "examples", "time_per_batch", "steps", "seconds", "contribution", "seen", "bytes", "state", "since",
    "updates", "refused", "equation", "active", "idle_charged", "equation_rate", "active_rate", "idle_charged_rate",
)  # fmt: skip
STATES = ("expected", "training", "idle", "away", "set aside", "withdrawn", "late")
KINDS = ("training", "transfer", "idle", "away")
MIXED = len(KINDS)  # the kind of a merged span

MOST_SPANS = 120_000  # of all learners of a run
_LEAST, _MOST = 64, 4096  # of one learner
MOST_POINTS = 600
MOST_VERSIONS = 20_000
_BETWEEN_BILLS = 0.02  # share of the run's time from one point of the costs to the next
_PART = 4000  # spans in one part of a snapshot
_NAMED = 3  # learners that are told apart in a sentence about several
_UNMEASURED = 100  # published models that may still be measured
_GRACE = 0.1  # share of its time that a learner may take longer before it is called late
_PATIENCE = 2.0  # times what its speed promises, for a learner whose task has no end in time


def _short(value: float | None) -> float | None:
    """Nine digits are more than a screen can show; JSON knows no infinity."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.9g}")


class Series:
    """A curve of bounded length: when it is full every second point is dropped, and of new ones as many.

    The first and the latest point are always there.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        assert most % 2 == 0  # so that the point that is one too many stays
        self.points: list[list[float | None]] = []
        self._most, self._chunk_size, self._count = most, 1, 0
        self._provisional = False  # whether the last point is there only because it is the latest
        self._sent = 0

    def add(self, point: list[float | None]) -> None:
        if self._provisional:
            self._pop()
        self._provisional = self._count % self._chunk_size != 0
        self.points.append(point)
        self._count += 1
        if len(self.points) > self._most and not self._provisional:
            self.points = self.points[::2]
            self._chunk_size *= 2
            self._sent = 0

    def replace_last(self, point: list[float | None]) -> None:
        self._pop()
        self.points.append(point)

    def _pop(self) -> None:
        self.points.pop()
        self._sent = min(self._sent, len(self.points))

    def increment(self) -> list[Any] | None:
        """From where the page must replace what it has, then the points; None if nothing changed."""
        if self._sent == len(self.points):
            return None
        start, self._sent = self._sent, len(self.points)
        return [start, *self.points[start:]]


@dataclass(slots=True)
class _Learner:
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
    refusal: tuple[float, UpdateRefused] | None = None  # since its last update that counted
    sent_at: float | None = None
    overhead: float = 0.0
    late: bool = False
    spans: list[tuple[float, Any]] = field(default_factory=list)  # end, and the kind or the seconds of each kind


class RunView:
    """Folds the events of one run, and tells what is new since it was last asked."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.metric = setting.metric
        self.now = 0.0  # of the latest event
        self.events = 0
        self.version = 0
        self.damage: str | None = None
        self.finish_reason: str | None = None
        self.history = Series()
        self.costs = Series()
        self._ledger = CostLedger(
            {learner.name: learner.power for learner in setting.learners},
            setting.model_bytes,
            setting.fills_the_period,
            setting.update_bytes,
        )
        self._update_bytes = setting.model_bytes if setting.update_bytes is None else setting.update_bytes
        self._timeline = TimelineFold()
        self._learners: dict[str, _Learner] = {}
        self._order: list[_Learner] = []
        self._update_requests = 0
        self._billed_until = 0.0
        self._published: dict[int, tuple[float, int]] = {0: (0.0, 0)}  # version: when, and update requests by then
        self._versions: list[tuple[int, float]] = []
        self._latest: tuple[int, float] | None = None  # version and metric of the last measured model
        self._first = True
        self._names_sent = 0
        self._touched: set[int] = set()
        self._new_spans: dict[int, list[float]] = {}
        self._new_versions: list[float] = []
        self._problems_sent: list[dict[str, str]] | None = None
        self._told: tuple[int, str | None] | None = None  # events and damage
        for learner in setting.learners:
            known = self._learner(learner.name)
            known.examples = learner.examples or None
            known.time_per_batch = learner.time_per_batch if math.isfinite(learner.time_per_batch) else None

    # --- folding --------------------------------------------------------------------------------

    def feed(self, lines: Sequence[bytes]) -> None:
        """Take lines of `events.jsonl` in; at one that cannot be understood the view stops for good."""
        for line in lines:
            if self.damage is not None:
                return
            try:
                self.record(*from_line(line.decode()))
            except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
                self.damage = f"line {self.events + 1} of its events cannot be understood; what came before is shown"

    def record(self, now: float, item: Event | Action) -> None:
        self._ledger.record(now, item)
        for span in self._timeline.record(now, item):
            self._add_span(span)
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
            case LearnerLeft() | LearnerWithdrawn():
                learner = self._touch(item.learner)
                learner.sent_at, learner.seen = None, now
                learner.withdrawn = now if isinstance(item, LearnerWithdrawn) else None
            case LearnerSetAside():
                self._touch(item.learner).aside = (now, item.reason)
            case Finish():
                self.finish_reason = item.reason
                self._touched.update(range(len(self._order)))
            case _:
                pass

    def _learner(self, name: str) -> _Learner:
        learner = self._learners.get(name)
        if learner is None:
            learner = self._learners[name] = _Learner(len(self._order), name)
            self._order.append(learner)
            self._touched.add(learner.index)
        return learner

    def _touch(self, name: str) -> _Learner:
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
        self._published.pop(version - _UNMEASURED, None)
        self._versions.append((version, now))
        self._new_versions += [version, now]
        if len(self._versions) > MOST_VERSIONS:
            half = MOST_VERSIONS // 2
            self._versions = [*self._versions[:half:2], *self._versions[half:]]
        # The bill of a thousand learners takes milliseconds: not with every model, but whenever time has grown a bit.
        if now >= self._billed_until:
            self._billed_until = now * (1 + _BETWEEN_BILLS)
            self.costs.add(self._cost_point(now, self._ledger.costs(now)))

    def _cost_point(self, now: float, costs: Costs) -> list[float | None]:
        energy = costs.energy
        return [*map(_short, (now, energy.equation, energy.active, energy.idle_charged)), costs.update_requests]

    def _evaluate(self, item: Evaluated) -> None:
        self.metric = self.metric or next(iter(item.metrics), "")
        if self.metric not in item.metrics or item.version not in self._published:
            return
        at, requests = self._published[item.version]
        value = item.metrics[self.metric]
        point = [_short(at), requests, item.version, _short(value)]
        if self.history.points and self.history.points[-1][2] == item.version:
            self.history.replace_last(point)
        else:
            self.history.add(point)
        self._latest = (item.version, value)

    def _add_span(self, span: Span) -> None:
        learner = self._learner(span.learner)
        kind, end = KINDS.index(span.kind), float(f"{span.end:.9g}")
        if end <= (learner.spans[-1][0] if learner.spans else 0.0):  # nothing but the rounding of a sum
            return
        learner.spans.append((end, kind))
        self._new_spans.setdefault(learner.index, []).extend((kind, end))
        room = min(_MOST, max(_LEAST, MOST_SPANS // len(self._order)))
        if len(learner.spans) > room:
            learner.spans = _merged(learner.spans, room // 4 * 2)

    # --- telling --------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """Whether an increment would tell anything but the time."""
        return self._first or self._told != (self.events, self.damage) or bool(self._touched)

    def skip(self) -> None:
        """Nobody looks: what is new need not be told to anybody. Whoever comes gets a snapshot."""
        self._touched.clear()
        self._new_spans.clear()
        self._new_versions.clear()

    def increment(self, now: float | None = None) -> Increment:
        """What is new since the last increment, at this second of the run (by default at the latest event)."""
        now = self.now if now is None or self.finish_reason is not None else max(now, self.now)
        told: Increment = {"now": _short(now)}
        if self._first:
            told["head"] = self._head()
            self._first = False
        self._note_late(now)
        if self._names_sent < len(self._order):
            told["names"] = [self._names_sent, *(learner.name for learner in self._order[self._names_sent :])]
            self._names_sent = len(self._order)
        bill = self._ledger.costs(now)
        if self._touched:
            told["rows"] = self._rows(sorted(self._touched), bill, self._ledger.costs(now + 1.0))
            self._touched.clear()
        if self._new_spans:
            told["spans"] = [[index, *spans] for index, spans in self._new_spans.items()]
            self._new_spans.clear()
        if self._new_versions:
            told["versions"] = [_short(value) for value in self._new_versions]
            self._new_versions.clear()
        for name, series in (("history", self.history), ("costs", self.costs)):
            points = series.increment()
            if points is not None:
                told[name] = points
        told["totals"] = self._totals(bill)
        problems = self.problems()
        if problems != self._problems_sent:
            told["problems"] = self._problems_sent = problems
        self._told = (self.events, self.damage)
        return told

    def snapshot(self, now: float | None = None) -> Iterator[Increment]:
        """All that a page needs, in parts; call it right after `increment`, so that nothing is told twice."""
        now = self.now if now is None or self.finish_reason is not None else max(now, self.now)
        bill = self._ledger.costs(now)
        yield {
            "now": _short(now),
            "head": self._head(),
            "names": [0, *(learner.name for learner in self._order)],
            "rows": self._rows(range(len(self._order)), bill, self._ledger.costs(now + 1.0)),
            "versions": [_short(value) for pair in self._versions for value in pair],
            "history": [0, *self.history.points],
            "costs": [0, *self.costs.points],
            "totals": self._totals(bill),
            "problems": self.problems(),
        }
        part: list[list[float]] = []
        held = 0
        for learner in self._order:
            flat: list[float] = [learner.index]
            for end, kind in learner.spans:
                flat += [kind, end] if isinstance(kind, int) else [MIXED, end, *kind]
            if learner.spans:
                part.append(flat)
                held += len(learner.spans)
            if held >= _PART:
                yield {"now": _short(now), "spans": part}
                part, held = [], 0
        if part:
            yield {"now": _short(now), "spans": part}

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

    def _rows(self, indices: Sequence[int], bill: Costs, later: Costs) -> list[list[Any]]:
        rows = []
        for index in indices:
            learner = self._order[index]
            state, since = self._state(learner)
            energy, rate = [0.0] * 3, [0.0] * 3
            if learner.name in bill.by_learner:
                spent, soon = bill.by_learner[learner.name].energy, later.by_learner[learner.name].energy
                energy = [spent.equation, spent.active, spent.idle_charged]
                if self.finish_reason is None:
                    # Between two events energy grows evenly, so that the page can tell it at any moment.
                    rate = [soon.equation - energy[0], soon.active - energy[1], soon.idle_charged - energy[2]]
            rows.append(
                [
                    index,
                    learner.examples,
                    _short(learner.time_per_batch),
                    learner.steps,
                    _short(learner.seconds),
                    _short(learner.contribution),
                    _short(learner.seen),
                    learner.exchanged,
                    STATES.index(state),
                    _short(since),
                    learner.updates,
                    learner.refused,
                    *map(_short, energy),
                    *(_short(round(value, 9)) for value in rate),
                ]
            )
        return rows

    def _state(self, learner: _Learner) -> tuple[str, float | None]:
        if not learner.joined:
            return "expected", None
        doing, since = self._timeline.doing(learner.name)
        if learner.withdrawn is not None:
            return "withdrawn", since
        if doing == "idle" and learner.aside is not None:
            return "set aside", since
        return "late" if learner.late else doing, since

    def _note_late(self, now: float) -> None:
        for learner in self._order:
            late = self.finish_reason is None and learner.sent_at is not None and self._overdue(learner, now)
            if late != learner.late:
                learner.late = late
                self._touched.add(learner.index)

    def _allowed(self, learner: _Learner) -> float:
        """Seconds from being sent a task after which a learner is late; as a barrier would wait for it."""
        batch = learner.time_per_batch or 0.0
        if learner.seconds is not None:
            return learner.seconds * (1 + _GRACE) + learner.overhead + batch
        if learner.steps is None or learner.time_per_batch is None:
            return math.inf
        return learner.steps * batch * _PATIENCE + learner.overhead + batch

    def _overdue(self, learner: _Learner, now: float) -> bool:
        assert learner.sent_at is not None
        return now - learner.sent_at > self._allowed(learner) + 1e-6 * now

    def _totals(self, bill: Costs) -> Increment:
        learners = bill.by_learner.values()
        energy = bill.energy
        return {
            "version": self.version,
            "events": self.events,
            "requests": bill.update_requests,
            "refused": bill.refused,
            "models": bill.models_exchanged,
            "bytes": bill.bytes_exchanged,
            "steps": bill.steps,
            "training": _short(bill.cumulative_time),
            "transfer": _short(bill.transfer_time),
            "idle": _short(bill.idle_time),
            "away": _short(math.fsum(learner.away for learner in learners)),
            "energy": [_short(energy.equation), _short(energy.active), _short(energy.idle_charged)],
            "learners": len(self._order),
            "finished": self.finish_reason,
        }

    # --- what is wrong --------------------------------------------------------------------------

    def problems(self) -> list[dict[str, str]]:
        """What is wrong right now, in sentences that stay the same as long as it is."""
        said: list[dict[str, str]] = []

        def say(weight: str, text: str) -> None:
            said.append({"weight": weight, "text": text})

        if self.damage is not None:
            say("bad", f"{self.damage}.")
        if self._latest is not None and not math.isfinite(self._latest[1]):
            say("bad", f"{self.metric} of community model {self._latest[0]} is no number: training may have diverged.")
        if (self.finish_reason or "").startswith("no learner"):
            say("bad", f"It ended before its budget was spent: {self.finish_reason}.")
        aside = [learner for learner in self._order if learner.joined and learner.aside is not None]
        for name, (at, reason) in _few(aside, [learner.aside for learner in aside]):
            say("bad", f"{name} is set aside since {_at(at)} and gets no task until it joins again: {reason}.")
        if len(aside) > _NAMED:
            say("bad", f"{_all(aside)} are set aside and get no tasks until they join again.")
        refused = [learner for learner in self._order if learner.refusal is not None and learner.aside is None]
        for name, (at, update) in _few(refused, [learner.refusal for learner in refused]):
            if update.kind == "late":
                reason = update.reason.removeprefix("late: ")
                say("warn", f"An update of {name} came too late, at {_at(at)}, and was not mixed: {reason}.")
            else:
                say("bad", f"An update of {name} was refused at {_at(at)}: {update.reason}.")
        if len(refused) > _NAMED:
            say("bad", f"The latest updates of {_all(refused)} were refused; the table of learners counts them.")
        if self.finish_reason is not None:
            return said
        late = [learner for learner in self._order if learner.late and learner.sent_at is not None]
        for name, sent_at in _few(late, [learner.sent_at for learner in late]):
            say("warn", f"{name} is late: the task that it was given at {_at(sent_at)} is still not handed in.")
        if len(late) > _NAMED:
            say("warn", f"{_all(late)} are late with their tasks.")
        states = {learner.name: self._state(learner) for learner in self._order}
        away = [learner for learner in self._order if states[learner.name][0] == "away"]
        for name, since in _few(away, [states[learner.name][1] for learner in away]):
            say("note", f"{name} is away since {_at(since)}.")
        if len(away) > _NAMED:
            say("note", f"{_all(away)} are away.")
        withdrawn = [learner for learner in self._order if learner.withdrawn is not None]
        for name, at in _few(withdrawn, [learner.withdrawn for learner in withdrawn]):
            say("note", f"{name} withdrew for good at {_at(at)}.")
        if len(withdrawn) > _NAMED:
            say("note", f"{_all(withdrawn)} withdrew for good.")
        expected = [learner for learner in self._order if not learner.joined]
        for name, _ in _few(expected, expected):
            say("note", f"{name} has not joined yet.")
        if len(expected) > _NAMED:
            say("note", f"{_all(expected)} have not joined yet.")
        return said


def _few(learners: Sequence[_Learner], values: Sequence[Any]) -> list[tuple[str, Any]]:
    """Name and value of each, if they are few enough to be told one by one."""
    if len(learners) > _NAMED:
        return []
    return [(f"'{learner.name}'", value) for learner, value in zip(learners, values, strict=True)]


def _all(learners: Sequence[_Learner]) -> str:
    shown = ", ".join(f"'{learner.name}'" for learner in learners[:_NAMED])
    rest = len(learners) - _NAMED
    return f"{len(learners)} learners ({shown}{f' and {rest} more' if rest > 0 else ''})"


def _at(seconds: float | None) -> str:
    return "the start" if seconds is None else f"{seconds:,.1f} s"


def _merged(spans: list[tuple[float, Any]], count: int) -> list[tuple[float, Any]]:
    """The first `count` spans in pairs, the rest as they are."""
    merged: list[tuple[float, Any]] = []
    start = 0.0
    for (middle, first), (end, second) in zip(spans[:count:2], spans[1:count:2], strict=True):
        seconds = [0.0] * len(KINDS)
        for kind, length in ((first, middle - start), (second, end - middle)):
            if isinstance(kind, int):
                seconds[kind] += length
            else:
                seconds = [a + b for a, b in zip(seconds, kind, strict=True)]
        merged.append((end, tuple(float(f"{value:.6g}") for value in seconds)))
        start = end
    return merged + spans[count:]
