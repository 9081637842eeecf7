"""A data set divided over the learners of a file; needs no tensor library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.data import partition as divisions
from metis.data.datasets import DATASETS, Dataset, load_dataset
from metis.errors import ConfigError, DataError
from metis.experiments.config.checks import kept_for_training
from metis.experiments.config.load import ExperimentConfig, LearnerGroup
from metis.experiments.learners import check_traces

# Random streams, so that asking for fewer examples does not change how the rest is divided.
_SUBSET, _PARTITION, _VALIDATION, _TEST = 11, 12, 13, 14


@dataclass(frozen=True)
class Assignment:
    """One learner: its name, its group and the examples that it holds."""

    name: str
    group: LearnerGroup
    indices: NDArray[np.int64]
    test: NDArray[np.int64] | None = None  # of the held-out examples, where each site has its own


@dataclass(frozen=True)
class Division:
    """A data set and who holds which of its training examples."""

    dataset: Dataset
    assignments: tuple[Assignment, ...]
    validation: tuple[NDArray[Any], NDArray[Any]] | None = None  # inputs and targets, which no learner holds

    @property
    def counts(self) -> NDArray[np.int64]:
        """Examples of each class (column) that each learner (row) holds."""
        return divisions.describe([assignment.indices for assignment in self.assignments], self.dataset.y_train)

    def counts_by_range(self, ranges: int = 8) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Examples in equal ranges of the target (column) that each learner (row) holds, and the ranges' edges."""
        targets = self.dataset.y_train.astype(np.float64)
        edges = np.linspace(targets.min(), targets.max(), ranges + 1)
        if edges[0] == edges[-1]:
            edges = edges[[0, -1]]
        # The last range includes its upper edge; a rounded edge never leaves an example out.
        column = np.clip(np.searchsorted(edges, targets, side="right") - 1, 0, len(edges) - 2)
        rows = [np.bincount(column[assignment.indices], minlength=len(edges) - 1) for assignment in self.assignments]
        return np.stack(rows).astype(np.int64), edges


def divide(config: ExperimentConfig, *, progress: bool = False) -> Division:
    """Load the data set and divide it; an impossible partition is a DataError."""
    if config.site is not None:
        raise ConfigError(f"each site brings its own data in {config.site.title}; there is no data set to divide")
    folder = Path(config.data.folder) if config.data.folder is not None else None
    site = config.data.smallest_site
    options: dict[str, Any] = {} if site is None else {"smallest_site": site}
    dataset = load_dataset(config.data.dataset, folder, progress=progress, **options)
    rng = np.random.default_rng([config.seed, _SUBSET])
    train = _subset(len(dataset.y_train), config.data.train_examples, rng)
    test = _subset(len(dataset.y_test), config.data.test_examples, rng)
    dataset = replace(
        dataset,
        x_train=dataset.x_train[train],
        y_train=dataset.y_train[train],
        x_test=dataset.x_test[test],
        y_test=dataset.y_test[test],
        silos=dataset.silos[train] if len(dataset.silos) else dataset.silos,
    )
    dataset, validation = _without_validation(config, dataset)
    try:
        if config.partition.sizes == "natural":
            assignments = _natural_assignments(config, dataset)
        else:
            assignments = assign(config, _parts(config, dataset.y_train))
    except DataError as problem:
        raise DataError(f"partition: {problem}") from None
    check_traces([(assignment.name, assignment.group) for assignment in assignments])
    if config.partition.test == "own":
        rng = np.random.default_rng([config.seed, _TEST])
        parts = divisions.alike([one.indices for one in assignments], dataset.y_train, dataset.y_test, rng)
        assignments = tuple(replace(one, test=part) for one, part in zip(assignments, parts, strict=True))
    return Division(dataset, assignments, validation)


def _without_validation(
    config: ExperimentConfig, dataset: Dataset
) -> tuple[Dataset, tuple[NDArray[Any], NDArray[Any]] | None]:
    """What learners divide among them, and what is held out of it."""
    examples = len(dataset.y_train)
    kept = kept_for_training(config, examples)
    if kept == examples:
        return dataset, None
    order = np.random.default_rng([config.seed, _VALIDATION]).permutation(examples)
    train, held = np.sort(order[:kept]), np.sort(order[kept:])
    rest = replace(
        dataset,
        x_train=dataset.x_train[train],
        y_train=dataset.y_train[train],
        silos=dataset.silos[train] if len(dataset.silos) else dataset.silos,
    )
    return rest, (dataset.x_train[held], dataset.y_train[held])


