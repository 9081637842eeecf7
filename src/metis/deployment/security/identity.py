"""Identities in a deployment: kits, mTLS credentials, the peer of a call, and revocation.

A kit is a folder: `ca.pem`, `certificate.pem`, `key.pem`, and for a controller `revoked.pem`. Its
holder is identified by the URI `metis://ROLE/NAME` in the certificate. `authority.py` makes kits, `preflight.py` tries
them out.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes
from cryptography.x509.oid import NameOID

from metis.errors import ConfigError, LearnerError
from metis.privacy.keys import Identity

ROLES = ("learner", "controller", "admin", "viewer")
AUTHORITY, CERTIFICATE, KEY, REVOKED, REQUEST = "ca.pem", "certificate.pem", "key.pem", "revoked.pem", "request.csr"
SOON = timedelta(days=30)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_log = logging.getLogger(__name__)


# --- words ------------------------------------------------------------------------------------


def now_utc() -> datetime:
    """The current time, as certificates are compared with it."""
    return datetime.now(timezone.utc)


def moment(at: datetime) -> str:
    """A date and time as messages show it."""
    return f"{at:%Y-%m-%d %H:%M} UTC"


def span(length: timedelta) -> str:
    """A length of time in its largest unit."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        count = int(length.total_seconds() // size)
        if count:
            return f"{count:,} {unit}{'s' * (count > 1)}"
    return "less than a minute"


def fingerprint(key: PublicKeyTypes) -> str:
    """SHA-256 of a public key, short enough to be read aloud, for a site and the keeper of the CA to compare."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(public_bytes(key))
    return digest.finalize()[:16].hex(":", 2)


def public_bytes(key: PublicKeyTypes) -> bytes:
    """The encoding in which keys are compared."""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def check_name(name: str) -> str:
    """The name itself, if it is a valid name of a learner, a controller or an admin."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"'{name}' is not a valid name; allowed are up to 64 letters (a-z, A-Z), digits, '-', '_' and '.', and "
            "the first must be a letter or a digit"
        )
    return name


# --- kits -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kit:
    """A folder with a certificate, its key and the CA, as read when it was loaded; the key stays on disk."""

    folder: Path
    authority: x509.Certificate
    certificate: x509.Certificate
    role: str
    name: str

    @property
    def not_before(self) -> datetime:
        return self.certificate.not_valid_before_utc

    @property
    def not_after(self) -> datetime:
        return self.certificate.not_valid_after_utc

    @property
    def serial(self) -> int:
        return self.certificate.serial_number

    @property
    def hosts(self) -> list[str]:
        return hosts_of(self.certificate)

    def __str__(self) -> str:
        return f"{self.role} '{self.name}'"


