"""What a policy will cost, before anything is trained: the real controller in virtual time, with constant speeds.

A policy with rounds, or with masked windows, is played until these recur; without them each learner repeats its first
task. All numbers describe that steady state, without the cold start. Bytes are those of the ledger of costs, so they
are what a simulation counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np

from metis.core.controller import Controller
from metis.core.costs import CostLedger, Costs, Energy, Power
from metis.core.events import (
    Budget,
    CommunityPublished,
    LearnerId,
    LearnerJoined,
    PeriodBegun,
    SendTask,
    UpdateCommitted,
    UpdateRequest,
)
from metis.core.mixing.secure import fewest_members
from metis.core.model import Model
from metis.core.policy import Policy
from metis.core.protocols import CommunicationProtocol
from metis.core.stop import StopRule
from metis.errors import ConfigError
from metis.privacy.records import Privacy
from metis.simulation.link import Link
from metis.simulation.loop import ScheduledEvent, play
from metis.simulation.opening import seconds_to_open
from metis.simulation.speed import Speed

HOUR = 3600.0
_Sizes: TypeAlias = tuple[int, int]  # bytes of a community model, and of an update
# How many rounds to play: a few suffice under a barrier for everybody; more are tried while the rounds do not recur.
_ROUNDS = (4, 24, 120)

Kind = Literal["synchronous", "semi-synchronous", "asynchronous"]


@dataclass(frozen=True)
class PlannedLearner:
    """What a forecast needs to know about one learner."""

    name: LearnerId
    examples: int
    batch_size: int
    time_per_batch: float
    download: float = 0.0  # seconds
    upload: float = 0.0
    power: Power = field(default_factory=Power)
    source: str = "the file"  # where the time per batch comes from
    privacy: Privacy | None = None  # how it protects its records
    link: Link | None = None  # None where the times of an exchange were measured

    @property
    def batches(self) -> int:
        """Batches in an epoch."""
        return -(-self.examples // self.batch_size)

    @property
    def epoch_time(self) -> float:
        """t_k^e of Eq. 5."""
        return self.batches * self.time_per_batch

    @property
    def exchange(self) -> float:
        """Seconds of a task that are not training."""
        return self.download + self.upload

    def handing_in(self, update_bytes: int | None) -> PlannedLearner:
        """The same learner where an update has so many bytes; None: as many as a model."""
        if update_bytes is None or self.link is None:
            return self
        return replace(self, upload=self.link.upload_time(update_bytes))

    def work(self, action: SendTask, now: float) -> ScheduledEvent:
        """When a task sent now is answered, and how."""
        spent = Speed(self.time_per_batch).spend(action.task.budget, now, np.random.default_rng(0))
        update = UpdateRequest(
            self.name, action.task.number, spent.steps, spent.seconds, spent.time_per_batch, Model.empty()
        )
        return ScheduledEvent(now + self.download + spent.seconds + self.upload, update)


@dataclass(frozen=True)
class LearnerForecast:
    """What one learner does between two mixings, and how it spends the time."""

    learner: LearnerId
    steps: int  # B_k
    local_epochs: float  # without mixing: the more, the further its model drifts from the others
    seconds: float  # from one task to the next
    active: float  # this and the next two are shares of that time
    transfer: float
    idle: float
    weight: float  # share of the mixture that its model has; without rounds by its examples
    overtaken: float  # updates of others that were mixed while it worked
    energy: Energy  # per hour


@dataclass(frozen=True)
class Forecast:
    """One policy in its steady state."""

    policy: Policy
    learners: tuple[LearnerForecast, ...]
    update_requests: float  # per hour
    models_exchanged: float  # per hour
    bytes_exchanged: float  # per hour
    refused: float = 0.0  # per hour
    round: float | None = None  # seconds between two mixings; None without rounds
    first_round: float | None = None  # seconds of the cold start: the first round, if it has tasks of its own
    slowest_learner_epochs: float | None = None  # lambda, of a policy that has one
    bounded_by: str = ""  # the setting that makes periods longer or shorter than lambda says
    period: PeriodBegun | None = None  # the last one, of a protocol that explains itself

    @property
    def kind(self) -> Kind:
        protocol = self.policy.protocol
        if not protocol.has_rounds:
            return "asynchronous"
        return "semi-synchronous" if protocol.has_period else "synchronous"

    @property
    def energy(self) -> Energy:
        """Per hour, in epsilon-seconds or joules."""
        return sum((learner.energy for learner in self.learners), Energy())

    @property
    def idle(self) -> float:
        """Mean share of the learners' time."""
        return math.fsum(learner.idle for learner in self.learners) / len(self.learners)

    @property
    def transfer(self) -> float:
        """Mean share of the learners' time."""
        return math.fsum(learner.transfer for learner in self.learners) / len(self.learners)

    @property
    def local_epochs(self) -> float:
        """Between two mixings, averaged by the weights of the models."""
        return math.fsum(learner.weight * learner.local_epochs for learner in self.learners)


