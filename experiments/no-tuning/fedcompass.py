"""FedCompass (Li et al. 2024, arXiv 2309.14675) as a policy in one file.

A scheduler estimates how fast each learner is and hands out numbers of local steps so that learners arrive in groups. A
learner joins the group in which it can do the most steps, between `min_steps` and `max_steps`, until that group is
expected; if none fits, it founds one. A group is mixed when all its members are there, or after `latest` times the time
that it was expected to take; who comes later is not waited for, trains on at once, and is mixed with the next group.

Two simplifications, both in its favour: the exchange of models is part of the expected time instead of slowing down the
estimated speed, and a member that is there before its group is mixed with whichever group is complete first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from metis import Policy
from metis.core.contribution import version_staleness
from metis.core.events import Budget, LearnerId, RoundMeasure
from metis.core.mixing.fedbuff import Buffered
from metis.core.mixing.store import ModelStore
from metis.core.model import Model
from metis.core.policies import POLICIES
from metis.core.protocols import BaseProtocol
from metis.core.roster import LearnerRecord, Roster
from metis.core.schedules import Moment
from metis.registry import Setting, check_settings

MinSteps = Annotated[int, Setting("fewest local steps of a task (Q_min)", ge=1)]
MaxSteps = Annotated[int, Setting("most local steps of a task (Q_max)", ge=1)]
Latest = Annotated[float, Setting("how many times its expected time a group is waited for (lambda)", ge=1)]


@dataclass
class _Group:
    expected: float  # when its members should be there
    latest: float  # until when they are waited for
    members: list[LearnerId]


@dataclass
class Compass(BaseProtocol):
    """Learners arrive in groups; a group does not wait for another."""

    min_steps: MinSteps = 20
    max_steps: MaxSteps = 100
    latest: Latest = 1.2

    _groups: list[_Group] = field(default_factory=list, init=False, repr=False)
    _deadline: float = field(default=math.inf, init=False, repr=False)

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def deadline(self) -> float:
        return self._deadline

    def ready(self, roster: Roster, now: float) -> bool:
        waiting = {record.learner for record in roster.waiting}
        held = [group for group in self._groups if waiting & set(group.members) and not self._ends(group, roster, now)]
        self._deadline = min((group.latest for group in held), default=math.inf)
        return bool(waiting - {learner for group in held for learner in group.members})

    def tasks(
        self, who: Sequence[LearnerRecord], roster: Roster, moment: Moment, measure: RoundMeasure | None
    ) -> dict[LearnerId, Budget]:
        now = moment.seconds
        self._groups = [group for group in self._groups if not self._ends(group, roster, now)]
        held = {learner for group in self._groups for learner in group.members}
        free = sorted((one for one in who if one.learner not in held), key=lambda one: (_step(one), one.learner))
        budgets = {one.learner: Budget(self._steps(one, roster, now)) for one in free}
        waiting = {one.learner for one in who} - set(budgets)
        self._deadline = min((group.latest for group in self._groups if waiting & set(group.members)), default=math.inf)
        return budgets

    def _ends(self, group: _Group, roster: Roster, now: float) -> bool:
        """Whether all members are there, or its time is over: then who is still training belongs to no group."""
        return now >= group.latest or all(roster[one].task is None for one in group.members)

    def _steps(self, one: LearnerRecord, roster: Roster, now: float) -> int:
        if one.time_per_batch is None:
            return self.min_steps
        step = one.time_per_batch

        def fitting(until: float) -> int:
            return math.floor((until - now - one.overhead) / step * (1 + 1e-9))

        fits = [(fitting(group.expected), index) for index, group in enumerate(self._groups)]
        best, index = max((fit for fit in fits if self.min_steps <= fit[0] <= self.max_steps), default=(0, 0))
        if best:
            self._groups[index].members.append(one.learner)
            return best
        # A group of its own, which ends when the fastest of another one could have done its next task.
        ends = [
            group.latest + self.max_steps * min(_step(roster[member]) for member in group.members)
            for group in self._groups
        ]
        steps = max((fit for fit in map(fitting, ends) if fit <= self.max_steps), default=self.max_steps)
        steps = max(self.min_steps, steps)
        takes = one.overhead + steps * step
        self._groups.append(_Group(now + takes, now + self.latest * takes, [one.learner]))
        return steps


def _step(one: LearnerRecord) -> float:
    return math.inf if one.time_per_batch is None else one.time_per_batch


class GroupMixing(Buffered):
    """w += sum of p_k s_k Delta_k over a group, with p_k the share of all examples and s_k less for what is stale."""

    def __init__(self, initial_model: Model, store: ModelStore) -> None:
        super().__init__(initial_model, store, buffer_size=1)
        self._examples: dict[LearnerId, int] = {}

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        self._examples[learner] = examples
        super().commit(learner, local_model, value * examples, steps, base, examples)

    def publish(self, seconds: float = 0.0) -> bool:
        self._server_learning_rate = max(1, self.contributors) / max(1, sum(self._examples.values()))
        return super().publish(seconds)

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        known = {f"examples/{learner}": np.array(examples) for learner, examples in self._examples.items()}
        return {**super().arrays(local_models=local_models), **known}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        super().load_arrays(model, arrays, store)
        known = {name: int(value) for name, value in arrays.items() if name.startswith("examples/")}
        self._examples = {name.removeprefix("examples/"): value for name, value in known.items()}


@POLICIES.register("fedcompass")
def fedcompass(min_steps: MinSteps = 20, max_steps: MaxSteps = 100, latest: Latest = 1.2) -> Policy:
    """FedCompass: learners are given steps so that they arrive in groups."""
    protocol = Compass(min_steps, max_steps, latest)
    return Policy("fedcompass", protocol, version_staleness, GroupMixing, label=f"FedCompass ({min_steps}-{max_steps})")
