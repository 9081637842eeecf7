"""Small plays, one for each thing that a protocol promises: events in, actions out."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from core.play import Actor, Play, model, snapshot
from metis.core.controller import Controller
from metis.core.events import (
    Budget,
    CommunityPublished,
    CommunityStamp,
    DeadlinePassed,
    Evaluated,
    Finish,
    LearnerJoined,
    LearnerLeft,
    LearnerWithdrawn,
    LocalTask,
    SendTask,
    StopRequested,
    TaskFailed,
    UpdateCommitted,
    UpdateRefused,
    UpdateRequest,
)
from metis.core.model import Layout, Model, TensorSpec
from metis.core.policies import POLICIES, async_fedavg, fedasync, fedbuff, fedrec, semisync_fedavg, sync_fedavg
from metis.core.policy import Policy
from metis.core.protocols import Asynchronous, SemiSynchronous, Synchronous
from metis.core.stop import StopRule, Target
from metis.errors import UnexpectedEvent

EPOCH = 50  # batches: 5,000 examples in batches of 100, as `Actor` has them
FAST, SLOW = 0.03, 0.30

every_policy = pytest.mark.parametrize("policy", [make() for make in POLICIES.values()], ids=lambda each: each.name)


def update(learner: str, task: int, local_model: Model | None = None, **claims: float) -> UpdateRequest:
    """A valid update, unless the claims make it otherwise."""
    honest = {"steps": 1, "seconds": 0.1, "time_per_batch": 0.1}
    return UpdateRequest(learner, task, local_model=local_model or model(1, 1, 1), **(honest | claims))  # type: ignore[arg-type]


# --- synchronous ------------------------------------------------------------------------------


def test_sync_gives_everybody_the_same_epochs_and_waits_for_the_slowest():
    """The fast learner hands in early, has no task until the slow one is done, then both start together."""
    play = Play(sync_fedavg(local_epochs=4), gpu=FAST, cpu=SLOW)

    play.run_until(time=4 * EPOCH * SLOW)
    assert play.waiting() == ["gpu"]
    assert play.version == 0
    play.run_until(community_version=1)

    assert play.now == pytest.approx(4 * EPOCH * SLOW)
    assert play.tasks() == {"gpu": 4 * EPOCH, "cpu": 4 * EPOCH}


@pytest.mark.parametrize("policy", [sync_fedavg(0.5), async_fedavg(0.5)], ids=lambda policy: policy.name)
def test_fractional_epochs_are_rounded_down_to_batches(policy):
    """Half an epoch of 51 batches is 25; a tiny fraction is still one batch."""
    play = Play(policy, Actor("odd", FAST, examples=5001), Actor("tiny", FAST, examples=7))

    play.run_until(time=1e-9)

    assert play.tasks() == {"odd": math.floor(0.5 * math.ceil(5001 / 100)), "tiny": 1}


def test_sync_round_limit_ends_a_slow_learners_task():
    """A learner that reaches the limit hands in the batches that it has; it is not late."""
    limit = 10.0
    play = Play(sync_fedavg(local_epochs=4, round_limit=limit), gpu=FAST, snail=0.8)

    play.run_until(community_version=1)

    steps = {item.learner: item.steps for item in play.items(UpdateRequest)}
    assert steps == {"gpu": 4 * EPOCH, "snail": math.ceil(limit / 0.8)}
    assert play.refused() == []


def test_sync_goes_on_without_a_silent_learner_after_the_limit():
    """The barrier waits for the limit and its grace, then the others train on."""
    silent = Actor("silent", FAST, mood="silent")
    play = Play(sync_fedavg(1, round_limit=10.0, grace=0.2), Actor("gpu", FAST), silent)

    play.run_until(community_version=1)

    assert play.now == pytest.approx(10.0 * (1 + 0.2))
    assert play.published()[0].contributors == 1
    assert set(play.tasks()) == {"gpu", "silent"}


# --- semi-synchronous -------------------------------------------------------------------------


def test_semi_sync_gives_the_fast_learner_more_steps():
    """After the cold start both learners are due back at the same moment."""
    play = Play(semisync_fedavg(slowest_learner_epochs=2), gpu=FAST, cpu=SLOW)

    play.run_until(community_version=1)
    assert play.tasks() == {"gpu": 2 * EPOCH * SLOW / FAST, "cpu": 2 * EPOCH}
    begun = play.now
    play.run_until(community_version=2)

    returns = [at for at, item in play.log if isinstance(item, UpdateRequest) and at > begun]
    assert returns == pytest.approx([begun + 2 * EPOCH * SLOW] * 2)


def test_cold_start_is_one_epoch_and_counts_as_the_first_round():
    """R4: everybody does one epoch, the models are mixed, the period is not yet known."""
    play = Play(semisync_fedavg(2), gpu=FAST, cpu=SLOW)

    play.run_until(time=1e-9)

    assert play.budgets() == {name: Budget(EPOCH, math.inf) for name in ("gpu", "cpu")}
    assert play.controller.protocol.synchronization_period is None
    assert play.controller.deadline == math.inf
    play.run_until(community_version=1)
    assert play.published()[0].contributors == 2
    assert play.controller.protocol.synchronization_period == pytest.approx(2 * EPOCH * SLOW)


def test_cold_start_limit_holds_up_nobody_and_loses_nobody():
    """R3: a very slow learner stops at the batch after the limit, and its speed is known all the same."""
    limit = 3.0
    play = Play(semisync_fedavg(1, cold_start_limit=limit), gpu=FAST, snail=0.8)

    play.run_until(community_version=1)

    steps = {item.learner: item.steps for item in play.items(UpdateRequest)}
    assert steps == {"gpu": EPOCH, "snail": math.ceil(limit / 0.8)}
    assert play.now == pytest.approx(math.ceil(limit / 0.8) * 0.8)
    assert play.refused() == []
    assert play.tasks() == {"gpu": math.floor(EPOCH * 0.8 / FAST), "snail": EPOCH}


def test_cold_start_limit_with_a_batch_far_longer_than_it():
    """The others go on at the limit plus grace; the first update is late, is rebased, and fits from then on."""
    limit, grace = 3.0, 0.1
    play = Play(semisync_fedavg(1, cold_start_limit=limit, grace=grace), gpu=FAST, glacier=20.0)

    play.run_until(community_version=1)
    assert play.now == pytest.approx(limit * (1 + grace))
    play.run_until(time=20.1)
    (refused,) = play.refused()
    assert (refused.learner, refused.kind) == ("glacier", "late")
    count = play.version
    play.run_until(community_version=count + 3)

    assert play.refused() == [refused]
    assert play.published()[-1].contributors == 2


@pytest.mark.parametrize(("budget", "share"), [("steps", 1 / 1.8), ("all_steps", 1.0)])
def test_static_timings_with_and_without_a_limit_of_seconds(budget: str, share: float):
    """R13: a learner that has become slower stops when the period ends, or does all its B_k batches."""
    play = Play(semisync_fedavg(2, timings="cold_start", budget=budget), gpu=FAST, cpu=SLOW)
    play.run_until(community_version=1)
    play.actors["cpu"].time_per_batch = 1.8 * SLOW  # from its next task on
    play.run_until(community_version=2)
    begun = play.now
    play.run_until(community_version=3)

    done = [item.steps for item in play.items(UpdateRequest) if item.learner == "cpu"]
    assert done == [EPOCH, 2 * EPOCH, math.ceil(share * 2 * EPOCH)]
    assert play.now - begun == pytest.approx(done[-1] * 1.8 * SLOW)
    assert play.published()[-1].contributors == 2 and play.refused() == []


@pytest.mark.parametrize("lam", [0.5, 0.13, 1.7, 3])
def test_lambda_may_be_fractional(lam: float):
    """B_k = lambda * t_max^e / t_beta_k, rounded down."""
    play = Play(semisync_fedavg(lam), gpu=FAST, cpu=SLOW)

    play.run_until(community_version=1)

    expected = {name: math.floor(lam * EPOCH * SLOW / time + 1e-6) for name, time in (("gpu", FAST), ("cpu", SLOW))}
    assert play.tasks() == expected


def test_a_late_joiner_waits_for_the_barrier_and_has_its_own_cold_start():
    """It joins the next round with one epoch, at most the period; then it is scheduled like the others."""
    play = Play(semisync_fedavg(2), gpu=FAST, cpu=SLOW)
    play.run_until(community_version=1)
    period = 2 * EPOCH * SLOW
    play.cast(Actor("new", 0.1), at=play.now + 1)

    play.run_until(time=play.now + 2)
    assert play.waiting() == ["new"]
    play.run_until(community_version=2)
    assert play.budgets()["new"] == Budget(EPOCH, pytest.approx(period))
    play.run_until(community_version=3)

    assert play.published()[-1].contributors == 3
    assert play.tasks() == {"gpu": 2 * EPOCH * SLOW / FAST, "cpu": 2 * EPOCH, "new": 2 * EPOCH * SLOW / 0.1}


def test_a_late_joiner_with_a_cold_start_limit_below_the_period():
    """The limit of the cold start binds a newcomer as it bound everybody."""
    play = Play(semisync_fedavg(2, cold_start_limit=20.0), gpu=FAST, cpu=SLOW)
    play.cast(Actor("new", 0.1), at=16.0)

    play.run_until(community_version=2)

    assert play.budgets()["new"] == Budget(EPOCH, 20.0)


def test_a_newcomer_that_is_the_slowest_stretches_the_period_once_it_is_known():
    """Its first, late update shows its speed; the next period fits it."""
    play = Play(semisync_fedavg(1), gpu=FAST, cpu=SLOW)
    play.run_until(community_version=1)
    play.cast(Actor("snail", 30.0), at=play.now + 1)

    play.run_until(time=100.0)
    assert [refused.kind for refused in play.refused()] == ["late"]
    play.run_until(community_version=play.version + 1)

    assert play.controller.protocol.synchronization_period == pytest.approx(EPOCH * 30.0)


def test_a_leaving_learners_speed_no_longer_counts():
    """The period is that of the slowest who is there."""
    play = Play(semisync_fedavg(2), gpu=FAST, cpu=SLOW)
    play.run_until(community_version=1)
    play.leave("cpu", at=play.now + 1)

    play.run_until(community_version=2)

    assert play.tasks() == {"gpu": 2 * EPOCH}
    assert play.controller.protocol.synchronization_period == pytest.approx(2 * EPOCH * FAST)


@pytest.mark.parametrize("policy", [sync_fedavg(1), semisync_fedavg(1)], ids=lambda policy: policy.name)
def test_the_barrier_opens_when_the_last_awaited_learner_leaves(policy):
    """The waiting learners go on at that moment, from a model without the one that left."""
    play = Play(policy, gpu=FAST, cpu=SLOW)
    play.run_until(time=EPOCH * FAST + 1)
    assert play.waiting() == ["gpu"]
    play.leave("cpu", at=play.now + 2)
    moment = play.now + 2

    play.run_until(community_version=1)

    assert play.now == moment
    assert play.published()[0].contributors == 1
    assert set(play.tasks()) == {"gpu"}


def test_who_comes_back_is_scheduled_by_the_speed_that_is_known():
    """No second cold start for a learner that was here before."""
    play = Play(semisync_fedavg(2), gpu=FAST, cpu=SLOW)
    play.run_until(community_version=1)
    play.leave("gpu", at=play.now + 1)
    play.join("gpu", at=play.now + 2)

    play.run_until(community_version=2)

    assert play.published()[-1].contributors == 1
    assert play.tasks() == {"gpu": 2 * EPOCH * SLOW / FAST, "cpu": 2 * EPOCH}


def test_a_late_learner_is_refused_with_late_and_rebased():
    """I13: its stale model changes nothing, and it is in the round after."""
    play = Play(semisync_fedavg(2, grace=0.1), gpu=FAST, cpu=SLOW)
    play.run_until(community_version=1)
    begun, period = play.now, 2 * EPOCH * SLOW
    play.actors["cpu"].transfer = 1000.0  # from its next task on: the open one is already timed
    play.run_until(community_version=2)
    play.actors["cpu"].transfer = 0.0
    play.run_until(community_version=3)
    assert play.now == pytest.approx(begun + period + period * (1 + 0.1) + SLOW)
    assert play.published()[-1].contributors == 1
    arrival = begun + period + 1000.0 + period
    play.run_until(time=arrival - 1e-6)
    before = play.version

    play.run_until(community_version=before + 2)

    (refused,) = play.refused()
    assert (refused.learner, refused.kind) == ("cpu", "late")
    assert "community model 2" in refused.reason
    assert play.published()[-1].contributors == 2


def test_a_late_learner_is_not_awaited_a_second_time():
    """Rounds go on at the others' pace while it is still away with its old task."""
    play = Play(semisync_fedavg(2, grace=0.1), gpu=FAST, cpu=SLOW)
    play.run_until(community_version=1)
    play.actors["cpu"].mood = "silent"
    play.run_until(community_version=3)
    behind = play.now

    play.run_until(community_version=4)

    # The period still fits cpu, which counts as there until somebody says otherwise.
    assert play.now == pytest.approx(behind + 2 * EPOCH * SLOW)
    assert play.published()[-1].contributors == 1


