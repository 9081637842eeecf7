"""The connection to the controller: how it is dialled, its stream, and the current session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from metis.deployment.route import Route
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import CHUNK
from metis.deployment.wire.protocol import CHANNEL_OPTIONS, FederationStub, network
from metis.deployment.wire.untrusted import LONGEST
from metis.system import uniform
from metis.text import printable

_T = TypeVar("_T")

# There is a new channel for each dial, so gRPC need not remember how the earlier ones ended.
_OPTIONS: list[tuple[str, Any]] = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]

SILENCE_SECONDS = 28.0  # after which a line on which nothing arrives is dead: it is noticed within 30
_LOOKS = 30  # in that time

CODE = grpc.StatusCode
RETRIED = {
    CODE.UNAVAILABLE,
    CODE.DEADLINE_EXCEEDED,
    CODE.RESOURCE_EXHAUSTED,
    CODE.ABORTED,
    CODE.INTERNAL,
    CODE.UNKNOWN,
    CODE.CANCELLED,
}
NOT_ALLOWED = {CODE.PERMISSION_DENIED, CODE.UNAUTHENTICATED, CODE.FAILED_PRECONDITION}


class ConnectionLost(Exception):
    """A call ended because its channel was closed."""

    def __init__(self) -> None:
        super().__init__("the connection was closed")


async def detached(work: Coroutine[Any, Any, _T]) -> _T:
    """Await calls of gRPC: when their channel closes they raise CancelledError, as if this task were cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    if task.cancelled():
        raise ConnectionLost
    try:
        return task.result()
    except grpc.aio.UsageError:  # a call on a channel that was closed a moment before
        raise ConnectionLost from None


async def read(call: Any) -> Any:
    """The next message of a stream; None at its end."""
    message = await call.read()
    return None if message is grpc.aio.EOF else message


def reason_of(problem: grpc.aio.AioRpcError) -> str:
    """What the controller wrote, or else the name of the status."""
    return printable(problem.details() or problem.code().name, LONGEST)


class Backoff:
    """How long to wait before the next attempt: 0.2 s, doubling to three heartbeats, and a part of it at random."""

    shortest, longest = 0.2, 15.0

    def __init__(self) -> None:
        self._seconds = self.shortest

    def next(self, heartbeat: float = 5.0) -> float:
        limit = max(self.shortest, min(self.longest, 3 * heartbeat))
        seconds, self._seconds = min(limit, self._seconds), min(limit, 2 * self._seconds)
        return seconds * uniform(0.5, 1.0)

    def reset(self) -> None:
        self._seconds = self.shortest


@dataclass(frozen=True)
class Endpoint:
    """How to reach the controller; without credentials in plain text, under this name."""

    route: Route
    credentials: Callable[[], grpc.ChannelCredentials] | None = None
    preflight: Callable[[], Awaitable[None]] | None = None
    name: str | None = None

    @property
    def target(self) -> str:
        return self.route.where

    async def dial(self) -> Any:
        """A new channel, after the preflight."""
        if self.preflight is not None:
            await self.preflight()
        target, options = self.route.channel()
        if self.credentials is None:
            return network().insecure_channel(target, [*_OPTIONS, *options])
        return network().secure_channel(target, self.credentials(), [*_OPTIONS, *options])

    def calls(self, channel: grpc.aio.Channel) -> Calls:
        return Calls(FederationStub(channel), () if self.name is None else (("metis-learner", self.name),))


@dataclass(frozen=True)
class Calls:
    """The calls of a learner on one channel."""

    stub: FederationStub
    metadata: tuple[tuple[str, str], ...]

    def attend(self) -> Any:
        return self.stub.attend(metadata=self.metadata)

    def hand_in(self, header: pb.UploadHeader) -> Any:
        return self.stub.hand_in(header, metadata=self.metadata)

    def upload(self) -> Any:
        return self.stub.upload(metadata=self.metadata)

    def download(self, request: pb.ModelRequest) -> Any:
        return self.stub.download(request, metadata=self.metadata)


