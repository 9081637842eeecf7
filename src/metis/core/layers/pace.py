"""HOW LONG periods are without lambda: as long as batches and the exchange of models need, and no longer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from metis.core.events import RoundMeasure
from metis.core.layers.base import Layer
from metis.core.layers.scheduled_lambda import paced_label
from metis.core.protocols.pacing import Pace, TimedLearner, of_most
from metis.core.schedules import Moment
from metis.registry import Setting

if TYPE_CHECKING:
    from metis.core.protocols import CommunicationProtocol


@dataclass(frozen=True)
class MeasuredPace(
    Layer,
    key="pace",
    order=21,
    needs={"period": "chooses the periods of semi-synchronous training; {policy} has none"},
    takes={"period"},
):
    """Periods from measured times alone; beyond the paper.

    A period is the longest of three times: two batches of most learners; a few batches on average, so that a solver's
    momentum, which restarts in each task, builds up; and twice the exchange, so that at most a third of the time is
    spent on the line, unless that is many epochs, after which local models learn little by training on. The exchange is
    the longest, which a round waits for, of those that take at most four times as long as that of most learners.

    Where local models lead apart and cancel each other out, the few batches are fewer: drift then costs more than
    momentum gains. The measure is the squared length of the mean difference over that of unrelated differences of the
    same lengths, smoothed; if it is below 1, that share of the batches is left, at least `apart`.

    "Most" are the quickest that hold `share` of the examples, and the average is that of batches a second, weighted by
    examples: one learner that is, or becomes, ten times slower changes little.
    """

    batches: Annotated[float, Setting("batches of a learner in a period, on average over the examples", ge=1)] = 8.0
    apart: Annotated[
        float, Setting("share of these batches that is left where local models cancel each other out", gt=0, le=1)
    ] = 0.5
    share: Annotated[
        float, Setting("share of all examples whose holders, the quickest, are the measure of the rest", gt=0, le=1)
    ] = 0.8
    fewest: Annotated[float, Setting("batches that these learners get done in a period", ge=1)] = 2.0
    exchanges: Annotated[float, Setting("a period lasts at least this many times their exchange", ge=0)] = 2.0
    epochs: Annotated[float, Setting("but not because of the exchange longer than so many of their epochs", gt=0)] = 4.0

    replaces = frozenset({"slowest_learner_epochs"})

    def relabel(self, label: str) -> str:
        return paced_label(label, "paced") if label.startswith("SemiSync (") else label

    def set_protocol(self, protocol: CommunicationProtocol) -> CommunicationProtocol:
        return protocol.paced(self)

    def start(self) -> Pace:
        return _Measured(self)


_FEWER = 0.8  # of the batches: a difference that is worth a word
_ALIKE = 4.0  # times the exchange of most learners: nobody waits for a line that is much slower than that


@dataclass
class _Measured:
    settings: MeasuredPace
    reason: str = ""
    agreement: float = 1.0  # of local models, over that of unrelated ones; smoothed over rounds
    _measured: bool = False

    def period(self, learners: Sequence[TimedLearner], moment: Moment, measure: RoundMeasure | None) -> float | None:
        self._follow(measure)
        if not learners:
            return None
        share, most = self.settings.share, f"learners with {self.settings.share:.0%} of the examples"
        examples = sum(learner.examples for learner in learners)
        a_second = math.fsum(learner.examples / examples / learner.time_per_batch for learner in learners)
        batches = self.settings.batches * min(1.0, max(self.settings.apart, self.agreement))
        average = f"{self.settings.batches:g} batches on average take that long"
        if batches <= _FEWER * self.settings.batches:
            average = f"fewer than {average}, and local models lead apart"
        times = {
            average: batches / a_second,
            f"{most} need that long for {self.settings.fewest:g} batches": self.settings.fewest
            * of_most(learners, lambda one: one.time_per_batch, share),
        }
        # A round waits for the longest of them, but one line that is much slower than the others is not their measure.
        usual = _ALIKE * of_most(learners, lambda one: one.typical_exchange, share)
        longest = max(one.typical_exchange for one in learners if one.typical_exchange <= usual)
        exchange = self.settings.exchanges * longest
        epochs = self.settings.epochs * of_most(learners, lambda one: one.epoch_time, share)
        if exchange <= epochs:
            times[f"{self.settings.exchanges:g} times the exchange of models takes that long"] = exchange
        else:
            times[f"{self.settings.epochs:g} epochs of {most} take that long, and their exchange even longer"] = epochs
        self.reason = max(times, key=lambda reason: times[reason])
        return times[self.reason] + of_most(learners, lambda one: one.inside, share)

    def _follow(self, measure: RoundMeasure | None) -> None:
        if measure is None or not measure.unrelated > 0:  # nothing to measure, or a masked round
            return
        now = (measure.progress / measure.unrelated) ** 2
        self.agreement = (self.agreement + now) / 2 if self._measured else now
        self._measured = True
