"""The same policy gives the same tasks and versions under the wall clock and in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deployment.federations import served
from metis.core import policies
from metis.core.controller import Controller
from metis.core.events import Action, CommunityPublished, Event, SendTask
from metis.core.model import Model
from metis.core.policy import Policy
from metis.core.stop import StopRule
from metis.runs.trace import read_trace, to_line, to_record
from metis.simulation.recording import replay_recorded

POLICIES = {
    "synchronous": policies.sync_fedavg(1),
    "semi-synchronous": policies.semisync_fedavg(2),
    "asynchronous": policies.fedrec(1),
}


async def deploy(folder: Path, policy: Policy) -> None:
    async with served(folder, policy, StopRule(rounds=8)) as federation:
        learners = federation.learners(3, pace=lambda index: 0.004 * (index + 1))
        await asyncio.wait_for(asyncio.gather(*(learner.run() for learner in learners)), 600)
        assert await federation.serving


def fresh(policy: Policy) -> Controller:
    return Controller(policy, Model.empty(), stop=StopRule(rounds=8), learners_expected=3, quorum=1)


def decisions(trace: list[tuple[float, Event | Action]]) -> list[dict[str, object]]:
    """Every task and every version, without the moment and what depends on it."""
    kept = [to_record(0.0, item) for _, item in trace if isinstance(item, (SendTask, CommunityPublished))]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in kept]


@pytest.mark.parametrize("name", POLICIES)
def test_recorded_timings_give_the_same_tasks_and_versions(name: str, tmp_path: Path) -> None:
    """A real run's timings, replayed in virtual time, lead the controller to the same decisions."""
    policy = POLICIES[name]
    asyncio.run(deploy(tmp_path, policy))
    recorded = list(read_trace(tmp_path / "run" / "events.jsonl"))
    replayed = replay_recorded(recorded, fresh(policy))
    assert decisions(replayed) == decisions(recorded)
    assert len([item for _, item in replayed if isinstance(item, CommunityPublished)]) == 8


@pytest.mark.parametrize("name", POLICIES)
def test_recorded_events_give_the_same_actions_to_the_letter(name: str, tmp_path: Path) -> None:
    """The controller is a function of (event, now): nothing else decided anything in the deployment."""
    policy = POLICIES[name]
    asyncio.run(deploy(tmp_path, policy))
    recorded = [(at, item) for at, item in read_trace(tmp_path / "run" / "events.jsonl")]
    controller, replayed = fresh(policy), []
    for at, item in recorded:
        if "event" in to_record(at, item):
            replayed.append(to_line(at, item))
            replayed += [to_line(at, action) for action in controller.handle(item, at)]  # type: ignore[arg-type]
    assert replayed == [to_line(at, item) for at, item in recorded]
