"""HOW A RUN BEGINS: a few batches of everybody time the learners, instead of an epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from metis.core.layers.base import Layer
from metis.registry import Setting

if TYPE_CHECKING:
    from metis.core.protocols import CommunicationProtocol

# With half of the examples 20 times as long as they took, with a tenth 12,000 times: a quick site with little data
# must not begin alone because the others take a minute to start.
_RELUCTANCE = 4


@dataclass(frozen=True)
class Probe(
    Layer,
    key="probe",
    order=15,
    needs={"bound": "replaces the cold start of semi-synchronous training; {policy} has none"},
):
    """A probe in place of the cold start; beyond the paper.

    Everybody does a few batches: the first warms up, the others are timed. Once learners with most of the examples have
    answered, the others are waited for a few times as long as that took, and no longer. Where one learner needs hours
    for an epoch and the others minutes, the first period begins after minutes. If fewer have answered, the others are
    waited for much longer, by the fourth power of what is missing, but not for ever: one may never answer.
    """

    batches: Annotated[int, Setting("batches of each learner; the first is not timed", ge=2)] = 2
    share: Annotated[
        float, Setting("share of all examples whose holders decide how long the others are waited for", gt=0, le=1)
    ] = 0.8
    patience: Annotated[float, Setting("how many times as long as those took the probe lasts at most", ge=1)] = 3.0

    replaces = frozenset({"cold_start_limit"})

    def set_protocol(self, protocol: CommunicationProtocol) -> CommunicationProtocol:
        return protocol.probing(self)

    def latest_end(self, began: float, now: float, answered: int, examples: int) -> float:
        """When the others are no longer waited for; never, as long as nobody has answered."""
        if not answered:
            return math.inf
        missing = max(1.0, self.share * examples * (1 - 1e-9) / answered)
        return began + self.patience * missing**_RELUCTANCE * (now - began)
