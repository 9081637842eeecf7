"""Models that travel encrypted (`ckks.py`): what a learner opens and seals, and what a controller mixes unread.

A community model travels in an envelope, one opaque tensor: its blocks, each in a room of a fixed size, and a tail that
says whether they are encrypted and by which number they must be divided. An update is the blocks of the local model,
or, for FedBuff, of how far it is from its base.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.core.events import LearnerId
from metis.core.layers.ckks import ADDED_BLOCK, FRESH_BLOCK, SLOTS, TAIL, blocks_of, envelope
from metis.core.mixing import Buffered, CachedAverage, FullPass, Mixing, ModelStore
from metis.core.mixing.community import Published
from metis.core.model import Layout, Model, Vector
from metis.core.policy import Policy
from metis.errors import ConfigError, InternalError, Refused
from metis.privacy.ckks import Adder, KeyHolder

_LENGTH = 4  # bytes before a block


def enveloped(network: Model) -> Model:
    """A first community model in the clear, as the controller's own process makes it."""
    layout = envelope(network.layout)
    vector = np.zeros(layout.size, np.float32)
    vector[: network.layout.size] = network.vector
    return Model(layout, vector, network.counters)


def read_key(path: Path) -> bytes:
    """A key for homomorphic encryption, as `metis certificates ckks` wrote it."""
    try:
        return path.read_bytes()
    except OSError as problem:
        raise ConfigError(f"the key {path} cannot be read: {problem.strerror}") from problem


# --- at a learner ---------------------------------------------------------------------------------


class SharedKey:
    """What a learner does with the key that all learners share."""

    def __init__(self, secret: bytes, *, of_differences: bool = False) -> None:
        self._holder, self._of_differences = KeyHolder(secret), of_differences

    @staticmethod
    def of(path: str | None, policy: Policy) -> SharedKey | None:
        """The key in this file, if the federation encrypts; a ConfigError if only one side does."""
        if policy.ckks is None:
            if path is not None:
                raise ConfigError(
                    "this site sends encrypted models only (--ckks-key), and the policy of this federation has no ckks"
                )
            return None
        if path is None:
            raise ConfigError(
                "the models of this federation are encrypted (policy.ckks): give --ckks-key FILE, the key that its "
                "learners share"
            )
        differences = getattr(policy.mixing, "func", policy.mixing) is Buffered
        return SharedKey(read_key(Path(path)), of_differences=differences)

    def opened(self, model: Model, layout: Layout) -> Model:
        """The community model in this envelope; Refused if it cannot be one."""
        encrypted, divisor = _tail(model)
        if not encrypted:
            return Model(layout, np.array(model.vector[: layout.size]), model.counters)
        vector = self._holder.decrypt(_blocks(model.vector, blocks_of(layout), ADDED_BLOCK), layout.size, divisor)
        if not np.isfinite(vector).all():
            raise Refused("the community model does not decrypt to numbers; was it encrypted with another key?")
        return Model(layout, vector, model.counters)

    def sealed(self, local: Model, base: Model) -> list[memoryview]:
        """The bytes of an update."""
        vector = local.vector - base.vector if self._of_differences else local.vector
        return [memoryview(_room(block, FRESH_BLOCK)) for block in self._holder.encrypt(vector)]


# --- at the controller ----------------------------------------------------------------------------


def encrypted_policy(policy: Policy, public: bytes) -> Policy:
    """The policy of a controller that mixes what it cannot read."""
    return replace(policy, mixing=encrypted_mixing(policy.mixing, Adder(public)))


def encrypted_mixing(mixing: Mixing, adder: Adder) -> Mixing:
    """The mixing of ciphertexts that does what this one does with numbers."""
    kinds: Mapping[Any, Any] = {
        FullPass: EncryptedAverage, CachedAverage: EncryptedCache, Buffered: EncryptedBuffer,
    }  # fmt: skip
    made = kinds[getattr(mixing, "func", mixing)]
    return partial(made, adder=adder, **getattr(mixing, "keywords", {}))


def encrypted_start(model: Model, public: bytes) -> Model:
    """The first community model, given in an envelope in the clear; to be kept, for its bits are never the same."""
    adder = Adder(public)
    numbers = np.zeros(blocks_of(model.layout) * SLOTS, np.float32)
    numbers[:] = model.vector[: numbers.size]
    blocks = (adder.scaled(block, 1.0) for block in adder.encrypt(numbers))
    return model.with_vector(_filled(model.layout, blocks, 1.0))


