"""The bytes of a model as messages: how many at once, and how they are written and read without copies."""

from __future__ import annotations

from metis.deployment.wire import wire_pb2 as pb

CHUNK = 1 << 20  # 1.2-1.6 GB/s on loopback; one large message is six times slower
SMALLEST_CHUNK = 1 << 14
FIRST_STRETCH = 1 << 16  # bytes that are sent before it is known how fast the line is
SMALL = 1 << 16  # bytes of a model that travels inside another message: its own calls would take longer than it does


def chunk_bytes(stretch: int, maximum: int = CHUNK) -> int:
    """Bytes of one message in a stretch of so many: several, since only a whole message shows that something moves."""
    return max(4, min(CHUNK, maximum, max(SMALLEST_CHUNK, stretch // 16)) & ~3)  # whole numbers of the vector


def travels_inside(length: int) -> bool:
    """Whether a model of so many bytes is part of another message."""
    return 0 < length <= SMALL


class Stretch:
    """How many bytes to send, or to ask for, before they are acknowledged: as many as take about `seconds`.

    So heartbeats get through a slow line, whatever buffers it has, and a cut costs no more than these.
    """

    def __init__(self, seconds: float = 2.0) -> None:
        self._seconds, self._first, self.bytes = seconds, FIRST_STRETCH, FIRST_STRETCH

    def took(self, length: int, seconds: float) -> None:
        """So many bytes were acknowledged after so many seconds; a shorter rest at the end says little of the line."""
        if length >= self.bytes:
            fitting = int(length * min(4.0, self._seconds / max(seconds, 1e-6)))
            self.bytes = max(SMALLEST_CHUNK, fitting & ~3)

    def lost(self) -> None:
        """The line was cut, or nothing moved on it any more: begin carefully."""
        self.bytes = min(self.bytes, self._first)


class Piece:
    """Some bytes of a model on the wire, written and read as a `pb.Chunk`.

    These are nearly all that travels, and protobuf would copy each three times at both ends; so they are copied once
    when they are written and not at all when they are read. What is on the wire is the same.
    """

    __slots__ = ("data", "message", "offset")

    def __init__(self, offset: int, data: bytes | memoryview, message: bytes = b"") -> None:
        self.offset, self.data = offset, data
        self.message = message  # as it is written, if it was read from its file together with what is in front


def write_chunk(chunk: pb.Chunk | Piece) -> bytes:
    """As `pb.Chunk.SerializeToString` does it."""
    if not isinstance(chunk, Piece):
        return chunk.SerializeToString()
    return chunk.message or b"".join((chunk_front(chunk.offset, len(chunk.data)), chunk.data))


def write_part(part: pb.UploadPart | Piece) -> bytes:
    """As `pb.UploadPart.SerializeToString` does it; a piece is the part with its chunk."""
    if not isinstance(part, Piece):
        return part.SerializeToString()
    return part.message or b"".join((part_front(part.offset, len(part.data)), part.data))


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


def chunk_front(offset: int, length: int) -> bytes:
    """What is in front of the data of a chunk."""
    front = b"\x08" + _varint(offset) if offset else b""
    return front + b"\x12" + _varint(length) if length else front


def part_front(offset: int, length: int) -> bytes:
    """The same of a chunk that is part of an upload."""
    front = chunk_front(offset, length)
    return b"\x12" + _varint(len(front) + length) + front


def _piece(message: bytes, start: int) -> Piece | None:
    """The chunk from `start` to the end, if it is written exactly as we write it."""
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
    for index, byte in enumerate(message[start : start + 9]):
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            return value, start + index + 1
    return 1 << 64, len(message) + 1
