"""Messages with exactly one encoding: what is signed or hashed cannot be read in two ways.

Every value is a letter for its type, its length, and its bytes; nothing is joined by separators. `decode` takes bytes
from anybody and accepts only what `encode` writes: whatever else is refused in one sentence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from metis.errors import Refused

LARGEST = 1 << 26  # bytes of a message
DEEPEST = 8
HASH = 32  # bytes of every hash, key and share

Kind = TypeVar("Kind", bound="Message")
Value = Any  # int, float, str, bytes, or a tuple of these


def encode(value: Value) -> bytes:
    """The one encoding of numbers, texts, bytes and tuples of them."""
    match value:
        case bool():
            raise TypeError("a message has no truth values")
        case int():
            letter, data = b"i", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
        case float():
            letter, data = b"f", np.array(value, ">f8").tobytes()
        case str():
            letter, data = b"s", value.encode()
        case bytes():
            letter, data = b"b", value
        case tuple():
            letter, data = b"t", b"".join(map(encode, value))
        case _:
            raise TypeError(f"a message cannot carry a {type(value).__name__}")
    return letter + len(data).to_bytes(4, "big") + data


def decode(data: bytes) -> Value:
    """What `encode` made these bytes of; Refused if it cannot have made them."""
    if len(data) > LARGEST:
        raise Refused(f"a message of {len(data)} bytes is longer than the {LARGEST} that are allowed")
    values = tuple(_values(data, 0))
    if len(values) != 1:
        raise Refused(f"a message holds one value, not {len(values)}")
    return values[0]


def _values(data: bytes, depth: int) -> Iterator[Value]:
    if depth > DEEPEST:
        raise Refused(f"a message is nested more than {DEEPEST} deep")
    start = 0
    while start < len(data):
        end = start + 5 + int.from_bytes(data[start + 1 : start + 5], "big")
        if start + 5 > len(data) or end > len(data):
            raise Refused(f"a message ends in the middle of a value, at byte {len(data)}")
        yield _value(data[start : start + 1], data[start + 5 : end], depth)
        start = end


def _value(letter: bytes, data: bytes, depth: int) -> Value:
    match letter:
        case b"i":
            number = int.from_bytes(data, "big", signed=True)
            if len(data) > 9 or encode(number)[5:] != data:
                raise Refused("an integer of a message is too long, or not in its shortest form")
            return number
        case b"f":
            real = float(np.frombuffer(data, ">f8")[0]) if len(data) == 8 else np.inf
            if not np.isfinite(real):
                raise Refused("a number of a message is not finite")
            return real
        case b"s":
            try:
                return data.decode()
            except UnicodeDecodeError:
                raise Refused("a text of a message is not UTF-8") from None
        case b"b":
            return data
        case b"t":
            return tuple(_values(data, depth + 1))
        case _:
            raise Refused(f"a message has a value of the unknown type {letter!r}")


def digest(purpose: str, *values: Value) -> bytes:
    """SHA-256 of the one encoding of these values; the purpose keeps hashes of different things apart."""
    return hashlib.sha256(encode(("metis", purpose, *values))).digest()


@dataclass(frozen=True)
class Message:
    """What travels or is stored: a dataclass of numbers, texts, bytes, messages, and tuples of one of them."""

    def plain(self) -> Value:
        """As a tuple that `encode` takes."""
        return (type(self).__name__, *(_plain(getattr(self, field.name)) for field in fields(self)))

    def encode(self) -> bytes:
        return encode(self.plain())

    @classmethod
    def decode(cls: type[Kind], data: bytes) -> Kind:
        """The message of these bytes; Refused unless they encode one that keeps its own rules."""
        made: Kind = _typed(decode(data), cls, cls.__name__)
        return made


def _plain(value: Value) -> Value:
    if isinstance(value, Message):
        return value.plain()
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


@cache
def _types(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _typed(value: Value, kind: Any, where: str) -> Value:
    """The value, if it has this type; messages inside are made of their tuples."""
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            raise Refused(f"{where} is not a list")
        return tuple(_typed(item, get_args(kind)[0], where) for item in value)
    if isinstance(kind, type) and issubclass(kind, Message):
        known: Any = kind  # a class of messages, which mypy does not take for hashable
        types = _types(known)
        if not isinstance(value, tuple) or not value or value[0] != kind.__name__ or len(value) != len(types) + 1:
            raise Refused(f"{where} is not a {kind.__name__} with {len(types)} fields")
        values = zip(types.items(), value[1:], strict=True)
        return kind(**{name: _typed(item, hint, f"{where}.{name}") for (name, hint), item in values})
    if type(value) is not kind:
        raise Refused(f"{where} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def check_hash(where: str, *values: bytes) -> None:
    """Refuse what does not have the length of a hash."""
    for value in values:
        if len(value) != HASH:
            raise Refused(f"{where} has {len(value)} bytes, not {HASH}")
