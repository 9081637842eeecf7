"""A large model between a learner and a controller on one machine, against a raw TCP copy of the same bytes.

    python benchmarks/wire.py [--megabytes 100] [--repeats 10] [--tasks 200] [--quick] [--no-peers] [--out FOLDER]

The controller is a process of its own; this one is the learner, with the code of the real one but for the training.
A download is from the request until the community model lies checked and whole in a file of the learner; an upload
from its first byte until the receipt: hashed, every number looked at, in a file, journaled. Between them, with the
same two cores, the same bytes are copied over TCP by a plain sender and a plain receiver: from memory to memory, and
from a file to a new file. Bare gRPC is the same bytes through streams of the same library in chunks of the same size,
from memory to memory: nothing is hashed, looked at, read or written. The best of all repeats counts everywhere, because
noise of a shared machine only adds.
Then the time from the push of a task to its receipt with a model of 4 kB, on the controller's clock.

The last table is whole rounds of one learner that does nothing, model down and up again: Metis in its real deployment,
Flower in its own (SuperLink, SuperNode, `flwr run`, no TLS, app processes as they come), NVFlare's FedAvg in its
simulator, whose client is a process of its own on TCP. Every system does what it does by default besides (Metis hashes,
checks every number, and journals; NVFlare writes the model to disk; Flower starts a process of the app for each task).
The first round warms up; the median of the others counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
from _bench import Report, arguments, median, percentile, report
from _federation import ControllerUnderTest, Spec, blocks, consortium, cpu_of
from _peers import Unavailable, ask

from metis.core.events import CommunityPublished, SendTask, UpdateRequest
from metis.deployment.learner.process import LearnerProcess
from metis.deployment.learner.work import Update
from metis.deployment.route import Route
from metis.deployment.security.identity import channel_credentials, load_kit, server_credentials
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import CHUNK, travels_inside
from metis.deployment.wire.model_mac import ModelMac
from metis.deployment.wire.models import model_bytes
from metis.deployment.wire.protocol import CHANNEL_OPTIONS, SERVER_OPTIONS
from metis.deployment.wire.transfer import keep_buffers
from metis.net import host_and_port
from metis.runs.trace import read_trace

PIECE = 1 << 20
COMPARED = ("bare", "raw memory", "raw file")
MEMORY, FILE = "raw TCP, memory to memory", "raw TCP, file to file"


# --- bare gRPC ----------------------------------------------------------------------------------


def bare(server: bool, length: int, kits: tuple[Path, Path] | None) -> None:
    """The same bytes from memory to memory through gRPC's own streams in chunks of ours, and nothing else.

    As `--bare-server` it serves; else it prints the seconds of an upload and a download for each line that it reads.
    """
    keep_buffers()
    chunk = os.urandom(CHUNK)
    chunks = [chunk] * (length // CHUNK) + [chunk[: length % CHUNK]] * bool(length % CHUNK)

    async def upload(messages: Any, _: Any) -> bytes:
        return str(sum([len(message) async for message in messages])).encode()

    async def download(_: bytes, context: Any) -> None:
        for message in chunks:
            await context.write(message)

    async def serve() -> None:
        serving = grpc.aio.server(options=SERVER_OPTIONS)
        handlers: dict[str, Any] = {
            "Up": grpc.stream_unary_rpc_method_handler(upload),
            "Down": grpc.unary_stream_rpc_method_handler(download),
        }
        serving.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
        address = "127.0.0.1:0"
        if kits is None:
            print(serving.add_insecure_port(address), flush=True)
        else:
            print(serving.add_secure_port(address, server_credentials(load_kit(kits[0]))), flush=True)
        await serving.start()
        await serving.wait_for_termination()

    async def call(port: int, pids: tuple[int, int]) -> None:
        if kits is None:
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", CHANNEL_OPTIONS)
        else:
            credentials = channel_credentials(load_kit(kits[1]))
            channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, CHANNEL_OPTIONS)
        async with channel:
            up: Any = channel.stream_unary("/bare/Up")
            down: Any = channel.unary_stream("/bare/Down")
            while sys.stdin.readline():
                began, spent = time.perf_counter(), sum(map(cpu_of, pids))
                sending = up()
                for message in chunks:
                    await sending.write(message)
                await sending.done_writing()
                assert int(await sending) == length
                middle, spent_up = time.perf_counter(), sum(map(cpu_of, pids))
                assert sum([len(message) async for message in down(b"")]) == length
                times = {"up": middle - began, "down": time.perf_counter() - middle}
                times |= {"cpu up": spent_up - spent, "cpu down": sum(map(cpu_of, pids)) - spent_up}
                print(json.dumps(times), flush=True)

    if server:
        asyncio.run(serve())
        return
    command = [sys.executable, __file__, "--bare-server", *sys.argv[2:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            asyncio.run(call(int(process.stdout.readline()), (os.getpid(), process.pid)))
        finally:
            process.kill()


class Bare:
    """What gRPC itself takes, in processes of its own that wait between exchanges."""

    def __init__(self, length: int, kits: tuple[Path, Path] | None) -> None:
        command = [sys.executable, __file__, "--bare", str(length), *map(str, kits or ())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def exchange(self) -> dict[str, float]:
        """Seconds up and down."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        times: dict[str, float] = json.loads(self._process.stdout.readline())
        return times

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# --- a raw copy ---------------------------------------------------------------------------------


