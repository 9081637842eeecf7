"""HOW OFTEN a learner may hand in a model: a budget of messages, kept by longer periods."""

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
class MessageBudget(
    Layer,
    key="messages",
    order=26,
    needs={"bound": "bounds the periods of semi-synchronous training; {policy} has none"},
):
    """Periods so long that no learner hands in more models than this; beyond the paper.

    Each update request moves two models over the line, one up and one down, so this is a budget of bytes as well.
    """

    an_hour: Annotated[float, Setting("largest number of update requests of one learner in an hour", gt=0)]

    def set_protocol(self, protocol: CommunicationProtocol) -> CommunicationProtocol:
        return protocol.at_least(self.key, self.seconds)

    def seconds(self, learners: Sequence[TimedLearner]) -> float:
        """How long a period must be."""
        return 3600 / self.an_hour
