"""Fault matrix C1, row 14: whatever comes in whatever order is answered, nothing escapes, nothing hangs."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from deployment.faults import Stage, tried
from deployment.federations import Served
from deployment.fuzz_service import ANSWERS, EXTREME, WILD, Mutator, Scene, knock, strike
from deployment.scripted_learner import LAYOUT, HonestLearner, local_model, move_towards
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.protocol import PROTOCOL

_CODE = grpc.StatusCode
NAME = "fuzz"


async def _goes_on(here: Served) -> None:
    """An honest learner comes, trains and gets the final model."""
    honest = HonestLearner("honest", here.address, LAYOUT, train=move_towards(1.0))
    learning = asyncio.create_task(honest.run())
    await here.until(lambda: len(honest.receipts) >= 3)
    here.process.stop_run("enough")
    await learning
    assert await here.serving
    assert honest.final is not None


async def _answered(here: Served, method: str, messages: list[bytes], hang_up: str = "end") -> grpc.StatusCode:
    tried()
    async with grpc.aio.insecure_channel(here.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        code = await strike(channel, NAME, method, messages, hang_up)
    assert code in ANSWERS, f"{method} {messages}: {code}"
    return code


def _scene(here: Served) -> Scene:
    task = here.process._writer.durable.open_task(NAME)
    if task is None:
        return Scene(here.process.run)
    return Scene(
        here.process.run, task.number, here.process._writer.durable.hashes.get(task.based_on.version, "0" * 64)
    )


# --- valid messages with any values, bytes that are nearly messages, and noise ------------------------------

numbers = st.sampled_from(EXTREME) | st.integers(0, 2**64 - 1)
reals = st.sampled_from(WILD) | st.floats()
texts = st.text(max_size=20) | st.sampled_from(["x" * 100_000, LAYOUT.fingerprint, "0" * 64])
hellos = st.builds(
    pb.Hello,
    protocol=st.sampled_from([PROTOCOL, PROTOCOL, 0, 2**32 - 1]),
    software=texts,
    instance=texts,
    run=texts,
    task=st.none() | numbers,
    unix_time=reals,
)
enums = st.integers(-(2**31), 2**31 - 1) | st.integers(0, 20)
causes = st.builds(pb.Cause, kind=enums, rule=enums, reference=st.integers(0, 2**32 - 1))
words = st.one_of(
    st.builds(pb.FromLearner, hello=hellos),
    st.builds(
        pb.FromLearner,
        ready=st.builds(pb.Ready, examples=numbers, batch_size=numbers, evaluation_examples=numbers, layout=texts),
    ),
    st.builds(pb.FromLearner, heartbeat=st.builds(pb.Heartbeat, task=st.none() | numbers, steps=numbers)),
    st.builds(pb.FromLearner, failed=st.builds(pb.Failed, task=numbers, cause=causes, steps=numbers, seconds=reals)),
    st.builds(
        pb.FromLearner,
        evaluation=st.builds(
            pb.Evaluation, version=numbers, examples=numbers, metrics=st.dictionaries(st.text(max_size=5), reals)
        ),
    ),
    st.builds(pb.FromLearner, leaving=st.builds(pb.Leaving, cause=causes)),
    st.just(pb.FromLearner()),
).map(pb.FromLearner.SerializeToString)
headers = st.builds(
    pb.UploadHeader,
    run=texts,
    task=numbers,
    steps=numbers,
    seconds=reals,
    time_per_batch=reals,
    bytes=numbers,
    sha256=texts,
    content=st.binary(max_size=40),
)
pieces = st.one_of(
    st.builds(pb.UploadPart, header=headers),
    st.builds(pb.UploadPart, chunk=st.builds(pb.Chunk, offset=numbers, data=st.binary(max_size=40))),
    st.builds(pb.UploadPart, end=st.builds(pb.UploadEnd, bytes=numbers, sha256=texts)),
    st.just(pb.UploadPart()),
    st.builds(pb.UploadPart, acknowledge=st.booleans()),
).map(pb.UploadPart.SerializeToString)
requests = st.builds(pb.ModelRequest, run=texts, sha256=texts, offset=numbers, length=numbers).map(
    pb.ModelRequest.SerializeToString
)
KINDS = {
    "attend": words,
    "hand_in": headers.map(pb.UploadHeader.SerializeToString),
    "upload": pieces,
    "download": requests,
}


def _anything(kind: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """A message of this kind, one that was damaged, one with more in it than anybody knows, or noise."""
    damaged = st.builds(
        lambda message, seed: Mutator(random.Random(seed)).mutated(message), kind, st.integers(0, 2**32)
    )
    more = st.builds(
        lambda message, rest: message + b"\x9a\x06" + bytes([len(rest)]) + rest, kind, st.binary(max_size=99)
    )
    not_text = kind.map(lambda message: message + b"\x12\x02\xc3\x28")  # no UTF-8
    return kind | damaged | more | not_text | st.binary(max_size=200)


@pytest.mark.hypothesis
@pytest.mark.parametrize("method", KINDS)
def test_any_messages_in_any_order_are_answered(method: str, tmp_path: Path) -> None:
    """C1 row 14: malformed, unknown, empty, huge, out of order, on each of the calls; then a learner trains."""
    with Stage(tmp_path) as stage:
        least = 1 if method in ("download", "hand_in") else 0

        @settings(max_examples=40, suppress_health_check=list(HealthCheck))
        @given(
            st.lists(_anything(KINDS[method]), min_size=least, max_size=5),
            st.booleans(),
            st.sampled_from(["end", "end", "end", "cancel"]),
        )
        def attempt(messages: list[bytes], begin_well: bool, hang_up: str) -> None:
            scene = _scene(stage.here)
            if begin_well and method == "attend":
                hello = pb.Hello(protocol=PROTOCOL, instance="fuzz", run=scene.run)
                ready = pb.Ready(examples=100, batch_size=10, evaluation_examples=5, layout=LAYOUT.fingerprint)
                opening = [pb.FromLearner(hello=hello), pb.FromLearner(ready=ready)]
                messages = [*(message.SerializeToString() for message in opening), *messages]
            elif begin_well and method == "upload":
                header = pb.UploadHeader(run=scene.run, task=scene.task, steps=1, bytes=len(local_model()))
                messages = [pb.UploadPart(header=header).SerializeToString(), *messages]
            stage.play(_answered(stage.here, method, messages, hang_up))

        attempt()
        stage.play(_goes_on(stage.here))


def test_a_message_that_cannot_be_read_is_the_senders_mistake(tmp_path: Path) -> None:
    """C1 row 14: INVALID_ARGUMENT, as the first message and later, and not an error that asks to try again."""
    with Stage(tmp_path) as stage:
        here = stage.here
        hello = pb.FromLearner(hello=pb.Hello(protocol=PROTOCOL, instance="one")).SerializeToString()

        async def scene() -> None:
            for unreadable in (
                b"\xff",
                b"\x0a\x05ab",
                b"\x0a\x08\x0a\x02\xc3\x28\x12\x02\xc3\x28",
                b"\x0f",
                b"\x0a" * 1000,
            ):
                for method in KINDS:
                    assert await _answered(here, method, [unreadable]) == _CODE.INVALID_ARGUMENT
                assert await _answered(here, "attend", [hello, unreadable]) == _CODE.INVALID_ARGUMENT
                async with here.scripted(NAME) as learner:
                    task = await (await learner.join()).task()
                    header = pb.UploadPart(header=learner.header(task.number)).SerializeToString()
                    assert await _answered(here, "upload", [header, unreadable]) == _CODE.INVALID_ARGUMENT
            for method in ("attend", "upload"):
                assert await _answered(here, method, []) == _CODE.INVALID_ARGUMENT
            await _goes_on(here)

        stage.play(scene())


def test_noise_on_the_port_is_ignored(tmp_path: Path) -> None:
    """C1 row 14: what is not HTTP/2 at all, or only its first line, harms nobody else."""
    rng = random.Random(14)
    with Stage(tmp_path) as stage:

        async def scene() -> None:
            preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            noise = [preface[: rng.randrange(25)] + rng.randbytes(rng.randrange(200)) for _ in range(15)]
            tried(len(noise) + 2)
            await asyncio.gather(
                *(knock(stage.here.address, content) for content in [b"", b"GET / HTTP/1.1\r\n\r\n", *noise])
            )
            await _goes_on(stage.here)

        stage.play(scene())
