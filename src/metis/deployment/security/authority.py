"""The small certificate authority of a consortium: a folder with its key and a register of what it signed.

The register `issued.json` is the source of truth: it is written before a certificate is handed out, so every
certificate can be revoked, and the revocation list is made from it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from metis.deployment.security.identity import (
    AUTHORITY,
    CERTIFICATE,
    KEY,
    REQUEST,
    REVOKED,
    ROLES,
    check_name,
    identity_of,
    load_certificate,
    load_key,
    moment,
    now_utc,
    public_bytes,
    read_file,
)
from metis.errors import ConfigError
from metis.files import locked, write_durable

AUTHORITY_KEY, REGISTER = "ca-key.pem", "issued.json"
SKEW = timedelta(minutes=5)  # a site whose clock is a little slow can use its certificate at once
SiteKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey
_HOST = re.compile(
    r"(?=.{1,253}$)([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
)


@dataclass
class Entry:
    """One certificate in the register."""

    name: str
    role: str
    hosts: list[str]
    serial: str  # hexadecimal
    issued: str
    not_after: str
    revoked: str | None
    certificate: str

    def parsed(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate(self.certificate.encode())


class Authority:
    """An existing CA; every change goes through the register."""

    def __init__(self, folder: Path) -> None:
        if not (folder / AUTHORITY_KEY).exists() or not (folder / AUTHORITY).exists():
            raise ConfigError(
                f"{folder} does not contain a CA ({AUTHORITY}, {AUTHORITY_KEY}); give its folder with --ca, "
                "or create one with: "
                f"metis certificates init {folder}"
            )
        key = load_key(folder / AUTHORITY_KEY)
        self.folder, self.certificate = folder, load_certificate(folder / AUTHORITY)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or public_bytes(key.public_key()) != public_bytes(
            self.certificate.public_key()
        ):
            raise ConfigError(f"{folder / AUTHORITY_KEY} does not belong to {folder / AUTHORITY}")
        self._key = key

    @classmethod
    def create(cls, folder: Path, name: str, days: int = 3650, now: datetime | None = None) -> Authority:
        """Create a CA with an empty register; the folder must not contain one."""
        held = [part for part in (AUTHORITY, AUTHORITY_KEY, REGISTER) if (folder / part).exists()]
        if held:
            raise ConfigError(
                f"{folder} already contains a CA ({', '.join(held)}), and overwriting it would lock out every site; "
                "choose another folder"
            )
        if not 1 <= len(name) <= 64 or not name.isprintable() or name != name.strip():
            raise ConfigError(f"the name of a consortium must have 1 to 64 printable characters, not {name!r}")
        now = (now or now_utc()).replace(microsecond=0)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(subject, subject, key.public_key(), now - SKEW, now + timedelta(days=days), _serial())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(sign=True), critical=True)
        folder.mkdir(parents=True, exist_ok=True)
        write_durable(folder / AUTHORITY_KEY, _key_pem(key), private=True)
        write_durable(folder / AUTHORITY, builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        authority = cls(folder)
        authority._write(authority.folder / REGISTER, [])
        authority._write_revoked([], now)
        return authority

    def issue(
        self,
        name: str,
        role: str = "learner",
        hosts: Sequence[str] = (),
        days: int = 365,
        key: SiteKey | None = None,
        now: datetime | None = None,
        *,
        again: bool = False,
    ) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey | None]:
        """Sign a certificate for a name, with a new key unless the site's public key is given.

        A name that has a valid certificate needs `again`, so that two sites do not get the same name by mistake.
        """
        check_name(name)
        if role not in ROLES:
            raise ConfigError(f"'{role}' is not a role; the roles are {', '.join(ROLES)}")
        if role == "controller" and not hosts:
            raise ConfigError(
                f"a controller needs the names or addresses that learners dial, as in: metis certificates issue "
                f"{name} --role controller --host federation.example.org"
            )
        if role != "controller" and hosts:
            raise ConfigError(f"only a controller has hosts, since learners dial it; a {role} is not dialled")
        hosts = [_checked_host(host) for host in hosts]
        moment_now = (now or now_utc()).replace(microsecond=0)
        with self._register() as entries:
            valid = [entry for entry in entries if entry.name == name and state(entry, entries, moment_now) == "valid"]
            if valid and not again:
                raise ConfigError(
                    f"{valid[0].role} '{name}' already has a certificate, valid until {valid[0].not_after[:10]}; "
                    f"renew it with: metis certificates renew {name} (or issue a second one with --force)"
                )
            made = None if key is not None else ec.generate_private_key(ec.SECP256R1())
            public = key if key is not None else made.public_key()  # type: ignore[union-attr]
            return self._sign(entries, name, role, hosts, days, public, moment_now), made

    def renew(
        self, name: str, days: int = 365, now: datetime | None = None, *, kit: Path | None = None
    ) -> x509.Certificate:
        """A new certificate for the same name, role, hosts and key; the previous one stays valid until it expires.

        The key in `kit`, if there is one, must be the same.
        """
        moment_now = (now or now_utc()).replace(microsecond=0)
        with self._register() as entries:
            last = self._of(name, entries)[-1]
            if last.revoked:
                raise ConfigError(
                    f"'{name}' was revoked on {last.revoked[:10]}, and its key may have been stolen; make a new one "
                    f"with: metis certificates issue {name} --role {last.role}"
                )
            key = last.parsed().public_key()
            assert isinstance(key, (ec.EllipticCurvePublicKey, rsa.RSAPublicKey))  # as issue() signed it
            held = None if kit is None else kit / KEY
            if held and held.exists() and public_bytes(load_key(held).public_key()) != public_bytes(key):
                raise ConfigError(f"{held} is not the key of '{name}'; give the kit of '{name}' with --out")
            return self._sign(entries, name, last.role, last.hosts, days, key, moment_now)

    def revoke(self, name: str, now: datetime | None = None) -> list[Entry]:
        """Revoke every certificate of a name and write the list; earlier revocations keep their date."""
        moment_now = (now or now_utc()).replace(microsecond=0)
        with self._register() as entries:
            found = [entry for entry in self._of(name, entries) if not entry.revoked]
            for entry in found:
                entry.revoked = moment_now.isoformat()
            # First the register, so that after a crash in between a second try writes the list.
            self._write(self.folder / REGISTER, entries)
            self._write_revoked(entries, moment_now)
        return found

    def entries(self) -> list[Entry]:
        """The register, oldest first."""
        path = self.folder / REGISTER
        try:
            return [Entry(**entry) for entry in json.loads(read_file(path))]
        except (ValueError, TypeError):
            raise ConfigError(
                f"{path} is damaged; without it nothing can be issued or revoked: restore it from a backup"
            ) from None

    def write_kit(self, folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey | None) -> None:
        """Write the files of a kit; an existing key is kept unless a new one is given."""
        folder.mkdir(parents=True, exist_ok=True)
        if key is not None:
            write_durable(folder / KEY, _key_pem(key), private=True)
        write_durable(folder / AUTHORITY, read_file(self.folder / AUTHORITY))
        write_durable(folder / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM))
        if identity_of(certificate, CERTIFICATE)[0] == "controller":
            self.write_revoked(folder)

    def write_revoked(self, folder: Path) -> None:
        """Put the revocation list into a controller's kit."""
        write_durable(folder / REVOKED, read_file(self.folder / REVOKED))

    def _of(self, name: str, entries: list[Entry]) -> list[Entry]:
        found = [entry for entry in entries if entry.name == name]
        if not found:
            names = ", ".join(sorted({entry.name for entry in entries}))
            others = f"only to {names}" if names else "nor to anybody else"
            raise ConfigError(f"{self.folder} has not issued anything to '{name}', {others}")
        return found

    def _sign(
        self,
        entries: list[Entry],
        name: str,
        role: str,
        hosts: Sequence[str],
        days: int,
        key: SiteKey,
        now: datetime,
    ) -> x509.Certificate:
        if now >= self.certificate.not_valid_after_utc:
            raise ConfigError(
                f"the CA of {self.folder} expired on {moment(self.certificate.not_valid_after_utc)}; make a new one "
                "with: metis certificates init, and new kits for all sites"
            )
        start = max(now - SKEW, self.certificate.not_valid_before_utc)
        end = min(now + timedelta(days=days), self.certificate.not_valid_after_utc)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = [x509.UniformResourceIdentifier(f"metis://{role}/{name}"), *map(_host_name, hosts)]
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role == "controller":
            uses.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
        builder = _builder(subject, self.certificate.subject, key, start, end, _serial())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(sign=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        entries.append(
            Entry(
                name,
                role,
                list(hosts),
                f"{certificate.serial_number:x}",
                now.isoformat(),
                end.isoformat(),
                None,
                certificate.public_bytes(serialization.Encoding.PEM).decode(),
            )
        )
        return certificate

    @contextlib.contextmanager
    def _register(self) -> Iterator[list[Entry]]:
        """The register, to be changed; it is locked, so that two administrators do not lose each other's entries."""
        with locked(self.folder / AUTHORITY_KEY, wait=math.inf, note=False):
            entries = self.entries()
            yield entries
            self._write(self.folder / REGISTER, entries)

    @staticmethod
    def _write(path: Path, entries: Sequence[Entry]) -> None:
        content = json.dumps([asdict(entry) for entry in entries], indent=1).encode() + b"\n"
        write_durable(path, content, private=True)  # it names every site of the consortium

    def _write_revoked(self, entries: Sequence[Entry], now: datetime) -> None:
        # It does not expire before the CA: a federation must not stop because an unchanged list was not copied.
        builder = x509.CertificateRevocationListBuilder(
            issuer_name=self.certificate.subject,
            last_update=now,
            next_update=self.certificate.not_valid_after_utc,
            revoked_certificates=[
                x509.RevokedCertificateBuilder(int(entry.serial, 16), datetime.fromisoformat(entry.revoked)).build()
                for entry in entries
                if entry.revoked
            ],
        )
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
        )
        content = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        write_durable(self.folder / REVOKED, content)


