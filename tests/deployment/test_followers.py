"""A silo that trains in several processes as one: the same model as one process, and never a wait without end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("grpc")

from deployment.test_trainer import Trainer, training
from deployment.tiny import settings
from metis.deployment.trainer.followers import own_device
from metis.deployment.wire.models import read_model, write_model
from metis.errors import ConfigError
from metis.experiments.silo import build_silo

# What could differ between one process and two: normalisation, tied and frozen weights, momentum, augmentation.
SITE = """
import numpy as np
import torch
from torch import nn

def network():
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 16, 6), nn.BatchNorm1d(6, momentum=None), nn.ReLU(), nn.Linear(6, 2),
    )
    network[0].bias.requires_grad_(False)
    return network

def training_data(site):
    rng = np.random.default_rng(7)
    inputs = rng.normal(size=(EXAMPLES, 1, 6, 6)).astype(np.float32)
    return inputs, (inputs.mean(axis=(1, 2, 3)) > 0).astype(np.int64)

def evaluation_data(site):
    return training_data(site)
"""
AUGMENT = """
def augment(inputs, generator):
    return inputs + 0.1 * torch.randn(inputs.shape, generator=generator)
"""
MOMENTUM = {"training": {"learning_rate": 0.05, "solver": "momentum", "momentum": 0.9, "keep_momentum": True}}
SCAFFOLD = {"training": {"learning_rate": 0.05, "solver": "scaffold", "momentum": 0.5}}


class Crew(Trainer):
    """A trainer with followers."""

    def __init__(self, processes: int) -> None:
        command = [sys.executable, "-m", "metis.cli.trainer", "--processes", str(processes)]
        super().__init__(command)

    def followers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()


@pytest.fixture(scope="module")
def crews() -> Iterator[dict[int, Trainer]]:
    """One, two and three processes that train as one."""
    crews: dict[int, Trainer] = {1: Trainer(), 2: Crew(2), 3: Crew(3)}
    yield crews
    for crew in crews.values():
        followers = crew.followers() if isinstance(crew, Crew) else []
        crew.end()
        assert crew.process.returncode == 0
        assert not psutil.wait_procs(followers, timeout=600)[1], "they end with the first"


def make(folder: Path, examples: int, more: str = "", **changes: Any) -> tuple[Path, Path, Any]:
    """Site file, settings and initial model."""
    path = folder / "site.py"
    path.write_text(SITE.replace("EXAMPLES", str(examples)) + more)
    silo = build_silo(settings(path, **changes), path, "zurich", 1)
    write_model(folder / "initial.model", silo.initial_model(1990))
    return path, folder / "initial.model", silo.layout


# Batches of 10: 40 are even, of 33 the last one has 3, of 31 it has 1: fewer than processes.
@pytest.mark.slow
@pytest.mark.parametrize("examples", [40, 33, 31])
@pytest.mark.parametrize("more", ["", AUGMENT], ids=["plain", "augmented"])
@pytest.mark.parametrize("solver", [MOMENTUM, SCAFFOLD], ids=["momentum", "scaffold"])
def test_the_model_is_that_of_one_process(
    crews: dict[int, Trainer], tmp_path: Path, examples: int, more: str, solver: dict[str, Any]
) -> None:
    """Two tasks with a memory between them, uneven last batches: the same weights, statistics, loss and steps."""
    site, initial, layout = make(tmp_path, examples, more, **solver)
    answers, models = {}, {}
    for processes, crew in crews.items():
        prepared = crew.prepare(site, settings=settings(site, **solver))
        assert prepared["done"]["examples"] == examples
        first, second = (tmp_path / f"{processes}-{task}.model" for task in (1, 2))
        crew.train(initial, first, task=1, steps=9)
        answers[processes] = crew.train(first, second, task=2, steps=6)["done"]
        models[processes] = read_model(second, layout)

    assert answers[1]["steps"] == 6
    assert not np.array_equal(models[1].vector, read_model(initial, layout).vector)
    for processes in (2, 3):
        np.testing.assert_allclose(models[processes].vector, models[1].vector, rtol=2e-4, atol=2e-5)
        np.testing.assert_array_equal(models[processes].counters, models[1].counters)
        assert answers[processes]["loss"] == pytest.approx(answers[1]["loss"], rel=1e-4)
        assert answers[processes]["steps"] == answers[1]["steps"]


def test_a_budget_in_seconds_ends_for_all_at_the_same_batch(crews: dict[int, Trainer], tmp_path: Path) -> None:
    """The first process has the clock; afterwards they still work together, and the first alone evaluates."""
    site, initial, layout = make(tmp_path, 40)
    crews[2].prepare(site, settings=settings(site), pace=0.05)

    done = crews[2].train(initial, tmp_path / "a.model", task=1, steps=None, seconds=0.6)["done"]

    assert 2 <= done["steps"] <= 13
    again = crews[2].train(initial, tmp_path / "b.model", task=1, steps=done["steps"])["done"]
    assert read_model(tmp_path / "a.model", layout).sha256() == read_model(tmp_path / "b.model", layout).sha256()
    assert again["loss"] == done["loss"]
    assert crews[2].ask("evaluate", model=str(tmp_path / "b.model"))["done"]["examples"] == 40


def test_a_training_that_is_given_up_is_given_up_by_all(crews: dict[int, Trainer], tmp_path: Path) -> None:
    """None of them keeps the momentum of it; the next task is that of processes that never saw it."""
    site, initial, layout = make(tmp_path, 40, **MOMENTUM)
    crews[2].prepare(site, settings=settings(site, **MOMENTUM), pace=0.05)
    number = crews[2].send("train", **training(initial, tmp_path / "x.model", task=3, steps=100_000))
    time.sleep(0.3)
    crews[2].write({"id": number, "command": "abandon"})
    assert crews[2].read()["abandoned"]["task"] == 3

    crews[1].prepare(site, settings=settings(site, **MOMENTUM))
    for processes in (1, 2):
        crews[processes].train(initial, tmp_path / f"{processes}.model", task=4, steps=5)

    one, two = (read_model(tmp_path / f"{processes}.model", layout).vector for processes in (1, 2))
    np.testing.assert_allclose(two, one, rtol=2e-4, atol=2e-5)


def test_a_failure_that_all_share_is_told_once_and_they_go_on(crews: dict[int, Trainer], tmp_path: Path) -> None:
    """A diverged training, a broken site file: as with one process, and the next command works."""
    wild = {"training": {"learning_rate": 1e30}}
    site, initial, _ = make(tmp_path, 40, **wild)
    followers = crews[2].followers()  # type: ignore[attr-defined]
    crews[2].prepare(site, settings=settings(site, **wild))
    assert "diverged" in crews[2].train(initial, tmp_path / "x.model")["failed"]

    broken = tmp_path / "broken.py"
    broken.write_text("raise ValueError('no data today')")
    assert "no data today" in crews[2].prepare(broken, settings=settings(site))["failed"]

    crews[2].prepare(site, settings=settings(site))
    assert crews[2].train(initial, tmp_path / "y.model")["done"]["steps"] == 5
    assert crews[2].followers() == followers  # type: ignore[attr-defined]


@pytest.mark.parametrize("moment", ["training", "idle"])
def test_the_death_of_a_process_is_a_failed_task(tmp_path: Path, moment: str) -> None:
    """kill -9 of one of two: the current task fails with the reason and all processes end; there is no hang."""
    site, initial, _ = make(tmp_path, 40)
    crew = Crew(2)
    crew.prepare(site, settings=settings(site), pace=0.02)
    (follower,) = crew.followers()
    number = 0
    if moment == "training":
        number = crew.send("train", **training(initial, tmp_path / "x.model", steps=100_000))
        time.sleep(0.3)
    follower.send_signal(signal.SIGKILL)

    if moment == "training":
        answer = crew.read()
        assert answer["id"] == number
        assert answer["failed"] == "process 1 of 2: the training process was killed (SIGKILL): out of memory?"
    assert crew.process.wait(60) == 1
    assert "process 1 of 2" in crew.end()


@pytest.mark.slow
def test_a_process_that_fails_alone_fails_the_task(tmp_path: Path) -> None:
    """Only the second process cannot read its examples: the first would wait for ever for its part of the sum."""
    more = """
