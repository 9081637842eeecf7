"""The messages of the secure sum, its thresholds, and what a site accepts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from metis.core.canonical import Message
from metis.core.ring import Ring
from metis.core.secure_sum import (
    PROTOCOL,
    WIDER,
    Abandonment,
    Answer,
    Opening,
    Pins,
    Place,
    Request,
    SignedKey,
    Statement,
    Trained,
    Upload,
    Vote,
    check_expected,
    check_statement,
    max_colluders,
    min_learners,
    released,
    root,
    row,
    seed_commitment,
    threshold,
)
from metis.errors import ArgumentError, Refused

HASH = bytes(32)
NAMES = tuple(f"h{index}" for index in range(7))


def opening(names: tuple[str, ...] = NAMES, **changes: Any) -> Opening:
    places = tuple(Place(10.0 + n, 20, SignedKey(name, "run", 3, HASH, b"", b"")) for n, name in enumerate(names))
    made = Opening(
        PROTOCOL, "run", 3, 0, HASH, HASH, HASH, 1.0, 0, Ring(32, len(names), 1.0), threshold(len(names)), 4, places
    )
    return replace(made, **changes)


PINS = Pins(frozenset(NAMES), 1)
STATEMENT = Statement(HASH, NAMES[:2], (HASH, HASH))


# --- thresholds -------------------------------------------------------------------------------


def test_the_thresholds_of_the_design() -> None:
    """t = floor(2N/3) + 1; N = 4: c = 0; 5: 1; 6-7: 2; 8 and 10: 3."""
    assert {n: max_colluders(n) for n in (3, 4, 5, 6, 7, 8, 10)} == {3: 0, 4: 0, 5: 1, 6: 2, 7: 2, 8: 3, 10: 3}
    assert [threshold(n) for n in (3, 4, 5, 6, 7, 8, 9, 10)] == [3, 3, 4, 5, 5, 6, 7, 7]


def test_two_statements_never_both_get_t_votes() -> None:
    """Honest members vote once: c double voters are too few for two sets of t, and c + 3 learners are at most t."""
    for members in range(3, 1001):
        t, c = threshold(members), max_colluders(members)
        assert 0 <= c < 2 * t - members
        assert min_learners(c) <= t <= members
        assert c < t


def test_each_further_vector_costs_a_learner() -> None:
    """With m extra vectors least - c >= m + 2, and never below 3."""
    assert [min_learners(2, m) for m in range(4)] == [5, 5, 6, 7]


# --- what a site accepts ----------------------------------------------------------------------


def test_a_fair_opening_is_accepted() -> None:
    PINS.check(opening())
    PINS.check(opening(NAMES[:5], least=4))  # two of seven may be absent


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (opening((*NAMES[:-1], "other")), "other is not among the peers"),
        (opening(NAMES[:4]), "lacks 3 of the pinned peers; 2 may be absent"),
        (opening(threshold=4), "threshold of 7 members is 5, not 4"),
        (opening(threshold=6), "threshold of 7 members is 5, not 6"),
        (opening(least=3), "needs 4 to 7 learners, not 3"),
        (opening(least=8), "needs 4 to 7 learners, not 8"),
        (opening(extra_vectors=2), "needs 5 to 7 learners, not 4"),
        (opening(extra_vectors=-1), "not 4"),
        (opening(extra_vectors=9, least=7), "learners"),
        (opening(ring=Ring(32, 6, 1.0)), "a ring of 32 bits for 6 learners"),
        (opening(ring=Ring(32, 8, 1.0)), "a ring of 32 bits for 8 learners"),
        (opening(ring=Ring(32, 7, 1e9)), "the clip is 1e\\+09"),
        (opening(ring=Ring(32, 7, 1.0, 1e-9)), "the clip is 1e-09"),
        (opening(rate=1e-9), "factor of the learning rate is 1e-09"),
        (opening(rate=float("nan")), "factor of the learning rate is nan"),
    ],
)
def test_an_opening_that_could_show_one_model_is_refused(changed: Opening, words: str) -> None:
    with pytest.raises(Refused, match=words):
        PINS.check(changed)


@pytest.mark.parametrize(
    ("weight", "steps", "words"),
    [
        (1e12, 20, "contribution values reach from 10 to 1e\\+12"),
        (1e-12, 20, "contribution values reach"),
        (0.0, 20, "h3 is not a positive number"),
        (-1.0, 20, "h3 is not a positive number"),
        (float("inf"), 20, "h3 is not a positive number"),
        (10.0, 0, "the steps of h3 is 0"),
        (10.0, 10**7, "the steps of h3"),
    ],
)
def test_a_table_that_makes_the_sum_one_learners_is_refused(weight: float, steps: int, words: str) -> None:
    places = list(opening().members)
    places[3] = replace(places[3], weight=weight, steps=steps)
    with pytest.raises(Refused, match=words):
        PINS.check(opening(members=tuple(places)))


def test_a_site_says_how_many_peers_may_be_absent_and_which_rings_it_takes() -> None:
    with pytest.raises(Refused, match="lacks 1 of the pinned peers; 0 may be absent"):
        replace(PINS, max_absent=0).check(opening(NAMES[:6]))
    with pytest.raises(Refused, match="a ring of 32 bits"):
        replace(PINS, bits=(64,)).check(opening())


def test_a_small_cohort_does_not_tolerate_the_colluders_that_a_large_one_does() -> None:
    with pytest.raises(Refused, match="5 members tolerate 1 colluders; this site pins 2"):
        replace(PINS, colluders=2).check(opening(NAMES[:5], least=5))


@pytest.mark.parametrize(("peers", "colluders"), [(2, 0), (7, 3), (7, -1), (0, 0)])
def test_pins_that_cannot_be_kept_are_refused_at_once(peers: int, colluders: int) -> None:
    with pytest.raises(ArgumentError, match="cannot be tolerated"):
        Pins(frozenset(NAMES[:peers]), colluders)


def test_what_the_learner_computed_itself_must_be_in_the_opening() -> None:
    check_expected(opening(), {"run": "run", "model": HASH})
    with pytest.raises(Refused, match="the model of the opening is not the one"):
        check_expected(opening(), {"model": b"1" * 32})
    with pytest.raises(Refused, match="the protocol of the opening"):
        check_expected(opening(protocol=2), {})


def test_a_statement_is_about_enough_learners_of_this_cohort() -> None:
    made = opening()
    good = Statement(made.context, NAMES[:4], (HASH,) * 4)
    check_statement(made, good)
    for bad, words in (
        (replace(good, context=HASH), "another context"),
        (Statement(made.context, ("a", *NAMES[:3]), (HASH,) * 4), "not in the cohort"),
        (Statement(made.context, NAMES[:3], (HASH,) * 3), "a sum of 3 learners is refused; 4 are the fewest"),
    ):
        with pytest.raises(Refused, match=words):
            check_statement(made, bad)


# --- windows ----------------------------------------------------------------------------------

OLDER = b"2" * 32


def window(*trained: Trained | None, **changes: Any) -> Opening:
    """One to which some members hand in what they have trained, from versions 2 and 3."""
    given = trained or (*(Trained(k, 3, HASH, 1.0) for k in range(4)), Trained(4, 2, OLDER, 0.5))
    places = [
        replace(place, weight=1.0, trained=() if mine is None else (mine,))
        for place, mine in zip(opening().members, (*given, *[None] * 7), strict=False)
    ]
    about: dict[str, Any] = {"members": tuple(places), "ring": Ring(32, 1000, 1.0), **changes}
    return opening(**about)


WINDOWS = replace(PINS, windows=True)


def test_a_window_says_who_hands_in_what() -> None:
    made = window()
    assert made.windowed and not opening().windowed
    assert made.handing_in == NAMES[:5] and opening().handing_in == NAMES
    assert made.trained_by("h4") == Trained(4, 2, OLDER, 0.5) and made.trained_by("h5") is None
    assert made.most == 1.0  # what is worth 1 does not depend on who is there
    WINDOWS.check(made)
    statement = Statement(made.context, NAMES[:4], (HASH,) * 4)
    check_statement(made, statement)
    with pytest.raises(Refused, match="not in the cohort"):
        check_statement(made, replace(statement, names=(*NAMES[:3], "h5")))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (window(*(Trained(k, 3, HASH, 1.0) for k in range(3))), "needs 4 to 3 learners, not 4"),
        (window(ring=Ring(32, 7, 1.0)), "a ring of 32 bits for 7 learners"),
        (window(*(Trained(k, 3, OLDER if k else HASH, 1.0) for k in range(5))), "community model 3 is not the same"),
        (window(*(Trained(k, 2, HASH if k else OLDER, 1.0) for k in range(5))), "community model 2 is not the same"),
        (window(*(Trained(k, 4, OLDER, 1.0) for k in range(5))), "community model 4 is later than the window on 3"),
        (window(*(Trained(k, 3, HASH, 1e-9) for k in range(5))), "factor of the learning rate is 1e-09"),
        (window(*(Trained(k, 3, HASH, 0.05 if k else 1.0) for k in range(5))), "reach from 0.05 to 1; this site pins"),
    ],
)
def test_a_window_that_could_show_one_model_is_refused(changed: Opening, words: str) -> None:
    with pytest.raises(Refused, match=words):
        WINDOWS.check(changed)


def _whole(**changes: Any) -> Opening:
    """A window of whole models: five are fresh, and the last hands in again what it did before."""
    made = window()
    *places, last = made.members
    assert not last.trained
    about = {"ring": Ring(64, 1000, WIDER), "whole": 1, "members": (*places, replace(last, again=(3,))), **changes}
    return replace(made, **about)


def test_a_window_of_whole_models_also_has_what_was_handed_in_before() -> None:
    made = _whole()
    WINDOWS.check(made)
    assert made.fresh == NAMES[:5] and made.handing_in == (*NAMES[:5], NAMES[-1])
    assert made.again_by(NAMES[-1]) == 3 and made.again_by(NAMES[0]) is None and made.trained_by(NAMES[-1]) is None
    assert made.most == max(made.weights[name] for name in made.handing_in)
    names = (*NAMES[:4], NAMES[-1])
    check_statement(made, Statement(made.context, names, (HASH,) * 5))
    with pytest.raises(Refused, match="a sum of 3 learners with something fresh is refused; 4 are the fewest"):
        check_statement(made, Statement(made.context, names[1:], (HASH,) * 4))
    with pytest.raises(Refused, match="needs 4 to 3 learners"):
        WINDOWS.check(
            _whole(members=(*window(*(Trained(k, 3, HASH, 1.0) for k in range(3))).members[:-1], made.members[-1]))
        )
    with pytest.raises(Refused, match="the clip is 1e\\+06"):
        WINDOWS.check(_whole(ring=Ring(64, 1000, 1e6 * WIDER)))


@pytest.mark.parametrize("changes", [{"whole": 0}, {"whole": 2}, {"members": opening().members}])
def test_only_windows_sum_whole_models_and_have_some_again(changes: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="only windows sum whole local models"):
        _whole(**changes)


def test_a_site_takes_part_in_windows_only_if_it_says_so() -> None:
    with pytest.raises(Refused, match="rounds only"):
        PINS.check(window())


def test_a_version_has_the_same_model_in_every_window() -> None:
    later = window(*(Trained(9 + k, 3, HASH, 1.0) for k in range(5)), version=4, model=b"4" * 32)
    later.check_models(window())
    with pytest.raises(Refused, match="community model 3 is not the same"):
        later.check_models(window(*(Trained(k, 2, OLDER, 1.0) for k in range(5)), model=b"3" * 32))


# --- messages ---------------------------------------------------------------------------------

MESSAGES: list[Message] = [
    opening(),
    opening().members[0].key,
    Upload(HASH, "h0", HASH, (HASH,) * 3, (HASH,) * 3, (b"", b"1", b"2"), b"s"),
    STATEMENT,
    Vote(HASH, "h0", STATEMENT.digest, b"s"),
    Vote(HASH, "h0", b"", b"s"),
    Abandonment(HASH, (Vote(HASH, "h0", b"", b"s"),)),
    Request(STATEMENT, (), (b"", b"x"), (HASH, HASH)),
    Answer(HASH, "h0", HASH, (b"", HASH * 7), b"s"),
    window(),
    Trained(4, 2, OLDER, 0.5),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back(message: Message) -> None:
    assert type(message).decode(message.encode()) == message
    for one, other in product([message], MESSAGES):
        assert (one.encode() == other.encode()) == (one == other)


@pytest.mark.parametrize(
    ("message", "changes", "words"),
    [
        (MESSAGES[1], {"name": ""}, "a learner's name"),
        (MESSAGES[1], {"name": "x" * 65}, "a learner's name"),
        (MESSAGES[1], {"run": ""}, "a run"),
        (MESSAGES[1], {"version": -1}, "a version"),
        (MESSAGES[1], {"key": b"1"}, "the key of a round has 1 bytes"),
        (MESSAGES[1], {"certificate": bytes(20_000)}, "a certificate has 20000 bytes"),
        (MESSAGES[1], {"signature": bytes(2000)}, "a signature has 2000 bytes"),
        (MESSAGES[0], {"model": b""}, "a hash of an opening"),
        (MESSAGES[0], {"members": opening().members[:2]}, "3 to 1000 members"),
        (MESSAGES[0], {"members": opening().members[::-1]}, "sorted by name"),
        (MESSAGES[0], {"members": (*opening().members, opening().members[-1])}, "each once"),
        (MESSAGES[2], {"body": b""}, "a hash of an upload"),
        (MESSAGES[2], {"roots": (HASH,)}, "for each member"),
        (MESSAGES[2], {"boxes": (b"", b"", bytes(125))}, "a box has 125 bytes; at most 124"),
        (MESSAGES[3], {"names": ("b", "a")}, "sorted by name"),
        (MESSAGES[3], {"names": ("a", "a")}, "each once"),
        (MESSAGES[3], {"digests": (HASH,)}, "a digest for each"),
        (MESSAGES[4], {"statement": b"1"}, "the statement of a vote"),
        (MESSAGES[7], {"boxes": ()}, "a box and a root"),
        (MESSAGES[7], {"roots": (b"", b"")}, "a root of a request"),
        (MESSAGES[8], {"rows": (bytes(32_001),)}, "a row of an answer"),
        (MESSAGES[9], {"members": tuple(replace(p, trained=p.trained * 2) for p in window().members)}, "one update"),
        (MESSAGES[9], {"members": tuple(replace(p, again=(1,)) for p in window().members)}, "one update"),
        (MESSAGES[10], {"task": -1}, "not negative"),
        (MESSAGES[10], {"version": -1}, "not negative"),
        (MESSAGES[10], {"model": b""}, "a model of a window"),
    ],
)
def test_a_message_that_breaks_its_rules_is_refused(message: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        replace(message, **changes)


def test_the_context_binds_everything_in_the_opening() -> None:
    """No two openings that differ anywhere have the same context."""
    key = opening().members[0].key
    variants = [
        opening(), opening(run="r"), opening(version=4), opening(attempt=1), opening(model=b"1" * 32),
        opening(layout=b"1" * 32), opening(settings=b"1" * 32), opening(rate=0.5), opening(extra_vectors=1),
        opening(ring=Ring(64, 7, 1.0)), opening(ring=Ring(32, 7, 2.0)), opening(threshold=6), opening(least=5),
        opening(members=opening().members[1:]),
        opening(members=(Place(11.0, 20, key), *opening().members[1:])),
        opening(members=(Place(10.0, 21, key), *opening().members[1:])),
        opening(members=(Place(10.0, 20, replace(key, key=b"1" * 32)), *opening().members[1:])),
        *(window(Trained(*each)) for each in [(1, 2, OLDER, 1.0), (2, 2, OLDER, 1.0), (1, 3, OLDER, 1.0),
                                              (1, 2, HASH, 1.0), (1, 2, OLDER, 0.5)]),
    ]  # fmt: skip
    assert len({variant.context for variant in variants}) == len(variants)


def test_the_table_of_contribution_values_is_public() -> None:
    assert opening().weights == {name: 10.0 + n for n, name in enumerate(NAMES)}
    assert opening().most == 16.0


def test_a_digest_binds_everything_but_the_signature_and_the_boxes() -> None:
    upload, key = MESSAGES[2], MESSAGES[1]
    assert isinstance(upload, Upload)
    assert isinstance(key, SignedKey)
    changed = [{"context": b"1" * 32}, {"name": "h1"}, {"body": b"1" * 32}, {"commitments": (HASH, HASH, b"1" * 32)},
               {"roots": (HASH, HASH, b"1" * 32)}]  # fmt: skip
    assert len({upload.digest, *(replace(upload, **c).digest for c in changed)}) == 6  # type: ignore[arg-type]
    signed = [{"version": 4}, {"run": "r"}, {"name": "h1"}, {"key": b"1" * 32}]
    assert len({key.signed, *(replace(key, **c).signed for c in signed)}) == 5  # type: ignore[arg-type]
    vote, answer = MESSAGES[4], MESSAGES[8]
    assert isinstance(vote, Vote)
    assert isinstance(answer, Answer)
    assert len({vote.signed, replace(vote, statement=b"").signed, replace(vote, context=b"1" * 32).signed}) == 3
    assert answer.signed != replace(answer, rows=(b"", b"")).signed


# --- commitments ------------------------------------------------------------------------------


def test_released_are_the_own_seed_and_the_pairs_with_those_outside() -> None:
    """Of dealer 1 in a sum of {0, 1, 3} of 5: its own, and those with 2 and 4."""
    assert released(1, frozenset({0, 1, 3}), 5) == [1, 2, 4]


def test_a_row_gives_the_root_whichever_shares_are_open() -> None:
    """And no other root, if any share, the dealer or the member is another."""
    shares = [bytes([k]) * 32 for k in range(5)]
    roots = set()
    for opened in (frozenset[int](), frozenset({1}), frozenset({0, 2, 4}), frozenset(range(5))):
        made = row(HASH, 1, 2, shares, opened)
        assert [made[32 * k : 32 * k + 32] == shares[k] for k in range(5)] == [k in opened for k in range(5)]
        roots.add(root(HASH, 1, 2, made, opened))
    assert len(roots) == 1
    other = row(HASH, 1, 2, [*shares[:-1], HASH], frozenset())
    others = {root(HASH, 1, 2, other, frozenset()), root(HASH, 2, 2, row(HASH, 2, 2, shares, frozenset()), frozenset())}
    assert not others & roots


def test_both_learners_of_a_pair_commit_to_the_same_seed() -> None:
    assert seed_commitment(HASH, 1, 4, b"seed") == seed_commitment(HASH, 4, 1, b"seed")
    assert seed_commitment(HASH, 1, 4, b"seed") != seed_commitment(HASH, 1, 3, b"seed")