def _subset(available: int, wanted: int | None, rng: np.random.Generator) -> NDArray[np.int64] | slice:
    """Which examples to use; all of them without a copy."""
    if wanted is None or wanted >= available:
        return slice(None)
    return np.sort(rng.choice(available, wanted, replace=False))


def learner_sizes(config: ExperimentConfig, examples: int) -> list[int]:
    """The number of examples of each learner out of `examples`, the largest first unless the file lists them."""
    partition, learners = config.partition, config.learner_count
    exponent = 1.5 if partition.exponent is None else partition.exponent
    match partition.sizes:
        case "uniform":
            return divisions.uniform_sizes(examples, learners)
        case "skewed":
            return divisions.skewed_sizes(examples, learners)
        case "power_law":
            return divisions.power_law_sizes(examples, learners, exponent)
        case "zipf":
            return divisions.zipf_sizes(examples, learners, exponent)
        case "explicit":
            return divisions.explicit_sizes(examples, partition.explicit or [])
        case "natural":
            raise DataError("the sizes of natural silos are known only once the data is loaded")


def _parts(config: ExperimentConfig, labels: NDArray[Any]) -> list[NDArray[np.int64]]:
    partition, sizes = config.partition, learner_sizes(config, len(labels))
    rng = np.random.default_rng([config.seed, _PARTITION])
    match partition.classes:
        case "iid":
            return divisions.iid(labels, sizes, rng)
        case "non_iid" | "random_classes":
            numbers, at_random = partition.classes_per_learner or 1, partition.classes == "random_classes"
            return divisions.non_iid(labels, sizes, numbers, rng, at_random)
        case "shards":
            shards = partition.classes_per_learner
            return divisions.shards(labels, sizes, shards if isinstance(shards, int) else 1, rng)
        case "class_dirichlet":
            return divisions.class_dirichlet(labels, config.learner_count, partition.alpha or 1.0, rng)
        case "dirichlet":
            return divisions.dirichlet(labels, sizes, partition.alpha or 1.0, rng)
        case "target_ranges":
            return divisions.target_ranges(labels, sizes, rng)


def _natural_assignments(config: ExperimentConfig, dataset: Dataset) -> tuple[Assignment, ...]:
    """One learner for each silo of the data, called as the silo is; the largest first."""
    parts, names = divisions.natural(dataset.silos)
    if len(names) != config.learner_count:
        raise DataError(
            f"{dataset.name} has {len(names)} silos, but [[learners]] has {config.learner_count} learners in all"
        )
    return tuple(replace(assignment, name=name) for assignment, name in zip(assign(config, parts), names, strict=True))


def assign(config: ExperimentConfig, parts: Sequence[NDArray[np.int64]]) -> tuple[Assignment, ...]:
    """Who gets which part: under `alternate` the groups take turns, the largest part first (Sec. 6)."""
    chairs = [(group, number) for group in config.learners for number in range(group.count)]
    if config.partition.assignment == "alternate":
        parts = sorted(parts, key=len, reverse=True)
        chairs.sort(key=lambda chair: chair[1])  # stable: all the first of a group, then all the second, ...
    return tuple(
        Assignment(group.learner_names[number], group, part)
        for (group, number), part in zip(chairs, parts, strict=True)
    )


def dry_assignments(config: ExperimentConfig) -> tuple[Assignment, ...]:
    """How many examples each learner holds, but not which ones, so that the data set need not be there."""
    if config.partition.sizes == "natural" or config.partition.classes == "class_dirichlet":
        return divide(config).assignments  # the sizes depend on the data
    examples = DATASETS[config.data.dataset].train
    sizes = learner_sizes(config, kept_for_training(config, min(examples, config.data.train_examples or examples)))
    ends = np.cumsum(sizes)
    return assign(config, [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)])


def partition_in_words(config: ExperimentConfig) -> str:
    partition = config.partition
    if partition.sizes == "natural":
        return "one learner for each silo of the data"
    classes = {
        "iid": "IID",
        "non_iid": f"Non-IID({partition.classes_per_learner})",
        "random_classes": f"Non-IID({partition.classes_per_learner}), classes at random",
        "shards": f"{partition.classes_per_learner} shards each",
        "dirichlet": f"Dirichlet({partition.alpha})",
        "class_dirichlet": f"Dirichlet({partition.alpha}) by class",
        "target_ranges": "ranges of the target",
    }
    return f"{partition.sizes.replace('_', ' ')} sizes, {classes[partition.classes]}"
