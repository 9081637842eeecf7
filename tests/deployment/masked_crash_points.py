"""Kill the controller or a learner of a masked federation at every system call that touches its folder.

    python tests/deployment/masked_crash_points.py             # 10 points of each
    python tests/deployment/masked_crash_points.py --all       # every point; hours
    python tests/deployment/masked_crash_points.py --most 100 --only controller
    python tests/deployment/masked_crash_points.py --all --keep FILE   # continues where it was interrupted
    python tests/deployment/masked_crash_points.py --all --windows     # windows of the cache (fedrec) instead of rounds

A dry run under strace lists the calls; then a federation a point is run, with real processes, whose victim gets a
SIGKILL there and is started again. It must end with the bits of the simulated ring, no learner may have signed two
statements, answered for two sums or sent two masked bodies in one context, and no update that was acknowledged may be
lost. In windows one learner is so slow that it must hand in its latest model again: the victim itself, if it is a
learner. Who is in which window depends on the machine, so every community model is compared with a fold over the
journal by the core and the ring alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import socket
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from deployment import masked
from deployment.crash_points import CALLS, strace_problem
from deployment.masked import NAMES
from metis.core.canonical import Message
from metis.core.secure_sum import Answer, Upload, Vote
from metis.deployment.controller.state import State
from metis.deployment.storage import read_file
from metis.deployment.trainer import process as trainer
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.secure import unpacked
from metis.system import REAL, SYSTEM

VICTIM, SLOW = "cyd", "dan"
ROUNDS, WINDOWS = "average", "fedrec"
HANG = 300.0  # seconds
AFTERWARDS = 5.0  # seconds


@dataclass(frozen=True)
class Point:
    """One point at which to strike."""

    who: str  # controller or learner
    call: str
    number: int  # of all calls of this name that one of its threads makes
    policy: str = ROUNDS  # by its name in `masked.POLICIES`


@dataclass
class Said:
    """What learners have sent, and what came of it."""

    votes: dict[tuple[bytes, str], set[bytes]] = field(default_factory=lambda: defaultdict(set))
    answers: dict[tuple[bytes, str], set[bytes]] = field(default_factory=lambda: defaultdict(set))
    uploads: dict[tuple[bytes, str], set[bytes]] = field(default_factory=lambda: defaultdict(set))
    acknowledged: set[int] = field(default_factory=set)  # updates, by their numbers

    def reported(self, kind: str, text: str) -> None:
        """What a learner shows its operator."""
        if kind == "handed_in" and (found := re.match(r"task (\d+):", text)) is not None:
            self.acknowledged.add(int(found[1]))

    def heard(self, name: str, message: pb.SecureSum) -> None:
        made: Message
        if message.kind == pb.SecureSum.STATEMENT:
            made = Vote.decode(message.content)
            self.votes[made.context, name].add(made.statement)
        elif message.kind == pb.SecureSum.SHARES:
            made = Answer.decode(message.content)
            self.answers[made.context, name].add(message.content)

    def problems(self) -> Iterator[str]:
        for what, said in (("votes", self.votes), ("answers", self.answers), ("uploads", self.uploads)):
            for (_, name), given in said.items():
                if len(given) > 1:
                    yield f"{name} has {len(given)} {what} in one context"


@dataclass(frozen=True)
class Result:
    """What came of it."""

    point: Point | None
    struck: bool
    acknowledged: int
    problem: str = ""  # empty is good


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Trainer:
    """The training of a learner that is not the victim: a thread that looks like a process, and begins at once."""

    pid, returncode = 0, None

    async def start(self, limit: int) -> _Trainer:
        commands, theirs = os.pipe()
        mine, answers = os.pipe()
        self.stdin = _Pipe(theirs)
        loop, self.stdout = asyncio.get_running_loop(), asyncio.StreamReader(limit)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self.stdout), os.fdopen(mine, "rb"))
        self._ended = asyncio.ensure_future(asyncio.to_thread(self._serve, commands, answers))
        return self

    @staticmethod
    def _serve(commands: int, answers: int) -> None:
        with os.fdopen(commands, "rb") as stdin, os.fdopen(answers, "wb") as stdout:
            trainer.serve(masked.build, stdin, stdout)

    async def wait(self) -> int:
        await asyncio.shield(self._ended)
        return 0

    def kill(self) -> None:
        self.stdin.close()


class _Pipe:
    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "wb", 0)
        self.close = self._file.close

    def write(self, line: bytes) -> None:
        self._file.write(line)

    async def drain(self) -> None:
        pass


async def _thread(*_: str, limit: int, **__: Any) -> _Trainer:
    return await _Trainer().start(limit)


class Federation:
    """Real processes: the victim and its training process under strace, the others in this one."""

    def __init__(self, home: Path, point: Point | None, who: str, killed: str = "", policy: str = ROUNDS) -> None:
        self.home, self.point, self.who, self.killed, self.policy = home, point, who, killed, policy
        self.said, self.log, self.struck = Said(), home / "strace", False

    def _strace(self) -> list[str]:
        if self.point is None:
            return ["strace", "-f", "-y", "-o", str(self.log), "-e", f"trace={','.join(CALLS)}"]
        rule = f"inject={self.point.call}:signal=SIGKILL:when={self.point.number}"
        return ["strace", "-f", "-o", str(self.log), "-e", f"trace={self.point.call}", "-e", rule]

    async def _victim(self, *arguments: str) -> None:
        """To its end; once killed, it is started again, without strace."""
        command = [*([] if self.killed else self._strace()), sys.executable, masked.__file__, *arguments]
        environment = {**os.environ, **({masked.KILLED: self.killed} if self.killed else {})}
        for _ in range(4):
            with (self.home / f"{self.who}.out").open("ab") as out:
                process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out, env=environment)
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                process.kill()
                await process.wait()
                raise
            self.struck = self.struck or code != 0
            if code == 0:
                return
            command, environment = [sys.executable, masked.__file__, *arguments], dict(os.environ)
        raise AssertionError(f"it does not end: {(self.home / f'{self.who}.out').read_text()[-2000:]}")

    async def _learner(self, name: str, address: str) -> None:
        SYSTEM.set(replace(REAL, spawn=_thread))
        reports: list[tuple[str, str]] = []
        process = masked.learner_process(self.home, name, address, reports)
        send = process.connection.send

        def sending(**message: Any) -> bool:
            if "secure" in message:
                self.said.heard(name, message["secure"])
            return bool(send(**message))

        process.connection.send = sending
        try:
            assert await process.run() == 0
        finally:
            for line in reports:
                self.said.reported(*line)

    async def play(self) -> None:
        home, others = str(self.home), [name for name in NAMES if name != VICTIM]
        if self.who == "controller":
            address = f"127.0.0.1:{free_port()}"
            learners = [self._learner(name, address) for name in NAMES]
            await asyncio.wait_for(asyncio.gather(self._victim("controller", home, address), *learners), HANG)
            return
        policy, rounds = masked.POLICIES[self.policy], masked.rounds_of(self.policy)
        async with masked.controller(self.home, policy=policy, rounds=rounds) as here:
            hear = here.process._sums.hear

            def hearing(name: str, message: pb.SecureSum) -> None:
                if name == VICTIM:
                    self.said.heard(name, message)
                hear(name, message)

            here.process._sums.hear = hearing
            problem = here.process._sums.problem

            def checking(name: str, content: bytes) -> str | None:
                found: str | None = problem(name, content)
                if found is None:
                    upload = Upload.decode(unpacked(content, here.process._sums._opening.ring.nbytes(masked.LAYOUT)))
                    self.said.uploads[upload.context, name].add(upload.digest)
                return found

            here.process._sums.problem = checking
            victim = asyncio.ensure_future(self._victim("learner", home, VICTIM, here.address))
            learners = [self._learner(name, here.address) for name in others]
            try:
                await asyncio.wait_for(asyncio.gather(*learners), HANG)
                assert await here.serving
                for _ in range(round(HANG / AFTERWARDS)):
                    struck = self.struck
                    await asyncio.wait({victim}, timeout=AFTERWARDS)
                    if victim.done() or struck:
                        break
                else:
                    raise AssertionError("it does not end")
            finally:
                # One that was killed after its last task, and came back after the end, would dial for ever.
                victim.cancel()
                with suppress(asyncio.CancelledError):
                    await victim


def examine(home: Path, said: Said, *, same_bits: bool = True, policy: str = ROUNDS) -> Iterator[str]:
    """What is wrong with what a run has left."""
    yield from said.problems()
    with State.open(home / "state", "process") as state:
        # A learner whose training process alone was killed says so, and the round goes on without it.
        failed = sum(entry.record.get("event") == "task_failed" for entry in state.entries())
        updates = [entry.update for entry in state.entries() if entry.update is not None]
        opened = [entry.record["version"] for entry in state.entries() if entry.record.get("event") == "sum_opened"]
        latest = next((snapshot.seq for snapshot in state.snapshots()), 0)  # what is before it may be collected
        for entry in state.entries(latest):
            if entry.record.get("event") == "sum_opened" and entry.blob is not None:
                read_file(state.blob_path(entry.blob))
    found, rounds = masked.published(home), masked.rounds_of(policy)
    if same_bits and found != masked.folded(home, masked.POLICIES[policy], rounds):
        yield f"other bits: {found}"
    if same_bits and policy == ROUNDS and not failed and found != masked.simulated():
        yield f"other bits than simulated: {found}"
    if lost := sorted(said.acknowledged - set(updates)):
        yield f"the updates {lost} were acknowledged and are not in the journal"
    if len(updates) != len(set(updates)) or (policy == ROUNDS and len(updates) + failed != len(NAMES) * rounds):
        yield f"{len(updates)} updates are in the journal, and {failed} failed"
    if len(opened) != len(set(opened)) or len(opened) != rounds:
        yield f"the sums of {opened} were opened"


def run(
    home: Path, point: Point | None, who: str, *, fresh: bool = False, killed: str = "", policy: str = ROUNDS
) -> tuple[Federation, str]:
    """One federation to its end; the victim is killed at a point, or where `masked.KILLED` says.

    `fresh`: it trains otherwise after its restart.
    """
    wanted = {"METIS_TEST_HOME": str(home), masked.CHOSEN: policy}
    if fresh:
        wanted[masked.FRESH] = "1"
    if policy == WINDOWS:
        wanted[masked.SLOW] = SLOW if who == "controller" else VICTIM
    os.environ.update(wanted)
    federation, problem = Federation(home, point, who, killed, policy), ""
    try:
        asyncio.run(federation.play())
        problem = "; ".join(examine(home, federation.said, same_bits=not fresh, policy=policy))
    except (AssertionError, asyncio.TimeoutError) as failure:
        problem = f"{type(failure).__name__} {failure}"[:2000]
    for name in wanted.keys() - {"METIS_TEST_HOME"}:
        del os.environ[name]
    return federation, problem


def prepared(workspace: Path, name: str) -> Path:
    home = workspace / name
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    if not (workspace / "kits").exists():
        masked.make_kits(workspace / "kits", rules="masked_windows = true\n")
    shutil.copytree(workspace / "kits" / "ca", home / "ca")
    return home


def all_points(workspace: Path, who: str, policy: str = ROUNDS) -> list[Point]:
    """Every call of the victim that touches its folder, from the first on that is one of a round."""
    home = prepared(workspace, "dry")
    federation, problem = run(home, None, who, policy=policy)
    if not problem and policy == WINDOWS and '"resent":' not in (home / "state/run/events.jsonl").read_text():
        problem = "nobody has handed in its latest model again"
    if problem:
        raise RuntimeError(f"it fails by itself: {problem}")
    folder = str(home / "state") if who == "controller" else str(home / "work" / VICTIM)
    counts: Counter[tuple[str, str]] = Counter()
    starting: dict[str, int] = {}  # calls of each name before the folder is touched, which strike there instead
    points: dict[Point, None] = {}
    for line in federation.log.read_text(errors="replace").splitlines():
        found = re.match(r"(\d+) +(\w+)\(", line)
        if found is not None:
            counts[found[1], found[2]] += 1
            if folder in line:
                starting = starting or {call: count for (_, call), count in counts.items()}
                if counts[found[1], found[2]] >= starting.get(found[2], 0):
                    points[Point(who, found[2], counts[found[1], found[2]], policy)] = None
    return list(points)


def strike(workspace: Path, point: Point) -> Result:
    home = prepared(workspace, "home")
    federation, problem = run(home, point, point.who, policy=point.policy)
    return Result(point, federation.struck, len(federation.said.acknowledged), problem)


class Kept:
    """Points and results of both victims, in a file if one is named: one line a point, what failed in full."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.all: dict[str, dict[str, str | None]] = {}  # of each victim: "call number" -> problem; None: not tried yet
        if path is not None and path.exists():
            self.all = json.loads(path.read_text())

    def points(self, workspace: Path, who: str, policy: str = ROUNDS) -> list[Point]:
        if who not in self.all:
            found = all_points(workspace, who, policy)
            self.all[who] = {f"{point.call} {point.number}": None for point in found}
            self._save()
        return [Point(who, *_call(key), policy) for key in self.all[who]]

    def tried(self, point: Point) -> bool:
        return self.all[point.who][f"{point.call} {point.number}"] is not None

    def take(self, result: Result) -> None:
        assert result.point is not None
        problem = result.problem or ("killed" if result.struck else "not reached")
        self.all[result.point.who][f"{result.point.call} {result.point.number}"] = problem
        self._save()

    def _save(self) -> None:
        if self.path is not None:
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(self.all, indent=1) + "\n")
            new.replace(self.path)


