"""Compressed updates on the wire: the controller mixes what arrives, and refuses what no learner would send."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployment import federations
from deployment.federations import LAYOUT, initial_model, served
from deployment.wire_learner import WireLearner
from metis.core import policies
from metis.core.compression import Compression
from metis.core.controller import StopRule
from metis.core.events import CommunityPublished, UpdateRefused
from metis.core.model import Model
from metis.trace import read_trace

KINDS = [Compression("float16"), Compression("bfloat16"), Compression("int8"), Compression("top_k", 0.05)]


class Compressing(WireLearner):
    """Hands in the encoded way instead of the model; remembers what it left out."""

    compression: Compression
    left_out: np.ndarray | None = None

    async def hand_in(self, stub: Any, number: int) -> None:
        data = np.frombuffer(self.held[number], np.uint8)
        size = 4 * LAYOUT.size
        local = Model(LAYOUT, data[:size].view("<f4").astype(np.float32), data[size:].view("<i8").astype(np.int64))
        made = self.compression.compress(local, self.base, self.left_out)
        self.left_out = made.left_out
        self.held[number] = made.payload
        await super().hand_in(stub, number)

    async def fetch(self, stub: Any, sha256: str) -> bytes:
        data = await super().fetch(stub, sha256)
        numbers = np.frombuffer(data, np.uint8)
        size = 4 * LAYOUT.size
        self.base = Model(LAYOUT, numbers[:size].view("<f4").copy(), numbers[size:].view("<i8").astype(np.int64))
        return data


async def run(folder: Path, policy: policies.Policy, compression: Compression, monkeypatch: Any) -> bytes:
    real = federations.Plan
    monkeypatch.setattr(federations, "Plan", lambda *given: replace(real(*given), compression=compression))
    monkeypatch.setattr(federations, "WireLearner", Compressing)
    async with served(folder, policy, StopRule(rounds=5)) as federation:
        learners = federation.learners(3)
        for learner in learners:
            learner.compression = compression
        await asyncio.wait_for(asyncio.gather(*(learner.run() for learner in learners)), 60)
        assert await federation.serving
        return federation.process._durable.controller.community.model.vector.tobytes()


@pytest.mark.parametrize("compression", KINDS, ids=lambda each: each.kind)
@pytest.mark.parametrize("policy", [policies.sync_fedavg(1), policies.fedrec(1)], ids=lambda each: each.name)
def test_compressed_updates_are_mixed(compression: Compression, policy: Any, tmp_path: Path, monkeypatch: Any) -> None:
    vector = np.frombuffer(asyncio.run(run(tmp_path, policy, compression, monkeypatch)), np.float32)
    events = [item for _, item in read_trace(tmp_path / "run" / "events.jsonl")]
    assert len([item for item in events if isinstance(item, CommunityPublished)]) == 5
    assert not [item for item in events if isinstance(item, UpdateRefused)]
    assert np.isfinite(vector).all()
    if policy.name == "sync_fedavg":  # the three go as far to one side as to the other
        assert vector == pytest.approx(initial_model().vector, abs=0.05)
    else:
        assert (vector != initial_model().vector).any()
