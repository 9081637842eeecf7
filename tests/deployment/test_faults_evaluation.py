"""Fault matrix C1 row 31, what a site reports of a model: one site cannot decide what it is taken to be worth."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from deployment.faults import federation, play, traced, tried
from deployment.federations import Served, served
from deployment.scripted_learner import HonestLearner, ScriptedLearner
from metis.core import policies
from metis.core.events import Evaluated, LearnerSetAside
from metis.core.stop import Patience, StopRule, Target
from metis.deployment.controller.settings import DeploymentSettings
from metis.deployment.controller.site_reports import RANGES, SiteReports, federated_value, report_problem
from metis.deployment.wire import wire_pb2 as pb
from metis.learning.sums import Sums, merged_value, value_of
from metis.runs.run import Run
from metis.runs.trace import from_line, to_line

AT_LEARNERS: dict[str, Any] = {"evaluate_at_learners": True, "evaluation_wait": 600.0}


# --- the federated value ------------------------------------------------------------------------------


def test_of_one_or_two_sites_it_is_the_weighted_mean() -> None:
    """Nobody can say which of two is wrong."""
    assert federated_value({"a": (10, 0.5)}) == 0.5
    assert federated_value({"a": (30, 0.5), "b": (10, 0.9)}) == pytest.approx((30 * 0.5 + 10 * 0.9) / 40)


def test_of_more_it_is_the_weighted_median() -> None:
    """Half of the weight lies on each side; between two where it does so exactly."""
    assert federated_value({"a": (10, 0.5), "b": (10, 0.6), "c": (10, 1.0)}) == 0.6
    assert federated_value({"a": (10, 0.5), "b": (10, 0.6), "c": (10, 0.8), "d": (10, 1.0)}) == pytest.approx(0.7)
    assert federated_value({"a": (1, 0.5), "b": (1, 0.6), "c": (3, 0.9), "d": (4, 0.8)}) == 0.8


honest = st.lists(st.tuples(st.integers(1, 10**6), st.floats(0.2, 0.8)), min_size=2, max_size=7)


@given(honest, st.integers(1, 10**9), st.sampled_from([0.0, 1.0]))
def test_one_liar_among_three_or_more_stays_within_what_the_others_say(
    others: list[tuple[int, float]], examples: int, lie: float
) -> None:
    """However many examples it has declared."""
    reports = {str(index): (float(weight), value) for index, (weight, value) in enumerate(others)}
    values = [value for _, value in others]
    assert min(values) <= federated_value({**reports, "liar": (float(examples), lie)}) <= max(values)


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        ({"accuracy": 1e99}, "accuracy is 1e+99, which must be between 0 and 1"),
        ({"accuracy": -0.1}, "accuracy is -0.1, which must be between 0 and 1"),
        ({"rmse": -1.0}, "rmse is -1, which must be between 0 and 1e+06"),
        ({"r2": 1.5}, "r2 is 1.5, which must be between -1e+06 and 1"),
        ({"my_score": 1e7}, "my_score is 1e+07, which must be between -1e+06 and 1e+06"),
        ({"patient\n7": 0.5}, "the name of a metric has other characters"),
        ({"x" * 61: 0.5}, "the name of a metric has other characters than letters, digits and _.@-, or is longer"),
        ({}, "it has 0 metrics; 1 to 50 are allowed"),
        ({f"m{index}": 0.5 for index in range(51)}, "it has 51 metrics; 1 to 50 are allowed"),
    ],
)
def test_what_cannot_have_been_measured_is_refused(metrics: dict[str, float], problem: str) -> None:
    """The sentence says what is allowed."""
    assert (report_problem(metrics) or "").startswith(problem)


def test_what_can_have_been_measured_is_not() -> None:
    """The ends of every range, a rounding error beyond them, a negative loss, and a model that has diverged."""
    for name, ends in RANGES.items():
        assert all(report_problem({name: end}) is None for end in ends)
    assert report_problem({"accuracy": 1.0000001, "loss": -3.5, "dice": math.nan, "mse": math.inf}) is None


# --- sums ---------------------------------------------------------------------------------------------

RECALL = Sums("recall", (50.0, 3.0, 60.0, 10.0, 57.0, 13.0))  # of 70 examples; class 1: 3 of 13


def test_sites_with_sums_are_pooled_and_no_single_one_decides() -> None:
    """Three sites: the metric is their median, the pooled one that of all examples; of two the pooled one counts."""
    reports = SiteReports(patience=60.0)
    own = {
        "a": (70, RECALL),
        "b": (20, Sums("recall", (10.0, 8.0, 11.0, 9.0, 11.0, 9.0))),
        "c": (10, Sums("recall", (5.0, 1.0, 8.0, 2.0, 6.0, 4.0))),
    }
    for name, (examples, sums) in own.items():
        metrics = {"recall": value_of(sums), "auc": 0.5}
        assert report_problem(metrics, {"recall": sums}, examples) is None
        reports.add(name, 1, examples, metrics, 0.0, {"recall": sums})
    assert reports.collect(own).metrics == {"recall": 1 / 4, "pooled_recall": (3 + 8 + 1) / (13 + 9 + 4), "auc": 0.5}
    assert reports.collect({"a", "b"}).metrics == {"recall": 11 / 22, "pooled_recall": 11 / 22, "auc": 0.5}
    reports.add("b", 2, 20, {"recall": 0.9, "auc": 0.5}, 0.0)
    assert reports.collect({"a", "b"}).metrics.keys() == {"recall", "auc"}, "b has kept its sums"


@pytest.mark.parametrize(
    ("sums", "problem"),
    [
        (RECALL._replace(kind="\x1b[2J"), "its sums of recall are of an unknown kind; mean, rmse, r2, f1, "),
        (RECALL._replace(values=(1.0,) * 769), "its sums of recall are 769 numbers; at most 768 are allowed"),
        (RECALL._replace(values=(math.nan,) * 6), "its sums of recall have a number that is not finite or too large"),
        (RECALL._replace(values=(1e19,) * 6), "its sums of recall have a number that is not finite or too large"),
        (RECALL._replace(values=()), "its sums of recall are impossible for recall"),
        (RECALL._replace(values=RECALL.values[:5]), "its sums of recall are impossible for recall"),
        (RECALL._replace(values=(50, 14, 56, 14, 57, 13)), "its sums of recall are impossible for recall"),
        (RECALL._replace(values=(50, 2.5, 60, 10, 57, 13)), "its sums of recall are impossible for recall"),
        (RECALL._replace(values=(-50, 3, 60, 10, 57, 13)), "its sums of recall are impossible for recall"),
        (RECALL._replace(values=(5e8, 3, 6e8, 10, 6e8, 10)), "its sums of recall are over 6e+08 items, which does not"),
        (RECALL._replace(values=(0, 0, 0, 0, 0, 0)), "its sums of recall are over 0 items, which does not fit the"),
        (RECALL._replace(values=(50, 13, 57, 13, 57, 13)), "its sums of recall give 1, but the report says 0.230769"),
        (Sums("mean", (3.0, 13.0)), "its sums of recall are over 13 items, which does not fit the declared 70"),
        (Sums("mean", (32.3, 140.0)), "its sums of recall are over 140 items, which does not fit the declared 70"),
        (Sums("rmse", (-1.0, 70.0)), "its sums of recall are impossible for rmse"),
        (Sums("r2", (1e18, 0.0, 5e-324, 70.0)), "its sums of recall give -inf, but the report says 0.230769"),
    ],
)
def test_forged_sums_are_refused(sums: Sums, problem: str) -> None:
    """In one sentence, which has nothing of the sender's text."""
    tried()
    assert (report_problem({"recall": 3 / 13}, {"recall": sums}, 70) or "").startswith(problem)


