"""Killed at any system call, a failing disk, a full disk, a power loss: nothing acknowledged is lost.

Here a subset; all of them: `python tests/deployment/crash_points.py --all`, `python tests/deployment/power_loss.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deployment.crash_points import enumerate_crash_points, run_driver, strace_problem
from deployment.power_loss import enumerate_power_losses
from metis.deployment.controller.disk import EXIT_DISK_FAILED
from metis.deployment.controller.state import State

_PROBLEM = strace_problem()
pytestmark = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))


@pytest.mark.slow
def test_every_crash_point_recovers(tmp_path: Path) -> None:
    """SIGKILL, EIO and ENOSPC at calls that are spread over all that touch the folder."""
    results = list(enumerate_crash_points(tmp_path, most=26))

    assert not [result for result in results if result.lost or result.problem]
    assert {result.point.fault for result in results} == {"killed", "EIO", "ENOSPC"}
    assert all(result.ended for result in results if result.point.fault == "killed")
    assert sum(result.acknowledged for result in results) > 26


def test_a_failing_disk_ends_the_process(tmp_path: Path) -> None:
    """Asking for the same sync again could be answered with a lie, so nobody asks again."""
    for call, number, file in [("fdatasync", 8, "controller.db"), ("fsync", 4, "blobs/tmp.")]:
        folder = tmp_path / call
        done = run_driver(folder, "-o", "/dev/null", "-e", f"inject={call}:error=EIO:when={number}")
        assert done.returncode == EXIT_DISK_FAILED
        assert re.match(rf"{folder}/{file}.*(I/O|Input/output) error; ", done.stderr)
        assert re.search("when the disk works again, restart with the same command.\n$", done.stderr)
        with State.open(folder) as state:
            assert state.epoch == 2


def test_a_full_disk_does_not(tmp_path: Path) -> None:
    """One refused write, and all updates are there in the end."""
    done = run_driver(tmp_path / "state", "-o", "/dev/null", "-e", "inject=pwrite64:error=ENOSPC:when=33")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("FULL") == 1
    with State.open(tmp_path / "state") as state:
        assert [entry.update for entry in state.entries() if entry.update is not None] == [1, 2, 3, 4, 5, 6, 7]


def test_power_losses_are_survived(tmp_path: Path) -> None:
    """Whatever part of the writes that were not synced reached the disk."""
    results = list(enumerate_power_losses(tmp_path, every=11))
    assert not [result for result in results if result.lost or result.problem]
    assert max(result.acknowledged for result in results) == 7


def test_the_level_process_does_not_survive_power_losses(tmp_path: Path) -> None:
    """As it says; and this shows that the simulated disk does lose what is not synced."""
    results = list(enumerate_power_losses(tmp_path, every=40, durability="process"))
    assert any(result.lost or result.problem for result in results)
