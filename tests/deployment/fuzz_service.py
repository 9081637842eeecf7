"""Fuzz the calls of a real controller on loopback, and its port, while an honest learner trains.

    python tests/deployment/fuzz_service.py --seconds 60 [--seed 1] [--workers 8]

Messages are valid ones, valid ones with wild values, mutated bytes and noise, in any order, with every way to hang up.
The same seed makes the same messages; in which order they meet, the machine decides. Prints executions, how calls
ended, and crashes, hangs and escaped exceptions; exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import logging
import math
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from deployment.faults import watched
from deployment.federations import Served, served
from deployment.scripted_learner import LAYOUT, HonestLearner, local_model, move_towards
from metis.core import policies
from metis.core.stop import StopRule
from metis.deployment.controller.settings import DeploymentSettings
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.models import model_bytes
from metis.deployment.wire.protocol import ATTEND, DOWNLOAD, HAND_IN, PROTOCOL, UPLOAD
from metis.learning.sums import KINDS

HANG = 600.0  # seconds after which a call that should have ended hangs
METHODS = {"attend": ATTEND, "hand_in": HAND_IN, "upload": UPLOAD, "download": DOWNLOAD}
# The answers that a learner may get; UNKNOWN would be an exception that a handler let out.
ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INTERNAL,  # gRPC's own: the answer came while the learner was in the middle of sending
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNAVAILABLE,
}
EXTREME = (0, 1, 2, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
WILD = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e300, -1e308, math.inf, -math.inf, math.nan)


@dataclass
class Scene:
    """What an attacker knows: the run, its open task, the model of it."""

    run: str
    task: int = 0
    sha256: str = "0" * 64


class Mutator:
    """Makes messages that are nearly, or not at all, those of the protocol."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    # --- valid messages, some with wild values ------------------------------------------------------

    def number(self, usual: int) -> int:
        return usual if self.rng.random() < 0.7 else self.rng.choice(EXTREME)

    def real(self, usual: float) -> float:
        return usual if self.rng.random() < 0.7 else self.rng.choice(WILD)

    def text(self, usual: str) -> str:
        if self.rng.random() < 0.8:
            return usual
        letters = "a\n\x00\x1b[31m'\"\\ü€\U0001f600"
        return "".join(self.rng.choices(letters, k=10)) * self.rng.choice([0, 1, 5, 500, 20_000])

    def from_learner(self, scene: Scene) -> pb.FromLearner:
        hello = pb.Hello(
            protocol=PROTOCOL if self.rng.random() < 0.9 else self.rng.choice(EXTREME) % 2**32,
            software=self.text("fuzz"),
            instance=self.text("one"),
            run=self.text(scene.run),
            unix_time=self.real(time.time()),
        )
        if self.rng.random() < 0.5:
            hello.task = self.number(scene.task)
        metrics = {self.text(f"m{index}"): self.real(0.5) for index in range(self.rng.choice([0, 1, 3, 60]))}
        return self.rng.choice(
            [
                pb.FromLearner(hello=hello),
                pb.FromLearner(
                    ready=pb.Ready(
                        examples=self.number(100),
                        batch_size=self.number(10),
                        evaluation_examples=self.number(5),
                        layout=self.text(LAYOUT.fingerprint),
                    )
                ),
                pb.FromLearner(heartbeat=pb.Heartbeat(task=self.number(scene.task), steps=self.number(3))),
                pb.FromLearner(
                    failed=pb.Failed(
                        task=self.number(scene.task),
                        cause=pb.Cause(
                            kind=self.number(1) % 30, rule=self.number(1) % 30, reference=self.number(1) % 2**32
                        ),
                        steps=self.number(3),
                        seconds=self.real(0.1),
                    )
                ),
                pb.FromLearner(
                    evaluation=pb.Evaluation(
                        version=self.number(0),
                        examples=self.number(5),
                        metrics=metrics,
                        sums={
                            name: pb.Sums(
                                kind=self.rng.choice(("", *KINDS)),
                                values=[self.real(1.0) for _ in range(self.rng.choice((0, 2, 4, 6, 1000)))],
                            )
                            for name in (*metrics, "other")[self.rng.randrange(2) :]
                        },
                    )
                ),
                pb.FromLearner(leaving=pb.Leaving(cause=pb.Cause(kind=self.number(1) % 30))),
                pb.FromLearner(),
            ]
        )

    def attendance(self, scene: Scene) -> list[bytes]:
        messages = [self.from_learner(scene) for _ in range(self.rng.randrange(6))]
        if self.rng.random() < 0.7:
            hello = pb.Hello(protocol=PROTOCOL, instance="fuzz", run=scene.run)
            ready = pb.Ready(examples=100, batch_size=10, evaluation_examples=5, layout=LAYOUT.fingerprint)
            messages = [pb.FromLearner(hello=hello), pb.FromLearner(ready=ready), *messages]
        return [message.SerializeToString() for message in messages]

    def header(self, scene: Scene, model: bytes) -> pb.UploadHeader:
        return pb.UploadHeader(
            run=self.text(scene.run),
            task=self.number(scene.task),
            steps=self.number(1),
            seconds=self.real(0.01),
            time_per_batch=self.real(0.01),
            loss=self.real(0.5),
            bytes=len(model) if self.rng.random() < 0.9 else self.rng.choice(EXTREME),
            sha256=self.text(hashlib.sha256(model).hexdigest()),
        )

    def model(self) -> bytes:
        wild = [0.0, 1e-40, 1e30, math.inf, math.nan]
        return local_model(2.0 if self.rng.random() < 0.5 else self.rng.choice(wild))

    def hand_in(self, scene: Scene) -> list[bytes]:
        header = self.header(scene, model := self.model())
        header.content = model if self.rng.random() < 0.9 else model[: self.rng.randrange(len(model))]
        return [header.SerializeToString()]

    def upload(self, scene: Scene) -> list[bytes]:
        header = self.header(scene, model := self.model())
        size = self.rng.choice([len(model), 4, 400, 1001])
        parts = [pb.UploadPart(header=header)]
        for offset in range(0, min(len(model), 40 * size), size):
            at = offset if self.rng.random() < 0.99 else self.rng.choice(EXTREME)
            parts.append(pb.UploadPart(chunk=pb.Chunk(offset=at, data=model[offset : offset + size])))
            if self.rng.random() < 0.1:
                parts.append(pb.UploadPart(acknowledge=self.rng.random() < 0.9))
        digest = hashlib.sha256(model).hexdigest() if self.rng.random() < 0.9 else self.text("0" * 64)
        parts.append(pb.UploadPart(end=pb.UploadEnd(bytes=self.number(len(model)), sha256=digest)))
        if self.rng.random() < 0.3:
            self.rng.shuffle(parts)
        return [part.SerializeToString() for part in parts]

    def download(self, scene: Scene) -> list[bytes]:
        offset = 0 if self.rng.random() < 0.5 else self.rng.choice([*EXTREME, model_bytes(LAYOUT), 4000])
        request = pb.ModelRequest(run=self.text(scene.run), sha256=self.text(scene.sha256), offset=offset)
        return [request.SerializeToString()]

    # --- bytes ---------------------------------------------------------------------------------------

    def mutated(self, message: bytes) -> bytes:
        """The message with some of its bytes changed, moved, lost or made up."""
        content = bytearray(message)
        for _ in range(self.rng.choice([1, 1, 2, 8])):
            at, length = self.rng.randint(0, len(content)), self.rng.randint(0, 9)
            match self.rng.randrange(9):
                case 0 if content:
                    content[at % len(content)] ^= 1 << self.rng.randrange(8)
                case 1:
                    content[at:at] = self.rng.randbytes(length)
                case 2:
                    del content[at : at + length]
                case 3:
                    content[at:at] = content[at : at + length]
                case 4:
                    del content[at:]
                case 5:  # a field that nobody knows, of any wire type, also the end of a group that never began
                    content[at:at] = bytes([self.rng.randrange(256)]) + b"\xff" * 9 + b"\x01"
                case 6:
                    content[at:at] = struct.pack("<d", self.rng.choice(WILD))
                case 7:  # text that is not UTF-8
                    content[at : at + length] = b"\xc3\x28\xed\xa0\x80\xff"[:length]
                case _:  # nested as deep as it goes
                    inner = bytes(content[:100])
                    for _ in range(self.rng.choice([3, 60, 200])):
                        inner = b"\x0a" + _varint(len(inner)) + inner
                    content = bytearray(inner)
        return bytes(content)

    def messages(self, method: str, scene: Scene) -> list[bytes]:
        """What is sent in one call."""
        make = {
            "attend": self.attendance, "hand_in": self.hand_in, "upload": self.upload, "download": self.download
        }[method]  # fmt: skip
        messages = make(scene)
        kind = self.rng.random()
        if kind < 0.4 and messages:
            at = self.rng.randrange(len(messages))
            messages[at] = self.mutated(messages[at])
        elif kind < 0.5:
            messages = [self.rng.randbytes(self.rng.choice([0, 1, 10, 1000, 70_000])) for _ in messages]
        if method in ("download", "hand_in"):
            return messages[:1] or [b""]
        return messages


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


