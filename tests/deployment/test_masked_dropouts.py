"""Semi-synchronous masked rounds whose members vanish and come back, with real learner and training processes."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from deployment import masked
from deployment.masked import NAMES
from metis.core.layers import SecureSum
from metis.core.policies import semisync, semisync_fedavg

POLICY = semisync_fedavg(1, cold_start_limit=30.0, longest_period=30.0).with_layers(SecureSum())
ROUNDS = 3


def test_a_member_that_vanishes_is_left_out_and_comes_back(tmp_path: Path, monkeypatch: Any) -> None:
    """The sum of the others is opened without it, exactly; with it the next round begins."""
    masked.make_kits(tmp_path)
    monkeypatch.setenv("METIS_TEST_HOME", str(tmp_path))
    terms = replace(masked.TERMS, lease=3.0)
    asyncio.run(asyncio.wait_for(_scene(tmp_path, terms), 300))
    assert masked.published(tmp_path) == masked.folded(tmp_path, POLICY, ROUNDS)


async def _scene(home: Path, terms: Any) -> None:
    async with masked.controller(home, policy=POLICY, rounds=ROUNDS, terms=terms) as here:

        def said(text: str) -> bool:
            return any(text in line for _, line in here.reports)

        slow = masked.learner_process(home, "dan", here.address, [], pace=0.3)
        vanishing = asyncio.ensure_future(slow.run())
        others = [
            asyncio.ensure_future(masked.learner_process(home, name, here.address, []).run()) for name in NAMES[:3]
        ]
        await here.until(lambda: said("community model 1 of 4 learners"), 300)
        await here.until(lambda: slow._tasks.current is not None, 300)
        slow.child.kill()
        vanishing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await vanishing
        await here.until(lambda: said("round closed with 3 of 4 members"), 300)
        await here.until(lambda: said("community model 2 of 3 learners"), 300)
        back = masked.learner_process(home, "dan", here.address, [])
        assert await back.run() == 0
        assert await asyncio.gather(*others) == [0, 0, 0]
        assert await here.serving and said("community model 3 of 4 learners")


def test_semisync_without_parameters_is_masked_without_what_needs_single_models() -> None:
    """Its differences and measures come as sums; late models cannot."""
    policy = semisync().with_layers(SecureSum())
    assert policy.secure_sum is not None
    assert "late" not in {layer.key for layer in policy.layers}
