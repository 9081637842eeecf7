"""Models on disk: safetensors files, and a store that keeps every learner's latest model out of memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from metis.core.arithmetic import release
from metis.core.events import LearnerId
from metis.core.model import Layout, Model, TensorSpec, Vector
from metis.errors import DataError
from metis.files import replacing
from metis.system import disk

_PIECE = 8 << 20  # bytes
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_DIGEST = "metis_digest"  # of all arrays: safetensors itself does not notice a flipped bit


class DiskStore:
    """One file per learner; a model is mapped only while it is read, so memory is flat in learners."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def _path(self, learner: LearnerId) -> Path:
        # Readable, but never too long for a file name, and distinct for names that differ only in case.
        digest = hashlib.sha256(learner.encode("utf-8", "surrogatepass")).hexdigest()
        return self._folder / f"{quote(learner, safe='', errors='replace')[:40]}-{digest[:32]}.f32"

    def put(self, learner: LearnerId, vector: Vector) -> None:
        # A new file under the same name: an old mapping that is still being read stays intact.
        with replacing(self._path(learner)) as new:
            vector.tofile(new)

    def get(self, learner: LearnerId) -> Vector:
        path = self._path(learner)
        if path.stat().st_size == 0:
            return np.zeros(0, np.float32)
        return np.memmap(path, np.float32, mode="r")

    def remove(self, learner: LearnerId) -> None:
        self._path(learner).unlink(missing_ok=True)


def save_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write named arrays as one safetensors file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not ascontiguousarray, which would make a list of one out of a single number.
    contiguous = {name: np.asanyarray(array, order="C") for name, array in arrays.items()}
    header = _header(contiguous, {**metadata, _DIGEST: _digest(contiguous)})
    with replacing(path) as new:
        with disk().file(disk().open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)) as file:
            file.write(header)
            for name in _order(contiguous):
                for piece in _pieces(contiguous[name]):
                    file.write(piece)


def _order(arrays: Mapping[str, NDArray[Any]]) -> list[str]:
    """In which they lie in the file: the widest numbers first, so that all are aligned."""
    return sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))


def _header(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """What stands before the numbers. The library writes the same, but needs a second copy of all arrays for it."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in _order(arrays):
        array, begin = arrays[name], end
        end += array.nbytes
        content[name] = {"dtype": _DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": [begin, end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(array: NDArray[Any]) -> Iterator[memoryview]:
    """The bytes of an array, a part at a time, which need not stay in memory afterwards."""
    flat = array.reshape(-1).view(np.uint8) if array.size else np.zeros(0, np.uint8)
    for start in range(0, flat.size, _PIECE):
        piece = flat[start : start + _PIECE]
        yield piece.data
        release(piece)


def load_arrays(path: Path, *, mapped: bool = False) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read what `save_arrays` wrote: the arrays and the metadata; mapped ones are read when they are needed."""
    try:
        with safe_open(path, framework="numpy") as file:  # which checks the header
            arrays = {} if mapped else {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = dict(file.metadata() or {})
        if mapped:
            arrays = _mapped(path)
    except (OSError, SafetensorError) as problem:
        raise DataError(f"{path} cannot be read as a safetensors file: {problem}") from problem
    if metadata.pop(_DIGEST, None) not in (None, _digest(arrays)):  # None: written by another program
        raise DataError(f"{path} is damaged: its numbers do not match their digest")
    return arrays, metadata


def _digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}\n".encode())
        for piece in _pieces(arrays[name]):
            digest.update(piece)
    return digest.hexdigest()


def _mapped(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file whose header is sound; they cannot be written to."""
    whole = np.memmap(path, np.uint8, mode="r")
    start = 8 + int.from_bytes(whole[:8].tobytes(), "little")
    content = json.loads(whole[8:start].tobytes())
    content.pop("__metadata__", None)
    numbers = {code: np.dtype(name) for name, code in _DTYPES.items()}
    arrays = {}
    for name, tensor in content.items():
        begin, end = tensor["data_offsets"]
        arrays[name] = whole[start + begin : start + end].view(numbers[tensor["dtype"]]).reshape(tensor["shape"])
    return arrays


def save_model(path: Path, model: Model, metadata: Mapping[str, str] | None = None) -> None:
    """Write a model under the network's own tensor names, so that any program can load it; without control variates."""
    save_arrays(path, *model_arrays(model, metadata or {}))


def model_arrays(model: Model, metadata: Mapping[str, str]) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """A model as arrays and metadata of a safetensors file."""
    model = model.network
    layout = json.dumps(model.layout.to_json())
    return model.tensors(), {**metadata, "metis_layout": layout, "sha256": model.sha256()}


def load_model(path: Path) -> Model:
    """Read a model that `save_model` wrote."""
    arrays, metadata = load_arrays(path)
    if "metis_layout" not in metadata:
        raise DataError(f"{path} is a safetensors file, but not one that Metis wrote: it has no metis_layout")
    try:
        return Model.from_tensors(arrays, Layout.from_json(json.loads(metadata["metis_layout"])))
    except (ValueError, TypeError) as problem:
        raise DataError(f"{path} is damaged: {problem}") from problem


def warm_start(arrays: Mapping[str, NDArray[Any]], model: Model, whose: str, kept: Collection[str] = ()) -> Model:
    """This model with these weights, which are checked; what a layer adds is kept.

    `kept` are tensors that may be among them although they are not sent.
    """
    layout = model.network.layout
    problem = next(filter(None, (_misfit(spec, arrays.get(spec.name)) for spec in layout.tensors)), None)
    if problem is None and (extra := sorted(arrays.keys() - layout.slices.keys() - set(kept))):
        problem = f"it has a tensor '{extra[0]}', which the network does not have or does not federate"
    if problem is not None:
        raise DataError(f"{whose} does not fit the network: {problem}")
    network = Model.from_tensors({spec.name: arrays[spec.name] for spec in layout.tensors}, layout)
    if not np.isfinite(network.vector).all():
        raise DataError(f"{whose} has numbers that are not finite")
    vector = model.vector.copy()
    vector[: layout.size] = network.vector
    return Model(model.layout, vector, network.counters)


def initial_fact(name: str, model: Model) -> dict[str, str]:
    """What a report says of a run that began with this file; the digest is that of a run's community model."""
    return {"initial model": f"{name}, sha256 {model.network.sha256()}"}


def _misfit(spec: TensorSpec, array: NDArray[Any] | None) -> str | None:
    """Why an array cannot be this tensor of the network."""
    wanted = f"{list(spec.shape)} of {spec.dtype}"
    if array is None:
        return f"it has no tensor '{spec.name}' {wanted}"
    if array.shape != spec.shape or (array.dtype.kind in "iu") != (spec.role == "counter"):
        return f"tensor '{spec.name}' is {list(array.shape)} of {array.dtype}, the network's is {wanted}"
    return None
