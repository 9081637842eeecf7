"""A run that was interrupted or killed goes on and ends in the same bits as one that never was."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import metis
from metis.errors import ConfigError, DataError
from metis.runs.checkpoint import CHECKPOINT
from simulation.children import child, is_running, lines, wait_until
from simulation.federations import FEATURES, POLICIES, lively, lively_learners, simulate_lively, victim

SECONDS = 4.0  # of virtual time


@pytest.fixture(scope="module")
def never_interrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For a policy: the weights and the events of a run from beginning to end."""
    known: dict[str, tuple[str, bytes]] = {}

    def of(policy: str) -> tuple[str, bytes]:
        if policy not in known:
            out = tmp_path_factory.mktemp(policy)
            run = simulate_lively(policy, seconds=SECONDS, out=out)
            known[policy] = run.community_model.sha256(), (out / "events.jsonl").read_bytes()
        return known[policy]

    return of


def resume(policy: str, out: Path, **options: Any) -> tuple[str, bytes]:
    run = simulate_lively(policy, seconds=SECONDS, out=out, resume=True, **options)
    assert not (out / CHECKPOINT).exists()
    assert json.loads((out / "summary.json").read_text())["community_sha256"] == run.community_model.sha256()
    return run.community_model.sha256(), (out / "events.jsonl").read_bytes()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_killed_at_random_moments_it_ends_in_the_same_bits(
    policy: str, workers: int, tmp_path: Path, never_interrupted: Any
) -> None:
    """Two kill -9 in a row, the second in the resumed run; then it goes on from the last checkpoint to the end."""
    chance = random.Random()
    whole = never_interrupted(policy)
    length = whole[1].count(b"\n")
    moment = 0
    for _ in range(2):
        moment = chance.randint(moment + 5, moment + max(6, (length - moment) // 2))
        started = (tmp_path / CHECKPOINT).exists()
        with child(victim, policy, tmp_path, workers, started, 0.01, SECONDS) as process:
            wait_until(
                lambda process=process, moment=moment: (
                    ((tmp_path / CHECKPOINT).exists() and lines(tmp_path / "events.jsonl") >= moment)
                    or not process.is_alive()
                )
            )
            time.sleep(chance.uniform(0, 0.02))
            process.kill()
        if (tmp_path / "returned").exists():  # it was quicker
            break

    if (tmp_path / CHECKPOINT).exists():
        assert resume(policy, tmp_path, workers=2 - workers) == whole
    else:
        assert (tmp_path / "events.jsonl").read_bytes() == whole[1]


@pytest.mark.parametrize(
    ("policy", "workers"), [*((policy, 0) for policy in POLICIES), ("semisync_fedavg", 2), ("fedrec", 2)]
)
def test_ctrl_c_keeps_the_run_and_resume_ends_in_the_same_bits(
    policy: str, workers: int, tmp_path: Path, never_interrupted: Any
) -> None:
    """SIGINT to the whole group, as a terminal sends it: the run is reported, and goes on as if nothing had been."""
    whole = never_interrupted(policy)
    with child(victim, policy, tmp_path, workers, False, 60.0, SECONDS) as process:
        wait_until(lambda: lines(tmp_path / "events.jsonl") >= 20)
        os.killpg(process.pid, signal.SIGINT)
        process.join(60)
        assert process.exitcode == 0

    assert (tmp_path / "returned").read_text() == "interrupted"
    kept = metis.Run.load(tmp_path)
    assert kept.finish_reason == "interrupted"
    assert kept.summary() == json.loads((tmp_path / "summary.json").read_text())
    events = (tmp_path / "events.jsonl").read_bytes().splitlines()
    assert events[:-2] == whole[1].splitlines()[: len(events) - 2]
    assert [json.loads(line).get("event") for line in events[-2:]] == ["stop_requested", None]
    assert resume(policy, tmp_path) == whole


def test_ctrl_c_again_and_again(tmp_path: Path, never_interrupted: Any) -> None:
    """TimedOut interruptions in a row never leave a checkpoint that leads elsewhere."""
    whole = never_interrupted("fedrec")
    with child(victim, "fedrec", tmp_path, 0, False, 0.0, SECONDS) as process:
        wait_until(lambda: lines(tmp_path / "events.jsonl") >= 20)
        while process.is_alive():
            os.kill(process.pid, signal.SIGINT)
            time.sleep(random.uniform(0, 0.003))

    assert resume("fedrec", tmp_path) == whole


def test_workers_of_a_killed_simulator_end(tmp_path: Path) -> None:
    """Nobody is left behind that waits for work for ever."""
    with child(victim, "fedrec", tmp_path, 2, False, 60.0, SECONDS) as process:
        wait_until(lambda: lines(tmp_path / "events.jsonl") >= 10)
        workers = [
            int(pid)
            for task in Path(f"/proc/{process.pid}/task").iterdir()
            for pid in (task / "children").read_text().split()
        ]
        assert len(workers) == 2
        process.kill()

    wait_until(lambda: not any(is_running(pid) for pid in workers))


def test_interrupted_on_the_disk_store_it_may_go_on_in_memory(tmp_path: Path, never_interrupted: Any) -> None:
    """How many workers and which store are no part of what a run is."""
    interrupt("async_fedavg", tmp_path, after=40, store="disk")
    copy = shutil.copytree(tmp_path, tmp_path / "copy")

    assert resume("async_fedavg", tmp_path, store="disk", workers=1) == never_interrupted("async_fedavg")
    assert resume("async_fedavg", copy) == never_interrupted("async_fedavg")


def interrupt(policy: str, out: Path, *, after: int, resume: bool = False, **options: Any) -> metis.Run:
    """Ctrl-C between two events, in this process."""
    seen = 0

    def watch(fold: object) -> None:
        nonlocal seen
        seen += 1
        if seen == after:
            signal.raise_signal(signal.SIGINT)

    return simulate_lively(policy, seconds=SECONDS, out=out, watch=watch, resume=resume, **options)


@pytest.mark.parametrize("policy", POLICIES)
def test_interrupted_at_every_tenth_event(policy: str, tmp_path: Path, never_interrupted: Any) -> None:
    """Interrupted, resumed, interrupted, ...: a checkpoint of a resumed run is as good as any."""
    run = interrupt(policy, tmp_path, after=10)
    while run.finish_reason == "interrupted":
        run = interrupt(policy, tmp_path, after=10, resume=True)

    whole = never_interrupted(policy)
    assert (run.community_model.sha256(), (tmp_path / "events.jsonl").read_bytes()) == whole


def test_a_run_may_go_on_beyond_the_end_it_was_given(tmp_path: Path) -> None:
    """Interrupted before 3 seconds and resumed to 4, it is the run to 4 seconds."""
    federation, policy = lively(), POLICIES["fedbuff"]()
    whole = federation.simulate(policy, seconds=4)
    federation.simulate(policy, seconds=3, out=tmp_path, watch=interrupts_after(25))

    resumed = federation.simulate(policy, seconds=4, out=tmp_path, resume=True)

    assert resumed.community_model.sha256() == whole.community_model.sha256()
    assert resumed.summary() | {"wall_seconds": 0} == whole.summary() | {"wall_seconds": 0}


def interrupts_after(events: int) -> Any:
    seen = iter(range(1, events + 1))

    def watch(fold: object) -> None:
        if next(seen, 0) == events:
            raise KeyboardInterrupt

    return watch


# --- what cannot be resumed -------------------------------------------------------------------------


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    lively().simulate(metis.fedrec(1), seconds=SECONDS, out=tmp_path, watch=interrupts_after(30))
    return tmp_path


def faster() -> list[metis.SimulatedLearner]:
    first, *others = lively_learners()
    return [metis.SimulatedLearner(first.name, first.indices, first.batch_size, metis.Speed(0.01)), *others]


def other_examples() -> list[metis.SimulatedLearner]:
    first, *others = lively_learners()
    return [metis.SimulatedLearner(first.name, first.indices[::-1], first.batch_size, first.speed), *others]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"seed": 7}, "network or seed"),
        ({"network": lambda: torch.nn.Linear(FEATURES, 3)}, "network or seed"),
        ({"solver": metis.MomentumSGD(0.04, 0.5, keep_momentum=True)}, "solver"),
        ({"solver": metis.VanillaSGD(0.05)}, "solver"),
        ({"learners": lively_learners()[:4]}, "division of the data or other learners"),
        ({"learners": faster()}, "division of the data or other learners"),
        ({"learners": other_examples()}, "division of the data or other learners"),
        ({"augment": lambda inputs, generator: inputs}, "augmentation"),
        ({"test": None}, "way of evaluating"),
    ],
)
def test_a_changed_federation_is_refused(interrupted: Path, changes: dict[str, Any], what: str) -> None:
    """What would lead to other bits is named, and nothing is touched."""
    before = {path.name: path.read_bytes() for path in interrupted.iterdir()}

    with pytest.raises(DataError, match=rf"cannot be resumed: it was started with a different {what}$"):
        lively(**changes).simulate(metis.fedrec(1), seconds=SECONDS, out=interrupted, resume=True)

    assert {path.name: path.read_bytes() for path in interrupted.iterdir()} == before


