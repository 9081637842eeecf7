"""A durable controller that is restarted anywhere is the one that never was."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from metis.core import policies
from metis.core.controller import Controller
from metis.core.events import (
    Action,
    DeadlinePassed,
    Evaluated,
    Event,
    LearnerJoined,
    LearnerLeft,
    LocalTask,
    RolledBack,
    StopRequested,
    TaskFailed,
    UpdateRequest,
)
from metis.core.layers import AdaptivePeriod, FedNova, Median, NormBound, ScheduledRate
from metis.core.layers.sample import Sample
from metis.core.layers.server_optimizers import FedAvgM, FedYogi
from metis.core.mixing import ModelStore
from metis.core.model import Layout, Model, TensorSpec
from metis.core.policy import Policy
from metis.core.schedules import Schedule
from metis.core.solvers import Scaffold
from metis.core.stop import StopRule
from metis.deployment.controller.durable import DurableController
from metis.deployment.controller.state import State
from metis.deployment.wire.model_mac import checker
from metis.deployment.wire.models import model_parts
from metis.errors import ConfigError, DuplicateUpdate, StateError
from metis.runs.trace import to_line

NETWORK = Layout((TensorSpec("w", (40, 2)), TensorSpec("b", (3,)), TensorSpec("n", (), "int64", "counter")))
LAYOUT = NETWORK.with_controls(80)
INITIAL = Model(LAYOUT, np.linspace(-1, 1, LAYOUT.size, dtype=np.float32), np.array([7]))
LEARNERS = ["anna", "ben", "carl", "dora"]
RATE = Schedule(1, 0.1, 30, "seconds")
POLICIES = {
    "sync": policies.sync_fedavg(1),
    "semisync": policies.semisync_fedavg(2, cold_start_limit=5),
    "async": policies.async_fedavg(1, rebuild_every=7),
    "fedrec": policies.fedrec(1),
    "fedasync": policies.fedasync(1),
    "fedbuff": policies.fedbuff(1, buffer_size=3),
    "semisync-adaptive": policies.semisync_fedavg(timings="smoothed").with_layers(AdaptivePeriod()),
    "semisync-sample": policies.semisync_fedavg(2, exchange="inside").with_layers(Sample(learners=2)),
    "sync-nova-server": policies.sync_fedavg(1)
    .with_layers(FedNova())
    .with_layers(FedYogi(rate=RATE))
    .with_layers(ScheduledRate(RATE)),
    "sync-norm-bound": policies.sync_fedavg(1).with_layers(NormBound()),
    "fedbuff-median": policies.fedbuff(1, buffer_size=3).with_layers(Median()),
    "fedasync-server": policies.fedasync(1).with_layers(FedAvgM()),
    "sync-sample-scaffold": policies.sync_fedavg(1).with_layers(Sample(learners=2)).for_solver(Scaffold(0.1))[0],
    "async-scaffold": policies.async_fedavg(1, rebuild_every=7).for_solver(Scaffold(0.1))[0],
    "fedbuff-scaffold": policies.fedbuff(1, buffer_size=3).for_solver(Scaffold(0.1))[0],
    "semisync-adaptive-scaffold": (
        policies.semisync_fedavg(timings="smoothed").with_layers(AdaptivePeriod()).for_solver(Scaffold(0.1))[0]
    ),
}


def maker(policy: Policy) -> Callable[[Model, ModelStore], Controller]:
    def make(model: Model, store: ModelStore) -> Controller:
        return Controller(policy, model, stop=StopRule(rounds=40), learners_expected=3, store=store)

    return make


class Twin:
    """One controller on its folder, with the lines that it has written."""

    def __init__(self, folder: Path, policy: Policy, **options: int) -> None:
        self._folder, self._policy, self._options = folder, policy, options
        self.lines: list[str] = []
        self._open()

    def _open(self) -> None:
        self.state = State.open(self._folder, "process")
        self.lines.clear()
        self.durable = DurableController(maker(self._policy), INITIAL, self.state, self._note, **self._options)

    def _note(self, now: float, item: Event | Action) -> None:
        self.lines.append(to_line(now, item))

    def restart(self) -> None:
        self.state.close()
        self._open()

    def journal(self, event: Event, now: float) -> None:
        """Only the first half of an event: what a kill between journal and effect leaves."""
        blob = None
        if isinstance(event, UpdateRequest):
            blob = self.state.put_blob(model_parts(event.local_model))
        if isinstance(event, RolledBack):
            event, blob = self.durable.rollback(event.version)
        self.entry = self.durable.journal(event, now, blob)

    def happen(self, event: Event, now: float) -> None:
        self.journal(event, now)
        self.durable.apply(self.entry)


def random_events(policy: Policy, seed: int, events: int, folder: Path) -> list[tuple[Event, float]]:
    """What may happen to a federation: joins, updates, failures, departures, deadlines, in some order."""
    rng = random.Random(seed)
    twin = Twin(folder, policy)
    taken: list[tuple[Event, float]] = []
    now = 0.0
    while len(taken) < events and not twin.durable.controller.finished:
        now += rng.uniform(0.01, 1.5)
        roster = twin.durable.controller.roster
        away = [name for name in LEARNERS if (record := roster.get(name)) is None or not record.present]
        training = [record for record in roster.training if record.task is not None]
        event: Event
        if now >= twin.durable.controller.deadline:
            event = DeadlinePassed()
        elif away and (len(away) > 2 or rng.random() < 0.3):
            event = LearnerJoined(rng.choice(away), rng.randint(20, 90), 10)
        elif rng.random() < 0.06 and twin.durable.controller.started:
            event = RolledBack(rng.choice(list(twin.durable.kept())), Model.empty())
        elif training and rng.random() < 0.9:
            record = rng.choice(training)
            assert record.task is not None
            if rng.random() < 0.1:
                event = TaskFailed(record.learner, record.task.number, "no luck", 1, 0.1)
            else:
                vector = np.random.default_rng([seed, len(taken)]).normal(size=LAYOUT.size).astype(np.float32)
                steps = rng.randint(1, record.task.budget.steps or 9)
                seconds = rng.uniform(0.1, 1.0)
                model = Model(LAYOUT, vector, np.array([len(taken)]))
                event = UpdateRequest(record.learner, record.task.number, steps, seconds, seconds / steps, model, 0.5)
        elif rng.random() < 0.3 and len(roster.available) > 1:
            event = LearnerLeft(rng.choice(roster.available).learner)
        else:
            event = Evaluated(twin.durable.controller.community.stamp.version, {"accuracy": rng.random()})
        twin.happen(event, now)
        taken.append((event, now))
    twin.state.close()
    return taken


def same(one: Twin, other: Twin) -> None:
    first, second = one.durable.controller, other.durable.controller
    assert one.lines == other.lines
    assert one.durable.hashes == other.durable.hashes
    assert first.community.stamp == second.community.stamp
    assert first.community.model.sha256() == second.community.model.sha256()
    assert first.deadline == second.deadline
    for record in first.roster:
        again = second.roster[record.learner]
        assert replace(record, base_model=None, task_sent_at=0.0) == replace(again, base_model=None, task_sent_at=0.0)
    mine, theirs = first.community.arrays(), second.community.arrays()
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_restarted_anywhere_it_is_the_one_that_never_was(name: str, seed: int, tmp_path: Path) -> None:
    """Restarts at random moments, also between journal and effect; snapshots as often or as seldom as they come."""
    policy, rng = POLICIES[name], random.Random(seed)
    events = random_events(policy, seed, 90, tmp_path / "events")
    steady, killed = Twin(tmp_path / "a", policy), Twin(tmp_path / "b", policy, replay_at_most=rng.choice([1, 3, 10]))
    for event, now in events:
        steady.happen(event, now)
        if rng.random() < 0.15:
            killed.journal(event, now)
            killed.restart()  # finds the event in the journal, and its effect follows from that
        else:
            killed.happen(event, now)
        if rng.random() < 0.15:
            killed.restart()
        if rng.random() < 0.2:
            same(steady, killed)
    same(steady, killed)
    assert steady.durable.controller.community.stamp.version > 3
    assert steady.durable.model_macs.keys() <= steady.durable.versions.keys()
    for version, sealed in steady.durable.model_macs.items():
        check, right = checker("", sealed)
        check.update(steady.state.blob_path(steady.durable.versions[version]).read_bytes())
        assert check.digest() == right


@pytest.mark.parametrize("name", POLICIES)
def test_a_rollback_leads_back_to_every_model_that_is_kept(name: str, tmp_path: Path) -> None:
    """Its bits under a new number, whatever was restarted and collected meanwhile; what is not kept is refused."""
    twin = Twin(tmp_path / "a", POLICIES[name], replay_at_most=2)
    for event, now in random_events(POLICIES[name], 7, 60, tmp_path / "events"):
        twin.happen(event, now)
    for position in (0, 1, -2, -1):  # which versions these are changes with every rollback
        version, blob = list(twin.durable.kept().items())[position]
        latest = twin.durable.controller.community.stamp.version
        twin.happen(RolledBack(version, Model.empty()), now + 1)
        twin.restart()
        community = twin.durable.controller.community
        assert (community.stamp.version, twin.durable.hashes[latest + 1]) == (latest + 1, blob)
        assert b"".join(model_parts(community.model)) == twin.state.blob_path(blob).read_bytes()
        assert all(task.based_on == community.stamp for task in _open_tasks(twin))
        with pytest.raises(ConfigError, match=f"rolled back since community model {latest}, as .* {latest + 1}"):
            twin.durable.rollback(0, latest)  # the same once more, because its answer was lost
    gone = next(version for version in range(1, 100) if version not in twin.durable.kept())
    kept = ", ".join(str(version) for version in sorted(twin.durable.kept(), reverse=True))
    with pytest.raises(ConfigError, match=f"community model {gone} is not kept; those that are, .*: {kept}"):
        twin.durable.rollback(gone)


def _open_tasks(twin: Twin) -> list[LocalTask]:
    return [record.task for record in twin.durable.controller.roster.training if record.task is not None]


def test_a_damaged_model_is_not_rolled_back_to(tmp_path: Path) -> None:
    """It is found damaged before anything is journaled."""
    twin = Twin(tmp_path / "a", POLICIES["sync"])
    for event, now in random_events(POLICIES["sync"], 7, 60, tmp_path / "events"):
        twin.happen(event, now)
    version, blob = list(twin.durable.kept().items())[1]
    twin.state.journal.put(blob, b"x")  # it is small, and no file
    with pytest.raises(ConfigError, match=f"community model {version} is not kept"):
        twin.durable.rollback(version)
    twin.happen(StopRequested(), now + 1)
    with pytest.raises(ConfigError, match="has ended"):
        twin.durable.rollback(0)


def test_files_are_collected_and_those_that_are_needed_stay(tmp_path: Path) -> None:
    """Disk use is bounded by learners and snapshots, not by rounds."""
    policy = POLICIES["fedrec"]
    events = random_events(policy, 5, 400, tmp_path / "events")
    twin = Twin(tmp_path / "a", replace(policy), replay_at_most=5)
    for event, now in events:
        twin.happen(event, now)
    blobs = list((tmp_path / "a" / "blobs").iterdir())
    updates = sum(isinstance(event, UpdateRequest) for event, _ in events)
    assert updates > 35
    # Two snapshots of 4 learners and their bases, the updates between them, the initial model; the newest models, and
    # those that were published since the older snapshot.
    assert len(blobs) <= 2 * (4 + 5) + 2 * 5 + 2 + 5 + 2 * 5
    twin.restart()
    assert twin.durable.controller.community.stamp.version > 3


def test_small_models_in_the_journal_need_fewer_snapshots(tmp_path: Path) -> None:
    """Ten updates in files are as many as a start may have to replay; of small ones it is far more."""
    numbers = {}
    for where in ("files", "journal"):
        twin = Twin(tmp_path / where, POLICIES["async"])
        for learner in LEARNERS:
            twin.happen(LearnerJoined(learner, 50, 10), 0.0)
        for number in range(30):
            learner = LEARNERS[number % 2]
            task = twin.durable.open_task(learner)
            assert task is not None
            content = b"".join(model_parts(Model(LAYOUT, INITIAL.vector + np.float32(number), INITIAL.counters)))
            event = UpdateRequest(learner, task.number, 5, 0.1, 0.02, Model.empty())
            if where == "files":
                entry = twin.durable.journal(event, number, twin.state.put_blob([memoryview(content)]))
            else:
                entry = twin.durable.journal(event, number, hashlib.sha256(content).hexdigest(), content)
            twin.durable.apply(entry)
        numbers[where] = [snapshot.seq for snapshot in twin.state.snapshots()]
        before = twin.durable.controller.community.model.sha256()
        twin.restart()
        assert twin.durable.controller.community.model.sha256() == before
    assert len(numbers["files"]) == 2 and not numbers["journal"]


def test_a_damaged_snapshot_is_no_loss(tmp_path: Path) -> None:
    """The older one and the journal give the same."""
    policy = POLICIES["async"]
    events = random_events(policy, 1, 80, tmp_path / "events")
    steady, hurt = Twin(tmp_path / "a", policy), Twin(tmp_path / "b", policy, replay_at_most=5)
    for event, now in events:
        steady.happen(event, now)
        hurt.happen(event, now)
    newest = max((tmp_path / "b" / "snapshots").iterdir(), key=lambda path: path.name)
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    hurt.restart()
    same(steady, hurt)


def test_a_damaged_model_is_named(tmp_path: Path) -> None:
    """Nothing is mixed from bytes that are not those that were handed in."""
    policy = POLICIES["async"]
    twin = Twin(tmp_path / "a", policy, replay_at_most=1000)
    for event, now in random_events(policy, 1, 40, tmp_path / "events"):
        twin.happen(event, now)
    entry = next(entry for entry in twin.state.entries() if entry.blob is not None)
    assert entry.blob is not None
    path = twin.state.blob_path(entry.blob)
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(StateError, match=f"{entry.blob}.*damaged"):
        twin.restart()


def test_an_update_counts_once(tmp_path: Path) -> None:
    """The journal knows the task for ever."""
    twin = Twin(tmp_path / "a", POLICIES["async"])
    events = random_events(POLICIES["async"], 2, 40, tmp_path / "events")
    done: list[tuple[UpdateRequest, float]] = []
    for event, now in events:
        twin.happen(event, now)
        if isinstance(event, UpdateRequest):
            done.append((event, now))
    before = twin.durable.controller.community.model.sha256()
    for event, now in done:
        with pytest.raises(DuplicateUpdate):
            twin.journal(event, now + 1000)
    twin.restart()
    assert twin.durable.controller.community.model.sha256() == before
