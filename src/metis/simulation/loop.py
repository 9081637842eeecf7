"""Virtual time: one agenda of what is due, for the simulator, the planner and replays.

`play` runs the real controller on it without weights: nothing is trained, no tensor library is needed. The rest says
how long a learner takes for a task.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from metis.core.controller import Controller
from metis.core.events import (
    Action,
    Budget,
    DeadlinePassed,
    Event,
    LearnerJoined,
    LearnerLeft,
    LearnerWithdrawn,
    RolledBack,
    RoundClosed,
    SendTask,
    StopRuleChanged,
    SumOpened,
    TaskFailed,
    UpdateRequest,
)
from metis.core.timing import TOLERANCE
from metis.simulation.speed import Spent

Trace: TypeAlias = list[tuple[float, Event | Action]]
Item = TypeVar("Item")


class Agenda(Generic[Item]):
    """What is due: by time, of what is due at one moment by rank, then in the order in which it was added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, float, int, Item]] = []
        self._order = itertools.count()

    def __iter__(self) -> Iterator[tuple[float, Item]]:
        return ((at, item) for at, _, _, item in self._heap)

    def add(self, at: float, item: Item, rank: float = 0.0) -> None:
        """Due at this time; never, if it is infinite."""
        if at < math.inf:
            heapq.heappush(self._heap, (at, rank, next(self._order), item))

    def discard(self, item: Item) -> None:
        """It will not happen."""
        self._heap = [entry for entry in self._heap if entry[3] is not item]
        heapq.heapify(self._heap)

    def upcoming(self, controller: Controller) -> tuple[float, Item | None] | None:
        """What happens next, without removing it: an item, or None for the controller's deadline.

        None instead of both if nothing can happen any more.
        """
        at = self._heap[0][0] if self._heap else math.inf
        if controller.deadline < at:
            # The end of the run is not worth waiting for when nobody is left to train until then.
            if not self._heap and controller.protocol.deadline == math.inf:
                return None
            return controller.deadline, None
        return (at, self._heap[0][3]) if self._heap else None

    def pop(self) -> None:
        """The upcoming item has happened."""
        heapq.heappop(self._heap)


@dataclass(frozen=True, slots=True)
class ScheduledEvent:
    """An event that is due; of those due at one moment the lowest rank comes first, then the one made first."""

    at: float
    event: Event
    rank: float = math.inf


Work = Callable[[SendTask, float], ScheduledEvent | None]  # how a task sent now ends; None if that is not known


def play(
    controller: Controller,
    scheduled: Iterable[ScheduledEvent],
    work: Work,
    opening: Callable[[], float | None] = lambda: 0.0,
) -> Iterator[tuple[float, Event | Action]]:
    """Let these events happen to a fresh controller and learners work for it, until it ends or nobody goes on.

    `opening` is how long it takes to open the sum of the round that is closed. What has become impossible is left out:
    the answer of a learner that has left, the joining of one that is present.
    """
    agenda: Agenda[Event] = Agenda()
    extensions = 0  # still to come: after the end it may go on
    for item in scheduled:
        agenda.add(item.at, item.event, item.rank)
        extensions += isinstance(item.event, StopRuleChanged)
    while (extensions or not controller.finished) and (upcoming := agenda.upcoming(controller)) is not None:
        now, due = upcoming
        if due is not None:
            agenda.pop()
            extensions -= isinstance(due, StopRuleChanged)
        event = DeadlinePassed() if due is None else due
        if not _possible(controller, event):
            continue
        yield now, event
        for action in controller.handle(event, now):
            yield now, action
            if isinstance(action, RoundClosed):
                agenda.add(now + (opening() or 0.0), SumOpened(action.version, action.learners))
            answer = work(action, now) if isinstance(action, SendTask) else None
            if answer is not None:
                agenda.add(answer.at, answer.event, answer.rank)


def _possible(controller: Controller, event: Event) -> bool:
    match event:
        case UpdateRequest() | TaskFailed():
            record = controller.roster.get(event.learner)
            open_task = None if record is None or controller.finished else record.task
            return open_task is not None and open_task.number == event.task
        case LearnerJoined():
            record = controller.roster.get(event.learner)
            removed = controller.member_changes.get(event.learner) is False
            return not removed and (record is None or not record.available)
        case LearnerLeft() | LearnerWithdrawn():
            record = controller.roster.get(event.learner)
            return record is not None and record.present
        case SumOpened():
            return controller.closed is not None and controller.closed.version == event.version
        case RolledBack():
            return event.version <= controller.community.stamp.version
        case _:
            return True


@dataclass(frozen=True, slots=True)
class Stretch:
    """How fast a learner was from one moment on, until the next stretch."""

    since: float
    pace: float  # seconds a batch really took
    time_per_batch: float  # as the learner reported it: without warming up and stalls
    exchange: float  # seconds of a task besides training


class Pace:
    """A learner's speed as it was measured, stretch by stretch; the last one goes on for ever."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        kept: list[Stretch] = []
        for stretch in stretches:
            if not kept or not _alike(kept[-1], stretch):
                kept.append(stretch)
        self._stretches = kept
        self._starts = [stretch.since for stretch in kept]

    def at(self, now: float) -> Stretch:
        return self._stretches[self._index(now)]

    def spend(self, budget: Budget, start: float) -> Spent:
        """Train until the budget ends: finish a begun batch, do at least one, each as fast as when it begins."""
        steps, seconds = 0, 0.0
        max_steps = math.inf if budget.steps is None else budget.steps
        index = self._index(start)
        first = self._stretches[index]
        while not steps or (steps < max_steps and seconds < budget.seconds * (1 - TOLERANCE)):
            pace = self._stretches[index].pace
            last = index + 1 == len(self._starts)
            ends = math.inf if last else self._starts[index + 1] - start
            fitting = min(_batches(budget.seconds - seconds, pace), _batches(ends - seconds, pace), max_steps - steps)
            if math.isinf(fitting):
                raise ValueError("a budget without an end cannot be spent")
            done = max(1, int(fitting))
            steps, seconds = steps + done, seconds + done * pace
            index = max(index, self._index(start + seconds))
        return Spent(steps, seconds, first.time_per_batch)

    def _index(self, now: float) -> int:
        return max(0, bisect.bisect_right(self._starts, now) - 1)


def _alike(one: Stretch, other: Stretch) -> bool:
    """Whether they differ by no more than the rounding of the moments they were computed from."""
    return (
        math.isclose(one.pace, other.pace, rel_tol=1e-9)
        and math.isclose(one.time_per_batch, other.time_per_batch, rel_tol=1e-9)
        and math.isclose(one.exchange, other.exchange, rel_tol=1e-9, abs_tol=1e-9)
    )


def _batches(seconds: float, pace: float) -> float:
    """Batches that begin within this many seconds."""
    return math.ceil(seconds / pace * (1 - TOLERANCE)) if seconds < math.inf else math.inf
