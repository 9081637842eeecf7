"""Updates in fewer bytes: the delta from the community model is encoded; what is left out waits for the next update.

A learner encodes its delta plus what the last encoding left out, and keeps what this one leaves out (error feedback):
over the rounds nothing is lost, so the community model goes where it would have gone. What travels is the encoded delta
and, behind it, the counters; its length follows from the layout. The controller adds what it decodes to the community
model that the task was based on.

Buffers, BatchNorm's statistics, travel as they are: they are not sums of deltas that a later one could complete, and a
variance that is rounded, or gets what was left out on top, may come out below zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from metis.core.arithmetic import squared_distance
from metis.core.layers.base import Layer, Outgoing, Work
from metis.core.model import Layout, Model, Role, Vector
from metis.errors import ArgumentError
from metis.registry import Setting

Kind = Literal["float16", "bfloat16", "int8", "top_k"]

_GROUP = 4096  # numbers that share one scale in int8
_LARGEST_HALF = 65504.0
_LEFT_OUT = "left_out"  # in a learner's memory: what its last compressed update left out


@dataclass(frozen=True)
class Compression(
    Layer,
    key="compression",
    order=60,
    needs={"wire": "decides how an update is encoded, and so does {other}"},
    takes={"wire"},
):
    """Updates in fewer bytes, with what is left out sent later; beyond the paper."""

    kind: Annotated[Kind, Setting("two bytes a number, one byte a number, or only the largest numbers")]
    share: Annotated[float | None, Setting("share of all numbers, for top_k; 0.01 if not given", gt=0, le=1)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share is not None and self.kind != "top_k":
            raise ArgumentError(f"share is given, but kind = '{self.kind}' does not use it; 'top_k' would", "share")

    def relabel(self, label: str) -> str:
        return f"{label}, {self.label}"

    def encode(self, out: Outgoing, received: Work, prepared: Work) -> Outgoing:
        compressed = self.compress(out.model, received.base, received.memory.get(_LEFT_OUT))
        return Outgoing(
            compressed.local_model,
            {**out.memory, _LEFT_OUT: compressed.left_out},
            compressed.payload,
            {**out.notes, "compression_error": compressed.error},
        )

    def wire_bytes(self, layout: Layout) -> int:
        return self.nbytes(layout)

    def decode(self, payload: bytes | memoryview, base: Model) -> Model:
        return self.restore(payload, base)

    @property
    def label(self) -> str:
        """As tables call it."""
        return f"top {self._share:.2g} of the numbers" if self.kind == "top_k" else self.kind

    @property
    def _share(self) -> float:
        return 0.01 if self.share is None else self.share

    def nbytes(self, layout: Layout) -> int:
        """Bytes of every update of this layout."""
        own = sum(self._part_bytes(part.stop - part.start, role) for part, role in _parts(layout))
        return 4 * math.ceil(own / 4) + 8 * layout.counters  # chunks of an upload are whole fours

    def _part_bytes(self, size: int, role: Role) -> int:
        return 4 * size if role == "buffer" else self._encoded_bytes(size)

    def _encoded_bytes(self, size: int) -> int:
        match self.kind:
            case "float16" | "bfloat16":
                return 2 * size
            case "int8":
                return size + 4 * math.ceil(size / _GROUP)
            case "top_k":
                return 8 * self._kept(size)

    def _encode(self, delta: Vector) -> bytes:
        """The delta in fewer bytes; `_decode` gives what is left of it."""
        match self.kind:
            case "float16":
                return np.clip(delta, -_LARGEST_HALF, _LARGEST_HALF).astype("<f2").tobytes()
            case "bfloat16":
                return _to_bfloat16(delta).tobytes()
            case "int8":
                return _to_int8(delta)
            case "top_k":
                kept = self._kept(delta.size)
                # Ties go to whichever the partition meets first: the same for the same numbers.
                largest = np.sort(np.argpartition(np.abs(delta), delta.size - kept)[delta.size - kept :])
                return largest.astype("<u4").tobytes() + delta[largest].astype("<f4").tobytes()

    def _decode(self, data: bytes | memoryview, size: int) -> Vector:
        """What `_encode` left of a delta of this size; a ValueError if it cannot have been made by it."""
        match self.kind:
            case "float16":
                return np.frombuffer(data, "<f2", size).astype(np.float32)
            case "bfloat16":
                return (np.frombuffer(data, "<u2", size).astype(np.uint32) << 16).view(np.float32)
            case "int8":
                return _from_int8(data, size)
            case "top_k":
                kept = self._kept(size)
                indices = np.frombuffer(data, "<u4", kept)
                if kept and (int(indices.max()) >= size or not (np.diff(indices.astype(np.int64)) > 0).all()):
                    raise ValueError("the indices of a sparse update are not in order, or lie outside of the model")
                delta = np.zeros(size, np.float32)
                delta[indices] = np.frombuffer(data, "<f4", kept, 4 * kept)
                return delta

    def _kept(self, size: int) -> int:
        return min(size, max(1, math.ceil(self._share * size * (1 - 1e-9))))

    # --- updates ------------------------------------------------------------------------------------

    def compress(self, local_model: Model, base: Model, left_out: Vector | None) -> Compressed:
        """An update as it travels, with what earlier ones left out."""
        delta = local_model.vector - base.vector
        if left_out is not None:
            delta += left_out
        encoded, arrives, rest = [], base.vector.copy(), np.zeros_like(delta)
        for part, role in _parts(local_model.layout):
            if role == "buffer":
                arrives[part] = local_model.vector[part]
                encoded.append(arrives[part].astype("<f4").tobytes())
            else:
                encoded.append(self._encode(delta[part]))
                decoded = self._decode(encoded[-1], part.stop - part.start)
                arrives[part] += decoded
            if role == "parameter":
                rest[part] = delta[part] - decoded
            else:
                delta[part] = 0
        payload, length = b"".join(encoded), squared_distance(delta, None, delta.size)
        return Compressed(
            payload + bytes(-len(payload) % 4) + local_model.counters.astype("<i8").tobytes(),
            Model(local_model.layout, arrives, local_model.counters),
            rest,
            math.sqrt(squared_distance(rest, None, rest.size) / length) if length else 0.0,
        )

    def restore(self, data: bytes | memoryview, base: Model) -> Model:
        """The local model of an update, equal to the `local_model` that `compress` returned."""
        layout = base.layout
        if len(data) != self.nbytes(layout):
            raise ValueError(f"an update has {self.nbytes(layout)} bytes here, not {len(data)}")
        counters = np.frombuffer(data, "<i8", layout.counters, len(data) - 8 * layout.counters).astype(np.int64)
        vector, start = base.vector.copy(), 0
        with np.errstate(over="ignore", invalid="ignore"):  # an update with such numbers is refused later
            for part, role in _parts(layout):
                size = part.stop - part.start
                encoded = memoryview(data)[start : start + self._part_bytes(size, role)]
                start += len(encoded)
                if role == "buffer":
                    vector[part] = np.frombuffer(encoded, "<f4", size)
                else:
                    vector[part] += self._decode(encoded, size)
        return Model(layout, vector, counters)


def _parts(layout: Layout) -> list[tuple[slice, Role]]:
    """Neighbours of one role, each encoded for itself: control variates are of quite another size than deltas."""
    parts: list[tuple[slice, Role]] = []
    for spec in layout.tensors:
        if spec.role == "counter" or not spec.size:
            continue
        part = layout.slices[spec.name]
        if parts and parts[-1][1] == spec.role:
            parts[-1] = (slice(parts[-1][0].start, part.stop), spec.role)
        else:
            parts.append((part, spec.role))
    return parts


@dataclass(frozen=True, eq=False)
class Compressed:
    """An update as it is sent."""

    payload: bytes
    local_model: Model  # as it arrives
    left_out: Vector  # for the next update
    error: float  # what is left out now, over what was to be sent


def _to_bfloat16(delta: Vector) -> NDArray[np.uint16]:
    """The upper half of each float32, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(delta, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # What would round up to infinity stays the largest number.
    largest = np.where(bits >> 31, 0xFF7F, 0x7F7F)
    return np.where((rounded & 0x7FFF) >= 0x7F80, largest, rounded).astype("<u2")


def _to_int8(delta: Vector) -> bytes:
    padded = np.zeros(math.ceil(delta.size / _GROUP) * _GROUP, np.float32)
    padded[: delta.size] = delta
    groups = padded.reshape(-1, _GROUP)
    scales = (np.abs(groups).max(axis=1, initial=0.0) / 127).astype("<f4")
    steps = np.where(scales > 0, scales, 1).astype(np.float32)
    numbers = np.clip(np.rint(groups / steps[:, None]), -127, 127).astype(np.int8)
    return bytes(scales.tobytes() + numbers.reshape(-1)[: delta.size].tobytes())


def _from_int8(data: bytes | memoryview, size: int) -> Vector:
    count = math.ceil(size / _GROUP)
    scales = np.frombuffer(data, "<f4", count).astype(np.float32)
    numbers = np.frombuffer(data, np.int8, size, 4 * count).astype(np.float32)
    return numbers * np.repeat(scales, _GROUP)[:size]
