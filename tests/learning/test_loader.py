"""Examples that are read ahead: the same batches, in the same order, by any number of threads."""

from __future__ import annotations

import itertools
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch

import metis
from metis.core.solvers import VanillaSGD
from metis.errors import ArgumentError
from metis.learning import Learner, TorchEngine


class Files:
    """Items that are made when they are asked for."""

    def __init__(self, count: int = 40, broken: int = -1) -> None:
        self.count, self.broken = count, broken
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.count:
            raise IndexError
        if index == self.broken:
            raise OSError(f"file {index} cannot be read")
        self.threads.add(threading.current_thread().name)
        return torch.full((3,), float(index)), index % 2


def learner(examples: Any) -> Learner:
    return Learner("a", 0, examples, np.arange(len(examples)), 8, VanillaSGD(0.1), seed=5)


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (2, 2), (5, 3)])
def test_batches_are_those_without_a_loader(workers: int, prefetch: int) -> None:
    """In order, over several epochs, and read by other threads than the one that trains."""
    files = Files()
    loader = metis.Loader(files, workers=workers, prefetch=prefetch)
    plain, ahead = learner(metis.learning.DatasetExamples(Files())), learner(loader)
    for wanted, found in itertools.islice(zip(plain.batches(3), ahead.batches(3), strict=True), 12):
        assert torch.equal(wanted[0], found[0]) and torch.equal(wanted[1], found[1])
    assert threading.current_thread().name not in files.threads


def test_no_more_is_read_ahead_than_asked_for() -> None:
    """What does not fit memory must not be read whole."""
    read: list[int] = []

    class Counted(Files):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            read.append(index)
            return super().__getitem__(index)

    stream = metis.Loader(Counted(1000), workers=2, prefetch=3).stream(np.array([k]) for k in range(1000))
    for _ in range(4):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert len(read) <= 4 + 2 * 3


def test_threads_end_with_the_training() -> None:
    """Nothing is left that reads for nobody, also where training stops in the middle of an epoch."""
    loader = metis.Loader(Files(), workers=3)
    engine = TorchEngine(lambda: torch.nn.Linear(3, 2))
    learner(loader).train(engine, engine.initial_model(0), 0, 3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("metis-loader")]


def test_what_a_thread_cannot_read_is_raised_where_it_is_needed() -> None:
    with pytest.raises(OSError, match="file 7 cannot be read"):
        list(metis.Loader(Files(broken=7)).stream([np.array([0]), np.array([7]), np.array([1])]))


def test_a_loader_reaches_another_process() -> None:
    """It has no thread until it is used."""
    again = pickle.loads(pickle.dumps(metis.Loader(Files(), workers=2)))
    assert len(again) == 40 and torch.equal(again.batch(np.array([4]))[0], torch.full((1, 3), 4.0))


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"workers": 1.5}, {"prefetch": 0}, {"prefetch": True}])
def test_wrong_numbers_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ArgumentError, match=f"{name} is .*; it must be a whole number, 1 or more"):
        metis.Loader(Files(), **wrong)
