"""What a learner needs from a tensor library, and what it gets back."""

from __future__ import annotations

import functools
import importlib.util
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from metis.core.events import Budget
from metis.core.layers import Memory
from metis.core.model import Layout, Model
from metis.core.solvers import SOLVERS as SOLVERS, Solver  # noqa: PLC0414 - also from here, with those of torch
from metis.errors import ConfigError, needs_package
from metis.registry import Registry

Batch: TypeAlias = Any  # what the engine trains on: for PyTorch a pair of tensors, inputs and targets

# What somebody should know who chooses weights of 16 bits: at a rate of 0.05, a step moves 2 % of them in bfloat16.
LOSSY = (
    "weights of 16 bits (dtype) lose most steps of training; for speed use precision = 'bf16', which keeps the weights "
    "in float32"
)


class Examples(Protocol):
    """Data that can hand out any of its examples as one batch."""

    def __len__(self) -> int:
        """How many examples there are."""

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        """The examples of these indices, in this order."""


def makes_batches(source: Any) -> bool:
    """Whether these are `Examples`; a data set of Hugging Face has a method `batch` too, but gives single items."""
    return hasattr(source, "batch") and not hasattr(source, "__getitem__")


class SomeExamples:
    """Some of the examples."""

    def __init__(self, examples: Examples, indices: NDArray[np.int64]) -> None:
        self._examples, self._indices = examples, indices

    def __len__(self) -> int:
        return len(self._indices)

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        return self._examples.batch(self._indices[indices])


def batches_of(examples: Examples, orders: Iterable[NDArray[np.int64]]) -> Iterator[Batch]:
    """The batches of these indices, read ahead where the examples can."""
    stream = getattr(examples, "stream", None)
    return map(examples.batch, orders) if stream is None else stream(orders)


class Allotted:
    """Batches until a budget ends, with the budget, for an engine whose training loop asks for it and not for them."""

    def __init__(self, batches: Iterator[Batch], budget: Budget) -> None:
        self._batches, self.budget = batches, budget

    def __iter__(self) -> Iterator[Batch]:
        return self._batches


@dataclass(frozen=True)
class Trained:
    """A local model and what it took to train it."""

    model: Model
    steps: int
    loss: float  # mean over all examples trained on, each measured before its step
    memory: Memory = field(default_factory=dict)
    batch_times: Sequence[float] = ()  # seconds, if there was a clock
    evenly: bool = False  # the steps were counted when they were done, so their times are only known together
    payload: bytes = b""  # what travels, if it is not the model itself
    notes: Mapping[str, float] = field(default_factory=dict)  # of the policy's layers; information only

    @property
    def seconds(self) -> float:
        """Time spent on all batches; 0 if there was no clock."""
        return math.fsum(self.batch_times)

    @property
    def time_per_batch(self) -> float:
        """Median seconds of a batch without the first, which warms up; NaN if there was no clock."""
        times = self.batch_times[1:] or self.batch_times
        return statistics.median(times) if times else math.nan


class Engine(Protocol):
    """Trains and measures models of one network; keeps nothing between calls, so learners may share it."""

    @property
    def layout(self) -> Layout:
        """The layout of every model that comes in or goes out."""

    def initial_model(self, seed: int) -> Model:
        """The network's own initialization, the same for the same seed."""

    def train(
        self,
        community_model: Model,
        batches: Iterable[Batch],
        solver: Solver,
        memory: Memory | None = None,
        seed: int = 0,
    ) -> Trained:
        """One step a batch, starting from the community model; `seed` is for dropout and the like."""

    def evaluate(self, model: Model, examples: Examples, memory: Memory | None = None) -> dict[str, float]:
        """Loss and metrics, as means over the examples; `memory` if the network keeps local buffers."""


def seeded(engine: Engine, seed: int) -> Engine:
    """The engine with its local parts as this seed makes them, if it has any."""
    made: Engine = engine.seeded(seed) if hasattr(engine, "seeded") else engine
    return made


def trainable_of(engine: Engine) -> int:
    """How many numbers at the front of a model's vector a solver changes: as the engine declares, else all."""
    parameters = sum(spec.size for spec in engine.layout.tensors if spec.role == "parameter")
    return int(getattr(engine, "trainable", parameters))


# Metrics by name and whether more of each is better; the first of a task is measured unless others are given.
METRICS: dict[str, dict[str, bool]] = {
    "classification": {
        "accuracy": True, "loss": False, "auc": True, "f1": True, "precision": True, "recall": True,
        "balanced_accuracy": True, "dice": True,
    },
    "regression": {"mae": False, "loss": False, "mse": False, "rmse": False, "r2": True},
}  # fmt: skip
SHARES = frozenset(METRICS["classification"]) - {"loss"}  # they lie between 0 and 1


def measured(task: str, *more: str | None) -> tuple[str, ...]:
    """The metric of a task and the further ones by name; the loss is measured anyway."""
    names = dict.fromkeys((next(iter(METRICS[task])), *more))
    return tuple(name for name in names if name is not None and name != "loss")


