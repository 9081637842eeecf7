"""Bytes from anybody, at members and at the controller: refused in a sentence, or harmless."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from metis.core.secure_sum import Answer, Opening, Request, Statement, Upload, Vote
from metis.errors import Refused
from privacy.cohort import LAYOUT, Cohort

COHORT = Cohort(4, quick=True)
OPENING = COHORT.opening()
OPENER, TOTAL, PLAIN = COHORT.play(OPENING, COHORT.names, COHORT.names)
MEMBER = COHORT.members["h01"]
STATEMENT = OPENER.statement()
MESSAGES = {
    "opening": OPENING.encode(),
    "upload": OPENER.uploads["h00"].encode(),
    "statement": STATEMENT.encode(),
    "vote": OPENER.votes["h00"].encode(),
    "request": OPENER.request("h01").encode(),
    "answer": OPENER.answers["h00"].encode(),
}


def feed(kind: str, data: bytes) -> None:
    """As a member or a controller would take it in."""
    match kind:
        case "opening":
            COHORT.accept("h01", Opening.decode(data))
        case "upload":
            COHORT.opener(OPENING).take(Upload.decode(data))
        case "statement":
            MEMBER.vote(Statement.decode(data))
        case "vote":
            OPENER.vote(Vote.decode(data))
        case "request":
            MEMBER.answer(Request.decode(data))
        case "answer":
            OPENER.answer(Answer.decode(data))


@pytest.mark.parametrize("kind", MESSAGES)
@settings(max_examples=150)
@given(st.data())
def test_a_changed_message_is_refused_or_harmless(kind: str, data: st.DataObject) -> None:
    """Bytes changed, cut, put in or doubled: nothing but Refused is raised, and the sum stays what it was."""
    changed = bytearray(MESSAGES[kind])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed)))
        piece = data.draw(st.binary(max_size=3))
        changed[at : at + data.draw(st.integers(0, 4))] = piece
    try:
        feed(kind, bytes(changed))
    except Refused as refusal:
        assert "\n" not in str(refusal)
        assert len(str(refusal)) < 300
    assert MEMBER.vote(STATEMENT).statement == STATEMENT.digest
    assert OPENER.openable


@pytest.mark.parametrize("kind", MESSAGES)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(kind: str, data: bytes) -> None:
    with pytest.raises(Refused):
        feed(kind, data)


@pytest.mark.parametrize("kind", MESSAGES)
def test_the_messages_themselves_are_accepted(kind: str) -> None:
    """Otherwise the rest would prove nothing."""
    feed(kind, MESSAGES[kind])
    assert OPENER.opening.ring.nbytes(LAYOUT) == TOTAL.size
    assert TOTAL.tobytes() == PLAIN.tobytes()
