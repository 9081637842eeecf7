"""The controller's part in masked rounds, message by message: what it takes from whom, and what a restart remembers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc")

from deployment import masked
from deployment.masked import EXAMPLES, LAYOUT, NAMES
from metis.core.canonical import digest
from metis.core.events import Budget, CohortFixed, CommunityStamp, LocalTask, RoundClosed, RoundFailed, SumOpened
from metis.core.ring import Ring
from metis.core.secure_sum import Opening, Pins, Request, Statement
from metis.deployment.controller.openings import MaskedRound
from metis.deployment.controller.state import State
from metis.deployment.controller.sums import Sums
from metis.deployment.security.identity import load_kit, signing_identity
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.models import payload_sha256
from metis.deployment.wire.secure import packed
from metis.errors import Refused
from metis.privacy.keys import Peers
from metis.privacy.member import Member
from metis.privacy.store import MemoryStore

KEY, STATEMENT, SHARES = pb.SecureSum.KEY, pb.SecureSum.STATEMENT, pb.SecureSum.SHARES
RING, SETTINGS, STEPS = Ring(32, len(NAMES), 4.0), digest("settings", "ours"), 7
MODEL = masked.initial_model()
SIZE = RING.nbytes(LAYOUT)


class Desk:
    """The real `Sums` on a real folder, and real members; jobs are done as they come."""

    def __init__(self, home: Path, state: State) -> None:
        self.home, self.state = home, state
        self.peers = Peers(load_kit(home / "ca" / "main").authority)
        pins = Pins(frozenset(NAMES))
        self.members = {
            name: Member(signing_identity(home / "ca" / name), self.peers, pins, state.run, MemoryStore())
            for name in NAMES
        }
        self.round = MaskedRound(
            2, payload_sha256(MODEL), {name: float(EXAMPLES[name]) for name in NAMES},
            {name: LocalTask(k, CommunityStamp(2, 10), Budget(STEPS)) for k, name in enumerate(NAMES)},
            RING, 3, 4, False, None, {}, {2: payload_sha256(MODEL)},
        )  # fmt: skip
        self.start()

    def start(self) -> None:
        """A process of its own, which knows what is in the folder."""
        self.asked: list[tuple[str, pb.SecureSum]] = []
        self.posted: list[Any] = []
        self.total = b""
        self.reports: list[str] = []
        self.sums = Sums(
            self.state, LAYOUT, RING.nbytes(LAYOUT), SETTINGS, self.peers, lambda kind, text: self.reports.append(text),
            lambda learner, message: self.asked.append((learner, message)), lambda learner: None, 10.0,
        )  # fmt: skip
        self.sums.post = self._post
        self.take()

    def _post(self, event: Any, content: memoryview | None) -> None:
        self.posted.append(event)
        self.total = self.total if content is None else bytes(content)

    def do(self, job: Callable[[], None]) -> None:
        job()
        out, self.sums._out = self.sums._out, []
        for call in out:
            call()

    def take(self, **changes: Any) -> None:
        """The federation has changed."""
        self.round = self.sums._round = replace(self.round, **changes)
        self.do(lambda: self.sums._take(self.round))

    def hear(self, learner: str, kind: Any, content: bytes, version: int = 2) -> None:
        self.do(lambda: self.sums._hear(learner, pb.SecureSum(kind=kind, version=version, content=content)))

    def questions(self, kind: Any) -> dict[str, bytes]:
        return {learner: message.content for learner, message in self.asked if message.kind == kind}

    # --- a round, step by step ------------------------------------------------------------------

    def open(self) -> Opening:
        """Keys come, and the members are fixed."""
        for name in NAMES:
            self.hear(name, KEY, self.members[name].key(2).encode())
        assert isinstance(self.posted[-1], CohortFixed)
        self.take(fixed=True)
        opening = Opening.decode(self.sums.opening_of(2) or b"")
        for name in NAMES:
            self.members[name].accept(
                opening, model=bytes.fromhex(payload_sha256(MODEL)), layout=LAYOUT, settings=SETTINGS
            )
        self.plain = RING.total(LAYOUT)
        return opening

    def content(self, opening: Opening, name: str) -> bytes:
        """What a member uploads."""
        local, loss = masked.train(name, 1, STEPS, MODEL)
        body = opening.ring.quantize(local, MODEL, opening.weights[name], opening.most, (loss, 0.0, 0.0)).body
        opening.ring.add(self.plain, body, LAYOUT)
        upload = self.members[name].mask(opening.context, body, LAYOUT)
        return body.tobytes() + packed(upload.encode())

    def hand_in(self, opening: Opening) -> None:
        blobs = {}
        for name in NAMES:
            content = self.content(opening, name)
            assert self.sums.problem(name, content) is None
            blobs[name] = self.state.put_blob([memoryview(content)])
        self.take(uploads=blobs, tasks={})

    def close(self, opening: Opening) -> dict[str, bytes]:
        """All hand in, and the round is closed; the question to each member."""
        self.hand_in(opening)
        self.take(closed=RoundClosed(2, NAMES, len(NAMES)))
        return self.questions(STATEMENT)

    def vote(self, *names: str) -> None:
        for name in names:
            self.hear(name, STATEMENT, self._vote(name))

    def _vote(self, name: str) -> bytes:
        return self.members[name].vote(Statement.decode(self.questions(STATEMENT)[name])).encode()

    def answer(self, *names: str) -> None:
        for name in names:
            self.hear(name, SHARES, self._answer(name))

    def _answer(self, name: str) -> bytes:
        return self.members[name].answer(Request.decode(self.questions(SHARES)[name])).encode()


@pytest.fixture
def desk(tmp_path: Path) -> Any:
    masked.make_kits(tmp_path)
    with State.open(tmp_path / "state", "process") as state:
        state.begin({"initial": state.put_blob([memoryview(MODEL.vector).cast("B")])})
        yield Desk(tmp_path, state)


def test_a_round_from_its_keys_to_its_sum(desk: Desk) -> None:
    """The plain sum comes out once, though another member answers; nothing is left when the next round begins."""
    opening = desk.open()
    assert set(desk.close(opening)) == set(NAMES)
    desk.vote("ann", "bob")
    assert not desk.questions(SHARES), "t have not voted"
    desk.vote("cyd")
    assert set(desk.questions(SHARES)) == set(NAMES)
    desk.answer("dan", "cyd")
    assert not desk.total
    desk.answer("bob")
    assert np.array_equal(np.frombuffer(desk.total, np.uint8), desk.plain)
    desk.answer("ann")
    assert [event for event in desk.posted if isinstance(event, SumOpened)] == [SumOpened(2, NAMES)]
    blobs = list(desk.round.uploads.values())
    desk.take(version=3, values={}, fixed=False, closed=None, uploads={})
    assert not list((desk.state.folder / "sums").iterdir())
    assert not any((desk.state.folder / "blobs" / blob).exists() for blob in blobs)


def _window(desk: Desk, trained: str, *, keys: bool = True) -> Opening | None:
    """The window of those that have trained, of four tasks of which two are filled; None if it does not begin."""
    desk.take(ring=Ring(32, 1000, 4.0), window=3, values=dict.fromkeys(NAMES, 1.0))
    for name in NAMES if keys else NAMES[:3]:
        desk.hear(name, KEY, desk.members[name].key(2).encode())
    for name in trained.split():
        number = desk.round.tasks[name].number
        message = pb.SecureSum(kind=pb.SecureSum.WINDOW, version=2, task=number)
        desk.do(partial(desk.sums._hear, name, message))
    if not desk.posted:
        return None
    desk.take(fixed=True)
    return Opening.decode(desk.questions(pb.SecureSum.WINDOW)["ann"])


def test_a_window_begins_with_the_first_that_have_trained(desk: Desk) -> None:
    """All others are there to agree on its sum; tasks wait for nothing."""
    assert _window(desk, "cyd ann") is None and desk.sums.opening_of(2) == b""
    opening = _window(desk, "dan bob")
    assert opening is not None and opening.handing_in == ("ann", "cyd", "dan") and opening.names == NAMES
    (fixed,) = desk.posted
    assert replace(fixed, waited=()) == CohortFixed(2, ("ann", "cyd", "dan"), (0, 2, 3)) and len(fixed.waited) == 3
    assert set(desk.questions(pb.SecureSum.WINDOW)) == set(NAMES)
    count = len(desk.asked)
    desk.take(uploads={"ann": "a"})
    assert len(desk.asked) == count, "each gets it once"
    desk.do(lambda: desk.sums._ask_again("bob"))
    assert desk.asked[-1][0] == "bob" and desk.asked[-1][1].kind == pb.SecureSum.WINDOW
    desk.start()  # a restart reads it again and sends it to everybody
    assert Opening.decode(desk.questions(pb.SecureSum.WINDOW)["dan"]) == opening


def test_a_window_of_whole_models_asks_the_others_for_theirs_again(desk: Desk) -> None:
    """All that have something fresh are in it; each of the others gets the number under which it hands in again."""
    desk.take(whole=True, latest={"ann": (7, 1.5), "bob": (1, 2.0), "dan": (9, 3.0)})
    opening = _window(desk, "cyd ann dan")
    assert opening is not None and opening.whole and opening.fresh == ("ann", "cyd", "dan")
    assert opening.again_by("bob") == 1 and opening.weights == {"ann": 1.0, "bob": 2.0, "cyd": 1.0, "dan": 1.0}
    (fixed,) = desk.posted
    assert replace(fixed, waited=()) == CohortFixed(2, NAMES, (0, 1, 2, 3))
    assert fixed.waited[1] == 0 and "bob" not in fixed.waits  # it trains
    assert {message.task for _, message in desk.asked if message.kind == pb.SecureSum.WINDOW} == {0}
    desk.take(resends={"bob": 12})
    desk.do(lambda: desk.sums._ask_again("bob"))
    assert desk.asked[-1][1].task == 12


def test_all_that_have_something_fresh_are_in_a_window_of_whole_models(desk: Desk) -> None:
    desk.take(whole=True)
    assert _window(desk, "dan cyd bob ann", keys=False) is None
    opening = _window(desk, "")
    assert opening is not None and opening.fresh == NAMES


def test_a_window_begins_with_fewer_if_nobody_else_can_come(desk: Desk) -> None:
    """And waits for the keys of all that train, but not for ever; too few keys end nothing."""
    assert _window(desk, "ann bob cyd", keys=False) is None
    desk.do(lambda: desk.sums._late(2))
    assert not desk.posted, "four members are the fewest"
    opening = _window(desk, "dan")
    assert opening is not None and opening.handing_in == ("ann", "bob", "cyd")


def test_a_key_is_taken_from_its_owner_only(desk: Desk) -> None:
    """Neither another's, nor one of another version, nor one that nobody signed."""
    key = desk.members["bob"].key(2)
    with pytest.raises(Refused, match="not its own for this round"):
        desk.hear("ann", KEY, key.encode())
    with pytest.raises(Refused, match="not its own for this round"):
        desk.hear("bob", KEY, desk.members["bob"].key(3).encode())
    with pytest.raises(Refused, match="the key of 'bob'"):
        desk.hear("bob", KEY, replace(key, key=bytes(32)).encode())
    desk.hear("bob", KEY, key.encode(), version=1)  # an answer that comes too late
    assert not desk.sums._keys


