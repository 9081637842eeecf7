"""Notifications by a real command and to a real HTTP server: each condition once, and never in the way."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import pytest
import tomlkit
from typer.testing import CliRunner

from deployment.federations import served
from metis.cli.app import app
from metis.core import policies
from metis.core.stop import StopRule
from metis.deployment.controller import notify
from metis.deployment.controller.alerts import Alerts
from metis.deployment.controller.notify import Notifier, deliver, notification
from metis.deployment.controller.settings import DeploymentSettings, NotifySettings
from metis.deployment.controller.space import DiskSpace
from metis.deployment.controller.writer import Standing
from metis.deployment.security.identity import now_utc
from metis.errors import ConfigError
from metis.experiments.config.load import resolve_config
from metis.experiments.config.schema import NotifyEvent
from metis.experiments.deploy import make_settings

EVENTS = get_args(NotifyEvent)
DOCUMENT = notification("test", "hello", {"run": "r"})


def to_file(path: Path, **options: Any) -> NotifySettings:
    """Settings whose command adds the document to a file, a line each."""
    command = ("sh", "-c", 'cat >> "$0" && echo >> "$0"', str(path))
    return NotifySettings(command, None, options.pop("events", EVENTS), **options)


def heard(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kinds(path: Path) -> list[str]:
    return [document["kind"] for document in heard(path)]


@dataclass
class Hook:
    """A webhook that answers with these codes, one after the other, and then with the last one for ever."""

    codes: list[int]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def hook() -> Iterator[Callable[..., Hook]]:
    servers: list[http.server.ThreadingHTTPServer] = []

    def start(*codes: int) -> Hook:
        made = Hook(list(codes))

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                made.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(made.codes.pop(0) if len(made.codes) > 1 else made.codes[0])
                self.send_header("Location", made.url)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made.url = f"http://127.0.0.1:{server.server_address[1]}/hook"
        return made

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


# --- delivery -----------------------------------------------------------------------------------------


def test_a_condition_is_notified_once_also_after_a_restart(tmp_path: Path) -> None:
    """Again only after it was over; events each time."""
    out, problems = tmp_path / "out", []

    def process(act: Callable[[Notifier], None]) -> None:
        notifier = Notifier(to_file(out), tmp_path, {"run": "r"}, lambda *line: problems.append(line))
        act(notifier)
        notifier.close()

    def again_and_again(notifier: Notifier) -> None:
        for _ in range(3):
            notifier.began("away", "oslo", "learner 'oslo' is away", learner="oslo")
        notifier.notify("stopped", "stopped")

    process(again_and_again)
    process(again_and_again)
    assert kinds(out) == ["away", "stopped", "stopped"]
    assert heard(out)[0]["facts"] == {"run": "r", "learner": "oslo"}
    process(lambda notifier: notifier.over("away", "oslo") or None)
    process(again_and_again)
    assert kinds(out) == ["away", "stopped", "stopped", "away", "stopped"]
    assert problems == []


def test_only_the_events_that_were_asked_for(tmp_path: Path) -> None:
    """The others are neither sent nor remembered."""
    out = tmp_path / "out"
    notifier = Notifier(to_file(out, events=("finished",)), tmp_path, {}, lambda *_: None)
    notifier.began("away", "oslo", "away")
    assert not notifier.over("away", "oslo")
    notifier.notify("stopped", "stopped")
    notifier.notify("finished", "the end")
    notifier.close()
    assert kinds(out) == ["finished"]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["/does/not/exist"], "the command /does/not/exist cannot be run: No such file or directory"),
        (["sh", "-c", "echo why; exit 3"], "the command sh ended with 3: why"),
        (["sh", "-c", "exec sleep 600"], "the command sh did not end within 0.3 s and was killed"),
        (["sh", "-c", "sleep 600 & sleep 600"], "the command sh did not end within 0.3 s and was killed"),
        (
            ["sh", "-c", "printf '\\033[31mred'; exit 1"],
            "the command sh ended with 1: \N{REPLACEMENT CHARACTER}[31mred",
        ),
    ],
)
def test_a_command_that_fails_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, command: list[str], problem: str
) -> None:
    """Whatever it does, it ends in time, and so does what it has started."""
    monkeypatch.setattr(notify, "_COMMAND_SECONDS", 0.3)
    assert deliver(NotifySettings(tuple(command)), DOCUMENT) == [problem]


def test_the_output_of_a_command_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that never stops talking is not listened to for ever: its pipe is closed."""
    (problem,) = deliver(NotifySettings(("yes",)), DOCUMENT)
    assert problem.startswith("the command yes ended with ") and len(problem) < 400


