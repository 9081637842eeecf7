"""The deployed code under one seed: no seed violates what is promised, and the same seed gives the same history."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from system.bugs import BUGS

HERE = Path(__file__).parent
CASES = sorted((HERE / "cases").glob("*.json"))


def _run(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """A process of its own: what simulations leave behind in the interpreter goes with it."""
    return subprocess.run(
        [sys.executable, str(HERE / "run.py"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        check=False,
    )


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_what_was_once_found_stays_fixed(path: Path) -> None:
    """Each case is the shortest list of faults that showed it; its file says what went wrong."""
    done = _run("--case", str(path))

    assert done.returncode == 0, done.stdout + done.stderr


def test_no_seed_violates_what_is_promised() -> None:
    """A few of the seeds that `make simulate-system` plays by the thousand."""
    done = _run("--seeds", "0:60", "--jobs", "1")

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_same_seed_gives_the_same_history() -> None:
    """In another process, with another hash seed, with the trace shown or not."""
    digests = {
        line
        for hash_seed, more in (("0", ()), ("1", ()), ("2", ("--trace",)))
        for line in _run("--seed", "3", *more, hash_seed=hash_seed).stdout.splitlines()
        if line.startswith("seed 3:")
    }

    assert len(digests) == 1 and "digest" in next(iter(digests))


def test_a_planted_bug_is_found() -> None:
    """The whole list is for `make simulate-nightly`; here, that the machinery finds one."""
    done = _run("--bug", "the epoch does not grow", "--most", "200", "--jobs", "1")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 found" in done.stdout


@pytest.mark.parametrize("name", BUGS)
def test_every_planted_bug_still_has_its_place(name: str) -> None:
    """The text that it changes stands once in its module, and what becomes of it is still Python."""
    bug = BUGS[name]

    assert bug.path.read_text(encoding="utf-8").count(bug.before) == 1
    compile(bug.planted, str(bug.path), "exec")


def test_a_violation_is_shown_and_drawn(tmp_path: Path) -> None:
    """One seed: its last line, its trace and its picture."""
    done = _run("--seed", "2", "--trace", "--picture", str(tmp_path / "seed.svg"))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "says      ready" in done.stdout and "digest" in done.stdout.splitlines()[-1]
    assert (tmp_path / "seed.svg").read_text().count("controller")