def test_too_few_keys_begin_no_round(desk: Desk) -> None:
    """When the time is up, and not before; tasks are offered only when the members are fixed."""
    for name in NAMES[:3]:
        desk.hear(name, KEY, desk.members[name].key(2).encode())
    assert not desk.posted and desk.sums.opening_of(2) is None
    desk.do(lambda: desk.sums._late(2))
    assert isinstance(desk.posted[-1], RoundFailed) and "3 learners gave a key" in desk.posted[-1].reason


def test_an_opening_goes_with_its_own_version_once_it_is_journaled(desk: Desk) -> None:
    """Before, a crash would leave a member with a cohort that nobody knows any more."""
    for name in NAMES:
        desk.hear(name, KEY, desk.members[name].key(2).encode())
    assert desk.sums.opening_of(2) is None
    desk.take(fixed=True)
    assert desk.sums.opening_of(2) is not None and desk.sums.opening_of(3) is None


def test_an_update_is_its_learners_own_for_this_round_and_whole(desk: Desk) -> None:
    """Each with its sentence; and of a length that a masked model can have."""
    assert desk.sums.problem("ann", b"") == "no masked round is open"
    opening = desk.open()
    content = desk.content(opening, "bob")
    assert desk.sums.problem("ann", content) == "it is signed by another learner"
    changed = bytes([content[0] ^ 1]) + content[1:]
    assert desk.sums.problem("bob", changed) == "its masked numbers are not those that it signed"
    assert "does not end as it should" in (desk.sums.problem("bob", content[:-4]) or "")
    assert desk.sums.problem("bob", content) is None
    assert desk.sums.allows(len(content)) and not desk.sums.allows(SIZE) and not desk.sums.allows(SIZE + (1 << 24) + 1)


