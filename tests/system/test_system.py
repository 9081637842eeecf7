"""The deployed code under one seed: no seed violates what is promised, and the same seed gives the same history."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from system.bugs import BUGS
from system.tables import FOUND, PAGE, filled

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


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_what_was_once_found_is_found_without_its_fix(path: Path) -> None:
    """The planted bug that a case names takes the fix away; then the same faults show it again."""
    bug = json.loads(path.read_text(encoding="utf-8")).get("bug")
    if bug is None:
        pytest.skip("its fix is more than one guard")
    done = _run("--case", str(path), "--bug", bug)

    assert done.returncode == 1 and "VIOLATED" in done.stdout, done.stdout + done.stderr


def test_no_seed_violates_what_is_promised_and_all_are_the_same_again() -> None:
    """A few of the seeds that `make simulate-system` plays by the thousand; in other processes too."""
    done = _run("--seeds", "0:40", "--jobs", "1")
    again = _run("--seeds", "0:40", "--jobs", "2", hash_seed="random")

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rpartition("digest")[2] == again.stdout.rpartition("digest")[2] != ""


def _history(*more: str, hash_seed: str = "0") -> str:
    """The last line about seed 3, which has every kind of event; with the digest of all of them."""
    lines = _run("--seed", "3", *more, hash_seed=hash_seed).stdout.splitlines()
    (found,) = (line for line in lines if line.startswith("seed 3:"))
    assert "digest" in found
    return found


@pytest.fixture(scope="module")
def history() -> str:
    return _history()


def test_the_same_seed_gives_the_same_history_in_another_process(history: str) -> None:
    """Nothing depends on addresses, process ids, dates, or the names of temporary folders."""
    assert _history() == history


@pytest.mark.parametrize("hash_seed", ["1", "2", "random"])
def test_the_same_seed_gives_the_same_history_with_other_hashes(history: str, hash_seed: str) -> None:
    """Nothing depends on the order of a set of strings."""
    assert _history(hash_seed=hash_seed) == history


def test_a_trace_changes_nothing(history: str) -> None:
    """What is shown is also what happens when nobody looks."""
    assert _history("--trace") == history


def test_a_planted_bug_is_found() -> None:
    """The whole list is for `make simulate-nightly`; here, that the machinery finds one."""
    done = _run("--bug", "the epoch does not grow", "--most", "200", "--jobs", "1")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 found" in done.stdout


@pytest.mark.parametrize("name", BUGS)
def test_every_planted_bug_still_has_its_place(name: str) -> None:
    """The text that it changes stands once in its module, and what becomes of it is still Python."""
    for bug in BUGS[name].parts:
        for before, _ in bug.changes:
            assert bug.path.read_text(encoding="utf-8").count(before) == 1
        compile(bug.planted, str(bug.path), "exec")


def test_every_planted_bug_has_a_result() -> None:
    """`run.py --bug all --results tests/system/bugs-found.json` writes it: found or not, and within how many seeds."""
    found = json.loads(FOUND.read_text("utf-8"))

    assert not BUGS.keys() - found.keys(), "hunt these"
    assert all(result["seeds"] > 0 for result in found.values())


def test_the_tables_of_the_page_are_those_of_the_results() -> None:
    """`python tests/system/tables.py` writes them."""
    page = PAGE.read_text("utf-8")

    assert filled(page) == page


def test_a_violation_is_shown_and_drawn(tmp_path: Path) -> None:
    """One seed: its last line, its trace and its picture."""
    done = _run("--seed", "2", "--trace", "--picture", str(tmp_path / "seed.svg"))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "says      ready" in done.stdout and "digest" in done.stdout.splitlines()[-1]
    assert (tmp_path / "seed.svg").read_text().count("controller")
