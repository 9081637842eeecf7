"""What can be put on top of a policy: each layer is one file, and one import line here."""

from metis.core.layers.adaptive_period import AdaptivePeriod
from metis.core.layers.base import LAYERS, Layer, LayerKind, Memory, Need, Outgoing, Work
from metis.core.layers.cap import Cap
from metis.core.layers.ckks import HomomorphicEncryption
from metis.core.layers.compression import Compression
from metis.core.layers.control_variates import ControlVariates
from metis.core.layers.differences import Differences
from metis.core.layers.fednova import FedNova
from metis.core.layers.late import AcceptLate
from metis.core.layers.messages import MessageBudget
from metis.core.layers.pace import MeasuredPace
from metis.core.layers.probe import Probe
from metis.core.layers.proximal import ProximalPull
from metis.core.layers.rate import ScheduledRate
from metis.core.layers.robust import (
    CentredClipping,
    GeometricMedian,
    Median,
    MultiKrum,
    NormBound,
    RobustRule,
    TrimmedMean,
)
from metis.core.layers.sample import Sample
from metis.core.layers.scheduled_lambda import ScheduledLambda
from metis.core.layers.secure_sum import SecureSum
from metis.core.layers.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi, ServerOptimizer
from metis.core.layers.share import LargestShare
from metis.core.layers.shortest_period import ShortestPeriod
from metis.core.layers.wrapper import Wrapper

__all__ = [
    "LAYERS",
    "AcceptLate",
    "AdaptivePeriod",
    "Cap",
    "CentredClipping",
    "Compression",
    "ControlVariates",
    "Differences",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedNova",
    "FedYogi",
    "GeometricMedian",
    "HomomorphicEncryption",
    "LargestShare",
    "Layer",
    "LayerKind",
    "MeasuredPace",
    "Median",
    "Memory",
    "MessageBudget",
    "MultiKrum",
    "Need",
    "NormBound",
    "Outgoing",
    "Probe",
    "ProximalPull",
    "RobustRule",
    "Sample",
    "ScheduledLambda",
    "ScheduledRate",
    "SecureSum",
    "ServerOptimizer",
    "ShortestPeriod",
    "TrimmedMean",
    "Work",
    "Wrapper",
]
