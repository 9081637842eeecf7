"""HOW OFTEN a learner may hand in a model: a budget of messages or of bytes, kept by longer periods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, TypeAlias

from metis.core.layers.base import Layer
from metis.core.protocols.pacing import TimedLearner
from metis.errors import ArgumentError
from metis.registry import Setting

if TYPE_CHECKING:
    from metis.core.protocols import CommunicationProtocol

RequestsAnHour: TypeAlias = Annotated[
    float | None, Setting("largest number of update requests of one learner in an hour; periods become longer", gt=0)
]
BytesAnHour: TypeAlias = Annotated[
    float | None,
    Setting("largest number of bytes to and from one learner in an hour; periods become longer", gt=0),
]


@dataclass(frozen=True)
class MessageBudget(
    Layer,
    key="messages",
    order=26,
    needs={"bound": "bounds the periods of semi-synchronous training; {policy} has none"},
):
    """Periods so long that no learner hands in more models, or moves more bytes, than this; beyond the paper.

    Each update request moves a community model down and an update up. What is less of the two budgets counts, if both
    are given. With compression an update is smaller, so that the same bytes allow more of them.
    """

    an_hour: RequestsAnHour = None
    bytes_an_hour: BytesAnHour = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.an_hour is None and self.bytes_an_hour is None:
            raise ArgumentError("messages needs a budget: an_hour (update requests), bytes_an_hour or both", self.key)

    def relabel(self, label: str) -> str:
        limits = [] if self.an_hour is None else [f"{self.an_hour:g} requests an hour"]
        limits += [] if self.bytes_an_hour is None else [f"{self.bytes_an_hour / 1e6:g} MB an hour"]
        return ", ".join([label, *limits])

    def for_exchange(self, size: int) -> Layer:
        if self.bytes_an_hour is None or not size:
            return self
        requests = self.bytes_an_hour / size
        return replace(self, an_hour=requests if self.an_hour is None else min(self.an_hour, requests))

    def set_protocol(self, protocol: CommunicationProtocol) -> CommunicationProtocol:
        return protocol.at_least(self.key, self.seconds)

    def seconds(self, learners: Sequence[TimedLearner]) -> float:
        """How long a period must be."""
        return 3600 / (self.an_hour or math.inf)
