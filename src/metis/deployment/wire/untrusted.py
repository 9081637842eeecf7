"""What comes over the wire is untrusted, at both ends: its text is made printable and short where it enters."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import Message

from metis.text import printable

LONGEST = 1000  # characters of a text
_LONGEST_NAME = 60
_DOCUMENTS = {"metis.Welcome.settings", "metis.Welcome.layout"}  # JSON, which is parsed and checked, not shown

_M = TypeVar("_M", bound=Message)


def cleaned(message: _M) -> _M:
    """The message itself, no text of which can forge a line, move a terminal's cursor or fill a log."""
    for field, value in message.ListFields():
        if isinstance(value, str):
            if field.full_name not in _DOCUMENTS:
                setattr(message, field.name, printable(value, LONGEST))
        elif isinstance(value, Message):
            cleaned(value)
        elif hasattr(value, "get_or_create"):  # a map from names to messages: one with another name has no use
            for name in list(value):
                if printable(name, _LONGEST_NAME) == name:
                    cleaned(value[name])
                else:
                    del value[name]
        elif hasattr(value, "items"):  # a map from names to numbers
            renamed = {printable(name, _LONGEST_NAME): number for name, number in value.items()}
            value.clear()
            value.update(renamed)
        elif not isinstance(value, (bytes, int, float)) and isinstance(value[0], str):  # a list of names
            value[:] = [printable(text, _LONGEST_NAME) for text in value]
    return message
