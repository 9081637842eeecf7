"""The status of a real controller over real HTTP, and what anybody may do to it without hurting the federation."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from prometheus_client.parser import text_string_to_metric_families

from deployment.federations import Served, served
from deployment.scripted_learner import HonestLearner, move_towards
from metis.core import policies
from metis.core.stop import StopRule
from metis.deployment.controller import metrics, status_server
from metis.deployment.controller.announcement import ANNOUNCEMENT, announce, find, in_use, withdraw
from metis.deployment.controller.document import core_status
from metis.deployment.controller.state import State
from metis.deployment.controller.status import Unanswered, fetch, read_token, recall
from metis.deployment.controller.status_server import StatusServer
from metis.errors import ConfigError

TOKEN = "0123456789abcdef0123456789abcdef"
CONTROLLER = Path(__file__).parent / "watched_controller.py"


@dataclass
class Reply:
    code: int
    headers: http.client.HTTPMessage
    text: str


def ask(address: str, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Reply:
    """One request, as a well-behaved client makes it."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=600)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return Reply(response.status, response.headers, response.read().decode())
    finally:
        connection.close()


def send(address: str, data: bytes) -> bytes:
    """All that comes back for these bytes; the sender sends no more."""
    host, _, port = address.rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=600) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
        except ConnectionError:
            pass
    return answer


