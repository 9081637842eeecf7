"""grpc.aio in memory: messages take virtual time, lines are cut, connections break; handlers and messages are real.

Within a call messages arrive in order, between calls in any. A cut line holds what is sent, as TCP does. When a
learner is gone, the handler of its call sees the end of the stream, is cancelled, or both in any order.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc

from system.loop import BOOT, Boot, World

_CODE = grpc.StatusCode
_UP, _DOWN = 0, 1  # also: the client's end and the server's end of a connection
_WINDOW = 65536  # bytes of a call that may travel
_KEEPALIVE = (600.0, 660.0)  # seconds until gRPC itself gives up a silent connection


class Line:
    """Between one learner and the controller; it may change at any time."""

    def __init__(self, network: Network, rng: random.Random) -> None:
        self._network, self.rng = network, rng
        self.latency, self.jitter, self.rate = 0.005, 0.01, 1e8
        self.held = [False, False]
        self._waiting: list[list[Callable[[], None]]] = [[], []]
        self._episode = 0
        self.connections: list[Connection] = []

    def delay(self, size: int) -> float:
        return self.latency + self.rng.random() * self.jitter + size / self.rate

    def hold(self, way: int, travel: Callable[[], None]) -> None:
        self._waiting[way].append(travel)

    def cut(self, up: bool, down: bool) -> None:
        """Nothing moves in these directions; an end that hears nothing for long enough gives up."""
        self.held = [up, down]
        self._episode += 1
        episode, loop = self._episode, self._network.world.loop

        def give_up(connection: Connection, end: int) -> None:
            if self._episode == episode and any(self.held):
                self._network.world.sometimes("keepalive ended a connection")
                connection.lost(end, "keepalive watchdog timeout")

        for connection in self.connections:
            for end in (0, 1):
                loop.call_later(self.rng.uniform(*_KEEPALIVE), give_up, connection, end)

    def heal(self) -> None:
        self.held = [False, False]
        self._episode += 1
        for way in (_UP, _DOWN):
            waiting, self._waiting[way] = self._waiting[way], []
            for travel in waiting:
                travel()


class Connection:
    """One TCP connection, as each end sees it."""

    def __init__(self, line: Line, client: Boot, server: Server) -> None:
        self.line, self.client, self.server = line, client, server
        self.world = client.world
        self.open = [True, True]
        self.calls: list[tuple[Call, Served]] = []
        line.connections.append(self)
        client.at_death.append(lambda power: self.end_died(0, power))
        server.boot.at_death.append(lambda power: self.end_died(1, power))

    def end_died(self, end: int, power: bool) -> None:
        """The process at this end is gone: its kernel says so, unless the machine is gone too."""
        if not self.open[end]:
            return
        self.open[end] = False
        if power:
            delay, context = self.line.rng.uniform(*_KEEPALIVE), self.world.context.copy()
            self.world.loop.call_later(delay, self.lost, 1 - end, "keepalive watchdog timeout", context=context)
        else:
            self.send(end, None, 0, self.lost, 1 - end, "Socket closed")

    def boot(self, end: int) -> Boot:
        return self.client if end == 0 else self.server.boot

    def send(self, sender: int, call: Call | None, size: int, arrives: Callable[..., None], *arguments: Any) -> None:
        """Let it happen at the other end, later; in order within a call."""
        receiver, world = 1 - sender, self.world

        def arrive() -> None:
            if self.open[receiver] and not self.boot(receiver).dead:
                world.note("net", f"{('up', 'down')[sender]} {arrives.__name__} {size}")
                arrives(*arguments)

        def travel() -> None:
            at = world.loop.now + self.line.delay(size)
            if call is not None:
                at = call.last_arrival[sender] = max(call.last_arrival[sender] + 1e-9, at)
            world.loop.call_at(at, arrive, context=self.boot(receiver).context.copy())

        if self.line.held[sender]:
            self.line.hold(sender, travel)
        else:
            travel()

    def lost(self, end: int, why: str) -> None:
        """This end notices that there is no connection any more."""
        if not self.open[end]:
            return
        self.open[end] = False
        for call, served in self.calls:
            if end == 0:
                call.end(_CODE.UNAVAILABLE, why)
            else:
                served.gone()
        if self in self.line.connections and not any(self.open):
            self.line.connections.remove(self)

    def reset(self) -> None:
        """By something in between: both ends notice, each when it does."""
        for end in (0, 1):
            delay, context = self.line.rng.random() * 0.2, self.boot(end).context.copy()
            self.world.loop.call_later(delay, self.lost, end, "Connection reset by peer", context=context)


class _Signal:
    """Wakes the one coroutine that waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: asyncio.Future[None] | None = None

    def set(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait(self) -> None:
        self._waiting = self._loop.create_future()
        await self._waiting


class Call:
    """The client's end of a call."""

    def __init__(self, channel: Channel, method: str, write: Any, read: Any, metadata: Any) -> None:
        self.channel, self.method, self.metadata = channel, method, tuple(metadata or ())
        self._write, self._read = write, read
        loop = channel.world.loop
        self._inbox: deque[bytes] = deque()
        self._news, self._room = _Signal(loop), _Signal(loop)
        self.status: Any = None
        self._details = ""
        self._cancelled = self._closed_writing = False
        self._initial: asyncio.Future[Any] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self.last_arrival = [0.0, 0.0]
        self.served: Served | None = None
        self.outbox: list[tuple[int, str, tuple[Any, ...]]] = []  # before there is a connection
        self._in_flight = 0
        channel.calls.append(self)
        channel.connect(self)

    # --- what arrives ---------------------------------------------------------------------------

    def got(self, data: bytes) -> None:
        if self.status is None:
            self._inbox.append(data)
            self._news.set()

    def got_initial(self, metadata: Any) -> None:
        if not self._initial.done():
            self._initial.set_result(metadata)

    def got_window(self, size: int) -> None:
        self._in_flight -= size
        self._room.set()

    def end(self, status: Any, details: str = "") -> None:
        if self.status is not None:
            return
        self.status, self._details = status, details
        self.got_initial(())
        if not self._ended.done():
            self._ended.set_result(None)
        self._room.set()
        self._news.set()

    # --- what the caller uses -------------------------------------------------------------------

    def _raise(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError
        if self.status not in (None, _CODE.OK):
            raise grpc.aio.AioRpcError(self.status, grpc.aio.Metadata(), grpc.aio.Metadata(), self._details)

    async def write(self, message: Any) -> None:
        if self.status is not None or self._closed_writing:
            raise asyncio.InvalidStateError("RPC already finished.")
        self.channel.network.written(self, message)
        data = self._write(message)
        self._in_flight += len(data)
        self.transmit(len(data), "request", data)
        while self._in_flight > _WINDOW and self.status is None:
            await self._room.wait()
        await asyncio.sleep(0)
        if self.status is not None:
            self._raise()

    async def done_writing(self) -> None:
        if self.status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        self._closed_writing = True
        self.transmit(0, "half_close")

    def transmit(self, size: int, what: str, *arguments: Any) -> None:
        connection = self.channel.connection
        if self.served is None or connection is None:
            self.outbox.append((size, what, arguments))
        else:
            connection.send(0, self, size, getattr(self.served, what), *arguments)

    def ask(self, request: Any) -> Call:
        """The only request of a unary call."""
        self.channel.network.written(self, request)
        data = self._write(request)
        self.transmit(len(data), "request", data)
        self._closed_writing = True
        self.transmit(0, "half_close")
        return self

    async def read(self) -> Any:
        while not self._inbox:
            if self.status is not None:
                self._raise()
                return grpc.aio.EOF
            await self._news.wait()
        if self._cancelled:
            raise asyncio.CancelledError
        return self._read(self._inbox.popleft())

    def __aiter__(self) -> Any:
        return self._messages()

    async def _messages(self) -> Any:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def initial_metadata(self) -> Any:
        return await asyncio.shield(self._initial)

    async def code(self) -> Any:
        await asyncio.shield(self._ended)
        return self.status

    async def details(self) -> str:
        await asyncio.shield(self._ended)
        return self._details

    def done(self) -> bool:
        return self.status is not None

    def cancel(self) -> bool:
        if self.status is not None:
            return False
        if self.served is not None and self.channel.connection is not None:
            self.channel.connection.send(0, self, 0, self.served.gone)
        self._cancelled = True
        self.end(_CODE.CANCELLED, "Locally cancelled by application!")
        return True

    def __await__(self) -> Any:
        return self._response().__await__()

    async def _response(self) -> Any:
        try:
            await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise()
        return self._read(self._inbox.popleft())


class Channel:
    """The client's end of a connection."""

    def __init__(self, network: Network, boot: Boot, target: str) -> None:
        self.network, self.boot, self.world, self._target = network, boot, boot.world, target
        self.calls: list[Call] = []
        self.connection: Connection | None = None
        self._state = "idle"

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *reason: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for call in self.calls:
            if call.status is None:
                call._cancelled = True
                call.end(_CODE.CANCELLED, "Channel closed!")
        if self.connection is not None:
            self.connection.end_died(0, power=False)
        self._state = "closed"

    def connect(self, call: Call) -> None:
        if self.connection is not None and self.connection.open[0]:
            self._begin(call)
        elif self._state == "lost" or self.connection is not None:
            self.world.loop.call_later(0.01, call.end, _CODE.UNAVAILABLE, "Socket closed")
        elif self._state == "idle":
            self._state = "connecting"
            self.world.loop.call_later(2 * self.network.line(self.boot.name).delay(100), self._try, 0)

    def _try(self, attempt: int) -> None:
        line, server = self.network.line(self.boot.name), self.network.servers.get(self._target)
        if self._state != "connecting":
            return
        if any(line.held):
            if attempt < 20:
                self.world.loop.call_later(1.0, self._try, attempt + 1)
            else:
                self._refuse("connect timed out")
        elif server is None or server.boot.dead:
            self._refuse("Connection refused")
        else:
            self._state, self.connection = "connected", Connection(line, self.boot, server)
            for call in self.calls:
                if call.status is None:
                    self._begin(call)

    def _refuse(self, why: str) -> None:
        self._state = "lost"
        for call in self.calls:
            call.end(_CODE.UNAVAILABLE, f"failed to connect to all addresses; {why}")

    def _begin(self, call: Call) -> None:
        connection = self.connection
        assert connection is not None
        served = call.served = Served(connection, call)
        connection.calls.append((call, served))
        connection.send(0, call, 50, served.start)
        for size, what, arguments in call.outbox:
            connection.send(0, call, size, getattr(served, what), *arguments)
        call.outbox.clear()

    def stream_stream(self, method: str, write: Any, read: Any) -> Any:
        return lambda metadata=(), **options: Call(self, method, write, read, metadata)

    stream_unary = stream_stream

    def unary_stream(self, method: str, write: Any, read: Any) -> Any:
        return lambda request, metadata=(), **options: Call(self, method, write, read, metadata).ask(request)

    unary_unary = unary_stream


class Served:
    """The server's end of a call, and the context of its handler."""

    def __init__(self, connection: Connection, call: Call) -> None:
        self._connection, self.call = connection, call
        self._loop = connection.world.loop
        self._queue: deque[bytes | None] = deque()
        self._news = _Signal(self._loop)
        self._task: asyncio.Task[None] | None = None
        self._status: tuple[Any, str] | None = None
        self._gone = False

    # --- what arrives ---------------------------------------------------------------------------

    def start(self) -> None:
        server = self._connection.server
        details = SimpleNamespace(method=self.call.method, invocation_metadata=self.call.metadata)
        handler = next((found for each in server.handlers if (found := each.service(details)) is not None), None)
        if handler is None:
            self._connection.send(1, self.call, 0, self.call.end, _CODE.UNIMPLEMENTED, "Method not found!")
        else:
            self._task = self._loop.create_task(self._run(handler))

    def request(self, data: bytes) -> None:
        self._connection.server.network.heard[self._connection.client.name] = self._loop.now
        self._queue.append(data)
        self._connection.send(1, self.call, 0, self.call.got_window, len(data))
        self._news.set()

    def half_close(self) -> None:
        self._queue.append(None)
        self._news.set()

    def gone(self) -> None:
        """The client is gone; gRPC ends the stream as if it were whole, cancels the handler, or both in any order."""
        if self._gone or self._task is None:
            return
        self._gone = True
        rng = self._connection.line.rng
        if (how := rng.randrange(3)) != 1:
            self.half_close()
        delay, context = 0.0 if how == 1 else rng.random() * 0.05, self._connection.server.boot.context.copy()
        self._loop.call_later(delay, self._task.cancel, context=context)

    def cut_short(self) -> None:
        """The server stops: the handler is cancelled, and its caller only sees that the connection is gone."""
        if self._task is not None:
            self._gone = True
            self._task.cancel()

    # --- the handler ----------------------------------------------------------------------------

    async def next(self) -> bytes | None:
        while not self._queue:
            await self._news.wait()
        return None if self._queue[0] is None else self._queue.popleft()

    async def _run(self, handler: Any) -> None:
        self._loop.kept.append(self)
        read, self._serialize = handler.request_deserializer or bytes, handler.response_serializer or bytes
        network = self._connection.server.network
        try:
            requests: Any = _Requests(self, read)
            if not handler.request_streaming:
                data = await self.next()
                if data is None:
                    return  # gone before it had asked
                requests = read(data)
            if not handler.response_streaming:
                answer = await (handler.stream_unary or handler.unary_unary)(requests, self)
                network.sent(self.call, answer)
                self._send(answer)
            elif handler.request_streaming:
                await handler.stream_stream(requests, self)
            else:
                async for message in handler.unary_stream(requests, self):
                    await self.write(message)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            return
        except Exception as problem:
            self._connection.world.violated(f"an exception escaped a handler: {problem!r}")
            self._status = (_CODE.UNKNOWN, f"Unexpected {type(problem)}: {problem}")
        code, details = self._status or (_CODE.OK, "")
        self._connection.send(1, self.call, 0, self.call.end, code, details)

    def _send(self, message: Any) -> None:
        data = self._serialize(message)
        self._connection.send(1, self.call, len(data), self.call.got, data)

    # --- the handler's context ------------------------------------------------------------------

    async def write(self, message: Any) -> None:
        self._connection.server.network.sent(self.call, message)
        self._send(message)
        await asyncio.sleep(0)

    async def send_initial_metadata(self, metadata: Any) -> None:
        self._connection.send(1, self.call, 0, self.call.got_initial, metadata)

    async def abort(self, code: Any, details: str = "", trailing: Any = ()) -> None:
        self._status = (code, details)
        self._connection.server.network.aborted(self.call, details)
        raise grpc.aio.AbortError("Locally aborted.")

    def invocation_metadata(self) -> Any:
        return self.call.metadata

    def auth_context(self) -> dict[str, Any]:
        return {}

    def peer(self) -> str:
        return f"ipv4:simulated:{self._connection.client.name}"


class _Requests:
    def __init__(self, served: Served, read: Any) -> None:
        self._served, self._read = served, read

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        data = await self._served.next()
        if data is None:
            raise StopAsyncIteration
        return self._read(data)


class Server:
    """What listens."""

    def __init__(self, network: Network, boot: Boot) -> None:
        self.network, self.boot = network, boot
        self.handlers: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self.handlers += handlers

    def add_insecure_port(self, listen: str) -> int:
        self._listen = listen
        return int(listen.rpartition(":")[2])

    async def start(self) -> None:
        self.network.servers[self._listen] = self

    async def stop(self, grace: float | None = None) -> None:
        if self.network.servers.get(self._listen) is self:
            del self.network.servers[self._listen]
        await asyncio.sleep(grace or 0)
        for line in self.network.lines.values():
            for connection in list(line.connections):
                if connection.server is self:
                    for _, served in connection.calls:
                        served.cut_short()
                    connection.end_died(1, power=False)


class Network:
    """All lines and servers of one simulation; the two hooks are for checkers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._rng = random.Random(f"network {world.seed}")
        self.lines: dict[str, Line] = {}
        self.heard: dict[str, float] = {}  # when anything of each client arrived last
        self.servers: dict[str, Server] = {}
        self.written: Callable[[Call, Any], None] = lambda call, message: None  # by a client
        self.sent: Callable[[Call, Any], None] = lambda call, message: None  # by a handler
        self.aborted: Callable[[Call, str], None] = lambda call, reason: None

    def line(self, name: str) -> Line:
        if name not in self.lines:
            self.lines[name] = Line(self, random.Random(self._rng.random()))
        return self.lines[name]

    # --- as a process sees it: the functions of grpc.aio ----------------------------------------

    def server(self, options: Any = None, **more: Any) -> Server:
        boot = BOOT.get()
        assert boot is not None
        return Server(self, boot)

    def insecure_channel(self, target: str, options: Any = None) -> Channel:
        boot = BOOT.get()
        assert boot is not None
        return Channel(self, boot, target)