def state(entry: Entry, entries: Sequence[Entry], now: datetime) -> str:
    """valid, replaced (still accepted, but its name has a newer one), expired or revoked."""
    if entry.revoked:
        return "revoked"
    if now > datetime.fromisoformat(entry.not_after):
        return "expired"
    newer = entries[entries.index(entry) + 1 :]
    return "replaced" if any(other.name == entry.name and not other.revoked for other in newer) else "valid"


def make_request(name: str, folder: Path) -> SiteKey:
    """At a site: make a key that never leaves it, and a request to have it signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, check_name(name))])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    folder.mkdir(parents=True, exist_ok=True)
    write_durable(folder / KEY, _key_pem(key), private=True)
    write_durable(folder / REQUEST, request.public_bytes(serialization.Encoding.PEM))
    return key.public_key()


def read_request(path: Path, name: str) -> SiteKey:
    """At the CA: the key of a request, which must be for this name; everything else in it is ignored."""
    try:
        request = x509.load_pem_x509_csr(read_file(path))
        valid, key = request.is_signature_valid, request.public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{path} does not contain a certificate request in PEM form") from None
    if not valid:
        raise ConfigError(f"{path} is not signed by the key it asks for; it was damaged or changed on the way")
    names = [str(part.value) for part in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if names != [name]:
        raise ConfigError(f"{path} asks for the name {' and '.join(names) or '(none)'}, not for {name}")
    strong = (isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in {"secp256r1", "secp384r1"}) or (
        isinstance(key, rsa.RSAPublicKey) and key.key_size >= 2048
    )
    if not strong:
        raise ConfigError(
            f"{path} has an unsupported key; supported are ECDSA P-256, ECDSA P-384, and RSA with 2048 bits or more"
        )
    return key  # type: ignore[return-value]


def _serial() -> int:
    return secrets.randbits(63) | 1 << 63  # sixteen digits that a person can compare


def _builder(
    subject: x509.Name, issuer: x509.Name, key: SiteKey, start: datetime, end: datetime, serial: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign,
        crl_sign=sign,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _checked_host(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if not _HOST.fullmatch(host) or host.rsplit(".", 1)[-1].isdigit():
            raise ConfigError(
                f"'{host}' is neither a host name nor an IP address; without port, as in --host federation.example.org"
            ) from None
        return host.lower()


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
