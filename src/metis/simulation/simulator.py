"""The controller of the core in virtual time, with learners that really train.

Everything that could differ between two runs is fixed: ties are broken by the order of insertion,
randomness comes from the seed, the learner and the task, and results are asked for in virtual order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from metis.core.controller import Controller
from metis.core.events import (
    Action,
    Budget,
    CommunityPublished,
    DeadlinePassed,
    Evaluated,
    Event,
    Finish,
    LearnerId,
    LearnerJoined,
    LearnerLeft,
    SendTask,
    StopRequested,
    TaskFailed,
    UpdateRequest,
)
from metis.core.layers import Memory
from metis.core.mixing import ModelStore
from metis.core.model import Model
from metis.core.schedules import Cadence
from metis.errors import ConfigError, Diverged
from metis.learning import Trained
from metis.simulation.availability import Always, Availability
from metis.simulation.interrupt import Interrupts
from metis.simulation.link import Link
from metis.simulation.loop import Agenda
from metis.simulation.opening import Opening, SumOpening
from metis.simulation.outages import ControllerFaults, Outages
from metis.simulation.pools.local import Fetch, Measured, Pool, Ticket
from metis.simulation.speed import Speed, Spent

# Random streams besides those of the learners' batches.
_SPEED, _AVAILABILITY, _CUTS, _STALLS, _RESTARTS = range(1, 6)
_EVALUATION, _OCCURRENCE = 0, 1  # at one moment an evaluation comes first: it belongs to what just happened

Record = Callable[[float, Event | Action], None]


@dataclass(frozen=True)
class Machine:
    """The simulated computer of a learner, and what the controller knows about its data."""

    name: LearnerId
    examples: int
    batch_size: int
    speed: Speed
    availability: Availability = field(default_factory=Always)
    link: Link = field(default_factory=Link)
    private: bool = False  # it makes exactly the steps that it is asked for, however long they take
    max_steps: int | None = None  # that its privacy budget allows
    larger_batches: bool = False  # whether it fills with them what the budget leaves of a period

    def spend(self, budget: Budget, start: float, rng: np.random.Generator | None) -> Spent:
        """What it does with a budget; records that are protected decide about no step."""
        if not self.private:
            return self.speed.spend(budget, start, rng)
        assert budget.steps is not None, "it was refused"
        spent = self.speed.spend(Budget(budget.steps * budget.batches_per_step), start, rng)
        return Spent(budget.steps, spent.seconds, spent.time_per_batch)


@dataclass(slots=True)
class _Arrival:
    """A local model in transfer; void if the learner has left meanwhile."""

    learner: int
    task: int
    version: int  # of the community model that it is based on
    rate: float
    spent: Spent
    ticket: Ticket[Trained]
    batches_per_step: int = 1
    cuts: int = 0  # of the line, during its transfers
    resent: int = 0  # bytes


@dataclass(slots=True)
class Measurement:
    version: int
    model: Model
    ticket: Ticket[Measured]


@dataclass(slots=True)
class _Departure:
    learner: int
    back_at: float


@dataclass(slots=True)
class _Return:
    learner: int


def present_at_start(machines: Sequence[Machine], seed: int) -> int:
    """How many learners the federation begins with: those that are present at time 0, or the first to come."""
    first = [next(_absences(machine, seed, index), None) for index, machine in enumerate(machines)]
    return max(1, sum(absence is None or absence[0] > 0.0 for absence in first))


def _absences(machine: Machine, seed: int, index: int) -> Iterator[tuple[float, float]]:
    return machine.availability.absences(np.random.default_rng([seed, _AVAILABILITY, index]))


def _share(part: float, whole: float) -> float:
    return part / whole if part else 0.0


class Simulator(SumOpening):
    """Runs one federation in virtual time; `run` may be called once."""

    def __init__(
        self,
        controller: Controller,
        machines: Sequence[Machine],
        pool: Pool,
        record: Record,
        *,
        seed: int,
        evaluate: bool = True,
        evaluate_every: float = 0.0,
        model_bytes: int | None = None,
        update_bytes: int | None = None,  # of what learners hand in, if that is not whole models
        versions: ModelStore | None = None,
        personal: bool = False,  # models are measured at each learner, with what it keeps for itself
        best_version: Callable[[], int | None] = lambda: None,  # of what was recorded so far
        faults: ControllerFaults | None = None,
    ) -> None:
        self.controller = controller
        self.now = 0.0
        self.finished = False
        self._machines = machines
        self._index = {machine.name: index for index, machine in enumerate(machines)}
        self._pool = pool
        self._record = record
        self._seed = seed
        self._evaluate = evaluate
        self._cadence = Cadence(evaluate_every)
        self._last_evaluated: int | None = None
        self._model_bytes = controller.community.model.nbytes if model_bytes is None else model_bytes
        self._update_bytes = self._model_bytes if update_bytes is None else update_bytes
        self._agenda: Agenda[Any] = Agenda()
        self._open: dict[int, _Arrival] = {}  # by learner
        self._base_models: dict[int, Fetch] = {}  # by version, while an open task is based on it
        self._open_tasks: Counter[int] = Counter()  # by the version that they are based on
        self._versions = versions  # where to keep those models, if not in memory
        self._memories: dict[int, Memory] = {}
        self._personal = personal
        self._best_version = best_version
        self.best_model: Model | None = None
        self._steps_reserved: Counter[int] = Counter()  # by learner; of those with a privacy budget
        self._absences: list[Iterator[tuple[float, float]]] = []
        self._faults = faults or ControllerFaults()
        self._desk = Outages(self._drawn(self._faults.stalls, _STALLS), self._restarts())
        self._lines = [
            Outages(self._drawn(machine.link.cuts, _CUTS, index), self._restarts())
            for index, machine in enumerate(machines)
        ]
        self._due = 0.0  # when what happens now was due; a controller that is busy or down comes to it later
        self._started = False

    def _drawn(self, availability: Availability, *stream: int) -> Iterator[tuple[float, float]]:
        return availability.absences(np.random.default_rng([self._seed, *stream]))

    def _restarts(self) -> Iterator[tuple[float, float]]:
        """The same for the controller and for every line to it."""
        return self._drawn(self._faults.restarts, _RESTARTS)

    # --- the course of a run ------------------------------------------------------------------

    def run(self, after_each: Callable[[], None], on_interrupt: Callable[[], None]) -> None:
        """Go on until the controller finishes, nobody can go on, or the user interrupts."""
        with Interrupts() as interrupts:
            try:
                if not self._started:
                    self.start()
                while not self.finished:
                    if interrupts.pending:
                        raise KeyboardInterrupt
                    if not self.step(interrupts):
                        self._handle(StopRequested(self._standstill(), publish=True))
                        break
                    after_each()
                if self._evaluate and self._last_evaluated != self.controller.community.stamp.version:
                    self._measure_now()
            except KeyboardInterrupt:
                if interrupts.torn:
                    raise  # the last checkpoint on disk is whole, this state may not be
                if not self.finished:
                    on_interrupt()
                    self._handle(StopRequested("interrupted"))

    def _standstill(self) -> str:
        waiting = len(self.controller.roster.waiting) if self.controller.started and not self.controller.paused else 0
        if not waiting:
            return "no learner is left that could go on"
        learners = "1 learner waits" if waiting == 1 else f"{waiting} learners wait"
        return f"{learners}, but {type(self.controller.protocol).__name__} gives nobody a task"

    def step(self, interrupts: Interrupts) -> bool:
        """Let the next thing happen; False if nothing can happen any more."""
        upcoming = self._agenda.upcoming(self.controller)
        if upcoming is None:
            return False
        at, occurrence = upcoming
        if occurrence is None:
            self._advance(at)
            self._handle(DeadlinePassed())
            return True
        result: Any = None
        if isinstance(occurrence, (_Arrival, Measurement)):
            with interrupts.welcome():  # the only place that takes long; nothing has changed yet
                try:
                    result = occurrence.ticket.result()
                except Diverged as problem:
                    result = problem
        self._agenda.pop()
        if isinstance(occurrence, Measurement):
            self.now = max(self.now, at)  # elsewhere, and in no time
        else:
            self._advance(at, self._faults.write_seconds if isinstance(occurrence, _Arrival) else 0.0)
        self._happen(occurrence, result)
        return True

    def _advance(self, due: float, seconds: float = 0.0) -> None:
        """To when the controller has written down what was due at this time, one thing after the other."""
        self._due = due
        self.now = self._desk.finish(max(due, self.now), seconds).at
        if self.now == math.inf:
            raise ConfigError(f"the controller's outage at second {due:.6g} has no end, so nothing can go on")

    def start(self) -> None:
        """Measure the initial model and let everybody join who is there at the beginning."""
        self._started = True
        present = []
        for index, machine in enumerate(self._machines):
            self._absences.append(_absences(machine, self._seed, index))
            absence = next(self._absences[index], None)
            if absence is not None and absence[0] <= 0.0:
                self._push(absence[1], _Return(index))
                continue
            present.append(index)
            self._plan_departure(index, absence)
        if self._evaluate:
            self._measure_now()
        for index in present:
            self._join(index)

    def _happen(self, occurrence: object, result: Any) -> None:
        match occurrence:
            case _Arrival():
                self._arrive(occurrence, result)
            case Measurement():
                self._last_evaluated = occurrence.version
                self._handle(Evaluated(occurrence.version, *result))
                self._keep_best(occurrence.version, occurrence.model)
            case Opening():
                self._open_sum(occurrence)
            case _Departure():
                self._leave(occurrence)
            case _Return():
                self._plan_departure(occurrence.learner, next(self._absences[occurrence.learner], None))
                self._join(occurrence.learner)

    def _arrive(self, arrival: _Arrival, result: Trained | Diverged) -> None:
        name, spent = self._machines[arrival.learner].name, arrival.spent
        del self._open[arrival.learner]
        if isinstance(result, Diverged):
            self._handle(TaskFailed(name, arrival.task, str(result), spent.steps, spent.seconds))
        else:
            if result.memory:
                self._memories[arrival.learner] = result.memory
            self._handle(
                UpdateRequest(
                    name,
                    arrival.task,
                    spent.steps,
                    spent.seconds,
                    spent.time_per_batch,
                    result.model,
                    result.loss,
                    result.notes,
                    cuts=arrival.cuts,
                    resent=arrival.resent,
                )
            )
        self._release(arrival.version)

    def _leave(self, departure: _Departure) -> None:
        arrival = self._open.pop(departure.learner, None)
        if arrival is not None:
            arrival.ticket.cancel()
            self._agenda.discard(arrival)
        self._push(departure.back_at, _Return(departure.learner))
        self._handle(LearnerLeft(self._machines[departure.learner].name))
        if arrival is not None:
            self._release(arrival.version)

    def _join(self, index: int) -> None:
        machine = self._machines[index]
        left = None if machine.max_steps is None else machine.max_steps - self._steps_reserved[index]
        self._handle(LearnerJoined(machine.name, machine.examples, machine.batch_size, left, machine.larger_batches))

    def _handle(self, event: Event) -> None:
        self._record(self.now, event)
        actions = self.controller.handle(event, self.now)
        self.finished = any(isinstance(action, Finish) for action in actions)
        for action in actions:
            self._record(self.now, action)
            match action:
                case SendTask():
                    self._send(action)
                case CommunityPublished():
                    self._published(action)
                case _:
                    pass
        self._agree_on_sum()

    def _send(self, action: SendTask) -> None:
        index, task = self._index[action.learner], action.task
        machine = self._machines[index]
        link, line = machine.link, self._lines[index]
        download = line.finish(self.now, link.download_time(self._model_bytes), link.resumed)
        begins = download.at
        rng = np.random.default_rng([self._seed, _SPEED, index, task.number]) if machine.speed.jitter else None
        spent = machine.spend(task.budget, begins, rng)
        self._steps_reserved[index] += spent.steps
        upload = line.finish(begins + spent.seconds, link.upload_time(self._update_bytes), link.resumed)
        due = upload.at
        resent = _share(download.repeated, link.download_time(self._model_bytes)) * self._model_bytes
        resent += _share(upload.repeated, link.upload_time(self._update_bytes)) * self._update_bytes
        version = task.based_on.version
        if version not in self._base_models:
            self._base_models[version] = self._keep(version, action.community_model)
        self._open_tasks[version] += 1
        ticket = self._pool.train(
            due,
            index,
            self._base_models[version],
            task.number,
            spent.steps,
            self._memories.get(index),
            task.rate,
            task.budget.batches_per_step,
        )
        self._open[index] = _Arrival(
            index,
            task.number,
            version,
            task.rate,
            spent,
            ticket,
            task.budget.batches_per_step,
            download.cuts + upload.cuts,
            round(resent),
        )
        self._push(due, self._open[index])

    def _published(self, action: CommunityPublished) -> None:
        if self._evaluate and not self.finished and self._cadence.due(self.now):
            ticket = self._pool.evaluate(self.now, action.community_model, self._kept())
            # Before anything else that was due meanwhile: a resumed run measures the latest model again.
            self._push(self._due, Measurement(action.stamp.version, action.community_model, ticket), _EVALUATION)

    def _kept(self) -> dict[int, Memory] | None:
        """What each learner keeps for itself, where models are measured with it."""
        return dict(self._memories) if self._personal else None

    def _measure_now(self) -> None:
        """Evaluate what is published, outside the heap: at the start and at the end."""
        community = self.controller.community
        self._last_evaluated = community.stamp.version
        measured = self._pool.evaluate(self.now, community.model, self._kept()).result()
        self._record(self.now, Evaluated(community.stamp.version, *measured))
        self._keep_best(community.stamp.version, community.model)

    def _keep_best(self, version: int, model: Model) -> None:
        """The best model so far is kept when it has been measured."""
        if self._best_version() == version:
            self.best_model = model

    def _link_of(self, learner: LearnerId) -> Link:
        return self._machines[self._index[learner]].link

    def _push(self, at: float, occurrence: object, rank: int = _OCCURRENCE) -> None:
        self._agenda.add(at, occurrence, rank)

    def _plan_departure(self, index: int, absence: tuple[float, float] | None) -> None:
        if absence is not None:
            self._push(absence[0], _Departure(index, absence[1]))

    def _release(self, version: int) -> None:
        """A task is no longer open; the model that it was based on is dropped with the last one."""
        self._open_tasks[version] -= 1
        if not self._open_tasks[version]:
            del self._open_tasks[version], self._base_models[version]
            if self._versions is not None:
                self._versions.remove(str(version))

    def _keep(self, version: int, model: Model) -> Fetch:
        """Keep a model that tasks are based on; returns how to get it, because a mapped file counts as open."""
        versions, layout, counters = self._versions, model.layout, model.counters
        if versions is None or not layout.size:
            return lambda: model
        versions.put(str(version), model.vector)
        return lambda: Model(layout, versions.get(str(version))[:], counters)