class Odd(torch.utils.data.Dataset):
    def __init__(self): self.inputs, self.targets = training_pairs()
    def __len__(self): return len(self.targets)
    def __getitem__(self, index):
        import sys
        if "--follow" in sys.argv: raise OSError("no such disk")
        return self.inputs[index], self.targets[index]

training_pairs = lambda: SOURCE("x")
SOURCE = training_data
def training_data(site): return Odd()
"""
    site, initial, _ = make(tmp_path, 40, more)
    crew = Crew(2)
    crew.prepare(site, settings=settings(site))

    answer = crew.train(initial, tmp_path / "x.model")

    assert "process 1 of 2" in answer["failed"] or "no such disk" in answer["failed"]
    crew.end()


def test_the_others_end_when_the_first_is_killed(tmp_path: Path) -> None:
    """Nobody is left behind, also in the middle of a training."""
    site, initial, _ = make(tmp_path, 40)
    crew = Crew(3)
    crew.prepare(site, settings=settings(site), pace=0.02)
    crew.send("train", **training(initial, tmp_path / "x.model", steps=100_000))
    followers = crew.followers()
    assert len(followers) == 2
    os.kill(crew.process.pid, signal.SIGKILL)

    assert not psutil.wait_procs(followers, timeout=600)[1]
    crew.end()


def test_every_process_has_a_gpu_of_its_own() -> None:
    """By its number; a single GPU cannot be asked for."""
    command = {"device": None, "settings": {"experiment": {"training": {"device": "cuda"}}}}
    assert [own_device(command, rank, 2) for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    assert own_device({**command, "device": "cpu"}, 1, 2) == "cpu"
    assert own_device({"device": None, "settings": {"experiment": {}}}, 1, 2) is None
    with pytest.raises(ConfigError, match="the device is 'cuda:1', but 2 processes need one each: write cuda"):
        own_device({**command, "device": "cuda:1"}, 0, 2)
