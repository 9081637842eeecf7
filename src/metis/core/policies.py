"""The paper's policies: each is a protocol, a contribution value and a way of mixing, composed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from metis.core.community import (
    Buffered,
    CachedAverage,
    Community,
    CommunityFactory,
    FullPass,
    Interpolation,
    ModelStore,
)
from metis.core.compression import Compression
from metis.core.contribution import (
    ContributionValue,
    dataset_size,
    step_recency,
    steps_done,
    version_staleness,
)
from metis.core.controls import ControlVariates
from metis.core.events import LearnerId
from metis.core.measured import Measured
from metis.core.model import Model
from metis.core.nova import FedNova, NormalizedAverage
from metis.core.pacing import AdaptivePeriod, Pacing, ScheduledLambda
from metis.core.protocols import Asynchronous, CommunicationProtocol, Paced, SemiSynchronous, Synchronous
from metis.core.protocols.semi_synchronous import BudgetUnit, Timings
from metis.core.sampling import Sample
from metis.core.schedules import Changing
from metis.core.server import Optimized, ServerOptimizer

Weighting = Literal["examples", "steps"]


@dataclass(frozen=True)
class Policy:
    """WHEN to mix, HOW MUCH a local model counts, HOW models are mixed."""

    name: str
    protocol: CommunicationProtocol  # settings only; each run works on a fresh copy
    contribution: ContributionValue
    community: CommunityFactory
    label: str = ""  # how tables and legends call it
    proximal_term: float = 0.0  # regularization toward the received model that the policy asks of local training
    nova: FedNova | None = None  # normalised averaging in place of the community's own
    server: ServerOptimizer | None = None  # what becomes of what the community proposes
    server_rate: Changing | None = None  # times the server's learning rate, in the course of a run
    rate: Changing | None = None  # times the learners' learning rate, in the course of a run
    compression: Compression | None = None  # of what learners hand in
    controls: bool = False  # whether learners train with control variates, which travel behind the network

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", self.name)

    def start_community(
        self,
        initial_model: Model,
        store: ModelStore,
        now: Callable[[], float] = lambda: 0.0,
        examples: Callable[[LearnerId], float] = lambda _: 1.0,
    ) -> Community:
        """The mixing of one run, with all that is put on top of it.

        `now` tells how long the run has lasted, `examples` how many a learner has.
        """
        mixing = partial(self._start_mixing, now)
        if not self.controls:
            return mixing(initial_model, store)
        return ControlVariates(initial_model, store, mixing, examples, by_round=self.community is FullPass)

    def _start_mixing(self, now: Callable[[], float], initial_model: Model, store: ModelStore) -> Community:
        community: Community
        if self.nova is None:
            community = self.community(initial_model, store)
        else:
            community = NormalizedAverage(initial_model, store, self.nova)
        if isinstance(self.protocol, Paced) and self.protocol.measures:
            # Below the optimizer: whether local models agree is not told by how long its steps are.
            community = Measured(community)
        return community if self.server is None else Optimized(community, self.server, self.server_rate, now)

    def with_server(self, optimizer: ServerOptimizer, rate: Changing | None = None) -> Policy:
        """The same policy with an optimizer that makes steps from what its mixing proposes.

        `rate` is what its learning rate is multiplied by: a `Schedule`, or a function of the `Moment`.
        """
        return replace(self, server=optimizer, server_rate=rate, label=f"{self.label} + {optimizer.name}")

    def with_rate(self, schedule: Changing) -> Policy:
        """The same policy with a learning rate of the learners that is multiplied by a `Schedule`, or by a function."""
        return replace(self, rate=schedule, label=f"{self.label}, η scheduled")

    def with_nova(self, settings: FedNova | None = None) -> Policy:
        """The same policy with normalised averaging; its rounds must be mixed by a plain average."""
        if self.community is not FullPass:
            others = "sync_fedavg and semisync_fedavg do"
            raise ValueError(f"nova mixes rounds by a normalised average, and {self.name} has none; {others}")
        return replace(self, nova=settings or FedNova(), label=f"{self.label} FedNova")

    def with_compression(self, compression: Compression) -> Policy:
        """The same policy with updates that travel in fewer bytes."""
        return replace(self, compression=compression, label=f"{self.label}, {compression.label}")

    def with_sample(self, sample: Sample) -> Policy:
        """The same policy with a sample of the learners in each round; its protocol must have rounds."""
        if not isinstance(self.protocol, (Synchronous, SemiSynchronous)):
            others = "sync_fedavg and semisync_fedavg do"
            raise ValueError(f"sample is drawn for each round, and {self.name} has none; {others}")
        size = f"{sample.learners} learners" if sample.learners is not None else f"{sample.share:.0%} of the learners"
        return replace(self, protocol=replace(self.protocol, sample=sample), label=f"{self.label}, {size}")

    def with_lambda(self, schedule: Changing) -> Policy:
        """The same semi-synchronous policy with a lambda that changes: a `Schedule`, or a function of the `Moment`."""
        return self._paced("schedule of lambda is", ScheduledLambda(schedule), "SemiSync (λ scheduled)")

    def with_adaptive_period(self, settings: AdaptivePeriod | None = None) -> Policy:
        """The same semi-synchronous policy with periods chosen from what its rounds show, without lambda."""
        return self._paced("adaptive periods are", settings or AdaptivePeriod(), "SemiSync (adaptive)")

    def _paced(self, what: str, pacing: Pacing, label: str) -> Policy:
        if not isinstance(self.protocol, SemiSynchronous):
            raise ValueError(f"{what} for semi-synchronous training; {self.name} has none")
        start, closing, rest = self.label.partition(")")
        known = start.startswith("SemiSync (") and closing  # then what is behind it, such as FedNova, stays
        label += rest if known else _limits(self.protocol)
        return replace(self, protocol=replace(self.protocol, pacing=pacing), label=label)

    def for_solver(self, momentum: float, pull: float, *, controls: bool = False) -> Policy:
        """With what mixing and pacing must know of the local solver; see `accumulated_steps`."""
        nova = None if self.nova is None else self.nova.for_solver(momentum, pull)
        protocol = self.protocol
        if isinstance(protocol, SemiSynchronous) and protocol.pacing is not None:
            protocol = replace(protocol, pacing=protocol.pacing.for_solver(momentum))
        return replace(self, nova=nova, protocol=protocol, controls=controls)


def _contribution(weighting: Weighting) -> ContributionValue:
    if weighting not in get_args(Weighting):
        raise ValueError(f"weighting must be one of {', '.join(get_args(Weighting))}, not '{weighting}'")
    return dataset_size if weighting == "examples" else steps_done


def sync_fedavg(
    local_epochs: float = 4.0,
    round_limit: float = math.inf,
    grace: float = 0.1,
    weighting: Weighting = "examples",
) -> Policy:
    """SyncFedAvg: everybody trains `local_epochs`, the fast wait for the slowest."""
    return Policy(
        "sync_fedavg", Synchronous(local_epochs, round_limit, grace), _contribution(weighting), FullPass, "Sync"
    )


def semisync_fedavg(
    slowest_learner_epochs: float = 2.0,
    cold_start_limit: float = math.inf,
    timings: Timings = "every_round",
    budget: BudgetUnit = "steps",
    grace: float = 0.1,
    weighting: Weighting = "examples",
    longest_period: float = math.inf,
    max_local_epochs: float | None = None,
    exchange: Literal["inside"] | None = None,
) -> Policy:
    """SemiSync: everybody trains until the same moment, lambda epochs of the slowest learner away."""
    protocol = SemiSynchronous(
        slowest_learner_epochs,
        cold_start_limit,
        timings,
        budget,
        grace,
        longest_period,
        max_local_epochs=max_local_epochs,
        exchange=exchange,
    )
    label = f"SemiSync (λ={slowest_learner_epochs:g}){_limits(protocol)}"
    return Policy("semisync_fedavg", protocol, _contribution(weighting), FullPass, label)


def _limits(protocol: SemiSynchronous) -> str:
    """What of a period is not the paper's, for a label."""
    most, inside = protocol.max_local_epochs, ", exchange inside" if protocol.exchange == "inside" else ""
    return inside if most is None else f", at most {most:g} epoch{'' if most == 1 else 's'}{inside}"


