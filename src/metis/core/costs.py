"""What a federation costs: a fold over events and actions, the same for a simulation and a deployment.

Parallel time is the clock; cumulative time is training summed over learners; an update request is one
local model handed in (the paper's communication cost; models exchanged are tasks sent plus updates).

Energy comes in three definitions, never one alone (R12):
  equation      the paper's: active time, but the whole time of everybody under semi-synchronous training
  active        active time only
  idle_charged  active time, and idle and transfer time at idle power
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from metis.core.events import (
    Action,
    Event,
    LearnerId,
    LearnerJoined,
    LearnerLeft,
    LearnerWithdrawn,
    SendTask,
    TaskFailed,
    UpdateRefused,
    UpdateRequest,
)


@dataclass(frozen=True, slots=True)
class Power:
    """What a learner's machine draws: relative epsilon_k (GPU 2, CPU 1 in the paper) or watts."""

    active: float = 1.0
    idle: float | None = None  # None: as much as when active, which is what the paper's time ratios imply
    unit: Literal["epsilon", "watt"] = "epsilon"

    def __post_init__(self) -> None:
        for name, value in (("active", self.active), ("idle", self.idle)):
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} power must be 0 or more, not {value}")


@dataclass(frozen=True, slots=True)
class Energy:
    """Energy in epsilon-seconds, or in joules where power is in watts."""

    equation: float = 0.0
    active: float = 0.0
    idle_charged: float = 0.0

    def __add__(self, other: Energy) -> Energy:
        return Energy(
            self.equation + other.equation, self.active + other.active, self.idle_charged + other.idle_charged
        )


@dataclass(frozen=True, slots=True)
class LearnerCosts:
    """One learner's share; active + transfer + idle + away = parallel time."""

    active: float
    transfer: float
    idle: float
    away: float
    steps: int
    update_requests: int
    refused: int
    energy: Energy


@dataclass(frozen=True, slots=True)
class Costs:
    """The bill of a federation up to one moment."""

    parallel_time: float
    update_requests: int
    refused: int
    models_exchanged: int
    bytes_exchanged: int
    by_learner: dict[LearnerId, LearnerCosts]

    @property
    def cumulative_time(self) -> float:
        return math.fsum(learner.active for learner in self.by_learner.values())

    @property
    def idle_time(self) -> float:
        return math.fsum(learner.idle for learner in self.by_learner.values())

    @property
    def transfer_time(self) -> float:
        return math.fsum(learner.transfer for learner in self.by_learner.values())

    @property
    def steps(self) -> int:
        return sum(learner.steps for learner in self.by_learner.values())

    @property
    def energy(self) -> Energy:
        return sum((learner.energy for learner in self.by_learner.values()), Energy())

    def to_json(self) -> dict[str, Any]:
        energy = self.energy
        return {
            "parallel_time": self.parallel_time,
            "cumulative_time": self.cumulative_time,
            "idle_time": self.idle_time,
            "transfer_time": self.transfer_time,
            "update_requests": self.update_requests,
            "refused_updates": self.refused,
            "models_exchanged": self.models_exchanged,
            "bytes_exchanged": self.bytes_exchanged,
            "steps": self.steps,
            "steps_by_learner": {name: learner.steps for name, learner in self.by_learner.items()},
            "energy": {
                "equation": energy.equation,
                "active": energy.active,
                "idle_charged": energy.idle_charged,
            },
        }


@dataclass(slots=True)
class _Account:
    present_since: float | None = None
    present: float = 0.0
    task_sent_at: float | None = None
    active: float = 0.0
    transfer: float = 0.0
    steps: int = 0
    last_steps: int = 0
    update_requests: int = 0
    refused: int = 0


@dataclass
class CostLedger:
    """Reads the course of a federation and can tell the bill at any moment."""

    powers: Mapping[LearnerId, Power]
    model_bytes: int
    fills_the_period: bool  # of the protocol: then `equation` charges everybody's whole time
    _accounts: dict[LearnerId, _Account] = field(default_factory=dict, init=False)
    _tasks: int = field(default=0, init=False)
    _updates: int = field(default=0, init=False)

    def record(self, now: float, item: Event | Action) -> None:
        """Take the next event or action in."""
        match item:
            case LearnerJoined():
                account = self._accounts.setdefault(item.learner, _Account())
                if account.present_since is None:
                    account.present_since = now
            case LearnerLeft() | LearnerWithdrawn():
                self._leave(self._accounts[item.learner], now)
            case SendTask():
                self._accounts[item.learner].task_sent_at = now
                self._tasks += 1
            case UpdateRequest() | TaskFailed():
                self._hand_in(item, now)
            case UpdateRefused():
                account = self._accounts[item.learner]
                account.refused += 1
                if item.kind == "invalid":  # what it claims is not believed
                    account.steps -= account.last_steps
            case _:
                pass

    def _leave(self, account: _Account, now: float) -> None:
        if account.task_sent_at is not None:  # it worked in vain, but it worked
            account.active += now - account.task_sent_at
            account.task_sent_at = None
        if account.present_since is not None:
            account.present += now - account.present_since
            account.present_since = None

    def _hand_in(self, item: UpdateRequest | TaskFailed, now: float) -> None:
        account = self._accounts[item.learner]
        assert account.task_sent_at is not None
        elapsed = now - account.task_sent_at
        account.task_sent_at = None
        # A claim is no more than the time that passed; a refused one may even be NaN.
        active = min(max(0.0, item.seconds), elapsed)
        account.active += active
        account.transfer += elapsed - active
        account.steps += item.steps
        account.last_steps = item.steps
        if isinstance(item, UpdateRequest):
            account.update_requests += 1
            self._updates += 1

    def costs(self, now: float) -> Costs:
        """The bill at this moment; work in hand counts as active so far, its steps when they are handed in."""
        by_learner = {}
        for learner, account in self._accounts.items():
            present = account.present + (0.0 if account.present_since is None else now - account.present_since)
            in_hand = 0.0 if account.task_sent_at is None else now - account.task_sent_at
            active = account.active + in_hand
            idle = max(0.0, present - active - account.transfer)
            power = self.powers.get(learner, Power())
            idle_power = power.active if power.idle is None else power.idle
            energy = Energy(
                equation=power.active * (present if self.fills_the_period else active),
                active=power.active * active,
                idle_charged=power.active * active + idle_power * (idle + account.transfer),
            )
            by_learner[learner] = LearnerCosts(
                active,
                account.transfer,
                idle,
                max(0.0, now - present),
                account.steps,
                account.update_requests,
                account.refused,
                energy,
            )
        exchanged = self._tasks + self._updates
        return Costs(
            parallel_time=now,
            update_requests=self._updates,
            refused=sum(account.refused for account in self._accounts.values()),
            models_exchanged=exchanged,
            bytes_exchanged=exchanged * self.model_bytes,
            by_learner=by_learner,
        )
