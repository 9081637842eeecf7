"""How the messages of `wire.proto` travel: method names, channel settings, and models as raw bytes.

A model on the wire and on disk is its vector as little-endian float32 followed by its counters as little-endian
int64: nothing else, so its length follows from the layout and its SHA-256 names it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.poly1305 import Poly1305

from metis.core.model import Layout, Model
from metis.deployment.wire import wire_pb2 as pb

PROTOCOL = 2
CHUNK = 1 << 20  # 1.2-1.6 GB/s on loopback; one large message is six times slower
SMALLEST_CHUNK = 1 << 16
MOST_MESSAGE = CHUNK + (1 << 16)
_BRISK_SECONDS, _SLUGGISH_SECONDS = 0.1, 0.5  # for one chunk
TURN = (("metis-turn", "come"),)  # initial metadata of an upload that may go on behind its header
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of malloc.h
_KEY_BYTES, _SEAL_BYTES = 32, 48  # of a seal: its key; that and the code
SERVICE = "metis.Federation"
ATTEND, UPLOAD, DOWNLOAD = (f"/{SERVICE}/{name}" for name in ("Attend", "Upload", "Download"))

# A peer that vanished without a word is found within 25 seconds, before the default lease ends. Not sooner: an answer
# waits behind a chunk or two of a model and what the system has buffered, and no slow site would ever get one through.
# The third is needed: without it gRPC's own bandwidth ping masks the others for a minute.
KEEPALIVE: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 2_500),
    ("grpc.max_receive_message_length", MOST_MESSAGE),
    ("grpc.max_metadata_size", 16_384),
    ("grpc.so_reuseport", 0),  # a second controller on the port is an error, not a lottery
]
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *KEEPALIVE,
    ("grpc.max_receive_message_length", 64 << 20),  # the settings may be long; the controller is trusted with that
    ("grpc.enable_retries", 0),  # whether to send again is decided above, where it is known what was received
]


def model_bytes(layout: Layout) -> int:
    """Length of every model of this layout."""
    return 4 * layout.size + 8 * layout.counters


def read_model(path: Path, layout: Layout) -> Model:
    """Map a model file; nothing is read before it is needed."""
    counters = np.fromfile(path, "<i8", offset=4 * layout.size).astype(np.int64, copy=False)
    if not layout.size:
        return Model(layout, np.zeros(0, np.float32), counters)
    return Model(layout, np.memmap(path, "<f4", mode="r", shape=(layout.size,)), counters)


def let_go(model: Model) -> None:
    """Give the memory back that a mapped model takes after it was read; what is needed again comes from the file."""
    mapped = getattr(model.vector, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def model_parts(model: Model) -> tuple[memoryview, memoryview]:
    """The bytes of a model, without a copy where the machine is little-endian."""
    vector = np.ascontiguousarray(model.vector, "<f4")
    counters = np.ascontiguousarray(model.counters, "<i8")
    return vector.view(np.uint8).data, counters.view(np.uint8).data


def payload_sha256(model: Model) -> str:
    """Names the bytes of a model."""
    digest = hashlib.sha256()
    for part in model_parts(model):
        digest.update(part)
    return digest.hexdigest()


class Seal:
    """A key of its own and the Poly1305 of some bytes under it: whoever has both finds a wrong bit as SHA-256 does.

    In a seventh of the time. But unlike a SHA-256 it names nothing: whoever knows the key can make other bytes for it.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(_KEY_BYTES) if key is None else key
        self._code = Poly1305(self._key)

    def update(self, data: bytes | memoryview) -> None:
        self._code.update(data)

    def digest(self) -> bytes:
        """Key and code; nothing can be added then."""
        return self._key + self._code.finalize()


def new_seal() -> Seal | None:
    """With a new key; None where the system allows no Poly1305."""
    try:
        return Seal()
    except UnsupportedAlgorithm:
        return None


def checker(sha256: str, seal: bytes) -> tuple[Any, bytes]:
    """What to update with the bytes of a model, and the digest that it must have then."""
    if len(seal) == _SEAL_BYTES:
        with contextlib.suppress(UnsupportedAlgorithm):
            return Seal(seal[:_KEY_BYTES]), seal
    return hashlib.sha256(), bytes.fromhex(sha256)