@dataclass
class Watched:
    """A federation of which learners train until the block ends, and its status server."""

    served: Served
    status: StatusServer

    async def ask(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Reply:
        return await asyncio.to_thread(ask, self.status.address, path, method, body, **headers)

    async def until_version(self, version: int) -> None:
        while (await self.served.process.status())["version"] < version:
            await asyncio.sleep(0.02)


class EverBetter:
    """Judges models without looking at them."""

    seen = 0

    async def evaluate(self, model: Path) -> dict[str, float]:
        self.seen += 1
        return {"accuracy": 1 - 1 / (1 + self.seen), "loss": float("nan")}


@asynccontextmanager
async def watched(
    folder: Path, *, rounds: int = 10_000, names: tuple[str, ...] = ("l0", "l1", "l2"), **options: Any
) -> AsyncIterator[Watched]:
    async with served(folder, policies.sync_fedavg(1), StopRule(rounds=rounds), evaluator=EverBetter()) as federation:
        learners = [
            HonestLearner(
                name, federation.address, federation.process.layout, train=move_towards(i), seconds_per_batch=0.002
            )
            for i, name in enumerate(names)
        ]
        tasks = [asyncio.create_task(learner.run()) for learner in learners]
        status = StatusServer("127.0.0.1:0", federation.process.status, asyncio.get_running_loop(), **options)
        try:
            yield Watched(federation, status)
        finally:
            status.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def play(folder: Path, scene: Callable[[Watched], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        async with watched(folder / "state", **options) as federation:
            await scene(federation)

    asyncio.run(whole())


@pytest.fixture
def quiet() -> Any:
    """A server of a made-up document, for what is only about HTTP; its event loop runs in another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers: list[StatusServer] = []

    async def document() -> dict[str, Any]:
        return {"state": "running", "learners": [], "nothing": float("inf")}

    def serve(listen: str = "127.0.0.1:0", answer: Any = document, **options: Any) -> StatusServer:
        servers.append(StatusServer(listen, answer, loop, **options))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


# --- what it shows ----------------------------------------------------------------------------------


def test_the_document_is_that_of_the_controller(tmp_path: Path) -> None:
    """`/status` is strict JSON with the names of `ControllerProcess.status`."""

    async def scene(federation: Watched) -> None:
        await federation.until_version(2)
        reply = await federation.ask("/status")
        document = json.loads(reply.text, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
        assert reply.code == 200 and reply.headers["Content-Type"] == "application/json"
        assert document.keys() == (await federation.served.process.status()).keys()
        assert document["state"] == "running" and document["version"] >= 2
        assert {learner["name"] for learner in document["learners"]} == {"l0", "l1", "l2"}
        assert document["latest"]["loss"] is None, "not a number is null"
        assert await asyncio.to_thread(fetch, federation.status.address)

    play(tmp_path, scene)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def test_metrics_say_what_the_document_says(tmp_path: Path) -> None:
    """They parse, every name is ours or the process's, and every learner has its row, whatever it is called."""
    strange = 'a "b" \\n {c}'

    async def scene(federation: Watched) -> None:
        await federation.until_version(3)
        # Both from one answer: an answer is repeated for a moment.
        while True:
            before = json.loads((await federation.ask("/status")).text)
            reply = await federation.ask("/metrics")
            if json.loads((await federation.ask("/status")).text) == before:
                break
        assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        found = samples(reply.text)
        assert all(name.startswith(("metis_", "process_")) for name, _ in found)
        plain = {name: value for (name, labels), value in found.items() if not labels}
        assert plain["metis_community_version"] == before["version"]
        assert plain["metis_updates_total"] == before["costs"]["update_requests"]
        assert plain["metis_bytes_exchanged_total"] == before["costs"]["bytes_exchanged"]
        assert plain["metis_disk_bytes"] == before["disk_bytes"]
        assert found["metis_metric", (("metric", "accuracy"),)] == before["latest"]["accuracy"]
        assert found["metis_state", (("state", "running"),)] == 1
        assert {form for name, labels in found if name == "metis_energy" for _, form in labels} == {
            "equation", "active", "idle_charged",
        }  # fmt: skip
        for learner in before["learners"]:
            label = (("learner", learner["name"]),)
            assert found["metis_learner_updates_total", label] == learner["updates"]
            assert found["metis_learner_idle_seconds", label] == learner["idle"]
            assert found["metis_learner_connected", label] == 1
            assert found["metis_learner_state", (*label, ("state", learner["state"]))] == 1
        assert ("metis_learner_updates_total", (("learner", strange),)) in found
        assert "metis_target" not in plain, "there is none"

    play(tmp_path, scene, names=("l0", "l1", strange))


def test_counters_never_fall(tmp_path: Path) -> None:
    """Also over a restart of the controller: they are folded from its journal."""
    seen: list[dict[Any, float]] = []

    async def scene(federation: Watched) -> None:
        start = (await federation.served.process.status())["version"]
        for more in (2, 4):
            await federation.until_version(start + more)
            time.sleep(status_server._FRESH)
            seen.append(samples((await federation.ask("/metrics")).text))

    play(tmp_path, scene)
    play(tmp_path, scene)
    counters = [key for key in seen[0] if key[0].endswith("_total") and key[0].startswith("metis_")]
    assert len(counters) > 8
    for before, after in itertools.pairwise(seen):
        assert all(before[key] <= after[key] for key in counters)
    assert seen[0]["metis_updates_total", ()] < seen[-1]["metis_updates_total", ()]


@pytest.mark.parametrize("state", metrics.STATES)
def test_ready_while_learners_may_come(quiet: Any, state: str) -> None:
    """Not when it stops or has ended; well it is all the time."""

    async def document() -> dict[str, Any]:
        return {"state": state, "learners": []}

    server = quiet(answer=document)
    reply = ask(server.address, "/readyz")
    assert (reply.code, reply.text) == (503 if state in ("stopping", "finished") else 200, f"{state}\n")
    assert ask(server.address, "/healthz").text == "ok\n"


# --- whether it is well -----------------------------------------------------------------------------


async def until(federation: Watched, code: int) -> Reply:
    while (reply := await federation.ask("/healthz")).code != code:
        await asyncio.sleep(0.05)
    return reply


def test_a_writer_that_stands_still_is_not_well(tmp_path: Path) -> None:
    """And is again when it goes on."""

    async def scene(federation: Watched) -> None:
        await until(federation, 200)
        release = threading.Event()
        federation.served.process._writer._thread.submit(release.wait, 600)
        try:
            reply = await until(federation, 503)
            assert "the writer of the controller has not answered for" in reply.text
            assert (await federation.ask("/status")).code == 503
            assert (await federation.ask("/metrics")).code == 503
        finally:
            release.set()
        await until(federation, 200)

    play(tmp_path, scene, seconds=0.2)


def test_an_event_loop_that_stands_still_is_not_well(tmp_path: Path) -> None:
    """The server's threads answer although the loop does not."""

    async def scene(federation: Watched) -> None:
        await until(federation, 200)
        blocked, release = threading.Event(), threading.Event()

        def from_outside() -> Reply:
            try:
                assert blocked.wait(30)
                time.sleep(status_server._FRESH)
                return ask(federation.status.address, "/healthz")
            finally:
                release.set()

        asking = asyncio.get_running_loop().run_in_executor(None, from_outside)
        await asyncio.sleep(0.05)
        blocked.set()
        release.wait(60)  # the whole event loop waits here
        reply = await asking
        assert reply.code == 503 and "the event loop of the controller has not answered for" in reply.text
        await until(federation, 200)

    play(tmp_path, scene, seconds=0.2)


def test_many_who_ask_are_one_question(quiet: Any) -> None:
    """However many wait, the event loop is asked once; the next question is a new one."""
    asked: list[int] = []
    release = threading.Event()

    async def slowly() -> dict[str, Any]:
        asked.append(1)
        while not release.is_set():
            await asyncio.sleep(0.01)
        return {"state": "running", "learners": []}

    server = quiet(answer=slowly)
    with ThreadPoolExecutor(20) as crowd:
        replies = [crowd.submit(ask, server.address, path) for path in ("/status", "/healthz") * 10]
        while not asked:
            time.sleep(0.01)
        release.set()
        assert {reply.result().code for reply in replies} == {200}
    assert len(asked) == 1
    time.sleep(status_server._FRESH + 0.1)
    assert ask(server.address, "/status").code == 200
    assert len(asked) == 2


def test_a_status_that_cannot_be_made_is_asked_for_again(quiet: Any) -> None:
    """An error is reported in a sentence and not kept."""
    problems = [RuntimeError("cannot schedule new futures after shutdown")]

    async def moody() -> dict[str, Any]:
        if problems:
            raise problems.pop()
        return {"state": "running", "learners": []}

    server = quiet(answer=moody)
    reply = ask(server.address, "/status")
    assert (reply.code, reply.text) == (
        503, "the controller could not give its status: cannot schedule new futures after shutdown\n",
    )  # fmt: skip
    assert ask(server.address, "/status").code == 200


def test_after_the_event_loop_has_ended() -> None:
    """One sentence, and nothing is left unawaited."""
    loop = asyncio.new_event_loop()
    loop.close()

    async def never() -> dict[str, Any]:
        raise AssertionError

    server = StatusServer("127.0.0.1:0", never, loop)
    try:
        reply = ask(server.address, "/healthz")
        assert (reply.code, reply.text) == (503, "the event loop of the controller has ended\n")
        with pytest.raises(Unanswered, match="has ended"):
            fetch(server.address)
    finally:
        server.close()


def test_a_crowd_does_not_hold_up_the_federation(tmp_path: Path) -> None:
    """Sixteen clients that never stop asking, and it comes to its end."""

    async def scene(federation: Watched) -> None:
        enough = threading.Event()
        codes: set[int] = set()

        def pester(path: str) -> None:
            while not enough.is_set():
                codes.add(ask(federation.status.address, path).code)

        with ThreadPoolExecutor(16) as crowd:
            pestering = [crowd.submit(pester, path) for path in ("/status", "/metrics", "/healthz", "/nothing") * 4]
            ended = await federation.served.serving
            enough.set()
            for one in pestering:
                one.result()
        assert ended
        assert codes == {200, 404}

    play(tmp_path, scene, rounds=20)


# --- whatever comes over HTTP -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET /status\r\n\r\n", 400),
        (b"GET /status HTTP/9.9\r\nHost: localhost\r\n\r\n", 505),
        (b"GET /status HTTP/x\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /status HTTP/1.1\r\n\r\n", 400),
        (b"GET /status HTTP/1.1\r\nHost: localhost\r\nHost: 127.0.0.1\r\n\r\n", 400),
        (b"GET /status HTTP/1.1\r\nHost: localhost\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"GET /" + 9000 * b"a" + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        (b"GET /status HTTP/1.1\r\nHost: localhost\r\n" + 200 * b"X: y\r\n" + b"\r\n", 431),
        (b"GET http://localhost/status HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /../status HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /%73tatus HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"POST /status HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello", 405),
        (b"BREW /status HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET /status HTTP/1.0\r\n\r\n", 200),
        (b"GET /status?x=1 HTTP/1.1\nHost: localhost\n\n", 200),
    ],
)  # fmt: skip
def test_a_bad_request_gets_a_clean_error(quiet: Any, data: bytes, code: int) -> None:
    """A status line, headers and one sentence; and the next one is served."""
    server = quiet()
    answer = send(server.address, data)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert answer.startswith(f"HTTP/1.1 {code} ".encode()), answer[:200]
    assert f"content-length: {len(body)}".encode() in head.lower()
    assert body.endswith(b"\n") and b"<" not in body
    assert ask(server.address, "/healthz").code == 200


def test_only_reading(quiet: Any) -> None:
    """A method that writes is refused, also with a body that nobody reads; HEAD is GET without a body."""
    server = quiet()
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        reply = ask(server.address, "/status", method, bytes(100_000))
        assert (reply.code, reply.headers["Allow"]) == (405, "GET, HEAD")
    got, head = ask(server.address, "/status"), ask(server.address, "/status", "HEAD")
    assert head.text == "" and head.headers["Content-Length"] == got.headers["Content-Length"]
    assert json.loads(got.text)["nothing"] is None


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost:9464", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1", 200),
        ("[::1]:9464", 200),
        ("evil.example", 403),
        ("evil.example:9464", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example:80", 403),
        ("", 403),
    ],
)
def test_a_page_in_a_browser_cannot_read_by_renaming_us(quiet: Any, host: str, code: int) -> None:
    """Only names of this machine are answered to, since a stranger's name may be made to lead here."""
    server = quiet()
    reply = ask(server.address, "/status", Host=host)
    assert reply.code == code
    assert "Access-Control-Allow-Origin" not in reply.headers
    assert reply.headers["X-Content-Type-Options"] == "nosniff"


def test_a_token_is_asked_for_everywhere(quiet: Any) -> None:
    """Whatever the path; and a wrong one is as good as none."""
    server = quiet("0.0.0.0:0", token=TOKEN)
    address = server.address.replace("0.0.0.0", "127.0.0.1")
    for path in (*status_server.PATHS, "/nothing"):
        assert ask(address, path).code == 401
    for wrong in ("", TOKEN, f"Bearer {TOKEN}0", f"bearer {TOKEN}", "Bearer ", "Basic eDp5", "Bearer \xe9"):
        reply = ask(address, "/status", Authorization=wrong)
        assert (reply.code, reply.headers["WWW-Authenticate"]) == (401, 'Bearer realm="metis"')
    assert ask(address, "/status", Authorization=f"Bearer {TOKEN}", Host="controller.example.org").code == 200
    assert fetch(server.address, TOKEN)["state"] == "running"
    with pytest.raises(ConfigError, match="a token is needed"):
        fetch(server.address)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300) | st.text(max_size=100).map(lambda text: f"GET {text} HTTP/1.1\r\n\r\n".encode()))
