"""What the deployment benchmarks share: a controller in a process of its own, light learners, and what /proc tells.

python benchmarks/_federation.py SPEC    runs a controller; the benchmarks do that themselves
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from metis.core import policies
from metis.core.layers import SecureSum
from metis.core.model import Layout, TensorSpec
from metis.core.stop import StopRule
from metis.deployment.controller.callers import identify_by_certificate, identify_by_name
from metis.deployment.controller.process import ControllerProcess
from metis.deployment.controller.settings import DeploymentSettings, FederationPlan, make_core
from metis.deployment.controller.state import State
from metis.deployment.security.authority import Authority
from metis.deployment.security.identity import (
    Kit,
    Revocations,
    channel_credentials,
    load_kit,
    now_utc,
    server_credentials,
)
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import CHUNK, Piece, travels_inside
from metis.deployment.wire.model_mac import ModelMac, checker
from metis.deployment.wire.models import model_bytes, read_model
from metis.deployment.wire.protocol import CHANNEL_OPTIONS, PROTOCOL, FederationStub
from metis.kernels import use_all_processors
from metis.privacy.keys import Peers
from metis.runs.setting import Setting
from metis.system import keep_what_is_loaded

OPTIONS = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]  # a connection for each learner
_FOR_GOOD = {
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
}


# --- the controller -----------------------------------------------------------------------------


@dataclass
class Spec:
    """The federation that is measured."""

    folder: str
    megabytes: float  # of the model, in units of 10^6 bytes
    learners: int
    rounds: int
    policy: str = "sync_fedavg"
    settings: dict[str, Any] = field(default_factory=lambda: {"local_epochs": 1})
    durability: str = "process"
    kit: str | None = None  # with mTLS if there is one
    port: int = 0
    masked: bool = False  # with secure sums, which need the kit
    linger: float = 2.0  # seconds at the end in which learners may fetch the final model
    cgroup: str = ""  # folder of a control group that the controller's process enters

    @property
    def layout(self) -> Layout:
        return layout_of(self.megabytes)


def layout_of(megabytes: float) -> Layout:
    return Layout((TensorSpec("w", (round(megabytes * 250_000),)),))


def blocks(layout: Layout, number: int) -> Iterator[memoryview]:
    """A model of random numbers, block by block, never whole in memory; another one for each number.

    The numbers are drawn once in a process: drawing them for each upload took half of the learners' time.
    """
    left = model_bytes(layout)
    first = _random_block()[: left // 4].copy() if left < CHUNK else _random_block().copy()
    first[0] = number
    block = first
    while left:
        part = memoryview(block).cast("B")[:left]
        yield part
        left -= len(part)
        block = _random_block()


def _seal(layout: Layout, number: int) -> bytes:
    mac = ModelMac()
    for block in blocks(layout, number):
        mac.update(block)
    return mac.digest()


@functools.cache
def _random_block() -> NDArray[np.float32]:
    block = np.random.default_rng(1990).standard_normal(CHUNK // 4, np.float32)
    block.flags.writeable = False
    return block


async def _serve(spec: Spec) -> None:
    """As `metis controller` does it, without a evaluator."""
    folder, layout = Path(spec.folder), spec.layout
    use_all_processors(in_service=True, scratch=folder)
    with State.open(folder, spec.durability) as state:  # type: ignore[arg-type]
        facts = state.facts()
        if facts is None:
            facts = {"initial": state.put_blob(blocks(layout, 0))}
            state.begin(facts)
        initial = read_model(state.blob_path(facts["initial"]), layout)
        policy = getattr(policies, spec.policy)(**spec.settings)
        if spec.masked:
            policy = policy.with_layers(SecureSum())
        settings = DeploymentSettings(expected=spec.learners, minimum=1, linger=spec.linger)
        setting = Setting.of(policy, initial, (), seed=1, metric="accuracy")
        make = make_core(policy, StopRule(rounds=spec.rounds), settings, 3)
        shared = '{"experiment": {}}'
        plan = FederationPlan(make, initial, shared, setting, None, settings, secure_sum=policy.secure_sum)
        kit = None if spec.kit is None else load_kit(spec.kit)
        process = ControllerProcess(
            plan,
            state,
            folder / "run",
            evaluator=None,
            identify=identify_by_name if kit is None else identify_by_certificate(Revocations(kit)),
            report=lambda kind, text: print(text, file=sys.stderr) if kind == "warning" else None,
            peers=None if kit is None else Peers(kit.authority),
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, process.drain, "the benchmark is over")
        credentials = None if kit is None else server_credentials(kit)
        keep_what_is_loaded()
        serving = asyncio.create_task(process.serve(f"127.0.0.1:{spec.port}", credentials))
        while not (hasattr(process, "address") or serving.done()):
            await asyncio.sleep(0.005)
        if not serving.done():
            print(process.address, flush=True)
        await serving


class ControllerUnderTest:
    """A controller in a process of its own; `kill` and `start` again go on with the same folder and port."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        while not spec.port:
            # None of those that the system gives to who dials: a learner that dials while nobody listens could get
            # the very port, connect to itself, and keep the controller out.
            port = random.randrange(20_000, 32_000)
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                spec.port = port

    def start(self) -> float:
        """Seconds until it listens."""
        began = time.monotonic()
        command = [sys.executable, __file__, json.dumps(asdict(self.spec))]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        if not self.address:
            raise SystemExit("the controller did not start")
        return time.monotonic() - began

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    def __enter__(self) -> ControllerUnderTest:
        self.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self.stop()


