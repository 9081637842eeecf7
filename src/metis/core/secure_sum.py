"""The secure sum's public part: its messages, its thresholds, and what a site accepts.

A controller learns the sum of a cohort's bodies (`ring.py`) and nothing else. One round, or one window of an
asynchronous protocol, goes like this; `metis.privacy` does the cryptography:

    learner                                          controller
    SignedKey of (run, version)  ------------------>
                                 <------------------ Opening, with everybody's keys; its hash is the context
    Upload and masked body       ------------------>
                                 <------------------ Statement: who is in the sum, with the digests of their uploads
    Vote for that statement      ------------------>
                                 <------------------ Request: t votes for one statement, and the boxes for this member
    Answer: shares of the masks  ------------------>  opens the sum

A member votes once in a context: for one statement, or against all of them (a refusal). t votes for a statement are
needed to open it, t refusals to abandon it, and since c < 2t - N, never both.

Indices: members are sorted by name. Secret k of dealer i is its own mask's seed if k = i, and else the seed of the mask
that it shares with member k. Released are, of each dealer in the sum, its own seed and those shared with members that
are not in the sum.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from metis.core.canonical import HASH, Message, check_hash, digest
from metis.core.ring import MOST_MEMBERS, Ring
from metis.errors import ArgumentError, Refused

PROTOCOL = 1
FEWEST = 3  # honest learners in any sum
MOST_STEPS = 10**6  # of a task, also of one without a number of them
WIDER = 1024.0  # numbers themselves, not how far they moved in a round, fit into so many clips


def threshold(members: int) -> int:
    """t: how many members must agree to open a sum."""
    return 2 * members // 3 + 1


def max_colluders(members: int) -> int:
    """The largest c for a cohort: two statements cannot both get t votes, and c + 3 learners are no more than t."""
    t = threshold(members)
    return min(2 * t - members - 1, t - FEWEST)


def min_learners(colluders: int, extra_vectors: int = 0) -> int:
    """The fewest learners in a sum: each further vector of the same cohort costs a degree of freedom."""
    return colluders + max(FEWEST, extra_vectors + 2)


# --- messages ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SignedKey(Message):
    """A learner's key of one round, signed by the key of its certificate."""

    name: str
    run: str
    version: int
    key: bytes
    certificate: bytes  # DER; empty where the public key is pinned
    signature: bytes

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= 64 or not 1 <= len(self.run) <= 200 or self.version < 0:
            raise Refused("a key has a learner's name, a run and a version that is not negative")
        check_hash("the key of a round", self.key)
        check_short("a certificate", self.certificate, 1 << 14)
        check_short("a signature", self.signature)

    @property
    def signed(self) -> bytes:
        return digest("key", PROTOCOL, self.run, self.version, self.name, self.key)


@dataclass(frozen=True)
class Trained(Message):
    """What a member hands in to a window: which task it has trained, and from what."""

    task: int
    version: int
    model: bytes  # SHA-256 of that community model's bytes
    rate: float  # factor of the learning rate

    def __post_init__(self) -> None:
        check_hash("a model of a window", self.model)
        if self.task < 0 or self.version < 0:
            raise Refused("what is handed in to a window has a task and a version that are not negative")


@dataclass(frozen=True)
class Place(Message):
    """A member of a cohort: its contribution value and number of steps, which are public, and its key.

    In a round everybody hands in what it trained from the model of the opening. A window says of each member what it
    hands in: something fresh, or again the local model of a task that was in a window before. Who hands in nothing is
    there to agree on the sum.
    """

    weight: float
    steps: int
    key: SignedKey
    trained: tuple[Trained, ...] = ()  # one or none: what no window has had yet
    again: tuple[int, ...] = ()  # one or none: a task whose local model an earlier window had

    @property
    def name(self) -> str:
        return self.key.name


