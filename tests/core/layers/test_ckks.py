"""The sizes of encrypted models, and what a policy says of them; `tests/deployment/test_encrypted.py` encrypts."""

from __future__ import annotations

import pytest

from metis.core.layers import ControlVariates, FedAdam, FedNova, HomomorphicEncryption, SecureSum
from metis.core.layers.ckks import ADDED_BLOCK, FRESH_BLOCK, SLOTS, TAIL, blocks_of, envelope, is_envelope
from metis.core.model import Layout, TensorSpec
from metis.core.policies import async_fedavg, fedasync, semisync, sync_fedavg
from metis.errors import ArgumentError

LAYOUT = Layout((TensorSpec("w", (SLOTS + 1,)), TensorSpec("n", (), "int64", "counter")))


def test_an_envelope_has_room_for_all_blocks_and_keeps_counters() -> None:
    """It says how many blocks it holds, so that sizes follow from it as from the network's own layout."""
    travels, policy = envelope(LAYOUT), sync_fedavg().with_layers(HomomorphicEncryption())
    assert is_envelope(travels) and not is_envelope(LAYOUT) and not is_envelope(Layout())
    assert blocks_of(LAYOUT) == blocks_of(travels) == 2 and travels.counters == 1
    assert 4 * travels.size == 2 * ADDED_BLOCK + TAIL
    for layout in (LAYOUT, travels):
        assert policy.update_bytes(layout) == 2 * FRESH_BLOCK
        assert policy.model_bytes(layout) == 2 * ADDED_BLOCK + TAIL + 8
    assert sync_fedavg().model_bytes(LAYOUT) is None


def test_a_policy_says_whether_models_are_hidden() -> None:
    """Then nobody measures, clips or checks the numbers of one update."""
    assert not sync_fedavg().hides_models
    assert sync_fedavg().with_layers(SecureSum()).hides_models
    assert async_fedavg().with_layers(HomomorphicEncryption()).hides_models


@pytest.mark.parametrize(
    ("policy", "layers"),
    [
        (fedasync(), ()),
        (semisync(), ()),
        (sync_fedavg(), (FedNova(),)),
        (sync_fedavg(), (FedAdam(),)),
        (sync_fedavg(), (ControlVariates(),)),
        (sync_fedavg(), (SecureSum(),)),
    ],
    ids=["fedasync", "semisync", "nova", "server", "scaffold", "secure_sum"],
)
def test_what_sums_of_ciphertexts_cannot_do_is_refused(policy: object, layers: tuple[object, ...]) -> None:
    """With the name of what does not go together."""
    with pytest.raises(ArgumentError, match="ckks"):
        policy.with_layers(HomomorphicEncryption(), *layers)  # type: ignore[attr-defined]
