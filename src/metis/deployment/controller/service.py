"""The controller's end of the wire: who may speak, what a message must look like, models in and out by chunks.

It knows no policy. What is received is checked before anything is allocated or kept; what a learner did wrong is
told in one sentence that its operator reads.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from metis.core.compression import Compression
from metis.core.model import Layout, Model
from metis.deployment.controller.state import BlobMismatch, DiskFull, Incoming, State
from metis.deployment.security.identity import Revocations, check_name, moment, now_utc, peer_of
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.protocol import (
    CHUNK,
    PROTOCOL,
    SMALLEST_CHUNK,
    TURN,
    ChunkSize,
    Piece,
    model_bytes,
    model_parts,
)
from metis.deployment.wire.transfer import Bytes, IdleTimeout, Intake, ended, read_ahead
from metis.errors import ConfigError, LearnerError

Context = Any  # grpc.aio.ServicerContext; its stubs are generic in ways that help nobody
_T = TypeVar("_T")

_HELLO_SECONDS = 15.0
_PROGRESS_SECONDS = 60.0  # an upload may take for ever as long as something comes
_MOST_UPLOADS = 32  # at the same time; the others wait for their turn
_MOST_AHEAD = 3 * CHUNK  # bytes of a model that were received and are not worked on yet
_MOST_INCOMING = 32 << 20  # the same of all models
_MOST_OUTGOING = 32 << 20  # bytes of models that were read and are not sent yet, in all downloads
_MOST_TEXT = 2000
_TELL_AGAIN = 300.0  # seconds, of a refusal that is the same
_NOT_LET_IN = {
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
}
_UNREADABLE = "a message could not be read: it is none of this protocol"


def address_of(context: Context) -> str:
    """Where a call comes from, as a person would write it."""
    kind, _, rest = unquote(str(context.peer())).partition(":")
    return rest if kind in ("ipv4", "ipv6") else f"{kind}:{rest}"


class Refused(Exception):
    """A call that ends here, with a status and a sentence for the operator of the site."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


@dataclass(eq=False)
class Session:
    """One learner's stream."""

    learner: str
    instance: str
    address: str
    epoch: int
    outbox: asyncio.Queue[pb.ToLearner | None] = field(default_factory=asyncio.Queue)
    last_heard: float = field(default_factory=time.monotonic)
    ready: pb.Ready | None = None
    held_task: int | None = None  # what the learner says that it has in hand
    steps: int = 0

    def send(self, **message: Any) -> None:
        self.outbox.put_nowait(pb.ToLearner(**message))

    def close(self) -> None:
        self.outbox.put_nowait(None)


@dataclass(frozen=True)
class Handed:
    """A local model that came whole, or what is wrong with it; a blob holds it unless its task was answered before."""

    learner: str
    header: pb.UploadHeader
    blob: str | None
    problem: str | None = None


class Host(Protocol):
    """The process behind the service."""

    run: str
    layout: Layout
    state: State
    compression: Compression | None  # of what learners hand in

    def base_model(self, learner: str, task: int) -> Model | None:
        """The community model that this open task of the learner is based on; None if it is not open."""

    def admit(self, session: Session, hello: pb.Hello) -> None:
        """Take a new stream in and greet it, or raise `Refused`."""

    def hear(self, session: Session, message: pb.FromLearner) -> None:
        """A message of an admitted learner; may raise `Refused`."""

    def alive(self, learner: str) -> None:
        """Something of the learner came, though not on its stream."""

    def part(self, session: Session) -> None:
        """The stream has ended, for whatever reason."""

    def check_upload(self, learner: str, header: pb.UploadHeader) -> pb.Receipt | None:
        """The answer if none of its bytes are needed; None to receive it. Raises `Refused` if it is not its own."""

    async def hand_in(self, handed: Handed) -> pb.Receipt:
        """Make the update durable and let it count."""

    def downloadable(self, learner: str, sha256: str) -> bool:
        """Whether this learner has a task that is based on this model, or the federation has ended with it."""


