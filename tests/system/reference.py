"""The arithmetic of every policy a second time, as plainly as possible: what a journal must lead to.

I1, I2, I12, I14: weights, staleness and community models are computed here from the journal and from what was seen on
the wire; nothing of the core is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.core.events import (
    Action,
    CommunityPublished,
    Event,
    LearnerJoined,
    LearnerWithdrawn,
    MemberRemoved,
    RolledBack,
    RoundAbandoned,
    SendTask,
    SumOpened,
    UpdateCommitted,
    UpdateRequest,
)
from metis.core.model import Model

_ROUNDING = 2e-6  # a community model is float32

Vector = NDArray[np.float64]


def _vector(model: Model) -> Vector:
    return np.asarray(model.vector, np.float64)


class Reference:
    """Fed with every event of a journal and what the core made of it; `violated` hears what does not agree."""

    def __init__(
        self,
        policy: str,
        initial: Model,
        tasks: Mapping[int, tuple[str, int]],  # as they were sent: learner and version
        longest_budget: float,  # seconds
        violated: Callable[[str], None],
        opened: Callable[[int, Vector], Vector],  # of masked rounds: version and model to the mean of what was masked
    ) -> None:
        self._opened, self._abandoned = opened, False
        self._policy, self._tasks, self._longest, self._violated = policy, tasks, longest_budget, violated
        self._models, self._steps_at = {0: _vector(initial)}, {0: 0}
        self._version = self._steps = 0
        self._examples: dict[str, int] = {}
        self._counted: dict[str, tuple[float, Vector]] = {}  # whose models make the next community model
        self._blended = _vector(initial)  # FedAsync's and FedBuff's
        self._differences: list[Vector] = []

    def record(self, event: Event, actions: list[Action]) -> None:
        """Check one event."""
        if isinstance(event, LearnerJoined):
            self._examples[event.learner] = event.examples
        elif isinstance(event, LearnerWithdrawn) or (isinstance(event, MemberRemoved) and event.withdraw):
            self._counted.pop(event.learner, None)
        elif isinstance(event, RolledBack):
            self._counted.clear()
            self._differences.clear()
            self._blended = self._models[event.version].copy()
        for action in actions:
            match action:
                case RoundAbandoned():
                    self._abandoned = True
                case UpdateCommitted():
                    assert isinstance(event, UpdateRequest)
                    self._commit(event, action)
                case CommunityPublished():
                    self._publish(action, event)
                case SendTask():
                    budget = action.task.budget
                    probe = self._policy == "semisync measured" and budget.steps is not None and budget.steps <= 2
                    too_long = budget.seconds > self._longest and not probe
                    if too_long or (budget.steps is not None and budget.steps < 1):
                        self._violated(f"I11: a task may last {budget}, the longest period is {self._longest}")

    def _commit(self, event: UpdateRequest, action: UpdateCommitted) -> None:
        learner, base = event.learner, self._tasks[event.task][1]
        if self._tasks[event.task][0] != learner:
            self._violated(f"I16: the update of {learner} to task {event.task} of {self._tasks[event.task][0]} counts")
        match self._policy:
            case "fedrec":
                stale = self._steps - (self._steps_at[base] + event.steps)
                value = stale**-0.5 if stale > 0 else 1.0
            case "fedrec masked":  # nothing of its own window counts
                stale = self._steps_at[self._version] - (self._steps_at[base] + event.steps)
                value = stale**-0.5 if stale > 0 else 1.0
            case "fedasync" | "fedbuff" | "fedbuff masked":
                value = (self._version - base + 1) ** -0.5
            case "semisync measured":
                value = self._examples[learner] * (self._version - base + 1) ** -0.5
            case _:
                value = float(self._examples[learner])
        if not math.isclose(value, action.contribution_value, rel_tol=1e-12):
            self._violated(f"I12: task {event.task} counts {action.contribution_value}, not {value}")
        self._steps += event.steps
        local = _vector(event.local_model)
        self._counted[learner] = (value, local)
        if "masked" in self._policy:
            return
        if self._policy == "fedasync":
            self._blended = (1 - value / 2) * self._blended + value / 2 * local
        self._differences.append(value * (local - self._models[base]))

    def _publish(self, action: CommunityPublished, event: Event) -> None:
        stamp, found = action.stamp, _vector(action.community_model)
        if stamp.version != self._version + 1 or stamp.steps != self._steps:
            self._violated(f"I6: {stamp} follows version {self._version} with {self._steps} steps")
        self._version = stamp.version
        if isinstance(event, RolledBack):
            expected: Vector | None = self._models[event.version]
        elif self._abandoned:  # the same model again
            expected, self._abandoned = self._models[stamp.version - 1], False
            self._counted.clear()
        elif isinstance(event, SumOpened):
            expected = self._opened(event.version, self._models[event.version])
            self._counted.clear()
        else:
            expected = self._mixed()
        self._models[stamp.version], self._steps_at[stamp.version] = found, stamp.steps
        if expected is not None and not np.allclose(found, expected, rtol=_ROUNDING, atol=_ROUNDING):
            worst: Any = np.abs(found - expected).max()
            self._violated(f"I1: community model {stamp.version} is not the mixture of its local models, by {worst:g}")

    def _mixed(self) -> Vector | None:
        match self._policy:
            case "sync FedAvgM" | "semisync measured":
                return None  # what a server's optimizer makes of the mixture is not repeated here
            case "fedasync":
                return self._blended
            case "fedbuff":
                self._blended = self._blended + sum(self._differences) / len(self._differences)
                self._differences.clear()
                return self._blended
        total = math.fsum(value for value, _ in self._counted.values())
        if not 0 < total < math.inf:
            self._violated(f"I2: the contribution values of {sorted(self._counted)} sum to {total}")
        mixture: Vector = sum((value / total * local for value, local in self._counted.values()), np.zeros(1))
        if self._policy not in ("async", "fedrec"):
            self._counted.clear()
        return mixture
