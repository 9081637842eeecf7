"""The web server of the dashboard: one page, its assets, and a stream of increments. It only reads.

    /              the page                 /assets/NAME   style, script, uPlot
    /events        server-sent events: a snapshot, then what is new, at most twice a second

On loopback everyone on this machine has access; from elsewhere both page and stream require the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from metis.errors import ConfigError
from metis.net import header_is_loopback, is_served_locally
from metis.reporting.dashboard.follow import Restarted, RunFolder, Tail, runs_in, setting_of, setting_version
from metis.reporting.dashboard.listening import address_of
from metis.reporting.dashboard.series import KINDS
from metis.reporting.dashboard.view import COLUMNS, STATES, Increment, RunView
from metis.runs.trace import EVENTS

STATIC = Path(__file__).parent / "static"
_ASSETS = {
    "dashboard.css": "text/css",
    "dashboard.js": "text/javascript",
    "uPlot.min.css": "text/css",
    "uPlot.min.js": "text/javascript",
}
TICK = 0.5  # seconds between two increments
_SLICE = 0.05  # seconds of folding after which readers get their turn
_SEARCH = 2.0  # seconds between two searches for new runs
_KEEP_ALIVE = 15.0
_LINGER = 30.0  # seconds for which increments are kept for a page that lost its connection
_MIN_SECONDS = 2.0  # that a dashboard in the background of a run stays up
_MAX_CLIENTS = 32
_MAX_WAITING = 120  # increments that a slow page may fall behind before it must start again
_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


# --- the runs of a folder ---------------------------------------------------------------------------


class _Followed:
    """One run on its way."""

    def __init__(self, source: RunFolder) -> None:
        self.source = source
        self.tail = Tail(source.folder / EVENTS)
        self.fresh = True  # whether pages must forget what they know of it
        self._begin()

    def _begin(self) -> None:
        self._setting_version = setting_version(self.source.folder)
        self.view = RunView(setting_of(self.source.folder))
        self.fresh = True

    def read(self) -> bool:
        """Fold the next lines; whether there are more to read at once."""
        try:
            if setting_version(self.source.folder) != self._setting_version:
                self.tail = Tail(self.source.folder / EVENTS)
                self._begin()
            lines = self.tail.read()
            self.view.feed(lines)
            return bool(lines) and self.tail.behind > 0
        except Restarted:
            self._begin()
            return True
        except (OSError, ValueError) as problem:
            self.view.damage = f"its events cannot be read: {problem}"
            return False

    @property
    def now(self) -> float | None:
        """The second of the run: of a real federation it goes on between two events."""
        view = self.view
        if view.events and view.finish_reason is None and self.source.alive:
            return view.now + max(0.0, time.time() - self.tail.changed_at)
        return None


class Hub:
    """Follows the runs of a folder, and sends every open page what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[str, _Followed] = {}
        self._order: list[str] = []
        self._searched_at = -_SEARCH
        self._boot = secrets.token_hex(4)
        self._number = 0
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=_MAX_WAITING)
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self._left_at = -_LINGER
        self._ended = False

    # --- folding --------------------------------------------------------------------------------

    def read(self) -> bool:
        """Fold for a short while; whether there is more to read at once."""
        end = time.monotonic() + _SLICE
        self._search()
        while True:
            more = [run.read() for run in self._runs.values()]
            if not any(more) or time.monotonic() > end:
                return any(more)

    def _search(self) -> None:
        if time.monotonic() - self._searched_at < _SEARCH:
            return
        self._searched_at = time.monotonic()
        found = {source.name: source for source in runs_in(self.folder)}
        for name, source in found.items():
            if name not in self._runs or self._runs[name].source != source:
                self._runs[name] = _Followed(source)
        # A deleted run stays on the page: someone may be looking at it.
        self._order = [*found, *(name for name in self._order if name not in found)]

    async def follow(self) -> None:
        """Read and tell until cancelled."""
        while True:
            behind = self.read()
            if self._listeners or time.monotonic() - self._left_at < _LINGER:
                self.tell()
            elif self._recent:
                self._forget()
            else:
                for run in self._runs.values():
                    run.view.skip()
            await asyncio.sleep(0.01 if behind else TICK)

    # --- telling --------------------------------------------------------------------------------

    def tell(self) -> None:
        """Send everybody what is new."""
        news = []
        for index, name in enumerate(self._order):
            run = self._runs[name]
            now = run.now
            if run.view.changed or run.fresh or now is not None:
                increment = run.view.increment(now)
                news.append(self._entry(run, index, increment, fresh=run.fresh))
                run.fresh = False
        if news:
            self._broadcast({"runs": news})

    def _entry(self, run: _Followed, index: int, increment: Increment, *, fresh: bool) -> Increment:
        entry: Increment = {"id": run.source.name, **increment}
        if fresh:
            entry |= {"reset": True, "place": index, "real": run.source.state is not None}
        entry["age"] = round(max(0.0, time.time() - run.tail.changed_at), 1) if run.tail.changed_at else None
        return entry

    def _broadcast(self, message: Increment) -> None:
        self._number += 1
        data = self._framed(message)
        self._recent.append((self._number, data))
        for queue in list(self._listeners):
            if queue.qsize() >= _MAX_WAITING:
                # It cannot follow; when it connects again it gets a snapshot.
                self._listeners.discard(queue)
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(None)
            else:
                queue.put_nowait(data)

    def _framed(self, message: Increment, kind: str = "news") -> bytes:
        text = json.dumps(message, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return f"event: {kind}\nid: {self._boot}.{self._number}\ndata: {text}\n\n".encode()

    def _forget(self) -> None:
        self._recent.clear()
        self._boot = secrets.token_hex(4)

    async def listen(self, last_id: str) -> AsyncIterator[bytes]:
        """The stream of one page, from where it lost its connection if that is not long ago."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.tell()  # the others first: then the snapshot and what follows it fit together
        for old in self._missed(last_id) or self._snapshot():
            queue.put_nowait(old)
        if self._ended:
            queue.put_nowait(self._framed({}, "end"))
            queue.put_nowait(None)
        self._listeners.add(queue)
        try:
            while True:
                try:
                    data = await asyncio.wait_for(queue.get(), _KEEP_ALIVE)
                except asyncio.TimeoutError:
                    yield b": still here\n\n"
                    continue
                if data is None:
                    return
                yield data
        finally:
            self._listeners.discard(queue)
            self._left_at = time.monotonic()

    @property
    def full(self) -> bool:
        return len(self._listeners) >= _MAX_CLIENTS

    def _missed(self, last_id: str) -> list[bytes] | None:
        boot, _, number = last_id.partition(".")
        if boot != self._boot or not number.isdigit() or int(number) > self._number:
            return None
        missed = [(at, data) for at, data in self._recent if at > int(number)]
        if len(missed) != self._number - int(number):
            return None
        return [b": nothing was missed\n\n", *(data for _, data in missed)]

    def _snapshot(self) -> Iterator[bytes]:
        hello = {
            "title": self.folder.resolve().name,
            "columns": COLUMNS,
            "states": STATES,
            "kinds": KINDS,
            "runs": self._order,
        }
        yield self._framed(hello, "hello")
        for index, name in enumerate(self._order):
            run = self._runs[name]
            for number, part in enumerate(run.view.snapshot(run.now)):
                yield self._framed({"runs": [self._entry(run, index, part, fresh=number == 0)]})

    def end(self) -> None:
        """Read what is left, say farewell and close all streams; pages keep what they show."""
        self._ended = True
        self._searched_at = -_SEARCH
        until = time.monotonic() + 2.0
        while self.read() and time.monotonic() < until:
            pass
        if self._listeners:
            self.tell()
        farewell = self._framed({}, "end")
        for queue in self._listeners:
            queue.put_nowait(farewell)
            queue.put_nowait(None)


# --- HTTP -------------------------------------------------------------------------------------------


class _Guard:
    """Lets in who may look, and puts the security headers on every answer."""

    def __init__(self, app: ASGIApp, token: str | None, *, loopback: bool, cookie: str) -> None:
        self._app, self._token, self._loopback, self._cookie = app, token, loopback, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", []))
                held = {name.lower() for name, _ in headers}
                headers += [
                    (name.lower().encode(), value.encode())
                    for name, value in _SECURITY.items()
                    if name.lower().encode() not in held
                ]
                message = {**message, "headers": headers}
            await send(message)

        answer = self._refusal(Request(scope))
        await (answer or self._app)(scope, receive, secured)

    def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return _text(405, "the dashboard can be read, and nothing else", Allow="GET, HEAD")
        # A page in a browser on this machine can have its own name lead here, and would read what is not its own.
        if self._loopback and self._token is None and not header_is_loopback(request.headers.get("host", "")):
            return _text(403, "the Host header must name this machine: localhost, 127.0.0.1 or [::1]")
        if self._token is None:
            return None
        given = request.query_params.get("token")
        if request.url.path == "/" and given is not None and self._right(given):
            # Into a cookie, out of the address bar: there it would be in the history, and in every screenshot.
            answer = RedirectResponse(".", status_code=303)
            answer.set_cookie(self._cookie, given, httponly=True, samesite="lax", path="/")
            return answer
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        if self._right(request.cookies.get(self._cookie, "")) or (kind.lower() == "bearer" and self._right(bearer)):
            return None
        reason = "a token is needed: open the address that the program printed when it started"
        return _text(401, reason, **{"WWW-Authenticate": 'Bearer realm="metis"'})

    def _right(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token.encode())


def _text(code: int, reason: str, **headers: str) -> Response:
    return Response(f"{reason}\n", code, headers, "text/plain; charset=utf-8")


def _application(hub: Hub, guard: dict[str, Any]) -> ASGIApp:
    held = {name: (STATIC / name).read_bytes() for name in ("index.html", *_ASSETS)}

    async def page(request: Request) -> Response:
        return Response(held["index.html"], media_type="text/html; charset=utf-8")

    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _ASSETS:
            return _text(404, "there is nothing here")
        return Response(held[name], media_type=f"{_ASSETS[name]}; charset=utf-8")

    async def events(request: Request) -> Response:
        if hub.full:
            return _text(503, f"{_MAX_CLIENTS} pages are already connected", **{"Retry-After": "10"})
        stream = hub.listen(request.headers.get("last-event-id", ""))
        return StreamingResponse(stream, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        following = asyncio.create_task(hub.follow())
        try:
            yield
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following

    routes = [Route("/", page), Route("/assets/{name}", asset), Route("/events", events)]
    return _Guard(Starlette(routes=routes, lifespan=lifespan), **guard)


# --- starting and ending ----------------------------------------------------------------------------


class DashboardServer:
    """Serves the dashboard of a folder from a thread until it is closed."""

    def __init__(self, folder: Path, bound: socket.socket, token: str | None = None) -> None:
        if token is None and not is_served_locally(bound):
            raise ConfigError("a dashboard that other machines can read needs a token")
        self.url = address_of(bound, token)
        self._hub = Hub(folder)
        guard = {"token": token, "loopback": is_served_locally(bound), "cookie": f"metis-{bound.getsockname()[1]}"}
        config = uvicorn.Config(
            _application(self._hub, guard),
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,  # visitors are not worth logging, and an address may contain the token
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            limit_concurrency=4 * _MAX_CLIENTS,
        )
        self._server = uvicorn.Server(config)
        self._bound = bound
        self._thread = threading.Thread(target=self._run, name="metis-dashboard", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve(sockets=[self._bound])

    def close(self) -> None:
        """Let pages have the final state, then end."""
        deadline = time.monotonic() + 10.0
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._thread.is_alive():

            def end() -> None:
                self._hub.end()
                self._server.should_exit = True

            self._loop.call_soon_threadsafe(end)
            self._thread.join(10.0)
        self._bound.close()

    def __enter__(self) -> DashboardServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve_until_stdin_ends(folder: Path, descriptor: int) -> None:
    """The other side of `DashboardProcess`."""
    with contextlib.suppress(OSError):
        os.nice(10)
    bound = socket.socket(fileno=descriptor)
    with DashboardServer(folder, bound):
        begun = time.monotonic()
        while os.read(0, 4096):
            pass
        # The run was over before the dashboard was up: a page that is already connecting still gets it.
        time.sleep(max(0.0, begun + _MIN_SECONDS - time.monotonic()))
