"""The status document: what a person wants to know of a running federation, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from metis.core.controller import Controller
from metis.core.costs import Costs
from metis.core.events import LearnerId, LocalTask, PeriodBegun
from metis.core.stop import StopRule
from metis.deployment.controller.session import Session
from metis.deployment.controller.sessions import Presence
from metis.deployment.controller.settings import FederationPlan
from metis.deployment.controller.state import State
from metis.deployment.controller.view import View
from metis.runs.folds import RunFold
from metis.system import monotonic

_CHANGES = 5  # of the length of periods that a status shows


@dataclass(frozen=True, slots=True)
class RosterRow:
    """What the core knows of one learner."""

    learner: LearnerId
    present: bool
    set_aside: bool
    examples: int
    batch_size: int
    time_per_batch: float | None
    task: LocalTask | None
    task_sent_at: float
    steps_left: int | None = None  # of its privacy budget, as far as it has said


@dataclass(frozen=True, slots=True)
class CoreStatus:
    """What the core knows of the federation; taken in the writer."""

    phase: str
    version: int
    steps: int
    update_requests: int
    deadline: float
    expected: int | None
    on_hold: bool
    stop: StopRule
    roster: tuple[RosterRow, ...]
    period: float | None = None  # seconds, of semi-synchronous training
    period_bounded_by: str = ""
    period_begun: PeriodBegun | None = None  # of a protocol that explains itself


def core_status(controller: Controller) -> CoreStatus:
    """In the writer: a copy that never changes."""
    phase = (
        "finished" if controller.finished
        else "paused" if controller.on_hold
        else "waiting for learners" if not controller.started
        else "paused" if controller.paused
        else "waiting for learners" if controller.awaited is not None
        else "running"
    )  # fmt: skip
    return CoreStatus(
        phase,
        controller.community.stamp.version,
        controller.community.committed_steps,
        controller.update_requests,
        controller.deadline,
        controller.learners_expected,
        controller.on_hold,
        controller.stop,
        tuple(
            RosterRow(
                record.learner,
                record.present,
                record.set_aside,
                record.examples,
                record.batch_size,
                record.time_per_batch,
                record.task,
                record.task_sent_at,
                record.steps_left,
            )
            for record in controller.roster
        ),
        getattr(controller.protocol, "synchronization_period", None),
        getattr(controller.protocol, "bounded_by", ""),
        controller.protocol.begun() if controller.started else None,
    )


def status_document(
    core: CoreStatus,
    view: View,
    plan: FederationPlan,
    state: State,
    sessions: Mapping[LearnerId, Session],
    presence: Presence,
    refused_calls: Mapping[str, int],
    *,
    now: float,
    disk_bytes: int,
    disk: Mapping[str, Any],
    stopping: bool,
) -> dict[str, Any]:
    """The document, from the writer's copy and what the event loop knows."""
    fold, setting, best = view.fold, plan.setting, view.best_version
    costs = fold.costs_at(now)
    latest = fold.history[-1].version if fold.history else None
    return {
        "run": state.run,
        "state": "stopping" if stopping and core.phase != "finished" else core.phase,
        "policy": setting.label,
        "start": state.epoch,
        "version": core.version,
        "steps": core.steps,
        "update_requests": core.update_requests,
        "seconds": now,
        "deadline": core.deadline if math.isfinite(core.deadline) else None,
        "period": core.period,
        "period_bounded_by": core.period_bounded_by or None,
        "period_reason": None if core.period_begun is None else core.period_begun.reason,
        "not_awaited": [] if core.period_begun is None else list(core.period_begun.not_awaited),
        "period_changes": [{"at": change.at, "text": change.text} for change in view.periods.changes[-_CHANGES:]],
        "expected": core.expected,
        "awaited": _awaited(view, now) if core.phase == "waiting for learners" else None,
        "on_hold": core.on_hold,
        "stop": asdict(core.stop),
        "left": _left(core, now, fold),
        "metric": setting.metric,
        "target": setting.target.value if setting.target else None,
        "latest": _point(fold, latest),
        "best_version": best,
        "best": _point(fold, best),
        "learners": [
            {
                **_learner(row, sessions.get(row.learner), presence, fold, costs, now, plan.deployment.lease),
                **view.history(row.learner),
            }
            for row in core.roster
        ],
        "costs": costs.to_json(),
        "compression_error": fold.compression_error,
        "refused_calls": dict(refused_calls),
        "disk_bytes": disk_bytes,
        "disk": dict(disk),
        "finish_reason": fold.finish_reason,
    }