def test_nobody_answers_before_the_deadline():
    """All are late, no model is published; the first that answers is still welcome and goes on alone."""
    policy = sync_fedavg(1, round_limit=10.0)
    play = Play(policy, Actor("a", FAST, transfer=50.0), Actor("b", FAST, transfer=60.0))

    play.run_until(time=50.0)
    assert play.version == 0
    assert set(play.tasks()) == {"a", "b"}
    assert play.controller.deadline == math.inf
    play.run_until(time=60.0)

    assert play.published()[0].contributors == 1
    play.run_until(time=65.0)
    assert [(refused.learner, refused.kind) for refused in play.refused()] == [("b", "late")]


def test_deadline_mode_trains_for_the_period_and_hands_in_what_there_is():
    """After the cold start a task has no steps, only seconds; a learner that became slower is still in time."""
    play = Play(semisync_fedavg(2, budget="deadline"), gpu=FAST, cpu=SLOW)
    period = 2 * EPOCH * SLOW

    play.run_until(community_version=1)
    assert play.budgets() == {name: Budget(None, pytest.approx(period)) for name in ("gpu", "cpu")}
    play.run_until(community_version=2)

    steps = {item.learner: item.steps for item in play.items(UpdateRequest)[2:]}
    assert steps == {"gpu": period / FAST, "cpu": period / SLOW}
    assert play.refused() == []


