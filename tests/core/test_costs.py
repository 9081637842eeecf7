"""The costs of a federation, folded from events written by hand and from plays."""

from __future__ import annotations

import json
import math
import weakref
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings, strategies as st

from core.play import Actor, Play, model
from metis.core.costs import CostLedger, Energy, LearnerCosts, Power, Totals
from metis.core.events import (
    Action,
    Budget,
    CohortFixed,
    CommunityStamp,
    DeadlinePassed,
    Event,
    LearnerJoined,
    LearnerLeft,
    LearnerWithdrawn,
    LocalTask,
    SendTask,
    TaskFailed,
    UpdateRefused,
    UpdateRequest,
)
from metis.core.policies import async_fedavg, fedasync, fedbuff, fedrec, semisync_fedavg, sync_fedavg
from metis.core.stop import StopRule

MODEL_BYTES = 1000


def ledger(fills_the_period: bool = False, **powers: Power) -> CostLedger:
    return CostLedger(powers, MODEL_BYTES, fills_the_period)


def fold(into: CostLedger, *items: tuple[float, Event | Action]) -> CostLedger:
    for at, item in items:
        into.record(at, item)
    return into


def joined(name: str) -> LearnerJoined:
    return LearnerJoined(name, 100, 10)


def sent(name: str, number: int = 0) -> SendTask:
    return SendTask(name, LocalTask(number, CommunityStamp(), Budget(10)), model())


def done(name: str, steps: int, seconds: float, number: int = 0) -> UpdateRequest:
    return UpdateRequest(name, number, steps, seconds, seconds / max(1, steps), model())


# One round by hand: `fast` trains 2 s, its models travel 1 s; `slow` trains 8 s; then both wait until 10.
ROUND = [
    (0.0, joined("fast")),
    (0.0, joined("slow")),
    (0.0, sent("fast")),
    (0.0, sent("slow", 1)),
    (3.0, done("fast", 20, 2.0)),
    (8.0, done("slow", 5, 8.0, 1)),
]


def test_active_transfer_idle():
    """Training as the learner says, transfer the rest until its update is there, idle until now."""
    costs = fold(ledger(), *ROUND).costs(10.0)

    fast, slow = costs.by_learner["fast"], costs.by_learner["slow"]
    assert (fast.active, fast.transfer, fast.idle, fast.away) == (2.0, 3.0 - 2.0, 10.0 - 3.0, 0.0)
    assert (slow.active, slow.transfer, slow.idle, slow.away) == (8.0, 0.0, 10.0 - 8.0, 0.0)
    assert (fast.steps, slow.steps) == (20, 5)
    assert costs.parallel_time == 10.0
    assert costs.cumulative_time == 2.0 + 8.0
    assert costs.transfer_time == 1.0
    assert costs.idle_time == 7.0 + 2.0
    assert costs.steps == 20 + 5
    assert costs.update_requests == 2
    assert costs.models_exchanged == 2 + 2
    assert costs.bytes_exchanged == (2 + 2) * MODEL_BYTES


@pytest.mark.parametrize("fills_the_period", [False, True])
def test_three_energies(fills_the_period: bool):
    """R12: the paper's equation, active time only, and idle and transfer time charged at idle power."""
    powers = {"fast": Power(180.0, 20.0, "watt"), "slow": Power(90.0, 10.0, "watt")}

    energy = fold(ledger(fills_the_period, **powers), *ROUND).costs(10.0).energy

    active = 180 * 2.0 + 90 * 8.0
    assert energy.active == active
    assert energy.idle_charged == active + 20 * (1.0 + 7.0) + 10 * 2.0
    assert energy.equation == ((180 + 90) * 10.0 if fills_the_period else active)


