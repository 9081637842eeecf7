"""SemiSync without parameters, part by part: the probe, the pace, who is not waited for, differences, messages."""

from __future__ import annotations

import math

import numpy as np
import pytest

from core.play import LAYOUT, Actor, Play, model
from metis.core.arithmetic import accumulated_steps
from metis.core.events import Budget, CommunityPublished, PeriodBegun, RoundMeasure, SendTask, UpdateRequest
from metis.core.layers import (
    AcceptLate,
    Compression,
    Differences,
    FedAvgM,
    MeasuredPace,
    MessageBudget,
    Probe,
    ShortestPeriod,
)
from metis.core.mixing import DifferenceAverage, FullPass, MemoryStore
from metis.core.model import Layout, Model, TensorSpec
from metis.core.policies import semisync, semisync_fedavg
from metis.core.protocols.pacing import TimedLearner
from metis.core.schedules import Moment
from metis.core.solvers import MomentumSGD
from metis.errors import ArgumentError


def hospitals() -> Play:
    """Seven of about 20 batches of 40 s an epoch, one of 200 batches of 60 s: an epoch of everybody takes 3.3 hours."""
    small = [Actor(f"small-{number}", 40.0, examples=640, batch_size=32) for number in range(7)]
    return Play(semisync(), *small, Actor("large", 60.0, examples=6400, batch_size=32))


def tasks_of(play: Play, learner: str) -> list[Budget]:
    return [item.task.budget for item in play.items(SendTask) if item.learner == learner]


# --- the probe --------------------------------------------------------------------------------


def test_a_probe_times_everybody_in_two_batches() -> None:
    """The first period begins after two batches of the slowest, not after its epoch."""
    play = hospitals().run_until(community_version=1)
    assert {budget.steps for name in play.actors for budget in tasks_of(play, name)[:1]} == {2}
    assert play.now == pytest.approx(120.0)
    assert play.items(PeriodBegun)[0] == PeriodBegun(math.inf, "everybody does 2 batches, by which they are timed", ())


def test_a_probe_does_not_wait_for_the_hopeless() -> None:
    """Three times as long as learners with 80 % of the examples took; what comes later is mixed later."""
    play = Play(semisync(), Actor("a", 1.0), Actor("b", 2.0), Actor("laptop", 500.0, examples=100))
    play.run_until(community_version=1)
    assert play.now == pytest.approx(3 * 4.0)
    play.run_until(time=2000.0)
    assert play.refused() == []
    assert "laptop" in {item.learner for item in play.committed()}


def test_a_probe_of_few_examples_is_not_longer_than_an_epoch() -> None:
    play = Play(semisync(), Actor("tiny", 1.0, examples=10), Actor("b", 1.0)).run_until(community_version=1)
    assert tasks_of(play, "tiny")[0].steps == 1


@pytest.mark.parametrize(("answered", "end"), [(0, math.inf), (10, 10 + 6 * 8**4), (40, 10 + 6 * 2**4), (80, 16.0)])
def test_a_probe_waits_longer_the_fewer_have_answered(answered: int, end: float) -> None:
    assert Probe().latest_end(10.0, 12.0, answered, 100) == pytest.approx(end)


@pytest.mark.parametrize(("examples", "latest"), [(1500, 100), (50_000, 5000)])
def test_one_that_never_answers_is_not_waited_for(examples: int, latest: float) -> None:
    """Not even if it holds most of the examples, though then for long."""
    play = Play(semisync(), Actor("a", 1.0), Actor("b", 1.0), Actor("dead", 1e12, examples=examples))
    play.run_until(community_version=3)
    assert play.now < latest


def test_those_who_left_during_a_probe_are_not_missed() -> None:
    """The share is that of the examples of those who are still there."""
    play = Play(semisync(), Actor("a", 1.0), Actor("b", 100.0, examples=100), Actor("big", 50.0, examples=50_000))
    play.leave("big", at=1.0)
    play.run_until(community_version=1)
    assert play.now == pytest.approx(6.0)


def test_a_later_joiner_is_probed_inside_the_running_period() -> None:
    """It gets two batches at once, and its share of steps from the next period on."""
    play = Play(semisync(), Actor("a", 1.0), Actor("b", 1.0))
    play.cast(Actor("c", 0.5), at=3.0)
    play.run_until(time=40.0)
    first, second, *_ = [item for item in play.log if isinstance(item[1], SendTask) and item[1].learner == "c"]
    assert (first[0], first[1].task.budget.steps) == (3.0, 2)
    assert second[1].task.budget.steps > 2


