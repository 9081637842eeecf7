"""Trained updates on their way from the spool to the controller, each until it is answered for good."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc

from metis.deployment.learner import outgoing
from metis.deployment.learner.connection import (
    CODE,
    NOT_ALLOWED,
    Backoff,
    Connection,
    ConnectionLost,
    Session,
    detached,
    read,
    reason_of,
)
from metis.deployment.learner.downloads import PROGRESS_SECONDS
from metis.deployment.learner.site_log import SiteLog
from metis.deployment.learner.supervisor import Supervisor
from metis.deployment.learner.work import Update, WorkFolder
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import Stretch, chunk_bytes, part_front, travels_inside
from metis.deployment.wire.model_mac import has_checksum
from metis.deployment.wire.transfer import IdleTimeout, read_ahead
from metis.errors import DataError
from metis.system import monotonic
from metis.text import size

PROMPT_SECONDS = 1.0  # within which the receipt of a small update mostly comes
_RECEIPT_SECONDS = 600.0  # the controller makes several gigabytes durable


class Uploads:
    """Hands in the updates of the spool, one after the other."""

    def __init__(
        self, supervisor: Supervisor, connection: Connection, work: WorkFolder, log: SiteLog, stretch: Stretch
    ) -> None:
        self._supervisor, self._connection, self._work, self._log = supervisor, connection, work, log
        self._stretch = stretch
        self.task: int | None = None  # the latest one whose update waits
        self.empty = asyncio.Event()
        self._wake = asyncio.Event()
        self._syncing: set[int] = set()  # tasks whose updates are synced soon, unless there is a receipt before

    def look(self) -> None:
        """Notice what is in the spool now."""
        updates = self._work.updates()
        self.task = max((update.task for update in updates if not update.again), default=None)
        for task in self._work.unsynced - self._syncing:
            self._syncing.add(task)
            self._supervisor.start(self._sync(task))
        if updates:
            self.empty.clear()
            self._wake.set()
        else:
            self.empty.set()

    async def _sync(self, task: int) -> None:
        """Where the receipt of an update does not come promptly, have it survive a loss of power."""
        backoff = Backoff()
        await asyncio.sleep(PROMPT_SECONDS)
        while task in self._work.unsynced:
            try:
                await asyncio.to_thread(self._work.sync, task)
            except OSError as problem:
                where = self._work.update_file(task)
                self._supervisor.retrying(f"task {task}: {where} could not be synced: {problem.strerror}")
                await asyncio.sleep(backoff.next(PROMPT_SECONDS))
        self._syncing.discard(task)

    def has(self, task: int) -> bool:
        """Whether this task is trained already; then its update is handed in."""
        found = any(update.task == task for update in self._work.updates())
        if found:
            self._wake.set()
        return found

    async def keep_handing_in(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            for update in self._work.updates():
                await self._hand_in(update)
            self.look()

    async def _hand_in(self, update: Update) -> None:
        """Send the update until it is answered for good, however long that takes."""
        backoff, not_allowed = Backoff(), 0
        while True:
            session = await self._connection.connected()
            if update.run != session.welcome.run or update not in self._work.updates():
                return  # dropped in the meantime, with its run
            if not self._work.update_file(update.task).exists():
                self._give_up(update, f"its file is not in {self._work.folder} any more")
                return
            began, reason = monotonic(), ""
            try:
                receipt = await detached(self.upload(session, update))
            except grpc.aio.AioRpcError as problem:
                code, reason = problem.code(), reason_of(problem)
                if code in (CODE.INVALID_ARGUMENT, CODE.ALREADY_EXISTS):
                    self._give_up(update, reason)
                    return
                if code == CODE.DATA_LOSS and await self._damaged(update):
                    self._give_up(update, f"its file in {self._work.folder} is damaged")
                    return
                if code in NOT_ALLOWED:
                    not_allowed += 1
                    if not_allowed > 1:
                        text = f"the controller refuses the update of task {update.task}: {reason}"
                        self._supervisor.end(2, "error", text)
                        return
                    session.cut()
            except asyncio.TimeoutError:
                reason = "nothing moved for too long"
            except ConnectionLost as problem:
                reason = str(problem)
            except OSError as problem:
                self._give_up(update, f"its file cannot be read: {problem.strerror}")
                return
            else:
                self._acknowledge(update, receipt, monotonic() - began)
                return
            self._supervisor.retrying(f"task {update.task}: the update is not handed in yet: {reason}")
            await asyncio.sleep(backoff.next(self._connection.heartbeat))

    def _acknowledge(self, update: Update, receipt: pb.Receipt, seconds: float) -> None:
        report = self._supervisor.report
        match receipt.verdict:
            case pb.Receipt.REFUSED:
                report("refused", f"task {update.task}: the update does not count: {receipt.reason}")
            case pb.Receipt.ALREADY:
                report("handed_in", f"task {update.task}: the controller had the update already")
            case _:
                report("handed_in", f"task {update.task}: handed in, {size(update.bytes)} in {seconds:.1f} s")
        self._forget(update)

    def _forget(self, update: Update) -> None:
        self._work.drop(update.task)
        if self.task == update.task:
            self.task = None

    def _give_up(self, update: Update, reason: str) -> None:
        self._forget(update)
        cause = self._log.failed(pb.Cause.UPDATE_LOST, f"task {update.task}: the update is dropped: {reason}")
        self._connection.send_failed(update.task, cause, update.steps, update.seconds)

    async def _damaged(self, update: Update) -> bool:
        try:
            return not await asyncio.to_thread(has_checksum, self._work.update_file(update.task), update.checksum)
        except (OSError, DataError):
            return True

    async def upload(self, session: Session, update: Update) -> pb.Receipt:
        """Send the update once, from where an earlier attempt ended."""
        if travels_inside(update.bytes) and update.bytes <= session.chunk_bytes:
            return await self._send_small(session, update)
        call = session.calls.upload()
        answers = _Answers(call, session)
        try:
            header = pb.UploadPart(header=outgoing.header(update))
            await asyncio.wait_for(call.write(header), PROGRESS_SECONDS)
            offset = await answers.first(_RECEIPT_SECONDS)  # when its turn has come
            if offset is not None:
                await self._send(call, session, update, min(offset, update.bytes), answers)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # it was answered before its end: the answer contains the reason
        except BaseException:
            self._stretch.lost()
            await answers.close()
            raise
        try:
            return await answers.receipt(_RECEIPT_SECONDS)
        except BaseException:
            self._stretch.lost()
            raise
        finally:
            await answers.close()

    async def _send_small(self, session: Session, update: Update) -> pb.Receipt:
        """All bytes at once, with their header."""
        reading = read_ahead(self._work.update_file(update.task), 0, update.bytes, update.bytes)
        async with contextlib.aclosing(reading) as pieces:
            content = b"".join([bytes(piece.data) async for piece in pieces])
        with IdleTimeout(_RECEIPT_SECONDS) as idle_timeout:
            return await idle_timeout.wait(session.calls.hand_in(outgoing.header(update, content)))

    async def _send(self, call: Any, session: Session, update: Update, offset: int, answers: _Answers) -> None:
        """Chunks in stretches, each of which is acknowledged before the next one is sent, and the end."""
        with IdleTimeout(PROGRESS_SECONDS) as idle_timeout:
            while offset < update.bytes:
                began, stretch = monotonic(), min(self._stretch.bytes, update.bytes - offset)
                reading = read_ahead(
                    self._work.update_file(update.task), offset, offset + stretch,
                    chunk_bytes(stretch, session.chunk_bytes), part_front,
                )  # fmt: skip
                async with contextlib.aclosing(reading) as pieces:
                    async for piece in pieces:
                        await idle_timeout.wait(call.write(piece))
                offset += stretch
                if offset < update.bytes:
                    await idle_timeout.wait(call.write(pb.UploadPart(acknowledge=True)))
                    await answers.acknowledged(offset)
                    self._stretch.took(stretch, monotonic() - began)
            end = pb.UploadEnd(bytes=update.bytes, sha256=update.sha256)
            await idle_timeout.wait(call.write(pb.UploadPart(end=end)))
            await call.done_writing()


class _Answers:
    """What the controller answers during an upload; read all the time, since each answer shows that the line works."""

    def __init__(self, call: Any, session: Session) -> None:
        self._call, self._session = call, session
        self._received: int | None = None
        self._changed = asyncio.Event()
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> pb.Receipt:
        try:
            while (answer := await read(self._call)) is not None and not answer.HasField("receipt"):
                self._session.heard()
                self._received = answer.received
                self._changed.set()
            if answer is None:
                raise ConnectionLost
            receipt: pb.Receipt = answer.receipt
            return receipt
        finally:
            self._changed.set()

    async def first(self, seconds: float) -> int | None:
        """From which byte on to send; None if there is an answer already."""
        await asyncio.wait_for(self._changed.wait(), seconds)
        return self._received

    async def acknowledged(self, offset: int) -> None:
        """Wait until so many bytes are received, or the call has ended.

        For as long as anything at all arrives: the session's watch decides when the line is dead.
        """
        while (self._received or 0) < offset and not self._reading.done():
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), _RECEIPT_SECONDS)

    async def receipt(self, seconds: float) -> pb.Receipt:
        return await asyncio.wait_for(self._reading, seconds)

    async def close(self) -> None:
        self._call.cancel()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
