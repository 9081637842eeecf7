"""Why a round was slow, in words: who was last and by what, who waited, who was late or away; from the trace alone.

Round N is what made community model N: from the publication of the model before it, or from the first task, to its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from metis.core.events import (
    Action,
    CohortFixed,
    CommunityPublished,
    ControllerAway,
    DeadlinePassed,
    Event,
    LearnerId,
    LearnerJoined,
    LearnerLeft,
    LearnerSetAside,
    LearnerWithdrawn,
    MemberRemoved,
    Paused,
    SendTask,
    TaskFailed,
    UpdateCommitted,
    UpdateRefused,
    UpdateRequest,
)
from metis.errors import ConfigError
from metis.text import listed, number, percent, plural, printable, seconds

_MAX_ROWS = 1000  # the latest
_MAX_NAMES = 5
_SLOW = 1.5  # times the usual, from which on a time is called long
_DULL = 0.05  # share of a round below which something is not worth a sentence


@dataclass(frozen=True, slots=True)
class Work:
    """One task that was answered."""

    learner: LearnerId
    sent: float
    at: float
    training: float
    steps: int
    outcome: str = "void"  # committed, late, invalid, failed
    waited: float = 0.0  # for a window, with something trained

    @property
    def transfer(self) -> float:
        return max(0.0, self.at - self.sent - self.training - self.waited)

    @property
    def per_step(self) -> float:
        return self.training / self.steps if self.steps else 0.0


@dataclass(slots=True)
class Round:
    """What happened until one community model was published."""

    began: float
    ended: float = 0.0
    version: int = 0
    contributors: int = 0
    works: list[Work] = field(default_factory=list)
    still_training: list[LearnerId] = field(default_factory=list)  # when it ended
    given_up: dict[LearnerId, float] = field(default_factory=dict)  # left with an open task: when
    came: dict[LearnerId, float] = field(default_factory=dict)
    refusals: dict[LearnerId, str] = field(default_factory=dict)
    set_aside: list[LearnerId] = field(default_factory=list)
    away: float = 0.0  # seconds in which the controller stood still
    paused: bool = False
    ended_by: Event | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def last(self) -> Work | None:
        """The update that everybody waited for: the latest that counts."""
        return max((work for work in self.works if work.outcome == "committed"), key=lambda work: work.at, default=None)

    @property
    def cause(self) -> str:
        """What the round lasted as long as it did for: one word."""
        match self.ended_by:
            case LearnerLeft() | LearnerWithdrawn() | MemberRemoved():
                return "absence"
            case LearnerJoined():
                return "absence"
            case DeadlinePassed():
                return "deadline"
            case _:
                last = self.last
                if last is None:
                    return "–"
                late_start = last.sent - self.began
                parts = {"training": last.training, "transfer": last.transfer, "absence": late_start}
                return max(parts, key=lambda name: parts[name])

    def row(self) -> dict[str, Any]:
        """For a table."""
        last = self.last
        return {
            "round": self.version,
            "began": self.began,
            "seconds": self.seconds,
            "contributors": self.contributors,
            "refused": sum(work.outcome not in ("committed", "void") for work in self.works),
            "left": len(self.given_up),
            "last": None if last is None else last.learner,
            "cause": self.cause,
        }


class RoundsFold:
    """Folds events into rounds as they come."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.open = Round(0.0)
        self._begun = False
        self._sent: dict[LearnerId, float] = {}
        self._waited: dict[LearnerId, float] = {}  # for a window
        self._unclocked: dict[LearnerId, float] = {}  # that passed for a learner while the run's clock stood still
        self._latest: Event | None = None

    def record(self, now: float, item: Event | Action) -> None:
        if isinstance(item, Event):
            self._latest = item
        match item:
            case SendTask():
                if not self._begun:
                    self._begun, self.open.began = True, now
                self._sent[item.learner], self._unclocked[item.learner] = now, 0.0
                self._waited.pop(item.learner, None)
            case CohortFixed():
                self._waited |= item.waits
            case UpdateRequest() | TaskFailed() if item.learner in self._sent:
                sent = self._sent.pop(item.learner)
                training = min(max(0.0, item.seconds), now - sent + self._unclocked.pop(item.learner))
                waited = self._waited.pop(item.learner, 0.0)
                self.open.works.append(Work(item.learner, sent, now, training, item.steps, waited=waited))
            case UpdateCommitted():
                self._close(item.learner, "committed")
            case UpdateRefused():
                self._close(item.learner, item.kind)
                self.open.refusals[item.learner] = item.reason
            case LearnerSetAside():
                self.open.set_aside.append(item.learner)
            case LearnerLeft() | LearnerWithdrawn() | MemberRemoved():
                if self._sent.pop(item.learner, None) is not None:
                    self.open.given_up[item.learner] = now
            case LearnerJoined():
                self.open.came[item.learner] = now
            case ControllerAway():
                self.open.away += item.seconds
                self._unclocked = {learner: lost + item.seconds for learner, lost in self._unclocked.items()}
            case Paused():
                self.open.paused = True
            case CommunityPublished():
                done, self.open = self.open, Round(now)
                done.ended, done.version, done.contributors = now, item.stamp.version, item.contributors
                done.still_training, done.ended_by = list(self._sent), self._latest
                self.rounds.append(done)
            case _:
                pass

    def _close(self, learner: LearnerId, outcome: str) -> None:
        for index in range(len(self.open.works) - 1, -1, -1):
            work = self.open.works[index]
            if work.learner == learner:
                self.open.works[index] = replace(work, outcome=outcome)
                return


