"""A learner process with its real child, against a server that is cut, killed, slow and wrong on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

pytest.importorskip("grpc")

from deployment.scripted_controller import UNAVAILABLE, ScriptedController, Stream
from deployment.tiny import settings, write_site
from metis.core.model import Layout, TensorSpec
from metis.deployment.learner.connection import Backoff, ConnectionLost, detached
from metis.deployment.learner.process import LearnerProcess
from metis.deployment.learner.site_log import LOG
from metis.deployment.route import Route
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.causes import reference
from metis.deployment.wire.model_mac import ModelMac
from metis.deployment.wire.protocol import PROTOCOL
from metis.errors import ConfigError
from metis.experiments.silo import build_silo
from metis.net import host_and_port
from metis.runs.storage import load_model

TRAINER = [sys.executable, "-m", "metis.cli.trainer"]
LIGHT = [sys.executable, str(Path(__file__).with_name("light_learner.py"))]  # the same, but it trains without torch
CODE = grpc.StatusCode


class Site:
    """A learner that runs in the test's own loop, and what it reported."""

    def __init__(
        self,
        controller: ScriptedController,
        folder: Path,
        site: Path | None = None,
        child: Sequence[str] = LIGHT,
        address: str | None = None,
        **options: Any,
    ) -> None:
        self.folder, self.lines = folder, []  # type: tuple[Path, list[tuple[str, str]]]
        self.process = LearnerProcess(
            Route(*host_and_port(address or controller.address)),
            work=folder,
            child=child,
            report=lambda kind, text: self.lines.append((kind, text)),
            name="zurich",
            site=site or folder.parent / "site.py",
            **options,
        )
        self.running = asyncio.ensure_future(self.process.run())

    def reported(self, kind: str) -> list[str]:
        return [text for known, text in self.lines if known == kind]

    @property
    def child(self) -> int:
        pid = self.process.child.pid
        assert pid is not None
        return pid

    async def end(self) -> int:
        return await self.running

    async def stop(self) -> None:
        """End it, wherever it is."""
        if not self.running.done():
            self.process.stop()
        with contextlib.suppress(Exception):
            await self.running


