"""Kits, mTLS, peers and revocation, against a real gRPC server; certificates are made out of date, not clocks."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import ssl
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from deployment.consortium import DAY, Consortium, dial, serving, who
from metis.deployment.security.identity import (
    Kit,
    Revocations,
    check_kit,
    check_name,
    load_certificate,
    load_kit,
    now_utc,
    peer_of,
    span,
    warnings,
)
from metis.errors import ConfigError, LearnerError


@pytest.fixture
def ours(tmp_path: Path) -> Consortium:
    return Consortium(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Consortium:
    return Consortium(tmp_path / "theirs", "Theirs")


# --- kits -------------------------------------------------------------------------------------


def test_a_kit_says_who_holds_it(ours: Consortium) -> None:
    kit = ours.kit("hospital-a")
    check_kit(kit, "learner")
    assert (kit.role, kit.name, kit.hosts) == ("learner", "hospital-a", [])
    assert kit.not_before < now_utc() < kit.not_after
    assert warnings(kit) == []
    assert ours.controller().hosts == ["localhost", "127.0.0.1"]


def _remove(name: str) -> Callable[[Path, Consortium], None]:
    return lambda folder, theirs: (folder / name).unlink()


def _spoil(name: str) -> Callable[[Path, Consortium], None]:
    def spoil(folder: Path, theirs: Consortium) -> None:
        (folder / name).write_text("-----BEGIN NOTHING-----")

    return spoil


def _exchange(name: str) -> Callable[[Path, Consortium], None]:
    def exchange(folder: Path, theirs: Consortium) -> None:
        shutil.copy(theirs.kit("hospital-a").folder / name, folder / name)

    return exchange


def _protect(folder: Path, theirs: Consortium) -> None:
    key = serialization.load_pem_private_key((folder / "key.pem").read_bytes(), None)
    protection = serialization.BestAvailableEncryption(b"secret")
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection)
    (folder / "key.pem").write_bytes(pem)


def _unknown_curve(folder: Path, theirs: Consortium) -> None:
    shutil.copy(folder / "certificate.pem", folder / "key.pem")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove("ca.pem"), r"ca\.pem is missing"),
        (_remove("certificate.pem"), r"certificate\.pem is missing"),
        (_remove("key.pem"), r"key\.pem is missing"),
        (_spoil("ca.pem"), r"ca\.pem does not contain exactly one certificate in PEM form"),
        (_spoil("certificate.pem"), r"certificate\.pem does not contain exactly one certificate in PEM form"),
        (_spoil("key.pem"), r"key\.pem does not contain a private key in PEM form"),
        (_unknown_curve, r"key\.pem does not contain a private key in PEM form"),
        (_protect, r"key\.pem is protected by a passphrase"),
        (_exchange("key.pem"), r"key\.pem does not belong to .*certificate\.pem"),
        (_exchange("ca.pem"), r"is not signed by .*: it is signed by 'Ours', but the CA of this kit is 'Theirs'"),
        (_exchange("certificate.pem"), r"is not signed by .*: it is signed by 'Theirs', .* is 'Ours'"),
        (lambda folder, _: (folder / "key.pem").chmod(0o644), r"can be read by every user .*chmod 600 .*key\.pem"),
        (lambda folder, _: shutil.rmtree(folder), r"there is no kit .*hospital-a"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_kit_is_named(
    ours: Consortium, theirs: Consortium, damage: Callable[[Path, Consortium], None], message: str
) -> None:
    """Every file in turn is missing, damaged, or another kit's."""
    folder = ours.kit("hospital-a").folder
    damage(folder, theirs)
    with pytest.raises(ConfigError, match=message):
        check_kit(load_kit(folder))


