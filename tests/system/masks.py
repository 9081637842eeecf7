"""Masked rounds and privacy ledgers in the simulated system: certificates that are always the same, and the checkers.

I31: an opened sum is the exact sum of what its learners masked. I32: in a context there is one statement, with the
same learners and digests at every member; a member signs one, uploads one body, answers for that statement only. I33: a
sum has c + 3 learners or more, each with an upload of this very context, and of a window only those that it has a place
for: c + 3 of them with a task that is in no other window, the others with the same local model as before. I34: no step
is made that is not reserved in the ledger, whatever a crash has left of it. I35: a round begins again only if something
is damaged, or too few are there. I36: what a learner has made or signed stays while its training process masks. I37: a
member that is there has a task that it can work on. I38: nobody who is honest is called a liar. (I20 to I22 of the
design, where other numbers were free.)
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID
from numpy.typing import NDArray

from metis.core.events import CohortFixed, Event, RoundFailed, SumOpened
from metis.core.layers import SecureSum
from metis.core.mixing.secure import scalars
from metis.core.mixing.windows import whole_body
from metis.core.model import Layout, Model
from metis.core.policy import Policy
from metis.core.ring import Body
from metis.core.secure_sum import Answer, Opening, Pins, Request, Statement, Upload, Vote
from metis.deployment.controller.process import ControllerProcess
from metis.deployment.trainer.masking import Masking
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.secure import unpacked
from metis.errors import MetisError
from metis.privacy.keys import Peers
from metis.privacy.ledger import Ledger
from metis.privacy.member import Member
from metis.privacy.records import Privacy
from metis.privacy.store import FolderStore
from system.disk import DiskPath

SETTINGS = '{"experiment": {}}'
MASKED = ("semisync masked", "sync masked")
WINDOWED = ("fedbuff masked",)
CACHED = ("async masked", "fedrec masked")
FOURTH = "l4"  # a masked round needs four members
SECURE = SecureSum(clip=128.0)  # models of the simulation are numbers up to 64
COLLUDERS = 0
NOISE, RATE = Privacy(noise=1.0), 0.125
_FROM, _TO = datetime(2000, 1, 1, tzinfo=timezone.utc), datetime(2100, 1, 1, tzinfo=timezone.utc)

Violated = Callable[[str], None]


def masks(seed: int) -> bool:
    """Whether the rounds of this seed are masked: of every sixth."""
    return random.Random(f"masks {seed}").random() < 1 / 6


# --- certificates ---------------------------------------------------------------------------------


def _key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


def _certificate(name: str, role: str) -> x509.Certificate:
    whose = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ca")])
    serial = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    made = x509.CertificateBuilder(authority, whose, _key(name).public_key(), serial, _FROM, _TO)
    if role == "ca":
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    else:
        uri = x509.UniformResourceIdentifier(f"metis://{role}/{name}")
        made = made.add_extension(x509.SubjectAlternativeName([uri]), critical=False)
    return made.sign(_key("ca"), None)


@cache
def authority() -> x509.Certificate:
    return _certificate("ca", "ca")


def write_kits(folder: Path, names: tuple[str, ...]) -> None:
    """The same bytes for every seed; a policy beside each certificate pins the peers."""
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        key = _key(name).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        pem = serialization.Encoding.PEM
        files = {
            "ca.pem": authority().public_bytes(pem),
            "certificate.pem": _certificate(name, "learner").public_bytes(pem),
            "key.pem": key,
            "site-policy.toml": f"peers = {list(names)}\ncolluders = {COLLUDERS}\nmasked_windows = true\n".encode(),
        }
        for file, content in files.items():
            (folder / name / file).write_bytes(content)


def peers() -> Peers:
    return Peers(authority())


# --- the trainer's part ---------------------------------------------------------------------------


class WatchedMasking(Masking):
    """The real one on the simulated disk; what it masks first in a context is what the sum must have."""

    def __init__(self, order: Mapping[str, Any], checks: MaskChecks) -> None:
        super().__init__(order)
        self._store = FolderStore(DiskPath(order["store"]))
        self._checks = checks

    def done(self) -> tuple[dict[str, Any], list[memoryview]] | None:
        self.look()
        return super().done()

    def look(self) -> None:
        """What there is before anything is masked."""
        self._at_first = self._signed()

    def mask(
        self, local: Model, base: Model, loss: float, facts: Mapping[str, Any], policy: Policy
    ) -> list[memoryview]:
        opening, p = self._opening, self._opening.weights[self._name]
        numbers = scalars(local, base, 0.0 if opening.windowed else loss)
        body = opening.ring.quantize(local, base, p, opening.most, numbers).body
        if opening.whole:
            body = whole_body(opening.ring, local, p, opening.most)
        self._checks.trained(opening.context, self._name, body, local)
        before = self._signed()
        self._checks.signed_meanwhile(before - self._at_first)
        masked = super().mask(local, base, loss, facts, policy)
        self._checks.kept(self._name, before - self._signed())
        return masked

    def _signed(self) -> set[tuple[str, bytes]]:
        """What the learner's own process has made or signed and must never make again, as it is on the disk."""
        pins = Pins(frozenset(self._opening.names))
        state = Member(self._identity, Peers(), pins, self._run, self._store)._state
        keys = {("a key", key.public.encode()) for key in state.keys}
        return keys | {("a vote", round_.vote) for round_ in state.rounds if round_.vote}


