"""The view of a run: increments that add up to the whole, bounded sizes, and what is wrong in words."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from metis.core.events import (
    CommunityPublished,
    CommunityStamp,
    Evaluated,
    Finish,
    LearnerJoined,
    LearnerLeft,
    LearnerSetAside,
    LearnerWithdrawn,
    MembersAwaited,
    UpdateCommitted,
    UpdateRefused,
)
from metis.core.model import Model
from metis.reporting.dashboard import view as view_module
from metis.reporting.dashboard.series import KINDS, Series
from metis.reporting.dashboard.view import COLUMNS, STATES, RunView
from metis.runs.run import Run
from metis.runs.setting import Setting
from metis.runs.trace import to_line
from reporting.dashboard.pages import (
    NAMES,
    PageOfRun,
    Recorded,
    as_json,
    finished,
    joined,
    lines,
    rounds,
    sent,
    update,
    write_run,
    written_setting,
)
from simulation.federations import POLICIES, lively


def folded(setting: Setting, events: Sequence[Recorded]) -> RunView:
    view = RunView(setting)
    view.feed(lines(events).encode().splitlines())
    return view


def page_of(view: RunView, now: float | None = None) -> PageOfRun:
    """A page that has just been opened."""
    view.increment(now)
    page = PageOfRun()
    for part in view.snapshot(now):
        page.add(as_json(part))
    return page


def notices(events: Sequence[Recorded], now: float | None = None) -> list[str]:
    return page_of(folded(written_setting(), events), now).notices


@pytest.fixture(scope="module", params=sorted(POLICIES))
def run(request: pytest.FixtureRequest) -> Run:
    """Learners that jitter, leave, come back and are late, under every policy."""
    return lively().simulate(POLICIES[request.param](), seconds=6)


# --- against the whole --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_increments_add_up_to_a_fold_from_scratch(run: Run, seed: int) -> None:
    """However the lines come in, the page ends with what a page has that is opened at the end."""
    chance, view, page = random.Random(seed), RunView(run.setting), PageOfRun()
    text = [to_line(*event).encode() for event in run.events]
    while text:
        taken = chance.choice((0, 1, 2, 7, 40))
        view.feed(text[:taken])
        del text[:taken]
        page.add(as_json(view.increment()))
    page.add(as_json(view.increment()))

    assert page == page_of(folded(run.setting, run.events))


def test_energy_can_be_told_between_two_events(run: Run) -> None:
    """A row that is sent once, and its rate, give the energy of any later moment until its next event."""
    cut = len(run.events) * 2 // 3
    view, page = RunView(run.setting), PageOfRun()
    for event in run.events[:cut]:
        view.record(*event)
        page.add(as_json(view.increment()))
        for row in page.rows.values():
            if len(row) == len(COLUMNS):
                row.append(page.rest["now"])  # when it was sent
    fresh = page_of(folded(run.setting, run.events[:cut]))

    at = {name: index for index, name in enumerate(COLUMNS)}
    for index, row in page.rows.items():
        for kind in ("equation", "active", "idle_charged"):
            grown = row[at[kind]] + row[at[f"{kind}_rate"]] * (page.rest["now"] - row[-1])
            assert grown == pytest.approx(fresh.rows[index][at[kind]], rel=1e-6, abs=1e-6)


def test_it_tells_what_the_run_tells(run: Run) -> None:
    """History, costs and timeline are those of the report."""
    page, costs = page_of(folded(run.setting, run.events)), run.costs

    measured = [(point.at, point.update_requests, point.version) for point in run.history]
    assert [(pytest.approx(at), requests, version) for at, requests, version, _ in page.history] == measured
    assert [value for *_, value in page.history] == pytest.approx(run.metric_values)
    totals = page.rest["totals"]
    assert (totals["requests"], totals["steps"]) == (costs.update_requests, costs.steps)
    assert totals["bytes"] == costs.bytes_exchanged == sum(page.row(name)["bytes"] for name in page.names)
    assert totals["energy"] == pytest.approx(
        [costs.energy.equation, costs.energy.active, costs.energy.idle_charged], rel=1e-6
    )
    for name, own in costs.by_learner.items():
        row = page.row(name)
        assert row["equation"] == pytest.approx(own.energy.equation, rel=1e-6)
        assert (row["updates"], row["refused"]) == (own.update_requests, own.refused)
    for name in page.names:
        spans = [span for span in run.spans() if span.learner == name]
        seconds = page.seconds(name)
        row, ended = page.row(name), page.spans[page.names.index(name)][-1][0]
        open_kind = {"training": 0, "late": 0, "idle": 2, "set aside": 2, "away": 3}[STATES[row["state"]]]
        seconds[open_kind] += page.rest["now"] - ended
        wanted = [math.fsum(span.end - span.start for span in spans if span.kind == kind) for kind in KINDS]
        assert seconds == pytest.approx(wanted, abs=1e-6)


def test_nothing_is_told_twice() -> None:
    """An increment after which nothing happened is the time and the totals."""
    view = folded(written_setting(), [*joined(), *rounds(2)])
    view.increment()

    assert not view.changed
    assert view.increment().keys() == {"now", "totals"}


def test_a_page_that_comes_after_nobody_looked_gets_everything() -> None:
    """What was not sent to anybody is in the snapshot."""
    view = folded(written_setting(), [*joined(), *rounds(2)])
    view.skip()

    assert page_of(view) == page_of(folded(written_setting(), [*joined(), *rounds(2)]))


# --- bounds -------------------------------------------------------------------------------------


def test_a_long_run_takes_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older spans are merged, without losing a second; curves lose points, but neither the first nor the last."""
    monkeypatch.setattr(view_module, "MAX_SPANS", 300)
    monkeypatch.setattr(view_module, "MAX_VERSIONS", 100)
    events = [*joined(), *rounds(900)]
    view = RunView(written_setting())
    for event in events:
        view.record(*event)
    page = page_of(view)

    assert all(len(spans) <= 100 for spans in page.spans.values())
    assert page.seconds("fast") == pytest.approx([900.0, 0.0, 1800.0 - 2.0, 0.0])
    assert len(page.history) <= 601 and len(page.costs) <= 601
    assert page.history[0][2] == 1 and page.history[-1][2] == 900
    assert len(page.versions) <= 200 and page.versions[-2:] == [900, 2700.0]
    assert page.rest["totals"]["version"] == 900


