"""From names to things: the only place where a name in a file becomes a function or a class.

`divide` needs no torch and serves `metis data show`; the rest makes what a run needs.
"""

from __future__ import annotations

import csv
import functools
import importlib.metadata
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from metis import __version__
from metis.core.costs import Power
from metis.core.policy import Policy
from metis.core.stop import StopRule, Target
from metis.data import partition as divisions
from metis.data.datasets import DATASETS, Dataset, load_dataset
from metis.errors import ConfigError, DataError
from metis.experiments.compose import build_policy, build_solver
from metis.experiments.config.load import (
    METRICS,
    ExperimentConfig,
    LearnerGroup,
    Operation,
    TrainingConfig,
    did_you_mean,
    network_parameters,
    task_of,
)
from metis.simulation.availability import Always, Availability, RandomAvailability, RecordedAvailability
from metis.simulation.link import Link
from metis.simulation.speed import Speed

if TYPE_CHECKING:
    from metis.core.solvers import Solver
    from metis.experiments.federation import Federation
    from metis.learning import Augmentation, Examples, TorchEngine, Transform

# Streams of chance, so that asking for fewer examples does not change how the rest is divided.
_SUBSET, _PARTITION = 11, 12

MEGABIT = 1_000_000 / 8  # bytes


@dataclass(frozen=True)
class Assignment:
    """One learner: its name, its group and the examples that it holds."""

    name: str
    group: LearnerGroup
    indices: NDArray[np.int64]


@dataclass(frozen=True)
class Division:
    """A data set and who holds which of its training examples."""

    dataset: Dataset
    assignments: tuple[Assignment, ...]

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
        place = np.clip(np.searchsorted(edges, targets, side="right") - 1, 0, len(edges) - 2)
        rows = [np.bincount(place[assignment.indices], minlength=len(edges) - 1) for assignment in self.assignments]
        return np.stack(rows).astype(np.int64), edges


# --- data -------------------------------------------------------------------------------------


def divide(config: ExperimentConfig, *, progress: bool = False) -> Division:
    """Load the data set and divide it; an impossible partition is a DataError."""
    if config.site is not None:
        raise ConfigError(f"each site brings its own data in {config.site.file}; there is no data set to divide")
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
    try:
        if config.partition.sizes == "natural":
            assignments = _natural_assignments(config, dataset)
        else:
            assignments = assign(config, _parts(config, dataset.y_train))
    except DataError as problem:
        raise DataError(f"partition: {problem}") from None
    check_traces(assignments)
    return Division(dataset, assignments)


def _subset(there_are: int, wanted: int | None, rng: np.random.Generator) -> NDArray[np.int64] | slice:
    """Which examples to use; all of them without a copy."""
    if wanted is None or wanted >= there_are:
        return slice(None)
    return np.sort(rng.choice(there_are, wanted, replace=False))


def learner_sizes(config: ExperimentConfig, examples: int) -> list[int]:
    """How many of so many examples each share has, the largest first unless the file lists them."""
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
        case "non_iid":
            return divisions.non_iid(labels, sizes, partition.classes_per_learner or 1, rng)
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
    if config.partition.sizes == "natural":
        return divide(config).assignments
    examples = DATASETS[config.data.dataset].train
    sizes = learner_sizes(config, min(examples, config.data.train_examples or examples))
    ends = np.cumsum(sizes)
    return assign(config, [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)])


def _channel_statistics(images: NDArray[Any]) -> tuple[Any, Any]:
    """Mean and standard deviation of each channel, exact, without a float copy of all images."""
    if images.dtype != np.uint8:
        inputs = images.astype(np.float64)
        deviation = inputs.std(axis=0)
        return inputs.mean(axis=0).tolist(), np.where(deviation > 0, deviation, 1.0).tolist()
    channels = images.reshape(-1, images.shape[-1]) if images.ndim == 4 else images.reshape(-1, 1)
    values = np.arange(256)
    means, deviations = [], []
    for channel in range(channels.shape[1]):
        frequency = np.bincount(channels[:, channel], minlength=256) / len(channels)
        mean = float(frequency @ values)
        means.append(mean)
        deviations.append(math.sqrt(float(frequency @ (values - mean) ** 2)) or 1.0)
    return means, deviations


