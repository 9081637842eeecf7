"""Community models on their way from the controller into the work folder, checked bit by bit."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path

import grpc

from metis.deployment.learner.connection import (
    CODE,
    RETRIED,
    Backoff,
    Calls,
    Connection,
    ConnectionLost,
    detached,
    read,
    reason_of,
)
from metis.deployment.learner.supervisor import Supervisor
from metis.deployment.learner.work import Incoming, WorkFolder
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import CHUNK, Stretch
from metis.deployment.wire.transfer import Bytes, IdleTimeout, Intake, ended, in_background
from metis.system import monotonic

PROGRESS_SECONDS = 60.0  # a transfer may take as long as it likes if something moves
_MAX_AHEAD = 8 * CHUNK  # bytes that were received and are not processed yet
_MAX_MISMATCHES = 3


class TaskFailed(Exception):
    """The current task ends without a model; the controller hears of its kind only."""

    def __init__(
        self,
        reason: str,
        kind: pb.Cause.Kind = pb.Cause.MODEL_NOT_FETCHED,
        rule: pb.Cause.Rule = pb.Cause.NO_RULE,  # of the site policy
    ) -> None:
        super().__init__(reason)
        self.kind, self.rule = kind, rule


class Downloads:
    """Fetches community models; goes on where an earlier attempt ended."""

    def __init__(self, supervisor: Supervisor, connection: Connection, work: WorkFolder, stretch: Stretch) -> None:
        self._supervisor, self._connection, self._work = supervisor, connection, work
        self._stretch = stretch
        self.received = 0  # bytes of models so far
        self._one_at_a_time = asyncio.Lock()  # what a task that was abandoned still writes may go to the same file
        self.in_use = ""  # SHA-256 of a model that must stay although another one is fetched

    async def fetch(self, task: pb.Task | pb.Evaluate) -> Path:
        """The community model of the task, as a file whose every bit was checked."""
        backoff, mismatches = Backoff(), 0
        while True:
            session = await self._connection.connected()
            try:
                content = task.model if isinstance(task, pb.Task) and not mismatches else b""
                if await detached(self.obtain(session.calls, task.sha256, task.bytes, task.seal, content)):
                    return self._work.model_file(task.sha256)
                mismatches += 1
                if mismatches >= _MAX_MISMATCHES:
                    raise TaskFailed(f"community model {task.version} did not arrive as it was announced")
            except grpc.aio.AioRpcError as problem:
                if problem.code() == CODE.NOT_FOUND:
                    raise TaskFailed(
                        f"community model {task.version} cannot be fetched: {reason_of(problem)}"
                    ) from problem
                if problem.code() not in RETRIED:
                    session.cut()  # the next stream shows whether this learner may stay
                self._supervisor.retrying(f"community model {task.version}: {reason_of(problem)}")
            except asyncio.TimeoutError:
                self._supervisor.retrying(f"community model {task.version}: nothing arrived for too long")
            except ConnectionLost:
                pass  # with the stream, which is dialled again
            await asyncio.sleep(backoff.next(self._connection.heartbeat))

    async def obtain(
        self, calls: Calls, sha256: str, length: int, model_mac: bytes = b"", content: bytes = b""
    ) -> bool:  # fmt: skip
        """Have the model in its file; False if something else arrived. Of a small one the content is here already."""
        if not (len(sha256) == 64 and set(sha256) <= set("0123456789abcdef")):
            raise TaskFailed("the controller names a model by something that is not a SHA-256")
        async with self._one_at_a_time:
            return await self._obtain(calls, sha256, length, model_mac, content)

    async def _obtain(self, calls: Calls, sha256: str, length: int, model_mac: bytes, content: bytes) -> bool:
        try:
            if content:
                return self._keep(sha256, length, model_mac, content)
            incoming = await self._opened(sha256, length, model_mac)
        except OSError as problem:
            raise TaskFailed(self._no_room(sha256, problem), pb.Cause.DISK) from problem
        if incoming is None:
            return True

        def make_room() -> None:
            self._work.forget_models({sha256, self.in_use})
            incoming.reserve()

        making_room = in_background(make_room)

        def append(pieces: Sequence[Bytes]) -> None:
            making_room.result()  # takes a while, in which the first bytes may arrive
            incoming.append(pieces)

        intake = Intake(append)
        try:
            if incoming.received < length:
                await self._receive(calls, incoming, intake, sha256, length)
            await intake.finish()
            return await asyncio.to_thread(incoming.commit)
        except asyncio.TimeoutError:  # nothing arrived; since Python 3.11 it is an OSError too
            raise
        except OSError as problem:
            self._work.forget_models(set())  # half a model on a full disk helps nobody
            raise TaskFailed(self._no_room(sha256, problem), pb.Cause.DISK) from problem
        finally:
            await intake.end()
            await ended(asyncio.wrap_future(making_room))  # it uses the file too
            incoming.close()

    async def _opened(self, sha256: str, length: int, model_mac: bytes) -> Incoming | None:
        """Where the model comes; closed if nobody waits for it any more."""
        opening = asyncio.ensure_future(asyncio.to_thread(self._work.incoming, sha256, length, model_mac))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            await ended(opening)
            if not opening.cancelled() and opening.exception() is None and (incoming := opening.result()) is not None:
                incoming.close()
            raise

    def _keep(self, sha256: str, length: int, model_mac: bytes, content: bytes) -> bool:
        """A small model came with its task; nothing is synced, so writing it takes less than a thread would."""
        self._work.forget_models({sha256, self.in_use})
        self.received += len(content)
        return self._work.put_model(sha256, length, model_mac, content)

    async def _receive(self, calls: Calls, incoming: Incoming, intake: Intake, sha256: str, length: int) -> None:
        """Stretch by stretch, so that no more than one of them is on its way and must be sent again after a cut."""
        expected = incoming.received
        while expected < length:
            began, stretch = monotonic(), min(self._stretch.bytes, length - expected)
            call = calls.download(
                pb.ModelRequest(run=self._work.run, sha256=sha256, offset=expected, length=stretch)
            )  # fmt: skip
            end = expected + stretch
            try:
                with IdleTimeout(PROGRESS_SECONDS) as idle_timeout:
                    while expected < end:
                        chunk = await idle_timeout.wait(read(call))
                        if chunk is None or chunk.offset != expected or expected + len(chunk.data) > length:
                            return
                        expected += len(chunk.data)
                        self.received += len(chunk.data)
                        self._connection.heard()
                        incoming.check(chunk.data)
                        await intake.put(chunk.data, _MAX_AHEAD)
            except BaseException:
                self._stretch.lost()
                raise
            finally:
                call.cancel()
            self._stretch.took(stretch, monotonic() - began)

    def _no_room(self, sha256: str, problem: OSError) -> str:
        full = ": the disk of the learner is full" if problem.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"the community model cannot be kept in {self._work.model_file(sha256)}{full} ({problem.strerror})"
