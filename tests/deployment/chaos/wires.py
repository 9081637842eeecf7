"""What goes wrong on the wire: rows whose faults are tried by the tests of the suite, run here and counted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from deployment.chaos.harness import HERE, SOURCE, Outcome, Tally

TESTS = HERE.parents[1]
FUZZER = HERE.parent / "fuzz_service.py"
# Number, fault, expected, and what one try is called.
WIRE = {
    2: (
        "controller: kill -9 between commit and receipt",
        "the learner sends again and hears ALREADY; counted once, same final model as unharmed",
        "kills",
    ),
    3: (
        "controller: kill -9 while it opens the sum of a masked round",
        "the same learners are in the sum; no member answers for two; the same bits",
        "kills",
    ),
    4: (
        "learner: kill -9, cancelled or cut in the middle of an upload",
        "what came of it is gone, nothing is mixed; the next whole upload counts",
        "uploads broken off",
    ),
    6: ("an update sent 100 times at once, and after a restart", "one effect, the same receipt for all", "sendings"),
    7: ("the same task with other bytes", "ALREADY_EXISTS, the first stays, the operator is warned", "sendings"),
    8: (
        "updates after their round or task; chunks out of order",
        "asked to rebase, nothing changes; OUT_OF_RANGE names the byte expected",
        "sendings",
    ),
    9: ("uploads end early and cleanly, at every sixteenth", "0 accepted without the end message", "ends"),
    10: ("bits flip in transit and on the disk", "found by the hash, named; quarantine; no start from it", "flips"),
    11: (
        "NaN, Inf, 1e30 and all zeros in an update",
        "refused naming tensor and count, the community model keeps every bit; set aside in the end",
        "updates",
    ),
    12: ("models of wrong size, shape, type, name, order", "refused from header or layout", "misfits"),
    13: (
        "10 GB announced or streamed, a million chunks, sizes that overflow",
        "refused with the first that does not fit, memory does not grow",
        "uploads",
    ),
    14: (
        "malformed, unknown and mutated messages, noise on the port",
        "every call is answered; no crash, no hang, no exception escapes; an honest learner goes on",
        "calls",
    ),
    28: (
        "stolen identity",
        "the older of two is sent away; another's task: PERMISSION_DENIED",
        "attempts",
    ),
    29: ("messages of an earlier round, start or run again", "no second effect", "replays"),
    31: (
        "a learner lies about examples, steps, seconds, metrics, and sends poison",
        "what cannot be is refused, the rest bounded by what was seen; rounds go on",
        "lies",
    ),
    32: (
        "a fifth of the sites poisons the model: sign flip, x 100",
        "every robust rule stops x 100; those that compare directions also sign flips",
        "attacks",
    ),
    41: (
        "uploads and downloads cut at every eighth, over restarts of both ends",
        "each goes on where it was; bytes sent below 1.6 times the model and a stretch a cut",
        "transfers",
    ),
    42: (
        "an HTTP proxy with a password, which alone knows the controller's name",
        "preflight and learner go through it by CONNECT",
        "ways through",
    ),
    43: (
        "the federation is rolled back to an earlier community model while learners train",
        "its bits under a new number; open tasks are void; what is not kept is refused with the list of what is",
        "rollbacks",
    ),
}


_FILES = [*sorted(HERE.parent.glob("test_faults_*.py")), HERE.parent / "test_resumed.py", HERE.parent / "test_route.py"]


def try_tests(tally: Tally, number: int, tmp: Path, times: int) -> int:
    """Run the tests of this row so often; returns how many passed."""
    passed = 0
    for _ in range(times):
        out = tmp / "counted.json"
        out.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "deployment.chaos.counted"]
        done = subprocess.run(
            [*command, "--basetemp", str(tmp / "pytest"), *map(str, _FILES)],
            cwd=TESTS.parent, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{TESTS}", "CHAOS_ROW": str(number),
                 "CHAOS_OUT": str(out), "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        if not out.exists():
            tally.problems.append(f"the tests did not run: {(done.stdout + done.stderr)[-500:]}")
            break
        found = json.loads(out.read_text())
        tally.tried += found["tried"]
        tally.problems += found["problems"]
        tally.check(found["passed"] or found["problems"], "no test says that it is of this row")
        passed += found["passed"]
    return passed


def row_of(number: int) -> Callable[[Path, int], Outcome]:
    """The function of a row that the tests try."""
    fault, expected, name = WIRE[number]

    def row(tmp: Path, times: int) -> Outcome:
        tally = Tally()
        passed = try_tests(tally, number, tmp, times)
        return tally.outcome(expected, f"{tally.tried} {name}, all as expected (tests passed: {passed})")

    row.__doc__ = fault
    return row


def row_14(tmp: Path, times: int) -> Outcome:
    tally = Tally()
    passed = try_tests(tally, 14, tmp, 1)
    seconds = 6 * times
    done = subprocess.run(
        [sys.executable, str(FUZZER), "--seconds", str(seconds), "--workers", "4"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{TESTS}", "TMPDIR": str(tmp)},
    )  # fmt: skip
    fuzzed = re.match(r"(\d+) executions", done.stdout)
    found = re.search(r"(\d+) crashes, (\d+) hangs", done.stdout)
    tally.check(done.returncode == 0 and found, f"the fuzzer: {(done.stdout + done.stderr)[-400:]}")
    tally.tried += int(fuzzed[1]) if fuzzed else 0
    return tally.outcome(
        WIRE[14][1],
        f"{tally.tried} calls, {seconds} s of fuzzing, {found[1] if found else '?'} crashes, "
        f"{found[2] if found else '?'} hangs (tests passed: {passed})",
    )


row_14.__doc__ = WIRE[14][0]
