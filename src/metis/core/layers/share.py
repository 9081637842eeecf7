"""HOW MUCH one learner may count for at most, however much data it says it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from metis.core.layers.base import Layer
from metis.core.mixing import Community, Mixing, ModelStore
from metis.core.model import Model
from metis.registry import Setting


@dataclass(frozen=True)
class LargestShare(
    Layer,
    key="share",
    order=45,
    needs={
        "shares": "limits what a learner counts for in an average, and {policy} adds models up as they come; "
        "sync_fedavg and semisync_fedavg average, and without secure_sum also async_fedavg and fedrec",
    },
):
    """A limit on the share of the mixture that one learner counts for; beyond the paper.

    Contribution values above it are lowered until they are that share of the sum, all to the same value. With fewer
    learners than that leaves room for, they count equally. It holds for control variates too.
    """

    largest: Annotated[float, Setting("largest share of the mixture that one learner counts for", gt=0, le=1)] = 0.5

    def relabel(self, label: str) -> str:
        return f"{label}, at most {100 * self.largest:g} % each"

    def wrap(self, mixing: Mixing) -> Mixing:
        def limited(model: Model, store: ModelStore) -> Community:
            community = mixing(model, store)
            community.limit_shares(self.largest)
            return community

        return limited
