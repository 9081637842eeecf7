"""A network whose parameters and buffers are views into one flat tensor: the trainable ones first, then the frozen
ones, then the floating-point buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from metis.core.layers import Memory
from metis.core.model import Layout, Model, TensorSpec
from metis.errors import ConfigError


class FlatNetwork:
    """Between the models of a federation and the tensors of a network; a base class of the engine."""

    _device: torch.device
    _dtype: torch.dtype
    _local: bool  # buffers stay in the silo

    def _lay_flat(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())  # a tied parameter comes once, under its first name
        trainable = {name: p for name, p in parameters.items() if p.requires_grad}
        frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        # Non-persistent buffers are constants that the network makes for itself.
        persistent = module.state_dict().keys()
        buffers = {name: b for name, b in module.named_buffers() if name in persistent}
        floats = {name: b for name, b in buffers.items() if b.is_floating_point()}
        counters = {name: b for name, b in buffers.items() if not b.is_floating_point()}

        flat = torch.empty(
            sum(t.numel() for t in (*parameters.values(), *floats.values())),
            dtype=self._dtype,
            device=self._device,
        )
        weights = flat[: sum(p.numel() for p in trainable.values())]
        gradient = torch.zeros_like(weights)
        homes: dict[str, Tensor] = {}
        end = 0
        for name, tensor in (trainable | frozen | floats).items():
            start, end = end, end + tensor.numel()
            homes[name] = flat[start:end].view(tensor.shape)
            homes[name].copy_(tensor.detach())
            tensor.data = homes[name]
            if name in trainable:
                tensor.grad = gradient[start:end].view(tensor.shape)

        def specs(tensors: Mapping[str, Tensor], role: Literal["parameter", "buffer", "counter"]) -> list[TensorSpec]:
            return [
                TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch."), role) for n, t in tensors.items()
            ]

        mixed = [*specs(trainable | frozen, "parameter"), *([] if self._local else specs(floats, "buffer"))]
        self._layout = Layout((*mixed, *specs(counters, "counter")))
        self._module, self._flat, self._weights, self._gradient = module, flat, weights, gradient
        self._shared, self._own = flat[: self._layout.size], flat[self._layout.size :]
        self._initial_own = self._own.clone()
        self._float_homes = [(*owner(module, name), homes[name]) for name in floats]
        self._counter_homes = [(*owner(module, name), tensor) for name, tensor in counters.items()]
        self._batch_norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
        self._flat_batch_norms = [layer for layer in self._batch_norms if isinstance(layer, nn.BatchNorm1d)]

    def _load(self, model: Model, memory: Memory) -> None:
        if model.layout is not self._layout and model.layout != self._layout:
            raise ConfigError(
                f"a model of {model.layout.size} numbers was given to a network of {self._layout.size}; "
                "their layouts must be equal"
            )
        copy_from_numpy(self._shared, model.vector)
        if self._own.numel():
            if "buffers" in memory:
                copy_from_numpy(self._own, memory["buffers"])
            else:
                self._own.copy_(self._initial_own)
        # A network may have replaced a buffer instead of writing to it.
        for owner, name, home in (*self._float_homes, *self._counter_homes):
            owner._buffers[name] = home
        counters, end = memory.get("counters", model.counters), 0
        for _, _, home in self._counter_homes:
            start, end = end, end + home.numel()
            home.copy_(torch.tensor(counters[start:end]).view(home.shape))

    def _store(self, community_model: Model, kept: Memory) -> Model:
        """The local model; what stays in the silo goes into `kept`."""
        for owner, name, home in self._float_homes:
            now = owner._buffers[name]
            if now is not home and now is not None:
                home.copy_(now.detach())
        if self._own.numel():
            kept["buffers"] = to_numpy(self._own).copy()
        if self._counter_homes:
            counts = [owner._buffers[name] for owner, name, _ in self._counter_homes]
            kept["counters"] = np.concatenate([to_numpy(c).ravel() for c in counts if c is not None]).astype(np.int64)
        vector = np.array(to_numpy(self._shared), dtype=np.float32)
        return community_model.with_vector(vector)

    def _community(self, model: Model) -> Tensor:
        """The trainable part of the community model, without a copy where torch can look at it directly."""
        if self._flat.device.type == "cpu" and self._dtype == torch.float32 and model.vector.flags.writeable:
            return torch.from_numpy(model.vector)[: self._weights.numel()]
        return self._weights.clone()


def owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def copy_from_numpy(target: Tensor, source: NDArray[Any]) -> None:
    if target.device.type == "cpu" and target.dtype != torch.bfloat16:
        # Through numpy, because torch refuses to look at read-only arrays, such as memory-mapped models.
        np.copyto(target.numpy(), source, casting="same_kind")
    else:
        target.copy_(torch.tensor(source))


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """On the CPU, without a copy where numpy has the dtype."""
    tensor = tensor.detach().cpu()
    array: NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
