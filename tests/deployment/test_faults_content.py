"""Fault matrix C1, what an update holds: numbers, sizes and claims that cannot be, and what becomes of the sender."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from hypothesis import given, settings, strategies as st

from deployment.faults import (
    Stage,
    community_hash,
    federation,
    files,
    finish,
    journaled,
    play,
    refusal,
    status_of,
    traced,
    tried,
)
from deployment.scripted_learner import LAYOUT, ScriptedLearner, chunk, end, local_model, parts, receipt_of
from metis.core import policies
from metis.core.events import LearnerSetAside, TaskFailed, UpdateCommitted
from metis.core.model import Layout, TensorSpec
from metis.core.timing import MAX_STEPS
from metis.deployment.controller.upload import NumberCheck
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.models import model_bytes
from metis.deployment.wire.protocol import UPLOAD

_CODE = grpc.StatusCode
LENGTH = model_bytes(LAYOUT)

# --- row 11: numbers ------------------------------------------------------------------------------------


def _with(number: float, *indices: int) -> bytes:
    vector = np.frombuffer(local_model(), "<f4", LAYOUT.size).copy()
    vector[list(indices)] = number
    return vector.tobytes() + local_model()[4 * LAYOUT.size :]


WILD = {
    "NaN": (_with(math.nan, 1001), "tensor 'b' holds 1 of 3 numbers that are not finite"),
    "Inf": (_with(math.inf, 0, 5, 999), "tensor 'w' holds 3 of 1000 numbers that are not finite"),
    "-Inf": (_with(-math.inf, *range(1000)), "tensor 'w' holds 1000 of 1000 numbers that are not finite"),
    "1e30": (_with(1e30, 7, 1000, 1002), "tensor 'w' holds 1 of 1000 numbers beyond 1e+10"),
    "-1e30": (_with(-1e30, 1000, 1002), "tensor 'b' holds 2 of 3 numbers beyond 1e+10"),
    "zero": (local_model(0.0), "every number of the model is 0"),
    "negative zero": (local_model(-0.0), "every number of the model is 0"),
}
TAME = {
    "denormal": local_model(1e-40),
    "zeros but one": _with(0.0, *range(1, 1003)),
    "largest": local_model(1e10),
    "counters beyond all": local_model()[: 4 * LAYOUT.size] + b"\xff" * 8,
}


def test_a_model_with_wild_numbers_is_refused(tmp_path: Path) -> None:
    """C1 row 11: the tensor and the count are named, the community model keeps every bit, however it was cut."""

    async def scene() -> None:
        async with federation(tmp_path) as here, here.scripted() as learner:
            await learner.join()
            for model, problem in WILD.values():
                for size in (LENGTH, 40, 1004):
                    tried()
                    task, community, before = await learner.task(), community_hash(here), files(here)
                    receipt = await learner.upload(parts(learner.header(task.number), model, size=size))
                    assert (receipt.verdict, receipt.reason) == (pb.Receipt.REFUSED, problem)
                    assert (await learner.notice(pb.Notice.REFUSED)).text == problem
                    assert community_hash(here) == community
                    assert files(here) == before
                # Three in a row are forgiven; a good one makes up for them.
                await learner.hand_in((await learner.task()).number)
            for model in TAME.values():
                receipt = await learner.hand_in((await learner.task()).number, model)
                assert receipt.verdict == pb.Receipt.COMMITTED
                await learner.notice(pb.Notice.COMMITTED)
            await here.until(lambda: len(traced(here, UpdateCommitted)) == len(WILD) + len(TAME))

    play(scene())


@settings(max_examples=50)
@given(data=st.data())
def test_the_verdict_does_not_depend_on_the_chunks(data: st.DataObject) -> None:
    """C1 row 11: what is seen in passing is what a look at the whole model shows."""
    tried()
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    layout = Layout(tuple(TensorSpec(f"t{index}", (size,)) for index, size in enumerate(sizes)))
    values = st.sampled_from([0.0, 1.0, math.nan, math.inf, 2e10, -2e10])
    vector = np.array(data.draw(st.lists(values, min_size=layout.size, max_size=layout.size)), "<f4")
    numbers, content, offset = NumberCheck(layout, 1e10), vector.tobytes(), 0
    while offset < len(content):
        piece = content[offset : offset + 4 * data.draw(st.integers(1, 6))]
        numbers.add(offset, piece)
        offset += len(piece)
    expected = "every number" if layout.size and not vector.any() else None
    for spec in layout.tensors if expected is None else ():
        mine = vector[layout.slices[spec.name]]
        if (wild := int((~np.isfinite(mine)).sum())) or (mine[np.isfinite(mine)] > 1e10).any() or (mine < -1e10).any():
            count = wild or int((np.abs(mine) > 1e10).sum())
            expected = f"tensor '{spec.name}' holds {count} of {spec.size} numbers {'that' if wild else 'beyond'}"
            break
    problem = numbers.problem()
    assert problem is None if expected is None else problem is not None and problem.startswith(expected)


# --- row 12: sizes and layouts ----------------------------------------------------------------------------


@st.composite
def misfits(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], int, bool]:
    """Announced bytes, chunks as (offset, length), bytes at the end, whether the hash is right: never a model."""
    announced = draw(st.just(LENGTH) | st.integers(0, 2 * LENGTH) | st.integers(0, 2**64 - 1))
    lengths = draw(st.lists(st.just(LENGTH // 2) | st.integers(0, LENGTH + 9), max_size=4))
    offsets = [sum(lengths[:index]) for index in range(len(lengths))]
    if lengths and draw(st.booleans()):
        offsets[draw(st.integers(0, len(lengths) - 1))] = draw(st.integers(0, 2**64 - 1))
    return announced, list(zip(offsets, lengths, strict=True)), draw(st.integers(0, 2**64 - 1)), draw(st.booleans())


@pytest.mark.hypothesis
def test_a_model_of_another_size_is_refused(tmp_path: Path) -> None:
    """C1 row 12: too short, too long, announced otherwise, in chunks that do not fit: nothing of it stays."""
    with Stage(tmp_path) as stage:
        here, learner = stage.here, None

        async def join() -> tuple[ScriptedLearner, int]:
            puppet = await here.scripted().join()
            return puppet, (await puppet.task()).number

        learner, task = stage.play(join())
        before = files(here)

        @settings(max_examples=80)
        @given(misfits())
        def attempt(misfit: tuple[int, list[tuple[int, int]], int, bool]) -> None:
            tried()
            announced, chunks, last, honest = misfit
            sent = b"".join(b"\1" * length for _, length in chunks)
            closing = pb.UploadEnd(bytes=last, sha256=hashlib.sha256(sent).hexdigest() if honest else "0" * 64)
            messages = [
                pb.UploadPart(header=learner.header(task, bytes=announced)),
                *(chunk(offset, b"\1" * length) for offset, length in chunks),
                pb.UploadPart(end=closing),
            ]
            code, reason = stage.play(refusal(learner, *messages))
            assert code in (_CODE.INVALID_ARGUMENT, _CODE.OUT_OF_RANGE, _CODE.DATA_LOSS)
            assert any(character.isdigit() for character in reason)

        attempt()
        assert journaled(here) == []
        assert files(here) == before
        assert stage.play(learner.hand_in(task)).verdict == pb.Receipt.COMMITTED
        stage.play(learner.__aexit__())


def test_a_small_update_counts_by_its_header_alone(tmp_path: Path) -> None:
    """Once, with its checksum and exactly the bytes that it announces; and its numbers are looked at as any."""

    async def scene() -> None:
        async with federation(tmp_path / "state") as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            assert hashlib.sha256(task.model).hexdigest() == task.sha256
            content, before = local_model(), files(here)
            right = {"content": content, "sha256": hashlib.sha256(content).hexdigest()}
            for wrong, code in (
                ({"sha256": ""}, _CODE.INVALID_ARGUMENT),
                ({"content": content[:-4]}, _CODE.INVALID_ARGUMENT),
                ({"content": content + bytes(4)}, _CODE.INVALID_ARGUMENT),
                ({"seal": bytes(7)}, _CODE.INVALID_ARGUMENT),
                ({"seal": bytes(48)}, _CODE.INVALID_ARGUMENT),  # one checksum, not two
                ({"sha256": "0" * 64}, _CODE.DATA_LOSS),
                ({"sha256": "", "seal": bytes(47) + b"1"}, _CODE.DATA_LOSS),
            ):
                header = learner.header(task.number, **{**right, **wrong})
                assert (await status_of(learner.hand_in_small(header)))[0] == code, wrong
                tried()
            assert files(here) == before and journaled(here) == []
            header = learner.header(task.number, **right)
            assert (await refusal(learner, pb.UploadPart(header=header), end(content)))[0] == _CODE.INVALID_ARGUMENT
            for verdict in (pb.Receipt.COMMITTED, pb.Receipt.ALREADY):
                assert (await learner.hand_in_small(header)).verdict == verdict
            assert len(journaled(here)) == 1
            task = await learner.task()
            wild = local_model(float("nan"))
            header = learner.header(task.number, content=wild, sha256=hashlib.sha256(wild).hexdigest())
            receipt = await learner.hand_in_small(header)
            assert receipt.verdict == pb.Receipt.REFUSED and "not finite" in receipt.reason

    asyncio.run(asyncio.wait_for(scene(), 600))


def _changed(draw: st.DrawFn) -> Layout:
    """The federation's layout with one thing changed."""
    tensors = list(LAYOUT.tensors)
    which = draw(st.integers(0, len(tensors) - 1))
    spec = tensors[which]
    match draw(st.sampled_from(["shape", "0-d", "transposed", "dtype", "name", "order", "extra", "missing", "role"])):
        case "shape":
            tensors[which] = replace(spec, shape=(*spec.shape, 1))
        case "0-d":
            tensors[which] = replace(spec, shape=())
        case "transposed":
            tensors[0] = replace(tensors[0], shape=(2, 500))
        case "dtype":
            tensors[which] = replace(spec, dtype="int32" if spec.role == "counter" else "float64")
        case "name":
            tensors[which] = replace(spec, name=spec.name + draw(st.text(min_size=1)))
        case "order":
            tensors.reverse()
        case "extra":
            tensors.insert(which, TensorSpec("extra", draw(st.sampled_from([(), (0,), (3, 3)]))))
        case "missing":
            del tensors[which]
        case "role":
            tensors[0] = replace(tensors[0], role="buffer")
    return Layout(tuple(tensors))


