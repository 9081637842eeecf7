"""Masking: what a site writes for the controller is masked.

The bytes of an update are the masked body and, behind it, the encoded `Upload`. What was masked once for a context is
kept by the `Member` and written again after a crash; it is never masked a second time. The training process masks what
it has trained, so no local model lies on a disk. Only where windows are of whole models, the latest one does, sealed if
the site has a storage key: the learner's process masks it once more for every window until there is another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metis.core.mixing.secure import largest_weight, scalars
from metis.core.mixing.windows import whole_body
from metis.core.model import Layout, Model
from metis.core.policy import Policy
from metis.core.ring import Body
from metis.core.secure_sum import Opening, Pins
from metis.deployment.security.identity import signing_identity
from metis.deployment.storage import file_sha256
from metis.deployment.wire.models import payload_sha256, read_model, write_model
from metis.deployment.wire.secure import packed
from metis.errors import DataError, Refused
from metis.privacy.keys import Peers
from metis.privacy.member import Member
from metis.privacy.store import FolderStore

LOCAL = "local-"  # how the name of a local model begins; its task and its SHA-256 follow


class Masking:
    """One masked update, as the learner's process ordered it."""

    def __init__(self, order: Mapping[str, Any], store: FolderStore | None = None) -> None:
        identity = signing_identity(Path(order["identity"]))
        self._opening = Opening.decode(bytes.fromhex(order["opening"]))
        self._store = store or FolderStore(Path(order["store"]))
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
        # What was in the sum of a window must not be in that of a round, nor a difference beside a whole model.
        if opening.windowed == policy.protocol.has_rounds or bool(opening.whole) != policy.sums_whole_models:
            raise DataError("the opening does not sum what this federation's policy sums; nothing is masked for it")
        weights, steps = opening.weights, {place.name: place.steps for place in opening.members}
        factors = policy.masked_factors(weights, steps)
        p, most, factor = weights[self._name], largest_weight(weights, factors), factors[self._name]
        if opening.windowed:  # no round is measured
            most, loss = opening.most, 0.0
        if not opening.whole:
            body = opening.ring.quantize(local, base, p, most, scalars(local, base, loss, factor), factor).body
            return self._masked(body, local.layout, facts)
        return self._masked(whole_body(opening.ring, local, p, most), local.layout, facts, local)

    def mask_again(self, layout: Layout) -> list[memoryview]:
        """The bytes to send of the local model that this window wants again."""
        opening = self._opening
        found = list(self._store.folder.glob(f"{self._beginning}*"))
        if not found or file_sha256(found[0]) != found[0].name.rpartition("-")[2]:
            raise Refused("the local model that the window wants again is not here any more, or damaged")
        local = read_model(found[0], layout)
        body = whole_body(opening.ring, local, opening.weights[self._name], opening.most)
        return self._masked(body, layout, {})

    @property
    def _beginning(self) -> str:
        """Of the name of the local model that this window has a place for."""
        trained, again = self._opening.trained_by(self._name), self._opening.again_by(self._name)
        return f"{LOCAL}{again if trained is None else trained.task}-"

    def _keep(self, local: Model) -> None:
        """Durably, before it counts as masked; what was trained for this task before a crash was not."""
        for path in self._store.folder.glob(f"{self._beginning}*"):
            path.unlink()
        write_model(self._store.path(f"{self._beginning}{payload_sha256(local)}"), local, private=True)

    def _forget(self, *, but: str) -> None:
        for path in self._store.folder.glob(f"{LOCAL}*"):
            if not path.name.startswith(but):
                path.unlink()

    def _masked(
        self, body: Body, layout: Layout, facts: Mapping[str, Any], kept_too: Model | None = None
    ) -> list[memoryview]:
        opening = self._opening
        with self._store.locked():
            member = self._member()
            if member.masked(opening.context):  # by a process that was thought dead
                kept = member.upload(opening.context)
                if kept is None:
                    raise DataError("this round was masked and sent before; it is never masked twice")
                upload, body = kept
            else:
                self._store.write("facts", json.dumps(dict(facts)).encode())
                if kept_too is not None:
                    self._keep(kept_too)
                upload = member.mask(opening.context, body, layout)
                if kept_too is not None:  # now the one before it is not wanted any more
                    self._forget(but=self._beginning)
        return [body.data, memoryview(packed(upload.encode()))]