class Command:
    """A learner as a process of its own, so that it can be killed."""

    def __init__(self, controller: ScriptedController, folder: Path, pace: float = 0.0) -> None:
        self.arguments = [*LIGHT, controller.address, str(folder), str(pace)]
        self.lines: list[tuple[str, str]] = []

    @staticmethod
    def metis(controller: ScriptedController, folder: Path, python: Sequence[str] = ("-m", "metis.cli.app")) -> Command:
        """The real command, with the real trainer."""
        command = Command(controller, folder)
        command.arguments = [
            sys.executable, *python, "learner", "--controller", controller.address, "--insecure", "--name", "zurich",
            "--site", str(folder.parent / "site.py"), "--work", str(folder), "--json",
        ]  # fmt: skip
        return command

    async def __aenter__(self) -> Command:
        self.process = await asyncio.create_subprocess_exec(*self.arguments, stdout=asyncio.subprocess.PIPE)
        self._reading = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            document = json.loads(line)
            self.lines.append((document["kind"], document["text"]))

    def reported(self, kind: str) -> list[str]:
        return [text for known, text in self.lines if known == kind]

    async def end(self) -> int:
        await self._reading
        return await self.process.wait()

    async def kill(self, number: int = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        return await self.end()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            print(*self.lines, sep="\n")
        if self.process.returncode is None:
            self.process.kill()
        await self.end()


def entry(work: Path, cause: pb.Cause) -> str:
    """What the site's log says under the reference of a cause."""
    found = [entry for entry in (work / LOG).read_text().split("\n2") if f" {reference(cause)} " in entry]
    assert len(found) == 1
    return found[0]


Play = Callable[[Callable[[ScriptedController], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Runs a coroutine with a controller that serves the tiny federation; attempts follow each other quickly."""
    monkeypatch.setattr(Backoff, "longest", 0.4)

    def run(story: Callable[[ScriptedController], Coroutine[Any, Any, None]]) -> None:
        if not (tmp_path / "site.py").exists():
            write_site(tmp_path)
        plain = write_site(tmp_path, name="plain.py")

        async def main() -> None:
            async with ScriptedController(plain, settings(tmp_path / "site.py"), tmp_path) as controller:
                await story(controller)  # pytest's time-out is the guard

        asyncio.run(main())

    return run


@contextlib.asynccontextmanager
async def learner(controller: ScriptedController, folder: Path, **options: Any) -> AsyncIterator[Site]:
    site = Site(controller, folder, **options)
    try:
        yield site
    except BaseException:
        print(*site.lines, sep="\n")  # what a test that fails or hangs was doing
        raise
    finally:
        await site.stop()


async def until(condition: Callable[[], object]) -> None:
    """Wait for what must come; the test's time-out is the guard."""
    while not condition():
        await asyncio.sleep(0.02)


def empty(folder: Path) -> bool:
    return not list(folder.iterdir())


async def trained(controller: ScriptedController, stream: Stream, number: int, **changes: Any) -> bytes:
    """Give a task and wait until its update is there."""
    stream.send(task=controller.task(number, **changes))
    await controller.receipts.get()
    return controller.committed[number]


# --- a whole life -----------------------------------------------------------------------------------


def test_a_learner_joins_trains_evaluates_and_ends_with_the_final_model(play: Play, tmp_path: Path) -> None:
    """From Hello to community.safetensors; the local model is that of a simulation."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work", child=TRAINER, out=tmp_path / "out") as site:
            stream = await controller.stream()
            assert (stream.hello.protocol, stream.hello.run, stream.task) == (PROTOCOL, "", None)
            controller.welcome(stream)
            ready = await stream.expect("ready")
            assert (ready.examples, ready.batch_size, ready.evaluation_examples) == (40, 10, 20)
            assert ready.layout == controller.layout.fingerprint

            update = await trained(controller, stream, 7, evaluate=True)

            silo = build_silo(json.loads(controller.settings), tmp_path / "site.py", "zurich", 0)
            assert silo.learner is not None and silo.evaluation is not None
            initial = silo.engine.initial_model(1990)
            expected = silo.learner.train(silo.engine, initial, 7, 5).model
            assert update == expected.vector.tobytes()
            (header,) = controller.headers
            assert (header.run, header.task, header.steps, header.bytes) == ("run-1", 7, 5, 200)
            assert header.seconds > 0 < header.time_per_batch
            evaluation = await stream.expect("evaluation")
            assert (evaluation.version, evaluation.examples) == (4, 20)
            assert dict(evaluation.metrics) == pytest.approx(silo.engine.evaluate(initial, silo.evaluation))

            await until(lambda: len(site.reported("handed_in")) == 1)  # the receipt may come behind the next task
            await trained(controller, stream, 9)
            assert controller.offsets == [0]  # the second task is based on a model that is here already
            await until(lambda: len(site.reported("handed_in")) == 2)
            stream.send(notice=pb.Notice(kind=pb.Notice.COMMITTED, text="the update of task 9 counts"))
            stream.send(farewell=controller.farewell())

            assert await site.end() == 0
            final = load_model(tmp_path / "out" / "community.safetensors")
            assert final.sha256() == initial.sha256()
            # In the order in which they can happen, which is not quite fixed: an upload overlaps with other things.
            kinds = Counter(kind for kind, _ in site.lines if kind not in ("info", "warning"))
            assert kinds == {
                "connected": 1, "ready": 1, "task": 2, "trained": 2, "handed_in": 2, "evaluated": 1, "committed": 1,
                "finished": 1,
            }  # fmt: skip
            assert site.reported("task")[0] == "task 7: 5 batches from community model 4"
            await until(lambda: empty(tmp_path / "work" / "spool"))

    play(story)


def test_a_learner_measures_the_last_model_when_it_is_asked_to(play: Play, tmp_path: Path) -> None:
    """Also in the middle of a task, which does not count any more; then it is ready for the farewell."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work", child=TRAINER, pace=0.05) as site:
            stream = await controller.ready()
            stream.send(task=controller.task(7, steps=100_000))
            await until(lambda: site.process._tasks.steps > 0)
            request = pb.Evaluate(version=9, sha256=controller.sha256, bytes=len(controller.model))
            stream.send(evaluate=request)
            evaluation = await stream.expect("evaluation")
            assert (evaluation.version, evaluation.examples) == (9, 20)
            stream.send(farewell=controller.farewell())
            assert await site.end() == 0
            assert not controller.headers

    play(story)


def test_a_learner_that_was_away_at_the_end_still_gets_the_final_model(play: Play, tmp_path: Path) -> None:
    """It is greeted with the farewell; that it took part is in its work folder."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work") as site:
            await controller.ready()
        async with learner(controller, tmp_path / "work") as site:
            (await controller.stream()).send(farewell=controller.farewell())
            assert await site.end() == 0
            assert site.lines[-1] == (
                "finished",
                f"the federation has ended: 3 rounds are done; community model 9 is in {tmp_path}/work/"
                "community.safetensors",
            )
            assert load_model(tmp_path / "work" / "community.safetensors").vector.tobytes() == controller.model

    play(story)


def test_the_seconds_of_a_task_count_from_its_receipt(play: Play, tmp_path: Path) -> None:
    """A download that takes longer than the budget leaves the one batch that is always done."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work", pace=0.05) as site:
            stream = await controller.ready()
            controller.may_download.clear()
            stream.send(task=controller.task(1, steps=None, seconds=0.3))
            await controller.downloading.wait()
            await asyncio.sleep(0.4)
            controller.may_download.set()
            await controller.receipts.get()
            assert controller.headers[0].steps == 1
            stream.send(task=controller.task(2, steps=1000, seconds=0.5))
            await controller.receipts.get()
            assert 1 <= controller.headers[1].steps < 1000
            assert site.reported("task")[1] == "task 2: 1000 batches or 0.5 s from community model 4"

    play(story)


def test_another_task_replaces_the_current_one(play: Play, tmp_path: Path) -> None:
    """The controller gave this learner up for lost and starts again with it; the old training is abandoned."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work", pace=0.2) as site:
            stream = await controller.ready()
            stream.send(task=controller.task(1, steps=100_000))
            await asyncio.wait_for(controller.downloading.wait(), 600)
            while not any(beat.task == 1 for beat in await stream.beats(1)):
                pass
            stream.send(task=controller.task(1, steps=100_000))  # sent twice: nothing happens
            stream.send(task=controller.task(2))
            await controller.receipts.get()
            assert list(controller.committed) == [2]
            assert "task 1: abandoned, the controller has another one" in site.reported("info")

    play(story)


# --- lost connections -------------------------------------------------------------------------------


def test_an_upload_that_is_cut_anywhere_is_sent_again_and_counts_once(play: Play, tmp_path: Path) -> None:
    """Before the header, at several offsets, and after the commit when only the receipt was lost."""

    async def story(controller: ScriptedController) -> None:
        controller.upload_faults = [
            UNAVAILABLE, 16, (CODE.RESOURCE_EXHAUSTED, "the disk is full"), 64, 112, (CODE.DATA_LOSS, "send again"),
            200, (CODE.ABORTED, "no end"), "late",
        ]  # fmt: skip
        async with learner(controller, tmp_path / "work") as site:
            stream = await controller.ready()
            stream.send(task=controller.task(1))
            receipt = await controller.receipts.get()

            assert controller.upload_faults == []
            assert receipt.verdict == pb.Receipt.ALREADY
            (content,) = controller.committed.values()
            assert [len(attempt) for attempt in controller.attempts] == [16, 64, 112, 200, 200, 200]
            assert all(content.startswith(attempt) for attempt in controller.attempts)
            await trained(controller, stream, 2)  # and life goes on
            assert site.reported("handed_in")[0] == "task 1: the controller had the update already"
            await until(lambda: empty(tmp_path / "work" / "spool"))

    play(story)


def test_a_download_goes_on_where_it_was_cut(play: Play, tmp_path: Path) -> None:
    """And starts again when something else than what was announced arrived."""

    async def story(controller: ScriptedController) -> None:
        controller.download_faults = [48, UNAVAILABLE, 112, None, "wrong", None]
        async with learner(controller, tmp_path / "work"):
            stream = await controller.ready()
            await trained(controller, stream, 1)
            assert controller.offsets == [0, 48, 48, 112]
            controller.model = controller.model[:-4] + controller.model[:4]
            await trained(controller, stream, 2)
            assert controller.offsets[4:] == [0, 0]
            assert len(list((tmp_path / "work" / "models").iterdir())) == 1

    play(story)


def test_a_small_model_comes_with_its_task(play: Play, tmp_path: Path) -> None:
    """Nothing is downloaded, unless what came is not what was announced."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work"):
            stream = await controller.ready()
            await trained(controller, stream, 1, model=controller.model)
            assert controller.offsets == []
            controller.model = controller.model[:-4] + controller.model[:4]
            await trained(controller, stream, 2, model=controller.model[::-1])
            assert controller.offsets == [0]
            controller.model = controller.model[4:] + controller.model[:4]
            await trained(controller, stream, 3, model=controller.model[:-4])
            assert controller.offsets == [0, 0]

    play(story)


def test_a_small_update_is_handed_in_with_its_header(play: Play, tmp_path: Path) -> None:
    """One message; if it is not answered, the same one again."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work"):
            stream = await controller.ready(chunk_bytes=1 << 16)
            controller.upload_faults = ["late", UNAVAILABLE]
            await trained(controller, stream, 1, model=controller.model)
            headers = [header for header in controller.headers if header.task == 1]
            assert len(headers) == 2 and headers[0] == headers[1]
            assert headers[0].content == controller.committed[1]

    play(story)


def test_a_model_is_checked_against_its_mac(play: Play, tmp_path: Path) -> None:
    """Wherever it was cut; a model that does not match is fetched again and fails the task in the end."""

    def mac_of(content: bytes) -> bytes:
        mac = ModelMac()
        mac.update(content)
        return mac.digest()

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work"):
            stream = await controller.ready()
            controller.download_faults = [48, None, "wrong", None]
            await trained(controller, stream, 1, seal=mac_of(controller.model))
            assert controller.offsets == [0, 48]
            controller.model = controller.model[:-4] + controller.model[:4]
            await trained(controller, stream, 2, seal=mac_of(controller.model))
            assert controller.offsets[2:] == [0, 0]
            controller.model = controller.model[4:] + controller.model[:4]
            stream.send(task=controller.task(3, seal=mac_of(controller.model[::-1])))
            failed = await stream.expect("failed")
            assert (failed.task, failed.cause.kind) == (3, pb.Cause.MODEL_NOT_FETCHED)
            assert "did not arrive as it was announced" in entry(tmp_path / "work", failed.cause)

    play(story)


def test_a_model_that_never_comes_right_fails_the_task(play: Play, tmp_path: Path) -> None:
    """After three attempts; and a model that the controller no longer has fails it at once."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work"):
            stream = await controller.ready()
            controller.download_faults = ["wrong"] * 3
            stream.send(task=controller.task(1))
            failed = await stream.expect("failed")
            assert (failed.task, failed.cause.kind) == (1, pb.Cause.MODEL_NOT_FETCHED)
            controller.download_faults = [(CODE.NOT_FOUND, "no task that is based on it")]
            stream.send(task=controller.task(2))
            failed = await stream.expect("failed")
            assert "cannot be fetched: no task that is based on it" in entry(tmp_path / "work", failed.cause)
            stream.send(task=controller.task(3, sha256="../../../etc/passwd"))
            failed = await stream.expect("failed")
            assert "by something that is not a SHA-256" in entry(tmp_path / "work", failed.cause)
            await trained(controller, stream, 4)

    play(story)