class Peer:
    """The other end of a raw copy, in a process of its own."""

    def __init__(self, folder: Path, length: int) -> None:
        self._folder, self._length = folder, length
        command = [sys.executable, __file__, "--peer", str(folder), str(length)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())
        self._memory = bytearray(os.urandom(1 << 20) * (length // (1 << 20) + 1))[:length]

    def copy(self, direction: str, place: str) -> float:
        """Seconds of one copy "up" (from here) or "down", from "memory" to memory or from a "file" to a new one."""
        mine = self._folder / f"mine-{direction}"
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            began = time.perf_counter()
            connection.sendall(f"{direction} {place}".ljust(16).encode())
            if direction == "up":
                _send(connection, self._memory if place == "memory" else self._folder / "model")
                connection.recv(1)
            else:
                _receive(connection, self._memory if place == "memory" else mine, self._length)
            seconds = time.perf_counter() - began
        mine.unlink(missing_ok=True)
        return seconds

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def _send(connection: socket.socket, source: bytearray | Path) -> None:
    if isinstance(source, Path):
        with source.open("rb", buffering=0) as file:
            while piece := file.read(PIECE):
                connection.sendall(piece)
    else:
        connection.sendall(source)


def _receive(connection: socket.socket, target: bytearray | Path, length: int) -> None:
    if isinstance(target, Path):
        piece = memoryview(bytearray(PIECE))
        with target.open("wb", buffering=0) as file:
            while length:
                count = connection.recv_into(piece[: min(length, PIECE)])
                file.write(piece[:count])
                length -= count
    else:
        rest = memoryview(target)
        while rest:
            rest = rest[connection.recv_into(rest, min(len(rest), PIECE)) :]


def peer(folder: Path, length: int) -> None:
    memory = bytearray(os.urandom(1 << 20) * (length // (1 << 20) + 1))[:length]
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            with connection:
                direction, place = connection.recv(16, socket.MSG_WAITALL).decode().split()
                theirs = folder / "theirs"
                if direction == "up":
                    _receive(connection, memory if place == "memory" else theirs, length)
                    connection.sendall(b".")
                else:
                    _send(connection, memory if place == "memory" else folder / "model")
            theirs.unlink(missing_ok=True)


# --- the learner --------------------------------------------------------------------------------


class TimedLearner(LearnerProcess):
    """The real learner, with a model made before instead of training, and a watch on both transfers."""

    def __init__(
        self,
        address: str,
        controller: int,
        folder: Path,
        hashes: list[str],
        raw: Peer | None,
        bare: Bare | None,
        kit: Any,
        report: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        credentials = None if kit is None else lambda: channel_credentials(kit)
        name = "learner-0" if kit is None else None
        super().__init__(
            Route(*host_and_port(address)),
            work=folder / "work",
            child=(),
            report=report,
            credentials=credentials,
            name=name,
        )
        self._pids = (os.getpid(), controller)
        self._model, self._hashes, self._raw, self._bare = folder / "model", hashes, raw, bare
        self.times: dict[str, list[float]] = {}
        self.downloads.obtain = self._timed("down", self.downloads.obtain)  # type: ignore[method-assign]
        self.uploads.upload = self._timed("up", self.uploads.upload)  # type: ignore[method-assign]
        replaced: Any = self.training
        replaced.prepare, replaced.train, replaced.save = self._prepare, self._train, self._save

    def _note(self, what: str, seconds: float) -> None:
        self.times.setdefault(what, []).append(seconds)

    async def _prepare(self, welcome: pb.Welcome) -> dict[str, Any]:
        from metis.core.model import Layout

        layout = Layout.from_json(json.loads(welcome.layout)).fingerprint
        return {"examples": 100, "batch_size": 10, "evaluation_examples": 0, "fingerprint": layout}

    def _timed(self, what: str, transfer: Any) -> Any:
        async def timed(*arguments: Any) -> Any:
            if self._raw is None:  # reading the processor time of all threads takes longer than a tiny task does
                return await transfer(*arguments)
            began, spent = time.perf_counter(), sum(map(cpu_of, self._pids))
            result = await transfer(*arguments)
            self._note(what, time.perf_counter() - began)
            self._note(f"cpu {what}", sum(map(cpu_of, self._pids)) - spent)
            return result

        return timed

    async def _save(self, *_: Any) -> None:
        """It would convert the final model."""

    async def _train(self, task: pb.Task, received: float, *_: Any) -> Update:
        if self._raw is not None:
            await asyncio.sleep(0.3)  # the controller has nothing else to do any more
            for place in ("memory", "file"):
                for direction in ("up", "down"):
                    self._note(f"raw {place} {direction}", self._raw.copy(direction, place))
        if self._bare is not None:
            for what, seconds in self._bare.exchange().items():
                self._note(f"bare {what}", seconds)
        number = task.number % len(self._hashes)
        with self._model.open("r+b") as model_file:
            model_file.write(first_number(number))
        os.link(self._model, self.work.update_file(task.number))
        seconds = time.monotonic() - received
        update = Update(
            self.work.run, task.number, task.steps, seconds, max(1e-6, seconds / task.steps), 0.1,
            "", self._model.stat().st_size, seal=self._hashes[number],
        )  # fmt: skip
        if travels_inside(task.bytes):  # as `Training` does
            self.work.keep(update, synced=False)
        else:
            await asyncio.to_thread(self.work.keep, update)
        return update


@contextlib.contextmanager
def scratch(megabytes: float, rounds: int) -> Iterator[tuple[Path, list[str]]]:
    """A folder with a model in it, and the seal that it has with the number of each round as its first number.

    One file for all rounds: a virtual machine takes ten times as long to write to memory that it never used before.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "model").open("wb") as file:
            for block in blocks(Spec("", megabytes, 1, 1).layout, 0):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())  # or the system writes it to the disk while the wire is measured
        content = bytearray((folder / "model").read_bytes())
        hashes = []
        for number in range(rounds):
            content[:4] = first_number(number)
            mac = ModelMac()
            mac.update(memoryview(content))
            hashes.append(mac.digest().hex())
        yield folder, hashes


def first_number(number: int) -> bytes:
    return struct.pack("<f", number + 1)


def exchange(
    megabytes: float, rounds: int, durability: str, tls: bool, raw: bool
) -> tuple[dict[str, list[float]], Any]:
    """The times of all transfers, and the events of the run."""
    with scratch(megabytes, rounds) as (folder, hashes):
        main, kits = consortium(["learner-0"])
        kit = load_kit(kits["learner-0"]) if tls else None
        spec = Spec(
            str(folder / "state"), megabytes, 1, rounds, durability=durability, kit=str(main) if tls else None
        )  # fmt: skip
        length = model_bytes(spec.layout)
        peer = Peer(folder, length) if raw else None
        bare = Bare(length, (main, kits["learner-0"]) if tls else None) if raw else None
        try:
            with ControllerUnderTest(spec) as controller:

                async def learn() -> dict[str, list[float]]:
                    learner = TimedLearner(controller.address, controller.pid, folder, hashes, peer, bare, kit)
                    assert await learner.run() == 0
                    return learner.times

                times = asyncio.run(learn())
        finally:
            for other in (peer, bare):
                if other is not None:
                    other.end()
        return times, list(read_trace(folder / "state" / "run" / "events.jsonl"))


def latencies(events: Any) -> list[float]:
    """From the push of each task to the moment at which its update was durable."""
    sent = {item.task.number: at for at, item in events if isinstance(item, SendTask)}
    return [at - sent[item.task] for at, item in events if isinstance(item, UpdateRequest)]


def round_times(events: Any) -> list[float]:
    """Seconds between community models, but for the first round."""
    moments = [at for at, item in events if isinstance(item, CommunityPublished)]
    return [end - begin for begin, end in pairwise(moments)]


def against_raw(sheet: Report, size: float, repeats: int) -> None:
    rows: list[list[Any]] = [
        [
            "MB/s, best of all (median, first to third quarter)",
            "up",
            "down",
            "both",
            "of bare gRPC",
            "of raw file copy",
            "CPU, ms",
            "times bare gRPC's",
        ]
    ]
    found: dict[str, Any] = {}
    others: dict[str, list[list[float]]] = {MEMORY: [], FILE: []}
    for tls in (False, True):
        for durability in ("process", "power"):
            times, _ = exchange(size, repeats, durability, tls, raw=True)
            mine = [times["up"], times["down"]]
            bare, memory, file = ([times[f"{what} {way}"] for way in ("up", "down")] for what in COMPARED)
            ratios = [_both(other) / _both(mine) for other in (bare, file)]
            name = f"{'mTLS' if tls else 'plain'}, {durability}"
            spent, least = ([median(times[f"{what}cpu {way}"]) for way in ("up", "down")] for what in ("", "bare "))
            cells = [f"{ratio:.2f}" for ratio in ratios]
            cells += [" + ".join(f"{1000 * cpu:.0f}" for cpu in spent), f"{sum(spent) / sum(least):.2f}"]
            rows.append([name, *_speeds(size, mine), *cells])
            found[name] = {
                "times": times, "MB/s": 2 * size / _both(mine), "of_bare": ratios[0],
                "of_raw_memory": _both(memory) / _both(mine), "of_raw_file": ratios[1],
            }  # fmt: skip
            bare_name = f"bare gRPC, {'mTLS' if tls else 'plain'}, memory to memory"
            for other, lists in ((bare_name, bare), (MEMORY, memory), (FILE, file)):
                others[other] = [[*old, *new] for old, new in zip(others.get(other) or [[], []], lists, strict=True)]
    rows += [[name, *_speeds(size, lists), "", "", "", ""] for name, lists in others.items()]
    sheet.table(rows)
    sheet.figures |= {"transfers": found}
    for name in ("plain", "mTLS"):
        mine = found[f"{name}, process"]
        sheet.goal(
            f"wire, {size:g} MB model on loopback, {name}", "at least 0.9 of bare gRPC in the same run",
            f"{mine['of_bare']:.2f} ({mine['MB/s']:,.0f} MB/s)", mine["of_bare"] >= 0.9, mine["of_bare"] / 0.9,
        )  # fmt: skip


def _both(lists: list[list[float]]) -> float:
    """Seconds up and down: the best, because noise of a shared machine only adds."""
    return sum(map(min, lists))


def _speeds(size: float, lists: list[list[float]]) -> list[str]:
    """MB/s up, down and both."""
    cells = []
    for seconds in (*lists, [up + down for up, down in zip(*lists, strict=False)]):
        megabytes = size * (1 if seconds in lists else 2)
        low, middle, high = (megabytes / percentile(seconds, share) for share in (0.75, 0.5, 0.25))
        cells.append(f"{megabytes / min(seconds):,.0f} ({middle:,.0f}, {low:,.0f}-{high:,.0f})")
    return cells


def latency(sheet: Report, tasks: int) -> None:
    rows: list[list[Any]] = [["task of a tiny model, push to receipt", "p50, ms", "p99, ms"]]
    sheet.figures["latency"] = {}
    for tls in (False, True):
        for durability in ("process", "power"):
            _, events = exchange(0.004, tasks, durability, tls, raw=False)
            name, found = f"{'mTLS' if tls else 'plain'}, {durability}", latencies(events)
            rows.append([name, *(f"{1000 * percentile(found, share):.1f}" for share in (0.5, 0.99))])
            sheet.figures["latency"][name] = found
    sheet.table(rows)
    middle = 1000 * median(sheet.figures["latency"]["plain, process"])
    sheet.goal(
        "a task of a tiny model, push to receipt, p50", "at most 3 ms", f"{middle:.1f} ms", middle <= 3, 3 / middle
    )


def against_peers(sheet: Report, size: float, rounds: int) -> None:
    def ours(megabytes: float, tls: bool) -> float:
        return median(round_times(exchange(megabytes, rounds + 1, "process", tls, raw=False)[1]))

    def theirs(megabytes: float, peer: str, script: str) -> float:
        return median(ask(peer, script, {"learners": 1, "megabytes": megabytes, "rounds": rounds, "timeout": 240}))

    systems: dict[str, Any] = {
        "Metis": lambda megabytes: ours(megabytes, False),
        "Metis, mTLS": lambda megabytes: ours(megabytes, True),
        "Flower": lambda megabytes: theirs(megabytes, "flower", "flower_deployment"),
        "NVFlare": lambda megabytes: theirs(megabytes, "nvflare", "nvflare_exchange"),
    }
    found: dict[str, dict[str, float]] = {}
    for name, round_of in systems.items():
        try:
            large, tiny = round_of(size), round_of(0.004)
            # What a round costs whatever the model is not the wire's: the difference is what the bytes take.
            found[name] = {"large": large, "tiny": tiny, "MB/s": 2 * size / max(large - tiny, 1e-9)}
        except Unavailable as problem:
            sheet.say(f"{name} was not measured: {problem}")
    head = ["one do-nothing learner", f"round of {size:g} MB, s", "round of 4 kB, s", "MB/s of the difference"]
    rows: list[list[Any]] = [head]
    rows += [[name, *values.values()] for name, values in found.items()]
    sheet.table(rows)
    sheet.figures["rounds"] = found
    others = {name: values["large"] for name, values in found.items() if not name.startswith("Metis")}
    if others:
        fastest = min(others, key=lambda name: others[name])
        times = others[fastest] / found["Metis"]["large"]
        rate = found["Metis"]["MB/s"] / max(found[name]["MB/s"] for name in others)
        sheet.goal(
            f"wire, a round of a {size:g} MB model, against the fastest peer", "at least 3 times as fast",
            f"{times:.1f} times {fastest} ({rate:.1f} times without what a tiny round costs)", min(times, rate) >= 3,
        )  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tasks", type=int, default=200, help="with the tiny model")
    options = parser.parse_args()
    if options.quick:
        options.megabytes, options.repeats, options.tasks = 4.0, 2, 5
    with report(options, __doc__) as sheet:
        against_raw(sheet, options.megabytes, options.repeats)
        latency(sheet, options.tasks)
        if not options.no_peers:
            against_peers(sheet, options.megabytes, 2 if options.quick else 4)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--peer":
        peer(Path(sys.argv[2]), int(sys.argv[3]))
    elif len(sys.argv) > 1 and sys.argv[1] in ("--bare", "--bare-server"):
        kits = (Path(sys.argv[3]), Path(sys.argv[4])) if len(sys.argv) > 3 else None
        bare(sys.argv[1] == "--bare-server", int(sys.argv[2]), kits)
    else:
        main()
