"""What a controller tells those who watch it: one document, as JSON, as metrics, and as an answer to "are you well?".

    /status   the document, JSON                /healthz  whether the event loop and the writer answer
    /metrics  the same for Prometheus           /readyz   whether learners may come: not when it stops or has ended

The server only reads. It asks the event loop one question at a time, whoever and however many ask it, and all waiting
is done in its own threads: whatever comes over HTTP, the federation goes on.

`controller.json` in the state folder says where a running controller is found; a killed one leaves it behind.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hmac
import http.client
import io
import json
import math
import os
import shutil
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from metis.errors import ConfigError
from metis.files import write_text
from metis.net import header_is_loopback, host_and_port, is_loopback, join_address, listening_problem
from metis.text import json_text

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

Document = dict[str, Any]
Ask = Callable[[], Awaitable[Document]]

PATHS = ("/healthz", "/metrics", "/readyz", "/status")
ANNOUNCEMENT = "controller.json"
STATES = ("waiting for learners", "running", "paused", "stopping", "finished")
LEARNER_STATES = ("training", "waiting", "late", "disconnected", "away", "set aside")
_MOST_CONNECTIONS = 32
_MOST_HEAD = 8192  # bytes of a request; there is nothing to say
_MOST_ANSWER = 1 << 28
_PATIENCE = 5.0  # seconds for a request to come, and for its answer to be taken
_FRESH = 1.0  # seconds for which an answer is given again
_LEAST_TOKEN = 16


def read_token(path: Path) -> str:
    """The token in a file: its one line."""
    try:
        return _checked_token(path.read_text("utf-8").strip(), str(path))
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is no text"
        raise ConfigError(f"the token file {path} cannot be read: {reason}") from problem


def _checked_token(token: str, where: str) -> str:
    if len(token) < _LEAST_TOKEN or not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            f"the token in {where} must be {_LEAST_TOKEN} or more letters, digits and signs without spaces; make one "
            "with: openssl rand -hex 32"
        )
    return token


# --- one question at a time -------------------------------------------------------------------------


class Unanswered(Exception):
    """Nobody could tell the status; one sentence says why."""


class _Question:
    """The status, asked once; everybody who wants to know it meanwhile waits for the same answer."""

    def __init__(self, ask: Ask, loop: asyncio.AbstractEventLoop) -> None:
        self._asked_at = time.monotonic()
        self._answered_at = -math.inf
        self._heard = False
        self._rendered: dict[str, bytes] = {}
        self._rendering = threading.Lock()
        asking = self._put(ask)
        try:
            self._future = asyncio.run_coroutine_threadsafe(asking, loop)
        except RuntimeError as problem:
            asking.close()
            raise Unanswered("the event loop of the controller has ended") from problem

    async def _put(self, ask: Ask) -> Document:
        self._heard = True
        document = await ask()
        self._answered_at = time.monotonic()
        return document

    @property
    def spent(self) -> bool:
        """Whether it is time to ask anew; never while the answer is awaited."""
        return self._future.done() and time.monotonic() - self._answered_at > _FRESH

    def answer(self, seconds: float) -> Document:
        concurrent.futures.wait([self._future], seconds)
        if not self._future.done():
            who = "writer" if self._heard else "event loop"
            raise Unanswered(f"the {who} of the controller has not answered for {self._age:.0f} s")
        if self._future.cancelled():
            raise Unanswered("the controller is ending")
        problem = self._future.exception()
        if problem is not None:
            raise Unanswered(f"the controller cannot tell its status: {problem}") from problem
        return self._future.result()

    @property
    def _age(self) -> float:
        return time.monotonic() - self._asked_at

    def rendered(self, path: str, document: Document) -> bytes:
        """The body for this path, made once."""
        with self._rendering:  # with a thousand learners it takes as long as some rounds do
            if path not in self._rendered:
                self._rendered[path] = _metrics(document) if path == "/metrics" else _json(document)
            return self._rendered[path]


def _json(document: Document) -> bytes:
    from metis.runs.trace import plain_number  # numpy is slow to import, and the command line needs it not

    return json_text(document, indent=None, default=plain_number).encode() + b"\n"


# --- HTTP -------------------------------------------------------------------------------------------


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
        self._lock = threading.Lock()
        family, place = _resolve(listen)
        self.loopback = is_loopback(place[0])
        if token is None and not self.loopback:
            raise ConfigError(
                f"the status on {listen} could be read from other machines, so it needs a token; give one, or listen "
                f"on 127.0.0.1:{place[1]}"
            )
        self.token = None if token is None else _checked_token(token, "use").encode()
        try:
            self._server = _Server(self, family, place)
        except OSError as problem:
            cause = listening_problem(problem, "is another controller running? Port 0 takes a free one")
            raise ConfigError(f"the status cannot be served on {listen}: {cause}") from problem
        host, port = self._server.server_address[:2]
        self.address = join_address(str(host), port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="metis-status", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more; twice is once."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def question(self) -> _Question:
        """The open one, one just answered, or else a new one."""
        with self._lock:
            if self._question is None or self._question.spent:
                self._question = _Question(self._ask, self._loop)
            return self._question

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status code, type and body."""
        try:
            question = self.question()
            document = question.answer(self._seconds)
        except Unanswered as problem:
            return 503, _TEXT, f"{problem}\n".encode()
        if path == "/healthz":
            return 200, _TEXT, b"ok\n"
        if path == "/readyz":
            ready = document["state"] not in ("stopping", "finished")
            return 200 if ready else 503, _TEXT, f"{document['state']}\n".encode()
        return 200, _METRICS if path == "/metrics" else _JSON, question.rendered(path, document)


