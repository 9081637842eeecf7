"""Random schedules of drop-outs, lateness, crashes and restarts, in which every opened sum must be the plain one.

python tests/privacy/schedules.py 10000 [FIRST_SEED]
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from metis.core.canonical import Message
from metis.core.ring import Body
from metis.core.secure_sum import Abandonment, Answer, Opening, Statement, Upload, Vote, max_colluders
from metis.errors import Refused
from metis.privacy.opener import Opener
from metis.privacy.store import MemoryStore
from privacy.cohort import LAYOUT, Cohort


class Crash(Exception):
    """A process ends here."""


class CrashingStore(MemoryStore):
    """Ends the process before or after some writes and deletions."""

    def __init__(self, chance: random.Random, rate: float) -> None:
        super().__init__()
        self.chance, self.rate = chance, rate

    def write(self, name: str, data: bytes | memoryview) -> None:
        self._crash()
        super().write(name, data)
        self._crash()

    def delete(self, name: str) -> None:
        self._crash()
        super().delete(name)

    def _crash(self) -> None:
        if self.chance.random() < self.rate:
            raise Crash


class Schedule:
    """A cohort with small integer models through two versions."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        count = self.chance.randint(3, 7)
        colluders, bits = self.chance.randint(0, max_colluders(count)), self.chance.choice([16, 32, 64])
        self.cohort = Cohort(count, colluders, bits, quick=True)
        self.stores = {name: CrashingStore(self.chance, 0.0) for name in self.cohort.names}
        self.cohort.stores.update(self.stores)
        self.cohort.members = {name: self.cohort.restarted(name) for name in self.cohort.names}
        self.bodies: dict[bytes, Body] = {}  # what was masked, by the digest of the upload
        self.sent: dict[tuple[bytes, str], set[bytes]] = defaultdict(set)
        self.voted: dict[tuple[bytes, str], set[bytes]] = defaultdict(set)
        self.answered: dict[tuple[bytes, str], set[bytes]] = defaultdict(set)
        self.trained = 0

    def play(self) -> Counter[str]:
        """How the rounds ended."""
        ends: Counter[str] = Counter()
        for version in range(2):
            for store in self.stores.values():
                store.rate = 0.0
            opening = self.cohort.opening(version)
            rate = self.chance.choice([0.0, 0.02, 0.1])
            for store in self.stores.values():
                store.rate = rate
            end, abandoned = self._round(opening, ())
            ends[end] += 1
            if abandoned is not None:
                end, _ = self._round(self.cohort.opening_of([p.key for p in opening.members], attempt=1), (abandoned,))
                ends[f"again: {end}"] += 1
        for record in (self.sent, self.voted, self.answered):
            assert all(len(values) == 1 for values in record.values()), "two uploads, votes or answered sets"
        return ends

    # --- a member, which may crash anywhere -------------------------------------------------------

    def _restart(self, name: str) -> None:
        while True:
            try:
                self.cohort.members[name] = self.cohort.restarted(name)
                return
            except Crash:
                continue

    def _act(self, name: str, what: str, *arguments: object) -> Message | None:
        """Do it; after a crash the member starts again, and sometimes the message was lost."""
        for _ in range(20):
            try:
                result: Message = getattr(self, f"_{what}")(name, *arguments)
            except Crash:
                self._restart(name)
                if self.chance.random() < 0.3:
                    return None
                continue
            return result
        return None

    def _upload(self, name: str, opening: Opening, abandoned: tuple[Abandonment, ...]) -> Upload:
        """Train, perhaps to another model than before the crash, and mask."""
        context = self.cohort.accept(name, opening, abandoned=abandoned)
        self.trained += 1
        plain = self._integers(opening, name)
        body = plain.copy()
        try:
            upload = self.cohort.members[name].mask(context, body, LAYOUT)
        except Crash:
            self._restart(name)
            kept = self._kept(name, context)
            if kept is not None:
                self.bodies.setdefault(kept.digest, plain)
            raise
        self.bodies.setdefault(upload.digest, plain)
        sent = self.cohort.members[name].upload(context)
        assert sent is not None
        self.sent[context, name].add(sent[0].encode() + sent[1].tobytes())
        return upload

    def _kept(self, name: str, context: bytes) -> Upload | None:
        kept = self.cohort.members[name].upload(context)
        return None if kept is None else kept[0]

    def _integers(self, opening: Opening, name: str) -> Body:
        """A small integer model, with the weight that the table says."""
        body, ring = self.cohort.body(name, opening, self.trained), opening.ring
        for section in ring.sections(LAYOUT):
            words = section.view(body)[section.leading :]
            words[:] = [self.chance.randint(-9, 9) % 2**section.bits for _ in words]
        return body

    def _vote(self, name: str, statement: Statement) -> Vote:
        vote = self.cohort.members[name].vote(statement)
        self.voted[statement.context, name].add(vote.encode())
        return vote

    def _refuse(self, name: str, context: bytes) -> Vote:
        vote = self.cohort.members[name].refuse(context)
        self.voted[context, name].add(vote.encode())
        return vote

    def _answer(self, name: str, opener: Opener) -> Answer:
        answer = self.cohort.members[name].answer(opener.request(name))
        self.answered[answer.context, name].add(answer.encode())
        return answer

    # --- the controller, whose opener is rebuilt from what it stored -------------------------------

    def _round(self, opening: Opening, abandoned: tuple[Abandonment, ...]) -> tuple[str, Abandonment | None]:
        chance, names = self.chance, list(opening.names)
        stored: list[Message] = []
        bodies: dict[str, Body] = {}
        alive = {name for name in names if chance.random() < 0.9}
        late = {name for name in names if chance.random() < 0.15}

        def opener() -> Opener:
            made = self.cohort.opener(opening)
            for message in stored:
                step = {Upload: made.take, Statement: made.close, Vote: made.vote, Answer: made.answer}[type(message)]
                step(message)  # type: ignore[operator]
            return made

        def keep(message: Message | None) -> None:
            if message is not None:
                again = type(message).decode(message.encode())  # as it comes over the wire
                stored.append(again)

        chance.shuffle(names)
        uploads = [name for name in names if name in alive]
        for name in [*(n for n in uploads if n not in late), *(n for n in uploads if chance.random() < 0.2)]:
            upload = self._act(name, "upload", opening, abandoned)
            if isinstance(upload, Upload):
                sent = self.cohort.members[name].upload(opening.context)
                assert sent is not None
                bodies[name] = sent[1]
                keep(upload)
        current = opener()
        if not current.enough:
            return self._abandoned(opening, current, alive)
        statement = current.statement()
        keep(statement)
        for name in late & alive:
            upload = self._act(name, "upload", opening, abandoned)
            if isinstance(upload, Upload) and name not in statement.names:
                self._refused(opener().take, upload)
        voters = [name for name in names if name in alive and chance.random() < 0.9]
        for name in [*voters, *voters[:1]]:
            self._accepted(name, opening, abandoned)
            keep(self._act(name, "vote", statement))
            other = Statement(statement.context, statement.names[1:], statement.digests[1:])
            if (statement.context, name) in self.voted and chance.random() < 0.3:
                self._refused(self._act, name, "vote", other)
        current = opener()
        if not current.agreed:
            return "too few votes", None
        answering = [name for name in names if name in alive and chance.random() < 0.95]
        for name in [*answering, *answering[:1]]:
            self._accepted(name, opening, abandoned)
            keep(self._act(name, "answer", current))
            if chance.random() < 0.1:
                current = opener()
        current = opener()
        if not current.openable:
            return "too few answers", None
        plain = opening.ring.sum([self.bodies[digest] for digest in statement.digests], LAYOUT)
        total = current.open(bodies, LAYOUT)
        assert np.array_equal(total, plain), "the opened sum is not the plain one"
        assert np.array_equal(opener().open(bodies, LAYOUT), total), "a rebuilt controller opens other bits"
        assert not current.liars, current.liars
        weights = {name: opening.weights[name] for name in statement.names}
        opening.ring.mean(total, self.cohort.base, weights, opening.most)  # the sum of q is the public one
        return "opened", None

    def _accepted(self, name: str, opening: Opening, abandoned: tuple[Abandonment, ...]) -> None:
        """A member that missed the task sees the opening now."""
        for _ in range(20):
            try:
                self.cohort.accept(name, opening, abandoned=abandoned)
                return
            except Crash:
                self._restart(name)

    def _abandoned(self, opening: Opening, current: Opener, alive: set[str]) -> tuple[str, Abandonment | None]:
        for name in sorted(alive):
            self._accepted_or_not(name, opening)
            if opening.context in self.cohort.members[name].contexts:
                vote = self._act(name, "refuse", opening.context)
                if isinstance(vote, Vote):
                    current.vote(vote)
        return "too few uploads", current.abandonment()

    def _accepted_or_not(self, name: str, opening: Opening) -> None:
        with contextlib.suppress(Refused):  # in a second attempt: it missed that the first one is abandoned
            self._accepted(name, opening, ())

    def _refused(self, call: object, *arguments: object) -> None:
        """Never a vote for two sets, never a late upload."""
        try:
            result = call(*arguments)  # type: ignore[operator]
        except Refused:
            return
        assert result is None and call == self._act, "it should have been refused"  # or it crashed and was lost


def main(count: int, first: int) -> None:
    ends: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            ends += Schedule(seed).play()
        except Exception as problem:
            raise SystemExit(f"seed {seed}: {type(problem).__name__}: {problem}") from problem
    print(f"{count} schedules, every opened sum exact: {dict(sorted(ends.items()))}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
