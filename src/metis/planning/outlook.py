"""A plan from an experiment's file: its learners, the policies to forecast, and advice about both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from metis.core.costs import Energy
from metis.core.events import LearnerId
from metis.core.layers import Cap, MeasuredPace, ShortestPeriod
from metis.core.model import Layout, TensorSpec
from metis.core.policies import POLICIES
from metis.core.policy import Policy
from metis.data.datasets import DATASETS
from metis.errors import ConfigError
from metis.experiments.compose import build_policy, compose
from metis.experiments.config.load import (
    ExperimentConfig,
    FaultsConfig,
    LearnerGroup,
    PolicyConfig,
    did_you_mean,
    slug,
    task_of,
)
from metis.experiments.data import dry_assignments
from metis.experiments.learners import build_link, build_power, build_speed
from metis.experiments.private import build_privacy
from metis.experiments.setup import build_augmentation, network_options
from metis.planning.advice import LambdaRange, names, sensible_range, warnings
from metis.planning.forecast import HOUR, Forecast, PlannedLearner, forecast
from metis.planning.privacy import spending
from metis.planning.timings import LearnerTiming, Timings
from metis.registry import parameters_of
from metis.text import seconds

_LayoutOf: TypeAlias = Callable[[Policy], Layout]  # of the models that a policy sends
LAMBDAS = (0.5, 1.0, 2.0, 3.0, 4.0)  # those that the paper tried
_DEFAULTS = ("sync_fedavg", "semisync_fedavg", "async_fedavg")  # one of each kind
# Labels of a plan leave out how a policy mixes, on which its costs do not depend.
_SHORT_LABELS = {
    "sync_fedavg": "Sync",
    "semisync_fedavg": "SemiSync",
    **dict.fromkeys(("async_fedavg", "fedrec", "fedasync", "fedbuff"), "Async"),
}


@dataclass(frozen=True)
class PolicyOutlook:
    """One policy of a plan."""

    parameters: Mapping[str, Any]  # as in a file, with the defaults
    forecast: Forecast


@dataclass(frozen=True)
class Outlook:
    """What the policies will cost, and which lambda is sensible."""

    source: str
    learners: tuple[PlannedLearner, ...]
    model_bytes: int
    policies: tuple[PolicyOutlook, ...]
    sensible: LambdaRange | None  # None if no policy has a lambda
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    privacy: Mapping[str, Any] = field(default_factory=dict)  # what is spent of it; empty if nobody protects records

    @property
    def watts(self) -> bool:
        return self.learners[0].power.unit == "watt"

    def energy(self, found: Forecast) -> Energy:
        """Per hour, in watt hours or epsilon-seconds."""
        energy, factor = found.energy, 1 / HOUR if self.watts else 1.0
        return Energy(energy.equation * factor, energy.active * factor, energy.idle_charged * factor)

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.source,
            "model_bytes": self.model_bytes,
            "energy_unit": "watt hour" if self.watts else "epsilon second",
            "learners": [
                {
                    "name": learner.name,
                    "examples": learner.examples,
                    "batch_size": learner.batch_size,
                    "batches_per_epoch": learner.batches,
                    "time_per_batch": learner.time_per_batch,
                    "epoch_seconds": learner.epoch_time,
                    "exchange_seconds": learner.exchange,
                    "power": [learner.power.active, learner.power.idle, learner.power.unit],
                    "timing": learner.source,
                }
                for learner in self.learners
            ],
            "policies": [self._policy_json(policy) for policy in self.policies],
            "lambda": None
            if self.sensible is None
            else {
                "lowest": self.sensible.lowest,
                "highest": self.sensible.highest if self.sensible.highest < math.inf else None,
                "why": self.sensible.why,
            },
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            **({"privacy": dict(self.privacy)} if self.privacy else {}),
            "accuracy": "not predicted",
        }

    def _policy_json(self, policy: PolicyOutlook) -> dict[str, Any]:
        found = policy.forecast
        energy, slowest_learner_epochs = self.energy(found), found.slowest_learner_epochs
        assessment = None
        if self.sensible is not None and slowest_learner_epochs is not None:
            assessment = self.sensible.assess(slowest_learner_epochs)
        return {
            "policy": found.policy.name,
            "label": found.policy.label,
            "protocol": found.kind,
            "slowest_learner_epochs": slowest_learner_epochs,
            "local_epochs": policy.parameters.get("local_epochs"),
            "lambda_is": assessment,
            "first_round_seconds": found.first_round,
            "round_seconds": found.round,
            "period_bounded_by": found.bounded_by or None,
            "period": None if found.period is None else asdict(found.period),
            "idle_share": found.idle,
            "transfer_share": found.transfer,
            "mean_local_epochs": found.local_epochs,
            "update_requests_per_hour": found.update_requests,
            "refused_updates_per_hour": found.refused,
            "bytes_per_hour": found.bytes_exchanged,
            "energy_per_hour": {
                "equation": energy.equation,
                "active": energy.active,
                "idle_charged": energy.idle_charged,
            },
            "learners": [
                {
                    "learner": one.learner,
                    "steps": one.steps,
                    "local_epochs": one.local_epochs,
                    "seconds": one.seconds,
                    "active_share": one.active,
                    "transfer_share": one.transfer,
                    "idle_share": one.idle,
                    "weight": one.weight,
                    "updates_of_others_meanwhile": one.overtaken,
                }
                for one in found.learners
            ],
        }


def make_outlook(
    config: ExperimentConfig,
    source: str,
    *,
    wanted: Sequence[str] = (),
    lambdas: Sequence[float] | None = None,
    timings: Timings | None = None,
) -> Outlook:
    """Forecast the policies of a file, or those named, with the learners as the file has them or as measured."""
    chosen = _policies(config, source, wanted, lambdas)
    notes: list[str] = []
    size = timings.model_bytes if timings is not None else None
    layout_of = network_layouts(config, source) if size is None else _one_tensor(size)
    model_bytes = _model_bytes(config, layout_of) if size is None else size
    learners = _learners(config, model_bytes, timings, notes)
    policies = _forecasts(chosen, learners, model_bytes, layout_of)
    forecasts = [policy.forecast for policy in policies]
    with_lambda = [policy for policy in policies if policy.forecast.slowest_learner_epochs is not None]
    sensible = None
    if with_lambda:
        caps = [_cap(policy.forecast.policy) for policy in with_lambda]
        weights = [one.weight for one in with_lambda[0].forecast.learners]
        sensible = sensible_range(learners, weights, max(caps))
    reference = _reference(config, with_lambda)
    notes += _assumptions(config, with_lambda)
    notes += _bounds(with_lambda, learners)
    return Outlook(
        source,
        learners,
        model_bytes,
        tuple(policies),
        sensible,
        tuple(warnings(learners, forecasts, reference)),
        tuple(notes),
        privacy=spending(learners, forecasts, config.stop.rounds),
    )


# --- policies -------------------------------------------------------------------------------------


def _policies(
    config: ExperimentConfig, source: str, wanted: Sequence[str], lambdas: Sequence[float] | None
) -> list[PolicyConfig]:
    """The policies asked for, else one of each kind, the file's own where it has one; sorted by kind, each lambda."""
    given = [_named(config, source, name) for name in wanted] if wanted else list(config.policy)
    given = [policy for policy in given if compose(policy).baseline is None]  # federated with nobody
    if wanted and not given:
        raise ConfigError(f"{wanted[0]} is a baseline, whose costs are not those of a federation")
    if not wanted:
        kinds = {(_kind(policy), _has_lambda(policy)) for policy in given}
        defaults = [PolicyConfig(name=name) for name in _DEFAULTS]
        # Beside a semi-synchronous policy without a lambda, those with one are still worth comparing.
        given += [policy for policy in defaults if (_kind(policy), _has_lambda(policy)) not in kinds]
    chosen: list[PolicyConfig] = []
    for policy in sorted(given, key=_kind):
        own = _parameters(policy).get("slowest_learner_epochs")
        if own is None:
            chosen.append(policy)
        else:
            chosen += [_with_lambda(policy, value) for value in sorted({own, *(lambdas or LAMBDAS)})]
    if lambdas is not None and not any(map(_has_lambda, chosen)):
        raise ConfigError("--lambda needs a semi-synchronous policy, and none is asked for")
    return chosen


