"""Encrypted federations: the controller mixes what it cannot read, as it would mix numbers, across restarts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from deployment.test_masked_rounds import _free_port, _start, _until
from deployment.tiny import write_site
from metis.core.controller import Controller
from metis.core.events import LearnerJoined, LearnerWithdrawn, UpdateRequest
from metis.core.layers import HomomorphicEncryption, LargestShare
from metis.core.layers.ckks import ADDED_BLOCK, FRESH_BLOCK, SLOTS, TAIL, envelope
from metis.core.mixing import ModelStore
from metis.core.model import Layout, Model, TensorSpec
from metis.core.policies import async_fedavg, fedbuff, fedrec, semisync_fedavg, sync_fedavg
from metis.core.policy import Policy
from metis.core.stop import StopRule
from metis.deployment.controller.durable import DurableController
from metis.deployment.controller.state import State
from metis.errors import ConfigError, InternalError, Refused, StateError
from metis.privacy.encrypted import EncryptedUpdates, SharedKey, _room, encrypted_policy, encrypted_start, enveloped

ckks = pytest.importorskip("metis.privacy.ckks")
pytest.importorskip("tenseal")

LAYOUT = Layout((TensorSpec("w", (SLOTS // 2 + 7, 2)), TensorSpec("n", (), "int64", "counter")))  # two blocks
NAMES = ("ann", "bob", "cyd")
POLICIES = {
    "sync": sync_fedavg(1),
    "semisync": semisync_fedavg(1),
    "share": sync_fedavg(1).with_layers(LargestShare(0.4)),
    "async": async_fedavg(1, rebuild_every=5),
    "async share": async_fedavg(1).with_layers(LargestShare(0.4)),
    "fedrec": fedrec(1),
    "fedbuff": fedbuff(1, buffer_size=2, server_learning_rate=0.5),
}


@pytest.fixture(scope="module")
def keys() -> tuple[bytes, bytes]:
    made: tuple[bytes, bytes] = ckks.new_keys()
    return made


def _initial() -> Model:
    return Model(LAYOUT, np.linspace(-1, 1, LAYOUT.size, dtype=np.float32), np.array([7]))


def _controller(policy: Policy, model: Model, store: ModelStore | None = None) -> Controller:
    return Controller(policy, model, stop=StopRule(rounds=40), learners_expected=3, store=store, models_checked=True)


class Twins:
    """A plain controller, and one that adds ciphertexts up in its folder; both get the same events."""

    def __init__(self, folder: Path, policy: Policy, keys: tuple[bytes, bytes]) -> None:
        self._folder, self._public = folder, keys[1]
        self._policy = policy.with_layers(HomomorphicEncryption())
        self.key = SharedKey(keys[0], of_differences=self._policy.name == "fedbuff")
        self.plain = _controller(policy, _initial())
        self._start, self.now = encrypted_start(enveloped(_initial()), keys[1]), 0.0
        self._open()

    def _open(self) -> None:
        self._state = State.open(self._folder, "process")
        blind = encrypted_policy(self._policy, self._public)
        updates = EncryptedUpdates(self._public, envelope(LAYOUT))
        self.durable = DurableController(
            lambda model, store: _controller(blind, model, store), self._start, self._state,
            lambda now, item: None, update_size=updates.numbers,
        )  # fmt: skip

    def restart(self) -> None:
        self._state.close()
        self._open()

    def happen(self, event: Any, local: Model | None = None, base: Model | None = None) -> None:
        self.now += 1.0
        blob = None
        if local is not None and base is not None:
            blob = self._state.put_blob(self.key.sealed(local, base))
            event, plain = replace(event, local_model=Model.empty()), replace(event, local_model=local)
        else:
            plain = event
        self.plain.handle(plain, self.now)
        self.durable.apply(self.durable.journal(event, self.now, blob))

    def opened(self) -> Model:
        return self.key.opened(self.durable.controller.community.model, LAYOUT)

    def work(self, rounds: int) -> Iterator[int]:
        """Everybody trains in turn; after each update, how many there were."""
        rng, count = np.random.default_rng(3), 0
        for _ in range(rounds):
            for name in NAMES:
                record = self.plain.roster[name]
                if record.task is None or not record.available:
                    continue
                steps = min(record.task.budget.steps or 1, 3)
                base = self.plain.community.model if record.base_model is None else record.base_model
                moved = base.vector + rng.normal(0, 0.1, base.vector.size).astype(np.float32)
                request = UpdateRequest(name, record.task.number, steps, 1.0, 0.1, Model.empty(), 0.5)
                self.happen(request, base.with_vector(moved), base)
                count += 1
                yield count


@pytest.mark.parametrize(
    "name",
    [name if name in ("sync", "async", "fedbuff") else pytest.param(name, marks=pytest.mark.slow) for name in POLICIES],
)
def test_ciphertexts_are_mixed_as_numbers_are(name: str, keys: tuple[bytes, bytes], tmp_path: Path) -> None:
    """The same events, a withdrawal and restarts in between, with and without a snapshot: the same model to 1e-5."""
    twins = Twins(tmp_path, POLICIES[name], keys)
    for index, learner in enumerate(NAMES):
        twins.happen(LearnerJoined(learner, 30 + 100 * index, 10))
    for count in twins.work(6):
        if count == 4:
            twins.restart()
        if count == 7:
            twins.durable.snapshot()
            twins.restart()
        if count == 10:
            twins.happen(LearnerWithdrawn("bob"))
            twins.happen(LearnerJoined("bob", 40, 10))
        assert twins.durable.controller.community.stamp == twins.plain.community.stamp
        np.testing.assert_allclose(twins.opened().vector, twins.plain.community.model.vector, atol=1e-5)
    assert twins.plain.community.stamp.version >= 4 and twins.opened().counters.tolist() == [7]
    stored = b"".join(path.read_bytes() for path in (tmp_path / "blobs").iterdir() if path.is_file())
    later = twins.plain.community.model.vector[:64].astype("<f4").tobytes()
    assert later[:16] not in stored and len(stored) > FRESH_BLOCK


def test_an_update_that_is_damaged_on_the_disk_is_not_replayed(keys: tuple[bytes, bytes], tmp_path: Path) -> None:
    """Nobody can read it, but its name says what it was: the start is refused, and names the file."""
    twins = Twins(tmp_path, POLICIES["async"], keys)
    for index, learner in enumerate(NAMES):
        twins.happen(LearnerJoined(learner, 30 + 100 * index, 10))
    for _ in zip(range(2), twins.work(1), strict=False):
        pass
    (blob, *_) = [path for path in (tmp_path / "blobs").iterdir() if path.stat().st_size == 2 * FRESH_BLOCK]
    content = bytearray(blob.read_bytes())
    content[1000] ^= 1
    blob.write_bytes(content)
    with pytest.raises(StateError, match=f"blobs/{blob.name} of learner"):
        twins.restart()


def test_updates_and_envelopes_that_are_not_are_refused(keys: tuple[bytes, bytes]) -> None:
    """Whatever comes from the wire: one sentence."""
    policy = sync_fedavg().with_layers(HomomorphicEncryption())
    key, updates = SharedKey(keys[0]), EncryptedUpdates(keys[1], LAYOUT)
    content = b"".join(key.sealed(_initial(), _initial()))
    assert updates.allows(len(content)) and not updates.allows(len(content) - 4)
    assert len(content) == policy.update_bytes(LAYOUT) == 2 * FRESH_BLOCK
    assert policy.model_bytes(LAYOUT) == 2 * ADDED_BLOCK + TAIL + 8
    assert updates.problem("ann", content) is None
    assert "not an encrypted block" in str(updates.problem("ann", bytes(len(content))))
    assert "claims" in str(updates.problem("ann", b"\xff" * len(content)))
    first = enveloped(_initial())
    np.testing.assert_array_equal(key.opened(first, LAYOUT).vector, _initial().vector)
    for tail in ([2.0, 1.0], [1.0, 0.0], [1.0, np.nan]):
        vector = first.vector.copy()
        vector[-TAIL // 4 :] = np.array(tail, "<f8").view(np.float32)
        with pytest.raises(Refused, match="does not say how it is encrypted"):
            key.opened(first.with_vector(vector), LAYOUT)
    with pytest.raises(InternalError, match="room of 8"):
        _room(bytes(9), 8)


def test_a_key_and_a_policy_belong_together(keys: tuple[bytes, bytes], tmp_path: Path) -> None:
    """A site with a key never sends a plain model, and one without cannot take part."""
    path, encrypted = tmp_path / "learners.ckks", sync_fedavg().with_layers(HomomorphicEncryption())
    assert SharedKey.of(None, sync_fedavg()) is None
    with pytest.raises(ConfigError, match="give --ckks-key FILE"):
        SharedKey.of(None, encrypted)
    with pytest.raises(ConfigError, match="has no ckks"):
        SharedKey.of(str(path), sync_fedavg())
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        SharedKey.of(str(path), encrypted)
    path.write_bytes(keys[1])
    with pytest.raises(ConfigError, match="not a learner's key"):
        SharedKey.of(str(path), encrypted)
    path.write_bytes(keys[0])
    assert SharedKey.of(str(path), encrypted) is not None


_FILE = """
[site]
file = "site.py"
[[learners]]
name = "all"
names = ["a", "b", "c"]
batch_size = 10
time_per_batch = 0.1
[training]
learning_rate = 0.1
[policy]
name = "fedrec"
local_epochs = 1
[policy.ckks]
[stop]
update_requests = 9
[deployment]
heartbeat = 1
linger = 5
"""


@pytest.mark.slow
def test_processes_train_though_the_controller_reads_nothing_and_is_killed(tmp_path: Path) -> None:
    """Only the learners can open what the federation ends with; no loss is sent."""
    site, port = write_site(tmp_path), _free_port()
    (tmp_path / "federation.toml").write_text(_FILE)
    subprocess.run([sys.executable, "-m", "metis.cli.app", "certificates", "ckks", "keys"], cwd=tmp_path, check=True)
    assert (tmp_path / "keys" / "learners.ckks").stat().st_mode & 0o77 == 0
    serve = (
        "controller", "federation.toml", "--state", "state", "--insecure", "--listen", f"127.0.0.1:{port}", "--site",
        str(site), "--http", "", "--ckks-key", "keys/controller.ckks",
    )  # fmt: skip

    def take_part(name: str) -> tuple[str, ...]:
        return (
            "learner", "--controller", f"127.0.0.1:{port}", "--insecure", "--name", name, "--site", str(site),
            "--work", f"work-{name}", "--ckks-key", "keys/learners.ckks",
        )  # fmt: skip

    controller = _start(tmp_path, "controller", *serve)
    learners = [_start(tmp_path, name, *take_part(name)) for name in "abc"]
    events = tmp_path / "state" / "run" / "events.jsonl"
    try:
        _until(lambda: events.exists() and events.read_bytes().count(b"update_committed") >= 3, controller, tmp_path)
        controller.kill()
        controller.wait()
        controller = _start(tmp_path, "controller", *serve)
        assert controller.wait(600) == 0, (tmp_path / "controller.out").read_text()[-3000:]
        assert [learner.wait(300) for learner in learners] == [0, 0, 0]
    finally:
        for process in (controller, *learners):
            if process.poll() is None:
                process.kill()
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    assert all(line["loss"] is None for line in lines if line.get("event") == "update_request")
    models = [load_file(tmp_path / f"work-{name}" / "community.safetensors") for name in "abc"]
    assert all(np.array_equal(models[0][key], other[key]) for other in models for key in models[0])
    assert all(np.isfinite(value).all() for value in models[0].values())
    assert list(load_file(tmp_path / "state" / "run" / "community.safetensors")) == ["ckks"]
    late = tmp_path / "work-c" / "community.safetensors"
    late.unlink()
    controller = _start(tmp_path, "controller", *serve)
    try:  # who comes back after the end, and trains nothing any more, gets the model too
        assert _start(tmp_path, "c", *take_part("c")).wait(300) == 0, (tmp_path / "c.out").read_text()[-3000:]
        assert controller.wait(300) == 0
    finally:
        controller.kill()
    assert {key: value.tobytes() for key, value in load_file(late).items()} == {
        key: value.tobytes() for key, value in models[0].items()
    }
