"""The ledger of a data set: reserved before it is spent, and never forgotten."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metis.errors import ConfigError
from metis.privacy import accounting
from metis.privacy.accounting import Steps
from metis.privacy.ledger import BudgetSpent, Ledger
from metis.privacy.records import Privacy, coarse
from metis.system import SYSTEM, Disk, System

PRIVACY, RATE = Privacy(noise=1.0, budget=3.0), 0.02


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return made(tmp_path)


def made(folder: Path) -> Ledger:
    return Ledger(folder / "site", "cohort", folder / "elsewhere")


def test_reservations_add_up_over_runs_and_processes(ledger: Ledger, tmp_path: Path) -> None:
    """Keyed by data set: another run, and another process, find what was spent."""
    ledger.reserve(PRIVACY, RATE, "first", 0, 100)
    made(tmp_path).reserve(PRIVACY, RATE, "second", 0, 50)
    assert [(entry.run, entry.steps.steps) for entry in ledger.entries()] == [("first", 100), ("second", 50)]
    assert ledger.epsilon(1e-5) == accounting.epsilon([Steps(RATE, 1.0, 150)], 1e-5)
    assert ledger.epsilon(1e-5, tight=True) < ledger.epsilon(1e-5)
    assert Ledger(tmp_path / "site", "other", tmp_path / "elsewhere").entries() == []


def test_the_budget_is_never_exceeded(ledger: Ledger) -> None:
    """S_k steps can be reserved in any pieces, and not one more; a larger batch costs no more than a plain one."""
    allowed = accounting.max_steps(RATE, 1.0, 3.0, 1e-5)
    ledger.reserve(PRIVACY, RATE, "run", 0, allowed - 10)
    used = ledger.reserve(PRIVACY, RATE, "run", 1, 9, 8)
    assert used.noise_at(RATE, 8) > 4
    with pytest.raises(BudgetSpent, match="does not allow 5 more steps"):
        ledger.reserve(PRIVACY, RATE, "run", 2, 5)
    assert ledger.epsilon(1e-5) <= 3.0 and len(ledger.entries()) == 2


def test_settings_may_change_and_the_filter_still_holds(ledger: Ledger) -> None:
    """Noise, rate and steps are chosen as one goes; the sum at the order of the first line decides."""
    order = None
    for task, (noise, rate) in enumerate([(1.0, 0.02), (2.0, 0.1), (0.8, 0.01)] * 3):
        ledger.reserve(Privacy(noise=noise, budget=3.0), rate, "run", task, 10)
        order = order or ledger.order()
    assert ledger.order() == order and ledger.epsilon(1e-5) <= 3.0


def test_a_rerun_reserves_again(ledger: Ledger) -> None:
    """A task that is trained twice, after a crash, is spent twice: its noise is new, and both may have been seen."""
    for _ in range(2):
        ledger.reserve(PRIVACY, RATE, "run", 7, 10)
    assert [entry.task for entry in ledger.entries()] == [7, 7]


def test_the_site_tells_a_coarse_number_that_shrinks_by_what_it_makes(ledger: Ledger) -> None:
    """Rounded once, at the beginning of a run: later ones would reveal the exact number by when they change."""
    allowed = accounting.max_steps(RATE, 1.0, 3.0, 1e-5)
    assert ledger.steps_left(PRIVACY, RATE, "run") == coarse(allowed)
    ledger.reserve(PRIVACY, RATE, "run", 0, 37)
    assert ledger.steps_left(PRIVACY, RATE, "run") == coarse(allowed) - 37
    assert ledger.steps_left(PRIVACY, RATE, "next") == coarse(allowed - 37)
    assert ledger.steps_left(Privacy(noise=1.0), RATE, "run") is None
    assert ledger.steps_left(Privacy(noise=1.0, budget=0.1), RATE, "run") == 0


def test_a_ledger_from_a_backup_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    """Restored, emptied, deleted or changed: the witness in the other place knows better."""
    ledger.reserve(PRIVACY, RATE, "run", 0, 10)
    backup = ledger.path.read_bytes()
    ledger.reserve(PRIVACY, RATE, "run", 1, 10)
    whole = ledger.path.read_bytes()
    for content, sentence in (
        (backup, "lacks reservations that were made: it has 1, and .* knows of 2"),
        (whole.splitlines(keepends=True)[0], "lacks reservations"),
        (b"", "is gone, but .* knows of 2 reservations"),
        (whole.replace(b'"steps":10', b'"steps":1', 1), "changed or is damaged"),
        (whole[:-5], "lacks reservations"),
    ):
        ledger.path.write_bytes(content)
        with pytest.raises(ConfigError, match=sentence):
            ledger.reserve(PRIVACY, RATE, "run", 2, 1)
    ledger.path.write_bytes(whole)
    shutil.rmtree(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"witness .* is gone"):
        ledger.entries()


def test_a_name_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    """The data set's name becomes one."""
    with pytest.raises(ConfigError, match="letters, digits"):
        Ledger(tmp_path, "../other")


class Killed(Exception):
    """The process ends here."""


class DyingDisk(Disk):
    """Lets so many operations happen, half of the next write, and nothing more."""

    def __init__(self, operations: int) -> None:
        self.left = operations

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self._count()
        return os.open(path, flags, mode)

    def fsync(self, descriptor: int) -> None:
        self._count()

    def file(self, descriptor: int, mode: str = "wb") -> Any:
        file, count = os.fdopen(descriptor, mode, buffering=0), self._count

        class Half:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def write(self, data: bytes) -> None:
                try:
                    count()
                except Killed:
                    file.write(data[: len(data) // 2])
                    raise
                file.write(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        return Half()


def killed_after(operations: int, work: Callable[[], object]) -> bool:
    token = SYSTEM.set(System(disk=DyingDisk(operations)))
    try:
        work()
    except Killed:
        return True
    finally:
        SYSTEM.reset(token)
    return False


@pytest.mark.parametrize("before", [0, 2])
def test_at_every_kill_point_what_is_spent_is_reserved(tmp_path: Path, before: int) -> None:
    """Killed at every operation of a reservation: nothing was trained, and the ledger goes on with what it had."""
    for operations in range(100):
        folder = tmp_path / str(operations)
        for task in range(before):
            made(folder).reserve(PRIVACY, RATE, "run", task, 10)
        died = killed_after(operations, lambda: made(folder).reserve(PRIVACY, RATE, "run", 99, 5))  # noqa: B023
        trained = before + (0 if died else 1)
        again = made(folder)
        assert len(again.entries()) >= trained  # reserved, and perhaps not spent; never the other way round
        again.reserve(PRIVACY, RATE, "run", 99, 5)
        assert [entry.task for entry in again.entries()][:before] == list(range(before))
        if not died:
            assert operations > 5
            return
    raise AssertionError("a reservation has fewer operations than that")
