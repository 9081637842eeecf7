"""HOW SHORT a period may be: training that takes less time than its exchange is not worth the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from metis.core.layers.base import Layer
from metis.core.protocols.pacing import TimedLearner
from metis.registry import Setting

if TYPE_CHECKING:
    from metis.core.protocols import CommunicationProtocol


@dataclass(frozen=True)
class ShortestPeriod(
    Layer,
    key="shortest_period",
    order=25,
    needs={"bound": "bounds the periods of semi-synchronous training; {policy} has none"},
):
    """A period is never shorter than a multiple of the measured exchange; beyond the paper.

    The exchange of a learner is all of a task that is not training: download, upload and whatever its site does around
    them; the median of its latest three tasks counts, so that one that stalled does not. Of the learners the median
    counts, of two in the middle the shorter: one slow site, or one that claims to be slow, does not make everybody's
    period longer. Such a site is not late either, because a barrier waits for the exchange of each learner.
    """

    exchanges: Annotated[
        float, Setting("a period lasts at least this many times the exchange of the median learner; 0: no bound", ge=0)
    ] = 4.0

    def set_protocol(self, protocol: CommunicationProtocol) -> CommunicationProtocol:
        return protocol.at_least(self.key, self.seconds) if self.exchanges else protocol

    def seconds(self, learners: Sequence[TimedLearner]) -> float:
        """How long a period of these learners must be."""
        exchanges = sorted(learner.typical_exchange for learner in learners)
        return self.exchanges * exchanges[(len(exchanges) - 1) // 2]
