"""The CA: what it signs, what it refuses, and a register from which everything can be revoked."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from deployment.consortium import DAY, Consortium
from metis.deployment.security.authority import Authority, make_request, read_request, state
from metis.deployment.security.identity import check_kit, load_kit, now_utc, public_bytes, signed_by
from metis.errors import ConfigError


@pytest.fixture
def ours(tmp_path: Path) -> Consortium:
    return Consortium(tmp_path)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def request_of(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey, *names: str) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, algorithm)
    return request.public_bytes(serialization.Encoding.PEM)


def test_a_certificate_says_who_it_is_for_and_nothing_more(ours: Consortium) -> None:
    """A learner's is good for calling only, a controller's also for being called, under its hosts."""
    learner = ours.kit("hospital-a").certificate
    controller = ours.controller(["Federation.example.org", "10.0.0.1", "::1"]).certificate
    for certificate in (learner, controller):
        assert signed_by(certificate, ours.authority.certificate)
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert now_utc() - timedelta(minutes=6) < certificate.not_valid_before_utc < now_utc() - timedelta(minutes=4)
    names = learner.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == ["metis://learner/hospital-a"]
    uses = learner.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(uses) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    names = controller.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == [
        "metis://controller/main", "federation.example.org", "10.0.0.1", "::1",
    ]  # fmt: skip
    uses = controller.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(uses) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}


def test_keys_are_for_their_owner_only(ours: Consortium) -> None:
    """The keys are 0600, also where the umask would allow more."""
    kit = ours.kit("a")
    assert mode(ours.folder / "ca" / "ca-key.pem") == mode(kit.folder / "key.pem") == 0o600
    register = ours.folder / "ca" / "issued.json"  # it names every site
    assert mode(register) == 0o600
    register.chmod(0o644)
    ours.kit("later")
    assert mode(register) == 0o600, "one of an earlier version is made private by the next change"


def test_a_ca_is_never_overwritten(ours: Consortium) -> None:
    """Not even the remains of one."""
    before = (ours.folder / "ca" / "ca.pem").read_bytes()
    with pytest.raises(ConfigError, match="already contains a CA"):
        Authority.create(ours.folder / "ca", "Ours")
    assert (ours.folder / "ca" / "ca.pem").read_bytes() == before


@pytest.mark.parametrize("name", ["", " ", "x" * 65, "two\nlines", " padded"])
def test_a_consortium_has_a_name_that_can_be_printed(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="1 to 64 printable"):
        Authority.create(tmp_path / "ca", name)


@pytest.mark.parametrize("name", ["", ".", "..", "-a", "a b", "a/b", "ä", "x" * 65, "a\n"])
def test_a_name_is_plain(ours: Consortium, name: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid name"):
        ours.kit(name, folder="x")
    assert ours.authority.entries() == []


@pytest.mark.parametrize("host", ["", "a b", "*.example.org", "example.org:8443", "1.2.3", "-x.org", "a..b", "x" * 64])
def test_a_host_is_a_name_or_an_address(ours: Consortium, host: str) -> None:
    with pytest.raises(ConfigError, match="neither a host name nor an IP address"):
        ours.controller([host])


def test_only_a_controller_has_hosts_and_it_must(ours: Consortium) -> None:
    with pytest.raises(ConfigError, match="needs the names or addresses"):
        ours.controller([])
    with pytest.raises(ConfigError, match="a learner is not dialled"):
        ours.kit("a", hosts=["localhost"])
    with pytest.raises(ConfigError, match="'root' is not a role; the roles are learner, controller, admin"):
        ours.kit("a", role="root")


def test_a_name_is_not_given_twice_by_mistake(ours: Consortium) -> None:
    """Two sites of one name would be one learner to the controller."""
    ours.authority.issue("a")
    with pytest.raises(ConfigError, match=r"already has a certificate.*metis certificates renew a"):
        ours.authority.issue("a")
    ours.authority.issue("a", again=True)


def test_renewing_keeps_name_role_hosts_and_key(ours: Consortium) -> None:
    """So only the certificate travels, and the key stays where it is."""
    kit = ours.controller(days=10)
    ours.authority.write_kit(kit.folder, ours.authority.renew("main"), None)
    renewed = load_kit(kit.folder)
    check_kit(renewed, "controller")
    assert (renewed.name, renewed.role, renewed.hosts) == (kit.name, kit.role, kit.hosts)
    assert public_bytes(renewed.certificate.public_key()) == public_bytes(kit.certificate.public_key())
    assert renewed.serial != kit.serial and renewed.not_after > kit.not_after
    entries = ours.authority.entries()
    assert [state(entry, entries, now_utc()) for entry in entries] == ["replaced", "valid"]


def test_revoking_takes_all_certificates_of_a_name_for_ever(ours: Consortium) -> None:
    """A renewed learner cannot come back with the certificate before; a new kit may be issued."""
    ours.authority.issue("a")
    ours.authority.renew("a")
    ours.authority.issue("b")
    assert len(ours.authority.revoke("a")) == 2
    assert ours.authority.revoke("a") == []
    listed = x509.load_pem_x509_crl((ours.folder / "ca" / "revoked.pem").read_bytes())
    entries = ours.authority.entries()
    assert {f"{entry.serial_number:x}" for entry in listed} == {e.serial for e in entries if e.name == "a"}
    assert [state(entry, entries, now_utc()) for entry in entries] == ["revoked", "revoked", "valid"]
    with pytest.raises(ConfigError, match=r"was revoked on .* metis certificates issue a --role learner"):
        ours.authority.renew("a")
    ours.authority.issue("a")


def test_expired_is_a_state(ours: Consortium) -> None:
    ours.authority.issue("a", days=10, now=now_utc() - 20 * DAY)
    entries = ours.authority.entries()
    assert state(entries[0], entries, now_utc()) == "expired"
    ours.authority.issue("a")  # no --force needed


def test_nothing_outlives_the_ca(ours: Consortium) -> None:
    """A certificate ends with the CA at the latest, and an expired CA signs nothing."""
    end = ours.authority.certificate.not_valid_after_utc
    certificate, _ = ours.authority.issue("a", days=36_500)
    assert certificate.not_valid_after_utc == end
    with pytest.raises(ConfigError, match="expired on"):
        ours.authority.issue("b", now=end + DAY)


def test_a_request_is_signed_without_seeing_the_key(ours: Consortium, tmp_path: Path) -> None:
    """The site's folder becomes a whole kit by the two files that come back."""
    site = tmp_path / "site"
    key = make_request("a", site)
    assert public_bytes(read_request(site / "request.csr", "a")) == public_bytes(key)
    certificate, made = ours.authority.issue("a", key=read_request(site / "request.csr", "a"))
    assert made is None
    with pytest.raises(ConfigError, match=r"waits for its certificate: send .*request\.csr"):
        load_kit(site)
    ours.authority.write_kit(tmp_path / "back", certificate, made)
    assert not (tmp_path / "back" / "key.pem").exists()
    for name in ("ca.pem", "certificate.pem"):
        (site / name).write_bytes((tmp_path / "back" / name).read_bytes())
    check_kit(load_kit(site), "learner")


