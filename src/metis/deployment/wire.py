"""How the messages of `wire.proto` travel: method names, channel settings, and models as raw bytes.

A model on the wire and on disk is its vector as little-endian float32 followed by its counters as little-endian
int64: nothing else, so its length follows from the layout and its SHA-256 names it.
"""

from __future__ import annotations

import hashlib
import mmap
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from metis.core.model import Layout, Model
from metis.deployment import wire_pb2 as pb

PROTOCOL = 1
CHUNK = 1 << 20  # 1.2-1.6 GB/s on loopback; one large message is six times slower
MOST_MESSAGE = CHUNK + (1 << 16)
SERVICE = "metis.Federation"
ATTEND, UPLOAD, DOWNLOAD = (f"/{SERVICE}/{name}" for name in ("Attend", "Upload", "Download"))

# A peer that vanished without a word is found within 15 seconds. The third is needed: without it gRPC's own
# bandwidth ping masks the others for a minute.
KEEPALIVE: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
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


class FederationStub:
    """The three calls of a learner."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.attend = channel.stream_stream(ATTEND, pb.FromLearner.SerializeToString, pb.ToLearner.FromString)
        self.upload = channel.stream_unary(UPLOAD, pb.UploadPart.SerializeToString, pb.Receipt.FromString)
        self.download = channel.unary_stream(DOWNLOAD, pb.ModelRequest.SerializeToString, pb.Chunk.FromString)


def service_handler(servicer: Any) -> grpc.GenericRpcHandler:
    """Make an object with the coroutines attend, upload and download a gRPC service."""
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Attend": grpc.stream_stream_rpc_method_handler(
                servicer.attend, pb.FromLearner.FromString, pb.ToLearner.SerializeToString
            ),
            "Upload": grpc.stream_unary_rpc_method_handler(
                servicer.upload, pb.UploadPart.FromString, pb.Receipt.SerializeToString
            ),
            "Download": grpc.unary_stream_rpc_method_handler(
                servicer.download, pb.ModelRequest.FromString, pb.Chunk.SerializeToString
            ),
        },
    )
