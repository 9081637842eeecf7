"""A federation so small that a real training process is quick: two sites, a network of 58 numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from metis.experiments.config.load import resolve_config

SITE = """
import numpy as np
from torch import nn

def network():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

def records(site, seed, count):
    rng = np.random.default_rng([len(site), seed])
    inputs = rng.normal(size=(count, 3))
    return inputs, (inputs.sum(axis=1) > 0).astype(np.int64)

def training_data(site):
    return records(site, 1, 40)

def evaluation_data(site):
    return records(site, 2, 20)
"""

EXPERIMENT: dict[str, Any] = {
    "site": {"file": "site.py"},
    "learners": [{"name": "all", "names": ["cleveland", "zurich"], "batch_size": 10, "time_per_batch": 0.1}],
    "training": {"learning_rate": 0.1},
    "policy": {"name": "semisync_fedavg", "slowest_learner_epochs": 1},
    "stop": {"rounds": 3},
}


def write_site(folder: Path, more: str = "", name: str = "site.py") -> Path:
    """The site file, with more code at its end."""
    path = folder / name
    path.write_text(SITE + more)
    return path


def settings(site: Path, **changes: Any) -> dict[str, Any]:
    """What a controller sends to its learners."""
    config = resolve_config({**EXPERIMENT, **changes}, "federation.toml", folder=site.parent)
    return {"experiment": config.to_dict(), "policy": 0}
