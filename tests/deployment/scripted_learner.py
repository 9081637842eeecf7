"""Learners on the real wire: one that does only what a test asks it to, and one that takes part by itself."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from metis.core.model import Layout, TensorSpec
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import CHUNK
from metis.deployment.wire.models import model_bytes
from metis.deployment.wire.protocol import CHANNEL_OPTIONS, PROTOCOL, FederationStub

LAYOUT = Layout((TensorSpec("w", (500, 2)), TensorSpec("b", (3,)), TensorSpec("n", (1,), "int64", "counter")))

Train = Callable[[pb.Task, "np.ndarray[Any, Any]"], "np.ndarray[Any, Any]"]
_PERMANENT = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
)


def local_model(value: float = 2.0, layout: Layout = LAYOUT) -> bytes:
    """The bytes of a model whose numbers are all the same."""
    return np.full(layout.size, value, "<f4").tobytes() + np.full(layout.counters, 4, "<i8").tobytes()


def chunk(offset: int, data: bytes) -> pb.UploadPart:
    return pb.UploadPart(chunk=pb.Chunk(offset=offset, data=data))


def end(data: bytes) -> pb.UploadPart:
    return pb.UploadPart(end=pb.UploadEnd(bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))


async def parts(header: pb.UploadHeader, data: bytes, size: int = CHUNK) -> AsyncIterator[pb.UploadPart]:
    """A whole and correct upload."""
    yield pb.UploadPart(header=header)
    for offset in range(0, len(data), size):
        yield chunk(offset, data[offset : offset + size])
    yield end(data)


async def receipt_of(call: Any) -> pb.Receipt:
    """The last answer to an upload, whatever was acknowledged before."""
    receipt = None
    while (answer := await call.read()) is not grpc.aio.EOF:
        receipt = answer.receipt
    assert receipt is not None
    return receipt


@dataclass(eq=False)
class ScriptedLearner:
    """Does only what the test asks it to; it dials when it is first used."""

    name: str
    target: str
    layout: Layout = LAYOUT
    run_id: str = ""
    instance: str = "first"
    credentials: grpc.ChannelCredentials | None = None
    notices: list[pb.Notice] = field(default_factory=list)
    stream: Any = None
    _channel: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            # A pool of its own: each learner has its own connection, and does not wait for what another one met.
            options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
            if self.credentials is not None:
                self._channel = grpc.aio.secure_channel(self.target, self.credentials, options=options)
            else:
                self._channel = grpc.aio.insecure_channel(self.target, options=options)
        return self._channel

    @property
    def stub(self) -> FederationStub:
        return FederationStub(self.channel)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.credentials is not None else (("metis-learner", self.name),)

    async def __aenter__(self) -> ScriptedLearner:
        return self

    async def __aexit__(self, *reason: object) -> None:
        await self.vanish()
        if self._channel is not None:
            await self._channel.close()
        self._channel = self.stream = None

    # --- the stream -------------------------------------------------------------------------------

    async def greet(self, **hello: Any) -> None:
        """Open the stream and say hello."""
        self.stream = self.stub.attend(metadata=self.metadata)
        about = {"protocol": PROTOCOL, "software": "test", "instance": self.instance, "unix_time": time.time()}
        await self.send(hello=pb.Hello(**{**about, **hello}))

    async def connect(self, **hello: Any) -> pb.Welcome:
        """Say hello and be welcomed."""
        await self.greet(**hello)
        welcome: pb.Welcome = await self.expect("welcome")
        return welcome

    async def ready(self, **ready: Any) -> None:
        about = {"examples": 100, "batch_size": 10, "layout": self.layout.fingerprint}
        await self.send(ready=pb.Ready(**{**about, **ready}))

    async def join(self, examples: int = 100, batch_size: int = 10, **hello: Any) -> ScriptedLearner:
        """Connect and be ready; a task may arrive from then on."""
        await self.connect(**hello)
        await self.ready(examples=examples, batch_size=batch_size)
        return self

    async def send(self, **message: Any) -> None:
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

    async def notice(self, kind: Any) -> pb.Notice:
        """The next notice of this kind."""
        while (notice := await self.expect("notice")).kind != kind:
            pass
        return notice  # type: ignore[no-any-return]

    async def ended(self) -> grpc.StatusCode:
        """How the stream ends, after whatever still arrives."""
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

    async def fetch(self, sha256: str) -> bytes:
        request = pb.ModelRequest(run=self.run_id, sha256=sha256)
        data = b"".join([piece.data async for piece in self.stub.download(request, metadata=self.metadata)])
        assert hashlib.sha256(data).hexdigest() == sha256
        return data

    def header(self, task: int, **claims: Any) -> pb.UploadHeader:
        about = {
            "run": self.run_id, "task": task, "steps": 1, "seconds": 0.001, "time_per_batch": 0.001, "loss": 0.5,
            "bytes": model_bytes(self.layout),
        }  # fmt: skip
        return pb.UploadHeader(**{**about, **claims})

    async def hand_in(self, task: int, data: bytes | None = None, **claims: Any) -> pb.Receipt:
        """A whole upload of these bytes, with these claims."""
        return await self.upload(parts(self.header(task, **claims), local_model() if data is None else data))

    async def hand_in_small(self, header: pb.UploadHeader) -> pb.Receipt:
        """An update that is the content of this header."""
        receipt: pb.Receipt = await self.stub.hand_in(header, metadata=self.metadata)
        return receipt

    async def upload(self, messages: AsyncIterable[pb.UploadPart]) -> pb.Receipt:
        """As a learner does it: the answer to its header comes before the rest, so no write hides a refusal."""
        call: Any = self.stub.upload(metadata=self.metadata)
        first = True
        try:
            async for message in messages:
                await call.write(message)
                if first and (answer := await call.read()) is not grpc.aio.EOF and answer.HasField("receipt"):
                    return answer.receipt
                first = False
            await call.done_writing()
        except asyncio.InvalidStateError:
            pass  # it was answered before its end
        except asyncio.CancelledError:
            call.cancel()
            raise
        return await receipt_of(call)


def move_towards(goal: float) -> Train:
    """Half the distance to a constant: what "training" is here."""
    return lambda task, vector: (vector + np.float32(goal)) / np.float32(2)


@dataclass(eq=False)
class HonestLearner(ScriptedLearner):
    """Attends, trains by arithmetic and hands in, over any number of connections; light enough to have a thousand."""

    train: Train = field(default_factory=lambda: move_towards(1.0))
    examples: int = 100
    batch_size: int = 10
    evaluation_examples: int = 0
    accuracy: float = 0.5  # that it reports
    seconds_per_batch: float = 0.0
    reconnect: bool = True
    held: dict[int, bytes] = field(default_factory=dict)  # trained and not acknowledged
    timing: dict[int, tuple[int, float, float]] = field(default_factory=dict)  # steps, seconds, seconds per batch
    receipts: list[tuple[int, pb.Receipt]] = field(default_factory=list)
    tasks: list[pb.Task] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)  # how uploads failed, by status
    farewell: pb.Farewell | None = None
    final: bytes | None = None
    refused: grpc.aio.AioRpcError | None = None
    joined_after: float | None = None

    def __post_init__(self) -> None:
        self.instance = f"{self.name}-{random.randrange(10**12)}"

    @property
    def acknowledged(self) -> list[tuple[int, int]]:
        """Task and number in the journal of everything that it was promised."""
        refused = pb.Receipt.REFUSED
        return [(task, receipt.sequence) for task, receipt in self.receipts if receipt.verdict != refused]

    async def run(self) -> None:
        """Take part until the federation ends, the controller refuses, or this is cancelled."""
        while self.farewell is None or self.farewell.kind == pb.Farewell.RETRY:
            try:
                async with self:
                    await self.attend()
            except grpc.aio.AioRpcError as problem:
                if problem.code() in _PERMANENT:
                    self.refused = problem
                    return
            if not self.reconnect:
                return
            await asyncio.sleep(random.uniform(0.05, 0.3))

    async def attend(self) -> None:
        began = time.monotonic()
        await self.greet(run=self.run_id, task=next(iter(self.held), None))
        running: list[asyncio.Task[None]] = []
        try:
            while (message := await self.stream.read()) is not grpc.aio.EOF:
                match message.WhichOneof("message"):
                    case "welcome":
                        if self.run_id and self.run_id != message.welcome.run:
                            self.held.clear()
                        self.run_id = message.welcome.run
                        running.append(asyncio.create_task(self.beat(message.welcome.heartbeat_seconds)))
                        await self.ready(
                            examples=self.examples,
                            batch_size=self.batch_size,
                            evaluation_examples=self.evaluation_examples,
                        )
                        if self.joined_after is None:
                            self.joined_after = time.monotonic() - began
                        running += [asyncio.create_task(self.deliver(number)) for number in list(self.held)]
                    case "task":
                        self.tasks.append(message.task)
                        running.append(asyncio.create_task(self.work(message.task)))
                    case "evaluate":
                        vector = np.frombuffer(await self.fetch(message.evaluate.sha256), "<f4", self.layout.size)
                        await self.measure(message.evaluate.version, vector)
                    case "notice":
                        self.notices.append(message.notice)
                    case "farewell":
                        self.farewell = message.farewell
                        if message.farewell.kind == pb.Farewell.FINISHED:
                            self.final = await self.fetch(message.farewell.sha256)
                        return
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def beat(self, every: float) -> None:
        while True:
            await asyncio.sleep(every)
            await self.send(heartbeat=pb.Heartbeat(task=next(iter(self.held), None)))

    async def work(self, task: pb.Task) -> None:
        began = time.monotonic()
        community = np.frombuffer(await self.fetch(task.sha256), np.uint8)
        size = 4 * self.layout.size
        vector = self.train(task, community[:size].view("<f4"))
        steps = task.steps if task.HasField("steps") else 10
        if self.seconds_per_batch:
            limit = task.seconds if task.HasField("seconds") else float("inf")
            steps = max(1, int(min(steps, limit / self.seconds_per_batch)))
            await asyncio.sleep(max(0.0, steps * self.seconds_per_batch - (time.monotonic() - began)))
        seconds = time.monotonic() - began
        self.held[task.number] = np.asarray(vector, "<f4").tobytes() + community[size:].tobytes()
        self.timing[task.number] = (steps, seconds, max(seconds / steps, 1e-6))
        if task.evaluate:
            await self.measure(task.version, community[:size].view("<f4"))
        await self.deliver(task.number)

    async def measure(self, version: int, vector: np.ndarray[Any, Any]) -> None:
        metrics = {"loss": float(np.mean(np.square(vector))), "accuracy": self.accuracy}
        evaluation = pb.Evaluation(version=version, examples=self.evaluation_examples, metrics=metrics)
        await self.send(evaluation=evaluation)

    def header(self, task: int, **claims: Any) -> pb.UploadHeader:
        steps, seconds, per_batch = self.timing[task]
        about = {"steps": steps, "seconds": seconds, "time_per_batch": per_batch, "bytes": len(self.held[task])}
        return super().header(task, **{**about, "loss": 0.1, **claims})

    async def deliver(self, task: int) -> None:
        """Hand in what was trained until it is answered."""
        while task in self.held:
            try:
                receipt = await self.hand_in(task, self.held[task])
            except grpc.aio.AioRpcError as problem:
                self.codes[problem.code().name] += 1
                if problem.code() == grpc.StatusCode.ALREADY_EXISTS:
                    del self.held[task]
                await asyncio.sleep(0.2)
            else:
                self.receipts.append((task, receipt))
                self.held.pop(task, None)