def _forecasts(
    policies: Sequence[PolicyConfig], learners: Sequence[PlannedLearner], model_bytes: int, layout_of: _LayoutOf
) -> list[PolicyOutlook]:
    """One for each policy; of those with the same label and costs the first, of those with the same label a number."""
    distinct: list[PolicyOutlook] = []
    for policy in policies:
        parameters = _parameters(policy)
        named = replace(compose(policy), label=_label(policy))
        update_bytes = named.update_bytes(layout_of(build_policy(policy)))
        found = forecast(named, learners, parameters.get("slowest_learner_epochs"), model_bytes, update_bytes)
        if not any(
            replace(found, policy=other.forecast.policy) == other.forecast
            and named.label == other.forecast.policy.label
            for other in distinct
        ):
            distinct.append(PolicyOutlook(parameters, found))
    labels = [outlook.forecast.policy.label for outlook in distinct]
    return [
        outlook if labels.count(label) == 1 else _numbered(outlook, labels[: index + 1].count(label))
        for index, (outlook, label) in enumerate(zip(distinct, labels, strict=True))
    ]


def _numbered(outlook: PolicyOutlook, count: int) -> PolicyOutlook:
    policy = outlook.forecast.policy
    labelled = replace(policy, label=f"{policy.label} #{count}")
    return replace(outlook, forecast=replace(outlook.forecast, policy=labelled))


