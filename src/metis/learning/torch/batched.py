"""Many small learners as one computation.

A step of a small network is mostly torch's own overhead, which is the same for fifty networks at once. Sums are made
in another order than one by one, so the last bits differ; they do not depend on which learners train together.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from metis.core.model import Model
from metis.core.solvers import FedProx, MomentumSGD, VanillaSGD
from metis.learning.engine import Batch, Engine, Trained
from metis.learning.learner import Learner
from metis.learning.torch.engine import TorchEngine
from metis.learning.torch.examples import ArrayExamples


def kind_of(engine: Engine, learner: Learner, steps: int) -> Hashable | None:
    """Learners of the same kind can train this many steps as one computation; None: only alone."""
    alone = (
        not (isinstance(engine, TorchEngine) and engine.trains_batched and engine.ranks is None)
        or not (type(learner.examples) is ArrayExamples and learner.examples.plain)
        or not isinstance(learner.solver, (VanillaSGD, MomentumSGD, FedProx))
        or learner.solver.keeps_memory
        or any(part is not None for part in (learner.augment, learner.ranks, learner.privacy))
        or learner.layers
        # One example is multiplied by other means, whose last bits depend on where in memory it lies.
        or any(size == 1 or not _same_anywhere(engine, size) for size in _batch_sizes(learner, steps))
    )
    return None if alone else (id(learner.examples), len(learner.indices), learner.batch_size, learner.solver, steps)


def _same_anywhere(engine: TorchEngine, examples: int) -> bool:
    """Whether a batch of this size gives the same bits at any position among those that are batched."""
    # Their matrices are stored one after the other; one not aligned to 16 bytes is multiplied by another kernel.
    layers = [layer for layer in engine.module.modules() if isinstance(layer, nn.Linear)]
    return all(
        size % (16 // layer.weight.element_size()) == 0
        for layer in layers
        for size in (examples * layer.in_features, examples * layer.out_features, layer.weight.numel())
    )


def _batch_sizes(learner: Learner, steps: int) -> set[int]:
    last = len(learner.indices) % learner.batch_size
    return {learner.batch_size, last} if last and steps >= learner.epoch_steps else {learner.batch_size}


def train_batched(
    engine: Engine, learners: Sequence[Learner], model: Model, tasks: Sequence[int], steps: int, rate: float
) -> list[Trained | None]:
    """The result of each learner of one kind, starting from the same model."""
    assert isinstance(engine, TorchEngine), "ensured by kind_of()"
    examples, solver = learners[0].examples, learners[0].solver
    orders = [learner.orders(task) for learner, task in zip(learners, tasks, strict=True)]
    if len(orders) == 1:  # by the same means as several
        orders.append(learners[0].orders(tasks[0]))

    def batches() -> Iterator[Batch]:
        for chosen in itertools.islice(zip(*orders, strict=True), steps):
            inputs, targets = examples.batch(np.concatenate(chosen))
            shape = (len(orders), len(chosen[0]))
            yield torch.unflatten(inputs, 0, shape), torch.unflatten(targets, 0, shape)

    trained = engine.train_batched(model, batches(), solver if rate == 1 else solver.with_rate(rate))
    return list(trained[: len(learners)])
