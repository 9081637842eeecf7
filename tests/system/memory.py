"""Functions whose result is determined by their arguments are computed once for all simulated processes.

Every learner of a seed checks the same certificates and signatures and reads the same messages; here all of them are in
one process. What is refused is computed each time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from metis.core.canonical import Message
from metis.deployment.controller import sums
from metis.deployment.learner import site_policy, sums as learner_sums
from metis.deployment.security import identity
from metis.deployment.trainer import masking
from metis.privacy import keys, member, opener

_remembered = lru_cache(4096)
_check, _key = keys.check_signature, keys.Peers.key


@_remembered
def _decoded(decode: Any, kind: type[Message], data: bytes) -> Message:
    made: Message = decode(kind, data)
    return made


@_remembered
def _certified(authority: x509.Certificate, name: str, certificate: bytes) -> keys.PublicKey:
    return _key(keys.Peers(authority), name, certificate)


@_remembered
def _signed(key: bytes, message: bytes, signature: bytes, what: str) -> None:
    _check(Ed25519PublicKey.from_public_bytes(key), message, signature, what)


def _signed_by(key: Any, message: bytes, signature: bytes, what: str) -> None:
    _signed(key.public_bytes_raw(), message, signature, what)


def _key_of(peers: keys.Peers, name: str, certificate: bytes) -> keys.PublicKey:
    assert peers.authority is not None and not peers.pinned, "as in the simulation"
    return _certified(peers.authority, name, certificate)


def remember() -> None:
    """Whoever in the simulated system calls these functions gets what they returned before."""
    decode: Any = Message.__dict__["decode"].__func__
    changes: tuple[tuple[Any, str, Any], ...] = (
        (Message, "decode", classmethod(lambda kind, data: _decoded(decode, kind, data))),
        (keys.Peers, "key", _key_of),
        *((module, "check_signature", _signed_by) for module in (keys, member, opener, sums)),
        *((module, "agree", _remembered(keys.agree)) for module in (keys, member)),
        # Nobody changes the files of a kit while a seed is played.
        *((module, "signing_identity", _remembered(identity.signing_identity)) for module in (learner_sums, masking)),
        (learner_sums, "load_kit", _remembered(identity.load_kit)),
        (site_policy, "_content", _remembered(site_policy._content)),
    )
    for owner, name, function in changes:
        setattr(owner, name, function)