@pytest.mark.parametrize("policy", [metis.sync_fedavg(1), metis.async_fedavg(1), metis.fedrec(2), metis.fedasync(1)])
def test_another_policy_is_refused(interrupted: Path, policy: metis.Policy) -> None:
    """Also one whose events would be the same for a while."""
    with pytest.raises(DataError, match="it was started with a different policy"):
        lively().simulate(policy, seconds=SECONDS, out=interrupted, resume=True)


def test_an_end_that_has_passed_is_refused(interrupted: Path) -> None:
    """A run cannot go back behind its checkpoint."""
    with pytest.raises(DataError, match="the run has passed the end that is asked for now"):
        lively().simulate(metis.fedrec(1), update_requests=2, out=interrupted, resume=True)


def go_on(out: Path) -> metis.Run:
    return lively().simulate(metis.fedrec(1), seconds=SECONDS, out=out, resume=True)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda content: content[: len(content) // 2], "cannot be read as a safetensors file"),
        (lambda content: b"", "cannot be read as a safetensors file"),
        (lambda content: b"not a checkpoint" * 20, "cannot be read as a safetensors file"),
        (
            lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
            "is damaged: its numbers do not match",
        ),
    ],
    ids=["cut", "empty", "garbage", "flipped bit"],
)
def test_a_damaged_checkpoint_is_one_clear_error(interrupted: Path, damage: Any, sentence: str) -> None:
    """Not a traceback from within, and no run that goes on with wrong weights."""
    path = interrupted / CHECKPOINT
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(DataError, match=sentence) as caught:
        go_on(interrupted)

    assert str(path) in str(caught.value)


