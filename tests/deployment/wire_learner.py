"""A learner that speaks the real wire but trains by arithmetic: light enough to have a thousand of them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from metis.core.model import Layout
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import CHUNK
from metis.deployment.wire.protocol import CHANNEL_OPTIONS, PROTOCOL, FederationStub

Train = Callable[[pb.Task, "np.ndarray[Any, Any]"], "np.ndarray[Any, Any]"]
_PERMANENT = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
)


def move_towards(goal: float) -> Train:
    """Half the way to a constant: what "training" is here."""
    return lambda task, vector: (vector + np.float32(goal)) / np.float32(2)


@dataclass
class WireLearner:
    """Attends, trains what it is told to, hands it in; `run` until the end or until cancelled."""

    name: str
    target: str
    layout: Layout
    train: Train
    examples: int = 100
    batch_size: int = 10
    evaluation_examples: int = 0
    seconds_per_batch: float = 0.0
    credentials: grpc.ChannelCredentials | None = None
    instance: str = ""
    reconnect: bool = True
    held: dict[int, bytes] = field(default_factory=dict)  # trained and not acknowledged
    timing: dict[int, tuple[int, float, float]] = field(default_factory=dict)  # steps, seconds, seconds per batch
    receipts: list[tuple[int, pb.Receipt]] = field(default_factory=list)
    notices: list[pb.Notice] = field(default_factory=list)
    tasks: list[pb.Task] = field(default_factory=list)
    farewell: pb.Farewell | None = None
    run_id: str = ""
    final: bytes | None = None
    refused: grpc.aio.AioRpcError | None = None
    joined_after: float | None = None

    def channel(self) -> grpc.aio.Channel:
        if self.credentials is not None:
            return grpc.aio.secure_channel(self.target, self.credentials, options=CHANNEL_OPTIONS)
        return grpc.aio.insecure_channel(self.target, options=CHANNEL_OPTIONS)

    @property
    def metadata(self) -> list[tuple[str, str]]:
        return [] if self.credentials is not None else [("metis-learner", self.name)]

    async def run(self) -> None:
        self.instance = self.instance or f"{self.name}-{id(self)}"
        delay = 0.05
        while self.farewell is None or self.farewell.kind == pb.Farewell.RETRY:
            try:
                async with self.channel() as channel:
                    await self.attend(FederationStub(channel))
            except grpc.aio.AioRpcError as problem:
                if problem.code() in _PERMANENT:
                    self.refused = problem
                    return
            if not self.reconnect:
                return
            await asyncio.sleep(delay)
            delay = min(1.0, delay * 1.5)

    async def attend(self, stub: FederationStub) -> None:
        began = time.monotonic()
        stream = stub.attend(metadata=self.metadata)
        held = next(iter(self.held), None)
        hello = pb.Hello(protocol=PROTOCOL, software="test", instance=self.instance, run=self.run_id, task=held)
        hello.unix_time = time.time()
        await stream.write(pb.FromLearner(hello=hello))
        running: list[asyncio.Task[None]] = []
        try:
            async for message in stream:
                match message.WhichOneof("message"):
                    case "welcome":
                        if self.run_id and self.run_id != message.welcome.run:
                            self.held.clear()
                        self.run_id = message.welcome.run
                        running.append(asyncio.create_task(self.beat(stream, message.welcome.heartbeat_seconds)))
                        ready = pb.Ready(
                            examples=self.examples,
                            batch_size=self.batch_size,
                            evaluation_examples=self.evaluation_examples,
                            layout=self.layout.fingerprint,
                        )
                        await stream.write(pb.FromLearner(ready=ready))
                        if self.joined_after is None:
                            self.joined_after = time.monotonic() - began
                        running += [asyncio.create_task(self.hand_in(stub, number)) for number in list(self.held)]
                    case "task":
                        self.tasks.append(message.task)
                        running.append(asyncio.create_task(self.work(stub, stream, message.task)))
                    case "notice":
                        self.notices.append(message.notice)
                    case "farewell":
                        self.farewell = message.farewell
                        if message.farewell.kind == pb.Farewell.FINISHED:
                            self.final = await self.fetch(stub, message.farewell.sha256)
                        return
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def beat(self, stream: Any, every: float) -> None:
        while True:
            await asyncio.sleep(every)
            await stream.write(pb.FromLearner(heartbeat=pb.Heartbeat(task=next(iter(self.held), None))))

    async def work(self, stub: FederationStub, stream: Any, task: pb.Task) -> None:
        began = time.monotonic()
        community = np.frombuffer(await self.fetch(stub, task.sha256), np.uint8)
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
            metrics = {"loss": float(np.mean(np.square(vector))), "accuracy": 0.5}
            evaluation = pb.Evaluation(version=task.version, examples=self.evaluation_examples, metrics=metrics)
            await stream.write(pb.FromLearner(evaluation=evaluation))
        await self.hand_in(stub, task.number)

    async def fetch(self, stub: FederationStub, sha256: str) -> bytes:
        request = pb.ModelRequest(run=self.run_id, sha256=sha256)
        data = b"".join([chunk.data async for chunk in stub.download(request, metadata=self.metadata)])
        assert hashlib.sha256(data).hexdigest() == sha256
        return data

    def header(self, number: int) -> pb.UploadHeader:
        steps, seconds, per_batch = self.timing[number]
        return pb.UploadHeader(
            run=self.run_id,
            task=number,
            steps=steps,
            seconds=seconds,
            time_per_batch=per_batch,
            loss=0.1,
            bytes=len(self.held[number]),
        )

    async def hand_in(self, stub: FederationStub, number: int) -> None:
        data = self.held[number]
        while True:
            try:
                receipt = await stub.upload(parts(self.header(number), data), metadata=self.metadata)
                break
            except grpc.aio.AioRpcError as problem:
                if problem.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED):
                    await asyncio.sleep(0.2)
                    continue
                if problem.code() == grpc.StatusCode.ALREADY_EXISTS:
                    self.held.pop(number, None)
                raise
        self.receipts.append((number, receipt))
        self.held.pop(number, None)


async def parts(header: pb.UploadHeader, data: bytes, chunk: int = CHUNK) -> AsyncIterator[pb.UploadPart]:
    """A whole and correct upload."""
    yield pb.UploadPart(header=header)
    for offset in range(0, len(data), chunk):
        yield pb.UploadPart(chunk=pb.Chunk(offset=offset, data=data[offset : offset + chunk]))
    yield pb.UploadPart(end=pb.UploadEnd(bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
