"""What the fault tests share: a learner that does only what it is told to, a bad wire, a controller under watch."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np

from deployment.federations import LAYOUT, Served, served
from deployment.wire_learner import WireLearner, move_towards, parts
from metis.core import policies
from metis.core.events import Action, Event
from metis.core.model import Layout
from metis.core.policy import Policy
from metis.core.stop import StopRule
from metis.deployment.controller.settings import DeploymentSettings
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.models import model_bytes
from metis.deployment.wire.protocol import CHANNEL_OPTIONS, PROTOCOL, FederationStub
from metis.runs.trace import read_trace

_T = TypeVar("_T")
HANG = 60.0  # seconds; only so that a test ends when something hangs


attempts = 0  # faults that the tests of this process have tried so far


def tried(count: int = 1) -> None:
    """Another fault was tried; `make chaos` tells how often."""
    global attempts  # noqa: PLW0603
    attempts += count


def play(scene: Coroutine[Any, Any, _T]) -> _T:
    """Run one test's scene to its end."""

    async def bounded() -> _T:
        return await asyncio.wait_for(scene, HANG)

    return asyncio.run(bounded())


class Stage:
    """A federation that stands still between the many small scenes of one test, as hypothesis plays them."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._federation = federation(folder, **options)
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Stage:
        self.here = self.play(self._federation.__aenter__())
        return self

    def __exit__(self, *reason: Any) -> None:
        try:
            self.play(self._federation.__aexit__(*reason))
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def play(self, scene: Coroutine[Any, Any, _T]) -> _T:
        return self._loop.run_until_complete(asyncio.wait_for(scene, HANG))


class _Escapes(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(logging.Formatter().format(record))


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """What gRPC and asyncio log meanwhile: an exception that a handler of the service has let out, say."""
    escapes = _Escapes()
    loggers = [logging.getLogger(name) for name in ("grpc", "asyncio", "concurrent.futures")]
    for logger in loggers:
        logger.addHandler(escapes)
    try:
        yield escapes.lines
    finally:
        for logger in loggers:
            logger.removeHandler(escapes)


@contextlib.contextmanager
def nothing_escapes() -> Iterator[None]:
    """Fail if there is anything of that kind."""
    with watched() as lines:
        yield
    assert not lines, "\n".join(lines)


@contextlib.asynccontextmanager
async def federation(
    folder: Path,
    *,
    policy: Policy | None = None,
    expected: int = 1,
    minimum: int = 1,
    rounds: int = 1000,
    lease: float = 20.0,
    heartbeat: float = 0.2,
    linger: float = 0.2,
    **options: Any,
) -> AsyncIterator[Served]:
    """A controller from whose handlers no exception escapes, and that has not failed in the end."""
    terms = DeploymentSettings(expected=expected, minimum=minimum, lease=lease, heartbeat=heartbeat, linger=linger)
    with nothing_escapes():
        async with served(
            folder, policy or policies.async_fedavg(1), StopRule(rounds=rounds), terms=terms, **options
        ) as here:
            yield here
            assert here.process.failure is None
        assert here.serving.done()
        here.serving.result()


def local_model(value: float = 2.0, layout: Layout = LAYOUT) -> bytes:
    """The bytes of a model whose numbers are all the same."""
    return np.full(layout.size, value, "<f4").tobytes() + np.full(layout.counters, 4, "<i8").tobytes()


class Puppet:
    """A learner on the real wire that does only what it is told to."""

    def __init__(self, here: Served, name: str = "l0", *, instance: str = "first", address: str | None = None) -> None:
        self._here, self.name, self.instance = here, name, instance
        self.metadata = (("metis-learner", name),)
        self._channel = grpc.aio.insecure_channel(
            address or here.address,
            # A pool of its own, so that each puppet has a connection of its own.
            options=[*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)],
        )
        self.stub = FederationStub(self._channel)
        self.stream: Any = None
        self.notices: list[pb.Notice] = []

    async def __aenter__(self) -> Puppet:
        return self

    async def __aexit__(self, *reason: object) -> None:
        await self.vanish()
        await self._channel.close()

    async def connect(self, **hello: Any) -> pb.Welcome:
        """Say hello and be welcomed."""
        self.stream = self.stub.attend(metadata=self.metadata)
        about = {"protocol": PROTOCOL, "software": "puppet", "instance": self.instance, "unix_time": time.time()}
        await self.say(hello=pb.Hello(**{**about, **hello}))
        welcome: pb.Welcome = await self.expect("welcome")
        return welcome

    async def join(self, examples: int = 100, batch_size: int = 10, **hello: Any) -> Puppet:
        """Connect and be ready; a task may come from then on."""
        await self.connect(**hello)
        await self.ready(examples=examples, batch_size=batch_size)
        return self

    async def ready(self, **ready: Any) -> None:
        about = {"examples": 100, "batch_size": 10, "layout": self._here.process.layout.fingerprint}
        await self.say(ready=pb.Ready(**{**about, **ready}))

    async def say(self, **message: Any) -> None:
        await self.stream.write(pb.FromLearner(**message))

    async def expect(self, kind: str) -> Any:
        """The next message of this kind; notices are kept, anything else before it is a mistake."""
        while (message := await self.stream.read()) is not grpc.aio.EOF:
            found = message.WhichOneof("message")
            if found == "notice":
                self.notices.append(message.notice)
            if found == kind:
                return getattr(message, kind)
            assert found == "notice", f"expected {kind}, but {message} came"
        raise AssertionError(f"the stream ended where {kind} was expected")

    async def task(self) -> pb.Task:
        task: pb.Task = await self.expect("task")
        return task

    async def told(self, kind: Any) -> pb.Notice:
        """The next notice of this kind."""
        while (notice := await self.expect("notice")).kind != kind:
            pass
        return notice  # type: ignore[no-any-return]

    async def ended(self) -> grpc.StatusCode:
        """How the stream ends, after whatever still comes."""
        try:
            while await self.stream.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass
        code: grpc.StatusCode = await self.stream.code()
        return code

    async def vanish(self) -> None:
        """Be gone without a word."""
        if self.stream is not None:
            self.stream.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.stream.code()

    # --- models -----------------------------------------------------------------------------------

    def header(self, task: int, **claims: Any) -> pb.UploadHeader:
        about = {
            "run": self._here.process.run,
            "task": task,
            "steps": 1,
            "seconds": 0.001,
            "time_per_batch": 0.001,
            "loss": 0.5,
            "bytes": model_bytes(self._here.process.layout),
        }
        return pb.UploadHeader(**{**about, **claims})

    async def hand_in(self, task: int, data: bytes | None = None, **claims: Any) -> pb.Receipt:
        """A whole upload of these bytes, with these claims."""
        data = local_model() if data is None else data
        return await self.upload(parts(self.header(task, **claims), data))

    async def upload(self, messages: AsyncIterable[pb.UploadPart]) -> pb.Receipt:
        receipt: pb.Receipt = await self.stub.upload(messages, metadata=self.metadata)
        return receipt


async def status_of(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    """How a call that must fail does fail."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as problem:
        return problem.code(), problem.details() or ""
    raise AssertionError(f"the call was answered: {answer}")