def test_a_snapshot_of_many_learners_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No part is so large that a page would stand still."""
    monkeypatch.setattr(view_module, "_PART", 200)
    names = [f"learner-{k}" for k in range(300)]
    view = folded(written_setting(names), [*joined(names), *rounds(3, names)])
    view.increment()
    parts = list(view.snapshot())

    assert max(sum(len(flat) // 2 for flat in part.get("spans", [])) for part in parts) <= 210
    assert sum(len(part.get("spans", [])) for part in parts) == 300


@given(st.integers(1, 400), st.sampled_from([4, 10]), st.data())
def test_a_series_is_bounded_and_told_in_increments(count: int, most: int, data: st.DataObject) -> None:
    """Whenever it is asked, the page has the same points; the first and the latest are among them."""
    series, held = Series(most), []
    for number in range(count):
        if number and data.draw(st.booleans()):
            series.replace_last([number, -1.0])
        else:
            series.add([number, 0.0])
        if data.draw(st.booleans()) or number == count - 1:
            increment = series.increment()
            if increment is not None:
                start, *points = increment
                held[start:] = points
    assert held == series.points
    assert len(held) <= most + 1
    assert held[-1][0] == count - 1
    assert [point[0] for point in held] == sorted(point[0] for point in held)


# --- what is wrong ------------------------------------------------------------------------------


def test_nothing_is_wrong() -> None:
    assert notices([*joined(), *rounds(2), finished(6.0)]) == []


def test_a_refused_update_is_told_until_the_next_that_counts() -> None:
    """With the reason that the learner was given."""
    refused = UpdateRefused("slow", 1, "invalid", "its local model holds NaN")
    events = [*joined(), sent(0.0, "slow", 1), update(2.0, "slow", 1, 2.0), (2.0, refused)]

    assert notices(events) == ["An update from 'slow' was refused at 2.0 s: its local model holds NaN."]
    events += [sent(2.0, "slow", 2), update(4.0, "slow", 2, 2.0), (4.0, UpdateCommitted("slow", 2, 1.0))]
    assert notices(events) == []


def test_an_update_that_came_too_late() -> None:
    """It is not the learner's fault, and worded so."""
    late = UpdateRefused("slow", 1, "late", "late: it is based on community model 3, rebase onto 4")
    events = [*joined(), sent(0.0, "slow", 1), update(9.0, "slow", 1, 9.0), (9.0, late)]

    assert notices(events) == [
        "An update from 'slow' came too late, at 9.0 s, and was not mixed: "
        "it is based on community model 3, rebase onto 4."
    ]  # fmt: skip