# --- learners -----------------------------------------------------------------------------------


class LightLearner:
    """Speaks the wire as a learner does and makes its models up: light enough to have hundreds in a process."""

    def __init__(self, name: str, address: str, layout: Layout, kit: Kit | None = None, pace: float = 0.0) -> None:
        self.name, self._address, self._layout, self._pace = name, address, layout, pace
        self._credentials = None if kit is None else channel_credentials(kit)
        self._metadata = None if kit is not None else (("metis-learner", name),)
        self._instance = f"{name}-{os.getpid()}"
        self._run = ""
        self._held: pb.Task | None = None  # in hand and not acknowledged
        self._working: set[asyncio.Task[None]] = set()
        self.may_work = asyncio.Event()
        self.may_work.set()
        self.one_at_a_time = False  # the next task waits until it may
        self.version = -1  # of the latest task
        self.joins: list[tuple[float, float]] = []  # when it dialled, and how long until the Welcome
        self.hand_ins: list[tuple[float, float]] = []  # when it began, and how long until the receipt
        self.attempts = 0
        self.refused: list[str] = []  # updates that did not count
        self.failures: list[str] = []  # whatever must not happen
        self.finished = False

    async def run(self) -> None:
        pause = 0.2
        while not (self.finished or self.failures):
            self.attempts += 1
            try:
                await self._attend()
                pause = 0.2
            except grpc.aio.AioRpcError as problem:
                if problem.code() in _FOR_GOOD:
                    self.failures.append(f"{self.name}: {problem.code().name}: {problem.details()}")
            if not self.finished:
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(15.0, 2 * pause)

    async def _attend(self) -> None:
        began = time.monotonic()
        if self._credentials is None:
            channel = grpc.aio.insecure_channel(self._address, options=OPTIONS)
        else:
            channel = grpc.aio.secure_channel(self._address, self._credentials, options=OPTIONS)
        beating = None
        async with channel:
            stub = FederationStub(channel)
            stream = stub.attend(metadata=self._metadata)
            task = None if self._held is None else self._held.number
            hello = pb.Hello(protocol=PROTOCOL, instance=self._instance, run=self._run, task=task)
            await stream.write(pb.FromLearner(hello=hello))
            try:
                async for message in stream:
                    if message.HasField("welcome"):
                        self.joins.append((began, time.monotonic() - began))
                        self._run = message.welcome.run
                        beating = asyncio.create_task(self._beat(stream, message.welcome.heartbeat_seconds))
                        layout = self._layout.fingerprint
                        await stream.write(pb.FromLearner(ready=pb.Ready(examples=100, batch_size=10, layout=layout)))
                        if self._held is not None:
                            self._begin(stub, self._held)
                    elif message.HasField("task"):
                        self._held, self.version = message.task, message.task.version
                        self._begin(stub, message.task)
                    elif message.HasField("farewell"):
                        self.finished = message.farewell.kind != pb.Farewell.RETRY
                        return
            finally:
                for task_ in (*self._working, *([beating] if beating else [])):
                    task_.cancel()

    async def _beat(self, stream: Any, every: float) -> None:
        while True:
            await asyncio.sleep(every)
            held = None if self._held is None else self._held.number
            await stream.write(pb.FromLearner(heartbeat=pb.Heartbeat(task=held)))

    def _begin(self, stub: FederationStub, task: pb.Task) -> None:
        working = asyncio.create_task(self._work(stub, task))
        self._working.add(working)
        working.add_done_callback(self._done)

    def _done(self, working: asyncio.Task[None]) -> None:
        self._working.discard(working)
        problem = None if working.cancelled() else working.exception()
        if problem is None or (isinstance(problem, grpc.aio.AioRpcError) and problem.code() not in _FOR_GOOD):
            return  # the stream ends too, and the next one takes the task up again
        self.failures.append(f"{self.name}: {problem!r}")

    async def _work(self, stub: FederationStub, task: pb.Task) -> None:
        await self.may_work.wait()
        received = time.monotonic()
        digest, announced = checker(task.sha256, task.seal)
        if task.model:
            digest.update(task.model)
        else:
            request = pb.ModelRequest(run=self._run, sha256=task.sha256)
            calls: Any = stub
            async for chunk in calls.download(request, metadata=self._metadata):
                digest.update(chunk.data)
        assert digest.digest() == announced
        steps = task.steps or 10
        if self._pace and task.HasField("seconds"):
            left = task.seconds - (time.monotonic() - received)
            steps = max(1, min(steps, int(left / self._pace)))
        await asyncio.sleep(self._pace * steps)
        began = time.monotonic()
        header = pb.UploadHeader(
            run=self._run, task=task.number, steps=steps, seconds=began - received,
            time_per_batch=max(self._pace, 1e-6), loss=0.1, bytes=model_bytes(self._layout),
            seal=_seal(self._layout, task.number + 1),
        )  # fmt: skip
        if travels_inside(header.bytes):
            header.content = b"".join(blocks(self._layout, task.number + 1))
            receipt = await stub.hand_in(header, metadata=self._metadata)
        else:
            receipt = await self._upload(stub, header)
        if receipt.verdict == pb.Receipt.REFUSED:
            self.refused.append(f"{self.name}: task {task.number}: {receipt.reason}")
        self.hand_ins.append((began, time.monotonic() - began))
        if self.one_at_a_time:
            self.may_work.clear()
        if self._held is task:
            self._held = None

    async def _upload(self, stub: FederationStub, header: pb.UploadHeader) -> pb.Receipt:
        """A made-up model, a block at a time, when its turn has come."""
        call: Any = stub.upload(metadata=self._metadata)
        await call.write(pb.UploadPart(header=header))
        answer = await call.read()
        if answer.HasField("received"):  # else it is answered already
            offset = 0
            for block in blocks(self._layout, header.task + 1):
                await call.write(Piece(offset, block))
                offset += len(block)
            await call.write(pb.UploadPart(end=pb.UploadEnd(bytes=offset)))
            await call.done_writing()
        while answer.HasField("received"):
            answer = await call.read()
        receipt: pb.Receipt = answer.receipt
        return receipt