def _call(key: str) -> tuple[str, int]:
    call, number = key.split()
    return call, int(number)


def enumerate_points(
    workspace: Path, victims: Sequence[str], most: int | None, kept: Kept | None = None, policy: str = ROUNDS
) -> Iterator[Result]:
    """Strike at every point that was not tried, or at `most` of each victim that are spread evenly over all of them."""
    kept, points = kept or Kept(None), []
    for who in victims:
        found = kept.points(workspace, who, policy)
        print(f"{len(found)} points of the {who}", file=sys.stderr)
        if most is not None and most < len(found):
            found = [found[i * len(found) // most] for i in range(most)]
        points += found
    random.Random(1).shuffle(points)  # so that the beginning of a long run is spread over all
    # What only opens a file leaves the same disk as what comes next.
    for point in sorted(points, key=lambda point: point.call == "openat"):
        if not kept.tried(point):
            result = strike(workspace, point)
            kept.take(result)
            yield result


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--most", type=int, default=10)
    parser.add_argument("--only", choices=("controller", "learner"))
    parser.add_argument("--keep", type=Path, help="a JSON file with what came out; its points are not tried again")
    parser.add_argument("--windows", action="store_true", help="masked windows of fedrec instead of masked rounds")
    options = parser.parse_args(arguments)
    if problem := strace_problem():
        print(f"nothing was tried: {problem}")
        return 2
    results, victims = [], [options.only] if options.only else ["controller", "learner"]
    with tempfile.TemporaryDirectory() as name:
        most = None if options.all else options.most
        policy = WINDOWS if options.windows else ROUNDS
        for result in enumerate_points(Path(name), victims, most, Kept(options.keep), policy):
            results.append(result)
            about = {"struck": result.struck, "acknowledged": result.acknowledged, "problem": result.problem}
            line = {"point": str(result.point), **about}
            print(json.dumps(line), flush=True)
    for who in victims:
        found = [result for result in results if result.point is not None and result.point.who == who]
        struck, failed = sum(result.struck for result in found), sum(bool(result.problem) for result in found)
        print(f"{who}: {len(found)} points, {struck} kills, {failed} failed")
    return int(any(result.problem for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