def test_a_request_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path, key = tmp_path / "r.csr", ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(ConfigError, match=r"r\.csr is missing"):
        read_request(path, "a")
    path.write_text("nothing")
    with pytest.raises(ConfigError, match="does not contain a certificate request in PEM form"):
        read_request(path, "a")
    path.write_bytes(request_of(key, "b"))
    with pytest.raises(ConfigError, match="asks for the name b, not for a"):
        read_request(path, "a")
    path.write_bytes(request_of(key, "a", "b"))
    with pytest.raises(ConfigError, match="asks for the name a and b, not for a"):
        read_request(path, "a")
    path.write_bytes(request_of(ed25519.Ed25519PrivateKey.generate(), "a"))
    with pytest.raises(ConfigError, match="has an unsupported key"):
        read_request(path, "a")
    der = bytearray(x509.load_pem_x509_csr(request_of(key, "a")).public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1  # the last of the signature
    path.write_bytes(x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM))
    with pytest.raises(ConfigError, match="is not signed by the key it asks for"):
        read_request(path, "a")


def test_an_rsa_key_may_be_signed_too(ours: Consortium, tmp_path: Path) -> None:
    """Some hospitals have hardware that makes nothing else."""
    path = tmp_path / "r.csr"
    path.write_bytes(request_of(rsa.generate_private_key(65537, 2048), "a"))
    certificate, _ = ours.authority.issue("a", key=read_request(path, "a"))
    assert signed_by(certificate, ours.authority.certificate)
    renewed = ours.authority.renew("a")
    assert public_bytes(renewed.public_key()) == public_bytes(certificate.public_key())


def test_administrators_at_the_same_time_lose_no_entry(ours: Consortium) -> None:
    """What is not in the register could never be revoked."""
    names = [f"site-{number}" for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: Authority(ours.folder / "ca").issue(name), names))
        list(pool.map(lambda name: Authority(ours.folder / "ca").revoke(name), names[:8]))
    assert sorted(entry.name for entry in ours.authority.entries()) == sorted(names)
    listed = x509.load_pem_x509_crl((ours.folder / "ca" / "revoked.pem").read_bytes())
    revoked = {entry.serial for entry in ours.authority.entries() if entry.name in names[:8]}
    assert {f"{entry.serial_number:x}" for entry in listed} == revoked


def test_a_damaged_ca_is_named(ours: Consortium, tmp_path: Path) -> None:
    folder = ours.folder / "ca"
    with pytest.raises(ConfigError, match="does not contain a CA"):
        Authority(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="has not issued anything to 'a', nor to anybody else"):
        ours.authority.revoke("a")
    for content in ("{", json.dumps([{"name": "a"}]), "3"):
        (folder / "issued.json").write_text(content)
        with pytest.raises(ConfigError, match=r"issued\.json is damaged"):
            ours.authority.issue("a")
    other = Consortium(tmp_path / "other")
    (folder / "ca.pem").write_bytes((other.folder / "ca" / "ca.pem").read_bytes())
    with pytest.raises(ConfigError, match=r"ca-key\.pem does not belong to"):
        Authority(folder)
