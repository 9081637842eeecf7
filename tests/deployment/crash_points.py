"""Kill a controller, or fail its disk, at every system call that touches its state folder, and look what is left.

    python tests/deployment/crash_points.py            # a subset
    python tests/deployment/crash_points.py --all      # every point; some minutes

A dry run under strace lists the calls; then one process a point runs with a SIGKILL, an I/O error or a full disk
injected there. Two cases are covered: a folder that is new, and one that an earlier process left behind when it was
killed. After each, the folder must open, hold every acknowledged update exactly once, and go on working.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from metis.deployment.controller.disk import EXIT_DISK_FAILED
from metis.deployment.controller.state import State
from metis.errors import DuplicateUpdate, MetisError

DRIVER = Path(__file__).with_name("crash_driver.py")
SOURCE = Path(__file__).parents[2] / "src"
UPDATES = 7
CALLS = (
    "openat", "write", "pwrite64", "fsync", "fdatasync", "rename", "renameat", "renameat2", "unlink", "unlinkat",
    "ftruncate", "mkdir", "mkdirat",
)  # fmt: skip
FAULTS = {"killed": "signal=SIGKILL", "EIO": "error=EIO", "ENOSPC": "error=ENOSPC"}
Story = Literal["new folder", "after a kill"]
Fault = Literal["killed", "EIO", "ENOSPC"]


@dataclass(frozen=True, slots=True)
class Point:
    """One point at which to strike."""

    story: Story
    fault: Fault
    call: str
    number: int  # of all calls of this name that the process makes


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it."""

    point: Point
    exit_code: int
    acknowledged: int
    lost: int
    problem: str = ""  # of the process itself or of the recovery; empty is good

    @property
    def ended(self) -> bool:
        """Whether the fault ended the process."""
        return self.exit_code != 0


