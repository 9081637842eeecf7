"""The paper's policies by name: each is a protocol, a contribution value and a mixing, composed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal, get_args

from metis.core.contribution import (
    ContributionValue,
    dataset_size,
    discounted_size,
    step_recency,
    steps_done,
    version_staleness,
)
from metis.core.layers import (
    AcceptLate,
    Cap,
    Differences,
    FedAvgM,
    Layer,
    MeasuredPace,
    MessageBudget,
    Probe,
    ProximalPull,
)
from metis.core.layers.messages import BytesAnHour, RequestsAnHour
from metis.core.mixing import Buffered, CachedAverage, FullPass, Interpolation
from metis.core.policy import POLICIES, Baseline, Policy
from metis.core.protocols import Asynchronous, SemiSynchronous, Synchronous
from metis.core.protocols.asynchronous import LocalEpochs
from metis.core.protocols.semi_synchronous import (
    BudgetUnit,
    ColdStartLimit,
    Exchange,
    Lambda,
    LongestPeriod,
    Returning,
    Timings,
)
from metis.core.protocols.synchronous import Grace, RoundLimit
from metis.errors import ArgumentError
from metis.registry import Setting, check_setting, parameters_of

__all__ = [
    "POLICIES",
    "Policy",
    "alone",
    "async_fedavg",
    "centralized",
    "fedasync",
    "fedbuff",
    "fedrec",
    "semisync",
    "semisync_fedavg",
    "sync_fedavg",
]

_Weighting = Literal["examples", "steps"]
Weighting = Annotated[
    _Weighting, Setting("what a local model counts by: the learner's examples, or the steps that it did")
]
RebuildEvery = Annotated[int, Setting("commits after which the cached sum is computed again, exactly (R11)", ge=1)]


def _contribution(weighting: str) -> ContributionValue:
    if weighting not in get_args(_Weighting):
        raise ArgumentError(
            f"weighting is '{weighting}'; it must be one of {', '.join(get_args(_Weighting))}", "weighting"
        )
    return dataset_size if weighting == "examples" else steps_done


@POLICIES.register("sync_fedavg")
def sync_fedavg(
    local_epochs: LocalEpochs = 4.0,
    round_limit: RoundLimit = math.inf,
    grace: Grace = 0.1,
    weighting: Weighting = "examples",
) -> Policy:
    """SyncFedAvg: everybody trains `local_epochs`, the fast wait for the slowest."""
    protocol = Synchronous(local_epochs, round_limit, grace)
    return Policy("sync_fedavg", protocol, _contribution(weighting), FullPass, label="Sync")


@POLICIES.register("semisync_fedavg")
def semisync_fedavg(
    slowest_learner_epochs: Lambda = 2.0,
    cold_start_limit: ColdStartLimit = math.inf,
    timings: Timings = "every_round",
    budget: BudgetUnit = "steps",
    grace: Grace = 0.1,
    weighting: Weighting = "examples",
    longest_period: LongestPeriod = math.inf,
    max_local_epochs: Annotated[
        float | None,
        Setting("maximum local epochs in a period; a learner that is done waits, and its machine may sleep", gt=0),
    ] = None,
    exchange: Exchange = None,
    returning: Returning = None,
) -> Policy:
    """SemiSync: everybody trains until the same moment, lambda epochs of the slowest learner away."""
    check_setting("semisync_fedavg", parameters_of(semisync_fedavg)["max_local_epochs"], max_local_epochs)
    protocol = SemiSynchronous(
        slowest_learner_epochs, cold_start_limit, timings, budget, grace, longest_period, exchange, returning
    )
    label = f"SemiSync (λ={slowest_learner_epochs:g}){', exchange inside' if exchange == 'inside' else ''}"
    policy = Policy("semisync_fedavg", protocol, _contribution(weighting), FullPass, label=label)
    return policy if max_local_epochs is None else policy.with_layers(Cap(max_local_epochs))


@POLICIES.register("semisync")
def semisync(
    update_requests_an_hour: RequestsAnHour = None,
    longest_period: LongestPeriod = math.inf,
    bytes_an_hour: BytesAnHour = None,
) -> Policy:
    """SemiSync without lambda: a probe, periods from measured times, the slowest not waited for, server momentum."""
    protocol = SemiSynchronous(timings="smoothed", longest_period=longest_period, returning="train")
    layers: tuple[Layer, ...] = (Differences(), Probe(), MeasuredPace(), AcceptLate(), FedAvgM(momentum=0.5))
    defaults = frozenset(layer.key for layer in layers)
    policy = Policy("semisync", protocol, discounted_size, FullPass, layers, "SemiSync", defaults)
    budgets = {"update_requests_an_hour": update_requests_an_hour, "bytes_an_hour": bytes_an_hour}
    for name, budget in budgets.items():
        check_setting("semisync", parameters_of(semisync)[name], budget)
    if update_requests_an_hour is None and bytes_an_hour is None:
        return policy
    return policy.with_layers(MessageBudget(update_requests_an_hour, bytes_an_hour))


@POLICIES.register("async_fedavg")
def async_fedavg(local_epochs: LocalEpochs = 4.0, rebuild_every: RebuildEvery = 1000) -> Policy:
    """AsyncFedAvg: no barrier, every learner's latest model counts by its examples, cached sum."""
    mixing = partial(CachedAverage, rebuild_every=rebuild_every)
    return Policy("async_fedavg", Asynchronous(local_epochs), dataset_size, mixing, label="AsyncFedAvg")