def _awaited(view: View, now: float) -> dict[str, Any] | None:
    """For whom masked rounds wait, why, and since when."""
    if view.periods.awaited is None:
        return None
    since, awaited = view.periods.awaited
    return {"learners": list(awaited.learners), "reason": awaited.reason, "since": since, "seconds": now - since}


def _left(core: CoreStatus, now: float, fold: RunFold) -> dict[str, float]:
    """What the stop rule leaves: rounds, seconds, update requests, steps; and an estimate of the time that takes."""
    stop = core.stop
    limits = (
        ("rounds", stop.rounds, core.version),
        ("update_requests", stop.update_requests, core.update_requests),
        ("steps", stop.steps, core.steps),
    )
    left: dict[str, float] = {
        name: max(0, limit - done) for name, limit, done in limits if limit is not None
    }  # fmt: skip
    estimates = [now * (limit - done) / done for _, limit, done in limits if limit is not None and 0 < done <= limit]
    if stop.seconds is not None:
        left["seconds"] = max(0.0, stop.seconds - now)
        estimates.append(left["seconds"])
    if estimates and core.phase != "finished":
        left["about_seconds"] = min(estimates)
    return left


def _point(fold: RunFold, version: int | None) -> dict[str, float] | None:
    """The measurement of this version; the latest, if its history has several."""
    found = [point for point in fold.history if point.version == version]
    return {"version": found[-1].version, "at": found[-1].at, **found[-1].metrics} if found else None


def _learner(
    row: RosterRow, session: Session | None, presence: Presence, fold: RunFold, costs: Costs, now: float, lease: float
) -> dict[str, Any]:
    heard = presence.last_heard(row.learner, session)
    overdue = row.task is not None and now - row.task_sent_at > row.task.budget.seconds + lease
    state = (
        "budget spent" if row.set_aside and row.steps_left == 0
        else "set aside" if row.set_aside
        else "away" if not row.present
        else "disconnected" if session is None
        else "late" if overdue
        else "training" if row.task is not None
        else "waiting"
    )  # fmt: skip
    spent, spending = costs.by_learner.get(row.learner), fold.spending.by_learner.get(row.learner)
    return {
        "name": row.learner,
        "state": state,
        "connected": session is not None,
        "address": session.address if session else None,
        "examples": row.examples,
        "batch_size": row.batch_size,
        "time_per_batch": row.time_per_batch,
        "task": None if row.task is None else row.task.number,
        "steps_of_task": session.steps if session else 0,
        "budget_steps": None if row.task is None else row.task.budget.steps,
        "steps_left": row.steps_left,
        "rounds_left": None if spending is None else spending.rounds_left,
        "silent_seconds": monotonic() - heard if math.isfinite(heard) else None,
        "updates": spent.update_requests if spent else 0,
        "compression_error": fold.compression_errors.get(row.learner),
        "report": _report(fold, row.learner),
        "refused": spent.refused if spent else 0,
        "active": spent.active if spent else 0.0,
        "idle": spent.idle if spent else 0.0,
        "transfer": spent.transfer if spent else 0.0,
    }


def _report(fold: RunFold, learner: LearnerId) -> dict[str, float] | None:
    """What the learner has reported last of a community model; None if it never did."""
    found = fold.by_learner.get(learner)
    return None if found is None else {"version": found[0], **found[1]}