def test_a_learner_set_aside_is_told_until_it_joins_again() -> None:
    aside = LearnerSetAside("slow", "4 refused updates in a row: no memory left")
    events: list[Recorded] = [*joined(), (5.0, aside)]

    assert notices(events) == [
        "'slow' has been set aside since 5.0 s and gets no task until it joins again: "
        "4 refused updates in a row: no memory left."
    ]  # fmt: skip
    row = page_of(folded(written_setting(), events)).row("slow")
    assert STATES[row["state"]] == "set aside"
    assert notices([*events, (6.0, LearnerLeft("slow")), (6.0, LearnerJoined("slow", 5, 5))]) == []


def test_away_withdrawn_and_not_there_yet() -> None:
    """Away and gone for good are two things."""
    events = [*joined(NAMES[:2]), (4.0, LearnerLeft("slow")), (5.0, LearnerWithdrawn("fast"))]

    assert notices(events) == [
        "'slow' has been away since 4.0 s.",
        "'fast' withdrew permanently at 5.0 s.",
        "'<b>&odd' has not joined yet.",
    ]


def test_a_masked_federation_says_for_whom_it_waits() -> None:
    """Since the first moment, though another one leaves; until enough are there again."""
    reason = "a masked window begins with 4 learners or more, and 3 are there"
    events: list[Recorded] = [(7.0, MembersAwaited(("bob",), reason)), (9.0, MembersAwaited(("ann", "bob"), reason))]
    begun = [*joined(), *rounds(1)]
    assert notices([*begun, *events]) == [f"It has waited for 'ann', 'bob' since 7.0 s: {reason}."]
    assert notices([*begun, *events, (11.0, MembersAwaited((), ""))]) == []
    told = notices([*begun, (7.0, MembersAwaited(tuple("abcde"), reason))])
    assert told == [f"It has waited for 'a', 'b', 'c' and 2 more since 7.0 s: {reason}."]


def test_a_learner_is_late_when_its_time_is_over() -> None:
    """Its seconds and the grace that a barrier gives; without a limit twice what its speed promises."""
    limited = [*joined(), sent(1.0, "slow", 1, seconds=10.0)]
    late = "'slow' is late: it has not handed in the task that it was given at 1.0 s."

    assert notices(limited, now=12.0) == []
    assert notices(limited, now=12.2) == [late]
    unlimited = [*joined(), sent(1.0, "slow", 1, steps=10)]  # of 0.1 s each
    assert notices(unlimited, now=3.0) == []
    assert notices(unlimited, now=3.2) == [late]
    page = page_of(folded(written_setting(), unlimited), now=3.2)
    assert STATES[page.row("slow")["state"]] == "late"
    assert notices([*unlimited, finished(5.0)], now=9.0) == []


def test_a_task_without_steps_or_speed_is_never_called_late() -> None:
    setting = written_setting(learners=())
    view = folded(setting, [*joined(), sent(0.0, "slow", 1, steps=10), sent(0.0, "fast", 2, steps=None)])

    assert page_of(view, now=1e6).notices == []


