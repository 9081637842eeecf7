"""Algorithm 1: the one place where protocol, contribution and community meet.

The controller is a function of (event, now). It has no clock and no threads; calling it from one place
gives the paper's first-in-first-out order without a lock. An illegal event raises and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from metis.core.events import (
    Action,
    Budget,
    CohortFixed,
    CommunityPublished,
    CommunityStamp,
    ControllerAway,
    DeadlinePassed,
    Evaluated,
    Event,
    Finish,
    LearnerId,
    LearnerJoined,
    LearnerLeft,
    LearnerSetAside,
    LearnersExpected,
    LearnerWithdrawn,
    LocalTask,
    MemberAdded,
    MemberRemoved,
    ModelResent,
    Paused,
    Resumed,
    RolledBack,
    RoundFailed,
    RoundMeasure,
    SendTask,
    SpeedChanged,
    StopRequested,
    StopRuleChanged,
    SumOpened,
    TaskFailed,
    UpdateCommitted,
    UpdateRefused,
    UpdateRequest,
)
from metis.core.masked import MaskedRounds
from metis.core.mixing import MemoryStore, ModelStore
from metis.core.model import Model, mixable_problem
from metis.core.policy import Policy
from metis.core.privacy_budget import BY_DEADLINE, SPENT, rounds_left, within_privacy
from metis.core.roster import LearnerRecord, Roster
from metis.core.schedules import Moment
from metis.core.secure_sum import MOST_STEPS
from metis.core.stop import Stagnation, StopRule
from metis.core.timing import MAX_STEPS, SHORTEST_BATCH, TOLERANCE, steps_within
from metis.errors import DefinitionError, UnexpectedEvent

_CLOCK_STOOD = 1.0  # seconds of a task in which the controller's clock may have stood still unnoticed


class Controller(MaskedRounds):
    """Digests events, answers with actions; the same under virtual time and under the wall clock."""

    def __init__(
        self,
        policy: Policy,
        initial_model: Model,
        *,
        stop: StopRule | None = None,
        learners_expected: int | None = 1,  # None: wait for `LearnersExpected`
        quorum: int = 0,
        refusals_allowed: int = 3,
        store: ModelStore | None = None,
        models_checked: bool = False,  # the runtime has checked every number of an update already
        exchange_bytes: int | None = None,  # of an update request; None: as the initial model has
    ) -> None:
        self.policy = policy
        size = policy.exchange_bytes(initial_model) if exchange_bytes is None else exchange_bytes
        self.protocol = policy.for_exchange(size).start_protocol()
        self.store: ModelStore = MemoryStore() if store is None else store
        self.community = policy.start_community(initial_model, self.store)
        self.roster = Roster()
        self.stop = stop or StopRule()
        self.learners_expected = learners_expected
        self.quorum, self.refusals_allowed = quorum, refusals_allowed
        self._models_checked = models_checked
        self.update_requests = 0
        self.started = False
        self.finished = False
        self.on_hold = False  # by an administrator
        self.member_changes: dict[LearnerId, bool] = {}  # since the start: added (True) or removed, the latest
        self._tasks_sent = 0
        self._rounds_begun = 0
        self.latest_rollback = 0  # the version under which it was published
        self._stagnation = Stagnation()
        self._rollbacks = 0  # versions that repeat an earlier model
        self.measures: Mapping[int, RoundMeasure] = {}  # by version; for a replay without weights

    @property
    def deadline(self) -> float:
        """Wake the controller then with `DeadlinePassed`, even if nothing happens."""
        if self.finished or self.on_hold:
            return math.inf
        end = math.inf if self.stop.seconds is None else self.stop.seconds
        return end if self.paused else min(self.protocol.deadline, end)

    @property
    def paused(self) -> bool:
        """Whether no tasks are sent: somebody wants it so, or fewer learners are there than a round needs."""
        return self.on_hold or self.roster.available_count < self.quorum

    @property
    def rounds(self) -> int:
        """Community models that were mixed; one that a rollback has published again is not counted again."""
        return self.community.stamp.version - self._rollbacks

    def handle(self, event: Event, now: float) -> list[Action]:
        """Digest one event; return what the runtime must now do, in order."""
        actions: list[Action] = []
        match event:
            case LearnerJoined():
                self._admit(event)
                actions += self._privacy_allows(event.learner)
            case LearnerLeft():
                self._known(event.learner)
                self.roster.dismiss(event.learner)
            case LearnerWithdrawn():
                self._known(event.learner)
                self.roster.dismiss(event.learner)
                self.community.withdraw(event.learner)
            case UpdateRequest() | TaskFailed():
                actions += self._close_task(event, now)
                actions += self._privacy_allows(event.learner)
            case Evaluated():
                if (reason := self._measured(event)) is not None:
                    return self._finish(reason)
            case LearnersExpected():
                self.learners_expected = event.learners
            case ControllerAway():
                for record in self.roster.training:
                    record.unclocked += event.seconds
                return []
            case RolledBack():
                actions += self._roll_back(event)
            case CohortFixed():
                self._fix_cohort(event)
            case ModelResent():
                self._take_again(event)
            case SumOpened():
                actions += self._open(event, now)
            case RoundFailed():
                self._masked_round(event.version)
                actions += self._begin_again(event.reason)
            case StopRequested():
                pending = self._publish(now) if event.publish and not self.finished else []
                return [*pending, *self._finish(event.reason)]
            case Paused():
                self.on_hold = True
                return []
            case Resumed():
                self.on_hold = False
            case StopRuleChanged():
                self.stop, self._stagnation = event.rule, Stagnation()
                if self.finished:
                    self.finished = False
                    if (reason := self._spent(now)) is not None:
                        return self._finish(reason)
                    actions += self._go_on()
            case MemberAdded():
                self._change_member(event.learner, added=True)
            case MemberRemoved():
                self._change_member(event.learner, added=False)
                if self.roster.get(event.learner) is not None:
                    self.roster.dismiss(event.learner)
                    if event.withdraw:
                        self.community.withdraw(event.learner)
            case DeadlinePassed():
                if self.stop.out_of_time(now):
                    return self._finish(f"{self.stop.seconds:g} seconds have passed")
            case _:
                raise TypeError(f"not an event: {event!r}")
        if self.finished or self.closed is not None:
            return actions
        expected = math.inf if self.learners_expected is None else self.learners_expected
        self.started = self.started or self.roster.available_count >= expected
        if self.started and not self.paused:
            actions += self._give_window_up()
            if self.protocol.ready(self.roster, now):
                actions += self._publish_and_assign(now)
            elif not self.policy.chooses and self.secure is None and (joining := self._joining(now)):
                actions += self._assign(joining, self._moment(now))
            elif isinstance(event, DeadlinePassed) and self.protocol.deadline <= now:
                # It would be woken at this moment for ever.
                raise DefinitionError(
                    f"{type(self.protocol).__name__} asked to be woken at {self.protocol.deadline:g} s; that moment "
                    "has come, and it is still not ready"
                )
            actions += self._await_members()
        return actions

    # --- events -----------------------------------------------------------------------------

    def _admit(self, event: LearnerJoined) -> None:
        if event.examples < 1 or event.batch_size < 1:
            raise UnexpectedEvent(
                f"learner '{event.learner}' joined with {event.examples} examples in batches of {event.batch_size}; "
                "both must be at least 1"
            )
        if self.member_changes.get(event.learner) is False:
            raise UnexpectedEvent(f"learner '{event.learner}' joined, but it was removed from this federation")
        record = self.roster.get(event.learner)
        if record is not None and record.available:
            raise UnexpectedEvent(f"learner '{event.learner}' joined, but it is here already")
        self.roster.admit(event)

    def _change_member(self, learner: LearnerId, *, added: bool) -> None:
        if self.member_changes.get(learner) is added:
            return
        self.member_changes[learner] = added
        if self.learners_expected is not None:
            self.learners_expected = max(1, self.learners_expected + (1 if added else -1))

    def _known(self, learner: LearnerId) -> LearnerRecord:
        record = self.roster.get(learner)
        if record is None:
            raise UnexpectedEvent(f"learner '{learner}' is not known here; it must join first")
        return record

    def _close_task(self, event: UpdateRequest | TaskFailed, now: float) -> list[Action]:
        record = self._known(event.learner)
        task = record.task
        if self.finished:
            raise UnexpectedEvent(f"learner '{event.learner}' sent an update, but the federation has ended")
        if not record.available or task is None or task.number != event.task:
            expected = f"its open task is {task.number}" if task is not None else "it has no open task"
            raise UnexpectedEvent(f"learner '{event.learner}' answered task {event.task}, but {expected}")

        base, elapsed = record.base_model, now - record.task_sent_at + record.unclocked
        of_round = task.based_on == self.community.stamp
        self.roster.close_task(event.learner, of_round=of_round)
        if of_round:
            # The very object, by which a mixing of differences knows what is not late.
            base = self.community.model if base is not None else None
        if isinstance(event, TaskFailed):
            return self._refuse(record, task, "failed", event.reason)
        self.update_requests += 1
        problem = claim_problem(event, task) or self._model_problem(event)
        if problem is not None:
            return self._refuse(record, task, "invalid", problem)
        # Late work is lost, but not what it shows about the learner's speed.
        time_before = record.note_timing(_credible(event, task, record, elapsed), overhead=elapsed - event.seconds)
        alarm = self._speed_alarm(record, time_before)
        if not self.protocol.accepts_stale and (task.based_on != self.community.stamp or self.closed is not None):
            version = self.community.stamp.version + (self.closed is not None)
            reason = f"late: it is based on community model {task.based_on.version}, rebase onto {version}"
            return [*self._refuse(record, task, "late", reason), *alarm]
        value = self._value(event, record, task.based_on)
        if not (math.isfinite(value) and value > 0):
            return self._refuse(record, task, "invalid", f"its contribution value {value} is not a positive number")
        record.refusals = 0
        record.note_step(event.steps, event.lengths)
        self.community.commit(event.learner, event.local_model, value, event.steps, base, record.examples)
        if self.secure is not None:
            self.secure.note_loss(event.learner, event.loss)
        return [UpdateCommitted(event.learner, task.number, value), *alarm]

    def _measured(self, event: Evaluated) -> str | None:
        """Why this evaluation ends the federation; None if it does not."""
        target, patience = self.stop.target, self.stop.patience
        if not event.conclusive or self.finished:
            return None
        if target is not None and target.reached_by(event.metrics):
            return f"{target.metric} reached {target.value:g}"
        if patience is not None and self._stagnation.note(event.version, event.metrics, patience):
            return f"{patience.metric} has not improved in {patience.evaluations} evaluations"
        return None

    def _roll_back(self, event: RolledBack) -> list[Action]:
        """Begin again from an earlier model: nothing that was committed, sent or remembered for mixing is left."""
        stamp = self.community.stamp
        if self.finished:
            raise UnexpectedEvent("the federation has ended; there is nothing to roll back")
        if not 0 <= event.version <= stamp.version:
            raise UnexpectedEvent(f"there is no community model {event.version} yet; the latest is {stamp.version}")
        self._rollbacks += 1
        self._stagnation = Stagnation(version=stamp.version)
        self.closed = None
        self.roster.void_tasks()
        for record in self.roster:
            self.store.remove(record.learner)
        spent = [action for record in self.roster for action in self._privacy_allows(record.learner)]
        # The number is a new one, because no two models may share one; steps that were done stay counted.
        steps = self.community.committed_steps
        self.community = self.policy.start_community(event.community_model, self.store)
        self.community.continue_from(CommunityStamp(stamp.version + 1, steps))
        self.latest_rollback = stamp.version + 1
        return [CommunityPublished(self.community.stamp, 0, event.community_model), *spent]

    def _privacy_allows(self, learner: LearnerId) -> list[Action]:
        """Nothing if its privacy budget lets this learner go on; otherwise it gets no more tasks."""
        record = self.roster[learner]
        if record.steps_left is None or not record.available:
            return []
        if record.steps_left and not self.protocol.by_deadline:
            return []
        self.roster.put_aside(learner)
        return [LearnerSetAside(learner, BY_DEADLINE if record.steps_left else SPENT)]

    def _speed_alarm(self, record: LearnerRecord, before: float | None) -> list[Action]:
        if before is None or record.typical_time.value is None or not self.protocol.reports_speed:
            return []
        return [SpeedChanged(record.learner, before, record.typical_time.value)]

    def _model_problem(self, event: UpdateRequest) -> str | None:
        return None if self._models_checked else mixable_problem(event.local_model, self.community.model.layout)

    def _refuse(self, record: LearnerRecord, task: LocalTask, kind: str, reason: str) -> list[Action]:
        refused = UpdateRefused(record.learner, task.number, kind, reason)  # type: ignore[arg-type]
        if kind == "late":
            return [refused]
        record.refusals += 1
        if record.refusals <= self.refusals_allowed:
            return [refused]
        self.roster.put_aside(record.learner)
        return [refused, LearnerSetAside(record.learner, f"{record.refusals} refused updates in a row: {reason}")]

    # --- actions ----------------------------------------------------------------------------

    def _publish(self, now: float) -> list[Action]:
        contributors = self.community.contributors
        if not self.community.publish(now):
            return []
        # In a replay without weights, what was measured then.
        measure = self.measures.get(self.community.stamp.version, self.community.measure)
        return [CommunityPublished(self.community.stamp, contributors, self.community.model, measure)]

    def _publish_and_assign(self, now: float) -> list[Action]:
        """Publish exactly when somebody is about to train on the result; this covers all protocols."""
        if (secure := self.secure) is not None:
            if self._is_full(secure):
                return [self._close(secure)]
            # No two rounds may be based on one version: what members have signed is bound to it.
            actions = self._begin_again(secure.too_few()) if secure.values and not secure.windowed else []
        else:
            actions = self._publish(now)
        community = self.community
        spent = self.stop.spent(self.rounds, self.update_requests, community.committed_steps)
        if spent is not None:
            return [*actions, *self._finish(spent)]
        waiting = self.roster.waiting
        if secure is not None:
            here = self.roster.available_count if secure.windowed else len(waiting)
            if here < secure.fewest:
                return actions  # until more are there
            waiting = [record for record in waiting if record.learner not in secure.fresh]
            if not waiting:
                return actions  # until their window is opened
        self._rounds_begun += 1
        self.roster.begin_round()
        moment = self._moment(now)
        published = next((action.measure for action in actions if isinstance(action, CommunityPublished)), None)
        measure, self._round_measure = published or self._round_measure, None
        who = self.policy.choose(waiting, moment)
        tasks = self.protocol.tasks(who, self.roster, moment, measure)
        budgets = _checked(tasks, self.roster, self.protocol, "tasks")
        begun = self.protocol.begun()
        return [*actions, *([] if begun is None else [begun]), *self._assign(budgets, moment)]

    def _moment(self, now: float) -> Moment:
        return Moment(self.community.stamp.version, self.community.committed_steps, now, self._rounds_begun)

    def _joining(self, now: float) -> dict[LearnerId, Budget]:
        """What learners that are back in the middle of a round do until its end."""
        back = self.roster.back
        return _checked(self.protocol.joining(back, now), self.roster, self.protocol, "joining") if back else {}

    def _assign(self, budgets: dict[LearnerId, Budget], moment: Moment) -> list[Action]:
        actions: list[Action] = []
        community, now, rate = self.community, moment.seconds, self.policy.scale_rate(moment)
        limited = self.policy.limit(budgets, self.roster, moment)
        limited = within_privacy(limited, self.roster, self._rounds_left(limited, now))
        if (secure := self.secure) is not None:
            # What a task draws at random comes from its number: by names, not by who joined first.
            limited = dict(sorted(limited.items()))
            examples = {learner: float(self.roster[learner].examples) for learner in limited}
            secure.begin(examples, {k: min(budget.steps or MOST_STEPS, MOST_STEPS) for k, budget in limited.items()})
        for learner, budget in limited.items():
            task = LocalTask(self._tasks_sent, community.stamp, budget, rate)
            self._tasks_sent += 1
            self.roster.assign(learner, task, now, community.model if community.uses_base else None)
            actions.append(SendTask(learner, task, community.model))
        return actions

    def _rounds_left(self, budgets: dict[LearnerId, Budget], now: float) -> int:
        period = max((budget.seconds for budget in budgets.values()), default=math.inf)
        learners = max(1, self.roster.available_count)
        turns = learners if self.protocol.has_rounds else 1
        return rounds_left(self.stop, self.rounds, self.update_requests, now, period, learners, turns)

    def _spent(self, now: float) -> str | None:
        """Why the stop rule leaves nothing to do, in words; None if it leaves something."""
        if self.stop.out_of_time(now):
            return f"{self.stop.seconds:g} seconds have passed"
        return self.stop.spent(self.rounds, self.update_requests, self.community.committed_steps)

    def _finish(self, reason: str) -> list[Action]:
        if self.finished:
            return []
        self.finished = True
        return [Finish(reason)]


def claim_problem(update: UpdateRequest, task: LocalTask) -> str | None:
    """Which claim of an update to this task cannot be true; None if all may be."""
    max_steps = MAX_STEPS if task.budget.steps is None else task.budget.steps
    if not 1 <= update.steps <= max_steps:
        return f"it claims {update.steps} steps, the task allows 1 to {max_steps}"
    if not (math.isfinite(update.seconds) and update.seconds >= 0):
        return f"it claims {update.seconds} seconds of training"
    if not SHORTEST_BATCH <= update.time_per_batch < math.inf:
        return f"it claims {update.time_per_batch} seconds per batch, which must be at least {SHORTEST_BATCH:g}"
    return None


def within_elapsed(update: UpdateRequest, elapsed: float) -> UpdateRequest:
    """The update with no more seconds, and no more steps of its own time per batch, than have passed since its task."""
    # Of an honest mean, which leaves out warm-up and stalls, all steps together may be nearly three times too long.
    fitting = steps_within(3 * (elapsed + _CLOCK_STOOD), update.time_per_batch)
    return replace(update, steps=min(update.steps, fitting), seconds=min(update.seconds, elapsed))


def _credible(update: UpdateRequest, task: LocalTask, record: LearnerRecord, elapsed: float) -> float:
    """The time per batch that an update claims, as far as one can know: a period for everybody is made from it."""
    claimed = update.time_per_batch
    if elapsed > 0:
        # A mean without stalls and warm-up leaves out at max_steps half of the batches that were timed.
        claimed = min(claimed, 2 * elapsed / max(2, update.steps - 1) * (1 + TOLERANCE))
    known = record.time_per_batch
    if known is not None and update.steps == 1 and task.budget.steps != 1:
        # Cut off after its only batch, which may be all warm-up or only a piece of one.
        claimed = min(max(claimed, known / 2), 2 * known)
    return claimed


def _checked(
    budgets: dict[LearnerId, Budget], roster: Roster, protocol: object, method: str
) -> dict[LearnerId, Budget]:
    """What a method of a protocol, perhaps of the user's, returned, if it can be sent as tasks."""
    if (problem := _budgets_problem(budgets, roster)) is not None:
        raise DefinitionError(f"{method} of {type(protocol).__name__} returned {problem}")
    return budgets


def _budgets_problem(budgets: dict[LearnerId, Budget], roster: Roster) -> str | None:
    if not hasattr(budgets, "items"):
        return f"{budgets!r}; it must return a dict with a Budget for each learner"
    for learner, budget in budgets.items():
        if not roster.waits(learner):
            why = "is not in the federation" if roster.get(learner) is None else "is not waiting for a task"
            return f"a budget for learner {learner!r}, which {why}"
        if (problem := _budget_problem(budget)) is not None:
            return f"{budget!r} for learner '{learner}'; {problem}"
    return None


def _budget_problem(budget: object) -> str | None:
    """Why nobody can train for so long; None if one can."""
    if not isinstance(budget, Budget):
        return "it must be a Budget, such as Budget(steps=10)"
    if budget.steps is None:
        return None if budget.seconds < math.inf else "such a task would not end: give it steps, seconds or both"
    if not (hasattr(budget.steps, "__index__") and budget.steps >= 1):
        return "its steps must be a whole number, 1 or more"
    return None
