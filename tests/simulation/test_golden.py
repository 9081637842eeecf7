"""Golden traces: a short run under each policy, compared with the stored one.

How to record them again is described in tests/golden/README.md.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import metis
from metis.runs.trace import to_record
from simulation.federations import steady, still

GOLDEN = Path(__file__).parent.parent / "golden"

POLICIES = {
    "sync_fedavg": metis.sync_fedavg(local_epochs=1.5),
    "semisync_fedavg": metis.semisync_fedavg(slowest_learner_epochs=2),
    "semisync_fedavg_static": metis.semisync_fedavg(
        slowest_learner_epochs=0.5, timings="cold_start", cold_start_limit=0.7, weighting="steps"
    ),
    "semisync_fedavg_deadline": metis.semisync_fedavg(slowest_learner_epochs=1, budget="deadline"),
    "async_fedavg": metis.async_fedavg(local_epochs=2),
    "fedrec": metis.fedrec(local_epochs=2),
    "fedasync": metis.fedasync(local_epochs=2),
    "fedbuff": metis.fedbuff(local_epochs=2, buffer_size=2),
}


def trace_of(policy: metis.Policy) -> str:
    """A short run with a fast, a slow, a shaky and a far learner; what the processor could change is left out."""
    federation = still(
        [5, 3, 4, 2],
        [0.1, 0.3, metis.Speed(0.1, profile=((2.0, 2.0),)), 0.1],
        batch_size=4,
        learner=[
            {},
            {},
            {"availability": metis.RecordedAvailability(((1.0, 2.5),))},
            {"link": metis.Link(latency=0.05, upload=10_000)},
        ],
    )
    run = federation.simulate(policy, rounds=12, seconds=8)
    return "".join(json.dumps(steady(to_record(*event))) + "\n" for event in run.events)


@pytest.mark.golden
@pytest.mark.parametrize("policy", POLICIES)
def test_golden_trace(policy: str) -> None:
    """Who trains when, for how long, and with what weight has not changed."""
    path = GOLDEN / f"{policy}.jsonl"
    now = trace_of(POLICIES[policy])
    if os.environ.get("METIS_RECORD_GOLDEN"):
        path.write_text(now, encoding="utf-8")
        pytest.skip(f"recorded {path.name}; read the difference before you commit it")

    assert now.splitlines() == path.read_text(encoding="utf-8").splitlines()


@pytest.mark.golden
def test_golden_traces_belong_to_policies() -> None:
    """No stored trace is left over."""
    assert {path.stem for path in GOLDEN.glob("*.jsonl")} == set(POLICIES)
