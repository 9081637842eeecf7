"""What a run spends of its sites' privacy budgets: the steps that are left, and how many rounds they last for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from metis.core.events import Action, Event, LearnerId, LearnerJoined, SendTask


@dataclass(slots=True)
class Spending:
    """Of one site; the steps that are left are those that it has said, rounded down to two digits."""

    left: int | None = None
    steps: Counter[int] = field(default_factory=Counter)  # that tasks have asked for, by the batches of a step
    latest: int = 0  # steps of the latest task

    @property
    def rounds_left(self) -> int | None:
        """Tasks like the latest one that the budget still allows."""
        return None if self.left is None or not self.latest else self.left // self.latest


class SpendingFold:
    """Folds events into what each protected site has spent; a simulation says which sites are (`protected`)."""

    def __init__(self, protected: object) -> None:
        named = protected if isinstance(protected, dict) else {}
        self.by_learner: dict[LearnerId, Spending] = {name: Spending() for name in named}

    def record(self, item: Event | Action) -> None:
        if isinstance(item, LearnerJoined) and item.steps_left is not None:
            self.by_learner.setdefault(item.learner, Spending()).left = item.steps_left
        elif isinstance(item, SendTask) and (mine := self.by_learner.get(item.learner)) is not None:
            steps = item.task.budget.steps or 0
            mine.steps[item.task.budget.batches_per_step] += steps
            mine.latest = steps
            mine.left = None if mine.left is None else max(0, mine.left - steps)
