"""What may happen to a controller (events) and what it may ask for (actions).

All are frozen values. `now` never appears in them: time is an argument of `Controller.handle`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from metis.core.model import Model
from metis.core.stop import StopRule

LearnerId: TypeAlias = str


@dataclass(frozen=True, slots=True)
class CommunityStamp:
    """Identifies one published community model."""

    version: int = 0  # T, the global clock of FedAsync
    steps: int = 0  # s_c, local steps committed when it was published (FedRec)


@dataclass(frozen=True, slots=True)
class RoundMeasure:
    """What was measured of a round when it was published; lengths of vectors of weights."""

    progress: float  # ||w - w_c||: how far the mixture w lies from the community model, before any optimizer
    divergence: float  # (sum p_k ||w_k - w_c||^2)^(1/2): how far the local models spread around it
    # Of masked rounds, where only their sums are known:
    loss: float = math.nan  # weighted mean of the local losses
    clamped: float = math.nan  # weighted mean share of the numbers that lay beyond the clip
    # Of mixed differences: (sum p_k^2 ||Delta_k||^2)^(1/2), the progress of as long ones in unrelated directions
    unrelated: float = math.nan


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to train: whichever ends first. A batch that has begun is finished; at least one is done."""

    steps: int | None = None  # B_k; None for as many as fit
    seconds: float = math.inf
    batches_per_step: int = 1  # more only where a privacy budget limits the steps


@dataclass(frozen=True, slots=True)
class LocalTask:
    """Train from this community model until the budget ends."""

    number: int  # counts all tasks of a run, so an update names the task that it answers
    based_on: CommunityStamp
    budget: Budget
    rate: float = 1.0  # times the solver's learning rate


# --- events ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LearnerJoined:
    """A learner is there, for the first time or again."""

    learner: LearnerId
    examples: int  # |D_k|
    batch_size: int  # beta_k
    steps_left: int | None = None  # that its privacy budget allows from now on; None for no limit
    larger_batches: bool = False  # whether it fills with them what the budget leaves of a period


@dataclass(frozen=True, slots=True)
class LearnerLeft:
    """A learner is away; its open task is lost, its last contribution stays, it may come back."""

    learner: LearnerId