def test_a_lost_connection_does_not_lose_the_training(play: Play, tmp_path: Path) -> None:
    """The learner dials again, names its task, and hands it in; a new epoch is the same run."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work", pace=0.1) as site:
            stream = await controller.ready()
            stream.send(task=controller.task(1, steps=12))
            while not any(beat.task == 1 for beat in await stream.beats(1)):
                pass
            stream.cut()
            again = await controller.stream()
            assert (again.task, again.hello.run) == (1, "run-1")
            assert again.hello.instance == stream.hello.instance
            controller.welcome(again, epoch=2, task=1)
            await again.expect("ready")
            await controller.receipts.get()
            assert controller.headers[0].steps == 12
            assert len(site.reported("trained")) == 1

    play(story)


def test_a_controller_that_is_down_is_waited_for(play: Play, tmp_path: Path) -> None:
    """Trained meanwhile, handed in when it is back, on the same address, with nothing lost."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work", pace=0.05) as site:
            stream = await controller.ready()
            stream.send(task=controller.task(1, steps=40))
            while not any(beat.steps for beat in await stream.beats(1)):
                pass
            await controller.server.stop(0)
            await until(lambda: site.reported("trained"))
            assert controller.committed == {}
            await controller.start(controller.address)
            stream = await controller.stream()
            while stream.task is None and stream.ended.is_set():  # a dial that the old server took with it
                stream = await controller.stream()
            assert stream.task == 1
            controller.welcome(stream, epoch=2, task=1)
            await controller.receipts.get()
            assert list(controller.committed) == [1]
            assert any("trying again" in text for text in site.reported("warning"))

    play(story)


