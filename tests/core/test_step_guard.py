"""Which steps are far beyond what others did, and who can change what counts as usual."""

from __future__ import annotations

import math

import pytest

from core.play import model
from metis.core.controller import Controller
from metis.core.events import LearnerJoined, SendTask, UpdateRequest
from metis.core.policies import async_fedavg
from metis.core.roster import LearnerRecord
from metis.core.step_guard import Lengths, step_excess

MODEL = Lengths(5.0, 3.0, 0.0)


def _learner(name: str, *steps: tuple[int, float]) -> LearnerRecord:
    """One whose accepted steps had these batches and this length, a tenth of it in the buffers, a half of control."""
    record = LearnerRecord(name, 100, 10)
    for batches, length in steps:
        record.note_step(batches, Lengths(length, length / 10, length / 2))
    return record


USUAL = [_learner("a", (10, 1.0), (10, 1.2), (10, 0.8)), _learner("b", (10, 2.0)), _learner("c", (10, 3.0))]


def test_what_is_usual_is_the_median_of_the_sites_medians() -> None:
    """Here 2 for the parameters, 0.2 for the buffers, 1 for control variates; ten times that is allowed."""
    assert step_excess(USUAL, 10, Lengths(20.0, 1.0, 5.0), MODEL, 10) == pytest.approx((1.0, 0.5, 0.5))
    assert step_excess(USUAL, 10, Lengths(9e9, 0.0, 20.0), MODEL, 10) == pytest.approx((9e9 / 20, 0.0, 2.0))


def test_one_site_neither_raises_nor_lowers_it() -> None:
    """Whatever its accepted steps were, it stays between those of the two others."""
    for lie in (1e-9, 1e9):
        records = [*USUAL[1:], _learner("liar", *[(1, lie)] * 5)]
        assert 1 / 30 <= step_excess(records, 10, Lengths(1.0), MODEL, 10).parameters <= 1 / 20


def test_many_batches_go_further() -> None:
    """With twenty times the batches a site may go twenty times as far; with one batch as far as usual."""
    assert step_excess(USUAL, 200, Lengths(400.0), MODEL, 10).parameters == pytest.approx(1.0)
    assert step_excess(USUAL, 1, Lengths(20.0), MODEL, 10).parameters == pytest.approx(1.0)


def test_a_claim_of_batches_does_not_lift_it_without_end() -> None:
    """A site that claims a nanosecond a batch gets a task of a billion; twenty times the usual is all that counts."""
    assert step_excess(USUAL, 10**9, Lengths(400.0), MODEL, 10).parameters == pytest.approx(1.0)
    assert step_excess(USUAL[:1], 10**9, Lengths(9e9), MODEL, 10).parameters > 1e6


def test_until_three_sites_were_accepted_the_model_itself_is_the_measure() -> None:
    """Twice its length, or more if somebody went so far; nobody lowers it, and buffers are not judged yet."""
    assert step_excess([], 10, Lengths(10.0, 1e9, 1e9), MODEL, 10) == pytest.approx((1.0, 0.0, 0.0))
    low = [_learner("a", (10, 1e-9)), _learner("b"), _learner("c", (10, 1e-9))]
    assert step_excess(low, 10, Lengths(10.0), MODEL, 10).parameters == pytest.approx(1.0)
    assert step_excess([_learner("a", (10, 4.0))], 10, Lengths(40.0), MODEL, 10).parameters == pytest.approx(1.0)


def test_where_nothing_moves_a_thousandth_of_the_model_is_allowed() -> None:
    """Otherwise whoever still learns would be refused when the others have converged."""
    still = [_learner(name, (10, 0.0)) for name in "abc"]
    assert step_excess(still, 10, Lengths(5e-3, 0.0, 0.0), MODEL, 10).parameters == pytest.approx(1.0)
    assert step_excess(still, 10, Lengths(0.0, 0.0, 7.0), MODEL, 10).control == 0.0, "there is nothing to compare with"
    assert step_excess([], 10, Lengths(1.0), Lengths(), 10).parameters == 0.0


def test_only_accepted_steps_are_remembered_and_only_the_latest() -> None:
    """A refused update says nothing of what is usual; nor does one whose step was not measured."""
    controller = Controller(async_fedavg(1), model())
    record, now = None, 0.0
    actions = controller.handle(LearnerJoined("a", 100, 10), now)
    for length in (math.nan, None, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        task = next(action.task for action in actions if isinstance(action, SendTask))
        record, now = controller.roster["a"], now + 1.0
        valid = model(math.nan if length is not None and math.isnan(length) else 1.0, 0, 0)
        lengths = () if length is None else Lengths(length)
        actions = controller.handle(UpdateRequest("a", task.number, 5, 0.5, 0.1, valid, lengths=lengths), now)
    assert record is not None
    assert record.step_lengths == tuple((5, Lengths(length)) for length in (2.0, 3.0, 4.0, 5.0, 6.0))
