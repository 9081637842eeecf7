"""Receiving an update: streamed to disk by chunks, hashed and checked on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import Protocol, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from metis.core.layers import Layer
from metis.core.model import Layout, Model
from metis.deployment.controller.blobs import Incoming, mismatch
from metis.deployment.controller.session import Context, Refused
from metis.deployment.controller.state import State
from metis.deployment.storage import storage
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import CHUNK, SMALL, Piece, travels_inside
from metis.deployment.wire.model_mac import SEAL_BYTES, checksum_of, is_checksum, name_of
from metis.deployment.wire.models import model_bytes, model_parts
from metis.deployment.wire.transfer import IdleTimeout, Intake, ended
from metis.system import monotonic

_T = TypeVar("_T")

_HELLO_SECONDS = 15.0
_PROGRESS_SECONDS = 60.0  # an upload may take for ever as long as something comes
_MAX_AHEAD = 8 * CHUNK  # bytes of a model that were received and are not processed yet
_MAX_INCOMING = 32 << 20  # the same of all models
_ANSWER_SECONDS = 1.0  # between two answers that nobody asked for: the learner sees that something moves


@dataclass(frozen=True)
class Received:
    """A local model that came whole, or what is wrong with it.

    A blob holds it unless its task was answered before, or it is small: then its content is here.
    """

    learner: str
    header: pb.UploadHeader
    blob: str | None
    problem: str | None = None
    content: bytes | None = None


class Updates(Protocol):
    """What becomes of updates and models; the controller behind the service."""

    def open_tasks(self) -> Collection[int]:
        """The numbers of all tasks that may still be answered."""

    def base_model(self, learner: str, task: int) -> Model | None:
        """The community model that this open task of the learner is based on; None if it is not open."""

    def check_upload(self, learner: str, header: pb.UploadHeader) -> pb.Receipt | None:
        """The answer if none of its bytes are needed; None to receive it. Raises `Refused` if it is not its own."""

    async def hand_in(self, received: Received) -> pb.Receipt:
        """Make the update durable and let it count."""

    def downloadable(self, learner: str, sha256: str) -> bool:
        """Whether this learner has a task that is based on this model, or the federation has ended with it."""

    def version_of(self, learner: str, sha256: str) -> int:
        """The version of such a model."""


class Unread(Protocol):
    """Checks masked or encrypted updates, of which the numbers say nothing."""

    def allows(self, length: int) -> bool:
        """Whether an update may have so many bytes."""

    def problem(self, learner: str, content: bytes) -> str | None:
        """Why it cannot count; None if it can."""


class UploadReceiver:
    """Receives local models, many at a time within a bound on memory."""

    def __init__(
        self,
        state: State,
        layout: Layout,
        wire: Layer | None,
        updates: Updates,
        alive: Callable[[str], None],
        *,
        largest_number: float,
        unread: Unread | None = None,
    ) -> None:
        self._unread = unread
        self._state, self._layout, self._wire = state, layout, wire
        self._updates, self._alive, self._largest_number = updates, alive, largest_number
        self._length = model_bytes(layout) if wire is None else wire.wire_bytes(layout)
        self._receiving: dict[IdleTimeout, str] = {}  # the learners whose uploads are in progress

    def interrupt(self, learner: str) -> None:
        """The learner has a new connection: nothing more will come on an earlier one."""
        for idle_timeout, name in self._receiving.items():
            if name == learner:
                idle_timeout.expire()

    async def receive(
        self,
        learner: str,
        first: pb.UploadPart | Piece | None,
        requests: AsyncIterator[pb.UploadPart | Piece],
        context: Context,
    ) -> Received | pb.Receipt:
        """Stream the model to disk, hashing and checking on the way; only an explicit end makes it one."""
        if not isinstance(first, pb.UploadPart) or first.WhichOneof("part") != "header":
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "an upload must begin with its header")
        header, wire = first.header, self._wire
        answer = self._check(learner, header)
        if answer is not None:
            return answer
        announced = announced_checksum(header)
        opened = self._updates.open_tasks()
        self._state.blobs.forget_partial(opened)
        with self._state.incoming(header.task if header.task in opened else None, announced) as incoming:
            numbers = NumberCheck(self._layout, self._largest_number)
            checks = wire is None and self._unread is None
            length = header.bytes
            base = None if wire is None else self._updates.base_model(learner, header.task)
            resuming = in_thread(incoming.resume, length, numbers.add if checks else None)
            try:
                await asyncio.shield(resuming)
            finally:
                await ended(resuming)
            end = await self._stream(learner, requests, context, incoming, numbers if checks else None, length)
            incoming.whole()
            if header.sha256 not in ("", end.sha256):
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "header and end announce different bytes")
            expected = end.bytes, announced or end.sha256
            if wire is None:
                concluding = in_thread(self._conclude, learner, header, incoming, numbers, expected)
            else:
                concluding = in_thread(self._unpack, learner, header, incoming, numbers, expected, wire, base)
            try:
                return await asyncio.shield(concluding)
            finally:
                await ended(concluding)

    def _check(self, learner: str, header: pb.UploadHeader) -> pb.Receipt | None:
        """The answer if none of its bytes are needed; raises `Refused` if it does not fit."""
        if header.run != self._state.run:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this update belongs to run {header.run[:40]!r}, but this controller serves run {self._state.run}",
            )
        if self._unread is not None and not self._unread.allows(header.bytes):
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"an update does not have {header.bytes} bytes here")
        if header.bytes != self._length and self._unread is None:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the header announces a model of {header.bytes} bytes; a model of this federation has {self._length}",
            )
        if len(header.seal) and (len(header.seal) != SEAL_BYTES or header.sha256):
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"a seal has {SEAL_BYTES} bytes, and replaces the SHA-256")
        return self._updates.check_upload(learner, header)

    async def take(self, learner: str, header: pb.UploadHeader) -> Received | pb.Receipt:
        """A small update, which came with its header."""
        answer = self._check(learner, header)
        if answer is not None:
            return answer
        content, wire, announced = header.content, self._wire, announced_checksum(header)
        if not travels_inside(len(content)) or len(content) != header.bytes or not announced:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"a header brings at most {SMALL} bytes, as many as it announces, with their checksum",
            )
        numbers = NumberCheck(self._layout, self._largest_number)
        if wire is None and self._unread is None and not storage().sealed and is_checksum(announced):
            # The disk is waited for once, when it is journaled; the rest takes less than passing it to a thread.
            if (came := checksum_of(content, announced)) != announced:
                raise mismatch(came, announced)
            numbers.add(0, content)
            problem = numbers.problem()
            return Received(learner, header, None if problem else name_of(announced), problem, content)
        base = None if wire is None else self._updates.base_model(learner, header.task)

        def take() -> Received:
            with self._state.incoming(checksum=announced) as incoming:
                incoming.write(content)
                if wire is not None:
                    return self._unpack(learner, header, incoming, numbers, (header.bytes, announced), wire, base)
                if self._unread is None:
                    numbers.add(0, content)
                return self._conclude(learner, header, incoming, numbers, (header.bytes, announced))

        taking = in_thread(take)
        try:
            return await asyncio.shield(taking)
        finally:
            await ended(taking)

    async def _stream(
        self,
        learner: str,
        requests: AsyncIterator[pb.UploadPart | Piece],
        context: Context,
        incoming: Incoming,
        numbers: NumberCheck | None,
        length: int,
    ) -> pb.UploadEnd:
        """Everything between header and end; chunks are hashed, checked and written while the next ones travel.

        Hashing and checking take less than passing a chunk to a thread would; only the disk is waited for elsewhere.
        """
        received = incoming.bytes
        asked, answered, answered_at = received, -1, 0.0  # the last bytes that were asked about, and answered, and when

        async def answer() -> None:
            nonlocal answered, answered_at
            answered, answered_at = received, monotonic()
            await idle_timeout.wait(context.write(pb.UploadAnswer(received=received)))

        intake = Intake(incoming.append_all)
        idle_timeout = IdleTimeout(_PROGRESS_SECONDS)
        self._receiving[idle_timeout] = learner
        try:
            with idle_timeout:
                await answer()  # until now a learner sends no more than the header
                while True:
                    part = await next_message(requests, idle_timeout)
                    self._alive(learner)  # on a slow line its heartbeats wait behind its model
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
                            incoming.hash(data)
                            if numbers is not None:
                                numbers.add(received, data)
                            received += len(data)
                            await intake.put(data, min(_MAX_AHEAD, _MAX_INCOMING // len(self._receiving)))
                            if monotonic() - answered_at >= _ANSWER_SECONDS:
                                await answer()
                        case pb.UploadPart() if part.WhichOneof("part") == "acknowledge" and received > asked:
                            asked = received
                            if answered < received:
                                await answer()
                        case pb.UploadPart() if part.WhichOneof("part") == "end":
                            if received != length:
                                raise Refused(
                                    grpc.StatusCode.INVALID_ARGUMENT,
                                    f"the model ended after {received} bytes; {length} were announced",
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
                            raise Refused(
                                grpc.StatusCode.INVALID_ARGUMENT,
                                "only chunks, what acknowledges them, and one end follow",
                            )
        except asyncio.TimeoutError:
            raise _silent(_PROGRESS_SECONDS) from None
        finally:
            del self._receiving[idle_timeout]
            await intake.end()

    def _conclude(
        self,
        learner: str,
        header: pb.UploadHeader,
        incoming: Incoming,
        numbers: NumberCheck,
        expected: tuple[int, str],  # bytes and checksum
    ) -> Received:
        """Keep what came, if it may be needed; of any other upload nothing stays, however often it is sent."""
        whole = (incoming.bytes, incoming.checksum) == expected
        problem = self._problem(learner, incoming, numbers) if whole else None
        if whole and (problem is not None or self._state.find(header.task) is not None):
            return Received(learner, header, None if problem else incoming.checksum, problem)
        return Received(learner, header, incoming.commit(*expected))

    def _problem(self, learner: str, incoming: Incoming, numbers: NumberCheck) -> str | None:
        return numbers.problem() if self._unread is None else self._unread.problem(learner, incoming.content())

    def _unpack(
        self,
        learner: str,
        header: pb.UploadHeader,
        incoming: Incoming,
        numbers: NumberCheck,
        expected: tuple[int, str],
        wire: Layer,
        base: Model | None,
    ) -> Received:
        """Keep the local model that a compressed update stands for, if it may be needed."""
        if (incoming.bytes, incoming.checksum) != expected:
            incoming.commit(*expected)  # raises
        known = self._state.find(header.task)
        if known is not None or base is None:  # what it was based on may be gone: the first one counts
            return Received(learner, header, None if known is None else known.blob)
        try:
            model = wire.decode(incoming.content(), base)
        except ValueError as problem:
            return Received(learner, header, None, str(problem))
        parts = model_parts(model)
        numbers.add(0, parts[0])
        wrong = numbers.problem()
        if wrong is not None:
            return Received(learner, header, None, wrong)
        with self._state.incoming() as whole:
            for part in parts:
                whole.write(part)
            return Received(learner, header, whole.commit(whole.bytes, whole.checksum))


def announced_checksum(header: pb.UploadHeader) -> str:
    """What the header says of the bytes; empty if only the end does."""
    return memoryview(header.seal).hex() or header.sha256


class NumberCheck:
    """Checks the numbers of a model as they stream past."""

    def __init__(self, layout: Layout, largest: float) -> None:
        self._size, self._largest = layout.size, largest
        self._tensors = [spec for spec in layout.tensors if spec.role != "counter"]
        self._ends = np.cumsum([spec.size for spec in self._tensors], dtype=np.int64)
        self._wild = np.zeros(len(self._tensors), np.int64)  # by tensor: not finite
        self._large = self._wild.copy()  # by tensor: beyond the largest, or not finite
        self._all_zero = layout.size > 0

    def add(self, offset: int, data: bytes | memoryview) -> None:
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


async def next_message(requests: AsyncIterator[_T], idle_timeout: IdleTimeout) -> _T | None:
    """The next message; None at the end of the stream, which is also how a killed learner looks."""
    try:
        return await idle_timeout.wait(requests.__anext__())
    except StopAsyncIteration:
        return None


async def first_message(requests: AsyncIterator[_T]) -> _T | None:
    """The first message of a call."""
    try:
        with IdleTimeout(_HELLO_SECONDS) as idle_timeout:
            return await next_message(requests, idle_timeout)
    except asyncio.TimeoutError:
        raise _silent(_HELLO_SECONDS) from None


def _silent(seconds: float) -> Refused:
    return Refused(grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing was received for {seconds:g} seconds")


def in_thread(work: Callable[..., _T], *arguments: object) -> asyncio.Future[_T]:
    """Work with a file, which goes on when the call is cancelled; to be awaited behind a shield and with `ended`."""
    return asyncio.ensure_future(asyncio.to_thread(work, *arguments))
