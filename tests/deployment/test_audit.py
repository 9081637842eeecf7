"""The audit log: what is in it survives, and whatever is changed in it shows."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from metis.cli.app import app
from metis.deployment.controller.audit import AUDIT, FIRST, AuditLog, line_hash, read_audit


def written(path: Path, count: int = 5) -> AuditLog:
    log = AuditLog(path)
    for number in range(count):
        log.note("admitted", learner=f"site-{number}", serial="ab12", address="10.0.0.1:5", nothing=None)
    log.close()
    return log


def problem(path: Path) -> tuple[int, str] | None:
    broken = [(line.number, line.problem) for line in read_audit(path) if line.problem is not None]
    return broken[0] if broken else None  # type: ignore[return-value]


def test_a_chain_over_several_starts(tmp_path: Path) -> None:
    """Each process continues where the last one ended."""
    path = tmp_path / AUDIT
    written(path, 3)
    log = written(path, 2)
    lines = list(read_audit(path))
    assert [line.record["n"] for line in lines] == [1, 2, 3, 4, 5] and problem(path) is None
    assert lines[0].record["previous"] == FIRST and lines[-1].hash == log.head
    assert "nothing" not in lines[0].record
    assert path.stat().st_mode & 0o077 == 0


def tamper(path: Path, how: str) -> int:
    """Change the log; returns the first line that shows it."""
    lines = path.read_bytes().splitlines(keepends=True)
    if how == "changed":
        lines[1] = lines[1].replace(b"site-1", b"site-9")
    elif how == "removed":
        del lines[1]
    elif how == "swapped":
        lines[1], lines[2] = lines[2], lines[1]
    elif how == "added":
        record = json.loads(lines[1])
        lines.insert(2, json.dumps({**record, "n": 3, "previous": line_hash(lines[1][:-1])}).encode() + b"\n")
    else:
        lines[1] = b"[]\n"
    path.write_bytes(b"".join(lines))
    return {"changed": 3, "added": 4}.get(how, 2)


@pytest.mark.parametrize("how", ["changed", "removed", "swapped", "added", "nonsense"])
def test_tampering_shows(tmp_path: Path, how: str) -> None:
    """`metis audit` names the first broken line and exits with 1."""
    path = tmp_path / AUDIT
    written(path)
    expected = tamper(path, how)
    found = problem(path)
    assert found is not None and found[0] == expected
    result = CliRunner().invoke(app, ["audit", str(tmp_path)])
    assert result.exit_code == 1 and f"line {expected} of" in result.stderr


def test_every_flipped_byte_shows(tmp_path: Path) -> None:
    """Except in the last line, which only its hash, noted elsewhere, protects."""
    path = tmp_path / AUDIT
    log = written(path, 3)
    whole = path.read_bytes()
    last = whole.rfind(b"\n", 0, -1) + 1
    for place in range(0, last, 7):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert problem(path) is not None, place
    path.write_bytes(whole[:last])  # cut off at the end: whole by itself
    assert problem(path) is None
    run = CliRunner().invoke(app, ["audit", str(path), "--head", log.head])
    assert run.exit_code == 1 and "lines were cut off or replaced" in run.stderr
    path.write_bytes(whole)
    assert CliRunner().invoke(app, ["audit", str(path), "--head", log.head]).exit_code == 0


def test_a_torn_last_line_is_cut_and_noted(tmp_path: Path) -> None:
    """A crash between writing and syncing, at every byte: the chain goes on and is whole."""
    path = tmp_path / AUDIT
    written(path, 2)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole), 11):
        path.write_bytes(whole[:length])
        written(path, 1)
        kinds = [line.record["kind"] for line in read_audit(path)]
        assert problem(path) is None
        assert kinds == ["admitted", *(["repaired"] if length > first else []), "admitted"]
        path.write_bytes(whole[:length] + bytes(20) + whole[-40:])  # a sector before others was not written
        written(path, 1)
        assert problem(path) is None
        assert [line.record["kind"] for line in read_audit(path)] == ["admitted", "repaired", "admitted"]
    path.write_bytes(b'{"n":1')
    written(path, 1)
    assert problem(path) is None


def test_a_full_disk_delays_lines_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written as soon as there is room, also after half of a write."""
    path = tmp_path / AUDIT
    log = AuditLog(path)
    real, full = os.pwrite, True

    def pwrite(file: int, data: Any, offset: int) -> int:
        if full and len(data) < 40:
            raise OSError(errno.ENOSPC, "full")
        return real(file, data[:-30] if full else data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    log.note("finished", version=1)
    asyncio.run(log.flushed())
    assert path.read_bytes() == b""
    full = False
    log.note("finished", version=2)
    log.close()
    assert problem(path) is None and [line.record["version"] for line in read_audit(path)] == [1, 2]


def test_the_same_is_noted_once(tmp_path: Path) -> None:
    """A learner that reconnects again and again does not fill the log."""
    log = AuditLog(tmp_path / AUDIT)
    for value in ("x", "x", "y", "y", "x"):
        log.note_change("admitted a", value, "admitted", learner="a", serial=value)
    log.close()
    assert [line.record["serial"] for line in read_audit(tmp_path / AUDIT)] == ["x", "y", "x"]


def test_the_command_filters_and_escapes(tmp_path: Path) -> None:
    """By name and date; a name from a certificate cannot change the terminal."""
    path = tmp_path / AUDIT
    log = AuditLog(path)
    log.note("admitted", learner="a", address="\x1b[2Jx")
    log.note("command", who="kim", command="pause", result="paused")
    log.close()
    run = CliRunner().invoke(app, ["audit", str(path), "--who", "kim", "--json"])
    document = json.loads(run.stdout)
    assert [line["command"] for line in document["lines"]] == ["pause"] and document["count"] == 2
    assert json.loads(CliRunner().invoke(app, ["audit", str(path), "--since", "2999", "--json"]).stdout)["lines"] == []
    refused = CliRunner().invoke(app, ["audit", str(path), "--since", "yesterday"])
    assert (refused.exit_code, "give a date as 2026-03-01" in refused.stderr) == (2, True)
    table = CliRunner().invoke(app, ["audit", str(path)]).stdout
    assert "\x1b[2J" not in table and "2 lines, the chain is whole" in table
    missing = CliRunner().invoke(app, ["audit", str(tmp_path / "nowhere")])
    assert missing.exit_code == 2 and "there is no audit log" in missing.stderr
