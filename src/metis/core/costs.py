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
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from metis.core.events import (
    Action,
    CohortFixed,
    Event,
    LearnerId,
    LearnerJoined,
    LearnerLeft,
    LearnerWithdrawn,
    MemberAdded,
    MemberRemoved,
    RolledBack,
    RoundClosed,
    SendTask,
    TaskFailed,
    UpdateRefused,
    UpdateRequest,
)
from metis.core.mixing.secure import MessageBytes


@dataclass(frozen=True, slots=True)
class Power:
    """What a learner's machine draws: relative epsilon_k (GPU 2, CPU 1 in the paper) or watts.

    - `active`: while it trains.
    - `idle`: while it waits; None is as much as when active, which is what the paper's time ratios imply.
    - `unit`: `"epsilon"` or `"watt"`, the same for all learners.
    """

    active: float = 1.0
    idle: float | None = None
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
class Totals:
    """The sums of `Costs` over all learners, bit for bit, without the share of each one."""

    parallel_time: float
    update_requests: int
    refused: int
    models_exchanged: int
    bytes_exchanged: int
    cumulative_time: float
    idle_time: float
    transfer_time: float
    steps: int
    energy: Energy


@dataclass(frozen=True, slots=True)
class Costs:
    """What a federation has cost up to one moment."""

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


class _Counts(NamedTuple):
    """What one learner did, in whole numbers."""

    steps: int = 0
    last_steps: int = 0
    update_requests: int = 0
    refused: int = 0


_Times: TypeAlias = NDArray[np.float64]
# The columns of a learner's times, in seconds: present since (NaN while away), present before that, when its open task
# was sent (NaN without one; later by what it has waited for a window), active and in transfer before that.
_SINCE, _PRESENT, _SENT, _ACTIVE, _TRANSFER = range(5)


class Moment:
    """A moment whose costs can be computed later; dropping it frees everything that is kept for it.

    It keeps the accounts that changed between it and the next moment, as they were before: nothing when it is made,
    and never more than has happened. Only an earlier moment refers to a later one.
    """

    def __init__(
        self, at: float, learners: int, tasks: int, updates: int, refused: int, steps: int, resent: int
    ) -> None:
        self.at, self.learners = at, learners
        self.tasks, self.updates, self.refused, self.steps, self.resent = tasks, updates, refused, steps, resent
        self.before: dict[int, tuple[_Times, _Counts]] = {}
        self.next: Moment | None = None


