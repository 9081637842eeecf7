"""A learner in the secure sum: checks an opening, masks once, votes once, and answers only what t members agreed on.

    member = Member(identity, peers, pins, run, store)
    member.key(version)                                -> SignedKey, for the controller
    member.accept(opening, model=..., ...)             -> context; Refused if the sum could show one learner's model
    member.mask(context, body, layout)                 -> Upload; the body is masked in place and durable
    member.upload(context)                             -> the same Upload and body after a crash, or None
    member.vote(statement), member.refuse(context)     -> Vote; one of the two in a context, for ever
    member.answer(request)                             -> Answer
    member.erase()                                     at the farewell and after a time-out

Everything that must not happen twice is in the store before its result is returned, so that a crash at any instruction
leads to the same bytes again. The version of a run never goes back, also after `erase`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from metis.core.canonical import HASH, Message, digest
from metis.core.model import Layout
from metis.core.ring import Body
from metis.core.secure_sum import (
    Abandonment,
    Answer,
    Opening,
    Pins,
    Request,
    SignedKey,
    Statement,
    Upload,
    Vote,
    check_expected,
    check_statement,
    released,
    root,
    row,
    seed_commitment,
)
from metis.core.shamir import number, raw, split
from metis.errors import Refused
from metis.privacy.keys import (
    Identity,
    Peers,
    PublicKey,
    Random,
    agree,
    check_signature,
    new_key,
    pair_key,
    seal,
    unseal,
)
from metis.privacy.masks import mask
from metis.privacy.store import Store
from metis.system import random_bytes

MOST_KEYS = 8  # versions ahead


@dataclass(frozen=True)
class _Key(Message):
    private: bytes
    public: SignedKey


@dataclass(frozen=True)
class _Round(Message):
    """All of a context that outlives a crash; what has not happened yet is empty."""

    opening: Opening
    upload: bytes = b""
    own_shares: bytes = b""
    vote: bytes = b""


@dataclass(frozen=True)
class _Seen(Message):
    """The latest task of a learner, this one or another, that a window which this member accepted called fresh."""

    name: str
    task: int


@dataclass(frozen=True)
class _State(Message):
    version: int = -1  # the largest that was accepted
    keys: tuple[_Key, ...] = ()
    rounds: tuple[_Round, ...] = ()  # of that version
    seen: tuple[_Seen, ...] = ()


class Member:
    """One learner's side of one run."""

    def __init__(
        self, identity: Identity, peers: Peers, pins: Pins, run: str, store: Store, random: Random = random_bytes
    ) -> None:
        self.name, self._identity, self._peers, self._pins = identity.name, identity, peers, pins
        self._run, self._store, self._random = run, store, random
        self._name = f"secure-sum-{digest('run', run).hex()[:16]}"
        self._body_name = f"{self._name}-body"  # one is enough: the next is written when no other is needed any more
        stored = store.read(self._name)
        self._state = _State() if stored is None else _State.decode(stored)
        self._verified: dict[bytes, dict[str, PublicKey]] = {}  # by context
        if not any(round_.upload for round_ in self._state.rounds):
            store.delete(self._body_name)  # a crash came between

    def key(self, version: int) -> SignedKey:
        """This learner's key for a version; the same until it is erased."""
        for held in self._state.keys:
            if held.public.version == version:
                return held.public
        if version < self._state.version or version < 0:
            raise Refused(f"version {version} has passed; {self._state.version} is the latest of this learner")
        if len(self._state.keys) >= MOST_KEYS:
            raise Refused(f"{MOST_KEYS} keys for later versions are made already")
        made = _Key(*new_key(self._identity, self._run, version, self._random))
        self._save(replace(self._state, keys=(*self._state.keys, made)))
        return made.public

    # --- accepting an opening ---------------------------------------------------------------------

    def accept(
        self,
        opening: Opening,
        *,
        model: bytes | None,
        layout: Layout,
        settings: bytes,
        extra_vectors: int = 0,
        abandoned: Sequence[Abandonment] = (),
    ) -> bytes:
        """Check everything that this learner will trust, and remember it; the context.

        `model` is the SHA-256 of the bytes that this learner trains on, `settings` the hash that it computes itself.
        In a window it is None: what each trained from is in the table, and `trained_by` is for the caller to compare.
        """
        expected: dict[str, object] = {
            "layout": bytes.fromhex(layout.fingerprint),
            "settings": settings,
            "run": self._run,
        }
        if not opening.windowed or model is not None:
            expected["model"] = model
        check_expected(opening, {**expected, "extra_vectors": extra_vectors})
        self._pins.check(opening)
        if opening.windowed and self.latest is not None:
            opening.check_models(self.latest)
        mine = [place.key for place in opening.members if place.name == self.name]
        if not mine or mine[0] not in [held.public for held in self._state.keys]:
            raise Refused(f"the key of {self.name} in the opening is not the one that it made for this version")
        self._keys(opening)
        if any(round_.opening.context == opening.context for round_ in self._state.rounds):
            return opening.context
        state = self._state
        if opening.version < state.version:
            raise Refused(f"version {opening.version} has passed; {state.version} is the latest of this learner")
        seen = self._seen_with(opening)
        if opening.version == state.version:
            self._check_abandoned(abandoned)
            self._save(replace(state, rounds=(*state.rounds, _Round(opening)), seen=seen))
        else:
            keys = tuple(held for held in state.keys if held.public.version >= opening.version)
            self._save(_State(opening.version, keys, (_Round(opening),), seen))
            self._store.delete(self._body_name)
        return opening.context

    def _seen_with(self, opening: Opening) -> tuple[_Seen, ...]:
        """What is called fresh was in no window that this member has accepted: each of them may have been opened."""
        seen = self._seen
        for name in opening.fresh:
            if (trained := opening.trained_by(name)) is not None:
                if trained.task <= seen.get(name, -1):
                    raise Refused(f"task {trained.task} of {name}, or a later one, was in an earlier window already")
                seen[name] = trained.task
        return tuple(_Seen(name, seen[name]) for name in sorted(seen))

    def _check_abandoned(self, abandoned: Sequence[Abandonment]) -> None:
        """A version gets another context only if no earlier one can ever be opened."""
        for round_ in self._state.rounds:
            votes = [vote for given in abandoned if given.context == round_.opening.context for vote in given.votes]
            self._check_votes(round_.opening, votes, b"", "abandoning the earlier context of this version")

    def _check_votes(self, opening: Opening, votes: Iterable[Vote], statement: bytes, what: str) -> None:
        """Refuse fewer than t different members' votes for this statement."""
        keys, valid = self._keys(opening), set()
        for vote in votes:
            if (vote.context, vote.statement) == (opening.context, statement) and vote.name in keys:
                check_signature(keys[vote.name], vote.signed, vote.signature, f"the vote of {vote.name}")
                valid.add(vote.name)
        if len(valid) < opening.threshold:
            raise Refused(f"{what} needs the votes of {opening.threshold} members, and there are {len(valid)}")

    # --- masking ----------------------------------------------------------------------------------

    def mask(self, context: bytes, body: Body, layout: Layout) -> Upload:
        """Mask a body in place and keep it; if this context was masked before, that upload, and the body is ignored."""
        round_ = self._round(context)
        if round_.upload:
            return Upload.decode(round_.upload)
        opening, names = round_.opening, round_.opening.names
        sections = opening.ring.sections(layout)
        if bytes.fromhex(layout.fingerprint) != opening.layout or body.size != sections[-1].end:
            raise Refused(f"a body of {body.size} bytes does not fit the layout of the opening")
        self._check_place(opening)
        me, count = names.index(self.name), len(names)
        pairs = self._pairs(opening)
        seeds = [
            raw(number(self._random(32) if k == me else _pair_seed(pairs[name], context, self.name, name)))
            for k, name in enumerate(names)
        ]
        mask(body, sections, [*seeds[me:]], [*seeds[:me]])
        shares = [
            split(number(seed), opening.threshold, count, self._random(32 * (opening.threshold - 1))) for seed in seeds
        ]
        dealt = [[raw(shares[k][m]) for k in range(count)] for m in range(count)]
        hidden = [row(context, me, m, dealt[m], frozenset()) for m in range(count)]
        unsealed = Upload(
            context,
            self.name,
            hashlib.sha256(body.data).digest(),
            tuple(seed_commitment(context, me, k, seed) for k, seed in enumerate(seeds)),
            tuple(root(context, me, m, hidden[m], frozenset()) for m in range(count)),
            (b"",) * count,
            b"",
        )
        boxes = tuple(
            b""
            if m == me
            else seal(
                pair_key(pairs[name], "box", context, self.name, name),
                b"".join(dealt[m]),
                unsealed.digest,
                self._random,
            )
            for m, name in enumerate(names)
        )
        upload = replace(unsealed, boxes=boxes, signature=self._identity.sign(unsealed.digest))
        # The body first: without the record nothing leaves, and a body without a record is overwritten.
        self._store.write(self._body_name, body.data)
        self._change(replace(round_, upload=upload.encode(), own_shares=b"".join(dealt[me])))
        return upload

    def _check_place(self, opening: Opening) -> None:
        """Who has no place in a window masks nothing for it, and what is masked again is the latest."""
        again, latest = opening.again_by(self.name), self._seen.get(self.name, -1)
        if again is not None and again != latest:
            raise Refused(f"task {again} is not the latest of {self.name} that a window had, which is {latest}")
        if self.name not in opening.handing_in:
            raise Refused(f"{self.name} hands in nothing to this window")

    @property
    def _seen(self) -> dict[str, int]:
        return {each.name: each.task for each in self._state.seen}

    def masked(self, context: bytes) -> bool:
        """Whether a body was masked for this context, which happens once."""
        return bool(self._round(context).upload)

    def upload(self, context: bytes) -> tuple[Upload, Body] | None:
        """What was masked, to be sent (again); None if this context was not masked yet."""
        round_ = self._round(context)
        body = self._store.read(self._body_name) if round_.upload else None
        if body is None:
            return None
        upload = Upload.decode(round_.upload)
        return (upload, np.frombuffer(body, np.uint8)) if hashlib.sha256(body).digest() == upload.body else None

    # --- opening ----------------------------------------------------------------------------------

    def vote(self, statement: Statement) -> Vote:
        """Sign a statement: the only one in its context."""
        round_ = self._round(statement.context)
        check_statement(round_.opening, statement)
        if self.name in statement.names:
            mine = Upload.decode(round_.upload).digest if round_.upload else b""
            if statement.digests[statement.names.index(self.name)] != mine:
                raise Refused(f"the statement has an upload of {self.name} that it did not make")
        return self._only_vote(round_, statement.digest)

    def refuse(self, context: bytes) -> Vote:
        """Sign that this learner will never vote for a statement of this context."""
        return self._only_vote(self._round(context), b"")

    def _only_vote(self, round_: _Round, statement: bytes) -> Vote:
        if round_.vote:
            cast = Vote.decode(round_.vote)
            if cast.statement != statement:
                raise Refused(f"{self.name} has voted in this context already, and only once")
            return cast
        vote = Vote(round_.opening.context, self.name, statement, b"")
        vote = replace(vote, signature=self._identity.sign(vote.signed))
        self._change(replace(round_, vote=vote.encode()))
        return vote

    def answer(self, request: Request) -> Answer:
        """This member's shares of the masks of exactly the sum that t members voted for."""
        statement = request.statement
        self.vote(statement)  # never shares of a statement that it would not sign
        round_ = self._round(statement.context)
        opening, context, names = round_.opening, round_.opening.context, round_.opening.names
        self._check_votes(opening, request.votes, statement.digest, "opening a sum")
        pairs, me, count = self._pairs(opening), names.index(self.name), len(names)
        summed = frozenset(names.index(name) for name in statement.names)
        rows = []
        for name, bound_to, box, committed in zip(
            statement.names, statement.digests, request.boxes, request.roots, strict=True
        ):
            dealer = names.index(name)
            shares: bytes | None = round_.own_shares
            if dealer != me:
                shares = unseal(pair_key(pairs[name], "box", context, name, self.name), box, bound_to)
            rows.append(b"")
            if shares is not None and len(shares) == HASH * count:
                dealt = [shares[HASH * k : HASH * (k + 1)] for k in range(count)]
                opened = frozenset(released(dealer, summed, count))
                made = row(context, dealer, me, dealt, opened)
                if root(context, dealer, me, made, opened) == committed:
                    rows[-1] = made
        answer = Answer(context, self.name, statement.digest, tuple(rows), b"")
        return replace(answer, signature=self._identity.sign(answer.signed))

    # --- what is kept -----------------------------------------------------------------------------

    def erase(self) -> None:
        """Delete keys, shares and masked bodies; only the version stays, so that nothing is ever summed twice."""
        state = self._state
        self._save(_State(state.version + 1 if state.rounds else state.version, seen=state.seen))
        self._store.delete(self._body_name)

    @property
    def contexts(self) -> tuple[bytes, ...]:
        """The contexts of the latest version, as they were accepted."""
        return tuple(round_.opening.context for round_ in self._state.rounds)

    @property
    def latest(self) -> Opening | None:
        """The opening that was accepted last, unless it was erased."""
        return self._state.rounds[-1].opening if self._state.rounds else None

    def _round(self, context: bytes) -> _Round:
        for round_ in self._state.rounds:
            if round_.opening.context == context:
                return round_
        raise Refused(f"{self.name} has not accepted an opening of this context, or has erased it")

    def _keys(self, opening: Opening) -> dict[str, PublicKey]:
        if opening.context not in self._verified:
            self._verified = {opening.context: self._peers.keys(opening)}
        return self._verified[opening.context]

    def _change(self, changed: _Round) -> None:
        context = changed.opening.context
        rounds = tuple(changed if round_.opening.context == context else round_ for round_ in self._state.rounds)
        self._save(replace(self._state, rounds=rounds))

    def _save(self, state: _State) -> None:
        self._store.write(self._name, state.encode())
        self._state = state

    def _pairs(self, opening: Opening) -> dict[str, bytes]:
        (private,) = (held.private for held in self._state.keys if held.public.version == opening.version)
        return {place.name: agree(private, place.key.key) for place in opening.members if place.name != self.name}


def _pair_seed(pair: bytes, context: bytes, one: str, other: str) -> bytes:
    return pair_key(pair, "pair", context, min(one, other), max(one, other))