# --- the pace ---------------------------------------------------------------------------------


def timed(*learners: tuple[int, float, float]) -> list[TimedLearner]:
    return [
        TimedLearner(examples, 50 * time, time, exchange, 0.0, exchange, f"k{number}")
        for number, (examples, time, exchange) in enumerate(learners)
    ]


@pytest.mark.parametrize(
    ("there", "seconds", "reason"),
    [
        (timed((100, 1.0, 0.0), (100, 1.0, 0.0)), 8.0, "8 batches on average take that long"),
        (timed((100, 0.5, 0.0), (100, 1.0, 0.0)), 8 / 1.5, "8 batches on average take that long"),
        (
            timed((50, 0.01, 0.0), (50, 9.0, 0.0)),
            18.0,
            "learners with 80% of the examples need that long for 2 batches",
        ),
        (timed((100, 1.0, 20.0), (10, 1.0, 90.0)), 40.0, "2 times the exchange of models"),
        (timed((100, 1.0, 20.0), (10, 1.0, 30.0)), 60.0, "2 times the exchange of models"),
        (timed((100, 1.0, 900.0), (10, 1.0, 9.0)), 200.0, "4 epochs of learners with 80% of the examples take"),
    ],
)
def test_a_period_is_the_longest_of_three_times(there: list[TimedLearner], seconds: float, reason: str) -> None:
    pace = MeasuredPace().start()
    assert pace.period(there, Moment(), None) == pytest.approx(seconds)
    assert pace.reason.startswith(reason)  # type: ignore[attr-defined]
    assert pace.period([], Moment(), None) is None


def test_models_that_lead_apart_are_mixed_more_often() -> None:
    """Down to half of the batches, smoothed over rounds; masked rounds, whose lengths nobody knows, change nothing."""
    pace, there = MeasuredPace().start(), timed((100, 1.0, 0.0), (100, 1.0, 0.0))

    def after(agreement: float) -> float | None:
        return pace.period(there, Moment(), RoundMeasure(math.sqrt(agreement), 1.0, unrelated=1.0))

    assert after(3.0) == pytest.approx(8.0)
    assert after(0.0) == pytest.approx(8.0)  # 1.5 on average
    assert after(0.0) == pytest.approx(6.0)
    assert pace.reason == "fewer than 8 batches on average take that long, and local models lead apart"  # type: ignore[attr-defined]
    assert after(0.0) == pytest.approx(4.0) == after(0.0)
    assert pace.period(there, Moment(), RoundMeasure(1.0, 1.0)) == pytest.approx(4.0)
    assert pace.period(there, Moment(), None) == pytest.approx(4.0)
    assert after(4.0) == pytest.approx(8.0)
    assert pace.reason == "8 batches on average take that long"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("models", "progress", "spread", "unrelated"),
    [
        ((model(2, 0, 0), model(2, 0, 0)), 4.0, 4.0, 2.0),
        ((model(2, 0, 0), model(0, 2, 0)), 2.0, 4.0, 2.0),
        ((model(2, 0, 0), model(-2, 0, 0)), 0.0, 4.0, 2.0),
    ],
)
def test_differences_measure_how_far_they_lead_apart(
    models: tuple[Model, Model], progress: float, spread: float, unrelated: float
) -> None:
    """Squares: of the mean, the mean square, and what that of the mean would be in unrelated directions."""
    community = DifferenceAverage(model(0, 0, 0), MemoryStore())
    for learner, local in zip("ab", models, strict=True):
        community.commit(learner, local, 1.0, 1, community.model)
    assert community.publish() and community.measure is not None
    found = community.measure
    assert (found.progress**2, found.divergence**2, found.unrelated**2) == pytest.approx((progress, spread, unrelated))
    community.commit("a", community.model, 1.0, 1, community.model)
    assert community.publish() and community.measure is None  # nobody went anywhere


