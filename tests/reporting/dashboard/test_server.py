"""The web server of the dashboard over real HTTP: who may look, and a stream that adds up to the whole."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from metis.core.events import UpdateRefused
from metis.deployment.controller.announcement import announce
from metis.errors import ConfigError
from metis.net import is_served_locally
from metis.reporting.dashboard import server as server_module
from metis.reporting.dashboard.follow import setting_of
from metis.reporting.dashboard.listening import DashboardProcess, address_of, bind
from metis.reporting.dashboard.server import STATIC, DashboardServer, Hub
from metis.reporting.dashboard.view import COLUMNS, RunView
from reporting.dashboard.pages import (
    PageOfRun,
    append,
    finished,
    joined,
    lines,
    rounds,
    sent,
    update,
    write_run,
    written_setting,
)

TOKEN = "a-token-of-letters-0123456789"
HANG = 600.0  # seconds; only so that a broken test ends


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "TICK", 0.02)
    monkeypatch.setattr(server_module, "_SEARCH", 0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "sync", [*joined(), *rounds(2)])
    return tmp_path


@pytest.fixture
def served(folder: Path) -> Iterator[DashboardServer]:
    with DashboardServer(folder, bind("127.0.0.1:0")) as server:
        yield server


def connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=HANG)


def ask(url: str, path: str = "/", method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = connect(url)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


class Listener:
    """A page without a screen that is connected to the stream."""

    def __init__(self, url: str, **headers: str) -> None:
        self._connection = connect(url)
        self._connection.request("GET", "/events", headers=headers)
        self.answer = self._connection.getresponse()
        self.runs: dict[str, PageOfRun] = {}
        self.hello: dict[str, Any] = {}
        self.kinds: list[str] = []
        self.last_id = ""

    def next(self) -> str:
        """Take one message in; its kind, or nothing at the end of the stream."""
        kind = ""
        while True:
            line = self.answer.readline()
            if not line:
                return ""
            text = line.decode().rstrip("\n")
            if text.startswith("event: "):
                kind = text.removeprefix("event: ")
            elif text.startswith("id: "):
                self.last_id = text.removeprefix("id: ")
            elif text.startswith("data: "):
                self._take(kind, json.loads(text.removeprefix("data: ")))
            elif not text and kind:
                self.kinds.append(kind)
                return kind

    def _take(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "hello":
            self.hello, self.runs = data, {}
        for news in data.get("runs", []) if kind == "news" else []:
            self.runs.setdefault(news["id"], PageOfRun()).add(news)

    def until(self, run: str, **totals: Any) -> PageOfRun:
        """Listen until the totals of a run are these."""
        end = time.monotonic() + HANG
        while time.monotonic() < end:
            page = self.runs.get(run)
            if page is not None and page.rest.get("totals", {}).items() >= totals.items() and page.spans:
                return page
            assert self.next(), f"the stream has ended before {run} had {totals}"
        raise AssertionError(f"{run} never had {totals}")

    def rest(self) -> None:
        while self.next():
            pass

    def close(self) -> None:
        self._connection.close()


def from_scratch(folder: Path) -> PageOfRun:
    view = RunView(setting_of(folder))
    view.feed((folder / "events.jsonl").read_bytes().splitlines())
    view.increment()
    page = PageOfRun()
    for part in view.snapshot():
        page.add(json.loads(json.dumps(part)))
    return page


# --- the stream -------------------------------------------------------------------------------------


def test_a_page_gets_a_snapshot_and_then_only_what_is_new(served: DashboardServer, folder: Path) -> None:
    """While the file grows; what has come adds up to a fold from scratch."""
    page = Listener(served.url)
    assert page.next() == "hello"
    assert page.hello["columns"] == list(COLUMNS)
    assert page.hello["title"] == folder.name
    page.until("sync", version=2)
    first = len(page.kinds)

    path = folder / "sync" / "events.jsonl"
    for number in range(2, 6):
        append(path, rounds(1, start=3.0 * number, first=number))
        page.until("sync", version=number + 1)
    append(path, [finished(18.0)])
    page.until("sync", finished="all rounds are done")

    assert page.runs["sync"] == from_scratch(folder / "sync")
    assert len(page.kinds) > first + 3 and page.kinds.count("hello") == 1
    page.close()


def test_one_that_comes_later_sees_the_same(served: DashboardServer, folder: Path) -> None:
    """Two pages, one opened in the middle of the run."""
    early = Listener(served.url)
    early.until("sync", version=2)
    append(folder / "sync" / "events.jsonl", rounds(2, start=6.0, first=2))
    late = Listener(served.url)
    late.until("sync", version=4)
    early.until("sync", version=4)
    append(folder / "sync" / "events.jsonl", [finished(12.0)])

    assert early.until("sync", finished="all rounds are done") == late.until("sync", finished="all rounds are done")
    early.close()
    late.close()


def test_a_line_is_shown_when_it_is_whole(served: DashboardServer, folder: Path) -> None:
    """A last line that is cut off in writing harms nobody."""
    page = Listener(served.url)
    page.until("sync", version=2)
    text = lines(rounds(1, start=6.0, first=2))
    path = folder / "sync" / "events.jsonl"
    with path.open("a", encoding="utf-8", buffering=1) as file:
        file.write(text[:-30])
        file.flush()
        page.until("sync", version=3)
        file.write(text[-30:])
    page.until("sync", events=len(path.read_text().splitlines()))

    assert page.runs["sync"] == from_scratch(folder / "sync")
    page.close()


def test_two_runs_and_one_that_begins_later(served: DashboardServer, folder: Path) -> None:
    """As of a comparison: every run has its own curve and its own learners."""
    page = Listener(served.url)
    page.until("sync", version=2)
    others = ("north", "south")
    path = write_run(folder / "semisync", joined(others), written_setting(others, label="SemiSync"))
    append(path, rounds(1, others))
    page.until("semisync", version=1)
    append(folder / "sync" / "events.jsonl", rounds(1, start=6.0, first=2))
    page.until("sync", version=3)

    assert page.runs["semisync"].names == list(others)
    assert page.runs["semisync"].rest["head"]["label"] == "SemiSync"
    for name in ("sync", "semisync"):
        assert page.runs[name] == from_scratch(folder / name)
    page.close()


def test_a_run_that_is_begun_anew_is_shown_anew(served: DashboardServer, folder: Path) -> None:
    """With --force, or after an interruption from its checkpoint: nothing of the old one is left."""
    page = Listener(served.url)
    page.until("sync", version=2)
    write_run(folder / "sync", [*joined(("lone",)), *rounds(1, ("lone",))], written_setting(("lone",)))
    page.until("sync", version=1, learners=1)

    assert page.runs["sync"] == from_scratch(folder / "sync")
    page.close()


def test_a_damaged_file_is_told_in_words(served: DashboardServer, folder: Path) -> None:
    page = Listener(served.url)
    page.until("sync", version=2)
    with (folder / "sync" / "events.jsonl").open("a") as file:
        file.write("garbage\n")
    while not page.runs["sync"].notices:
        page.next()

    assert "is not valid" in page.runs["sync"].notices[0]
    page.close()


def test_after_a_lost_connection_only_what_was_missed_is_sent(served: DashboardServer, folder: Path) -> None:
    """The page says what it had last, as browsers do; a stranger's number gets it a snapshot."""
    page = Listener(served.url)
    page.until("sync", version=2)
    page.close()
    append(folder / "sync" / "events.jsonl", rounds(1, start=6.0, first=2))

    again = Listener(served.url, **{"Last-Event-ID": page.last_id})
    again.runs = page.runs
    again.until("sync", version=3)
    assert "hello" not in again.kinds
    assert again.runs["sync"] == from_scratch(folder / "sync")
    again.close()
    for number in ("", "x", "nonsense.1", f"{page.last_id}99"):
        stranger = Listener(served.url, **{"Last-Event-ID": number})
        assert stranger.next() == "hello"
        stranger.close()