def keep_buffers() -> None:
    """Let this process keep the memory of chunks that were freed, some 32 MB, for the chunks to come.

    glibc would give it back after each chunk and let the system clear new pages for the next: that was half of the
    time that sending took.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library has its own ways
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, 16 << 20)
        mallopt(_ARENA_MAX, 2)  # of which each keeps as much; there would be one for each of many threads
        mallopt(_MMAP_THRESHOLD, 8 << 20)  # what is larger, a whole model say, comes and goes as before


class ChunkSize:
    """How many bytes of a model to send at once: few on a slow line, where signs of life wait behind them."""

    def __init__(self, most: int) -> None:
        self._most, self.bytes = most, min(most, SMALLEST_CHUNK)

    def took(self, seconds: float) -> None:
        """The last ones were on their way after so long."""
        if seconds < _BRISK_SECONDS:
            self.bytes = min(self._most, 2 * self.bytes)
        elif seconds > _SLUGGISH_SECONDS and self.bytes > SMALLEST_CHUNK:
            self.bytes = max(SMALLEST_CHUNK, self.bytes // 8 * 4)  # whole numbers of the vector


class Piece:
    """Some bytes of a model on the wire, written and read as a `pb.Chunk`.

    These are nearly all that travels, and protobuf would copy each three times at both ends; so they are copied once
    when they are written and not at all when they are read. What is on the wire is the same.
    """

    __slots__ = ("data", "offset")

    def __init__(self, offset: int, data: bytes | memoryview) -> None:
        self.offset, self.data = offset, data


def write_chunk(chunk: pb.Chunk | Piece) -> bytes:
    """As `pb.Chunk.SerializeToString` does it."""
    return b"".join(_pieces(chunk)) if isinstance(chunk, Piece) else chunk.SerializeToString()


def write_part(part: pb.UploadPart | Piece) -> bytes:
    """As `pb.UploadPart.SerializeToString` does it; a piece is the part with its chunk."""
    if not isinstance(part, Piece):
        return part.SerializeToString()
    pieces = _pieces(part)
    return b"".join((b"\x12", _varint(sum(map(len, pieces))), *pieces))


def read_chunk(message: bytes) -> Piece:
    """As `pb.Chunk.FromString` does it; the data stays where it is."""
    piece = _piece(message, 0)
    if piece is not None:
        return piece
    chunk = pb.Chunk.FromString(message)
    return Piece(chunk.offset, chunk.data)


def read_part(message: bytes) -> pb.UploadPart | Piece:
    """As `pb.UploadPart.FromString` does it; a part with a chunk is a piece, and the data stays where it is."""
    if message[:1] == b"\x12":
        length, start = _read_varint(message, 1)
        if start + length == len(message) and (piece := _piece(message, start)) is not None:
            return piece
    part = pb.UploadPart.FromString(message)
    return Piece(part.chunk.offset, part.chunk.data) if part.WhichOneof("part") == "chunk" else part


def _pieces(piece: Piece) -> tuple[bytes | memoryview, ...]:
    offset = b"\x08" + _varint(piece.offset) if piece.offset else b""
    return (offset, b"\x12", _varint(len(piece.data)), piece.data) if piece.data else (offset,)


def _piece(message: bytes, start: int) -> Piece | None:
    """The chunk from `start` to the end, if it is written in the one way that we write it."""
    offset = 0
    if message[start : start + 1] == b"\x08":
        offset, start = _read_varint(message, start + 1)
    if message[start : start + 1] == b"\x12":
        length, start = _read_varint(message, start + 1)
        if start + length == len(message):
            return Piece(offset, memoryview(message)[start:])
    return None


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    written.append(value)
    return bytes(written)


def _read_varint(message: bytes, start: int) -> tuple[int, int]:
    """The number and where it ends; one that no field here has if it does not end soon."""
    value = 0
    for place, byte in enumerate(message[start : start + 9]):
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            return value, start + place + 1
    return 1 << 64, len(message) + 1


class FederationStub:
    """The three calls of a learner."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.attend = channel.stream_stream(ATTEND, pb.FromLearner.SerializeToString, pb.ToLearner.FromString)
        self.upload = channel.stream_unary(UPLOAD, write_part, pb.Receipt.FromString)
        self.download = channel.unary_stream(DOWNLOAD, pb.ModelRequest.SerializeToString, read_chunk)


def service_handler(
    servicer: Any, read_part: Callable[[bytes], Any] = pb.UploadPart.FromString
) -> grpc.GenericRpcHandler:
    """Make an object with the coroutines attend, upload and download a gRPC service."""
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Attend": grpc.stream_stream_rpc_method_handler(
                servicer.attend, pb.FromLearner.FromString, pb.ToLearner.SerializeToString
            ),
            "Upload": grpc.stream_unary_rpc_method_handler(servicer.upload, read_part, pb.Receipt.SerializeToString),
            # The service reads the request itself: what gRPC cannot read it answers with UNKNOWN.
            "Download": grpc.unary_stream_rpc_method_handler(servicer.download, None, write_chunk),
        },
    )