def load_kit(folder: str | Path) -> Kit:
    """Read a kit; a file that is missing or is not PEM raises ConfigError."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"there is no kit {folder}; it is a folder with {AUTHORITY}, {CERTIFICATE} and {KEY}")
    if (folder / "ca-key.pem").exists():
        raise ConfigError(f"{folder} is the folder of a CA; a kit is made by: metis certificates issue NAME")
    if (folder / REQUEST).exists() and not (folder / CERTIFICATE).exists():
        raise ConfigError(
            f"{folder} waits for its certificate: send {folder / REQUEST} to the keeper of the CA, and put the "
            f"{CERTIFICATE} and {AUTHORITY} that you get back into the same folder"
        )
    authority, certificate = (load_certificate(folder / name) for name in (AUTHORITY, CERTIFICATE))
    read_file(folder / KEY)
    role, name = identity_of(certificate, str(folder / CERTIFICATE))
    return Kit(folder, authority, certificate, role, name)


def check_kit(kit: Kit, role: str | None = None, now: datetime | None = None) -> None:
    """Raise ConfigError with the first thing that is wrong with a kit; nothing is dialled."""
    now, path, authority = now or now_utc(), kit.folder / CERTIFICATE, kit.folder / AUTHORITY
    if role is not None and kit.role != role:
        raise ConfigError(f"{path} belongs to {kit}, but this is a {role}; give the kit of a {role}")
    if not signed_by(kit.certificate, kit.authority):
        raise ConfigError(f"{path} is not signed by {authority}: {signers(kit.certificate, kit.authority)}")
    if public_bytes(load_key(kit.folder / KEY).public_key()) != public_bytes(kit.certificate.public_key()):
        raise ConfigError(f"{kit.folder / KEY} does not belong to {path}; use the files of one kit")
    if os.name == "posix" and (kit.folder / KEY).stat().st_mode & 0o007:
        where = kit.folder / KEY
        raise ConfigError(f"{where} can be read by every user of this machine; make it private: chmod 600 {where}")
    if now > kit.not_before and (problem := out_of_date(kit.authority, now)):  # a slow clock shows in the younger one
        raise ConfigError(f"{authority}: the CA '{_common_name(kit.authority)}' {problem}")
    if problem := out_of_date(kit.certificate, now):
        renew = (
            f"; the keeper of the CA renews it with: metis certificates renew {kit.name}" if now > kit.not_after else ""
        )
        raise ConfigError(f"{path}: the certificate of {kit} {problem}{renew}")


def signing_identity(folder: Path) -> Identity:
    """Who signs in the secure sum, and with which key."""
    kit, key = load_kit(folder), load_key(folder / KEY)
    if not isinstance(key, (ec.EllipticCurvePrivateKey, rsa.RSAPrivateKey, Ed25519PrivateKey)):
        raise ConfigError(f"{folder / KEY} is a key that cannot sign")
    return Identity(kit.name, key, kit.certificate.public_bytes(serialization.Encoding.DER))


def warnings(kit: Kit, now: datetime | None = None) -> list[str]:
    """What will soon be a problem."""
    now, found = now or now_utc(), []
    for what, held in ((f"the certificate of {kit}", kit.certificate), ("the CA", kit.authority)):
        end = held.not_valid_after_utc
        if timedelta(0) <= end - now < SOON:
            found.append(f"{what} expires in {span(end - now)}, on {moment(end)}")
    if os.name == "posix" and (kit.folder / KEY).stat().st_mode & 0o070:
        found.append(f"{kit.folder / KEY} can be read by its group")
    return found


def read_file(path: Path) -> bytes:
    """The content of a file; ConfigError if it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing") from None
    except OSError as problem:
        raise ConfigError(f"{path} cannot be read: {problem.strerror}") from None


def load_certificate(path: Path) -> x509.Certificate:
    """The one certificate of a PEM file."""
    try:
        (certificate,) = x509.load_pem_x509_certificates(read_file(path))
    except ValueError:
        raise ConfigError(
            f"{path} does not contain exactly one certificate in PEM form; is it damaged, or the wrong file?"
        ) from None
    return certificate


def load_key(path: Path) -> PrivateKeyTypes:
    """The private key of a PEM file."""
    try:
        return serialization.load_pem_private_key(read_file(path), None)
    except TypeError:
        raise ConfigError(
            f"{path} is protected by a passphrase; Metis needs a key without one, in a file of mode 0600"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(
            f"{path} does not contain a private key in PEM form; is it damaged, or the wrong file?"
        ) from None


def identity_of(certificate: x509.Certificate, source: str) -> tuple[str, str]:
    """Role and name: of exactly one URI metis://ROLE/NAME."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = [uri for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if uri.startswith("metis:")]
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        uris = []
    parts = uris[0].split("/") if len(uris) == 1 else []
    if len(parts) != 4 or parts[1] or parts[2] not in ROLES or not _NAME.fullmatch(parts[3]):
        raise ConfigError(f"{source} is not a certificate of Metis: it needs one URI metis://ROLE/NAME and has {uris}")
    return parts[2], parts[3]


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """The names and addresses that a controller may be dialled by."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether the authority's key signed the certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _common_name(certificate: x509.Certificate, *, issuer: bool = False) -> str:
    found = (certificate.issuer if issuer else certificate.subject).get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else "(no name)"


def signers(certificate: x509.Certificate, authority: x509.Certificate) -> str:
    theirs, ours = _common_name(certificate, issuer=True), _common_name(authority)
    if theirs == ours:
        return f"both CAs are called '{ours}', but they have different keys"
    return f"it is signed by '{theirs}', but the CA of this kit is '{ours}'"


def out_of_date(certificate: x509.Certificate, now: datetime) -> str | None:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        return f"expired on {moment(end)}, {span(now - end)} ago (this machine's clock says {moment(now)})"
    if now < start:
        return (
            f"is not valid before {moment(start)}, and this machine's clock says {moment(now)}: either that clock is "
            f"slow by {span(start - now)} or more, or the clock of the machine that made the certificate was fast"
        )
    return None


# --- gRPC -------------------------------------------------------------------------------------


def channel_credentials(kit: Kit) -> grpc.ChannelCredentials:
    """A learner's side of mTLS; a renewed certificate is used by the next channel that is made."""
    authority, certificate, key = (read_file(kit.folder / name) for name in (AUTHORITY, CERTIFICATE, KEY))
    return grpc.ssl_channel_credentials(authority, key, certificate)


def server_credentials(kit: Kit) -> grpc.ServerCredentials:
    """The controller's side of mTLS: callers must show a certificate of our CA; a renewed kit is used at once."""
    files = [kit.folder / name for name in (AUTHORITY, CERTIFICATE, KEY)]
    seen = [_stamp(path) for path in files]

    def configuration() -> grpc.ServerCertificateConfiguration:
        authority, certificate, key = map(read_file, files)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

    def renewed() -> grpc.ServerCertificateConfiguration | None:  # called by gRPC before every handshake
        nonlocal seen
        stamps = [_stamp(path) for path in files]
        if stamps == seen:
            return None
        seen = stamps
        try:
            fresh = load_kit(kit.folder)
            check_kit(fresh, "controller")
            changed = configuration()
        except ConfigError as problem:  # perhaps half copied; the next change is looked at again
            _log.warning("the identity has changed and cannot be used, the previous one stays in use: %s", problem)
            return None
        _log.info("the identity has changed: %s, valid until %s", fresh, moment(fresh.not_after))
        return changed

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        renewed,  # type: ignore[arg-type]  # the stubs do not know that None means unchanged
        require_client_authentication=True,
    )


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


