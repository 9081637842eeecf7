"""The status of a running controller over HTTP.

    /status   the document, JSON            /healthz  whether event loop and writer answer, and the disk has room
    /metrics  the same for Prometheus       /readyz   whether learners may connect: not when it stops or has ended

The server only reads, in a thread and an event loop of its own. It has at most one question open to the controller's
event loop, no matter how many clients wait for the answer: whatever comes over HTTP, the federation goes on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hmac
import math
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from metis.deployment.controller.metrics import metrics_text
from metis.deployment.controller.status import Document, Unanswered, check_token
from metis.errors import ConfigError
from metis.net import header_is_loopback, is_served_locally, join_address, listen_on
from metis.runs.trace import plain_number
from metis.text import json_text

Ask = Callable[[], Awaitable[Document]]

PATHS = ("/healthz", "/metrics", "/readyz", "/status")
_MAX_CONNECTIONS = 32
_MAX_HEAD = 8192  # bytes of a request; nothing more is needed
_MAX_HEADERS = 100
_REQUEST_SECONDS = 5.0  # in which a request must be complete
_ANSWER_SECONDS = 30.0  # in which its answer must be taken
_BODY_SECONDS = 1.0  # in which the body of a refused request is read and forgotten
_FRESH = 1.0  # seconds for which an answer is used again
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Connection": "close"}


class _Question:
    """The status, asked once; everybody who wants it meanwhile waits for the same answer."""

    def __init__(self, ask: Ask, loop: asyncio.AbstractEventLoop) -> None:
        self._asked_at = time.monotonic()
        self._answered_at = -math.inf
        self._heard = False
        self._bodies: dict[str, asyncio.Future[bytes]] = {}
        asking = self._put(ask)
        try:
            self._future: concurrent.futures.Future[Document] = asyncio.run_coroutine_threadsafe(asking, loop)
        except RuntimeError as problem:
            asking.close()
            raise Unanswered("the event loop of the controller has ended") from problem

    async def _put(self, ask: Ask) -> Document:
        """In the controller's event loop."""
        self._heard = True
        document = await ask()
        self._answered_at = time.monotonic()
        return document

    @property
    def spent(self) -> bool:
        """Whether it is time to ask again; never while the answer is awaited."""
        return self._future.done() and time.monotonic() - self._answered_at > _FRESH

    async def answer(self, seconds: float) -> Document:
        waiting = asyncio.wrap_future(self._future)
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen below, or nobody waits
        await asyncio.wait([waiting], timeout=seconds)
        if not self._future.done():
            who, age = "writer" if self._heard else "event loop", time.monotonic() - self._asked_at
            raise Unanswered(f"the {who} of the controller has not answered for {age:.0f} s")
        if self._future.cancelled():
            raise Unanswered("the controller is ending")
        problem = self._future.exception()
        if problem is not None:
            raise Unanswered(f"the controller could not give its status: {problem}") from problem
        return self._future.result()

    async def body(self, render: Callable[[Document], bytes]) -> bytes:
        """The document in this form, made once and outside the event loop: it may be long."""
        if render.__name__ not in self._bodies:
            making = asyncio.to_thread(render, self._future.result())
            self._bodies[render.__name__] = asyncio.ensure_future(making)
        return await asyncio.shield(self._bodies[render.__name__])


class StatusServer:
    """Serves the status of a controller until it is closed; a ConfigError says why it cannot."""

    address: str

    def __init__(
        self,
        listen: str,
        ask: Ask,
        loop: asyncio.AbstractEventLoop,
        *,
        token: str | None = None,
        seconds: float = 5.0,  # that the event loop and the writer have to answer
    ) -> None:
        self._ask, self._loop, self._seconds = ask, loop, seconds
        self._question: _Question | None = None
        if token is not None:
            check_token(token, "use")
        bound = listen_on(listen, "the status")
        host, port = bound.getsockname()[:2]
        if token is None and not is_served_locally(bound):
            bound.close()
            raise ConfigError(
                f"the status on {listen} could be read from other machines, so it needs a token; give one, or listen "
                f"on 127.0.0.1:{port}"
            )
        self.address = join_address(host, port)
        endpoints = (self._healthz, self._metrics, self._readyz, self._status)
        routes = [Route(path, endpoint) for path, endpoint in zip(PATHS, endpoints, strict=True)]
        app = Starlette(routes=routes, exception_handlers={Unanswered: _unavailable})
        guarded = _Guard(app, None if token is None else token.encode(), is_served_locally(bound))
        self._server = uvicorn.Server(
            uvicorn.Config(
                guarded, http=_Connection, ws="none", lifespan="off", loop="asyncio", proxy_headers=False,
                log_config=None, log_level="critical", access_log=False, server_header=False, date_header=False,
                h11_max_incomplete_event_size=_MAX_HEAD, timeout_graceful_shutdown=1,
            )
        )  # fmt: skip
        self._thread = threading.Thread(
            target=self._server.run, args=([bound],), name="metis-status", daemon=True
        )  # fmt: skip
        self._thread.start()

    def close(self) -> None:
        """Stop answering; may be called again."""
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)
        self._server.should_exit = True
        self._thread.join()

    async def _answer(self) -> tuple[_Question, Document]:
        """The open question, one just answered, or else a new one; and its answer."""
        if self._question is None or self._question.spent:
            self._question = _Question(self._ask, self._loop)
        question = self._question
        return question, await question.answer(self._seconds)

    async def _status(self, request: Request) -> Response:
        question, _ = await self._answer()
        return Response(await question.body(_json), media_type="application/json")

    async def _metrics(self, request: Request) -> Response:
        question, _ = await self._answer()
        return Response(await question.body(metrics_text), media_type="text/plain; version=0.0.4")

    async def _healthz(self, request: Request) -> Response:
        _, document = await self._answer()
        disk = document.get("disk", {})
        sentence = f"{disk['sentence']}\n" if disk.get("sentence") else ""
        return PlainTextResponse(sentence, 503) if disk.get("full") else PlainTextResponse(f"ok\n{sentence}")

    async def _readyz(self, request: Request) -> Response:
        _, document = await self._answer()
        disk = document.get("disk", {})
        ready = document["state"] not in ("stopping", "finished") and not disk.get("full")
        text = disk["sentence"] if disk.get("full") else document["state"]
        return PlainTextResponse(f"{text}\n", 200 if ready else 503)


