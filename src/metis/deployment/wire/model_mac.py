"""What tells the bytes of a model from all others: a SHA-256, or a MAC under a fresh key in a seventh of its time.

Written in hexadecimal digits it is a checksum, and its length says which of the two it is. The file of an update is
named by its checksum; behind a MAC there is a part at random, because with the key, which its learner has chosen, other
bytes with the same MAC can be made: no file may ever be replaced by those.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.poly1305 import Poly1305

from metis.deployment.storage import Digest, file_digest
from metis.system import random_bytes, token_hex

_KEY_BYTES, SEAL_BYTES = 32, 48  # the key; key and code
_CHECKSUM = re.compile("[0-9a-f]{64}|[0-9a-f]{96}")
_NAME = re.compile("[0-9a-f]{64}|[0-9a-f]{96}-[0-9a-f]{16}")


class ModelMac:
    """A random key and the Poly1305 of some bytes under it, which finds a wrong bit as a SHA-256 does."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = random_bytes(_KEY_BYTES) if key is None else key
        self._code = Poly1305(self._key)

    def update(self, data: bytes | memoryview) -> None:
        self._code.update(data)

    def digest(self) -> bytes:
        """Key and code; nothing can be added afterwards."""
        return self._key + self._code.finalize()


def new_model_mac() -> ModelMac | None:
    """With a new key; None where the system does not allow Poly1305."""
    try:
        return ModelMac()
    except UnsupportedAlgorithm:
        return None


def is_checksum(text: str) -> bool:
    """Whether it is one, as far as it can be seen."""
    return _CHECKSUM.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Whether a file can be called so."""
    return _NAME.fullmatch(text) is not None


def name_of(checksum: str) -> str:
    """What the file with these bytes is called."""
    return checksum if len(checksum) == 64 else f"{checksum}-{token_hex(8)}"


def checksum_in(name: str) -> str:
    """Of the file with this name."""
    return name.partition("-")[0]


def digest_like(checksum: str) -> Digest:
    """What gives this checksum for the bytes that have it."""
    if len(checksum) != 2 * SEAL_BYTES:
        return hashlib.sha256()
    return ModelMac(bytes.fromhex(checksum)[:_KEY_BYTES])


def checksum_of(content: bytes, like: str) -> str:
    """Of these bytes, of the kind that this checksum or name has."""
    digest = digest_like(checksum_in(like))
    digest.update(content)
    return digest.digest().hex()


def has_checksum(path: Path, checksum: str) -> bool:
    """Whether the content of a file is the one that has it; a DataError if it is sealed and damaged."""
    return file_digest(path, digest_like(checksum)).hex() == checksum


def checker(sha256: str, model_mac: bytes) -> tuple[Digest, bytes]:
    """What to update with the bytes of a model, and the digest that it must have then.

    Checks the SHA-256 if there is no code.
    """
    if len(model_mac) == SEAL_BYTES:
        with contextlib.suppress(UnsupportedAlgorithm):
            return ModelMac(model_mac[:_KEY_BYTES]), model_mac
    return hashlib.sha256(), bytes.fromhex(sha256)
