"""The controller's end of the wire: who may call, what a message must look like, models in and out by chunks.

It knows no policy. What is received is checked before anything is allocated or kept; what a learner did wrong is
reported in one sentence that its operator reads.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError

from metis.core.layers import Layer
from metis.core.model import Layout
from metis.deployment.controller.audit import AuditLog
from metis.deployment.controller.blobs import BlobMismatch
from metis.deployment.controller.callers import serial_of
from metis.deployment.controller.session import Context, Refused, Session, address_of
from metis.deployment.controller.state import State
from metis.deployment.controller.upload import Received, Unread, Updates, UploadReceiver, first_message
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import Piece, chunk_bytes
from metis.deployment.wire.models import model_bytes
from metis.deployment.wire.protocol import PROTOCOL
from metis.deployment.wire.transfer import read_ahead
from metis.errors import DiskFull, LearnerError, StateError
from metis.system import monotonic

_T = TypeVar("_T")

_MAX_HEADER = 4096  # bytes of an upload's header
_MAX_UPLOADS = 32  # at the same time; the others wait for their turn
_MAX_CALLS = 8  # uploads, and downloads, of one learner at the same time; an honest one has one of each
_MAX_OUTGOING = 32 << 20  # bytes of models that were read and are not sent yet, in all downloads
_MAX_TEXT = 2000
_AUDIT_AGAIN = 300.0  # seconds until the same refusal is audited again
_NOT_LET_IN = {
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
}
_UNREADABLE = "a message could not be decoded: it does not belong to this protocol"


class Streams(Protocol):
    """Where the learners' streams are kept."""

    def admit(self, session: Session, hello: pb.Hello) -> None:
        """Take a new stream in and greet it, or raise `Refused`."""

    def alive(self, learner: str) -> None:
        """Something of the learner came, though not on its stream."""

    def part(self, session: Session) -> None:
        """The stream has ended, for whatever reason."""