@pytest.mark.hypothesis
def test_a_network_of_another_layout_is_refused(tmp_path: Path) -> None:
    """C1 row 12: wrong shape, dtype, name, order, extra or missing tensors: refused before any model travels."""
    with Stage(tmp_path) as stage:

        async def attempt_with(fingerprint: str) -> None:
            async with stage.here.scripted("other") as learner:
                await learner.connect()
                await learner.ready(layout=fingerprint)
                assert await learner.ended() == _CODE.FAILED_PRECONDITION
                reason = await learner.stream.details()
                assert LAYOUT.fingerprint[:12] in reason
                assert "1003 numbers in 3 tensors" in reason

        @settings(max_examples=25)
        @given(st.composite(_changed)().map(lambda layout: layout.fingerprint) | st.text(max_size=100))
        def attempt(fingerprint: str) -> None:
            tried()
            stage.play(attempt_with(fingerprint))

        attempt()
        assert stage.here.process._writer.durable.controller.roster.get("other") is None


# --- row 13: sizes that would hurt ------------------------------------------------------------------------

MAX_GROWTH = 48 << 20  # bytes of both ends of the wire in this one process; a fraction of what is announced


def test_what_is_announced_or_sent_without_end_costs_no_memory(tmp_path: Path) -> None:
    """C1 row 13: 10 GB announced, 10 GB streamed, a million chunks: refused with the first that does not fit."""
    sent = 0

    async def endless(header: pb.UploadHeader, piece: bytes) -> AsyncIterator[pb.UploadPart]:
        nonlocal sent
        yield pb.UploadPart(header=header)
        for count in range(1_000_000):
            sent += 1
            yield chunk(count * len(piece), piece)

    async def scene() -> None:
        nonlocal sent
        async with federation(tmp_path) as here, here.scripted() as learner:
            task = (await (await learner.join()).task()).number
            await status_of(learner.upload(endless(learner.header(task, bytes=10**10), b"\1" * 1024)))
            before, memory = files(here), psutil.Process().memory_info().rss
            for announced, piece in ((10**10, 1024), (LENGTH, 1000), (LENGTH, 1 << 20), (LENGTH, 0), (2**64 - 1, 4)):
                sent = 0
                tried()
                refusals = here.process._service.refusals["INVALID_ARGUMENT"]
                code, reason = await status_of(
                    learner.upload(endless(learner.header(task, bytes=announced), b"\1" * piece))
                )
                # gRPC sometimes hides the answer from a learner that is in the middle of sending.
                assert code == _CODE.INTERNAL or (code == _CODE.INVALID_ARGUMENT and str(LENGTH) in reason)
                assert here.process._service.refusals["INVALID_ARGUMENT"] == refusals + 1
                assert sent < 1000  # what was under way when the answer came
            assert psutil.Process().memory_info().rss - memory < MAX_GROWTH
            assert (files(here), journaled(here)) == (before, [])

    play(scene())


