"""The run's clock stands still while the controller does not run, whoever asks it first afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from metis.deployment.controller import _RunClock


class Wall:
    """A clock on the wall that the test moves."""

    moment = 1000.0

    def monotonic(self) -> float:
        return self.moment


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    wall = Wall()
    monkeypatch.setattr("metis.deployment.controller.time", SimpleNamespace(monotonic=wall.monotonic))
    return wall


def test_it_begins_with_the_first_task(wall: Wall) -> None:
    """Waiting for learners is no time of the run."""
    clock = _RunClock(7.0)
    wall.moment += 0.4
    clock.tick()
    assert clock.now() == 7.0
    clock.go()
    wall.moment += 0.4
    assert clock.now() == pytest.approx(7.4)


@pytest.mark.parametrize("stop", [2.0, 4.0, 300.0])
def test_a_stop_is_no_time_of_the_run(wall: Wall, stop: float) -> None:
    """Also a stop that is much shorter than the default lease: leases may be short."""
    clock = _RunClock(0.0)
    clock.go()
    wall.moment += stop
    assert clock.tick() == pytest.approx(stop, abs=0.5)
    assert clock.now() <= 0.5
    assert clock.tick() == 0.0


def test_a_model_that_comes_before_the_first_tick_after_a_stop_is_not_late(wall: Wall) -> None:
    """The clock never goes back: what was journaled meanwhile has the right time already."""
    clock = _RunClock(0.0)
    clock.go()
    wall.moment += 60.0
    handed_in = clock.now()
    lost = clock.tick()
    assert handed_in <= 0.5 and lost == pytest.approx(60.0, abs=0.5)
    assert clock.now() >= handed_in