def test_a_webhook_is_tried_again_when_it_fails(hook: Callable[..., Hook]) -> None:
    """An error of the server may pass; one of ours does not, and a redirection is not followed."""
    flaky = hook(500, 503, 200)
    assert deliver(NotifySettings(webhook=flaky.url), DOCUMENT, waits=(0, 0)) == []
    assert flaky.bodies == [DOCUMENT] * 3
    for code in (404, 302):
        strict = hook(code)
        (problem,) = deliver(NotifySettings(webhook=strict.url), DOCUMENT, waits=(0, 0))
        assert problem.startswith(f"the webhook answers {code} ") and len(strict.bodies) == 1
    broken = hook(500)
    (problem,) = deliver(NotifySettings(webhook=broken.url), DOCUMENT, waits=(0, 0))
    assert problem.startswith("the webhook answers 500") and len(broken.bodies) == 3
    (problem,) = deliver(NotifySettings(webhook="http://127.0.0.1:1/secret"), DOCUMENT, waits=())
    assert problem.startswith("the webhook cannot be reached: ") and "secret" not in problem


def test_what_is_not_delivered_is_reported_and_does_not_wait(tmp_path: Path) -> None:
    """The caller goes on at once, also when more come than can be delivered."""
    reports: list[tuple[str, str]] = []
    gate = tmp_path / "gate"
    command = ("sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.05; done; exit 1")
    notifier = Notifier(NotifySettings(command, None, EVENTS), tmp_path, {}, lambda *line: reports.append(line))
    for _ in range(notify._WAITING + 2):
        notifier.notify("stopped", "stopped")
    dropped = [text for _, text in reports]
    assert dropped and set(dropped) == {"100 notifications wait to be delivered; another one is dropped"}
    gate.touch()
    while not any("was not delivered: the command sh ended with 1" in text for _, text in reports):
        time.sleep(0.02)


# --- conditions -----------------------------------------------------------------------------------------


def standing(available: int = 3) -> Standing:
    return Standing(True, False, False, 1.0, 1, "", available)


def test_conditions_of_a_federation(tmp_path: Path) -> None:
    """A site stays away and comes back, the quorum is lost and regained, the disk gets full and free."""
    out = tmp_path / "out"
    clock = [1000.0]
    notifier, disk = Notifier(to_file(out), tmp_path, {}, lambda *_: None), DiskSpace(tmp_path, 1000)
    disk.nearly_full = False
    watch = Alerts(notifier, disk, away_after=60, minimum=2, clock=lambda: clock[0])
    everybody = ("oslo", "lyon", "bern")
    watch.look(standing(), everybody, everybody)
    clock[0] += 59
    watch.look(standing(), everybody, ("oslo", "lyon"))
    assert not notifier._conditions
    clock[0] += 2
    for _ in range(3):
        watch.look(standing(), everybody, ("oslo", "lyon"))
    watch.look(standing(1), everybody, ("oslo", "lyon"))
    watch.look(standing(1), everybody, everybody)
    watch.look(standing(2), everybody, everybody)
    disk.refused("no room")
    watch.look(standing(), everybody, everybody)
    disk.look()
    watch.look(standing(), everybody, everybody)
    notifier.close()
    expected = ["away", "quorum_lost", "back", "quorum_regained", "disk_full", "disk_free"]
    assert [kind for kind in kinds(out) if kind != "disk_nearly_full"] == expected
    assert heard(out)[0]["facts"]["learner"] == "bern" and "away for " in heard(out)[0]["text"]


