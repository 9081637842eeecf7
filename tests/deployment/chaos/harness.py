"""Real processes of a federation, to be killed, stopped, starved and cut off, and the truth to hold them against."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from deployment.scripted_learner import HonestLearner
from metis.core.events import (
    CommunityPublished,
    RolledBack,
    SendTask,
    UpdateCommitted,
    UpdateRefused,
    UpdateRequest,
)
from metis.core.mixing import MemoryStore
from metis.core.model import Layout, Model, TensorSpec
from metis.deployment.controller.state import State
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.models import model_parts, payload_sha256, read_model
from metis.errors import LearnerError
from metis.experiments.config.load import load_config
from metis.experiments.deploy import make_plan
from metis.runs.storage import load_model
from metis.runs.trace import from_record, to_line

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"
METIS = (sys.executable, "-m", "metis.cli.app")
HANG = 600.0  # seconds; only so that nothing hangs for ever, on a busy machine too


@dataclass(frozen=True)
class Outcome:
    """One line of the table: what should come of a fault, and what came of it."""

    expected: str
    seen: str
    tried: int
    ok: bool

    @classmethod
    def not_tried(cls, expected: str, why: str) -> Outcome:
        """For a fault that cannot be made on this machine."""
        return cls(expected, f"not tried: {why}", 0, True)

    @property
    def verdict(self) -> str:
        return "WRONG" if not self.ok else "ok" if self.tried else "not run"


class Tally:
    """Counts how often a fault was tried, and keeps what went wrong."""

    def __init__(self) -> None:
        self.tried = 0
        self.problems: list[str] = []

    def check(self, good: object, problem: str) -> None:
        if not good:
            self.problems.append(problem)

    def outcome(self, expected: str, seen: str) -> Outcome:
        if not self.problems:
            return Outcome(expected, seen, self.tried, True)
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        return Outcome(expected, f"{seen}; WRONG: {self.problems[0]}{more}", self.tried, False)


def percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


# --- processes --------------------------------------------------------------------------------------


def free_port() -> int:
    """None of those that the system gives to who dials: a learner that dials while nobody listens could get the very
    port, connect to itself, and keep the controller out."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def environment(**more: str) -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "500", "NO_COLOR": "1"}
    return {**os.environ, "PYTHONPATH": str(SOURCE), **quiet, **more}


def limited(limit: str) -> tuple[str, ...]:
    """Words before a command that give it a limit of the shell's `ulimit`."""
    return ("sh", "-c", f'ulimit {limit}; exec "$@"', "sh")


class Process:
    """One process of the command line, and all that it says."""

    def __init__(self, words: Sequence[object], log: Path, *, before: Sequence[str] = (), **more: str) -> None:
        self.log = log
        self._begin = log.stat().st_size if log.exists() else 0
        self.started = time.monotonic()
        with log.open("ab") as file:
            self._popen = subprocess.Popen(
                [*before, *METIS, *map(str, words)], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env=environment(**more), cwd=log.parent,
            )  # fmt: skip
        self.pid = self._popen.pid

    @property
    def code(self) -> int | None:
        return self._popen.poll()

    def text(self) -> str:
        """What this process has written so far; the log may begin with that of an earlier one."""
        with self.log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")

    def printed(self, kind: str | None = None) -> list[str]:
        """The sentences of its JSON lines, and its other lines if no kind is asked for."""
        found = []
        for line in self.text().splitlines():
            try:
                message = json.loads(line)
                if kind in (None, message["kind"]):
                    found.append(str(message["text"]))
            except (ValueError, KeyError, TypeError):
                if kind is None:
                    found.append(line)
        return found

    def wait_for(self, words: str, count: int = 1, seconds: float = HANG) -> None:
        """Until it has printed something this many times."""
        end = time.monotonic() + seconds
        while sum(words in line for line in self.printed()) < count:
            gone = self.code is not None and sum(words in line for line in self.printed()) < count
            if gone or time.monotonic() > end:
                how = f"ended with {self.code}" if gone else f"has not in {seconds:.0f} s"
                raise AssertionError(f"'{words}' was expected, but the process {how}: {self.text()[-1500:]}")
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self._popen.wait(HANG)

    def wait(self, seconds: float = HANG) -> int:
        """Its exit code; a process that does not end is killed and reported."""
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            tail = self.text()[-1500:]
            self.kill()
            raise AssertionError(f"the process did not end in {seconds:.0f} s: {tail}") from None

    def children(self) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        return []

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *reason: object) -> None:
        self.signal(signal.SIGCONT)
        self.kill()


def metis(*words: object, cwd: Path, before: Sequence[str] = (), **more: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [*before, *METIS, *map(str, words)], capture_output=True, text=True, env=environment(**more), cwd=cwd,
        stdin=subprocess.DEVNULL, timeout=HANG,
    )  # fmt: skip