def test_idle_power_is_the_active_one_unless_it_is_said():
    """Which is what the paper's ratios of times imply; learners without an entry draw 1."""
    costs = fold(ledger(fast=Power(2.0)), *ROUND).costs(10.0)

    assert costs.by_learner["fast"].energy.idle_charged == 2.0 * 10.0
    assert costs.by_learner["slow"].energy.idle_charged == 1.0 * 10.0
    assert Energy(1, 2, 3) + Energy(10, 20, 30) == Energy(11, 22, 33)


def test_work_in_hand_is_active_so_far():
    """Its steps, and what of it was transfer, are known when it is handed in."""
    costs = fold(ledger(), *ROUND[:4]).costs(2.5)

    assert costs.by_learner["fast"].active == 2.5
    assert costs.steps == 0
    assert costs.models_exchanged == 2


def test_a_learner_away_costs_nothing_and_its_lost_work_did():
    """It left at 4 with an open task, came back at 6, withdrew at 7; leaving twice changes nothing."""
    book = fold(
        ledger(fills_the_period=True),
        (1.0, joined("a")),
        (2.0, sent("a")),
        (4.0, LearnerLeft("a")),
        (5.0, LearnerLeft("a")),
        (6.0, joined("a")),
        (7.0, LearnerWithdrawn("a")),
    )

    a = book.costs(10.0).by_learner["a"]

    assert a.active == 4.0 - 2.0
    assert a.idle == (2.0 - 1.0) + (7.0 - 6.0)
    assert a.away == 1.0 + (6.0 - 4.0) + (10.0 - 7.0)
    assert a.energy.equation == (4.0 - 1.0) + (7.0 - 6.0)
    assert (a.steps, a.update_requests) == (0, 0)


def test_joining_again_without_having_left_keeps_the_time():
    """A learner that was set aside joins again; it was there all the time."""
    book = fold(ledger(), (0.0, joined("a")), (4.0, joined("a")))

    assert book.costs(10.0).by_learner["a"].idle == 10.0


def test_refused_and_failed_work_is_work():
    """A refused update was sent and counts; a failed task sent nothing back but took its time and steps."""
    book = fold(
        ledger(),
        (0.0, joined("a")),
        (0.0, sent("a", 0)),
        (5.0, done("a", 10, 5.0)),
        (5.0, UpdateRefused("a", 0, "late", "late")),
        (5.0, sent("a", 1)),
        (9.0, TaskFailed("a", 1, "out of memory", steps=3, seconds=3.0)),
        (9.0, UpdateRefused("a", 1, "failed", "out of memory")),
        (9.0, DeadlinePassed()),
    )

    costs = book.costs(9.0)

    assert (costs.update_requests, costs.refused, costs.models_exchanged) == (1, 2, 2 + 1)
    assert costs.cumulative_time == 5.0 + 3.0
    assert costs.steps == 10 + 3
    assert costs.by_learner["a"].refused == 2


@pytest.mark.parametrize(
    ("claim", "active"), [(math.nan, 0.0), (-5.0, 0.0), (math.inf, 4.0), (1e9, 4.0), (4.0, 4.0), (3.0, 3.0)]
)
def test_a_lie_about_time_cannot_spoil_the_bill(claim: float, active: float):
    """Nobody trained longer than its task was out; a refused claim need not even be a number."""
    book = fold(ledger(), (0.0, joined("a")), (1.0, sent("a")), (5.0, done("a", 1, claim)))

    a = book.costs(5.0).by_learner["a"]

    assert (a.active, a.transfer, a.idle, a.away) == (active, 4.0 - active, 1.0, 0.0)


def test_json_has_the_names_that_other_programs_read():
    """The cost names of a summary; everything in it is plain."""
    costs = fold(ledger(), *ROUND).costs(10.0)

    document = json.loads(json.dumps(costs.to_json()))

    assert document == {
        "parallel_time": 10.0,
        "cumulative_time": 10.0,
        "idle_time": 9.0,
        "transfer_time": 1.0,
        "update_requests": 2,
        "refused_updates": 0,
        "models_exchanged": 4,
        "bytes_exchanged": 4 * MODEL_BYTES,
        "steps": 25,
        "steps_by_learner": {"fast": 20, "slow": 5},
        "energy": {"equation": 10.0, "active": 10.0, "idle_charged": 20.0},
    }