def test_no_bytes_bring_it_down(one_server: StatusServer, data: bytes) -> None:
    """Whatever is sent, the answer is HTTP or silence."""
    answer = send(one_server.address, data)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    assert b"HTTP/1.1 500" not in answer


@pytest.fixture
def one_server(quiet: Any) -> StatusServer:
    server = quiet()
    assert isinstance(server, StatusServer)
    return server


def test_who_says_nothing_is_sent_away(quiet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that never become a request take all slots only for a while."""
    monkeypatch.setattr(status_server, "_REQUEST_SECONDS", 0.3)
    server = quiet()
    host, _, port = server.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(status_server._MAX_CONNECTIONS + 10)]
    try:
        while True:
            try:
                if ask(server.address, "/healthz").code == 200:
                    break
            except (ConnectionError, http.client.HTTPException):
                time.sleep(0.05)
    finally:
        for connection in silent:
            connection.close()


# --- where it listens -------------------------------------------------------------------------------


def test_other_machines_need_a_token(quiet: Any) -> None:
    """Without one it does not even start."""
    with pytest.raises(ConfigError, match=r"on 0\.0\.0\.0:9464 could be read from other machines, so it needs a token"):
        quiet("0.0.0.0:9464")
    for bad in ("short", "has a space in it, somewhere", "ünprintable-and-long-enough"):
        with pytest.raises(ConfigError, match="at least 16 letters"):
            quiet(token=bad)


def test_a_port_that_is_taken(quiet: Any) -> None:
    """The sentence names the address and what to do."""
    taken = quiet().address
    with pytest.raises(ConfigError, match=f"cannot be served on {taken}: the port is in use"):
        quiet(taken)


@pytest.mark.parametrize("address", ["9464", ":9464", "localhost", "localhost:http", "localhost:99999", "::1:9464"])
def test_an_address_that_is_none(quiet: Any, address: str) -> None:
    """Reported before anything is opened."""
    with pytest.raises(ConfigError, match="is not a valid address; write HOST:PORT"):
        quiet(address)


def test_names_and_ipv6(quiet: Any) -> None:
    """A name is resolved once and what it means counts; an IPv6 address stands in brackets."""
    with pytest.raises(ConfigError, match=r"cannot be served on nowhere\.invalid:1"):
        quiet("nowhere.invalid:1")
    assert fetch(quiet("localhost:0").address)
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists() and Path("/proc/net/if_inet6").read_text():
        server = quiet("[::1]:0")
        assert server.address.startswith("[::1]:")
        assert fetch(server.address)


def test_closed_is_closed(quiet: Any) -> None:
    """The port is free at once, and closing again does nothing."""
    server = quiet()
    server.close()
    server.close()
    with pytest.raises(Unanswered, match="nothing listens on"):
        fetch(server.address)
    assert quiet(server.address).address == server.address


def test_something_else_listens_there(quiet: Any) -> None:
    """A page that is not ours is distinguished from a controller."""

    async def other() -> dict[str, Any]:
        return {"state": "running"}

    with pytest.raises(ConfigError, match="is not the status address of a controller"):
        fetch(quiet(answer=other).address)


def test_a_token_file(tmp_path: Path) -> None:
    """One line; what cannot be a token is reported with the file's name."""
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    assert read_token(file) == TOKEN
    file.write_bytes(b"\xff\xfe")
    for path, match in ((file, "it is not a text file"), (tmp_path / "none", "No such file")):
        with pytest.raises(ConfigError, match=match):
            read_token(path)


# --- controller.json --------------------------------------------------------------------------------


def test_announced_and_withdrawn(tmp_path: Path) -> None:
    """A running controller is found; after a clean end nothing is left."""
    announce(tmp_path, listen="127.0.0.1:7443", http="127.0.0.1:9464", run="abc")
    found = find(tmp_path)
    assert found is not None and not found.gone
    assert (found.pid, found.listen, found.http, found.run) == (os.getpid(), "127.0.0.1:7443", "127.0.0.1:9464", "abc")
    withdraw(tmp_path)
    withdraw(tmp_path)
    assert find(tmp_path) is None and not list(tmp_path.iterdir())


def test_one_that_was_killed_is_told_from_one_that_runs(tmp_path: Path) -> None:
    """By its process; also when that id belongs to another process by now, and while nobody has waited for it."""
    program = (
        "import sys, time, pathlib; from metis.deployment.controller.announcement import announce\n"
        f"announce(pathlib.Path({str(tmp_path)!r}), listen='a:1', http=None, run='abc')\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child:
        child.stdout.readline()
        found = find(tmp_path)
        assert found is not None and not found.gone
        withdraw(tmp_path)
        assert find(tmp_path) == found, "it is not ours to withdraw"
        child.send_signal(signal.SIGKILL)
        while not found.gone:  # a zombie, until it is waited for
            time.sleep(0.01)
        child.wait()
        assert found.gone
    content = json.loads((tmp_path / ANNOUNCEMENT).read_text())
    (tmp_path / ANNOUNCEMENT).write_text(json.dumps({**content, "pid": os.getpid()}))
    again = find(tmp_path)
    assert again is not None and again.gone, "another process has its id"
    (tmp_path / ANNOUNCEMENT).write_text(json.dumps({**content, "host": "elsewhere"}))
    far = find(tmp_path)
    assert far is not None and not far.gone, "of another machine nobody knows"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"pid": "x"}', '{"pid": 1, "listen": 2}'])
def test_an_announcement_that_makes_no_sense(tmp_path: Path, text: str) -> None:
    """Is none."""
    (tmp_path / ANNOUNCEMENT).write_text(text)
    assert find(tmp_path) is None


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux shows who holds a lock")
def test_a_folder_in_use_is_seen_without_touching_it(tmp_path: Path) -> None:
    """The lock is not taken, so a controller that starts at this moment is not kept from it."""
    assert not in_use(tmp_path)
    with State.open(tmp_path / "state", "process"):
        assert in_use(tmp_path / "state")
    assert not in_use(tmp_path / "state")


# --- what the journal shows -------------------------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_recalled_from_the_journal(tmp_path: Path) -> None:
    """After a clean end and from the folder of a controller that was killed, the same; no file changes or appears."""
    known: dict[str, Any] = {}

    async def scene(federation: Watched) -> None:
        await federation.until_version(4)
        federation.served.process.drain("enough")
        await federation.served.serving
        process = federation.served.process
        known.update(process._document(core_status(process._writer.controller), 0))
        # As kill -9 leaves it: with all that is in the journal's WAL, which a clean end would empty.
        shutil.copytree(tmp_path / "state", tmp_path / "killed")

    play(tmp_path, scene)
    assert (tmp_path / "killed" / "controller.db-wal").stat().st_size
    for folder in (tmp_path / "state", tmp_path / "killed"):
        before = files(folder)
        recalled = recall(folder)
        assert files(folder) == before
        for name in ("run", "version", "start"):
            assert recalled[name] == known[name], name
        assert recalled["update_requests"] == known["costs"]["update_requests"]
        assert {learner["name"] for learner in recalled["learners"]} == {"l0", "l1", "l2"}
        assert recalled["latest"]["accuracy"] == known["latest"]["accuracy"]
        assert recalled["state"] == "not running" and recalled["finish_reason"] is None


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    """By its own path, not by that of the copy."""
    with State.open(tmp_path / "state", "process") as state:
        state.append(0.0, {"at": 0.0})
    (tmp_path / "state" / "controller.db").write_bytes(b"not a database, but long enough for one" * 30)
    with pytest.raises(ConfigError) as refused:
        recall(tmp_path / "state")
    assert str(tmp_path / "state" / "controller.db") in str(refused.value)
    assert "metis-status-" not in str(refused.value)
