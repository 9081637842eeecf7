"""HOW models are mixed so that a minority of poisoned ones cannot decide: each rule is one file."""

from metis.core.layers.robust.centred_clipping import CentredClipping
from metis.core.layers.robust.geometric_median import GeometricMedian
from metis.core.layers.robust.median import Median
from metis.core.layers.robust.multi_krum import MultiKrum
from metis.core.layers.robust.norm_bound import NormBound
from metis.core.layers.robust.rule import RobustRule
from metis.core.layers.robust.trimmed_mean import TrimmedMean

__all__ = [
    "CentredClipping",
    "GeometricMedian",
    "Median",
    "MultiKrum",
    "NormBound",
    "RobustRule",
    "TrimmedMean",
]
