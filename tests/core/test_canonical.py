"""Messages with exactly one encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, strategies as st

from metis.core import canonical
from metis.core.canonical import Message, check_hash, decode, digest, encode
from metis.errors import Refused

PLAIN = (
    st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=8)


@dataclass(frozen=True)
class Inner(Message):
    number: int


@dataclass(frozen=True)
class Outer(Message):
    text: str
    real: float
    data: bytes
    inner: Inner
    several: tuple[Inner, ...]

    def __post_init__(self) -> None:
        check_hash("the data", self.data)


OUTER = Outer("x", 0.5, bytes(32), Inner(-3), (Inner(0), Inner(2**62)))


@given(VALUES)
def test_decode_inverts_encode(value: Any) -> None:
    """Every value comes back, with its types."""
    again = decode(encode(value))
    assert again == value
    assert encode(again) == encode(value)


@given(VALUES, VALUES)
def test_different_values_have_different_encodings(one: Any, other: Any) -> None:
    """Also 1 and 1.0, and ("ab", "c") and ("a", "bc")."""
    assert (encode(one) == encode(other)) == (repr(one) == repr(other))


@given(st.binary(max_size=60))
def test_decode_accepts_only_what_encode_writes(data: bytes) -> None:
    """Bytes from anybody are refused in a sentence, or are the one encoding of a value."""
    try:
        value = decode(data)
    except Refused:
        return
    assert encode(value) == data


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_changed_byte_of_a_message_never_gives_another_reading(position: int, byte: int) -> None:
    """What decodes encodes to the same bytes again."""
    data = bytearray(OUTER.encode())
    data[position % len(data)] = byte
    try:
        message = Outer.decode(bytes(data))
    except Refused:
        return
    assert message.encode() == bytes(data)


def test_a_message_comes_back() -> None:
    assert Outer.decode(OUTER.encode()) == OUTER


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "one value, not 0"),
        (encode(1) + encode(2), "one value, not 2"),
        (b"i\x00\x00", "ends in the middle"),
        (b"b\x00\x00\x00\x05abc", "ends in the middle"),
        (b"i\x00\x00\x00\x02\x00\x01", "shortest form"),
        (b"i\x00\x00\x00\x0a" + bytes(10), "too long"),
        (b"i\x00\x00\x00\x00", "shortest form"),
        (b"f\x00\x00\x00\x04" + bytes(4), "not finite"),
        (encode(float("nan")), "not finite"),
        (b"s\x00\x00\x00\x01\xff", "UTF-8"),
        (b"x\x00\x00\x00\x00", "unknown type b'x'"),
        (encode(((((((((((1,),),),),),),),),),)), "nested"),
    ],
)
def test_what_is_malformed_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(Refused, match=words):
        decode(data)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("Outer", "not a Outer with 5 fields"),
        ((), "not a Outer"),
        (("Inner", 1), "not a Outer"),
        (("Outer", "x", 0.5, bytes(32), ("Inner", 1)), "5 fields"),
        (("Outer", "x", 0.5, bytes(32), ("Inner", 1), 3), "Outer.several is not a list"),
        (("Outer", "x", 0.5, bytes(32), ("Inner", "1"), ()), "Outer.inner.number is a str, not a int"),
        (("Outer", "x", 1, bytes(32), ("Inner", 1), ()), "Outer.real is a int, not a float"),
        (("Outer", "x", 1.0, bytes(31), ("Inner", 1), ()), "the data has 31 bytes, not 32"),
    ],
)
def test_what_is_not_the_message_is_refused(value: Any, words: str) -> None:
    with pytest.raises(Refused, match=words):
        Outer.decode(encode(value))


def test_a_message_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical, "LARGEST", 10)
    with pytest.raises(Refused, match="longer than the 10"):
        decode(encode("0123456789"))


@pytest.mark.parametrize("value", [True, None, [1]])
def test_what_a_message_cannot_carry(value: Any) -> None:
    with pytest.raises(TypeError, match="a message"):
        encode(value)


def test_digests_of_different_purposes_differ() -> None:
    assert digest("one", 1) != digest("other", 1)
    assert digest("one", "a", "b") != digest("one", "ab")
