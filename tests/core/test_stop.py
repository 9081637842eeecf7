"""When a federation ends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from core.play import model
from metis.core.controller import Controller
from metis.core.events import (
    Action,
    CommunityPublished,
    Evaluated,
    Finish,
    LearnerJoined,
    RolledBack,
    StopRuleChanged,
)
from metis.core.policies import sync_fedavg
from metis.core.stop import Patience, Stagnation, StopRule, Target
from metis.errors import ArgumentError


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        ({"rounds": 0}, "rounds is 0; it must be greater than 0"),
        ({"seconds": math.nan}, "seconds is nan; it must be greater than 0"),
        ({"rounds": "3"}, "rounds is '3'; it must be a number"),
        ({"rounds": 2.5}, "rounds is 2.5; it must be a whole number"),
        ({"update_requests": 1e3}, "update_requests is 1000.0; it must be a whole number"),
        ({"steps": math.inf}, "steps is inf; it must be a whole number"),
    ],
)
def test_impossible_limits_are_refused(limits: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{complaint}$") as refusal:
        StopRule(**limits)
    assert refusal.value.argument in limits


@pytest.mark.parametrize("value", ["0.9", None, math.nan])
def test_a_target_is_a_number(value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^target is {value!r}; it must be a number$"):
        Target("accuracy", value)


def test_seconds_need_not_be_whole() -> None:
    assert StopRule(seconds=2.5).seconds == 2.5


def judged(patience: Patience, *values: float) -> list[bool]:
    """Whether patience has run out after each of these evaluations, of models 1, 2, ..."""
    stagnation = Stagnation()
    return [stagnation.note(version, {"f1": value}, patience) for version, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("patience", "values", "ended"),
    [
        (Patience("f1", 2), [0.5, 0.6, 0.6, 0.6], [False, False, False, True]),
        (Patience("f1", 2), [0.5, 0.4, 0.6, 0.5, 0.6], [False, False, False, False, True]),
        (Patience("f1", 1, higher_is_better=False), [0.5, 0.4, 0.4], [False, False, True]),
        (Patience("f1", 2), [math.nan, 0.1, math.nan, 0.05], [False, False, False, True]),
        (Patience("f1", 2), [math.nan, math.nan], [False, True]),
    ],
)
def test_patience_counts_evaluations_since_the_best(patience: Patience, values: list[float], ended: list[bool]) -> None:
    """An equal value and one that is not a number are not better."""
    assert judged(patience, *values) == ended


def test_patience_ignores_older_models_and_other_metrics() -> None:
    """A late report of a model, the initial model and what other data give do not use it up."""
    stagnation, patience = Stagnation(), Patience("f1", 1)
    assert not stagnation.note(0, {"f1": 0.9}, patience)
    assert not stagnation.note(2, {"f1": 0.5}, patience)
    assert not stagnation.note(1, {"f1": 0.1}, patience)
    assert not stagnation.note(3, {"federated_f1": 0.1}, patience)
    assert stagnation.note(4, {"f1": 0.5}, patience)


@pytest.mark.parametrize("evaluations", [0, -1, 1.5, True])
def test_patience_is_a_whole_number(evaluations: Any) -> None:
    with pytest.raises(ArgumentError, match=r"patience is .*; it must be a whole number, 1 or more") as refusal:
        Patience("f1", evaluations)
    assert refusal.value.argument == "patience"


def reasons(actions: list[Action]) -> list[str]:
    return [action.reason for action in actions if isinstance(action, Finish)]


def test_a_federation_ends_when_patience_has_run_out() -> None:
    """An inconclusive evaluation does not count, and after the end nothing ends again."""
    controller = Controller(sync_fedavg(), model(), stop=StopRule(rounds=9, patience=Patience("f1", 1)))
    controller.handle(LearnerJoined("a", 10, 5), 0.0)
    assert not reasons(controller.handle(Evaluated(1, {"f1": 0.5}), 1.0))
    assert not reasons(controller.handle(Evaluated(2, {"f1": 0.1}, conclusive=False), 2.0))
    ended = ["f1 has not improved in 1 evaluations"]
    assert reasons(controller.handle(Evaluated(3, {"f1": 0.5}), 3.0)) == ended
    assert controller.handle(Evaluated(4, {"f1": 0.4}), 4.0) == []


def test_patience_begins_again_with_another_rule() -> None:
    """Somebody who extends a federation that has ended wants more of it."""
    rule = StopRule(rounds=9, patience=Patience("f1", 1))
    controller = Controller(sync_fedavg(), model(), stop=rule)
    controller.handle(LearnerJoined("a", 10, 5), 0.0)
    controller.handle(Evaluated(1, {"f1": 0.5}), 1.0)
    assert reasons(controller.handle(Evaluated(2, {"f1": 0.5}), 2.0))
    assert not reasons(controller.handle(StopRuleChanged(replace(rule, rounds=20)), 3.0))
    assert not controller.finished
    assert not reasons(controller.handle(Evaluated(3, {"f1": 0.2}), 4.0))
    assert reasons(controller.handle(Evaluated(4, {"f1": 0.2}), 5.0))


def test_patience_begins_again_with_a_rollback() -> None:
    """What was measured of the models that were given up does not count, even if it comes late."""
    controller = Controller(sync_fedavg(), model(), stop=StopRule(rounds=9, patience=Patience("f1", 1)))
    controller.handle(LearnerJoined("a", 10, 5), 0.0)
    controller.handle(Evaluated(1, {"f1": 0.9}), 1.0)
    (published, *_) = controller.handle(RolledBack(0, model()), 2.0)
    assert isinstance(published, CommunityPublished)
    assert not reasons(controller.handle(Evaluated(published.stamp.version, {"f1": 0.2}), 3.0))
    assert not reasons(controller.handle(Evaluated(published.stamp.version, {"f1": 0.2}), 4.0))
    assert reasons(controller.handle(Evaluated(published.stamp.version + 1, {"f1": 0.2}), 5.0))
