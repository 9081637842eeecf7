"""A tiny virtual-time stage around the real controller: events in, actions out, no torch and no simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from metis.core.controller import Controller
from metis.core.costs import CostLedger, Costs, Power
from metis.core.events import (
    Action,
    Budget,
    CommunityPublished,
    DeadlinePassed,
    Event,
    Finish,
    LearnerJoined,
    LearnerLeft,
    LearnerSetAside,
    LearnerWithdrawn,
    LocalTask,
    RoundClosed,
    SendTask,
    SumOpened,
    TaskFailed,
    UpdateCommitted,
    UpdateRefused,
    UpdateRequest,
)
from metis.core.model import Layout, Model, TensorSpec
from metis.core.policy import Policy
from metis.core.stop import StopRule
from metis.core.timing import TOLERANCE
from metis.simulation.loop import Agenda

LAYOUT = Layout((TensorSpec("weight", (2,)), TensorSpec("bias", ())))


def model(*numbers: float) -> Model:
    """A model of three numbers."""
    return Model(LAYOUT, np.array(numbers or (0.0, 0.0, 0.0), np.float32))


@dataclass
class Actor:
    """A scripted learner: honest unless a test says otherwise, and of constant speed."""

    name: str
    time_per_batch: float
    examples: int = 5000
    batch_size: int = 100
    transfer: float = 0.0  # seconds of sending to and fro, for each task
    mood: str = "well"  # or: failing, diverging, silent

    @property
    def epoch_steps(self) -> int:
        return math.ceil(self.examples / self.batch_size)

    def steps_of(self, budget: Budget) -> int:
        """Batches done when the budget ends; a batch that has begun at the limit is finished (R3)."""
        by_time = math.inf
        if budget.seconds < math.inf:
            by_time = max(1, math.ceil(budget.seconds / self.time_per_batch * (1 - TOLERANCE)))
        return int(min(math.inf if budget.steps is None else budget.steps, by_time))

    def train(self, task: LocalTask, community_model: Model) -> Event | None:
        """What comes of a task, at the end of it."""
        steps = self.steps_of(task.budget)
        seconds = steps * self.time_per_batch
        match self.mood:
            case "silent":
                return None
            case "failing":
                return TaskFailed(self.name, task.number, "out of memory", steps, seconds)
            case "diverging":
                vector = np.full_like(community_model.vector, np.nan)
            case _:
                vector = community_model.vector + np.float32(len(self.name) / steps)
        local_model = community_model.with_vector(vector)
        return UpdateRequest(self.name, task.number, steps, seconds, self.time_per_batch, local_model)


class Play:
    """A federation of actors; `Play(policy, gpu=0.03, cpu=0.30)` names them by their seconds per batch."""

    def __init__(
        self,
        policy: Policy,
        *cast: Actor,
        stop: StopRule | None = None,
        learners_expected: int | None = None,
        powers: dict[str, Power] | None = None,
        **times: float,
    ) -> None:
        self.actors = {actor.name: actor for actor in cast}
        self.actors |= {name: Actor(name, time) for name, time in times.items()}
        self.now = 0.0
        self.log: list[tuple[float, Event | Action]] = []
        initial_model = policy.extend_model(model(), LAYOUT.size)
        self.controller = Controller(
            policy, initial_model, stop=stop, learners_expected=learners_expected or len(self.actors)
        )
        self.ledger = CostLedger(powers or {}, model().nbytes, policy.fills_the_period)
        self.opens = True  # whether the sums of closed rounds become known at once
        self._agenda: Agenda[Event] = Agenda()
        for actor in self.actors.values():
            self.join(actor.name, at=0.0)

    # --- the script ---------------------------------------------------------------------------

    def cast(self, actor: Actor, at: float) -> None:
        """One more learner enters."""
        self.actors[actor.name] = actor
        self.join(actor.name, at)

    def join(self, name: str, at: float) -> None:
        actor = self.actors[name]
        self.at(at, LearnerJoined(name, actor.examples, actor.batch_size))

    def leave(self, name: str, at: float) -> None:
        self.at(at, LearnerLeft(name))

    def withdraw(self, name: str, at: float) -> None:
        self.at(at, LearnerWithdrawn(name))

    def at(self, at: float, event: Event) -> None:
        self._agenda.add(at, event)

    # --- the performance ----------------------------------------------------------------------

    def step(self) -> bool:
        """Let the next thing happen; False if nothing can happen any more."""
        upcoming = self._agenda.upcoming(self.controller)
        if upcoming is None:
            return False
        at, event = upcoming
        if event is None:
            self.now = at
            self.handle(DeadlinePassed())
            return True
        self._agenda.pop()
        if isinstance(event, (UpdateRequest, TaskFailed)) and not self._still_open(event):
            return True  # the learner left; its open task is lost
        self.now = at
        self.handle(event)
        return True

    def _still_open(self, event: UpdateRequest | TaskFailed) -> bool:
        task = self.controller.roster[event.learner].task
        return task is not None and task.number == event.task

    def handle(self, event: Event) -> list[Action]:
        """Give the controller one event now and perform what it asks for."""
        actions = self.controller.handle(event, self.now)
        for item in (event, *actions):
            self.log.append((self.now, item))
            self.ledger.record(self.now, item)
            if isinstance(item, SendTask):
                actor = self.actors[item.learner]
                outcome = actor.train(item.task, item.community_model)
                if outcome is not None:
                    self.at(self.now + actor.transfer + outcome.seconds, outcome)
            if isinstance(item, RoundClosed) and self.opens:
                assert self.controller.secure is not None
                self.at(self.now, SumOpened(item.version, item.learners, self.controller.secure.total()))
        return actions

    def run(self, max_events: int = 20_000) -> Play:
        """Perform to the end: the controller finishes, or nothing can happen any more."""
        for _ in range(max_events):
            if self.controller.finished or not self.step():
                return self
        raise AssertionError("the play does not end")

    def run_until(self, *, community_version: int | None = None, time: float = math.inf) -> Play:
        """Perform until this community model is out, or until just before this moment."""
        while community_version is None or self.version < community_version:
            upcoming = self._agenda.upcoming(self.controller)
            if upcoming is None or upcoming[0] >= time or not self.step():
                break
        return self

    # --- the review ---------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.controller.community.stamp.version

    def tasks(self) -> dict[str, int | None]:
        """Steps of every open task."""
        return {record.learner: record.task.budget.steps for record in self.controller.roster.training}

    def budgets(self) -> dict[str, Budget]:
        return {record.learner: record.task.budget for record in self.controller.roster.training}

    def waiting(self) -> list[str]:
        return [record.learner for record in self.controller.roster.waiting]

    def items(self, kind: type) -> list[Any]:
        return [item for _, item in self.log if isinstance(item, kind)]

    def times(self, kind: type) -> list[float]:
        return [at for at, item in self.log if isinstance(item, kind)]

    def published(self) -> list[CommunityPublished]:
        return self.items(CommunityPublished)

    def committed(self) -> list[UpdateCommitted]:
        return self.items(UpdateCommitted)

    def refused(self) -> list[UpdateRefused]:
        return self.items(UpdateRefused)

    def set_aside(self) -> list[LearnerSetAside]:
        return self.items(LearnerSetAside)

    def finish_reason(self) -> str | None:
        """Why it ended; None if it has not. It ends once."""
        ends = self.items(Finish)
        assert len(ends) <= 1
        return ends[0].reason if ends else None

    def costs(self) -> Costs:
        return self.ledger.costs(self.now)


def community_snapshot(controller: Controller) -> dict[str, Any]:
    """Every number of the community, to the bit."""
    community = controller.community
    return {
        "model": community.model.sha256(),
        "stamp": community.stamp,
        "steps": community.committed_steps,
        "contributors": community.contributors,
        "arrays": {name: array.tobytes() for name, array in community.arrays().items()},
    }


def snapshot(controller: Controller) -> dict[str, Any]:
    """The whole state of a controller, comparable: roster, protocol and community."""

    def value(thing: Any) -> Any:
        return thing.sha256() if isinstance(thing, Model) else repr(thing)

    protocol = controller.protocol
    return {
        "roster": [{f.name: value(getattr(record, f.name)) for f in fields(record)} for record in controller.roster],
        "protocol": {f.name: repr(getattr(protocol, f.name)) for f in fields(protocol) if f.name != "_barrier"},  # type: ignore[arg-type]
        "barrier": repr(sorted(vars(protocol._barrier).items())) if hasattr(protocol, "_barrier") else None,
        "community": community_snapshot(controller),
        "run": (controller.started, controller.finished, controller.update_requests, controller._tasks_sent),
    }
