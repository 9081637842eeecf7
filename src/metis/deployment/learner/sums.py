"""A learner's part in masked rounds: whom it trusts is in its own files, and what it signs is durable before it leaves.

The keys of a round, what was masked and what was voted for are in `sums/` of the work folder, which only its owner can
read. They go when the next round is accepted, at the end of the federation, and when they are a week old. So does the
latest local model, which is there unmasked where windows want it again.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metis.core.model import Layout
from metis.core.secure_sum import MOST_STEPS, Opening, Pins, Request, Statement
from metis.deployment.learner.connection import Connection
from metis.deployment.learner.downloads import TaskFailed
from metis.deployment.learner.site_log import SiteLog
from metis.deployment.learner.site_policy import PolicyFile, SitePolicy
from metis.deployment.learner.supervisor import Supervisor
from metis.deployment.learner.work import Update, WorkFolder, forget_local_models
from metis.deployment.security.identity import load_kit, signing_identity
from metis.deployment.storage import file_sha256
from metis.deployment.trainer.masking import Masking
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.causes import rule_named
from metis.deployment.wire.models import write_parts
from metis.deployment.wire.secure import settings_hash
from metis.errors import ConfigError, DataError, Refused
from metis.privacy.keys import Peers
from metis.privacy.member import Member
from metis.privacy.store import FolderStore
from metis.system import unix_time

_WEEK = 7 * 86400.0


@dataclass
class _Wait:
    """A task whose update is masked when a window has a place for it."""

    task: pb.Task
    model: bytes  # SHA-256 of what it is trained from
    place: asyncio.Future[dict[str, Any]]
    trained: bool = False


def _not_allowed(problem: Refused | ConfigError) -> TaskFailed:
    """The task ends, by a rule of this site's policy if the problem is with one."""
    return TaskFailed(str(problem), pb.Cause.SITE_POLICY, rule_named(getattr(problem, "rule", "")))


