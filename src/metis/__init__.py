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

from metis.registry import document
from metis.runs import display

__version__ = "0.1.0"

if TYPE_CHECKING:
    from metis.core.costs import (
        Power as Power,
    )
    from metis.core.layers import (
        AcceptLate as AcceptLate,
        AdaptivePeriod as AdaptivePeriod,
        Cap as Cap,
        CentredClipping as CentredClipping,
        Compression as Compression,
        Differences as Differences,
        FedAdagrad as FedAdagrad,
        FedAdam as FedAdam,
        FedAvgM as FedAvgM,
        FedNova as FedNova,
        FedYogi as FedYogi,
        GeometricMedian as GeometricMedian,
        LargestShare as LargestShare,
        Layer as Layer,
        MeasuredPace as MeasuredPace,
        Median as Median,
        MessageBudget as MessageBudget,
        MultiKrum as MultiKrum,
        NormBound as NormBound,
        Probe as Probe,
        ProximalPull as ProximalPull,
        Sample as Sample,
        ScheduledLambda as ScheduledLambda,
        ScheduledRate as ScheduledRate,
        SecureSum as SecureSum,
        TrimmedMean as TrimmedMean,
    )
    from metis.core.model import (
        Model as Model,
    )
    from metis.core.policies import (
        alone as alone,
        async_fedavg as async_fedavg,
        centralized as centralized,
        fedasync as fedasync,
        fedbuff as fedbuff,
        fedrec as fedrec,
        semisync as semisync,
        semisync_fedavg as semisync_fedavg,
        sync_fedavg as sync_fedavg,
    )
    from metis.core.policy import (
        Policy as Policy,
    )
    from metis.core.schedules import (
        Moment as Moment,
        Schedule as Schedule,
    )
    from metis.core.solvers import (
        Adam as Adam,
        AdamW as AdamW,
        FedProx as FedProx,
        MomentumSGD as MomentumSGD,
        Scaffold as Scaffold,
        Solver as Solver,
        VanillaSGD as VanillaSGD,
    )
    from metis.core.stop import (
        StopRule as StopRule,
        Target as Target,
    )
    from metis.data.datasets import (
        Dataset as Dataset,
        load_dataset as load_dataset,
    )
    from metis.errors import (
        MetisError as MetisError,
    )
    from metis.experiments.federation import (
        Federation as Federation,
        SimulatedLearner as SimulatedLearner,
    )
    from metis.experiments.flamby import (
        flamby_federation as flamby_federation,
    )
    from metis.experiments.search import (
        search as search,
    )
    from metis.learning.torch.loader import (
        Loader as Loader,
    )
    from metis.learning.torch.metrics import (
        BatchMean as BatchMean,
    )
    from metis.learning.torch.optimizers import (
        TorchOptimizer as TorchOptimizer,
    )
    from metis.learning.torch.personal import (
        APFL as APFL,
        Ditto as Ditto,
    )
    from metis.reporting.notebook import (
        Comparison as Comparison,
    )
    from metis.reporting.trackers.tracking import (
        Tracking as Tracking,
    )
    from metis.runs.run import (
        Run as Run,
    )
    from metis.simulation.availability import (
        DailyAvailability as DailyAvailability,
        RandomAvailability as RandomAvailability,
        RecordedAvailability as RecordedAvailability,
    )
    from metis.simulation.link import (
        Link as Link,
    )
    from metis.simulation.outages import (
        ControllerFaults as ControllerFaults,
    )
    from metis.simulation.poisoning import (
        Poison as Poison,
    )
    from metis.simulation.speed import (
        Speed as Speed,
    )

# The public names and where each is defined.
_PUBLIC = {
    "metis.core.costs": ("Power",),
    "metis.core.layers": (
        "AcceptLate",
        "AdaptivePeriod",
        "Cap",
        "CentredClipping",
        "Compression",
        "Differences",
        "FedAdagrad",
        "FedAdam",
        "FedAvgM",
        "FedNova",
        "FedYogi",
        "GeometricMedian",
        "LargestShare",
        "Layer",
        "MeasuredPace",
        "Median",
        "MessageBudget",
        "MultiKrum",
        "NormBound",
        "Probe",
        "ProximalPull",
        "Sample",
        "SecureSum",
        "ScheduledLambda",
        "ScheduledRate",
        "TrimmedMean",
    ),
    "metis.core.model": ("Model",),
    "metis.core.policies": (
        "alone",
        "async_fedavg",
        "centralized",
        "fedasync",
        "fedbuff",
        "fedrec",
        "semisync",
        "semisync_fedavg",
        "sync_fedavg",
    ),
    "metis.core.policy": ("Policy",),
    "metis.core.schedules": (
        "Moment",
        "Schedule",
    ),
    "metis.core.solvers": (
        "Adam",
        "AdamW",
        "FedProx",
        "MomentumSGD",
        "Scaffold",
        "Solver",
        "VanillaSGD",
    ),
    "metis.core.stop": (
        "StopRule",
        "Target",
    ),
    "metis.data.datasets": (
        "Dataset",
        "load_dataset",
    ),
    "metis.errors": ("MetisError",),
    "metis.experiments.federation": (
        "Federation",
        "SimulatedLearner",
    ),
    "metis.learning.torch.loader": ("Loader",),
    "metis.learning.torch.metrics": ("BatchMean",),
    "metis.learning.torch.optimizers": ("TorchOptimizer",),
    "metis.learning.torch.personal": ("APFL", "Ditto"),
    "metis.experiments.flamby": ("flamby_federation",),
    "metis.experiments.search": ("search",),
    "metis.reporting.notebook": ("Comparison",),
    "metis.reporting.trackers.tracking": ("Tracking",),
    "metis.runs.run": ("Run",),
    "metis.simulation.availability": (
        "DailyAvailability",
        "RandomAvailability",
        "RecordedAvailability",
    ),
    "metis.simulation.link": ("Link",),
    "metis.simulation.outages": ("ControllerFaults",),
    "metis.simulation.poisoning": ("Poison",),
    "metis.simulation.speed": ("Speed",),
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = ["__version__", "draw", *_HOMES]  # noqa: PLE0604 - a test holds it against the imports above


def draw(runs: list[Any], path: Any = None) -> Any:
    """The metric of several `runs` over parallel time and over update requests; saved if a `path` is given."""
    from metis.reporting import figures

    return figures.draw(runs, path)


def show(run: Any) -> str:
    """A run as a notebook shows it: HTML that needs nothing from outside."""
    from metis.reporting import notebook

    return notebook.run_html(run)


def _comparison(runs: list[Any]) -> Any:
    from metis.reporting.notebook import Comparison

    return Comparison(runs)


def _progress(label: str, stop: Any) -> Any:
    from metis.reporting.console import run_progress

    return run_progress(label, stop)


display.curves, display.page, display.comparison, display.progress = draw, show, _comparison, _progress


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'metis' has no attribute '{name}'")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    if _HOMES[name].startswith(("metis.core.", "metis.simulation.", "metis.learning.torch.personal")):
        document(found)  # for help(): settings are described in their annotations
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
