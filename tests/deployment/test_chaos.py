"""The quick rows of the fault matrix on real processes, and the runner that prints all of them (`make chaos`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from deployment.chaos import administration, clocks, disks, kills, mistakes, run, stops, wires
from deployment.chaos.counted import rows_of
from deployment.chaos.harness import Outcome, Tally

# What `make chaos` must have; 21, 36 and 37 are tried elsewhere or later.
MATRIX = {*range(1, 21), *range(22, 36), *range(38, 49)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "times"),
    [
        (kills.row_01, 3),  # each protocol once
        (stops.row_18, 1),
        (clocks.row_22, 1),
        (disks.row_26, 1),
        (stops.row_39, 1),
        (mistakes.row_40, 1),
        (administration.row_44, 1),
        (administration.row_45, 1),
    ],
)
def test_a_row_of_the_fault_matrix(row: Callable[[Path, int], Outcome], times: int, tmp_path: Path) -> None:
    """As `make chaos` tries it, but less often."""
    outcome = row(tmp_path, times)
    if outcome.verdict == "not run":
        pytest.skip(outcome.seen)
    assert outcome.ok, outcome.seen
    assert outcome.tried > 0


def test_every_row_is_there() -> None:
    """Each with its fault in words; and every row of the wire has tests that say so."""
    assert {int(row.name.rstrip("ab")) for row in run.ROWS} == MATRIX
    assert len({row.name for row in run.ROWS}) == len(run.ROWS)
    assert all(row.fault for row in run.ROWS)
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    named = set().union(*(rows_of(line.strip().strip('"')) for line in tests.splitlines() if "C1 row" in line))
    assert set(wires.WIRE) <= named


def test_rows_of_a_test_are_read_from_its_docstring() -> None:
    """One, several, none."""
    assert rows_of("C1 row 9: a clean end") == {9}
    assert rows_of("C1 rows 4 and 9: the connection is cut") == {4, 9}
    assert rows_of("Measured while the connection was down.") == set()
    assert rows_of(None) == set()


@pytest.mark.slow
def test_tests_of_a_row_are_run_and_counted(tmp_path: Path) -> None:
    """In a process of their own: those of this row only."""
    tally = Tally()
    assert wires.try_tests(tally, 7, tmp_path, 1) == 1
    assert (tally.tried, tally.problems) == (20, [])


# --- the runner ---------------------------------------------------------------------------------------


def _good(tmp: Path, times: int) -> Outcome:
    """a fault that is survived"""
    tally = Tally()
    tally.tried = times
    return tally.outcome("nothing", "nothing")


def _bad(tmp: Path, times: int) -> Outcome:
    """a fault that is not"""
    tally = Tally()
    tally.tried = times
    tally.check(False, "an update was lost")
    tally.check(False, "another one")
    return tally.outcome("nothing", "some")


def _impossible(tmp: Path, times: int) -> Outcome:
    """a fault for another machine"""
    return Outcome.not_tried("nothing", "there is no such disk")


def _hopeless(tmp: Path, times: int) -> Outcome:
    """a fault that ends its own row"""
    raise AssertionError("it did\nnot start")


def _interrupted(tmp: Path, times: int) -> Outcome:
    """somebody has seen enough"""
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("not reached")


def _run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    rows: list[run.Row],
    *words: str,
) -> tuple[int, list[str], str]:
    monkeypatch.setattr(run, "ROWS", rows)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = run.main(words)
    printed = capsys.readouterr()
    return code, printed.out.splitlines(), printed.err


def test_the_table_has_a_line_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What cannot be tried here says so and is not wrong; folders of what went well are gone."""
    rows = [run.Row("1", _good, 5), run.Row("12", _impossible, 1)]
    code, lines, progress = _run(monkeypatch, capsys, tmp_path, rows)
    assert code == 0
    assert " ".join(lines[1].split()) == "1 a fault that is survived 5 nothing nothing ok"
    assert lines[2].endswith("0  nothing   not tried: there is no such disk  not run")
    assert lines[-1].startswith("1 ok, 0 wrong, 1 not run, in ")
    assert "row 12: not run after 0 s (2 of 2)" in progress
    assert not list(tmp_path.iterdir())


def test_what_is_wrong_is_told_and_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Exit code 1, also for a row that does not come to its end; what it left behind stays to be looked at."""
    rows = [run.Row("1", _bad, 5), run.Row("2", _hopeless, 1), run.Row("3", _good, 1)]
    code, lines, progress = _run(monkeypatch, capsys, tmp_path, rows, "--times", "2")
    assert code == 1
    assert "2  nothing" in lines[1] and lines[1].endswith("some; WRONG: an update was lost (and 1 more)  WRONG")
    assert "AssertionError: it did not start" in lines[2] and lines[2].endswith("WRONG")
    assert lines[3].endswith("ok")
    assert lines[-1].startswith("1 ok, 2 wrong, 0 not run, in ")
    assert all(str(path) in progress for path in tmp_path.iterdir()) and len(list(tmp_path.iterdir())) == 2


def test_rows_can_be_chosen_listed_and_written_as_markdown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In the order of the matrix; a row that there is not is named."""
    rows = [run.Row("1", _bad, 5), run.Row("2", _good, 1)]
    code, lines, _ = _run(monkeypatch, capsys, tmp_path, rows, "2", "--markdown")
    assert (code, lines[2]) == (0, "| 2 | a fault that is survived | 1 | nothing | nothing | ok |")
    code, lines, _ = _run(monkeypatch, capsys, tmp_path, rows, "--list")
    assert (code, lines) == (0, ["  1     5 times  a fault that is not", "  2     1 times  a fault that is survived"])
    for words, problem in ((["7"], "there is no row 7; there are 1, 2"), (["--times", "0"], "--times is 0")):
        with pytest.raises(SystemExit, match="2"):
            run.main(words)
        assert problem in capsys.readouterr().err


def test_an_interrupted_run_tells_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ctrl-C ends it, not what was found out."""
    rows = [run.Row("1", _good, 5), run.Row("2", _interrupted, 1)]
    code, lines, _ = _run(monkeypatch, capsys, tmp_path, rows)
    assert code == 130
    assert lines[1].endswith("ok") and lines[-1].startswith("1 ok, 0 wrong")
    assert not list(tmp_path.iterdir())