def test_many_of_one_kind_are_one_sentence() -> None:
    """A thousand learners must not be a thousand lines."""
    names = [f"site-{k}" for k in range(9)]
    events = joined(names)
    for k, name in enumerate(names):
        events += [sent(0.0, name, k), update(1.0, name, k, 1.0), (1.0, UpdateRefused(name, k, "invalid", "NaN"))]
    page = page_of(folded(written_setting(names), events))

    assert page.notices == [
        "The latest updates from 9 learners ('site-0', 'site-1', 'site-2' and 6 more) were refused; "
        "the table of learners counts them."
    ]  # fmt: skip
    nobody = page_of(folded(written_setting(names), []))
    assert nobody.notices == ["9 learners ('site-0', 'site-1', 'site-2' and 6 more) have not joined yet."]
    gone = [*joined(names), *((2.0, LearnerLeft(name)) for name in names)]
    assert page_of(folded(written_setting(names), gone)).notices == [
        "9 learners ('site-0', 'site-1', 'site-2' and 6 more) are away."
    ]


def test_a_metric_that_is_no_number() -> None:
    published = CommunityPublished(CommunityStamp(1, 10), 3, Model.empty())
    events = [*joined(), (3.0, published), (3.0, Evaluated(1, {"accuracy": math.nan}))]

    assert notices(events) == ["accuracy of community model 1 is not a number: training may have diverged."]
    assert page_of(folded(written_setting(), events)).history[-1][3] is None


def test_a_run_that_ran_out_of_learners() -> None:
    assert notices([*joined(), (3.0, Finish("no learner is left"))]) == [
        "It ended before its budget was used up: no learner is left."
    ]


@pytest.mark.parametrize(
    "bad",
    [
        b"{",
        b"[]",
        b'{"at":1.0,"action":"fly"}',
        b'{"at":1.0,"event":"learner_left"}',
        b'{"at":NaN,"event":"learner_left","learner":"fast"}',
        b'{"at":1e308,"event":"learner_left","learner":"fast"}',
        b"\xff",
    ],
)
def test_a_damaged_line_is_told_and_what_came_before_is_shown(bad: bytes) -> None:
    view = folded(written_setting(), [*joined(), *rounds(1)])
    count = view.events
    view.feed([bad])
    view.feed(lines(rounds(1, first=1, start=3.0)).encode().splitlines())
    page = page_of(view)

    assert page.notices == [f"line {count + 1} of its events is not valid; what came before it is shown."]
    assert page.rest["totals"]["version"] == 1


def test_an_event_that_cannot_follow_is_damage_too() -> None:
    """An update that nobody was asked for."""
    view = folded(written_setting(), [*joined(), update(1.0, "slow", 1, 1.0)])

    assert page_of(view).notices == ["line 4 of its events is not valid; what came before it is shown."]


# --- runs of which little is known --------------------------------------------------------------


def test_learners_that_nobody_announced_get_their_rows() -> None:
    """As in a deployment that is open to everybody with a certificate."""
    page = page_of(folded(written_setting(()), [*joined(), *rounds(1)]))

    assert page.names == list(NAMES)
    assert page.row("fast")["examples"] == 100


def test_the_metric_is_found_where_no_setting_says_it() -> None:
    page = page_of(folded(written_setting(metric=""), [*joined(), *rounds(1)]))

    assert page.rest["head"]["metric"] == "accuracy"
    assert len(page.history) == 1


def test_a_model_measured_at_two_places_is_one_point() -> None:
    """The controller's metric counts; what learners measured has other names."""
    events = [
        *joined(),
        *rounds(1),
        (3.5, Evaluated(1, {"federated_accuracy": 0.1})),
        (3.6, Evaluated(1, {"accuracy": 0.9})),
    ]
    page = page_of(folded(written_setting(), events))

    assert [point[2:] for point in page.history] == [[1, 0.9]]


def test_the_folder_of_a_run_is_enough(tmp_path: object) -> None:
    """Nothing but setting and events is read."""
    from pathlib import Path

    from metis.reporting.dashboard.follow import setting_of

    folder = Path(str(tmp_path))
    path = write_run(folder, [*joined(), *rounds(1)])
    view = RunView(setting_of(folder))
    view.feed(path.read_bytes().splitlines())

    assert page_of(view) == page_of(folded(written_setting(), [*joined(), *rounds(1)]))