@dataclass(frozen=True, slots=True)
class LearnerWithdrawn:
    """A learner leaves for good and takes its contribution out of the community model."""

    learner: LearnerId


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """A learner hands in its local model and asks for the next community model."""

    learner: LearnerId
    task: int
    steps: int  # s_k, really done
    seconds: float  # spent training them
    time_per_batch: float  # t_beta_k in seconds, as measured at the learner
    local_model: Model = field(compare=False)  # w_k
    loss: float = math.nan  # mean training loss over the task; information only
    notes: Mapping[str, float] = field(default_factory=dict)  # of the policy's layers, by name; information only
    lengths: tuple[float, ...] = ()  # of its step, by part of the vector (step_guard.Lengths), where steps are judged
    cuts: int = 0  # times that its transfers were cut, in a simulation
    resent: int = 0  # bytes of them that travelled again


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A learner could not finish its task and has no model to hand in."""

    learner: LearnerId
    task: int
    reason: str
    steps: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The community model of this version was measured on held-out data."""

    version: int
    metrics: dict[str, float]
    by_learner: dict[LearnerId, dict[str, float]] = field(default_factory=dict)  # what each site reported, if sites did
    conclusive: bool = True  # whether enough have measured it to end the federation at a target


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The moment that `Controller.deadline` named has come."""


@dataclass(frozen=True, slots=True)
class LearnersExpected:
    """The federation begins as soon as this many learners are present."""

    learners: int


@dataclass(frozen=True, slots=True)
class ControllerAway:
    """The controller, and with it the run's clock, stood still for this long while the learners worked on."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The federation goes on from an earlier community model; what was done since is not mixed any more."""

    version: int  # of that model; it is published again under a number of its own
    community_model: Model = field(compare=False)


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants the federation to end now; what was reached is kept."""

    reason: str = "stopped by the user"
    publish: bool = False  # whether what was committed to the open round is mixed first


@dataclass(frozen=True, slots=True)
class Paused:
    """Somebody wants no new tasks to be sent; open ones are finished and count, and the run's clock stands still."""

    by: str = ""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The federation goes on after a pause."""

    by: str = ""


@dataclass(frozen=True, slots=True)
class StopRuleChanged:
    """The federation ends by another rule from now on; one that has ended goes on if the rule leaves something."""

    rule: StopRule
    by: str = ""  # an administrator; empty: the file that the controller was started with


@dataclass(frozen=True, slots=True)
class MemberAdded:
    """This learner may join, for the first time or again after it was removed."""

    learner: LearnerId
    active: float = 1.0  # what its machine draws, as in `costs.Power`
    idle: float | None = None
    unit: Literal["epsilon", "watt"] = "epsilon"


@dataclass(frozen=True, slots=True)
class MemberRemoved:
    """This learner may not join any more; if it is here it leaves, and its open task is lost."""

    learner: LearnerId
    withdraw: bool = False  # whether its contribution is taken out of the community model


@dataclass(frozen=True, slots=True)
class CohortFixed:
    """These members of a masked round have agreed on keys; the others have no part in it."""

    version: int  # of the community model that the round is based on
    learners: tuple[LearnerId, ...]
    tasks: tuple[int, ...] = ()  # of a window: the number of the task that each of these hands in
    waited: tuple[float, ...] = ()  # of a window: seconds for which each has waited for it, where they are known

    @property
    def waits(self) -> dict[LearnerId, float]:
        """For how long each has waited with something trained."""
        return {learner: waited for learner, waited in zip(self.learners, self.waited, strict=False) if waited > 0}


@dataclass(frozen=True, slots=True)
class ModelResent:
    """A member of a window has handed in again, masked once more, the latest local model that an earlier one had."""

    learner: LearnerId
    task: int  # the number under which it does so
    lost: bool = False  # it does not have that model any more


@dataclass(frozen=True, slots=True)
class SumOpened:
    """The masks of a closed round are off: this is the sum of its local models, and nothing else is known of them."""

    version: int  # of the community model that the round is based on
    learners: tuple[LearnerId, ...]  # whose models are in it; those that were caught lying are not
    total: NDArray[np.uint8] | None = field(default=None, compare=False)  # in the ring; None: a replay without weights


@dataclass(frozen=True, slots=True)
class RoundFailed:
    """The sum of a masked round will never be known; the round begins again, from the same model."""

    version: int
    reason: str


Event: TypeAlias = (
    LearnerJoined
    | LearnerLeft
    | LearnerWithdrawn
    | UpdateRequest
    | TaskFailed
    | Evaluated
    | DeadlinePassed
    | LearnersExpected
    | ControllerAway
    | RolledBack
    | StopRequested
    | Paused
    | Resumed
    | StopRuleChanged
    | MemberAdded
    | MemberRemoved
    | CohortFixed
    | ModelResent
    | SumOpened
    | RoundFailed
)

# --- actions --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendTask:
    """Give this learner this task and the community model that it is based on."""

    learner: LearnerId
    task: LocalTask
    community_model: Model = field(compare=False)


@dataclass(frozen=True, slots=True)
class PeriodBegun:
    """A synchronization period begins, and why it is that long; from protocols that explain themselves."""

    seconds: float  # infinite in a probe, which ends with the answers
    reason: str
    not_awaited: tuple[LearnerId, ...] = ()  # learners that do one batch, for which nobody waits


@dataclass(frozen=True, slots=True)
class CommunityPublished:
    """There is a new community model."""

    stamp: CommunityStamp
    contributors: int  # learners whose local models are in it
    community_model: Model = field(compare=False)
    measure: RoundMeasure | None = None  # only where the protocol asks for it


@dataclass(frozen=True, slots=True)
class UpdateCommitted:
    """This learner's update counts, with this contribution value."""

    learner: LearnerId
    task: int
    contribution_value: float  # p_k


@dataclass(frozen=True, slots=True)
class UpdateRefused:
    """This learner's update does not count; the community model is unchanged and the federation goes on."""

    learner: LearnerId
    task: int
    kind: Literal["late", "invalid", "failed"]
    reason: str


@dataclass(frozen=True, slots=True)
class LearnerSetAside:
    """This learner gets no more tasks until it joins again: too many refused updates in a row."""

    learner: LearnerId
    reason: str


@dataclass(frozen=True, slots=True)
class SpeedChanged:
    """This learner has become slower or faster for good, by its smoothed timings; somebody may want to know why."""

    learner: LearnerId
    before: float  # seconds a batch
    now: float


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """The sum of exactly these learners' masked models is to be opened; later ones do not count."""

    version: int  # of the community model that the round is based on
    learners: tuple[LearnerId, ...]  # in ascending order
    members: int  # that the round began with
    resent: int = 0  # of a window: how many of these models an earlier one had, and were handed in again


@dataclass(frozen=True, slots=True)
class RoundAbandoned:
    """A masked round ended without a sum; the community model is published again under a new number."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class MembersAwaited:
    """No masked round or window begins, because too few learners are there; without a reason: enough are again."""

    learners: tuple[LearnerId, ...]  # that have joined and are not there, in ascending order
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The federation has ended."""

    reason: str


Action: TypeAlias = (
    SendTask
    | PeriodBegun
    | CommunityPublished
    | UpdateCommitted
    | UpdateRefused
    | LearnerSetAside
    | SpeedChanged
    | RoundClosed
    | RoundAbandoned
    | MembersAwaited
    | Finish
)