# --- certificates -------------------------------------------------------------------------------


def consortium(names: Sequence[str]) -> tuple[Path, dict[str, Path]]:
    """The kits of a controller and of learners with these names; made once and kept for the next benchmark."""
    home = Path(tempfile.gettempdir()) / f"metis-benchmark-kits-{os.getuid()}"
    if not (home / "ca" / "ca.pem").exists():
        home.mkdir(mode=0o700, exist_ok=True)
        authority = Authority.create(home / "ca", "Benchmark")
        authority.write_kit(home / "main", *authority.issue("main", "controller", ["localhost", "127.0.0.1"]))
    kits = {name: home / name for name in names}
    missing = [name for name, kit in kits.items() if not (kit / "certificate.pem").exists()]
    if missing:
        from cryptography.hazmat.primitives.asymmetric import ec

        authority = Authority(home / "ca")
        with authority._register() as entries:  # once for all: a thousand times would write it a thousand times
            for name in missing:
                key = ec.generate_private_key(ec.SECP256R1())
                signed = authority._sign(entries, name, "learner", (), 365, key.public_key(), now_utc())
                authority.write_kit(kits[name], signed, key)
    return home / "main", kits


# --- what /proc tells ---------------------------------------------------------------------------


def memory_of(pid: int) -> dict[str, float]:
    """Resident memory of a process in MB: all, anonymous, of files, and the highest of all so far."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    names = {"rss": "VmRSS", "anonymous": "RssAnon", "files": "RssFile", "peak": "VmHWM"}
    return {name: int(lines[entry].split()[0]) * 1024 / 1e6 for name, entry in names.items()}


def cpu_of(pid: int) -> float:
    """Seconds of processor time that all threads of a process have had."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def descriptors_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def threads_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def size_of(folder: Path) -> int:
    """Bytes of all files below."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    if spec.cgroup:
        Path(spec.cgroup, "cgroup.procs").write_text(str(os.getpid()))
    asyncio.run(_serve(spec))


if __name__ == "__main__":
    _main()