def test_a_farewell_for_a_while_is_no_end(play: Play, tmp_path: Path) -> None:
    """The controller is upgraded; the learner stays away as long as it was asked to."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work") as site:
            stream = await controller.ready()
            farewell = pb.Farewell(kind=pb.Farewell.RETRY, reason="upgrade", retry_seconds=0.2)
            stream.send(farewell=farewell)
            again = await controller.ready()
            assert again.hello.run == "run-1"
            assert "the controller says goodbye for a while: upgrade; back in 0 s" in site.reported("info")
            again.send(farewell=controller.farewell())
            assert await site.end() == 0

    play(story)


def test_an_evaluation_that_nobody_heard_is_sent_after_the_next_hello(play: Play, tmp_path: Path) -> None:
    """Measured while the connection was down."""

    async def story(controller: ScriptedController) -> None:
        held = (
            f"import os, time\ngo = {str(tmp_path / 'go')!r}\n"
            "def loss(o, t):\n    while len(t) == 20 and not os.path.exists(go):\n"
            "        time.sleep(0.02)\n    return nn.functional.cross_entropy(o, t)\n"
        )
        write_site(tmp_path, held)  # it has 20 examples to evaluate on
        async with learner(controller, tmp_path / "work", child=TRAINER) as site:
            stream = await controller.ready()
            stream.send(task=controller.task(1, steps=2, evaluate=True))
            await controller.receipts.get()
            await controller.server.stop(0)
            await until(lambda: site.process.connection.session is None)
            (tmp_path / "go").touch()
            await until(lambda: site.reported("evaluated"))
            await controller.start(controller.address)
            stream = await controller.ready()
            assert (await stream.expect("evaluation")).version == 4

    play(story)


# --- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "code", "sentence"),
    [
        ((CODE.PERMISSION_DENIED, "learner 'zurich' does not belong to this federation"), 2,
         "the controller refuses: learner 'zurich' does not belong to this federation"),
        ((CODE.FAILED_PRECONDITION, "install the same version"), 2, "the controller refuses: install the same version"),
        ((CODE.UNAUTHENTICATED, "who are you?"), 2, "the controller refuses: who are you?"),
        (pb.Farewell(kind=pb.Farewell.REFUSED, reason="another process with this certificate"), 2,
         "the controller refuses this learner: another process with this certificate"),
        (pb.Farewell(kind=pb.Farewell.FINISHED, reason="done", version=3, sha256="0" * 64, bytes=4), 0,
         "the federation has ended: done; this learner took no part in it and has no model of it"),
    ],
)  # fmt: skip
def test_a_refusal_ends_the_learner_with_its_reason(
    play: Play, tmp_path: Path, answer: Any, code: int, sentence: str
) -> None:
    """Not an endless loop: somebody has to do something about it."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work") as site:
            stream = await controller.stream()
            stream.cut(*answer) if isinstance(answer, tuple) else stream.send(farewell=answer)
            assert await site.end() == code
            assert site.lines[-1] == ("error" if code else "finished", sentence)

    play(story)


