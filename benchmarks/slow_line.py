"""A model over a slow line behind a relay that takes in whatever comes: does it arrive, and is a dead peer noticed?

    python benchmarks/slow_line.py [--rate 10] [--megabytes 1.25] [--quick] [--out FOLDER]

A controller in a process of its own, the real learner but for the training, and between them a relay that swallows
all that it is sent at once and passes on so many kB a second in each direction, as home routers and some firewalls do.
Nothing tells either end that the bytes are still on their way. A round is one model down and one up; its time is that
from the push of the task until the update is durable, against the least that the line allows. Then the relay keeps all
connections open and passes nothing on: how long until the learner gives the line up and dials again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

from _bench import Report, arguments, report
from _federation import ControllerUnderTest, Spec
from wire import TimedLearner, latencies, scratch

from metis.deployment.wire.models import model_bytes
from metis.net import host_and_port
from metis.runs.trace import read_trace

NOTICED = 30  # seconds
_SEGMENT = 1460  # bytes of a packet: on loopback they are so long that megabytes would seem to be sent


class Relay:
    """Listens on loopback; passes on at its own pace, or nothing while it is `silent`."""

    def __init__(self, target: str, rate: float) -> None:
        self._target, self._rate = host_and_port(target), rate
        self._free = [0.0, 0.0]  # when each direction is free again
        self._pumps: set[asyncio.Task[None]] = set()
        self.silent, self.connections, self.bytes = False, 0, [0, 0]

    async def __aenter__(self) -> Relay:
        listening = socket.socket()
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT)
        listening.bind(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._serve, sock=listening)
        self.address = f"127.0.0.1:{listening.getsockname()[1]}"
        return self

    async def __aexit__(self, *reason: object) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, beyond = await asyncio.open_connection(*self._target)
        for direction, source, sink in ((0, reader, beyond), (1, there, writer)):
            relay = asyncio.StreamReader(limit=1 << 40)
            for work in (self._swallow(source, relay), self._pass_on(direction, relay, sink)):
                pump = asyncio.create_task(work)
                self._pumps.add(pump)
                pump.add_done_callback(self._pumps.discard)

    async def _swallow(self, source: asyncio.StreamReader, relay: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                relay.feed_data(data)
        relay.feed_eof()

    async def _pass_on(self, direction: int, relay: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await relay.read(_SEGMENT):
                while self.silent:
                    await asyncio.sleep(0.05)
                now = time.monotonic()
                self._free[direction] = max(self._free[direction], now) + len(data) / self._rate
                await asyncio.sleep(self._free[direction] - now)
                self.bytes[direction] += len(data)
                sink.write(data)
                await sink.drain()
        sink.close()


def measure(sheet: Report, megabytes: float, rate: float) -> None:
    lines: list[str] = []
    with scratch(megabytes, 2) as (folder, hashes):
        spec = Spec(str(folder / "state"), megabytes, 1, 1000)
        length = model_bytes(spec.layout)
        trace = folder / "state" / "run" / "events.jsonl"

        async def take_part(controller: ControllerUnderTest) -> tuple[dict[str, Any], float]:
            async with Relay(controller.address, rate) as relay:
                learner = TimedLearner(
                    relay.address, controller.pid, folder, hashes, None, None, None, lambda _, text: lines.append(text)
                )
                running = asyncio.ensure_future(learner.run())
                while not (found := latencies(list(read_trace(trace)))):
                    await asyncio.sleep(0.5)
                seen = {"seconds": found[0], "connections": relay.connections, "bytes": list(relay.bytes)}
                relay.silent, began = True, time.monotonic()
                while not any("nothing arrives from" in line for line in lines):
                    await asyncio.sleep(0.1)
                noticed = time.monotonic() - began
                relay.silent = False
                learner.stop()
                await running
                return seen, noticed

        with ControllerUnderTest(spec) as controller:
            seen, noticed = asyncio.run(take_part(controller))
    least = 2 * length / rate
    sent = sum(seen["bytes"]) / (2 * length)
    sheet.table([
        ["kB/s each way", "model, MB", "a round, s", "times the least", "connections", "bytes passed on / of models",
         "a silent line is given up after, s"],
        [f"{rate / 1000:g}", f"{megabytes:g}", f"{seen['seconds']:.0f}", f"{seen['seconds'] / least:.2f}",
         seen["connections"], f"{sent:.2f}", f"{noticed:.0f}"],
    ])  # fmt: skip
    sheet.figures = {"round": seen, "least_seconds": least, "noticed_seconds": noticed}
    sheet.goal(
        f"a {rate / 1000:g} kB/s line behind a buffering relay, {megabytes:g} MB", "a round ends",
        f"after {seen['seconds']:.0f} s, {seen['seconds'] / least:.2f} times the least", True,
    )  # fmt: skip
    sheet.goal(
        "the same line, silent", f"given up within {NOTICED} s", f"{noticed:.0f} s", noticed <= NOTICED,
        NOTICED / noticed,
    )  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rate", type=float, default=10.0, help="kB a second in each direction")
    parser.add_argument("--megabytes", type=float, default=1.25, help="of the model")
    options = parser.parse_args()
    with report(options, __doc__) as sheet:
        measure(sheet, *((0.2, 100_000.0) if options.quick else (options.megabytes, 1000 * options.rate)))


if __name__ == "__main__":
    main()
