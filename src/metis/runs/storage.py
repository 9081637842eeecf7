"""Models on disk: safetensors files, and a store that keeps every learner's latest model out of memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from metis.core.events import LearnerId
from metis.core.model import Layout, Model, TensorSpec, Vector
from metis.errors import DataError
from metis.files import replacing
from metis.system import disk

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
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    with replacing(path) as new:
        disk().write_arrays(new, contiguous, {**metadata, _DIGEST: _digest(contiguous)})


def load_arrays(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read what `save_arrays` wrote: the arrays and the metadata."""
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is not a dict)
            metadata = dict(file.metadata() or {})
    except (OSError, SafetensorError) as problem:
        raise DataError(f"{path} cannot be read as a safetensors file: {problem}") from problem
    if metadata.pop(_DIGEST, None) not in (None, _digest(arrays)):  # None: written by another program
        raise DataError(f"{path} is damaged: its numbers do not match their digest")
    return arrays, metadata


def _digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}\n".encode())
        digest.update(arrays[name].reshape(-1).data)
    return digest.hexdigest()


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
