"""How long periods are: lambda by a schedule, periods that adapt, work caps, smoothed timings."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from core.play import Actor, Play
from metis.core.controller import Controller
from metis.core.events import (
    Budget,
    CommunityPublished,
    Event,
    LearnerJoined,
    LocalTask,
    RoundMeasure,
    SendTask,
    SpeedChanged,
    UpdateRequest,
)
from metis.core.layers import FedNova, MeasuredPace, Sample, ScheduledRate, ShortestPeriod
from metis.core.layers.adaptive_period import AdaptivePeriod
from metis.core.layers.scheduled_lambda import ScheduledLambda
from metis.core.layers.server_optimizers import FedAvgM
from metis.core.model import Model
from metis.core.policies import fedrec, semisync, semisync_fedavg, sync_fedavg
from metis.core.protocols.pacing import Pace, TimedLearner
from metis.core.schedules import Moment, Schedule
from metis.core.solvers import MomentumSGD, SolverFacts
from metis.errors import ConfigError

AGREE, DISAGREE = RoundMeasure(1.0, 1.0), RoundMeasure(0.1, 1.0)


def learners(*times: float, examples: int = 100, epoch: float = 50, exchange: float = 0.0) -> list[TimedLearner]:
    return [TimedLearner(examples, epoch * time, time, exchange) for time in times]


def next_period(pace: Pace, there: list[TimedLearner], measure: RoundMeasure | None = None) -> float | None:
    return pace.period(there, Moment(), measure)


# --- lambda by a schedule ---------------------------------------------------------------------


def test_lambda_follows_its_schedule_round_by_round():
    """The period of the round after model v is lambda(v) epochs of the slowest learner, from the same moment on."""
    schedule = Schedule(4, 1, 3, shape="linear")
    play = Play(semisync_fedavg().with_layers(ScheduledLambda(schedule)), gpu=0.03, cpu=0.3).run_until(
        community_version=6
    )

    epoch = 50 * 0.3
    budgets = [item.task.budget for item in play.items(SendTask) if item.learner == "cpu"]
    assert budgets[0] == Budget(50)  # the cold start
    for version, budget in enumerate(budgets[1:], start=1):
        epochs = schedule(Moment(rounds=version))
        assert budget.seconds == pytest.approx(epochs * epoch)
        assert budget.steps == math.floor(epochs * 50 + 1e-6)
    gaps = [after - before for before, after in itertools.pairwise(play.times(CommunityPublished))]
    assert gaps == pytest.approx([3 * epoch, 2 * epoch, epoch, epoch, epoch])


def test_lambda_may_be_any_function_of_steps_or_time():
    """Here: long periods until 2,000 steps are done."""
    play = Play(
        semisync_fedavg().with_layers(ScheduledLambda(lambda moment: 2.0 if moment.steps < 2000 else 0.5)),
        gpu=0.03,
        cpu=0.3,
    )
    play.run_until(community_version=6)

    stamps = {item.stamp.version: item.stamp.steps for item in play.published()}
    for item in play.items(SendTask):
        if item.task.based_on.version:
            expected = 2.0 if stamps[item.task.based_on.version] < 2000 else 0.5
            assert item.task.budget.seconds == pytest.approx(expected * 15)


@pytest.mark.parametrize("number", [0.0, -1.0, math.nan, math.inf])
def test_a_function_that_gives_no_lambda_is_named(number):
    with pytest.raises(ConfigError, match=f"the schedule of lambda gives {number} after 1 rounds"):
        Play(
            semisync_fedavg().with_layers(ScheduledLambda(lambda moment: number if moment.rounds else 1.0)), cpu=0.3
        ).run_until(community_version=3)


def test_a_label_keeps_what_was_put_on_top_before():
    """In whatever order a policy is put together."""
    nova = semisync_fedavg(3, max_local_epochs=5).with_layers(FedNova())
    assert (
        nova.with_layers(ScheduledLambda(Schedule(4, 1, 3))).label == "SemiSync (λ scheduled), at most 5 epochs FedNova"
    )
    assert (
        nova.with_layers(AdaptivePeriod()).label
        == semisync_fedavg(max_local_epochs=5).with_layers(AdaptivePeriod()).with_layers(FedNova()).label
    )


# --- periods that adapt -----------------------------------------------------------------------


def test_the_shortest_period_serves_those_who_hold_most_examples():
    """A single straggler with a fifth of the examples does not make it longer; a second one does."""
    pace = AdaptivePeriod(batches=12, served=0.8).start()
    assert next_period(pace, learners(0.03, 0.03, 0.03, 0.3, 3.0)) == pytest.approx(12 * 0.3)
    assert next_period(pace, learners(0.03, 0.03, 0.03, 3.0, 3.0)) == pytest.approx(12 * 3.0)
    everybody = AdaptivePeriod(8, served=1.0).start()
    assert next_period(everybody, learners(0.03, 0.3, 3.0)) == pytest.approx(8 * 3.0)


def test_a_period_is_as_long_as_anybody_s_batch():
    """Who waited for it would be idle; but nobody is waited for longer than `longest` epochs."""
    pace = AdaptivePeriod(batches=8, longest=2.0, served=0.8).start()
    assert next_period(pace, learners(0.1, 0.1, 0.1, 0.1, 5.0)) == pytest.approx(5.0)
    assert next_period(pace, learners(0.1, 0.1, 0.1, 0.1, 50.0)) == pytest.approx(2 * 50 * 0.1)


def test_the_shortest_period_is_twice_the_exchange():
    """Exchanges take no more than a third of the time of those who hold most examples."""
    far = [*learners(0.01, 0.01, 0.01, 0.01, exchange=0.5), *learners(0.01, exchange=100.0)]
    assert next_period(AdaptivePeriod(batches=8).start(), far) == pytest.approx(2 * 0.5)


def test_agreement_makes_periods_longer_and_disagreement_shorter():
    """By exp(gain (agreement - wanted)); between the shortest period and `longest` epochs."""
    settings = AdaptivePeriod(batches=8, longest=2.0, wanted_agreement=0.5, gain=0.8)
    pace, there = settings.start(), learners(0.1, 0.1, 0.1)
    shortest, longest = 8 * 0.1, 2.0 * 50 * 0.1
    assert next_period(pace, there) == pytest.approx(shortest)
    assert next_period(pace, there, AGREE) == pytest.approx(shortest * math.exp(0.8 * (1 - 0.5)))
    back = shortest * math.exp(0.8 * (1 - 0.5) + 0.8 * (0.01 - 0.5))
    assert next_period(pace, there, DISAGREE) == pytest.approx(back)
    for _ in range(20):
        assert next_period(pace, there, AGREE) <= longest * (1 + 1e-12)
    assert next_period(pace, there) == pytest.approx(longest)
    assert next_period(pace, there, DISAGREE) < longest, "what the bound cut off has not accumulated"
    for _ in range(20):
        assert next_period(pace, there, DISAGREE) >= shortest * (1 - 1e-12)


def test_a_round_without_a_measure_changes_nothing():
    pace, there = AdaptivePeriod(batches=8).start(), learners(0.1)
    before = next_period(pace, there)
    assert next_period(pace, there, RoundMeasure(0.0, 0.0)) == before
    assert next_period(pace, there, None) == before


def test_momentum_asks_for_longer_periods():
    """A momentum that restarts in each task needs some steps to build up."""
    policy = semisync_fedavg().with_layers(AdaptivePeriod())
    for momentum, batches in ((0.0, 4.0), (0.95, 0.5 / (1 - 0.95))):
        (layer,) = policy.for_solver(MomentumSGD(0.1, momentum))[0].layers
        assert layer == AdaptivePeriod(batches=batches)
    (layer,) = policy.for_solver(MomentumSGD(0.1, 0.95, keep_momentum=True))[0].layers
    assert layer == AdaptivePeriod(batches=4), "momentum that is kept is there from the first step"
    assert AdaptivePeriod(batches=5).for_solver(SolverFacts(momentum=0.95)) == AdaptivePeriod(batches=5)


def test_a_learner_that_becomes_ten_times_slower_does_less_instead_of_holding_everybody_up():
    """Under lambda every period would be ten times longer from then on."""
    names = [f"site-{number}" for number in range(5)]
    rounds = {}
    for kind, policy in (
        ("adaptive", semisync_fedavg(timings="smoothed").with_layers(AdaptivePeriod(25, longest=0.5))),
        ("fixed", semisync_fedavg(0.5)),
    ):
        play = Play(policy, **dict.fromkeys(names, 0.1)).run_until(time=50.0)
        before = play.version
        play.actors["site-0"].time_per_batch = 1.0
        play.run_until(time=150.0)
        rounds[kind] = (before / 50, (play.version - before) / 100)

    assert rounds["adaptive"][1] == pytest.approx(rounds["adaptive"][0], rel=0.2)
    assert rounds["fixed"][1] < 0.3 * rounds["fixed"][0]


def test_rounds_are_measured_only_where_somebody_asks():
    """And the measure is published with the model."""
    plain = Play(semisync_fedavg(2), gpu=0.03, cpu=0.3).run_until(community_version=3)
    adaptive = Play(semisync_fedavg().with_layers(AdaptivePeriod()), gpu=0.03, cpu=0.3).run_until(community_version=3)

    assert [item.measure for item in plain.published()] == [None] * 3
    for item in adaptive.published():
        assert item.measure is not None
        assert 0 < item.measure.progress <= item.measure.divergence * (1 + 1e-6)


class _Wavering(Actor):
    """Goes where others go, or the other way."""

    def train(self, task: LocalTask, community_model: Model) -> Event | None:
        done = super().train(task, community_model)
        assert isinstance(done, UpdateRequest)
        went = done.local_model.vector - community_model.vector
        sign = -1 if task.based_on.version % 3 else 1
        return replace(done, local_model=community_model.with_vector(community_model.vector + sign * went))


@pytest.mark.parametrize(
    "policy",
    [
        semisync_fedavg().with_layers(AdaptivePeriod(batches=8, gain=3.0)),
        semisync().with_layers(MeasuredPace(batches=100, apart=0.01)),
    ],
)
def test_a_replay_without_weights_paces_as_it_was_measured(policy):
    """The measures of the record count, not those of empty models."""
    play = Play(policy, Actor("gpu", 0.03), _Wavering("cpu", 0.3, transfer=0.2)).run_until(community_version=8)
    periods = {item.task.budget.seconds for item in play.items(SendTask)}
    assert len(periods) > 3, "otherwise this would show nothing"

    again = Controller(policy, Model.empty(), learners_expected=2)
    again.measures = {item.stamp.version: item.measure for item in play.published()}
    replayed = []
    for at, item in play.log:
        if isinstance(item, UpdateRequest):
            item = UpdateRequest(item.learner, item.task, item.steps, item.seconds, item.time_per_batch, Model.empty())
        if isinstance(item, (LearnerJoined, UpdateRequest)) or type(item).__name__ == "DeadlinePassed":
            replayed += [item, *again.handle(item, at)]
    assert replayed == [item for _, item in play.log]


# --- exchange inside a period -----------------------------------------------------------------


def test_a_scheduled_lambda_leaves_room_for_the_exchange_as_a_fixed_one_does():
    """A schedule that stays at 2 is lambda = 2, also where exchanges take longer than the training."""
    cast = (Actor("near", 0.03), Actor("far", 0.3, transfer=40.0))
    fixed = Play(semisync_fedavg(2, exchange="inside"), *cast).run_until(community_version=4)
    policy = semisync_fedavg(exchange="inside").with_layers(ScheduledLambda(Schedule(2, 2, 10)))
    scheduled = Play(policy, *cast).run_until(community_version=4)

    assert scheduled.tasks() == fixed.tasks()
    assert scheduled.tasks()["far"] == 2 * 50
    assert scheduled.times(CommunityPublished) == pytest.approx(fixed.times(CommunityPublished))


def test_an_adaptive_period_has_room_for_the_exchange():
    """Of those who hold most examples everybody still does the batches that are sensible."""
    cast = [Actor(f"far{number}", 0.3, transfer=0.5) for number in range(4)]
    play = Play(semisync_fedavg(exchange="inside").with_layers(AdaptivePeriod(6, gain=1e-6)), *cast)
    play.run_until(community_version=4)
    assert min(play.tasks().values()) >= 6


@pytest.mark.parametrize(
    "policy", [semisync_fedavg(1, timings="smoothed", exchange="inside"), None], ids=["inside", "adaptive"]
)
def test_one_exchange_that_stalls_does_not_change_a_smoothed_period(policy):
    """Two do: then the line has become slower."""
    policy = policy or semisync_fedavg(timings="smoothed").with_layers(AdaptivePeriod(gain=1e-6))
    cast = [Actor(f"site{number}", 0.3, transfer=2.0) for number in range(2)]
    play = Play(policy, *cast).run_until(community_version=3)
    period = play.controller.protocol.synchronization_period

    def next_period(exchange: float) -> float:
        for actor in play.actors.values():
            actor.transfer = exchange  # of the tasks that are sent when the next model is published
        play.run_until(community_version=play.controller.community.stamp.version + 1)
        return play.controller.protocol.synchronization_period

    for exchange in (20.0, 2.0, 2.0, 2.0, 2.0):
        assert next_period(exchange) == pytest.approx(period, rel=1e-3)
    assert [next_period(20.0) for _ in range(5)][-1] > 1.5 * period


# --- never shorter than a multiple of the exchange --------------------------------------------


def of_exchanges(*exchanges: float) -> list[TimedLearner]:
    return [TimedLearner(100, 1.0, 0.01, each, typical_exchange=each) for each in exchanges]


@pytest.mark.parametrize(
    ("exchanges", "seconds"),
    [((0.5,), 2.0), ((0.5, 60.0), 2.0), ((0.1, 0.5, 60.0), 2.0), ((0.0, 0.5, 0.7, 900.0), 2.0), ((0.0, 0.0, 9.0), 0.0)],
)
def test_the_exchange_of_the_median_learner_counts(exchanges, seconds):
    """One slow site, or one that claims to be slow, does not make everybody's period longer; nor does one of two."""
    assert ShortestPeriod(4.0).seconds(of_exchanges(*exchanges)) == pytest.approx(seconds)