def test_a_foreign_checkpoint_is_refused(interrupted: Path) -> None:
    """A safetensors file that is none of ours."""
    from safetensors.numpy import save_file

    save_file({"w": np.zeros(3, np.float32)}, interrupted / CHECKPOINT)

    with pytest.raises(DataError, match="cannot be resumed"):
        go_on(interrupted)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.6])
def test_truncated_events_are_one_clear_error(interrupted: Path, kept: float) -> None:
    """The checkpoint says how many events it needs."""
    path = interrupted / "events.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])

    with pytest.raises(DataError, match=r"events.jsonl has \d+ events, but the checkpoint needs \d+"):
        go_on(interrupted)


def test_lost_events_are_one_clear_error(interrupted: Path) -> None:
    """The file of the events is gone."""
    (interrupted / "events.jsonl").unlink()

    with pytest.raises(DataError, match=r"events.jsonl cannot be read: No such file"):
        go_on(interrupted)


def test_a_line_that_is_no_event_is_one_clear_error(interrupted: Path) -> None:
    """With its number."""
    path = interrupted / "events.jsonl"
    path.write_text(path.read_text().replace("learner_joined", "learner_joked", 1))

    with pytest.raises(DataError, match=r"events.jsonl, line 2 is not an event of a run"):
        go_on(interrupted)


@pytest.mark.parametrize(("old", "new"), [('"steps":5', '"steps":4'), ('"learner":"gpu"', '"learner":"cpu"')])
def test_changed_events_are_one_clear_error(interrupted: Path, old: str, new: str) -> None:
    """Events that do not follow from the configuration are not gone on from."""
    path = interrupted / "events.jsonl"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))

    with pytest.raises(DataError, match="its events do not come out again"):
        go_on(interrupted)


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    """No directory, or one without a checkpoint."""
    with pytest.raises(ConfigError, match="to resume, give the directory"):
        lively().simulate(metis.fedrec(1), seconds=1, resume=True)
    with pytest.raises(DataError, match="has no checkpoint to resume from; start the run again"):
        lively().simulate(metis.fedrec(1), seconds=1, out=tmp_path, resume=True)
    lively().simulate(metis.fedrec(1), seconds=1, out=tmp_path)
    with pytest.raises(DataError, match="contains a finished run; there is nothing to resume"):
        lively().simulate(metis.fedrec(1), seconds=2, out=tmp_path, resume=True)


def test_a_run_that_failed_before_it_began_may_be_started_again(tmp_path: Path) -> None:
    """It has left files, but nothing to continue or to lose."""
    (tmp_path / "events.jsonl").touch()
    (tmp_path / "setting.json").write_text("{}", encoding="utf-8")
    assert lively().simulate(metis.fedrec(1), seconds=1, out=tmp_path).rounds > 0


def test_a_fresh_run_leaves_nothing_of_an_earlier_one(interrupted: Path) -> None:
    """The checkpoint and the summary of another run would not fit the new events."""
    run = lively().simulate(metis.sync_fedavg(1), rounds=2, out=interrupted, overwrite=True)

    assert not (interrupted / CHECKPOINT).exists()
    assert metis.Run.load(interrupted).summary() == run.summary()
