"""Journaled is not yet applied: several updates may wait for their turn, and the disk may be full when it comes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from deployment.test_durable import POLICIES, Twin, random_events, same
from metis.core.events import RolledBack
from metis.deployment.controller.journal import Entry
from metis.deployment.controller.state import State
from metis.errors import DiskFull


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_snapshots_hold_what_was_applied_not_what_was_journaled(name: str, seed: int, tmp_path: Path) -> None:
    """Updates are journaled in bursts and applied later; after a kill anywhere nothing is missing from the mixture."""
    policy, rng = POLICIES[name], random.Random(seed)
    events = random_events(policy, seed, 60, tmp_path / "events")
    straight, burst = Twin(tmp_path / "a", policy), Twin(tmp_path / "b", policy, replay_at_most=1)
    waiting: list[Entry] = []
    for event, now in events:
        straight.happen(event, now)
        while waiting and isinstance(event, RolledBack):  # which model is kept is known when all is applied
            burst.durable.apply(waiting.pop(0))
        burst.journal(event, now)
        waiting.append(burst.entry)
        while waiting and rng.random() < 0.5:
            burst.durable.apply(waiting.pop(0))
        if rng.random() < 0.2:
            burst.restart()  # what waited was journaled, so it is applied now
            waiting.clear()
    for entry in waiting:
        burst.durable.apply(entry)
    same(straight, burst)
    burst.restart()
    same(straight, burst)


@pytest.mark.parametrize("name", POLICIES)
def test_a_full_disk_between_journal_and_effect_loses_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same entry is applied again when there is room; its actions come once, and are those of a disk with room."""
    policy, rng = POLICIES[name], random.Random(5)
    events = random_events(policy, 5, 60, tmp_path / "events")
    straight, starved = Twin(tmp_path / "a", policy), Twin(tmp_path / "b", policy, replay_at_most=2)
    full = False
    for method in ("put_blob", "append", "write_snapshot"):
        monkeypatch.setattr(
            State, method, _when_there_is_room(getattr(State, method), lambda: full and rng.random() < 0.6)
        )
    refused = 0
    for event, now in events:
        straight.journal(event, now)
        expected = straight.durable.apply(straight.entry)
        starved.journal(event, now)
        full = True
        while True:
            try:
                actions = starved.durable.apply(starved.entry)
                break
            except DiskFull:
                refused += 1
        full = False
        assert actions == expected
    assert refused
    same(straight, starved)
    starved.restart()
    same(straight, starved)


def _when_there_is_room(method: Any, full: Any) -> Any:
    def guarded(self: State, *arguments: Any, **options: Any) -> Any:
        if full():
            raise DiskFull("no room")
        return method(self, *arguments, **options)

    return guarded
