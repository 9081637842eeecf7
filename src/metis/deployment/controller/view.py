"""What the event loop knows of the federation."""

from __future__ import annotations

import math

from metis.core.events import LearnerId
from metis.deployment.controller.writer import OpenTask, Outcome, Recovered
from metis.runs.folds import RunFold
from metis.runs.setting import Setting


class View:
    """Kept from the writer's outcomes, and for the event loop alone."""

    def __init__(self, setting: Setting, recovered: Recovered) -> None:
        self.standing = recovered.standing
        self.tasks: dict[LearnerId, OpenTask] = {
            learner: task for learner, task in recovered.tasks.items() if task is not None
        }
        self.fold = RunFold(setting)
        for now, item in recovered.recorded:
            self.fold.record(now, item)

    def take(self, outcome: Outcome) -> None:
        self.standing = outcome.standing
        for learner, task in outcome.tasks.items():
            if task is None:
                self.tasks.pop(learner, None)
            else:
                self.tasks[learner] = task
        for now, item in outcome.recorded:
            self.fold.record(now, item)

    def open_task(self, learner: LearnerId, number: int) -> OpenTask | None:
        """This task of the learner, if it may still be answered."""
        opened = self.tasks.get(learner)
        return opened if opened is not None and opened.task.number == number else None

    @property
    def best_version(self) -> int | None:
        """The first community model with the best value of the metric so far; None before any was measured."""
        setting = self.fold.setting
        measured = [
            (point.metrics[setting.metric], point.version)
            for point in self.fold.history
            if math.isfinite(point.metrics.get(setting.metric, math.nan))
        ]
        if not measured:
            return None
        value = (max if setting.higher_is_better else min)(value for value, _ in measured)
        return next(version for found, version in measured if found == value)