def test_votes_and_shares_are_taken_from_their_owners_only(desk: Desk) -> None:
    """A colluder that sends on what others say to it, or that answers before it is asked, gains nothing."""
    desk.close(desk.open())
    desk.hear("dan", STATEMENT, desk._vote("ann"))
    assert not desk.sums._opener.votes  # type: ignore[union-attr]
    desk.vote("ann", "bob", "cyd")
    desk.hear("dan", SHARES, desk._answer("ann"))
    assert not desk.sums._opener.answers  # type: ignore[union-attr]


def test_a_restart_goes_on_with_the_same_opening_votes_and_answers(desk: Desk) -> None:
    """Whatever was heard is not asked again, whatever was said is said again; the sum has the same bits."""
    opening = desk.open()
    desk.start()
    assert desk.sums.opening_of(2) == opening.encode()
    first = desk.close(opening)
    desk.vote("ann", "bob")
    desk.start()
    assert desk.questions(STATEMENT) == {name: first[name] for name in ("cyd", "dan")}
    desk.vote("cyd")
    desk.answer("ann", "bob")
    desk.start()
    assert set(desk.questions(SHARES)) == {"cyd", "dan"} and not desk.questions(STATEMENT)
    desk.answer("dan")
    assert np.array_equal(np.frombuffer(desk.total, np.uint8), desk.plain)


