"""The controller in the secure sum: collects uploads, votes and answers of one context, and opens the sum.

    opener = Opener(opening, peers)
    opener.take(upload); opener.enough                -> whether the barrier may open
    opener.statement()                                -> Statement, to be journaled before anybody is asked
    opener.close(statement); opener.vote(vote)        -> and `opener.request(member)` once `opener.agreed`
    opener.answer(answer); opener.openable            -> then `opener.open(bodies, layout)`: the sum, to be decoded by
                                                         `opening.ring.mean`
    opener.liars                                      -> who was caught, and how

An opener is a fold over messages: fed with the stored ones in any order that respects these steps, a new one after a
crash is in the same state and opens the same bits. It keeps no secret.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, islice

from metis.core.canonical import HASH
from metis.core.model import Layout
from metis.core.ring import Body
from metis.core.secure_sum import (
    Abandonment,
    Answer,
    Opening,
    Request,
    Statement,
    Upload,
    Vote,
    check_statement,
    released,
    root,
    seed_commitment,
)
from metis.core.shamir import P, combine, factors, raw
from metis.errors import Refused
from metis.privacy.keys import Peers, check_signature
from metis.privacy.masks import unmasked_sum

MOST_SUBSETS = 5000  # of answers, tried for a dealer whose shares do not fit together


class Opener:
    """One context."""

    def __init__(self, opening: Opening, peers: Peers) -> None:
        self.opening, self.context = opening, opening.context
        self._keys = peers.keys(opening)
        self._index = {name: index for index, name in enumerate(opening.names)}
        self.uploads: dict[str, Upload] = {}
        self.closed: Statement | None = None
        self.votes: dict[str, Vote] = {}
        self.refusals: dict[str, Vote] = {}
        self.answers: dict[str, Answer] = {}
        self.liars: dict[str, str] = {}
        self._accusations: set[tuple[str, str]] = set()  # member, dealer

    # --- uploads ----------------------------------------------------------------------------------

    def take(self, upload: Upload) -> None:
        """Take an upload in; Refused if it comes late, is not signed, or is another one than before."""
        self._check_author(upload.name, upload.context, upload.digest, upload.signature, "upload")
        if upload.name not in self.opening.handing_in:
            raise Refused(f"{upload.name} hands in nothing to this window")
        if len(upload.commitments) != len(self._index):
            raise Refused(f"the upload of {upload.name} is for a cohort of {len(upload.commitments)}")
        known = self.uploads.setdefault(upload.name, upload) if self.closed is None else self.uploads.get(upload.name)
        if known is None or known.digest != upload.digest:
            raise Refused(f"the upload of {upload.name} came late, or is not its first one")

    @property
    def enough(self) -> bool:
        """Whether the sum has the fewest learners that it needs."""
        return len(set(self._consistent()) & set(self.opening.fresh)) >= self.opening.least

    def _consistent(self) -> list[str]:
        """Uploads without those that disagree with others about the seed of their pair."""
        edges = [
            (one, other)
            for one, other in combinations(sorted(self.uploads), 2)
            if self.uploads[one].commitments[self._index[other]] != self.uploads[other].commitments[self._index[one]]
        ]
        out = blamed(edges)
        return [name for name in sorted(self.uploads) if name not in out]

    def statement(self) -> Statement:
        """The statement about all uploads so far."""
        if self.closed is not None:
            return self.closed
        names = self._consistent()
        for name in sorted(set(self.uploads) - set(names)):
            self.liars[name] = "its commitments to the seeds of pairs are not those of the others"
        statement = Statement(self.context, tuple(names), tuple(self.uploads[name].digest for name in names))
        check_statement(self.opening, statement)
        return statement

    def close(self, statement: Statement) -> None:
        """From now on nothing changes who is in the sum."""
        check_statement(self.opening, statement)
        held = tuple(self.uploads[name].digest for name in statement.names if name in self.uploads)
        if held != statement.digests or self.closed not in (None, statement):
            raise Refused("this sum was closed otherwise, or lacks an upload that is stored")
        self.closed = statement

    # --- votes ------------------------------------------------------------------------------------

    def vote(self, vote: Vote) -> None:
        """Take in a vote for the statement, or a refusal."""
        self._check_author(vote.name, vote.context, vote.signed, vote.signature, "vote")
        if not vote.statement:
            self.refusals[vote.name] = vote
        elif vote.statement == self._statement().digest:
            self.votes[vote.name] = vote
        else:
            raise Refused(f"the vote of {vote.name} is for another statement")

    @property
    def agreed(self) -> bool:
        """Whether shares may be asked for."""
        return len(self.votes) >= self.opening.threshold

    def abandonment(self) -> Abandonment | None:
        """What lets the version have another context; None while there are fewer than t refusals."""
        if len(self.refusals) < self.opening.threshold:
            return None
        return Abandonment(self.context, tuple(self.refusals[name] for name in sorted(self.refusals)))

    def request(self, member: str) -> Request:
        """What a member needs in order to answer."""
        if not self.agreed:
            raise Refused(f"{len(self.votes)} of {self.opening.threshold} members have voted")
        if member not in self._index:
            raise Refused(f"{member} is not in the cohort")
        statement, index = self._statement(), self._index[member]
        votes = tuple(self.votes[name] for name in sorted(self.votes)[: self.opening.threshold])
        uploads = [self.uploads[name] for name in statement.names]
        boxes, roots = tuple(u.boxes[index] for u in uploads), tuple(u.roots[index] for u in uploads)
        return Request(statement, votes, boxes, roots)

    # --- answers ----------------------------------------------------------------------------------

    def answer(self, answer: Answer) -> None:
        """Take in a member's shares; wrong ones are left out and the member is named."""
        statement, count = self._statement(), len(self._index)
        self._check_author(answer.name, answer.context, answer.signed, answer.signature, "answer")
        if answer.statement != statement.digest or len(answer.rows) != len(statement.names):
            raise Refused(f"the answer of {answer.name} is to another statement")
        member = self._index[answer.name]
        for name, given in zip(statement.names, answer.rows, strict=True):
            if not given:
                self._accusations.add((answer.name, name))
                continue
            dealer = self._index[name]
            opened = frozenset(self._released(dealer))
            committed = self.uploads[name].roots[member]
            if len(given) != HASH * count or root(self.context, dealer, member, given, opened) != committed:
                self.liars[answer.name] = f"its shares of {name} are not those that {name} committed to"
                return
        self.answers.setdefault(answer.name, answer)

    @property
    def openable(self) -> bool:
        """Whether every seed that the sum needs can be put together."""
        try:
            return self._seeds() is not None
        except Refused:
            return False

    def open(self, bodies: Mapping[str, Body], layout: Layout) -> Body:
        """The sum of the masked bodies, without the masks; Refused if it cannot be opened, with the reason."""
        statement = self._statement()
        for name in statement.names:
            if name not in bodies or hashlib.sha256(bodies[name].data).digest() != self.uploads[name].body:
                raise Refused(f"the stored body of {name} is not the one that it sent")
        plus, minus = self._seeds()
        chosen = {name: bodies[name] for name in statement.names}
        return unmasked_sum(chosen, self.opening.ring.sections(layout), plus, minus)

    def _seeds(self) -> tuple[list[bytes], list[bytes]]:
        """The masks to add and to subtract."""
        self._name_liars()
        plus: list[bytes] = []
        minus: list[bytes] = []
        for name in self._statement().names:
            dealer = self._index[name]
            for k, seed in self._dealt(name, dealer):
                # The dealer added the masks of itself and of those after it, and subtracted those before.
                (minus if k >= dealer else plus).append(seed)
        return plus, minus

    def _dealt(self, name: str, dealer: int) -> Iterator[tuple[int, bytes]]:
        """The released seeds of a dealer, from any t members whose shares give what it committed to."""
        position, count = self._statement().names.index(name), self.opening.threshold
        rows = {
            self._index[member] + 1: answer.rows[position]
            for member, answer in sorted(self.answers.items())
            if answer.rows[position]
        }
        if len(rows) < count:
            raise Refused(f"{len(rows)} of {count} members have answered with shares of {name}")
        secrets = self._released(dealer)
        for members in islice(combinations(sorted(rows), count), MOST_SUBSETS):
            weights = factors(members)
            seeds = [(k, self._combined(members, weights, rows, k)) for k in secrets]
            if all(
                seed_commitment(self.context, dealer, k, seed) == self.uploads[name].commitments[k] for k, seed in seeds
            ):
                return iter(seeds)
            # All shares are those that the dealer signed: it dealt shares that do not lie on one polynomial.
            self.liars[name] = "the shares that it dealt do not give the seeds that it committed to"
        raise Refused(f"the sum cannot be opened: {name} dealt shares that do not give its seeds")

    @staticmethod
    def _combined(members: Iterable[int], weights: Iterable[int], rows: Mapping[int, bytes], k: int) -> bytes:
        shares = (int.from_bytes(rows[m][HASH * k : HASH * (k + 1)], "big") % P for m in members)
        return raw(combine(shares, weights))

    def _name_liars(self) -> None:
        for name in blamed(self._accusations):
            self.liars.setdefault(name, "its boxes are said to be wrong, or it says so of too many")

    # --- checks -----------------------------------------------------------------------------------

    def _released(self, dealer: int) -> list[int]:
        summed = frozenset(self._index[name] for name in self._statement().names)
        return released(dealer, summed, len(self._index))

    def _statement(self) -> Statement:
        if self.closed is None:
            raise Refused("the round is still open")
        return self.closed

    def _check_author(self, name: str, context: bytes, signed: bytes, signature: bytes, what: str) -> None:
        if context != self.context:
            raise Refused(f"the {what} of {name} is for another context")
        if name not in self._keys:
            raise Refused(f"the {what} is of {name}, which is not in the cohort")
        check_signature(self._keys[name], signed, signature, f"the {what} of {name}")


def blamed(disputes: Iterable[tuple[str, str]]) -> set[str]:
    """Of each two that contradict each other, the one that contradicts more; both if it is a tie."""
    edges = {tuple(sorted(pair)) for pair in disputes}
    degrees = Counter(name for edge in edges for name in edge)
    return {name for edge in edges for name in edge if degrees[name] == max(degrees[end] for end in edge)}