def test_two_cas_of_one_name_are_told_apart(ours: Consortium, tmp_path: Path) -> None:
    """Somebody ran init twice: the names agree, the keys do not."""
    kit, again = ours.kit("a"), Consortium(tmp_path / "again", "Ours")
    shutil.copy(again.folder / "ca" / "ca.pem", kit.folder / "ca.pem")
    with pytest.raises(ConfigError, match="both CAs are called 'Ours', but they have different keys"):
        check_kit(load_kit(kit.folder))


def test_the_folder_of_a_ca_is_no_kit(ours: Consortium) -> None:
    with pytest.raises(ConfigError, match="is the folder of a CA"):
        load_kit(ours.folder / "ca")


def test_a_kit_of_another_role_is_refused(ours: Consortium) -> None:
    with pytest.raises(ConfigError, match="belongs to learner 'a', but this is a controller"):
        check_kit(ours.kit("a"), "controller")


def test_dates_are_named_with_this_machines_clock(ours: Consortium) -> None:
    """A clock that is off looks like a bad certificate, so both dates are shown."""
    kit = ours.kit("a", days=30)
    check_kit(kit, now=kit.not_after)
    with pytest.raises(ConfigError, match=rf"expired on {kit.not_after:%Y-%m-%d %H:%M} UTC, 12 days ago .*clock says"):
        check_kit(kit, now=kit.not_after + 12 * DAY)
    with pytest.raises(ConfigError, match=r"renew a$"):
        check_kit(kit, now=kit.not_after + timedelta(hours=2))
    with pytest.raises(ConfigError, match=r"learner 'a' is not valid before .* slow by 2,000 days or more"):
        check_kit(kit, now=kit.not_before - 2000 * DAY)
    with pytest.raises(ConfigError, match=r"learner 'a' is not valid before .* slow by 3 hours or more"):
        check_kit(kit, now=kit.not_before - timedelta(hours=3))
    with pytest.raises(ConfigError, match=r"ca\.pem: the CA 'Ours' expired on"):
        check_kit(kit, now=ours.authority.certificate.not_valid_after_utc + DAY)


def test_what_ends_soon_is_said_before(ours: Consortium) -> None:
    kit = ours.kit("a", days=29)
    assert ["expires in 28 days" in line for line in warnings(kit)] == [True]
    (kit.folder / "key.pem").chmod(0o640)
    assert "can be read by its group" in warnings(kit)[1]
    check_kit(kit)


def test_lengths_of_time_have_a_unit() -> None:
    cases = {0: "less than a minute", 61: "1 minute", 7200: "2 hours", 86_400: "1 day", 86_400 * 3650: "3,650 days"}
    assert {seconds: span(timedelta(seconds=seconds)) for seconds in cases} == cases


def test_a_name_is_given_back() -> None:
    assert check_name("Hospital-1.north_wing") == "Hospital-1.north_wing"


# --- gRPC -------------------------------------------------------------------------------------


def signed_with(ours: Consortium, *uris: str) -> bytes:
    """A certificate of our CA with other URIs than it would ever write."""
    key, name = ec.generate_private_key(ec.SECP256R1()), [x509.NameAttribute(NameOID.COMMON_NAME, "a")]
    builder = x509.CertificateBuilder().subject_name(x509.Name(name)).issuer_name(ours.authority.certificate.subject)
    builder = builder.public_key(key.public_key()).serial_number(7)
    builder = builder.not_valid_before(now_utc() - DAY).not_valid_after(now_utc() + DAY)
    if uris:
        names = [x509.UniformResourceIdentifier(uri) for uri in uris]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(ours.authority._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    "uris",
    [
        (),
        ("https://example.org/a",),
        ("metis://learner/a", "metis://learner/b"),
        ("metis://learner/a", "metis://controller/a"),
        ("metis://root/a",),
        ("metis://learner/a/b",),
        ("metis://learner/",),
        ("metis://learner/..",),
        ("metis:learner/a",),
    ],
)
def test_a_peer_has_exactly_one_identity(ours: Consortium, uris: tuple[str, ...]) -> None:
    with pytest.raises(LearnerError, match=r"it needs one URI metis://ROLE/NAME"):
        peer_of({"x509_pem_cert": [signed_with(ours, *uris)]})


