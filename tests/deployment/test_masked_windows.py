"""Windows of an asynchronous policy under masks, with real learner and training processes."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from deployment import masked
from deployment.masked import NAMES, POLICIES, ROUNDS
from deployment.masked_crash_points import free_port

FEDBUFF = POLICIES["fedbuff"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: Any) -> Path:
    """A consortium whose sites take part in windows."""
    monkeypatch.setenv("METIS_TEST_HOME", str(tmp_path))
    monkeypatch.setenv(masked.CHOSEN, "fedbuff")
    masked.make_kits(tmp_path, rules="masked_windows = true\n")
    return tmp_path


def test_windows_of_fedbuff_have_the_bits_of_the_simulated_ring(home: Path) -> None:
    """Each hands in what it has trained when a window has a place for it, also from an older model."""

    async def scene() -> None:
        async with masked.controller(home, policy=FEDBUFF, rounds=1000) as here:
            learners = [masked.learner_process(home, name, here.address, []) for name in NAMES]
            running = [asyncio.ensure_future(learner.run()) for learner in learners]

            events = home / "state" / "run" / "events.jsonl"
            await here.until(lambda: '"contribution_value":0.7' in events.read_text(), 300)  # one version behind
            here.process.stop_run("the test has seen it")
            assert await asyncio.gather(*running) == [0] * len(NAMES)
            assert await here.serving

    asyncio.run(asyncio.wait_for(scene(), 300))
    found = masked.published(home)
    assert len(found) > 1 and found == masked.folded(home, FEDBUFF, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["a learner", "opening", "statement", "vote", "answer"])
def test_a_window_ends_with_the_same_bits_after_a_kill(home: Path, killed: str, monkeypatch: Any) -> None:
    """A learner that has masked and handed in nothing yet, or the controller when it has written such a file."""

    async def victim(*arguments: str) -> None:
        command = [sys.executable, masked.__file__, *arguments]
        codes: list[int] = []
        for environment in ({**os.environ, masked.KILLED: killed}, dict(os.environ)):
            with (home / "victim.out").open("ab") as out:
                process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out, env=environment)
            codes.append(await process.wait())
        assert codes == [-9, 0], (home / "victim.out").read_text()[-2000:]

    async def others(names: tuple[str, ...], address: str) -> None:
        learners = [masked.learner_process(home, name, address, []) for name in names]
        assert await asyncio.gather(*(learner.run() for learner in learners)) == [0] * len(names)

    async def scene() -> None:
        if killed == "a learner":
            async with masked.controller(home, policy=FEDBUFF) as here:
                await asyncio.gather(victim("learner", str(home), "ann", here.address), others(NAMES[1:], here.address))
                assert await here.serving
            return
        address = f"127.0.0.1:{free_port()}"
        await asyncio.gather(victim("controller", str(home), address), others(NAMES, address))

    asyncio.run(asyncio.wait_for(scene(), 300))
    found = masked.published(home)
    assert len(found) == ROUNDS + 1 and found == masked.folded(home, FEDBUFF)
