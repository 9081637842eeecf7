"""What the controller knows about each learner."""

from __future__ import annotations

import math
from collections.abc import Iterator, KeysView
from dataclasses import dataclass, field

from metis.core.events import LearnerId, LearnerJoined, LocalTask
from metis.core.model import Model
from metis.core.timing import TypicalTime

_STEPS_KEPT = 5  # accepted steps of a learner whose lengths are remembered


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
    typical_time: TypicalTime = field(default_factory=TypicalTime)  # t_beta_k over all updates
    overhead: float = 0.0  # seconds that its latest exchange took besides training
    overheads: tuple[float, ...] = ()  # of the latest three
    refusals: int = 0  # invalid or failed updates in a row
    steps_left: int | None = None  # that its privacy budget allows; None for no limit
    larger_batches: bool = False  # whether it fills with them what that leaves of a period
    step_lengths: tuple[tuple[int, tuple[float, ...]], ...] = ()  # batches and lengths of the latest accepted steps

    @property
    def epoch_steps(self) -> int:
        """Batches in one pass over the local data; the last one may be short (R2)."""
        return -(-self.examples // self.batch_size)

    @property
    def typical_overhead(self) -> float:
        """The median of the latest three, of two the shorter: one that stalled does not count."""
        return sorted(self.overheads)[(len(self.overheads) - 1) // 2] if self.overheads else 0.0

    @property
    def available(self) -> bool:
        return self.present and not self.set_aside

    def note_step(self, steps: int, lengths: tuple[float, ...]) -> None:
        """Remember how far an accepted update went, if that was measured."""
        if lengths:
            self.step_lengths = (*self.step_lengths[1 - _STEPS_KEPT :], (steps, lengths))

    def note_timing(self, time_per_batch: float, overhead: float) -> float | None:
        """Remember how fast the learner was this time; returns its earlier speed if it has changed for good."""
        self.time_per_batch = time_per_batch
        if self.first_time_per_batch is None:
            self.first_time_per_batch = time_per_batch
        self.overhead = max(0.0, overhead)
        self.overheads = (*self.overheads[-2:], self.overhead)
        return self.typical_time.note(time_per_batch)


class Roster:
    """All learners that ever joined, in the order of first joining; only it moves them between waiting and training."""

    def __init__(self) -> None:
        self._records: dict[LearnerId, LearnerRecord] = {}
        self._index: dict[LearnerId, int] = {}  # in the order of first joining
        self._waiting: dict[int, LearnerRecord] = {}  # by index
        self._back: dict[int, LearnerRecord] = {}  # those of them that have not answered in the open round
        self._answered: set[LearnerId] = set()  # who has answered a task of the open round
        self._training: dict[int, LearnerRecord] = {}  # by the number of the task

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
    def available_count(self) -> int:
        """How many are there and not set aside."""
        return len(self._waiting) + len(self._training)

    @property
    def training(self) -> list[LearnerRecord]:
        """Learners with an open task."""
        return [record for record in self if record.task is not None]

    @property
    def open_tasks(self) -> KeysView[int]:
        """The numbers of all open tasks."""
        return self._training.keys()

    @property
    def waiting(self) -> list[LearnerRecord]:
        """Learners that could train but have no task."""
        return [self._waiting[index] for index in sorted(self._waiting)]

    def waits(self, learner: LearnerId) -> bool:
        """Whether there is a learner of this name that could train but has no task."""
        return self._index.get(learner) in self._waiting

    @property
    def back(self) -> list[LearnerRecord]:
        """Those of `waiting` that have not answered in the open round: with none it takes no time."""
        return [self._back[index] for index in sorted(self._back)]

    def begin_round(self) -> None:
        """Nobody has answered in it yet."""
        self._answered.clear()
        self._back = dict(self._waiting)

    def admit(self, joined: LearnerJoined) -> None:
        """Add a learner, or take one back with what is known about its speed."""
        record = self._records.get(joined.learner)
        if record is None:
            record = LearnerRecord(joined.learner, joined.examples, joined.batch_size)
            self._index[joined.learner] = len(self._records)
            self._records[joined.learner] = record
        else:
            record.examples, record.batch_size = joined.examples, joined.batch_size
            record.present, record.set_aside, record.refusals = True, False, 0
            self._close(record)
        record.steps_left, record.larger_batches = joined.steps_left, joined.larger_batches
        self._wait(record)

    def assign(self, learner: LearnerId, task: LocalTask, now: float, base_model: Model | None) -> None:
        """The learner trains from now on."""
        record = self._waiting.pop(self._index[learner])
        self._back.pop(self._index[learner], None)
        record.task, record.task_sent_at, record.base_model = task, now, base_model
        if record.steps_left is not None and task.budget.steps is not None:
            record.steps_left = max(0, record.steps_left - task.budget.steps)  # spent, whatever becomes of it
        self._training[task.number] = record

    def close_task(self, learner: LearnerId, *, of_round: bool = False) -> None:
        """The learner waits for its next task; it may have answered one of the open round."""
        record = self._records[learner]
        self._close(record)
        if of_round:
            self._answered.add(learner)
        self._wait(record)

    def void_tasks(self) -> None:
        """Nobody's open task may be answered any more; all that trained wait for another."""
        for record in self.training:
            self.close_task(record.learner)

    def put_aside(self, learner: LearnerId) -> None:
        """The learner gets no more tasks until it joins again."""
        self._records[learner].set_aside = True
        self._wait_no_longer(learner)

    def dismiss(self, learner: LearnerId) -> None:
        """The learner is away; its open task is void."""
        record = self._records[learner]
        record.present = False
        self._close(record)
        self._wait_no_longer(learner)

    def _wait(self, record: LearnerRecord) -> None:
        index = self._index[record.learner]
        self._waiting[index] = record
        if record.learner not in self._answered:
            self._back[index] = record

    def _wait_no_longer(self, learner: LearnerId) -> None:
        self._waiting.pop(self._index[learner], None)
        self._back.pop(self._index[learner], None)

    def _close(self, record: LearnerRecord) -> None:
        if record.task is not None:
            del self._training[record.task.number]
        record.task, record.task_sent_at, record.unclocked, record.base_model = None, math.nan, 0.0, None
