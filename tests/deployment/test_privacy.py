"""A real learner whose site policy protects its records: what leaves, what is reserved, what is refused."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc")

from deployment.scripted_controller import ScriptedController
from deployment.tiny import settings, write_site
from metis.deployment.learner.process import LearnerProcess
from metis.deployment.learner.site_policy import PolicyFile
from metis.deployment.route import Route
from metis.deployment.wire import wire_pb2 as pb
from metis.net import host_and_port

TRAINER = [sys.executable, "-m", "metis.cli.trainer"]


def test_nothing_clear_leaves_and_nothing_is_trained_beyond_the_budget(tmp_path: Path) -> None:
    """No loss, no evaluation, no reason of a failure; each task is in the ledger; one too long is refused."""
    site = write_site(tmp_path)
    controller = ScriptedController(site, settings(site), tmp_path)
    policy = tmp_path / "kit" / "site-policy.toml"
    policy.parent.mkdir()
    witness = json.dumps(str(tmp_path / "witness"))
    policy.write_text(f'[privacy]\nnoise = 2.0\nbudget = 3.0\ndata = "cohort"\nwitness = {witness}\n')
    lines: list[tuple[str, str]] = []

    async def story() -> None:
        stream = await controller.welcomed()
        ready: pb.Ready = await stream.expect("ready")
        assert 10 <= ready.steps_left < 100 and ready.larger_batches and ready.evaluation_examples == 0
        stream.send(task=controller.task(1, steps=3, seconds=1e-9, batches_per_step=2, evaluate=True))
        await controller.receipts.get()
        header = controller.headers[-1]
        assert header.steps == 3 and math.isnan(header.loss)
        stream.send(task=controller.task(2, steps=10 * ready.steps_left))
        failed: pb.Failed = await stream.expect("failed")  # and no evaluation before it
        assert (failed.task, failed.cause.kind, failed.steps) == (2, pb.Cause.PRIVACY_BUDGET, 0)
        task = controller.task(3)
        task.ClearField("steps")
        stream.send(task=task)
        failed = await stream.expect("failed")
        assert (failed.task, failed.cause.kind, failed.seconds) == (3, pb.Cause.UNKNOWN, 0.0)

    async def scene() -> None:
        async with controller:
            process = LearnerProcess(
                Route(*host_and_port(controller.address)), work=tmp_path / "work", child=TRAINER, name="zurich",
                site=site, policy=PolicyFile(policy), report=lambda *line: lines.append(line),
            )  # fmt: skip
            running = asyncio.ensure_future(process.run())
            try:
                await asyncio.wait_for(story(), 300)
            finally:
                process.stop()
                await running

    asyncio.run(scene())
    entries = (policy.parent / "privacy" / "cohort.ledger").read_text().splitlines()[1:]
    assert [(json.loads(line)["task"], json.loads(line)["steps"]) for line in entries] == [(1, 3)]
    assert any("records are protected with noise 2" in text for _, text in lines)
