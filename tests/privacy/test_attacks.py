"""The attacks that an earlier version of the protocol did not survive, one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from metis.core.canonical import encode
from metis.core.ring import Body
from metis.core.secure_sum import Abandonment, Opening, Place, Statement, Upload, Vote, threshold
from metis.errors import Refused
from metis.privacy import member as member_module
from metis.privacy.keys import derive
from metis.privacy.masks import mask
from metis.privacy.opener import Opener
from metis.privacy.store import MemoryStore
from privacy.cohort import MODEL, SETTINGS, Cohort, identity


@pytest.fixture
def cohort() -> Cohort:
    return Cohort(7)


def closed(cohort: Cohort, opening: Opening) -> tuple[Opener, Statement]:
    """All have uploaded, and all are in the sum."""
    opener = cohort.opener(opening)
    for name in opening.names:
        cohort.accept(name, opening)
        opener.take(cohort.members[name].mask(opening.context, cohort.body(name, opening), cohort.layout))
    opener.close(opener.statement())
    return opener, opener.statement()


# --- 1: a different set of survivors to each member -------------------------------------------


def test_1_a_member_votes_for_one_set_of_survivors(cohort: Cohort) -> None:
    """Also after a restart; the same vote may be asked for again."""
    _, statement = closed(cohort, cohort.opening())
    member = cohort.members["h00"]
    other = Statement(statement.context, statement.names[:-1], statement.digests[:-1])
    first = member.vote(statement)
    for again in (member, cohort.restarted("h00")):
        with pytest.raises(Refused, match="has voted in this context already"):
            again.vote(other)
        assert again.vote(statement) == first


def test_1_shares_are_given_against_t_votes_for_the_same_statement(cohort: Cohort) -> None:
    """Not against t - 1, not if votes are counted twice, and not if they are for another statement or context."""
    opener, statement = closed(cohort, cohort.opening())
    for name in cohort.names:
        opener.vote(cohort.members[name].vote(statement))
    request, member = opener.request("h00"), cohort.members["h00"]
    few, t = request.votes[:-1], threshold(7)
    other = Vote(statement.context, "h04", b"1" * 32, b"")
    other = replace(other, signature=identity("h04").sign(other.signed))
    elsewhere = replace(other, context=b"1" * 32)
    elsewhere = replace(elsewhere, signature=identity("h04").sign(elsewhere.signed))
    for votes in (few, (*few, few[0]), (*few, other), (*few, elsewhere), (*few, replace(few[0], name="stranger")), ()):
        with pytest.raises(Refused, match=f"needs the votes of {t} members"):
            member.answer(replace(request, votes=votes))
    for vote in (replace(few[0], name="h06"), replace(other, statement=statement.digest)):
        with pytest.raises(Refused, match="is not signed by the learner that it names"):
            member.answer(replace(request, votes=(*few, vote)))
    member.answer(request)


def test_1_a_member_gives_no_shares_of_a_statement_that_it_would_not_sign(cohort: Cohort) -> None:
    """t others voted for a sum; this member voted for another before, or has refused."""
    opener, statement = closed(cohort, cohort.opening())
    for name in cohort.names[2:]:
        opener.vote(cohort.members[name].vote(statement))
    cohort.members["h00"].vote(Statement(statement.context, statement.names[:-1], statement.digests[:-1]))
    cohort.members["h01"].refuse(statement.context)
    for name in ("h00", "h01"):
        with pytest.raises(Refused, match="has voted in this context already"):
            cohort.members[name].answer(opener.request(name))


def test_1_a_sum_of_too_few_or_of_another_upload_is_not_signed(cohort: Cohort) -> None:
    """The number of survivors and a member's own digest are checked by the member."""
    _, statement = closed(cohort, cohort.opening())
    least = cohort.opening().least
    with pytest.raises(Refused, match=f"a sum of {least - 1} learners is refused"):
        cohort.members["h00"].vote(
            Statement(statement.context, statement.names[: least - 1], statement.digests[: least - 1])
        )
    with pytest.raises(Refused, match="an upload of h00 that it did not make"):
        cohort.members["h00"].vote(replace(statement, digests=(b"1" * 32, *statement.digests[1:])))