def _unavailable(request: Request, problem: Exception) -> Response:
    return PlainTextResponse(f"{problem}\n", 503)


def _json(document: Document) -> bytes:
    return json_text(document, indent=None, default=plain_number).encode() + b"\n"


class _BadRequest(Exception):
    def __init__(self, code: int, reason: str, **headers: str) -> None:
        super().__init__(reason)
        self.code, self.headers = code, headers


class _Guard:
    """Refuses what is not a plain request for one of the paths, and puts the same headers on every answer."""

    def __init__(self, app: ASGIApp, token: bytes | None, loopback: bool) -> None:
        self._app, self._token, self._loopback = app, token, loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        try:
            self._check(Request(scope), scope)
            await self._app(scope, receive, send_with_headers)
        except _BadRequest as bad:
            with contextlib.suppress(
                asyncio.TimeoutError
            ):  # an answer is lost if the connection ends with bytes unread
                await asyncio.wait_for(_read_body(receive), _BODY_SECONDS)
            refusal = PlainTextResponse(f"{bad}\n", bad.code, bad.headers)
            await refusal(scope, receive, send_with_headers)

    def _check(self, request: Request, scope: Scope) -> None:
        path = scope["raw_path"].decode("latin-1")
        headers = request.headers.raw
        if scope["http_version"] not in ("1.0", "1.1"):
            raise _BadRequest(505, "only HTTP/1.0 and HTTP/1.1 are supported")
        if (
            len(headers) > _MAX_HEADERS
            or len(path) + sum(len(name) + len(value) for name, value in headers) > _MAX_HEAD
        ):
            raise _BadRequest(431, f"a request may have {_MAX_HEAD} bytes and {_MAX_HEADERS} headers")
        # A page in a browser on this machine can have its own name lead here, and would read what is not its own.
        host = request.headers.get("Host")
        if host is not None and self._loopback and self._token is None and not header_is_loopback(host):
            raise _BadRequest(403, "the Host header must name this machine: localhost, 127.0.0.1 or [::1]")
        if self._token is not None:
            given = request.headers.get("Authorization", "").encode("latin-1", "replace")
            if not hmac.compare_digest(given, b"Bearer " + self._token):
                header = {"WWW-Authenticate": 'Bearer realm="metis"'}
                raise _BadRequest(401, "a token is needed: Authorization: Bearer TOKEN", **header)
        if path not in PATHS:
            raise _BadRequest(404, f"not found; the paths are {', '.join(PATHS)}")
        if request.method not in ("GET", "HEAD"):
            raise _BadRequest(405, "only GET and HEAD are allowed: the status can only be read", Allow="GET, HEAD")


async def _read_body(receive: Receive) -> None:
    while (message := await receive()).get("more_body") and message["type"] == "http.request":
        pass


class _Connection(H11Protocol):
    """A connection of the server, with limits that uvicorn does not have: their number, and the time for a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._answering = False
        self._timer = self.loop.call_later(_REQUEST_SECONDS, self._too_slow)
        if len(self.connections) > _MAX_CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has sent its request may close its half of the connection and still gets the answer."""
        cycle: Any = self.cycle  # None before the first request
        if cycle is None and self.conn.trailing_data[0]:
            self.send_400_response("")
        return cycle is not None and not cycle.response_complete

    def _too_slow(self) -> None:
        cycle: Any = self.cycle
        if cycle is None or self._answering:
            self.transport.abort()
        else:
            self._answering = True
            self._timer = self.loop.call_later(_ANSWER_SECONDS, self._too_slow)

    def send_400_response(self, msg: str) -> None:
        reason = f"not a valid HTTP request, or longer than {_MAX_HEAD} bytes\n".encode()
        headers = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(reason)), **_HEADERS}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(f"HTTP/1.1 400 Bad Request\r\n{head}\r\n".encode() + reason)
        self.transport.close()
