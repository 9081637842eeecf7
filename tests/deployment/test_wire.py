"""Pieces of models are on the wire what protobuf would write, and are read as protobuf reads them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from hypothesis import given, strategies as st

from metis.core.model import Layout, Model, TensorSpec
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import (
    CHUNK,
    SMALLEST_CHUNK,
    Piece,
    Stretch,
    chunk_bytes,
    read_chunk,
    read_part,
    write_chunk,
    write_part,
)
from metis.deployment.wire.model_mac import ModelMac, checker, new_model_mac
from metis.deployment.wire.models import model_parts, payload_sha256, read_model, release_memory

OFFSETS = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1))
NEARLY = st.builds(  # messages that begin as a chunk does, and end somehow
    lambda head, number, rest: head + number + rest,
    st.sampled_from([b"", b"\x12", b"\x08", b"\x12\x05\x08", b"\x12\x04\x12", b"\x08\x01\x12"]),
    st.binary(max_size=11),
    st.binary(max_size=5),
)


@given(OFFSETS, st.binary(max_size=300))
def test_what_is_written_is_protobufs(offset: int, data: bytes) -> None:
    """To the byte, and back."""
    chunk = pb.Chunk(offset=offset, data=data)
    part = pb.UploadPart(chunk=chunk)
    for view in (data, memoryview(data)):
        assert write_chunk(Piece(offset, view)) == chunk.SerializeToString() == write_chunk(chunk)
        assert write_part(Piece(offset, view)) == part.SerializeToString() == write_part(part)
    for piece in (read_chunk(chunk.SerializeToString()), read_part(part.SerializeToString())):
        assert isinstance(piece, Piece)
        assert (piece.offset, bytes(piece.data)) == (offset, data)


@given(st.one_of(NEARLY, st.binary(max_size=20)))
def test_any_bytes_are_read_as_protobuf_reads_them(message: bytes) -> None:
    """The same message, or no message in both."""
    try:
        expected: pb.UploadPart | None = pb.UploadPart.FromString(message)
    except DecodeError:
        expected = None
    try:
        found = read_part(message)
    except DecodeError:
        assert expected is None
        return
    assert expected is not None
    if isinstance(found, Piece):
        assert expected.WhichOneof("part") == "chunk"
        assert (found.offset, bytes(found.data)) == (expected.chunk.offset, expected.chunk.data)
    else:
        assert found == expected and expected.WhichOneof("part") != "chunk"


@given(st.one_of(NEARLY, st.binary(max_size=20)))
def test_any_bytes_are_the_chunk_that_protobuf_sees(message: bytes) -> None:
    """The same for the other direction."""
    try:
        expected: pb.Chunk | None = pb.Chunk.FromString(message)
    except DecodeError:
        expected = None
    try:
        found: Piece | None = read_chunk(message)
    except DecodeError:
        found = None
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert (found.offset, bytes(found.data)) == (expected.offset, expected.data)


def test_a_model_that_was_let_go_is_read_again(tmp_path: Path) -> None:
    """Giving its memory back loses nothing."""
    layout = Layout((TensorSpec("w", (100_000,)), TensorSpec("n", (2,), "int64", "counter")))
    model = Model(layout, np.arange(100_000, dtype=np.float32), np.array([1, 2]))
    (tmp_path / "model").write_bytes(b"".join(model_parts(model)))
    mapped = read_model(tmp_path / "model", layout)
    for each in (mapped, model):
        release_memory(each)
        assert payload_sha256(each) == payload_sha256(model)


# --- stretches ----------------------------------------------------------------------------------------


@given(st.floats(100, 1e10), st.integers(1, CHUNK))
def test_a_stretch_takes_about_as_long_on_any_line(speed: float, maximum: int) -> None:
    """Within a few stretches, also when the line is a thousand times slower all of a sudden; in several chunks."""
    stretch = Stretch(2.0)
    for rate in (speed, speed / 1000):
        for _ in range(20):
            before = stretch.bytes
            stretch.took(before, before / rate)
            assert stretch.bytes % 4 == 0 and SMALLEST_CHUNK <= stretch.bytes <= 4 * before
            assert 0 < chunk_bytes(stretch.bytes, maximum) <= max(4, maximum)
        assert stretch.bytes <= max(SMALLEST_CHUNK, 2 * rate)
        assert stretch.bytes >= min(SMALLEST_CHUNK, rate)
    stretch.lost()
    assert stretch.bytes <= 1 << 16


def test_the_rest_of_a_model_does_not_shorten_a_stretch() -> None:
    stretch = Stretch()
    stretch.took(4, 10.0)
    assert stretch.bytes == 1 << 16
    assert chunk_bytes(1 << 30) == CHUNK


@given(st.binary(min_size=1, max_size=100), st.integers(0, 99), st.integers(1, 255))
def test_a_model_mac_differs_with_any_byte(content: bytes, index: int, change: int) -> None:
    """However the bytes are cut; two codes of the same bytes have nothing in common."""
    index %= len(content)
    model_mac, other = new_model_mac(), new_model_mac()
    assert model_mac is not None and other is not None
    for one in (model_mac, other):
        one.update(memoryview(content)[:index])
        one.update(content[index:])
    announced_mac = model_mac.digest()
    assert announced_mac != other.digest()
    damaged = bytearray(content)
    damaged[index] ^= change
    for received, right in ((content, True), (bytes(damaged), False), (content + b"\0", False), (content[:-1], False)):
        check, announced = checker("00" * 32, announced_mac)
        assert isinstance(check, ModelMac)
        check.update(received)
        assert (check.digest() == announced) == right


def test_without_a_model_mac_the_hash_counts() -> None:
    for model_mac in (b"", b"of another length"):
        check, announced = checker(hashlib.sha256(b"model").hexdigest(), model_mac)
        check.update(b"model")
        assert check.digest() == announced
