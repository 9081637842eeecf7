"""Text from the other end of the wire: it cannot forge a line, move a cursor, hide itself or fill a log."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("grpc")

from deployment.faults import federation, play
from deployment.scripted_controller import ScriptedController
from deployment.tiny import settings, write_site
from metis.deployment.learner.process import LearnerProcess
from metis.deployment.route import Route
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.untrusted import LONGEST, cleaned
from metis.net import host_and_port

FORGED = "fine\n12:00:00 learner 'a' joins\r\x1b[2J\x1b]0;title\x07 \u202etxt.exe\u202c\u200b\u2028 end"
LIGHT = [sys.executable, str(Path(__file__).with_name("light_learner.py"))]


def test_all_texts_of_a_message_are_made_printable() -> None:
    """Whatever field they are in, also in names of metrics; documents that are parsed stay as they are."""
    message = cleaned(pb.FromLearner(hello=pb.Hello(software=FORGED, instance="x" * 5000, run="run-1")))
    assert message.hello.software.isprintable() and message.hello.software.startswith("fine\ufffd12:00:00")
    assert len(message.hello.instance) == LONGEST
    assert message.hello.run == "run-1"
    evaluation = cleaned(pb.FromLearner(evaluation=pb.Evaluation(metrics={FORGED: 1.0, "loss": 0.5}))).evaluation
    assert evaluation.metrics["loss"] == 0.5
    assert len(evaluation.metrics) == 2 and all(name.isprintable() for name in evaluation.metrics)
    sums = {FORGED: pb.Sums(), "loss": pb.Sums(kind=FORGED, values=[1.0, 2.0])}
    evaluation = cleaned(pb.FromLearner(evaluation=pb.Evaluation(sums=sums))).evaluation
    assert [*evaluation.sums] == ["loss"] and [*evaluation.sums["loss"].values] == [1.0, 2.0]
    assert evaluation.sums["loss"].kind.isprintable()
    document = '{"a":\n"\u200b"}'
    welcome = cleaned(pb.ToLearner(welcome=pb.Welcome(settings=document, layout=document, metrics=[FORGED]))).welcome
    assert (welcome.settings, welcome.layout) == (document, document)
    assert welcome.metrics[0].isprintable()
    receipt = pb.Receipt(verdict=pb.Receipt.REFUSED, sequence=2**63, reason=FORGED)
    assert cleaned(receipt).reason.isprintable() and receipt.sequence == 2**63


def test_a_learner_cannot_forge_lines_of_the_controller(tmp_path: Path) -> None:
    """Neither by its greeting nor by the names of what it measured; each report is one printable line."""

    async def scene() -> None:
        async with (
            federation(tmp_path) as here,
            here.scripted("liar") as liar,
            here.scripted("old") as old,
        ):
            await old.greet(protocol=1, software=FORGED)
            assert await old.ended() == grpc.StatusCode.FAILED_PRECONDITION
            await liar.connect(instance=FORGED, software=FORGED)
            await liar.ready(evaluation_examples=5)
            task = await liar.task()
            await liar.send(evaluation=pb.Evaluation(version=0, examples=5, metrics={FORGED: 0.5, "loss": 1.0}))
            await liar.hand_in(task.number)
            await liar.send(leaving=pb.Leaving())
            await here.until(lambda: any("leaves" in text for _, text in here.reports))
            assert any("version 1 of the protocol" in text for _, text in here.reports)
            assert all(text.isprintable() for _, text in here.reports)

    play(scene())


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> ScriptedController:
    folder = tmp_path_factory.mktemp("controller")
    site = write_site(folder)
    return ScriptedController(site, settings(site), folder)


def test_a_controller_cannot_forge_lines_of_a_learner(scripted: ScriptedController, tmp_path: Path) -> None:
    """By its greeting, notices, statuses, receipts or goodbye; each line that the learner prints is printable."""
    lines: list[tuple[str, str]] = []

    async def scene() -> int:
        async with scripted as controller:
            process = LearnerProcess(
                Route(*host_and_port(controller.address)), work=tmp_path / "work", child=LIGHT, name="zurich",
                report=lambda *line: lines.append(line),
            )  # fmt: skip
            running: asyncio.Task[Any] = asyncio.ensure_future(process.run())
            stream = await controller.stream()
            stream.cut(grpc.StatusCode.UNAVAILABLE, FORGED)
            stream = await controller.ready(run=FORGED, learner=FORGED)
            stream.send(notice=pb.Notice(text=FORGED))
            stream.send(notice=pb.Notice(kind=pb.Notice.REFUSED, text=FORGED))
            controller.download_faults = [(grpc.StatusCode.NOT_FOUND, FORGED)]
            stream.send(task=controller.task(1))
            await stream.expect("failed")
            stream.send(farewell=pb.Farewell(kind=pb.Farewell.REFUSED, reason=FORGED))
            return int(await running)

    assert asyncio.run(scene()) == 2
    assert len([text for _, text in lines if "fine\ufffd12:00:00" in text]) >= 6
    assert all(text.isprintable() for _, text in lines)