_TEXT, _JSON = "text/plain; charset=utf-8", "application/json"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"


def _resolve(listen: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    host, port = host_and_port(listen, listen=True)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as problem:
        raise ConfigError(f"the status cannot be served on {listen}: {problem.strerror}") from problem
    family, _, _, _, place = found[0]
    return family, cast("tuple[str, int]", place)


class _Server(ThreadingHTTPServer):
    allow_reuse_port = False
    daemon_threads = True  # nobody waits for a reader who does not read
    request_queue_size = 64

    def __init__(self, status: StatusServer, family: socket.AddressFamily, place: tuple[str, int]) -> None:
        self.status, self.address_family = status, family
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__(place, _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer would ask the name service who we are, and wait for it

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection broke; whoever had it knows."""


class _BadRequest(Exception):
    def __init__(self, code: int, reason: str, **headers: str) -> None:
        super().__init__(reason)
        self.code, self.reason, self.headers = code, reason, headers


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def handle(self) -> None:
        """One request, then the connection ends."""
        self.command = ""
        try:
            head = self._read_head()
            if not head:
                return  # somebody knocked and went away
            self.rfile.close()
            self.rfile = io.BytesIO(head)
            self.raw_requestline = self.rfile.readline()
            if not self.parse_request():
                raise _BadRequest(400, "the first line of a request must not be empty")
            self._send(*self.server.status.answer(self._check()))
        except _BadRequest as bad:
            self._refuse(bad.code, bad.reason, **bad.headers)
        except OSError:
            pass
        except Exception as problem:
            self._refuse(500, f"unexpected {type(problem).__name__}: {problem}")

    def _read_head(self) -> bytes:
        """All up to the empty line, within one time-out for the whole."""
        end, head = time.monotonic() + _PATIENCE, b""
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            try:
                self.connection.settimeout(max(0.01, end - time.monotonic()))
                data = self.connection.recv(4096)
            except TimeoutError:
                raise _BadRequest(408, f"the request was not complete after {_PATIENCE:g} s") from None
            if not data:
                if head:
                    raise _BadRequest(400, "the request ended before its head did")
                break
            head += data
            if len(head) > _MOST_HEAD:
                raise _BadRequest(431, f"a request may have {_MOST_HEAD} bytes")
        self.connection.settimeout(_PATIENCE)
        return head

    def _check(self) -> str:
        """The path that is asked for, if all about the request is in order."""
        status = self.server.status
        if self.request_version == "HTTP/0.9":
            raise _BadRequest(400, "HTTP/1.0 or later is spoken here")
        hosts = self.headers.get_all("Host", [])
        if len(hosts) > 1 or (not hosts and self.request_version != "HTTP/1.0"):
            raise _BadRequest(400, "a request must have one Host header")
        # A page in a browser on this machine can have its own name lead here, and would read what is not its own.
        if hosts and status.loopback and status.token is None and not header_is_loopback(hosts[0]):
            raise _BadRequest(403, "the Host header must name this machine: localhost, 127.0.0.1 or [::1]")
        if status.token is not None:
            given = self.headers.get("Authorization", "").encode("latin-1", "replace")
            if not hmac.compare_digest(given, b"Bearer " + status.token):
                header = {"WWW-Authenticate": 'Bearer realm="metis"'}
                raise _BadRequest(401, "a token is needed: Authorization: Bearer TOKEN", **header)
        path = self.path.partition("?")[0]
        if path not in PATHS:
            raise _BadRequest(404, f"there is nothing here; see {', '.join(PATHS)}")
        if self.command not in ("GET", "HEAD"):
            raise _BadRequest(405, "only GET and HEAD: the status can be read, and nothing else", Allow="GET, HEAD")
        return path

    def _send(self, code: int, kind: str, body: bytes, **headers: str) -> None:
        self.request_version = "HTTP/1.0"  # of a broken request it may be none, and then there would be no headers
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, code: int, reason: str, **headers: str) -> None:
        with contextlib.suppress(OSError):
            self._send(code, _TEXT, f"{reason}\n".encode(), **headers)
            # Closing while bytes are unread resets the connection, and the answer would be lost with it.
            self.connection.shutdown(socket.SHUT_WR)
            end = time.monotonic() + 1.0
            while (left := end - time.monotonic()) > 0:
                self.connection.settimeout(left)
                if not self.connection.recv(1 << 16):
                    break

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library finds wrong while parsing."""
        raise _BadRequest(code, message or explain or "bad request")

    def version_string(self) -> str:
        return "metis"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Who asks is not news."""


# --- Prometheus -------------------------------------------------------------------------------------


def _metrics(document: Document) -> bytes:
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(document))
    ProcessCollector(registry=registry)  # memory, descriptors and processor time of the controller
    return generate_latest(registry)


class _Collector:
    """The document as metrics. What is a counter never falls, also over a restart: it is folded from the journal."""

    def __init__(self, document: Document) -> None:
        self._document = document

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily

        document, costs = self._document, self._document["costs"]
        about = {name: str(document[name]) for name in ("run", "policy", "metric")}
        yield InfoMetricFamily("metis_run", "The run that this controller serves", about)
        state = GaugeMetricFamily("metis_state", "1 for the state that the federation is in", labels=["state"])
        for name in STATES:
            state.add_metric([name], document["state"] == name)
        yield state
        left = None if document["deadline"] is None else document["deadline"] - document["seconds"]
        for name, text, value in (
            ("community_version", "Version of the community model", document["version"]),
            ("steps", "Local steps committed to the community model", document["steps"]),
            ("run_seconds", "Seconds of the run; they stand still while the controller is down", document["seconds"]),
            ("deadline_seconds", "Seconds until the next deadline of the protocol", left),
            ("learners_expected", "Learners to begin with", document["expected"]),
            ("target", "Value of the metric to reach", document["target"]),
            ("disk_bytes", "Bytes in the state folder", document["disk_bytes"]),
            ("starts", "How often this run's controller was started", document["start"]),
        ):
            yield _gauge(f"metis_{name}", text, value)
        yield from self._evaluations()
        for name, text, value in (
            ("updates", "Local models handed in", costs["update_requests"]),
            ("updates_refused", "Updates that were refused", costs["refused_updates"]),
            ("models_exchanged", "Models sent to learners and handed in", costs["models_exchanged"]),
            ("bytes_exchanged", "Bytes of these models", costs["bytes_exchanged"]),
        ):
            yield _counter(f"metis_{name}", text, value)
        energy = GaugeMetricFamily(
            "metis_energy", "Epsilon seconds, or joules where powers are in watts, by three forms", labels=["form"]
        )
        for form, value in costs["energy"].items():
            energy.add_metric([form], value)
        yield energy
        calls = _counter("metis_refused_calls", "Calls refused since this start, by gRPC status", labels=["code"])
        for code, count in document["refused_calls"].items():
            calls.add_metric([code], count)
        yield calls
        yield from self._learners()

    def _evaluations(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        latest = dict(self._document["latest"] or {})
        yield _gauge(
            "metis_evaluated_version", "Version of the community model that was measured", latest.get("version")
        )
        best = self._document["best_version"]
        yield _gauge("metis_best_version", "Version of the best community model so far", best)
        metric = GaugeMetricFamily("metis_metric", "The latest evaluation of the community model", labels=["metric"])
        for name, value in latest.items():
            if name not in ("version", "at") and value is not None:
                metric.add_metric([name], value)
        yield metric

    def _learners(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        learners, steps = self._document["learners"], self._document["costs"]["steps_by_learner"]
        counted = [learner["state"] for learner in learners]
        states = GaugeMetricFamily("metis_learners", "Learners in each state", labels=["state"])
        state = GaugeMetricFamily(
            "metis_learner_state", "1 for the state that a learner is in", labels=["learner", "state"]
        )
        for name in LEARNER_STATES:
            states.add_metric([name], counted.count(name))
            for learner in learners:
                state.add_metric([learner["name"], name], learner["state"] == name)
        yield from (states, state)
        for key, name, text in (
            ("connected", "connected", "Whether its stream is open"),
            ("examples", "examples", "Training examples that it holds"),
            ("time_per_batch", "seconds_per_batch", "Measured by itself, warm-up excluded"),
            ("silent_seconds", "silent_seconds", "Since something was heard of it"),
            ("steps_of_task", "task_steps", "Steps of the task in hand, by its latest heartbeat"),
            ("compression_error", "compression_error", "Share of its latest update that waits for the next one"),
            # Not counters: work in hand counts as active until it is known how much of it was transfer.
            ("active", "active_seconds", "Spent training"),
            ("idle", "idle_seconds", "Spent waiting for a task"),
            ("transfer", "transfer_seconds", "Spent sending and receiving models"),
        ):
            gauge = GaugeMetricFamily(f"metis_learner_{name}", text, labels=["learner"])
            for learner in learners:
                if learner.get(key) is not None:
                    gauge.add_metric([learner["name"]], learner[key])
            yield gauge
        done = GaugeMetricFamily("metis_learner_steps", "Local steps that it has handed in", labels=["learner"])
        for name, count in steps.items():
            done.add_metric([name], count)
        yield done
        for key, name, text in (
            ("updates", "updates", "Local models that it handed in"),
            ("refused", "updates_refused", "Updates of it that were refused"),
        ):
            counter = _counter(f"metis_learner_{name}", text, labels=["learner"])
            for learner in learners:
                counter.add_metric([learner["name"]], learner[key])
            yield counter


def _gauge(name: str, text: str, value: float | None) -> Metric:
    """Without a sample where there is no value."""
    from prometheus_client.metrics_core import GaugeMetricFamily

    gauge = GaugeMetricFamily(name, text)
    if value is not None:
        gauge.add_metric([], value)
    return gauge


def _counter(name: str, text: str, value: float | None = None, labels: list[str] | None = None) -> Any:
    from prometheus_client.metrics_core import CounterMetricFamily

    counter = CounterMetricFamily(name, text, labels=labels)
    if value is not None:
        counter.add_metric([], value)
    return counter


# --- where a controller is found --------------------------------------------------------------------


@dataclass(frozen=True)
class Announcement:
    """What `controller.json` says."""

    pid: int
    host: str
    born: str | None  # when the kernel says that the process began; ids are used again
    listen: str
    http: str | None
    run: str
    started: str

    @property
    def gone(self) -> bool:
        """Whether that process surely runs no more; of another machine nobody knows."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            pass
        return self.born is not None and _born(self.pid) != self.born


_TEXT_OR_NONE = (str, type(None))
_KINDS: dict[str, Any] = {
    "pid": int, "host": str, "born": _TEXT_OR_NONE, "listen": str, "http": _TEXT_OR_NONE, "run": str, "started": str,
}  # fmt: skip


def announce(folder: Path, *, listen: str, http: str | None, run: str) -> None:
    """Write down in the state folder where this controller is found."""
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    content = Announcement(os.getpid(), socket.gethostname(), _born(os.getpid()), listen, http, run, started)
    write_text(folder / ANNOUNCEMENT, json.dumps(asdict(content), indent=2) + "\n")


def withdraw(folder: Path) -> None:
    """Take back what this process announced; a stranger's stays, as the trace of one that was killed."""
    found = find(folder)
    if found is not None and (found.pid, found.host) == (os.getpid(), socket.gethostname()):
        (folder / ANNOUNCEMENT).unlink(missing_ok=True)


def find(folder: Path) -> Announcement | None:
    """What was announced here last and not taken back; None also if it cannot be understood."""
    try:
        said = json.loads((folder / ANNOUNCEMENT).read_text("utf-8"))
        if all(isinstance(said[name], kind) for name, kind in _KINDS.items()):
            return Announcement(**{name: said[name] for name in _KINDS})
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        pass
    return None


def in_use(folder: Path) -> bool:
    """Whether a process holds the lock of this state folder, found out without touching it; False if unknown."""
    try:
        held = (folder / "LOCK").stat()
        mark = f"{os.major(held.st_dev):02x}:{os.minor(held.st_dev):02x}:{held.st_ino}"
        return any("FLOCK" in line and mark in line.split() for line in Path("/proc/locks").read_text().splitlines())
    except OSError:
        return False


def _born(pid: int) -> str | None:
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return None if state in "ZX" else rest[18]  # a zombie runs no more
    except (OSError, ValueError, IndexError):
        return None


def fetch(address: str, token: str | None = None, seconds: float = 8.0) -> Document:
    """The document of the controller whose status is served there; `Unanswered` says why there is none."""
    host, port = host_and_port(address)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # wherever it listens, it listens here
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        connection.request("GET", "/status", headers={} if token is None else {"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        body = response.read(_MOST_ANSWER)
        said = body[:300].decode("utf-8", "replace").strip()
        if response.status in (401, 403):
            raise ConfigError(f"{address} refuses to tell its status: {said}")
        if response.status == 503:
            raise Unanswered(said)
        document = json.loads(body)
        if response.status != 200 or not isinstance(document, dict) or "learners" not in document:
            raise ValueError
        return document
    except ConnectionRefusedError:
        raise Unanswered(f"nothing listens on {address}") from None
    except OSError as problem:
        raise Unanswered(f"{address}: {problem.strerror or problem}") from problem
    except (ValueError, http.client.HTTPException):
        raise ConfigError(f"{address} is not the status address of a controller") from None
    finally:
        connection.close()


# --- a controller that does not run -----------------------------------------------------------------


def recall(folder: Path) -> Document:
    """What the journal tells while no controller runs, under the names of the status document; nothing is touched.

    SQLite would make files beside a journal that it only reads, and would keep a controller from starting; so it
    reads a copy.
    """
    from metis.deployment.controller.state import State, StateError

    with tempfile.TemporaryDirectory(prefix="metis-status-") as place:
        copy = Path(place)
        for name in ("controller.db", "controller.db-wal", "ACKNOWLEDGED"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(folder / name, copy / name)
        try:
            with State.open(copy, "process") as state:
                told = _recalled(state.facts() or {}, (entry.record for entry in state.entries()))
                run, start = state.run, state.epoch - 1
        except StateError as problem:
            raise ConfigError(str(problem).replace(place, str(folder))) from problem
    reason = _finish_reason(folder / "run" / "summary.json")
    state_now = "not running" if reason is None else "finished"
    return {"run": run, "state": state_now, "finish_reason": reason, "start": start, **told}


def _recalled(facts: Document, records: Iterator[Document]) -> Document:
    experiment = facts.get("experiment", {})
    policy = (experiment.get("policy") or [{}])[0]
    metric, best = facts.get("metric"), None
    document: Document = {
        "policy": policy.get("label") or policy.get("name"),
        "version": 0,
        "update_requests": 0,
        "seconds": 0.0,
        "metric": metric,
        "target": experiment.get("evaluation", {}).get("target"),
        "latest": None,
        "best": None,
    }
    present: dict[str, bool] = {}
    for record in records:
        document["seconds"] = max(document["seconds"], record["at"])
        if "published" in record:
            document["version"] = record["published"]
        match record.get("event"):
            case "update_request":
                document["update_requests"] += 1
            case "learner_joined":
                present[record["learner"]] = True
            case "learner_left" | "learner_withdrawn":
                present[record["learner"]] = False
            case "evaluated":
                point = {"version": record["version"], "at": record["at"], **record["metrics"]}
                document["latest"], value = point, record["metrics"].get(metric)
                sign = 1 if facts.get("higher_is_better", True) else -1
                if value is not None and math.isfinite(value) and (best is None or sign * value > sign * best):
                    best, document["best"] = value, point
    document["learners"] = [{"name": name, "present": here} for name, here in present.items()]
    return document


def _finish_reason(summary: Path) -> str | None:
    try:
        return str(json.loads(summary.read_text("utf-8"))["finish_reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