# --- learners ---------------------------------------------------------------------------------


def build_speed(group: LearnerGroup, learner: str) -> Speed:
    """How fast a learner of this group is."""
    if group.speed_trace is None:
        assert group.time_per_batch is not None, "the configuration was checked"
        profile = tuple((at, factor) for at, factor in group.drift)
        return Speed(group.time_per_batch, group.jitter, profile)
    rows = _read_trace(Path(group.speed_trace), ("at", "time_per_batch"), learner)
    if not rows:
        raise ConfigError(f"{group.speed_trace}: there is no row for learner '{learner}'")
    first = rows[0][1]
    for at, seconds in rows:
        if not 0 < seconds < math.inf:
            raise ConfigError(
                f"{group.speed_trace}: time_per_batch is {seconds:g} from second {at:g} on, must be greater than 0"
            )
    try:
        return Speed(first, group.jitter, tuple((at, seconds / first) for at, seconds in rows))
    except ValueError as problem:
        raise ConfigError(f"{group.speed_trace}: {problem}") from None


def build_availability(group: LearnerGroup, learner: str) -> Availability:
    """When a learner of this group is there."""
    settings = group.availability
    if settings.kind == "random":
        assert settings.mean_present is not None and settings.mean_away is not None
        return RandomAvailability(settings.mean_present, settings.mean_away)
    if settings.kind == "trace":
        assert settings.file is not None
        try:
            return RecordedAvailability(tuple(_read_trace(Path(settings.file), ("leaves", "back"), learner)))
        except ValueError as problem:
            raise ConfigError(f"{settings.file}: {problem}") from None
    return Always()


def build_link(group: LearnerGroup) -> Link:
    """How far a learner of this group is from the controller."""
    up, down = group.network.upload_mbps, group.network.download_mbps
    return Link(
        group.network.latency,
        math.inf if up is None else up * MEGABIT,
        math.inf if down is None else down * MEGABIT,
    )


def build_power(group: LearnerGroup) -> Power:
    """What the machines of this group draw."""
    if group.watts is not None:
        return Power(group.watts, group.idle_watts, "watt")
    return Power(1.0 if group.epsilon is None else group.epsilon, group.idle_epsilon, "epsilon")


def check_traces(assignments: Sequence[Assignment]) -> None:
    """Refuse a trace with a row for a learner that does not use it; groups may share one file."""
    users: dict[str, list[str]] = {}
    for assignment in assignments:
        for file in {assignment.group.speed_trace, assignment.group.availability.file} - {None}:
            users.setdefault(str(file), []).append(assignment.name)
    for file, known in users.items():
        try:
            with Path(file).open(newline="", encoding="utf-8-sig") as stream:
                rows = list(csv.reader(stream))
        except (OSError, UnicodeDecodeError, csv.Error) as problem:
            raise ConfigError(f"{file}: cannot be read as CSV: {problem}") from None
        heading = [name.strip() for name in rows[0]] if rows else []
        if "learner" not in heading:
            continue
        column = heading.index("learner")
        for number, row in enumerate(rows[1:], start=2):
            name = row[column].strip() if len(row) > column else ""
            if row and name not in known:
                raise ConfigError(f"{file}: row {number}: there is no learner '{name}'; {did_you_mean(name, known)}")


