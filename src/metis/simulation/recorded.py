"""A recorded run again, in virtual time: the learners take as long as they took, the controller decides anew.

Under the recorded policy the same tasks and versions come out; that is how a deployment and a simulation are compared.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from metis.core.controller import Controller
from metis.core.events import (
    Action,
    DeadlinePassed,
    Evaluated,
    Event,
    Finish,
    LearnerId,
    LearnerJoined,
    LearnerLeft,
    LearnerWithdrawn,
    SendTask,
    StopRequested,
    TaskFailed,
    UpdateRequest,
)
from metis.core.model import Model

Course = list[tuple[float, Event | Action]]


def replay_recorded(recorded: Iterable[tuple[float, Event | Action]], controller: Controller) -> Course:
    """Let the recorded learners work for this controller, which must be fresh and need no weights.

    Who came and went, and when, is taken from the record; so is how long each learner's first, second, ... task
    took it, what it did in that time and what an evaluation measured. When a task is sent, what it asks for and when a
    deadline passes is up to the controller.
    """
    answers: dict[LearnerId, deque[tuple[float, UpdateRequest | TaskFailed]]] = {}
    sent: dict[LearnerId, float] = {}
    heap: list[tuple[float, int, Event]] = []
    order = itertools.count()
    for at, item in recorded:
        match item:
            case SendTask():
                sent[item.learner] = at
            case UpdateRequest() | TaskFailed():
                duration = at - sent.pop(item.learner)
                answers.setdefault(item.learner, deque()).append((duration, item))
            case LearnerJoined() | LearnerLeft() | LearnerWithdrawn() | Evaluated() | StopRequested():
                heapq.heappush(heap, (at, next(order), item))
            case _:
                pass
    course: Course = []
    while heap or controller.protocol.deadline < float("inf"):
        if not heap or controller.deadline < heap[0][0]:
            now, event = controller.deadline, DeadlinePassed()
            if now == float("inf"):
                break
        else:
            now, _, event = heapq.heappop(heap)  # type: ignore[assignment]
            if isinstance(event, (UpdateRequest, TaskFailed)) and not _open(controller, event):
                continue  # the learner has left meanwhile
        actions = controller.handle(event, now)
        course += [(now, event), *((now, action) for action in actions)]
        for action in actions:
            if isinstance(action, Finish):
                return course
            left = answers.get(action.learner) if isinstance(action, SendTask) else None
            if isinstance(action, SendTask) and left:
                duration, answer = left.popleft()
                answer = replace(answer, task=action.task.number)
                if isinstance(answer, UpdateRequest):
                    answer = replace(answer, local_model=Model.empty())
                heapq.heappush(heap, (now + duration, next(order), answer))
    return course


def _open(controller: Controller, answer: UpdateRequest | TaskFailed) -> bool:
    record = controller.roster.get(answer.learner)
    return record is not None and record.task is not None and record.task.number == answer.task