@dataclass(frozen=True)
class Opening(Message):
    """What all members of a round must see alike; its hash, the context, is part of every mask, box and signature.

    In a window of an asynchronous protocol `version` counts windows, and members train from models of their own.
    """

    protocol: int
    run: str
    version: int
    attempt: int  # grows if a version's earlier context was abandoned
    model: bytes  # SHA-256 of the model bytes that are trained on
    layout: bytes  # its fingerprint
    settings: bytes  # hash of solver, layers and everything else that training depends on
    rate: float  # factor of the learning rate
    extra_vectors: int  # control variates: 1
    ring: Ring
    threshold: int
    least: int
    members: tuple[Place, ...]
    whole: int = 0  # 1 in a window of whole local models, 0 where differences from what was trained on are summed

    def __post_init__(self) -> None:
        check_hash("a hash of an opening", self.model, self.layout, self.settings)
        names = self.names
        if not FEWEST <= len(names) <= MOST_MEMBERS or list(names) != sorted(set(names)):
            raise Refused(f"a cohort has {FEWEST} to {MOST_MEMBERS} members, sorted by name, each once")
        if any(len(place.trained) + len(place.again) > 1 for place in self.members):
            raise Refused("a member hands in one update to a window")
        again = any(place.again for place in self.members)
        if self.whole not in (0, 1) or (self.whole and not self.windowed) or (again and not self.whole):
            raise Refused("only windows sum whole local models, and only these can be handed in again")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(place.name for place in self.members)

    @cached_property
    def context(self) -> bytes:
        return hashlib.sha256(self.encode()).digest()

    @property
    def weights(self) -> dict[str, float]:
        return {place.name: place.weight for place in self.members}

    @property
    def most(self) -> float:
        """What is worth 1 in the ring: the largest contribution value, but 1 for differences in windows."""
        if self.windowed and not self.whole:
            return 1.0
        handing_in = set(self.handing_in)
        return max(place.weight for place in self.members if place.name in handing_in)

    @property
    def windowed(self) -> bool:
        """Whether it is of a window, to which only some members hand in something."""
        return any(place.trained or place.again for place in self.members)

    @property
    def handing_in(self) -> tuple[str, ...]:
        """Whose updates may be in the sum."""
        if not self.windowed:
            return self.names
        return tuple(place.name for place in self.members if place.trained or place.again)

    @property
    def fresh(self) -> tuple[str, ...]:
        """Whose updates no other sum has: in a round everybody's."""
        return tuple(place.name for place in self.members if place.trained) if self.windowed else self.names

    def trained_by(self, name: str) -> Trained | None:
        """What this member hands in to a window; None if it hands in nothing, or in a round."""
        return next((place.trained[0] for place in self.members if place.name == name and place.trained), None)

    def again_by(self, name: str) -> int | None:
        """The task whose local model this member hands in again; None if it does not."""
        return next((place.again[0] for place in self.members if place.name == name and place.again), None)

    def check_models(self, before: Opening | None = None) -> None:
        """Refuse a window in which, or since the one before, a version has two models."""
        known = {} if before is None else dict(before._models)
        for version, model in self._models:
            if known.setdefault(version, model) != model:
                raise Refused(f"community model {version} is not the same for all members of this window")

    @property
    def _models(self) -> list[tuple[int, bytes]]:
        trained = [place.trained[0] for place in self.members if place.trained]
        return [(self.version, self.model), *((each.version, each.model) for each in trained)]


@dataclass(frozen=True)
class Upload(Message):
    """What comes with a masked body: commitments to the seeds, to each member's shares, and the sealed shares."""

    context: bytes
    name: str
    body: bytes  # SHA-256 of the masked body
    commitments: tuple[bytes, ...]  # of secret k
    roots: tuple[bytes, ...]  # of the shares of member m
    boxes: tuple[bytes, ...]  # for member m; empty for the learner itself
    signature: bytes

    def __post_init__(self) -> None:
        check_hash("a hash of an upload", self.context, self.body, *self.commitments, *self.roots)
        check_short("a signature", self.signature)
        count = len(self.commitments)
        if not len(self.roots) == len(self.boxes) == count <= MOST_MEMBERS:
            raise Refused("an upload has a commitment, a root and a box for each member")
        for box in self.boxes:
            check_short("a box", box, HASH * count + 28)

    @cached_property
    def digest(self) -> bytes:
        """Everything but the boxes, which are sealed under it."""
        return digest("upload", PROTOCOL, self.context, self.name, self.body, self.commitments, self.roots)


@dataclass(frozen=True)
class Statement(Message):
    """Who is in the sum, with the digests of their uploads."""

    context: bytes
    names: tuple[str, ...]
    digests: tuple[bytes, ...]

    def __post_init__(self) -> None:
        check_hash("a hash of a statement", self.context, *self.digests)
        if list(self.names) != sorted(set(self.names)) or len(self.names) != len(self.digests):
            raise Refused("a statement has learners sorted by name, each once, and a digest for each")

    @cached_property
    def digest(self) -> bytes:
        return digest("statement", PROTOCOL, self.context, self.names, self.digests)


@dataclass(frozen=True)
class Vote(Message):
    """A member's only vote in a context: for a statement, by its digest, or against all of them if it is empty."""

    context: bytes
    name: str
    statement: bytes
    signature: bytes

    def __post_init__(self) -> None:
        check_hash("the context of a vote", self.context)
        if self.statement:
            check_hash("the statement of a vote", self.statement)
        check_short("a signature", self.signature)

    @property
    def signed(self) -> bytes:
        return digest("vote", PROTOCOL, self.context, self.name, self.statement)