def test_sums_of_what_is_not_reported_are_refused() -> None:
    tried()
    assert report_problem({"auc": 0.5}, {"recall": RECALL}, 70) == "it has sums of a metric that it does not report"


def test_sums_that_do_not_go_together_are_not_pooled() -> None:
    """Of other classes, of another kind, over more items for each example; or where the pooled one is not defined."""
    assert merged_value([(RECALL, 70), (RECALL, 70)]) == 3 / 13
    assert merged_value([(RECALL, 70), (Sums("recall", (1.0,) * 9), 3)]) is None
    assert merged_value([(RECALL, 70), (RECALL._replace(kind="f1"), 70)]) is None
    assert merged_value([(RECALL, 70), (RECALL, 35)]) is None
    assert merged_value([(Sums("r2", (1.0, 2.0, 4.0, 1.0)), 1)]) is None


# --- who is waited for --------------------------------------------------------------------------------


def test_a_site_that_does_not_answer_is_waited_for_once() -> None:
    """From the first report on, for as long as is stated; afterwards not before it has reported."""
    reports = SiteReports(patience=60.0)
    everybody = {"a", "b", "c"}
    for name in everybody:
        reports.ask(name)
    reports.add("a", 1, 10, {"accuracy": 0.5}, now=0.0)
    reports.add("b", 1, 10, {"accuracy": 0.7}, now=1.0)
    assert [reports.due(everybody, now) for now in (1.0, 59.9, 60.0)] == [False, False, True]
    assert reports.collect(everybody).metrics == {"accuracy": pytest.approx(0.6)}

    for name in everybody:
        reports.ask(name)
    reports.add("a", 2, 10, {"accuracy": 0.5}, now=100.0)
    assert not reports.due(everybody, 100.0), "b is waited for"
    reports.add("b", 2, 10, {"accuracy": 0.7}, now=101.0)
    assert reports.due(everybody, 101.0), "c is not"
    reports.collect(everybody)

    reports.add("c", 2, 10, {"accuracy": 0.9}, now=102.0)
    reports.ask("a")
    reports.ask("c")
    assert not reports.due(everybody, 102.0)
    reports.excuse("a")
    assert reports.due(everybody, 102.0)
    assert reports.collect(everybody).by_learner.keys() == everybody, "its latest report counts with the others'"


