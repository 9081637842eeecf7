"""Real learners, `metis learner`, are killed, stopped and starved, and their training fails in every way."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from deployment.chaos.harness import (
    Federation,
    Outcome,
    Process,
    Tally,
    events,
    fill,
    percentile,
    small_disk,
    until,
)

QUICK_LEASE = "lease = 4\nheartbeat = 0.5\n"


def row_05(tmp: Path, times: int) -> Outcome:
    """learner: kill -9 in the middle of its training"""
    tally = Tally()
    back: list[float] = []
    with Federation(tmp, ("a", "b"), policy="semi-synchronous", deployment="lease = 12\nheartbeat = 0.5\n") as here:
        here.start()
        with here.learner("a", "--pace", 0.05), contextlib.ExitStack() as later:
            victim = later.enter_context(here.learner("b", "--pace", 0.05))
            here.advance(3)  # beyond the cold start: rounds have deadlines
            for number in range(times):
                tally.tried += 1
                _in_training(here, "b", victim)
                victim.kill()
                task, gone = _task_of(here, "b"), time.monotonic()
                here.advance(2)  # rounds close at their deadlines without it, long before its lease ends
                waited = time.monotonic() - gone
                tally.check(waited < 12 or number, f"the rounds waited {waited:.0f} s for it")
                if number % 2:  # its lease ends: it has left, and joins again
                    until(lambda: "b" not in _present(here), "its lease ends", 40)
                    here.advance(1)
                victim = later.enter_context(here.learner("b", "--pace", 0.05))
                victim.wait_for("task ", 1)
                back.append(time.monotonic() - victim.started)
                if number % 2 == 0:
                    again = any(line.startswith(f"task {task}:") for line in victim.printed("task"))
                    late = _task_of(here, "b") != task
                    tally.check(again or late, f"it did not get task {task} again")
                victim.wait_for("handed in")
            left = len(events(here, "learner_left", "b"))
            tally.check(left == times // 2, f"it left {left} times, expected {times // 2}")
        tally.check(not events(here, "learner_left", "a"), "the other learner was declared dead")
    return tally.outcome(
        "rounds close at their deadlines without it; restarted it gets its task again, after its lease it joins again",
        f"{tally.tried} kills, back at work {percentile(back, 0.5):.1f} s after its start (torch included)",
    )


def row_17(tmp: Path, times: int) -> Outcome:
    """learner: SIGSTOP for a while, and for longer than its lease, then SIGCONT"""
    tally = Tally()
    rejoin: list[float] = []
    with Federation(tmp, ("a", "b"), policy="semi-synchronous", deployment=QUICK_LEASE) as here:
        here.start()
        with here.learner("a", "--pace", 0.05), here.learner("b", "--pace", 0.05) as victim:
            here.advance(2)
            for _ in range(times):
                tally.tried += 2
                joined, left = (len(events(here, kind, "b")) for kind in ("learner_joined", "learner_left"))
                _pause(victim, 2.0)
                here.advance(2)
                tally.check(len(events(here, "learner_left", "b")) == left, "2 s of silence cost it its lease of 4 s")
                victim.signal(signal.SIGSTOP)
                until(lambda: len(events(here, "learner_left", "b")) > left, "its lease ends")  # noqa: B023
                here.advance(1)
                time.sleep(2)
                victim.signal(signal.SIGCONT)
                began = time.monotonic()
                until(lambda: len(events(here, "learner_joined", "b")) > joined, "it joins again")  # noqa: B023
                rejoin.append(time.monotonic() - began)
                before = len(events(here, "update_committed", "b"))
                until(lambda: len(events(here, "update_committed", "b")) > before, "its updates count")  # noqa: B023
            tally.check(victim.code is None, f"it ended with {victim.code}")
            tally.check(not events(here, "learner_left", "a"), "the other learner was declared dead")
    return tally.outcome(
        "a short stop is not noticed; after a long one it joins again by itself",
        f"short ones unseen; after the lease back {max(rejoin, default=0):.1f} s after SIGCONT at the latest",
    )


def row_34(tmp: Path, times: int) -> Outcome:
    """learner: training holds the interpreter's lock in C for longer than the lease"""
    tally = Tally()
    # PyDLL keeps the lock while it calls: no thread of this process runs meanwhile.
    site = """
import ctypes
_libc, _calls = ctypes.PyDLL(None), [0]
def augment(inputs, generator):
    _calls[0] += 1
    if _calls[0] % 3 == 2:
        _libc.sleep(7)
    return inputs
"""
    with Federation(tmp, ("a",), site=site, deployment=QUICK_LEASE) as here:
        here.start()
        with here.learner("a") as learner:
            learner.wait_for("handed in", times, seconds=60 + 20 * times)
            tally.tried = times
            tally.check(not events(here, "learner_left"), "it was declared dead")
            tally.check(not here.warnings(), f"warnings: {here.warnings()}")
            tally.check(len(learner.printed("connected")) == 1, "it lost its connection")
    return tally.outcome(
        "heartbeats come from another process: not declared dead", f"{times} tasks of 7 s and more, lease 4 s, 0 deaths"
    )


# --- row 33 -----------------------------------------------------------------------------------------

FAILING = """
import os, resource
_calls = [0]
def augment(inputs, generator):
    _calls[0] += 1
    what = open(os.environ["CHAOS"]).read().strip()
    if what == "raise":
        raise RuntimeError("CUDA error: device-side assert triggered")
    if what == "memory":
        import numpy as np
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
        try:
            np.ones(1 << 28)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return inputs
"""