def _cap(policy: Policy) -> float:
    """The most local epochs that a learner runs in a task."""
    return next((layer.local_epochs for layer in policy.layers if isinstance(layer, Cap)), math.inf)


def _label(policy: PolicyConfig) -> str:
    """The kind of policy with its lambda or local epochs; the label of its own for a policy of somebody else's."""
    parameters = _parameters(policy)
    label = _SHORT_LABELS.get(policy.name) or POLICIES[policy.name](**policy.parameters).label
    slowest_learner_epochs, epochs = parameters.get("slowest_learner_epochs"), parameters.get("local_epochs")
    if slowest_learner_epochs is not None:
        return f"{label} λ={slowest_learner_epochs:g}"
    return label if epochs is None else f"{label} {epochs:g} epoch{'' if epochs == 1 else 's'}"


def _parameters(policy: PolicyConfig) -> dict[str, Any]:
    """All parameters of a policy, with the defaults."""
    known = parameters_of(POLICIES[policy.name])
    return {name: parameter.default for name, parameter in known.items()} | policy.parameters


def _kind(policy: PolicyConfig) -> int:
    """Synchronous, semi-synchronous and asynchronous policies in this order."""
    protocol = compose(policy).protocol
    if protocol.has_period:
        return 1
    return 0 if protocol.has_rounds else 2


def _has_lambda(policy: PolicyConfig) -> bool:
    """Whether it has one; `semisync` chooses its periods without."""
    return "slowest_learner_epochs" in _parameters(policy)


def _with_lambda(policy: PolicyConfig, value: float) -> PolicyConfig:
    layers = {key: table for key, table in policy.layers.items() if key not in ("schedule", "adaptive")}
    return PolicyConfig(name=policy.name, **(policy.parameters | layers | {"slowest_learner_epochs": value}))


def _named(config: ExperimentConfig, source: str, wanted: str) -> PolicyConfig:
    """A policy of the file by its label or name, else one that Metis knows, with its defaults."""
    for policy in config.policy:
        label = policy.label or policy.name
        if wanted.lower() in (label.lower(), slug(label), policy.name):
            return policy
    if wanted in POLICIES:
        return PolicyConfig(name=wanted)
    known = [*(policy.label or policy.name for policy in config.policy), *POLICIES]
    raise ConfigError(f"there is no policy '{wanted}' in {source} or in Metis; {did_you_mean(wanted, known)}")


