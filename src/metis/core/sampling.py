"""WHO takes part in a round, where not everybody does (cross-device federations)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from metis.core.roster import LearnerRecord


@dataclass(frozen=True)
class Sample:
    """So many learners, or this share of those who are there, drawn anew for each round.

    The core has no chance of its own: a learner's lot in a round is a hash of the seed, the round and its name. So a
    replay draws the same, whatever the order in which learners joined.
    """

    learners: int | None = None
    share: float | None = None
    seed: int = 1990

    def __post_init__(self) -> None:
        if (self.learners is None) == (self.share is None):
            raise ValueError("sample must be a number of learners or a share of them, one of both")
        if self.learners is not None and self.learners < 1:
            raise ValueError(f"learners must be 1 or more, not {self.learners}")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"share must be greater than 0 and at most 1, not {self.share}")

    def draw(self, there: Sequence[LearnerRecord], round_number: int) -> list[LearnerRecord]:
        """Who takes part, in the order that was given; at least one."""
        share = 1.0 if self.share is None else self.share
        wanted = self.learners if self.learners is not None else max(1, math.ceil(share * len(there) * (1 - 1e-9)))
        lots = {record.learner: self._lot(record.learner, round_number) for record in there}
        drawn = set(sorted(lots, key=lambda learner: (lots[learner], learner))[:wanted])
        return [record for record in there if record.learner in drawn]

    def _lot(self, learner: str, round_number: int) -> bytes:
        return hashlib.sha256(f"{self.seed}/{round_number}/{learner}".encode()).digest()
