"""How long periods were and why they changed, in words."""

from __future__ import annotations

import math

from core.play import Actor, Play
from metis.core.events import LearnerJoined, LearnerLeft, PeriodBegun, SpeedChanged
from metis.core.policies import semisync, semisync_fedavg
from metis.runs.periods import MAX_CHANGES, PeriodsFold, periods_in_short, periods_of

EIGHT = "8 batches on average take that long"
BATCH = "learners with 80% of the examples need that long for a batch"


def folded(*items: tuple[float, object]) -> PeriodsFold:
    fold = PeriodsFold()
    for now, item in items:
        fold.record(now, item)  # type: ignore[arg-type]
    return fold


def test_a_probe_and_the_first_period_are_told_and_equal_ones_are_not() -> None:
    fold = folded(
        (0.0, PeriodBegun(math.inf, "everybody does 2 batches, by which they are timed")),
        (1.0, PeriodBegun(2.0, EIGHT)),
        (3.0, PeriodBegun(2.1, EIGHT)),
        (5.1, PeriodBegun(1.9, EIGHT)),
    )
    assert [(change.at, change.number) for change in fold.changes] == [(0.0, 0), (1.0, 1)]
    assert fold.changes[0].text == "A probe: everybody does 2 batches, by which they are timed."
    assert fold.changes[1].text == f"Periods of 2 s: {EIGHT}."
    assert fold.latest is not None and fold.latest.seconds == 1.9
    assert fold.count == 3


def test_a_change_says_what_has_happened_since() -> None:
    fold = folded(
        (1.0, PeriodBegun(2.0, EIGHT)),
        (2.0, SpeedChanged("a", 0.1, 1.0)),
        (2.5, SpeedChanged("b", 1.0, 0.5)),
        (2.6, LearnerJoined("c", 10, 2)),
        (2.7, LearnerLeft("d")),
        (3.0, PeriodBegun(4.0, BATCH)),
    )
    assert fold.changes[-1].text == (
        f"Periods of 4 s instead of 2 s: {BATCH}. Since the period before, 'a' has become 10 times slower, 'b' has "
        "become 2 times faster, 'c' has joined and 'd' has left."
    )


def test_slow_drift_is_told_once_it_adds_up_to_a_quarter() -> None:
    lengths = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    fold = folded(*((float(at), PeriodBegun(length, EIGHT)) for at, length in enumerate(lengths)))
    assert [change.seconds for change in fold.changes] == [1.0, 1.3]


def test_who_is_not_waited_for_is_named() -> None:
    fold = folded(
        (1.0, PeriodBegun(2.0, EIGHT)), (3.0, PeriodBegun(2.0, EIGHT, ("x",))), (5.0, PeriodBegun(2.0, EIGHT))
    )
    assert "'x': not waited for from now on, because one batch takes too long." in fold.changes[1].text
    assert "'x': waited for again." in fold.changes[2].text
    assert "instead" not in fold.changes[1].text


def test_a_second_probe_is_told() -> None:
    fold = folded(
        (1.0, PeriodBegun(2.0, EIGHT)), (3.0, PeriodBegun(math.inf, "a probe")), (4.0, PeriodBegun(2.0, EIGHT))
    )
    assert [change.number for change in fold.changes] == [1, 0, 2]


def test_the_latest_changes_are_kept() -> None:
    fold = folded(*((float(at), PeriodBegun(1.0 + at % 2, EIGHT)) for at in range(3 * MAX_CHANGES)))
    assert len(fold.changes) == MAX_CHANGES
    assert fold.changes[-1].at == 3 * MAX_CHANGES - 1


def test_a_run_tells_its_periods_and_a_policy_with_lambda_has_none() -> None:
    play = Play(semisync(), Actor("a", 1.0), Actor("b", 1.0)).run_until(time=100.0)
    points, changes = periods_of(play.log)
    assert points[0] == (2.0, 8.0)
    assert [change.number for change in changes] == [0, 1]
    assert periods_in_short(points).endswith("periods, of 8 s")
    plain, none = periods_of(Play(semisync_fedavg(1), Actor("a", 1.0)).run_until(time=100.0).log)
    assert plain == none == []
    assert periods_in_short(plain) == "no period yet"
    assert periods_in_short([(0.0, 1.0), (1.0, 3.0)]) == "2 periods, from 1 s to 3 s"
