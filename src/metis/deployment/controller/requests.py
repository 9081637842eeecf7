"""What learners ask for: to join, to hand in an update, to report a failed task, to fetch a model.

The event loop answers what it can from its view; whatever changes the federation is decided in the writer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import grpc

from metis.core.controller import Controller, claim_problem, within_elapsed
from metis.core.events import (
    ControllerAway,
    LearnerId,
    LearnerJoined,
    LearnerLeft,
    LocalTask,
    ModelResent,
    TaskFailed,
    UpdateRequest,
)
from metis.core.model import Layout, Model
from metis.core.timing import MAX_STEPS
from metis.deployment.controller.journal import Entry
from metis.deployment.controller.members import Members
from metis.deployment.controller.session import Refused, Session
from metis.deployment.controller.settings import Report
from metis.deployment.controller.state import State
from metis.deployment.controller.steps import Measured, StepGuard
from metis.deployment.controller.upload import Received, announced_checksum
from metis.deployment.controller.view import View
from metis.deployment.controller.writer import Writer
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.causes import sentence
from metis.deployment.wire.model_mac import checksum_in
from metis.deployment.wire.models import read_model

_CODE = grpc.StatusCode


class LearnerRequests:
    """Turns what learners send into events, and answers them when these are durable."""

    def __init__(
        self,
        writer: Writer,
        view: View,
        state: State,
        layout: Layout,
        guard: StepGuard,
        members: Members,
        report: Report,
        held_for: Callable[[], float],  # in the writer: seconds of a pause that are not journaled yet
    ) -> None:
        self._guard, self._members, self._held_for = guard, members, held_for
        self.notify: Callable[..., object] = lambda kind, text, **facts: None
        self._writer, self._view, self._state, self._layout, self._report = writer, view, state, layout, report
        self.uploads = 0  # updates that wait for the writer
        self.stopping = False

    # --- joining and failing --------------------------------------------------------------------

    def join(self, session: Session, ready: pb.Ready, resume: Callable[[Session], None]) -> None:
        """Let a learner join; `resume` is called in the event loop if it had only lost its connection."""
        # After the effects of what was journaled before: a lease that has just ended must not end this stay too.
        # If it cannot be journaled, the learner comes again.
        submit = self._writer.submit
        submit(lambda: submit(lambda: self._join(session, ready, resume), session.close))

    def _join(self, session: Session, ready: pb.Ready, resume: Callable[[Session], None]) -> None:
        """In the writer: a learner that is new or was away joins; one that only lost its connection continues."""
        learner, writer = session.learner, self._writer
        if writer.controller.member_changes.get(learner) is False:  # it was removed while it connected
            writer.in_loop(session.close)
            return
        record = writer.controller.roster.get(learner)
        if record is not None and record.present:
            same = (record.examples, record.batch_size) == (ready.examples, ready.batch_size)
            if same and not record.set_aside and not _over(writer.controller, record.task):
                writer.in_loop(resume, session)
                return
            writer.journal(LearnerLeft(learner), writer.now())
        if not writer.controller.finished:
            text = f"learner '{learner}' joins with {ready.examples} examples, batches of {ready.batch_size}"
            writer.in_loop(self._report, "info", text)
            left = min(ready.steps_left, MAX_STEPS) if ready.HasField("steps_left") else None
            joined = LearnerJoined(learner, ready.examples, ready.batch_size, left, ready.larger_batches)
            writer.journal(joined, writer.now())

    def fail(self, session: Session, failed: pb.Failed) -> None:
        """Close a task that the learner could not do."""
        # If it cannot be journaled, the learner reconnects without this task and is given it again.
        self._writer.submit(lambda: self._fail(session.learner, failed), session.close)

    def _fail(self, learner: LearnerId, failed: pb.Failed) -> None:
        """In the writer."""
        task = self._writer.durable.open_task(learner)
        if task is not None and task.number == failed.task and not self._writer.controller.finished:
            seconds = failed.seconds if math.isfinite(failed.seconds) else 0.0
            steps = min(failed.steps, task.budget.steps or MAX_STEPS)
            event = TaskFailed(learner, failed.task, sentence(failed.cause), steps, max(0.0, seconds))
            self._writer.journal(event, self._writer.now())
        elif self._writer.controller.resend_of(learner) == failed.task:
            self._writer.journal(ModelResent(learner, failed.task, lost=True), self._writer.now())
            self._writer.in_loop(self._report, "warning", _lost(learner, sentence(failed.cause)))

    # --- updates --------------------------------------------------------------------------------

    def check_upload(self, learner: LearnerId, header: pb.UploadHeader) -> pb.Receipt | None:
        known = self._state.find(header.task)
        if known is not None:
            if known.record["learner"] != learner:
                raise self._not_yours(learner, header.task)
            if known.blob is not None and announced_checksum(header) == checksum_in(known.blob):
                return pb.Receipt(verdict=pb.Receipt.ALREADY, sequence=known.seq)
            return None  # received again and compared: the same bytes get the same answer
        if self.stopping:
            raise Refused(_CODE.UNAVAILABLE, "the controller is stopping; keep the update and come back")
        if self._view.awaits(learner, header.task):
            return None
        if header.task in self._view.open_updates:
            raise self._not_yours(learner, header.task)
        return _too_late(header.task, self._view.standing.version)

    def open_tasks(self) -> set[int]:
        return self._view.open_updates

    def base_model(self, learner: LearnerId, task: int) -> Model | None:
        opened = self._view.open_task(learner, task)
        return None if opened is None else read_model(self._state.blob_path(opened.sha256), self._layout)

    def downloadable(self, learner: LearnerId, sha256: str) -> bool:
        opened, standing = self._view.tasks.get(learner), self._view.standing
        mine = opened is not None and opened.sha256 == sha256
        return mine or (standing.finished and standing.sha256 == sha256 and learner in self._members)

    def version_of(self, learner: LearnerId, sha256: str) -> int:
        """Of a model that is `downloadable`."""
        opened = self._view.tasks.get(learner)
        mine = opened is not None and opened.sha256 == sha256
        return opened.task.based_on.version if opened is not None and mine else self._view.standing.version

    def _not_yours(self, learner: LearnerId, task: int) -> Refused:
        self._report("warning", f"learner '{learner}' tried to hand in task {task}, which belongs to another learner")
        return Refused(_CODE.PERMISSION_DENIED, f"task {task} does not belong to learner '{learner}'")

    async def hand_in(self, received: Received) -> pb.Receipt:
        self.uploads += 1
        try:
            measured = await self._measure(received)
            answer = await self._writer.commit(lambda: self._hand_in(received, measured))
        finally:
            self.uploads -= 1
        if isinstance(answer, pb.Receipt):
            return answer
        learner, task = received.learner, received.header.task
        if answer.record["learner"] != learner:
            raise self._not_yours(learner, task)
        same = checksum_in(answer.blob or "") == checksum_in(received.blob or "")
        if not same and "step_excess" not in answer.record:  # a clipped one has bytes of its own
            self._report("warning", f"learner '{learner}' sent task {task} again with other bytes")
            raise Refused(_CODE.ALREADY_EXISTS, f"task {task} was handed in before with other bytes; the first counts")
        return pb.Receipt(verdict=pb.Receipt.ALREADY, sequence=answer.seq)

    async def _measure(self, received: Received) -> Measured | None:
        """How far the update goes, without keeping the writer from its work; None if that does not matter now."""
        opened = self._view.open_task(received.learner, received.header.task)
        if self._guard.guard == "off" or opened is None or received.blob is None or received.problem is not None:
            return None
        if received.content is not None:
            return None  # a small one takes less than a thread would
        return await asyncio.to_thread(self._guard.measure, opened.sha256, received.blob)

    def _hand_in(self, received: Received, measured: Measured | None) -> pb.Receipt | Entry:
        """In the writer: an answer that is durable, or the entry that answered this task before."""
        learner, header, writer = received.learner, received.header, self._writer
        known = self._state.find(header.task)
        if known is not None:
            return known
        task, now = writer.durable.open_task(learner), writer.now()
        if writer.controller.resend_of(learner) == header.task:
            again = ModelResent(learner, header.task, lost=received.problem is not None)
            sequence = writer.journal(again, now, received.blob).seq
            if received.problem is not None:
                writer.in_loop(self._report, "warning", _lost(learner, received.problem))
                return pb.Receipt(verdict=pb.Receipt.REFUSED, reason=received.problem)
            return pb.Receipt(verdict=pb.Receipt.COMMITTED, sequence=sequence)
        if task is None or task.number != header.task or writer.controller.finished:
            return _too_late(header.task, writer.controller.community.stamp.version)
        held = self._held_for()
        if held:
            writer.journal(ControllerAway(held), now)
        event = UpdateRequest(
            learner,
            header.task,
            header.steps,
            header.seconds,
            header.time_per_batch,
            Model.empty(),
            header.loss,
            claimed_notes(header),
        )
        problem = received.problem or claim_problem(event, task)
        if problem is not None:
            return self._refuse(event, problem, now)
        # The run's clock may have stood still while the learner trained on; more than passed is not charged.
        record = writer.controller.roster[learner]
        event = within_elapsed(event, max(0.0, now - record.task_sent_at + record.unclocked + held))
        blob, content = received.blob, received.content
        if self._guard.guard != "off" and blob is not None:
            measured = measured or self._guard.measure(writer.durable.hashes[task.based_on.version], content or blob)
            verdict = self._guard.judge(writer.controller.roster, event, blob, measured, content)
            if verdict.problem is not None:
                done = "; it is refused" if verdict.refused else "; it is clipped" if verdict.blob != blob else ""
                text = f"the update of '{learner}' to task {header.task} is unusual: {verdict.problem}{done}"
                writer.in_loop(self._unusual, learner, text, verdict.refused)
            if verdict.refused and verdict.problem is not None:
                return self._refuse(event, verdict.problem, now)
            content = content if verdict.blob == blob else None
            event, blob = verdict.event, verdict.blob
        return pb.Receipt(verdict=pb.Receipt.COMMITTED, sequence=writer.journal(event, now, blob, content).seq)

    def _unusual(self, learner: LearnerId, text: str, refused: bool) -> None:
        if not refused:  # a refusal is reported by itself
            self._report("warning", text)
        self.notify("update_held", text, learner=learner)

    def _refuse(self, event: UpdateRequest, problem: str, now: float) -> pb.Receipt:
        """In the writer."""
        self._writer.journal(TaskFailed(event.learner, event.task, problem), now)
        return pb.Receipt(verdict=pb.Receipt.REFUSED, reason=problem)


def _over(controller: Controller, task: LocalTask | None) -> bool:
    """Whether a task is of a masked round that is over: it cannot be sent again, because its keys are gone."""
    secure, stamp = controller.secure, controller.community.stamp
    return secure is not None and not secure.windowed and task is not None and task.based_on != stamp


def _lost(learner: LearnerId, reason: str) -> str:
    return (
        f"learner '{learner}' does not hand in its latest local model again, and is in no window until it has trained "
        f"again: {reason}"
    )


def _too_late(task: int, version: int) -> pb.Receipt:
    reason = f"late: task {task} is no longer open; rebase onto community model {version}"
    return pb.Receipt(verdict=pb.Receipt.REFUSED, reason=reason)


def claimed_notes(header: pb.UploadHeader) -> dict[str, float]:
    """What the compression of this update left out, as the learner claims; nothing where that makes no sense."""
    error = header.compression_error if header.HasField("compression_error") else math.nan
    return {"compression_error": error} if 0 <= error < math.inf else {}
