"""What a poisoned learner sends: rehearse attacks before they happen, and see which mixing withstands them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from metis.core.layers import Layer, Outgoing, Work
from metis.learning.engine import Examples
from metis.registry import Setting

Attack = Literal["sign_flip", "scale", "label_flip", "collusion"]
ATTACKS: tuple[Attack, ...] = get_args(Attack)
_USUAL = {"sign_flip": 1.0, "scale": 100.0, "label_flip": 1.0, "collusion": 1.5}


@dataclass(frozen=True)
class Poison(Layer):
    """An attack by one learner, on what it sends (or, with `label_flip`, on what it learns from).

    sign_flip: its delta the other way, `strength` times. scale: its delta `strength` times. label_flip: it trains on
    mirrored targets, highest - y. collusion: to each number of its delta the same sign is added for all that collude,
    `strength` times the root mean square of the delta, so that nobody stands out by much.
    """

    attack: Annotated[Attack, Setting("what it does")]
    strength: Annotated[float | None, Setting("how strongly; 1, or 100 for scale, or 1.5 for collusion", gt=0)] = None

    key, order = "poison", 0

    @property
    def _times(self) -> float:
        return _USUAL[self.attack] if self.strength is None else self.strength

    def encode(self, out: Outgoing, received: Work, prepared: Work) -> Outgoing:
        base = received.base.vector
        delta = out.model.vector - base
        if self.attack == "sign_flip":
            delta = delta * np.float32(-self._times)
        elif self.attack == "scale":
            delta = delta * np.float32(self._times)
        elif self.attack == "collusion":
            signs = np.random.default_rng(17).choice(np.array([-1, 1], np.float32), delta.size)  # all know the same
            delta = delta + np.float32(self._times * np.sqrt(np.square(delta, dtype=np.float64).mean())) * signs
        else:
            return out
        return replace(out, model=out.model.with_vector(base + delta))

    def taught(self, examples: Examples, indices: NDArray[np.int64]) -> Examples:
        """What this learner trains on, of which these are its own."""
        if self.attack != "label_flip":
            return examples
        return _Mirrored(examples, examples.batch(np.asarray(indices, np.int64))[1].max())


@dataclass(frozen=True, eq=False)
class _Mirrored:
    """Examples whose targets are mirrored."""

    inside: Examples
    highest: Any

    def __len__(self) -> int:
        return len(self.inside)

    def batch(self, indices: NDArray[np.int64]) -> Any:
        inputs, targets = self.inside.batch(indices)
        return inputs, self.highest - targets