def _reference(config: ExperimentConfig, with_lambda: Sequence[PolicyOutlook]) -> float | None:
    """The lambda to speak about: the file's, else the middle one; None without any."""
    tried = sorted(policy.parameters["slowest_learner_epochs"] for policy in with_lambda)
    for policy in config.policy:
        own = policy.parameters.get("slowest_learner_epochs")
        if own is not None and own in tried:
            return float(own)
    return tried[len(tried) // 2] if tried else None


# --- learners -------------------------------------------------------------------------------------


def _learners(
    config: ExperimentConfig, model_bytes: int, timings: Timings | None, notes: list[str]
) -> tuple[PlannedLearner, ...]:
    measured: Mapping[LearnerId, LearnerTiming] = {} if timings is None else timings.learners
    held = _held(config, measured)
    if timings is not None:
        _compare_names(list(held), list(measured), notes)
    return tuple(
        _learner(name, group, examples, model_bytes, measured.get(name)) for name, (group, examples) in held.items()
    )


def _held(
    config: ExperimentConfig, measured: Mapping[LearnerId, LearnerTiming]
) -> dict[LearnerId, tuple[LearnerGroup, int]]:
    """Each learner with its group and the number of examples it holds."""
    if config.site is None:
        return {one.name: (one.group, len(one.indices)) for one in dry_assignments(config)}
    from metis.experiments.bridges import site_path
    from metis.experiments.site import examples_of, load_site

    site = load_site(site_path(config))
    held = {}
    for group in config.learners:
        for name in group.learner_names:
            try:
                held[name] = group, measured[name].examples if name in measured else examples_of(site, name)
            except ConfigError as problem:
                raise ConfigError(
                    f"the number of examples of '{name}' is not known here: {problem}; measure it there with "
                    f"metis probe --site FILE --name {name} --json, and pass that file with --timings"
                ) from None
    return held


def _learner(
    name: LearnerId, group: LearnerGroup, examples: int, model_bytes: int, timing: LearnerTiming | None
) -> PlannedLearner:
    link = build_link(group)
    learner = PlannedLearner(
        name,
        examples,
        group.batch_size,
        build_speed(group, name).time_per_batch,
        link.download_time(model_bytes),
        link.upload_time(model_bytes),
        build_power(group),
        privacy=build_privacy(group),
        link=link,
    )
    if timing is None:
        return learner
    learner = replace(
        learner,
        examples=timing.examples,
        batch_size=timing.batch_size,
        time_per_batch=timing.time_per_batch,
        source=timing.source,
    )
    if timing.exchange is None:
        return learner
    return replace(learner, download=timing.exchange / 2, upload=timing.exchange / 2, link=None)


def _compare_names(learners: Sequence[LearnerId], measured: Sequence[LearnerId], notes: list[str]) -> None:
    """Refuse timings of other learners; note those that are missing or not needed."""
    if not set(learners) & set(measured):
        raise ConfigError(
            f"the timings are those of {names(measured)}, but the learners of the file are {names(learners)}"
        )
    if missing := [name for name in learners if name not in measured]:
        notes.append(f"There are no timings of {names(missing)}; those of the file are used.")
    if others := [name for name in measured if name not in learners]:
        notes.append(f"The timings of {names(others)} are ignored: the file has no such learner.")


def _assumptions(config: ExperimentConfig, with_lambda: Sequence[PolicyOutlook]) -> list[str]:
    """What the file has that a forecast with constant speeds ignores."""
    notes = []
    with_control_variates = [policy.training.solver == "scaffold" for policy in config.policy]
    if any(with_control_variates) and not all(with_control_variates):
        notes.append("All models count as large as those of scaffold; those of the other solvers have half the bytes.")
    if any({"adaptive", "schedule"} & policy.layers.keys() for policy in config.policy):
        notes.append("Periods that adapt or follow a schedule are not forecast; fixed lambdas are shown instead.")
    by_assumption: dict[str, list[str]] = {}
    for group in config.learners:
        for present, assumption in (
            (group.jitter > 0, "jitter is ignored: every batch takes time_per_batch"),
            (bool(group.drift), "drift is ignored: batches take time_per_batch all the time"),
            (group.speed_trace is not None, "only the first row of the speed_trace is used"),
            (group.availability.kind != "always", "absences are ignored: every learner is present all the time"),
            (group.network.cut_every is not None, "cuts of the line are ignored"),
        ):
            if present:
                by_assumption.setdefault(assumption, []).append(group.name)
    notes += [f"{names(groups)}: {assumption}." for assumption, groups in by_assumption.items()]
    if config.faults != FaultsConfig():
        notes.append("Faults of the controller are ignored.")
    longest = min((policy.parameters.get("longest_period", math.inf) for policy in with_lambda), default=math.inf)
    if longest < math.inf:
        notes.append(f"longest_period limits periods to {seconds(longest)}.")
    return notes


def _bounds(policies: Sequence[PolicyOutlook], learners: Sequence[PlannedLearner]) -> list[str]:
    """Which periods are longer than lambda says because of the exchange, here or in a deployment."""
    here: list[Forecast] = []
    deployed: list[Forecast] = []
    for found in (policy.forecast for policy in policies):
        if found.bounded_by == ShortestPeriod.key:
            here.append(found)
        elif not any(isinstance(layer, (ShortestPeriod, MeasuredPace)) for layer in found.policy.layers):
            bound = forecast(found.policy.with_layers(ShortestPeriod()), learners)
            if bound.bounded_by == ShortestPeriod.key:
                deployed.append(replace(bound, policy=found.policy))
    notes = []
    for forecasts, where in ((here, ""), (deployed, "In a deployment, ")):
        if forecasts:
            labels = names([found.policy.label for found in forecasts])
            rounds = seconds(max(found.round or 0.0 for found in forecasts))
            text = f"{labels}: periods are bounded by the exchange (shortest_period), so that a round takes {rounds}."
            notes.append(where + text)
    return notes


# --- the network ------------------------------------------------------------------------------------


def network_bytes(config: ExperimentConfig, source: str) -> int:
    """Bytes of a model; the data set need not be there."""
    return _model_bytes(config, network_layouts(config, source))


def _model_bytes(config: ExperimentConfig, layout_of: _LayoutOf) -> int:
    """The largest that a policy of the file sends: SCAFFOLD's control variates travel with the network."""
    layouts = [layout_of(build_policy(policy)) for policy in config.policy]
    return max(4 * layout.size + 8 * layout.counters for layout in layouts)


def _one_tensor(size: int) -> _LayoutOf:
    """Where only the bytes of a model are known."""
    return lambda policy: Layout((TensorSpec("all", (size // 4,)),))


def network_layouts(config: ExperimentConfig, source: str) -> _LayoutOf:
    """The layout of what each policy sends; the network is built once for that."""
    from metis.learning import ArrayExamples
    from metis.learning.engine import ENGINES, EngineJob, trainable_of

    job = EngineJob(task_of(config), buffers=config.training.buffers)
    if config.site is not None:
        from metis.experiments.bridges import site_path
        from metis.experiments.site import SiteFunction, load_site

        job = replace(job, network=SiteFunction(load_site(site_path(config)).path, "network"))
    else:
        dataset = DATASETS[config.data.dataset]
        images = dataset.read is None and dataset.generate is None
        _, transform = build_augmentation(config.data.augment, dataset.shape)
        one = np.zeros((1, *dataset.shape), np.uint8 if images else np.float32)
        job = replace(
            job,
            network_name=config.network.name,
            network_options=network_options(config, source),
            input_shape=ArrayExamples(one, np.zeros(1, np.int64), transform=transform).input_shape,
            outputs=1 if job.task == "regression" else len(dataset.class_names),
        )
    engine = ENGINES.named(config.training.engine)(job)
    return lambda policy: policy.extend_layout(engine.layout, trainable_of(engine))