def forecast(
    policy: Policy,
    learners: Sequence[PlannedLearner],
    slowest_learner_epochs: float | None = None,
    model_bytes: int = 0,
    update_bytes: int | None = None,  # None: as a model has
) -> Forecast:
    """The policy's steady state with these learners, all of them present and equally fast all the time.

    `slowest_learner_epochs` is the policy's lambda, if it has one; the costs do not depend on being given it.
    """
    sizes = model_bytes, model_bytes if update_bytes is None else update_bytes
    policy = policy.for_exchange(sum(sizes))
    if policy.protocol.has_rounds or policy.secure_sum is not None:
        return _with_rounds(policy, [one.handing_in(update_bytes) for one in learners], slowest_learner_epochs, sizes)
    return _without_rounds(policy, [one.handing_in(update_bytes) for one in learners], sizes)


def _joins(learners: Sequence[PlannedLearner]) -> list[ScheduledEvent]:
    return [ScheduledEvent(0.0, LearnerJoined(one.name, one.examples, one.batch_size)) for one in learners]


def _controller(policy: Policy, learners: Sequence[PlannedLearner], stop: StopRule | None = None) -> Controller:
    return Controller(policy, Model.empty(), stop=stop, learners_expected=len(learners))


def _ledger(policy: Policy, learners: Sequence[PlannedLearner], sizes: _Sizes) -> CostLedger:
    powers = {learner.name: learner.power for learner in learners}
    return CostLedger(powers, sizes[0], policy.fills_the_period, sizes[1])


def _per_hour(now: Energy, then: Energy, span: float) -> Energy:
    factor = HOUR / span
    return Energy(
        (now.equation - then.equation) * factor,
        (now.active - then.active) * factor,
        (now.idle_charged - then.idle_charged) * factor,
    )


# --- with rounds ----------------------------------------------------------------------------------


@dataclass
class _Round:
    """What happened between two published community models, by learner where it is a dictionary."""

    begins: float
    costs: Costs  # of the run until the end of this round
    steps: dict[LearnerId, list[int]] = field(default_factory=dict)  # of each update
    values: dict[LearnerId, list[float]] = field(default_factory=dict)  # contribution values
    overtaken: dict[LearnerId, int] = field(default_factory=dict)
    training_for: dict[LearnerId, float] = field(default_factory=dict)  # seconds, of tasks still open at its end