@pytest.mark.parametrize("timings", ["cold_start", "every_round"])
def test_static_timings_keep_the_first_measurement_and_the_others_follow_the_learner(timings: str):
    """R13: a learner becomes twice as fast; only re-measured timings give it twice the steps."""
    play = Play(semisync_fedavg(2, timings=timings), gpu=FAST, cpu=SLOW)
    play.run_until(time=1e-9)
    play.actors["gpu"].time_per_batch = FAST / 2

    play.run_until(community_version=3)

    speed = FAST if timings == "cold_start" else FAST / 2
    assert play.tasks() == {"gpu": 2 * EPOCH * SLOW / speed, "cpu": 2 * EPOCH}


def test_seconds_bind_a_learner_that_has_become_slower():
    """Its steps no longer fit the period; it hands in fewer, in time."""
    play = Play(semisync_fedavg(2), gpu=FAST, cpu=SLOW)
    play.run_until(time=1e-9)
    play.actors["gpu"].time_per_batch = 10 * FAST

    play.run_until(community_version=2)

    period = 2 * EPOCH * SLOW
    steps = {item.learner: item.steps for item in play.items(UpdateRequest)[2:]}
    assert steps == {"gpu": period / (10 * FAST), "cpu": period / SLOW}
    assert play.published()[-1].contributors == 2
    assert play.refused() == []


