"""The controller is killed: at random moments, at chosen system calls, and by a disk that fails."""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from deployment.chaos.harness import (
    POLICIES,
    Crowd,
    Federation,
    Outcome,
    Process,
    Tally,
    percentile,
    recompute,
)
from deployment.crash_points import enumerate_crash_points, strace_problem
from deployment.power_loss import enumerate_power_losses
from metis.deployment.controller.disk import EXIT_DISK_FAILED

# Where a running controller is struck, and how deep: receiving, committing, mixing, publishing, taking snapshots,
# collecting and answering all come within this many calls.
CALLS = {
    "pwrite64": 24, "fsync": 12, "write": 16, "rename": 8, "fdatasync": 6, "sendmsg": 16, "openat": 12, "unlink": 6,
    "recvmsg": 12, "pread64": 12, "lseek": 4,
}  # fmt: skip
NUMBERS = 300_000  # of a model: two chunks on the wire


def points() -> list[tuple[str, int]]:
    """All calls and depths, the kinds mixed, so that any beginning of the list has some of each."""
    columns = [[(call, when) for when in range(1, deepest + 1)] for call, deepest in CALLS.items()]
    return [point for row in zip_longest(*columns) for point in row if point is not None]


@contextlib.contextmanager
def struck(process: Process, call: str, when: int, fault: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A fault at the n-th call of some thread of the running process, counted from now."""
    tracer = subprocess.Popen(
        ["strace", "-f", "-p", str(process.pid), "-o", str(log), "-e", f"trace={call}",
         "-e", f"inject={call}:{fault}:when={when}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert tracer.stderr is not None
        tracer.stderr.readline()  # "Process N attached"
        yield tracer
    finally:
        tracer.terminate()
        tracer.communicate()


def strike(process: Process, call: str, when: int, fault: str, log: Path, idle_timeout: float = 6.0) -> bool:
    """Whether the process ended by it; some calls never come so often."""
    with struck(process, call, when, fault, log):
        end = time.monotonic() + idle_timeout
        while process.code is None and time.monotonic() < end:
            time.sleep(0.01)
    return process.code is not None


def row_01(tmp: Path, times: int) -> Outcome:
    """controller: kill -9, at random and at chosen system calls"""
    tally, chance = Tally(), random.Random(1)
    starts: list[float] = []
    at_calls = updates = versions = counted = late = 0
    traced = strace_problem() is None
    spread = points()
    share = -(-times // len(POLICIES))
    for index, policy in enumerate(POLICIES):
        chosen = [spread[(i * len(POLICIES) + index) % len(spread)] for i in range(share)]
        with Federation(tmp / policy, policy=policy, numbers=NUMBERS) as federation, Crowd(federation) as crowd:
            for number, (call, when) in enumerate(chosen):
                tally.tried += 1
                if number % 10 == 9:  # while it starts and recovers
                    controller = federation.start(listening=False)
                    time.sleep(chance.uniform(0.0, 1.5))
                elif traced and number % 2 == 0:
                    controller = federation.start()
                    at_calls += strike(controller, call, when, "signal=SIGKILL", tmp / "strace")
                else:
                    controller = federation.start()
                    time.sleep(chance.uniform(0.0, 1.0))
                tally.check(controller.code in (None, -9), f"the controller ended with {controller.code} by itself")
                tally.check("Traceback" not in controller.text(), f"a traceback: {controller.text()[-500:]}")
                controller.kill()
            federation.finish()
            crowd.join()
            truth = recompute(federation, crowd)
            tally.problems += [f"{policy}: {problem}" for problem in truth.problems]
            tally.check(truth.versions > 0, f"{policy}: nothing was published")
            tally.check(all(learner.final for learner in crowd.learners), f"{policy}: a learner has no final model")
            starts += federation.starts
            updates += crowd.acknowledged
            counted += truth.counted
            late += truth.late
            versions += truth.versions
    return tally.outcome(
        "0 acknowledged updates lost or counted twice; every model bit for bit as never killed",
        f"{tally.tried} kills ({at_calls} at a call), {updates} acknowledged, {counted} counted once and {late} late, "
        f"{versions} models equal, start to serving p50 {percentile(starts, 0.5):.1f} s, "
        f"p99 {percentile(starts, 0.99):.1f} s",
    )


def crash_points(tmp: Path, times: int) -> Outcome:
    """state folder: SIGKILL, EIO or ENOSPC at every system call that touches it"""
    expected = "0 acknowledged updates lost, 0 failed recoveries"
    if problem := strace_problem():
        return Outcome.not_tried(expected, problem)
    tally, lost, failed, ended, acknowledged = Tally(), 0, 0, 0, 0
    for result in enumerate_crash_points(tmp, 10 * times):
        tally.tried += 1
        lost, failed = lost + result.lost, failed + bool(result.problem)
        ended, acknowledged = ended + result.ended, acknowledged + result.acknowledged
        tally.check(not (result.lost or result.problem), str(result))
    return tally.outcome(
        expected,
        f"{tally.tried} injections, {ended} ended the process, {acknowledged} acknowledged, {lost} lost, "
        f"{failed} failed recoveries",
    )


def power_losses(tmp: Path, times: int) -> Outcome:
    """state folder: power is lost, of what was not synced any part is on the disk"""
    expected = "0 acknowledged updates lost, 0 failed recoveries"
    if problem := strace_problem():
        return Outcome.not_tried(expected, problem)
    tally, lost, failed, acknowledged = Tally(), 0, 0, 0
    for result in enumerate_power_losses(tmp, every=max(1, 40 // times)):
        tally.tried += 1
        lost, failed = lost + result.lost, failed + bool(result.problem)
        acknowledged += result.acknowledged
        tally.check(not (result.lost or result.problem), str(result))
    return tally.outcome(
        expected, f"{tally.tried} losses, {acknowledged} acknowledged, {lost} lost, {failed} failed recoveries"
    )


def row_24(tmp: Path, times: int) -> Outcome:
    """controller: fsync, write or commit fails with EIO"""
    expected = f"ends on purpose with {EXIT_DISK_FAILED} and one sentence, the restart recovers, 0 acknowledged lost"
    if problem := strace_problem():
        return Outcome.not_tried(expected, problem)
    tally, ended = Tally(), 0
    calls = [("fsync", 1), ("pwrite64", 1), ("fdatasync", 1), ("fsync", 3), ("pwrite64", 4), ("rename", 1),
             ("fdatasync", 2), ("fsync", 5), ("pwrite64", 9), ("unlink", 1), ("rename", 3), ("fsync", 8)]  # fmt: skip
    with Federation(tmp / "eio", numbers=NUMBERS) as federation, Crowd(federation) as crowd:
        for number in range(times):
            call, when = calls[number % len(calls)]
            controller = federation.start()
            tally.tried += 1
            if strike(controller, call, when, "error=EIO", tmp / "strace"):
                ended += 1
                code, text = controller.code, controller.text()
                tally.check(code == EXIT_DISK_FAILED, f"{call} {when}: exit code {code}: {text[-300:]}")
                tally.check("Traceback" not in text, f"{call} {when}: a traceback")
                sentences = [line for line in controller.printed() if "restart with the same command" in line]
                tally.check(len(sentences) == 1, f"{call} {when}: not one sentence: {text[-300:]}")
            else:
                controller.kill()
        federation.finish()
        crowd.join()
        truth = recompute(federation, crowd)
        tally.problems += truth.problems
        tally.check(ended >= tally.tried / 2, f"only {ended} of {tally.tried} faults were met")
    return tally.outcome(expected, f"{ended} ended so, {crowd.acknowledged} acknowledged, 0 lost, models equal")
