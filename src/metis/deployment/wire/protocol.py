"""How the messages of `wire.proto` travel: method names, channel settings, client and server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import CHUNK, read_chunk, write_chunk, write_part
from metis.deployment.wire.untrusted import cleaned
from metis.system import SYSTEM

PROTOCOL = 7
_MAX_MESSAGE = CHUNK + (1 << 16)
SERVICE = "metis.Federation"
ADMINISTRATION = "metis.Administration"
ATTEND, HAND_IN, UPLOAD, DOWNLOAD = (f"/{SERVICE}/{name}" for name in ("Attend", "HandIn", "Upload", "Download"))

# Whether the other end is alive is decided above, by whether anything of it arrives: an answer to a ping waits behind
# whatever a slow line or a relay has buffered, and other bytes do not count for gRPC. So these only clear away
# connections that nobody uses any more. Without the third gRPC's own bandwidth ping would still end one after a minute.
KEEPALIVE: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 600_000),
    ("grpc.http2.ping_timeout_ms", 600_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.max_metadata_size", 16_384),
    ("grpc.so_reuseport", 0),  # a second controller on the port is an error, not a lottery
]
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *KEEPALIVE,
    ("grpc.max_receive_message_length", 64 << 20),  # the settings may be long; the controller is trusted with that
    ("grpc.enable_retries", 0),  # whether to send again is decided above, where it is known what was received
]


class FederationStub:
    """The calls of a learner."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.attend = channel.stream_stream(
            ATTEND, pb.FromLearner.SerializeToString, lambda data: cleaned(pb.ToLearner.FromString(data))
        )
        self.hand_in = channel.unary_unary(
            HAND_IN, pb.UploadHeader.SerializeToString, lambda data: cleaned(pb.Receipt.FromString(data))
        )
        self.upload = channel.stream_stream(UPLOAD, write_part, lambda data: cleaned(pb.UploadAnswer.FromString(data)))
        self.download = channel.unary_stream(DOWNLOAD, pb.ModelRequest.SerializeToString, read_chunk)


def service_handler(
    servicer: Any, read_part: Callable[[bytes], Any] = pb.UploadPart.FromString
) -> grpc.GenericRpcHandler:
    """Make an object with the coroutines attend, hand_in, upload and download a gRPC service."""
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Attend": grpc.stream_stream_rpc_method_handler(
                servicer.attend, lambda data: cleaned(pb.FromLearner.FromString(data)), pb.ToLearner.SerializeToString
            ),
            "Upload": grpc.stream_stream_rpc_method_handler(
                servicer.upload, read_part, pb.UploadAnswer.SerializeToString
            ),
            # The service reads these requests itself: what gRPC cannot read it answers with UNKNOWN.
            "HandIn": grpc.unary_unary_rpc_method_handler(servicer.hand_in, None, pb.Receipt.SerializeToString),
            "Download": grpc.unary_stream_rpc_method_handler(servicer.download, None, write_chunk),
        },
    )


def administration_handler(servicer: Any) -> grpc.GenericRpcHandler:
    """Make an object with the coroutines command and read a gRPC service; it decodes the requests itself."""
    return grpc.method_handlers_generic_handler(
        ADMINISTRATION,
        {
            "Command": grpc.unary_unary_rpc_method_handler(servicer.command, None, pb.AdminAnswer.SerializeToString),
            "Read": grpc.unary_stream_rpc_method_handler(servicer.read, None, pb.Chunk.SerializeToString),
        },
    )


def network() -> Any:
    """The functions `server`, `insecure_channel` and `secure_channel` of the machine that runs: those of grpc.aio."""
    return SYSTEM.get().network or grpc.aio