def test_a_peer_without_a_certificate_is_nobody(ours: Consortium) -> None:
    for context in ({}, {"x509_pem_cert": []}):
        with pytest.raises(LearnerError, match="did not present a certificate"):
            peer_of(context)
    with pytest.raises(LearnerError):
        peer_of({"x509_pem_cert": [b"nothing"]})
    peer = peer_of({"x509_pem_cert": [signed_with(ours, "https://example.org", "metis://learner/a")]})
    assert (peer.role, peer.name, peer.serial) == ("learner", "a", 7)


def test_the_server_knows_its_caller_by_the_certificate(ours: Consortium) -> None:
    async def play() -> None:
        kit = ours.kit("hospital-a")
        async with serving(ours.controller()) as port, dial(port, kit) as channel:
            assert await who(channel) == f"learner/hospital-a/{kit.serial:x}"

    asyncio.run(play())


async def _refused(port: int, kit: Kit) -> None:
    async with dial(port, kit) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as problem:
            await who(channel)
    assert problem.value.code() == grpc.StatusCode.UNAVAILABLE


def test_no_other_certificate_is_let_in(ours: Consortium, theirs: Consortium) -> None:
    """gRPC itself refuses what is expired, not valid yet, of another CA; a learner cannot pose as the controller."""

    async def play() -> None:
        async with serving(ours.controller()) as port:
            await _refused(port, ours.kit("old", days=10, made=now_utc() - 20 * DAY))
            await _refused(port, ours.kit("early", made=now_utc() + 20 * DAY))
            stranger = theirs.kit("hospital-a")
            shutil.copy(ours.folder / "ca" / "ca.pem", stranger.folder / "ca.pem")
            await _refused(port, stranger)
            async with grpc.aio.secure_channel(
                f"127.0.0.1:{port}",
                grpc.ssl_channel_credentials((ours.folder / "ca" / "ca.pem").read_bytes()),
            ) as anonymous:
                with pytest.raises(grpc.aio.AioRpcError):
                    await who(anonymous)
        async with serving(ours.kit("impostor")) as port:
            await _refused(port, ours.kit("hospital-a"))

    asyncio.run(play())


def _shown(port: int, kit: Kit) -> int:
    """Serial of the certificate that a server shows now."""
    context = ssl.create_default_context(cafile=kit.folder / "ca.pem")
    context.load_cert_chain(kit.folder / "certificate.pem", kit.folder / "key.pem")
    with socket.create_connection(("127.0.0.1", port), timeout=600) as plain:
        with context.wrap_socket(plain, server_hostname="localhost") as secure:
            assert secure.version() == "TLSv1.3"
            return x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"").serial_number


def test_a_renewed_certificate_is_served_without_a_restart(ours: Consortium, caplog: pytest.LogCaptureFixture) -> None:
    """And one that is half copied is not: the one before goes on until the kit is whole."""
    caplog.set_level(logging.INFO)

    async def play() -> None:
        kit, learner = ours.controller(days=20), ours.kit("a")
        async with serving(kit) as port, dial(port, learner) as channel:
            assert await asyncio.to_thread(_shown, port, learner) == kit.serial
            ours.authority.write_kit(kit.folder, ours.authority.renew("main"), None)
            renewed = load_kit(kit.folder)
            assert await asyncio.to_thread(_shown, port, learner) == renewed.serial != kit.serial
            new = ours.controller(folder="new")
            shutil.copy(new.folder / "certificate.pem", kit.folder / "certificate.pem")
            assert await asyncio.to_thread(_shown, port, learner) == renewed.serial
            shutil.copy(new.folder / "key.pem", kit.folder / "key.pem")
            assert await asyncio.to_thread(_shown, port, learner) == new.serial
            assert await who(channel)  # the open connection never noticed

    asyncio.run(play())
    logged = [record.getMessage() for record in caplog.records if record.name == "metis.deployment.security.identity"]
    assert [line.partition(":")[0] for line in logged] == [
        "the identity has changed",
        "the identity has changed and cannot be used, the previous one stays in use",
        "the identity has changed",
    ]


