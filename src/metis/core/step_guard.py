"""How far a local model may go from the community model that it started from, judged by how far others went.

A step is as long as the difference of the two vectors; parameters, buffers (BatchNorm's statistics) and control
variates are judged apart, because their sizes have nothing to do with each other. What is usual is the median over the
sites of each site's own median of its latest accepted steps: one site can neither raise nor lower it alone. A site that
does many batches goes further, so the usual length of a batch, times the batches, is allowed too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from metis.core.roster import LearnerRecord

_ENOUGH = 3  # sites with accepted steps, before their median says anything
_FIRST = 2.0  # until then: times the length of the model itself
_MAX_BATCHES = 20  # times those of the others: more do not make a longer step usual
_SMALL = 1e-3  # times the length of the model itself: a step that is never judged


class Lengths(NamedTuple):
    """Of the three parts of a vector."""

    parameters: float = 0.0
    buffers: float = 0.0
    control: float = 0.0


def step_excess(records: Iterable[LearnerRecord], steps: int, step: Lengths, model: Lengths, limit: float) -> Lengths:
    """How many times as long as allowed each part of a step of this many batches is; up to 1 it is allowed.

    `model` is the length of the community model that it started from.
    """
    histories = [record.step_lengths for record in records if record.step_lengths]
    if histories:  # the number of batches is the site's claim, which must not lift what it is allowed without end
        usual_batches = _median(_median(done for done, _ in history) for history in histories)
        steps = min(steps, math.ceil(_MAX_BATCHES * usual_batches))
    parts = []
    for part, (length, own) in enumerate(zip(step, model, strict=True)):
        raw = [_median(lengths[part] for _, lengths in history) for history in histories]
        by_batch = [_median(lengths[part] / done for done, lengths in history) for history in histories]
        if len(histories) >= _ENOUGH:
            usual = max(_median(raw), _median(by_batch) * steps)
            allowed = max(limit * usual, _SMALL * own) or math.inf
        elif part == 0:
            # Too few to tell who is wrong: nobody can lower what is allowed.
            seen = max((*raw, *(each * steps for each in by_batch)), default=0.0)
            allowed = max(_FIRST * own, limit * seen) or math.inf
        else:
            allowed = math.inf
        parts.append(length / allowed)
    return Lengths(*parts)


def _median(numbers: Iterable[float]) -> float:
    return float(np.median(list(numbers)))