def test_whoever_is_not_connected_neither_counts_nor_is_waited_for() -> None:
    """And a report that is older than as many models as there are sites is forgotten."""
    reports = SiteReports(patience=60.0)
    for name, version in (("a", 9), ("b", 2), ("gone", 9)):
        reports.add(name, version, 10, {"accuracy": 0.5, name: 1.0}, now=0.0)
    reports.ask("gone")
    assert reports.due({"a", "b"}, 0.0)
    collected = reports.collect({"a", "b"})
    assert (collected.version, collected.by_learner) == (9, {"a": {"accuracy": 0.5, "a": 1.0}})
    reports.add("gone", 10, 10, {"accuracy": 0.5}, now=0.0)
    assert reports.collect(set()).by_learner == {}


# --- on the wire --------------------------------------------------------------------------------------


async def _attend(stack: AsyncExitStack, here: Served, **examples: int) -> list[ScriptedLearner]:
    learners = []
    for name, count in examples.items():
        learner = await stack.enter_async_context(here.scripted(name))
        await learner.connect()
        await learner.ready(evaluation_examples=count)
        learners.append(learner)
    return learners


def _measured(here: Served) -> list[Evaluated]:
    return traced(here, Evaluated)


def test_one_site_neither_ends_the_federation_nor_decides_what_is_best(tmp_path: Path) -> None:
    """C1 row 31: it declared 1 example and reports over 1e9; before, the federation ended at community model 0."""

    async def scene() -> None:
        target = Target("accuracy", 0.95)
        async with (
            federation(tmp_path, expected=3, target=target, settings=AT_LEARNERS) as here,
            AsyncExitStack() as stack,
        ):
            liar, *others = await _attend(stack, here, liar=1, l1=40, l2=60)
            for learner in (liar, *others):
                assert (await learner.task()).evaluate
            tried()
            await liar.send(evaluation=pb.Evaluation(examples=10**9, metrics={"accuracy": 0.97}))
            for learner, accuracy in zip(others, (0.5, 0.6), strict=True):
                await learner.send(evaluation=pb.Evaluation(examples=1, metrics={"accuracy": accuracy}))
            await here.until(lambda: bool(_measured(here)))
            (event,) = _measured(here)
            assert event.metrics == {"accuracy": 0.6}
            assert event.by_learner == {name: {"accuracy": value} for name, value in
                                        (("l1", 0.5), ("l2", 0.6), ("liar", 0.97))}  # fmt: skip
            assert not here.process.finished
            assert from_line(to_line(1.0, event)) == (1.0, event)
            status = await here.process.status()
            json.dumps(status, allow_nan=False)
            shown = {row["name"]: row["report"] for row in status["learners"]}
            assert shown["liar"] == {"version": 0, "accuracy": 0.97}

    play(scene())