def async_fedavg(local_epochs: float = 4.0, rebuild_every: int = 1000) -> Policy:
    """AsyncFedAvg: no barrier, every learner's latest model counts by its examples, cached sum."""
    community = partial(CachedAverage, rebuild_every=rebuild_every)
    return Policy("async_fedavg", Asynchronous(local_epochs), dataset_size, community, "AsyncFedAvg")


def fedrec(local_epochs: float = 4.0, rebuild_every: int = 1000) -> Policy:
    """FedRec: asynchronous, a model counts less the more steps others committed meanwhile."""
    community = partial(CachedAverage, rebuild_every=rebuild_every)
    return Policy("fedrec", Asynchronous(local_epochs), step_recency, community, "FedRec")


def fedasync(local_epochs: float = 4.0, mixing: float = 0.5, regularization: float = 0.005) -> Policy:
    """FedAsync + Poly: the requester's model is blended into the community model by staleness (R14)."""
    if not 0 <= regularization < math.inf:
        raise ValueError(f"regularization (rho) must be 0 or more, not {regularization}")
    community = partial(Interpolation, mixing=mixing)
    return Policy("fedasync", Asynchronous(local_epochs), version_staleness, community, "FedAsync", regularization)


def fedbuff(local_epochs: float = 4.0, buffer_size: int = 3, server_learning_rate: float = 1.0) -> Policy:
    """FedBuff: asynchronous, the community model moves once `buffer_size` updates have come."""
    community = partial(Buffered, buffer_size=buffer_size, server_learning_rate=server_learning_rate)
    label = f"FedBuff (K={buffer_size})"
    return Policy("fedbuff", Asynchronous(local_epochs), version_staleness, community, label)