@dataclass(frozen=True)
class Abandonment(Message):
    """t refusals of one context."""

    context: bytes
    votes: tuple[Vote, ...]


@dataclass(frozen=True)
class Request(Message):
    """Asks a member for its shares; boxes and roots are in the order of the statement."""

    statement: Statement
    votes: tuple[Vote, ...]
    boxes: tuple[bytes, ...]
    roots: tuple[bytes, ...]

    def __post_init__(self) -> None:
        check_hash("a root of a request", *self.roots)
        if not len(self.boxes) == len(self.roots) == len(self.statement.names):
            raise Refused("a request has a box and a root for each learner in the sum")


@dataclass(frozen=True)
class Answer(Message):
    """A member's shares: for each learner in the sum a row of N shares, or hashes of those that stay secret.

    An empty row says that the box of that learner did not hold what it had committed to.
    """

    context: bytes
    name: str
    statement: bytes
    rows: tuple[bytes, ...]
    signature: bytes

    def __post_init__(self) -> None:
        check_hash("a hash of an answer", self.context, self.statement)
        check_short("a signature", self.signature)
        for row in self.rows:
            check_short("a row of an answer", row, HASH * MOST_MEMBERS)

    @property
    def signed(self) -> bytes:
        return digest("answer", PROTOCOL, self.context, self.name, self.statement, self.rows)


def check_short(what: str, data: bytes, most: int = 1024) -> None:
    """Refuse what is longer than it can be."""
    if len(data) > most:
        raise Refused(f"{what} has {len(data)} bytes; at most {most} are allowed")


# --- commitments ------------------------------------------------------------------------------


def seed_commitment(context: bytes, one: int, other: int, seed: bytes) -> bytes:
    """Hides a seed, which is uniform; both learners of a pair compute the same."""
    return digest("seed", context, min(one, other), max(one, other), seed)


def released(dealer: int, summed: frozenset[int], members: int) -> list[int]:
    """Which secrets of a dealer open a sum of these members: its own, and those it shares with members outside."""
    return [k for k in range(members) if k == dealer or k not in summed]


def row(context: bytes, dealer: int, member: int, shares: list[bytes], open_: frozenset[int]) -> bytes:
    """A member's shares of a dealer's secrets, with hashes in place of those that are not opened."""
    start = _leaf(context, dealer, member)
    return b"".join(share if k in open_ else _hash(start, k, share) for k, share in enumerate(shares))


