"""Windows of an asynchronous policy under masks, with real learner and training processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from deployment import masked
from deployment.masked import NAMES, POLICIES

WINDOWS = 4
RULES = "masked_windows = true\n"


def test_windows_of_fedbuff_have_the_bits_of_the_simulated_ring(tmp_path: Path, monkeypatch: Any) -> None:
    """Each learner hands in when it has trained, some from older models; the sums are those of the ring alone."""
    monkeypatch.setenv("METIS_TEST_HOME", str(tmp_path))
    monkeypatch.setenv(masked.CHOSEN, "fedbuff")
    masked.make_kits(tmp_path, rules=RULES)

    async def scene() -> None:
        async with masked.controller(tmp_path, policy=POLICIES["fedbuff"], rounds=WINDOWS) as here:
            learners = [
                masked.learner_process(tmp_path, name, here.address, [], **({"pace": 0.5} if name == "dan" else {}))
                for name in NAMES
            ]
            assert await asyncio.gather(*(learner.run() for learner in learners)) == [0] * len(NAMES)
            assert await here.serving

    asyncio.run(asyncio.wait_for(scene(), 300))
    found = masked.published(tmp_path)
    assert len(found) == WINDOWS + 1
    assert found == masked.folded(tmp_path, POLICIES["fedbuff"], WINDOWS)
