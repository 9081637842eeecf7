"""Faults of a rehearsal: daily hours, cut lines, a slow disk and restarts of the controller."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metis
from metis.core.events import LearnerJoined, LearnerLeft, UpdateRequest
from metis.errors import ConfigError
from metis.simulation.availability import DailyAvailability, RandomAvailability, RecordedAvailability
from metis.simulation.outages import Outages
from simulation.federations import POLICIES, fingerprint, lively, lively_learners, still

TESTS = Path(__file__).parent.parent
SECONDS = 8.0
STORMY = metis.ControllerFaults(0.02, RandomAvailability(1.0, 0.2), RecordedAvailability(((1.5, 1.9), (3.0, 3.2))))


def stormy(seed: int = 1990) -> metis.Federation:
    """Lively learners whose lines are cut, one of them without resuming, and a controller that stalls and restarts."""
    learners = [
        replace(
            own,
            link=replace(
                own.link, upload=1000, download=2000, cuts=RandomAvailability(0.8, 0.1), resumed=index % 2 == 0
            ),
        )
        for index, own in enumerate(lively_learners())
    ]
    return lively(learners=learners, faults=STORMY, seed=seed)


def simulate(policy: str, **options: Any) -> metis.Run:
    return stormy().simulate(POLICIES[policy](), seconds=SECONDS, **options)


def updates(run: metis.Run) -> list[tuple[float, UpdateRequest]]:
    return [(at, item) for at, item in run.events if isinstance(item, UpdateRequest)]


@pytest.mark.parametrize(
    ("opens", "closes", "spans"),
    [
        (8, 18, [(0, 8), (18, 32), (42, 56)]),
        (20, 6, [(6, 20), (30, 44), (54, 68)]),
        (0, 12, [(12, 24), (36, 48), (60, 72)]),
        (12, 24, [(0, 12), (24, 36), (48, 60)]),
    ],
)
def test_daily_hours(opens: float, closes: float, spans: list[tuple[float, float]]) -> None:
    """Away outside the hours of every day, also over midnight; an hour has one second here."""
    away = DailyAvailability(opens, closes, day=24.0).absences(np.random.default_rng(0))
    assert list(itertools.islice(away, 3)) == spans


@pytest.mark.parametrize(
    ("opens", "closes", "day"), [(8, 8, 24.0), (0, 24, 24.0), (-1, 8, 24.0), (8, 25, 24.0), (8, 9, 0)]
)
def test_hours_that_are_none(opens: float, closes: float, day: float) -> None:
    """Refused with a sentence."""
    with pytest.raises(ValueError, match=r"hour|seconds"):
        DailyAvailability(opens, closes, day)


def test_a_clinic_trains_in_its_hours_only() -> None:
    """It joins when it opens and leaves when it closes."""
    hours = {"availability": DailyAvailability(6, 18, day=12.0)}
    run = still([4, 4], [0.25, 0.25], learner=[{}, hours]).simulate(metis.async_fedavg(1), seconds=30)
    mine = [(at, type(item)) for at, item in run.events if getattr(item, "learner", "") == "learner1"]
    assert [at for at, kind in mine if kind is LearnerJoined] == [3.0, 15.0, 27.0]
    assert [at for at, kind in mine if kind is LearnerLeft] == [9.0, 21.0]


def outages(*spans: tuple[float, float]) -> Outages:
    return Outages(iter(spans))


def test_what_is_cut_goes_on_afterwards() -> None:
    """The outage is added to its time, and nothing is repeated."""
    assert outages((2, 5), (6, 7)).finish(1.0, 2.5) == (7.5, 2, 0.0)
    assert outages((2, 5)).finish(3.0, 1.0) == (6.0, 0, 0.0)  # it waits for the line, and is not cut
    assert outages((2, 5)).finish(0.0, 2.0) == (2.0, 0, 0.0)  # just in time


def test_what_is_cut_begins_again_if_it_cannot_resume() -> None:
    """What was done before the cut is repeated."""
    assert outages((2, 5), (6, 7)).finish(1.0, 2.5, resumed=False) == (9.5, 2, 2.0)


def test_outages_of_two_sources_count_together() -> None:
    """A line is of no use while the controller is down."""
    both = Outages(iter([(1.0, 2.0)]), iter([(1.5, 3.0), (4.0, 5.0)]))
    assert both.finish(0.5, 2.0) == (5.5, 2, 0.0)
    assert both.finish(0.0, 0.5) == (0.5, 0, 0.0)  # earlier than what was asked before


def test_a_line_that_stays_cut() -> None:
    """The transfer never ends, and the learner is stuck with its task; the others go on."""
    dead = {"link": metis.Link(cuts=RecordedAvailability(((1.5, math.inf),)))}
    run = still([4, 4], [0.25, 0.25], learner=[{}, dead]).simulate(metis.async_fedavg(1), seconds=5)
    assert {item.learner for _, item in updates(run)} == {"learner0", "learner1"}
    assert max(at for at, item in updates(run) if item.learner == "learner1") == 1.0


def test_a_transfer_that_can_never_get_through() -> None:
    """One sentence instead of an endless loop."""
    line = metis.Link(upload=1000.0, cuts=RandomAvailability(0.01, 0.01), resumed=False)
    with pytest.raises(ConfigError, match="did not get through; let transfers resume"):
        still([2], [0.25], learner=[{"link": line}]).simulate(metis.sync_fedavg(1), rounds=1)


def test_bytes_of_a_cut_transfer_are_charged() -> None:
    """An upload of 1,000 bytes in 2 s, cut after 1 s for 3 s: half of it travels again, and time and bytes show it."""

    def run(resumed: bool) -> metis.Run:
        line = metis.Link(upload=500.0, cuts=RecordedAvailability(((1.5, 4.5),)), resumed=resumed)
        return still([2], [0.25], learner=[{"link": line}]).simulate(metis.sync_fedavg(1), rounds=1)

    again, resumed = run(False), run(True)
    assert again.faults == {"departures": 0, "cuts": 1, "resent_bytes": 500}
    assert resumed.faults == {"departures": 0, "cuts": 1, "resent_bytes": 0}
    assert again.costs.bytes_exchanged == resumed.costs.bytes_exchanged + 500 == 2500
    assert (again.costs.parallel_time, resumed.costs.parallel_time) == (6.5, 5.5)
    assert again.costs.transfer_time == 6.0
    assert again.summary()["faults"]["cuts"] == 1


def test_a_slow_disk_writes_one_update_after_the_other() -> None:
    """Three updates at second 1, 0.5 s each: the round is published at 2.5."""
    faults = metis.ControllerFaults(write_seconds=0.5)
    run = still([4, 4, 4], [0.25] * 3, faults=faults).simulate(metis.sync_fedavg(1), rounds=1)
    assert [at for at, _ in updates(run)] == [1.5, 2.0, 2.5]
    assert run.costs.parallel_time == 2.5


def test_a_disk_that_stalls_holds_everything_up() -> None:
    """What was due in the stall happens at its end, the deadline of the run too."""
    faults = metis.ControllerFaults(stalls=RecordedAvailability(((0.9, 3.0),)))
    run = still([4, 4], [0.25, 0.5], faults=faults).simulate(metis.async_fedavg(1), seconds=2.5)
    assert [at for at, _ in updates(run)] == [3.0, 3.0]
    assert run.costs.parallel_time == 3.0


def test_learners_train_on_while_the_controller_restarts() -> None:
    """Their updates arrive when it is back: training goes on, transfers wait."""
    faults = metis.ControllerFaults(restarts=RecordedAvailability(((0.5, 3.0),)))
    run = still([4, 20], [0.25, 0.25], faults=faults).simulate(metis.sync_fedavg(1), rounds=1)
    assert [at for at, _ in updates(run)] == [3.0, 5.0]
    assert run.costs.cumulative_time == 6.0


def test_an_outage_of_the_controller_without_an_end() -> None:
    """One sentence."""
    faults = metis.ControllerFaults(stalls=RecordedAvailability(((0.5, math.inf),)))
    with pytest.raises(ConfigError, match="has no end"):
        still([4], [0.25], faults=faults).simulate(metis.sync_fedavg(1), seconds=2)


def test_a_disk_cannot_take_less_than_no_time() -> None:
    """Refused with a sentence."""
    with pytest.raises(ValueError, match="write_seconds must be 0 or more"):
        metis.ControllerFaults(write_seconds=-1)


@pytest.mark.parametrize("policy", ["sync_fedavg", "semisync_fedavg", "fedrec", "fedbuff"])
def test_the_same_faults_for_any_number_of_workers_and_after_a_resume(policy: str, tmp_path: Path) -> None:
    """The same bits with worker processes, and for a run that was interrupted twice and continued."""
    whole = simulate(policy)
    assert whole.faults["cuts"] > 3 and whole.faults["resent_bytes"] > 0 and whole.faults["departures"] > 0
    assert fingerprint(simulate(policy, workers=2)) == fingerprint(whole)

    seen = 0

    def interrupt(_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == 9:
            raise KeyboardInterrupt

    for attempt in range(2):
        seen = 0
        part = simulate(policy, out=tmp_path, watch=interrupt, resume=attempt > 0)
        assert part.finish_reason == "interrupted"
    assert fingerprint(simulate(policy, out=tmp_path, resume=True)) == fingerprint(whole)


def test_the_same_faults_for_any_hash_seed() -> None:
    """Nothing depends on the order of a set."""
    code = (
        "from simulation.test_outages import simulate\nfrom simulation.federations import fingerprint\n"
        "print(fingerprint(simulate('fedrec')))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(fingerprint(simulate("fedrec")))


def test_other_faults_for_another_seed() -> None:
    """Cuts are drawn from the seed."""
    runs = [stormy(seed).simulate(metis.fedrec(1), seconds=2) for seed in (1, 2)]
    assert [at for at, _ in updates(runs[0])] != [at for at, _ in updates(runs[1])]