speeds = st.lists(st.floats(0.01, 2.0), min_size=1, max_size=6)
sizes = st.integers(1, 3000)


@given(st.data(), st.floats(0.1, 4.0))
def test_semi_sync_idle_time_is_less_than_a_batch(data, lam):
    """I10: given honest timings nobody waits longer than one batch of its own for the round to close.

    Only where lambda gives the slowest learner less than a batch is the period that one batch (R1).
    """
    actors = [
        Actor(f"learner-{k}", speed, data.draw(sizes), batch_size=32) for k, speed in enumerate(data.draw(speeds))
    ]
    play = Play(semisync_fedavg(lam), *actors, stop=StopRule(rounds=4)).run()

    closes = play.times(CommunityPublished)
    waits = {actor.name: 0.0 for actor in actors}
    for at, item in play.log:
        if isinstance(item, UpdateRequest) and at > closes[0]:
            close = min(close for close in closes if close >= at)
            waits[item.learner] = max(waits[item.learner], close - at)
    period = lam * max(actor.epoch_steps * actor.time_per_batch for actor in actors)
    too_short = max(0.0, max(actor.time_per_batch for actor in actors) - period)
    for actor in actors:
        assert waits[actor.name] <= too_short + actor.time_per_batch * (1 + 1e-6)


@given(st.data(), st.floats(0.1, 4.0), st.floats(0, 0.5))
def test_semi_sync_rounds_end_whatever_others_do(data, lam, grace):
    """I11: learners fall silent or fail; a round still lasts at most the period, its grace and one batch."""
    moods = st.sampled_from(["well", "silent", "failing", "diverging"])
    actors = [Actor(f"learner-{k}", speed, 500, 32) for k, speed in enumerate(data.draw(speeds))]
    policy = semisync_fedavg(lam, cold_start_limit=20.0, grace=grace)
    play = Play(policy, *actors, Actor("reliable", 0.1))
    play.run_until(community_version=1)
    for actor in actors:
        actor.mood = data.draw(moods)
    play.run_until(community_version=5)

    closes = play.times(CommunityPublished)
    slowest = max(actor.time_per_batch for actor in play.actors.values())
    period = lam * slowest * math.ceil(5000 / 32)
    assert len(closes) == 5
    for begin, end in pairwise(closes):
        assert end - begin <= period * (1 + grace) + 2 * slowest + 1e-6


# --- asynchronous -----------------------------------------------------------------------------


def test_async_learners_never_wait():
    """Each trains its epochs, hands in, and goes on at once from a model that holds its own."""
    play = Play(async_fedavg(local_epochs=4), gpu=FAST, cpu=SLOW)

    play.run_until(time=4 * EPOCH * SLOW * 1.01)

    assert play.waiting() == []
    assert play.tasks() == {"gpu": 4 * EPOCH, "cpu": 4 * EPOCH}
    assert play.costs().idle_time == pytest.approx(0)
    by_learner = [item.learner for item in play.committed()]
    assert by_learner.count("gpu") == SLOW / FAST
    assert by_learner.count("cpu") == 1
    assert play.version == SLOW / FAST + 1


def test_async_first_update_becomes_the_community_model():
    """R9: W = 0, P = 0 at the start."""
    play = Play(async_fedavg(1), gpu=FAST, cpu=SLOW)

    play.run_until(community_version=1)

    (first,) = play.items(UpdateRequest)
    assert play.published()[0].community_model.vector == pytest.approx(first.local_model.vector)


def test_fedrec_discounts_steps_that_others_committed():
    """The slow learner's first update is worth (steps of the fast ones meanwhile - its own)^(-1/2)."""
    play = Play(fedrec(local_epochs=1), gpu=FAST, cpu=SLOW)

    play.run_until(time=EPOCH * SLOW * 1.01)

    *fast, slow = play.committed()[: [item.learner for item in play.committed()].index("cpu") + 1]
    assert len(fast) > 1
    assert {item.contribution_value for item in fast} == {1.0}
    assert slow.contribution_value == (EPOCH * len(fast) - EPOCH) ** -0.5


def test_recency_counts_steps_that_are_committed_but_not_yet_published():
    """R7: s_c is the counter of all commits, also where a buffer holds the publication back."""
    policy = Policy("mine", Asynchronous(1), fedrec().contribution, fedbuff(buffer_size=9).mixing)
    controller = Controller(policy, model(), learners_expected=2)
    for name in ("a", "b"):
        controller.handle(LearnerJoined(name, 500, 100), 0.0)
    controller.handle(update("a", 0, steps=5), 1.0)

    committed, _ = controller.handle(update("b", 1, steps=2), 2.0)

    assert committed.contribution_value == (5 - (0 + 2)) ** -0.5


