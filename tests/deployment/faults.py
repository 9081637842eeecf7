"""What the fault tests share: a controller under watch, and what it remembers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc

from deployment.federations import Served, served
from deployment.scripted_learner import HonestLearner, ScriptedLearner, move_towards
from metis.core import policies
from metis.core.events import Action, Event
from metis.core.policy import Policy
from metis.core.stop import StopRule, Target
from metis.deployment.controller.settings import DeploymentSettings
from metis.deployment.wire import wire_pb2 as pb
from metis.runs.trace import read_trace

_T = TypeVar("_T")
HANG = 600.0  # seconds; only so that a test ends when something hangs


attempts = 0  # faults that the tests of this process have tried so far


def tried(count: int = 1) -> None:
    """Another fault was tried; `make chaos` reports how often."""
    global attempts  # noqa: PLW0603
    attempts += count


def play(scene: Coroutine[Any, Any, _T]) -> _T:
    """Run one test's scene to its end."""

    async def bounded() -> _T:
        return await asyncio.wait_for(scene, HANG)

    return asyncio.run(bounded())


class Stage:
    """A federation that stands still between the many small scenes of one test, as hypothesis plays them."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._federation = federation(folder, **options)
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Stage:
        self.here = self.play(self._federation.__aenter__())
        return self

    def __exit__(self, *reason: Any) -> None:
        try:
            self.play(self._federation.__aexit__(*reason))
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def play(self, scene: Coroutine[Any, Any, _T]) -> _T:
        return self._loop.run_until_complete(asyncio.wait_for(scene, HANG))


class _Escapes(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(logging.Formatter().format(record))


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """What gRPC and asyncio log meanwhile: an exception that a handler of the service has let out, say."""
    escapes = _Escapes()
    loggers = [logging.getLogger(name) for name in ("grpc", "asyncio", "concurrent.futures")]
    for logger in loggers:
        logger.addHandler(escapes)
    try:
        yield escapes.lines
    finally:
        for logger in loggers:
            logger.removeHandler(escapes)


@contextlib.contextmanager
def nothing_escapes() -> Iterator[None]:
    """Fail if there is anything of that kind."""
    with watched() as lines:
        yield
    assert not lines, "\n".join(lines)


@contextlib.asynccontextmanager
async def federation(
    folder: Path,
    *,
    policy: Policy | None = None,
    expected: int = 1,
    minimum: int = 1,
    rounds: int = 1000,
    lease: float = 20.0,
    heartbeat: float = 0.2,
    linger: float = 0.2,
    target: Target | None = None,
    settings: dict[str, Any] | None = None,  # more of the deployment's
    **options: Any,
) -> AsyncIterator[Served]:
    """A controller from whose handlers no exception escapes, and that has not failed in the end."""
    terms = DeploymentSettings(
        expected=expected, minimum=minimum, lease=lease, heartbeat=heartbeat, linger=linger, **(settings or {})
    )
    with nothing_escapes():
        async with served(
            folder, policy or policies.async_fedavg(1), StopRule(rounds=rounds, target=target), terms=terms, **options
        ) as here:
            yield here
            assert here.process.failure is None
        assert here.serving.done()
        here.serving.result()


async def status_of(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    """How a call that must fail does fail."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as problem:
        return problem.code(), problem.details() or ""
    raise AssertionError(f"the call was answered: {answer}")


async def refusal(learner: ScriptedLearner, *messages: pb.UploadPart) -> tuple[grpc.StatusCode, str]:
    """How an upload of these messages is refused, however busy the machine is.

    gRPC itself says INTERNAL where a message was being written when the answer came; then there are longer pauses.
    """
    for attempt in range(40):
        code, reason = await status_of(learner.upload(in_order(*messages, pause=0.01 * attempt)))
        if code != grpc.StatusCode.INTERNAL:
            break
    return code, reason


async def in_order(*messages: pb.UploadPart, pause: float = 0.0) -> AsyncIterator[pb.UploadPart]:
    """Exactly these, then a clean end of the stream; an answer has time to come in a pause behind each."""
    for message in messages:
        yield message
        if pause:
            await asyncio.sleep(pause)


# --- what a controller remembers ------------------------------------------------------------------


def community_hash(here: Served) -> str:
    """Names the bits of the community model as it is now."""
    return here.process._writer.durable.controller.community.model.sha256()


def journaled(here: Served) -> list[int]:
    """The tasks that were answered, in the order of the journal."""
    return [entry.update for entry in here.state.entries() if entry.update is not None]


def files(here: Served) -> set[str]:
    """The names of all models on disk, whole or not."""
    return {path.name for path in (here.state.folder / "blobs").iterdir()}


def traced(here: Served, kind: type[_T]) -> list[_T]:
    """All events or actions of this kind so far."""
    items: list[Event | Action] = [item for _, item in read_trace(here.process.folder / "events.jsonl")]
    return [item for item in items if isinstance(item, kind)]


@contextlib.contextmanager
def busy_writer(here: Served) -> Iterator[None]:
    """Whatever is to be journaled waits until the block ends: a slow disk, or a large model being mixed."""
    free = threading.Event()
    here.process._writer._thread.submit(free.wait, HANG)
    try:
        yield
    finally:
        free.set()


async def finish(here: Served, *names: str, **options: Any) -> list[HonestLearner]:
    """Honest learners come, and the federation goes on to its end."""
    learners = [
        HonestLearner(name, here.address, here.process.layout, train=move_towards(index), **options)
        for index, name in enumerate(names)
    ]
    await asyncio.gather(*(learner.run() for learner in learners))
    assert await here.serving
    assert all(learner.final is not None for learner in learners)
    return learners