# --- revocation -------------------------------------------------------------------------------


def test_without_a_list_nobody_is_revoked(ours: Consortium) -> None:
    kit = ours.controller()
    (kit.folder / "revoked.pem").unlink()
    assert Revocations(kit).reason(kit.serial) is None


def test_the_list_is_read_again_when_it_changes(ours: Consortium) -> None:
    """And its content holds if it is taken away while the controller runs."""
    kit, learner = ours.controller(), ours.kit("a")
    revocations = Revocations(kit)
    assert revocations.reason(learner.serial) is None
    ours.authority.revoke("a")
    assert revocations.reason(learner.serial) is None
    ours.authority.write_revoked(kit.folder)
    assert f"certificate {learner.serial:x} was revoked on {now_utc():%Y-%m-%d}" in str(
        revocations.reason(learner.serial)
    )
    assert revocations.reason(kit.serial) is None
    (kit.folder / "revoked.pem").unlink()
    assert revocations.reason(learner.serial)


def test_a_list_that_cannot_be_trusted_lets_nobody_in(ours: Consortium, theirs: Consortium) -> None:
    """Not ours, damaged, half copied: the operator is warned, and the next good list fixes it."""
    kit, learner = ours.controller(), ours.kit("a")
    revocations = Revocations(kit)
    whole = (kit.folder / "revoked.pem").read_bytes()
    for content, message in (
        ((theirs.folder / "ca" / "revoked.pem").read_bytes(), r"revoked\.pem is not signed by .*ca\.pem"),
        (b"", "does not contain a revocation list in PEM form"),
        (whole[: len(whole) // 2], "does not contain a revocation list in PEM form"),
    ):
        (kit.folder / "revoked.pem").write_bytes(content)
        for _ in range(2):
            with pytest.raises(ConfigError, match=message):
                revocations.reason(learner.serial)
        (kit.folder / "revoked.pem").write_bytes(whole)
        assert revocations.reason(learner.serial) is None
    (kit.folder / "revoked.pem").unlink()
    (kit.folder / "revoked.pem").mkdir()
    with pytest.raises(ConfigError, match=r"revoked\.pem cannot be read: Is a directory"):
        revocations.reason(learner.serial)


def test_revoked_in_the_middle_of_a_run(ours: Consortium) -> None:
    """The connection is open; the next call on it is refused with the reason, and others are not."""

    async def play() -> None:
        controller, bad, good = ours.controller(), ours.kit("bad"), ours.kit("good")
        async with serving(controller) as port, dial(port, bad) as out, dial(port, good) as stays:
            assert await who(out) and await who(stays)
            ours.authority.revoke("bad")
            ours.authority.write_revoked(controller.folder)
            with pytest.raises(grpc.aio.AioRpcError) as problem:
                await who(out)
            assert problem.value.code() == grpc.StatusCode.PERMISSION_DENIED
            assert f"certificate {bad.serial:x} was revoked on" in str(problem.value.details())
            assert await who(stays)

    asyncio.run(play())


def test_several_certificates_in_ca_pem_are_refused(ours: Consortium, theirs: Consortium) -> None:
    """gRPC would trust them all, and the checks here look at one."""
    kit = ours.kit("a")
    both = [(one.folder / "ca" / "ca.pem").read_bytes() for one in (ours, theirs)]
    (kit.folder / "ca.pem").write_bytes(b"".join(both))
    with pytest.raises(ConfigError, match="does not contain exactly one certificate"):
        load_certificate(kit.folder / "ca.pem")
