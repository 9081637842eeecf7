"""What the roster keeps about who waits, against a search of all learners."""

from __future__ import annotations

from hypothesis import given, strategies as st

from metis.core.events import Budget, CommunityStamp, LearnerJoined, LocalTask
from metis.core.roster import Roster

LEARNERS = ("anna", "berta", "clara", "dora")
CHANGES = ("join", "assign", "answer", "answer late", "aside", "leave", "round", "void")


@given(st.lists(st.tuples(st.sampled_from(CHANGES), st.sampled_from(LEARNERS)), max_size=40))
def test_who_is_back_waits_and_has_not_answered_in_the_open_round(changes: list[tuple[str, str]]) -> None:
    """Whatever happened before, in the order of joining."""
    roster, answered, number = Roster(), set[str](), 0
    for change, learner in changes:
        record = roster.get(learner)
        here = record is not None and record.available
        training = here and record is not None and record.task is not None
        if change == "join" and not here:
            roster.admit(LearnerJoined(learner, 10, 5))
        elif change == "assign" and here and not training:
            roster.assign(learner, LocalTask(number, CommunityStamp(), Budget(1)), 0.0, None)
            number += 1
        elif change.startswith("answer") and training:
            roster.close_task(learner, of_round=change == "answer")
            answered |= {learner} if change == "answer" else set()
        elif change == "aside" and here and not training:
            roster.put_aside(learner)
        elif change == "leave" and here:
            roster.dismiss(learner)
        elif change == "round":
            roster.begin_round()
            answered.clear()
        elif change == "void":
            roster.void_tasks()
        waiting = [one.learner for one in roster if one.available and one.task is None]
        assert [one.learner for one in roster.waiting] == waiting
        assert [one.learner for one in roster.back] == [name for name in waiting if name not in answered]
