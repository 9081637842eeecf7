"""A model is one contiguous float32 vector and the layout that says where each tensor lies.

Mixing, sending, storing and hashing therefore touch one buffer. Integer tensors (BatchNorm's
`num_batches_tracked`, say) are counters: they travel alongside the vector and are never averaged. Behind the network's
own tensors there may be control variates (SCAFFOLD): they travel and are mixed with it, but are not part of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import CALL, release

Vector = NDArray[np.float32]
Role = Literal["parameter", "buffer", "counter", "control"]

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a network: its name, shape and dtype, and whether it is mixed."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    role: Role = "parameter"

    def __post_init__(self) -> None:
        allowed = _INTEGERS if self.role == "counter" else _FLOATS
        if self.dtype not in allowed:
            raise ValueError(
                f"tensor '{self.name}' is a {self.role} of dtype {self.dtype}; allowed: {', '.join(allowed)}"
            )
        if any(side < 0 for side in self.shape):
            raise ValueError(f"tensor '{self.name}' has the impossible shape {self.shape}")

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Names, shapes and dtypes of all tensors, in the order in which they lie in the vector."""

    tensors: tuple[TensorSpec, ...] = ()

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.tensors]
        if len(set(names)) != len(names):
            raise ValueError(f"tensor names must differ: {sorted(n for n in names if names.count(n) > 1)}")
        mixed = [spec.role == "control" for spec in self.tensors if spec.role != "counter"]
        if mixed != sorted(mixed):
            raise ValueError("control variates must lie behind the network's own tensors")

    @cached_property
    def size(self) -> int:
        """How many floating-point numbers are mixed."""
        return sum(spec.size for spec in self.tensors if spec.role != "counter")

    @cached_property
    def counters(self) -> int:
        """How many integers travel alongside the vector."""
        return sum(spec.size for spec in self.tensors if spec.role == "counter")

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each tensor lies: in the vector, or among the counters if it is one."""
        where, vector_end, counter_end = {}, 0, 0
        for spec in self.tensors:
            if spec.role == "counter":
                where[spec.name] = slice(counter_end, counter_end + spec.size)
                counter_end += spec.size
            else:
                where[spec.name] = slice(vector_end, vector_end + spec.size)
                vector_end += spec.size
        return where

    @cached_property
    def network(self) -> Layout:
        """Of the network alone, without control variates; it lies at the front of the vector."""
        own = tuple(spec for spec in self.tensors if spec.role != "control")
        return self if len(own) == len(self.tensors) else Layout(own)

    @cached_property
    def control(self) -> Layout:
        """Of the control variates alone."""
        return Layout(tuple(spec for spec in self.tensors if spec.role == "control"))

    def with_controls(self, trainable: int) -> Layout:
        """With a control variate for each tensor that lies among the first `trainable` numbers."""
        controls = tuple(
            TensorSpec(f"control:{spec.name}", spec.shape, role="control")
            for spec in self.tensors
            if spec.role == "parameter" and self.slices[spec.name].stop <= trainable
        )
        return Layout((*self.tensors, *controls))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the layout, so that two sites can agree on it once."""
        return hashlib.sha256(json.dumps(self.to_json(), separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> list[list[Any]]:
        return [[spec.name, list(spec.shape), spec.dtype, spec.role] for spec in self.tensors]

    @staticmethod
    def from_json(rows: Iterable[Iterable[Any]]) -> Layout:
        return Layout(tuple(TensorSpec(name, tuple(shape), dtype, role) for name, shape, dtype, role in rows))


def _no_counters() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Model:
    """All weights of a network in one vector; immutable by convention, shared freely.

    - `layout`: the names and shapes of the tensors, in the order of the vector.
    - `vector`: their numbers, one after the other.
    - `counters`: whole numbers that networks count with, such as the batches that BatchNorm has seen.
    """

    layout: Layout
    vector: Vector
    counters: NDArray[np.int64] = field(default_factory=_no_counters)

    def __post_init__(self) -> None:
        if self.vector.dtype != np.float32 or self.vector.shape != (self.layout.size,):
            raise ValueError(
                f"a model of this layout is a float32 vector of {self.layout.size} numbers, "
                f"not {self.vector.dtype} of shape {self.vector.shape}"
            )
        if self.counters.dtype != np.int64 or self.counters.shape != (self.layout.counters,):
            raise ValueError(
                f"a model of this layout has {self.layout.counters} int64 counters, "
                f"not {self.counters.dtype} of shape {self.counters.shape}"
            )

    @staticmethod
    @cache
    def empty() -> Model:
        """The model without weights: stands in where only the sequence of events matters."""
        return Model(Layout(), np.zeros(0, np.float32))

    @staticmethod
    def from_tensors(tensors: Mapping[str, NDArray[Any]], layout: Layout) -> Model:
        """Copy named arrays into one vector; every tensor of the layout must be there with its shape."""
        extra, missing = tensors.keys() - layout.slices.keys(), layout.slices.keys() - tensors.keys()
        if extra or missing:
            wrong = (("missing", missing), ("unknown", extra))
            raise ValueError("; ".join(f"tensors {what}: {', '.join(sorted(names))}" for what, names in wrong if names))
        vector, counters = np.empty(layout.size, np.float32), np.empty(layout.counters, np.int64)
        for spec in layout.tensors:
            array = np.asarray(tensors[spec.name])
            if array.shape != spec.shape:
                raise ValueError(f"tensor '{spec.name}' has shape {array.shape}, not {spec.shape}")
            target: NDArray[Any] = counters if spec.role == "counter" else vector
            target[layout.slices[spec.name]] = array.ravel()
        return Model(layout, vector, counters)

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Views by name, in the layout's shapes; 16-bit ones come as float32, since a mixture of them needs it."""
        return {
            spec.name: (self.counters if spec.role == "counter" else self.vector)[self.layout.slices[spec.name]]
            .reshape(spec.shape)
            .astype("float32" if spec.dtype in ("float16", "bfloat16") else spec.dtype, copy=False)
            for spec in self.layout.tensors
        }

    def with_vector(self, vector: Vector) -> Model:
        """The same network with other weights; counters are kept."""
        return Model(self.layout, vector, self.counters)

    @property
    def network(self) -> Model:
        """The network alone, without control variates; not a copy."""
        layout = self.layout.network
        return self if layout is self.layout else Model(layout, self.vector[: layout.size], self.counters)

    @property
    def control(self) -> Vector:
        """The control variates, one behind the other; not a copy."""
        return self.vector[self.layout.network.size :]

    @property
    def nbytes(self) -> int:
        """Bytes that travel when the model is sent."""
        return self.vector.nbytes + self.counters.nbytes

    def sha256(self) -> str:
        """Names these weights: equal exactly when layout and every bit are equal."""
        digest = hashlib.sha256(self.layout.fingerprint.encode())
        for start in range(0, self.vector.size, CALL):
            piece = self.vector[start : start + CALL]
            digest.update(np.ascontiguousarray(piece, "<f4").data)
            release(piece)
        digest.update(np.ascontiguousarray(self.counters, "<i8").data)
        return digest.hexdigest()


def mixable_problem(model: Model, layout: Layout) -> str | None:
    """Why this model must not be mixed with models of `layout`; None if it may."""
    if model.layout is not layout and model.layout != layout:
        return f"its layout ({model.layout.size} numbers) is not the federation's ({layout.size} numbers)"
    # A finite sum of squares proves every number finite in one pass; on overflow look closer.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.dot(model.vector, model.vector)):
            return None
    finite = np.isfinite(model.vector)
    if finite.all():
        return None
    stored = (spec for spec in layout.tensors if spec.role != "counter")
    spec = next(spec for spec in stored if not finite[layout.slices[spec.name]].all())
    bad = int((~finite[layout.slices[spec.name]]).sum())
    return f"tensor '{spec.name}' holds {bad} of {spec.size} numbers that are not finite"
