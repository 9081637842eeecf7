"""`metis dashboard`, and `--dashboard` during a run: what they print, and that a page can follow to the end."""

from __future__ import annotations

import http.server
import importlib.util
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from metis.cli.app import app
from reporting.dashboard.pages import finished, joined, rounds, write_run
from reporting.dashboard.test_server import Listener

EXPERIMENT = """
seed = 1
[data]
dataset = "digits"
[[learners]]
name = "fast"
count = 2
batch_size = 20
time_per_batch = 0.03
[[learners]]
name = "slow"
count = 2
batch_size = 20
time_per_batch = 0.3
[network]
name = "mlp"
hidden = [8]
[training]
solver = "vanilla"
learning_rate = 0.05
[[policy]]
name = "sync_fedavg"
local_epochs = 1
[[policy]]
name = "semisync_fedavg"
slowest_learner_epochs = 1
[stop]
rounds = 3
"""
METIS = [sys.executable, "-m", "metis.cli.app"]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.toml").write_text(EXPERIMENT, "utf-8")
    return tmp_path


def metis(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


# --- mistakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no directory nowhere; make a run with: metis simulate FILE --out nowhere"),
        (
            ["federation.example.org"],
            "there is no directory federation.example.org; make a run with: metis simulate FILE --out "
            "federation.example.org; for a dashboard that federation.example.org serves, add its port: "
            "federation.example.org:8484",
        ),
        (["127.0.0.1:1"], "there is no dashboard at http://127.0.0.1:1/: Connection refused; on that machine: metis"),
        (["127.0.0.1:1", "--listen", "127.0.0.1:0"], "--listen is for a directory; http://127.0.0.1:1/ is served"),
        (["two.toml"], "two.toml is a file; give the directory of a run"),
        (
            [".", "--listen", "8484"],
            "'8484' is not a valid address; write HOST:PORT, as in 127.0.0.1:9464 or [::1]:9464",
        ),
        ([".", "--token-file", "none"], "the token file none cannot be read: No such file or directory"),
        ([".", "--token-file", "two.toml"], "the token in two.toml must have at least 16 letters, digits and signs"),
    ],
)
def test_a_mistake_is_one_clear_line(arguments: list[str], message: str) -> None:
    result = metis("dashboard", *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith(f"error: {message}")


@pytest.mark.parametrize("arguments", [["dashboard", "."], ["simulate", "two.toml", "--policy", "sync", "--dashboard"]])
def test_without_the_extra_it_says_how_to_get_it(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is trained."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    result = metis(*arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        "error: the dashboard needs the package uvicorn; in your clone of Metis run: pip install '.[dashboard]'"
    )


# --- the command ------------------------------------------------------------------------------------


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a person starts it; none is left behind."""
    with subprocess.Popen([*METIS, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`metis dashboard` and the address that it prints on stdout."""
    with running("dashboard", *arguments) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()


def test_it_serves_until_ctrl_c(workplace: Path) -> None:
    """Which is its normal end."""
    write_run(workplace / "run", [*joined(), *rounds(2), finished(6.0)])
    with serving("run", "--listen", "127.0.0.1:0") as (process, url):
        page = Listener(url)
        page.until("run", finished="all rounds are done")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=600)
        page.rest()
        page.close()

    assert process.returncode == 0
    assert (stdout, stderr) == ("", "stop it with Ctrl-C\n")
    assert page.kinds[-1] == "end"


def test_the_address_of_a_dashboard_that_is_served_elsewhere(workplace: Path) -> None:
    write_run(workplace / "run", [*joined(), *rounds(2), finished(6.0)])
    (workplace / "token").write_text("a-token-of-the-federation\n", "utf-8")
    (workplace / "other").write_text("a-token-of-somebody-else\n", "utf-8")
    with serving("run", "--listen", "127.0.0.1:0", "--token-file", "token") as (_, url):
        address = url.removeprefix("http://").partition("/")[0]
        for target in (address, f"http://{address}/"):
            assert metis("dashboard", target, "--token-file", "token").stdout.strip() == url
        refused = metis("dashboard", address)
        assert refused.exit_code == 2
        assert "requires a token: give its token with --token-file" in refused.stderr
        assert "the token is not the one that it has" in metis("dashboard", address, "--token-file", "other").stderr


