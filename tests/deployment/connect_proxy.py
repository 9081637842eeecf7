"""A real HTTP proxy for the tests: it understands CONNECT with basic authentication, and nothing else."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import threading


class ConnectProxy:
    """Listens on loopback; `hosts` are the names that it alone can resolve, as the proxy of a hospital does."""

    def __init__(
        self, *, user: str | None = None, password: str = "", hosts: dict[str, str] | None = None, status: str = ""
    ) -> None:
        self._expected = None if user is None else base64.b64encode(f"{user}:{password}".encode()).decode()
        self._hosts, self._status = hosts or {}, status  # a status that every request gets, as in "403 Forbidden"
        self.targets: list[str] = []  # every HOST:PORT that a tunnel was opened to
        self.refused = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._relays: set[asyncio.Task[None]] = set()

    def __enter__(self) -> ConnectProxy:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result(30)  # fmt: skip
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *reason: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def url(self, credentials: str = "") -> str:
        return f"http://{credentials}{'@' if credentials else ''}127.0.0.1:{self.port}"

    async def _end(self) -> None:
        self._server.close()
        # One that was accepted this moment has yet to begin; cancelled before that it would never close its connection.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for relay in self._relays:
                relay.cancel()
            await asyncio.wait(others, timeout=0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._answer(reader, writer)
        finally:
            self._relays.discard(task)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, *_ = head[0].split(" ")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        if self._status or method != "CONNECT":
            return await self._refuse(writer, self._status or "405 Method Not Allowed")
        if self._expected is not None and headers.get("proxy-authorization") != f"Basic {self._expected}":
            return await self._refuse(writer, "407 Proxy Authentication Required")
        self.targets.append(target)
        host, _, port = target.rpartition(":")
        try:
            host = self._hosts.get(host, host.strip("[]"))
            there, thither = await asyncio.open_connection(host, int(port))
        except (OSError, socket.gaierror):
            return await self._refuse(writer, "502 Bad Gateway")
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        relays = [asyncio.create_task(_relay(reader, thither)), asyncio.create_task(_relay(there, writer))]
        try:
            await asyncio.wait(relays, return_when=asyncio.FIRST_COMPLETED)
        finally:
            thither.transport.abort()  # first: whoever waits below may be cancelled again
            for relay in relays:
                relay.cancel()
            await asyncio.gather(*relays, return_exceptions=True)

    async def _refuse(self, writer: asyncio.StreamWriter, status: str) -> None:
        self.refused += 1
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.write_eof()
        await asyncio.sleep(0.05)  # it reads the answer before the connection is reset


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
