"""What a learner needs from a tensor library, and what it gets back."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from metis.core.layers import Memory
from metis.core.model import Layout, Model
from metis.core.solvers import Solver

Batch: TypeAlias = Any  # what the engine trains on: for PyTorch a pair of tensors, inputs and targets


class Examples(Protocol):
    """Data that can hand out any of its examples as one batch."""

    def __len__(self) -> int:
        """How many examples there are."""

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        """The examples of these indices, in this order."""


@dataclass(frozen=True)
class Trained:
    """A local model and what it took to train it."""

    model: Model
    steps: int
    loss: float  # mean over all examples trained on, each measured before its step
    memory: Memory = field(default_factory=dict)
    batch_times: Sequence[float] = ()  # seconds, if a clock was there
    payload: bytes = b""  # what travels, if it is not the model itself
    notes: Mapping[str, float] = field(default_factory=dict)  # of the policy's layers; information only

    @property
    def seconds(self) -> float:
        """Time spent on all batches; 0 if no clock was there."""
        return math.fsum(self.batch_times)

    @property
    def time_per_batch(self) -> float:
        """Median seconds of a batch without the first, which warms up; NaN if no clock was there."""
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


def trainable_of(engine: Engine) -> int:
    """How many numbers at the front of a model's vector a solver changes: what the engine says, else all parameters."""
    parameters = sum(spec.size for spec in engine.layout.tensors if spec.role == "parameter")
    return int(getattr(engine, "trainable", parameters))
