"""What is minimised: the loss of a batch, from the network's outputs or by the user's own step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metis.errors import ConfigError
from metis.learning.engine import Batch
from metis.learning.torch.batches import TARGETS, call, move, scalar_loss, split, takes_batch
from metis.learning.torch.personal import Beside

Loss: TypeAlias = Callable[[Any, Any], Tensor]  # of outputs and targets, or the batch; a mean over the batch
TrainingStep: TypeAlias = Callable[[nn.Module, Any], Any]  # of network and batch: the loss, perhaps outputs and targets
Task = Literal["classification", "regression"]

LOSSES: dict[Task, Loss] = {"classification": F.cross_entropy, "regression": F.mse_loss}

_NO_TARGETS = (
    "a batch has no targets: items must be pairs (input, target) or have one of the names "
    f"{', '.join(TARGETS)}; else give loss(outputs, batch) or step(module, batch)"
)
_NO_OUTPUTS = (
    "step(module, batch) returned a loss only, but metrics need outputs and targets: return (loss, outputs, targets), "
    "or give metrics={}"
)


def _check_function(name: str, given: Any, takes: str) -> None:
    if isinstance(given, type):
        raise ConfigError(f"{name} is the class {given.__name__}; give an object of it: {given.__name__}()")
    if given is not None and not callable(given):
        raise ConfigError(f"{name} is {given!r}; it must be a function of {takes}")


class Objective:
    """The loss of a task, a loss of the user's, or a step of the user's."""

    def __init__(
        self,
        task: Task,
        loss: Loss | None,
        step: TrainingStep | None,
        device: torch.device,
        dtype: torch.dtype,
        channels_last: bool,
    ) -> None:
        _check_function("loss", loss, "(outputs, targets) or (outputs, batch)")
        _check_function("step", step, "(module, batch)")
        self._regression = task == "regression"
        self._loss, self._step = loss or LOSSES[task], step
        self._of_batch = takes_batch(self._loss)
        self._device, self._dtype, self._channels_last = device, dtype, channels_last

    @property
    def usual(self) -> bool:
        """Whether the loss is a function of the network's outputs and the targets."""
        return self._step is None and not self._of_batch

    @property
    def without_targets(self) -> str:
        """Why there is nothing to compare outputs with."""
        return _NO_TARGETS if self._step is None else _NO_OUTPUTS

    def move(self, batch: Batch) -> Batch:
        """The batch where the network is, floating-point numbers as the network has them."""
        return move(batch, self._convert, self._device)

    def _convert(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.to(self._device)
        memory_format = torch.preserve_format
        if tensor.ndim == 4:
            memory_format = torch.channels_last if self._channels_last else torch.contiguous_format
        return tensor.to(self._device, self._dtype, memory_format=memory_format)

    def measure(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Any, Any]:
        """The loss of a batch, outputs and targets; the last two are None if the user's own step hides them."""
        if isinstance(module, Beside):
            return module.measure(lambda part: self._measure(part, batch))
        return self._measure(module, batch)

    def _measure(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Any, Any]:
        if self._step is not None:
            result = self._step(module, batch)
            loss, outputs, targets = result if isinstance(result, tuple) and len(result) == 3 else (result, None, None)
            return scalar_loss(loss, "step"), outputs, targets
        inputs, targets = split(batch)
        if targets is None and not self._of_batch:
            raise ConfigError(_NO_TARGETS)
        outputs, targets = self._fitted(call(module, inputs), targets)
        return scalar_loss(self._loss(outputs, batch if self._of_batch else targets), "loss"), outputs, targets

    def losses(self, module: nn.Module, batch: Batch) -> Tensor:
        """The loss of each example as if it were a batch, where the loss is usual."""
        inputs, targets = split(batch)
        if targets is None:
            raise ConfigError(_NO_TARGETS)
        outputs, targets = self._fitted(call(module, inputs), targets)
        if self._loss is F.cross_entropy and outputs.ndim == 2 and not targets.is_floating_point():
            return F.cross_entropy(outputs, targets, reduction="none")

        def alone(output: Tensor, target: Tensor) -> Tensor:
            return scalar_loss(self._loss(output.unsqueeze(0), target.unsqueeze(0)), "loss")

        losses: Tensor = torch.func.vmap(alone)(outputs, targets)
        return losses

    def gradients_of_many(self, module: nn.Module) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Of the loss by the weights, and the loss, of each row of weights on its own inputs and targets."""
        shapes = {name: p.shape for name, p in module.named_parameters()}

        def loss(weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
            pieces = torch.split(weights, [shape.numel() for shape in shapes.values()])
            own = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
            outputs = torch.func.functional_call(module, own, (inputs,))
            return self._loss(*self._fitted(outputs, targets))

        gradients: Callable[..., tuple[Tensor, Tensor]] = torch.func.vmap(torch.func.grad_and_value(loss))
        return gradients

    def _fitted(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """For a regression, both of one shape and dtype; torch would broadcast unequal ones."""
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            return outputs, targets
        if self._loss is F.cross_entropy or isinstance(self._loss, nn.CrossEntropyLoss):
            _check_classes(outputs, targets)
        if not self._regression:
            return outputs, targets
        targets = targets.to(self._dtype)
        if outputs.shape == targets.shape:
            return outputs, targets
        if outputs.shape == (*targets.shape, 1):
            return outputs.squeeze(-1), targets
        raise ConfigError(
            f"the network's outputs have shape {tuple(outputs.shape)}, the targets {tuple(targets.shape)}; "
            "a regression needs one output for each target"
        )


def _check_classes(outputs: Tensor, targets: Tensor) -> None:
    """Refuse a network of one output: its cross-entropy is always 0, so it would train without learning anything."""
    if outputs.ndim > 1 and outputs.shape[1] != 1:
        return
    if targets.is_floating_point():
        raise ConfigError(
            'the network has one output and the targets are floating-point numbers: write task = "regression", '
            "or give a loss such as nn.BCEWithLogitsLoss()"
        )
    raise ConfigError(
        "the network has one output, whose cross-entropy is always 0: give it one for each class, "
        "or give a loss such as nn.BCEWithLogitsLoss()"
    )