def fast_sites(*policy_layers, transfer: float = 0.5, **settings) -> Play:
    """An epoch of each takes 0.1 s, its exchange five times as long."""
    cast = [Actor(name, 0.01, examples=1000, transfer=transfer) for name in ("north", "east", "south")]
    return Play(semisync_fedavg(2, **settings).with_layers(*policy_layers), *cast)


def test_training_that_is_shorter_than_its_exchange_gets_longer_periods():
    """At most a fifth of the time is exchange, instead of five sevenths; nobody is late."""
    short, bound = fast_sites(), fast_sites(ShortestPeriod())
    for play in (short, bound):
        play.run_until(time=60.0)
    assert (short.tasks()["north"], bound.tasks()["north"]) == (20, 200)
    assert bound.controller.protocol.synchronization_period == pytest.approx(4 * 0.5)
    assert bound.controller.protocol.bounded_by == "shortest_period"
    assert short.controller.protocol.bounded_by == ""
    shares = [play.costs().transfer_time / (3 * play.now) for play in (short, bound)]
    assert shares == [pytest.approx(0.71, abs=0.03), pytest.approx(0.2, abs=0.01)]
    assert bound.refused() == []


def test_the_bound_holds_for_other_pacings_and_below_the_longest_period():
    """Whatever chooses the periods; `longest_period` is the user's last word."""
    adaptive = fast_sites(ShortestPeriod(10.0), AdaptivePeriod(gain=1e-6)).run_until(community_version=3)
    assert adaptive.controller.protocol.synchronization_period == pytest.approx(10 * 0.5)
    limited = fast_sites(ShortestPeriod(10.0), longest_period=3.0).run_until(community_version=3)
    assert limited.controller.protocol.synchronization_period == 3.0
    assert limited.controller.protocol.bounded_by == "longest_period"


