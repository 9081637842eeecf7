"""A bad network between learners and their controller: a TCP proxy that a test controls while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

_BUFFER = 1 << 14


def _socket() -> socket.socket:
    """As on a line between two sites. On loopback segments and so buffers are huge: megabytes would seem to be sent."""
    made = socket.socket()
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1460)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    made.setblocking(False)
    return made


class Direction:
    """One direction of all connections; the fields may be set at any time."""

    def __init__(self) -> None:
        self.bytes = 0  # that came in so far
        self.held = False  # nothing moves, nothing is lost: what a cut cable does to TCP
        self.rate: float | None = None  # bytes a second
        self.buffers = False  # takes in whatever comes, and passes it on at its own pace: for new connections
        self.flip_at: int | None = None  # one bit of the byte with this number, counted by `bytes`
        self.cut_at: int | None = None  # the connection is closed after this byte
        self.change: Callable[[bytes], bytes] | None = None  # what else happens to the bytes
        self._next = 0.0  # when the line is free again

    async def meddle(self, data: bytes) -> tuple[bytes, bool]:
        """What is passed on of it, and whether the connection lives."""
        while self.held:
            await asyncio.sleep(0.01)
        start, self.bytes = self.bytes, self.bytes + len(data)
        if self.flip_at is not None and start <= self.flip_at < self.bytes:
            changed = bytearray(data)
            changed[self.flip_at - start] ^= 1 << 4
            data = bytes(changed)
        if self.change is not None:
            data = self.change(data)
        if self.cut_at is not None and self.cut_at < self.bytes:
            return data[: max(0, self.cut_at - start)], False
        if self.rate is not None:
            now = asyncio.get_running_loop().time()
            self._next = max(self._next, now) + len(data) / self.rate
            await asyncio.sleep(self._next - now)
        return data, True


class Proxy:
    """Listens on loopback and passes on to `target`; `up` is from those who dial, `down` is to them."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.up, self.down = Direction(), Direction()
        self.connections = 0  # so far
        self._alive: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._server = self._do(self._listen())
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *reason: object) -> None:
        self.heal()
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> asyncio.Server:
        door = _socket()
        door.bind(("127.0.0.1", 0))
        return await asyncio.start_server(self._serve, sock=door, limit=_BUFFER, backlog=200)

    async def _end(self) -> None:
        self._server.close()
        for connection in list(self._alive):
            connection.abort()
        await asyncio.sleep(0.05)

    # --- what a test may do -----------------------------------------------------------------------

    def partition(self, *, up: bool = True, down: bool = True) -> None:
        """Hold up one direction or both, of new connections too, until `heal`."""
        self.up.held, self.down.held = up, down

    def heal(self) -> None:
        """From now on everything passes as it comes."""
        for each in (self.up, self.down):
            each.held, each.rate, each.flip_at, each.cut_at, each.change = False, None, None, None, None

    def vanish(self) -> None:
        """What is connected now is so for ever, but neither end hears of the other again; new connections are well."""
        for connection in list(self._alive):
            connection.mute = True

    def cut(self) -> None:
        """Reset all connections."""
        self._do(self._cut())

    async def _cut(self) -> None:
        for connection in list(self._alive):
            connection.abort()

    # --- connections --------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            line = _socket()
            await asyncio.get_running_loop().sock_connect(line, self._target)
            there, thither = await asyncio.open_connection(sock=line, limit=_BUFFER)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(writer, thither)
        self._alive.add(connection)
        directions = [
            asyncio.create_task(connection.pump(reader, thither, self.up)),
            asyncio.create_task(connection.pump(there, writer, self.down)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            while connection.mute:
                await asyncio.sleep(0.05)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            connection.abort()
            self._alive.discard(connection)


class _Connection:
    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self._writers = writers
        self.mute = False

    def abort(self) -> None:
        self.mute = False
        for writer in self._writers:
            writer.transport.abort()

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
        """Until one end closes, or the direction cuts it."""
        if not direction.buffers:
            await self._pass_on(reader, writer, direction)
            return
        relay = asyncio.StreamReader(limit=1 << 40)
        filling = asyncio.create_task(_fill(reader, relay))
        try:
            await self._pass_on(relay, writer, direction)
        finally:
            filling.cancel()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(4096):
                data, alive = await direction.meddle(data)
                if self.mute:
                    continue
                writer.write(data)
                await writer.drain()
                if not alive:
                    return
            while direction.held:  # the end of a connection does not pass a cut cable either
                await asyncio.sleep(0.01)


async def _fill(reader: asyncio.StreamReader, relay: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            relay.feed_data(data)
    relay.feed_eof()
