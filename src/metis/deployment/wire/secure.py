"""What both ends of a masked round compute alike."""

from __future__ import annotations

import json

from metis.core.canonical import digest
from metis.errors import Refused


def settings_hash(settings: str) -> bytes:
    """What all sites must train alike, as both ends compute it: the settings without the list of learners."""
    document = json.loads(settings)
    document["experiment"].pop("learners", None)
    return digest("settings", json.dumps(document, sort_keys=True, separators=(",", ":")))


def packed(upload: bytes) -> bytes:
    """An encoded `Upload` as it follows the masked numbers: its length, itself, and zeros up to a whole four."""
    return len(upload).to_bytes(4, "little") + upload + bytes(-len(upload) % 4)


def unpacked(content: bytes, start: int) -> bytes:
    """What `packed` put behind the first `start` bytes; Refused if it cannot have."""
    length = int.from_bytes(content[start : start + 4], "little")
    upload = content[start + 4 : start + 4 + length]
    if content[start:] != packed(upload):
        raise Refused("a masked update does not end as it should")
    return upload
