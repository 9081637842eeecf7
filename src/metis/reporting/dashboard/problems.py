"""What is wrong with a run right now, in sentences for the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from metis.reporting.dashboard.view import LearnerRow, RunView

Problem: TypeAlias = dict[str, str]  # its weight (bad, warn or note) and its text
_NAMED = 3  # learners that are named in a sentence about several


def problems(view: RunView) -> list[Problem]:
    """What is wrong right now, in sentences that do not change while it lasts."""
    found: list[Problem] = []

    def say(weight: str, text: str) -> None:
        found.append({"weight": weight, "text": text})

    if view.damage is not None:
        say("bad", f"{view.damage}.")
    if view.latest is not None and not math.isfinite(view.latest[1]):
        say("bad", f"{view.metric} of community model {view.latest[0]} is not a number: training may have diverged.")
    if (view.finish_reason or "").startswith("no learner"):
        say("bad", f"It ended before its budget was used up: {view.finish_reason}.")
    aside = [learner for learner in view.learners if learner.joined and learner.aside is not None]
    for name, (at, reason) in _few(aside, [learner.aside for learner in aside]):
        say("bad", f"{name} has been set aside since {_at(at)} and gets no task until it joins again: {reason}.")
    if len(aside) > _NAMED:
        say("bad", f"{_all(aside)} are set aside and get no tasks until they join again.")
    refused = [learner for learner in view.learners if learner.refusal is not None and learner.aside is None]
    for name, (at, update) in _few(refused, [learner.refusal for learner in refused]):
        if update.kind == "late":
            reason = update.reason.removeprefix("late: ")
            say("warn", f"An update from {name} came too late, at {_at(at)}, and was not mixed: {reason}.")
        else:
            say("bad", f"An update from {name} was refused at {_at(at)}: {update.reason}.")
    if len(refused) > _NAMED:
        say("bad", f"The latest updates from {_all(refused)} were refused; the table of learners counts them.")
    if view.finish_reason is not None:
        return found
    if view.rhythm.awaited is not None:
        since, awaited = view.rhythm.awaited
        names = ", ".join(f"'{learner}'" for learner in awaited.learners[:_NAMED])
        rest = len(awaited.learners) - _NAMED
        names += f" and {rest} more" if rest > 0 else ""
        say("warn", f"It has waited for {names or 'more learners'} since {_at(since)}: {awaited.reason}.")
    late = [learner for learner in view.learners if learner.late and learner.sent_at is not None]
    for name, sent_at in _few(late, [learner.sent_at for learner in late]):
        say("warn", f"{name} is late: it has not handed in the task that it was given at {_at(sent_at)}.")
    if len(late) > _NAMED:
        say("warn", f"{_all(late)} are late with their tasks.")
    states = {learner.name: view.state_of(learner) for learner in view.learners}
    away = [learner for learner in view.learners if states[learner.name][0] == "away"]
    for name, since in _few(away, [states[learner.name][1] for learner in away]):
        say("note", f"{name} has been away since {_at(since)}.")
    if len(away) > _NAMED:
        say("note", f"{_all(away)} are away.")
    withdrawn = [learner for learner in view.learners if learner.withdrawn is not None]
    for name, at in _few(withdrawn, [learner.withdrawn for learner in withdrawn]):
        say("note", f"{name} withdrew permanently at {_at(at)}.")
    if len(withdrawn) > _NAMED:
        say("note", f"{_all(withdrawn)} withdrew permanently.")
    expected = [learner for learner in view.learners if not learner.joined]
    for name, _ in _few(expected, expected):
        say("note", f"{name} has not joined yet.")
    if len(expected) > _NAMED:
        say("note", f"{_all(expected)} have not joined yet.")
    return found


def _few(learners: Sequence[LearnerRow], values: Sequence[Any]) -> list[tuple[str, Any]]:
    """Name and value of each, if they are few enough for a sentence each."""
    if len(learners) > _NAMED:
        return []
    return [(f"'{learner.name}'", value) for learner, value in zip(learners, values, strict=True)]


def _all(learners: Sequence[LearnerRow]) -> str:
    shown = ", ".join(f"'{learner.name}'" for learner in learners[:_NAMED])
    rest = len(learners) - _NAMED
    return f"{len(learners)} learners ({shown}{f' and {rest} more' if rest > 0 else ''})"


def _at(seconds: float | None) -> str:
    return "the start" if seconds is None else f"{seconds:,.1f} s"