class Service:
    """Attend, Upload, Download."""

    def __init__(
        self, host: Host, identify: Callable[[Context], str], *, largest_number: float, report: Callable[[str], None]
    ) -> None:
        self._host, self._identify, self._report = host, identify, report
        self._largest_number = largest_number
        self._uploads = asyncio.Semaphore(_MOST_UPLOADS)
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of each learner's uploads
        self._receiving = 0  # uploads in progress
        self._downloads = 0  # in progress
        self.refusals: dict[str, int] = {}  # calls refused, by status
        self._told: dict[str, float] = {}  # reasons, and when they were reported

    # --- one stream for each learner --------------------------------------------------------------

    async def attend(self, requests: AsyncIterator[pb.FromLearner], context: Context) -> None:
        await self._guarded(context, self._attend(requests, context))

    async def _attend(self, requests: AsyncIterator[pb.FromLearner], context: Context) -> None:
        learner = self._identify(context)
        first = await _first(requests)
        if first is None or first.WhichOneof("message") != "hello":
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a stream must be a Hello")
        hello = first.hello
        if hello.protocol != PROTOCOL:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"learner '{learner}' speaks version {hello.protocol} of the protocol ({hello.software[:60]}), this "
                f"controller version {PROTOCOL}: install the same version of Metis at both ends",
            )
        if not 1 <= len(hello.instance) <= 100:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "Hello.instance must have 1 to 100 characters")
        session = Session(learner, hello.instance, address_of(context), 0)
        self._host.admit(session, hello)
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
            self._host.part(session)

    async def _read(self, session: Session, requests: AsyncIterator[pb.FromLearner]) -> None:
        try:
            async for message in requests:
                session.last_heard = time.monotonic()
                self._host.hear(session, message)
        finally:
            session.close()

    # --- models -----------------------------------------------------------------------------------

    async def upload(self, requests: AsyncIterator[pb.UploadPart | Piece], context: Context) -> pb.Receipt:
        async def receive() -> pb.Receipt:
            learner = self._identify(context)
            # A learner that is silent, or calls many times, keeps nobody but itself waiting.
            first = await _first(requests)
            async with self._turns[learner], self._uploads:
                received = await self._receive(learner, first, requests, context)
                return received if isinstance(received, pb.Receipt) else await self._host.hand_in(received)

        return await self._guarded(context, receive())

    async def _receive(
        self,
        learner: str,
        first: pb.UploadPart | Piece | None,
        requests: AsyncIterator[pb.UploadPart | Piece],
        context: Context,
    ) -> Handed | pb.Receipt:
        """Stream the model to disk, hashing and checking on the way; only an explicit end makes it one."""
        if not isinstance(first, pb.UploadPart) or first.WhichOneof("part") != "header":
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "an upload must begin with its header")
        header, compression = first.header, self._host.compression
        length = model_bytes(self._host.layout) if compression is None else compression.nbytes(self._host.layout)
        if header.run != self._host.run:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this update belongs to run {header.run[:40]!r}, here runs {self._host.run}",
            )
        if header.bytes != length:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the model is announced with {header.bytes} bytes, a model of this federation has {length}",
            )
        answer = self._host.check_upload(learner, header)
        if answer is not None:
            return answer
        await context.send_initial_metadata(TURN)  # until now a learner sends no more than the header
        with self._host.state.incoming() as incoming:
            numbers = _Numbers(self._host.layout, self._largest_number)
            if compression is None:
                end = await self._take_in(learner, requests, length, incoming, numbers)
                concluding = _in_thread(self._conclude, learner, header, incoming, numbers, end)
            else:
                base = self._host.base_model(learner, header.task)
                end = await self._take_in(learner, requests, length, incoming, None)
                concluding = _in_thread(self._unpack, learner, header, incoming, numbers, end, compression, base)
            try:
                return await asyncio.shield(concluding)
            finally:
                await ended(concluding)

    async def _take_in(
        self,
        learner: str,
        requests: AsyncIterator[pb.UploadPart | Piece],
        length: int,
        incoming: Incoming,
        numbers: _Numbers | None,
    ) -> pb.UploadEnd:
        """Everything between header and end; chunks are hashed, looked at and written while the next ones travel."""
        received = looked_at = 0

        def look(data: Bytes) -> None:
            nonlocal looked_at
            incoming.hash(data)
            if numbers is not None:
                numbers.look_at(looked_at, data)
            looked_at += len(data)

        def take(data: Bytes) -> None:
            look(data)
            incoming.append(data)

        intake = Intake(look, incoming.append) if length > CHUNK else Intake(take)
        self._receiving += 1
        try:
            with IdleTimeout(_PROGRESS_SECONDS) as idle_timeout:
                while True:
                    part = await _next(requests, idle_timeout)
                    self._host.alive(learner)  # on a slow line its heartbeats wait behind its model
                    match part:
                        case Piece():
                            offset, data = part.offset, part.data
                            if offset != received:
                                raise Refused(
                                    grpc.StatusCode.OUT_OF_RANGE,
                                    f"a chunk at byte {offset} came where byte {received} was expected",
                                )
                            if not data or received + len(data) > length or len(data) % 4:
                                raise Refused(
                                    grpc.StatusCode.INVALID_ARGUMENT,
                                    f"a chunk of {len(data)} bytes at byte {received} does not fit a model of {length}",
                                )
                            received += len(data)
                            await intake.put(data, min(_MOST_AHEAD, _MOST_INCOMING // self._receiving))
                        case pb.UploadPart() if part.WhichOneof("part") == "end":
                            if received != length:
                                raise Refused(
                                    grpc.StatusCode.INVALID_ARGUMENT,
                                    f"the model has {received} bytes, announced were {length}",
                                )
                            await intake.finish()
                            return part.end
                        case None:
                            raise Refused(
                                grpc.StatusCode.ABORTED,
                                f"the upload ended after {received} of {length} bytes without its end message; send it "
                                "again",
                            )
                        case _:
                            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "only chunks and one end follow a header")
        except asyncio.TimeoutError:
            raise _silent(_PROGRESS_SECONDS) from None
        finally:
            self._receiving -= 1
            await intake.end()

    def _conclude(
        self, learner: str, header: pb.UploadHeader, incoming: Incoming, numbers: _Numbers, end: pb.UploadEnd
    ) -> Handed:
        """Keep what came, if it may be needed; of any other upload nothing stays, however often it is sent."""
        whole = (incoming.bytes, incoming.sha256) == (end.bytes, end.sha256)
        problem = numbers.problem() if whole else None
        if whole and (problem is not None or self._host.state.find(header.task) is not None):
            return Handed(learner, header, None if problem else incoming.sha256, problem)
        return Handed(learner, header, incoming.commit(end.bytes, end.sha256))

    def _unpack(
        self,
        learner: str,
        header: pb.UploadHeader,
        incoming: Incoming,
        numbers: _Numbers,
        end: pb.UploadEnd,
        compression: Compression,
        base: Model | None,
    ) -> Handed:
        """Keep the local model that a compressed update stands for, if it may be needed."""
        if (incoming.bytes, incoming.sha256) != (end.bytes, end.sha256):
            incoming.commit(end.bytes, end.sha256)  # raises
        known = self._host.state.find(header.task)
        if known is not None or base is None:  # what it was based on may be gone: the first one counts
            return Handed(learner, header, None if known is None else known.blob)
        try:
            model = compression.restore(incoming.content(), base)
        except ValueError as problem:
            return Handed(learner, header, None, str(problem))
        parts = model_parts(model)
        numbers.look_at(0, parts[0])
        wrong = numbers.problem()
        if wrong is not None:
            return Handed(learner, header, None, wrong)
        with self._host.state.incoming() as whole:
            for part in parts:
                whole.write(part)
            return Handed(learner, header, whole.commit(whole.bytes, whole.sha256))

    async def download(self, content: bytes, context: Context) -> AsyncIterator[Piece]:
        try:
            learner = self._identify(context)
            request = _read_request(content)
            if request.run != self._host.run:
                raise Refused(
                    grpc.StatusCode.FAILED_PRECONDITION, f"here runs {self._host.run}, not {request.run[:40]!r}"
                )
            if not self._host.downloadable(learner, request.sha256):
                raise Refused(
                    grpc.StatusCode.NOT_FOUND,
                    f"learner '{learner}' has no task that is based on model {request.sha256[:12]!r}",
                )
            if request.offset > (length := model_bytes(self._host.layout)):
                raise Refused(
                    grpc.StatusCode.OUT_OF_RANGE, f"byte {request.offset} is asked for, the model has {length} bytes"
                )
            path = self._host.state.blob_path(request.sha256)
        except Refused as refused:
            await self._abort(context, refused)
            return
        chunk_size = ChunkSize(CHUNK)
        self._downloads += 1
        try:
            async with aclosing(
                read_ahead(path, request.offset, lambda: self._chunk(chunk_size), chunk_size.took)
            ) as pieces:  # fmt: skip
                async for offset, data in pieces:
                    yield Piece(offset, data)
        finally:
            self._downloads -= 1

    def _chunk(self, chunk_size: ChunkSize) -> int:
        """Bytes to read at once; smaller ones for many learners, so that memory does not grow with them."""
        return max(SMALLEST_CHUNK, min(chunk_size.bytes, _MOST_OUTGOING // self._downloads))

    # --- what can go wrong ------------------------------------------------------------------------

    async def _guarded(self, context: Context, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except Refused as refused:
            await self._abort(context, refused)
        except BlobMismatch as problem:
            await self._abort(context, Refused(grpc.StatusCode.DATA_LOSS, f"{problem}; send it again"))
        except DiskFull:
            reason = "the disk of the controller is full; keep the update and send it again later"
            self._report("the disk is full: no update is accepted until there is space again")
            await self._abort(context, Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, reason))
        except DecodeError:
            await self._abort(context, Refused(grpc.StatusCode.INVALID_ARGUMENT, _UNREADABLE))
        raise AssertionError("abort raises")

    async def _abort(self, context: Context, refused: Refused) -> None:
        self.refusals[refused.code.name] = self.refusals.get(refused.code.name, 0) + 1
        if refused.code in _NOT_LET_IN:
            self._tell(f"a call from {address_of(context)} is refused: {refused.reason}", refused.reason)
        await context.abort(refused.code, refused.reason[:_MOST_TEXT])

    def _tell(self, line: str, key: str) -> None:
        """Say it to the operator of the controller, but not again and again while a learner keeps trying."""
        now = time.monotonic()
        if len(self._told) > 1000:
            self._told.clear()
        if now - self._told.get(key, -math.inf) >= _TELL_AGAIN:
            self._told[key] = now
            self._report(line[:_MOST_TEXT])


async def _next(requests: AsyncIterator[_T], idle_timeout: IdleTimeout) -> _T | None:
    """The next message; None at the end of the stream, which is also how a killed learner looks."""
    try:
        return await idle_timeout.wait(requests.__anext__())
    except StopAsyncIteration:
        return None


async def _first(requests: AsyncIterator[_T]) -> _T | None:
    """The first message of a call."""
    try:
        with IdleTimeout(_HELLO_SECONDS) as idle_timeout:
            return await _next(requests, idle_timeout)
    except asyncio.TimeoutError:
        raise _silent(_HELLO_SECONDS) from None


def _silent(seconds: float) -> Refused:
    return Refused(grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing came for {seconds:g} seconds")


def _read_request(content: bytes) -> pb.ModelRequest:
    try:
        return pb.ModelRequest.FromString(content)
    except DecodeError:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, _UNREADABLE) from None


def _in_thread(work: Callable[..., _T], *arguments: object) -> asyncio.Future[_T]:
    """Work with a file, which goes on when the call is cancelled; to be awaited behind a shield and with `ended`."""
    return asyncio.ensure_future(asyncio.to_thread(work, *arguments))


# --- who speaks ---------------------------------------------------------------------------------


def identify_by_name(context: Context) -> str:
    """Without certificates, on loopback only: the learner is who it says it is."""
    name = dict(context.invocation_metadata() or ()).get("metis-learner")
    try:
        return check_name(str(name or ""))
    except ConfigError as problem:
        reason = f"without certificates a learner must say its name, --name NAME: {problem}"
        raise Refused(grpc.StatusCode.UNAUTHENTICATED, reason) from problem


def identify_by_certificate(revocations: Revocations) -> Callable[[Context], str]:
    """The learner is who its certificate says; asked at every call, so that a revocation works at once."""

    def identify(context: Context) -> str:
        try:
            peer = peer_of(context.auth_context())
        except LearnerError as problem:
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, str(problem)) from problem
        try:
            reason = revocations.reason(peer.serial)
        except ConfigError as problem:  # our list is not in order: the learner did nothing wrong and may try again
            raise Refused(
                grpc.StatusCode.UNAVAILABLE, "the controller cannot read its list of revocations"
            ) from problem
        if reason is not None:
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, reason)
        if peer.not_after <= now_utc():  # an open connection outlives its certificate
            raise Refused(
                grpc.StatusCode.UNAUTHENTICATED,
                f"the certificate of '{peer.name}' expired on {moment(peer.not_after)}; renew it",
            )
        if peer.role != "learner":
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                f"the certificate of '{peer.name}' is that of a {peer.role}, not of a learner",
            )
        return peer.name

    return identify


