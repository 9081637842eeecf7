"""A recorded run again, in virtual time: the learners take as long as they did, the controller decides again.

Under the recorded policy the same tasks and versions come out; that is how a deployment and a simulation are compared.
Under another policy it shows what that policy would have asked of the same learners.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from metis.core.controller import Controller
from metis.core.events import (
    Action,
    Budget,
    ControllerAway,
    DeadlinePassed,
    Evaluated,
    Event,
    LearnerId,
    LearnerJoined,
    LearnerLeft,
    LearnerSetAside,
    LearnersExpected,
    LearnerWithdrawn,
    MemberAdded,
    MemberRemoved,
    Paused,
    Resumed,
    RolledBack,
    SendTask,
    StopRequested,
    StopRuleChanged,
    TaskFailed,
    UpdateRefused,
    UpdateRequest,
)
from metis.core.model import Layout, Model, TensorSpec
from metis.simulation.loop import Pace, ScheduledEvent, Stretch, Trace, play

# A task that is sent almost when a recorded one was, and asks for the same, is that task; a real clock wakes the
# controller a little after the deadline, the virtual one does not.
_SAME = 0.01  # of its duration
# Which weights made an update invalid is not recorded; these are as unfit to be mixed.
_UNFIT = Model(Layout((TensorSpec("not recorded", (1,)),)), np.zeros(1, np.float32))


@dataclass(frozen=True, slots=True)
class RecordedTask:
    """A task as it was sent, and how it ended; without an answer the learner left, or the record ends before."""

    sent: float
    budget: Budget
    at: float = math.inf
    answer: UpdateRequest | TaskFailed | None = None
    index: int = 0  # of the answer in the record
    invalid: bool = False


def recorded_tasks(recorded: Iterable[tuple[float, Event | Action]]) -> dict[LearnerId, list[RecordedTask]]:
    """Every learner's tasks in the order in which they were sent."""
    tasks: dict[LearnerId, list[RecordedTask]] = {}
    for index, (at, item) in enumerate(recorded):
        match item:
            case SendTask():
                tasks.setdefault(item.learner, []).append(RecordedTask(at, item.task.budget))
            case UpdateRequest() | TaskFailed():
                mine = tasks[item.learner]
                mine[-1] = replace(mine[-1], at=at, answer=item, index=index)
            case UpdateRefused(kind="invalid"):
                mine = tasks[item.learner]
                mine[-1] = replace(mine[-1], invalid=True)
            case _:
                pass
    return tasks


def replay_recorded(recorded: Iterable[tuple[float, Event | Action]], controller: Controller) -> Trace:
    """Let the recorded learners work for this controller, which must be fresh and need no weights.

    Who came and went, and when, is taken from the record; so is how long each learner's first, second, ... task
    took it, what it did in that time and what an evaluation measured. When a task is sent, what it asks for and when a
    deadline passes is up to the controller.
    """
    recorded = list(recorded)
    answers = {
        learner: deque(task for task in tasks if task.answer is not None)
        for learner, tasks in recorded_tasks(recorded).items()
    }

    def work(action: SendTask, now: float) -> ScheduledEvent | None:
        left = answers.get(action.learner)
        return _again(left.popleft(), action, now) if left else None

    return list(play(controller, _scheduled(recorded), work))


def replay_otherwise(
    recorded: Sequence[tuple[float, Event | Action]],
    controller: Controller,
    nominal: Mapping[LearnerId, float] | None = None,
) -> Trace:
    """What another policy would have made of the recorded learners; the controller is fresh and needs no weights.

    Who was there and when the first tasks could be sent is taken from the record. How long a task takes follows from
    what it asks for and from the learner's time per batch and its exchanges as recorded at that time; a task that was
    recorded takes what it took, so that the recorded policy gives the recorded trace. Nothing is evaluated. `nominal`
    is the time per batch of learners that never handed anything in.
    """
    starts = _start(recorded)
    if starts is None:
        return []
    trigger, expected = starts
    extended = max((index for index, (_, item) in enumerate(recorded) if isinstance(item, StopRuleChanged)), default=-1)
    scheduled = [
        item
        for item in _scheduled(recorded, {trigger})
        # An accuracy that the other policy did not have, and how many were waited for until then.
        if not isinstance(item.event, (Evaluated, LearnersExpected, StopRuleChanged))
        # An end after which the run went on: the other policy has all of the recorded time.
        and not (isinstance(item.event, StopRequested) and item.rank < extended)
    ]
    # Just before the event at which the first task was sent.
    begins = ScheduledEvent(recorded[trigger][0], LearnersExpected(expected), trigger - 0.5)
    return list(play(controller, [begins, *scheduled], RecordedLearners(recorded, nominal or {})))