def test_everybody_fills_the_period() -> None:
    """B_k = T / t_k; the reason is recorded with every period."""
    play = Play(semisync(), gpu=0.03, cpu=0.3).run_until(community_version=4)
    period = play.controller.protocol.synchronization_period
    assert play.tasks() == {"gpu": int(period / 0.03), "cpu": max(1, int(period / 0.3))}
    assert {item.reason for item in play.items(PeriodBegun)[1:]} == {
        "learners with 80% of the examples need that long for 2 batches"
    }


# --- not waited for ---------------------------------------------------------------------------


def test_the_slowest_do_one_batch_for_which_nobody_waits() -> None:
    """Its models come when they come, count less the later they are, and no round takes longer because of it."""
    play = Play(semisync(), Actor("a", 1.0), Actor("b", 1.0), Actor("slow", 100.0, examples=500))
    play.run_until(time=3000.0)
    named = [item for item in play.items(PeriodBegun) if item.not_awaited]
    assert {item.not_awaited for item in named} == {("slow",)}
    assert {budget.steps for budget in tasks_of(play, "slow")[1:]} == {1}
    gaps = np.diff(play.times(CommunityPublished))[3:]
    assert max(gaps) < 12.0
    values = {item.contribution_value for item in play.committed() if item.learner == "slow"}
    assert max(values) < 500 and min(values) > 0
    assert play.refused() == []


def test_a_layer_of_its_own_lets_periods_end_without_some() -> None:
    """With lambda as well: late models are mixed instead of refused."""
    plain = semisync_fedavg(0.1, cold_start_limit=10.0)
    cast = (Actor("a", 1.0), Actor("b", 1.0), Actor("slow", 40.0))
    strict, tolerant = Play(plain, *cast), Play(plain.with_layers(AcceptLate()), *cast)
    for play in (strict, tolerant):
        play.run_until(time=600.0)
    assert strict.refused() and not tolerant.refused()


# --- differences ------------------------------------------------------------------------------


def test_without_late_models_differences_are_the_average_of_the_round() -> None:
    start = model(1, 2, 3)
    mixed = [
        make(start, MemoryStore())
        for make in (FullPass, lambda *given: DifferenceAverage(*given, extrapolation="none"))
    ]
    for community in mixed:
        community.commit("a", model(2, 2, 2), 3.0, 1, community.model)
        community.commit("b", model(0, 4, 3), 1.0, 1, community.model)
        assert community.publish()
    assert mixed[0].model.vector == pytest.approx(mixed[1].model.vector)


def test_a_late_model_counts_by_what_it_has_changed() -> None:
    """Not by where it is: the community has moved on since it started."""
    community = DifferenceAverage(model(0, 0, 0), MemoryStore(), "none")
    early = community.model
    community.commit("a", model(10, 0, 0), 1.0, 1, community.model)
    assert community.publish()
    community.commit("b", model(0, 1, 0), 1.0, 1, early)
    assert community.publish()
    assert community.model.vector == pytest.approx([10, 1, 0])


def test_eta_undoes_the_dilution_by_those_that_went_a_short_way() -> None:
    """1 if all went equally far; sum p L^2 / (sum p L)^2 else, at most `largest`."""

    def mixed(first: float, second: float, **settings: object) -> float:
        community = DifferenceAverage(model(0, 0, 0), MemoryStore(), **settings)  # type: ignore[arg-type]
        community.commit("a", model(first, 0, 0), 1.0, 1, community.model)
        community.commit("b", model(second, 0, 0), 1.0, 1, community.model)
        assert community.publish()
        return float(community.model.vector[0])

    assert mixed(2, 2) == pytest.approx(2)
    assert mixed(3, 1) == pytest.approx(2 * (5 / 4))
    assert mixed(3, 0) == pytest.approx(1.5 * 2)
    assert mixed(3, 0, largest=1.5) == pytest.approx(1.5 * 1.5)
    assert mixed(0, 0) == 0
    assert mixed(2, 2, extrapolation="fedexp") == pytest.approx(2)
    assert mixed(3, -1, extrapolation="fedexp") == pytest.approx(1 * 5 / 2)
    assert mixed(3, -3, extrapolation="fedexp") == 0