@dataclass(slots=True)
class _Site:
    """What one site has been through."""

    drops: int = 0  # times it left with a task, or just left
    late: int = 0
    invalid: int = 0
    failed: int = 0
    first_time_per_batch: float | None = None
    transfer: float | None = None  # seconds of the latest task that were not training
    sent: float | None = None
    unclocked: float = 0.0  # that the run's clock does not have, less what it waited for a window


class SitesFold:
    """Folds events into a short history of each site; its size depends on the number of sites only."""

    def __init__(self, model_bytes: int, update_bytes: int | None) -> None:
        self._bytes = model_bytes + (model_bytes if update_bytes is None else update_bytes)
        self._sites: dict[LearnerId, _Site] = {}

    def record(self, now: float, item: Event | Action) -> None:
        match item:
            case LearnerJoined():
                self._sites.setdefault(item.learner, _Site())
            case LearnerLeft() | LearnerWithdrawn() | MemberRemoved() if item.learner in self._sites:
                site = self._sites[item.learner]
                site.drops, site.sent = site.drops + 1, None
            case SendTask():
                site = self._sites[item.learner]
                site.sent, site.unclocked = now, 0.0
            case CohortFixed():
                for learner, waited in item.waits.items():
                    self._sites[learner].unclocked -= waited
            case UpdateRequest():
                site = self._sites[item.learner]
                if site.sent is not None:
                    site.transfer = max(0.0, now - site.sent + site.unclocked - item.seconds)
                    site.sent = None
                if site.first_time_per_batch is None:
                    site.first_time_per_batch = item.time_per_batch
            case UpdateRefused():
                site = self._sites[item.learner]
                setattr(site, item.kind, getattr(site, item.kind) + 1)
            case ControllerAway():
                for site in self._sites.values():
                    site.unclocked += item.seconds
            case _:
                pass

    def history(self, learner: LearnerId) -> dict[str, Any]:
        site = self._sites.get(learner, _Site())
        speed = self._bytes / site.transfer if site.transfer else None
        return {
            "drops": site.drops,
            "late": site.late,
            "invalid": site.invalid,
            "failed": site.failed,
            "first_time_per_batch": site.first_time_per_batch,
            "transfer_seconds": site.transfer,
            "bytes_per_second": speed,
        }


def rounds_of(events: Iterable[tuple[float, Event | Action]]) -> list[Round]:
    """Every finished round of a trace."""
    fold = RoundsFold()
    for now, item in events:
        fold.record(now, item)
    return fold.rounds


def round_report(
    events: Iterable[tuple[float, Event | Action]], version: int | None = None, site: LearnerId | None = None
) -> dict[str, Any]:
    """One round in words, one site's rounds, or a table of the latest rounds; plain values."""
    rounds = rounds_of(events)
    if version is not None:
        found = next((one for one in rounds if one.version == version), None)
        if found is None:
            known = f"there are rounds 1 to {rounds[-1].version}" if rounds else "no round has ended yet"
            raise ConfigError(f"there is no round {version}; {known}")
        return {"round": found.row(), "text": explained(found, rounds)}
    if site is not None:
        return _site(rounds, str(site))
    return {"rounds": [one.row() for one in rounds[-_MAX_ROWS:]]}


def explained(this: Round, rounds: list[Round]) -> list[str]:
    """Why a round lasted as long as it did, in sentences."""
    usual = statistics.median(one.seconds for one in rounds)
    compared = (
        "about as long as usual" if this.seconds < _SLOW * usual else f"{number(this.seconds / usual)} times the usual"
    )
    if len(rounds) < 3 or usual <= 0:
        compared = "there are too few rounds to say what is usual"
    sentences = [
        f"Round {this.version} lasted {seconds(this.seconds)}, from {seconds(this.began)} to {seconds(this.ended)} of "
        f"the run ({compared}; the median is {seconds(usual)}), with {plural(this.contributors, 'contribution')}."
    ]
    last = this.last
    if last is not None:
        sentences += _of_last(this, last, rounds)
    sentences += _of_the_end(this)
    waits = sorted(
        (
            (this.ended - work.at, work.learner)
            for work in this.works
            if work.outcome == "committed" and work is not last
        ),
        reverse=True,
    )
    long = [f"'{printable(who)}' {seconds(wait)}" for wait, who in waits if wait > _DULL * this.seconds]
    if long and last is not None:
        sentences.append(f"Meanwhile these waited: {listed(long, _MAX_NAMES)}.")
    sentences += _of_the_rest(this)
    return sentences


