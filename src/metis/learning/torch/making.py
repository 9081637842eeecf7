"""A network of its own from what a user gives: a class, a function, a module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from metis.errors import ConfigError, DataError


def make_network(network: Callable[[], nn.Module] | nn.Module) -> nn.Module:
    """A module that nobody else holds; a function may return the same one, or parts of it, each time."""
    module = network if isinstance(network, nn.Module) else network()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"network must make a torch.nn.Module, not {type(module).__name__}")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
        raise ConfigError("the network has lazy layers whose shapes are not known; give their sizes")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_complex():
            raise ConfigError(f"tensor '{name}' of the network is complex; only real numbers can be mixed")
    try:
        return copy.deepcopy(module)
    except Exception as problem:  # of a hook or a tensor that cannot be copied
        kept = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        again = None if isinstance(network, nn.Module) else network()
        if again is None or any(id(tensor) in kept for tensor in (*again.parameters(), *again.buffers())):
            reason = str(problem).splitlines()[0]
            raise ConfigError(
                f"network is one module that cannot be copied, so make it each time: {reason}"
            ) from problem
        return module


class WithValues:
    """Makes a network and gives some of its tensors these values."""

    def __init__(self, network: Callable[[], nn.Module] | nn.Module, tensors: Mapping[str, NDArray[Any]]) -> None:
        self._network, self._tensors = network, tensors

    def __call__(self) -> nn.Module:
        module = make_network(self._network)
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, array in self._tensors.items():
            if own[name].shape != array.shape:
                raise DataError(
                    f"the initial model does not fit the network: its tensor '{name}' is {list(array.shape)}, "
                    f"the network's {list(own[name].shape)}"
                )
            own[name].data.copy_(torch.tensor(array))
        return module