def _with_rounds(
    policy: Policy, learners: Sequence[PlannedLearner], slowest_learner_epochs: float | None, sizes: _Sizes
) -> Forecast:
    length = None
    for count in _ROUNDS:
        rounds, cold_start, protocol = _played(policy, learners, count, sizes)
        if (
            not rounds
            and policy.secure_sum is not None
            and len(learners) < (fewest := fewest_members(policy.secure_sum.colluders))
        ):
            few = f"secure_sum with colluders = {policy.secure_sum.colluders} needs {fewest} learners or more"
            raise ConfigError(f"{policy.label} gives {', '.join(one.name for one in learners)} no task: {few}")
        if len(rounds) < 2:
            raise ConfigError(f"the costs of {policy.label} cannot be forecast: it ends after {len(rounds)} rounds")
        length = _recurrence(rounds, len(learners))
        if length is not None:
            break
    recurring = rounds[-(length or len(rounds) // 2) :]
    before, after = rounds[-len(recurring) - 1].costs, rounds[-1].costs
    span = after.parallel_time - before.parallel_time
    values = {
        one.name: _mean([value for made in recurring for value in made.values.get(one.name, ())]) for one in learners
    }
    total = math.fsum(values.values())
    found = []
    for learner in learners:
        then, now = before.by_learner[learner.name], after.by_learner[learner.name]
        steps = [count for made in recurring for count in made.steps.get(learner.name, ())]
        found.append(
            LearnerForecast(
                learner.name,
                round(_mean(steps)),
                _mean(steps) / learner.batches,
                span / (len(steps) or len(recurring)),
                (now.active - then.active) / span,
                max(0.0, now.transfer - then.transfer) / span,
                max(0.0, now.idle - then.idle) / span,  # a difference of sums may be a hair under 0
                values[learner.name] / total,
                sum(made.overtaken.get(learner.name, 0) for made in recurring) / (len(steps) or 1),
                _per_hour(now.energy, then.energy, span),
            )
        )
    return Forecast(
        policy,
        tuple(found),
        (after.update_requests - before.update_requests) * HOUR / span,
        (after.models_exchanged - before.models_exchanged) * HOUR / span,
        (after.bytes_exchanged - before.bytes_exchanged) * HOUR / span,
        (after.refused - before.refused) * HOUR / span,
        span / len(recurring) if policy.protocol.has_rounds else None,
        rounds[0].costs.parallel_time if cold_start else None,
        slowest_learner_epochs,
        getattr(protocol, "bounded_by", ""),
        protocol.begun(),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _played(
    policy: Policy, learners: Sequence[PlannedLearner], count: int, sizes: _Sizes
) -> tuple[list[_Round], bool, CommunicationProtocol]:
    """This many rounds, whether they begin with a cold start (other tasks than the last), and the protocol."""
    by_name = {learner.name: learner for learner in learners}
    ledger = _ledger(policy, learners, sizes)
    rounds: list[_Round] = []
    current = _Round(0.0, ledger.costs(0.0))
    open_since: dict[LearnerId, float] = {}
    first: dict[LearnerId, Budget] = {}
    last: dict[LearnerId, Budget] = {}
    arrived = mixed = 0  # updates, and those in the latest community model
    mixed_before: dict[LearnerId, int] = {}  # when a learner's task was sent
    controller = _controller(policy, learners, StopRule(rounds=count))

    def opening() -> float | None:
        return seconds_to_open(controller, lambda name: by_name[name].link or Link(), sizes[1])

    def work(action: SendTask, at: float) -> ScheduledEvent:
        return by_name[action.learner].work(action, at)

    for now, item in play(controller, _joins(learners), work, opening):
        ledger.record(now, item)
        match item:
            case SendTask():
                open_since[item.learner], mixed_before[item.learner] = now, mixed
                last[item.learner] = item.task.budget
                first.setdefault(item.learner, item.task.budget)
            case UpdateRequest():
                arrived += 1
                open_since.pop(item.learner, None)
                current.steps.setdefault(item.learner, []).append(item.steps)
                current.overtaken[item.learner] = (
                    current.overtaken.get(item.learner, 0) + mixed - mixed_before[item.learner]
                )
            case UpdateCommitted():
                current.values.setdefault(item.learner, []).append(item.contribution_value)
            case CommunityPublished():
                mixed = arrived
                current.costs = ledger.costs(now)
                current.training_for = {learner: now - since for learner, since in open_since.items()}
                rounds.append(current)
                current = _Round(now, current.costs)
            case _:
                pass
    return rounds, first != last, controller.protocol


def _recurrence(rounds: Sequence[_Round], learners: int) -> int | None:
    """After how many rounds everything recurs, each learner having handed in an update; None if it does not."""
    for length in range(1, len(rounds) // 2 + 1):
        latest, earlier = rounds[-length:], rounds[-2 * length : -length]
        if len({name for made in latest for name in made.steps}) == learners and all(map(_alike, latest, earlier)):
            return length
    return None


def _alike(one: _Round, other: _Round) -> bool:
    """Whether two rounds took the same time for the same steps and left the same tasks open, but for rounding."""
    rounding = 1e-9 * one.costs.parallel_time
    times = [
        (made.costs.parallel_time - made.begins, *(made.training_for[name] for name in sorted(made.training_for)))
        for made in (one, other)
    ]
    return (
        one.steps == other.steps
        and one.training_for.keys() == other.training_for.keys()
        and all(math.isclose(mine, theirs, rel_tol=1e-9, abs_tol=rounding) for mine, theirs in zip(*times, strict=True))
    )


# --- without rounds -------------------------------------------------------------------------------


def _without_rounds(policy: Policy, learners: Sequence[PlannedLearner], sizes: _Sizes) -> Forecast:
    """Nobody waits for anybody, so each learner repeats its first task again and again."""
    trace = play(_controller(policy, learners), _joins(learners), lambda *_: None)
    tasks = {item.learner: item for _, item in trace if isinstance(item, SendTask)}
    if without := [learner.name for learner in learners if learner.name not in tasks]:
        raise ConfigError(f"{policy.label} gives {', '.join(without)} no task")
    answers = {learner.name: learner.work(tasks[learner.name], 0.0) for learner in learners}
    examples = sum(learner.examples for learner in learners)
    rate = math.fsum(1 / answer.at for answer in answers.values())  # updates per second
    found = []
    for learner, joined in zip(learners, _joins(learners), strict=True):
        answer, ledger = answers[learner.name], _ledger(policy, [learner], sizes)
        for at, item in ((0.0, joined.event), (0.0, tasks[learner.name]), (answer.at, answer.event)):
            ledger.record(at, item)
        costs = ledger.costs(answer.at).by_learner[learner.name]
        found.append(
            LearnerForecast(
                learner.name,
                costs.steps,
                costs.steps / learner.batches,
                answer.at,
                costs.active / answer.at,
                costs.transfer / answer.at,
                costs.idle / answer.at,
                learner.examples / examples,
                (rate - 1 / answer.at) * answer.at,
                _per_hour(costs.energy, Energy(), answer.at),
            )
        )
    return Forecast(policy, tuple(found), rate * HOUR, 2 * rate * HOUR, sum(sizes) * rate * HOUR)
