"""What needs more of a masked round than the mean of its models, with real training processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from deployment import masked
from deployment.masked import LAYOUT, NAMES, POLICIES, ROUNDS


@pytest.mark.parametrize("name", ["nova", "scaffold", "semisync"])
def test_what_needs_more_than_the_mean_has_the_bits_of_the_simulated_ring(
    name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Factors of everybody's steps, control variates in a section of their own, lengths of differences: from sums."""
    monkeypatch.setenv("METIS_TEST_HOME", str(tmp_path))
    monkeypatch.setenv(masked.CHOSEN, name)
    masked.make_kits(tmp_path)
    layout = LAYOUT.with_controls(LAYOUT.size) if name == "scaffold" else LAYOUT
    policy = POLICIES[name]

    async def scene() -> None:
        async with masked.controller(tmp_path, policy=policy, layout=layout) as here:
            learners = [masked.learner_process(tmp_path, learner, here.address, []) for learner in NAMES]
            assert await asyncio.gather(*(learner.run() for learner in learners)) == [0] * len(NAMES)
            assert await here.serving

    asyncio.run(asyncio.wait_for(scene(), 300))
    found = masked.published(tmp_path, layout)
    assert len(found) == ROUNDS + 1
    assert found == masked.folded(tmp_path, policy, ROUNDS, layout)
    if name == "nova":
        assert found != masked.folded(tmp_path, masked.POLICY, ROUNDS, layout), "the factors made no difference"