def test_without_exchanges_nothing_is_bound():
    """0 turns it off; where exchanges take no time there is nothing to bound."""
    for play in (fast_sites(ShortestPeriod(0.0)), fast_sites(ShortestPeriod(), transfer=0.0)):
        play.run_until(community_version=3)
        assert play.controller.protocol.synchronization_period == pytest.approx(0.2)


def test_a_line_that_stalls_once_neither_stretches_periods_nor_the_wait_for_the_late():
    """The median of three exchanges counts for both."""
    play = fast_sites(ShortestPeriod()).run_until(community_version=4)
    period, waits = play.controller.protocol.synchronization_period, []
    for transfer in (50.0, 0.5, 0.5):
        play.actors["north"].transfer = transfer
        play.run_until(community_version=play.version + 1)
        assert play.controller.protocol.synchronization_period == pytest.approx(period)
        waits.append(play.controller.deadline - play.now)
    assert waits == [pytest.approx(period * 1.1 + 0.5, abs=0.02)] * 3


def test_a_limited_cold_start_waits_as_long_again_for_exchanges_that_nobody_knows_yet():
    """Otherwise everybody would be late in the first round, in which all train until the limit."""
    late, in_time = fast_sites(cold_start_limit=0.6), fast_sites(ShortestPeriod(), cold_start_limit=0.6)
    for play in (late, in_time):
        play.actors["east"].transfer = 0.55
        play.actors["south"].mood = "silent"
        play.actors["north"].time_per_batch = play.actors["east"].time_per_batch = 0.1
        play.run_until(time=2.0)
    assert [(refused.learner, refused.kind) for refused in late.refused()] == [("east", "late")]
    assert in_time.refused() == []
    assert in_time.times(CommunityPublished)[0] == pytest.approx(0.6 * 2.1)


