"""Following a run from outside: files that grow, are cut or replaced, and folders with one run or several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from metis.deployment.controller.announcement import announce
from metis.reporting.dashboard import follow
from metis.reporting.dashboard.follow import Restarted, RunFolder, Tail, runs_in, setting_of, setting_version
from reporting.dashboard.pages import joined, rounds, write_run, written_setting


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def add(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


# --- a file that grows ------------------------------------------------------------------------------


def test_a_file_that_is_not_there_yet_has_no_lines(path: Path) -> None:
    tail = Tail(path)
    assert tail.read() == []

    add(path, b"one\n")
    assert tail.read() == [b"one"]


def test_half_a_line_waits_for_its_end(path: Path) -> None:
    """Whatever is cut off in writing is read when it is whole."""
    add(path, b"one\ntw")
    tail = Tail(path)
    assert tail.read() == [b"one"]
    assert tail.read() == []
    assert tail.behind == 2

    add(path, b"o\nthree\n")
    assert tail.read() == [b"two", b"three"]
    assert tail.behind == 0


@given(
    st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b" ").replace(b"\r", b" ")), max_size=20),
    st.lists(st.integers(0, 40), max_size=20),
    st.integers(1, 50),
)
def test_all_lines_come_once_however_they_are_written(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], cuts: list[int], most: int
) -> None:
    """In pieces of any size, read in pieces of any size."""
    path = tmp_path_factory.mktemp("tail") / "file"
    whole = b"".join(line + b"\n" for line in lines)
    path.write_bytes(b"")
    tail, found = Tail(path), []
    for cut in [*cuts, len(whole)]:
        add(path, whole[:cut])
        whole = whole[cut:]
        found += tail.read(most)
    while tail.behind:
        found += tail.read(most)
    assert found == [line for text in lines for line in text.splitlines() or [b""]]


def test_a_file_that_was_cut_is_read_anew(path: Path) -> None:
    """As by a run that goes on from its checkpoint."""
    add(path, b"one\ntwo\n")
    tail = Tail(path)
    tail.read()
    path.write_bytes(b"one\n")

    with pytest.raises(Restarted):
        tail.read()
    assert tail.read() == [b"one"]


def test_another_file_in_its_place_is_read_anew(path: Path) -> None:
    """As by a run that is started again with --force; even if it is longer already."""
    add(path, b"one\n")
    tail = Tail(path)
    tail.read()
    fresh = path.with_name("fresh")
    add(fresh, b"ten\neleven\n")
    fresh.replace(path)

    with pytest.raises(Restarted):
        tail.read()
    assert tail.read() == [b"ten", b"eleven"]


def test_a_file_written_anew_beyond_its_old_length_is_noticed(path: Path) -> None:
    """The same file, cut and filled between two looks: what is before the position of reading has changed."""
    add(path, b"one\ntwo\n")
    tail = Tail(path)
    tail.read()
    path.write_bytes(b"uno\ndue\ntre\n")

    with pytest.raises(Restarted):
        tail.read()
    assert tail.read() == [b"uno", b"due", b"tre"]


def test_a_file_written_anew_with_the_same_content_is_the_same(path: Path) -> None:
    """A restarted controller writes its events again; nothing has to be forgotten for that."""
    add(path, b"one\ntwo\n")
    tail = Tail(path)
    tail.read()
    path.write_bytes(b"one\ntwo\nthree\n")

    assert tail.read() == [b"three"]


def test_a_file_that_is_gone_is_told_once(path: Path) -> None:
    add(path, b"one\n")
    tail = Tail(path)
    tail.read()
    path.unlink()

    with pytest.raises(Restarted):
        tail.read()
    assert tail.read() == []


def test_a_line_without_an_end_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is not a trace at all must not fill the memory."""
    monkeypatch.setattr(follow, "_LONGEST_LINE", 1000)
    add(path, b"x" * 5000)

    with pytest.raises(ValueError, match="longer than 1000 bytes"):
        Tail(path).read(100)


# --- folders ----------------------------------------------------------------------------------------


def named(folder: Path) -> list[str]:
    return [run.name for run in runs_in(folder)]


def test_the_folder_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "first", joined())

    assert runs_in(tmp_path / "first") == [RunFolder("first", tmp_path / "first")]


def test_a_comparison_in_its_order_with_what_has_not_begun(tmp_path: Path) -> None:
    """Runs that are planned are known before they start."""
    write_run(tmp_path / "semisync", joined())
    (tmp_path / "comparison.json").write_text(json.dumps({"runs": ["sync", "semisync"]}))

    assert named(tmp_path) == ["sync", "semisync"]


def test_all_runs_below_a_folder(tmp_path: Path) -> None:
    """By name; a folder that holds none is empty, not an error."""
    assert named(tmp_path) == []
    for name in ("b", "a", "paper/small/x"):
        write_run(tmp_path / name, joined())

    assert named(tmp_path) == ["a", "b", "paper/small/x"]
    assert named(tmp_path / "nowhere") == []


@pytest.mark.parametrize("content", ["{", "[]", '{"runs": 3}', "{}"])
def test_a_comparison_that_says_nothing_is_looked_through(tmp_path: Path, content: str) -> None:
    write_run(tmp_path / "sync", joined())
    (tmp_path / "comparison.json").write_text(content)

    assert named(tmp_path) == ["sync"]


def test_the_state_folder_of_a_controller(tmp_path: Path) -> None:
    """Also before its first event, and if the folder of its run is given."""
    state = tmp_path / "state"
    state.mkdir()
    (state / "controller.db").touch()
    run = RunFolder("state", state / "run", state)
    assert runs_in(state) == [run]
    assert not run.alive

    write_run(state / "run", joined())
    assert runs_in(state) == [run]
    assert runs_in(state / "run") == [RunFolder("run", state / "run", state)]


def test_a_controller_is_alive_while_its_process_is(tmp_path: Path) -> None:
    """One that was killed leaves its announcement behind."""
    run = RunFolder("run", tmp_path / "run", tmp_path)
    announce(tmp_path, listen="127.0.0.1:1", http=None, run="r")
    assert run.alive

    program = (
        "import sys; from pathlib import Path; from metis.deployment.controller.announcement import announce\n"
        "announce(Path(sys.argv[1]), listen='127.0.0.1:1', http=None, run='r')"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, env={**os.environ})
    assert not run.alive


# --- settings ---------------------------------------------------------------------------------------


def test_the_setting_of_a_run_and_of_an_old_one(tmp_path: Path) -> None:
    """Written before the first event; a finished run that has none has it in its summary."""
    setting = written_setting()
    setting.save(tmp_path)
    assert setting_of(tmp_path) == setting

    (tmp_path / "setting.json").rename(tmp_path / "summary.json")
    assert setting_of(tmp_path) == setting


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"setting": 3}'])
def test_without_a_setting_the_folder_gives_the_name(tmp_path: Path, content: str) -> None:
    """And powers and bytes are not known."""
    (tmp_path / "setting.json").write_text(content)
    setting = setting_of(tmp_path)

    assert (setting.label, setting.learners, setting.model_bytes) == (tmp_path.name, (), 0)


def test_a_setting_that_is_written_anew_is_noticed(tmp_path: Path) -> None:
    """The summary at the end of a run is not a new setting."""
    assert setting_version(tmp_path) == (0, 0)
    write_run(tmp_path, rounds(0))
    first = setting_version(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    assert setting_version(tmp_path) == first != (0, 0)

    written_setting(label="another").save(tmp_path)
    assert setting_version(tmp_path) != first
