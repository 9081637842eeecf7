"""Fingerprints: trace and weights of a short run under many combinations of policy, layers and solver, to the bit.

The golden traces next to them can be read; these only show that something has changed. How to record them again is
described in tests/golden/README.md.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metis
from metis.core.layers import Memory
from metis.core.model import Layout, Model, TensorSpec
from metis.core.solvers import Solver
from metis.experiments.compose import build_policy, build_solver
from metis.experiments.config.load import resolve_config
from metis.learning import Trained
from metis.learning.engine import Examples
from metis.runs.trace import to_record
from simulation.federations import blobs, lively_learners, steady

STORED = Path(__file__).parent.parent / "golden" / "fingerprints.json"

SEMISYNC = {"name": "semisync_fedavg", "slowest_learner_epochs": 1}
ADAPTIVE = {"name": "semisync_fedavg", "adaptive": {}}
SYNC = {"name": "sync_fedavg", "local_epochs": 1, "round_limit": 2.5}
ASYNC = {"name": "async_fedavg", "local_epochs": 1, "rebuild_every": 7}
FEDREC = {"name": "fedrec", "local_epochs": 1}
FEDASYNC = {"name": "fedasync", "local_epochs": 1}
FEDBUFF = {"name": "fedbuff", "local_epochs": 1, "buffer_size": 3}
UNTUNED = {"name": "semisync"}
MOMENTUM = {"solver": "momentum", "learning_rate": 0.05, "momentum": 0.5, "keep_momentum": False}
SCAFFOLD = {"solver": "scaffold", "learning_rate": 0.05, "momentum": 0.5}
SCHEDULE = {"start": 1.0, "end": 0.25, "length": 5.0, "over": "rounds", "shape": "linear"}
SCHEDULED = {"name": "semisync_fedavg", "schedule": SCHEDULE}

TABLES: dict[str, dict[str, Any]] = {
    "sync": SYNC,
    "sync FedNova, momentum": {**SYNC, "nova": {}, "training": MOMENTUM},
    "sync FedAvgM, rate": {**SYNC, "rate": SCHEDULE, "server": {"optimizer": "momentum"}},
    "sync scaffold, nova": {**SYNC, "nova": {}, "training": SCAFFOLD},
    "sync sampled": {**SYNC, "sample": {"learners": 2}},
    "sync sampled, scaffold": {**SYNC, "sample": {"share": 0.5}, "training": SCAFFOLD},
    "semisync": SEMISYNC,
    "semisync deadline": {**SEMISYNC, "budget": "deadline", "weighting": "steps"},
    "semisync smoothed, inside": {**SEMISYNC, "timings": "smoothed", "exchange": "inside"},
    "semisync capped": {**SEMISYNC, "max_local_epochs": 0.5},
    "semisync scheduled lambda": SCHEDULED,
    "semisync scheduled lambda, inside, capped": {**SCHEDULED, "exchange": "inside", "max_local_epochs": 0.5},
    "semisync adaptive": {**ADAPTIVE, "timings": "smoothed"},
    "semisync adaptive, FedAvgM": {
        **ADAPTIVE,
        "adaptive": {"gain": 2.0},
        "server": {"optimizer": "momentum", "momentum": 0.5},
    },
    "semisync adaptive, scaffold, int8": {**ADAPTIVE, "training": SCAFFOLD, "compression": {"kind": "int8"}},
    "semisync FedNova": {**SEMISYNC, "nova": {"largest_amplification": 2.0}, "training": MOMENTUM},
    "semisync FedNova, rate, Yogi": {
        **SEMISYNC,
        "nova": {},
        "rate": SCHEDULE,
        "server": {"optimizer": "yogi", "rate": SCHEDULE},
    },
    "semisync top_k": {**SEMISYNC, "compression": {"kind": "top_k", "share": 0.1}},
    "semisync float16, FedAdam": {**SEMISYNC, "compression": {"kind": "float16"}, "server": {"optimizer": "adam"}},
    "semisync scaffold": {**SEMISYNC, "training": SCAFFOLD},
    "semisync scaffold, bfloat16, FedAdagrad": {
        **SEMISYNC,
        "training": SCAFFOLD,
        "compression": {"kind": "bfloat16"},
        "server": {"optimizer": "adagrad"},
    },
    "semisync sampled": {**SEMISYNC, "sample": {"learners": 3}},
    "semisync sampled, adaptive": {**ADAPTIVE, "sample": {"learners": 3}},
    "without parameters": {**UNTUNED, "training": MOMENTUM},
    "without parameters, int8": {**UNTUNED, "compression": {"kind": "int8"}},
    "without parameters, scaffold, top_k": {
        **UNTUNED,
        "training": SCAFFOLD,
        "compression": {"kind": "top_k", "share": 0.1},
    },
    "without parameters, rate": {**UNTUNED, "rate": SCHEDULE},
    "without parameters, sampled": {**UNTUNED, "sample": {"learners": 3}},
    "without parameters, messages, proximal": {
        **UNTUNED,
        "update_requests_an_hour": 3600,
        "training": {"solver": "fedprox", "learning_rate": 0.05},
    },
    "async": ASYNC,
    "async scaffold": {**ASYNC, "training": SCAFFOLD},
    "fedrec": {**FEDREC, "rebuild_every": 7},
    "fedrec int8, FedAvgM": {**FEDREC, "compression": {"kind": "int8"}, "server": {"optimizer": "momentum"}},
    "fedasync": {**FEDASYNC, "training": MOMENTUM},
    "fedasync FedAdam": {**FEDASYNC, "server": {"optimizer": "adam"}},
    "fedbuff": FEDBUFF,
    "fedbuff scaffold, rate": {**FEDBUFF, "training": SCAFFOLD, "rate": SCHEDULE},
}


class PullingEngine:
    """Weights are pulled toward what the first example of a batch says: numpy alone, so that every bit is fixed."""

    layout = Layout(
        (
            TensorSpec("w", (20,)),
            TensorSpec("b", (10,)),
            TensorSpec("running", (5,), role="buffer"),
            TensorSpec("seen", (), "int64", "counter"),
        )
    )
    trainable = 30

    def initial_model(self, seed: int) -> Model:
        return Model(self.layout, (np.arange(35) / 8).astype(np.float32), np.zeros(1, np.int64))

    def train(
        self,
        community_model: Model,
        batches: Iterable[Any],
        solver: Solver,
        memory: Memory | None = None,
        seed: int = 0,
    ) -> Trained:
        vector = community_model.vector.copy()
        weights, community = vector[:30], community_model.vector[:30].copy()
        state = solver.start(weights)
        steps, loss = 0, 0.0
        for inputs, _ in batches:
            first = float(inputs[0, 0])
            goal = first + np.arange(30, dtype=np.float32) / np.float32(4)
            gradient = ((weights - goal) * np.float32(0.5)).astype(np.float32)
            loss += float(gradient[0]) ** 2
            solver.step(weights, gradient, state, community)
            vector[30:] = vector[30:] * np.float32(0.9) + np.float32(0.1) * np.float32(first)
            steps += 1
        return Trained(Model(self.layout, vector, community_model.counters + steps), steps, loss / max(1, steps), {})

    def evaluate(self, model: Model, examples: Examples, memory: Memory | None = None) -> dict[str, float]:
        return {"loss": float(model.vector[0]), "accuracy": 0.5}


def fingerprint(table: dict[str, Any]) -> dict[str, Any]:
    """Of eight seconds of a federation in which learners come, go, change their speed and are far away."""
    document = {
        "learners": [{"name": "l", "count": 5, "batch_size": 5, "time_per_batch": 0.1}],
        "policy": [table],
        "stop": {"seconds": 8.0},
        "training": {"learning_rate": 0.05},
    }
    chosen = resolve_config(document, "test").policy[0]
    inputs, targets = blobs()
    federation = metis.Federation(
        engine=PullingEngine(),
        train=(inputs, targets),
        test=(inputs[:30], targets[:30]),
        learners=lively_learners(),
        solver=build_solver(chosen.training),
    )
    run = federation.simulate(build_policy(chosen), seconds=8)
    trace = "".join(json.dumps(steady(to_record(*event))) + "\n" for event in run.events)
    model = run.community_model
    return {
        "events": len(run.events),
        "trace": hashlib.sha256(trace.encode()).hexdigest()[:32],
        "weights": hashlib.sha256(model.vector.tobytes() + model.counters.tobytes()).hexdigest()[:32],
    }


@pytest.mark.golden
@pytest.mark.parametrize("name", TABLES)
def test_fingerprint(name: str) -> None:
    """Neither the trace nor a bit of the community model has changed."""
    now, stored = fingerprint(TABLES[name]), json.loads(STORED.read_text(encoding="utf-8"))
    if os.environ.get("METIS_RECORD_GOLDEN"):
        stored = {each: {**stored, name: now}[each] for each in TABLES if each == name or each in stored}
        STORED.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        pytest.skip(f"recorded '{name}'; read the difference before you commit it")
    assert now == stored[name]


@pytest.mark.golden
def test_fingerprints_belong_to_combinations() -> None:
    """None is left over, and none is missing."""
    assert list(json.loads(STORED.read_text(encoding="utf-8"))) == list(TABLES)