def test_a_refused_update_is_dropped_and_the_operator_reads_why(play: Play, tmp_path: Path) -> None:
    """By the receipt, by a status, and by the notices that accompany it."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work") as site:
            stream = await controller.ready()
            controller.upload_faults = [(CODE.INVALID_ARGUMENT, "a chunk does not fit")]
            stream.send(task=controller.task(1))
            failed = await stream.expect("failed")
            assert (failed.task, failed.cause.kind, failed.steps) == (1, pb.Cause.UPDATE_LOST, 5)
            assert "the update is dropped: a chunk does not fit" in entry(tmp_path / "work", failed.cause)
            controller.upload_faults = [(CODE.ALREADY_EXISTS, "handed in before with other bytes")]
            stream.send(task=controller.task(2))
            cause = (await stream.expect("failed")).cause
            assert "handed in before with other bytes" in entry(tmp_path / "work", cause)
            await until(lambda: empty(tmp_path / "work" / "spool"))
            stream.send(notice=pb.Notice(kind=pb.Notice.REFUSED, text="late: rebase onto community model 5", task=2))
            stream.send(notice=pb.Notice(text="the next round begins at noon"))
            await trained(controller, stream, 3)
            assert site.reported("refused") == ["refused: late: rebase onto community model 5"]
            assert "the next round begins at noon" in site.reported("info")

    play(story)


def test_an_update_whose_file_somebody_has_deleted_is_given_up(play: Play, tmp_path: Path) -> None:
    """The learner does not look for it for ever, and does the next task."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work") as site:
            stream = await controller.ready()
            controller.upload_faults = [(CODE.UNAVAILABLE, "not now")] * 3
            stream.send(task=controller.task(1))
            await until(lambda: any("not handed in yet" in text for text in site.reported("warning")))
            (tmp_path / "work" / "spool" / "1.model").unlink()
            failed = await stream.expect("failed")
            assert (failed.task, failed.cause.kind, failed.steps) == (1, pb.Cause.UPDATE_LOST, 5)
            controller.upload_faults = []
            await trained(controller, stream, 2)

    play(story)


def test_an_update_that_the_controller_never_allows_ends_the_learner(play: Play, tmp_path: Path) -> None:
    """The stream is opened again to see whether the refusal was meant; the second one is believed."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work") as site:
            stream = await controller.ready()
            controller.upload_faults = [(CODE.PERMISSION_DENIED, "task 1 is not yours")] * 2
            stream.send(task=controller.task(1))
            await controller.welcomed()
            assert await site.end() == 2
            assert site.lines[-1] == ("error", "the controller refuses the update of task 1: task 1 is not yours")

    play(story)


def test_a_learner_that_was_set_aside_waits_for_its_operator(play: Play, tmp_path: Path) -> None:
    """A mere reconnection does not bring it back; the end of the federation still reaches it."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work") as site:
            stream = await controller.ready()
            stream.send(notice=pb.Notice(kind=pb.Notice.SET_ASIDE, text="3 updates in a row were refused"))
            await stream.beats(1)
            stream.cut()
            again = await controller.welcomed()
            await again.beats(5)
            assert again.inbox.empty()
            assert site.reported("set_aside") == [
                "set aside: 3 updates in a row were refused; restart this learner to join again"
            ]
            again.send(farewell=controller.farewell())
            assert await site.end() == 0

    play(story)


def test_a_controller_that_was_begun_anew_drops_what_was_trained_for_the_old_run(play: Play, tmp_path: Path) -> None:
    """With a notice; the learner joins the new run."""

    async def story(controller: ScriptedController) -> None:
        controller.upload_faults = [UNAVAILABLE] * 3
        async with learner(controller, tmp_path / "work") as site:
            stream = await controller.ready()
            stream.send(task=controller.task(1))
            await until(lambda: site.reported("trained"))
            stream.cut()
            controller.run = "run-2"
            again = await controller.stream()
            assert (again.hello.run, again.task) == ("run-1", 1)
            controller.upload_faults = []
            controller.welcome(again)
            await again.expect("ready")
            await trained(controller, again, 1)
            assert controller.headers[-1].run == "run-2"
            assert "the update of task 1 is dropped: it belongs to run run-1" in site.reported("warning")

    play(story)


