"""What the controller knows of each learner."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from metis.core.events import LearnerId, LearnerJoined, LocalTask
from metis.core.model import Model


@dataclass(slots=True)
class LearnerRecord:
    """One learner, in the order of first joining."""

    learner: LearnerId
    examples: int  # |D_k|
    batch_size: int  # beta_k
    present: bool = True
    set_aside: bool = False
    task: LocalTask | None = None
    task_sent_at: float = math.nan
    unclocked: float = 0.0  # seconds since then in which the controller's clock stood still
    base_model: Model | None = None  # kept only for communities that mix differences
    first_time_per_batch: float | None = None  # t_beta_k of the cold start
    time_per_batch: float | None = None  # t_beta_k of the latest update
    overhead: float = 0.0  # seconds that its latest exchange took besides training
    refusals: int = 0  # invalid or failed updates in a row

    @property
    def epoch_steps(self) -> int:
        """Batches in one pass over the local data; the last one may be short (R2)."""
        return -(-self.examples // self.batch_size)

    @property
    def available(self) -> bool:
        return self.present and not self.set_aside

    def note_timing(self, time_per_batch: float, overhead: float) -> None:
        """Remember how fast the learner was this time."""
        self.time_per_batch = time_per_batch
        if self.first_time_per_batch is None:
            self.first_time_per_batch = time_per_batch
        self.overhead = max(0.0, overhead)

    def close_task(self) -> None:
        self.task, self.task_sent_at, self.unclocked, self.base_model = None, math.nan, 0.0, None


class Roster:
    """All learners that ever joined; iterates in the order of first joining."""

    def __init__(self) -> None:
        self._records: dict[LearnerId, LearnerRecord] = {}

    def __iter__(self) -> Iterator[LearnerRecord]:
        return iter(self._records.values())

    def __getitem__(self, learner: LearnerId) -> LearnerRecord:
        return self._records[learner]

    def get(self, learner: LearnerId) -> LearnerRecord | None:
        return self._records.get(learner)

    @property
    def available(self) -> list[LearnerRecord]:
        """Learners that are there and not set aside."""
        return [record for record in self if record.available]

    @property
    def training(self) -> list[LearnerRecord]:
        """Learners with an open task."""
        return [record for record in self if record.available and record.task is not None]

    @property
    def waiting(self) -> list[LearnerRecord]:
        """Learners that could train but have no task."""
        return [record for record in self if record.available and record.task is None]

    def admit(self, joined: LearnerJoined) -> None:
        """Add a learner, or welcome one back with what is known of its speed."""
        record = self._records.get(joined.learner)
        if record is None:
            self._records[joined.learner] = LearnerRecord(joined.learner, joined.examples, joined.batch_size)
            return
        record.examples, record.batch_size = joined.examples, joined.batch_size
        record.present, record.set_aside, record.refusals = True, False, 0
        record.close_task()

    def dismiss(self, learner: LearnerId) -> None:
        """The learner is away; its open task is void."""
        record = self._records[learner]
        record.present = False
        record.close_task()
