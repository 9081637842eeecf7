"""The controller's side: what it refuses, whom it names, and what it becomes after a crash."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from metis.core.secure_sum import Answer, Opening, Statement, Upload, threshold
from metis.core.shamir import P, raw
from metis.errors import Refused
from metis.privacy import member as member_module
from metis.privacy.opener import Opener, blamed
from privacy.cohort import LAYOUT, Cohort, identity


def uploaded(cohort: Cohort, opening: Opening, changed: dict[str, Upload] | None = None) -> tuple[Opener, dict]:
    """All uploads are there; some may be others than the members made."""
    opener, bodies = cohort.opener(opening), {}
    for name in opening.names:
        cohort.accept(name, opening)
        bodies[name] = cohort.body(name, opening)
        made = cohort.members[name].mask(opening.context, bodies[name], cohort.layout)
        opener.take((changed or {}).get(name, made))
    return opener, bodies


def agreed(cohort: Cohort, opener: Opener) -> Statement:
    statement = opener.statement()
    opener.close(statement)
    for name in cohort.names:
        if name in cohort.members:
            opener.vote(cohort.members[name].vote(statement))
    return statement


def lying(answer: Answer, row: int = 0) -> Answer:
    """With one share changed, and signed again."""
    rows = list(answer.rows)
    for position in range(len(rows)) if row < 0 else [row]:
        rows[position] = bytes([rows[position][0] ^ 1]) + rows[position][1:]
    answer = replace(answer, rows=tuple(rows))
    return replace(answer, signature=identity(answer.name).sign(answer.signed))


@pytest.mark.parametrize("count", [4, 7, 10])
def test_7_n_minus_t_liars_are_named_and_the_sum_is_opened(count: int) -> None:
    """They answer first, each with a wrong share of another learner; nobody else is named."""
    cohort = Cohort(count)
    opener, bodies = uploaded(cohort, cohort.opening())
    agreed(cohort, opener)
    liars = cohort.names[: count - threshold(count)]
    for position, name in enumerate(cohort.names):
        answer = cohort.members[name].answer(opener.request(name))
        assert not opener.openable
        opener.answer(lying(answer, count - 1 - position) if name in liars else answer)
    assert opener.openable
    plain = opener.opening.ring.sum([cohort.body(name, opener.opening) for name in cohort.names], LAYOUT)
    assert np.array_equal(opener.open(bodies, LAYOUT), plain)
    assert set(opener.liars) == set(liars)
    last = cohort.names[-1]
    assert opener.liars[liars[0]] == f"its shares of {last} are not those that {last} committed to"


def test_7_a_liar_may_still_answer_truly() -> None:
    """Its wrong answer changed nothing but its name's place among the liars."""
    cohort = Cohort(4)
    opener, _ = uploaded(cohort, cohort.opening())
    agreed(cohort, opener)
    answer = cohort.members["h00"].answer(opener.request("h00"))
    opener.answer(lying(answer))
    assert opener.answers == {}
    opener.answer(answer)
    assert set(opener.answers) == set(opener.liars) == {"h00"}


def test_7_who_seals_wrong_boxes_is_named_and_the_sum_is_opened() -> None:
    """The dealer sealed other shares than it committed to for N - t members; each of them says so."""
    cohort = Cohort(7)
    opening = cohort.opening()
    cohort.accept("h03", opening)
    made = cohort.members["h03"].mask(opening.context, cohort.body("h03", opening), cohort.layout)
    boxes = tuple(b"x" + box[1:] if m < 2 else box for m, box in enumerate(made.boxes))
    opener, bodies = uploaded(cohort, opening, {"h03": replace(made, boxes=boxes)})
    agreed(cohort, opener)
    for name in cohort.names:
        opener.answer(cohort.members[name].answer(opener.request(name)))
    assert opener.openable
    assert set(opener.liars) == {"h03"}
    assert np.array_equal(
        opener.open(bodies | {"h03": cohort.members["h03"].upload(opening.context)[1]}, LAYOUT),  # type: ignore[index]
        opening.ring.sum([cohort.body(name, opening) for name in cohort.names], LAYOUT),
    )


