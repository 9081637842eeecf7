"""Masking in the training process: what it writes for the controller is masked, so no local model lies on a disk.

The bytes of an update are the masked body and, behind it, the encoded `Upload`. What was masked once for a context is
kept by the `Member` and written again after a crash; it is never masked a second time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metis.core.mixing.secure import largest_weight, scalars
from metis.core.model import Model
from metis.core.policy import Policy
from metis.core.secure_sum import Opening, Pins
from metis.deployment.security.identity import signing_identity
from metis.deployment.wire.secure import packed
from metis.errors import DataError
from metis.privacy.keys import Peers
from metis.privacy.member import Member
from metis.privacy.store import FolderStore


class Masking:
    """One masked task, as the learner's process ordered it."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        identity = signing_identity(Path(order["identity"]))
        self._opening = Opening.decode(bytes.fromhex(order["opening"]))
        self._store = FolderStore(Path(order["store"]))
        self._identity, self._run = identity, order["run"]
        self._name = identity.name

    def _member(self) -> Member:
        """As it is on the disk now: while this process trains, the learner's own votes and makes keys."""
        pins = Pins(frozenset(self._opening.names))  # the learner's process has checked the opening
        return Member(self._identity, Peers(), pins, self._run, self._store)

    def done(self) -> tuple[dict[str, Any], list[memoryview]] | None:
        """The answer and the bytes of this context if it was masked before."""
        with self._store.locked():
            kept, facts = self._member().upload(self._opening.context), self._store.read("facts")
        if kept is None or facts is None:
            return None
        upload, body = kept
        return json.loads(facts), [body.data, memoryview(packed(upload.encode()))]

    def mask(
        self, local: Model, base: Model, loss: float, facts: Mapping[str, Any], policy: Policy
    ) -> list[memoryview]:
        """The bytes to send; `facts` is what the learner answers with them, also after a crash."""
        opening = self._opening
        weights, steps = opening.weights, {place.name: place.steps for place in opening.members}
        factors = policy.masked_factors(weights, steps)
        p, most, factor = weights[self._name], largest_weight(weights, factors), factors[self._name]
        if opening.windowed:  # no round is measured
            most, loss = opening.most, 0.0
        body = opening.ring.quantize(local, base, p, most, scalars(local, base, loss, factor), factor).body
        with self._store.locked():
            member = self._member()
            if member.masked(opening.context):  # by a process that was thought dead
                kept = member.upload(opening.context)
                if kept is None:
                    raise DataError("this round was masked and sent before; it is never masked twice")
                upload, body = kept
            else:
                self._store.write("facts", json.dumps(dict(facts)).encode())
                upload = member.mask(opening.context, body, local.layout)
        return [body.data, memoryview(packed(upload.encode()))]
