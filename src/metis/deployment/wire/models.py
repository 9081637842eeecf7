"""A model as bytes, on the wire and on disk.

They are its vector as little-endian float32 followed by its counters as little-endian int64 and nothing else, so their
number follows from the layout, and their SHA-256 names the model.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from metis.core.arithmetic import release
from metis.core.model import Layout, Model
from metis.deployment.storage import read_file, storage
from metis.deployment.wire.transfer import in_background
from metis.errors import DataError
from metis.files import durable_file

if TYPE_CHECKING:
    from metis.deployment.wire.model_mac import ModelMac

_PIECE = 4 << 20  # numbers


def model_bytes(layout: Layout) -> int:
    """Length of every model of this layout."""
    return 4 * layout.size + 8 * layout.counters


def read_model(path: Path, layout: Layout) -> Model:
    """Map a model file; nothing is read before it is needed, unless it is sealed."""
    if storage().sealed:
        content = read_file(path)
        if len(content) != model_bytes(layout):
            raise DataError(f"the model {path} has {len(content)} bytes, not {model_bytes(layout)}")
        return model_of(content, layout)
    counters = np.fromfile(path, "<i8", offset=4 * layout.size).astype(np.int64, copy=False)
    if not layout.size:
        return Model(layout, np.zeros(0, np.float32), counters)
    return Model(layout, np.memmap(path, "<f4", mode="r", shape=(layout.size,)), counters)


def model_of(content: bytes, layout: Layout) -> Model:
    """The model with these bytes, as many as the layout wants."""
    vector = np.frombuffer(content, "<f4", layout.size).astype(np.float32, copy=False)
    return Model(layout, vector, np.frombuffer(content, "<i8", offset=4 * layout.size).astype(np.int64))


def release_memory(model: Model) -> None:
    """Free the memory of a mapped model that was read; what is needed again is read from the file again."""
    mapped = getattr(model.vector, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def model_parts(model: Model) -> tuple[memoryview, memoryview]:
    """The bytes of a model, without a copy where the machine is little-endian."""
    vector = np.ascontiguousarray(model.vector, "<f4")
    counters = np.ascontiguousarray(model.counters, "<i8")
    return vector.view(np.uint8).data, counters.view(np.uint8).data


def model_pieces(model: Model) -> Iterator[memoryview]:
    """The same a piece at a time: of a model that is mapped, what was taken need not stay in memory."""
    vector, counters = model_parts(model)
    for start in range(0, model.vector.size, _PIECE):
        yield vector[4 * start : 4 * (start + _PIECE)]
        release(model.vector[start : start + _PIECE])
    yield counters


def payload_sha256(model: Model) -> str:
    """The SHA-256 of a model's bytes."""
    digest = hashlib.sha256()
    for piece in model_pieces(model):
        digest.update(piece)
    return digest.hexdigest()


def write_model(path: Path, model: Model, *, private: bool = False) -> tuple[str, int]:
    """Write a model durably, whole or not at all; returns the SHA-256 and the number of its bytes.

    A private one can be read by its owner only.
    """
    return write_parts(path, model_parts(model), private=private)


def write_parts(
    path: Path,
    parts: Iterable[memoryview],
    mac: ModelMac | None = None,
    *,
    synced: bool = True,
    private: bool = False,
) -> tuple[str, int]:
    """Write bytes, whole or not at all; returns their SHA-256, or this MAC of them, and their number.

    Unless they are `synced`, a loss of power may take them, or a part of them.
    """
    digest, length = mac or hashlib.sha256(), 0
    try:
        with durable_file(path, private=private, synced=synced) as file:
            writer = storage().writer(file)
            for part in parts:
                hashing = in_background(digest.update, part)  # while it is written
                writer.write(part)
                hashing.result()
                length += len(part)
            writer.finish()
    except OSError as problem:
        raise DataError(f"the model cannot be written to {path}: {problem.strerror}") from problem
    return digest.digest().hex(), length
