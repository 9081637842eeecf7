"""A layer: no local model moves further from the community model than a bound; longer updates are shortened."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from metis.core.layers import Layer, Outgoing, Work
from metis.registry import Setting


@dataclass(frozen=True)
class Clip(Layer, key="clip", order=50):
    """Updates are shortened to a bound at the learner, before anything leaves it."""

    norm: Annotated[float, Setting("longest update, as the Euclidean length of its numbers", gt=0)]

    def relabel(self, label: str) -> str:
        return f"{label}, clipped at {self.norm:g}"

    def encode(self, out: Outgoing, received: Work, prepared: Work) -> Outgoing:
        base = received.base.vector
        delta = out.model.vector - base
        length = float(np.linalg.norm(delta))
        factor = min(1.0, self.norm / length) if length else 1.0
        vector = (base + factor * delta).astype(np.float32)
        return replace(out, model=out.model.with_vector(vector), notes={**out.notes, "clipped": 1 - factor})