def test_clocks_that_disagree_are_told_once(play: Play, tmp_path: Path) -> None:
    """Nothing depends on them but the certificates, so it is a warning."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work") as site:
            stream = await controller.welcomed(unix_time=0.0)
            stream.cut()
            await controller.ready(unix_time=0.0)
            warnings = [text for text in site.reported("warning") if "clock" in text]
            assert len(warnings) == 1 and "the clock of this machine is off by +" in warnings[0]

    play(story)


def test_a_site_that_cannot_be_prepared_ends_the_learner_and_tells_the_controller(play: Play, tmp_path: Path) -> None:
    """Its file is wrong, or its network is not the federation's: mending it is the operator's."""

    async def story(controller: ScriptedController) -> None:
        broken = write_site(tmp_path, "raise OSError('no data here')", "broken.py")
        async with learner(controller, tmp_path / "a", child=TRAINER, site=broken) as site:
            stream = await controller.welcomed()
            cause = (await stream.expect("leaving")).cause
            assert cause.kind == pb.Cause.SETUP
            assert "OSError: no data here" in entry(tmp_path / "a", cause)
            assert await site.end() == 2
            assert site.lines[-1][1].startswith("this learner cannot take part: the site file cannot be used: broken.p")
        async with learner(controller, tmp_path / "b", child=TRAINER) as site:
            controller.layout = Layout(controller.layout.tensors[:-1])
            stream = await controller.welcomed()
            assert (await stream.expect("leaving")).cause.kind == pb.Cause.NETWORK_DIFFERS
            assert await site.end() == 2
            assert "the network here is not the federation's" in site.lines[-1][1]
        async with learner(controller, tmp_path / "c", child=TRAINER) as site:
            await controller.welcomed(settings='{"experiment": {}, "policy": 0}')
            assert await site.end() == 2
            assert "the controller's settings: learners: missing" in site.lines[-1][1]

    play(story)


# --- the child --------------------------------------------------------------------------------------


def test_a_killed_child_fails_its_task_and_is_replaced(play: Play, tmp_path: Path) -> None:
    """kill -9 in the middle of a training, as the kernel does when memory is short."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work", child=TRAINER, pace=0.05) as site:
            stream = await controller.ready()
            first = site.child
            stream.send(task=controller.task(1, steps=100_000))
            while not any(beat.task == 1 for beat in await stream.beats(1)):
                pass
            os.kill(first, signal.SIGKILL)
            failed = await stream.expect("failed")
            assert (failed.task, failed.cause.kind) == (1, pb.Cause.PROCESS_DIED)
            assert "was killed (SIGKILL): out of memory?" in entry(tmp_path / "work", failed.cause)
            await trained(controller, stream, 2)
            assert site.child != first
            os.kill(site.child, signal.SIGSEGV)  # between two tasks: nobody need know
            await until(lambda: not site.process.child.alive)
            await trained(controller, stream, 3)

    play(story)


@pytest.mark.slow
def test_a_child_that_dies_three_times_in_a_row_ends_the_learner(play: Play, tmp_path: Path) -> None:
    """With the cause in words for the operator, and as a kind for the controller."""

    async def story(controller: ScriptedController) -> None:
        write_site(tmp_path, "import os\ndef loss(o, t):\n    os._exit(7)\n")
        async with learner(controller, tmp_path / "work", child=TRAINER) as site:
            stream = await controller.ready()
            for number in (1, 2, 3):
                stream.send(task=controller.task(number))
                assert (await stream.expect("failed")).cause.kind == pb.Cause.PROCESS_DIED
            cause = (await stream.expect("leaving")).cause
            assert cause.kind == pb.Cause.PROCESS_DIED
            assert "ended with exit code 7, 3 times in a row" in entry(tmp_path / "work", cause)
            assert await site.end() == 1
            assert site.lines[-1][1].endswith("3 times in a row; fix the cause and start the learner again")

    play(story)


def test_an_exception_of_the_sites_code_is_a_failed_task_and_no_more(play: Play, tmp_path: Path) -> None:
    """Its text and traceback are in the site's log, which others cannot read; the child lives and trains on."""

    async def story(controller: ScriptedController) -> None:
        write_site(
            tmp_path,
            "calls = []\ndef loss(o, t):\n    calls.append(1)\n"
            "    if len(calls) == 3:\n        raise RuntimeError('no GPU today')\n"
            "    return nn.functional.cross_entropy(o, t)\n",
        )
        async with learner(controller, tmp_path / "work", child=TRAINER) as site:
            stream = await controller.ready()
            child = site.child
            stream.send(task=controller.task(1))
            failed = await stream.expect("failed")
            assert (failed.cause.kind, failed.steps) == (pb.Cause.SITE_CODE, 2)
            kept = entry(tmp_path / "work", failed.cause)
            assert "task 1: failed: site.py:22: RuntimeError: no GPU today" in kept
            assert "raise RuntimeError('no GPU today')" in kept
            assert (tmp_path / "work" / LOG).stat().st_mode & 0o777 == 0o600
            (line,) = site.reported("failed")
            assert line.endswith(f"no GPU today (reference {reference(failed.cause)})")
            await trained(controller, stream, 2)
            assert site.child == child

    play(story)


@pytest.mark.slow
def test_heartbeats_come_while_the_child_keeps_the_interpreter(play: Play, tmp_path: Path) -> None:
    """C code that never lets Python run: the parent does not train, so it is alive, and sends heartbeats."""

    async def story(controller: ScriptedController) -> None:
        (tmp_path / "go").unlink(missing_ok=True)
        write_site(
            tmp_path,
            "import ctypes, os\nbusy = ctypes.PyDLL(None)\ndef loss(o, t):\n"
            f"    while not os.path.exists({str(tmp_path / 'go')!r}):\n        busy.usleep(900_000)\n"
            "    return nn.functional.cross_entropy(o, t)\n",
        )
        async with learner(controller, tmp_path / "work", child=TRAINER):
            stream = await controller.ready()
            stream.send(task=controller.task(1))
            await controller.downloading.wait()
            beats = await stream.beats(25)  # two and a half seconds of them
            assert beats[-1].task == 1
            (tmp_path / "go").touch()
            await controller.receipts.get()

    play(story)


