"""A site's code says a secret in every way that it can: nothing that the controller receives or writes contains it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("grpc")

from deployment.proxy import Proxy
from deployment.tiny import SITE
from metis.deployment.controller.announcement import find
from metis.runs.trace import EVENTS

METIS = (sys.executable, "-m", "metis.cli.app")
SECRET = "patient_4711_Ms_Doe"
STANDS_FOR_A_HANG = 300.0  # seconds

FEDERATION = """
[site]
file = "site.py"

[[learners]]
name = "all"
names = ["broken", "other", "zurich"]
batch_size = 10
time_per_batch = 0.1

[training]
learning_rate = 0.1

[policy]
name = "sync_fedavg"
local_epochs = 1

[stop]
rounds = 9

[deployment]
wait_seconds = 0.1
minimum = 1
http = "127.0.0.1:0"
heartbeat = 0.2
evaluate_at_learners = true
"""

# Each training fails in another way, and the one after it succeeds, so that the learner is never set aside.
SPEAKING = """
import contextlib, logging, sys, warnings
from pathlib import Path

SECRET = "{secret}"
HERE = Path(__file__).parent
said = logging.getLogger(SECRET)

def speak(where):
    print(SECRET, where)
    print(SECRET, where, file=sys.stderr)
    said.critical("%s in %s", SECRET, where)
    with contextlib.suppress(Warning):
        warnings.warn(SECRET + where, stacklevel=2)

speak("import")
Error = type(SECRET, (Exception,), {{"__repr__": lambda self: SECRET, "__str__": lambda self: SECRET}})

class Thing:
    def __repr__(self):
        return SECRET

def chained():
    try:
        raise ValueError(SECRET)
    except ValueError as problem:
        raise RuntimeError("outer") from problem

def noted():
    problem = ValueError("a note follows")
    problem.__notes__ = [SECRET]
    raise problem

def grouped():
    if sys.version_info < (3, 11):
        raise ValueError(SECRET)
    raise ExceptionGroup(SECRET, [ValueError(SECRET), Error()])

def opened():
    (HERE / SECRET / "scan.dcm").open()

def keyed():
    return {{}}[Thing()]

def raised():
    raise Error

def left():
    sys.exit(SECRET)

def asserted():
    assert not SECRET, SECRET

WAYS = [raised, chained, noted, grouped, opened, keyed, left, asserted]

def times(name):
    path = HERE / name
    count = int(path.read_text()) if path.exists() else 0
    path.write_text(str(count + 1))
    return count

def loss(outputs, targets):
    speak("loss")
    if outputs.requires_grad:
        way, good = divmod(times("trained"), 5)
        if not good and way < len(WAYS):
            WAYS[way]()
    return nn.functional.cross_entropy(outputs, targets)

def accuracy(outputs, targets):
    speak("metric")
    if times("measured") in (1, 3):
        raise Error
    return (outputs.argmax(1) == targets).double().mean()

metrics = {{"accuracy": accuracy, SECRET: lambda outputs, targets: (outputs ** 2).mean()}}
metric = "accuracy"
"""
BROKEN = "\ndef training_data(site):\n    raise ValueError('{secret}')\n"
OTHER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.{secret} = nn.Linear(3, 2)
    def forward(self, x):
        return self.{secret}(x)

def network():
    return Net()
"""


class Recorder:
    """All bytes that learners sent."""

    def __init__(self) -> None:
        self.content = bytearray()

    def __call__(self, data: bytes) -> bytes:
        self.content += data
        return data


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + STANDS_FOR_A_HANG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def learner(folder: Path, address: str, name: str, code: str) -> tuple[int, str]:
    """`metis learner` with this code in its site file, to its end; its exit code and its terminal."""
    home = folder / name
    home.mkdir()
    site = home / f"{SECRET}.py"
    site.write_text(SITE + code.format(secret=SECRET))
    ended = subprocess.run(
        [
            *METIS,
            "learner",
            "--controller",
            address,
            "--insecure",
            "--name",
            name,
            "--site",
            site,
            "--work",
            home / "w",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STANDS_FOR_A_HANG,
    )
    return ended.returncode, ended.stdout


@pytest.mark.slow
def test_what_a_sites_code_says_stays_at_the_site(tmp_path: Path) -> None:
    """Exceptions of every shape, prints, warnings, loggers, metric names, tensor names and file names.

    While preparing, training and evaluating. The controller knows that something failed and of which kind; the site's
    log has the text under the reference that the controller shows.
    """
    away = tmp_path / "controller"
    away.mkdir()
    (away / "site.py").write_text(SITE)
    (away / "federation.toml").write_text(FEDERATION)
    arguments = ["controller", "federation.toml", "--state", "state", "--insecure", "--listen", "127.0.0.1:0"]
    pages: list[bytes] = []
    with (away / "terminal").open("wb") as terminal:
        controller = subprocess.Popen([*METIS, *arguments], cwd=away, stdout=terminal, stderr=terminal)
        try:
            until(lambda: find(away / "state") is not None or controller.poll() is not None)
            known = find(away / "state")
            assert known is not None and known.http is not None, (away / "terminal").read_text()
            with Proxy(known.listen) as proxy:
                proxy.up.change = sent = Recorder()
                assert learner(tmp_path, proxy.address, "broken", BROKEN)[0] == 2
                assert learner(tmp_path, proxy.address, "other", OTHER)[0] == 2
                for path in ("status", "metrics"):
                    with urllib.request.urlopen(f"http://{known.http}/{path}", timeout=STANDS_FOR_A_HANG) as answer:
                        pages.append(answer.read())
                code, printed = learner(tmp_path, proxy.address, "zurich", SPEAKING)
                assert code == 0, printed
            assert controller.wait(STANDS_FOR_A_HANG) == 0
        finally:
            controller.kill()
            controller.wait()
    subprocess.run([*METIS, "report", away / "state" / "run"], cwd=away, check=True, stdout=subprocess.DEVNULL)

    secret = SECRET.encode()
    assert (away / "state" / "run" / "report.html").exists()
    written = [path for path in away.rglob("*") if path.is_file()]
    assert [str(path) for path in written if secret in path.read_bytes() or SECRET in str(path)] == []
    assert secret not in sent.content
    assert not [page for page in pages if secret in page]
    # And all of it was really said, and can be found at the site.
    assert sent.content.count(b"zurich") and printed.count(SECRET) > 50
    events = (away / "state" / "run" / EVENTS).read_text()
    assert events.count("its code raised an exception; reference ") >= 7
    assert "its training process ended; reference " in events
    logs = {name: (tmp_path / name / "w" / "failures.log") for name in ("broken", "other", "zurich")}
    assert all(log.stat().st_mode & 0o777 == 0o600 for log in logs.values())
    assert all(SECRET in logs[name].read_text() for name in ("broken", "zurich"))
    references = {part.split()[0] for part in events.split("reference ")[1:]}
    kept = logs["zurich"].read_text()
    assert references and all(f" {reference} " in kept for reference in references)
    terminal_text = (away / "terminal").read_text()
    assert "learner 'broken' leaves: its network, data or settings cannot be used; reference " in terminal_text
    assert "learner 'other' leaves: its network is not the federation's; reference " in terminal_text
    assert not os.path.lexists(away / "failures.log")
