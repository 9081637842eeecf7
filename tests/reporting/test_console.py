"""A run in progress: live in a terminal, now and then a plain line elsewhere, nothing where nobody asked."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from metis.cli.output import Reporter
from metis.core.stop import StopRule
from metis.reporting import console as module
from metis.reporting.console import RunProgress, TaskProgress
from metis.runs.folds import RunFold
from metis.runs.run import Run


def shown(run: Run, *, terminal: bool, quiet: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, quiet=quiet, width=100, highlight=False, soft_wrap=True)
    fold = RunFold(run.setting)
    with RunProgress(console, "Sync [1]", StopRule(rounds=3)) as progress:
        for now, item in run.events:
            fold.record(now, item)
            progress(fold)
    return file.getvalue()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(module, "LINE_SECONDS", 0.0)


@pytest.mark.usefixtures("impatient")
def test_a_log_gets_plain_lines(written_run: Callable[..., Run]) -> None:
    """No control characters, no bar; a label in brackets is not markup."""
    lines = shown(written_run(values=[0.1, 0.2, 0.3]), terminal=False).splitlines()
    assert lines[-1] == "Sync [1]: round 3  t=9.0 s  update requests 6  accuracy 0.300"
    assert not any("\x1b" in line or "━" in line for line in lines)


def test_a_short_run_says_nothing_in_a_log(written_run: Callable[..., Run]) -> None:
    """A line comes once a minute; the result is printed at the end by others."""
    assert shown(written_run(values=[0.1]), terminal=False) == ""


@pytest.mark.usefixtures("impatient")
def test_a_terminal_gets_a_live_line_that_goes_away(written_run: Callable[..., Run]) -> None:
    """With a bar; at the end the line is erased, so that the result stands alone."""
    text = shown(written_run(values=[0.1, 0.2, 0.3]), terminal=True)
    assert "━" in text and "round 3" in text
    assert text.rstrip("\n").endswith("\x1b[2K") or "\x1b[1A\x1b[2K" in text[-40:]


@pytest.mark.usefixtures("impatient")
def test_a_quiet_console_stays_quiet(written_run: Callable[..., Run]) -> None:
    """As for --json."""
    assert shown(written_run(values=[0.1]), terminal=True, quiet=True) == ""
    assert shown(written_run(values=[0.1]), terminal=False, quiet=True) == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_learner_shows_what_it_does_in_a_terminal_only(terminal: bool) -> None:
    """One line that changes and goes at the end, below what is printed meanwhile; in a log only what is printed."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, highlight=False)
    with TaskProgress(console, "north [1]") as progress:
        progress("task 3: 5 of 10 batches", 0.5)
        console.print("printed")
    text = file.getvalue()
    assert "printed" in text
    assert ("north [1]" in text and "5 of 10 batches" in text and "━" in text) == terminal
    assert ("\x1b" in text) == terminal


@pytest.mark.parametrize(
    ("terminal", "as_json", "seen"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_changing_line_is_for_people_at_a_terminal(terminal: bool, as_json: bool, seen: bool) -> None:
    """Not for a log, and not among lines of JSON."""
    console = Console(file=io.StringIO(), force_terminal=terminal)
    live = Reporter(console, as_json, {}).live
    assert (live is console) == seen
    assert live.is_terminal == seen
