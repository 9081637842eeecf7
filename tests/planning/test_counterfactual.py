"""A deployment's record replayed: its own policy gives its own trace, another one a trace of the same learners."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

import metis
from deployment.federations import served
from metis.core.events import (
    Budget,
    CommunityStamp,
    Event,
    LearnerJoined,
    LearnersExpected,
    LocalTask,
    SendTask,
    UpdateRequest,
)
from metis.core.model import Model
from metis.core.policy import Policy
from metis.core.stop import StopRule
from metis.deployment.controller.settings import DeploymentSettings
from metis.errors import DataError
from metis.planning.counterfactual import (
    Recording,
    compare_policies,
    counterfactual_trace,
    decisions,
    load_recording,
    trace_costs,
)
from metis.planning.timings import read_timings
from metis.runs.trace import to_line
from metis.simulation.loop import Trace

POLICIES = {"semi-synchronous": metis.semisync_fedavg(2), "asynchronous": metis.fedrec(1)}


async def deploy(
    folder: Path, policy: Policy, rounds: int, terms: DeploymentSettings | None = None, learners: int = 3
) -> None:
    async with served(folder, policy, StopRule(rounds=rounds), terms=terms) as federation:
        crew = federation.learners(learners, pace=lambda index: 0.004 * (index + 1))
        await asyncio.wait_for(asyncio.gather(*(learner.run() for learner in crew)), 600)
        assert await federation.serving


@pytest.mark.parametrize("name", POLICIES)
def test_a_deployment_is_replayed_from_its_state_folder(name: str, tmp_path: Path) -> None:
    """Real clocks, real transfers: the recorded policy gives the recorded tasks, versions and costs."""
    policy = POLICIES[name]
    asyncio.run(deploy(tmp_path, policy, 6))
    recording = load_recording(tmp_path)
    assert recording.folder == tmp_path / "run"

    trace = counterfactual_trace(recording, policy)
    assert decisions(trace, recording.end) == decisions(recording.events, recording.end)
    fills = policy.protocol.fills_the_period
    again, recorded = (trace_costs(recording, events, "any", fills) for events in (trace, recording.events))
    assert again == recorded

    other = compare_policies(recording, [metis.sync_fedavg(1)])
    assert other.reproduced is None  # nobody wrote down with which parameters it was run
    synchronous = other.costs[1]
    assert synchronous.rounds > 0
    assert synchronous.costs.update_requests <= 3 * (synchronous.rounds + 1)
    assert all(math.isclose(epochs, 1.0) for epochs in synchronous.local_epochs.values())


def test_timings_of_a_deployment(tmp_path: Path) -> None:
    """Examples and batch size as the learners reported, time per batch as they measured it, exchanges as they took."""
    asyncio.run(deploy(tmp_path, POLICIES["semi-synchronous"], 4))
    found = read_timings([tmp_path])
    assert sorted(found.learners) == ["l0", "l1", "l2"]
    for timing in found.learners.values():
        assert timing.time_per_batch > 0
        assert timing.exchange is not None and timing.exchange > 0
        assert timing.examples > 0 and timing.batch_size > 0
    assert found.model_bytes == load_recording(tmp_path).model_bytes


def recording(events: Trace) -> Recording:
    return Recording(Path("run"), events, "any", None, False, {}, {}, None, 3, 0)


def test_who_begins_with_fewer_than_expected_begins_when_they_did() -> None:
    """Two came at seconds 0 and 1, a third was waited for until second 5: another policy begins then as well."""
    from metis.core.controller import Controller
    from metis.core.model import Model
    from metis.planning.forecast import PlannedLearner
    from metis.simulation.loop import ScheduledEvent, play

    crew = {name: PlannedLearner(name, 10, 2, 0.1) for name in ("a", "b")}
    events: list[Event] = [LearnerJoined(name, 10, 2) for name in crew]
    scheduled = [ScheduledEvent(float(k), event) for k, event in enumerate(events)]
    controller = Controller(metis.sync_fedavg(1), Model.empty(), stop=StopRule(seconds=9), learners_expected=None)
    trace = list(
        play(
            controller,
            [*scheduled, ScheduledEvent(5.0, LearnersExpected(2))],
            lambda action, now: crew[action.learner].work(action, now),
        )
    )
    for policy in (metis.sync_fedavg(1), metis.fedrec(2)):
        again = counterfactual_trace(recording(trace), policy)
        assert min(at for at, item in again if isinstance(item, SendTask)) == 5.0
    assert decisions(counterfactual_trace(recording(trace), metis.sync_fedavg(1)), 9.0) == decisions(trace, 9.0)


def test_events_that_cannot_follow_each_other_are_no_recording() -> None:
    """As after two lines were exchanged: an update before its task, an answer that is not a number."""
    joined = (0.0, LearnerJoined("a", 10, 10))
    sent = (5.0, SendTask("a", LocalTask(1, CommunityStamp(), Budget(1)), Model.empty()))
    early = (1.0, UpdateRequest("a", 1, 1, 1.0, 1.0, Model.empty()))
    wrong = (6.0, UpdateRequest("a", 1, None, [], 1.0, Model.empty()))  # type: ignore[arg-type]
    for events in ([joined, sent, early], [joined, early, sent], [joined, sent, wrong]):
        with pytest.raises(DataError, match=r"events.jsonl is damaged: its events contradict each other"):
            compare_policies(recording(list(events)), [metis.sync_fedavg(1)])


def test_a_summary_that_is_none_is_refused_in_words(tmp_path: Path) -> None:
    """The reason is not the name of a Python exception."""
    sent = SendTask("a", LocalTask(1, CommunityStamp(), Budget(1)), Model.empty())
    (tmp_path / "events.jsonl").write_text(to_line(5.0, sent) + "\n", "utf-8")
    (tmp_path / "summary.json").write_text("{}", "utf-8")
    with pytest.raises(DataError) as caught:
        load_recording(tmp_path)
    assert str(caught.value) == f"{tmp_path / 'summary.json'} is not the summary of a run: it has no 'setting'"
