"""HOW differences are mixed: what each learner has changed, and how far to go along their average."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from metis.core.layers.base import Layer
from metis.core.mixing import Mixing
from metis.core.mixing.differences import DifferenceAverage, Extrapolation
from metis.registry import Setting


@dataclass(frozen=True)
class Differences(
    Layer,
    key="differences",
    order=11,
    needs={
        "average": "replaces the average of a round, and {policy} does not average rounds; sync_fedavg and "
        "semisync_fedavg do",
    },
    takes={"average", "cohort", "linear"},
):
    """Rounds are mixed by the differences from the models that tasks started from; beyond the paper."""

    extrapolation: Annotated[
        Extrapolation,
        Setting(
            "how far to go along the average difference: lengths undoes the dilution by those that went a short way, "
            "fedexp follows their disagreement, none goes as far as the average"
        ),
    ] = "lengths"
    largest: Annotated[float, Setting("largest factor of the average difference", ge=1)] = 4.0

    def relabel(self, label: str) -> str:
        return f"{label} differences" if self.extrapolation == "none" else f"{label} η"

    def set_mixing(self, mixing: Mixing) -> Mixing:
        return partial(DifferenceAverage, extrapolation=self.extrapolation, largest=self.largest)
