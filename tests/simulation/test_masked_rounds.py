"""Masked rounds in virtual time: the ring without masks, the same for any number of workers and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metis
from metis.core.events import CohortFixed, RoundClosed, SumOpened, UpdateRequest
from metis.core.mixing.secure import MessageBytes
from simulation.federations import fingerprint, lively


def _policy(**changes: Any) -> metis.Policy:
    return metis.semisync_fedavg(1, cold_start_limit=1).with_layers(metis.SecureSum(**changes))


CACHE = metis.async_fedavg(1).with_layers(metis.SecureSum())


@pytest.mark.parametrize("policy", [_policy(), CACHE], ids=["rounds", "windows of whole models"])
def test_same_bits_for_any_number_of_workers_and_after_a_resume(policy: metis.Policy, tmp_path: Path) -> None:
    """Also if the run is cut off between the close of a round and its sum."""
    federation = lively()
    inline = federation.simulate(policy, seconds=6, out=tmp_path / "whole")
    kinds = [type(item) for _, item in inline.events]
    assert kinds.count(RoundClosed) == kinds.count(SumOpened) >= 2 and CohortFixed not in kinds
    assert fingerprint(federation.simulate(policy, seconds=6, workers=2)) == fingerprint(inline)

    closes = [at for at, item in inline.events if isinstance(item, RoundClosed)]

    def cut_off(fold: Any) -> None:
        if fold.now >= closes[1]:
            raise KeyboardInterrupt

    out = tmp_path / "cut"
    cut = federation.simulate(policy, seconds=6, out=out, watch=cut_off)
    assert cut.finish_reason == "interrupted" and isinstance(cut.events[-3][1], RoundClosed)
    resumed = federation.simulate(policy, seconds=6, out=out, resume=True)
    assert fingerprint(resumed) == fingerprint(inline)
    assert inline.community_model.sha256() != federation.initial_model.sha256()


def test_opening_a_sum_costs_time_and_bytes() -> None:
    """Two exchanges of small messages after each round, by the links of the members."""
    federation = lively()
    masked = federation.simulate(_policy(), rounds=2)
    plain = federation.simulate(metis.semisync_fedavg(1, cold_start_limit=1), rounds=2)
    closed = [at for at, item in masked.events if isinstance(item, RoundClosed)]
    opened = [at for at, item in masked.events if isinstance(item, SumOpened)]
    assert all(later > earlier for earlier, later in zip(closed, opened, strict=True))
    assert masked.costs.bytes_exchanged > plain.costs.bytes_exchanged


def test_what_is_handed_in_again_costs_time_and_bytes() -> None:
    """An upload of everybody in each window, of twice a model, before its members agree on the sum."""
    run = lively().simulate(CACHE, rounds=8)
    closed = [item for _, item in run.events if isinstance(item, RoundClosed)]
    again, models = sum(item.resent for item in closed), run.costs.models_exchanged
    small = [MessageBytes.of(item.members, len(item.learners)) for item in closed]
    told = sum(sizes.of_round(item.members, len(item.learners)) for sizes, item in zip(small, closed, strict=True))
    layout, down = run.community_model.layout, run.community_model.nbytes
    body, updates = CACHE.update_bytes(layout), run.costs.update_requests
    assert again > 0 and body is not None and body > 1.9 * down
    repeated = sum(item.resent for _, item in run.events if isinstance(item, UpdateRequest))
    assert run.costs.bytes_exchanged == (models - updates) * down + (updates + again) * body + told + repeated


def test_a_masked_run_is_the_plain_one_but_for_rounding() -> None:
    """With learners that are always there; 16 bits are coarser, 64 as good as exact."""
    learners = [
        metis.SimulatedLearner(f"site-{index}", part, 10, metis.Speed(0.1))
        for index, part in enumerate(np.array_split(np.arange(150), 4))
    ]
    federation = lively(learners=learners, buffers="average")
    plain = federation.simulate(metis.sync_fedavg(1), rounds=2).community_model.vector
    errors = [
        float(np.abs(federation.simulate(
            metis.sync_fedavg(1).with_layers(metis.SecureSum(bits=bits)), rounds=2
        ).community_model.vector - plain).max())
        for bits in (16, 32, 64)
    ]  # fmt: skip
    assert errors[0] < 5e-2 and errors[1] < 1e-5 and errors[2] < 1e-5 and errors[0] > errors[1]
