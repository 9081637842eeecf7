"""Models on disk, sealed: any part can be read, a change is noticed, and no byte of a model is in the clear."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("cryptography")

from deployment.chaos.harness import Process, until
from deployment.test_scaffold import write as write_federation
from metis.core.model import Layout, Model, TensorSpec
from metis.deployment import storage as storages
from metis.deployment.controller.blobs import BlobMismatch
from metis.deployment.controller.state import State
from metis.deployment.learner.work import Update, WorkFolder
from metis.deployment.storage import CHUNK, SealedStorage, Storage, choose, key_of, read_file, rotate, storage
from metis.deployment.trainer.memories import Memories
from metis.deployment.wire.models import model_parts, payload_sha256, read_model, write_model
from metis.errors import ConfigError, DataError, StateError
from metis.runs.storage import load_model

KEY, OTHER = bytes(range(32)), bytes(32)
LAYOUT = Layout((TensorSpec("w", (3 * CHUNK // 4 + 777,)), TensorSpec("n", (), "int64", "counter")))


@pytest.fixture
def sealed() -> Iterator[SealedStorage]:
    chosen = SealedStorage(KEY)
    choose(chosen)
    yield chosen
    choose(Storage())


def content(size: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def model(seed: int = 1) -> Model:
    numbers = np.random.default_rng(seed).normal(size=LAYOUT.size).astype(np.float32)
    return Model(LAYOUT, numbers, np.array([7], np.int64))


def shows(folder: Path, *secrets: bytes) -> list[str]:
    """The files in which any 12 bytes of a secret, at any multiple of 12, can be found; every byte is looked at."""
    pieces = {secret[at : at + 12] for secret in secrets for at in range(0, len(secret) - 11, 12)}
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            text = path.read_bytes()
            if any(text[at : at + 12] in pieces for at in range(len(text))):
                found.append(str(path.relative_to(folder)))
    return found


@settings(max_examples=60)
@given(data=st.data(), size=st.sampled_from([0, 1, 100, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 5]))
def test_any_part_of_a_sealed_file_can_be_read(data: st.DataObject, size: int, tmp_path_factory: Any) -> None:
    """However it was written in pieces, and without the rest of it."""
    whole, kept = content(size), SealedStorage(KEY)
    path = tmp_path_factory.mktemp("sealed") / "file"
    with path.open("w+b", buffering=0) as file:
        writer, done = kept.writer(file), 0
        while done < size:
            step = data.draw(st.integers(1, max(1, size // 2)))
            writer.write(memoryview(whole)[done : done + step])
            done += step
        writer.finish()
    assert kept.size(path) == size
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for _ in range(5):
            start, count = data.draw(st.integers(0, size)), data.draw(st.integers(0, size + 10))
            assert kept.read(descriptor, count, start) == whole[start : start + count]
    finally:
        os.close(descriptor)


def test_what_was_changed_is_refused_in_a_sentence(tmp_path: Path, sealed: SealedStorage) -> None:
    """A flipped bit, a missing end, exchanged chunks, chunks of another file, another key, no seal at all."""
    path, other = tmp_path / "model", tmp_path / "other"
    whole = content(3 * CHUNK + 100)
    sealed.write_file(path, whole)
    sealed.write_file(other, content(3 * CHUNK + 100, 2))
    good = path.read_bytes()
    assert read_file(path) == whole
    header = len(good) - (3 * (CHUNK + 28) + 128)
    step = CHUNK + 28

    def refused(raw: bytes, why: str) -> None:
        path.write_bytes(raw)
        with pytest.raises(DataError, match=why) as problem:
            read_file(path)
        assert str(path) in str(problem.value)
        assert "\n" not in str(problem.value)

    for at in (header, header + 12, header + step - 1, len(good) - 1, header - 1):
        refused(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :], "damaged, changed or cut off")
    for end in (len(good) - 1, len(good) - 128, header + step, header + 5):
        refused(good[:end], "damaged, changed or cut off")
    refused(good[: header - 1], "not sealed, or its file is cut off")
    first, second = good[header : header + step], good[header + step : header + 2 * step]
    refused(good[:header] + second + first + good[header + 2 * step :], "damaged, changed or cut off")
    refused(good[:header] + first + good[header + 2 * step :], "damaged, changed or cut off")
    refused(good[:header] + other.read_bytes()[header:], "damaged, changed or cut off")
    refused(good + first, "damaged, changed or cut off")
    refused(whole, "not sealed")
    path.write_bytes(good)
    choose(SealedStorage(OTHER))
    with pytest.raises(DataError, match="sealed with another key"):
        read_file(path)


def test_equal_models_look_different(tmp_path: Path, sealed: SealedStorage) -> None:
    """Each file has a key of its own and each chunk a nonce: nothing repeats."""
    for name in "ab":
        sealed.write_file(tmp_path / name, bytes(4 * CHUNK))
    raw = [(tmp_path / name).read_bytes()[33:] for name in "ab"]
    chunks = [each[at + 12 : at + 28] for each in raw for at in range(0, len(each), CHUNK + 28)]
    assert len(set(chunks)) == len(chunks) == 8


# --- the controller's folder -----------------------------------------------------------------------------


def test_a_state_folder_holds_no_model_in_the_clear(tmp_path: Path, sealed: SealedStorage) -> None:
    """Updates, models, snapshots and what was received of an upload; and all of it is read back to the bit."""
    first, second, half = model(1), model(2), content(5 * CHUNK // 2, 3)
    sums = np.random.default_rng(4).normal(size=50_000)
    folder = tmp_path / "state"
    sealed.check_folder(folder)
    with State.open(folder, "process") as state:
        state.begin({"experiment": {}})
        blob = state.put_blob(model_parts(first))
        assert blob == payload_sha256(first)
        with state.incoming() as incoming:
            for part in model_parts(second):
                incoming.write(part)
            received = incoming.commit(incoming.bytes, incoming.checksum)
        announced = hashlib.sha256(half + b"rest").hexdigest()
        with state.incoming(5, announced) as incoming:
            incoming.write(half)
        state.append(1.0, {"event": "update_request"}, update=1, blob=received)
        state.write_snapshot(1, {"sum": sums}, {}, {blob})
        assert state.verify_blob(blob)
    with State.open(folder, "process") as state:
        for name, expected in ((blob, first), (received, second)):
            got = read_model(state.blob_path(name), LAYOUT)
            assert (got.vector == expected.vector).all()
            assert (got.counters == expected.counters).all()
        (snapshot,) = state.snapshots()
        assert (state.load_snapshot(snapshot)["sum"] == sums).all()
        checked = bytearray()
        with state.incoming(5, announced) as incoming:
            assert incoming.resume(len(half) + 4, lambda offset, piece: checked.extend(piece)) == 2 * CHUNK
            assert bytes(checked) == half[: 2 * CHUNK]
            incoming.write(half[2 * CHUNK :] + b"rest")
            incoming.whole()
            resumed = incoming.commit(len(half) + 4, announced)
        assert read_file(state.blob_path(resumed)) == half + b"rest"
        secrets = [bytes(part) for each in (first, second) for part in model_parts(each)]
        assert not shows(folder, *secrets, half, sums.tobytes())
        choose(Storage())
        plain = state.put_blob(model_parts(first))
        assert shows(folder, secrets[0]) == [f"blobs/{plain}"], "the search finds what is there"


def test_a_damaged_sealed_model_goes_to_quarantine(tmp_path: Path, sealed: SealedStorage) -> None:
    with State.open(tmp_path / "state", "process") as state:
        blob = state.put_blob(model_parts(model()))
        path = state.blob_path(blob)
        raw = bytearray(path.read_bytes())
        raw[CHUNK] ^= 1
        path.write_bytes(bytes(raw))
        assert not state.verify_blob(blob)
        assert (tmp_path / "state" / "quarantine" / blob).exists()


def test_what_came_is_compared_with_what_was_announced(tmp_path: Path, sealed: SealedStorage) -> None:
    with State.open(tmp_path / "state", "process") as state, state.incoming() as incoming:
        incoming.write(b"abcd")
        with pytest.raises(BlobMismatch, match="4 bytes came"):
            incoming.commit(5, incoming.checksum)
    assert not list((tmp_path / "state" / "blobs").iterdir())


# --- the learner's folder --------------------------------------------------------------------------------


def test_a_work_folder_holds_no_model_in_the_clear(tmp_path: Path, sealed: SealedStorage) -> None:
    """The spool, downloads, also half of one, and what the learner remembers between tasks."""
    local, community = model(1), model(2)
    memory = {"residual": np.random.default_rng(3).normal(size=30_000).astype(np.float32)}
    whole = b"".join(bytes(part) for part in model_parts(community))
    with WorkFolder(tmp_path / "work") as work:
        work.begin("run", "site", "[]")
        digest, length = write_model(work.update_file(3), local)
        work.keep(Update("run", 3, 10, 1.0, 0.1, 0.5, digest, length))
        assert [update.task for update in work.updates()] == [3]
        incoming = work.incoming(payload_sha256(community), len(whole), b"")
        assert incoming is not None
        incoming.check(whole[:200_000])
        incoming.append([whole[:200_000]])
        incoming.close()
        Memories(work.memory).keep(3, memory)
        assert not shows(tmp_path, *(bytes(part) for part in model_parts(local)), whole, memory["residual"].tobytes())
        incoming = work.incoming(payload_sha256(community), len(whole), b"")
        assert incoming is not None
        assert incoming.received == 3 * CHUNK
        incoming.check(whole[incoming.received :])
        incoming.append([whole[incoming.received :]])
        assert incoming.commit()
        incoming.close()
        assert work.has_model(payload_sha256(community), len(whole))
        assert (read_model(work.update_file(3), LAYOUT).vector == local.vector).all()
        kept = Memories(work.memory).latest()
        assert kept is not None
        assert (kept["residual"] == memory["residual"]).all()
        path = work.model_file(payload_sha256(community))
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        assert not work.has_model(payload_sha256(community), len(whole)), "it is fetched again"


# --- keys ------------------------------------------------------------------------------------------------


def test_a_folder_stays_with_its_key(tmp_path: Path) -> None:
    """Without the key, with another, and a folder that was begun in the clear: one sentence each."""
    right, wrong = SealedStorage(KEY), SealedStorage(OTHER)
    right.check_folder(tmp_path / "state")
    right.check_folder(tmp_path / "state")
    with pytest.raises(StateError, match="are sealed; give their key with --storage-key"):
        Storage().check_folder(tmp_path / "state")
    with pytest.raises(StateError, match="sealed with another key"):
        wrong.check_folder(tmp_path / "state")
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "controller.db").touch()
    Storage().check_folder(begun)
    with pytest.raises(StateError, match="begun without --storage-key"):
        right.check_folder(begun)


def test_a_key_comes_from_a_file_a_variable_or_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(f"{KEY.hex()}\n")
    monkeypatch.setenv("A_KEY", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
    assert key_of(f"file:{tmp_path / 'key'}") == key_of("env:A_KEY") == key_of(f"command:cat {tmp_path / 'key'}") == KEY
    (tmp_path / "short").write_text("abcd")
    (tmp_path / "binary").write_bytes(b"\xff" * 32)
    for source, why in (
        ("key", "must be file:PATH, env:NAME or command:COMMAND"),
        ("file:", "must be file:PATH"),
        (f"file:{tmp_path / 'none'}", "cannot be read"),
        (f"file:{tmp_path / 'short'}", "does not give a key of 32 bytes"),
        (f"file:{tmp_path / 'binary'}", "does not give text"),
        ("env:NO_SUCH_VARIABLE", "is not set"),
        (f"command:{sys.executable} -c 'import sys; sys.exit(3)'", "ended with code 3"),
        (f"command:{tmp_path / 'no-such-program'}", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=why) as problem:
            key_of(source)
        assert KEY.hex() not in str(problem.value)


def test_a_child_gets_the_key_of_its_parent(monkeypatch: pytest.MonkeyPatch, sealed: SealedStorage) -> None:
    assert Storage().environment is None
    monkeypatch.setattr(os, "environ", sealed.environment)
    choose(Storage())
    storages.choose_from_environment()
    chosen = storage()
    assert isinstance(chosen, SealedStorage)
    assert chosen.key == KEY


def test_another_key_takes_over(tmp_path: Path, sealed: SealedStorage) -> None:
    """Rotation seals every file again, also after it was interrupted; unfinished ones go, the old key opens nothing."""
    new = SealedStorage(OTHER)
    sealed.check_folder(tmp_path)
    (tmp_path / "blobs").mkdir()
    for name in ("a", "b"):
        sealed.write_file(tmp_path / "blobs" / name, name.encode() * 1000)
    new.write_file(tmp_path / "blobs" / "c", b"c")  # as an interrupted rotation leaves it
    (tmp_path / "controller.db").write_bytes(b"SQLite")
    sealed.write_file(tmp_path / "blobs" / "partial.1.ab", b"half")
    with pytest.raises(StateError, match="not sealed with the old key"):
        rotate(tmp_path, SealedStorage(bytes(31) + b"x"), new)
    assert rotate(tmp_path, sealed, new) == 2
    assert rotate(tmp_path, sealed, new) == 0
    assert (tmp_path / "controller.db").read_bytes() == b"SQLite"
    with pytest.raises(DataError, match="sealed with another key"):
        read_file(tmp_path / "blobs" / "a")
    choose(new)
    assert [read_file(tmp_path / "blobs" / name)[:1] for name in "abc"] == [b"a", b"b", b"c"]
    assert not (tmp_path / "blobs" / "partial.1.ab").exists()
    new.check_folder(tmp_path)


def test_a_full_disk_is_not_a_sealed_file(sealed: SealedStorage) -> None:
    """A writer raises what the file raises, and takes as many calls as the file needs."""

    class Slow(io.BytesIO):
        def write(self, data: Any, /) -> int:
            return super().write(bytes(data[:1000]))

    file = Slow()
    writer = sealed.writer(file)
    writer.write(memoryview(content(CHUNK + 5)))
    writer.finish()
    assert len(file.getvalue()) == 33 + CHUNK + 5 + 2 * 28


@pytest.mark.slow
def test_a_federation_leaves_nothing_on_its_disks(tmp_path: Path) -> None:
    """Controller and learners as processes, one learner killed and started again: no model in the clear anywhere."""
    (tmp_path / "key").write_text(KEY.hex())
    (tmp_path / "key").chmod(stat.S_IRUSR)
    port = write_federation(tmp_path, 6, "vanilla")
    key = ["--storage-key", f"file:{tmp_path / 'key'}"]

    def learner(name: str) -> Process:
        words = ["learner", "--controller", f"127.0.0.1:{port}", "--insecure", "--name", name, "--site", "site.py"]
        return Process([*words, "--work", f"work-{name}", "--pace", "0.02", "--json", *key], tmp_path / f"{name}.log")

    command = ["controller", "federation.toml", "--state", "state", "--insecure", "--json"]
    events = tmp_path / "state" / "run" / "events.jsonl"
    with Process([*command, *key], tmp_path / "controller.log") as controller:
        controller.wait_for("listening on")
        with learner("athens") as athens, learner("basel") as killed:
            until(lambda: events.exists() and events.read_text().count('"community_published"') >= 2, "two rounds")
            killed.kill()
            with learner("basel") as back:
                assert controller.wait() == 0, controller.text()[-1500:]
                assert athens.wait() == 0, athens.text()[-1500:]
                assert back.wait() == 0, back.text()[-1500:]
    sealed_model = tmp_path / "state" / "run" / "community.safetensors.sealed"
    with Process(command, tmp_path / "refused.log") as refused:
        assert refused.wait() == 2
        assert "are sealed; give their key with --storage-key" in refused.text()
    with Process(
        ["storage", "open", str(sealed_model), *key, "--out", str(tmp_path / "out")], tmp_path / "o.log"
    ) as opened:
        assert opened.wait() == 0, opened.text()
    final = load_model(tmp_path / "out")
    secret = final.vector.tobytes()
    assert len(secret) == 12
    for folder in ("state", "work-athens", "work-basel"):
        assert not shows(tmp_path / folder, secret)
        assert list((tmp_path / folder).rglob("community.safetensors.sealed"))
        assert not list((tmp_path / folder).rglob("community.safetensors"))