def _of_last(this: Round, last: Work, rounds: list[Round]) -> list[str]:
    who = f"'{printable(last.learner)}'"
    cause = max(
        ("training", last.training), ("its transfers", last.transfer), ("its late start", last.sent - this.began),
        key=lambda part: part[1],
    )[0]  # fmt: skip
    text = (
        f"{who} was the last to hand in, {seconds(last.at - this.began)} after the round began, mostly because of "
        f"{cause}: {seconds(last.training)} of training ({plural(last.steps, 'step')}), {seconds(last.transfer)} of "
        "transfer and waiting for the network"
    )
    if last.sent - this.began > _DULL * this.seconds:
        text += f"; its task was sent only {seconds(last.sent - this.began)} after the round began"
    sentences = [f"{text}."]
    before = [
        work for one in rounds if one.version < this.version for work in one.works
        if work.learner == last.learner and work.steps
    ]  # fmt: skip
    if len(before) >= 2 and last.steps:
        usual = statistics.median(work.per_step for work in before)
        if usual > 0 and last.per_step > _SLOW * usual:
            sentences.append(
                f"A batch took it {seconds(last.per_step)}, {number(last.per_step / usual)} times its usual "
                f"{seconds(usual)}."
            )
        moved = statistics.median(work.transfer for work in before)
        if last.transfer > _SLOW * moved and last.transfer > _DULL * this.seconds:
            sentences.append(f"Its transfers took {seconds(last.transfer)} instead of its usual {seconds(moved)}.")
    return sentences


def _of_the_end(this: Round) -> list[str]:
    match this.ended_by:
        case LearnerLeft() | LearnerWithdrawn() | MemberRemoved():
            who = printable(this.ended_by.learner)
            how = "was removed" if isinstance(this.ended_by, MemberRemoved) else "was away and was given up"
            return [f"The round ended when '{who}' {how}, {seconds(this.ended - this.began)} after it began."]
        case LearnerJoined():
            return [f"The round ended when '{printable(this.ended_by.learner)}' came back: too few were there before."]
        case DeadlinePassed():
            late = [f"'{printable(name)}'" for name in this.still_training]
            without = f", without {listed(late, _MAX_NAMES)}" if late else ""
            return [f"The round ended at its deadline{without}."]
        case _:
            return []


def _of_the_rest(this: Round) -> list[str]:
    sentences = []
    for who, reason in list(this.refusals.items())[:_MAX_NAMES]:
        sentences.append(f"The update of '{printable(who)}' did not count: {printable(reason)[:200]}.")
    gone = [f"'{printable(who)}' after {seconds(at - this.began)}" for who, at in this.given_up.items()]
    if gone:
        sentences.append(f"Left while training: {listed(gone, _MAX_NAMES)}.")
    if this.set_aside:
        sentences.append(f"Set aside: {listed([repr(printable(name)) for name in this.set_aside], _MAX_NAMES)}.")
    if this.paused:
        sentences.append("The federation was paused by an administrator meanwhile; that time is not in these figures.")
    elif this.away:
        sentences.append(
            f"The controller stood still for {seconds(this.away)} meanwhile (stopped, restarted or suspended); that "
            "time is not in these figures."
        )
    return sentences


def _site(rounds: list[Round], site: LearnerId) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for one in rounds[-_MAX_ROWS:]:
        work = next((work for work in reversed(one.works) if work.learner == site), None)
        left = site in one.given_up
        if work is None and not left:
            continue
        rows.append(
            {
                "round": one.version,
                "outcome": "left" if work is None else work.outcome,
                "steps": 0 if work is None else work.steps,
                "training": None if work is None else work.training,
                "transfer": None if work is None else work.transfer,
                "waited": None if work is None else max(0.0, one.ended - work.at),
                "last": one.last is not None and one.last.learner == site,
            }
        )
    if not rows:
        raise ConfigError(f"the trace has no finished round with a task of '{printable(site)[:64]}'")
    last, counted = sum(row["last"] for row in rows), sum(row["outcome"] == "committed" for row in rows)
    text = (
        f"'{printable(site)}' took part in {plural(len(rows), 'round')}; {counted} of its updates counted, and it was "
        f"the last in {last} of them ({percent(last / len(rows))})."
    )
    return {"site": site, "rounds": rows, "text": [text]}