def row_33(tmp: Path, times: int) -> Outcome:
    """learner: out of memory, an exception in the site's code, its training process killed, its disk full"""
    tally = Tally()
    order = tmp / "what"
    order.write_text("nothing")
    with Federation(tmp / "f", ("a", "b"), policy="asynchronous", site=FAILING) as here:
        here.start()
        with here.learner("b", "--pace", 0.05, CHAOS=str(order)) as other:
            for _ in range(times):
                with here.learner("a", "--pace", 0.05, CHAOS=str(_file(tmp / "mine", "nothing"))) as learner:
                    learner.wait_for("handed in", 2)
                    _fails_and_recovers(tally, here, learner, tmp / "mine", "memory", "out of memory", "out of memory")
                    _fails_and_recovers(tally, here, learner, tmp / "mine", "raise", "site.py:", "raised an")
                    tally.tried += 1
                    _kill_child(learner)
                    learner.wait_for("starting another one")
                    learner.wait_for("handed in", len(learner.printed("handed_in")) + 1)
                    tally.check(learner.code is None, "the learner did not survive the death of its child")
                    _is_set_aside(tally, here, learner, tmp / "mine")
                _dies_again_and_again(tally, here, tmp / "mine")
                _with_a_full_disk(tally, here, tmp / "mine", tmp / "disk")
            tally.check(other.code is None and not events(here, "learner_left", "b"), "the other learner was affected")
            here.advance(3)
    return tally.outcome(
        "reported in a sentence, tried a bounded number of times, learner and others go on",
        f"{tally.tried} faults reported at both ends; 3 failures in a row set it aside, 3 deaths end it",
    )


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _fails_and_recovers(
    tally: Tally, here: Federation, learner: Process, order: Path, what: str, words: str, journaled: str
) -> None:
    """Fewer failures than are allowed, then it works again; what the site prints is not what the controller hears."""
    tally.tried += 1
    failed = len(learner.printed("failed"))
    order.write_text(what)
    until(lambda: len(learner.printed("failed")) > failed, f"{what} is reported")
    order.write_text("nothing")
    tally.check(words in learner.printed("failed")[failed], f"{what}: it says {learner.printed('failed')[failed]!r}")
    handed = len(learner.printed("handed_in"))
    until(lambda: len(learner.printed("handed_in")) > handed, "it hands in again")
    until(
        lambda: any(journaled in event["reason"] for event in events(here, "task_failed", "a")),
        "it is reported",
    )


def _is_set_aside(tally: Tally, here: Federation, learner: Process, order: Path) -> None:
    """A training that fails every time is not tried for ever."""
    tally.tried += 1
    before = len(events(here, "learner_set_aside", "a"))
    failed = len(events(here, "task_failed", "a"))
    order.write_text("raise")
    until(lambda: len(events(here, "learner_set_aside", "a")) > before, "it is set aside")
    time.sleep(1)
    order.write_text("nothing")
    tries = len(events(here, "task_failed", "a")) - failed
    tally.check(tries <= 5, f"it failed {tries} times before it was set aside")
    learner.wait_for("set aside")
    tally.check(learner.code is None, f"the learner ended with {learner.code}")


def _dies_again_and_again(tally: Tally, here: Federation, order: Path) -> None:
    """A training process that dies every time ends the learner with a sentence."""
    tally.tried += 1
    with here.learner("a", "--pace", 0.5, CHAOS=str(order)) as learner:
        for number in range(3):
            learner.wait_for("task ", 1)
            until(lambda: learner.children() or learner.code is not None, "there is a training process")
            if number:
                learner.wait_for("starting another one", number)
                until(lambda: learner.children() or learner.code is not None, "there is another training process")
            _kill_child(learner)
        code = learner.wait()
        tally.check(code == 1, f"after three deaths it ended with {code}")
        tally.check(any("3 times in a row" in line for line in learner.printed("error")), learner.text()[-300:])


def _with_a_full_disk(tally: Tally, here: Federation, order: Path, disk: Path) -> None:
    """No room for the update, then room again."""
    tally.tried += 1
    with small_disk(disk, "1m") as mounted:
        if not mounted:
            tally.tried -= 1
            return
        with here.learner("a", "--pace", 0.05, "--work", disk / "work", CHAOS=str(order)) as learner:
            learner.wait_for("handed in")
            ballast = fill(disk)
            learner.wait_for("failed:")
            tally.check(
                any("No space left" in line for line in learner.printed("failed")), f"{learner.printed('failed')[:1]}"
            )
            ballast.unlink()
            handed = len(learner.printed("handed_in"))
            until(lambda: len(learner.printed("handed_in")) > handed or learner.printed("set_aside"), "it works again")
            tally.check(learner.code is None, f"a full disk ended it with {learner.code}")


# --- what they share --------------------------------------------------------------------------------


def _pause(process: Process, seconds: float) -> None:
    process.signal(signal.SIGSTOP)
    time.sleep(seconds)
    process.signal(signal.SIGCONT)


def _kill_child(learner: Process) -> None:
    for child in learner.children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _task_of(here: Federation, learner: str) -> int | None:
    """The last task that this learner was sent."""
    sent = events(here, "send_task", learner)
    return int(sent[-1]["task"]) if sent else None


def _present(here: Federation) -> set[str]:
    last = {}
    for kind in ("learner_joined", "learner_left"):
        for event in events(here, kind):
            at, _ = last.get(event["learner"], (-1.0, ""))
            if event["at"] >= at:
                last[event["learner"]] = (event["at"], kind)
    return {learner for learner, (_, kind) in last.items() if kind == "learner_joined"}


def _in_training(here: Federation, name: str, learner: Process) -> None:
    """Until it has an open task that it has not handed in."""
    until(lambda: len(learner.printed("task")) > len(learner.printed("trained")), f"'{name}' trains")
