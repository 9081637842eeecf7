"""MedMNIST's files, as they are published, as data sets by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metis
from metis.data.datasets import load_dataset
from metis.data.medmnist import SETS
from metis.errors import DataError


def write(folder: Path, name: str, **changes: Any) -> None:
    """A small file in MedMNIST's format: images with channels last, labels as a column, three splits."""
    rng, own = np.random.default_rng(1), SETS[name]
    shape = (28, 28) if own.channels == 1 else (28, 28, own.channels)
    arrays: dict[str, Any] = {}
    for split, count in (("train", 60), ("val", 10), ("test", 20)):
        labels = np.arange(count) % len(own.class_names)
        images = rng.integers(0, 60, (count, *shape)) + (labels * 20).reshape(-1, *[1] * len(shape))
        arrays[f"{split}_images"], arrays[f"{split}_labels"] = images.astype(np.uint8), labels[:, None].astype(np.uint8)
    np.savez(folder / f"{name}.npz", **{**arrays, **changes})


@pytest.mark.parametrize("name", ["bloodmnist", "pneumoniamnist"])
def test_a_file_of_medmnist_is_read_as_it_is(name: str, tmp_path: Path) -> None:
    """Training and test images with flat labels; the note says that it is a part of the set."""
    write(tmp_path, name)
    data = load_dataset(name, tmp_path)
    assert data.x_train.shape[:3] == (60, 28, 28) and data.y_train.shape == (60,) and len(data.y_test) == 20
    assert data.class_names == SETS[name].class_names
    assert data.note == f"60 of {SETS[name].train:,} training and 20 of {SETS[name].test:,} test examples"


def test_it_is_a_ready_federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divided with the inner Dirichlet, which keeps the sizes, and trained."""
    write(tmp_path, "bloodmnist")
    monkeypatch.setenv("METIS_DATA", str(tmp_path))
    federation = metis.Federation.from_dataset(
        "bloodmnist", learners=3, sizes=[30, 20, 10], classes="dirichlet", alpha=0.3
    )
    assert [len(learner.indices) for learner in federation.learners] == [30, 20, 10]
    run = federation.simulate(metis.semisync_fedavg(2), rounds=5)
    assert run.history[-1].metrics["loss"] < run.history[0].metrics["loss"]


def test_labels_of_several_diseases_are_refused(tmp_path: Path) -> None:
    """A row of labels for each image is another task."""
    write(tmp_path, "pneumoniamnist", train_labels=np.zeros((60, 14), np.uint8))
    with pytest.raises(DataError, match="must hold one whole number for each example"):
        load_dataset("pneumoniamnist", tmp_path)
