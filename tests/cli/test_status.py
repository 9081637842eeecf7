"""`metis status` on a controller in another process: running, stopped, killed, frozen, finished, or none."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from deployment.test_status import TOKEN, files
from metis.cli.app import app
from metis.cli.status import federation_view
from metis.deployment.controller.status_server import StatusServer

CONTROLLER = Path(__file__).parents[1] / "deployment" / "watched_controller.py"


def metis(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["status", *map(str, arguments)])


class Controller:
    """A whole federation in another process."""

    def __init__(self, folder: Path, *, learners: int = 3, rounds: int = 100_000, http: str = "127.0.0.1:0") -> None:
        arguments = [str(CONTROLLER), str(folder), str(learners), str(rounds), http]
        self.process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.http = self.process.stdout.readline().strip().removeprefix("ready").strip()

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait(60)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts controllers, in `tmp_path / "state"` by default, and leaves none behind."""
    started: list[Controller] = []

    def start(folder: Path = tmp_path / "state", **options: Any) -> Controller:
        started.append(Controller(folder, **options))
        return started[-1]

    yield start
    for controller in started:
        controller.process.kill()
        controller.process.communicate()


def test_a_running_federation(start: Any, tmp_path: Path) -> None:
    """A head with policy, model, metric and costs, and a row for each learner; the same by folder and by address."""
    controller = start()
    for target in ([tmp_path / "state"], ["--http", controller.http]):
        result = metis(*target)
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert lines[0] == "Sync  running, 3 of 3 learners connected"
        assert lines[1].startswith("community model ")
        assert lines[2].startswith("ends at 100,000 rounds (")
        assert lines[3].startswith("accuracy ")
        assert any(line.startswith("costs: training ") for line in lines)
        assert [line.split()[0] for line in lines[-3:]] == ["l0", "l1", "l2"]
        assert "…" not in result.stdout


def test_json(start: Any, tmp_path: Path) -> None:
    """The document as the controller gives it, and that it runs."""
    controller = start()
    document = json.loads(metis(tmp_path / "state", "--json").stdout)
    assert document["running"] is True
    assert document["pid"] == controller.process.pid and document["http"] == controller.http
    assert {"run", "version", "costs", "learners", "latest"} <= document.keys()
    assert json.loads(metis("--http", controller.http, "--json").stdout)["run"] == document["run"]


def test_stopped_and_killed(start: Any, tmp_path: Path) -> None:
    """One sentence of what the journal knows and how to go on, exit code 3; nothing in the folder is touched."""
    folder = tmp_path / "state"
    start().end(signal.SIGTERM)
    stopped = metis(folder)
    assert stopped.exit_code == 3
    assert stopped.stdout.startswith(f"no controller is running on {folder}. SyncFedAvg had reached ")
    assert stopped.stdout.endswith(f"Resume with: metis controller FILE --state {folder}\n")
    assert stopped.stdout.count("\n") == 1 and " of 3 learners, accuracy 0." in stopped.stdout

    start().end(signal.SIGKILL)
    before = files(folder)
    killed = metis(folder)
    assert killed.exit_code == 3
    assert killed.stdout.startswith(
        f"no controller is running on {folder}; the last one was killed. SyncFedAvg had reached "
    )
    assert files(folder) == before

    document = json.loads(metis(folder, "--json").stdout)
    assert (document["running"], document["state"]) == (False, "not running")
    assert {learner["name"] for learner in document["learners"]} == {"l0", "l1", "l2"}


def test_finished(start: Any, tmp_path: Path) -> None:
    """It says how it ended and where the report is."""
    controller = start(rounds=3)
    controller.process.wait(60)
    result = metis(tmp_path / "state")
    assert result.exit_code == 3
    assert "the federation has ended: 3 rounds are done" in result.stdout
    assert result.stdout.endswith(f"metis report {tmp_path / 'state' / 'run'}\n")
    assert json.loads(metis(tmp_path / "state", "--json").stdout)["state"] == "finished"


