"""Compressed updates on the wire: the controller mixes what arrives, and refuses what no learner would send."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployment import federations
from deployment.federations import initial_model, served
from deployment.scripted_learner import LAYOUT, HonestLearner, move_towards
from metis.cli import status as cli_status
from metis.core import policies
from metis.core.events import CommunityPublished, SendTask, UpdateRefused, UpdateRequest
from metis.core.layers.compression import Compression
from metis.core.model import Model, Vector
from metis.core.stop import StopRule
from metis.deployment.controller.document import core_status
from metis.deployment.controller.metrics import metrics_text
from metis.deployment.wire import wire_pb2 as pb
from metis.reporting.dashboard.view import RunView
from metis.reporting.provenance import facts
from metis.runs.run import Run
from metis.runs.trace import read_trace

KINDS = [Compression("float16"), Compression("bfloat16"), Compression("int8"), Compression("top_k", 0.05)]


class Compressing(HonestLearner):
    """Hands in the encoded way instead of the model; remembers what it left out."""

    compression: Compression
    left_out: np.ndarray | None = None
    error: float = 0.0
    claim: float | None = None  # instead of the error

    async def deliver(self, number: int) -> None:
        data = np.frombuffer(self.held[number], np.uint8)
        size = 4 * self.layout.size
        local = Model(self.layout, data[:size].view("<f4").astype(np.float32), data[size:].view("<i8").astype(np.int64))
        made = self.compression.compress(local, self.base, self.left_out)
        self.left_out, self.error = made.left_out, made.error
        self.held[number] = made.payload
        await super().deliver(number)

    def header(self, task: int, **claims: Any) -> pb.UploadHeader:
        return super().header(task, compression_error=self.error if self.claim is None else self.claim, **claims)

    async def fetch(self, sha256: str) -> bytes:
        data = await super().fetch(sha256)
        numbers = np.frombuffer(data, np.uint8)
        size = 4 * self.layout.size
        self.base = Model(self.layout, numbers[:size].view("<f4").copy(), numbers[size:].view("<i8").astype(np.int64))
        return data


async def run(
    folder: Path,
    policy: policies.Policy,
    compression: Compression,
    monkeypatch: Any,
    claim: float | None = None,
    towards: Sequence[float] = (0, 1, 2),
) -> tuple[Vector, dict[str, Any], list[float]]:
    """The community model, the status of the controller at the end, and the errors that the learners saw last."""
    real = federations.FederationPlan

    def plan(*given: Any, **named: Any) -> federations.FederationPlan:
        made = real(*given, **named)
        setting = replace(made.setting, update_bytes=compression.nbytes(LAYOUT))
        return replace(made, wire=compression, setting=setting)

    monkeypatch.setattr(federations, "FederationPlan", plan)
    async with served(folder, policy, StopRule(rounds=5)) as federation:
        learners = federation.learners(3, kind=Compressing)
        for learner, goal in zip(learners, towards, strict=True):
            learner.compression, learner.claim, learner.train = compression, claim, move_towards(goal)
        await asyncio.wait_for(asyncio.gather(*(learner.run() for learner in learners)), 600)
        assert await federation.serving
        core = federation.process._writer.controller
        status = federation.process._document(core_status(core), 0)
        vector = core.community.model.vector
        return vector, status, [learner.error for learner in learners]


@pytest.mark.parametrize("compression", KINDS, ids=lambda each: each.kind)
@pytest.mark.parametrize("policy", [policies.sync_fedavg(1), policies.fedrec(1)], ids=lambda each: each.name)
def test_compressed_updates_are_mixed(compression: Compression, policy: Any, tmp_path: Path, monkeypatch: Any) -> None:
    # Asynchronously those that go to one side must not be able to cancel the others out.
    towards = (0, 1, 2) if policy.name == "sync_fedavg" else (2, 3, 4)
    vector, _, _ = asyncio.run(run(tmp_path, policy, compression, monkeypatch, towards=towards))
    events = [item for _, item in read_trace(tmp_path / "run" / "events.jsonl")]
    assert len([item for item in events if isinstance(item, CommunityPublished)]) == 5
    assert not [item for item in events if isinstance(item, UpdateRefused)]
    assert np.isfinite(vector).all()
    if policy.name == "sync_fedavg":  # the three go as far to one side as to the other
        assert vector == pytest.approx(initial_model().vector, abs=0.05)
    else:
        assert (vector > initial_model().vector).any()


@pytest.mark.parametrize("compression", KINDS, ids=lambda each: each.kind)
def test_what_is_left_out_and_what_travels_are_reported(
    compression: Compression, tmp_path: Path, monkeypatch: Any
) -> None:
    """In the record, the summary, the status, the metrics, the report and on the dashboard."""
    _, status, errors = asyncio.run(run(tmp_path, policies.sync_fedavg(1), compression, monkeypatch))
    folder = tmp_path / "run"
    trace = list(read_trace(folder / "events.jsonl"))
    recorded = [item.notes["compression_error"] for _, item in trace if isinstance(item, UpdateRequest)]
    assert len(recorded) == 15
    assert sorted(recorded[-3:]) == pytest.approx(sorted(errors))
    assert all(0 <= error < 1 for error in recorded)

    mean = sum(recorded) / 15
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    assert summary["compression_error"] == status["compression_error"] == pytest.approx(mean)
    assert {row["name"]: row["compression_error"] for row in status["learners"]} == pytest.approx(
        dict(zip(("l0", "l1", "l2"), errors, strict=True))
    )
    metrics = metrics_text(status).decode()
    assert f'metis_learner_compression_error{{learner="l2"}} {errors[2]}' in metrics
    assert "compressed updates: " in "\n".join(line.plain for line in cli_status._head(status))

    tasks = sum(isinstance(item, SendTask) for _, item in trace)
    travelled = tasks * initial_model().nbytes + 15 * compression.nbytes(LAYOUT)
    assert summary["bytes_exchanged"] == travelled
    loaded = Run.load(folder)
    assert ("update size", f"{compression.nbytes(LAYOUT):,} bytes") in facts(loaded)
    view = RunView(loaded.setting)
    view.feed((folder / "events.jsonl").read_bytes().splitlines())
    assert sum(learner.exchanged for learner in view.learners) == travelled
    assert view._ledger.costs(view.now).bytes_exchanged == travelled


@pytest.mark.parametrize("claim", [math.nan, math.inf, -0.5])
def test_a_claim_that_makes_no_sense_is_not_recorded(claim: float, tmp_path: Path, monkeypatch: Any) -> None:
    """It is information only: the update counts all the same."""
    compression = Compression("int8")
    vector, status, _ = asyncio.run(run(tmp_path, policies.sync_fedavg(1), compression, monkeypatch, claim))
    assert vector == pytest.approx(initial_model().vector, abs=0.05)
    assert status["compression_error"] is None
    lines = (tmp_path / "run" / "events.jsonl").read_text("utf-8").splitlines()
    assert lines and all("compression_error" not in line for line in lines)
