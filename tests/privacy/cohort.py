"""A cohort of real members with tiny models, for the tests of the secure sum."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from metis.core.model import Layout, Model, TensorSpec
from metis.core.ring import Body, Ring
from metis.core.secure_sum import (
    PROTOCOL,
    Opening,
    Pins,
    Place,
    SignedKey,
    max_colluders,
    min_learners,
    threshold,
)
from metis.privacy.keys import Identity, Peers, PublicKey
from metis.privacy.member import Member
from metis.privacy.opener import Opener
from metis.privacy.store import MemoryStore, Store

RUN, SETTINGS, MODEL = "run-1", hashlib.sha256(b"settings").digest(), hashlib.sha256(b"model").digest()
LAYOUT = Layout((TensorSpec("w", (5,)), TensorSpec("mean", (2,), role="buffer")))
SCALARS = (0.5, 0.25, 0.125)


class QuickKey:
    """Signs with a hash, for schedules by the thousand: whoever holds it could forge, and nobody there does."""

    def __init__(self, name: str) -> None:
        self._name = name.encode()

    def public_key(self) -> QuickKey:
        return self

    def sign(self, message: bytes) -> bytes:
        return hashlib.sha256(self._name + message).digest()

    def verify(self, signature: bytes, message: bytes) -> None:
        if signature != self.sign(message):
            raise InvalidSignature


@cache
def identity(name: str) -> Identity:
    return Identity(name, Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest()))


class _Peers(Peers):
    """Verifies the keys of an opening once, not once for each member."""

    _known: ClassVar[dict[bytes, dict[str, PublicKey]]] = {}

    def keys(self, opening: Opening) -> dict[str, PublicKey]:
        if opening.context not in self._known:
            self._known.clear()
            self._known[opening.context] = super().keys(opening)
        return self._known[opening.context]


class Cohort:
    """N members that are pinned to each other, and what a controller needs to open their sum."""

    def __init__(
        self, count: int, colluders: int | None = None, bits: int = 32, layout: Layout = LAYOUT, *, quick: bool = False
    ) -> None:
        self.names = tuple(f"h{index:02d}" for index in range(count))
        self.colluders = max_colluders(count) if colluders is None else colluders
        self.pins = Pins(frozenset(self.names), self.colluders)
        self.identities = {name: Identity(name, QuickKey(name)) if quick else identity(name) for name in self.names}  # type: ignore[arg-type]
        self.peers = _Peers(pinned={name: held.key.public_key() for name, held in self.identities.items()})
        self.stores: dict[str, Store] = {name: MemoryStore() for name in self.names}
        self.layout, self.bits = layout, bits
        self.members = {name: self.restarted(name) for name in self.names}
        self.base = Model(layout, np.zeros(layout.size, np.float32))

    def restarted(self, name: str) -> Member:
        """The member as a new process finds it."""
        return Member(self.identities[name], self.peers, self.pins, RUN, self.stores[name])

    def opening(self, version: int = 0, names: Sequence[str] | None = None, **changes: Any) -> Opening:
        names = self.names if names is None else names
        keys = [self.members[name].key(version) for name in names]
        return self.opening_of(keys, **changes)

    def opening_of(
        self, keys: Sequence[SignedKey], weights: Mapping[str, float] | None = None, **changes: Any
    ) -> Opening:
        ring = Ring(self.bits, len(keys), 1.0)
        places = tuple(Place((weights or {}).get(key.name, 10.0 + index), 20, key) for index, key in enumerate(keys))
        fingerprint = bytes.fromhex(self.layout.fingerprint)
        opening = Opening(
            PROTOCOL, RUN, keys[0].version, 0, MODEL, fingerprint, SETTINGS, 1.0, 0, ring,
            threshold(len(keys)), min_learners(self.colluders), places,
        )  # fmt: skip
        return replace(opening, **changes)

    def accept(self, name: str, opening: Opening, **changes: Any) -> bytes:
        options: dict[str, Any] = {"model": MODEL, "layout": self.layout, "settings": SETTINGS, **changes}
        return self.members[name].accept(opening, **options)

    def body(self, name: str, opening: Opening, seed: int = 0) -> Body:
        """A local model in the ring: the same for the same name and seed."""
        random = np.random.default_rng([seed, *name.encode()])
        local = Model(self.layout, random.standard_normal(self.layout.size).astype(np.float32) / 4)
        return opening.ring.quantize(local, self.base, opening.weights[name], opening.most, SCALARS).body

    def opener(self, opening: Opening) -> Opener:
        return Opener(opening, self.peers)

    def play(
        self, opening: Opening, uploading: Iterable[str], answering: Iterable[str], seed: int = 0
    ) -> tuple[Opener, Body, Body]:
        """A whole round: the opener, the sum that it opened, and the plain one."""
        opener, bodies, plain = self.opener(opening), {}, opening.ring.total(self.layout)
        for name in opening.names:
            self.accept(name, opening)
        for name in uploading:
            bodies[name] = self.body(name, opening, seed)
            opening.ring.add(plain, bodies[name], self.layout)
            opener.take(self.members[name].mask(opening.context, bodies[name], self.layout))
        statement = opener.statement()
        opener.close(statement)
        answering = list(answering)
        for name in answering:
            opener.vote(self.members[name].vote(statement))
        for name in answering:
            opener.answer(self.members[name].answer(opener.request(name)))
        return opener, opener.open(bodies, self.layout), plain
