"""Local models that the controller adds up without reading them: homomorphic encryption, with a key of the learners."""

from __future__ import annotations

from dataclasses import dataclass

from metis.core.layers.base import Layer
from metis.core.mixing import Buffered, CachedAverage, FullPass, Mixing
from metis.core.model import Layout, TensorSpec

SLOTS = 4096  # numbers in a block
FRESH_BLOCK = 236_544  # bytes of a block as a learner sends it, with room to spare
ADDED_BLOCK = 131_328  # of one that was weighted and added up
TAIL = 16  # bytes behind the blocks of a community model: whether it is encrypted, and the sum of weights
ENVELOPE = "ckks"  # the tensor that holds them


@dataclass(frozen=True)
class HomomorphicEncryption(
    Layer,
    key="ckks",
    order=13,
    needs={
        "linear": "adds encrypted models up, each times a number, and {policy} as it is composed here needs more; "
        "sync_fedavg, semisync_fedavg, async_fedavg, fedrec and fedbuff do not. fedasync would multiply again what was "
        "multiplied before, which these ciphertexts do not allow",
        "wire": "has its own encoding of updates, and so has {other}",
    },
    takes={"models", "mixture", "spread", "layout"},
):
    """Encrypted models (CKKS): the learners share a key, and the controller mixes without reading; beyond the paper.

    Learners encrypt their local models and decrypt the community model; the controller weights and adds up, and can
    evaluate nothing. Any one learner's key opens every model, so one learner together with the controller sees all. An
    update has 14 times the bytes of a plain one, a community model 8 times. In a simulation nothing is encrypted, and
    the bytes are counted.
    """

    def relabel(self, label: str) -> str:
        return f"{label}, encrypted"

    def update_bytes(self, layout: Layout) -> int:
        """Bytes of an update of this layout."""
        return blocks_of(layout) * FRESH_BLOCK

    def model_bytes(self, layout: Layout) -> int:
        """Bytes of a community model of this layout."""
        return blocks_of(layout) * ADDED_BLOCK + TAIL + 8 * layout.counters


def is_linear(mixing: Mixing) -> bool:
    """Whether a mixing only adds up local models, each times a number; `encrypted` says so of what does it unread."""
    made = getattr(mixing, "func", mixing)
    return made in (FullPass, CachedAverage, Buffered) or getattr(made, "encrypted", False)


def blocks_of(layout: Layout) -> int:
    """Encrypted blocks of a model of this layout, or of an envelope."""
    if is_envelope(layout):
        return (4 * layout.size - TAIL) // ADDED_BLOCK
    return -(-layout.size // SLOTS)


def is_envelope(layout: Layout) -> bool:
    """Whether this is what an encrypted model travels in."""
    return bool(layout.tensors) and layout.tensors[0].name == ENVELOPE


def envelope(layout: Layout) -> Layout:
    """What a community model of this layout travels in, encrypted; its counters are in the clear."""
    size = (blocks_of(layout) * ADDED_BLOCK + TAIL) // 4
    counters = tuple(spec for spec in layout.tensors if spec.role == "counter")
    return Layout((TensorSpec(ENVELOPE, (size,)), *counters))