@POLICIES.register("fedrec")
def fedrec(local_epochs: LocalEpochs = 4.0, rebuild_every: RebuildEvery = 1000) -> Policy:
    """FedRec: asynchronous, a model counts less the more steps others committed meanwhile."""
    mixing = partial(CachedAverage, rebuild_every=rebuild_every)
    return Policy("fedrec", Asynchronous(local_epochs), step_recency, mixing, label="FedRec")


@POLICIES.register("fedasync")
def fedasync(
    local_epochs: LocalEpochs = 4.0,
    mixing: Annotated[float, Setting("alpha: share of a fresh local model in the community model", gt=0, le=1)] = 0.5,
    regularization: Annotated[
        float, Setting("rho: pull of local training toward the received model; 0 is none", ge=0)
    ] = 0.005,
) -> Policy:
    """FedAsync + Poly: the requester's model is blended into the community model by staleness (R14)."""
    if not 0 <= regularization < math.inf:
        raise ArgumentError(f"regularization (rho) is {regularization}; it must be at least 0", "regularization")
    blend = partial(Interpolation, mixing=mixing)
    layers = (ProximalPull(regularization),) if regularization else ()
    return Policy("fedasync", Asynchronous(local_epochs), version_staleness, blend, layers, "FedAsync")


@POLICIES.register("fedbuff")
def fedbuff(
    local_epochs: LocalEpochs = 4.0,
    buffer_size: Annotated[int, Setting("K: updates that make one step of the community model", ge=1)] = 3,
    server_learning_rate: Annotated[float, Setting("factor of that step", gt=0)] = 1.0,
) -> Policy:
    """FedBuff: asynchronous, the community model moves once `buffer_size` updates have come."""
    mixing = partial(Buffered, buffer_size=buffer_size, server_learning_rate=server_learning_rate)
    label = f"FedBuff (K={buffer_size})"
    return Policy("fedbuff", Asynchronous(local_epochs), version_staleness, mixing, label=label)


# --- baselines ------------------------------------------------------------------------------------


@POLICIES.register("centralized")
def centralized(local_epochs: LocalEpochs = 1.0) -> Policy:
    """Baseline: all data in one place, on the fastest machine, a model after every `local_epochs`; simulated only."""
    baseline = Baseline(pooled=True)
    return replace(sync_fedavg(local_epochs), name="centralized", label="Centralized", baseline=baseline)


@POLICIES.register("alone")
def alone(
    learner: Annotated[str, Setting("who trains; without it the learner with the most examples")] = "",
    local_epochs: LocalEpochs = 1.0,
) -> Policy:
    """Baseline: one learner without the others, a model after every `local_epochs`; simulated only."""
    baseline = Baseline(learner=learner or None)
    label = f"Alone ({learner or 'largest'})"
    return replace(sync_fedavg(local_epochs), name="alone", label=label, baseline=baseline)
