"""HOW MUCH a local model counts: the contribution value p_k of an update.

Every function here is finite and greater than 0 for every legal update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

from metis.core.events import CommunityStamp, LearnerId, UpdateRequest
from metis.core.roster import LearnerRecord

# request, who made it, the community model it started from, the federation as it is now
ContributionValue: TypeAlias = Callable[[UpdateRequest, LearnerRecord, CommunityStamp, CommunityStamp], float]


def dataset_size(
    request: UpdateRequest, learner: LearnerRecord, based_on: CommunityStamp, current: CommunityStamp
) -> float:
    """FedAvg: p_k = |D_k| (Sec. 3)."""
    return float(learner.examples)


def steps_done(
    request: UpdateRequest, learner: LearnerRecord, based_on: CommunityStamp, current: CommunityStamp
) -> float:
    """The appendix's analysis: p_k = B_k, the local steps really done."""
    return float(request.steps)


def step_recency(
    request: UpdateRequest, learner: LearnerRecord, based_on: CommunityStamp, current: CommunityStamp
) -> float:
    """FedRec: a local model counts less the more steps others committed meanwhile (Sec. 4.2, R7, R8)."""
    stale_steps = current.steps - (based_on.steps + request.steps)
    return float(stale_steps**-0.5) if stale_steps > 0 else 1.0


def version_staleness(
    request: UpdateRequest, learner: LearnerRecord, based_on: CommunityStamp, current: CommunityStamp
) -> float:
    """FedAsync + Poly and FedBuff: (T - tau_k + 1)^(-1/2), tau_k the version that it started from (R14)."""
    return float((current.version - based_on.version + 1) ** -0.5)


def discounted_size(
    request: UpdateRequest, learner: LearnerRecord, based_on: CommunityStamp, current: CommunityStamp
) -> float:
    """p_k = |D_k| (1 + versions behind)^(-1/2): what comes late counts, but less."""
    return learner.examples * version_staleness(request, learner, based_on, current)


def capped(values: Mapping[LearnerId, float], share: float) -> dict[LearnerId, float]:
    """The values with the largest lowered, so that none is more than this share of their sum; all equal if none can be.

    Those that are lowered become equal: c = share (m c + rest) for the m largest.
    """
    ordered = sorted(values.values(), reverse=True)
    largest = ordered[-1]
    for lowered in range(len(ordered)):
        rest, room = math.fsum(ordered[lowered:]), 1 - lowered * share
        if room > 0 and ordered[lowered] <= share * rest / room * (1 + 1e-12):
            largest = share * rest / room if lowered else ordered[0]
            break
    return {learner: min(value, largest) for learner, value in values.items()}
