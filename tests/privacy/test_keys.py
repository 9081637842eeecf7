"""Signatures, certificates, boxes, stores, and masks that look like noise."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from metis.core.model import Layout, TensorSpec
from metis.deployment.security.authority import Authority
from metis.errors import Refused
from metis.privacy.keys import Identity, Peers, check_signature, new_key, seal, unseal
from metis.privacy.store import FolderStore, MemoryStore, Store
from metis.system import random_bytes
from privacy.cohort import Cohort, identity


@pytest.mark.parametrize(
    "key",
    [
        ec.generate_private_key(ec.SECP256R1()),
        rsa.generate_private_key(65537, 2048),
        Ed25519PrivateKey.from_private_bytes(bytes(32)),
    ],
    ids=["ECDSA", "RSA", "Ed25519"],
)
def test_every_kind_of_certificate_key_signs(key: object) -> None:
    signer = Identity("h00", key)  # type: ignore[arg-type]
    signature = signer.sign(b"message")
    public = signer.key.public_key()
    check_signature(public, b"message", signature, "it")
    for message, wrong in ((b"other", signature), (b"message", b""), (b"message", signature[:-1])):
        with pytest.raises(Refused, match="it is not signed by the learner that it names"):
            check_signature(public, message, wrong, "it")


class TestCertificates:
    @pytest.fixture
    def authority(self, tmp_path: Path) -> Authority:
        return Authority.create(tmp_path / "ca", "consortium")

    @staticmethod
    def issued(authority: Authority, name: str, **options: object) -> Identity:
        certificate, key = authority.issue(name, **options)  # type: ignore[arg-type]
        assert key is not None
        return Identity(name, key, certificate.public_bytes(Encoding.DER))

    def test_a_certified_learners_key_is_accepted(self, authority: Authority) -> None:
        learner = self.issued(authority, "h00")
        _, signed = new_key(learner, "run", 1, random_bytes)
        key = Peers(authority.certificate).key("h00", signed.certificate)
        check_signature(key, signed.signed, signed.signature, "the key")

    def test_other_names_roles_authorities_and_times_are_refused(self, authority: Authority, tmp_path: Path) -> None:
        learner = self.issued(authority, "h00")
        admin = self.issued(authority, "boss", role="admin")
        other = Authority.create(tmp_path / "other", "consortium")
        stranger = self.issued(other, "h00")
        peers = Peers(authority.certificate)
        for name, certificate, words in (
            ("h01", learner.certificate, "the certificate of h01 is for metis://learner/h00"),
            ("boss", admin.certificate, "the certificate of boss is for metis://admin/boss"),
            ("h00", stranger.certificate, "not one of this consortium's CA"),
            ("h00", b"", "not one of this consortium's CA"),
            ("h00", learner.certificate[:-1], "not one of this consortium's CA"),
        ):
            with pytest.raises(Refused, match=words):
                peers.key(name, certificate)
        later: Callable[[], datetime] = lambda: datetime.now(timezone.utc) + timedelta(days=4000)  # noqa: E731
        with pytest.raises(Refused, match="not valid at this time"):
            Peers(authority.certificate, now=later).key("h00", learner.certificate)

    def test_a_pinned_key_is_used_whatever_the_certificate_says(self, authority: Authority) -> None:
        learner = self.issued(authority, "h00")
        mine = identity("h00").key.public_key()
        assert Peers(authority.certificate, {"h00": mine}).key("h00", learner.certificate) is mine  # type: ignore[dict-item]
        with pytest.raises(Refused, match="the public key of h01 is not pinned here"):
            Peers(pinned={"h00": mine}).key("h01", b"")  # type: ignore[dict-item]


def test_a_box_opens_with_its_key_and_for_what_it_is_bound_to() -> None:
    key = random_bytes(32)
    box = seal(key, b"shares", b"upload", random_bytes)
    assert unseal(key, box, b"upload") == b"shares"
    wrong = ((random_bytes(32), box, b"upload"), (key, box, b"other"), (key, box[:-1], b"upload"), (key, b"", b""))
    assert [unseal(*bad) for bad in wrong] == [None] * 4
    assert seal(key, b"shares", b"upload", random_bytes) != box  # never the same nonce


def test_keys_are_made_ahead_but_not_without_end() -> None:
    member = Cohort(4).members["h00"]
    made = [member.key(version) for version in range(8)]
    assert [member.key(version) for version in range(8)] == made
    with pytest.raises(Refused, match="8 keys for later versions"):
        member.key(8)
    with pytest.raises(Refused, match="version -1 has passed"):
        member.key(-1)


def test_a_body_of_another_layout_is_not_masked() -> None:
    cohort = Cohort(4)
    opening = cohort.opening()
    cohort.accept("h00", opening)
    body = cohort.body("h00", opening)
    with pytest.raises(Refused, match="does not fit the layout"):
        cohort.members["h00"].mask(opening.context, body[:-4], cohort.layout)
    with pytest.raises(Refused, match="does not fit the layout"):
        cohort.members["h00"].mask(opening.context, body, Layout((TensorSpec("v", (5,)), cohort.layout.tensors[1])))
    assert cohort.members["h00"].upload(opening.context) is None


def test_a_masked_body_and_its_boxes_look_like_noise() -> None:
    """All bytes are equally frequent (chi-square over 255 degrees below 380: one in 10^6), and no two bodies agree."""
    cohort = Cohort(4, layout=Layout((TensorSpec("w", (60_000,)), TensorSpec("m", (9_000,), role="buffer"))))
    opening = cohort.opening()
    bodies = []
    for name in cohort.names:
        cohort.accept(name, opening)
        body = np.zeros(opening.ring.nbytes(cohort.layout), np.uint8)
        upload = cohort.members[name].mask(opening.context, body, cohort.layout)
        bodies.append(body)
        for section in opening.ring.sections(cohort.layout):
            counts = np.bincount(section.view(body).view(np.uint8), minlength=256)
            assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 380
        assert len(set(upload.boxes)) == 4
    for one in range(4):
        for other in range(one):
            assert np.count_nonzero(bodies[one] == bodies[other]) < 1.2 * bodies[0].size / 256
    total = opening.ring.sum(bodies, cohort.layout)  # own masks are left, and are noise as well
    counts = np.bincount(total, minlength=256)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 380


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_a_store_replaces_whole_values(kind: str, tmp_path: Path) -> None:
    store: Store = MemoryStore() if kind == "memory" else FolderStore(tmp_path / "a" / "b")
    assert store.read("x") is None
    store.delete("x")
    store.write("x", b"1")
    store.write("x", b"22")
    assert store.read("x") == b"22"
    if isinstance(store, FolderStore):
        assert store.path("x").stat().st_mode & 0o777 == 0o600
    store.delete("x")
    assert store.read("x") is None


def test_a_member_works_on_a_folder(tmp_path: Path) -> None:
    """What a new process reads from the folder is what the old one wrote; erased is erased."""
    cohort = Cohort(4)
    cohort.stores["h00"] = FolderStore(tmp_path)
    cohort.members["h00"] = cohort.restarted("h00")
    opening = cohort.opening()
    cohort.accept("h00", opening)
    body = cohort.body("h00", opening)
    upload = cohort.members["h00"].mask(opening.context, body, cohort.layout)
    kept = cohort.restarted("h00").upload(opening.context)
    assert kept is not None
    assert kept[0] == upload
    assert np.array_equal(kept[1], body)
    private = cohort.members["h00"]._state.keys[0].private
    assert any(private in path.read_bytes() for path in tmp_path.iterdir())
    cohort.members["h00"].erase()
    assert not any(private in path.read_bytes() for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 1
