"""Sums of local models and nothing else: the controller of a masked round never sees what one learner sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from metis.core.layers.base import Layer
from metis.core.layers.fednova import NormalizedAverage
from metis.core.mixing import Buffered, CachedAverage, DifferenceAverage, FullPass, Mixing
from metis.core.mixing.secure import SecureAverage, SecureDifferences, SecureNormalized
from metis.core.mixing.windows import BufferedWindows, CachedWindows
from metis.core.model import Layout
from metis.core.ring import Ring
from metis.registry import Setting

_SUMS = (
    "adds local models up before anybody sees them, and {policy} mixes each by itself: fedasync publishes after every "
    "single update, in which nobody can hide; sync_fedavg, semisync_fedavg, semisync, async_fedavg, fedrec and fedbuff "
    "mix several"
)


@dataclass(frozen=True)
class SecureSum(
    Layer,
    key="secure_sum",
    order=14,
    needs={
        "sums": _SUMS,
        "weights": "fixes what each local model counts before it is trained, and {policy} weighs it by what was done; "
        "use weighting = 'examples'",
        "steps": "fixes how many steps each learner makes before it trains, and the tasks of {policy} end with the "
        "time; use budget = 'steps'",
        "wire": "adds numbers of one width under masks, and {other} leaves some out or scales each learner's apart; "
        "secure_sum.bits = 16 halves an update instead",
        "everybody": "has its sum opened by all members, each of which demands its peers, and {other} leaves most out",
    },
    takes={"models"},
):
    """Masked rounds: only the sum of at least `colluders` + 3 local models is ever known; beyond the paper.

    Local models become whole numbers in a ring, add up under masks that cancel, and the masks come off only for a sum
    that enough members have agreed on. What a learner counts is public. In a simulation nothing is masked, and the
    sum is computed in the same ring. What comes late never counts, so `late` of `semisync` gives way. Asynchronous
    policies mix in windows: a new model is published when enough learners have handed in something new, and each of
    them waits for it. In windows of async_fedavg and fedrec all others hand in their latest model once more.
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
    bits: Annotated[
        Literal[16, 32, 64], Setting("size of a number of an update; 64 in windows of async_fedavg and fedrec")
    ] = 32

    displaces = frozenset({"late"})

    def relabel(self, label: str) -> str:
        return f"{label}, masked"

    def set_mixing(self, mixing: Mixing) -> Mixing:
        twin = masked_twin(mixing)
        assert twin is not None, "the policy was checked"
        keywords = {name: value for name, value in getattr(mixing, "keywords", {}).items() if name != "rebuild_every"}
        return lambda model, store: twin(model, store, self, **keywords)

    def ring(self, learners: int) -> Ring:
        """How the numbers of a round of so many members become words."""
        return Ring(self.bits, learners, self.clip, self.clip)

    def update_bytes(self, layout: Layout, *, whole: bool) -> int:
        """Bytes of the numbers of an update, in windows also of whole models; shares and signatures come on top."""
        return Ring(64 if whole else self.bits, 1, self.clip).nbytes(layout)


# What each mixing is where only sums are known; an exact sum need not be rebuilt.
_TWINS: Mapping[Any, Callable[..., SecureAverage]] = {
    FullPass: SecureAverage,
    NormalizedAverage: SecureNormalized,
    DifferenceAverage: SecureDifferences,
    CachedAverage: CachedWindows,
    Buffered: BufferedWindows,
}


def masked_twin(mixing: Mixing) -> Callable[..., SecureAverage] | None:
    """What does from sums what this mixing does from local models; None if nothing can."""
    return _TWINS.get(getattr(mixing, "func", mixing))