def test_the_reports_of_too_few_do_not_end_the_federation(tmp_path: Path) -> None:
    """C1 row 31: two of five members agree, which is shown and may be the best; half of the members must, to end it."""

    async def scene(share: float) -> None:
        members = [f"l{index}" for index in range(5)]
        async with (
            federation(
                tmp_path / str(share), expected=5, minimum=2, target=Target("accuracy", 0.8), members=members,
                settings={**AT_LEARNERS, "wait_seconds": 0.0, "target_share": share},
            ) as here,
            AsyncExitStack() as stack,
        ):  # fmt: skip
            learners = await _attend(stack, here, l0=10, l1=10)
            for learner in learners:
                await learner.task()
            tried()
            for learner in learners:
                await learner.send(evaluation=pb.Evaluation(metrics={"accuracy": 0.9}))
            await here.until(lambda: bool(_measured(here)))
            assert _measured(here)[0].conclusive == (share < 0.5)
            assert _measured(here)[0].metrics == {"accuracy": pytest.approx(0.9)}
            if share < 0.5:
                await here.until(lambda: here.process.finished)
            assert here.process.finished == (share < 0.5)

    for share in (0.5, 0.4):
        play(scene(share))


def test_the_report_of_one_among_several_is_shown_but_is_not_the_federations(tmp_path: Path) -> None:
    """C1 row 31: one site of two alone: its value is kept under its name, and there is no federated one."""

    async def scene() -> None:
        async with federation(tmp_path, expected=2, settings=AT_LEARNERS) as here, AsyncExitStack() as stack:
            one, other = await _attend(stack, here, l0=10, l1=0)
            await one.task()
            assert not (await other.task()).evaluate
            tried()
            await other.send(evaluation=pb.Evaluation(metrics={"accuracy": 1.0}))
            await one.send(evaluation=pb.Evaluation(metrics={"accuracy": 0.9}))
            await here.until(lambda: bool(_measured(here)))
            assert (_measured(here)[0].metrics, _measured(here)[0].conclusive) == ({}, False)
            fold = here.process._view.fold
            assert (fold.history, fold.by_learner) == ([], {"l0": (0, {"accuracy": 0.9})})

    play(scene())


def test_lies_about_an_evaluation_are_refused_and_the_others_count(tmp_path: Path) -> None:
    """C1 row 31: 1e99 fixed the best model for ever; now its sender reads why, and is not waited for."""

    async def scene() -> None:
        async with federation(tmp_path, expected=3, settings=AT_LEARNERS) as here, AsyncExitStack() as stack:
            liar, *others = await _attend(stack, here, liar=10, l1=10, l2=30)
            for learner in (liar, *others):
                await learner.task()
            lies: list[pb.Evaluation] = [
                *(pb.Evaluation(metrics={"accuracy": lie}) for lie in (1e99, -1e308, 1.1)),
                pb.Evaluation(version=2**64 - 1, metrics={"accuracy": 1.0}),
                pb.Evaluation(),
                pb.Evaluation(metrics={"accuracy": 1.0}, sums={"accuracy": pb.Sums(kind="mean", values=[1e9, 1e9])}),
            ]
            for lie in lies:
                tried()
                await liar.send(evaluation=lie)
                assert "its evaluation is refused" in (await liar.notice(pb.Notice.INFORMATION)).text
            assert not _measured(here)
            for learner, accuracy in zip(others, (0.5, 0.9), strict=True):
                await learner.send(evaluation=pb.Evaluation(metrics={"accuracy": accuracy, "loss": math.nan}))
            await here.until(lambda: bool(_measured(here)))
            assert "accuracy 0.8000 (mean over sites) of 2 sites" in "".join(text for _, text in here.reports)
            assert _measured(here)[0].metrics == {"accuracy": pytest.approx((10 * 0.5 + 30 * 0.9) / 40)}
            assert sum("is refused" in text for _, text in here.reports) == len(lies)

    play(scene())