def test_buffers_are_averaged_without_eta() -> None:
    """BatchNorm's statistics are not a direction."""
    layout = Layout((TensorSpec("weight", (1,)), TensorSpec("mean", (1,), role="buffer"), TensorSpec("last", (1,))))

    def local(*numbers: float) -> Model:
        return Model(layout, np.array(numbers, np.float32))

    community = DifferenceAverage(local(0, 0, 0), MemoryStore())
    community.commit("a", local(4, 100, 0), 1.0, 1, community.model)
    community.commit("b", local(0, 0, 0), 1.0, 1, community.model)
    assert community.publish()
    assert community.model.vector == pytest.approx([4, 50, 0])


def test_a_withdrawn_late_model_leaves_nothing_behind() -> None:
    community = DifferenceAverage(model(0, 0, 0), MemoryStore())
    early = community.model
    community.commit("a", model(1, 0, 0), 1.0, 1, community.model)
    assert community.publish() and not community.publish()
    community.commit("b", model(9, 9, 9), 1.0, 1, early)
    assert "started/b" in community.arrays()
    community.withdraw("b")
    assert set(community.arrays()) == {"differences/squares"}
    assert not community.publish()


def test_a_restart_keeps_the_models_that_late_ones_started_from() -> None:
    """Replayed without weights, then given its arrays: the same bits."""

    def told(*, weights: bool) -> DifferenceAverage:
        start = model(1, 1, 1) if weights else Model.empty()
        community = DifferenceAverage(start, MemoryStore())
        early = community.model
        community.commit("a", model(2, 1, 1) if weights else Model.empty(), 1.0, 1, community.model)
        community.publish()
        community.commit("b", model(1, 5, 1) if weights else Model.empty(), 2.0, 1, early)
        community.commit("a", model(3, 3, 3) if weights else Model.empty(), 1.0, 1, community.model)
        return community

    lived, restored = told(weights=True), told(weights=False)
    restored.load_arrays(lived.model, {name: array.copy() for name, array in lived.arrays().items()}, MemoryStore())
    assert lived.publish() and restored.publish()
    assert restored.model.sha256() == lived.model.sha256()


def test_differences_as_a_layer_of_a_round_with_lambda() -> None:
    made = semisync_fedavg().with_layers(Differences())
    assert made.label == "SemiSync (λ=2) η"
    assert semisync_fedavg().with_layers(Differences("none")).label == "SemiSync (λ=2) differences"
    assert isinstance(made.start_community(model(), MemoryStore()), DifferenceAverage)
    assert LAYOUT.size == 3


# --- messages ---------------------------------------------------------------------------------


def test_a_budget_of_messages_makes_periods_longer() -> None:
    """20 update requests an hour: 180 s a period, and says so."""
    play = Play(semisync(update_requests_an_hour=20), gpu=0.03, cpu=0.3).run_until(time=3600.0)
    by_learner = {name: sum(item.learner == name for item in play.items(UpdateRequest)) for name in ("gpu", "cpu")}
    assert all(15 <= count <= 21 for count in by_learner.values())  # with the probe
    last = play.items(PeriodBegun)[-1]
    assert (last.seconds, last.reason) == (180.0, "that is the limit set by messages")


def test_the_longest_of_two_bounds_counts() -> None:
    layers = (MessageBudget(360), ShortestPeriod(4.0))
    cast = [Actor(name, 0.01, examples=1000, transfer=0.5) for name in ("north", "east")]
    play = Play(semisync_fedavg(2).with_layers(*layers), *cast).run_until(community_version=3)
    protocol = play.controller.protocol
    assert (protocol.synchronization_period, protocol.bounded_by) == (10.0, "messages")  # type: ignore[attr-defined]


def test_parts_of_the_policy_give_way_to_those_of_a_file() -> None:
    """Another momentum or pace replaces the policy's own; given twice it is refused."""
    made = semisync().with_layers(FedAvgM(momentum=0.9), MeasuredPace(4))
    assert [layer for layer in made.layers if isinstance(layer, FedAvgM)] == [FedAvgM(momentum=0.9)]
    with pytest.raises(ArgumentError, match="server is given twice; keep one of them"):
        made.with_layers(FedAvgM())
    with pytest.raises(ArgumentError, match="update_requests_an_hour"):
        semisync(update_requests_an_hour=0)


# --- a budget of bytes ------------------------------------------------------------------------


