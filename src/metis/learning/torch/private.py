"""Gradients for DP-SGD: each record's is cut to a norm, then they are added up with noise.

The norms come from the inputs of the layers and the gradients of their outputs, which one backward pass gives ("ghost
clipping"); the sum comes from the same tensors, so that there is no second pass and no gradient for each record. A
network with other layers, or that uses a layer in an unusual way, is trained with explicit gradients.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from metis.errors import ConfigError
from metis.learning.private import PrivateStep
from metis.learning.torch.batches import examples_in, move, split, tensors_in
from metis.learning.torch.objective import Objective
from metis.learning.torch.optimizers import Steps
from metis.learning.torch.parallel import Ranks
from metis.learning.torch.personal import Beside
from metis.learning.torch.precision import Precision

_TINY = 1e-12
_CHECKED = 3  # records whose ghost norms are compared with explicit ones before they are trusted


class _UsedTwice(ValueError):
    """A layer has more than one place in a forward pass."""


class Use(NamedTuple):
    """What a layer did in a forward pass."""

    inputs: Tensor
    gradient: Tensor  # of its outputs, by record


class Part(NamedTuple):
    """The gradient of one parameter: its squared norm by record, and the sum over records with these factors."""

    squares: Tensor
    total: Callable[[Tensor], Tensor]


def check_private(module: nn.Module, objective: Objective) -> None:
    """Refuse what cannot be trained with a guarantee for each record."""
    for path, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) or (isinstance(layer, _InstanceNorm) and layer.track_running_stats):
            raise ConfigError(
                f"'{path}' is a {type(layer).__name__}, which mixes the records of a batch, so noise cannot protect "
                "each of them; use torch.nn.GroupNorm instead"
            )
    if not objective.usual:
        raise ConfigError("privacy needs a loss of outputs and targets; a step or a loss of the whole batch has none")


class PrivateTraining:
    """What an engine needs for records that are protected; a base class of it."""

    _module: nn.Module
    _objective: Objective
    _gradient: Tensor
    _accumulate: int
    _clip_norm: float | None
    _precision: Precision
    ranks: Ranks | None

    @functools.cached_property
    def _private(self) -> PrivateGradients:
        self.check_private()
        return PrivateGradients(self._module, self._objective, self._gradient)

    def _private_step(self, step: PrivateStep, solver_steps: Steps) -> int:
        """Make one step; returns that number."""
        self._private.fill(step)
        solver_steps.step()
        return 1

    def check_private(self) -> None:
        """Refuse a network or settings with which no record can be protected."""
        check_private(self._module, self._objective)
        for name, wrong in (
            ("accumulate", self._accumulate != 1),
            ("clip_norm", self._clip_norm is not None),
            ("precision", not self._precision.plain),
            ("--processes", self.ranks is not None),
            ("personal", isinstance(self._module, Beside)),
        ):
            if wrong:
                raise ConfigError(f"{name} cannot be combined with privacy, which has its own clip and batches")


class PrivateGradients:
    """Fills the flat gradient of a network, to which all its parameters' gradients are views."""

    def __init__(self, module: nn.Module, objective: Objective, gradient: Tensor) -> None:
        check_private(module, objective)
        self._module, self._objective, self._gradient = module, objective, gradient
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._ghost: bool | None = None  # None: not decided yet
        self._steady = False  # whether it is known that training leaves the buffers alone

    def fill(self, step: PrivateStep) -> None:
        """The noisy mean gradient of one step."""
        gradient = self._gradient.zero_()
        for part in step.parts:
            before = None if self._steady else [buffer.clone() for buffer in self._module.buffers()]
            self._add(self._objective.move(part), step.clip)
            if before is not None:
                self._check_buffers(before)
        noise = torch.from_numpy(step.chance.normal(gradient.numel())).to(gradient)
        gradient.add_(noise, alpha=step.noise * step.unit_clip).div_(step.expected)

    def _check_buffers(self, before: list[Tensor]) -> None:
        for (name, buffer), kept in zip(self._module.named_buffers(), before, strict=True):
            if not torch.equal(buffer, kept):
                raise ConfigError(
                    f"training changes the network's buffer '{name}' by the records of a batch, which noise does not "
                    "cover; use a layer without such a buffer"
                )
        self._steady = True

    def _add(self, batch: Any, clip: float) -> None:
        parts = self._parts(batch)
        squares = torch.stack([part.squares for _, part in parts]).sum(0)
        # A record with NaN or infinity in its gradient counts as a record without one.
        factors = torch.where(squares.isfinite(), (clip / (squares.sqrt() + _TINY)).clamp(max=1.0), 0.0)
        for parameter, part in parts:
            assert parameter.grad is not None, "a view of the flat gradient"
            parameter.grad.add_(part.total(factors))

    def norms(self, batch: Any) -> Tensor:
        """Of each record's gradient, as they are before they are cut."""
        parts = self._parts(self._objective.move(batch))
        return torch.stack([part.squares for _, part in parts]).sum(0).sqrt()

    def _parts(self, batch: Any) -> list[tuple[Tensor, Part]]:
        if self._ghost is None:
            self._ghost = self._ghost_is_right(batch)
        if self._ghost:
            try:
                return self._ghost_parts(batch)
            except _UsedTwice:  # for the first time
                self._ghost = False
        return self._explicit_parts(batch)

    # --- ghost clipping -------------------------------------------------------------------------

    def _ghost_is_right(self, batch: Any) -> bool:
        """Whether every parameter belongs to a layer with a rule, and the norms are those of explicit gradients."""
        ruled = {id(p) for layer in self._ruled() for p in layer.parameters(recurse=False) if p.requires_grad}
        if ruled != {id(parameter) for parameter in self._parameters}:
            return False
        few = _records(batch, slice(0, _CHECKED))
        training = self._module.training
        self._module.eval()  # without dropout, so that two passes are alike
        try:
            ghost = torch.stack([part.squares for _, part in self._ghost_parts(few)]).sum(0)
            explicit = torch.stack([part.squares for _, part in self._one_by_one(few)]).sum(0)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False
        finally:
            self._module.train(training)
        return torch.allclose(ghost.double(), explicit.double(), rtol=1e-2, atol=1e-8, equal_nan=True)

    def _ruled(self) -> list[nn.Module]:
        return [
            layer
            for layer in self._module.modules()
            if type(layer) in _RULES
            and _usual(layer)
            and any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
        ]

    def _ghost_parts(self, batch: Any) -> list[tuple[Tensor, Part]]:
        used: list[tuple[nn.Module, Tensor, Tensor]] = []
        overwritten = any(getattr(layer, "inplace", False) for layer in self._module.modules())

        def note(layer: nn.Module, inputs: tuple[Any, ...], outputs: Tensor) -> Tensor | None:
            used.append((layer, inputs[0].detach(), outputs))
            return outputs.clone() if overwritten else None

        with contextlib.ExitStack() as stack:
            for layer in self._ruled():
                stack.callback(layer.register_forward_hook(note).remove)
            losses = self._objective.losses(self._module, batch)
        if len({id(layer) for layer, _, _ in used}) != len(used):
            raise _UsedTwice("its gradients would have to be added up by record")
        outputs = [outputs for _, _, outputs in used]
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(losses.sum(), outputs, allow_unused=True)
        with torch.no_grad():
            return [
                found
                for (layer, inputs, _), gradient in zip(used, gradients, strict=True)
                if gradient is not None
                for found in _RULES[type(layer)](layer, Use(inputs, gradient))
                if found[0].requires_grad
            ]

    # --- explicit gradients ---------------------------------------------------------------------

    def _explicit_parts(self, batch: Any) -> list[tuple[Tensor, Part]]:
        try:
            return self._vectorised(batch)
        except (RuntimeError, ValueError, TypeError, AttributeError):  # torch.func does not know all operations
            return self._one_by_one(batch)

    def _vectorised(self, batch: Any) -> list[tuple[Tensor, Part]]:
        whole = _Losses(self._module, self._objective)
        own = {name: p.detach() for name, p in whole.named_parameters() if p.requires_grad}

        def loss(parameters: dict[str, Tensor], *tensors: Tensor) -> Tensor:
            alone = iter(tensors)
            record = move(batch, lambda _: next(alone).unsqueeze(0), tensors[0].device)
            found: Tensor = torch.func.functional_call(whole, parameters, (record,))
            return found.sum()

        tensors = list(tensors_in(batch))
        each = torch.func.vmap(
            torch.func.grad(loss), in_dims=(None, *[0] * len(tensors)), randomness="different"
        )(own, *tensors)  # fmt: skip
        parameters = dict(whole.named_parameters())
        return [(parameters[name], _explicit(gradients)) for name, gradients in each.items()]

    def _one_by_one(self, batch: Any) -> list[tuple[Tensor, Part]]:
        rows: list[tuple[Tensor | None, ...]] = []
        for record in range(examples_in(batch, split(batch)[1])):
            losses = self._objective.losses(self._module, _records(batch, slice(record, record + 1)))
            rows.append(torch.autograd.grad(losses.sum(), self._parameters, allow_unused=True))
        return [
            (
                parameter,
                _explicit(torch.stack([torch.zeros_like(parameter) if row is None else row for row in column])),
            )
            for parameter, column in zip(self._parameters, zip(*rows, strict=True), strict=True)
        ]


