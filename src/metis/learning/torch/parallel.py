"""Several processes of one silo that train as one.

The batch is the configured one: its examples are divided over the processes in order, in parts that differ by at most
one example; the gradient is the mean over all of them, so that steps, learning rate and result mean what they mean in
one process. Every process holds all weights, makes the same step and so ends with the same bits. Only what a network
draws for itself, as dropout does, is drawn separately in each process.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from metis.learning.engine import Examples
from metis.learning.torch.augmentation import Augmentation

_LONGEST_BATCH = datetime.timedelta(minutes=30)  # for the slowest batch; a process that died is noticed at once


class Part(NamedTuple):
    """The examples of one batch that are this process's; one to keep in step with the others if there is none."""

    batch: Any
    whole: int  # examples of the batch
    weight: float  # share of the batch; 0 for an example that only keeps step


class Ranks:
    """This process among those that train as one; rank 0 decides for all."""

    def __init__(self, rank: int, size: int, meeting_point: str) -> None:
        """Wait for the others at a file that they all know; nothing but this machine is involved."""
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = dist.FileStore(meeting_point, size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_LONGEST_BATCH)
        self.rank, self.size = rank, size

    def indices(self, examples: int) -> slice:
        """Which examples of a batch are this process's; its first one if there are fewer examples than processes."""
        start, end = examples * self.rank // self.size, examples * (self.rank + 1) // self.size
        return slice(start, end) if end > start else slice(0, 1)

    def weight(self, examples: int) -> float:
        """The share of a batch that is this process's."""
        return (examples * (self.rank + 1) // self.size - examples * self.rank // self.size) / examples

    def part(
        self, examples: Examples, chosen: NDArray[np.int64], augment: Augmentation | None, generator: torch.Generator
    ) -> Part:
        """What this process trains on, augmented as one process would do it: there it is drawn batch by batch."""
        own, whole = self.indices(len(chosen)), len(chosen)
        if augment is None:
            batch = examples.batch(chosen[own])
        else:
            inputs, targets = examples.batch(chosen)
            batch = augment(inputs, generator)[own], targets[own]
        return Part(batch, whole, self.weight(whole))

    def decide(self, verdict: int) -> int:
        """The verdict of rank 0; those of the others do not matter."""
        decided = torch.tensor([verdict])
        dist.broadcast(decided, 0)
        return int(decided)

    def add_up(self, tensor: Tensor) -> None:
        """Replace the tensor by the sum over all processes: the same bits in each."""
        dist.all_reduce(tensor)

    def mean(self, value: float, weight: float) -> float:
        """The weighted mean over all processes."""
        total = torch.tensor([value * weight if weight else 0.0], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)

    @contextlib.contextmanager
    def normalising(self, layers: Iterable[_BatchNorm], batch: list[float]) -> Iterator[None]:
        """While active, these layers see the whole batch; `batch` holds the weight of the current part."""
        layers = list(layers)
        for layer in layers:
            layer.forward = functools.partial(_normalise, layer, batch)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward


class _AddUp(torch.autograd.Function):
    """The sum over all processes; whatever depends on it anywhere reaches the gradient of each summand."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def _normalise(layer: _BatchNorm, batch: list[float], inputs: Tensor) -> Tensor:
    """`layer(inputs)` with mean and variance of the batch of all processes together."""
    if not layer.training:
        return type(layer).forward(layer, inputs)
    layer._check_input_dim(inputs)  # type: ignore[no-untyped-call]
    numbers = inputs if inputs.dtype == torch.float64 else inputs.float()
    axes = [axis for axis in range(inputs.ndim) if axis != 1]
    shape = [1, -1] + [1] * (inputs.ndim - 2)
    present = 1.0 if batch[0] else 0.0
    count = numbers.new_tensor([present * inputs.numel() / inputs.shape[1]])
    sums: Tensor = _AddUp.apply(torch.cat([present * numbers.sum(axes), count]))  # type: ignore[no-untyped-call]
    number = sums[-1].detach()
    mean = sums[:-1] / number
    # The squares after the mean is known, as torch does it: their difference would lose what is small in them.
    centred = numbers - mean.view(shape)
    squares: Tensor = _AddUp.apply(present * centred.square().sum(axes))  # type: ignore[no-untyped-call]
    _remember(layer, mean.detach(), (squares / (number - 1)).detach())
    result = centred * torch.rsqrt(squares / number + layer.eps).view(shape)
    if layer.affine:
        result = result * layer.weight.view(shape) + layer.bias.view(shape)
    return result.to(inputs.dtype)


def _remember(layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """What torch's own layer does with the statistics of a batch."""
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    share = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.mul_(1 - share).add_(mean, alpha=share)
    layer.running_var.mul_(1 - share).add_(variance, alpha=share)