@pytest.mark.parametrize("bad", [{"active": -1.0}, {"active": math.inf}, {"idle": math.nan}])
def test_impossible_powers_are_refused(bad):
    """By the name of the setting."""
    with pytest.raises(ValueError, match=f"{next(iter(bad))} power must be 0 or more"):
        Power(**bad)


def test_a_synchronous_federation_exchanges_two_models_for_each_update_request():
    """CC = N R and 2 CC models; PT is R rounds of the slowest; idle is what the fast ones wait."""
    rounds, epochs, fast, slow = 7, 2, 0.03, 0.3
    play = Play(sync_fedavg(epochs), a=fast, b=slow, c=slow, stop=StopRule(rounds=rounds)).run()

    costs = play.costs()

    steps = epochs * 50
    assert costs.update_requests == 3 * rounds
    assert costs.models_exchanged == 2 * 3 * rounds
    assert costs.bytes_exchanged == 2 * 3 * rounds * model().nbytes
    assert costs.parallel_time == pytest.approx(rounds * steps * slow)
    assert costs.cumulative_time == pytest.approx(rounds * steps * (fast + 2 * slow))
    assert costs.idle_time == pytest.approx(rounds * steps * (slow - fast))


POLICIES = [
    sync_fedavg(1),
    sync_fedavg(1, round_limit=10.0),
    semisync_fedavg(2, cold_start_limit=20.0),
    semisync_fedavg(1.5, budget="deadline"),
    async_fedavg(1),
    fedrec(1),
    fedasync(1),
    fedbuff(1, buffer_size=2),
]

actors = st.builds(
    Actor,
    name=st.just(""),
    time_per_batch=st.floats(0.01, 3.0),
    examples=st.integers(1, 2000),
    transfer=st.floats(0, 20),
    mood=st.sampled_from(["well", "well", "well", "failing", "diverging", "silent"]),
)


absences = st.lists(st.tuples(st.integers(0, 4), st.floats(0.5, 100), st.floats(0.01, 50), st.booleans()), max_size=5)


def perform(policy, cast, absences, end, powers=None) -> Play:
    """A play in which some are away for a while or for good."""
    for k, actor in enumerate(cast):
        actor.name = f"learner-{k}"
    play = Play(policy, *cast, stop=StopRule(seconds=end, update_requests=60), powers=powers)
    gone: dict[int, float] = {}
    for who, start, length, for_good in sorted(absences, key=lambda absence: absence[1]):
        who %= len(cast)
        if start > gone.get(who, 0.0):
            (play.withdraw if for_good else play.leave)(cast[who].name, at=start)
            play.join(cast[who].name, at=start + length)
            gone[who] = start + length
    return play.run()


@settings(max_examples=60)
@given(
    policy=st.sampled_from(POLICIES),
    cast=st.lists(actors, min_size=1, max_size=5),
    absences=absences,
    end=st.floats(1.0, 200.0),
)
def test_every_second_of_every_learner_is_accounted_for(policy, cast, absences, end):
    """Active + transfer + idle + away = parallel time, for any sequence of events; the sums agree with the log."""
    play = perform(policy, cast, absences, end)

    costs = play.costs()

    assert costs.parallel_time == play.now <= end
    for learner in costs.by_learner.values():
        assert min(learner.active, learner.transfer, learner.idle, learner.away) >= 0
        whole = learner.active + learner.transfer + learner.idle + learner.away
        assert whole == pytest.approx(costs.parallel_time)
        assert learner.energy.active <= learner.energy.idle_charged * (1 + 1e-9)
        present = learner.active + learner.transfer + learner.idle
        expected = present if play.controller.protocol.fills_the_period else learner.active
        assert learner.energy.equation == pytest.approx(expected)
    assert costs.update_requests == len(play.items(UpdateRequest))
    assert costs.models_exchanged == len(play.items(SendTask)) + len(play.items(UpdateRequest))
    assert costs.refused == len(play.refused())
    disbelieved = {refused.task for refused in play.refused() if refused.kind == "invalid"}
    believed = [item for item in play.items(UpdateRequest) + play.items(TaskFailed) if item.task not in disbelieved]
    assert costs.steps == sum(item.steps for item in believed)


