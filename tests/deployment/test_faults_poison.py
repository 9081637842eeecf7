"""Fault matrix C1 row 31, poisoning: how much and how far a site may pull, whatever it sends."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from deployment.faults import community_hash, federation, play, traced, tried
from deployment.federations import Served, initial_model
from deployment.scripted_learner import LAYOUT, ScriptedLearner, local_model
from metis.core import policies
from metis.core.events import LearnerSetAside, TaskFailed, UpdateCommitted, UpdateRequest
from metis.core.model import Layout, TensorSpec
from metis.core.step_guard import Lengths
from metis.deployment.controller.state import State
from metis.deployment.controller.steps import StepGuard
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.models import model_bytes, model_parts
from metis.runs.trace import from_line, to_line

POISON = local_model(9e9)
SIZE = LAYOUT.size


async def _attend(stack: AsyncExitStack, here: Served, *names: str) -> list[ScriptedLearner]:
    learners = [await stack.enter_async_context(here.scripted(name)) for name in names]
    for learner in learners:
        await learner.join()
    return learners


async def _round(learners: list[ScriptedLearner], *values: float) -> list[pb.Receipt]:
    """One synchronous round in which each hands in a model of this number, one after the other."""
    tasks = [await learner.task() for learner in learners]
    return [
        await learner.hand_in(task.number, local_model(value))
        for learner, task, value in zip(learners, tasks, values, strict=True)
    ]


def _vector(here: Served) -> np.ndarray[Any, Any]:
    return np.array(here.process._writer.durable.controller.community.model.vector)


def _updates(here: Served) -> list[UpdateRequest]:
    return traced(here, UpdateRequest)


@pytest.mark.parametrize("guard", ["clip", "refuse", "report"])
def test_a_step_far_beyond_those_of_others_is_clipped_refused_or_reported(guard: str, tmp_path: Path) -> None:
    """C1 row 31: every number 9e9, where the others went 1. A restart gives the same bits; the receipt is true."""
    settings = {"step_guard": guard}
    policy = policies.sync_fedavg(1)

    async def scene() -> tuple[str, int]:
        async with (
            federation(tmp_path, policy=policy, expected=4, settings=settings) as here,
            AsyncExitStack() as stack,
        ):
            notified: list[str] = []
            here.process._requests.notify = lambda kind, text, **facts: notified.append(f"{kind} {facts}")
            learners = await _attend(stack, here, "a", "b", "c", "liar")
            receipts = await _round(learners, 2.0, 2.0, 2.0, 2.0)
            assert all(receipt.verdict == pb.Receipt.COMMITTED for receipt in receipts)
            tried()
            tasks = [await learner.task() for learner in learners]
            receipt = await learners[-1].hand_in(tasks[-1].number, POISON)
            if guard == "refuse":
                assert receipt.verdict == pb.Receipt.REFUSED
                assert "times as far as is allowed (deployment.step_limit = 10)" in receipt.reason
                await here.until(lambda: len(traced(here, TaskFailed)) == 1)
            else:
                assert receipt.verdict == pb.Receipt.COMMITTED
                await here.until(lambda: len(_updates(here)) == 5)
                update = _updates(here)[-1]
                assert update.notes["step_excess"] == pytest.approx((9e9 - 2) / 10, rel=1e-6)
                assert from_line(to_line(1.0, update)) == (1.0, update)
                length = 10 * np.sqrt(SIZE) if guard == "clip" else (9e9 - 2) * np.sqrt(SIZE)
                assert update.lengths[0] == pytest.approx(length, rel=1e-6)
                warnings = [text for kind, text in here.reports if kind == "warning"]
                assert any("'liar'" in text and "is unusual" in text for text in warnings)
                again = await learners[-1].hand_in(tasks[-1].number, POISON)
                assert again.verdict == pb.Receipt.ALREADY
            assert notified == ["update_held {'learner': 'liar'}"]
            for learner, task in zip(learners[:-1], tasks[:-1], strict=True):
                await learner.hand_in(task.number, local_model(3.0))
            await here.until(lambda: here.process._view.standing.version == 2)
            expected = {"clip": (3 * 3 + 12) / 4, "refuse": 3.0, "report": (9 + 9e9) / 4}[guard]
            np.testing.assert_allclose(_vector(here), expected, rtol=1e-5)
            return community_hash(here), here.state.last_seq()

    async def restarted() -> str:
        async with federation(tmp_path, policy=policy, expected=4, settings=settings) as here:
            return community_hash(here)

    before, _ = play(scene())
    for _ in range(2):  # the second from the snapshot of the first
        assert play(restarted()) == before


def test_in_the_first_round_the_model_itself_is_the_measure(tmp_path: Path) -> None:
    """C1 row 31: the first to hand in may go twice the length of the model, not 9e9 times."""

    async def scene() -> None:
        settings = {"step_guard": "clip"}
        async with (
            federation(tmp_path, policy=policies.sync_fedavg(1), expected=3, settings=settings) as here,
            AsyncExitStack() as stack,
        ):
            learners = await _attend(stack, here, "liar", "a", "b")
            tried()
            await _round(learners, 9e9, 2.0, 2.0)
            await here.until(lambda: here.process._view.standing.version == 1)
            assert _updates(here)[0].lengths[0] == pytest.approx(2 * np.sqrt(SIZE), rel=1e-6)
            np.testing.assert_allclose(_vector(here), (3 + 2 + 2) / 3, rtol=1e-5)

    play(scene())


def test_tiny_steps_of_one_site_do_not_shut_the_others_out(tmp_path: Path) -> None:
    """C1 row 31: a liar that hardly moves, and is always first, does not make honest steps unusual."""

    async def scene() -> None:
        settings = {"step_guard": "refuse"}
        async with (
            federation(tmp_path, policy=policies.sync_fedavg(1), expected=3, settings=settings) as here,
            AsyncExitStack() as stack,
        ):
            learners = await _attend(stack, here, "liar", "a", "b")
            value = 1.0
            for _ in range(4):
                tried()
                receipts = await _round(learners, value, value + 0.5, value + 1.0)
                assert [receipt.verdict for receipt in receipts] == [pb.Receipt.COMMITTED] * 3
                value += 0.5
            await here.until(lambda: len(traced(here, UpdateCommitted)) == 12)

    play(scene())


def test_whoever_sends_poison_again_and_again_is_set_aside(tmp_path: Path) -> None:
    """C1 row 31: a refused step is a refused update; the others go on."""

    async def scene() -> None:
        settings = {"step_guard": "refuse"}
        async with federation(tmp_path, settings=settings) as here, AsyncExitStack() as stack:
            (liar,) = await _attend(stack, here, "liar")
            for _ in range(4):
                tried()
                assert (await liar.hand_in((await liar.task()).number, POISON)).verdict == pb.Receipt.REFUSED
            await here.until(lambda: len(traced(here, LearnerSetAside)) == 1)
            assert community_hash(here) == initial_model().sha256()

    play(scene())


def test_the_parts_of_a_model_are_measured_and_clipped_apart(tmp_path: Path) -> None:
    """Parameters and buffers by how far they went, control variates by their size; counters stay as they are."""
    network = Layout(
        (
            TensorSpec("w", (200_000,)), TensorSpec("mean", (5,), role="buffer"), TensorSpec("v", (3,)),
            TensorSpec("n", (), "int64", "counter"),
        )
    )  # fmt: skip
    layout = network.with_controls(network.size)
    initial = initial_model(layout)
    rng = np.random.default_rng(1)
    other = initial.with_vector(rng.normal(size=layout.size).astype(np.float32))
    with State.open(tmp_path, "process") as state:
        base, local = (state.put_blob(model_parts(model)) for model in (initial, other))
        guard = StepGuard("clip", 10.0, state, layout)
        measured = guard.measure(base, local)
        where = {name: layout.slices[name] for name in layout.slices if name != "n"}
        step, change = other.vector.astype(np.float64), other.vector.astype(np.float64) - 1.0
        parameters = np.concatenate((change[where["w"]], change[where["v"]]))
        control = step[network.size :]
        expected = [np.linalg.norm(part) for part in (parameters, change[where["mean"]], control)]
        assert measured.step == pytest.approx(expected)
        assert measured.model == pytest.approx([np.sqrt(200_003), np.sqrt(5), np.sqrt(control.size)])

        clipped = np.fromfile(state.blob_path(guard._clip(base, local, [0.5, 1.0, 0.25])), np.uint8)
        assert clipped.size == model_bytes(layout)
        numbers = clipped[: 4 * layout.size].view("<f4")
        np.testing.assert_allclose(numbers[where["v"]], 1 + 0.5 * change[where["v"]], rtol=1e-6)
        np.testing.assert_array_equal(numbers[where["mean"]], other.vector[where["mean"]])
        np.testing.assert_allclose(numbers[network.size :], 0.25 * control, rtol=1e-6)
        assert clipped[4 * layout.size :].view("<i8").tolist() == [3]
        assert isinstance(measured.step, Lengths)


@pytest.mark.parametrize("claim", [{"examples": 101}, {"examples": 10**9}, {"evaluation_examples": 101}])
def test_a_site_that_claims_more_than_the_file_allows_it_does_not_join(claim: dict[str, int], tmp_path: Path) -> None:
    """C1 row 31: the cap is its own; the sentence names it, and the others are not concerned."""

    async def scene() -> None:
        async with federation(tmp_path, max_examples={"liar": 100}) as here, AsyncExitStack() as stack:
            liar = await stack.enter_async_context(here.scripted("liar"))
            await liar.connect()
            tried()
            await liar.ready(**claim)
            assert await liar.ended() == grpc.StatusCode.FAILED_PRECONDITION
            assert "100 (its [[learners]].max_examples)" in await liar.stream.details()
            other = await stack.enter_async_context(here.scripted("other"))
            await other.join(examples=10**6)
            await other.task()

    play(scene())
