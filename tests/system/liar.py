"""A learner with a valid certificate that lies: wrong sizes, claims, replays, tasks of others, evaluations, garbage."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from metis.core.model import Layout
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import Piece
from metis.deployment.wire.models import model_bytes
from metis.deployment.wire.protocol import PROTOCOL, FederationStub, network
from metis.system import token_hex, uniform, unix_time

LIAR = "x"


Overheard = Callable[[], tuple[int, str] | None]  # task and SHA-256 of an update of somebody else


async def lie(
    listen: str, layout: Layout, rng: random.Random, until: asyncio.Future[None], overheard: Overheard
) -> int:
    """Come and go, and lie, until the federation has ended."""
    while not until.done():
        try:
            async with network().insecure_channel(listen) as channel:
                await asyncio.wait_for(_Stay(FederationStub(channel), layout, rng, overheard).run(), 20)
        except (grpc.aio.AioRpcError, asyncio.TimeoutError, asyncio.InvalidStateError, asyncio.CancelledError):
            pass  # refused, cut or ended: the liar comes again
        await asyncio.sleep(uniform(0.2, 2.0))
    return 0


class _Stay:
    """One stream of the liar."""

    def __init__(self, stub: FederationStub, layout: Layout, rng: random.Random, overheard: Overheard) -> None:
        self._stub, self._layout, self._rng, self._overheard = stub, layout, rng, overheard
        self._metadata = (("metis-learner", LIAR),)
        self._seen: list[int] = [0, 1, 2, 3]  # numbers of tasks, its own and, as they count up, those of others
        self._run = ""

    async def run(self) -> None:
        stream = self._stub.attend(metadata=self._metadata)
        hello = pb.Hello(protocol=PROTOCOL, software="\x1b[31mmetis\n", instance=token_hex(4), unix_time=unix_time())
        await stream.write(pb.FromLearner(hello=hello))
        welcome = await stream.read()
        if welcome is grpc.aio.EOF or not welcome.HasField("welcome"):
            return
        self._run = welcome.welcome.run
        examples = self._rng.choice((0, 1, 64, 64, 10**9, 2**63))
        ready = pb.Ready(
            examples=examples,
            batch_size=self._rng.choice((1, 8, 8, 2**62)),
            evaluation_examples=self._rng.choice((0, 1, 10**9)),
            layout=self._rng.choice((self._layout.fingerprint, self._layout.fingerprint, "other")),
        )
        await stream.write(pb.FromLearner(ready=ready))
        reading = asyncio.ensure_future(self._listen(stream))
        try:
            for _ in range(self._rng.randrange(1, 12)):
                await asyncio.sleep(self._rng.random())
                await self._one_lie(stream)
        finally:
            reading.cancel()
            stream.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _listen(self, stream: Any) -> None:
        while (message := await stream.read()) is not grpc.aio.EOF:
            if message.HasField("task"):
                self._seen.append(message.task.number)

    def _task(self) -> int:
        return self._rng.choice([*self._seen, max(self._seen) + self._rng.randrange(3), 2**63])

    async def _one_lie(self, stream: Any) -> None:
        match self._rng.randrange(6):
            case 0:
                failed = pb.Failed(
                    task=self._task(), steps=2**62, seconds=self._rng.choice((-1.0, float("nan"), 1e300))
                )
                await stream.write(pb.FromLearner(failed=failed))
            case 1:
                value = self._rng.choice((0.99, 1e99, float("nan"), -5.0))
                metrics = {"accuracy": value, "\x1b[2J": 1.0}
                evaluation = pb.Evaluation(version=self._rng.randrange(9), examples=10**9, metrics=metrics)
                await stream.write(pb.FromLearner(evaluation=evaluation))
            case 2:
                await stream.write(pb.FromLearner(heartbeat=pb.Heartbeat(task=self._task(), steps=2**63)))
            case 3:
                request = pb.ModelRequest(run=self._run, sha256="0" * 64, offset=2**40)
                call = self._stub.download(request, metadata=self._metadata)
                await asyncio.gather(call.read(), return_exceptions=True)
            case _:
                await self._upload()

    async def _upload(self) -> None:
        rng, length = self._rng, model_bytes(self._layout)
        wrong, truth = rng.randrange(8), rng.random() < 0.5  # a lie that is told among truths gets further
        value = 1.0 if truth else rng.choice((9e9, float("nan"), 0.0))
        if wrong == 7:
            value = 9e9  # almost the largest number that is let in
        content = np.full(length // 4, value, "<f4").tobytes()
        digest = hashlib.sha256(content).hexdigest()
        header = pb.UploadHeader(
            run=self._run if wrong != 1 else "another",
            task=self._seen[-1] if truth else self._task(),
            steps=1 if truth else rng.choice((0, 1, 8, 2**63)),
            seconds=0.1 if truth else rng.choice((-1.0, float("inf"))),
            time_per_batch=0.1 if truth else rng.choice((0.0, 1e-320, 1e300)),
            loss=float("nan"),
            bytes=length if wrong != 2 else 10 * length,
            sha256=digest if wrong != 3 else "f" * 64,
        )
        if wrong == 3 and (theirs := self._overheard()) is not None:
            header.task, checksum = theirs  # the work of another, as if it were its own
            header.sha256, header.seal = ("", bytes.fromhex(checksum)) if len(checksum) > 64 else (checksum, b"")
        if rng.random() < 0.3:  # all at once
            header.content = content[: length // 2] if wrong == 5 else content
            await self._stub.hand_in(header, metadata=self._metadata)
            return
        call = self._stub.upload(metadata=self._metadata)
        await call.write(pb.UploadPart(header=header))
        if wrong == 4:
            await call.write(Piece(8, content[8:]))  # with a gap
        elif wrong == 5:
            await call.write(Piece(0, content[: length // 2 & ~3]))  # and nothing more
        else:
            await call.write(Piece(0, content))
        if wrong != 6:
            await call.write(pb.UploadPart(end=pb.UploadEnd(bytes=length, sha256=digest)))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
