"""What the tests of the dashboard share: a page without a screen, and runs written down event by event."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from metis.core.costs import Power
from metis.core.events import (
    Action,
    Budget,
    CommunityPublished,
    CommunityStamp,
    Evaluated,
    Event,
    Finish,
    LearnerJoined,
    LocalTask,
    SendTask,
    UpdateCommitted,
    UpdateRequest,
)
from metis.core.model import Model
from metis.reporting.dashboard.view import COLUMNS, MIXED
from metis.runs.setting import LearnerInfo, Setting
from metis.runs.trace import to_line

Recorded = tuple[float, "Event | Action"]
NAMES = ("fast", "slow", "<b>&odd")


class PageOfRun:
    """What a page knows of one run: the increments added up, as the script of the page does it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.names: list[str] = []
        self.rows: dict[int, list[Any]] = {}
        self.spans: dict[int, list[tuple[float, Any]]] = {}
        self.versions: list[float] = []
        self.history: list[list[Any]] = []
        self.costs: list[list[Any]] = []
        self.periods: list[list[Any]] = []
        self.rest: dict[str, Any] = {}

    def add(self, news: dict[str, Any]) -> None:
        if news.get("reset"):
            self.clear()
        for key in ("now", "head", "totals", "problems", "changes"):
            if key in news:
                self.rest[key] = news[key]
        if "names" in news:
            start, *names = news["names"]
            assert start <= len(self.names), "names are missing"
            self.names[start:] = names
        for row in news.get("rows", []):
            self.rows[row[0]] = row
        for index, *flat in news.get("spans", []):
            spans = self.spans.setdefault(index, [])
            values = iter(flat)
            for kind in values:
                end = next(values)
                assert end > (spans[-1][0] if spans else 0.0), "a span must begin where the last one ended"
                spans.append((end, tuple(next(values) for _ in range(4)) if kind == MIXED else kind))
        self.versions += news.get("versions", [])
        for key in ("history", "costs", "periods"):
            if key in news:
                start, *points = news[key]
                held = getattr(self, key)
                assert start <= len(held), f"points of {key} are missing"
                held[start:] = points

    def row(self, name: str) -> dict[str, Any]:
        return dict(zip(COLUMNS, self.rows[self.names.index(name)], strict=True))

    def seconds(self, name: str) -> list[float]:
        """How long this learner did each kind of thing, as far as its spans have ended."""
        sums, start = [0.0] * 4, 0.0
        for end, kind in self.spans.get(self.names.index(name), []):
            if isinstance(kind, tuple):
                sums = [a + b for a, b in zip(sums, kind, strict=True)]
            else:
                sums[kind] += end - start
            start = end
        return sums

    @property
    def notices(self) -> list[str]:
        return [problem["text"] for problem in self.rest["problems"]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PageOfRun) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


def written_setting(names: Iterable[str] = NAMES, **changes: Any) -> Setting:
    values: dict[str, Any] = {
        "policy": "sync_fedavg",
        "label": "Sync",
        "seed": 1,
        "learners": tuple(LearnerInfo(name, 100, 10, 0.1, Power(2.0, 0.5)) for name in names),
        "model_bytes": 1000,
        "fills_the_period": False,
        "metric": "accuracy",
    }
    return Setting(**{**values, **changes})


def joined(names: Iterable[str] = NAMES, at: float = 0.0) -> list[Recorded]:
    return [(at, LearnerJoined(name, 100, 10)) for name in names]


def sent(at: float, learner: str, task: int, version: int = 0, steps: int | None = 10, **budget: float) -> Recorded:
    return at, SendTask(learner, LocalTask(task, CommunityStamp(version), Budget(steps, **budget)), Model.empty())


def update(at: float, learner: str, task: int, seconds: float, steps: int = 10) -> Recorded:
    return at, UpdateRequest(learner, task, steps, seconds, seconds / steps, Model.empty())


def rounds(count: int, names: Iterable[str] = NAMES, start: float = 0.0, first: int = 0) -> list[Recorded]:
    """This many synchronous rounds of three seconds; learner k trains for 1 + k % 3 of them."""
    names, events = list(names), []
    for number in range(first, first + count):
        begun = start + 3.0 * (number - first)
        events += [sent(begun, name, number * len(names) + k, number) for k, name in enumerate(names)]
        for k, name in sorted(enumerate(names), key=lambda pair: pair[0] % 3):
            spent, task = 1.0 + k % 3, number * len(names) + k
            events += [update(begun + spent, name, task, spent), (begun + spent, UpdateCommitted(name, task, 10.0))]
        stamp = CommunityStamp(number + 1, 10 * number)
        events.append((begun + 3.0, CommunityPublished(stamp, len(names), Model.empty())))
        events.append((begun + 3.0, Evaluated(number + 1, {"accuracy": 1 - 0.5 / (number + 1)})))
    return events


def finished(at: float) -> Recorded:
    return at, Finish("all rounds are done")


def lines(events: Iterable[Recorded]) -> str:
    return "".join(to_line(*event) + "\n" for event in events)


def write_run(folder: Path, events: Iterable[Recorded], setting: Setting | None = None) -> Path:
    """A folder as a run leaves it, or has left it so far; the path of its events."""
    folder.mkdir(parents=True, exist_ok=True)
    (setting or written_setting()).save(folder)
    path = folder / "events.jsonl"
    path.write_text(lines(events), "utf-8")
    return path


def append(path: Path, events: Iterable[Recorded]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(lines(events))


def as_json(news: dict[str, Any]) -> dict[str, Any]:
    """What arrives of an increment at the other side."""
    arrived: dict[str, Any] = json.loads(json.dumps(news, allow_nan=False))
    return arrived