def test_something_else_that_is_served_is_not_taken_for_a_dashboard(workplace: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = metis("dashboard", f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"error: http://127.0.0.1:{server.server_port}/ is not a Metis dashboard"


def test_elsewhere_it_makes_a_token_and_prints_it_once(workplace: Path) -> None:
    """As an address that can be opened."""
    write_run(workplace / "run", [*joined(), *rounds(2)])
    with serving("run", "--listen", "0.0.0.0:0") as (process, url):
        found = re.fullmatch(r"http://[^/]+:(\d+)/\?token=([\w-]{32})", url)
        assert found is not None, url
        port, token = found.groups()
        page = Listener(f"http://127.0.0.1:{port}/", Authorization=f"Bearer {token}")
        page.until("run", version=2)
        page.close()
        stranger = Listener(f"http://127.0.0.1:{port}/")
        assert stranger.answer.status == 401
        stranger.close()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=600)
    assert "not encrypted" in stderr and token not in stderr


def test_a_token_of_ones_own(workplace: Path) -> None:
    """Also on loopback, for a machine that several people use."""
    write_run(workplace / "run", [*joined(), *rounds(2)])
    (workplace / "token").write_text("0123456789abcdef\n")
    with serving("run", "--listen", "127.0.0.1:0", "--token-file", "token") as (_, url):
        assert url.endswith("/?token=0123456789abcdef")
        stranger = Listener(url)
        assert stranger.answer.status == 401
        stranger.close()


# --- during a run -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["simulate", "two.toml", "--policy", "sync", "--out", "out", "--json"], ["out"]),
        (["compare", "two.toml", "--out", "out", "--json"], ["sync", "semisync-lambda-1"]),
    ],
    ids=["simulate", "compare"],
)
def test_a_page_can_follow_a_run_to_its_end(workplace: Path, arguments: list[str], names: list[str]) -> None:
    """The address is printed to stderr; the page keeps the final state, which is that of the summary."""
    with running(*arguments, "--dashboard") as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert first.startswith("dashboard: http://127.0.0.1:"), first
        page = Listener(first.split()[1])
        page.rest()
        stdout, stderr = process.communicate(timeout=600)
        page.close()

    assert process.returncode == 0, stderr
    assert page.kinds[-1] == "end"
    assert "the dashboard has ended too; to see it again: metis dashboard out\n" in stderr
    json.loads(stdout)
    for name in names:
        folder = workplace / "out" if name == "out" else workplace / "out" / name
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
        totals = page.runs[name].rest["totals"]
        assert totals["finished"] == summary["finish_reason"]
        assert (totals["version"], totals["steps"]) == (summary["rounds"], summary["steps"])
        assert totals["bytes"] == summary["bytes_exchanged"]
        assert totals["energy"] == pytest.approx(list(summary["energy"].values()))


@pytest.mark.slow
def test_beside_a_controller_that_waits_for_its_learners(workplace: Path) -> None:
    """A real federation, before anybody has come; the page ends with the controller."""
    pytest.importorskip("grpc")
    arguments = ("two.toml", "--policy", "sync", "--state", "state", "--insecure", "--listen", "127.0.0.1:0")
    with running("controller", *arguments, "--http", "", "--dashboard") as process:
        assert process.stderr is not None
        page = Listener(process.stderr.readline().split()[1])
        while not (page.runs.get("state") and page.runs["state"].names):
            assert page.next(), process.stderr.read()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=600)
        page.rest()
        page.close()

    assert page.kinds[-1] == "end"
    assert page.runs["state"].names == ["fast-1", "fast-2", "slow-1", "slow-2"]
    assert page.runs["state"].notices == [
        "4 learners ('fast-1', 'fast-2', 'slow-1' and 1 more) have not joined yet."
    ]  # fmt: skip
