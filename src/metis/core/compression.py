"""What of an update travels: the way from the community model, in fewer bytes; the rest waits for the next update.

A learner encodes its way plus what the last encoding left out, and keeps what this one leaves out (error feedback):
over the rounds nothing is lost, so the community model goes where it would have gone. What travels is the encoded way
and, behind it, the counters; its length follows from the layout. The controller adds what it decodes to the community
model that the task was based on.

Buffers, BatchNorm's statistics, travel as they are: they are no sums of ways that a later one could make up for, and a
variance that is rounded, or gets what was left out on top, may come out below zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from metis.core.model import Layout, Model, Role, Vector

Kind = Literal["float16", "bfloat16", "int8", "top_k"]

_GROUP = 4096  # numbers that share one scale in int8
_LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class Compression:
    """How the ways are encoded: two bytes a number, one byte a number, or only the largest numbers."""

    kind: Kind
    share: float | None = None  # of all numbers, for top_k: 0.01 if not given

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, not '{self.kind}'")
        if self.share is not None and self.kind != "top_k":
            raise ValueError(f"share is given, but kind = '{self.kind}' does not use it; 'top_k' would")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"share must be greater than 0 and at most 1, not {self.share}")

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

    def encode(self, way: Vector) -> bytes:
        """The way in fewer bytes; `decode` says what is left of it."""
        match self.kind:
            case "float16":
                return np.clip(way, -_LARGEST_HALF, _LARGEST_HALF).astype("<f2").tobytes()
            case "bfloat16":
                return _to_bfloat16(way).tobytes()
            case "int8":
                return _to_int8(way)
            case "top_k":
                kept = self._kept(way.size)
                # Ties go to whichever the partition meets first: the same for the same numbers.
                largest = np.sort(np.argpartition(np.abs(way), way.size - kept)[way.size - kept :])
                return largest.astype("<u4").tobytes() + way[largest].astype("<f4").tobytes()

    def decode(self, data: bytes | memoryview, size: int) -> Vector:
        """What `encode` left of a way of so many numbers; a ValueError if it cannot have been made by it."""
        match self.kind:
            case "float16":
                return np.frombuffer(data, "<f2", size).astype(np.float32)
            case "bfloat16":
                return (np.frombuffer(data, "<u2", size).astype(np.uint32) << 16).view(np.float32)
            case "int8":
                return _from_int8(data, size)
            case "top_k":
                kept = self._kept(size)
                places = np.frombuffer(data, "<u4", kept)
                if kept and (int(places.max()) >= size or not (np.diff(places.astype(np.int64)) > 0).all()):
                    raise ValueError("the places of a sparse update are not in order, or outside of the model")
                way = np.zeros(size, np.float32)
                way[places] = np.frombuffer(data, "<f4", kept, 4 * kept)
                return way

    def _kept(self, size: int) -> int:
        return min(size, max(1, math.ceil(self._share * size * (1 - 1e-9))))

    # --- updates ------------------------------------------------------------------------------------

    def compress(self, local_model: Model, base: Model, left_out: Vector | None) -> Compressed:
        """An update as it travels, with what earlier ones left out."""
        way = local_model.vector - base.vector
        if left_out is not None:
            way += left_out
        encoded, arrives, rest = [], base.vector.copy(), np.zeros_like(way)
        for part, role in _parts(local_model.layout):
            if role == "buffer":
                arrives[part] = local_model.vector[part]
                encoded.append(arrives[part].astype("<f4").tobytes())
            else:
                encoded.append(self.encode(way[part]))
                decoded = self.decode(encoded[-1], part.stop - part.start)
                arrives[part] += decoded
            if role == "parameter":
                rest[part] = way[part] - decoded
            else:
                way[part] = 0
        length, payload = float(np.linalg.norm(way)), b"".join(encoded)
        return Compressed(
            payload + bytes(-len(payload) % 4) + local_model.counters.astype("<i8").tobytes(),
            Model(local_model.layout, arrives, local_model.counters),
            rest,
            float(np.linalg.norm(rest)) / length if length else 0.0,
        )

    def restore(self, data: bytes | memoryview, base: Model) -> Model:
        """The local model of an update, as `compress` said it would arrive."""
        layout = base.layout
        if len(data) != self.nbytes(layout):
            raise ValueError(f"an update has {self.nbytes(layout)} bytes here, not {len(data)}")
        counters = np.frombuffer(data, "<i8", layout.counters, len(data) - 8 * layout.counters).astype(np.int64)
        vector, start = base.vector.copy(), 0
        with np.errstate(over="ignore", invalid="ignore"):  # whoever sends such numbers is refused later
            for part, role in _parts(layout):
                size = part.stop - part.start
                encoded = memoryview(data)[start : start + self._part_bytes(size, role)]
                start += len(encoded)
                if role == "buffer":
                    vector[part] = np.frombuffer(encoded, "<f4", size)
                else:
                    vector[part] += self.decode(encoded, size)
        return Model(layout, vector, counters)


def _parts(layout: Layout) -> list[tuple[slice, Role]]:
    """Neighbours of one role, each encoded for itself: control variates are of quite another size than ways."""
    parts: list[tuple[slice, Role]] = []
    for spec in layout.tensors:
        if spec.role == "counter" or not spec.size:
            continue
        place = layout.slices[spec.name]
        if parts and parts[-1][1] == spec.role:
            parts[-1] = (slice(parts[-1][0].start, place.stop), spec.role)
        else:
            parts.append((place, spec.role))
    return parts


@dataclass(frozen=True, eq=False)
class Compressed:
    """One update on its way."""

    payload: bytes
    local_model: Model  # as it arrives
    left_out: Vector  # for the next update
    error: float  # what is left out now, over what was to be sent


def _to_bfloat16(way: Vector) -> NDArray[np.uint16]:
    """The upper half of each float32, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(way, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # What would round up to infinity stays the largest number.
    largest = np.where(bits >> 31, 0xFF7F, 0x7F7F)
    return np.where((rounded & 0x7FFF) >= 0x7F80, largest, rounded).astype("<u2")


def _to_int8(way: Vector) -> bytes:
    padded = np.zeros(math.ceil(way.size / _GROUP) * _GROUP, np.float32)
    padded[: way.size] = way
    groups = padded.reshape(-1, _GROUP)
    scales = (np.abs(groups).max(axis=1, initial=0.0) / 127).astype("<f4")
    steps = np.where(scales > 0, scales, 1).astype(np.float32)
    numbers = np.clip(np.rint(groups / steps[:, None]), -127, 127).astype(np.int8)
    return bytes(scales.tobytes() + numbers.reshape(-1)[: way.size].tobytes())


def _from_int8(data: bytes | memoryview, size: int) -> Vector:
    count = math.ceil(size / _GROUP)
    scales = np.frombuffer(data, "<f4", count).astype(np.float32)
    numbers = np.frombuffer(data, np.int8, size, 4 * count).astype(np.float32)
    return numbers * np.repeat(scales, _GROUP)[:size]