class Sums:
    """Answers what masked rounds ask of this learner; without a certificate it refuses."""

    def __init__(
        self,
        supervisor: Supervisor,
        connection: Connection,
        work: WorkFolder,
        policy: PolicyFile,
        kit: Path | None,
        log: SiteLog,
        look: Callable[[], None],  # when there is something new in the spool
    ) -> None:
        self._supervisor, self._connection, self._work, self._policy = supervisor, connection, work, policy
        self._log, self._look = log, look
        self._kit = kit  # with this site's certificate, its key and the CA
        self._folder = work.folder / "sums"
        self._lock = asyncio.Lock()  # one thing after the other: each reads and writes the same file
        self._wait: _Wait | None = None  # for a window

    @contextmanager
    def _member(self, policy: SitePolicy) -> Iterator[Member]:
        """While the training process, which masks, neither reads nor writes."""
        if self._kit is None:
            raise Refused("this federation masks its sums, for which a learner needs its certificate (--identity DIR)")
        if not policy.peers:
            raise Refused(
                "this federation masks its sums; name the learners to take part with: peers in the site policy", "peers"
            )
        pins = Pins(frozenset(policy.peers), policy.colluders, windows=policy.masked_windows)
        identity, peers, store = signing_identity(self._kit), Peers(load_kit(self._kit).authority), self._store()
        with store.locked():
            yield Member(identity, peers, pins, self._work.run, store)

    def _store(self) -> FolderStore:
        return FolderStore(self._folder)

    async def accept(self, task: pb.Task, model: Path, policy: SitePolicy) -> dict[str, Any] | None:
        """What the training process needs to mask this task; None if it is not masked, or not yet.

        Raises `TaskFailed`.
        """
        announced: Any = task.opening
        self._wait = None
        if task.window and not announced:
            return await self._await_window(task, model, policy)
        if not announced:
            return None
        async with self._lock:
            try:
                return await asyncio.to_thread(self._accept, task, model, policy)
            except (Refused, ConfigError) as problem:
                raise _not_allowed(problem) from problem

    def _accept(self, task: pb.Task, model: Path, policy: SitePolicy) -> dict[str, Any]:
        announced: Any = task.opening
        opening = Opening.decode(announced)
        welcome = self._connection.welcome
        steps = min(task.steps if task.HasField("steps") else MOST_STEPS, MOST_STEPS)
        mine = {place.name: place.steps for place in opening.members}.get(welcome.learner)
        rate = task.rate if task.HasField("rate") else 1.0
        if (opening.version, opening.rate, mine) != (task.version, rate, steps):
            raise Refused("the task is not the one that its opening describes")
        # Of the bytes that are trained on, whatever was announced.
        self._member_accepts(opening, bytes.fromhex(file_sha256(model)), policy)
        return self._order(opening)

    def _member_accepts(self, opening: Opening, model: bytes | None, policy: SitePolicy) -> None:
        welcome = self._connection.welcome
        layout = Layout.from_json(json.loads(welcome.layout))
        fewest = policy.min_masked_members or 0
        if len(opening.names) < fewest:
            text = f"the round has {len(opening.names)} members; this site wants {fewest} (min_masked_members)"
            raise Refused(text, "min_masked_members")
        with self._member(policy) as member:
            member.accept(
                opening,
                model=model,
                layout=layout,
                settings=settings_hash(welcome.settings),
                extra_vectors=int(layout.control.size > 0),
            )

    def _order(self, opening: Opening) -> dict[str, Any]:
        """For the training process."""
        return {
            "identity": str(self._kit),
            "store": str(self._folder),
            "run": self._work.run,
            "opening": opening.encode().hex(),
        }

    # --- windows ----------------------------------------------------------------------------------

    async def _await_window(self, task: pb.Task, model: Path, policy: SitePolicy) -> dict[str, Any] | None:
        """From now on a window may have a place for this task; one that had it before a crash is the one."""

        def latest() -> tuple[Opening | None, bytes]:
            with self._member(policy) as member:
                return member.latest, bytes.fromhex(file_sha256(model))

        async with self._lock:
            try:
                opening, sha256 = await asyncio.to_thread(latest)
                self._wait = wait = _Wait(task, sha256, asyncio.get_running_loop().create_future())
                if opening is not None:
                    self._give_place(opening)
            except (Refused, ConfigError) as problem:
                raise _not_allowed(problem) from problem
        return wait.place.result() if wait.place.done() else None

    async def place(self, task: pb.Task) -> dict[str, Any]:
        """What the training process needs to mask this task for a window, as soon as one has a place for it."""
        wait = self._wait
        assert wait is not None and wait.task is task, "it was accepted"
        wait.trained = True
        self.announce()
        return await wait.place

    def announce(self) -> None:
        """Say that a task is trained and waits; again on each new connection."""
        wait = self._wait
        if wait is not None and wait.trained and not wait.place.done():
            message = pb.SecureSum(kind=pb.SecureSum.WINDOW, version=wait.task.version, task=wait.task.number)
            self._connection.send(secure=message)

    async def _take_window(self, message: pb.SecureSum, policy: SitePolicy) -> None:
        """A window begins: this member agrees on its sum, and may hand in something."""
        try:
            opening = Opening.decode(message.content)
        except Refused as problem:
            self._supervisor.report("warning", f"window on community model {message.version}: {problem}")
            return
        async with self._lock:
            try:
                if not opening.windowed:
                    raise Refused("nobody hands in anything to this window")
                await asyncio.to_thread(self._member_accepts, opening, None, policy)
                self._give_place(opening)
            except (Refused, ConfigError) as problem:
                if message.task:
                    self._cannot_hand_in(message.task, str(problem))
                self._supervisor.report("warning", f"window on community model {opening.version}: {problem}")
                wait, mine = self._wait, opening.trained_by(self._connection.welcome.learner)
                if wait is not None and mine is not None and mine.task == wait.task.number and not wait.place.done():
                    wait.place.set_exception(_not_allowed(problem))
                return
            if message.task:
                await self._hand_in_again(opening, message.task)

    async def _hand_in_again(self, opening: Opening, number: int) -> None:
        """Mask the latest local model once more; the training process may be busy with the next one."""
        if any(update.task == number for update in self._work.updates()):
            return  # it is on its way

        def mask() -> None:
            layout = Layout.from_json(json.loads(self._connection.welcome.layout))
            parts = Masking(self._order(opening), self._store()).mask_again(layout)
            sha256, length = write_parts(self._work.update_file(number), parts)
            self._work.keep(Update(self._work.run, number, 0, 0.0, 0.0, math.nan, sha256, length, again=True))

        try:
            await asyncio.to_thread(mask)
        except (Refused, DataError, OSError) as problem:
            self._cannot_hand_in(number, str(problem))
        else:
            self._look()

    def _cannot_hand_in(self, number: int, reason: str) -> None:
        """A window need not wait for what this site does not have, or does not hand in."""
        self._work.drop(number)
        cause = self._log.failed(pb.Cause.UPDATE_LOST, f"a window does not get the latest model again: {reason}")
        self._connection.send_failed(number, cause, 0, 0.0)

    def _give_place(self, opening: Opening) -> None:
        """If this accepted window has a place for the task that is trained here, it must be as it was trained."""
        wait, name = self._wait, self._connection.welcome.learner
        mine = opening.trained_by(name)
        if wait is None or mine is None or mine.task != wait.task.number or wait.place.done():
            return
        task = wait.task
        steps = min(task.steps if task.HasField("steps") else MOST_STEPS, MOST_STEPS)
        places = {place.name: place.steps for place in opening.members}
        rate = task.rate if task.HasField("rate") else 1.0
        if (mine.version, mine.model, mine.rate, places[name]) != (task.version, wait.model, rate, steps):
            raise Refused("what this site has trained is not what the window says")
        wait.place.set_result(self._order(opening))

    def hear(self, message: pb.SecureSum) -> None:
        """Something that a masked round asks of this member."""
        self._supervisor.start(self._answer(message))

    async def _answer(self, message: pb.SecureSum) -> None:
        policy, refusal = self._policy.ask()
        if refusal is not None:
            if message.kind == pb.SecureSum.WINDOW and message.task:
                self._cannot_hand_in(message.task, refusal.text)
            return
        if message.kind == pb.SecureSum.WINDOW:
            await self._take_window(message, policy)
            return
        async with self._lock:
            try:
                content = await asyncio.to_thread(self._content, message, policy)
            except (Refused, ConfigError) as problem:
                self._supervisor.report("warning", f"masked round on community model {message.version}: {problem}")
                return
        self._connection.send(secure=pb.SecureSum(kind=message.kind, version=message.version, content=content))

    def _content(self, message: pb.SecureSum, policy: SitePolicy) -> bytes:
        with self._member(policy) as member:
            match message.kind:
                case pb.SecureSum.KEY:
                    return member.key(message.version).encode()
                case pb.SecureSum.STATEMENT:
                    return member.vote(Statement.decode(message.content)).encode()
                case pb.SecureSum.SHARES:
                    return member.answer(Request.decode(message.content)).encode()
                case _:
                    raise Refused("the controller asks for something that this learner does not know")

    def erase(self, *, only_old: bool = False) -> None:
        """Delete keys, shares and masked bodies; at the start of a process only what is a week old."""
        if self._folder.is_dir() and self._work.run:
            paths = list(self._folder.iterdir())
            newest = max((path.stat().st_mtime for path in paths), default=0.0)
            if paths and not (only_old and unix_time() - newest < _WEEK):
                policy, refusal = self._policy.ask()
                if refusal is None and policy.peers and self._kit is not None:
                    with self._member(policy) as member:
                        member.erase()
                    self._store().delete("facts")
                    forget_local_models(self._folder)
