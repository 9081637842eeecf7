"""HOW models are mixed: from committed local models to the community model."""

from metis.core.mixing.cached import CachedAverage
from metis.core.mixing.community import Community, Mixing
from metis.core.mixing.differences import DifferenceAverage
from metis.core.mixing.fedasync import Interpolation
from metis.core.mixing.fedbuff import Buffered
from metis.core.mixing.full_pass import FullPass
from metis.core.mixing.store import MemoryStore, ModelStore

__all__ = [
    "Buffered",
    "CachedAverage",
    "Community",
    "DifferenceAverage",
    "FullPass",
    "Interpolation",
    "MemoryStore",
    "Mixing",
    "ModelStore",
]