# --- back in the middle of a period -----------------------------------------------------------


def test_a_learner_that_is_back_in_the_middle_of_a_period_trains_for_the_rest_of_it():
    """Its update counts in the same round, which does not become longer; nothing is published for it."""
    play = Play(semisync_fedavg(1, returning="train"), gpu=0.03, cpu=0.3, late=0.1).run_until(community_version=2)
    began = play.now
    play.leave("late", began + 1.0)
    play.join("late", began + 5.0)
    play.run_until(time=began + 5.1)
    assert play.version == 2
    assert play.budgets()["late"] == Budget(100, pytest.approx(10.0))
    play.run_until(community_version=3)
    assert play.now == pytest.approx(began + 15.0)
    assert play.published()[-1].contributors == 3
    waiting = Play(semisync_fedavg(1), gpu=0.03, cpu=0.3, late=0.1).run_until(community_version=2)
    waiting.leave("late", began + 1.0)
    waiting.join("late", began + 5.0)
    waiting.run_until(time=began + 5.1)
    assert waiting.waiting() == ["late"]


def test_who_has_answered_waits_for_the_next_period():
    """A cap ends a task early: that is no reason for another one in the same period."""
    play = Play(semisync_fedavg(1, returning="train", max_local_epochs=1), gpu=0.03, cpu=0.3)
    play.run_until(community_version=4)
    assert [record.based_on.version for record in (item.task for item in play.items(SendTask))] == [
        version for version in range(5) for _ in range(2)
    ]