def test_fedasync_discounts_versions():
    """(T - tau + 1)^(-1/2): the slow learner starts from version 0 while the fast one publishes."""
    play = Play(fedasync(local_epochs=1), gpu=FAST, cpu=SLOW)

    play.run_until(time=EPOCH * SLOW * 1.01)

    *fast, slow = play.committed()[: [item.learner for item in play.committed()].index("cpu") + 1]
    assert len(fast) > 1
    assert {item.contribution_value for item in fast} == {1.0}
    assert slow.contribution_value == (len(fast) + 1) ** -0.5


def test_fedbuff_publishes_every_k_updates_and_nobody_waits_for_it():
    """Learners train on from the current model while the buffer fills."""
    play = Play(fedbuff(1, buffer_size=3), a=FAST, b=FAST, c=SLOW)

    play.run_until(community_version=2)

    assert len(play.committed()) == 2 * 3
    assert [each.contributors for each in play.published()] == [3, 3]
    assert play.waiting() == []


def test_fedbuff_mixes_differences_to_the_model_that_a_learner_started_from():
    """A stale learner's difference is taken to its own base, not to the current model."""
    controller = Controller(fedbuff(1, buffer_size=1), model(), learners_expected=2)
    for name in ("a", "b"):
        controller.handle(LearnerJoined(name, 1, 1), 0.0)
    controller.handle(update("a", 0, model(1, 1, 1)), 1.0)

    controller.handle(update("b", 1, model(2, 2, 2)), 2.0)

    assert controller.community.model.vector == pytest.approx([1 + (2 - 0) * 2**-0.5] * 3)


# --- every protocol ---------------------------------------------------------------------------


@every_policy
def test_nothing_starts_before_the_expected_learners_are_there(policy: Policy):
    """The last of the expected learners starts everybody, in the order of joining."""
    controller = Controller(policy, model(), learners_expected=3)

    assert controller.handle(LearnerJoined("b", 500, 100), 0.0) == []
    assert controller.handle(LearnerLeft("b"), 1.0) == []
    assert controller.handle(LearnerJoined("a", 500, 100), 2.0) == []
    assert controller.handle(LearnerJoined("c", 500, 100), 3.0) == []
    actions = controller.handle(LearnerJoined("b", 500, 100), 4.0)

    actions = [action for action in actions if isinstance(action, SendTask)]
    assert [action.learner for action in actions] == ["b", "a", "c"]
    assert [action.task.number for action in actions] == [0, 1, 2]
    assert {action.task.based_on for action in actions} == {CommunityStamp(0, 0)}


@every_policy
def test_everybody_gone_then_back(policy: Policy):
    """An empty federation waits without an error; the first that comes back trains at once."""
    play = Play(policy, gpu=FAST, cpu=SLOW)
    play.run_until(time=7.0)
    for name in ("gpu", "cpu"):
        play.leave(name, at=7.0)
    play.run_until(time=7.1)
    assert play.tasks() == {}
    play.join("cpu", at=100.0)

    play.run_until(time=100.1)

    assert set(play.tasks()) == {"cpu"}
    version = play.version
    play.run_until(community_version=version + 1)
    assert play.version == version + 1


@every_policy
def test_a_failing_learner_is_set_aside_until_it_joins_again(policy: Policy):
    """The fourth failure in a row is one too many; the others are not disturbed."""
    play = Play(policy, Actor("bad", FAST, mood="failing"), Actor("good", FAST))

    play.run_until(time=100.0)

    (aside,) = play.set_aside()
    assert aside.learner == "bad"
    assert [item.kind for item in play.refused()] == ["failed"] * 4
    assert set(play.tasks()) == {"good"}
    assert len(play.items(TaskFailed)) == 4
    play.actors["bad"].mood = "well"
    play.join("bad", at=100.0)
    play.run_until(time=200.0)
    assert "bad" in play.tasks()
    assert len(play.refused()) == 4


@every_policy
def test_a_diverging_learner_is_refused_by_name_and_the_run_goes_on(policy: Policy):
    """NaN never enters the community model."""
    play = Play(policy, Actor("bad", FAST, mood="diverging"), a=FAST, b=FAST, c=FAST)

    play.run_until(time=100.0)

    assert {(item.learner, item.kind) for item in play.refused()} == {("bad", "invalid")}
    assert "tensor 'weight' holds 2 of 2" in play.refused()[0].reason
    assert len(play.set_aside()) == 1
    assert play.version > 1
    assert np.isfinite(play.controller.community.model.vector).all()


@every_policy
def test_a_good_update_clears_the_record(policy: Policy):
    """Only refusals in a row count."""
    play = Play(policy, Actor("moody", FAST, mood="failing"))
    for _ in range(3):
        play.run_until(time=play.now + 1e-9)
        while len(play.refused()) % 3 != 2:
            play.step()
        play.actors["moody"].mood = "well"
        play.step()  # the failure that was under way
        play.step()
        play.actors["moody"].mood = "failing"
        play.step()
        assert play.controller.roster["moody"].refusals == 0
    assert play.set_aside() == []