def test_whoever_cannot_follow_must_begin_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that does not read takes no more than so much memory of the server: its stream ends."""
    monkeypatch.setattr(server_module, "_MAX_WAITING", 12)

    async def play() -> tuple[int, list[bytes]]:
        hub = Hub(folder)
        hub.read()
        idle, reading = hub.listen(""), hub.listen("")
        for page in (idle, reading):
            await anext(page)
        for number in range(2, 40):
            append(folder / "sync" / "events.jsonl", rounds(1, start=3.0 * number, first=number))
            hub.read()
            hub.tell()
            await anext(reading)
        left = len(hub._listeners)
        rest = [data async for data in idle]
        await reading.aclose()  # type: ignore[attr-defined]
        return left, rest

    left, rest = asyncio.run(play())
    assert left == 1
    assert rest == []


def test_the_number_of_pages_is_limited(served: DashboardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MAX_CLIENTS", 2)
    pages = [Listener(served.url) for _ in range(2)]
    for page in pages:
        page.next()

    answer, body = ask(served.url, "/events")
    assert answer.status == 503 and b"already connected" in body
    for page in pages:
        page.close()


def test_at_the_end_pages_get_the_final_state(folder: Path) -> None:
    """What was written last is sent before the stream ends."""
    with DashboardServer(folder, bind("127.0.0.1:0")) as server:
        page = Listener(server.url)
        page.until("sync", version=2)
        append(folder / "sync" / "events.jsonl", [*rounds(1, start=6.0, first=2), finished(9.0)])
    page.rest()

    assert page.kinds[-1] == "end"
    assert page.runs["sync"] == from_scratch(folder / "sync")
    page.close()


def test_an_empty_folder_waits_for_its_first_run(tmp_path: Path) -> None:
    with DashboardServer(tmp_path, bind("127.0.0.1:0")) as server:
        page = Listener(server.url)
        assert page.next() == "hello" and page.hello["runs"] == []
        write_run(tmp_path / "first", [*joined(), *rounds(1)])
        page.until("first", version=1)
        page.close()


def test_the_clock_of_a_real_federation_goes_on(tmp_path: Path) -> None:
    """Between two events a learner can become late; in a simulation nothing happens between them."""
    (tmp_path / "controller.db").touch()
    announce(tmp_path, listen="127.0.0.1:1", http=None, run="r")
    write_run(tmp_path / "run", [*joined(), sent(0.0, "slow", 0, seconds=0.1)])
    with DashboardServer(tmp_path, bind("127.0.0.1:0")) as server:
        page = Listener(server.url)
        while not page.runs.get(tmp_path.name, PageOfRun()).rest.get("problems"):
            page.next()
        assert page.runs[tmp_path.name].notices == [
            "'slow' is late: it has not handed in the task that it was given at 0.0 s."
        ]
        page.close()


def test_a_refused_update_reaches_the_page(served: DashboardServer, folder: Path) -> None:
    page = Listener(served.url)
    page.until("sync", version=2)
    refused = UpdateRefused("slow", 6, "invalid", "its local model holds NaN")
    append(folder / "sync" / "events.jsonl", [sent(6.0, "slow", 6), update(7.0, "slow", 6, 1.0), (7.0, refused)])
    page.until("sync", refused=1)

    assert page.runs["sync"].notices == ["An update from 'slow' was refused at 7.0 s: its local model holds NaN."]
    page.close()


# --- HTTP -------------------------------------------------------------------------------------------


def test_the_page_and_its_assets_come_from_here(served: DashboardServer) -> None:
    """All that the page names is served, and nothing is fetched from elsewhere."""
    answer, body = ask(served.url)
    assert answer.status == 200
    text = body.decode()
    named = re.findall(r'(?:src|href)="([^"#]+)"', text)
    assert {name for name in named if not name.startswith("data:")} == {
        f"assets/{name}" for name in ("dashboard.css", "dashboard.js", "uPlot.min.css", "uPlot.min.js")
    }
    for name in named:
        if name.startswith("assets/"):
            answer, body = ask(served.url, f"/{name}")
            assert answer.status == 200 and body == (STATIC / name.removeprefix("assets/")).read_bytes()
            assert answer.headers["Content-Type"].split(";")[0] in ("text/css", "text/javascript")
    for own in ("dashboard.css", "dashboard.js", "index.html"):
        assert "http" not in (STATIC / own).read_text("utf-8").replace("https://", "http")


def test_every_answer_is_closed_to_other_sites(served: DashboardServer) -> None:
    for path in ("/", "/assets/dashboard.js", "/nothing"):
        answer, _ = ask(served.url, path)
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'")
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path", ["/nothing", "/assets/", "/assets/nothing.js", "/assets/..%2fserver.py", "/assets/../server.py"]
)
def test_there_is_nothing_else(served: DashboardServer, path: str) -> None:
    assert ask(served.url, path)[0].status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(served: DashboardServer, method: str) -> None:
    for path in ("/", "/events"):
        answer, body = ask(served.url, path, method)
        assert answer.status == 405 and answer.headers["Allow"] == "GET, HEAD"
        assert body == b"the dashboard can be read, and nothing else\n"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_another_name_that_leads_here_is_refused(served: DashboardServer, host: str) -> None:
    """A page elsewhere whose name leads to this machine must not read what is here."""
    for path in ("/", "/events"):
        assert ask(served.url, path, Host=host)[0].status == 403


# --- the token --------------------------------------------------------------------------------------


@pytest.fixture
def locked(folder: Path) -> Iterator[DashboardServer]:
    with DashboardServer(folder, bind("127.0.0.1:0"), TOKEN) as server:
        yield server


@pytest.mark.parametrize("path", ["/", "/events", "/assets/dashboard.js", "/nothing"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Cookie": "metis-1=wrong"},
    ],
    ids=["none", "wrong", "another kind", "too long", "cookie"],
)
def test_without_the_token_there_is_nothing(locked: DashboardServer, path: str, headers: dict[str, str]) -> None:
    """Neither the page nor the stream, nor what exists."""
    answer, body = ask(locked.url, path, **headers)
    assert answer.status == 401
    assert TOKEN.encode() not in body
    for wrong in ("?token=", "?token=wrong", f"?token={TOKEN}x", "?token=%00%ff"):
        assert ask(locked.url, path + wrong, **headers)[0].status == 401


def test_the_printed_address_opens_it_and_hides_the_token(locked: DashboardServer) -> None:
    """The token moves into a cookie that scripts cannot read, and out of the address."""
    assert locked.url.endswith(f"/?token={TOKEN}")
    answer, _ = ask(locked.url, f"/?token={TOKEN}")
    assert answer.status == 303 and TOKEN not in answer.headers["Location"]
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "samesite=lax" in cookie.lower()

    held = cookie.partition(";")[0]
    assert ask(locked.url, "/", Cookie=held)[0].status == 200
    page = Listener(locked.url, Cookie=held)
    assert page.until("sync", version=2)
    page.close()


def test_programs_may_send_it_as_a_bearer_token(locked: DashboardServer) -> None:
    page = Listener(locked.url, Authorization=f"Bearer {TOKEN}")
    assert page.until("sync", version=2)
    page.close()


def test_other_machines_cannot_look_without_a_token(folder: Path) -> None:
    bound = bind("0.0.0.0:0")
    assert not is_served_locally(bound)
    with pytest.raises(ConfigError, match="needs a token"):
        DashboardServer(folder, bound)
    assert socket.gethostname() in address_of(bound, TOKEN)
    with DashboardServer(folder, bound, TOKEN):
        port = bound.getsockname()[1]
        url = f"http://127.0.0.1:{port}/"
        assert ask(url)[0].status == 401
        # With a token, whatever name leads here is right.
        answer, _ = ask(url, Host="metis.example", Authorization=f"Bearer {TOKEN}")
        assert answer.status == 200


# --- addresses --------------------------------------------------------------------------------------


def test_a_port_in_use_is_told_unless_it_was_not_asked_for() -> None:
    with bind("127.0.0.1:0") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"the port is in use; port 0 takes a free one"):
            bind(f"127.0.0.1:{port}")
    with bind(None) as usual, bind(None) as another:
        assert is_served_locally(usual) and is_served_locally(another)
        assert usual.getsockname() != another.getsockname()


@pytest.mark.parametrize("address", ["8484", "localhost", "127.0.0.1:x", "127.0.0.1:70000", "192.0.2.1:8484"])
def test_an_address_that_cannot_be(address: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(address)):
        bind(address)


def test_addresses_of_ipv6_have_brackets() -> None:
    try:
        bound = bind("[::1]:0")
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with bound:
        assert address_of(bound, None) == f"http://[::1]:{bound.getsockname()[1]}/"


# --- during a run -----------------------------------------------------------------------------------


def test_in_a_process_of_its_own(folder: Path) -> None:
    """It can be reached as soon as its address is known, and ends with the final state."""
    dashboard = DashboardProcess(folder, bind("127.0.0.1:0"))
    page = Listener(dashboard.url)
    page.until("sync", version=2)
    append(folder / "sync" / "events.jsonl", [finished(6.0)])
    assert dashboard.close() is None
    page.rest()

    assert page.kinds[-1] == "end"
    assert page.runs["sync"].rest["totals"]["finished"] == "all rounds are done"
    page.close()


def test_it_ends_before_it_has_begun(tmp_path: Path) -> None:
    """A run may fail at once."""
    assert DashboardProcess(tmp_path, bind("127.0.0.1:0")).close() is None


def test_it_does_not_outlive_a_run_that_is_killed(folder: Path) -> None:
    """Nobody is left to end it; it notices."""
    program = (
        "import sys, time; from pathlib import Path\n"
        "from metis.reporting.dashboard.listening import DashboardProcess, bind\n"
        "dashboard = DashboardProcess(Path(sys.argv[1]), bind('127.0.0.1:0'))\n"
        "print(dashboard.url, dashboard._process.pid, flush=True); time.sleep(600)"
    )
    run = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    url, pid = run.stdout.readline().split()
    page = Listener(url)
    page.until("sync", version=2)
    run.kill()
    run.wait()
    run.stdout.close()
    page.rest()
    page.close()

    end = time.monotonic() + HANG
    while _runs(int(pid)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _runs(int(pid))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_what_is_wrong_with_it_can_be_told(folder: Path) -> None:
    dashboard = DashboardProcess(folder, bind("127.0.0.1:0"))
    page = Listener(dashboard.url)
    page.next()
    os.kill(dashboard._process.pid, signal.SIGKILL)
    page.close()

    assert dashboard.close() == "it was killed"