def test_a_late_learner_goes_on_in_the_running_period():
    """Its update is refused, and it is at work again at once."""
    play = Play(semisync_fedavg(1, returning="train"), gpu=0.03, cpu=0.3, cut=0.1).run_until(community_version=2)
    play.actors["cut"].transfer = 4.0  # from the next task on
    play.run_until(community_version=3)
    play.actors["cut"].transfer = 0.0
    while not play.refused():
        assert play.step()
    assert play.tasks()["cut"] is not None
    assert "cut" not in play.waiting()


def test_a_newcomer_has_its_cold_start_in_what_is_left():
    """As much as a cold start may take; with so little left that it would be late, it waits."""
    play = Play(semisync_fedavg(1, returning="train", cold_start_limit=20.0), gpu=0.03, cpu=0.3)
    play.run_until(community_version=2)
    ends = play.now + 15.0
    play.cast(Actor("new", 0.1), at=ends - 4.0)
    play.run_until(time=ends - 3.9)
    assert play.budgets()["new"] == Budget(50, pytest.approx(4.0))
    play.leave("cpu", at=ends - 3.0)
    play.join("cpu", at=ends - 0.2)
    play.run_until(time=ends - 0.1)
    assert "cpu" in play.waiting()


def test_nobody_joins_a_cold_start_without_an_end_or_a_round_of_a_sample():
    """How much is left is not known; and who was not drawn does not take part."""
    cold = Play(semisync_fedavg(1, returning="train"), gpu=0.03, cpu=0.3)
    cold.cast(Actor("new", 0.1), at=1.0)
    cold.run_until(time=1.1)
    assert cold.waiting() == ["new"]
    sampled = Play(semisync_fedavg(1, returning="train").with_layers(Sample(learners=2)), a=0.1, b=0.1, c=0.1)
    sampled.run_until(community_version=4)
    assert len(sampled.items(SendTask)) == 2 * 5