def test_late_updates_do_not_set_a_learner_aside():
    """Being slow does not count against a learner (R3)."""
    limit = 2.0
    play = Play(sync_fedavg(1, round_limit=limit), Actor("gpu", FAST), Actor("far", FAST, transfer=0.0))
    play.run_until(community_version=1)
    for _ in range(6):
        # Its transfer grows faster than the allowance that the last one earned it.
        play.actors["far"].transfer = 2 * play.actors["far"].transfer + 10
        refused = len(play.refused())
        while len(play.refused()) == refused:
            play.step()

    assert {item.kind for item in play.refused()} == {"late"}
    assert play.set_aside() == []


@every_policy
def test_a_withdrawn_learner_may_come_back_without_its_old_contribution(policy: Policy):
    """I14: nothing of what it withdrew is in the sums when it returns."""
    play = Play(policy, gpu=FAST, cpu=FAST)
    play.run_until(community_version=3)
    play.withdraw("gpu", at=play.now)
    play.run_until(time=play.now + 1e-6)
    assert set(play.tasks()) == {"cpu"}
    assert "local/gpu" not in play.controller.community.arrays()

    play.join("gpu", at=play.now + 1e-6)
    play.run_until(time=play.now + 1e-6)

    assert "local/gpu" not in play.controller.community.arrays()


@every_policy
def test_runs_of_one_policy_share_nothing(policy: Policy):
    """A policy is settings: the second run of it is the first one again."""
    runs = [Play(policy, gpu=FAST, cpu=SLOW).run_until(time=100.0) for _ in range(2)]

    assert runs[0].controller.protocol is not policy.protocol
    assert runs[0].log == runs[1].log
    assert snapshot(runs[0].controller) == snapshot(runs[1].controller)


# --- illegal events ---------------------------------------------------------------------------

ILLEGAL = {
    "a stranger leaves": (LearnerLeft("x"), "not known"),
    "a stranger withdraws": (LearnerWithdrawn("x"), "not known"),
    "a stranger hands in": (update("x", 0), "not known"),
    "a stranger fails": (TaskFailed("x", 0, "?"), "not known"),
    "joining twice": (LearnerJoined("gpu", 500, 100), "here already"),
    "joining without data": (LearnerJoined("new", 0, 100), "at least 1"),
    "joining without batches": (LearnerJoined("new", 500, 0), "at least 1"),
    "somebody else's task": (update("gpu", 1), "its open task is"),
    "a task that does not exist": (update("gpu", 10**6), "its open task is"),
    "failing somebody else's task": (TaskFailed("gpu", 1, "?"), "its open task is"),
    "an update from a learner that is away": (update("away", 2), "no open task"),
}


@every_policy
@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_event_raises_and_changes_nothing(policy: Policy, name: str):
    """The sentence names the learner; the state is the same to the bit."""
    event, sentence = ILLEGAL[name]
    play = Play(policy, gpu=FAST, cpu=SLOW, away=SLOW)
    play.leave("away", at=0.1)
    play.run_until(community_version=1)
    before = snapshot(play.controller)

    with pytest.raises(UnexpectedEvent, match=f"'{event.learner}'.*{sentence}"):  # type: ignore[union-attr]
        play.controller.handle(event, play.now)

    assert snapshot(play.controller) == before


@every_policy
def test_a_duplicate_update_counts_once(policy: Policy):
    """The second copy answers no open task: it raises, and the model is that of one copy."""
    play = Play(policy, gpu=FAST, cpu=SLOW)
    play.run_until(community_version=1)
    (copy, *_) = play.items(UpdateRequest)
    before = snapshot(play.controller)

    with pytest.raises(UnexpectedEvent):
        play.controller.handle(copy, play.now)

    assert snapshot(play.controller) == before


@every_policy
@pytest.mark.parametrize(
    ("claims", "sentence"),
    [
        ({"steps": 0}, "it claims 0 steps, the task allows 1 to"),
        ({"steps": -5}, "it claims -5 steps"),
        ({"steps": 10**6}, "it claims 1000000 steps"),
        ({"seconds": math.nan}, "nan seconds of training"),
        ({"seconds": -1.0}, "-1.0 seconds of training"),
        ({"seconds": math.inf}, "inf seconds of training"),
        ({"time_per_batch": 0.0}, "0.0 seconds per batch"),
        ({"time_per_batch": math.nan}, "nan seconds per batch"),
        ({"time_per_batch": math.inf}, "inf seconds per batch"),
        ({"time_per_batch": 1e-320}, "it claims 1e-320 seconds per batch, which must be at least 1e-09"),
        ({"local_model": model(math.nan, 0, 0)}, "tensor 'weight' holds 1 of 2"),
        ({"local_model": model(0, 0, -math.inf)}, "tensor 'bias' holds 1 of 1"),
        ({"local_model": Model(Layout((TensorSpec("w", (1,)),)), np.ones(1, np.float32))}, "layout"),
    ],
)
def test_an_invalid_update_is_refused_before_it_has_any_effect(policy: Policy, claims, sentence):
    """I17: the community keeps every bit, the learner's speed is not believed, the learner gets another task."""
    controller = Controller(policy, model())
    *_, sent = controller.handle(LearnerJoined("a", 500, 100), 0.0)
    before = snapshot(controller)

    refused, *_, again = controller.handle(update("a", sent.task.number, **claims), 1.0)

    assert (refused.kind, refused.learner, refused.task) == ("invalid", "a", sent.task.number)
    assert sentence in refused.reason
    assert isinstance(again, SendTask)
    assert again.task.based_on == sent.task.based_on
    assert snapshot(controller)["community"] == before["community"]
    assert controller.roster["a"].time_per_batch is None
    assert controller.roster["a"].refusals == 1


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_contribution_value_that_is_not_a_positive_number_is_refused(value: float):
    """A user's own contribution function cannot spoil the sums (I2)."""
    policy = Policy("mine", Asynchronous(1), lambda *_: value, async_fedavg().mixing)
    controller = Controller(policy, model())
    controller.handle(LearnerJoined("a", 1, 1), 0.0)
    before = snapshot(controller)["community"]

    refused, _ = controller.handle(update("a", 0), 1.0)

    assert refused.kind == "invalid"
    assert f"contribution value {value}" in refused.reason
    assert snapshot(controller)["community"] == before
    assert policy.label == "mine"