class Service:
    """Attend, HandIn, Upload, Download."""

    def __init__(
        self,
        state: State,
        layout: Layout,
        wire: Layer | None,  # the layer that encodes updates, if models do not travel as they are
        streams: Streams,
        hear: Callable[[Session, pb.FromLearner], None],  # a message of an admitted learner; may raise `Refused`
        updates: Updates,
        identify: Callable[[Context], str],
        *,
        largest_number: float,
        refused: Callable[[str, str], None],  # address and reason of a caller that is not let in
        disk_full: Callable[[str], None],
        audit: AuditLog,
        unread: Unread | None = None,
    ) -> None:
        self._audit = audit
        self._state, self._layout = state, layout
        self._streams, self._hear, self._updates = streams, hear, updates
        self._identify, self._refused, self._disk_full = identify, refused, disk_full
        self._receiver = UploadReceiver(
            state, layout, wire, updates, streams.alive, largest_number=largest_number, unread=unread
        )  # fmt: skip
        self._uploads = asyncio.Semaphore(_MAX_UPLOADS)
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of each learner's uploads
        self._downloads = 0  # in progress
        self._downloading: defaultdict[str, set[Context]] = defaultdict(set)  # on each learner's latest connection
        self._uploading: Counter[str] = Counter()  # of each learner, those that wait for their turn too
        self.refusals: dict[str, int] = {}  # calls refused, by status

    # --- one stream for each learner --------------------------------------------------------------

    async def attend(self, requests: AsyncIterator[pb.FromLearner], context: Context) -> None:
        await self._guarded(context, self._attend(requests, context))

    async def _attend(self, requests: AsyncIterator[pb.FromLearner], context: Context) -> None:
        learner = self._identify(context)
        first = await first_message(requests)
        if first is None or first.WhichOneof("message") != "hello":
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a stream must be a Hello")
        self._identify(context)  # it may have been revoked meanwhile
        hello = first.hello
        if hello.protocol != PROTOCOL:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"learner '{learner}' speaks version {hello.protocol} of the protocol ({hello.software[:60]}), this "
                f"controller version {PROTOCOL}: install the same version of Metis at both ends",
            )
        if not 1 <= len(hello.instance) <= 100:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "Hello.instance must have 1 to 100 characters")
        address, serial = address_of(context), serial_of(context)
        session = Session(learner, hello.instance, address, 0)
        self._streams.admit(session, hello)
        self._receiver.interrupt(learner)
        self._downloading.pop(learner, None)  # nobody reads those of an earlier connection
        host = address.rpartition(":")[0]
        self._audit.note_change(
            f"admitted {learner}", (serial, host), "admitted", learner=learner, serial=serial, address=address
        )
        reader = asyncio.create_task(self._read(session, requests))
        try:
            while (message := await session.outbox.get()) is not None:
                await context.write(message)
                if message.HasField("farewell"):
                    if message.farewell.kind == pb.Farewell.FINISHED:
                        await reader  # until the learner hangs up: it has the final model then
                    return
            if reader.done():
                reader.result()  # raises what ended it, if it was the learner's mistake
        finally:
            reader.cancel()
            self._streams.part(session)

    async def _read(self, session: Session, requests: AsyncIterator[pb.FromLearner]) -> None:
        try:
            async for message in requests:
                session.last_heard = monotonic()
                self._hear(session, message)
        finally:
            session.close()

    # --- models -----------------------------------------------------------------------------------

    async def hand_in(self, content: bytes, context: Context) -> pb.Receipt:
        async def receive() -> pb.Receipt:
            learner = self._identify(context)
            self._streams.alive(learner)
            header = pb.UploadHeader.FromString(content)
            if len(content) > _MAX_HEADER + len(header.content):
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "the header is too long")
            return await self._in_turn(learner, lambda: self._receiver.take(learner, header))

        return await self._guarded(context, receive())

    async def _in_turn(self, learner: str, receive: Callable[[], Awaitable[Received | pb.Receipt]]) -> pb.Receipt:
        """Receive an update when it is its turn, and let it count: many may wait, and few are received at once."""
        if self._uploading[learner] >= _MAX_CALLS:
            raise _too_many(learner, "uploads")
        self._uploading[learner] += 1
        try:
            async with self._turns[learner], self._uploads:
                received = await receive()
                return received if isinstance(received, pb.Receipt) else await self._updates.hand_in(received)
        finally:
            self._uploading[learner] -= 1

    async def upload(self, requests: AsyncIterator[pb.UploadPart | Piece], context: Context) -> None:
        async def receive() -> pb.Receipt:
            learner = self._identify(context)
            # A learner that is silent, or calls many times, keeps nobody but itself waiting.
            first = await first_message(requests)
            self._streams.alive(learner)
            if not isinstance(first, pb.UploadPart) or first.ByteSize() > _MAX_HEADER:
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "an upload must begin with its header")
            return await self._in_turn(learner, lambda: self._receiver.receive(learner, first, requests, context))

        await context.write(pb.UploadAnswer(receipt=await self._guarded(context, receive())))

    async def download(self, content: bytes, context: Context) -> AsyncIterator[Piece]:
        try:
            learner = self._identify(context)
            self._streams.alive(learner)
            request = _read_request(content)
            if request.run != self._state.run:
                raise Refused(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"this controller serves run {self._state.run}, not {request.run[:40]!r}",
                )
            if not self._updates.downloadable(learner, request.sha256):
                raise Refused(
                    grpc.StatusCode.NOT_FOUND,
                    f"learner '{learner}' has no task based on model {request.sha256[:12]!r}",
                )
            if request.offset > (length := model_bytes(self._layout)):
                raise Refused(
                    grpc.StatusCode.OUT_OF_RANGE,
                    f"byte {request.offset} was requested, but the model has {length} bytes",
                )
            if len(mine := self._downloading[learner]) >= _MAX_CALLS:
                raise _too_many(learner, "downloads")
            path = self._state.blob_path(request.sha256)
            version, sha256 = self._updates.version_of(learner, request.sha256), request.sha256
            self.model_sent(learner, version, sha256)
        except Refused as refused:
            await self.refuse(context, refused)
            return
        except DiskFull:  # a small one is in the journal, and goes to a file to be sent
            full = "the model could not be read: the controller's disk is full; try again"
            await self.refuse(context, Refused(grpc.StatusCode.UNAVAILABLE, full))
            return
        end = min(length, request.offset + request.length) if request.length else length
        self._downloads += 1
        mine.add(context)
        try:
            size = chunk_bytes(end - request.offset, _MAX_OUTGOING // self._downloads)
            async with aclosing(read_ahead(path, request.offset, end, size)) as pieces:
                async for piece in pieces:
                    yield piece
        except OSError as problem:  # too many open files, or it is not needed any more and gone
            reason = f"the model could not be read: {problem.strerror}; try again"
            await self.refuse(context, Refused(grpc.StatusCode.UNAVAILABLE, reason))
        finally:
            self._downloads -= 1
            mine.discard(context)

    def model_sent(self, learner: str, version: int, sha256: str) -> None:
        """Audit that a learner gets a community model, once."""
        self._audit.note_change(
            f"model {learner}", sha256, "model_sent", learner=learner, version=version, sha256=sha256
        )

    # --- what can go wrong ------------------------------------------------------------------------

    async def _guarded(self, context: Context, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except Refused as refused:
            await self.refuse(context, refused)
        except BlobMismatch as problem:
            await self.refuse(context, Refused(grpc.StatusCode.DATA_LOSS, f"{problem}; send it again"))
        except DiskFull as problem:
            reason = "the disk of the controller is full; keep the update and send it again later"
            self._disk_full(str(problem))
            await self.refuse(context, Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, reason))
        except StateError:
            reason = "the controller has failed and stops; keep the update and come back"
            await self.refuse(context, Refused(grpc.StatusCode.UNAVAILABLE, reason))
        except DecodeError:
            await self.refuse(context, Refused(grpc.StatusCode.INVALID_ARGUMENT, _UNREADABLE))
        raise AssertionError("abort raises")

    async def refuse(self, context: Context, refused: Refused) -> None:
        """End a call; a caller that was not let in is reported, and audited as often."""
        self.refusals[refused.code.name] = self.refusals.get(refused.code.name, 0) + 1
        if refused.code in _NOT_LET_IN:
            address = address_of(context)
            self._refused(address, refused.reason)
            who = None
            with suppress(Refused, LearnerError, KeyError):  # an administrator, or nobody that is known
                who = self._identify(context)
            # Of what the caller wrote nothing is part of the key: it would be audited as often as it likes.
            once = f"refused {address.rpartition(':')[0]} {who} {refused.code.name}"
            self._audit.note_change(
                once, int(monotonic() // _AUDIT_AGAIN), "refused", who=who, address=address, reason=refused.reason
            )
        await context.abort(refused.code, refused.reason[:_MAX_TEXT])


def _too_many(learner: str, what: str) -> Refused:
    reason = f"learner '{learner}' has {_MAX_CALLS} {what} in progress; wait until one has ended"
    return Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)


def _read_request(content: bytes) -> pb.ModelRequest:
    try:
        return pb.ModelRequest.FromString(content)
    except DecodeError:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, _UNREADABLE) from None
