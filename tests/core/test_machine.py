"""Every protocol under random joins, leaves, lateness, lies and failures, with the invariants after each step.

The machine keeps its own books from the events it sends and the actions it sees (the "journal"), and compares
the controller with them. I-numbers name the invariants that the design asks for.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.play import LAYOUT, community_snapshot, model, snapshot
from metis.core.controller import Controller
from metis.core.events import (
    Action,
    CommunityPublished,
    CommunityStamp,
    DeadlinePassed,
    Evaluated,
    Event,
    Finish,
    LearnerJoined,
    LearnerLeft,
    LearnerSetAside,
    LearnerWithdrawn,
    LocalTask,
    SendTask,
    TaskFailed,
    UpdateCommitted,
    UpdateRefused,
    UpdateRequest,
)
from metis.core.layers.adaptive_period import AdaptivePeriod
from metis.core.layers.cap import Cap
from metis.core.layers.fednova import FedNova, NormalizedAverage, accumulated_steps
from metis.core.layers.server_optimizers import FedAvgM
from metis.core.layers.wrapper import Wrapper
from metis.core.mixing import Buffered, CachedAverage, Community, FullPass, Interpolation
from metis.core.model import Layout, Model, TensorSpec
from metis.core.policies import async_fedavg, fedasync, fedbuff, fedrec, semisync_fedavg, sync_fedavg
from metis.core.policy import Policy
from metis.core.protocols import Asynchronous, SemiSynchronous, Synchronous
from metis.core.stop import StopRule
from metis.core.timing import SHORTEST_BATCH, TypicalTime
from metis.errors import UnexpectedEvent

NAMES = ("a", "b", "c", "d")
REFUSALS_ALLOWED = 2
OTHER_LAYOUT = Model(Layout((TensorSpec("other", (3,)),)), np.zeros(3, np.float32))

ADAPTIVE = AdaptivePeriod(batches=3, served=0.6)
POLICIES = {
    "sync": sync_fedavg(1.5),
    "sync-limited": sync_fedavg(1.5, round_limit=5.0, grace=0.2),
    "semisync": semisync_fedavg(2),
    "semisync-static": semisync_fedavg(0.7, timings="cold_start", cold_start_limit=3.0, grace=0.0),
    "semisync-deadline": semisync_fedavg(2, cold_start_limit=3.0, budget="deadline", weighting="steps"),
    "async": async_fedavg(1, rebuild_every=7),
    "fedrec": fedrec(1, rebuild_every=10**6),
    "fedasync": fedasync(1),
    "fedbuff": fedbuff(1, buffer_size=2),
    "semisync-adaptive": semisync_fedavg(timings="smoothed", max_local_epochs=2).with_layers(ADAPTIVE),
    "semisync-server": semisync_fedavg(2).with_layers(FedAvgM(0.5, 0.8)),
    "fedasync-server": fedasync(1).with_layers(FedAvgM(0.5, 0.8)),
    "sync-nova": sync_fedavg(1.5).with_layers(FedNova(3.0, momentum=0.5)),
    "fedbuff-server": fedbuff(1, buffer_size=2).with_layers(FedAvgM(0.5, 0.8)),
}

names = st.sampled_from(NAMES)
delays = st.sampled_from([0.0, 0.1, 1.0, 7.0]) | st.floats(0, 30)
weights = st.floats(-10, 10, width=32)
models = st.builds(model, weights, weights, weights)
times_per_batch = st.floats(0.01, 3.0)


@dataclass
class Book:
    """What the machine knows of a learner without asking the controller."""

    examples: int
    batch_size: int
    present: bool = True
    set_aside: bool = False
    task: LocalTask | None = None
    sent_at: float = math.nan
    base: Model | None = None
    first_time: float | None = None
    last_time: float | None = None
    overhead: float = 0.0
    overheads: list[float] = field(default_factory=list)
    refusals: int = 0
    typical: TypicalTime = field(default_factory=TypicalTime)

    @property
    def typical_time(self) -> float | None:
        return self.typical.value

    @property
    def typical_overhead(self) -> float:
        return statistics.median_low(self.overheads[-3:])

    @property
    def available(self) -> bool:
        return self.present and not self.set_aside

    @property
    def epoch_steps(self) -> int:
        return math.ceil(self.examples / self.batch_size)


@dataclass
class Commit:
    learner: str
    vector: np.ndarray
    base: np.ndarray
    value: float
    steps: int
    based_on: CommunityStamp


class Federation(RuleBasedStateMachine):
    """A world of up to four learners around one controller."""

    def __init__(self, policy: Policy, stop: StopRule | None = None) -> None:
        super().__init__()
        self.policy = policy
        self.initial = model(1, -2, 3)
        self.controller = Controller(
            policy, self.initial, stop=stop, learners_expected=2, refusals_allowed=REFUSALS_ALLOWED
        )
        self.now = 0.0
        self.books: dict[str, Book] = {}
        self.answered: list[tuple[str, int]] = []  # tasks that may not be answered again
        self.commits: list[Commit] = []
        self.latest: dict[str, Commit] = {}  # in the cache
        self.round: dict[str, Commit] = {}  # committed since the last publication and not withdrawn
        self.versions: dict[int, str] = {0: self.initial.sha256()}
        self.stamp = CommunityStamp()
        self.vector = self.initial.vector.astype(np.float64)  # slow twin of FedAsync and FedBuff
        self.differences: list[np.ndarray] = []
        self.current = self.vector  # as published
        self.server_momentum = np.zeros(3)
        self.cap = next((layer.local_epochs for layer in self.policy.layers if isinstance(layer, Cap)), None)
        self.optimized = any(isinstance(layer, FedAvgM) for layer in self.policy.layers)
        self.round_tasks: set[int] = set()  # of the tasks sent together last
        self.tasks_sent = 0
        self.requests = 0
        self.started = False
        self.finished = False

    # --- what the machine knows -----------------------------------------------------------

    @property
    def barrier(self) -> bool:
        return not isinstance(self.controller.protocol, Asynchronous)

    @property
    def mixing(self) -> Community:
        """The mixing rule, without the optimizer that may be behind it."""
        community = self.controller.community
        while isinstance(community, Wrapper):
            community = community.inside
        return community

    @property
    def cached(self) -> bool:
        return isinstance(self.mixing, CachedAverage)

    def training(self) -> list[str]:
        return [name for name, book in self.books.items() if book.available and book.task is not None]

    def idle(self) -> list[str]:
        return [name for name, book in self.books.items() if book.available and book.task is None]

    # --- sending events -------------------------------------------------------------------

    def handle(self, event: Event) -> list[Action]:
        """Send an event, keep the books, check what concerns the transition."""
        before = community_snapshot(self.controller)
        deadline = self.controller.deadline
        actions = self.controller.handle(event, self.now)
        if isinstance(event, (UpdateRequest, TaskFailed)):
            self.digest_answer(event, actions, before)
        for action in actions:
            match action:
                case CommunityPublished():
                    self.digest_publication(action)
                case LearnerSetAside():
                    self.books[action.learner].set_aside = True
                case Finish():
                    assert not self.finished
                    self.finished = True
        self.started = self.started or sum(book.available for book in self.books.values()) >= 2
        self.digest_tasks([action for action in actions if isinstance(action, SendTask)])
        if isinstance(event, DeadlinePassed) and self.now >= deadline and self.started and not self.finished:
            self.check_i11_the_deadline_closes_the_round()
        return actions

    def digest_answer(self, event: UpdateRequest | TaskFailed, actions: list[Action], before: dict[str, Any]) -> None:
        book = self.books[event.learner]
        task, base, sent_at = book.task, book.base, book.sent_at
        assert task is not None
        assert base is not None
        self.answered.append((event.learner, task.number))
        book.task = None
        self.requests += isinstance(event, UpdateRequest)
        verdict = actions[0]
        valid = isinstance(event, UpdateRequest) and self.is_valid(event, task)
        if valid:
            elapsed = self.now - sent_at  # half of the timed batches took no longer than all of them
            most = 2 * elapsed / max(2, event.steps - 1) * (1 + 1e-9) if elapsed > 0 else math.inf
            claimed, known = min(event.time_per_batch, most), book.last_time
            if known is not None and event.steps == 1 and task.budget.steps != 1:
                claimed = min(max(claimed, known / 2), 2 * known)
            book.last_time = claimed
            book.first_time = book.first_time or book.last_time
            book.typical.note(book.last_time)
            book.overhead = max(0.0, self.now - sent_at - event.seconds)
            book.overheads.append(book.overhead)
        stale = task.based_on != self.stamp
        if isinstance(verdict, UpdateRefused):
            self.check_i13_refusals_have_a_reason(verdict, event, task, valid, stale)
            if verdict.kind != "late":
                book.refusals += 1
            aside = any(isinstance(action, LearnerSetAside) for action in actions)
            assert aside == (verdict.kind != "late" and book.refusals > REFUSALS_ALLOWED)
            if not any(isinstance(action, CommunityPublished) for action in actions):
                self.check_i17_refused_without_effect(before)
            return
        assert isinstance(verdict, UpdateCommitted)
        assert valid, "only a valid update may be committed"
        assert (verdict.learner, verdict.task) == (event.learner, task.number)
        book.refusals = 0
        self.check_i9_base_is_the_current_model(stale)
        self.check_i12_contribution_value(event, task, verdict.contribution_value)
        commit = Commit(
            event.learner,
            event.local_model.vector.astype(np.float64),
            base.vector.astype(np.float64),
            verdict.contribution_value,
            event.steps,
            task.based_on,
        )
        self.check_i8_counted_once(commit)
        self.commits.append(commit)
        self.round[event.learner] = self.latest[event.learner] = commit
        if isinstance(self.mixing, Interpolation):
            alpha = 0.5 * commit.value
            self.vector = (1 - alpha) * self.vector + alpha * commit.vector
        if isinstance(self.mixing, Buffered):
            self.differences.append(commit.value * (commit.vector - commit.base))

    def is_valid(self, event: UpdateRequest, task: LocalTask) -> bool:
        most = math.inf if task.budget.steps is None else task.budget.steps
        return (
            1 <= event.steps <= most
            and 0 <= event.seconds < math.inf
            and SHORTEST_BATCH <= event.time_per_batch < math.inf
            and event.local_model.layout == LAYOUT
            and bool(np.isfinite(event.local_model.vector).all())
        )

    def digest_publication(self, action: CommunityPublished) -> None:
        self.check_i6_version_follows(action)
        self.check_i2_released_with_weight(action)
        self.check_i9_model_is_what_was_committed(action)
        self.stamp = action.stamp
        self.versions[action.stamp.version] = action.community_model.sha256()
        self.round.clear()

    def digest_tasks(self, sent: list[SendTask]) -> None:
        if not sent:
            return
        for action in sent:
            book = self.books[action.learner]
            assert book.available, "only learners that are there get tasks"
            assert book.task is None, "one task at a time"
            assert action.task.number == self.tasks_sent, "I6: task numbers count up"
            assert action.task.based_on == self.stamp
            assert action.community_model.sha256() == self.versions[self.stamp.version]
            self.tasks_sent += 1
        self.check_i10_budgets(sent)
        for action in sent:
            book = self.books[action.learner]
            book.task, book.sent_at, book.base = action.task, self.now, action.community_model
        self.check_i11_deadline_is_bounded(sent)
        self.round_tasks = {action.task.number for action in sent}

    # --- rules: what happens in the world --------------------------------------------------

    @rule(name=names, examples=st.integers(1, 40), batch_size=st.integers(1, 8), delay=delays)
    def join(self, name: str, examples: int, batch_size: int, delay: float) -> None:
        book = self.books.get(name)
        event = LearnerJoined(name, examples, batch_size)
        if book is not None and book.available:
            self.illegal(event)
            return
        self.now += delay
        fresh = Book(examples, batch_size)
        if book is not None:
            fresh = replace(fresh, first_time=book.first_time, last_time=book.last_time, overhead=book.overhead)
            fresh.typical, fresh.overheads = book.typical, book.overheads
        self.books[name] = fresh
        self.handle(event)

    @precondition(lambda self: self.books)
    @rule(data=st.data(), delay=delays, for_good=st.booleans())
    def go(self, data: st.DataObject, delay: float, for_good: bool) -> None:
        """A learner leaves, or withdraws; perhaps it is away already."""
        name = data.draw(st.sampled_from(sorted(self.books)))
        self.now += delay
        book = self.books[name]
        if book.task is not None:
            self.answered.append((name, book.task.number))
        book.present, book.task = False, None
        if for_good:
            self.latest.pop(name, None)
            self.round.pop(name, None)
        self.handle(LearnerWithdrawn(name) if for_good else LearnerLeft(name))
        if for_good:
            self.check_i14_withdrawn(name)

    @precondition(lambda self: self.training() and not self.finished)
    @rule(data=st.data(), delay=delays, local_model=models, time=times_per_batch)
    def hand_in(self, data: st.DataObject, delay: float, local_model: Model, time: float) -> None:
        """Any learner with a task, in any order, however late."""
        name, task = self.draw_task(data)
        self.now += delay
        steps = data.draw(st.integers(1, min(task.budget.steps or 50, 50)))
        elapsed = self.now - self.books[name].sent_at
        seconds = data.draw(st.floats(0, 1)) * elapsed
        self.handle(UpdateRequest(name, task.number, steps, seconds, time, local_model))

    @precondition(lambda self: self.training() and not self.finished)
    @rule(data=st.data(), delay=delays)
    def lie(self, data: st.DataObject, delay: float) -> None:
        """NaN, a foreign layout, impossible steps and times; some lies are valid all the same."""
        name, task = self.draw_task(data)
        self.now += delay
        honest = UpdateRequest(name, task.number, 1, 0.1, 0.1, model(1, 2, 3))
        lies: list[dict[str, Any]] = [
            {"local_model": model(math.nan, 0, 0)},
            {"local_model": model(0, 0, math.inf)},
            {"local_model": OTHER_LAYOUT},
            {"steps": 0},
            {"steps": -3},
            {"steps": (task.budget.steps or 0) + 1},
            {"seconds": math.nan},
            {"seconds": -1.0},
            {"seconds": 1e9},
            {"time_per_batch": 0.0},
            {"time_per_batch": math.inf},
            {"time_per_batch": 1e-320},
            {"time_per_batch": 0.9 * SHORTEST_BATCH},
            {"time_per_batch": SHORTEST_BATCH},
            {"time_per_batch": 1e308},
        ]
        self.handle(replace(honest, **data.draw(st.sampled_from(lies))))

    @precondition(lambda self: self.training() and not self.finished)
    @rule(data=st.data(), delay=delays)
    def fail(self, data: st.DataObject, delay: float) -> None:
        name, task = self.draw_task(data)
        self.now += delay
        self.handle(TaskFailed(name, task.number, "out of memory"))

    @precondition(lambda self: self.controller.deadline < 1e12)
    @rule(late=delays)
    def wake(self, late: float) -> None:
        """The runtime wakes the controller at its deadline, or a little later."""
        self.now = max(self.now, self.controller.deadline) + late
        self.handle(DeadlinePassed())

    @rule(delay=delays)
    def wake_for_nothing(self, delay: float) -> None:
        """A spurious wake-up, or an evaluation, is harmless."""
        if self.now + delay < self.controller.deadline:
            self.now += delay
            before = snapshot(self.controller)
            assert self.handle(DeadlinePassed()) == []
            assert self.handle(Evaluated(self.stamp.version, {"accuracy": 1.0})) == []
            assert snapshot(self.controller) == before

    # --- rules: what must not happen -------------------------------------------------------

    @precondition(lambda self: self.answered)
    @rule(data=st.data(), local_model=models)
    def duplicate(self, data: st.DataObject, local_model: Model) -> None:
        """The same update again, or one from before the learner left."""
        name, number = data.draw(st.sampled_from(self.answered))
        self.illegal(UpdateRequest(name, number, 1, 0.1, 0.1, local_model))
        self.illegal(TaskFailed(name, number, "again"))

    @precondition(lambda self: self.training())
    @rule(data=st.data(), wrong=st.integers(-2, 50))
    def wrong_task(self, data: st.DataObject, wrong: int) -> None:
        name, task = self.draw_task(data)
        if wrong != task.number:
            self.illegal(UpdateRequest(name, wrong, 1, 0.1, 0.1, model()))

    @rule()
    def stranger(self) -> None:
        self.illegal(UpdateRequest("stranger", 0, 1, 0.1, 0.1, model()))
        self.illegal(LearnerLeft("stranger"))
        self.illegal(LearnerWithdrawn("stranger"))
        self.illegal(LearnerJoined("stranger", 0, 1))
        self.illegal(LearnerJoined("stranger", 1, 0))

    def illegal(self, event: Event) -> None:
        """An illegal event raises and changes nothing: roster, protocol, community."""
        before = snapshot(self.controller)
        with pytest.raises(UnexpectedEvent):
            self.controller.handle(event, self.now)
        assert snapshot(self.controller) == before

    def draw_task(self, data: st.DataObject) -> tuple[str, LocalTask]:
        name = data.draw(st.sampled_from(self.training()))
        task = self.books[name].task
        assert task is not None
        return name, task

    # --- invariants of a transition --------------------------------------------------------

    def check_i2_released_with_weight(self, action: CommunityPublished) -> None:
        """I2: P > 0 whenever a model is released, and the model is finite."""
        assert action.contributors > 0
        assert np.isfinite(action.community_model.vector).all()
        if self.cached:
            assert sum(commit.value for commit in self.latest.values()) > 0

    def check_i6_version_follows(self, action: CommunityPublished) -> None:
        """I6: versions go up by one, steps never down; a version names one model."""
        assert action.stamp.version == self.stamp.version + 1
        assert action.stamp.version not in self.versions
        assert action.stamp.steps >= self.stamp.steps
        assert action.stamp.steps == sum(commit.steps for commit in self.commits)

    def check_i8_counted_once(self, commit: Commit) -> None:
        """I8: behind a barrier a learner counts at most once between two publications."""
        if self.barrier:
            assert commit.learner not in self.round

    def check_i9_base_is_the_current_model(self, stale: bool) -> None:
        """I9: behind a barrier no update enters that is based on another model than the current one."""
        if self.barrier:
            assert not stale

    def check_i9_model_is_what_was_committed(self, action: CommunityPublished) -> None:
        """I8, I9: the model is the weighted average over exactly the contributors, none besides."""
        community = self.mixing
        if isinstance(community, NormalizedAverage):
            total = sum(commit.value for commit in self.round.values())
            lengths = {name: accumulated_steps(commit.steps, 0.5) for name, commit in self.round.items()}
            average = sum(commit.value / total * lengths[name] for name, commit in self.round.items())
            expected = self.current + sum(
                commit.value / total * min(3.0, average / lengths[name]) * (commit.vector - self.current)
                for name, commit in self.round.items()
            )
            assert action.contributors == len(self.round)
        elif isinstance(community, (FullPass, CachedAverage)):
            members = self.round if isinstance(community, FullPass) else self.latest
            total = sum(commit.value for commit in members.values())
            expected = sum(commit.value * commit.vector for commit in members.values()) / total
            assert action.contributors == len(members)
        elif isinstance(community, Buffered):
            assert action.contributors == len(self.differences) >= 2
            self.vector = self.vector + sum(self.differences) / len(self.differences)
            self.differences.clear()
            expected = self.vector
        else:
            expected = self.vector
        if self.optimized:
            self.server_momentum = 0.8 * self.server_momentum + expected - self.current
            expected = self.current + 0.5 * self.server_momentum
        np.testing.assert_allclose(action.community_model.vector, expected, rtol=1e-5, atol=1e-5)
        self.current = action.community_model.vector.astype(np.float64)
        if self.optimized:
            self.vector = self.current

    def check_i10_budgets(self, sent: list[SendTask]) -> None:
        """I10: t_max = lambda max t_k^e over those who are there, B_k = max(1, floor(t_max / t_beta_k))."""
        protocol = self.controller.protocol
        if not isinstance(protocol, SemiSynchronous):
            for action in sent:
                epochs, steps = protocol.local_epochs, action.task.budget.steps
                assert steps == max(1, math.floor(epochs * self.books[action.learner].epoch_steps + 1e-9))
            return
        kinds = {"cold_start": "first_time", "every_round": "last_time", "smoothed": "typical_time"}
        times = {name: getattr(book, kinds[protocol.timings]) for name, book in self.books.items() if book.available}
        known = [time * self.books[name].epoch_steps for name, time in times.items() if time is not None]
        period = protocol.slowest_learner_epochs * max(known) if known else None
        if protocol.pacing is None or period is None:
            assert protocol.synchronization_period == period
        else:
            period = protocol.synchronization_period
            self.check_adaptive_period(period, times)
        for action in sent:
            time, budget = times[action.learner], action.task.budget
            if time is None or period is None:
                assert budget.steps == self.books[action.learner].epoch_steps
                assert budget.seconds == min(protocol.cold_start_limit, math.inf if period is None else period)
            elif protocol.budget == "deadline":
                assert budget == type(budget)(None, period)
            else:
                assert budget.seconds == period
                assert budget.steps is not None
                if period / time < 2**50:  # beyond, a float does not count single steps
                    most = self.cap or math.inf
                    within = max(1, math.floor(period / time * (1 + 1e-9)))
                    assert budget.steps == min(within, most * self.books[action.learner].epoch_steps)
                    assert budget.steps * time <= period * (1 + 1e-8) or budget.steps == 1

    def check_adaptive_period(self, period: float, times: dict[str, float | None]) -> None:
        """Within the minimum of batches and the maximum of epochs of those who hold most of the examples."""
        timed = [(time, self.books[name]) for name, time in times.items() if time is not None]
        wanted = ADAPTIVE.served * sum(book.examples for _, book in timed)
        by_batch = sorted(timed, key=lambda pair: pair[0])
        shortest = next(
            time for index, (time, _) in enumerate(by_batch)
            if sum(book.examples for _, book in by_batch[: index + 1]) >= wanted * (1 - 1e-9)
        )  # fmt: skip
        assert period >= ADAPTIVE.batches * shortest * (1 - 1e-9)
        longest = max(time * book.epoch_steps for time, book in timed)
        exchange = max(book.typical_overhead for _, book in timed)
        bounds = (ADAPTIVE.longest * longest, ADAPTIVE.batches * shortest, 2 * exchange, by_batch[-1][0])
        assert period <= max(bounds) * (1 + 1e-9)

    def check_i11_deadline_is_bounded(self, sent: list[SendTask]) -> None:
        """I11: a round lasts at most its period, the grace, and what its learners' exchange takes."""
        protocol = self.controller.protocol
        if isinstance(protocol, SemiSynchronous):
            period = protocol.synchronization_period
            length = protocol.cold_start_limit if period is None else period
        elif isinstance(protocol, Synchronous):
            length = protocol.round_limit
        else:
            assert protocol.deadline == math.inf
            return
        books = [self.books[action.learner] for action in sent]
        # Semi-synchronous: one that stalled once does not hold up the next round.
        usual = isinstance(protocol, SemiSynchronous)
        allowance = max(
            (book.typical_overhead if usual and book.overheads else book.overhead) + (book.last_time or 0.0)
            for book in books
        )
        latest = self.now + length * (1 + protocol.grace) + allowance
        assert protocol.deadline <= latest * (1 + 1e-12)

    def check_i11_the_deadline_closes_the_round(self) -> None:
        """I11, I18: after the deadline nobody who is there waits, whatever the others do."""
        assert self.idle() == []

    def check_i12_contribution_value(self, event: UpdateRequest, task: LocalTask, value: float) -> None:
        """I2, I12: p_k is finite, positive and capped; recency uses the base and the steps of the journal."""
        committed = sum(commit.steps for commit in self.commits)
        match self.policy.name:
            case "fedrec":
                stale_steps = committed - (task.based_on.steps + event.steps)
                assert value == (1.0 if stale_steps <= 0 else stale_steps**-0.5)
                assert 0 < value <= 1
            case "fedasync" | "fedbuff":
                assert value == (self.stamp.version - task.based_on.version + 1) ** -0.5
                assert 0 < value <= 1
            case "semisync_fedavg" if self.policy is POLICIES["semisync-deadline"]:
                assert value == event.steps
            case _:
                assert value == self.books[event.learner].examples

    def check_i13_refusals_have_a_reason(
        self, refused: UpdateRefused, event: Event, task: LocalTask, valid: bool, stale: bool
    ) -> None:
        """I13: late exactly where the barrier has gone on; invalid or failed for what it is; always a reason."""
        assert refused.reason
        assert refused.task == task.number
        if isinstance(event, TaskFailed):
            assert refused.kind == "failed"
        elif not valid:
            assert refused.kind == "invalid"
        else:
            assert refused.kind == "late"
            assert self.barrier
            assert stale

    def check_i14_withdrawn(self, name: str) -> None:
        """I14: who withdrew is in no sum any more."""
        assert f"local/{name}" not in self.controller.community.arrays()

    def check_i17_refused_without_effect(self, before: dict[str, Any]) -> None:
        """I17: a refused update leaves every bit of the community as it was."""
        assert community_snapshot(self.controller) == before

    # --- invariants of a state -------------------------------------------------------------

    @invariant()
    def i1_running_sum(self) -> None:
        """I1: W = sum of p_k w_k over the cache, after every event."""
        if self.cached:
            expected = sum((commit.value * commit.vector for commit in self.latest.values()), np.zeros(3))
            scale = max((abs(commit.value * commit.vector).max() for commit in self.commits), default=1.0)
            np.testing.assert_allclose(
                self.controller.community.arrays()["sum"], expected, rtol=1e-12, atol=1e-12 * scale
            )

    @invariant()
    def i2_normalization(self) -> None:
        """I2: P = sum of p_k over the cache."""
        if self.cached:
            assert self.controller.community.normalization == math.fsum(commit.value for commit in self.latest.values())
            assert self.controller.community.contributors == len(self.latest)

    @invariant()
    def i6_nothing_published_in_silence(self) -> None:
        """I6, I7: the current stamp and model are the last published ones."""
        community = self.controller.community
        assert community.stamp == self.stamp
        assert community.model.sha256() == self.versions[self.stamp.version]

    @invariant()
    def i8_contributors_of_the_open_round(self) -> None:
        """I8: what the next publication would hold is what was committed since the last, and not withdrawn."""
        if isinstance(self.mixing, FullPass):
            assert self.controller.community.contributors == len(self.round)

    @invariant()
    def i12_committed_steps(self) -> None:
        """I12: s_c equals the sum in the journal; update requests are counted."""
        assert self.controller.community.committed_steps == sum(commit.steps for commit in self.commits)
        assert self.controller.update_requests == self.requests

    @invariant()
    def the_books_agree(self) -> None:
        """The controller knows of every learner what the machine knows."""
        for name, book in self.books.items():
            record = self.controller.roster[name]
            assert (record.task, record.available) == (book.task, book.available)
            assert (record.time_per_batch, record.refusals) == (book.last_time, book.refusals)
        assert self.controller.started == self.started

    @invariant()
    def i19_the_barrier_remembers_only_open_tasks(self) -> None:
        """I19: late tasks that were answered or given up are forgotten, so that memory stays bounded."""
        if self.barrier and self.started and not self.finished:
            open_tasks = {self.books[name].task.number for name in self.training()}
            assert self.controller.protocol._barrier._late <= open_tasks

    @invariant()
    def i18_nobody_waits_for_ever(self) -> None:
        """I18: a learner waits only for an open task of the current round, and not without limit."""
        if not self.started or self.finished or not self.idle():
            return
        assert self.barrier, "without a barrier nobody waits"
        awaited = [name for name in self.training() if self.books[name].task.number in self.round_tasks]
        assert awaited, "somebody waits and nobody is awaited: tasks should have been sent"
        protocol = self.controller.protocol
        if isinstance(protocol, SemiSynchronous):
            limited = protocol.synchronization_period is not None or protocol.cold_start_limit < math.inf
            limited = limited and (protocol.synchronization_period or 0.0) < math.inf
        else:
            limited = protocol.round_limit < math.inf
        assert limited == (self.controller.deadline < math.inf)