def test_a_budget_of_bytes_is_one_of_requests_of_that_size() -> None:
    """An update request moves two models, 4 bytes for each of their numbers."""
    size = 2 * model(*range(LAYOUT.size)).nbytes
    play = Play(semisync(bytes_an_hour=20 * size), Actor("a", 1.0), Actor("b", 1.0)).run_until(time=3600.0)
    periods = [item for item in play.items(PeriodBegun) if item.seconds < math.inf]
    assert {item.seconds for item in periods[1:]} == {180.0}
    assert {item.reason for item in periods[1:]} == {"that is the limit set by messages"}
    assert len([item for item in play.items(SendTask) if item.learner == "a"]) <= 21


def test_the_smaller_of_two_budgets_counts() -> None:
    budget = MessageBudget(an_hour=20, bytes_an_hour=1000)
    assert budget.for_exchange(100).seconds([]) == 360.0
    assert budget.for_exchange(10).seconds([]) == 180.0
    assert budget.for_exchange(0).seconds([]) == 180.0
    assert MessageBudget(bytes_an_hour=1000).seconds([]) == 0.0  # before the size is known


def test_a_budget_has_a_limit_and_a_label() -> None:
    with pytest.raises(ArgumentError, match="needs a budget"):
        MessageBudget()
    assert semisync(20, bytes_an_hour=5e6).label == "SemiSync, 20 requests an hour, 5 MB an hour"


def test_compressed_updates_leave_room_for_more_of_them() -> None:
    plain, compressed = semisync(bytes_an_hour=1e6), semisync(bytes_an_hour=1e6).with_layers(Compression("top_k"))
    layout = Layout((TensorSpec("w", (1000,)),))
    start = Model(layout, np.zeros(1000, np.float32))
    sizes = [policy.exchange_bytes(start) for policy in (plain, compressed)]
    assert sizes[0] == 8000 > sizes[1]
    assert plain.exchange_bytes(Model.empty()) == 0


# --- learners with many steps -----------------------------------------------------------------

BUFFERED = Layout((TensorSpec("w", (1,)), TensorSpec("running", (1,), role="buffer")))


def mixed_after(equalize: float, largest: float = 4.0, momentum: float = 0.0) -> list[float]:
    """Of two that count the same: one went 16 in 16 steps, the other -1 in one; their buffers became 4 and 8."""
    start = Model(BUFFERED, np.zeros(2, np.float32))
    community = DifferenceAverage(start, MemoryStore(), "none", largest, equalize, momentum)
    for learner, numbers, steps in (("fast", (16, 4), 16), ("slow", (-1, 8), 1)):
        local = Model(BUFFERED, np.array(numbers, np.float32))
        community.commit(learner, local, 1.0, steps, community.model)
    assert community.publish()
    return [float(value) for value in community.model.vector]


def test_many_steps_count_less_with_equalize() -> None:
    """a = 16 and 1, on average 8.5: with 1 all go as far as if they had done 8.5 steps; buffers are averaged."""
    assert mixed_after(0.0) == [7.5, 6.0]
    assert mixed_after(1.0, largest=100.0) == pytest.approx([(8.5 - 8.5) / 2, 6.0])
    half = (16 * (8.5 / 16) ** 0.5 - 8.5**0.5) / 2
    assert mixed_after(0.5) == pytest.approx([half, 6.0])
    assert mixed_after(1.0, largest=2.0) == pytest.approx([(8.5 - 2.0) / 2, 6.0])


def test_momentum_that_builds_up_is_taken_into_account() -> None:
    """Along a constant gradient one step leads 1 far, and 16 with momentum 0.5 almost 30."""
    reach = accumulated_steps(16, 0.5)
    mean = (reach + 1) / 2
    expected = (16 * (mean / reach) ** 0.5 - mean**0.5) / 2
    assert mixed_after(0.5, momentum=0.5) == pytest.approx([expected, 6.0])


def test_semisync_knows_its_solver() -> None:
    settled, _ = semisync().for_solver(MomentumSGD(0.1, 0.75))
    (own,) = [layer for layer in settled.layers if isinstance(layer, Differences)]
    assert (own.momentum, own.pull, own.equalize) == (0.75, 0.0, 0.5)
    assert own.factors({"a": 1.0, "b": 1.0}, {"a": 5, "b": 5}) == {"a": 1.0, "b": 1.0}
    assert settled.for_solver(MomentumSGD(0.1, 0.75))[0] == settled
