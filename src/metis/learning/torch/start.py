"""Weights to start from, out of files of PyTorch and Hugging Face: nothing in them is executed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from metis.errors import DataError
from metis.learning.torch.flat import to_numpy

_FOLDER = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin")
_INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SAVED = (b"PK\x03\x04", b"\x80")  # how files of torch.save begin: a zip archive, before version 1.6 a pickle


def load_weights(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a safetensors file, of a state dict that torch has saved, or of a folder of Hugging Face."""
    if path.is_dir():
        return _of_folder(path)
    return _of_safetensors(path) if path.suffix == ".safetensors" else _of_torch(path)


def weights_of(source: nn.Module | Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """The tensors of a module, or of its state dict; a parameter that is used twice comes once."""
    if isinstance(source, nn.Module):
        buffers = {name: b for name, b in source.named_buffers() if name in source.state_dict()}
        source = {**dict(source.named_parameters()), **buffers}
    return _arrays(source, "the initial model")


def _arrays(tensors: Mapping[Any, Any], whose: str) -> dict[str, NDArray[Any]]:
    found = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise DataError(f"{whose} is not a state dict: {name!r} is a {type(tensor).__name__}, not a tensor")
        found[name] = to_numpy(tensor).copy()
    return found


def _of_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with safe_open(path, framework="pt") as file:  # numpy does not know bfloat16
            return {name: to_numpy(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as problem:
        raise DataError(f"{path} cannot be read as a safetensors file: {problem}") from problem


def _of_torch(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file:
            saved = file.read(4).startswith(_SAVED)
        if not saved:
            raise DataError(
                f"{path} is not a model: neither of torch.save(module.state_dict(), path) nor a .safetensors file"
            )
        content = torch.load(path, map_location="cpu", weights_only=True)
    except DataError:
        raise
    except Exception as problem:  # whatever a file of somebody else's causes
        if type(problem).__name__ == "UnpicklingError":
            raise DataError(
                f"{path} has more than tensors, and is not loaded because that could run its code; save the state dict "
                "alone: torch.save(module.state_dict(), path)"
            ) from None
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise DataError(f"{path} cannot be read as a state dict of torch: {reason[:200]}") from problem
    for key in ("state_dict", "model_state_dict", "model"):  # as training scripts put it among other things
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise DataError(f"{path} is not a state dict: it has a {type(content).__name__}")
    if content and all(isinstance(name, str) and name.startswith("module.") for name in content):
        content = {name.removeprefix("module."): tensor for name, tensor in content.items()}  # of DataParallel
    return _arrays(content, str(path))


def _of_folder(folder: Path) -> dict[str, NDArray[Any]]:
    for name in _FOLDER:
        if (folder / name).is_file():
            return load_weights(folder / name)
    index = next((folder / name for name in _INDEX if (folder / name).is_file()), None)
    if index is None:
        raise DataError(f"the folder {folder} has no weights: none of {', '.join((*_FOLDER, *_INDEX))} is there")
    try:
        shards = json.loads(index.read_text("utf-8"))["weight_map"]
        names = sorted(set(shards.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise DataError(f"{index} is not an index of shards: it has no weight_map of names and files") from problem
    found: dict[str, NDArray[Any]] = {}
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise DataError(f"{index} names the shard {name!r}, which is not a file in this folder")
        found |= load_weights(folder / name)
    if missing := sorted(shards.keys() - found.keys()):
        raise DataError(f"{index} names the tensor '{missing[0]}', which {shards[missing[0]]} does not have")
    return found
