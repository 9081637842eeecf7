"""WHOM a period does not wait for, and what becomes of a model that comes late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from metis.core.events import LearnerId
from metis.core.layers.base import Layer
from metis.core.protocols.pacing import TimedLearner, of_most
from metis.registry import Setting

if TYPE_CHECKING:
    from metis.core.protocols import CommunicationProtocol

_MOST = 0.8  # share of the examples whose holders are the measure


@dataclass(frozen=True)
class AcceptLate(
    Layer,
    key="late",
    order=22,
    needs={
        "bound": "lets semi-synchronous periods end without some learners; {policy} has no periods",
        "models": "mixes what comes late with the next round, which {other} does not",
    },
):
    """What comes after its period counts in the next one, and the slowest are not waited for; beyond the paper.

    A learner whose batch and exchange take longer than `beyond` periods does one batch at a time, and nobody waits for
    it. Its model is mixed when it comes. How much less it counts then is up to the contribution
    value; what it has learned is the difference from the model that it started from, so mix differences with this.
    """

    beyond: Annotated[
        float, Setting("periods, with their exchange, that a batch may take before nobody waits for it", ge=1)
    ] = 1.5

    def set_protocol(self, protocol: CommunicationProtocol) -> CommunicationProtocol:
        return protocol.accepting_late(self)

    def not_awaited(self, learners: Sequence[TimedLearner], period: float) -> frozenset[LearnerId]:
        """Those that do one batch, however long it takes."""
        longest = self.beyond * (period + of_most(learners, lambda one: one.typical_exchange, _MOST))
        return frozenset(one.learner for one in learners if one.time_per_batch + one.typical_exchange > longest)