MACHINE = settings(max_examples=40, stateful_step_count=40, phases=(Phase.generate, Phase.shrink), deadline=None)


@pytest.mark.hypothesis
@pytest.mark.parametrize("policy", POLICIES)
def test_invariants_hold_whatever_happens(policy: str):
    """No order of events breaks an invariant, stalls the federation or aborts it."""
    run_state_machine_as_test(lambda: Federation(POLICIES[policy]), settings=MACHINE)


@pytest.mark.hypothesis
@pytest.mark.parametrize("policy", ["semisync", "fedrec"])
def test_invariants_hold_up_to_and_after_the_end(policy: str):
    """The same with an end after a few update requests: it comes once, and nobody is sent on."""
    short = settings(MACHINE, max_examples=15)
    run_state_machine_as_test(lambda: Federation(POLICIES[policy], StopRule(update_requests=5)), settings=short)


# --- found by random runs, and kept ----------------------------------------------------------


def hand_in(world: Federation, name: str, delay: float, time: float) -> list[Action]:
    """One step, all of the time since the task was sent spent on the line."""
    task = world.books[name].task
    assert task is not None
    world.now += delay
    return world.handle(UpdateRequest(name, task.number, 1, 0.0, time, model()))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_time_per_batch_that_no_machine_meets_makes_no_period(policy: str):
    """1e-320 s were believed and made a period of 5.7e-320 s, in which floats have three digits left."""
    world = Federation(POLICIES[policy])
    world.join("a", 1, 1, 0.0)
    world.join("b", 1, 1, 0.0)
    for name in ("a", "b", "a", "b"):
        if name in world.training():
            (refused, *_) = hand_in(world, name, delay=1.0, time=1e-320)
            assert isinstance(refused, UpdateRefused)
            assert "1e-320 seconds per batch" in refused.reason
    assert all(record.time_per_batch is None for record in world.controller.roster)


def test_an_adaptive_period_follows_the_typical_exchange_not_the_latest():
    """After exchanges of 3, 3 and 0 seconds the next period is twice the 3 that are usual."""
    world = Federation(POLICIES["semisync-adaptive"])
    world.join("a", 1, 1, 0.0)
    world.join("b", 1, 1, 0.0)
    world.now += 3.0
    world.books["a"].present, world.books["a"].task = False, None
    world.handle(LearnerLeft("a"))
    for delay in (0.0, 3.0, 0.0):
        hand_in(world, "b", delay, time=1.0)
    assert world.controller.protocol.synchronization_period == 6.0


def test_an_endless_period_without_grace_has_no_deadline() -> None:
    """A claim of 1e308 seconds a batch makes it endless; nothing times infinity is not a moment."""
    world = Federation(POLICIES["semisync-static"])
    for name, examples in (("b", 1), ("a", 2)):
        world.books[name] = Book(examples, 1)
        world.handle(LearnerJoined(name, examples, 1))
    first = world.books["a"].task
    assert first is not None
    world.now = 3.0
    world.handle(TaskFailed("a", first.number, "out of memory"))
    assert world.books["a"].task is not None
    hand_in(world, "a", 0.0, 1e308)
    assert world.controller.deadline == math.inf