def test_7_who_seals_other_shares_than_it_committed_to_is_named_and_not_the_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The boxes of N - t members open, with wrong shares in them; the members notice before they answer."""
    cohort, sealed = Cohort(7), []
    opening, seal = cohort.opening(), member_module.seal

    def wrong(key: bytes, data: bytes, *rest: Any) -> bytes:
        sealed.append(data)
        return seal(key, bytes([data[0] ^ 1]) + data[1:] if len(sealed) <= 2 else data, *rest)

    cohort.accept("h03", opening)
    with monkeypatch.context() as patch:
        patch.setattr(member_module, "seal", wrong)
        cohort.members["h03"].mask(opening.context, cohort.body("h03", opening), cohort.layout)
    opener, _ = uploaded(cohort, opening)
    agreed(cohort, opener)
    for name in cohort.names:
        answer = cohort.members[name].answer(opener.request(name))
        assert (answer.rows[3] == b"") == (name in cohort.names[:2])
        opener.answer(answer)
    assert opener.openable
    assert set(opener.liars) == {"h03"}


@pytest.mark.parametrize("wrong", [2, 3])
def test_7_who_deals_shares_of_no_polynomial_is_named(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own commitments prove it; another subset of members opens the sum while t true shares are left."""
    cohort = Cohort(7)
    opening = cohort.opening()
    split = member_module.split

    def bent(*arguments: object) -> list[int]:
        shares = split(*arguments)  # type: ignore[arg-type]
        return [(share + 3 ** (m + 5)) % P if m < wrong else share for m, share in enumerate(shares)]

    cohort.accept("h03", opening)
    with monkeypatch.context() as patch:
        patch.setattr(member_module, "split", bent)
        cohort.members["h03"].mask(opening.context, cohort.body("h03", opening), cohort.layout)
    opener, bodies = uploaded(cohort, opening)
    bodies["h03"] = cohort.members["h03"].upload(opening.context)[1]  # type: ignore[index]
    agreed(cohort, opener)
    for name in cohort.names:
        opener.answer(cohort.members[name].answer(opener.request(name)))
    assert opener.openable == (wrong == 2)
    assert set(opener.liars) == {"h03"}
    if wrong == 3:
        with pytest.raises(Refused, match="h03 dealt shares that do not give its seeds"):
            opener.open(bodies, LAYOUT)


def test_who_commits_to_other_seeds_of_pairs_is_left_out_before_the_close() -> None:
    """It contradicts all others, they only it."""
    cohort = Cohort(7)
    opening = cohort.opening()
    cohort.accept("h03", opening)
    made = cohort.members["h03"].mask(opening.context, cohort.body("h03", opening), cohort.layout)
    commitments = tuple(raw(k) if k != 3 else own for k, own in enumerate(made.commitments))
    made = replace(made, commitments=commitments)
    made = replace(made, signature=identity("h03").sign(made.digest))
    opener, _ = uploaded(cohort, opening, {"h03": made})
    assert opener.enough
    assert "h03" not in opener.statement().names
    assert set(opener.liars) == {"h03"}


def test_blame_goes_to_whoever_contradicts_more() -> None:
    assert blamed([("a", "b"), ("a", "c")]) == {"a"}
    assert blamed([("a", "b"), ("b", "a")]) == {"a", "b"}
    assert blamed([]) == set()


def test_any_t_members_open_the_same_bits() -> None:
    cohort = Cohort(5)
    opener, bodies = uploaded(cohort, cohort.opening())
    agreed(cohort, opener)
    answers = {name: cohort.members[name].answer(opener.request(name)) for name in cohort.names}
    opened = set()
    for members in combinations(cohort.names, threshold(5)):
        opener.answers = {}
        for name in members:
            opener.answer(answers[name])
        opened.add(opener.open(bodies, LAYOUT).tobytes())
    assert len(opened) == 1