def test_1_a_learner_that_uploaded_nothing_is_not_in_a_sum_that_it_signs(cohort: Cohort) -> None:
    opening = cohort.opening()
    cohort.accept("h00", opening)
    with pytest.raises(Refused, match="an upload of h00 that it did not make"):
        cohort.members["h00"].vote(Statement(opening.context, cohort.names, (bytes(32),) * 7))


def test_1_only_the_seeds_that_the_sum_needs_are_released(cohort: Cohort) -> None:
    """Of a pair inside the sum nothing but hashes leaves a member, and nothing at all of a late learner."""
    opening = cohort.opening()
    opener, _, _ = cohort.play(opening, cohort.names[:6], cohort.names)
    h = cohort.members["h03"].answer(opener.request("h03"))
    assert len(h.rows) == 6
    own = np.frombuffer(cohort.members["h03"]._state.rounds[0].own_shares, np.uint8).reshape(7, 32)
    given = np.frombuffer(h.rows[3], np.uint8).reshape(7, 32)
    assert [bool((own[k] == given[k]).all()) for k in range(7)] == [k in (3, 6) for k in range(7)]


# --- 2: the controller picks the cohort, or a weak threshold ----------------------------------


def test_2_a_picked_cohort_a_weak_threshold_and_a_small_sum_are_refused(cohort: Cohort) -> None:
    """By the member, from what its own file pins."""
    with pytest.raises(Refused, match="lacks 4 of the pinned peers; 2 may be absent"):
        cohort.accept("h00", cohort.opening(names=cohort.names[:3]))
    with pytest.raises(Refused, match="threshold of 7 members is 5, not 2"):
        cohort.accept("h00", cohort.opening(threshold=2))
    with pytest.raises(Refused, match="needs 5 to 7 learners, not 4"):
        cohort.accept("h00", cohort.opening(least=4))
    stranger = Cohort(8).members["h07"].key(0)
    keys = [*(cohort.members[name].key(0) for name in cohort.names), stranger]
    with pytest.raises(Refused, match="h07 is not among the peers"):
        cohort.accept("h00", cohort.opening_of(keys))


# --- 3: other models or learning rates for others ---------------------------------------------


def test_3_the_model_the_settings_and_the_run_are_what_the_learner_computes(cohort: Cohort) -> None:
    """The context has the hash of the bytes that are trained on, so that different models are different contexts."""
    opening = cohort.opening()
    for changes in ({"model": b"1" * 32}, {"settings": b"1" * 32}, {"extra_vectors": 1}):
        with pytest.raises(Refused, match="is not the one of this learner's task"):
            cohort.accept("h00", opening, **changes)
    with pytest.raises(Refused, match="the layout of the opening"):
        cohort.members["h00"].accept(opening, model=MODEL, layout=cohort.layout.control, settings=SETTINGS)
    with pytest.raises(Refused, match="the run of the opening"):
        cohort.accept("h00", replace(opening, run="another"))
    assert replace(opening, model=b"1" * 32).context != opening.context


def test_3_a_learning_rate_or_a_number_of_steps_near_zero_is_refused(cohort: Cohort) -> None:
    """With it for all but one, the sum would be one learner's; all see the same in the context."""
    with pytest.raises(Refused, match="learning rate is 1e-09"):
        cohort.accept("h00", cohort.opening(rate=1e-9))
    members = list(cohort.opening().members)
    members[3] = replace(members[3], steps=0)
    with pytest.raises(Refused, match="steps of h03"):
        cohort.accept("h00", cohort.opening(members=tuple(members)))


# --- 4: the same models summed twice ----------------------------------------------------------