def test_the_rest_of_a_period_by_its_deadline():
    play = Play(semisync_fedavg(1, returning="train", budget="deadline"), gpu=0.03, cpu=0.3)
    play.run_until(community_version=2)
    began = play.now
    play.leave("gpu", began + 1.0)
    play.join("gpu", began + 5.0)
    play.run_until(time=began + 5.1)
    assert play.budgets()["gpu"] == Budget(None, pytest.approx(10.0))


# --- work caps --------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["steps", "deadline"])
def test_a_learner_with_little_data_stops_at_the_maximum_of_epochs(budget):
    """At most this many epochs in a period; a learner that is done waits, the clock of the others is unchanged."""
    cast = (Actor("small", 0.03, examples=500), Actor("large", 0.03, examples=5000))
    play = Play(semisync_fedavg(2, budget=budget, max_local_epochs=3), *cast).run_until(community_version=3)

    assert play.tasks()["small"] == 3 * 5
    assert play.budgets()["large"].seconds == pytest.approx(2 * 50 * 0.03)
    free = Play(semisync_fedavg(2, budget=budget), *cast).run_until(community_version=3)
    assert free.times(CommunityPublished) == pytest.approx(play.times(CommunityPublished))
    assert play.costs().by_learner["small"].idle > free.costs().by_learner["small"].idle


def test_a_cap_below_one_epoch_holds_in_the_cold_start_too():
    play = Play(semisync_fedavg(2, max_local_epochs=0.4), gpu=0.03, cpu=0.3).run_until(community_version=3)
    assert {item.task.budget.steps for item in play.items(SendTask)} == {20}


def test_idle_time_of_a_cap_is_not_charged_as_work():
    """The paper's equation charges everybody's whole time because everybody works; with a cap they do not."""
    cast = (Actor("small", 0.03, examples=500), Actor("large", 0.03, examples=5000))
    play = Play(semisync_fedavg(2, max_local_epochs=3), *cast).run_until(community_version=4)
    energy = play.costs().energy

    assert energy.equation == energy.active < energy.idle_charged


# --- smoothed timings -------------------------------------------------------------------------


def test_one_odd_task_does_not_change_the_period_and_two_are_told():
    """A learner that is slow once is ignored; slow twice, it has changed, and that is reported."""
    play = Play(semisync_fedavg(1, timings="smoothed"), gpu=0.03, cpu=0.3).run_until(community_version=2)
    period = play.controller.protocol.synchronization_period
    cpu = play.actors["cpu"]

    cpu.time_per_batch = 3.0
    play.run_until(community_version=3)
    cpu.time_per_batch = 0.3
    play.run_until(community_version=6)
    assert play.controller.protocol.synchronization_period == pytest.approx(period)
    assert play.items(SpeedChanged) == []

    cpu.time_per_batch = 3.0
    play.run_until(community_version=9)
    assert play.items(SpeedChanged) == [SpeedChanged("cpu", pytest.approx(0.3), 3.0)]
    assert play.controller.protocol.synchronization_period == pytest.approx(10 * period)


