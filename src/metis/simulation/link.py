"""How far a simulated learner is from the controller."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from metis.simulation.availability import Always, Availability


@dataclass(frozen=True, slots=True)
class Link:
    """The network link between a learner and the controller.

    - `latency`: seconds, one way.
    - `upload`, `download`: bytes a second.
    - `cuts`: when it is cut, such as `metis.RandomAvailability(mean_present=600, mean_away=30)`.
    - `resumed`: whether a transfer that was cut goes on where it stopped, as it does in a deployment.
    """

    latency: float = 0.0
    upload: float = math.inf
    download: float = math.inf
    cuts: Availability = field(default_factory=Always)
    resumed: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency must be 0 seconds or more, not {self.latency}")
        if not (self.upload > 0 and self.download > 0):
            raise ValueError("upload and download must be greater than 0 bytes a second")

    def download_time(self, size: int) -> float:
        return self.latency + size / self.download

    def upload_time(self, size: int) -> float:
        return self.latency + size / self.upload
