"""A learner's part in masked rounds: whom it trusts is in its own files, and what it signs is durable before it leaves.

The keys of a round, what was masked and what was voted for are in `sums/` of the work folder, which only its owner can
read. They go when the next round is accepted, at the end of the federation, and when they are a week old.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metis.core.model import Layout
from metis.core.secure_sum import MOST_STEPS, Opening, Pins, Request, Statement
from metis.deployment.learner.connection import Connection
from metis.deployment.learner.downloads import TaskFailed
from metis.deployment.learner.site_policy import PolicyFile, SitePolicy
from metis.deployment.learner.supervisor import Supervisor
from metis.deployment.learner.work import WorkFolder
from metis.deployment.security.identity import load_kit, signing_identity
from metis.deployment.storage import file_sha256
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.secure import settings_hash
from metis.errors import ArgumentError, ConfigError, Refused
from metis.privacy.keys import Peers
from metis.privacy.member import Member
from metis.privacy.store import FolderStore
from metis.system import unix_time

_WEEK = 7 * 86400.0


class Sums:
    """Answers what masked rounds ask of this learner; without a certificate it refuses."""

    def __init__(
        self,
        supervisor: Supervisor,
        connection: Connection,
        work: WorkFolder,
        policy: PolicyFile,
        kit: Path | None,
    ) -> None:
        self._supervisor, self._connection, self._work, self._policy = supervisor, connection, work, policy
        self._kit = kit  # with this site's certificate, its key and the CA
        self._folder = work.folder / "sums"
        self._lock = asyncio.Lock()  # one thing after the other: each reads and writes the same file

    @contextmanager
    def _member(self, policy: SitePolicy) -> Iterator[Member]:
        """While the training process, which masks, neither reads nor writes."""
        if self._kit is None:
            raise Refused("this federation masks its sums, for which a learner needs its certificate (--identity DIR)")
        if not policy.peers:
            raise Refused(
                "this federation masks its sums; name the learners to take part with: peers in the site policy"
            )
        try:
            pins = Pins(frozenset(policy.peers), policy.colluders)
        except ArgumentError as problem:
            raise Refused(f"the site policy cannot be used: {problem}") from None
        identity, peers, store = signing_identity(self._kit), Peers(load_kit(self._kit).authority), self._store()
        with store.locked():
            yield Member(identity, peers, pins, self._work.run, store)

    def _store(self) -> FolderStore:
        return FolderStore(self._folder)

    async def accept(self, task: pb.Task, model: Path, policy: SitePolicy) -> dict[str, Any] | None:
        """What the training process needs to mask this task; None if it is not masked. Raises `TaskFailed`."""
        announced: Any = task.opening
        if not announced:
            return None
        async with self._lock:
            try:
                return await asyncio.to_thread(self._accept, task, model, policy)
            except (Refused, ConfigError) as problem:
                raise TaskFailed(str(problem), pb.Cause.SITE_POLICY) from problem

    def _accept(self, task: pb.Task, model: Path, policy: SitePolicy) -> dict[str, Any]:
        announced: Any = task.opening
        opening = Opening.decode(announced)
        fewest = policy.min_masked_members or 0
        if len(opening.names) < fewest:
            raise Refused(f"the round has {len(opening.names)} members; this site wants {fewest} (min_masked_members)")
        welcome = self._connection.welcome
        steps = min(task.steps if task.HasField("steps") else MOST_STEPS, MOST_STEPS)
        mine = {place.name: place.steps for place in opening.members}.get(welcome.learner)
        rate = task.rate if task.HasField("rate") else 1.0
        if (opening.version, opening.rate, mine) != (task.version, rate, steps):
            raise Refused("the task is not the one that its opening describes")
        layout = Layout.from_json(json.loads(welcome.layout))
        with self._member(policy) as member:
            member.accept(
                opening,
                model=bytes.fromhex(file_sha256(model)),  # of the bytes that are trained on, whatever was announced
                layout=layout,
                settings=settings_hash(welcome.settings),
                extra_vectors=int(layout.control.size > 0),
            )
        return {
            "identity": str(self._kit),
            "store": str(self._folder),
            "run": self._work.run,
            "opening": announced.hex(),
        }

    def hear(self, message: pb.SecureSum) -> None:
        """Something that a masked round asks of this member."""
        self._supervisor.start(self._answer(message))

    async def _answer(self, message: pb.SecureSum) -> None:
        policy, refusal = self._policy.ask()
        if refusal is not None:
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
