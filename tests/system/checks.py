"""Checkers of single parts: the messages of a session or an upload, leases, and the files of a state folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from numpy.typing import NDArray

from metis.core.controller import Controller
from metis.core.events import Action, Event, LearnerLeft, LearnerSetAside, UpdateCommitted, UpdateRefused
from metis.deployment.controller.process import ControllerProcess
from metis.deployment.controller.state import State
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.model_mac import checksum_in, checksum_of
from system.network import Call

Violated = Callable[[str], None]


class Calls:
    """I20, I21: a task is sent once in a session, and not to a learner that has it; an upload counts with its end."""

    def __init__(self, violated: Violated) -> None:
        self._violated = violated
        self._claimed: dict[Call, set[int]] = {}  # tasks that a learner says it is working on
        self._given: dict[Call, set[int]] = {}
        self._ended: set[Call] = set()

    def written(self, call: Call, message: Any) -> None:
        """By a client."""
        if isinstance(message, pb.UploadHeader) or (isinstance(message, pb.UploadPart) and message.HasField("end")):
            self._ended.add(call)
        if not isinstance(message, pb.FromLearner):
            return
        if message.HasField("hello") and message.hello.HasField("task"):
            self._given[call] = {message.hello.task}
        if message.HasField("heartbeat") and message.heartbeat.HasField("task"):
            self._claimed.setdefault(call, set()).add(message.heartbeat.task)

    def task(self, call: Call, number: int) -> None:
        """It is being sent."""
        given = self._given.setdefault(call, set())
        if number in given and not self._claimed.get(call, set()) - {number}:
            self._violated(f"I20: task {number} is sent again to a learner that is working on it")
        given.add(number)

    def committed(self, call: Call) -> None:
        if call not in self._ended:
            self._violated("I21: an upload counts that never came to its end")


class Leases:
    """I22, I29: who is not heard loses its lease, and a deadline passes; asked every now and then."""

    def __init__(self, lease: float, violated: Violated) -> None:
        self._lease, self._violated = lease, violated
        self._since = 0.0  # this controller could hear, and note what it heard
        self._process: ControllerProcess | None = None
        self._due: tuple[ControllerProcess, float] | None = None  # whose deadline has passed
        self._due_since = 0.0

    def look(
        self, now: float, process: ControllerProcess | None, busy: bool, heard: dict[str, float], deadline_in: float
    ) -> None:
        """`busy`: the controller is down or stopped, or its disk is full."""
        if busy or process is None or process is not self._process or process._view.standing.finished:
            self._process, self._since = process, now
            self._due = None
            return
        for learner in [record.learner for record in process._writer.controller.roster if record.present]:
            silent = now - max(self._since, heard.get(learner, 0.0))
            if silent > 2 * self._lease + 5:  # one that could not be journaled ends after another lease
                self._violated(f"I22: {learner} was not heard for {silent:.0f} s and is still counted on")
        standing = process._view.standing
        due = process, standing.deadline
        if due != self._due or deadline_in > 0:
            self._due, self._due_since = due, now
        elif now - self._due_since > 3:  # longer than a slow writer takes
            self._violated(f"I29: the deadline of {standing.deadline:g} s has passed, and nothing follows")


class Members:
    """I23, I24, I25, I31: what the journal says of who comes and goes, and of a federation that goes on."""

    def __init__(self, honest: Collection[str], allowed: int, released: Counter[str], violated: Violated) -> None:
        self._honest, self._allowed, self._violated = honest, allowed, violated
        self._refused: Counter[str] = Counter()  # in a row
        self._released = released  # how often a lease ended, or a learner said that it leaves
        self._at_the_end: set[int] = set()  # tasks that were open when the federation ended

    def before(self, event: Event, twin: Controller) -> None:
        """An event that the journal has next."""
        self._at_the_end = {*twin.roster.open_tasks} if twin.finished else set()
        if isinstance(event, LearnerLeft) and event.learner in self._honest:
            record = twin.roster.get(event.learner)
            task = None if record is None else record.task
            over = twin.secure is not None and task is not None and task.based_on != twin.community.stamp
            if record is not None and record.present and not record.set_aside and not over:
                self._released[event.learner] -= 1
                if self._released[event.learner] < 0:
                    self._violated(f"I23: {event.learner} had only lost its connection, and has to join again")

    def after(self, actions: list[Action], twin: Controller) -> None:
        """What became of it."""
        if not twin.finished and (left := self._at_the_end & twin.roster.open_tasks):
            self._violated(f"I31: the federation goes on, with task {min(left)} from before its end")
        for action in actions:
            match action:
                case UpdateCommitted():
                    self._refused[action.learner] = 0
                case UpdateRefused() if action.kind != "late":
                    self._refused[action.learner] += 1
                case LearnerSetAside() if action.learner in self._honest:
                    if (times := self._refused[action.learner]) <= self._allowed:
                        self._violated(f"I24: {action.learner} is set aside after {times} refused updates in a row")
        for record in twin.roster:
            if record.task is not None and not record.present:
                self._violated(f"I25: {record.learner} is away and has task {record.task.number}")


class WatchedState(State):
    """The real one; I26: what the journal and the snapshots need is never collected, nor is the first model."""

    initial: str
    violated: Violated
    sound = True  # no file of it was damaged
    masked = False  # local models go when their round is over
    rolled_back: Callable[[], object]  # called when that is in the journal, and nothing has come of it yet
    written: dict[int, tuple[int, dict[str, bytes]]]  # snapshots, by entry: community model, and what is being mixed

    def write_snapshot(
        self, seq: int, arrays: Mapping[str, NDArray[Any]], facts: dict[str, Any], blobs: Collection[str] = ()
    ) -> None:
        super().write_snapshot(seq, arrays, facts, blobs)
        self.written[seq] = max(map(int, facts["versions"])), {name: arrays[name].tobytes() for name in arrays}

    def append(self, at: float, record: dict[str, Any], **more: Any) -> int:
        seq = super().append(at, record, **more)
        if record.get("event") == "rolled_back":
            self.rolled_back()
        return seq

    def collect(self, keep: Collection[str]) -> int:
        deleted = super().collect(keep)
        self.check_files((self.initial,))
        return deleted

    def check_files(self, more: Collection[str] = ()) -> None:
        snapshots = self.snapshots()
        oldest = snapshots[1].seq if len(snapshots) > 1 else 0
        needed = {*more, *(entry.blob for entry in self.entries(oldest) if entry.blob is not None)}
        needed.update(blob for snapshot in snapshots for blob in snapshot.blobs)
        if self.masked:
            rounds = list(self.entries())
            # The note of a publication may be lost with the power; what ended the round before it is not.
            events = ("sum_opened", "rolled_back", "stop_rule_changed")
            ends = (e.seq for e in rounds if "published" in e.record or e.record.get("event") in events)
            over = max(ends, default=0)
            needed -= {entry.blob for entry in rounds if entry.update is not None and entry.seq < over}
        missing = sorted(blob for blob in needed if not self._is_whole(blob))
        if missing and self.sound:
            self.violated(f"I26: the model file {missing[0]} is needed and is gone")

    def _is_whole(self, name: str) -> bool:
        path, content = self.blobs.folder / name, self.journal.content(name)
        if content is None and path.is_file():
            content = path.read_bytes()
        return content is not None and checksum_of(content, name) == checksum_in(name)