def test_a_whole_model_in_the_smallest_chunks_is_a_model(tmp_path: Path) -> None:
    """C1 row 13: four bytes at a time are slow, and neither wrong nor a burden on memory."""
    layout = Layout((TensorSpec("w", (1500,)),))

    async def scene() -> None:
        async with federation(tmp_path, layout=layout) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            memory = psutil.Process().memory_info().rss
            model = local_model(layout=layout)
            receipt = await learner.upload(parts(learner.header(task.number), model, size=4))
            tried()
            assert receipt.verdict == pb.Receipt.COMMITTED
            assert psutil.Process().memory_info().rss - memory < MAX_GROWTH

    play(scene())


def test_numbers_at_the_edge_of_the_format(tmp_path: Path) -> None:
    """C1 row 13: negative and overflowing sizes, offsets and task numbers are answered, not computed with."""

    async def scene() -> None:
        async with federation(tmp_path) as here, here.scripted() as learner:
            task = await (await learner.join()).task()
            for number in (2**63 - 1, 2**63, 2**64 - 1):
                tried(5)
                late = await learner.hand_in(number)
                assert (late.verdict, "rebase" in late.reason) == (pb.Receipt.REFUSED, True)
                header = pb.UploadPart(header=learner.header(task.number))
                assert (await refusal(learner, header, chunk(number, b"1234")))[0] == _CODE.OUT_OF_RANGE
                wrong = pb.UploadPart(end=pb.UploadEnd(bytes=number, sha256=hashlib.sha256(local_model()).hexdigest()))
                code, _ = await refusal(learner, header, chunk(0, local_model()), wrong)
                assert code == _CODE.DATA_LOSS
                request = pb.ModelRequest(run=here.process.run, sha256=task.sha256, offset=number)
                download = learner.stub.download(request, metadata=learner.metadata)
                assert await download.code() == _CODE.OUT_OF_RANGE
                await learner.send(heartbeat=pb.Heartbeat(task=number, steps=number))
            # -1 as a signed number would be written; protobuf reads it as 2**64 - 1.
            negative = (
                b"\x0a"
                + bytes([2 + 16 + 11])
                + b"\x0a\x10"
                + here.process.run.encode()
                + b"\x38"
                + b"\xff" * 9
                + b"\x01"
            )
            raw = learner.channel.stream_stream(UPLOAD, None, None)
            code, reason = await status_of(receipt_of(raw(_raw(negative), metadata=learner.metadata)))
            assert (code, str(2**64 - 1) in reason) == (_CODE.INVALID_ARGUMENT, True)
            tried(2)
            too_long = await refusal(
                learner, pb.UploadPart(header=learner.header(task.number)), chunk(0, bytes(2 << 20))
            )
            assert too_long[0] == _CODE.RESOURCE_EXHAUSTED  # gRPC does not even read it
            json.dumps(await here.process.status(), allow_nan=False)
            assert (await learner.hand_in(task.number)).verdict == pb.Receipt.COMMITTED

    play(scene())