def test_4_a_version_gets_another_context_only_after_t_refusals(cohort: Cohort) -> None:
    """N - t + 1 are too few, one member's counts once, and votes are not refusals."""
    opening, again = cohort.opening(), cohort.opening(attempt=1)
    _, statement = closed(cohort, opening)
    refusals = [cohort.members[name].refuse(opening.context) for name in cohort.names[:5]]
    votes = [cohort.members[name].vote(statement) for name in cohort.names[5:]]
    bad: list[list[Vote]] = [[], refusals[:3], [*refusals[:4], refusals[0]], [*refusals[:4], *votes]]
    for given in bad:
        with pytest.raises(Refused, match="abandoning the earlier context of this version needs the votes of 5"):
            cohort.accept("h06", again, abandoned=[Abandonment(opening.context, tuple(given))])
    with pytest.raises(Refused, match="not signed"):
        forged = replace(votes[0], statement=b"")
        cohort.accept("h06", again, abandoned=[Abandonment(opening.context, (*refusals[:4], forged))])
    with pytest.raises(Refused, match="abandoning the earlier context"):
        cohort.accept("h06", again, abandoned=[Abandonment(again.context, tuple(refusals))])
    context = cohort.accept("h06", again, abandoned=[Abandonment(opening.context, tuple(refusals))])
    assert cohort.members["h06"].contexts == (opening.context, context)
    with pytest.raises(Refused, match="abandoning"):  # of every earlier one, not of the first only
        cohort.accept("h06", cohort.opening(attempt=2), abandoned=[Abandonment(opening.context, tuple(refusals))])


def test_4_who_has_voted_does_not_refuse_and_the_other_way_round(cohort: Cohort) -> None:
    """Otherwise t refusals and t votes could both be had."""
    _, statement = closed(cohort, cohort.opening())
    cohort.members["h00"].vote(statement)
    with pytest.raises(Refused, match="has voted"):
        cohort.members["h00"].refuse(statement.context)
    first = cohort.members["h01"].refuse(statement.context)
    assert cohort.restarted("h01").refuse(statement.context) == first
    with pytest.raises(Refused, match="has voted"):
        cohort.restarted("h01").vote(statement)