def _read_trace(path: Path, columns: tuple[str, str], learner: str) -> list[tuple[float, float]]:
    """Two columns of a CSV file; where it has a column `learner`, only that learner's rows."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = names
            if not set(columns) <= set(names):
                raise ConfigError(f"{path}: the first line is '{','.join(names)}', must name {' and '.join(columns)}")
            rows = []
            for row in reader:
                if "learner" in names and (row["learner"] or "").strip() != learner:
                    continue
                try:
                    rows.append((float(row[columns[0]]), float(row[columns[1]])))
                except (TypeError, ValueError):
                    raise ConfigError(
                        f"{path}: line {reader.line_num}: {' and '.join(columns)} must be numbers"
                    ) from None
            return rows
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise ConfigError(f"{path}: cannot be read as CSV: {problem}") from None


# --- training ---------------------------------------------------------------------------------


def build_augmentation(
    operations: Sequence[Operation], image_shape: Sequence[int]
) -> tuple[Augmentation | None, Transform | None]:
    """What training does to its images, and what an evaluation does to see images of the same kind."""
    from metis.learning.torch import augmentation

    if not operations:
        return None, None
    training: list[Transform] = []
    evaluation: list[Transform] = []
    side = min(image_shape[0], image_shape[1]) if len(image_shape) > 1 else 0
    for operation in operations:
        options = operation.parameters
        match operation.name:
            case "random_crop":
                training.append(augmentation.random_crop(**options))
                if options["size"] != side:
                    evaluation.append(augmentation.centre_crop(options["size"]))
                side = options["size"]
            case "horizontal_flip":
                training.append(augmentation.horizontal_flip(**options))
            case "standardize":
                training.append(augmentation.standardize())
                evaluation.append(augmentation.standardize())
    return augmentation.compose(*training), augmentation.compose(*evaluation) if evaluation else None


def build_policies(config: ExperimentConfig) -> list[tuple[Policy, Solver]]:
    """Every policy of the file with its own solver."""
    return [(build_policy(policy), build_solver(policy.training)) for policy in config.policy]


def build_stop(config: ExperimentConfig) -> StopRule:
    """When the run ends."""
    stop, evaluation = config.stop, config.evaluation
    target = None
    if stop.at_target and evaluation.target is not None and evaluation.metric is not None:
        higher = evaluation.higher_is_better
        if higher is None:
            higher = METRICS[task_of(config)].get(evaluation.metric, True)
        target = Target(evaluation.metric, evaluation.target, higher)
    return StopRule(stop.rounds, stop.seconds, stop.update_requests, target, stop.steps)


@dataclass(frozen=True)
class TrainingSetup:
    """What is trained on what by whom, before anybody trains."""

    network: Callable[[], Any]
    task: Literal["classification", "regression"]
    train: Examples
    test: Examples | None
    assignments: Sequence[Assignment]
    metric: str | None
    higher_is_better: bool | None = None
    loss: Any = None  # None: as the task has it
    metrics: Mapping[str, Any] | None = None
    augment: Augmentation | None = None
    class_counts: NDArray[np.int64] | None = None
    class_names: Sequence[str] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    def engine(self, training: TrainingConfig, device: str | None = None) -> TorchEngine:
        """What trains the network, on this device unless the experiment's is good enough."""
        from metis.learning import TorchEngine

        return TorchEngine(
            self.network,
            self.task,
            loss=self.loss,
            metrics=self.metrics,
            device=device or training.device,
            dtype=training.dtype,
            threads=training.threads,
            buffers=training.buffers,
        )