def test_a_stopped_child_is_waited_for(play: Play, tmp_path: Path) -> None:
    """SIGSTOP and SIGCONT: heartbeats go on in between, the task is not lost."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work", pace=0.05) as site:
            stream = await controller.ready()
            stream.send(task=controller.task(1, steps=40))
            while not any(beat.steps for beat in await stream.beats(1)):
                pass
            os.kill(site.child, signal.SIGSTOP)
            held = await stream.beats(10)
            assert {beat.task for beat in held} == {1}
            os.kill(site.child, signal.SIGCONT)
            await controller.receipts.get()
            assert controller.headers[0].steps == 40

    play(story)


# --- the process itself -----------------------------------------------------------------------------


def test_a_learner_killed_in_training_gets_its_task_again(play: Play, tmp_path: Path) -> None:
    """kill -9 of the parent: the child goes with it, no task is in progress, and it is trained again."""

    async def story(controller: ScriptedController) -> None:
        async with Command(controller, tmp_path / "work", pace=0.05) as command:
            stream = await controller.ready()
            stream.send(task=controller.task(1, steps=100_000))
            while not any(beat.steps for beat in await stream.beats(1)):
                pass
            await command.kill()
        async with Command.metis(controller, tmp_path / "work") as command:
            stream = await controller.stream()
            assert (stream.hello.run, stream.task) == ("run-1", None)
            controller.welcome(stream, task=1)
            await stream.expect("ready")
            stream.send(task=controller.task(1))
            await controller.receipts.get()
            assert controller.committed.keys() == {1}
            assert controller.offsets == [0]  # the model was here
            stream.send(farewell=controller.farewell())
            assert await command.end() == 0
            assert command.lines[-1][1].endswith(f"community model 9 is in {tmp_path}/work/community.safetensors")

    play(story)


def test_a_learner_killed_in_its_upload_hands_in_the_same_bytes_first(play: Play, tmp_path: Path) -> None:
    """kill -9 of the parent between two chunks: the update is in the spool, and goes before anything else."""

    async def story(controller: ScriptedController) -> None:
        never = asyncio.Event()
        controller.upload_faults = [never]
        async with Command(controller, tmp_path / "work") as command:
            stream = await controller.ready()
            stream.send(task=controller.task(1))
            await controller.uploading.wait()
            await command.kill()
        assert len(list((tmp_path / "work" / "spool").iterdir())) == 2
        async with Command(controller, tmp_path / "work"):
            stream = await controller.stream()
            assert (stream.hello.run, stream.task) == ("run-1", 1)
            controller.welcome(stream, task=1)
            await controller.receipts.get()
            assert stream.inbox.empty()  # it does not wait until network and data are ready
            (content,) = controller.committed.values()
            assert content.startswith(controller.attempts[0])
            assert len(controller.attempts[0]) < len(content) == 200
            await until(lambda: empty(tmp_path / "work" / "spool"))

    play(story)


def test_a_signal_ends_a_training_learner_at_once(play: Play, tmp_path: Path) -> None:
    """It says goodbye, so that nobody waits for its lease; exit code 0."""

    async def story(controller: ScriptedController) -> None:
        async with Command(controller, tmp_path / "work", pace=0.05) as command:
            stream = await controller.ready()
            stream.send(task=controller.task(1, steps=100_000))
            while not any(beat.task == 1 for beat in await stream.beats(1)):
                pass
            command.process.send_signal(signal.SIGTERM)
            assert (await stream.expect("leaving")).cause == pb.Cause(kind=pb.Cause.STOPPED)
            assert await command.end() == 0
            assert stream.inbox.empty()  # a goodbye, no failure
            assert command.lines[-1] == ("info", "SIGTERM: the learner has left the federation")

    play(story)


def test_a_signal_lets_a_trained_update_be_handed_in(play: Play, tmp_path: Path) -> None:
    """For some seconds; what cannot be handed in stays in the work folder for the next start."""

    async def story(controller: ScriptedController) -> None:
        controller.upload_faults = [UNAVAILABLE] * 3
        async with Command(controller, tmp_path / "work") as command:
            stream = await controller.ready()
            stream.send(task=controller.task(1))
            await until(lambda: command.reported("trained"))
            command.process.send_signal(signal.SIGINT)
            assert await command.end() == 0
            assert list(controller.committed) == [1]
        controller.upload_faults = [UNAVAILABLE] * 1000
        async with Command(controller, tmp_path / "work") as command:
            stream = await controller.ready()
            stream.send(task=controller.task(2))
            await until(lambda: command.reported("trained"))
            command.process.send_signal(signal.SIGTERM)
            assert await command.end() == 0
            assert any("the update of task 2 stays in" in text for text in command.reported("warning"))
        controller.upload_faults = []
        async with Command(controller, tmp_path / "work") as command:
            stream = await controller.welcomed()
            assert stream.task == 2
            await controller.receipts.get()

    play(story)


def test_the_second_signal_ends_it_without_waiting(play: Play, tmp_path: Path) -> None:
    """Nothing is lost by that: the update is on disk."""

    async def story(controller: ScriptedController) -> None:
        controller.upload_faults = [UNAVAILABLE] * 1000
        async with Command(controller, tmp_path / "work") as command:
            stream = await controller.ready()
            stream.send(task=controller.task(1))
            await until(lambda: command.reported("trained"))
            command.process.send_signal(signal.SIGTERM)
            await until(lambda: any("once more to end at once" in text for text in command.reported("info")))
            command.process.send_signal(signal.SIGTERM)
            assert await command.end() == 130
            assert len(list((tmp_path / "work" / "spool").iterdir())) == 2

    play(story)


def test_two_learners_cannot_work_in_one_folder(play: Play, tmp_path: Path) -> None:
    """They would hand in each other's updates."""

    async def story(controller: ScriptedController) -> None:
        async with learner(controller, tmp_path / "work"):
            await controller.stream()
            second = Site(controller, tmp_path / "work")
            with pytest.raises(ConfigError, match=rf"another learner \(process id {os.getpid()} on .*\) uses .*/work"):
                await second.running

    play(story)