class _Losses(nn.Module):
    """The loss of each record as a module, whose parameters torch.func can replace."""

    def __init__(self, network: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.network, self._objective = network, objective

    def forward(self, batch: Any) -> Tensor:
        return self._objective.losses(self.network, batch)


def _records(batch: Any, which: slice) -> Any:
    return move(batch, lambda tensor: tensor[which], next(tensors_in(batch)).device)


def _explicit(gradients: Tensor) -> Part:
    """From the gradient of each record."""
    flat = gradients.detach().flatten(1)

    def total(factors: Tensor) -> Tensor:
        return _weighted(factors, flat).view(gradients.shape[1:])

    return Part(_squares(flat), total)


def _squares(each: Tensor) -> Tensor:
    """Squared norm of each row."""
    norms: Tensor = torch.linalg.vector_norm(each.flatten(1), dim=1)
    return norms.square()


def _weighted(factors: Tensor, rows: Tensor) -> Tensor:
    """The sum of the rows times their factors; a row with factor 0 may hold NaN."""
    kept = factors != 0
    return factors @ rows if bool(kept.all()) else factors[kept] @ rows[kept]


# --- layers -------------------------------------------------------------------------------------

Found = Iterator[tuple[Tensor, Part]]


def _matrix(use: Use, shape: torch.Size) -> Part:
    """Of a matrix by which positions are multiplied: inputs [records, groups, positions, n], gradient [.., m]."""
    inputs, gradient = use
    positions, n, m = inputs.shape[2], inputs.shape[3], gradient.shape[3]

    def total(factors: Tensor) -> Tensor:
        kept = factors != 0
        ours, theirs, by = (inputs, gradient, factors) if bool(kept.all()) else (t[kept] for t in (*use, factors))
        scaled = theirs * by[:, None, None, None]
        if ours.shape[1] == 1:  # one product for all records and positions
            return (scaled.reshape(-1, m).T @ ours.reshape(-1, n)).view(shape)
        return torch.einsum("rgpm,rgpn->gmn", scaled, ours).reshape(shape)

    if positions == 1 and inputs.shape[1] == 1:
        return Part(_squares(inputs) * _squares(gradient), total)
    if 2 * positions * positions <= n * m:  # the products of positions are smaller than the gradients of the records
        alike = inputs @ inputs.transpose(2, 3)
        return Part((alike * (gradient @ gradient.transpose(2, 3))).sum((1, 2, 3)), total)
    each = gradient.transpose(2, 3) @ inputs

    def total_of_each(factors: Tensor) -> Tensor:
        return _weighted(factors, each.flatten(1)).view(shape)

    return Part(_squares(each), total_of_each)


def _rows(each: Tensor) -> Part:
    """From the gradient of each record of a small parameter."""
    return Part(_squares(each), lambda factors: _weighted(factors, each.flatten(1)).view(each.shape[1:]))


def _linear(layer: nn.Linear, use: Use) -> Found:
    inputs, gradient = (tensor.reshape(len(tensor), 1, -1, tensor.shape[-1]) for tensor in use)
    yield layer.weight, _matrix(Use(inputs, gradient), layer.weight.shape)
    if layer.bias is not None:
        yield layer.bias, _rows(gradient.sum((1, 2)))


def _convolution(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, use: Use) -> Found:
    groups, axes, sizes = layer.groups, len(layer.kernel_size), layer.kernel_size
    # Channels last: then the numbers under a row of the kernel lie side by side, and are copied in one go.
    patches, gradient = (tensor.movedim(1, -1) for tensor in use)
    if isinstance(layer.padding, str):
        total = [way * (size - 1) for way, size in zip(layer.dilation, sizes, strict=True)]
        sides = [(0, 0) if layer.padding == "valid" else (both // 2, both - both // 2) for both in total]
    else:
        sides = [(side, side) for side in layer.padding]
    if any(any(pair) for pair in sides):
        patches = F.pad(patches, [0, 0, *(side for pair in reversed(sides) for side in pair)])
    for axis, (size, stride, way) in enumerate(zip(sizes, layer.stride, layer.dilation, strict=True), start=1):
        patches = patches.unfold(axis, way * (size - 1) + 1, stride)[..., ::way]
    # [records, *positions, channels, *kernel] becomes [records, groups, positions, kernel and the group's channels]
    patches = patches.movedim(1 + axes, -1).reshape(len(gradient), -1, math.prod(sizes), groups, layer.weight.shape[1])
    patches = patches.permute(0, 3, 1, 2, 4).flatten(3)
    gradient = gradient.reshape(len(gradient), -1, groups, layer.out_channels // groups).transpose(1, 2)
    part = _matrix(Use(patches, gradient), torch.Size([layer.out_channels, *sizes, layer.weight.shape[1]]))
    yield layer.weight, Part(part.squares, lambda factors: part.total(factors).movedim(-1, 1))
    if layer.bias is not None:
        yield layer.bias, _rows(gradient.sum(2).flatten(1))


def _embedding(layer: nn.Embedding, use: Use) -> Found:
    words = use.inputs.reshape(len(use.inputs), -1)
    gradient = use.gradient.reshape(*words.shape, -1)
    if layer.padding_idx is not None:
        gradient = gradient * (words != layer.padding_idx)[..., None]
    alike = words[:, :, None] == words[:, None, :]

    def total(factors: Tensor) -> Tensor:
        kept = factors != 0
        scaled = gradient[kept] * factors[kept, None, None]
        return torch.zeros_like(layer.weight).index_add_(0, words[kept].flatten(), scaled.flatten(0, 1))

    yield layer.weight, Part((alike * (gradient @ gradient.transpose(1, 2))).sum((1, 2)), total)


def _norm(layer: nn.LayerNorm | nn.GroupNorm, use: Use) -> Found:
    if isinstance(layer, nn.LayerNorm):
        shape = layer.normalized_shape
        normal = F.layer_norm(use.inputs, shape, None, None, layer.eps)
        other = tuple(range(1, use.inputs.ndim - len(shape)))
    else:
        normal = F.group_norm(use.inputs, layer.num_groups, None, None, layer.eps)
        other = tuple(range(2, use.inputs.ndim))
    for parameter, each in ((layer.weight, use.gradient * normal), (layer.bias, use.gradient)):
        if parameter is not None:
            yield parameter, _rows(each.sum(other) if other else each)


_RULES: dict[type[nn.Module], Callable[[Any, Use], Found]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.Embedding: _embedding,
    nn.LayerNorm: _norm,
    nn.GroupNorm: _norm,
}


def _usual(layer: nn.Module) -> bool:
    """Whether the rule of its class holds for this layer."""
    if isinstance(layer, nn.Embedding):
        return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
    return getattr(layer, "padding_mode", "zeros") == "zeros"