def build_training_setup(
    config: ExperimentConfig,
    *,
    source: str = "",
    division: Division | None = None,
    overridden: Sequence[str] = (),
) -> TrainingSetup:
    """The network and the data set that the file names.

    `overridden` are the keys that came by --set, which is then blamed for a fault in them.
    """
    from metis.learning import NETWORKS, ArrayExamples

    options = network_parameters(config, NETWORKS, source, overridden)
    division = divide(config) if division is None else division
    dataset = division.dataset
    kind: dict[str, Any] = {}
    if dataset.x_train.dtype == np.uint8:
        largest = float(dataset.x_train.max()) or 1.0
        kind["scale"] = 1.0 / largest
    if config.data.normalise:
        mean, deviation = _channel_statistics(dataset.x_train)
        kind |= {"scale": 1.0, "mean": mean, "std": deviation}
    augment, transform = build_augmentation(config.data.augment, dataset.x_train.shape[1:])
    regression = task_of(config) == "regression"

    def targets(y: NDArray[Any]) -> NDArray[Any]:
        return y.astype(np.float32) if regression else y

    train = ArrayExamples(dataset.x_train, targets(dataset.y_train), **kind)
    test = ArrayExamples(dataset.x_test, targets(dataset.y_test), transform=transform, **kind)
    outputs = 1 if regression else dataset.classes
    return TrainingSetup(
        network=functools.partial(NETWORKS[config.network.name], test.input_shape, outputs, **options),
        task=task_of(config),
        train=train,
        test=test,
        assignments=division.assignments,
        metric=config.evaluation.metric,
        augment=augment,
        class_counts=None if dataset.task == "regression" else division.counts,
        class_names=dataset.class_names,
        facts={
            "dataset": config.data.dataset,
            "of_the_data": dataset.note,
            "train_examples": len(dataset.y_train),
            "test_examples": len(dataset.y_test),
            "partition": _partition_in_words(config),
            "network": config.network.name,
        },
    )


def build_federation(
    config: ExperimentConfig,
    *,
    source: str = "",
    division: Division | None = None,
    solver: Solver | None = None,
    overridden: Sequence[str] = (),
) -> Federation:
    """The federation that the file describes; the solver is that of its first policy unless one is given.

    `overridden` are the keys that came by --set, which is then blamed for a fault in them.
    """
    from metis.experiments.federation import Federation, SimulatedLearner

    if config.site is None:
        setup = build_training_setup(config, source=source, division=division, overridden=overridden)
    else:
        from metis.experiments.site import load_site, rehearsal

        setup = rehearsal(config, load_site(Path(config.site.file)))
    training = config.training
    for policy in config.policy:
        wanted = policy.layers.get("sample", {}).get("learners") or 0
        if wanted > len(setup.assignments):
            raise ConfigError(
                f"{source or 'policy'}: sample.learners of {policy.name} is {wanted}, "
                f"but there are {len(setup.assignments)} learners"
            )
    learners = [
        SimulatedLearner(
            name=assignment.name,
            indices=assignment.indices,
            batch_size=assignment.group.batch_size,
            speed=build_speed(assignment.group, assignment.name),
            availability=build_availability(assignment.group, assignment.name),
            link=build_link(assignment.group),
            power=build_power(assignment.group),
        )
        for assignment in setup.assignments
    ]
    return Federation(
        network=setup.network,
        train=setup.train,
        test=setup.test,
        learners=learners,
        solver=solver if solver is not None else build_solver(config.policy[0].training),
        task=setup.task,
        metric=setup.metric,
        higher_is_better=setup.higher_is_better,
        augment=setup.augment,
        device=training.device,
        dtype=training.dtype,
        threads=training.threads,
        buffers=training.buffers,
        seed=config.seed,
        class_counts=setup.class_counts,
        class_names=setup.class_names,
        facts=_facts(config, setup),
        engine=setup.engine(training),
    )


def _partition_in_words(config: ExperimentConfig) -> str:
    partition = config.partition
    if partition.sizes == "natural":
        return "one learner for each silo of the data"
    classes = {
        "iid": "IID",
        "non_iid": f"Non-IID({partition.classes_per_learner})",
        "dirichlet": f"Dirichlet({partition.alpha})",
        "target_ranges": "ranges of the target",
    }
    return f"{partition.sizes.replace('_', ' ')} sizes, {classes[partition.classes]}"


def _facts(config: ExperimentConfig, setup: TrainingSetup) -> dict[str, Any]:
    """What a reader of a report wants to know about the setting."""
    solvers = {policy.training.solver: policy.training for policy in config.policy}
    shared = next(iter(solvers.values())).model_dump(exclude_none=True) if len(solvers) == 1 else {}
    return {
        **setup.facts,
        **shared,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of Metis and of what its results depend on, here and now."""
    return {
        "metis": __version__,
        "Python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("numpy", "torch")},
    }
