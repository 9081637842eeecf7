"""The trace of a run: one JSON object per line in `events.jsonl`, from which everything else is derived."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from metis.core.events import (
    Action,
    Budget,
    CohortFixed,
    CommunityPublished,
    CommunityStamp,
    ControllerAway,
    DeadlinePassed,
    Evaluated,
    Event,
    Finish,
    LearnerJoined,
    LearnerLeft,
    LearnerSetAside,
    LearnersExpected,
    LearnerWithdrawn,
    LocalTask,
    MemberAdded,
    MemberRemoved,
    MembersAwaited,
    ModelResent,
    Paused,
    PeriodBegun,
    Resumed,
    RolledBack,
    RoundAbandoned,
    RoundClosed,
    RoundFailed,
    RoundMeasure,
    SendTask,
    SpeedChanged,
    StopRequested,
    StopRuleChanged,
    SumOpened,
    TaskFailed,
    UpdateCommitted,
    UpdateRefused,
    UpdateRequest,
)
from metis.core.model import Model
from metis.core.stop import Patience, StopRule, Target
from metis.errors import ArgumentError, DataError
from metis.files import write_text

EVENTS = "events.jsonl"
_EVENTS: dict[str, type[Any]] = {
    "learner_joined": LearnerJoined,
    "learner_left": LearnerLeft,
    "learner_withdrawn": LearnerWithdrawn,
    "update_request": UpdateRequest,
    "task_failed": TaskFailed,
    "evaluated": Evaluated,
    "deadline_passed": DeadlinePassed,
    "learners_expected": LearnersExpected,
    "controller_away": ControllerAway,
    "rolled_back": RolledBack,
    "stop_requested": StopRequested,
    "paused": Paused,
    "resumed": Resumed,
    "stop_rule_changed": StopRuleChanged,
    "member_added": MemberAdded,
    "member_removed": MemberRemoved,
    "cohort_fixed": CohortFixed,
    "model_resent": ModelResent,
    "sum_opened": SumOpened,
    "round_failed": RoundFailed,
}
_ACTIONS: dict[str, type[Any]] = {
    "send_task": SendTask,
    "period_begun": PeriodBegun,
    "community_published": CommunityPublished,
    "update_committed": UpdateCommitted,
    "update_refused": UpdateRefused,
    "learner_set_aside": LearnerSetAside,
    "speed_changed": SpeedChanged,
    "round_closed": RoundClosed,
    "round_abandoned": RoundAbandoned,
    "members_awaited": MembersAwaited,
    "finish": Finish,
}
_NAMES = {kind: ("event", name) for name, kind in _EVENTS.items()}
_NAMES |= {kind: ("action", name) for name, kind in _ACTIONS.items()}
_FIELDS = {kind: tuple(f.name for f in fields(kind)) for kind in _NAMES}
_WHERE_KNOWN = ("loss", "clamped", "unrelated")
_FIELDS_OF_MEASURE = tuple(f.name for f in fields(RoundMeasure) if f.name not in _WHERE_KNOWN)
_MODELS = ("local_model", "community_model", "total")
_END_OF_TIME = 1e15  # seconds; sums of later times would overflow


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity


def to_record(now: float, item: Event | Action) -> dict[str, Any]:
    """One line of the trace; weights stay out."""
    group, name = _NAMES[type(item)]
    record: dict[str, Any] = {"at": now, group: name}
    for key in _FIELDS[type(item)]:
        if key in _MODELS:
            continue
        value = getattr(item, key)
        if isinstance(value, LocalTask):
            record["task"] = value.number
            record["based_on"] = [value.based_on.version, value.based_on.steps]
            record["steps"], record["seconds"] = value.budget.steps, _number(value.budget.seconds)
            if value.rate != 1:
                record["rate"] = value.rate
            if value.budget.batches_per_step != 1:
                record["batches_per_step"] = value.budget.batches_per_step
        elif isinstance(value, CommunityStamp):
            record["version"], record["steps"] = value.version, value.steps
        elif isinstance(value, StopRule):
            record[key] = asdict(value)
        elif isinstance(value, RoundMeasure):
            record |= measure_record(value)
        elif key == "notes":
            record |= {name: number for name, number in value.items() if math.isfinite(number)}
        elif key == "measure":
            continue  # not measured
        elif key in {"not_awaited", "lengths", "tasks", "waited"}:
            if value:
                record[key] = list(value)
        elif key in ("cuts", "resent"):
            if value:
                record[key] = value
        elif key == "by_learner":
            if value:
                record[key] = {
                    who: {name: _number(number) for name, number in own.items()} for who, own in value.items()
                }
        elif key in ("steps_left", "larger_batches"):
            if value is not None and value is not False:
                record[key] = value
        elif key == "conclusive":
            if not value:
                record[key] = value
        elif isinstance(value, dict):
            record[key] = {name: _number(number) for name, number in value.items()}
        else:
            record[key] = _number(value) if isinstance(value, float) else value
    return record


class RecordError(ValueError):
    """What is wrong with a record, in a sentence for the owner of the file."""


def what_is_wrong(problem: Exception) -> str:
    """Why a file of a run or a line of it could not be read, without the words of Python."""
    match problem:
        case RecordError() | ArgumentError():
            return str(problem)
        case UnicodeDecodeError():
            return "it is not a text in UTF-8"
        case json.JSONDecodeError():
            return "it is not valid JSON"
        case OSError():
            return f"it cannot be read ({problem.strerror})"
        case KeyError():
            return f"it has no '{problem.args[0]}'"
    return "a value in it is missing or of the wrong type"


def _kind(known: dict[str, type[Any]], group: str, name: Any) -> type[Any]:
    if not isinstance(name, str) or name not in known:
        raise RecordError(f"there is no {group} {name!r}")
    return known[name]


def from_record(record: dict[str, Any]) -> tuple[float, Event | Action]:
    """What `to_record` wrote, with empty models."""
    rest = dict(record)
    at = rest.pop("at")
    if not isinstance(at, (int, float)) or not 0 <= at < _END_OF_TIME:
        raise RecordError(f"'at' is {at!r}, which is not a valid time of a run")
    if not all(isinstance(rest.get(name, ""), str) for name in ("learner", "reason")):
        raise RecordError("'learner' and 'reason' must be text")
    kind: Callable[..., Event | Action]
    if "event" in rest:
        name = rest.pop("event")
        kind = _kind(_EVENTS, "event", name)
        if name == "update_request":
            notes = {key: rest.pop(key) for key in rest.keys() - _FIELDS[UpdateRequest]}
            if not all(isinstance(number, (int, float)) for number in notes.values()):
                raise RecordError(f"unknown keys: {', '.join(sorted(notes))}")
            rest["notes"], rest["local_model"] = notes, Model.empty()
            rest["lengths"] = tuple(rest.get("lengths", ()))
            rest["loss"] = math.nan if rest["loss"] is None else rest["loss"]
        elif name == "rolled_back":
            rest["community_model"] = Model.empty()
        elif name == "evaluated":
            rest["metrics"] = _metrics(rest["metrics"])
            rest["by_learner"] = {who: _metrics(own) for who, own in rest.get("by_learner", {}).items()}
        elif name in ("cohort_fixed", "sum_opened"):
            rest["learners"] = tuple(rest["learners"])
            if name == "cohort_fixed":
                rest["tasks"], rest["waited"] = tuple(rest.get("tasks", ())), tuple(rest.get("waited", ()))
        elif name == "stop_rule_changed":
            rest["rule"] = stop_rule(rest["rule"])
    else:
        name = rest.pop("action")
        kind = _kind(_ACTIONS, "action", name)
        if name == "send_task":
            seconds = math.inf if rest["seconds"] is None else rest["seconds"]
            budget, rate = Budget(rest["steps"], seconds, rest.get("batches_per_step", 1)), rest.get("rate", 1.0)
            task = LocalTask(rest["task"], CommunityStamp(*rest["based_on"]), budget, rate)
            return at, SendTask(rest["learner"], task, Model.empty())
        if name == "period_begun":
            seconds = math.inf if rest["seconds"] is None else rest["seconds"]
            return at, PeriodBegun(seconds, rest["reason"], tuple(rest.get("not_awaited", ())))
        if name == "community_published":
            stamp = CommunityStamp(rest["version"], rest["steps"])
            return at, CommunityPublished(stamp, rest["contributors"], Model.empty(), recorded_measure(rest))
        if name in ("round_closed", "members_awaited"):
            rest["learners"] = tuple(rest["learners"])
    return at, kind(**rest)


def stop_rule(record: dict[str, Any]) -> StopRule:
    """A stop rule from its fields, as a record has them."""
    target, patience = record.get("target"), record.get("patience")
    nested = {
        "target": None if target is None else Target(**target),
        "patience": None if patience is None else Patience(**patience),
    }
    return StopRule(**{**record, **nested})


def _metrics(record: dict[str, Any]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in record.items()}


def measure_record(measure: RoundMeasure) -> dict[str, float | None]:
    """What was measured in a round, as part of a record."""
    known = {name: value for name in _WHERE_KNOWN if math.isfinite(value := getattr(measure, name))}
    return {name: _number(getattr(measure, name)) for name in _FIELDS_OF_MEASURE} | known


def recorded_measure(record: dict[str, Any]) -> RoundMeasure | None:
    """What `measure_record` put into a record; None if the round was not measured."""
    if "progress" not in record:
        return None
    known = {name: record[name] for name in _WHERE_KNOWN if name in record}
    return RoundMeasure(*(math.nan if record[name] is None else record[name] for name in _FIELDS_OF_MEASURE), **known)


def measures_of(events: Iterable[tuple[float, Event | Action]]) -> dict[int, RoundMeasure]:
    """What was measured in each round, by the version of the community model it produced."""
    published = (item for _, item in events if isinstance(item, CommunityPublished))
    return {item.stamp.version: item.measure for item in published if item.measure is not None}


def without_weights(item: Event | Action) -> Event | Action:
    """The same event or action with an empty model, so that a long list takes little memory."""
    match item:
        case UpdateRequest():
            return replace(item, local_model=Model.empty())
        case SendTask() | CommunityPublished() | RolledBack():
            return replace(item, community_model=Model.empty())
        case SumOpened():
            return replace(item, total=None)
        case _:
            return item


def to_line(now: float, item: Event | Action) -> str:
    return _LINE.encode(to_record(now, item))


def from_line(line: str) -> tuple[float, Event | Action]:
    """What `to_line` wrote; raises ValueError, KeyError, TypeError or AttributeError if it did not."""
    return from_record(_LINES.decode(line))


def _refuse(constant: str) -> float:
    raise RecordError(f"{constant} is not a valid number in JSON")


_LINES = json.JSONDecoder(parse_constant=_refuse)  # NaN and infinity, which Python would take


def plain_number(value: Any) -> Any:
    """For `json.dumps`: numbers taken from numpy arrays as Python numbers."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


_LINE = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=plain_number)


def has_events(folder: Path) -> bool:
    """Whether a run has begun in a directory; one that failed before its first event has left nothing to continue."""
    events = folder / EVENTS
    return events.exists() and events.stat().st_size > 0


def read_trace(path: Path) -> Iterator[tuple[float, Event | Action]]:
    """All events and actions of a file; an incomplete last line is left out."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("\n"):
                    return
                try:
                    yield from_line(line)
                except (ValueError, KeyError, TypeError, AttributeError) as problem:
                    raise DataError(
                        f"{path}, line {number} is not an event of a run: {what_is_wrong(problem)}"
                    ) from problem
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror}") from problem
    except UnicodeDecodeError as problem:
        raise DataError(f"{path} is not the trace of a run: it is not a text file") from problem


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Replace a JSON file."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False, default=plain_number)
    write_text(path, text + "\n")