class Session:
    """One stream to the controller, from its Welcome on."""

    def __init__(self, calls: Calls, stream: Any, welcome: pb.Welcome) -> None:
        self.calls, self.welcome = calls, welcome
        self._stream = stream
        self._heard = True  # since `watch` looked last
        self._outbox: asyncio.Queue[pb.FromLearner] = asyncio.Queue()

    @property
    def chunk_bytes(self) -> int:
        return max(4, min(self.welcome.chunk_bytes or CHUNK, CHUNK) & ~3)

    def send(self, **message: Any) -> None:
        self._outbox.put_nowait(pb.FromLearner(**message))

    async def keep_writing(self) -> None:
        """Write what was sent, in order."""
        while True:
            message = await self._outbox.get()
            try:
                await self._stream.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader of the stream learns why
            finally:
                self._outbox.task_done()

    async def keep_beating(self, progress: Callable[[], tuple[int | None, int]]) -> None:
        """Heartbeats with the task and its steps; while nothing can be written, none is queued."""
        seconds = self._heartbeat_seconds
        while True:
            if self._outbox.empty():
                number, steps = progress()
                self.send(heartbeat=pb.Heartbeat(task=number, steps=steps))
            await asyncio.sleep(seconds)

    @property
    def _heartbeat_seconds(self) -> float:
        return min(60.0, max(0.05, self.welcome.heartbeat_seconds or 5.0))

    def heard(self) -> None:
        """Something of the controller arrived: an answer to a heartbeat, a task, bytes of a model."""
        self._heard = True

    async def watch(self, seconds: float) -> None:
        """Return when nothing at all arrived for so long: then the line is dead, whatever the system says of it."""
        limit, silent = max(seconds, 3 * self._heartbeat_seconds), 0.0
        while silent < limit:
            # By looks, not by the clock: this process may have been suspended meanwhile.
            await asyncio.sleep(limit / _LOOKS)
            silent = 0.0 if self._heard else silent + limit / _LOOKS
            self._heard = False

    async def finish(self) -> None:
        """Write what is queued and let the controller read it."""
        await self._outbox.join()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._stream.done_writing()

    def cut(self) -> None:
        """End the stream; the learner dials again."""
        self._stream.cancel()


class Connection:
    """The current session, which comes and goes."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.welcome = pb.Welcome()  # the latest
        self.leaving = False  # after the goodbye: no more dialling
        self._opened = asyncio.Event()

    @property
    def heartbeat(self) -> float:
        """Seconds, as the controller wants it: how quickly things happen in this federation."""
        return float(self.welcome.heartbeat_seconds) or 5.0

    def open(self, session: Session) -> None:
        self.session, self.welcome = session, session.welcome
        self._opened.set()

    def lose(self, session: Session) -> None:
        if self.session is session:
            self.session = None
            self._opened.clear()

    async def connected(self) -> Session:
        """The current session, as soon as there is one."""
        while self.session is None:
            await self._opened.wait()
        return self.session

    def heard(self) -> None:
        """Something of the controller arrived."""
        if self.session is not None:
            self.session.heard()

    def send(self, **message: Any) -> bool:
        """Send a message if there is a session; whether there is."""
        if self.session is not None:
            self.session.send(**message)
        return self.session is not None

    def send_failed(self, task: int, cause: pb.Cause, steps: int, seconds: float) -> None:
        """Without a session nothing need be sent: the next Hello shows that the learner does not have the task."""
        self.send(failed=pb.Failed(task=task, cause=cause, steps=max(0, steps), seconds=max(0.0, seconds)))

    async def leave(self, cause: pb.Cause, *, for_good: bool = True) -> None:
        """Say goodbye; the controller then ends the stream."""
        self.leaving = self.leaving or for_good
        if self.session is not None:
            self.session.send(leaving=pb.Leaving(cause=cause))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.session.finish(), 2.0)
                await asyncio.sleep(0.2)  # what was written must leave the machine before the channel closes