class CostLedger:
    """Follows the events and actions of a federation and knows its costs at any moment.

    The learners' times are kept in one table, so that costs take a few operations on columns, however many there are.
    """

    def __init__(
        self,
        powers: Mapping[LearnerId, Power],
        model_bytes: int,
        fills_the_period: bool,
        update_bytes: int | None = None,  # of what learners hand in, if that is not whole models
    ) -> None:
        self._powers, self._model_bytes = dict(powers), model_bytes
        self._update_bytes = model_bytes if update_bytes is None else update_bytes
        self._fills_the_period = fills_the_period  # of the protocol: then `equation` charges everybody's whole time
        self._rows: dict[LearnerId, int] = {}  # row of each learner's account, in the order of joining
        self._times: _Times = np.empty((8, 5))
        self._draws: _Times = np.empty((8, 2))  # power while training, and while idle
        self._counts: list[_Counts] = []
        self._tasks = self._updates = self._refused = self._steps = self._resent = 0
        self._latest = self._now(-math.inf)

    @property
    def learners(self) -> int:
        """How many have an account."""
        return len(self._counts)

    def record(self, now: float, item: Event | Action) -> None:
        """Add the next event or action."""
        match item:
            case LearnerJoined():
                row = self._open(item.learner) if item.learner not in self._rows else self._change(item.learner)
                if math.isnan(self._times[row, _SINCE]):
                    self._times[row, _SINCE] = now
            case LearnerLeft() | LearnerWithdrawn():
                self._leave(self._times[self._change(item.learner)], now)
            case MemberRemoved() if item.learner in self._rows:
                self._leave(self._times[self._change(item.learner)], now)
            case MemberAdded():
                self._powers[item.learner] = Power(item.active, item.idle, item.unit)
            case RolledBack():
                for learner, row in self._rows.items():
                    if not math.isnan(self._times[row, _SENT]):
                        self._end_task(self._times[self._change(learner)], now)
            case SendTask():
                self._times[self._change(item.learner), _SENT] = now
                self._tasks += 1
            case CohortFixed():  # who has trained and waits for a window is idle
                for learner, waited in item.waits.items():
                    times = self._times[self._change(learner)]
                    times[_SENT] = min(times[_SENT] + waited, now)  # NaN, without a task, stays so
            case UpdateRequest() | TaskFailed():
                self._hand_in(item, now)
            case UpdateRefused():
                row = self._change(item.learner)
                counts = self._counts[row]
                disbelieved = counts.last_steps if item.kind == "invalid" else 0
                self._counts[row] = counts._replace(steps=counts.steps - disbelieved, refused=counts.refused + 1)
                self._refused += 1
                self._steps -= disbelieved
            case RoundClosed():
                learners = len(item.learners)
                self._resent += MessageBytes.of(item.members, learners).of_round(item.members, learners)
                self._resent += item.resent * self._update_bytes
            case _:
                pass

    def _open(self, learner: LearnerId) -> int:
        row = len(self._counts)
        if row == len(self._times):
            self._times = np.concatenate([self._times, np.empty_like(self._times)])
            self._draws = np.concatenate([self._draws, np.empty_like(self._draws)])
        power = self._powers.get(learner, Power())
        self._times[row] = (math.nan, 0.0, math.nan, 0.0, 0.0)
        self._draws[row] = (power.active, power.active if power.idle is None else power.idle)
        self._counts.append(_Counts())
        self._rows[learner] = row
        return row

    def _change(self, learner: LearnerId) -> int:
        """The row of an account that is about to change; the latest moment keeps a copy of it."""
        row = self._rows[learner]
        if row < self._latest.learners and row not in self._latest.before:
            self._latest.before[row] = (self._times[row].copy(), self._counts[row])
        return row

    def _leave(self, times: _Times, now: float) -> None:
        if not math.isnan(times[_SENT]):
            self._end_task(times, now)
        if not math.isnan(times[_SINCE]):
            times[_PRESENT] += now - times[_SINCE]
            times[_SINCE] = math.nan

    def _end_task(self, times: _Times, now: float) -> None:
        """It worked in vain, but it worked."""
        times[_ACTIVE] += now - times[_SENT]
        times[_SENT] = math.nan

    def _hand_in(self, item: UpdateRequest | TaskFailed, now: float) -> None:
        row = self._change(item.learner)
        times, counts = self._times[row], self._counts[row]
        elapsed = now - float(times[_SENT])
        assert not math.isnan(elapsed)
        times[_SENT] = math.nan
        # A claim counts for at most the time that passed; a refused one may even be NaN.
        active = min(max(0.0, item.seconds), elapsed)
        times[_ACTIVE] += active
        times[_TRANSFER] += elapsed - active
        handed_in = isinstance(item, UpdateRequest)
        self._counts[row] = _Counts(
            counts.steps + item.steps, item.steps, counts.update_requests + handed_in, counts.refused
        )
        self._updates += handed_in
        self._steps += item.steps
        if isinstance(item, UpdateRequest):
            self._resent += item.resent

    # --- costs ----------------------------------------------------------------------------------

    def moment(self, now: float) -> Moment:
        """This moment, for costs that may be wanted later."""
        moment = self._now(now)
        self._latest.next = moment
        self._latest = moment
        return moment

    def costs(self, at: float | Moment) -> Costs:
        """The costs, now or at a moment; work in progress counts as active, its steps once they are handed in."""
        moment, times, counts = self._accounts(at)
        columns = [column.tolist() for column in self._shares(moment.at, times)]
        shares = [
            LearnerCosts(active, transfer, idle, away, own.steps, own.update_requests, own.refused, Energy(*energy))
            for own, active, transfer, idle, away, *energy in zip(counts, *columns, strict=True)
        ]
        exchanged = moment.tasks + moment.updates
        return Costs(
            parallel_time=moment.at,
            update_requests=moment.updates,
            refused=moment.refused,
            models_exchanged=exchanged,
            bytes_exchanged=self._bytes(moment),
            by_learner=dict(zip(self._rows, shares, strict=False)),
        )

    def totals(self, at: float | Moment) -> Totals:
        """The sums of the costs, now or at a moment."""
        moment, times, _ = self._accounts(at)
        active, transfer, idle, _, *energies = self._shares(moment.at, times)
        exchanged = moment.tasks + moment.updates
        return Totals(
            parallel_time=moment.at,
            update_requests=moment.updates,
            refused=moment.refused,
            models_exchanged=exchanged,
            bytes_exchanged=self._bytes(moment),
            cumulative_time=math.fsum(active.tolist()),
            idle_time=math.fsum(idle.tolist()),
            transfer_time=math.fsum(transfer.tolist()),
            steps=moment.steps,
            # Added up one after the other, as `Costs.energy` does, and not by halves, as numpy's sum would.
            energy=Energy(*(float(np.add.accumulate(column)[-1]) if len(column) else 0.0 for column in energies)),
        )

    def _bytes(self, moment: Moment) -> int:
        return moment.tasks * self._model_bytes + moment.updates * self._update_bytes + moment.resent

    def _now(self, now: float) -> Moment:
        return Moment(now, len(self._counts), self._tasks, self._updates, self._refused, self._steps, self._resent)

    def _accounts(self, at: float | Moment) -> tuple[Moment, _Times, list[_Counts]]:
        """The accounts as they were at the moment, and the moment itself."""
        if not isinstance(at, Moment):
            return self._now(at), self._times[: len(self._counts)], self._counts
        times, counts = self._times[: at.learners].copy(), self._counts[: at.learners]
        since = [at]
        while since[-1].next is not None:
            since.append(since[-1].next)
        for moment in reversed(since):
            for row, (own_times, own_counts) in moment.before.items():
                if row < at.learners:
                    times[row], counts[row] = own_times, own_counts
        return at, times, counts

    def _shares(self, now: float, times: _Times) -> tuple[_Times, ...]:
        """Active, transfer, idle and away time of each learner, and its energy in the three definitions."""
        since, before, sent, active, transfer = times.T
        present = before + np.where(np.isnan(since), 0.0, now - since)
        active = active + np.where(np.isnan(sent), 0.0, now - sent)
        idle = np.maximum(0.0, present - active - transfer)
        full, least = self._draws[: len(times)].T
        charged = full * active + least * (idle + transfer)
        equation = full * (present if self._fills_the_period else active)
        return active, transfer, idle, np.maximum(0.0, now - present), equation, full * active, charged
