"""Homomorphic encryption."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from metis.errors import ConfigError, Diverged, Refused
from metis.privacy import ckks

SIZE = ckks.SLOTS + 100  # two blocks


@pytest.fixture(scope="module")
def keys() -> tuple[bytes, bytes]:
    pytest.importorskip("tenseal")
    return ckks.new_keys()


@pytest.fixture(scope="module")
def holder(keys: tuple[bytes, bytes]) -> ckks.KeyHolder:
    return ckks.KeyHolder(keys[0])


@pytest.fixture(scope="module")
def adder(keys: tuple[bytes, bytes]) -> ckks.Adder:
    return ckks.Adder(keys[1])


def model(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def test_a_round_gives_the_weighted_mean(holder: ckks.KeyHolder, adder: ckks.Adder) -> None:
    """Within 1e-5 for contribution values up to 1,000."""
    weights = {1: 17.0, 2: 1000.0, 3: 0.5}
    total: list[bytes] = []
    for seed, p in weights.items():
        scaled = [adder.scaled(block, p) for block in holder.encrypt(model(seed))]
        total = [adder.add(one, other) for one, other in zip(total, scaled, strict=True)] if total else scaled
    mean = sum(p * model(seed).astype(np.float64) for seed, p in weights.items()) / sum(weights.values())
    opened = holder.decrypt(total, SIZE, sum(weights.values()))
    assert opened.dtype == np.float32
    assert np.abs(opened - mean).max() < 1e-5


def test_the_asynchronous_cache_stays_right_over_many_updates(holder: ckks.KeyHolder, adder: ckks.Adder) -> None:
    """What a learner had goes off, what it has now comes on: 30 updates of 4 learners with new weights."""
    chance = np.random.default_rng(5)
    latest: dict[int, tuple[np.ndarray, float, bytes]] = {}
    running: bytes | None = None
    for update in range(30):
        who, p = int(chance.integers(4)), float(chance.uniform(0.5, 20))
        vector = model(update)[: ckks.SLOTS]
        row = adder.scaled(next(holder.encrypt(vector)), p)
        running = row if running is None else adder.add(running, row)
        if who in latest:
            running = adder.subtract(running, latest[who][2])
        latest[who] = vector, p, row
    assert running is not None
    whole = sum(p for _, p, _ in latest.values())
    mean = sum(p * vector.astype(np.float64) for vector, p, _ in latest.values()) / whole
    assert np.abs(holder.decrypt([running], ckks.SLOTS, whole) - mean).max() < 1e-5


def test_the_controller_cannot_decrypt(keys: tuple[bytes, bytes], holder: ckks.KeyHolder, adder: ckks.Adder) -> None:
    """Its part of the keys is not a learner's key, and equal models have different ciphertexts."""
    with pytest.raises(ConfigError, match="not a learner's key"):
        ckks.KeyHolder(keys[1])
    with pytest.raises(ConfigError, match="not the controller's part"):
        ckks.Adder(keys[0])
    block = next(holder.encrypt(model(1)))
    with pytest.raises(ValueError, match="secret_key"):
        adder._read(block).decrypt()
    assert block != next(holder.encrypt(model(1)))
    with pytest.raises(ConfigError, match="not a learner's key"):
        ckks.KeyHolder(b"nonsense")


def test_another_key_decrypts_noise(holder: ckks.KeyHolder) -> None:
    block = next(holder.encrypt(model(1)))
    other = ckks.KeyHolder(ckks.new_keys()[0]).decrypt([block], ckks.SLOTS)
    assert np.abs(other).mean() > 1e3


def test_bytes_from_anybody_are_refused(holder: ckks.KeyHolder, adder: ckks.Adder) -> None:
    block = next(holder.encrypt(model(1)))
    for bad in (b"", b"xx", block[:-5], block[:1000], block + bytes(1 << 18), b"\x00" * 1000):
        with pytest.raises(Refused, match="not an encrypted block"):
            adder.scaled(bad, 1.0)
    scaled = adder.scaled(block, 2.0)
    for call in (lambda: adder.scaled(scaled, 2.0), lambda: adder.scaled(adder.add(scaled, scaled), 2.0)):
        with pytest.raises(Refused, match="only once"):
            call()


@pytest.mark.parametrize("factor", [0.0, -1.0, 1e30, math.nan, math.inf])
def test_a_factor_that_cannot_be_is_refused(holder: ckks.KeyHolder, adder: ckks.Adder, factor: float) -> None:
    with pytest.raises(Refused, match="can be scaled by"):
        adder.scaled(next(holder.encrypt(model(1))), factor)


def test_a_sum_has_all_its_blocks(holder: ckks.KeyHolder) -> None:
    blocks = list(holder.encrypt(model(1)))
    assert np.abs(holder.decrypt(blocks, SIZE) - model(1)).max() < 1e-6
    with pytest.raises(Refused, match="2 encrypted blocks, not 1"):
        holder.decrypt(blocks[:1], SIZE)
    with pytest.raises(Refused, match="2 encrypted blocks, not more"):
        holder.decrypt([*blocks, blocks[0]], SIZE)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e9])
def test_numbers_that_would_wrap_are_refused(holder: ckks.KeyHolder, bad: float) -> None:
    vector = model(1)
    vector[7] = bad
    with pytest.raises(Diverged, match="not finite"):
        next(holder.encrypt(vector))


def test_without_the_package_one_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(ConfigError, match=r"pip install '.\[ckks\]'"):
        ckks.new_keys()