def strace_problem() -> str | None:
    """Why nothing can be injected here; None if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    probe = subprocess.run(
        ["strace", "-f", "-e", "inject=fsync:error=EIO", "true"], capture_output=True, text=True, timeout=600
    )
    return f"strace cannot trace here: {probe.stderr.strip()}" if probe.returncode else None


def run_driver(folder: Path, *strace: str, durability: str = "power") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    # Not --seccomp-bpf, with which signals are not injected.
    command = ["strace", *strace, sys.executable, str(DRIVER), str(folder), str(UPDATES), durability]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def prepare(story: Story, folder: Path, killed: Path) -> None:
    if story == "after a kill":
        shutil.copytree(killed, folder)


def leave_behind(folder: Path, workspace: Path) -> None:
    """A folder whose controller was killed while it received: a WAL, a temporary file and a stray snapshot."""
    log = workspace / "whole"
    run_driver(folder, "-o", str(log), "-e", "trace=write")
    writes = sum(" write(" in line or line.startswith("write(") for line in log.read_text().splitlines())
    shutil.rmtree(folder)
    killed = run_driver(
        folder, "-o", str(log), "-e", "trace=write", "-e", f"inject=write:signal=SIGKILL:when={writes - 3}"
    )
    if killed.returncode != -signal.SIGKILL:
        raise RuntimeError(f"strace did not kill the driver: {killed.stderr}")
    (folder / "snapshots" / "000000000099-00000000.safetensors").write_bytes(b"half of it")


def count_calls(folder: Path, workspace: Path) -> list[tuple[str, int, bool]]:
    """Name and number of all calls since the folder was first touched, and whether the folder is what they touch."""
    log = workspace / "calls"
    done = run_driver(folder, "-y", "-o", str(log), "-e", f"trace={','.join(CALLS)}")
    if done.returncode:
        raise RuntimeError(f"the driver fails by itself: {done.stderr}")
    counts: Counter[str] = Counter()
    calls, begun = [], False
    for line in log.read_text(errors="replace").splitlines():
        found = re.match(r"(?:\d+ +)?(\w+)\(", line)
        if found is None:
            continue
        counts[found[1]] += 1
        inside = str(folder) in line
        begun = begun or inside
        if begun:
            calls.append((found[1], counts[found[1]], inside))
    return calls


def all_points(workspace: Path) -> list[Point]:
    killed = workspace / "killed"
    leave_behind(killed, workspace)
    points: list[Point] = []
    for story in ("new folder", "after a kill"):
        folder = workspace / "dry"
        prepare(story, folder, killed)
        for call, number, inside in count_calls(folder, workspace):
            points.append(Point(story, "killed", call, number))
            if inside:  # an error while the driver prints does not concern the folder
                points += [Point(story, "EIO", call, number), Point(story, "ENOSPC", call, number)]
        shutil.rmtree(folder)
    return points


def strike(point: Point, folder: Path, workspace: Path) -> Result:
    prepare(point.story, folder, workspace / "killed")
    before = []
    if point.story == "after a kill":
        with State.open(workspace / "killed-copy", "process") as state:
            before = [(e.update, e.blob) for e in state.entries() if e.update is not None]
    rule = f"inject={point.call}:{FAULTS[point.fault]}:when={point.number}"
    log = workspace / "log"
    done = run_driver(folder, "-o", str(log), "-e", f"trace={point.call}", "-e", rule)
    acknowledged = before + [
        (int(words[1]), words[2]) for words in map(str.split, done.stdout.splitlines()) if words[0] == "ACK"
    ]
    problem = ""
    if not re.search(r"\(INJECTED\)|killed by SIGKILL", log.read_text(errors="replace")):
        problem = "nothing was injected"
    elif done.returncode not in (0, 2, EXIT_DISK_FAILED, -signal.SIGKILL) or "Traceback" in done.stderr:
        problem = f"the process ended with {done.returncode}: {done.stderr[-2000:]}"
    elif done.returncode in (2, EXIT_DISK_FAILED) and len(done.stderr.splitlines()) != 1:
        problem = f"not one clear sentence: {done.stderr}"
    try:
        lost = examine(folder, acknowledged)
    except (MetisError, AssertionError) as failure:
        return Result(point, done.returncode, len(acknowledged), 0, f"{problem} not recovered: {failure!r}")
    return Result(point, done.returncode, len(acknowledged), lost, problem)


def examine(folder: Path, acknowledged: Sequence[tuple[int | None, str | None]]) -> int:
    """Open the folder as the next process would; returns how many acknowledged updates are not there as they were."""
    with State.open(folder, "process") as state:
        entries = list(state.entries())
        assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1)), "the numbering has a gap"
        updates = {entry.update: entry.blob for entry in entries if entry.update is not None}
        assert len(updates) == sum(entry.update is not None for entry in entries), "an update is there twice"
        lost = sum(updates.get(update) != blob for update, blob in acknowledged)
        published: dict[int, str] = {}
        for entry in entries:
            if "published" in entry.record:
                known = published.setdefault(entry.record["published"], entry.record["sha256"])
                assert known == entry.record["sha256"], "a version has two models"
        snapshots = state.snapshots()
        for snapshot in snapshots:
            state.load_snapshot(snapshot)
        replayed = snapshots[0].seq if snapshots else 0
        fallback = snapshots[1].seq if len(snapshots) > 1 else 0
        needed = {entry.blob for entry in entries if entry.blob and entry.seq > min(replayed, fallback)}
        needed |= {blob for snapshot in snapshots for blob in snapshot.blobs}
        lost += sum(not state.verify_blob(blob) for blob in needed)
        assert not list((folder / "quarantine").iterdir()), "a blob is damaged"
        assert not list((folder / "blobs").glob("tmp.*")), "something half received is left"
        goes_on(state)
        last = state.last_seq()
    with State.open(folder, "process") as state:
        assert state.last_seq() == last, "it does not go on"
    return lost


def goes_on(state: State) -> None:
    """Whatever a controller does with its folder still works."""
    import numpy as np

    if state.facts() is None:
        state.begin({})
    with state.incoming() as incoming:
        incoming.write(b"another model")
        blob = incoming.commit(13, hashlib.sha256(b"another model").hexdigest())
    state.append(99.0, {}, update=99, blob=blob)
    try:
        state.append(99.0, {}, update=99, blob=blob)
    except DuplicateUpdate as duplicate:
        assert duplicate.entry.blob == blob
    else:
        raise AssertionError("an update counts twice")
    state.write_snapshot(state.last_seq(), {"w": np.zeros(3)}, {}, [blob])
    state.collect([])
    assert state.verify_blob(blob)


def enumerate_crash_points(workspace: Path, most: int | None = None) -> Iterator[Result]:
    """Strike at every point, or at `most` that are spread evenly over all of them."""
    points = all_points(workspace)
    shutil.copytree(workspace / "killed", workspace / "killed-copy")
    if most is not None and most < len(points):
        points = [points[i * len(points) // most] for i in range(most)]
    for point in points:
        folder = workspace / "state"
        yield strike(point, folder, workspace)
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every point instead of 60")
    arguments = parser.parse_args()
    if problem := strace_problem():
        print(f"nothing was tried: {problem}")
        return 2
    results = []
    with tempfile.TemporaryDirectory() as name:
        for result in enumerate_crash_points(Path(name), None if arguments.all else 60):
            results.append(result)
            if result.lost or result.problem:
                print(result)
            if len(results) % 100 == 0:
                print(f"{len(results)} so far", file=sys.stderr)
    for fault in FAULTS:
        chosen = [result for result in results if result.point.fault == fault]
        print(f"{fault:7} {Counter(result.exit_code for result in chosen)}")
    lost, failed = sum(result.lost for result in results), sum(bool(result.problem) for result in results)
    print(
        f"{len(results)} injections, {sum(result.ended for result in results)} processes ended, "
        f"{sum(result.acknowledged for result in results)} updates acknowledged, {lost} lost, "
        f"{failed} failed recoveries"
    )
    return 1 if lost or failed else 0


if __name__ == "__main__":
    sys.exit(main())
