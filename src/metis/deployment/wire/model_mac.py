"""A message authentication code of a community model: checked by learners in a seventh of the time of a SHA-256."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.poly1305 import Poly1305

from metis.system import random_bytes

_KEY_BYTES, _MAC_BYTES = 32, 48  # the key; key and code


class ModelMac:
    """A random key and the Poly1305 of some bytes under it, which finds a wrong bit as a SHA-256 does.

    Unlike a SHA-256 it names nothing: with the key, other bytes with the same code can be made.
    """

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


def checker(sha256: str, model_mac: bytes) -> tuple[Any, bytes]:
    """What to update with the bytes of a model, and the digest that it must have then.

    Checks the SHA-256 if there is no code.
    """
    if len(model_mac) == _MAC_BYTES:
        with contextlib.suppress(UnsupportedAlgorithm):
            return ModelMac(model_mac[:_KEY_BYTES]), model_mac
    return hashlib.sha256(), bytes.fromhex(sha256)