def until(condition: Callable[[], object], what: str, seconds: float = HANG, every: float = 0.05) -> float:
    """Wait for something to become true; returns how long it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise AssertionError(f"not in {seconds:.0f} s: {what}")
        time.sleep(every)
    return time.monotonic() - began


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[bool]:
    """A disk of this size, if this user may mount one."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], capture_output=True)


def fill(folder: Path) -> Path:
    """Leave no room; removing the file makes it again."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return ballast


# --- a federation -----------------------------------------------------------------------------------

SITE = """
import numpy as np
from torch import nn

def network():
    return nn.Linear(20, 5)

def training_data(site):
    rng = np.random.default_rng(len(site))
    return rng.random((40, 20), np.float32), rng.integers(0, 5, 40)
"""
POLICIES = {
    "synchronous": 'name = "sync_fedavg"\nlocal_epochs = 1',
    "semi-synchronous": 'name = "semisync_fedavg"\nslowest_learner_epochs = 2',
    "asynchronous": 'name = "fedrec"\nlocal_epochs = 1',
}


class Federation:
    """A federation's file, its state folder and its one controller, which may be ended and started as often as wanted.

    With `numbers` its state is begun here, with a model of that many numbers, as `metis controller` would begin it but
    without torch: then only light learners can take part. Without, the site file is used.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = ("l0", "l1", "l2"),
        *,
        policy: str = "synchronous",
        numbers: int | None = None,
        rounds: int = 1_000_000,
        site: str = "",
        deployment: str = "",
        identity: Path | None = None,
        state: Path | None = None,
        batch_size: int = 10,
    ) -> None:
        self.folder, self.names = folder, tuple(names)
        folder.mkdir(parents=True, exist_ok=True)
        self.state = state or folder / "state"
        self.port, self.http_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.identity = identity
        self.file = folder / "federation.toml"
        (folder / "site.py").write_text(SITE + site)
        shown = ", ".join(f'"{name}"' for name in self.names)
        self.file.write_text(
            f'seed = 1\n[site]\nfile = "site.py"\n[[learners]]\nname = "all"\nnames = [{shown}]\n'
            f"batch_size = {batch_size}\ntime_per_batch = 0.1\n[training]\nlearning_rate = 0.0001\n"
            f"[policy]\n{POLICIES[policy]}\n[stop]\nrounds = {rounds}\n[deployment]\n"
            f'listen = "{self.address}"\nhttp = "127.0.0.1:{self.http_port}"\nminimum = 1\nlinger = 10\n'
            'step_guard = "report"\n'  # light learners go farther than a network would; what they sent must stay
            + (deployment or "lease = 20\nheartbeat = 0.5\n")
        )
        self.starts: list[float] = []  # seconds from the start of each process until it listened
        self.controller: Process | None = None
        self.rounds = rounds
        if numbers is not None:
            self._begin(numbers)

    def _begin(self, numbers: int) -> None:
        layout = Layout((TensorSpec("weight", (numbers - 1,)), TensorSpec("bias", (1,))))
        model = Model(layout, np.linspace(-1, 1, numbers, dtype=np.float32))
        with State.open(self.state) as state:
            facts = {
                "experiment": load_config(self.file, []).to_dict(), "layout": layout.to_json(),
                "initial": state.put_blob(model_parts(model)), "metric": "accuracy", "higher_is_better": True,
                "evaluation_examples": 0,
            }  # fmt: skip
            state.begin(facts)

    def command(self, *extra: object) -> list[object]:
        secure: list[object] = ["--insecure"] if self.identity is None else ["--identity", self.identity]
        return ["controller", self.file, "--state", self.state, *secure, "--json", *extra]

    def start(self, *extra: object, listening: bool = True, before: Sequence[str] = (), **more: str) -> Process:
        """The same command every time, but for what is given here."""
        log = self.folder / "controller.log"
        self.controller = Process(self.command(*extra), log, before=before, **more)
        if listening:
            self.controller.wait_for("listening on")
            self.starts.append(time.monotonic() - self.controller.started)
        return self.controller

    def learner(self, name: str, *extra: object, address: str | None = None, **options: Any) -> Process:
        """`metis learner` of this site; each name has its own work folder."""
        words = ["learner", "--controller", address or self.address, "--work", self.folder / f"work-{name}"]
        if self.identity is None:
            words += ["--insecure", "--name", name]
        words += ["--site", self.folder / "site.py", "--json"]
        return Process([*words, *extra], self.folder / f"{name}.log", **options)

    def status(self) -> dict[str, Any]:
        """As a monitoring system would ask."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/status", timeout=600) as answer:
            return dict(json.load(answer))

    def version(self) -> int:
        """Of the newest community model, from what the controller printed."""
        lines = [line for line in self._lines("round") if line.startswith("community model ")]
        return max((int(line.split()[2]) for line in lines), default=0)

    def _lines(self, kind: str) -> list[str]:
        found = []
        for line in (self.folder / "controller.log").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                message = json.loads(line)
                if message["kind"] == kind:
                    found.append(str(message["text"]))
        return found

    def warnings(self) -> list[str]:
        """Of all its processes so far."""
        return self._lines("warning")

    def advance(self, versions: int = 2) -> float:
        """Wait for this many new community models; returns how long it took."""
        goal = self.version() + versions
        return until(lambda: self.version() >= goal or self._ended(), f"community model {goal}")

    def _ended(self) -> bool:
        code = None if self.controller is None else self.controller.code
        if code is not None:
            raise AssertionError(f"the controller ended with {code}: {self.controller.text()[-1500:]}")  # type: ignore[union-attr]
        return False

    def finish(self, rounds: int = 2) -> None:
        """Let the federation come to its end: the stop rule may be changed between two starts."""
        if self.controller is not None and self.controller.code is None:
            self.controller.kill()
        self.rounds = self.version() + rounds + 10  # it may not have printed what it published last
        controller = self.start("--set", f"stop.rounds={self.rounds}", listening=False)
        code = controller.wait()
        if code:
            raise AssertionError(f"the last controller ended with {code}: {controller.text()[-1500:]}")

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *reason: object) -> None:
        if self.controller is not None:
            self.controller.__exit__()


# --- light learners ---------------------------------------------------------------------------------


def drift(goal: float) -> Callable[[pb.Task, Any], Any]:
    """What "training" is here: bits of community model, task and learner, and of nothing else."""
    return lambda task, vector: vector * np.float32(0.5) + np.float32(goal) + np.float32(task.number % 7)


class Crowd:
    """Light learners in a thread of their own; they go on whatever happens to the controller."""

    def __init__(
        self, federation: Federation, *, pace: float = 0.01, address: str | None = None, layout: Layout | None = None,
        credentials: Callable[[str], grpc.ChannelCredentials] | None = None, only: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self.federation, self._pace = federation, pace
        with contextlib.closing(_facts(federation)) as facts:
            layout = layout or Layout.from_json(next(facts)["layout"])
        self.learners = [
            HonestLearner(
                name, address or federation.address, layout, train=drift(index), seconds_per_batch=pace,
                credentials=None if credentials is None else credentials(name),
            )
            for index, name in enumerate(federation.names)
            if only is None or name in only
        ]  # fmt: skip
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._running: dict[str, Any] = {}

    def __enter__(self) -> Crowd:
        self._thread.start()
        self.come()
        return self

    def __exit__(self, *reason: object) -> None:
        self.go()
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_asyncgens(), self._loop).result(HANG)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG)
        self._loop.close()

    def come(self) -> None:
        for learner in self.learners:
            if learner.name not in self._running:
                self._running[learner.name] = asyncio.run_coroutine_threadsafe(learner.run(), self._loop)

    def go(self) -> None:
        """All vanish without a word; what they hold they keep."""
        for future in self._running.values():
            future.cancel()
        for future in self._running.values():
            with contextlib.suppress(BaseException):
                future.result(HANG)
        self._running.clear()

    def come_back(self, name: str) -> None:
        """One that was sent away is started again."""
        self._running.pop(name).result(HANG)
        self.come()

    def join(self) -> None:
        """Wait until all have heard that the federation has ended."""
        for future in self._running.values():
            future.result(HANG)

    @property
    def codes(self) -> Counter[str]:
        return sum((learner.codes for learner in self.learners), Counter())

    @property
    def acknowledged(self) -> int:
        return sum(len(learner.acknowledged) for learner in self.learners)


def _facts(federation: Federation) -> Iterator[dict[str, Any]]:
    """What the run was begun with, read from a copy: the folder may be in use."""
    copy = federation.folder / f"facts-{random.randrange(10**9)}"
    copy.mkdir()
    try:
        for path in federation.state.glob("controller.db*"):
            shutil.copy(path, copy)
        with State.open(copy, "process") as state:
            facts = state.facts()
        assert facts is not None
        yield facts
    finally:
        shutil.rmtree(copy)


# --- the truth --------------------------------------------------------------------------------------


@dataclass
class Truth:
    """What a plain controller in memory, which was never killed, makes of the same journal."""

    updates: int = 0  # in the journal
    counted: int = 0  # mixed
    late: int = 0  # journaled, and refused by the policy or void when their turn came
    versions: int = 0
    final: bytes = b""
    problems: list[str] = field(default_factory=list)


def recompute(federation: Federation, crowd: Crowd) -> Truth:
    """Feed the journal to a fresh controller of the core, every local model trained again, and compare.

    Compared are every receipt with the journal, every local model and every published community model bit for bit, the
    whole trace of events and actions letter for letter, and the final model as it lies on disk and at the learners.
    """
    truth = Truth()
    wrong = truth.problems.append
    with State.open(federation.state) as state:
        facts, entries = state.facts(), list(state.entries())
        assert facts is not None
        layout = Layout.from_json(facts["layout"])
        initial = read_model(state.blob_path(facts["initial"]), layout)
        initial = Model(layout, np.array(initial.vector), np.array(initial.counters))
    config = load_config(federation.file, [f"stop.rounds={federation.rounds}"])
    plan = make_plan(config, initial, facts["metric"], facts["higher_is_better"], begun=facts["experiment"])
    controller = plan.make(initial, MemoryStore())
    trainers = {learner.name: learner.train for learner in crowd.learners}
    versions, tasks, trace = {0: initial}, {}, []
    commits: Counter[int] = Counter()
    refused: set[int] = set()
    for entry in entries:
        if "published" in entry.record:
            version = entry.record["published"]
            if payload_sha256(versions[version]) != entry.record["sha256"]:
                wrong(f"community model {version} is another one than the journal says")
            continue
        event: Any = from_record(entry.record)[1]
        if isinstance(event, UpdateRequest):
            truth.updates += 1
            base = versions[tasks[event.task].based_on.version]
            vector = trainers[event.learner](pb.Task(number=event.task), base.vector)
            local = Model(layout, np.asarray(vector, np.float32), base.counters)
            if payload_sha256(local) != entry.blob:
                wrong(f"the local model of task {event.task} in the journal is not what was trained")
            event = replace(event, local_model=local)
        elif isinstance(event, RolledBack):
            event = replace(event, community_model=versions[event.version])
        try:
            actions = controller.handle(event, entry.at)
        except LearnerError:
            continue
        trace += [to_line(entry.at, event), *(to_line(entry.at, action) for action in actions)]
        for action in actions:
            match action:
                case CommunityPublished():
                    versions[action.stamp.version] = action.community_model
                case SendTask():
                    tasks[action.task.number] = action.task
                case UpdateCommitted():
                    commits[action.task] += 1
                case UpdateRefused():
                    refused.add(action.task)
    truth.counted, truth.versions = sum(commits.values()), len(versions) - 1
    truth.late = truth.updates - truth.counted
    if both := refused & commits.keys():
        wrong(f"task {min(both)} counts, and was refused")
    truth.final = b"".join(bytes(part) for part in model_parts(controller.community.model))
    if most := [task for task, count in commits.items() if count > 1]:
        wrong(f"task {most[0]} counts {commits[most[0]]} times")
    by_seq = {entry.seq: entry for entry in entries}
    for learner in crowd.learners:
        for task, seq in learner.acknowledged:
            found = by_seq.get(seq)
            if found is None or found.update != task or found.record["learner"] != learner.name:
                wrong(f"the update of task {task} of '{learner.name}' was acknowledged as entry {seq} and is lost")
        if learner.final is not None and learner.final != truth.final:
            wrong(f"learner '{learner.name}' fetched another final model")
    recorded = (federation.state / "run" / "events.jsonl").read_text().splitlines()
    if recorded != trace:
        where = next((i for i, (a, b) in enumerate(zip(recorded, trace, strict=False)) if a != b), -1)
        wrong(f"the trace differs from line {where + 1} on ({len(recorded)} lines, {len(trace)} expected)")
    path = federation.state / "run" / "community.safetensors"
    if not path.exists():
        wrong("there is no final community model")
    elif not np.array_equal(load_model(path).vector, controller.community.model.vector):
        wrong("the final community model on disk is another one")
    return truth


def journal(federation: Federation) -> list[dict[str, Any]]:
    """The records of the journal, read from a copy of it."""
    copy = federation.folder / f"journal-{random.randrange(10**9)}"
    copy.mkdir()
    try:
        for path in federation.state.glob("controller.db*"):
            shutil.copy(path, copy)
        with State.open(copy, "process") as state:
            return [entry.record for entry in state.entries()]
    finally:
        shutil.rmtree(copy)


def events(federation: Federation, kind: str, learner: str | None = None) -> list[dict[str, Any]]:
    """The events or actions of this kind that the run has recorded so far."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in (federation.state / "run" / "events.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if kind in (record.get("event"), record.get("action")) and learner in (None, record.get("learner")):
                    found.append(record)
    return found
