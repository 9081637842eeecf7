"""The controller's side of the wire for tests of a learner: a real gRPC server that does what a test asks it to."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from metis.deployment.controller.upload import announced_checksum
from metis.deployment.security.identity import peer_of
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.model_mac import digest_like
from metis.deployment.wire.models import write_model
from metis.deployment.wire.protocol import SERVER_OPTIONS, service_handler
from metis.experiments.silo import build_silo

UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "cut by the test")


class Stream:
    """One Attend call of a learner; heartbeats are counted, everything else waits to be expected."""

    def __init__(self, hello: pb.Hello, name: str) -> None:
        self.hello, self.name = hello, name
        self.heartbeats: list[pb.Heartbeat] = []
        self.beat = asyncio.Condition()
        self.inbox: asyncio.Queue[pb.FromLearner] = asyncio.Queue()
        self.outbox: asyncio.Queue[Any] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.answers = True  # whether heartbeats are answered

    @property
    def task(self) -> int | None:
        """The task that the learner named in its Hello."""
        return self.hello.task if self.hello.HasField("task") else None

    async def read(self, requests: AsyncIterator[pb.FromLearner]) -> None:
        with contextlib.suppress(Exception):
            async for message in requests:
                if message.HasField("heartbeat"):
                    async with self.beat:
                        self.heartbeats.append(message.heartbeat)
                        self.beat.notify_all()
                    if self.answers:
                        self.send(pulse=pb.Pulse())
                else:
                    self.inbox.put_nowait(message)
        self.outbox.put_nowait(None)

    async def expect(self, kind: str) -> Any:
        """The next message, which must be of this kind."""
        message = await self.inbox.get()
        assert message.WhichOneof("message") == kind, message
        return getattr(message, kind)

    async def beats(self, count: int) -> list[pb.Heartbeat]:
        """This many heartbeats from now on."""
        start = len(self.heartbeats)
        async with self.beat:
            await self.beat.wait_for(lambda: len(self.heartbeats) >= start + count)
        return self.heartbeats[start:]

    def send(self, **message: Any) -> None:
        self.outbox.put_nowait(pb.ToLearner(**message))

    def cut(self, *status: Any) -> None:
        """End the stream with this status, UNAVAILABLE if none is given."""
        self.outbox.put_nowait(status or UNAVAILABLE)


class ScriptedController:
    """Serves one run with one model; `streams` are the learner's calls as they come."""

    def __init__(self, site: Path, settings: dict[str, Any], folder: Path) -> None:
        silo = build_silo(settings, site, "zurich", 0)
        self.layout = silo.engine.layout
        write_model(folder / "served.model", silo.engine.initial_model(1990))
        self.model = (folder / "served.model").read_bytes()
        self.settings = json.dumps(settings)
        self.run = "run-1"
        self.credentials: grpc.ServerCredentials | None = None
        self.heartbeat_seconds = 0.1
        self.chunk_bytes = 16
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()
        # Each upload takes the next fault: a number of bytes after which it is cut, "late" to commit without an
        # answer, a status to end with, or an event to wait for after half of the bytes.
        self.upload_faults: list[Any] = []
        self.attempts: list[bytearray] = []  # what each upload brought before its end
        self.headers: list[pb.UploadHeader] = []
        self.committed: dict[int, bytes] = {}
        self.resumes = False  # whether what was received before a cut is kept
        self.partial: dict[str, bytes] = {}
        self.resumed: list[int] = []  # from which byte on each upload was sent
        self.receipts: asyncio.Queue[pb.Receipt] = asyncio.Queue()
        self.uploading = asyncio.Event()
        self.download_faults: list[Any] = []  # bytes to serve before the cut, "wrong", or a status
        self.offsets: list[int] = []  # where downloads began
        self.downloading = asyncio.Event()
        self.may_download = asyncio.Event()
        self.may_download.set()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.model).hexdigest()

    async def __aenter__(self) -> ScriptedController:
        await self.start("127.0.0.1:0")
        return self

    async def start(self, address: str) -> None:
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        self.server.add_generic_rpc_handlers((service_handler(self),))
        if self.credentials is None:
            port = self.server.add_insecure_port(address)
        else:
            port = self.server.add_secure_port(address, self.credentials)
        self.address = f"127.0.0.1:{port}"
        await self.server.start()

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)

    # --- what a test does ---------------------------------------------------------------------------

    async def stream(self) -> Stream:
        return await self.streams.get()

    async def welcomed(self, **changes: Any) -> Stream:
        stream = await self.stream()
        self.welcome(stream, **changes)
        return stream

    def welcome(self, stream: Stream, **changes: Any) -> None:
        welcome: dict[str, Any] = {
            "run": self.run, "epoch": 1, "learner": stream.name, "index": 0, "settings": self.settings,
            "layout": json.dumps(self.layout.to_json()), "unix_time": time.time(),
            "heartbeat_seconds": self.heartbeat_seconds, "chunk_bytes": self.chunk_bytes, "members": 1,
            "metrics": ["loss", "accuracy"],
        }  # fmt: skip
        stream.send(welcome=pb.Welcome(**{**welcome, **changes}))

    async def ready(self, **changes: Any) -> Stream:
        """A learner that has joined."""
        stream = await self.welcomed(**changes)
        await stream.expect("ready")
        return stream

    def task(self, number: int, **changes: Any) -> pb.Task:
        task: dict[str, Any] = {
            "number": number, "epoch": 1, "version": 4, "steps": 5, "sha256": self.sha256, "bytes": len(self.model),
        }  # fmt: skip
        return pb.Task(**{**task, **changes})

    def farewell(self) -> pb.Farewell:
        return pb.Farewell(
            kind=pb.Farewell.FINISHED, reason="3 rounds are done", version=9, sha256=self.sha256, bytes=len(self.model)
        )

    # --- the service --------------------------------------------------------------------------------

    async def attend(self, requests: AsyncIterator[pb.FromLearner], context: Any) -> None:
        first = await requests.__anext__()
        if self.credentials is None:
            name = dict(context.invocation_metadata())["metis-learner"]
        else:
            name = peer_of(context.auth_context()).name
        stream = Stream(first.hello, name)
        self.streams.put_nowait(stream)
        reader = asyncio.create_task(stream.read(requests))
        try:
            while (item := await stream.outbox.get()) is not None:
                if isinstance(item, tuple):
                    await context.abort(*item)
                await context.write(item)
                if item.HasField("farewell"):
                    return
        finally:
            reader.cancel()
            stream.ended.set()

    async def hand_in(self, message: bytes, context: Any) -> pb.Receipt:
        fault = self.upload_faults.pop(0) if self.upload_faults else None
        header = pb.UploadHeader.FromString(message)
        if isinstance(fault, tuple):
            await context.abort(*fault)
        self.headers.append(header)
        self.resumed.append(0)
        self.attempts.append(bytearray(header.content))
        self.uploading.set()
        return await self._concluded(header, len(self.attempts) - 1, fault, context)

    async def upload(self, requests: AsyncIterator[pb.UploadPart], context: Any) -> AsyncIterator[pb.UploadAnswer]:
        fault = self.upload_faults.pop(0) if self.upload_faults else None
        header = (await requests.__anext__()).header
        if isinstance(fault, tuple):  # after the header: while it still sends, gRPC may report another status
            await context.abort(*fault)
        self.headers.append(header)
        announced = announced_checksum(header)
        content, number = bytearray(self.partial.get(announced, b"")), len(self.attempts)
        self.resumed.append(len(content))
        self.attempts.append(content)
        yield pb.UploadAnswer(received=len(content))  # without which nothing else is sent
        async for part in requests:
            if part.HasField("end"):
                break
            if part.acknowledge:
                yield pb.UploadAnswer(received=len(content))
                continue
            assert part.chunk.offset == len(content)
            content += part.chunk.data
            self.uploading.set()
            if isinstance(fault, int) and len(content) >= fault:
                if self.resumes:
                    self.partial[announced] = bytes(content)
                await context.abort(*UNAVAILABLE)
            if isinstance(fault, asyncio.Event) and len(content) >= header.bytes // 2:
                await fault.wait()
        else:
            await context.abort(grpc.StatusCode.ABORTED, "no end")
        yield pb.UploadAnswer(receipt=await self._concluded(header, number, fault, context))

    async def _concluded(self, header: pb.UploadHeader, number: int, fault: Any, context: Any) -> pb.Receipt:
        """The receipt of an attempt that came to its end."""
        content, announced = self.attempts[number], announced_checksum(header)
        digest = digest_like(announced)
        digest.update(content)
        assert (header.bytes, announced) == (len(content), digest.digest().hex())
        known = self.committed.setdefault(header.task, bytes(content))
        assert known == content, "the same update came with other bytes"
        if fault == "late":
            await context.abort(*UNAVAILABLE)
        again = self.headers.count(header) > 1 and any(
            attempt == content for attempt in self.attempts[:number]
        )  # fmt: skip
        receipt = pb.Receipt(verdict=pb.Receipt.ALREADY if again else pb.Receipt.COMMITTED, sequence=1)
        self.receipts.put_nowait(receipt)
        return receipt

    async def download(self, message: bytes, context: Any) -> AsyncIterator[pb.Chunk]:
        request = pb.ModelRequest.FromString(message)
        fault = self.download_faults.pop(0) if self.download_faults else None
        self.offsets.append(request.offset)
        self.downloading.set()
        await self.may_download.wait()
        if isinstance(fault, tuple):
            await context.abort(*fault)
        assert (request.run, request.sha256) == (self.run, self.sha256)
        content = self.model if fault != "wrong" else bytes(len(self.model))
        end = min(len(content), request.offset + (request.length or len(content)))
        for offset in range(request.offset, end, self.chunk_bytes):
            if isinstance(fault, int) and offset >= fault:
                await context.abort(*UNAVAILABLE)
            yield pb.Chunk(offset=offset, data=content[offset : min(end, offset + self.chunk_bytes)])