# --- engines by name ----------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineJob:
    """What an engine is to train, as a file or a site describes it."""

    task: Literal["classification", "regression"] = "classification"
    network: Callable[[], Any] | None = None  # makes the network, where a site brings its own
    network_name: str = ""  # else a network of the engine's by name ...
    network_options: Mapping[str, Any] = field(default_factory=dict)  # ... with its options
    input_shape: tuple[int, ...] = ()  # of one example as the network sees it
    outputs: int = 0  # classes, or 1 for a regression
    loss: Any = None  # None: that of the task
    metrics: Mapping[str, Any] | Sequence[str] | None = None  # None: those of the task
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    buffers: Literal["average", "local"] = "average"
    clip_norm: float | None = None  # of the gradient of a step
    accumulate: int = 1  # batches of a step
    step: Callable[[Any, Any], Any] | None = None  # of network and batch, in place of the loss
    precision: Literal["float32", "tf32", "bf16", "fp16", "auto"] = "float32"  # of the forward pass in training
    parameters: Any = None  # which are federated, local, frozen: patterns by kind, or a function of the name
    personal: Any = None  # a model of its own for each site beside the federated one


class EngineKind(Protocol):
    """Makes engines; a class whose constructor takes an `EngineJob` is one.

    One with an attribute `networks`, a function that returns networks by name, has a choice of them in [network]; the
    first two parameters of each are the shape of an example and the number of outputs.
    """

    def __call__(self, job: EngineJob, /) -> Engine: ...


ENGINES: Registry[EngineKind] = Registry("engine", "metis.engines")


def networks_of(engine: EngineKind) -> Mapping[str, Callable[..., Any]] | None:
    """The networks that an engine offers by name; None if it offers none."""
    networks = getattr(engine, "networks", None)
    return None if networks is None else networks()


class _Torch:
    """PyTorch: any `torch.nn.Module`; imported when it is used."""

    @staticmethod
    def networks() -> Mapping[str, Callable[..., Any]]:
        from metis.learning.torch.networks import NETWORKS

        return NETWORKS

    def __call__(self, job: EngineJob) -> Engine:
        from metis.learning.torch.engine import TorchEngine

        network = job.network
        if network is None:
            made = self.networks()[job.network_name]
            network = functools.partial(made, job.input_shape, job.outputs, **job.network_options)
        return TorchEngine(
            network,
            job.task,
            loss=job.loss,
            step=job.step,
            metrics=job.metrics,
            device=job.device,
            dtype=job.dtype,
            threads=job.threads,
            buffers=job.buffers,
            clip_norm=job.clip_norm,
            accumulate=job.accumulate,
            parameters=job.parameters,
            precision=job.precision,
            personal=job.personal,
        )


ENGINES.add("torch", _Torch())


class _Jax:
    """JAX: modules of flax and plain functions; the extra `jax`."""

    extra = "jax"

    @staticmethod
    def networks() -> Mapping[str, Callable[..., Any]]:
        _needed("jax", "flax", "optax", extra="jax")
        from metis.learning.jax.networks import logistic, mlp, small_cnn

        return {"mlp": mlp, "logistic": logistic, "small_cnn": small_cnn}

    def __call__(self, job: EngineJob) -> Engine:
        _needed("jax", "flax", "optax", extra="jax")
        from metis.learning.jax.engine import JaxEngine

        return JaxEngine(job)


class _Sklearn:
    """scikit-learn: linear models and MLPs with `partial_fit` or a warm start; the extra `sklearn`."""

    extra = "sklearn"

    @staticmethod
    def networks() -> Mapping[str, Callable[..., Any]]:
        _needed("sklearn", extra="sklearn")
        from metis.learning.sklearn.engine import networks

        return networks()

    def __call__(self, job: EngineJob) -> Engine:
        _needed("sklearn", extra="sklearn")
        from metis.learning.sklearn.engine import SklearnEngine

        return SklearnEngine(job)


def _needed(*packages: str, extra: str) -> None:
    """Refuse, in one sentence, to go on without packages that an extra of Metis installs."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(needs_package(f"the engine '{extra}'", missing[0], extra))


ENGINES.add("jax", _Jax())
ENGINES.add("sklearn", _Sklearn())


def _solvers_elsewhere() -> Mapping[str, type[Solver]]:
    from metis.learning.solvers import Optax, Own
    from metis.learning.torch.optimizers import solvers_by_name

    return {"own": Own, "optax": Optax, **solvers_by_name()}


SOLVERS.elsewhere = _solvers_elsewhere


# How a model of its own is trained for each site beside the federated one.
PERSONAL_MODELS: Registry[Any] = Registry("personal model", "metis.personal")


def _torch_personal_models() -> Mapping[str, Any]:
    from metis.learning.torch.personal import BY_NAME

    return BY_NAME


PERSONAL_MODELS.elsewhere = _torch_personal_models
