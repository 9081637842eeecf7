"""WHO takes part in a round, where not everybody does (cross-device federations)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from metis.core.layers.base import Layer
from metis.core.roster import LearnerRecord
from metis.core.schedules import Moment
from metis.errors import ArgumentError
from metis.registry import Setting


@dataclass(frozen=True)
class Sample(
    Layer,
    key="sample",
    order=5,
    needs={"rounds": "is drawn for each round, and {policy} has none; sync_fedavg and semisync_fedavg do"},
    takes={"everybody"},
):
    """A sample of the learners, drawn for each round; beyond the paper.

    The core has no randomness of its own: a learner's lot in a round is a hash of the seed, the number of the round and
    the learner's name. So a replay draws the same sample, whatever the order in which learners joined.
    """

    learners: Annotated[int | None, Setting("number of learners in a round; this or share", ge=1)] = None
    share: Annotated[
        float | None, Setting("share of the learners that are present, rounded up; this or learners", gt=0, le=1)
    ] = None
    seed: Annotated[int, Setting("seed of the draw", ge=0)] = 1990

    leaves_idle = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.learners is None) == (self.share is None):
            raise ArgumentError("sample needs either learners or share, not both", "learners")

    def relabel(self, label: str) -> str:
        size = f"{self.learners} learners" if self.learners is not None else f"{self.share:.0%} of the learners"
        return f"{label}, {size}"

    def choose(self, waiting: Sequence[LearnerRecord], moment: Moment) -> Sequence[LearnerRecord]:
        return self.draw(waiting, moment.begun)

    def draw(self, present: Sequence[LearnerRecord], round_number: int) -> list[LearnerRecord]:
        """Who takes part, in the given order; at least one."""
        share = 1.0 if self.share is None else self.share
        wanted = self.learners if self.learners is not None else max(1, math.ceil(share * len(present) * (1 - 1e-9)))
        lots = {record.learner: self._lot(record.learner, round_number) for record in present}
        drawn = set(sorted(lots, key=lambda learner: (lots[learner], learner))[:wanted])
        return [record for record in present if record.learner in drawn]

    def _lot(self, learner: str, round_number: int) -> bytes:
        return hashlib.sha256(f"{self.seed}/{round_number}/{learner}".encode()).digest()
