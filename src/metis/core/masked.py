"""The part of the controller that deals with masked rounds: closed, opened, or begun again."""

from __future__ import annotations

from abc import ABC, abstractmethod

from metis.core.events import (
    Action,
    CohortFixed,
    CommunityPublished,
    CommunityStamp,
    LearnerId,
    MembersAwaited,
    ModelResent,
    RoundAbandoned,
    RoundClosed,
    RoundMeasure,
    SumOpened,
    UpdateRequest,
)
from metis.core.layers.wrapper import innermost
from metis.core.mixing import Community
from metis.core.mixing.secure import SecureAverage
from metis.core.mixing.windows import CachedWindows, Windows
from metis.core.model import Model
from metis.core.policy import Policy
from metis.core.roster import LearnerRecord, Roster
from metis.errors import DefinitionError, UnexpectedEvent


class MaskedRounds(ABC):
    """What a controller does where local models are masked; where they are not, nothing."""

    policy: Policy
    community: Community
    roster: Roster
    finished: bool
    _rollbacks: int  # versions that repeat an earlier model
    _tasks_sent: int
    member_changes: dict[LearnerId, bool]
    closed: RoundClosed | None = None  # the round whose sum is being opened
    _round_measure: RoundMeasure | None = None  # of a round that nobody has begun the next one after
    awaited: MembersAwaited | None = None  # why no round or window begins

    @abstractmethod
    def _publish(self, now: float) -> list[Action]: ...

    @property
    def secure(self) -> SecureAverage | None:
        """The mixing, if it sees sums of local models only."""
        mixing = innermost(self.community)
        return mixing if isinstance(mixing, SecureAverage) else None

    def _close(self, secure: SecureAverage) -> RoundClosed:
        """From now on the round is exactly these learners, even if one is late or leaves."""
        secure.close({record.learner for record in self.roster.available})
        self.closed = RoundClosed(self.community.stamp.version, secure.learners, len(secure.values), len(secure.resent))
        return self.closed

    def _masked_round(self, version: int) -> SecureAverage:
        secure = self.secure
        if secure is None or not secure.values or self.community.stamp.version != version or self.finished:
            raise UnexpectedEvent(f"no masked round on community model {version} is open")
        return secure

    def _fix_cohort(self, event: CohortFixed) -> None:
        secure = self._masked_round(event.version)
        if self.closed is not None or secure.fixed or not set(event.learners) <= secure.values.keys():
            raise UnexpectedEvent(f"the members of the round on community model {event.version} are fixed already")
        if isinstance(secure, Windows):
            again = secure.fix_window(dict(zip(event.learners, event.tasks, strict=True)), self.member_values())
            if isinstance(secure, CachedWindows):
                # What is handed in again is an update of its own.
                secure.resends = {learner: self._tasks_sent + index for index, learner in enumerate(again)}
                self._tasks_sent += len(again)
            return
        for learner in secure.values.keys() - set(event.learners):
            if self.roster[learner].task is not None:
                self.roster.close_task(learner)
        secure.fix(event.learners)

    def _take_again(self, event: ModelResent) -> None:
        window = self.secure
        if not isinstance(window, CachedWindows) or self.resend_of(event.learner) != event.task:
            raise UnexpectedEvent(f"learner '{event.learner}' handed something in again that no window waits for")
        if event.lost:
            window.forget(event.learner)
        else:
            window.take_again(event.learner)

    def resend_of(self, learner: LearnerId) -> int | None:
        """Under which number this learner is to hand in again what it handed in before; None if it is not to."""
        return None if self.secure is None or self.finished else self.secure.missing.get(learner)

    @property
    def open_updates(self) -> set[int]:
        """The numbers of all that may still be handed in."""
        return {*self.roster.open_tasks, *(() if self.secure is None else self.secure.missing.values())}

    def member_values(self) -> dict[LearnerId, float]:
        """What the update of each member of the open round or window counts, before it is handed in."""
        secure = self.secure
        assert secure is not None
        values = dict(secure.values)
        if secure.windowed:
            for record in self.roster.training:
                task = record.task
                assert task is not None
                update = UpdateRequest(record.learner, task.number, task.budget.steps or 1, 0.0, 1.0, Model.empty())
                values[record.learner] = self._value(update, record, task.based_on)
        return values

    def _value(self, event: UpdateRequest, record: LearnerRecord, based_on: CommunityStamp) -> float:
        """What an update counts: by all steps that were committed until now, in windows by those of earlier ones."""
        secure, stamp = self.secure, self.community.stamp
        if secure is None or not secure.windowed:
            stamp = CommunityStamp(stamp.version, self.community.committed_steps)
        value = self.policy.contribution(event, record, based_on, stamp)
        if not hasattr(value, "__float__"):
            weighting = f"the weighting {getattr(self.policy.contribution, '__name__', '')}".strip()
            raise DefinitionError(
                f"{weighting} of policy '{self.policy.name}' returned {value!r} for learner '{record.learner}'; it "
                "must return a number greater than 0"
            )
        return value if secure is None else secure.value(event.learner, value)

    def _awaited(self, window: Windows) -> list[LearnerId]:
        """Who of a window's learners trains, or hands in, what it was to hand in."""
        open_ = {record.learner: record.task for record in self.roster.training}
        again = [k for k in window.missing if self.roster[k].available]
        fresh = [k for k, n in window.expected.items() if (task := open_.get(k)) is not None and task.number == n]
        return again + fresh

    def _is_full(self, secure: SecureAverage) -> bool:
        """Whether the sum of the round or window is to be opened, now that somebody waits."""
        wanted = secure.least
        if isinstance(secure, Windows) and secure.fixed:
            wanted = len(secure.fresh) + 1 if self._awaited(secure) else secure.least
        elif secure.windowed and self.roster.training:
            wanted = secure.wanted
        return len(secure.fresh) >= wanted

    def _give_window_up(self) -> list[Action]:
        """Begin again if so many of a window's learners are gone that its sum can never be opened."""
        window = self.secure
        if not isinstance(window, Windows) or not window.fixed or self._awaited(window):
            return []
        return self._begin_again(window.too_few()) if len(window.fresh) < window.least else []

    def _await_members(self) -> list[Action]:
        """Say once that too few are there for a round or window to begin, and who is not; and that enough are again."""
        secure, here, awaited = self.secure, self.roster.available_count, None
        if secure is None or self.finished:
            return []
        begun = secure.fixed if secure.windowed else bool(secure.values)
        if not begun and here < secure.fewest:
            gone = (record.learner for record in self.roster if not record.available)
            away = sorted(learner for learner in gone if self.member_changes.get(learner) is not False)
            what = "window" if secure.windowed else "round"
            reason = f"a masked {what} begins with {secure.fewest} learners or more, and {here} are there"
            awaited = MembersAwaited(tuple(away), reason)
        before, self.awaited = self.awaited, awaited
        return [] if before == awaited else [awaited or MembersAwaited((), "")]

    def _open(self, event: SumOpened, now: float) -> list[Action]:
        secure = self._masked_round(event.version)
        if self.closed is None or not set(event.learners) <= set(self.closed.learners):
            raise UnexpectedEvent(f"the round on community model {event.version} is not closed, or without these")
        secure.open(event.learners, event.total)
        self.closed = None
        actions = self._publish(now)
        self._round_measure = next(
            (action.measure for action in actions if isinstance(action, CommunityPublished)), None
        )
        return actions

    def _begin_again(self, reason: str) -> list[Action]:
        """The same model under a new number: what was committed to its round can never be opened."""
        stamp, community = self.community.stamp, self.community
        self.closed = None
        self._rollbacks += 1
        self.roster.void_tasks()
        assert self.secure is not None, "only a masked round is abandoned"
        self.secure.clear()
        community.continue_from(CommunityStamp(stamp.version + 1, community.committed_steps))
        return [RoundAbandoned(stamp.version, reason), CommunityPublished(community.stamp, 0, community.model)]

    def _go_on(self) -> list[Action]:
        """After an end that was not one: a masked round that had begun begins again."""
        self.roster.void_tasks()  # what came after the end was refused, and the models may be old
        begun = self.secure is not None and self.secure.values
        return self._begin_again("at the end its members erased their secrets") if begun else []
