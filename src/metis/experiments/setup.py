"""What is trained on what by whom: network, examples and assignments, before anybody trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from metis.errors import ConfigError
from metis.experiments.config.load import ExperimentConfig, Operation, network_parameters, task_of
from metis.experiments.config.schema import NetworkConfig, PersonalConfig
from metis.experiments.data import Assignment, Division, divide, partition_in_words

if TYPE_CHECKING:
    from metis.learning import Augmentation, Engine, Examples, Transform
    from metis.learning.engine import EngineKind


@dataclass(frozen=True)
class TrainingSetup:
    """What is trained on what by whom."""

    task: Literal["classification", "regression"]
    train: Examples
    test: Examples | None
    assignments: Sequence[Assignment]
    metric: str | None
    validation: Examples | None = None  # by which the best model is chosen
    network: Callable[[], Any] | None = None  # of a site; else one of the engine's by name
    network_name: str = ""
    network_options: Mapping[str, Any] = field(default_factory=dict)
    input_shape: tuple[int, ...] = ()
    outputs: int = 0
    higher_is_better: bool | None = None
    loss: Any = None  # None: that of the task
    metrics: Mapping[str, Any] | None = None
    step: Callable[[Any, Any], Any] | None = None
    augment: Augmentation | None = None
    engine_kind: EngineKind | None = None  # of a site that brings it; else by name
    class_counts: NDArray[np.int64] | None = None
    class_names: Sequence[str] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    def engine(self, config: ExperimentConfig, device: str | None = None) -> Engine:
        """What trains the network, on this device if one is given."""
        from metis.learning.engine import ENGINES, EngineJob, measured

        training, evaluation = config.training, config.evaluation

        job = EngineJob(
            self.task,
            self.network,
            self.network_name,
            self.network_options,
            self.input_shape,
            self.outputs,
            self.loss,
            measured(self.task, self.metric, *evaluation.metrics)
            if self.metrics is None
            else {**self.metrics, **{name: name for name in evaluation.metrics}},
            device or training.device,
            training.dtype,
            training.threads,
            training.buffers,
            training.clip_norm,
            training.accumulate,
            self.step,
            training.precision,
            None if training.parameters is None else training.parameters.to_patterns(),
            None if training.personal is None else _personal_model(training.personal),
        )
        return (self.engine_kind or ENGINES.named(training.engine))(job)


def _personal_model(table: PersonalConfig) -> Any:
    from metis.learning.engine import PERSONAL_MODELS

    return PERSONAL_MODELS.named(table.name)(**table.parameters)


def network_options(config: ExperimentConfig, source: str, overridden: Sequence[str] = ()) -> dict[str, Any]:
    """The options of the network that the file names, checked; `overridden` are the keys that came by --set."""
    from metis.learning.engine import ENGINES, networks_of

    networks = networks_of(ENGINES.named(config.training.engine))
    if networks is not None:
        return network_parameters(config, networks, source, overridden)
    if config.network != NetworkConfig():
        where = f"{source}: network" if source else "network"
        raise ConfigError(f"{where}: is given, but engine = '{config.training.engine}' has no networks to choose from")
    return {}


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
    from metis.learning import ArrayExamples

    options = network_options(config, source, overridden)
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
    held = division.validation
    validation = None if held is None else ArrayExamples(held[0], targets(held[1]), transform=transform, **kind)
    outputs = 1 if regression else dataset.classes
    return TrainingSetup(
        network_name=config.network.name,
        network_options=options,
        input_shape=test.input_shape,
        outputs=outputs,
        task=task_of(config),
        train=train,
        test=test,
        validation=validation,
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
            **({} if validation is None else {"validation_examples": len(validation)}),
            "partition": partition_in_words(config),
            "network": config.network.name,
        },
    )


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
            case "random_contrast":
                training.append(augmentation.random_contrast(**options))
            case "standardize":
                training.append(augmentation.standardize())
                evaluation.append(augmentation.standardize())
    return augmentation.compose(*training), augmentation.compose(*evaluation) if evaluation else None


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
