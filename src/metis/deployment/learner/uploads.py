"""Trained updates on their way from the spool to the controller, each until it is answered for good."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import grpc

from metis.deployment.learner.connection import (
    CODE,
    NOT_ALLOWED,
    Backoff,
    Connection,
    ConnectionLost,
    Session,
    detached,
    reason_of,
)
from metis.deployment.learner.downloads import PROGRESS_SECONDS
from metis.deployment.learner.site_log import SiteLog
from metis.deployment.learner.supervisor import Supervisor
from metis.deployment.learner.work import Update, WorkFolder, file_sha256
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import ChunkSize, Piece
from metis.deployment.wire.protocol import TURN
from metis.deployment.wire.transfer import IdleTimeout, read_ahead
from metis.text import size

_RECEIPT_SECONDS = 600.0  # the controller makes several gigabytes durable


class Uploads:
    """Hands in the updates of the spool, one after the other."""

    def __init__(self, supervisor: Supervisor, connection: Connection, work: WorkFolder, log: SiteLog) -> None:
        self._supervisor, self._connection, self._work, self._log = supervisor, connection, work, log
        self.task: int | None = None  # the latest one whose update waits
        self.empty = asyncio.Event()
        self._wake = asyncio.Event()

    def look(self) -> None:
        """Notice what is in the spool now."""
        updates = self._work.updates()
        self.task = updates[-1].task if updates else None
        if updates:
            self.empty.clear()
            self._wake.set()
        else:
            self.empty.set()

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
            if update.run != session.welcome.run or not self._work.update_file(update.task).exists():
                return  # dropped in the meantime, with its run
            began, reason = time.monotonic(), ""
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
                self._acknowledge(update, receipt, time.monotonic() - began)
                return
            self._supervisor.retrying(f"task {update.task}: the update is not handed in yet: {reason}")
            await asyncio.sleep(backoff.next())

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
            return await asyncio.to_thread(file_sha256, self._work.update_file(update.task)) != update.sha256
        except OSError:
            return True

    async def upload(self, session: Session, update: Update) -> pb.Receipt:
        """Send the update once."""
        header = pb.UploadHeader(
            run=update.run,
            task=update.task,
            steps=update.steps,
            seconds=update.seconds,
            time_per_batch=update.time_per_batch,
            loss=update.loss,
            bytes=update.bytes,
            compression_error=update.compression_error,
        )
        call = session.calls.upload()
        try:
            await asyncio.wait_for(call.write(pb.UploadPart(header=header)), PROGRESS_SECONDS)
            # Its turn, or the answer already; one more write would then hide what the answer is.
            if TURN[0] in tuple(await asyncio.wait_for(call.initial_metadata(), _RECEIPT_SECONDS)):
                await self._send(call, session, update)
                await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # it was answered before its end: the answer contains the reason
        except BaseException:
            call.cancel()
            raise
        return await asyncio.wait_for(_receipt(call), _RECEIPT_SECONDS)

    async def _send(self, call: Any, session: Session, update: Update) -> None:
        """Chunks and end."""
        chunk_size = ChunkSize(session.chunk_bytes)
        reading = read_ahead(self._work.update_file(update.task), 0, lambda: chunk_size.bytes, chunk_size.took)
        with IdleTimeout(PROGRESS_SECONDS) as idle_timeout:
            async with contextlib.aclosing(reading) as pieces:
                async for offset, data in pieces:
                    await idle_timeout.wait(call.write(Piece(offset, data)))
            end = pb.UploadEnd(bytes=update.bytes, sha256=update.sha256)
            await idle_timeout.wait(call.write(pb.UploadPart(end=end)))


async def _receipt(call: Any) -> pb.Receipt:
    receipt: pb.Receipt = await call
    return receipt
