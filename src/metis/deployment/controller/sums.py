"""Masked rounds at the controller: keys before a round, votes and shares behind it, and the sum itself.

What a round needs besides the masked models is in `sums/` of the state folder: the opening, the statement, votes and
answers, each durable before it has an effect. A restarted controller reads them again and opens the same bits. Nothing
of it is in the trace. All of it goes, with the masked models, when the next community model is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable

from metis.core.canonical import HASH
from metis.core.events import LearnerId, RoundFailed, SumOpened
from metis.core.model import Layout
from metis.core.secure_sum import Answer, Opening, SignedKey, Statement, Upload, Vote
from metis.deployment.controller.disk import writing
from metis.deployment.controller.openings import MaskedRound, fixed_by, handing_in, made_opening, too_many_away
from metis.deployment.controller.settings import Report
from metis.deployment.controller.state import State
from metis.deployment.storage import map_file, read_file
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.model_mac import checksum_in, has_checksum
from metis.deployment.wire.secure import unpacked
from metis.errors import DataError, DiskFull, Refused
from metis.privacy.keys import Peers, check_signature
from metis.privacy.opener import Opener
from metis.privacy.store import FolderStore
from metis.system import monotonic

_DISK_FULL_PAUSE = 0.2  # seconds until a full disk is tried again
_TAIL = 1 << 24  # bytes behind the masked numbers of an update, at most


class _Files(FolderStore):
    """What a round needs, on the disk of the state folder: each file begins with the SHA-256 of its content."""

    def read(self, name: str) -> bytes | None:
        stored = super().read(name)
        if stored is None:
            return None
        content = stored[HASH:]
        if hashlib.sha256(content).digest() != stored[:HASH]:
            raise DataError(f"the file sums/{name} of the state folder is damaged")
        return content

    def write(self, name: str, data: bytes | memoryview) -> None:
        with writing(self.path(name)):
            super().write(name, hashlib.sha256(data).digest() + data)

    def write_again(self) -> None:
        """After a failed write the system may show what it never wrote, and a loss of power takes it."""
        for path in list(self.folder.iterdir()):
            if path.name.endswith(".new"):  # a crash came before it was whole
                self.delete(path.name)
            elif (content := self.read(path.name)) is not None:
                self.write(path.name, content)

    def delete(self, name: str) -> None:
        with writing(self.path(name)):
            super().delete(name)


class Sums:
    """The masked rounds of one run; all work is done in one thread at a time, beside the event loop."""

    def __init__(
        self,
        state: State,
        layout: Layout,
        body_bytes: int,  # of an update, without what is behind the masked numbers
        settings: bytes,
        peers: Peers,
        report: Report,
        send: Callable[[LearnerId, pb.SecureSum], None],
        offer: Callable[[LearnerId], None],
        key_seconds: float,
    ) -> None:
        self._state, self._layout, self._settings, self._peers = state, layout, settings, peers
        self._body_bytes = body_bytes
        self._report, self._send, self._offer, self._key_seconds = report, send, offer, key_seconds
        self._store = _Files(state.folder / "sums")
        self._round: MaskedRound | None = None
        self._jobs: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
        self._keys: dict[LearnerId, SignedKey] = {}
        self._trained: dict[LearnerId, int] = {}  # the tasks that wait for a window, in the order in which they came
        self._since: dict[LearnerId, float] = {}  # when each of them began to wait
        self._has_opening: set[LearnerId] = set()  # of a window, since it has connected
        self._overdue = -1  # the version whose keys have been awaited for long enough
        self._opening: Opening | None = None  # of the current version
        self._opener: Opener | None = None
        self._posted = ""  # what was journaled last of this version
        self._version = -1
        self._warned = ""  # what was said last of somebody who is not there
        self._tails: dict[LearnerId, bytes] = {}  # what came behind the numbers of the latest update of each
        self._out: list[Callable[[], object]] = []  # to be done in the event loop
        self.post: Callable[..., None]  # an event, and the bytes that go with it, to the journal
        self.disk_full: Callable[[str], None]
        self.failed: Callable[[BaseException], None]  # the process cannot go on

    # --- in the event loop ----------------------------------------------------------------------

    async def run(self) -> None:
        """One thing after the other, for as long as the process serves."""
        while True:
            job = await self._jobs.get()
            while not await self._done(job):
                await asyncio.sleep(_DISK_FULL_PAUSE)
            out, self._out = self._out, []
            for call in out:
                call()

    async def _done(self, job: Callable[[], None]) -> bool:
        """Do it; False if the disk is full and the same is to be tried again before anything else."""
        try:
            await asyncio.to_thread(self._do, job)
        except Refused as problem:
            self._report("warning", f"masked round: {problem}")
        except DiskFull as problem:
            self.disk_full(str(problem))
            self._out = []
            return False
        except Exception as problem:
            self.failed(problem)
        return True

    def applied(self, round_: MaskedRound | None) -> None:
        """The federation has changed."""
        if round_ is not None and round_ != self._round:
            began = self._round is None or self._round.version != round_.version or not self._round.values
            self._round = round_
            self._jobs.put_nowait(lambda: self._take(round_))
            if began and round_.values and not round_.fixed:
                loop = asyncio.get_running_loop()
                loop.call_later(self._key_seconds, lambda: self._jobs.put_nowait(lambda: self._late(round_.version)))

    def back(self, learner: LearnerId) -> None:
        """A learner has reconnected: what it was asked for may be lost."""
        self._jobs.put_nowait(lambda: self._ask_again(learner))

    def hear(self, learner: LearnerId, message: pb.SecureSum) -> None:
        self._jobs.put_nowait(lambda: self._hear(learner, message))

    def opening_of(self, version: int) -> bytes | None:
        """What goes with a task of this version; None while its keys are awaited."""
        opening, round_ = self._opening, self._round
        if round_ is not None and round_.window:
            return b""  # it comes when the task is trained
        if opening is None or round_ is None or opening.version != version or not round_.fixed:
            return None
        return opening.encode()

    # --- in the thread --------------------------------------------------------------------------

    def _do(self, job: Callable[[], None]) -> None:
        try:
            job()
        except DataError as problem:  # members may have signed what is in the file: only another round can be opened
            self._forget()
            if self._round is not None:
                self._report("warning", str(problem))
                self._take(self._round)

    def _take(self, round_: MaskedRound) -> None:
        if self._version < 0:  # at the start
            self._store.write_again()
        if self._opening is not None and (self._opening.version != round_.version or not round_.values):
            self._forget()
        if self._version != round_.version:  # keys are of one version, also of a round that nobody could begin
            self._version, self._keys, self._posted = round_.version, {}, ""
        if not round_.values:
            return
        if self._opening is None:
            stored = self._store.read("opening")
            found = None if stored is None else Opening.decode(stored)
            if found is not None and found.version == round_.version:
                self._opening = found
            elif found is not None:
                self._forget()
        if self._opening is None and round_.fixed:
            self._post_once("failed", RoundFailed(round_.version, "what its members agreed on is damaged or lost"))
        elif self._opening is None:
            for learner in round_.tasks:
                self._ask(learner)
            self._try_opening(round_)
        elif not round_.fixed:
            self._post_once("fixed", fixed_by(self._opening))
        elif round_.window:
            for learner in sorted(set(self._opening.names) - self._has_opening):
                self._ask(learner)
        else:
            self._out += [lambda learner=learner: self._offer(learner) for learner in round_.tasks]  # type: ignore[misc]
        if round_.closed is not None and self._opening is not None and self._opener is None:
            self._close(round_, self._opening)
        if self._opener is not None and self._opener.closed is not None:
            opener = self._opener
            done = opener.answers if opener.agreed else opener.votes
            self._warn_once(too_many_away(round_, opener.opening, done))

    def _warn_once(self, text: str) -> None:
        if text and text != self._warned:
            self._warned = text
            self._report("warning", text)

    def _forget(self) -> None:
        """The round is over: delete what it needed, and the masked models."""
        for path in list(self._store.folder.iterdir()):
            if path.name.startswith("upload."):
                with contextlib.suppress(DataError):  # the blob stays until the next collection
                    self._state.blobs.discard((self._store.read(path.name) or b"").decode())
        # The opening last: as long as it is there, a restart knows whose the others are.
        for path in sorted(self._store.folder.iterdir(), key=lambda path: path.name == "opening"):
            self._store.delete(path.name)
        self._keys, self._opening, self._opener, self._posted, self._tails = {}, None, None, "", {}
        self._has_opening = set()

    def _post_once(self, what: str, event: object, content: memoryview | None = None) -> None:
        if self._posted != what:
            self._posted = what
            self.post(event, content)

    def _late(self, version: int) -> None:
        round_ = self._round
        if round_ is not None and round_.version == version and not round_.fixed:
            self._overdue = version
            self._try_opening(round_)

    def _try_opening(self, round_: MaskedRound) -> None:
        if self._opening is not None or round_.ring is None or not round_.tasks:
            return
        members = sorted(learner for learner in round_.tasks if learner in self._keys)
        late = self._overdue == round_.version
        if len(members) < len(round_.tasks) and not late:
            return
        if len(members) < round_.fewest:
            missing = ", ".join(f"'{learner}'" for learner in sorted(round_.tasks.keys() - self._keys.keys()))
            if late and round_.window and missing:
                self._warn_once(f"the window on community model {round_.version} waits for the keys of {missing}")
            elif late and not round_.window:
                reason = f"{len(members)} learners gave a key, and a masked round needs {round_.fewest}"
                self._post_once("failed", RoundFailed(round_.version, reason))
            return
        first = handing_in(round_, self._keys, self._trained)
        if round_.window and not first:
            return
        opening = made_opening(round_, self._keys, first, self._state.run, self._layout, self._settings)
        self._store.write("opening", opening.encode())
        self._opening = opening
        self._post_once("fixed", fixed_by(opening, {name: monotonic() - self._since[name] for name in first}))

    def _ask_again(self, learner: LearnerId) -> None:
        self._has_opening.discard(learner)
        self._ask(learner)

    def _ask(self, learner: LearnerId) -> None:
        """What is wanted of this member now."""
        round_, opener = self._round, self._opener
        if round_ is None or not round_.values:
            return
        message: pb.SecureSum | None = None
        opening = self._opening
        if round_.window and round_.fixed and opening is not None and learner in opening.names:
            again = round_.resends.get(learner, 0)  # never the first update
            window = pb.SecureSum(
                kind=pb.SecureSum.WINDOW, version=round_.version, content=opening.encode(), task=again
            )
            if learner not in self._has_opening:  # before anything is asked about it
                self._out.append(lambda: self._send(learner, window))
            self._has_opening.add(learner)
        if self._opening is None and learner in round_.tasks and learner not in self._keys:
            message = pb.SecureSum(kind=pb.SecureSum.KEY, version=round_.version)
        elif opener is not None and opener.closed is not None and learner in opener.opening.names:
            if not opener.agreed and learner not in opener.votes:
                content = opener.closed.encode()
                message = pb.SecureSum(kind=pb.SecureSum.STATEMENT, version=round_.version, content=content)
            elif opener.agreed and learner not in opener.answers and learner not in opener.liars:
                content = opener.request(learner).encode()
                message = pb.SecureSum(kind=pb.SecureSum.SHARES, version=round_.version, content=content)
        if message is not None:
            self._out.append(lambda: self._send(learner, message))

    def _hear(self, learner: LearnerId, message: pb.SecureSum) -> None:
        round_ = self._round
        if round_ is not None and message.kind == pb.SecureSum.WINDOW:
            if self._trained.get(learner) != message.task:  # its place in the order is that of this task
                self._trained.pop(learner, None)
                self._since[learner] = monotonic()
            self._trained[learner] = message.task
            self._try_opening(round_)
            return
        if round_ is None or message.version != round_.version:
            return
        if message.kind == pb.SecureSum.KEY:
            key = SignedKey.decode(message.content)
            if (key.name, key.run, key.version) != (learner, self._state.run, round_.version):
                raise Refused(f"learner '{learner}' sent a key that is not its own for this round")
            public = self._peers.key(learner, key.certificate)
            check_signature(public, key.signed, key.signature, f"the key of '{learner}'")
            self._keys[learner] = key
            self._try_opening(round_)
        elif self._opener is not None:
            self._hear_member(learner, message, round_, self._opener)

    def _hear_member(self, learner: LearnerId, message: pb.SecureSum, round_: MaskedRound, opener: Opener) -> None:
        if message.kind == pb.SecureSum.STATEMENT:
            vote, kept = Vote.decode(message.content), self._store.read(f"vote.{learner}")
            if vote.name != learner or kept is not None:
                return
            opener.vote(vote)
            self._store.write(f"vote.{learner}", message.content)
            if opener.agreed:
                for name in opener.opening.names:
                    self._ask(name)
        elif message.kind == pb.SecureSum.SHARES:
            answer, kept = Answer.decode(message.content), self._store.read(f"answer.{learner}")
            if answer.name != learner or not opener.agreed or kept is not None:
                return
            opener.answer(answer)
            self._store.write(f"answer.{learner}", message.content)
            self._open(round_, opener)

    def _close(self, round_: MaskedRound, opening: Opening) -> None:
        """Make the statement, or read the one that was made, and ask the members."""
        opener = Opener(opening, self._peers)
        assert round_.closed is not None
        stored = self._store.read("statement")
        for learner in round_.closed.learners:
            self._store.write(f"upload.{learner}", round_.uploads[learner].encode())
            try:
                opener.take(self._upload(learner, round_.uploads[learner], opening))
            except (DataError, Refused) as problem:
                self._report("warning", f"the masked model of '{learner}' on this disk is damaged: {problem}")
        try:
            statement = opener.statement() if stored is None else Statement.decode(stored)
            opener.close(statement)
        except Refused as problem:
            self._post_once("failed", RoundFailed(round_.version, str(problem)))
            return
        for liar, how in opener.liars.items():
            self._report("warning", f"learner '{liar}' is left out of the sum: {how}")
        if stored is None:
            self._store.write("statement", statement.encode())
        for name in opening.names:
            if (vote := self._store.read(f"vote.{name}")) is not None:
                opener.vote(Vote.decode(vote))
        for name in opening.names:
            if (answer := self._store.read(f"answer.{name}")) is not None:
                opener.answer(Answer.decode(answer))
        self._opener = opener
        self._report(
            "info", f"round closed with {len(statement.names)} of {len(opening.names)} members; opening its sum"
        )
        for name in opening.names:
            self._ask(name)
        self._open(round_, opener)

    def _open(self, round_: MaskedRound, opener: Opener) -> None:
        if self._posted == "opened" or opener.closed is None:
            return
        if not opener.openable:
            if set(opener.opening.names) <= opener.answers.keys() | opener.liars.keys():  # nobody else can help
                liars = "; ".join(f"'{liar}': {how}" for liar, how in opener.liars.items())
                reason = f"every member has answered, and the sum cannot be opened: {liars or 'boxes are damaged'}"
                self._post_once("failed", RoundFailed(round_.version, reason))
            return
        size = opener.opening.ring.nbytes(self._layout)
        names = opener.closed.names
        try:
            # Only the numbers, whose digest is compared: what is behind them was read when the round was closed.
            paths = {name: self._state.blob_path(round_.uploads[name]) for name in names}
            total = opener.open({name: map_file(path, size) for name, path in paths.items()}, self._layout)
        except (DataError, Refused) as problem:
            self._post_once("failed", RoundFailed(round_.version, str(problem)))
            return
        for liar, how in opener.liars.items():
            self._report("warning", f"learner '{liar}' lied in the secure sum: {how}")
        self._post_once("opened", SumOpened(round_.version, names), total.data)

    def _upload(self, learner: LearnerId, blob: str, opening: Opening) -> Upload:
        """What came behind the masked numbers, as it was received."""
        path, size = self._state.blob_path(blob), opening.ring.nbytes(self._layout)
        tail = read_file(path, size)
        # Boxes are neither signed nor part of a digest. After a restart the whole file is read, to see if it changed.
        if self._tails.get(learner) != tail and not has_checksum(path, checksum_in(blob)):
            raise DataError(f"the file blobs/{blob} is not as it was received")
        return Upload.decode(unpacked(tail, 0))

    # --- what is received -----------------------------------------------------------------------

    def allows(self, length: int) -> bool:
        """Whether an update may have so many bytes."""
        return self._body_bytes < length <= self._body_bytes + _TAIL

    def problem(self, learner: LearnerId, content: bytes) -> str | None:
        """Why a masked update cannot count; None if it can. In any thread."""
        opening = self._opening
        if opening is None:
            return "no masked round is open"
        try:
            size = opening.ring.nbytes(self._layout)
            upload = Upload.decode(unpacked(content, size))
            if upload.name != learner:
                return "it is signed by another learner"
            Opener(opening, self._peers).take(upload)
            if hashlib.sha256(memoryview(content)[:size]).digest() != upload.body:
                return "its masked numbers are not those that it signed"
            self._tails[learner] = bytes(memoryview(content)[size:])
        except (Refused, DataError) as problem:
            return str(problem)
        return None
