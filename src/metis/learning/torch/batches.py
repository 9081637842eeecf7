"""Batches of any shape: how they reach the device, what the network is called with, what its outputs are compared with.

A batch is a pair or longer tuple whose last part is the targets, or something with names (a mapping, a dataclass, a
named tuple) of which one is that of the targets. The network gets the rest: one tensor, several positional arguments,
or keywords.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from metis.errors import ConfigError, DataError

TARGETS = ("targets", "target", "labels", "label", "y")


def names_of(batch: Any) -> Mapping[str, Any] | None:
    """The parts of a batch by name; None if they have none."""
    if isinstance(batch, Mapping):
        return batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        named: Mapping[str, Any] = batch._asdict()
        return named
    return None


def split(batch: Any) -> tuple[Any, Any]:
    """What the network is called with, and the targets; None where a batch has none."""
    named = names_of(batch)
    if named is not None:
        key = next((name for name in TARGETS if name in named), None)
        return {name: part for name, part in named.items() if name != key}, None if key is None else named[key]
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        *inputs, targets = batch
        return inputs[0] if len(inputs) == 1 else tuple(inputs), targets
    return batch, None


def call(module: nn.Module, inputs: Any) -> Any:
    """The outputs of the network: one tensor alone, a tuple as positional arguments, names as keywords.

    Of an object with `logits`, as the networks of transformers return it, these.
    """
    if isinstance(inputs, Mapping):
        parameters = inspect.signature(module.forward).parameters
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            inputs = {name: part for name, part in inputs.items() if name in parameters}
            if not inputs:
                raise ConfigError(
                    f"forward({', '.join(parameters)}) of the network takes none of the names that a batch has"
                )
        outputs = module(**inputs)
    else:
        outputs = module(*inputs) if isinstance(inputs, (tuple, list)) else module(inputs)
    return outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", outputs)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Every tensor of a batch."""
    named = names_of(batch)
    if isinstance(batch, Tensor):
        yield batch
    elif named is not None or isinstance(batch, (tuple, list)):
        for part in batch if named is None else named.values():
            yield from tensors_in(part)


def examples_in(batch: Any, targets: Any) -> int:
    """How many examples a batch has: as many as targets, else as its first tensor is long."""
    if isinstance(targets, Tensor) and targets.ndim:
        return len(targets)
    first = next((tensor for tensor in tensors_in(batch) if tensor.ndim), None)
    return 1 if first is None else len(first)


def move(batch: Any, convert: Callable[[Tensor], Tensor], device: torch.device) -> Any:
    """The same batch with every tensor converted; an object of another kind moves itself if it can."""
    if isinstance(batch, Tensor):
        return convert(batch)
    named = names_of(batch)
    if named is not None:
        moved = {name: move(part, convert, device) for name, part in named.items()}
        if isinstance(batch, tuple):
            return type(batch)(**moved)
        return dataclasses.replace(batch, **moved) if dataclasses.is_dataclass(batch) else moved  # type: ignore[type-var]
    if isinstance(batch, (tuple, list)):
        return type(batch)(move(part, convert, device) for part in batch)
    return batch.to(device) if hasattr(batch, "to") else batch


def takes_batch(function: Callable[..., Any]) -> bool:
    """Whether a loss wants the whole batch: its second parameter is called `batch`."""
    try:
        return list(inspect.signature(function).parameters)[1:2] == ["batch"]
    except (TypeError, ValueError):  # the signature of a builtin is not known
        return False


def scalar_loss(value: Any, what: str) -> Tensor:
    """The loss, if it is one number."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ConfigError(f"{what} returned {shown}; it must return a tensor with one number, a mean over the batch")
    return value if value.ndim == 0 else value.reshape(())


def collated(items: list[Any], collate: Callable[[list[Any]], Any] | None) -> Any:
    """Items as one batch: by the user's function, else stacked as torch does it."""
    try:
        if collate is not None:
            batch = collate(items)
        elif dataclasses.is_dataclass(items[0]) and not isinstance(items[0], type):
            columns = {
                field.name: default_collate([getattr(item, field.name) for item in items])
                for field in dataclasses.fields(items[0])
            }
            batch = dataclasses.replace(items[0], **columns)
        else:
            batch = default_collate(items)
    except Exception as problem:
        reason = " ".join(str(problem).split())[:200]
        if collate is not None:
            raise DataError(f"collate failed on {len(items)} items: {type(problem).__name__}: {reason}") from problem
        raise DataError(
            f"items of the dataset cannot be stacked into a batch, so give collate=...: {reason}"
        ) from problem
    if batch is None or (next(tensors_in(batch), None) is None and not hasattr(batch, "to")):
        whose = "collate returned" if collate is not None else "the items of the dataset make"
        raise DataError(f"{whose} a {type(batch).__name__} without any tensor; a batch is made of tensors")
    return batch
