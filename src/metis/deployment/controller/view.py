"""What the event loop knows of the federation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metis.core.events import Action, Event, LearnerId
from metis.deployment.controller.openings import MaskedRound
from metis.deployment.controller.writer import OpenTask, Outcome, Recovered
from metis.runs.folds import RunFold
from metis.runs.periods import PeriodsFold
from metis.runs.rounds import SitesFold
from metis.runs.setting import Setting


class View:
    """Kept from the writer's outcomes, and for the event loop alone."""

    def __init__(self, setting: Setting, recovered: Recovered) -> None:
        self.standing = recovered.standing
        self.tasks: dict[LearnerId, OpenTask] = {
            learner: task for learner, task in recovered.tasks.items() if task is not None
        }
        self.resends = self._resends(recovered.masked)
        self.fold = RunFold(setting)
        self._sites = SitesFold(setting.model_bytes, setting.update_bytes)
        self.periods = PeriodsFold()
        for now, item in recovered.recorded:
            self._record(now, item)

    def _record(self, now: float, item: Event | Action) -> None:
        self.fold.record(now, item)
        self._sites.record(now, item)
        self.periods.record(now, item)

    def history(self, learner: LearnerId) -> dict[str, Any]:
        """How a learner has done so far, for the status."""
        return self._sites.history(learner)

    def take(self, outcome: Outcome) -> None:
        self.standing, self.resends = outcome.standing, self._resends(outcome.masked)
        for learner, task in outcome.tasks.items():
            if task is None:
                self.tasks.pop(learner, None)
            else:
                self.tasks[learner] = task
        for now, item in outcome.recorded:
            self._record(now, item)

    @staticmethod
    def _resends(masked: MaskedRound | None) -> Mapping[LearnerId, int]:
        """Who is to hand in again, for a window, what it handed in before; as which update."""
        return {} if masked is None else masked.resends

    @property
    def open_updates(self) -> set[int]:
        """What may still be handed in by somebody."""
        return {*(opened.task.number for opened in self.tasks.values()), *self.resends.values()}

    def awaits(self, learner: LearnerId, number: int) -> bool:
        """Whether this is what the learner may hand in."""
        return self.open_task(learner, number) is not None or self.resends.get(learner) == number

    def open_task(self, learner: LearnerId, number: int) -> OpenTask | None:
        """This task of the learner, if it may still be answered."""
        opened = self.tasks.get(learner)
        return opened if opened is not None and opened.task.number == number else None

    @property
    def best_version(self) -> int | None:
        """The best community model so far; None before any was measured."""
        best = self.fold.best
        return None if best is None else best.version