def test_who_is_in_the_sum_never_changes_once_it_was_said(desk: Desk) -> None:
    """A file that is damaged meanwhile fails the round: no member gets a second statement."""
    first = desk.close(desk.open())
    assert set(first) == set(NAMES)
    _flip(desk, "cyd", SIZE + 40)
    desk.start()
    assert not desk.questions(STATEMENT)
    assert isinstance(desk.posted[-1], RoundFailed) and any("'cyd' on this disk is damaged" in r for r in desk.reports)


def test_a_file_that_is_damaged_before_the_statement_is_left_out(desk: Desk) -> None:
    """Also in what nobody has signed, the sealed shares; the others' sum is opened."""
    desk.hand_in(desk.open())
    _flip(desk, "cyd", desk.state.blob_path(desk.round.uploads["cyd"]).stat().st_size - 80)
    desk.start()
    desk.take(closed=RoundClosed(2, NAMES, len(NAMES)))
    statement = Statement.decode(desk.questions(STATEMENT)["ann"])
    assert statement.names == ("ann", "bob", "dan")


def test_numbers_that_are_damaged_on_the_disk_are_not_summed(desk: Desk) -> None:
    """Between the statement and the shares: the round fails."""
    desk.close(desk.open())
    desk.vote("ann", "bob", "cyd")
    _flip(desk, "bob", 100)
    desk.answer("ann", "bob", "cyd")
    assert not desk.total
    assert isinstance(desk.posted[-1], RoundFailed) and "the stored body of bob" in desk.posted[-1].reason


def test_a_sum_says_once_who_must_come_back_before_it_is_opened(desk: Desk) -> None:
    """Three of four open it: with two away it cannot be, unless these have voted and answered already."""
    desk.close(desk.open())
    desk.take(away=frozenset({"dan"}))
    desk.vote("ann")
    desk.take(away=frozenset({"ann", "dan"}))
    assert not [text for text in desk.reports if "cannot be opened" in text]
    for _ in range(2):
        desk.take(away=frozenset({"cyd", "dan"}))
        desk.take(away=frozenset({"cyd", "dan", "eve"}))
    said = [text for text in desk.reports if "cannot be opened" in text]
    assert said == ["the sum on community model 2 cannot be opened before some of these are back: 'cyd', 'dan'"]
    desk.take(away=frozenset())
    desk.vote("bob", "cyd")
    desk.answer("bob", "cyd", "dan")
    assert desk.total


def test_a_window_says_once_whose_keys_it_waits_for(desk: Desk) -> None:
    """A learner that is there and gives no key: a round would begin again, a window waits."""
    desk.take(window=3)
    for name in NAMES[:3]:
        desk.hear(name, KEY, desk.members[name].key(2).encode())
    assert not desk.reports
    for _ in range(2):
        desk.do(lambda: desk.sums._late(2))
    assert desk.reports == ["the window on community model 2 waits for the keys of 'dan'"] and not desk.posted


def _flip(desk: Desk, learner: str, byte: int) -> None:
    path = desk.state.blob_path(desk.round.uploads[learner])
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)