def test_an_upload_is_taken_once_and_before_the_close() -> None:
    cohort = Cohort(5)
    opening = cohort.opening()
    opener, late = cohort.opener(opening), cohort.names[-1]
    made = {}
    for name in cohort.names:
        cohort.accept(name, opening)
        made[name] = cohort.members[name].mask(opening.context, cohort.body(name, opening), cohort.layout)
    for name in cohort.names[:4]:
        opener.take(made[name])
        opener.take(made[name])  # sent again: nothing changes
    other = replace(made["h00"], body=bytes(32))
    other = replace(other, signature=identity("h00").sign(other.digest))
    for upload, words in (
        (other, "not its first one"),
        (replace(made["h00"], name="h01"), "not signed"),
        (replace(made["h00"], context=bytes(32)), "another context"),
        (replace(made["h00"], name="x"), "not in the cohort"),
    ):
        with pytest.raises(Refused, match=words):
            opener.take(upload)
    short = replace(made["h00"], commitments=(), roots=(), boxes=())
    with pytest.raises(Refused, match="a cohort of 0"):
        opener.take(replace(short, signature=identity("h00").sign(short.digest)))
    opener.close(opener.statement())
    with pytest.raises(Refused, match="came late"):
        opener.take(made[late])
    opener.take(made["h00"])
    assert opener.statement().names == cohort.names[:4]


def test_the_steps_come_in_their_order() -> None:
    cohort = Cohort(5)
    opening = cohort.opening()
    empty = cohort.opener(opening)
    assert not empty.enough
    with pytest.raises(Refused, match="a sum of 0 learners"):
        empty.statement()
    opener, bodies = uploaded(cohort, opening)
    with pytest.raises(Refused, match="still open"):
        opener.open(bodies, LAYOUT)
    statement = opener.statement()
    with pytest.raises(Refused, match="lacks an upload that is stored"):
        empty.close(statement)
    opener.close(statement)
    with pytest.raises(Refused, match="closed otherwise"):
        opener.close(Statement(statement.context, statement.names[1:], statement.digests[1:]))
    with pytest.raises(Refused, match="0 of 4 members have voted"):
        opener.request("h00")
    other = Statement(statement.context, statement.names[1:], statement.digests[1:])
    with pytest.raises(Refused, match="for another statement"):
        opener.vote(cohort.members["h00"].vote(other))
    for name in cohort.names[1:]:
        opener.vote(cohort.members[name].vote(statement))
    with pytest.raises(Refused, match="stranger is not in the cohort"):
        opener.request("stranger")
    answer = cohort.members["h01"].answer(opener.request("h01"))
    elsewhere = replace(answer, statement=bytes(32))
    with pytest.raises(Refused, match="to another statement"):
        opener.answer(replace(elsewhere, signature=identity("h01").sign(elsewhere.signed)))
    with pytest.raises(Refused, match="not signed"):
        opener.answer(replace(answer, rows=(b"",) * 5))
    opener.answer(answer)
    with pytest.raises(Refused, match="1 of 4 members have answered with shares of h00"):
        opener.open(bodies, LAYOUT)
    assert opener.abandonment() is None


def test_a_stored_body_that_has_changed_is_not_summed() -> None:
    cohort = Cohort(5)
    opener, bodies = uploaded(cohort, cohort.opening())
    agreed(cohort, opener)
    for name in cohort.names:
        opener.answer(cohort.members[name].answer(opener.request(name)))
    bodies["h02"][-1] ^= 1
    with pytest.raises(Refused, match="the stored body of h02 is not the one that it sent"):
        opener.open(bodies, LAYOUT)
    del bodies["h02"]
    with pytest.raises(Refused, match="the stored body of h02"):
        opener.open(bodies, LAYOUT)


def test_a_round_is_abandoned_by_t_refusals_and_opened_again() -> None:
    """The same local models under another context; what was masked before is not kept."""
    cohort = Cohort(5)
    first = cohort.opening()
    opener, _ = uploaded(cohort, first)
    for name in cohort.names[: threshold(5)]:
        opener.vote(cohort.members[name].refuse(first.context))
    abandonment = opener.abandonment()
    assert abandonment is not None
    again = cohort.opening(attempt=1)
    for name in cohort.names:
        cohort.accept(name, again, abandoned=[abandonment])
        assert cohort.members[name].upload(first.context) is not None
    _, total, plain = cohort.play(again, cohort.names, cohort.names)
    assert np.array_equal(total, plain)
    assert cohort.members["h00"].upload(first.context) is None
