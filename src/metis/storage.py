"""Models on disk: safetensors files, and a store that keeps every learner's latest model out of memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from metis.core.events import LearnerId
from metis.core.model import Layout, Model, Vector
from metis.errors import DataError


class DiskStore:
    """One file per learner; a model is mapped only while it is read, so memory is flat in learners."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def _path(self, learner: LearnerId) -> Path:
        return self._folder / f"{quote(learner, safe='')}.f32"

    def put(self, learner: LearnerId, vector: Vector) -> None:
        # A new file under the same name: an old mapping that somebody still reads stays intact.
        path = self._path(learner)
        fresh = path.with_suffix(".new")
        vector.tofile(fresh)
        fresh.replace(path)

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
    fresh = path.with_name(path.name + ".new")
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, fresh, dict(metadata))
    fresh.replace(path)


def load_arrays(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read what `save_arrays` wrote: the arrays and the metadata."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118  (it is not a dict)
    except (OSError, SafetensorError) as problem:
        raise DataError(f"{path} cannot be read as a safetensors file: {problem}") from problem


def save_model(path: Path, model: Model, metadata: Mapping[str, str] | None = None) -> None:
    """Write a model under the network's own tensor names, so that any program can load it."""
    layout = json.dumps(model.layout.to_json())
    save_arrays(path, model.tensors(), {**(metadata or {}), "metis_layout": layout, "sha256": model.sha256()})


def load_model(path: Path) -> Model:
    """Read a model that `save_model` wrote."""
    arrays, metadata = load_arrays(path)
    if "metis_layout" not in metadata:
        raise DataError(f"{path} is a safetensors file, but not one that Metis wrote: it has no metis_layout")
    return Model.from_tensors(arrays, Layout.from_json(json.loads(metadata["metis_layout"])))