def test_certificates_that_end_soon(tmp_path: Path) -> None:
    """Of the controller, of the CA and of learners that connect later; a renewed one is a new condition."""
    out, ends = tmp_path / "out", {"the certificate of the CA": now_utc() + timedelta(days=13, hours=1)}
    ends["the certificate of controller 'main'"] = now_utc() + timedelta(days=300)
    notifier = Notifier(to_file(out), tmp_path, {}, lambda *_: None)
    watch = Alerts(notifier, DiskSpace(tmp_path, 1), away_after=60, minimum=1, certificates=ends.items)
    for _ in range(3):
        watch.look(standing(), (), ())
    ends["the certificate of learner 'oslo'"] = now_utc() - timedelta(hours=1)
    watch.look(standing(), (), ("oslo",))
    notifier.close()
    texts = [document["text"] for document in heard(out) if document["kind"] == "certificate"]
    assert len(texts) == 2
    assert texts[0].startswith("the certificate of the CA ends in 13 days, on ")
    assert texts[1].startswith("the certificate of learner 'oslo' has ended, on ")


def test_a_federation_notifies_of_its_end(tmp_path: Path) -> None:
    """By the command of its settings, with the run and the state folder; a stop before that is another event."""
    out = tmp_path / "out"
    terms = DeploymentSettings(expected=2, lease=20, heartbeat=0.5, linger=5, notify=to_file(out))

    async def play(rounds: int) -> None:
        async with served(tmp_path / "state", policies.sync_fedavg(1), StopRule(rounds=rounds), terms=terms) as here:
            tasks = [asyncio.create_task(learner.run()) for learner in here.learners(2)]
            await here.until(lambda: here.process._view.standing.version > 0)
            if rounds < 100:
                assert await here.serving
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(play(1000))
    asyncio.run(play(3))
    found = [document for document in heard(out) if not document["kind"].startswith("disk")]
    assert [document["kind"] for document in found] == ["stopped", "finished"]
    assert found[1]["text"].startswith("the federation has ended: ")
    assert found[1]["facts"]["state"] == str(tmp_path / "state")


# --- the file and the command -------------------------------------------------------------------------


FEDERATION = """
policy.name = "sync_fedavg"
data.dataset = "digits"
network = { name = "mlp", hidden = [8] }
stop.rounds = 1
[[learners]]
name = "site"
count = 2
batch_size = 10
time_per_batch = 0.01
"""


def config(**table: Any) -> Any:
    return resolve_config({**tomlkit.parse(FEDERATION).unwrap(), "deployment": {"notify": table}}, "federation.toml")


def test_the_table_of_the_file(tmp_path: Path) -> None:
    """All events by default; it survives being written out and read again."""
    made = config(command=["mail", "-s", "metis"], away_after=60.0)
    assert make_settings(made).notify == NotifySettings(("mail", "-s", "metis"), None, EVENTS, 60.0)
    assert resolve_config(tomlkit.parse(made.to_toml()).unwrap(), "again") == made
    assert make_settings(resolve_config(tomlkit.parse(FEDERATION).unwrap(), "x")).notify == NotifySettings()


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({}, "names neither a command nor a webhook"),
        ({"webhook": "http://example.org/x"}, "must be an address https://..., or http://... on this machine"),
        ({"webhook": "ftp://example.org"}, "must be an address https://"),
        ({"webhook": "https://"}, "must be an address https://"),
        ({"command": ["x"], "events": ["never"]}, "events"),
    ],
)
def test_a_table_that_cannot_work_is_refused(table: dict[str, Any], problem: str) -> None:
    """With the key and what is allowed."""
    with pytest.raises(ConfigError, match="notify") as caught:
        config(**table)
    assert problem in str(caught.value)


def test_a_test_notification(tmp_path: Path, hook: Callable[..., Hook]) -> None:
    """`metis controller --test-notification` sends one and says whether it arrived; no state folder is made."""
    there, runner = hook(200), CliRunner()
    file = tmp_path / "federation.toml"
    file.write_text(f'{FEDERATION}[deployment.notify]\nwebhook = "{there.url}"\n')
    command = ["controller", str(file), "--state", str(tmp_path / "state"), "--test-notification"]
    done = runner.invoke(app, command)
    assert (done.exit_code, done.output) == (0, "the notification was delivered\n")
    assert there.bodies[0]["kind"] == "test" and not (tmp_path / "state").exists()
    there.codes[:] = [404]
    done = runner.invoke(app, command)
    assert done.exit_code == 1 and done.output.startswith("the webhook answers 404")
    file.write_text(FEDERATION)
    assert "give [deployment.notify]" in runner.invoke(app, command).output