def test_other_timings_tell_of_no_change():
    """What the paper's policies say stays as it was."""
    play = Play(semisync_fedavg(1), gpu=0.03, cpu=0.3).run_until(community_version=2)
    play.actors["cpu"].time_per_batch = 3.0
    play.run_until(community_version=6)
    assert play.items(SpeedChanged) == []


# --- learning rates ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "moment_of"),
    [
        ("rounds", lambda at, stamp: stamp.version),
        ("steps", lambda at, stamp: stamp.steps),
        ("seconds", lambda at, stamp: at),
    ],
)
@pytest.mark.parametrize("policy", [sync_fedavg(1), semisync_fedavg(1), fedrec(1)], ids=lambda policy: policy.name)
def test_a_task_carries_the_factor_of_its_learning_rate(policy, over, moment_of):
    """By rounds, by committed steps or by time, as they are when the task is sent; without a schedule it is 1."""
    schedule = Schedule(1, 0.1, {"rounds": 4, "steps": 3000, "seconds": 60}[over], over, "linear")
    play = Play(policy.with_layers(ScheduledRate(schedule)), gpu=0.03, cpu=0.3).run_until(community_version=8)

    sent = [(at, item.task) for at, item in play.log if isinstance(item, SendTask)]
    assert len({task.rate for _, task in sent}) > 2
    for at, task in sent:
        moment = moment_of(at, task.based_on)
        assert task.rate == pytest.approx(schedule(Moment(**{over: moment})))
    plain = Play(policy, gpu=0.03, cpu=0.3).run_until(community_version=8)
    assert {item.task.rate for item in plain.items(SendTask)} == {1.0}
    assert [item.task.budget for item in plain.items(SendTask)] == [item.task.budget for item in play.items(SendTask)]


@pytest.mark.parametrize("over", ["rounds", "seconds"])
def test_the_server_s_rate_follows_its_schedule(over):
    """A step of half the rate goes half as far; the moment is that of the model that comes out."""
    schedule = Schedule(1, 0.5, {"rounds": 2, "seconds": 20}[over], over, "step")
    plain = Play(sync_fedavg(1).with_layers(FedAvgM(1.0, 0.0)), cpu=0.3).run_until(community_version=2)
    halved = Play(sync_fedavg(1).with_layers(FedAvgM(1.0, 0.0, rate=schedule)), cpu=0.3).run_until(community_version=2)

    deltas = []
    for play in (plain, halved):
        first, second = (item.community_model.vector for item in play.published())
        deltas.append((first[0], second[0] - first[0]))
    assert deltas[1][0] == pytest.approx(deltas[0][0])
    assert deltas[1][1] == pytest.approx(deltas[0][1] / 2)


def test_a_function_that_gives_no_rate_is_named():
    with pytest.raises(ConfigError, match="the schedule of the learning rate gives -1 after 1 rounds"):
        Play(sync_fedavg(1).with_layers(ScheduledRate(lambda moment: -1 if moment.rounds else 1)), cpu=0.3).run_until(
            community_version=3
        )
    with pytest.raises(ConfigError, match="the schedule of the server's learning rate gives 0 after 1 rounds"):
        Play(sync_fedavg(1).with_layers(FedAvgM(rate=lambda moment: 0)), cpu=0.3).run_until(community_version=3)


# --- what cannot be ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"batches": 0.5}, "batches of adaptive is 0.5; it must be at least 1"),
        ({"served": 0}, "served of adaptive is 0; it must be greater than 0 and at most 1"),
        ({"longest": 0}, "longest of adaptive is 0; it must be greater than 0"),
        ({"gain": math.nan}, "gain of adaptive is nan; it must be greater than 0"),
        ({"wanted_agreement": 1}, "wanted_agreement of adaptive is 1; it must be greater than 0 and less than 1"),
    ],
)
def test_impossible_settings_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=f"^{complaint}$"):
        AdaptivePeriod(**settings)


def test_an_impossible_cap_is_refused():
    with pytest.raises(ValueError, match="max_local_epochs of semisync_fedavg is 0; it must be greater than 0"):
        semisync_fedavg(max_local_epochs=0)
