"""Windows of asynchronous policies under masks, with real learner and training processes."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from deployment import masked
from deployment.masked import NAMES, POLICIES
from deployment.masked_crash_points import free_port
from metis.core.costs import CostLedger
from metis.core.events import CohortFixed, UpdateRequest
from metis.runs.trace import from_line


@pytest.fixture
def home(tmp_path: Path, monkeypatch: Any) -> Path:
    """A consortium whose sites take part in windows."""
    monkeypatch.setenv("METIS_TEST_HOME", str(tmp_path))
    monkeypatch.setenv(masked.SLOW, "dan")
    masked.make_kits(tmp_path, rules="masked_windows = true\n")
    return tmp_path


# What is in the trace once a window had what it is for: an update from the version before, or a model handed in again.
_SEEN = {"fedbuff": '"contribution_value":0.7', "async_fedavg": '"resent":1', "fedrec": '"resent":1'}


@pytest.mark.parametrize("name", list(_SEEN))
def test_windows_have_the_bits_of_the_simulated_ring(home: Path, name: str, monkeypatch: Any) -> None:
    """Each hands in what it has trained when a window has a place for it, also from an older model.

    In windows of the cache the others hand in again what they handed in before, while they train.
    """
    monkeypatch.setenv(masked.CHOSEN, name)

    async def scene() -> None:
        async with masked.controller(home, policy=POLICIES[name], rounds=1000) as here:
            learners = [masked.learner_process(home, who, here.address, []) for who in NAMES]
            running = [asyncio.ensure_future(learner.run()) for learner in learners]

            events = home / "state" / "run" / "events.jsonl"
            await here.until(lambda: _SEEN[name] in events.read_text(), 300)
            here.process.stop_run("the test has seen it")
            assert await asyncio.gather(*running) == [0] * len(NAMES)
            assert await here.serving

    asyncio.run(asyncio.wait_for(scene(), 300))
    found = masked.published(home)
    assert len(found) > 1 and found == masked.folded(home, POLICIES[name], 1000)
    _check_waiting(home)
    assert not list(home.glob("work/*/sums/local-*"))  # they went with the keys


def test_a_window_that_cannot_begin_says_for_whom_it_waits(home: Path, monkeypatch: Any) -> None:
    """Once, with the reason, in the log and in the status; and it says when it goes on."""
    monkeypatch.setenv(masked.CHOSEN, "fedrec")

    async def scene() -> None:
        async with masked.controller(home, policy=POLICIES["fedrec"], rounds=1000) as here:

            def said(text: str) -> list[str]:
                return [line for _, line in here.reports if text in line]

            learners = [masked.learner_process(home, who, here.address, []) for who in NAMES]
            running = [asyncio.ensure_future(learner.run()) for learner in learners]
            await here.until(lambda: bool(said("community model 1 of")), 300)
            learners[0].stop()
            await running[0]
            await here.until(lambda: bool(said("waiting for 'ann': a masked window begins with 4 learners")), 300)
            status = await here.process.status()
            assert status["state"] == "waiting for learners" and status["awaited"]["learners"] == ["ann"]
            assert status["awaited"]["seconds"] >= 0 and "3 are there" in status["awaited"]["reason"]
            published = len(said("community model"))
            running[0] = asyncio.ensure_future(masked.learner_process(home, "ann", here.address, []).run())
            await here.until(lambda: len(said("community model")) > published, 300)
            assert len(said("waiting for")) == len(said("goes on")) == 1
            status = await here.process.status()
            assert status["state"] == "running" and status["awaited"] is None
            here.process.stop_run("the test has seen it")
            assert await asyncio.gather(*running) == [0] * len(NAMES)
            assert await here.serving

    asyncio.run(asyncio.wait_for(scene(), 300))


def test_a_latest_model_that_is_lost_is_reported_and_its_learner_trains_on(home: Path, monkeypatch: Any) -> None:
    """The window goes on without it. A masked task has no loss of its own, and its learner shows none."""
    monkeypatch.setenv(masked.CHOSEN, "fedrec")
    reports: list[tuple[str, str]] = []

    async def scene() -> None:
        async with masked.controller(home, policy=POLICIES["fedrec"], rounds=1000) as here:
            learners = [masked.learner_process(home, who, here.address, reports) for who in NAMES]
            running = [asyncio.ensure_future(learner.run()) for learner in learners]

            def lost() -> list[str]:
                for path in home.glob("work/dan/sums/local-*"):
                    path.unlink(missing_ok=True)
                return [line for _, line in here.reports if "does not hand in its latest local model again" in line]

            await here.until(lambda: bool(lost()), 300)
            assert "learner 'dan'" in lost()[0] and "in the log of the site" in lost()[0]
            published = len([line for _, line in here.reports if "community model" in line])
            await here.until(lambda: len([line for _, line in here.reports if "community model" in line]) > published)
            here.process.stop_run("the test has seen it")
            assert await asyncio.gather(*running) == [0] * len(NAMES)
            assert await here.serving

    asyncio.run(asyncio.wait_for(scene(), 300))
    trained = [line for kind, line in reports if kind == "trained"]
    assert trained and not any("loss" in line for line in trained)


def _check_waiting(home: Path) -> None:
    """Whoever has trained and waits for a window is idle: at least for as long as is in the trace."""
    waited: dict[str, float] = dict.fromkeys(NAMES, 0.0)
    fixed: dict[str, float] = {}
    ledger, now = CostLedger({}, 1, False), 0.0
    for line in (home / "state" / "run" / "events.jsonl").read_text().splitlines():
        now, item = from_line(line)
        ledger.record(now, item)
        if isinstance(item, CohortFixed):
            fixed = item.waits
        elif isinstance(item, UpdateRequest):
            waited[item.learner] += fixed.pop(item.learner, 0.0)
    costs = ledger.costs(now).by_learner
    assert sum(waited.values()) > 0
    assert all(costs[name].idle >= seconds - 1e-6 for name, seconds in waited.items())


_KILLED = [
    *(("fedbuff", killed) for killed in ("a learner", "opening", "statement", "vote", "answer")),
    *(("async_fedavg", killed) for killed in ("a learner", "again", "opening", "statement", "vote", "answer")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "killed"), _KILLED)
def test_a_window_ends_with_the_same_bits_after_a_kill(home: Path, name: str, killed: str, monkeypatch: Any) -> None:
    """A learner that has masked and handed in nothing yet, or the controller when it has written such a file."""
    monkeypatch.setenv(masked.CHOSEN, name)
    policy, rounds = POLICIES[name], masked.rounds_of(name)

    async def victim(*arguments: str) -> None:
        command = [sys.executable, masked.__file__, *arguments]
        codes: list[int] = []
        for environment in ({**os.environ, masked.KILLED: killed}, dict(os.environ)):
            with (home / "victim.out").open("ab") as out:
                process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out, env=environment)
            codes.append(await process.wait())
        assert codes == [-9, 0], (home / "victim.out").read_text()[-2000:]

    async def others(names: tuple[str, ...], address: str) -> None:
        learners = [masked.learner_process(home, who, address, []) for who in names]
        assert await asyncio.gather(*(learner.run() for learner in learners)) == [0] * len(names)

    async def scene() -> None:
        if killed in ("a learner", "again"):
            async with masked.controller(home, policy=policy, rounds=rounds) as here:
                await asyncio.gather(victim("learner", str(home), "dan", here.address), others(NAMES[:3], here.address))
                assert await here.serving
            return
        address = f"127.0.0.1:{free_port()}"
        await asyncio.gather(victim("controller", str(home), address), others(NAMES, address))

    asyncio.run(asyncio.wait_for(scene(), 300))
    found = masked.published(home)
    assert len(found) == rounds + 1 and found == masked.folded(home, policy, rounds)