def test_4_the_second_context_of_a_version_has_other_masks(cohort: Cohort, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of the round are the same; the seeds that come from them are not."""
    seeds: list[set[bytes]] = []
    real = member_module.mask

    def seen(body: Body, sections: Any, plus: list[bytes], minus: list[bytes]) -> None:
        seeds.append({*plus, *minus})
        real(body, sections, plus, minus)

    monkeypatch.setattr(member_module, "mask", seen)
    first, again = cohort.opening(), cohort.opening(attempt=1)
    refusals = []
    for name in cohort.names:
        cohort.accept(name, first)
        cohort.members[name].mask(first.context, cohort.body(name, first), cohort.layout)
        refusals.append(cohort.members[name].refuse(first.context))
    abandoned = [Abandonment(first.context, tuple(refusals))]
    for name in cohort.names:
        cohort.accept(name, again, abandoned=abandoned)
        cohort.members[name].mask(again.context, cohort.body(name, again), cohort.layout)
    assert not set().union(*seeds[:7]) & set().union(*seeds[7:])


def test_4_a_version_does_not_come_back(cohort: Cohort) -> None:
    """Not after a later one, not after a restart, and not after everything was erased."""
    old, new = cohort.opening(0), cohort.opening(3)
    for name in cohort.names:
        cohort.accept(name, old)
    cohort.accept("h00", new)
    with pytest.raises(Refused, match="has not accepted an opening of this context, or has erased it"):
        cohort.members["h00"].refuse(old.context)
    with pytest.raises(Refused, match="version 0 has passed"):
        cohort.restarted("h00").key(0)
    with pytest.raises(Refused, match="not the one that it made for this version"):
        cohort.accept("h00", old)
    cohort.members["h01"].erase()
    cohort.members["h01"] = cohort.restarted("h01")
    with pytest.raises(Refused, match="version 0 has passed"):
        cohort.members["h01"].key(0)
    cohort.accept("h01", cohort.opening(4))


def test_4_a_round_that_begins_again_under_a_new_number_is_never_opened(cohort: Cohort) -> None:
    """As deployments do it, which have no refusals: who accepts the next version votes and answers for it alone."""
    opening = cohort.opening(0)
    opener, statement = closed(cohort, opening)
    for name in cohort.names:  # all agree, and the controller pretends that the round cannot be opened
        opener.vote(cohort.members[name].vote(statement))
    again = cohort.opening(1)
    t = opening.threshold
    for name in cohort.names[t - 1 :]:
        cohort.accept(name, again)
        for restarted in (cohort.members[name], cohort.restarted(name)):
            with pytest.raises(Refused, match="has not accepted an opening of this context, or has erased it"):
                restarted.answer(opener.request(name))
            with pytest.raises(Refused, match="has not accepted an opening of this context, or has erased it"):
                restarted.vote(statement)
    for name in cohort.names[: t - 1]:  # who has not moved on may answer, and they are too few
        opener.answer(cohort.members[name].answer(opener.request(name)))
    assert not opener.openable


def test_4_an_earlier_version_is_refused_although_its_key_is_still_there(cohort: Cohort) -> None:
    """The keys of a version that was skipped are erased; were they not, it would still stay closed."""
    skipped, member = cohort.opening(1), cohort.members["h00"]
    held = member._state.keys
    cohort.accept("h00", cohort.opening(2))
    assert [key.public.version for key in member._state.keys] == [2]
    member._state = replace(member._state, keys=(*member._state.keys, *held))
    with pytest.raises(Refused, match="version 1 has passed"):
        cohort.accept("h00", skipped)


# --- 5: masked twice after a crash ------------------------------------------------------------


class Killed(Exception):
    """The process ends here."""


class DyingStore(MemoryStore):
    """Ends the process before or after a write."""

    dies_at: tuple[int, bool] | None = None
    writes = 0

    def write(self, name: str, data: bytes | memoryview) -> None:
        before = self.dies_at == (self.writes, True)
        after = self.dies_at == (self.writes, False)
        self.writes += 1
        if before:
            raise Killed
        super().write(name, data)
        if after:
            raise Killed


@pytest.mark.parametrize("write", range(2))
@pytest.mark.parametrize("before", [True, False])
def test_5_killed_at_any_write_of_masking_only_one_upload_leaves(cohort: Cohort, write: int, before: bool) -> None:
    """The learner trains again, comes to another model, and still sends what was durable; else nothing had left."""
    store = cohort.stores["h00"] = DyingStore()
    cohort.members["h00"] = cohort.restarted("h00")
    opening = cohort.opening()
    cohort.accept("h00", opening)
    store.dies_at = (store.writes + write, before)
    with pytest.raises(Killed):
        cohort.members["h00"].mask(opening.context, cohort.body("h00", opening, 1), cohort.layout)
    store.dies_at = None
    member = cohort.restarted("h00")
    kept = member.upload(opening.context)
    body = cohort.body("h00", opening, 2)
    upload = member.mask(opening.context, body, cohort.layout)
    assert (kept is not None) == (write == 1 and not before)
    if kept is not None:
        assert upload == kept[0]
    for again in (member, cohort.restarted("h00")):
        sent = again.upload(opening.context)
        assert sent is not None
        assert sent[0] == upload
        assert kept is None or np.array_equal(sent[1], kept[1])


def test_5_boxes_of_another_masking_do_not_open(cohort: Cohort) -> None:
    """A box is sealed under the digest of its upload, and the statement has that digest."""
    opening = cohort.opening()
    opener, statement = closed(cohort, opening)
    cohort.stores["h00"] = MemoryStore()
    for name in cohort.names:
        opener.vote(cohort.members[name].vote(statement))
    request = opener.request("h01")
    twice = Cohort(7)
    twice.members["h00"]._state = cohort.members["h00"]._state
    twice.members["h00"]._state = replace(
        twice.members["h00"]._state, rounds=(replace(cohort.members["h00"]._state.rounds[0], upload=b"", vote=b""),)
    )
    second: Upload = twice.members["h00"].mask(opening.context, cohort.body("h00", opening, 5), cohort.layout)
    answer = cohort.members["h01"].answer(
        replace(request, boxes=(second.boxes[1], *request.boxes[1:]), roots=(second.roots[1], *request.roots[1:]))
    )
    assert answer.rows[0] == b""
    assert all(answer.rows[1:])


# --- 6: one keystream for two sections --------------------------------------------------------


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_6_every_section_has_a_keystream_of_its_own(bits: int) -> None:
    """Two sections under the same seed share no word, in whatever width one looks at them."""
    cohort = Cohort(4, bits=bits)
    sections = cohort.opening().ring.sections(cohort.layout)
    body = np.zeros(sections[-1].end, np.uint8)
    mask(body, sections, [b"s" * 32], [])
    wide, main = (section.view(body).tobytes() for section in sections)
    assert wide[: len(main)] != main
    assert not {wide[i : i + 2] for i in range(0, 10, 2)} & {main[i : i + 2] for i in range(0, 10, 2)}
    purposes = {derive(b"s" * 32, "mask", number, width) for number in range(3) for width in (16, 32, 64)}
    assert len(purposes) == 9


# --- 8: encodings, replays, and a weight that dwarfs all others -------------------------------


def test_8_a_key_of_another_version_run_or_name_is_refused(cohort: Cohort) -> None:
    """The signature covers all of them, and the opening's must be the same."""
    for name in cohort.names:
        cohort.members[name].key(0)
    opening = cohort.opening(1)
    old = cohort.members["h03"].key(0)

    def with_key(key: object) -> Opening:
        members = list(opening.members)
        members[3] = Place(members[3].weight, 20, key)  # type: ignore[arg-type]
        return replace(opening, members=tuple(members))

    for key, words in (
        (old, "the key of h03 is for another run or version"),
        (replace(old, version=1), "the key of h03 is not signed"),
        (replace(opening.members[3].key, key=b"1" * 32), "the key of h03 is not signed"),
        (replace(opening.members[2].key, name="h03"), "the key of h03 is not signed"),
        (replace(opening.members[3].key, run="another"), "another run"),
    ):
        with pytest.raises(Refused, match=words):
            cohort.accept("h00", with_key(key))


def test_8_the_members_own_key_is_the_one_that_it_made(cohort: Cohort) -> None:
    members = cohort.opening().members
    other = Cohort(7).members["h00"].key(0)
    with pytest.raises(Refused, match="the key of h00 in the opening is not the one that it made"):
        cohort.accept("h00", cohort.opening(members=(replace(members[0], key=other), *members[1:])))
    with pytest.raises(Refused, match="the key of h00"):
        cohort.accept("h00", cohort.opening(names=cohort.names[1:]))


def test_8_a_key_with_a_predictable_secret_is_refused(cohort: Cohort) -> None:
    """The point of order one gives zero with every key."""
    colluder = cohort.members["h06"].key(0)
    zero = replace(colluder, key=bytes(32))
    zero = replace(zero, signature=identity("h06").sign(zero.signed))
    members = cohort.opening().members
    opening = cohort.opening(members=(*members[:-1], replace(members[-1], key=zero)))
    cohort.accept("h00", opening)
    with pytest.raises(Refused, match="predictable secret"):
        cohort.members["h00"].mask(opening.context, cohort.body("h00", opening), cohort.layout)


def test_8_a_weight_that_rounds_everybody_else_to_zero_is_refused(cohort: Cohort) -> None:
    members = list(cohort.opening().members)
    members[3] = replace(members[3], weight=1e12)
    with pytest.raises(Refused, match="contribution values reach"):
        cohort.accept("h00", cohort.opening(members=tuple(members)))


def test_8_names_cannot_be_joined_differently() -> None:
    assert encode(("a|b", "c")) != encode(("a", "b|c"))
    assert derive(b"s" * 32, "box", "ab", "c") != derive(b"s" * 32, "box", "a", "bc")


def test_pairs_and_directions_have_different_secrets(cohort: Cohort) -> None:
    """No two of all seeds of a round are equal, and a body under its masks has no word in common with itself."""
    opening = cohort.opening()
    opener, _ = closed(cohort, opening)
    commitments = {c for upload in opener.uploads.values() for c in upload.commitments}
    assert len(commitments) == 7 + 7 * 6 // 2
    assert len({box for upload in opener.uploads.values() for box in upload.boxes}) == 1 + 7 * 6