# --- the calls ---------------------------------------------------------------------------------------


async def strike(
    channel: grpc.aio.Channel, name: str, method: str, messages: list[bytes], hang_up: str = "end"
) -> grpc.StatusCode:
    """Send these bytes as one call, hang up by "end" or "cancel", and wait for how it ends."""
    metadata = (("metis-learner", name),)
    if method == "download":
        call: Any = channel.unary_stream(DOWNLOAD, None, None)(messages[0], metadata=metadata)
    elif method == "hand_in":
        call = channel.unary_unary(HAND_IN, None, None)(messages[0], metadata=metadata)
    elif method == "upload":
        call = channel.stream_stream(UPLOAD, None, None)(_sent(messages), metadata=metadata)
    else:
        call = channel.stream_stream(ATTEND, None, None)(_sent(messages), metadata=metadata)
    if hang_up == "cancel":
        await asyncio.sleep(0.003)
        call.cancel()
    elif method != "hand_in":  # of which the status is the end
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
    code: grpc.StatusCode = await call.code()
    return code


async def _sent(messages: list[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def knock(address: str, content: bytes) -> None:
    """Send something to the port that is not a call at all."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(content)
        writer.write_eof()
        await asyncio.wait_for(reader.read(1 << 16), 0.2)
        writer.transport.abort()


# --- the campaign ------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What came of it."""

    processor_seconds: float = 0.0
    executions: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)


async def _assault(here: Served, tally: Tally, seed: int, worker: int, until: float) -> None:
    name, mutator = f"fuzz{worker}", Mutator(random.Random(f"{seed}/{worker}"))
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(here.address, options=options) as channel:
        while time.monotonic() < until:
            task = here.process._writer.durable.open_task(name)
            scene = Scene(here.process.run)
            if task is not None:
                scene.task = task.number
                scene.sha256 = here.process._writer.durable.hashes.get(task.based_on.version, scene.sha256)
            method = mutator.rng.choice(["attend", "hand_in", "upload", "upload", "download", "port"])
            if method == "port":
                if mutator.rng.random() < 0.1:
                    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if mutator.rng.random() < 0.7 else b""
                    await knock(here.address, preface + mutator.rng.randbytes(mutator.rng.randrange(300)))
                    tally.executions["port"] += 1
                continue
            messages = mutator.messages(method, scene)
            hang_up = "cancel" if mutator.rng.random() < 0.1 else "end"
            try:
                code = await asyncio.wait_for(strike(channel, name, method, messages, hang_up), HANG)
            except asyncio.TimeoutError:
                tally.hangs.append(f"{method} of {name}: {[message[:200] for message in messages]}")
                continue
            tally.executions[method] += 1
            tally.endings[code.name] += 1
            if code not in ANSWERS:
                tally.crashes.append(f"{method} ended with {code.name}: {[message[:200] for message in messages]}")


async def campaign(folder: Path, seconds: float, seed: int, workers: int) -> tuple[Tally, str]:
    """Fuzz for so long; then the honest learner must still be there and the federation end as it should."""
    tally = Tally()
    terms = DeploymentSettings(expected=1, minimum=1, lease=5, heartbeat=0.5, linger=2)
    with watched() as escapes:
        async with served(folder, policies.async_fedavg(1), StopRule(), terms=terms) as here:
            honest = HonestLearner("honest", here.address, LAYOUT, train=move_towards(1.0), seconds_per_batch=0.02)
            learning = asyncio.create_task(honest.run())
            await here.until(lambda: bool(honest.receipts))
            memory, began, processor = psutil.Process().memory_info().rss, time.monotonic(), time.process_time()
            await asyncio.gather(*(_assault(here, tally, seed, n, began + seconds) for n in range(workers)))
            tally.processor_seconds = time.process_time() - processor
            grown = psutil.Process().memory_info().rss - memory
            trained = len(honest.receipts)
            await here.until(lambda: len(honest.receipts) > trained, 600)
            here.process.stop_run("the fuzzing is over")
            await asyncio.wait_for(learning, 600)
            if not (await here.serving and honest.final is not None):
                tally.crashes.append("the federation did not end as it should")
            if here.process.failure is not None:
                tally.crashes.append(repr(here.process.failure))
            entries = here.state.last_seq() if here.state._database is not None else 0
    tally.crashes += escapes
    return tally, (
        f"{len(honest.receipts)} updates of the honest learner, {entries} entries journaled, "
        f"memory {grown / 2**20:+.1f} MB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    logging.getLogger("grpc").setLevel(logging.CRITICAL + 1)
    with tempfile.TemporaryDirectory() as folder:
        tally, summary = asyncio.run(campaign(Path(folder), arguments.seconds, arguments.seed, arguments.workers))
    total = tally.executions.total()
    by_method = ", ".join(f"{method} {count}" for method, count in sorted(tally.executions.items()))
    print(
        f"{total} executions ({by_method}), {total / arguments.seconds:.0f} a second, "
        f"{total / tally.processor_seconds:.0f} a second of processor time, seed {arguments.seed}"
    )
    print(", ".join(f"{code} {count}" for code, count in tally.endings.most_common()))
    print(summary)
    print(f"{len(tally.crashes)} crashes, {len(tally.hangs)} hangs")
    for line in dict.fromkeys([*tally.crashes, *tally.hangs]):
        print(line[:2000])
    return int(bool(tally.crashes or tally.hangs))


if __name__ == "__main__":
    sys.exit(main())