class RecordedLearners:
    """Works as fast as the learners of a record did at the time."""

    def __init__(self, recorded: Iterable[tuple[float, Event | Action]], nominal: Mapping[LearnerId, float]) -> None:
        self._tasks = recorded_tasks(recorded)
        self._sent = {learner: [task.sent for task in tasks] for learner, tasks in self._tasks.items()}
        self._paces = {
            learner: Pace(stretches) for learner, tasks in self._tasks.items() if (stretches := list(_stretches(tasks)))
        }
        for learner, seconds in nominal.items():
            if learner not in self._paces and math.isfinite(seconds):
                self._paces[learner] = Pace([Stretch(0.0, seconds, seconds, 0.0)])

    def __call__(self, action: SendTask, now: float) -> ScheduledEvent | None:
        task = self._recorded(action, now)
        if task is not None:
            return None if task.answer is None else _again(task, action, now)
        pace = self._paces.get(action.learner)
        if pace is None:
            return None
        half = pace.at(now).exchange / 2
        spent = pace.spend(action.task.budget, now + half)
        update = UpdateRequest(
            action.learner, action.task.number, spent.steps, spent.seconds, spent.time_per_batch, Model.empty()
        )
        return ScheduledEvent(now + half + spent.seconds + half, update)

    def _recorded(self, action: SendTask, now: float) -> RecordedTask | None:
        """The recorded task that this one is, if there is one."""
        sent = self._sent.get(action.learner, [])
        index = bisect.bisect_left(sent, now)
        near = [self._tasks[action.learner][k] for k in (index - 1, index) if 0 <= k < len(sent)]
        for task in sorted(near, key=lambda task: abs(task.sent - now)):
            asked, given = action.task.budget, task.budget
            close = now == task.sent or abs(now - task.sent) <= _SAME * (task.at - task.sent) < math.inf
            same = asked.seconds == given.seconds or math.isclose(asked.seconds, given.seconds, rel_tol=1e-6)
            if close and same and asked.steps == given.steps:
                return task
        return None


def _stretches(tasks: Iterable[RecordedTask]) -> Iterator[Stretch]:
    """How fast a learner was in each task that it ended."""
    for task in tasks:
        answer = task.answer
        if answer is None or answer.steps < 1 or not 0 < answer.seconds < math.inf:
            continue
        elapsed = task.at - task.sent
        seconds = min(answer.seconds, elapsed)
        pace = seconds / answer.steps
        reported = answer.time_per_batch if isinstance(answer, UpdateRequest) else pace
        if not 0 < reported < math.inf:
            reported = pace
        if math.isclose(pace, reported, rel_tol=1e-9):  # the quotient of a product need not be its factor
            pace = reported
        exchange = elapsed - seconds
        # Of two sums of floats the smaller part is lost: what is left of it is not a transfer.
        exchange = exchange if exchange > 1e-9 * task.at else 0.0
        yield Stretch(task.sent + exchange / 2, pace, reported, exchange)


def _again(task: RecordedTask, action: SendTask, now: float) -> ScheduledEvent:
    """The recorded answer, to this task; at the recorded moment to the last bit if the task was sent at its own."""
    assert task.answer is not None
    answer: UpdateRequest | TaskFailed = replace(task.answer, task=action.task.number)
    if isinstance(answer, UpdateRequest):
        answer = replace(answer, local_model=_UNFIT if task.invalid else Model.empty())
    return ScheduledEvent(task.at if now == task.sent else now + (task.at - task.sent), answer, task.index)


def _scheduled(recorded: Sequence[tuple[float, Event | Action]], also: Iterable[int] = ()) -> list[ScheduledEvent]:
    """What came from outside: who came and went, the controller too, what was measured, that somebody stopped it."""
    kinds = (
        LearnerJoined, LearnerLeft, LearnerWithdrawn, ControllerAway, Evaluated, StopRequested, LearnersExpected,
        Paused, Resumed, RolledBack, StopRuleChanged, MemberAdded, MemberRemoved,
    )  # fmt: skip
    wanted = set(also)
    return [
        ScheduledEvent(at, item, index)
        for index, (at, item) in enumerate(recorded)
        if isinstance(item, kinds) or (index in wanted and isinstance(item, DeadlinePassed))
    ]


def _start(recorded: Sequence[tuple[float, Event | Action]]) -> tuple[int, int] | None:
    """The index of the event that sent the first task, and how many learners were present; None without tasks."""
    there: set[LearnerId] = set()
    trigger = 0
    for index, (_, item) in enumerate(recorded):
        match item:
            case SendTask():
                return trigger, max(1, len(there))
            case LearnerJoined():
                there.add(item.learner)
            case LearnerLeft() | LearnerWithdrawn() | MemberRemoved() | LearnerSetAside():
                there.discard(item.learner)
            case _:
                pass
        if isinstance(
            item,
            (LearnerJoined, LearnerLeft, LearnerWithdrawn, LearnersExpected, MemberRemoved, Resumed, DeadlinePassed),
        ):
            trigger = index
    return None