@dataclass(frozen=True)
class Peer:
    """The other side of a call, by the certificate that was verified in the handshake."""

    role: str
    name: str
    serial: int
    not_after: datetime  # an open connection outlives it unless this is checked


def peer_of(auth_context: Mapping[str, Iterable[bytes]]) -> Peer:
    """The peer of a call, from gRPC's `context.auth_context()`; LearnerError if it has no certificate of Metis."""
    shown = list(auth_context.get("x509_pem_cert", ()))
    if len(shown) != 1:
        raise LearnerError("the caller did not present a certificate")
    return _peer(shown[0])


@functools.lru_cache(4096)  # a certificate is read once, not at every call
def _peer(pem: bytes) -> Peer:
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        role, name = identity_of(certificate, "the caller's certificate")
    except (ConfigError, ValueError) as problem:
        raise LearnerError(str(problem)) from None
    return Peer(role, name, certificate.serial_number, certificate.not_valid_after_utc)


class Revocations:
    """The list `revoked.pem` of a controller's kit, read again whenever the file changes."""

    def __init__(self, kit: Kit) -> None:
        self._folder = kit.folder
        self._stamp: tuple[int, ...] | None = None
        self._revoked: x509.CertificateRevocationList | None = None
        self._problem: str | None = None

    def reason(self, serial: int) -> str | None:
        """Why a certificate is no longer valid, or None; ConfigError if the list cannot be trusted."""
        path = self._folder / REVOKED
        stamp = _stamp(path)
        if stamp is not None and stamp != self._stamp:  # if it was deleted, its content still holds
            self._stamp, self._problem = stamp, self._read(path)
        if self._problem is not None:
            raise ConfigError(self._problem)
        found = self._revoked and self._revoked.get_revoked_certificate_by_serial_number(serial)
        return f"certificate {serial:x} was revoked on {moment(found.revocation_date_utc)}" if found else None

    def _read(self, path: Path) -> str | None:
        try:
            content = x509.load_pem_x509_crl(read_file(path))
            key = load_certificate(self._folder / AUTHORITY).public_key()
            if not content.is_signature_valid(key):  # type: ignore[arg-type]
                return f"{path} is not signed by {self._folder / AUTHORITY}; copy {REVOKED} from the folder of the CA"
        except (ValueError, TypeError, UnsupportedAlgorithm):
            return f"{path} does not contain a revocation list in PEM form; copy {REVOKED} from the folder of the CA"
        except ConfigError as problem:
            return str(problem)
        self._revoked = content
        return None