class EncryptedUpdates:
    """Checks what learners send, as far as it can be checked unread."""

    def __init__(self, public: bytes, layout: Layout) -> None:
        self._adder, self._blocks = Adder(public), blocks_of(layout)

    @property
    def numbers(self) -> int:
        """How long an update is, in the four bytes of a number."""
        return self._blocks * FRESH_BLOCK // 4

    def allows(self, length: int) -> bool:
        """Whether an update may have so many bytes."""
        return length == self._blocks * FRESH_BLOCK

    def problem(self, learner: LearnerId, content: bytes) -> str | None:
        """Why an update cannot count; None if it can."""
        try:
            for block in _blocks(np.frombuffer(content, np.float32), self._blocks, FRESH_BLOCK):
                self._adder.check(block)
        except Refused as problem:
            return str(problem)
        return None


class _Encrypted(Published):
    """What all have: an adder, updates in the store, and envelopes."""

    encrypted = True

    def __init__(self, initial_model: Model, store: ModelStore, adder: Adder) -> None:
        super().__init__(initial_model)
        self._store, self._adder = store, adder
        self._values: dict[LearnerId, float] = {}
        self._count = blocks_of(initial_model.layout) if initial_model.layout.size else 0

    def _block(self, learner: LearnerId, index: int) -> bytes:
        """Of the update that the store holds; only this much of it is read."""
        start = index * FRESH_BLOCK // 4
        return _unroom(np.asarray(self._store.get(learner)[start : start + FRESH_BLOCK // 4]))

    def _total(self, factors: Mapping[LearnerId, float], index: int) -> bytes:
        total: bytes | None = None
        for learner in sorted(factors):
            block = self._adder.scaled(self._block(learner, index), factors[learner])
            total = block if total is None else self._adder.add(total, block)
        assert total is not None, "asked only if somebody has handed in"
        return total

    def _publish(self, blocks: Iterable[bytes], divisor: float) -> None:
        self._stamp_new(_filled(self.model.layout, blocks, divisor))


class EncryptedAverage(_Encrypted):
    """The weighted average of a round."""

    averages_rounds = True
    weighs_learners = True

    @property
    def contributors(self) -> int:
        return len(self._values)

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        self._store.put(learner, local_model.vector)
        self._values[learner] = value
        self.committed_steps += steps

    def withdraw(self, learner: LearnerId) -> None:
        self._values.pop(learner, None)
        self._store.remove(learner)

    def publish(self, seconds: float = 0.0) -> bool:
        if not self._values:
            return False
        weights = self.weights(self._values)
        whole = math.fsum(weights.values())
        shares = {learner: p / whole for learner, p in weights.items()}
        self._publish((self._total(shares, index) for index in range(self._count)), 1.0)
        self._values.clear()
        return True

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        return {}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.model, self._store = model, store
        self._count = blocks_of(model.layout)


class EncryptedCache(_Encrypted):
    """The weighted average of everybody's latest models, from a running sum: W + p' w' - p w, encrypted (Sec. 5)."""

    weighs_learners = True

    def __init__(self, initial_model: Model, store: ModelStore, adder: Adder, rebuild_every: int = 1000) -> None:
        super().__init__(initial_model, store, adder)
        self._rebuild_every, self._commits, self._changed = rebuild_every, 0, False
        self._unit = 0.0  # of the weights, so that none is too large or too small for a ciphertext
        self._sum: list[bytes] = []  # W

    @property
    def contributors(self) -> int:
        return len(self._values)

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        self._unit = self._unit or value
        if learner in self._values:
            self._take_off(learner)
        self._store.put(learner, local_model.vector)
        self._values[learner] = value
        self.committed_steps += steps
        self._commits += 1
        self._changed = True
        if self._commits % self._rebuild_every == 0:  # ciphertexts get noisier with every sum
            self._rebuild()
            return
        fresh = (self._adder.scaled(self._block(learner, index), value / self._unit) for index in range(self._count))
        if self._sum:
            self._sum = [self._adder.add(one, other) for one, other in zip(self._sum, fresh, strict=True)]
        else:
            self._sum = list(fresh)

    def _take_off(self, learner: LearnerId) -> None:
        factor = self._values.pop(learner) / self._unit
        if not self._values:
            self._sum = []  # exactly nothing is left
            return
        old = (self._adder.scaled(self._block(learner, index), factor) for index in range(self._count))
        self._sum = [self._adder.subtract(one, other) for one, other in zip(self._sum, old, strict=True)]

    def withdraw(self, learner: LearnerId) -> None:
        if learner in self._values:
            self._take_off(learner)
            self._store.remove(learner)
            self._changed = bool(self._values)

    def _rebuild(self) -> None:
        factors = {learner: p / self._unit for learner, p in self._values.items()}
        self._sum = [self._total(factors, index) for index in range(self._count)]

    def publish(self, seconds: float = 0.0) -> bool:
        if not self._changed:
            return False
        self._changed = False
        weights = self.weights(self._values)
        if weights == self._values:
            self._publish(self._sum, math.fsum(weights.values()) / self._unit)
        else:
            factors = {learner: p / self._unit for learner, p in weights.items()}
            blocks = (self._total(factors, index) for index in range(self._count))
            self._publish(blocks, math.fsum(weights.values()) / self._unit)
        return True

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        return {"ckks/sum": _packed(self._sum)}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.model, self._store, self._sum = model, store, _unpacked(arrays["ckks/sum"])
        self._count = blocks_of(model.layout)


class EncryptedBuffer(_Encrypted):
    """FedBuff: learners send how far they are from their base, and weighted differences are added to the model."""

    def __init__(
        self,
        initial_model: Model,
        store: ModelStore,
        adder: Adder,
        buffer_size: int = 3,
        server_learning_rate: float = 1.0,
    ) -> None:
        super().__init__(initial_model, store, adder)
        self._buffer_size, self._factor = buffer_size, server_learning_rate / buffer_size
        self._sum: list[bytes] = []  # the community model with what has come since
        self.contributors = 0

    def commit(
        self,
        learner: LearnerId,
        local_model: Model,
        value: float,
        steps: int,
        base: Model | None = None,
        examples: int = 1,
    ) -> None:
        self._store.put(learner, local_model.vector)
        before = self._sum or self._start()
        fresh = (self._adder.scaled(self._block(learner, index), value * self._factor) for index in range(self._count))
        self._sum = [self._adder.add(one, other) for one, other in zip(before, fresh, strict=True)]
        self._store.remove(learner)
        self.committed_steps += steps
        self.contributors += 1

    def _start(self) -> list[bytes]:
        """The blocks of the community model that this began with."""
        if not self._count:
            return []
        if _tail(self.model) != (True, 1.0):
            raise InternalError("a buffer begins with an encrypted model that needs no division")
        return list(_blocks(self.model.vector, self._count, ADDED_BLOCK))

    def withdraw(self, learner: LearnerId) -> None:
        """Nothing: differences are summed as they come and cannot be separated."""

    def publish(self, seconds: float = 0.0) -> bool:
        if self.contributors < self._buffer_size:
            return False
        self._publish(self._sum, 1.0)
        self.contributors = 0
        return True

    def arrays(self, *, local_models: bool = True) -> dict[str, NDArray[Any]]:
        return {"ckks/sum": _packed(self._sum)}

    def load_arrays(self, model: Model, arrays: Mapping[str, NDArray[Any]], store: ModelStore) -> None:
        self.model, self._store, self._sum = model, store, _unpacked(arrays["ckks/sum"])
        self._count = blocks_of(model.layout)


# --- rooms ----------------------------------------------------------------------------------------


def _room(block: bytes, size: int) -> bytes:
    """A block at the length of its room: how long it is, itself, and zeros."""
    if len(block) + _LENGTH > size:
        raise InternalError(f"an encrypted block has {len(block)} bytes and a room of {size}")
    return len(block).to_bytes(_LENGTH, "little") + block + bytes(size - _LENGTH - len(block))


def _unroom(numbers: Vector) -> bytes:
    content = numbers.tobytes()
    length = int.from_bytes(content[:_LENGTH], "little")
    if length > len(content) - _LENGTH:
        raise Refused(f"an encrypted block claims {length} bytes in a room of {len(content)}")
    return content[_LENGTH : _LENGTH + length]


def _blocks(vector: Vector, count: int, size: int) -> Iterable[bytes]:
    return (_unroom(vector[index * size // 4 : (index + 1) * size // 4]) for index in range(count))


def _filled(layout: Layout, blocks: Iterable[bytes], divisor: float) -> Vector:
    """The vector of an envelope."""
    vector = np.zeros(layout.size, np.float32)
    raw = vector.view(np.uint8)
    for index, block in enumerate(blocks):
        raw[index * ADDED_BLOCK : (index + 1) * ADDED_BLOCK] = np.frombuffer(_room(block, ADDED_BLOCK), np.uint8)
    if vector.size:
        raw[-TAIL:] = np.array([1.0, divisor], "<f8").view(np.uint8)
    return vector


def _tail(model: Model) -> tuple[bool, float]:
    """Whether an envelope is encrypted, and by what its numbers are to be divided; Refused if it is not an envelope."""
    encrypted, divisor = np.array(model.vector[-TAIL // 4 :]).view("<f8")
    if encrypted not in (0.0, 1.0) or (encrypted and not (math.isfinite(divisor) and divisor > 0)):
        raise Refused("this community model does not say how it is encrypted")
    return bool(encrypted), float(divisor)


def _packed(blocks: Iterable[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(_room(block, ADDED_BLOCK) for block in blocks), np.uint8)


def _unpacked(array: NDArray[Any]) -> list[bytes]:
    numbers = np.array(array, np.uint8).view(np.float32)
    return list(_blocks(numbers, numbers.nbytes // ADDED_BLOCK, ADDED_BLOCK))