@dataclass
class SlowAccount:
    since: float | None = None
    present: float = 0.0
    sent: float | None = None
    active: float = 0.0
    transfer: float = 0.0
    steps: int = 0
    last: int = 0
    requests: int = 0
    refused: int = 0


def slow_bill(log, now: float, powers: dict[str, Power], fills_the_period: bool) -> dict[str, LearnerCosts]:
    """The same costs computed one learner and one event after the other."""
    accounts: dict[str, SlowAccount] = {}
    for at, item in log:
        account = accounts.setdefault(item.learner, SlowAccount()) if hasattr(item, "learner") else SlowAccount()
        match item:
            case LearnerJoined():
                account.since = at if account.since is None else account.since
            case LearnerLeft() | LearnerWithdrawn():
                account.active += 0.0 if account.sent is None else at - account.sent
                account.present += 0.0 if account.since is None else at - account.since
                account.sent = account.since = None
            case SendTask():
                account.sent = at
            case UpdateRequest() | TaskFailed():
                elapsed, account.sent = at - account.sent, None
                account.active += min(max(0.0, item.seconds), elapsed)
                account.transfer += elapsed - min(max(0.0, item.seconds), elapsed)
                account.steps, account.last = account.steps + item.steps, item.steps
                account.requests += isinstance(item, UpdateRequest)
            case UpdateRefused():
                account.refused += 1
                account.steps -= account.last if item.kind == "invalid" else 0
    costs = {}
    for name, account in accounts.items():
        power = powers.get(name, Power())
        present = account.present + (0.0 if account.since is None else now - account.since)
        active = account.active + (0.0 if account.sent is None else now - account.sent)
        idle = max(0.0, present - active - account.transfer)
        energy = Energy(
            power.active * (present if fills_the_period else active),
            power.active * active,
            power.active * active + (power.active if power.idle is None else power.idle) * (idle + account.transfer),
        )
        costs[name] = LearnerCosts(
            active, account.transfer, idle, max(0.0, now - present),
            account.steps, account.requests, account.refused, energy,
        )  # fmt: skip
    return costs


@settings(max_examples=40)
@given(
    policy=st.sampled_from(POLICIES),
    cast=st.lists(actors, min_size=1, max_size=5),
    absences=absences,
    end=st.floats(1.0, 100.0),
    power=st.tuples(st.floats(0, 3), st.none() | st.floats(0, 3)),
    moments=st.lists(st.integers(0, 200), min_size=1, max_size=8),
)
def test_a_bill_of_the_past_is_the_bill_of_then(policy, cast, absences, end, power, moments):
    """Bit for bit: asked for at the moment or at the end, in full or in sums, as the plain sum over the events."""
    powers = {"learner-0": Power(*power)}
    play = perform(policy, cast, absences, end, powers)
    book = CostLedger(powers, MODEL_BYTES, play.controller.protocol.fills_the_period)
    kept = []
    for number, (at, item) in enumerate(play.log):
        book.record(at, item)
        for _ in range(moments.count(number)):
            kept.append((number, book.moment(at), book.costs(at), book.totals(at)))

    for number, moment, costs, totals in kept:
        assert book.costs(moment) == costs
        assert book.totals(moment) == totals
        until = play.log[: number + 1]
        slow = slow_bill(until, moment.at, powers, play.controller.protocol.fills_the_period)
        assert costs.by_learner == slow
        assert costs.refused == sum(share.refused for share in slow.values())
        for name in Totals.__dataclass_fields__:
            assert getattr(totals, name) == getattr(costs, name)