@pytest.mark.parametrize("claim", [5e-324, 1e-300, 1e300, 1.7e308])
def test_absurd_times_per_batch_do_not_abort_a_run(claim: float):
    """I13: finite and positive, hence valid, and yet no budget overflows."""
    controller = Controller(semisync_fedavg(2), model(), learners_expected=2)
    for name in ("honest", "liar"):
        controller.handle(LearnerJoined(name, 500, 100), 0.0)
    controller.handle(update("honest", 0), 1.0)

    actions = controller.handle(update("liar", 1, time_per_batch=claim), 2.0)

    tasks = [action for action in actions if isinstance(action, SendTask)]
    assert [task.learner for task in tasks] == ["honest", "liar"]
    assert all(1 <= task.task.budget.steps <= 2**53 for task in tasks)


# --- the end ----------------------------------------------------------------------------------


@every_policy
def test_stop_after_rounds(policy: Policy):
    """The last model is published, nobody is sent on, everything after is refused or ignored."""
    play = Play(policy, gpu=FAST, cpu=SLOW, stop=StopRule(rounds=3, target=Target("accuracy", 0.5))).run()

    assert play.version == 3
    assert play.finish_reason() == "3 rounds are done"
    assert isinstance(play.log[-1][1], Finish)
    assert play.controller.deadline == math.inf
    for event in (DeadlinePassed(), StopRequested(), Evaluated(3, {"accuracy": 0.9})):
        assert play.handle(event) == []
    play.handle(LearnerLeft("gpu"))
    assert play.handle(LearnerJoined("gpu", 500, 100)) == []
    with pytest.raises(UnexpectedEvent, match="'cpu' sent an update, but the federation has ended"):
        play.controller.handle(update("cpu", 0), play.now)


@every_policy
def test_stop_after_seconds(policy: Policy):
    """The controller asks to be woken at the end; an earlier wake-up does nothing."""
    play = Play(policy, gpu=FAST, cpu=SLOW, stop=StopRule(seconds=77.0))
    play.run_until(time=50.0)
    assert play.handle(DeadlinePassed()) == []

    play.run()

    assert play.now == 77.0
    assert play.finish_reason() == "77 seconds have passed"


@every_policy
def test_stop_after_update_requests_publishes_what_was_committed(policy: Policy):
    """A barrier closes its round first: nobody's work is left out of the final model."""
    play = Play(policy, gpu=FAST, cpu=SLOW, stop=StopRule(update_requests=3)).run()

    requests = 3 if policy.protocol.accepts_stale else 4
    assert play.costs().update_requests == requests
    assert play.finish_reason() == f"{requests} update requests were made"
    assert play.published()[-1].stamp.steps == sum(item.steps for item in play.items(UpdateRequest))


@every_policy
def test_stop_after_steps(policy: Policy):
    """A budget of computing ends the run between two rounds, once it is used up."""
    play = Play(policy, gpu=FAST, cpu=SLOW, stop=StopRule(steps=300)).run()

    committed = sum(item.steps for item in play.items(UpdateRequest))
    assert committed >= 300
    assert play.finish_reason() == f"{committed} steps were made"
    assert all(published.stamp.steps < 300 for published in play.published()[:-1])


def test_stop_after_update_requests_with_a_buffer_half_full():
    """FedBuff publishes no half buffer, not even at the end."""
    play = Play(fedbuff(1, buffer_size=5), gpu=FAST, stop=StopRule(update_requests=3)).run()

    assert play.published() == []
    assert play.finish_reason() == "3 update requests were made"


@every_policy
@pytest.mark.parametrize(
    ("target", "misses", "hit"),
    [
        (Target("accuracy", 0.7), [0.1, 0.69, math.nan], 0.7),
        (Target("mae", 3.0, higher_is_better=False), [5.0, 3.01, math.nan], 3.0),
    ],
)
def test_stop_at_a_target(policy: Policy, target: Target, misses, hit):
    """The first evaluation that reaches it ends the run; others, or other metrics, do not."""
    play = Play(policy, gpu=FAST, cpu=SLOW, stop=StopRule(target=target))
    play.run_until(community_version=1)

    for miss in misses:
        assert not any(isinstance(action, Finish) for action in play.handle(Evaluated(1, {target.metric: miss})))
    assert play.handle(Evaluated(1, {"something else": hit})) == []
    assert play.handle(Evaluated(1, {target.metric: hit}, conclusive=False)) == [], "too few have measured it"
    play.handle(Evaluated(1, {target.metric: hit}))

    assert play.finish_reason() == f"{target.metric} reached {target.value:g}"


