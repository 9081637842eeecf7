"""Log files of the controller and the learner."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from metis.cli import log
from metis.cli.app import app
from metis.cli.log import Format, Level, logged


def lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()


def test_lines_with_utc_and_level(tmp_path: Path) -> None:
    """One line for each report, whatever is in it; only its owner reads the file."""
    path = tmp_path / "logs" / "metis.log"
    with logged(path, Level.INFO, Format.TEXT) as report:
        report("round", "community model 1")
        report("warning", "two\nlines \x1b[31m")
    first, second = lines(path)
    assert first[23] == "Z" and first[24:] == " info    community model 1"
    assert second[24:] == " warning two\N{REPLACEMENT CHARACTER}lines \N{REPLACEMENT CHARACTER}[31m"
    assert path.stat().st_mode & 0o777 == 0o600


def test_json_lines(tmp_path: Path) -> None:
    """Also what libraries log; a report cannot forge a line."""
    path = tmp_path / "metis.log"
    with logged(path, Level.WARNING, Format.JSON) as report:
        report("round", "below the level")
        report("refused", "a\nb \N{LATIN SMALL LETTER E WITH ACUTE}")
        logging.getLogger("some.library").warning("odd: %d", 3)
    first, second = (json.loads(line) for line in lines(path))
    assert (first["level"], first["kind"], first["text"]) == (
        "warning",
        "refused",
        "a\nb \N{LATIN SMALL LETTER E WITH ACUTE}",
    )
    assert first["at"].endswith("Z") and (second["kind"], second["text"]) == ("some.library", "odd: 3")
    for logger in (logging.getLogger(), logging.getLogger("metis.report")):
        assert not any(isinstance(handler, log.LogFile) for handler in logger.handlers)


def test_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file does not grow beyond its size, and only so many are kept, each private."""
    monkeypatch.setattr(log, "_BYTES", 2000)
    path = tmp_path / "metis.log"
    with logged(path, Level.INFO, Format.TEXT) as report:
        for number in range(300):
            report("info", f"line {number}")
    found = sorted(tmp_path.iterdir())
    assert [file.name for file in found] == ["metis.log", *(f"metis.log.{number}" for number in range(1, 6))]
    assert all(file.stat().st_size <= 2000 and file.stat().st_mode & 0o777 == 0o600 for file in found)
    assert lines(path)[-1].endswith("line 299")


def test_a_file_that_was_moved_away_is_opened_again(tmp_path: Path) -> None:
    """As logrotate does it."""
    path = tmp_path / "metis.log"
    with logged(path, Level.INFO, Format.TEXT) as report:
        report("info", "before")
        path.rename(tmp_path / "old")
        report("info", "after")
    assert lines(tmp_path / "old")[0].endswith("before") and lines(path)[0].endswith("after")


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal says it, once."""
    path = Path("/dev/full")
    if not path.exists():
        pytest.skip("there is no /dev/full here")
    link = tmp_path / "metis.log"
    link.symlink_to(path)
    with logged(link, Level.INFO, Format.TEXT) as report:
        report("info", "one")
        report("info", "two")
    assert capsys.readouterr().err.count("cannot be written: [Errno 28] No space left on device") == 1


def test_the_error_that_ends_a_command_is_in_the_log(tmp_path: Path) -> None:
    """So that a service that does not start says why where it is looked for."""
    path = tmp_path / "metis.log"
    command = ["learner", "--controller", "127.0.0.1:1", "--log-file", str(path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "error   a learner needs its certificate" in lines(path)[0]
    done = CliRunner().invoke(app, [*command[:-1], "/proc/no/such"])
    assert done.exit_code == 2 and "the log file /proc/no/such cannot be written" in done.output