async def in_order(*messages: pb.UploadPart) -> AsyncIterator[pb.UploadPart]:
    """Exactly these, then a clean end of the stream."""
    for message in messages:
        yield message


def chunk(offset: int, data: bytes) -> pb.UploadPart:
    return pb.UploadPart(chunk=pb.Chunk(offset=offset, data=data))


def end(data: bytes) -> pb.UploadPart:
    return pb.UploadPart(end=pb.UploadEnd(bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))


# --- what a controller remembers ------------------------------------------------------------------


def community_hash(here: Served) -> str:
    """Names the bits of the community model as it is now."""
    return here.process._writer.durable.controller.community.model.sha256()


def journaled(here: Served) -> list[int]:
    """The tasks that were answered, in the order of the journal."""
    return [entry.update for entry in here.state.entries() if entry.update is not None]


def files(here: Served) -> set[str]:
    """The names of all models on disk, whole or not."""
    return {path.name for path in (here.state.folder / "blobs").iterdir()}


def course(here: Served, kind: type[_T]) -> list[_T]:
    """All events or actions of this kind so far."""
    items: list[Event | Action] = [item for _, item in read_trace(here.process.folder / "events.jsonl")]
    return [item for item in items if isinstance(item, kind)]


@contextlib.contextmanager
def busy_writer(here: Served) -> Iterator[None]:
    """Whatever is to be journaled waits until the block ends: a slow disk, or a large model being mixed."""
    free = threading.Event()
    here.process._writer._thread.submit(free.wait, HANG)
    try:
        yield
    finally:
        free.set()


async def finish(here: Served, *names: str, **options: Any) -> list[WireLearner]:
    """Honest learners come, and the federation goes on to its end."""
    learners = [
        WireLearner(name, here.address, here.process.layout, move_towards(index), **options)
        for index, name in enumerate(names)
    ]
    await asyncio.gather(*(learner.run() for learner in learners))
    assert await here.serving
    assert all(learner.final is not None for learner in learners)
    return learners


# --- a bad wire -----------------------------------------------------------------------------------

Meddle = Callable[[int, bytes], bytes]  # how many bytes went before, and those that came


class Proxy:
    """A TCP connection that does to a learner's bytes what a function says; it is cut where some are left out."""

    def __init__(self, target: str, meddle: Meddle) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._meddle = meddle
        self._connections: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *reason: object) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.append(asyncio.create_task(self._connect(reader, writer)))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, thither = await asyncio.open_connection(self._host, int(self._port))
        back = asyncio.create_task(self._pump(there, writer, lambda _, data: data))
        try:
            await self._pump(reader, thither, self._meddle)
        finally:
            back.cancel()
            for side in (writer, thither):
                side.transport.abort()  # as when a process is killed or a cable is cut

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, meddle: Meddle) -> None:
        seen = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(4096):
                passed = meddle(seen, data)
                seen += len(data)
                writer.write(passed)
                await writer.drain()
                if len(passed) < len(data):
                    return