def test_sites_that_are_set_aside_are_not_waited_for(tmp_path: Path) -> None:
    """C1 row 31: three that were, though connected, blocked every evaluation: 74 models, 1 evaluated."""

    async def scene() -> None:
        async with (
            federation(tmp_path, expected=5, settings=AT_LEARNERS) as here,
            AsyncExitStack() as stack,
        ):
            broken = await _attend(stack, here, b0=10, b1=10, b2=10)
            running = [
                asyncio.create_task(learner.run())
                for learner in here.learners(2, lambda index: 0.002, evaluation_examples=20)
            ]
            for learner in broken:
                for _ in range(4):
                    tried()
                    await learner.hand_in((await learner.task()).number, b"\xff" * 4020)
            await here.until(lambda: len(traced(here, LearnerSetAside)) == 3)
            seen = len(_measured(here))
            await here.until(lambda: len(_measured(here)) >= seen + 3)
            assert _measured(here)[-1].by_learner.keys() == {"l0", "l1"}
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    play(scene())


def test_the_model_that_is_delivered_is_measured(tmp_path: Path) -> None:
    """C1 row 31: also where only sites can measure it: they are asked for it before they are sent home."""

    async def scene() -> None:
        policy = policies.sync_fedavg(1)
        async with federation(tmp_path, policy=policy, expected=3, rounds=3, settings=AT_LEARNERS) as here:
            learners: list[HonestLearner] = here.learners(3, evaluation_examples=10)
            await asyncio.gather(here.serving, *(learner.run() for learner in learners))
            final = _measured(here)[-1]
            assert (final.version, len(final.by_learner)) == (3, 3)
            assert {point.version for point in here.process._view.fold.history} >= {3}
            assert all(learner.final is not None for learner in learners)

    play(scene())


def test_a_site_that_does_not_measure_the_last_model_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """C1 row 31: it is waited for as long as is stated; one that leaves is not waited for at all."""

    async def scene(wait: float, leaves: bool) -> None:
        folder = tmp_path / str(leaves)
        settings = {**AT_LEARNERS, "evaluation_wait": wait}
        async with federation(folder, rounds=1, settings=settings) as here, AsyncExitStack() as stack:
            (silent,) = await _attend(stack, here, l0=10)
            await silent.hand_in((await silent.task()).number)
            request = await silent.expect("evaluate")
            assert request.version == here.process._view.standing.version == 1
            if leaves:
                await silent.vanish()
            else:
                await silent.expect("farewell")
            assert await here.serving

    play(scene(0.5, leaves=False))
    play(scene(600.0, leaves=True))


class _Stagnating:
    """A controller's evaluator: accuracy on the test examples goes up, on the validation examples down."""

    def __init__(self) -> None:
        self.calls = 0

    async def evaluate(self, model: Path) -> dict[str, float]:
        self.calls += 1
        return {"accuracy": 0.1 * self.calls, "validation_accuracy": 1.0 / self.calls}


def test_a_federation_ends_early_and_keeps_the_best_model_by_validation(tmp_path: Path) -> None:
    """What was measured is journaled, so a controller that starts again knows that it has ended and why."""
    stop = StopRule(rounds=1000, patience=Patience("validation_accuracy", 3))

    async def scene(ended: bool) -> None:
        evaluator = _Stagnating()
        terms = DeploymentSettings(expected=1, minimum=1, lease=20, heartbeat=0.2, linger=0.2)
        async with served(tmp_path, policies.sync_fedavg(1), stop, terms=terms, evaluator=evaluator) as here:
            if ended:
                assert here.process.finished
                return
            (learner,) = here.learners(1)
            await asyncio.gather(here.serving, learner.run())
            assert here.process._view.fold.finish_reason == "validation_accuracy has not improved in 3 evaluations"
            counted = [point for point in here.process._view.fold.history if point.version]
            assert len(counted) >= 4, "the first and three that are not better; the last may be measured at the end"
            assert here.process._view.best_version == here.process._view.fold.history[0].version

    play(scene(ended=False))
    best = Run.load(tmp_path / "run")
    assert best.best_model is not None and best.best_version == best.history[0].version
    play(scene(ended=True))
