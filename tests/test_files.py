"""Files that are written whole or not at all, and locks between processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from metis.errors import LockHeld
from metis.files import durable_file, locked, replacing, sync, take_lock, write_durable, write_text


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    return path


def test_the_old_file_stays_until_the_new_one_is_whole(path: Path) -> None:
    with replacing(path) as new:
        new.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert names_in(path.parent) == ["file"]


@pytest.mark.parametrize("problem", [OSError("disk full"), ValueError(), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(path: Path, problem: BaseException) -> None:
    for write in (replacing, durable_file):
        with pytest.raises(type(problem)), write(path):
            raise problem
    assert path.read_bytes() == b"old"
    assert names_in(path.parent) == ["file"]


def test_a_leftover_of_a_killed_process_is_overwritten(path: Path) -> None:
    path.with_name("file.new").write_bytes(b"half of a longer text")
    write_durable(path, b"new")
    assert path.read_bytes() == b"new"
    assert names_in(path.parent) == ["file"]


def test_durable_is_content_before_name_before_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another order a loss of power could leave an empty file under the name."""
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda number: (calls.append(str(Path(f"/proc/self/fd/{number}").readlink())), fsync(number))
    )
    monkeypatch.setattr(Path, "replace", lambda *paths: (calls.append("replace"), replace(*paths)))
    write_durable(path, b"new")
    assert calls == [f"{path}.new", "replace", str(path.parent)]


def test_a_private_file_is_never_readable_by_others(path: Path) -> None:
    path.with_name("file.new").write_bytes(b"a leftover that everybody may read")
    with durable_file(path, private=True) as file:
        file.write(b"key")
        file.flush()
        assert path.with_name("file.new").stat().st_mode & 0o777 == 0o600
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == b"key"


def test_a_text_makes_its_folder(tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "b" / "page", "ä\n")
    assert (tmp_path / "a" / "b" / "page").read_bytes() == "ä\n".encode()


def test_sync_of_a_missing_file_fails(tmp_path: Path) -> None:
    sync(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "nothing")


def test_a_lock_is_held_once_and_names_its_holder(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"):
        with pytest.raises(LockHeld, match=f"process id {os.getpid()} on ") as held, locked(tmp_path / "lock"):
            pass
        assert held.value.holder.startswith(f"process id {os.getpid()} on ")
    os.close(take_lock(tmp_path / "lock"))


def test_a_lock_ends_with_its_process_and_is_waited_for(tmp_path: Path) -> None:
    program = "import sys; from metis.files import *; from pathlib import Path; take_lock(Path(sys.argv[1])); " \
        "print(1, flush=True); input()"  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        with pytest.raises(LockHeld, match=f"process id {other.pid} "):
            take_lock(tmp_path / "lock", wait=0.15)
        other.stdin.write(b"\n")
        other.stdin.close()
        os.close(take_lock(tmp_path / "lock", wait=60))


def test_a_lock_without_a_note_leaves_the_file_alone(path: Path) -> None:
    path.chmod(0o400)
    with locked(path, note=False):
        with pytest.raises(LockHeld, match="is locked by another process"):
            take_lock(path, note=False)
        assert path.read_bytes() == b"old"