class Spending:
    """A site's ledger, and how many steps were really made."""

    def __init__(self, root: str, name: str, violated: Violated) -> None:
        self._name, self._violated, self.made = name, violated, 0
        self.ledger = Ledger(DiskPath(f"{root}/privacy"), "records", DiskPath(f"{root}/witness"))

    def reserve(self, run: str, task: int, steps: int) -> None:
        self.ledger.reserve(NOISE, RATE, run, task, steps)

    def step(self) -> None:
        """One more, on real records."""
        self.made += 1
        self.check()

    def check(self) -> None:
        """At every step and whenever the site's process starts."""
        try:
            reserved = sum(entry.steps.steps for entry in self.ledger.entries())
        except MetisError as problem:
            self._violated(f"I34: the ledger of {self._name} cannot be used any more: {problem}")
            return
        if reserved < self.made:
            self._violated(f"I34: {self._name} has made {self.made} steps, and {reserved} are reserved")


# --- checkers -------------------------------------------------------------------------------------


class MaskChecks:
    """Hears everything that a masked round has on the wire and in the journal."""

    def __init__(self, layout: Layout, policy: Policy, violated: Violated, sometimes: Callable[[str], None]) -> None:
        self._layout, self.policy, self._violated, self._sometimes = layout, policy, violated, sometimes
        self._openings: dict[bytes, Opening] = {}
        self._contexts: dict[int, bytes] = {}  # by version
        self._masked: dict[tuple[str, int], bytes] = {}  # of windows: in which context a task was handed in
        self._bodies: dict[tuple[bytes, str], list[tuple[Body, Model]]] = {}  # that were ever about to be masked
        self._locals: dict[tuple[str, int], Model] = {}  # of windows: what was handed in for a task
        self._summed: dict[tuple[str, int], int] = {}  # of windows: which sum was the first with a task
        self._uploads: dict[tuple[bytes, str], bytes] = {}  # digests that left a site
        self._plain: dict[tuple[bytes, str], Body] = {}  # what is under that digest
        self._statements: dict[bytes, Statement] = {}
        self._signed: dict[tuple[bytes, str], bytes] = {}
        self._answered: dict[tuple[bytes, str], bytes] = {}
        self._opened: dict[int, tuple[str, ...]] = {}  # by version
        self._totals: dict[int, Body] = {}
        self._waiting: dict[tuple[str, int], float] = {}  # since when, a learner that is there for which task
        self.reached: Counter[str] = Counter()

    def trained(self, context: bytes, name: str, body: Body, local: Model) -> None:
        """It is about to be masked; after a crash it may be another one."""
        self._bodies.setdefault((context, name), []).append((body, local))

    def task(self, message: pb.Task) -> None:
        """The controller sends it."""
        content: Any = message.opening
        if not content and not message.window:
            self._violated(f"I33: task {message.number} is sent without masks")
        if content:
            self._begun(Opening.decode(content))

    def _begun(self, opening: Opening) -> None:
        self._openings[opening.context] = opening
        if self._contexts.setdefault(opening.version, opening.context) != opening.context:
            self._violated(f"I32: version {opening.version} has two contexts")

    def uploaded(self, name: str, content: bytes) -> None:
        """A masked update came whole."""
        for opening in self._openings.values():
            try:
                upload = Upload.decode(unpacked(content, opening.ring.nbytes(self._layout)))
            except (MetisError, ValueError):
                continue
            if upload.context != opening.context:
                continue
            key = upload.context, name
            if self._uploads.setdefault(key, upload.digest) != upload.digest:
                self._violated(f"I32: {name} has masked twice in one context")
            mine, again = opening.trained_by(name), opening.again_by(name)
            if again is not None:
                self._sometimes("a model was handed in again")
                local = self._locals[name, again]
                self._plain[key] = whole_body(opening.ring, local, opening.weights[name], opening.most)
                return
            if opening.windowed and mine is None:
                self._violated(f"I33: {name} has handed in something to a window that has no place for it")
            body, local = self._bodies[key][-1]
            self._plain.setdefault(key, body)
            if mine is not None and self._masked.setdefault((name, mine.task), upload.context) != upload.context:
                self._violated(f"I32: {name} has handed in task {mine.task} to two windows")
            if mine is not None:
                self._locals.setdefault((name, mine.task), local)
            return

    def heard(self, name: str, message: pb.SecureSum) -> None:
        """A member answers."""
        if message.kind == pb.SecureSum.STATEMENT:
            vote = Vote.decode(message.content)
            if self._signed.setdefault((vote.context, name), vote.statement) != vote.statement:
                self._violated(f"I32: {name} has signed two statements in one context")
            said = self._statements.get(vote.context)
            if vote.statement and (said is None or said.digest != vote.statement):
                self._violated(f"I32: {name} has signed what the controller did not say")
            self._sometimes("a statement was signed" if vote.statement else "a context was refused")
        elif message.kind == pb.SecureSum.SHARES:
            answer = Answer.decode(message.content)
            if self._answered.setdefault((answer.context, name), answer.statement) != answer.statement:
                self._violated(f"I32: {name} has given shares for two sums of one context")
            if self._signed.get((answer.context, name), answer.statement) != answer.statement:
                self._violated(f"I32: {name} gives shares for what it has not signed")
            self._sometimes("shares were given")

    def asked(self, message: pb.SecureSum) -> None:
        """The controller asks."""
        if message.kind == pb.SecureSum.WINDOW:
            opening = Opening.decode(message.content)
            self._begun(opening)
            trained = [opening.trained_by(name) for name in opening.handing_in]
            if any(each is not None and each.version < opening.version for each in trained):
                self._sometimes("a window with an update of an older model")
        elif message.kind == pb.SecureSum.STATEMENT:
            self._stated(Statement.decode(message.content))
        elif message.kind == pb.SecureSum.SHARES:
            self._stated(Request.decode(message.content).statement)

    def _stated(self, statement: Statement) -> None:
        if self._statements.setdefault(statement.context, statement) != statement:
            self._violated("I32: the controller has made two statements in one context")
        fresh = set(statement.names) & set(self._openings[statement.context].fresh)
        if len(fresh) < COLLUDERS + 3:
            self._violated(f"I33: a sum of {len(fresh)} learners is to be opened")

    def signed_meanwhile(self, more: Collection[tuple[str, bytes]]) -> None:
        """Since its training process has begun, the learner has made or signed this."""
        for what, _ in more:
            self._sometimes(f"{what} while the training process was busy")

    def kept(self, name: str, gone: Collection[tuple[str, bytes]]) -> None:
        """Its training process has masked something, and these are gone since."""
        for what, _ in gone:
            self._violated(f"I36: the training process of {name} undoes {what} of the learner")

    def failed(self, event: RoundFailed, sound: bool) -> None:
        """A masked round begins again; if no file is damaged, only because too few members are there."""
        self._sometimes("a masked round began again")
        if sound and not re.search("gave a key|a sum of [0-9]+ learners", event.reason):
            self._violated(f"I35: the round on version {event.version} begins again: {event.reason}")

    def look(self, now: float, process: ControllerProcess, busy: bool) -> None:
        """I37: a member that is there has a task that it can work on."""
        waiting, standing = {}, process._view.standing
        for learner, session in {} if busy else process._sessions.open.items():
            opened = process._view.tasks.get(learner)
            if opened is None or session.ready is None or session.held_task == opened.task.number:
                continue
            round_ = None if process._sums is None else process._sums._round
            if round_ is not None and round_.window:
                continue  # tasks of windows wait for nothing
            if opened.task.based_on.version != standing.version and not standing.finished:
                waiting[learner, opened.task.number] = self._waiting.get((learner, opened.task.number), now)
        self._waiting = waiting
        for (learner, task), since in waiting.items():
            if now - since > 3.0:
                self._violated(f"I37: {learner} is there and waits for task {task}, whose round is over")

    def journaled(self, event: Event, content: bytes | None) -> None:
        """The controller is about to journal it, with these bytes."""
        if isinstance(event, CohortFixed):
            self._sometimes("a cohort was fixed")
        if not isinstance(event, SumOpened):
            return
        self._sometimes("a sum was opened")
        statement = next(
            (
                made
                for context, made in self._statements.items()
                if self._openings[context].version == event.version and made.names == tuple(event.learners)
            ),
            None,
        )
        if statement is None or content is None:
            self._violated(f"I32: the sum of version {event.version} is of learners that no statement names")
            return
        if self._opened.setdefault(event.version, statement.names) != statement.names:
            self._violated(f"I32: version {event.version} has two sums")
        opening = self._openings[statement.context]
        if len(statement.names) < len(opening.names):
            self._sometimes("a sum without some of its members")
        there = [name for name in statement.names if (statement.context, name) in self._uploads]
        fresh = there
        if opening.windowed:
            new = [(name, mine.task) for name in there if (mine := opening.trained_by(name)) is not None]
            fresh = [
                name for name, task in new if self._summed.setdefault((name, task), event.version) == event.version
            ]
        if len(fresh) < COLLUDERS + 3 or len(there) < len(statement.names):
            self._violated(f"I33: the sum of version {event.version} has {len(fresh)} fresh learners")
            return
        total = self._totals[event.version] = np.frombuffer(content, np.uint8)
        plain = np.zeros_like(total)
        for name in statement.names:
            opening.ring.add(plain, self._plain[statement.context, name], self._layout)
        if not np.array_equal(plain, total):
            self._violated(f"I31: the sum of version {event.version} is not the sum of what was masked")

    def mean(self, version: int, base: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the sum of a version makes of its model, from the plain words."""
        (statement,) = [
            made
            for context, made in self._statements.items()
            if self._openings[context].version == version and made.names == self._opened[version]
        ]
        opening = self._openings[statement.context]
        many, width = 1000 if opening.windowed else len(opening.names), 8 if opening.whole else 4
        room, clip = min(8 * width - 1 - many.bit_length(), 52), opening.ring.clip
        moved = np.zeros(base.size)
        for name in statement.names:
            words = self._plain[statement.context, name][-width * base.size :].view(f"<i{width}")
            moved += words.astype(np.float64) * clip / 2.0**room
        if opening.windowed and not opening.whole:
            step: NDArray[np.float64] = base + moved / len(statement.names)
            return step
        most = max(opening.weights[name] for name in opening.handing_in)
        if opening.whole:
            base = np.zeros(base.size)
        mean: NDArray[np.float64] = base + moved / sum(opening.weights[name] / most for name in statement.names)
        return mean

    def total(self, version: int) -> Body | None:
        """The sum that was opened."""
        return self._totals.get(version)
