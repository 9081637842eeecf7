"""A network whose parameters and buffers are views into one flat tensor.

First the parameters that are trained and stay in the silo, then what travels (trained parameters, others,
floating-point buffers), then buffers that stay in the silo, then what never changes.
"""

from __future__ import annotations

import functools
import hashlib
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
from metis.learning.torch.sharing import PERSONAL, Sharing, kinds_of, with_personal


class FlatNetwork:
    """Between the models of a federation and the tensors of a network; a base class of the engine."""

    _device: torch.device
    _dtype: torch.dtype
    _local: bool  # buffers stay in the silo
    _sharing: Sharing | None  # of parameters and buffers by name; None: all are federated
    _beside: bool  # whether the network has a personal one beside it

    def _lay_flat(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())  # a tied parameter comes once, under its first name
        # Non-persistent buffers are constants that the network makes for itself.
        persistent = module.state_dict().keys()
        buffers = {name: b for name, b in module.named_buffers() if name in persistent}
        names = [*parameters, *buffers]
        own_names = [name for name in names if self._beside and name.startswith(f"{PERSONAL}.")]
        kinds = kinds_of(self._sharing, [name for name in names if name not in own_names])
        kinds = with_personal(kinds, own_names)
        for name, parameter in parameters.items():
            if kinds[name] == "frozen":
                parameter.requires_grad_(False)
        trainable = {name: p for name, p in parameters.items() if p.requires_grad}
        fixed = {name: p for name, p in parameters.items() if not p.requires_grad}
        floats = {name: b for name, b in buffers.items() if b.is_floating_point()}
        counters = {name: b for name, b in buffers.items() if not b.is_floating_point()}
        federated = [{n: t for n, t in some.items() if kinds[n] == "federated"} for some in (trainable, fixed, floats)]
        local = {name: p for name, p in trainable.items() if kinds[name] == "local"}
        own = {n: t for n, t in floats.items() if kinds[n] == "local" or (self._local and kinds[n] == "federated")}
        shared = federated[0] | federated[1] | ({} if self._local else federated[2])
        stays = {n: t for n, t in (fixed | floats).items() if n not in shared and n not in own}

        order = local | shared | own | stays
        flat = torch.empty(sum(t.numel() for t in order.values()), dtype=self._dtype, device=self._device)
        weights = flat[: sum(p.numel() for p in trainable.values())]
        gradient = torch.zeros_like(weights)
        homes: dict[str, Tensor] = {}
        end = 0
        for name, tensor in order.items():
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

        mixed = [
            *specs(federated[0] | federated[1], "parameter"),
            *([] if self._local else specs(federated[2], "buffer")),
        ]
        counted = {name: b for name, b in counters.items() if kinds[name] == "federated"}
        self._layout = Layout((*mixed, *specs(counted, "counter")))
        self._module, self._flat, self._weights, self._gradient = module, flat, weights, gradient
        ends = np.cumsum([sum(t.numel() for t in some.values()) for some in (local, shared, own)])
        self._personal, self._shared = flat[: ends[0]], flat[ends[0] : ends[1]]
        self._own, self._stays = flat[ends[1] : ends[2]], flat[ends[2] :]
        self._frozen = {name: homes[name] for name in stays}
        self._initial = [(part, part.clone()) for part in (self._personal, self._own, self._stays)]
        self._float_homes = [(*owner(module, name), homes[name]) for name in floats]
        self._counter_homes = [(*owner(module, name), tensor) for name, tensor in counters.items()]
        self._initial_counters = np.concatenate(
            [np.zeros(0, np.int64), *(to_numpy(tensor).ravel() for tensor in counters.values())]
        ).astype(np.int64)
        travels = [np.full(tensor.numel(), name in counted) for name, tensor in counters.items()]
        self._counters_travel = np.concatenate([np.zeros(0, bool), *travels])
        self._batch_norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
        self._flat_batch_norms = [layer for layer in self._batch_norms if isinstance(layer, nn.BatchNorm1d)]
        self._frozen_norms = [
            layer
            for path, layer in module.named_modules()
            if isinstance(layer, _BatchNorm) and kinds.get(f"{path}.running_mean") == "frozen"
        ]
        self._begins_here = [name for name, kind in kinds.items() if kind == "local" and name not in own_names]
        self.kept = frozenset(name for name, kind in kinds.items() if kind != "federated" and name not in own_names)
        self.personal = any(kind == "local" for kind in kinds.values())

    def _build(self, seed: int) -> nn.Module:
        """The network as this seed makes it."""
        raise NotImplementedError

    def starting_with(self, tensors: Mapping[str, NDArray[Any]]) -> Any:
        """The same engine, whose network is made with these values."""
        raise NotImplementedError

    def seeded(self, seed: int) -> Any:
        """The same engine, whose local parts begin as this seed makes them; what is frozen is the same for all."""
        if not self._begins_here:
            return self
        module = self._build(seed)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return self.starting_with({name: to_numpy(tensors[name]).copy() for name in self._begins_here})

    @functools.cached_property
    def frozen_sha256(self) -> str:
        """A digest of what neither is trained nor travels, which must be the same everywhere; empty without any."""
        digest = hashlib.sha256()
        for name, home in sorted(self._frozen.items()):
            digest.update(f"{name} {tuple(home.shape)}\n".encode())
            digest.update(np.ascontiguousarray(to_numpy(home), np.float32).data)
        return digest.hexdigest() if self._frozen else ""

    def _load(self, model: Model, memory: Memory) -> None:
        if model.layout is not self._layout and model.layout != self._layout:
            raise ConfigError(
                f"a model of {model.layout.size} numbers was given to a network of {self._layout.size}; "
                "their layouts must be equal"
            )
        copy_from_numpy(self._shared, model.vector)
        for (part, initial), kept in zip(self._initial, ("local", "buffers", None), strict=True):
            if kept is not None and kept in memory and part.numel():
                copy_from_numpy(part, memory[kept])
            elif part.numel():
                part.copy_(initial)
        # A network may have replaced a buffer instead of writing to it.
        for owner, name, home in (*self._float_homes, *self._counter_homes):
            owner._buffers[name] = home
        counters, end = memory.get("counters"), 0
        if counters is None:
            counters = self._initial_counters.copy()
            counters[self._counters_travel] = model.counters
        for _, _, home in self._counter_homes:
            start, end = end, end + home.numel()
            home.copy_(torch.tensor(counters[start:end]).view(home.shape))

    def _store(self, community_model: Model, kept: Memory) -> Model:
        """The local model; what stays in the silo goes into `kept`."""
        for owner, name, home in self._float_homes:
            now = owner._buffers[name]
            if now is not home and now is not None:
                home.copy_(now.detach())
        for name, part in (("local", self._personal), ("buffers", self._own)):
            if part.numel():
                kept[name] = to_numpy(part).copy()
        if self._counter_homes:
            counts = [owner._buffers[name] for owner, name, _ in self._counter_homes]
            kept["counters"] = np.concatenate([to_numpy(c).ravel() for c in counts if c is not None]).astype(np.int64)
        vector = np.array(to_numpy(self._shared), dtype=np.float32)
        return community_model.with_vector(vector)

    def _community(self, model: Model) -> Tensor:
        """The trained part of the model that a task starts from, without a copy where torch can look at it directly."""
        looks = self._flat.device.type == "cpu" and self._dtype == torch.float32 and model.vector.flags.writeable
        if looks and not self._personal.numel():
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


def from_numpy(array: NDArray[Any]) -> Tensor:
    """A tensor of its own."""
    return torch.tensor(array)