@pytest.mark.slow
def test_with_a_full_disk_a_learner_leaves_and_comes_back(play: Play, tmp_path: Path) -> None:
    """No file may be larger than 3,000 bytes: neither a model of 4,200 nor, then, its update can be kept."""

    async def story(controller: ScriptedController) -> None:
        launcher = tmp_path / "launch.py"
        launcher.write_text(
            "import resource, runpy, sys\n"
            "sys.dont_write_bytecode = True\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
            "sys.argv = ['metis', *sys.argv[1:]]\n"
            "from metis.deployment.learner.absence import Absence\n"
            "Absence.look_seconds = Absence.room_seconds = 0.1\n"
            "runpy.run_module('metis.cli.app', run_name='__main__')\n"
        )
        wide = tmp_path / "site.py"
        write_site(
            tmp_path, "def network():\n    return nn.Sequential(nn.Linear(3, 175), nn.ReLU(), nn.Linear(175, 2))\n"
        )
        silo = build_silo(json.loads(controller.settings), wide, "zurich", 0)
        controller.layout = silo.engine.layout
        controller.model = silo.engine.initial_model(1990).vector.tobytes()
        assert len(controller.model) == 4208
        async with Command.metis(controller, tmp_path / "work", [str(launcher)]):
            stream = await controller.ready()
            stream.send(task=controller.task(1))
            failed = await stream.expect("failed")
            assert failed.cause.kind == pb.Cause.DISK
            text = f"the community model cannot be kept in {tmp_path}/work/models/{controller.sha256} (File too large)"
            assert text in entry(tmp_path / "work", failed.cause)
            assert list((tmp_path / "work" / "models").iterdir()) == []
            assert (await stream.expect("leaving")).cause == failed.cause
            stream = await controller.ready()
            # Somebody puts the model there by hand, so that only the update does not fit.
            (tmp_path / "work" / "models" / controller.sha256).write_bytes(controller.model)
            stream.send(task=controller.task(2))
            failed = await stream.expect("failed")
            assert failed.cause.kind == pb.Cause.DISK
            text = f"the model cannot be written to {tmp_path}/work/spool/2.model: File too large"
            assert text in entry(tmp_path / "work", failed.cause)
            assert (await stream.expect("leaving")).cause == failed.cause
            stream = await controller.ready()
            await stream.beats(2)
            await until(lambda: empty(tmp_path / "work" / "spool"))

    play(story)


@pytest.mark.slow
def test_a_large_model_never_lies_in_the_parents_memory(play: Play, tmp_path: Path) -> None:
    """160 MB down, up and saved at the end: what gRPC has in flight does not grow with it."""

    async def story(controller: ScriptedController) -> None:
        controller.layout = Layout((TensorSpec("weights", (4000, 10_000)),))
        controller.model = np.ones(40_000_000, "<f4").tobytes()
        controller.chunk_bytes, controller.heartbeat_seconds = 1 << 20, 1.0
        async with Command(controller, tmp_path / "work") as command:
            stream = await controller.ready()
            before = _peak_memory(command.process.pid)
            stream.send(task=controller.task(1, steps=1))
            await controller.receipts.get()
            stream.send(farewell=controller.farewell())
            while not (tmp_path / "work" / "community.safetensors").exists():
                grown = _peak_memory(command.process.pid) - before
                await asyncio.sleep(0.05)
            assert await command.end() == 0
            assert grown < 96 << 20

    play(story)


def _peak_memory(pid: int) -> int:
    """In bytes, as Linux counts it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def test_a_call_on_a_channel_that_was_closed_a_moment_before_is_a_lost_connection() -> None:
    """gRPC calls it a wrong usage, and the learner would end; a line that is cut as a task arrives does this."""

    async def run() -> None:
        channel = grpc.aio.insecure_channel("127.0.0.1:1")
        await channel.close()

        async def call() -> None:
            await channel.unary_unary("/metis.test/Anything")(b"")

        with pytest.raises(ConnectionLost):
            await detached(call())

    asyncio.run(run())


def test_a_learner_waits_at_most_three_heartbeats_before_it_dials_again() -> None:
    """The waits double from 0.2 s; where heartbeats are short, a line that is back is used soon."""
    longest = {}
    for heartbeat in (0.25, 5.0, 60.0):
        backoff = Backoff()
        longest[heartbeat] = max(backoff.next(heartbeat) for _ in range(12))
    assert 0.375 <= longest[0.25] <= 0.75
    assert 7.5 <= longest[5.0] <= 15.0
    assert 7.5 <= longest[60.0] <= 15.0
