"""Sums of local models and nothing else: the controller of a masked round never sees what one learner sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from metis.core.layers.base import Layer
from metis.core.mixing import Mixing
from metis.core.mixing.secure import SecureAverage
from metis.core.model import Layout
from metis.core.ring import Ring
from metis.registry import Setting

_ROUNDS = (
    "opens the sum of a round, and {policy} does not average rounds: fedasync publishes after every single update, in "
    "which nobody can hide, and the windows that async_fedavg, fedrec and fedbuff would need do not exist yet; "
    "sync_fedavg and semisync_fedavg average rounds"
)


@dataclass(frozen=True)
class SecureSum(
    Layer,
    key="secure_sum",
    order=14,
    needs={
        "average": _ROUNDS,
        "rounds": _ROUNDS,
        "weights": "fixes what each local model counts before it is trained, and {policy} weighs it by what was done; "
        "use weighting = 'examples'",
        "wire": "adds numbers of one width under masks, and {other} leaves some out or scales each learner's apart; "
        "secure_sum.bits = 16 halves an update instead",
        "everybody": "has its sum opened by all members, each of which demands its peers, and {other} leaves most out",
    },
    takes={"models"},
):
    """Masked rounds: only the sum of at least `colluders` + 3 local models is ever known; beyond the paper.

    Local models become whole numbers in a ring, add up under masks that cancel, and the masks come off only for a sum
    that enough members have agreed on. What a learner counts is public. In a simulation nothing is masked, and the
    sum is computed in the same ring.
    """

    colluders: Annotated[
        int,
        Setting("members that may work together with the controller without learning one model; each site has its own "
                "limit", ge=0),
    ] = 0  # fmt: skip
    weights: Annotated[
        Literal["examples", "equal"],
        Setting("what a local model counts, which is public: its examples, or all the same"),
    ] = "examples"
    clip: Annotated[
        float, Setting("how far one number of a local model may move in a round; what goes further is clamped", gt=0)
    ] = 4.0
    bits: Annotated[Literal[16, 32, 64], Setting("size of a number of an update")] = 32

    def relabel(self, label: str) -> str:
        return f"{label}, masked"

    def set_mixing(self, mixing: Mixing) -> Mixing:
        return lambda model, store: SecureAverage(model, store, self)

    def update_bytes(self, layout: Layout) -> int:
        """Bytes of the numbers of an update; shares and signatures come on top."""
        return Ring(self.bits, 1, self.clip).nbytes(layout)