def test_a_past_bill_leaves_out_who_joined_later():
    """Also where a later moment remembers an account of the newcomer."""
    book = fold(ledger(), *ROUND)
    early, bill = book.moment(8.0), book.costs(8.0)
    fold(book, (9.0, joined("late")))
    later = book.moment(9.0)
    fold(book, (9.0, sent("late", 2)), (12.0, done("late", 3, 3.0, 2)))

    assert book.learners == 3
    assert book.costs(early) == bill
    assert set(bill.by_learner) == {"fast", "slow"}
    assert book.costs(later).by_learner["late"].steps == 0


def test_what_is_kept_of_the_past_goes_with_its_last_moment():
    """A long run does not pile up accounts: a moment that nobody holds is gone, and only later ones stay."""
    book = fold(ledger(), *ROUND)
    first, second = (weakref.ref(book.moment(at)) for at in (8.0, 9.0))

    fold(book, (10.0, sent("fast", 2)))

    assert first() is None
    assert second() is not None, "the latest: an account that changes is kept in case somebody holds it"
    assert len(second().before) == 1


def test_steps_claimed_by_an_invalid_update_do_not_count():
    """A refused claim of a billion steps costs time and an update request, but no steps."""
    costs = fold(
        ledger(),
        (0.0, LearnerJoined("gpu", 100, 10)),
        (0.0, SendTask("gpu", LocalTask(0, CommunityStamp(), Budget(10)), model(0.0, 0.0, 0.0))),
        (3.0, UpdateRequest("gpu", 0, 10**9, 3.0, 0.3, model(0.0, 0.0, 0.0))),
        (3.0, UpdateRefused("gpu", 0, "invalid", "it claims 1000000000 steps")),
    ).costs(3.0)

    assert (costs.steps, costs.update_requests, costs.refused) == (0, 1, 1)
    assert costs.cumulative_time == 3.0


def test_bytes_that_travel_again_are_charged() -> None:
    """A transfer that was cut and began again counts with what had travelled before, but not at an earlier moment."""
    costs = fold(ledger(), (0.0, joined("far")), (0.0, sent("far")))
    before = costs.moment(1.0)
    costs.record(5.0, replace(done("far", 10, 2.0), cuts=2, resent=700))
    assert costs.costs(5.0).bytes_exchanged == costs.totals(5.0).bytes_exchanged == 2 * MODEL_BYTES + 700
    assert costs.costs(before).bytes_exchanged == MODEL_BYTES


def test_waiting_for_a_window_is_idle_as_in_a_simulation() -> None:
    """There it hands in at once and waits afterwards; in a deployment it hands in when a window has a place."""
    begun = [(0.0, joined("a")), (0.0, joined("b")), (0.0, sent("a", 1)), (0.0, sent("b", 2))]
    simulated = fold(ledger(), *begun, (6.0, done("a", 10, 4.0, 1)), (9.0, done("b", 10, 7.0, 2)))
    fixed = CohortFixed(0, ("a", "c"), (1, 0), (3.0, 0.0))
    deployed = fold(ledger(), *begun, (8.0, fixed), (9.0, done("a", 10, 4.0, 1)), (9.0, done("b", 10, 7.0, 2)))
    assert deployed.costs(9.0) == simulated.costs(9.0)
    own = deployed.costs(9.0).by_learner["a"]
    assert (own.active, own.transfer, own.idle) == (4.0, 2.0, 3.0)
    late = fold(ledger(), *begun, (8.0, CohortFixed(0, ("a",), (1,), (100.0,))))
    assert late.costs(8.0).by_learner["a"].active == 0.0, "nobody waits for longer than its task has existed"
