"""Messages with exactly one encoding: what is signed or hashed cannot be read in two ways.

Every value is a letter for its type, its length, and its bytes; nothing is joined by separators. `decode` takes bytes
from anybody and accepts only what `encode` writes: whatever else is refused in one sentence.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from metis.errors import Refused

LARGEST = 1 << 26  # bytes of a message
DEEPEST = 8
HASH = 32  # bytes of every hash, key and share
_BYTES, _TEXT, _TUPLE, _INTEGER, _REAL = b"bstif"
_FLOAT = ">f8"

Kind = TypeVar("Kind", bound="Message")
Value = Any  # int, float, str, bytes, or a tuple of these


def encode(value: Value) -> bytes:
    """The one encoding of numbers, texts, bytes and tuples of them."""
    match value:  # what is most frequent comes first
        case bytes():
            letter, data = b"b", value
        case str():
            letter, data = b"s", value.encode()
        case tuple():
            letter, data = b"t", b"".join([encode(item) for item in value])
        case bool():
            raise TypeError("a message has no truth values")
        case int():
            letter, data = b"i", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
        case float():
            letter, data = b"f", np.array(value, _FLOAT).tobytes()
        case _:
            raise TypeError(f"a message cannot carry a {type(value).__name__}")
    return letter + len(data).to_bytes(4, "big") + data


def decode(data: bytes) -> Value:
    """What `encode` made these bytes of; Refused if it cannot have made them."""
    if len(data) > LARGEST:
        raise Refused(f"a message of {len(data)} bytes is longer than the {LARGEST} that are allowed")
    values = _values(data, 0)
    if len(values) != 1:
        raise Refused(f"a message holds one value, not {len(values)}")
    return values[0]


def _values(data: bytes, depth: int) -> tuple[Value, ...]:
    if depth > DEEPEST:
        raise Refused(f"a message is nested more than {DEEPEST} deep")
    values, start, last = [], 0, len(data)
    while start < last:
        end = start + 5 + int.from_bytes(data[start + 1 : start + 5], "big")
        if start + 5 > last or end > last:
            raise Refused(f"a message ends in the middle of a value, at byte {last}")
        values.append(_value(data[start], data[start + 5 : end], depth))
        start = end
    return tuple(values)


def _value(letter: int, data: bytes, depth: int) -> Value:
    if letter == _BYTES:
        return data
    if letter == _TEXT:
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise Refused("a text of a message is not UTF-8") from None
    if letter == _TUPLE:
        return _values(data, depth + 1)
    if letter == _INTEGER:
        number = int.from_bytes(data, "big", signed=True)
        if len(data) > 9 or len(data) != number.bit_length() // 8 + 1:
            raise Refused("an integer of a message is too long, or not in its shortest form")
        return number
    if letter == _REAL:
        real = float(np.frombuffer(data, _FLOAT)[0]) if len(data) == 8 else math.inf
        if not math.isfinite(real):
            raise Refused("a number of a message is not finite")
        return real
    raise Refused(f"a message has a value of the unknown type {bytes((letter,))!r}")


def digest(purpose: str, *values: Value) -> bytes:
    """SHA-256 of the one encoding of these values; the purpose keeps hashes of different things apart."""
    return hashlib.sha256(encode(("metis", purpose, *values))).digest()


@dataclass(frozen=True)
class Message:
    """What travels or is stored: a dataclass of numbers, texts, bytes, messages, and tuples of one of them."""

    def plain(self) -> Value:
        """As a tuple that `encode` takes."""
        kind: Any = type(self)  # which mypy does not take for hashable
        return (kind.__name__, *[_plain(getattr(self, name)) for name in _types(kind)])

    def encode(self) -> bytes:
        return encode(self.plain())

    @classmethod
    def decode(cls: type[Kind], data: bytes) -> Kind:
        """The message of these bytes; Refused unless they encode one that keeps its own rules."""
        made: Kind = _typed(decode(data), cls, cls.__name__)
        return made


def _plain(value: Value) -> Value:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.plain() if isinstance(value, Message) else value


@cache
def _types(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


@cache
def _item(kind: Any) -> Any:
    """Of what a tuple of this type is; None if it is not one."""
    return get_args(kind)[0] if get_origin(kind) is tuple else None


def _typed(value: Value, kind: Any, where: str) -> Value:
    """The value, if it has this type; messages inside are made of their tuples."""
    if type(value) is kind:
        return value
    item_kind = _item(kind)
    if item_kind is not None:
        if not isinstance(value, tuple):
            raise Refused(f"{where} is not a list")
        return tuple([_typed(item, item_kind, where) for item in value])
    if issubclass(kind, Message):
        types = _types(kind)
        if not isinstance(value, tuple) or not value or value[0] != kind.__name__ or len(value) != len(types) + 1:
            raise Refused(f"{where} is not a {kind.__name__} with {len(types)} fields")
        values = zip(types.items(), value[1:], strict=True)
        return kind(**{name: _typed(item, hint, f"{where}.{name}") for (name, hint), item in values})
    raise Refused(f"{where} is a {type(value).__name__}, not a {kind.__name__}")


def check_hash(where: str, *values: bytes) -> None:
    """Refuse what does not have the length of a hash."""
    for value in values:
        if len(value) != HASH:
            raise Refused(f"{where} has {len(value)} bytes, not {HASH}")
