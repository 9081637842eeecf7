"""A data set: two half moons that cannot be separated by a line, made from a seed."""

from __future__ import annotations

import numpy as np

from metis.data.datasets import DATASETS, Dataset, DatasetSource

_TRAIN, _TEST, _CLASSES = 800, 200, ("upper", "lower")


def moons(*, noise: float = 0.15, seed: int = 7) -> Dataset:
    """`noise` is the standard deviation of the points around the moons."""
    rng = np.random.default_rng(seed)
    labels = np.arange(_TRAIN + _TEST) % 2
    angles = rng.uniform(0, np.pi, len(labels))
    upper = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    lower = np.stack([1 - np.cos(angles), 0.5 - np.sin(angles)], axis=1)
    points = np.where(labels[:, None] == 0, upper, lower) + rng.normal(0, noise, (len(labels), 2))
    inputs = points.astype(np.float32)
    train, test = slice(_TRAIN), slice(_TRAIN, None)
    return Dataset("moons", inputs[train], labels[train], inputs[test], labels[test], class_names=_CLASSES)


DATASETS.add(
    "moons",
    DatasetSource(
        name="moons",
        title="Two half moons, made from a seed",
        shape=(2,),
        class_names=_CLASSES,
        train=_TRAIN,
        test=_TEST,
        generate=moons,
    ),
)
