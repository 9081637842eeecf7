"""Metis: semi-synchronous federated learning, simulated in virtual time.

    import metis

    digits = metis.load_dataset("digits")
    federation = metis.Federation(...)
    run = federation.simulate(metis.semisync_fedavg(slowest_learner_epochs=2), seconds=60)

Names are imported when they are first used, so that `import metis` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from metis.runs import display

__version__ = "0.1.0"

if TYPE_CHECKING:
    from metis.core.compression import Compression
    from metis.core.controller import StopRule, Target
    from metis.core.costs import Power
    from metis.core.model import Model
    from metis.core.nova import FedNova
    from metis.core.pacing import AdaptivePeriod
    from metis.core.policies import (
        Policy,
        async_fedavg,
        fedasync,
        fedbuff,
        fedrec,
        semisync_fedavg,
        sync_fedavg,
    )
    from metis.core.sampling import Sample
    from metis.core.schedules import Moment, Schedule
    from metis.core.server import FedAdagrad, FedAdam, FedAvgM, FedYogi
    from metis.data.datasets import Dataset, load_dataset
    from metis.errors import MetisError
    from metis.experiments.federation import Federation, SimulatedLearner
    from metis.learning.solvers import FedProx, MomentumSGD, Scaffold, VanillaSGD
    from metis.reporting.notebook import Comparison
    from metis.reporting.trackers import Tracking
    from metis.runs.run import Run
    from metis.simulation.availability import RandomAvailability, RecordedAvailability
    from metis.simulation.link import Link
    from metis.simulation.speed import Speed

_HOMES = {
    "AdaptivePeriod": "metis.core.pacing",
    "Comparison": "metis.reporting.notebook",
    "Compression": "metis.core.compression",
    "Dataset": "metis.data.datasets",
    "FedAdagrad": "metis.core.server",
    "FedAdam": "metis.core.server",
    "FedAvgM": "metis.core.server",
    "FedNova": "metis.core.nova",
    "FedProx": "metis.learning.solvers",
    "FedYogi": "metis.core.server",
    "Federation": "metis.experiments.federation",
    "Link": "metis.simulation.link",
    "MetisError": "metis.errors",
    "Model": "metis.core.model",
    "Moment": "metis.core.schedules",
    "MomentumSGD": "metis.learning.solvers",
    "Policy": "metis.core.policies",
    "Power": "metis.core.costs",
    "RandomAvailability": "metis.simulation.availability",
    "RecordedAvailability": "metis.simulation.availability",
    "Run": "metis.runs.run",
    "Sample": "metis.core.sampling",
    "Scaffold": "metis.learning.solvers",
    "Schedule": "metis.core.schedules",
    "SimulatedLearner": "metis.experiments.federation",
    "Speed": "metis.simulation.speed",
    "StopRule": "metis.core.controller",
    "Target": "metis.core.controller",
    "Tracking": "metis.reporting.trackers",
    "VanillaSGD": "metis.learning.solvers",
    "async_fedavg": "metis.core.policies",
    "fedasync": "metis.core.policies",
    "fedbuff": "metis.core.policies",
    "fedrec": "metis.core.policies",
    "load_dataset": "metis.data.datasets",
    "semisync_fedavg": "metis.core.policies",
    "sync_fedavg": "metis.core.policies",
}

__all__ = [
    "AdaptivePeriod",
    "Comparison",
    "Compression",
    "Dataset",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedNova",
    "FedProx",
    "FedYogi",
    "Federation",
    "Link",
    "MetisError",
    "Model",
    "Moment",
    "MomentumSGD",
    "Policy",
    "Power",
    "RandomAvailability",
    "RecordedAvailability",
    "Run",
    "Sample",
    "Scaffold",
    "Schedule",
    "SimulatedLearner",
    "Speed",
    "StopRule",
    "Target",
    "Tracking",
    "VanillaSGD",
    "__version__",
    "async_fedavg",
    "draw",
    "fedasync",
    "fedbuff",
    "fedrec",
    "load_dataset",
    "semisync_fedavg",
    "sync_fedavg",
]


def draw(runs: list[Any], path: Any = None) -> Any:
    """The metric of several runs over parallel time and over update requests; saved if a path is given."""
    from metis.reporting import figures

    return figures.draw(runs, path)


def show(run: Any) -> str:
    """A run as a notebook shows it: HTML that needs nothing from outside."""
    from metis.reporting import notebook

    return notebook.run_html(run)


display.curves, display.page = draw, show


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'metis' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