class _Numbers:
    """Looks at the numbers of a model as they stream past."""

    def __init__(self, layout: Layout, largest: float) -> None:
        self._size, self._largest = layout.size, largest
        self._tensors = [spec for spec in layout.tensors if spec.role != "counter"]
        self._ends = np.cumsum([spec.size for spec in self._tensors], dtype=np.int64)
        self._wild = np.zeros(len(self._tensors), np.int64)  # by tensor: not finite
        self._large = self._wild.copy()  # by tensor: beyond the largest, or not finite
        self._all_zero = layout.size > 0

    def look_at(self, offset: int, data: bytes | memoryview) -> None:
        count = min(len(data), 4 * self._size - offset) // 4  # counters may be anything
        if count <= 0:
            return
        numbers = np.frombuffer(data, "<f4", count)
        low, high = float(numbers.min()), float(numbers.max())
        if not (-self._largest <= low and high <= self._largest):  # a NaN makes both comparisons false
            self._wild += self._by_tensor(offset, ~np.isfinite(numbers))
            self._large += self._by_tensor(offset, ~(np.abs(numbers) <= self._largest))
        self._all_zero &= low == 0.0 == high

    def _by_tensor(self, offset: int, bad: NDArray[np.bool_]) -> NDArray[np.intp]:
        tensors = np.searchsorted(self._ends, np.flatnonzero(bad) + offset // 4, side="right")
        return np.bincount(tensors, minlength=len(self._tensors))

    def problem(self) -> str | None:
        """Why this model must not be mixed, naming the tensor; None if it may."""
        if self._all_zero:
            return "every number of the model is 0"
        for spec, wild, large in zip(self._tensors, self._wild, self._large, strict=True):
            if wild:
                return f"tensor '{spec.name}' holds {wild} of {spec.size} numbers that are not finite"
            if large:
                return f"tensor '{spec.name}' holds {large} of {spec.size} numbers beyond {self._largest:g}"
        return None


def claimed_error(header: pb.UploadHeader) -> float:
    """What the compression of this update left out, as the learner says; NaN where that makes no sense."""
    error = header.compression_error if header.HasField("compression_error") else math.nan
    return error if 0 <= error < math.inf else math.nan


def plausible(header: pb.UploadHeader) -> str | None:
    """What cannot be true of these claims; None if all may be."""
    for name in ("seconds", "time_per_batch"):
        value = getattr(header, name)
        if not (math.isfinite(value) and value >= 0):
            return f"it claims {name} = {value}"
    return None
