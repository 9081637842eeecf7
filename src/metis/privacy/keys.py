"""Who signs, and with whom a secret is shared: certificates' keys, the X25519 keys of a round, and what is derived.

A signature counts only if the key that made it belongs to a pinned peer: by a certificate of the consortium's CA for
exactly that learner, or by a public key that the site holds itself. The controller's word is never asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone

from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from metis.core.canonical import encode
from metis.core.secure_sum import PROTOCOL, Opening, SignedKey
from metis.errors import Refused

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | Ed25519PrivateKey
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | Ed25519PublicKey
Random = Callable[[int], bytes]

# Deterministic, so that a statement that is signed again after a crash has the same bytes.
_ECDSA = ec.ECDSA(SHA256(), deterministic_signing=True)
_PSS = padding.PSS(padding.MGF1(SHA256()), padding.PSS.DIGEST_LENGTH)


@dataclass(frozen=True)
class Identity:
    """A learner's name, the private key of its certificate, and the certificate (DER)."""

    name: str
    key: PrivateKey
    certificate: bytes = b""

    def sign(self, message: bytes) -> bytes:
        match self.key:
            case ec.EllipticCurvePrivateKey():
                return self.key.sign(message, _ECDSA)
            case rsa.RSAPrivateKey():
                return self.key.sign(message, _PSS, SHA256())
            case _:
                return self.key.sign(message)


@dataclass(frozen=True)
class Peers:
    """Whose signature is whose, by the certificate of the CA or by public keys that were pinned by hand."""

    authority: x509.Certificate | None = None
    pinned: Mapping[str, PublicKey] = field(default_factory=dict)
    now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)

    def key(self, name: str, certificate: bytes) -> PublicKey:
        """The public key of a learner; Refused unless it is pinned or certified for exactly this name."""
        if name in self.pinned:
            return self.pinned[name]
        if self.authority is None:
            raise Refused(f"the public key of {name} is not pinned here")
        try:
            shown = x509.load_der_x509_certificate(certificate)
            shown.verify_directly_issued_by(self.authority)
            names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            uris = list(names.get_values_for_type(x509.UniformResourceIdentifier))
            key = shown.public_key()
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.ExtensionNotFound):
            raise Refused(f"the certificate of {name} is not one of this consortium's CA") from None
        if [uri for uri in uris if uri.startswith("metis:")] != [f"metis://learner/{name}"]:
            raise Refused(f"the certificate of {name} is for {', '.join(uris) or 'nobody'}")
        if not shown.not_valid_before_utc <= self.now() <= shown.not_valid_after_utc:
            raise Refused(f"the certificate of {name} is not valid at this time")
        if not isinstance(key, (ec.EllipticCurvePublicKey, rsa.RSAPublicKey, Ed25519PublicKey)):
            raise Refused(f"the certificate of {name} has a key that cannot sign here")
        return key

    def keys(self, opening: Opening) -> dict[str, PublicKey]:
        """The public keys of a cohort; Refused unless every key of the round is signed, for this run and version."""
        found = {}
        for place in opening.members:
            signed = place.key
            if (signed.run, signed.version) != (opening.run, opening.version):
                raise Refused(f"the key of {place.name} is for another run or version")
            found[place.name] = self.key(place.name, signed.certificate)
            check_signature(found[place.name], signed.signed, signed.signature, f"the key of {place.name}")
        return found


def check_signature(key: PublicKey, message: bytes, signature: bytes, what: str) -> None:
    """Refuse what this key has not signed."""
    try:
        match key:
            case ec.EllipticCurvePublicKey():
                key.verify(signature, message, _ECDSA)
            case rsa.RSAPublicKey():
                key.verify(signature, message, _PSS, SHA256())
            case _:
                key.verify(signature, message)
    except InvalidSignature:
        raise Refused(f"{what} is not signed by the learner that it names") from None


# --- the keys of a round ----------------------------------------------------------------------


def new_key(identity: Identity, run: str, version: int, random: Random) -> tuple[bytes, SignedKey]:
    """A private key and what is published of it."""
    private = random(32)
    public = X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
    unsigned = SignedKey(identity.name, run, version, public, identity.certificate, b"")
    signature = identity.sign(unsigned.signed)
    return private, SignedKey(identity.name, run, version, public, identity.certificate, signature)


def agree(private: bytes, public: bytes) -> bytes:
    """The secret of a pair; Refused if the other's key is one that makes it predictable."""
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise Refused("a member's key of the round has a predictable secret with every other") from None


def derive(secret: bytes, *purpose: str | int | bytes) -> bytes:
    """32 bytes for one purpose (HKDF)."""
    return HKDF(SHA256(), 32, salt=None, info=encode(("metis", PROTOCOL, *purpose))).derive(secret)


def pair_key(pair: bytes, purpose: str, context: bytes, dealer: str, member: str) -> bytes:
    """A key that two members share, for one purpose and in one direction."""
    return derive(pair, purpose, context, dealer, member)


def seal(key: bytes, data: bytes, bound_to: bytes, random: Random) -> bytes:
    """A box that only holders of the key can open, and only for what it is bound to."""
    nonce = random(12)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, data, bound_to)


def unseal(key: bytes, box: bytes, bound_to: bytes) -> bytes | None:
    """What is in a box; None if it was not sealed with this key and for this."""
    try:
        return ChaCha20Poly1305(key).decrypt(box[:12], box[12:], bound_to)
    except (InvalidTag, ValueError):
        return None