def test_a_controller_that_does_not_answer(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there, but stopped: exit code 1, and when it goes on it is seen again."""
    from metis.deployment.controller import status

    monkeypatch.setattr(status.fetch, "__defaults__", (None, 0.5))
    controller = start()
    controller.process.send_signal(signal.SIGSTOP)
    try:
        result = metis(tmp_path / "state")
        assert result.exit_code == 1
        assert f"(process {controller.process.pid} on " in result.stdout
        assert result.stdout.endswith(f"does not answer: {controller.http}: timed out\n")
        document = json.loads(metis(tmp_path / "state", "--json").stdout)
        assert document["running"] is True and "timed out" in document["reason"]
    finally:
        controller.process.send_signal(signal.SIGCONT)
    monkeypatch.undo()
    assert metis(tmp_path / "state").exit_code == 0


def test_a_controller_that_serves_no_status(start: Any, tmp_path: Path) -> None:
    """It runs, and more is not to be known."""
    start(http="")
    result = metis(tmp_path / "state")
    assert result.exit_code == 0
    assert "but serves no status" in result.stdout


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux shows who holds a lock")
def test_a_controller_that_only_begins(start: Any, tmp_path: Path) -> None:
    """The folder is taken, but it is not announced yet where the controller is found."""
    start()
    (tmp_path / "state" / "controller.json").unlink()
    result = metis(tmp_path / "state")
    assert result.exit_code == 0 and "has just started on" in result.stdout
    assert json.loads(metis(tmp_path / "state", "--json").stdout) == {"running": True, "state": "starting"}


def test_another_controller_has_the_address(start: Any, tmp_path: Path) -> None:
    """Its status is not taken for that of this folder."""
    start()
    other = start(tmp_path / "other")
    announced = json.loads((tmp_path / "state" / "controller.json").read_text())
    (tmp_path / "state" / "controller.json").write_text(json.dumps({**announced, "http": other.http}))
    result = metis(tmp_path / "state")
    assert result.exit_code == 1 and "serves the status of run" in result.stdout


def test_not_a_state_folder(tmp_path: Path) -> None:
    """The user's mistake: exit code 2, one line, and what would have been right."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").touch()
    for arguments, sentence in (
        ([tmp_path / "nowhere"], "there is no folder"),
        ([tmp_path], "is not the state folder of a controller"),
        ([tmp_path / "run"], "holds a run, not the state of a controller; see it with: metis report"),
        ([], "name either the state folder of a controller or its status address"),
        ([tmp_path, "--http", "127.0.0.1:1"], "name either the state folder"),
        (["--http", "localhost"], "is not a valid address; write HOST:PORT"),
        (["--http", "127.0.0.1:1", "--token-file", tmp_path / "none"], "the token file"),
    ):
        result = metis(*arguments)
        assert result.exit_code == 2 and not result.stdout, result.output
        assert sentence in result.stderr and result.stderr.count("\n") == 1


def test_nobody_at_the_address() -> None:
    """Not running, as far as can be seen."""
    result = metis("--http", "127.0.0.1:1")
    assert (result.exit_code, result.stdout) == (3, "no controller answers: nothing listens on 127.0.0.1:1\n")


def test_a_token(start: Any, tmp_path: Path) -> None:
    """A status that other machines can reach is shown to who has the token."""
    import asyncio
    import threading

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def document() -> dict[str, Any]:
        return federation(2)

    (tmp_path / "token").write_text(TOKEN + "\n")
    server = StatusServer("0.0.0.0:0", document, loop, token=TOKEN)
    try:
        assert metis("--http", server.address, "--token-file", tmp_path / "token").exit_code == 0
        refused = metis("--http", server.address)
        assert refused.exit_code == 2 and "a token is needed" in refused.stderr
    finally:
        server.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.slow
def test_watching_until_the_end(start: Any, tmp_path: Path) -> None:
    """One line of JSON each time, also while the controller is away; the last one says that it is finished."""
    folder = tmp_path / "state"
    first = start()
    watching = subprocess.Popen(
        [sys.executable, "-m", "metis.cli.app", "status", str(folder), "--watch", "0.1", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    with watching:
        seen = [json.loads(watching.stdout.readline())]
        first.end(signal.SIGKILL)
        while seen[-1]["running"]:
            seen.append(json.loads(watching.stdout.readline()))
        away = len(seen)
        start(rounds=seen[-1]["version"] + 30)
        seen += [json.loads(line) for line in watching.stdout]
    assert seen[-1]["state"] == "finished"
    assert any(look["running"] for look in seen[away:])
    versions = [look["version"] for look in seen if "version" in look]
    assert versions == sorted(versions)


def test_enough_seen(start: Any, tmp_path: Path) -> None:
    """Ctrl-C is how watching ends: no error, no traceback."""
    start()
    watching = subprocess.Popen(
        [sys.executable, "-m", "metis.cli.app", "status", str(tmp_path / "state"), "--watch", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    with watching:
        watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=600)
    assert (watching.returncode, errors) == (0, "")


# --- how it looks -----------------------------------------------------------------------------------


def federation(learners: int, **changes: Any) -> dict[str, Any]:
    """A document as a controller gives it, with numbers as large as they may become."""
    states = ["training", "waiting", "late", "disconnected", "away", "set aside"]
    rows = [
        {
            "name": f"hospital-{index}", "state": states[index % 6], "connected": index % 6 < 3, "address": None,
            "examples": 1_250_000, "batch_size": 100, "time_per_batch": 0.01234, "task": index, "steps_of_task": 12_345,
            "budget_steps": 23_456, "silent_seconds": 0.4, "updates": 10_000, "refused": 12, "active": 950.0,
            "idle": 40.0, "transfer": 10.0,
        }
        for index in reversed(range(learners))
    ]  # fmt: skip
    costs = {
        "parallel_time": 100_000.0, "cumulative_time": 3e6, "idle_time": 1e5, "transfer_time": 1e4,
        "update_requests": 123_456, "refused_updates": 12, "models_exchanged": 250_000, "bytes_exchanged": 25 * 10**12,
        "steps": 10**8, "steps_by_learner": {}, "energy": {"equation": 4e6, "active": 3e6, "idle_charged": 3.5e6},
    }  # fmt: skip
    document = {
        "run": "abc", "state": "running", "policy": "SemiSync (λ=2)", "start": 2, "version": 4321, "steps": 10**8,
        "update_requests": 123_456, "seconds": 100_000.0, "deadline": 100_030.0, "expected": learners,
        "metric": "accuracy", "target": 0.95, "latest": {"version": 4321, "at": 99_999.0, "accuracy": 0.91234},
        "best_version": 4300, "learners": rows, "costs": costs, "refused_calls": {}, "disk_bytes": 10**9,
        "finish_reason": None,
    }  # fmt: skip
    return {**document, **changes}


def shown(document: dict[str, Any], width: int, height: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(federation_view(document, width, height))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("learners", [4, 30])
def test_the_table_fits_its_terminal(learners: int, width: int) -> None:
    """A row for each learner in the order of their numbers; nothing is cut."""
    lines = shown(federation(learners), width)
    rows = [line for line in lines if line.startswith("hospital-")]
    assert [row.split()[0] for row in rows] == [f"hospital-{index}" for index in range(learners)]
    assert not any("…" in line for line in lines)
    assert max(map(len, lines)) <= width
    assert ("connected" in lines[-learners - 2]) == (width == 140)


def test_only_a_long_name_is_cut() -> None:
    """And what is left of it is enough to know it by."""
    document = federation(4)
    document["learners"][0]["name"] = "university-hospital-of-somewhere-far-away"
    (row,) = [line for line in shown(document, 80) if line.startswith("university-h")]
    assert "…" in row and "12,345/23,456" in row


@pytest.mark.parametrize("height", [16, 24, 40])
def test_a_terminal_that_is_too_low(height: int) -> None:
    """Those that need a look are shown, and how many are not."""
    lines = shown(federation(60), 80, height)
    assert len(lines) < height
    rows = [line for line in lines if line.startswith("hospital-")]
    assert lines[-1] == f"and {60 - len(rows)} more learners"
    assert all("training" not in row for row in rows[:3])


def test_before_and_after() -> None:
    """Nobody there yet, nothing measured; and an end with its reason."""
    before = shown(federation(0, state="waiting for learners", expected=4, latest=None, best_version=None), 80)
    assert before[0] == "SemiSync (λ=2)  waiting for learners, 0 of 4 have joined"
    assert before[2] == "accuracy not measured yet, target 0.95"
    assert before[-1] == "no learner has joined yet"
    after = shown(federation(1, state="finished", finish_reason="5 rounds are done"), 80)
    assert after[0] == "SemiSync (λ=2)  finished: 5 rounds are done"


def test_for_whom_masked_sums_wait() -> None:
    """Instead of how many have joined."""
    awaited = {"learners": ["oslo"], "reason": "a masked window begins with 4 learners or more, and 3 are there"}
    document = federation(4, state="waiting for learners", awaited={**awaited, "since": 60.0, "seconds": 190.0})
    assert shown(document, 200)[0] == (
        "SemiSync (λ=2)  waiting for learners, oslo, for 3 min 10 s: a masked window begins with 4 learners or more, "
        "and 3 are there"
    )


def test_a_learner_cannot_steer_the_terminal() -> None:
    """Whatever is in a name, only letters come out."""
    document = federation(1)
    document["learners"][0]["name"] = "\x1b[2Jevil[bold]\n"
    lines = shown(document, 100)
    assert "\x1b" not in "".join(lines)
    assert lines[-1].startswith("�[2Jevil[bold]�")