def root(context: bytes, dealer: int, member: int, row_: bytes, open_: frozenset[int]) -> bytes:
    """What a dealer commits to for a member, computed from any row of it."""
    start, whole = _leaf(context, dealer, member), hashlib.sha256(b"metis root")
    for k in range(len(row_) // HASH):
        part = row_[HASH * k : HASH * (k + 1)]
        whole.update(_hash(start, k, part) if k in open_ else part)
    return whole.digest()


def _leaf(context: bytes, dealer: int, member: int) -> bytes:
    return b"metis share" + context + dealer.to_bytes(4, "big") + member.to_bytes(4, "big")


def _hash(start: bytes, k: int, share: bytes) -> bytes:
    return hashlib.sha256(start + k.to_bytes(4, "big") + share).digest()


# --- what a site accepts ----------------------------------------------------------------------


@dataclass(frozen=True)
class Pins:
    """What a site has in its own file and never takes from the controller."""

    peers: frozenset[str]  # with the site itself
    colluders: int = 0  # c: how many members may work together with the controller
    max_absent: int | None = None  # pinned peers that a cohort may lack; N - t if not given
    bits: tuple[int, ...] = (16, 32, 64)
    rates: tuple[float, float] = (1e-3, 1e3)
    steps: tuple[int, int] = (1, MOST_STEPS)
    clips: tuple[float, float] = (1e-4, 1e4)
    max_ratio: float = 1000.0  # of contribution values, the largest over the smallest
    windows: bool = False  # whether members may hand in what they trained from different models
    max_rate_ratio: float = 10.0  # of a window's factors of the learning rate, the largest over the smallest

    def __post_init__(self) -> None:
        most = max_colluders(len(self.peers)) if len(self.peers) >= FEWEST else -1
        if not 0 <= self.colluders <= most:
            raise ArgumentError(
                f"{self.colluders} colluders cannot be tolerated among {len(self.peers)} peers; a secure sum needs "
                f"{FEWEST} peers or more, and {max(most, 0)} colluders or fewer",
                "colluders",
            )

    def check(self, opening: Opening) -> None:
        """Refuse an opening whose sum could show one learner's model."""
        names, count = opening.names, len(opening.names)
        if unknown := sorted(set(names) - self.peers):
            raise Refused(f"{unknown[0]} is not among the peers that this site pins", "peers")
        allowed = len(self.peers) - threshold(len(self.peers)) if self.max_absent is None else self.max_absent
        if len(self.peers) - count > allowed:
            lacking = len(self.peers) - count
            raise Refused(f"the cohort lacks {lacking} of the pinned peers; {allowed} may be absent", "peers")
        if opening.threshold != threshold(count):
            raise Refused(f"the threshold of {count} members is {threshold(count)}, not {opening.threshold}")
        if self.colluders > max_colluders(count):
            text = f"{count} members tolerate {max_colluders(count)} colluders; this site pins {self.colluders}"
            raise Refused(text, "colluders")
        fewest = min_learners(self.colluders, opening.extra_vectors)
        most = len(opening.fresh)
        if not 0 <= opening.extra_vectors <= 8 or not fewest <= opening.least <= most:
            raise Refused(f"a sum here needs {fewest} to {most} learners, not {opening.least}")
        # Windows have one ring, however many are there.
        fits = (
            opening.ring.learners == MOST_MEMBERS
            if opening.windowed
            else count <= opening.ring.learners <= len(self.peers)
        )
        if opening.ring.bits not in self.bits or not fits:
            raise Refused(
                f"a ring of {opening.ring.bits} bits for {opening.ring.learners} learners does not fit {count} members"
            )
        self._check_table(opening)
        if opening.windowed:
            self._check_window(opening)

    def _check_window(self, opening: Opening) -> None:
        if not self.windows:
            text = "this site takes part in rounds only, whose members train from the same model"
            raise Refused(text, "masked_windows")
        opening.check_models()
        trained = [place.trained[0] for place in opening.members if place.trained]
        for each in trained:
            _within("the factor of the learning rate", each.rate, self.rates)
            if each.version > opening.version:
                raise Refused(f"community model {each.version} is later than the window on {opening.version}")
        # All but one could be kept from moving.
        rates = [each.rate for each in trained]
        if max(rates) > self.max_rate_ratio * min(rates):
            raise Refused(
                f"the factors of the learning rate reach from {min(rates):g} to {max(rates):g}; this site pins a ratio "
                f"of {self.max_rate_ratio:g} at most"
            )

    def _check_table(self, opening: Opening) -> None:
        wider = WIDER if opening.whole else 1.0
        for clip in (opening.ring.clip / wider, opening.ring.control_clip):
            _within("the clip", clip, self.clips)
        _within("the factor of the learning rate", opening.rate, self.rates)
        for place in opening.members:
            _within(f"the steps of {place.name}", place.steps, self.steps)
            if not (math.isfinite(place.weight) and place.weight > 0):
                raise Refused(f"the contribution value of {place.name} is not a positive number")
        # A weight that dwarfs the others makes the sum one learner's, and rounds theirs to zero.
        smallest = min(place.weight for place in opening.members)
        largest = max(place.weight for place in opening.members)
        if largest > self.max_ratio * smallest:
            raise Refused(
                f"the contribution values reach from {smallest:g} to {largest:g}; this site pins a ratio of "
                f"{self.max_ratio:g} at most"
            )


def _within(what: str, value: float, limits: tuple[float, float]) -> None:
    if not limits[0] <= value <= limits[1]:
        raise Refused(f"{what} is {value:g}; this site pins {limits[0]:g} to {limits[1]:g}")


def check_expected(opening: Opening, expected: Mapping[str, object]) -> None:
    """Refuse an opening whose fields are not those that the learner computed itself."""
    for name, value in {"protocol": PROTOCOL, **expected}.items():
        if getattr(opening, name) != value:
            raise Refused(f"the {name} of the opening is not the one of this learner's task")


def check_statement(opening: Opening, statement: Statement) -> None:
    """Refuse a statement that is not about a large enough part of this cohort."""
    if statement.context != opening.context:
        raise Refused("the statement is about another context")
    if not set(statement.names) <= set(opening.handing_in):
        raise Refused("the statement names learners that are not in the cohort")
    fresh = len(set(statement.names) & set(opening.fresh))
    if fresh < opening.least:
        what = "learners with something fresh" if opening.whole else "learners"
        raise Refused(f"a sum of {fresh} {what} is refused; {opening.least} are the fewest")