async def _raw(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


# --- row 31: lies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", [{"examples": 0}, {"examples": 10**12}, {"examples": 2**64 - 1}, {"batch_size": 0}])
def test_a_learner_that_lies_about_its_data_does_not_join(lie: dict[str, int], tmp_path: Path) -> None:
    """C1 row 31: no examples or more than anybody has; the operator reads what is allowed, the others go on."""

    async def scene() -> None:
        async with federation(tmp_path, rounds=3) as here, here.scripted("liar") as liar:
            await liar.connect()
            await liar.ready(**lie)
            tried()
            assert await liar.ended() == _CODE.FAILED_PRECONDITION
            assert "both must be between 1 and 1000000000 (deployment.max_examples)" in await liar.stream.details()
            await finish(here, "l0")
            assert here.process._writer.durable.controller.roster.get("liar") is None

    play(scene())


IMPOSSIBLE: list[dict[str, Any]] = [
    *({"seconds": value} for value in (math.nan, math.inf, -math.inf, -1.0)),
    *({"time_per_batch": value} for value in (math.nan, math.inf, -1.0, 0.0, 5e-324)),
    *({"steps": value} for value in (0, 11, 2**64 - 1)),  # the tasks are of 10 steps
]
HARMLESS: list[dict[str, Any]] = [
    *({"seconds": value} for value in (0.0, 1e300)),
    *({"time_per_batch": value} for value in (1e300, 1e-9)),
    *({"loss": value} for value in (math.nan, -math.inf)),
]


@pytest.mark.parametrize("name", ["async_fedavg", "fedrec", "semisync_fedavg"])
def test_lies_about_the_work_are_refused_or_bounded(name: str, tmp_path: Path) -> None:
    """C1 row 31: what cannot be is refused; what might be is bounded by the time that passed; nothing stands still."""

    async def scene() -> None:
        policy = getattr(policies, name)(1)
        async with federation(tmp_path, policy=policy) as here, here.scripted("liar") as liar:
            await liar.join()
            for count, claims in enumerate(IMPOSSIBLE, start=1):
                tried()
                task, community = await liar.task(), community_hash(here)
                assert (await liar.hand_in(task.number, **claims)).verdict == pb.Receipt.REFUSED
                (claimed,) = claims.values()
                assert (
                    f"it claims {'' if 'steps' not in claims else claimed}"
                    in (await liar.notice(pb.Notice.REFUSED)).text
                )
                assert community_hash(here) == community
                if count % 3 == 0:  # a good one, not to be set aside
                    await liar.hand_in((await liar.task()).number)
            for claims in HARMLESS:
                tried()
                receipt = await liar.hand_in((await liar.task()).number, **claims)
                assert receipt.verdict == pb.Receipt.COMMITTED
                await liar.notice(pb.Notice.COMMITTED)
            assert (await liar.task()).steps <= MAX_STEPS
            status = await here.process.status()
            json.dumps(status, allow_nan=False)
            (account,) = status["learners"]
            assert (account["refused"], account["state"]) == (len(IMPOSSIBLE), "training")
            assert account["active"] <= status["seconds"]
            assert account["time_per_batch"] <= status["seconds"]
            assert all(0 < action.contribution_value < math.inf for action in traced(here, UpdateCommitted))
            assert status["deadline"] is None or status["deadline"] < 100 * status["seconds"]

    play(scene())


def test_a_receipt_never_promises_what_is_refused_afterwards(tmp_path: Path) -> None:
    """C1 row 31: tasks that end by time allow any number of steps that can be; 2^63 is refused in the receipt."""

    async def scene() -> None:
        policy = policies.semisync_fedavg(2, budget="deadline", cold_start_limit=1.0)
        async with federation(tmp_path, policy=policy) as here, here.scripted("liar") as liar:
            await liar.join()
            await liar.hand_in((await liar.task()).number)
            for steps in (2**53 + 1, 2**63, 2**64 - 1):
                tried()
                task = await liar.task()
                assert not task.HasField("steps")
                receipt = await liar.hand_in(task.number, steps=steps)
                assert (receipt.verdict, receipt.reason) == (
                    pb.Receipt.REFUSED,
                    f"it claims {steps} steps, the task allows 1 to {2**53}",
                )
            receipt = await liar.hand_in((await liar.task()).number, steps=10**9)
            assert receipt.verdict == pb.Receipt.COMMITTED
            await here.until(lambda: len(traced(here, UpdateCommitted)) == 2)
            status = await here.process.status()
            assert status["steps"] <= 1 + 3 * (status["seconds"] + 1) / 0.001 + 1, "as many as fit into the time"

    play(scene())


def test_a_claim_of_slowness_stretches_the_period_no_further_than_what_was_seen(tmp_path: Path) -> None:
    """C1 row 31: semi-synchronous; 1e9 seconds for a batch become the time that the whole task took."""

    async def scene() -> None:
        policy = policies.semisync_fedavg(2)
        async with (
            federation(tmp_path, policy=policy, expected=2) as here,
            here.scripted("l0") as honest,
            here.scripted("liar") as liar,
        ):
            await honest.join()
            await liar.join(examples=10, batch_size=10)
            tasks = [await honest.task(), await liar.task()]
            await honest.hand_in(tasks[0].number)
            await liar.hand_in(tasks[1].number, time_per_batch=1e9, seconds=1e9)
            tried()
            following = await honest.task()
            seen = (await here.process.status())["seconds"]
            period = 2 * max(seen, 10 * 0.001)  # lambda epochs: the liar's has one batch, the honest one's ten
            assert 0 < following.seconds <= period
            assert here.process._writer.durable.controller.deadline <= seen + 1.1 * period + 2 * seen

    play(scene())


def test_lies_about_a_failed_task(tmp_path: Path) -> None:
    """C1 row 31: steps and seconds that never were do not enter the costs; a kind that is none is unknown."""

    async def scene() -> None:
        async with federation(tmp_path) as here, here.scripted("liar") as liar:
            await liar.join()
            for seconds in (math.nan, math.inf, -1.0):
                tried()
                task = await liar.task()
                await liar.send(
                    failed=pb.Failed(
                        task=task.number, cause=pb.Cause(kind=2**31 - 1, rule=99), steps=2**64 - 1, seconds=seconds
                    )
                )
                await liar.send(failed=pb.Failed(task=10**6))
                assert (await liar.notice(pb.Notice.REFUSED)).text == "it does not say why"
            status = await here.process.status()
            (costs,) = status["learners"]
            assert status["costs"]["steps"] <= 3 * 10
            assert 0 <= costs["active"] <= status["seconds"]
            assert [failed.steps for failed in traced(here, TaskFailed)] == [10, 10, 10]
            assert (await liar.hand_in((await liar.task()).number)).verdict == pb.Receipt.COMMITTED

    play(scene())


# --- repeated offenders -----------------------------------------------------------------------------------


def test_a_repeated_offender_is_set_aside_and_the_others_go_on(tmp_path: Path) -> None:
    """C1 rows 11 and 31: after the fourth refusal in a row it gets no task until it joins again; no round waits."""

    async def scene() -> None:
        async with federation(tmp_path, policy=policies.sync_fedavg(1), expected=3, rounds=12) as here:
            finishing = asyncio.create_task(finish(here, "l0", "l1", seconds_per_batch=0.002))
            async with here.scripted("offender") as offender:
                await offender.join()
                for _ in range(4):
                    tried()
                    receipt = await offender.hand_in((await offender.task()).number, local_model(math.nan))
                    assert receipt.verdict == pb.Receipt.REFUSED
                notice = await offender.notice(pb.Notice.SET_ASIDE)
                assert "4 refused updates in a row" in notice.text
                seen = here.process._writer.durable.controller.community.stamp.version
                await here.until(lambda: here.process._writer.durable.controller.community.stamp.version >= seen + 2)
                assert [aside.learner for aside in traced(here, LearnerSetAside)] == ["offender"]
                await offender.vanish()
                await offender.join()  # somebody has fixed it
                await offender.hand_in((await offender.task()).number)
                await offender.notice(pb.Notice.COMMITTED)
                await offender.send(leaving=pb.Leaving())
                await finishing
            assert len([action for action in traced(here, UpdateCommitted) if action.learner == "offender"]) == 1

    play(scene())