@every_policy
def test_stop_on_request(policy: Policy):
    """The user's reason is the reason."""
    play = Play(policy, gpu=FAST, cpu=SLOW)
    play.run_until(time=10.0)
    assert play.handle(Evaluated(0, {"accuracy": 1.0})) == []

    assert play.handle(StopRequested("enough")) == [Finish("enough")]


# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Synchronous(0), "local_epochs"),
        (lambda: Synchronous(math.inf), "local_epochs"),
        (lambda: Synchronous(4, round_limit=0), "round_limit"),
        (lambda: Synchronous(4, grace=-0.1), "grace"),
        (lambda: SemiSynchronous(0), "slowest_learner_epochs"),
        (lambda: SemiSynchronous(math.nan), "slowest_learner_epochs"),
        (lambda: SemiSynchronous(2, cold_start_limit=0), "cold_start_limit"),
        (
            lambda: SemiSynchronous(2, timings="never"),
            "timings of SemiSynchronous is 'never'; it must be one of every_round, cold_start, smoothed",
        ),
        (
            lambda: SemiSynchronous(2, budget="money"),
            "budget of SemiSynchronous is 'money'; it must be one of steps, deadline",
        ),
        (lambda: SemiSynchronous(2, grace=math.inf), "grace"),
        (lambda: Asynchronous(-1), "local_epochs"),
        (lambda: fedasync(regularization=-0.1), "regularization"),
        (lambda: sync_fedavg(weighting="luck"), "weighting is 'luck'; it must be one of examples, steps"),
        (lambda: StopRule(rounds=0), "rounds"),
        (lambda: StopRule(seconds=math.nan), "seconds"),
        (lambda: StopRule(update_requests=-1), "update_requests"),
    ],
)
def test_impossible_settings_are_refused(make, sentence):
    """Before anything starts, by the setting's name."""
    with pytest.raises(ValueError, match=sentence):
        make()


def test_weighting_by_steps():
    """The appendix: p_k is the number of steps done."""
    play = Play(semisync_fedavg(2, weighting="steps"), gpu=FAST, cpu=SLOW)

    play.run_until(community_version=2)

    steps = [item.steps for item in play.items(UpdateRequest)]
    assert [item.contribution_value for item in play.items(UpdateCommitted)] == steps


def test_labels_say_which_policy_a_row_is():
    """Tables call policies by these names."""
    assert [make().label for make in POLICIES.values()] == [
        "Sync",
        "SemiSync (λ=2)",
        "SemiSync",
        "AsyncFedAvg",
        "FedRec",
        "FedAsync",
        "FedBuff (K=3)",
        "Centralized",
        "Alone (largest)",
    ]


def test_roster_knows_who_is_there():
    """Unknown names, presence and open tasks."""
    play = Play(async_fedavg(1), gpu=FAST)
    play.run_until(time=1e-9)
    roster = play.controller.roster

    assert roster.get("nobody") is None
    assert [record.learner for record in roster] == ["gpu"]
    assert roster["gpu"].task == LocalTask(0, CommunityStamp(), Budget(EPOCH))
    assert [record.learner for record in roster.available] == ["gpu"]
    assert isinstance(play.handle(LearnerLeft("gpu")), list)
    assert roster.available == []
    assert not any(isinstance(item, UpdateRefused) for _, item in play.log)


@pytest.mark.parametrize(("steps", "most"), [(9, 0.25), (2, 1.0)])
def test_a_wild_claim_of_time_per_batch_cannot_stretch_the_period(steps: int, most: float):
    """Half of the batches that were timed took no longer than the whole task, whatever a learner says."""
    play = Play(semisync_fedavg(2), gpu=FAST, cpu=SLOW)
    play.run_until(community_version=1)
    honest = play.controller.protocol.synchronization_period
    task = play.controller.roster["gpu"].task
    play.now += honest
    play.handle(UpdateRequest("gpu", task.number, steps, honest, 1e300, model(0.0, 0.0, 0.0)))

    assert play.controller.roster["gpu"].time_per_batch == pytest.approx(most * honest)


@pytest.mark.parametrize(("claim", "factor"), [(1e300, 2.0), (1e-9, 0.5), (None, 1.0)])
def test_one_batch_that_was_cut_off_tells_little(claim: float | None, factor: float):
    """A learner that was restarted near the deadline times its warm-up, or a piece of a batch."""
    play = Play(semisync_fedavg(2), gpu=FAST, cpu=SLOW)
    play.run_until(community_version=1)
    record = play.controller.roster["gpu"]
    known, task = record.time_per_batch, record.task
    assert task.budget.steps > 1
    play.now += play.controller.protocol.synchronization_period
    play.handle(UpdateRequest("gpu", task.number, 1, 0.1, claim or known, model(0.0, 0.0, 0.0)))

    assert record.time_per_batch == pytest.approx(factor * known)


def test_something_that_is_no_event_is_refused():
    """The controller does not pass over what it does not know."""
    play = Play(semisync_fedavg(2), gpu=FAST)

    with pytest.raises(TypeError, match="not an event"):
        play.handle("hello")
