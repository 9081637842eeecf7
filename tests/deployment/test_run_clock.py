"""The run's clock stands still while the controller does not run, whatever reads it first afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

import metis.deployment.controller.clock as clock_module
from metis.deployment.controller.clock import RunClock, read_tick, write_tick


class Wall:
    """A clock on the wall that the test moves."""

    moment = 1000.0

    def monotonic(self) -> float:
        return self.moment


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    wall = Wall()
    monkeypatch.setattr(clock_module, "monotonic", wall.monotonic)
    return wall


def test_it_begins_with_the_first_task(wall: Wall) -> None:
    """Waiting for learners does not count as time of the run."""
    clock = RunClock(7.0)
    wall.moment += 0.4
    clock.tick()
    assert clock.now() == 7.0
    clock.go()
    wall.moment += 0.4
    assert clock.now() == pytest.approx(7.4)


@pytest.mark.parametrize("stop", [2.0, 4.0, 300.0])
def test_a_stop_is_no_time_of_the_run(wall: Wall, stop: float) -> None:
    """Also a stop that is much shorter than the default lease: leases may be short."""
    clock = RunClock(0.0)
    clock.go()
    wall.moment += stop
    assert clock.tick() == pytest.approx(stop, abs=0.5)
    assert clock.now() <= 0.5
    assert clock.tick() == 0.0


def test_a_model_that_comes_before_the_first_tick_after_a_stop_is_not_late(wall: Wall) -> None:
    """The clock never goes back: what was journaled meanwhile has the right time already."""
    clock = RunClock(0.0)
    clock.go()
    wall.moment += 60.0
    handed_in = clock.now()
    lost = clock.tick()
    assert handed_in <= 0.5 and lost == pytest.approx(60.0, abs=0.5)
    assert clock.now() >= handed_in


def test_a_damaged_note_of_the_clock_is_none(tmp_path: Path) -> None:
    """No flipped bit and no cut makes the run older than it is: that could end it."""
    path = tmp_path / "clock"
    write_tick(path, "run", 12.5)
    whole = path.read_bytes()
    assert read_tick(path, "run")[0] == 12.5
    assert read_tick(path, "another run") == (0.0, 0.0)
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert read_tick(path, "run")[0] in (0.0, 12.5)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read_tick(path, "run")[0] in (0.0, 12.5)
