"""From an experiment's file to a plan: who the learners are, which policies to foresee, and what to make of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from metis.core.costs import Energy
from metis.core.events import LearnerId
from metis.core.policies import Policy
from metis.core.protocols import SemiSynchronous
from metis.data.datasets import DATASETS
from metis.errors import ConfigError
from metis.experiments.build import (
    Assignment,
    build_augmentation,
    build_link,
    build_policy,
    build_power,
    build_solver,
    build_speed,
)
from metis.experiments.config.load import (
    POLICIES,
    ExperimentConfig,
    LearnerGroup,
    PolicyConfig,
    did_you_mean,
    network_parameters,
    slug,
    task_of,
)
from metis.planning.forecast import (
    HOUR,
    Forecast,
    Member,
    SensibleRange,
    forecast,
    sensible_range,
    warnings,
)
from metis.planning.timings import Timing, Timings
from metis.reproduction.schedule import dry_assignments
from metis.text import listed, seconds

LAMBDAS = (0.5, 1.0, 2.0, 3.0, 4.0)  # those that the paper tried
_DEFAULTS = ("sync_fedavg", "semisync_fedavg", "async_fedavg")


@dataclass(frozen=True)
class Outlook:
    """What the policies will cost, and which lambda is sensible."""

    source: str
    members: tuple[Member, ...]
    model_bytes: int
    forecasts: tuple[Forecast, ...]
    sensible: SensibleRange | None  # None without a semi-synchronous policy
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def watts(self) -> bool:
        return self.members[0].power.unit == "watt"

    def energy(self, found: Forecast) -> Energy:
        """An hour, in watt hours or epsilon-seconds."""
        energy, factor = found.energy, 1 / HOUR if self.watts else 1.0
        return Energy(energy.equation * factor, energy.active * factor, energy.idle_charged * factor)

    def evaluator(self, found: Forecast) -> str | None:
        """Whether its lambda is too small, sensible or too large."""
        slowest_learner_epochs = found.slowest_learner_epochs
        if self.sensible is None or slowest_learner_epochs is None:
            return None
        return self.sensible.evaluator(slowest_learner_epochs)

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.source,
            "model_bytes": self.model_bytes,
            "energy_unit": "watt hour" if self.watts else "epsilon second",
            "learners": [
                {
                    "name": member.name,
                    "examples": member.examples,
                    "batch_size": member.batch_size,
                    "batches_per_epoch": member.batches,
                    "time_per_batch": member.time_per_batch,
                    "epoch_seconds": member.epoch_time,
                    "exchange_seconds": member.exchange,
                    "power": [member.power.active, member.power.idle, member.power.unit],
                    "timing": member.source,
                }
                for member in self.members
            ],
            "policies": [self._policy_json(found) for found in self.forecasts],
            "lambda": None
            if self.sensible is None
            else {
                "lowest": self.sensible.lowest,
                "highest": self.sensible.highest if self.sensible.highest < math.inf else None,
                "why": self.sensible.why,
            },
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "accuracy": "not predicted",
        }

    def _policy_json(self, found: Forecast) -> dict[str, Any]:
        energy = self.energy(found)
        return {
            "policy": found.policy.name,
            "label": found.policy.label,
            "protocol": found.kind,
            "slowest_learner_epochs": found.slowest_learner_epochs,
            "local_epochs": getattr(found.policy.protocol, "local_epochs", None),
            "lambda_is": self.evaluator(found),
            "first_round_seconds": found.first_round,
            "round_seconds": found.round,
            "idle_share": found.idle,
            "transfer_share": found.transfer,
            "mean_local_epochs": found.local_epochs,
            "update_requests_per_hour": found.update_requests,
            "refused_updates_per_hour": found.refused,
            "bytes_per_hour": found.models_exchanged * self.model_bytes,
            "energy_per_hour": {
                "equation": energy.equation,
                "active": energy.active,
                "idle_charged": energy.idle_charged,
            },
            "learners": [
                {
                    "learner": share.learner,
                    "steps": share.steps,
                    "local_epochs": share.local_epochs,
                    "seconds": share.seconds,
                    "active_share": share.active,
                    "transfer_share": share.transfer,
                    "idle_share": share.idle,
                    "weight": share.weight,
                    "updates_of_others_meanwhile": share.overtaken,
                }
                for share in found.learners
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
    """Foresee the policies of a file, or those named, with the file's learners or as they were measured."""
    chosen = _policies(config, source, wanted, lambdas)
    notes: list[str] = []
    size = timings.model_bytes if timings is not None else None
    model_bytes = network_bytes(config, source) if size is None else size
    members = _members(config, model_bytes, timings, notes)
    forecasts = tuple(forecast(policy, members) for policy in chosen)
    semi = [found for found in forecasts if found.slowest_learner_epochs is not None]
    cap = max((_most_local_epochs(found) for found in semi), default=math.inf)
    sensible = sensible_range(members, [share.weight for share in semi[0].learners], cap) if semi else None
    reference = _reference(config, semi)
    notes += _assumptions(config, semi)
    return Outlook(
        source,
        members,
        model_bytes,
        forecasts,
        sensible,
        tuple(warnings(members, forecasts, reference)),
        tuple(notes),
    )


# --- policies -------------------------------------------------------------------------------------


def _policies(
    config: ExperimentConfig, source: str, wanted: Sequence[str], lambdas: Sequence[float] | None
) -> list[Policy]:
    """What is asked for, else a policy of each kind, with the file's settings where it has one; sorted by kind."""
    given = [_named(config, source, name) for name in wanted] if wanted else list(config.policy)
    if not wanted:
        kinds = {_kind(policy) for policy in given}
        given += [PolicyConfig(name=name) for name in _DEFAULTS if _kind(PolicyConfig(name=name)) not in kinds]
    made: list[Policy] = []
    for policy in sorted(given, key=_kind):
        built = build_policy(policy)
        if isinstance(built.protocol, SemiSynchronous):
            own = built.protocol.slowest_learner_epochs
            made += [_with_lambda(policy, value) for value in sorted({own, *(lambdas or LAMBDAS)})]
        else:
            what = "Sync" if _kind(policy) == 0 else "Async"
            epochs = getattr(built.protocol, "local_epochs", 1.0)
            made.append(replace(built, label=f"{what} {epochs:g} epoch{'' if epochs == 1 else 's'}"))
    if lambdas is not None and not any(isinstance(policy.protocol, SemiSynchronous) for policy in made):
        raise ConfigError("--lambda is given, but no semi-synchronous policy is asked for")
    distinct = {_schedule(policy): policy for policy in reversed(made)}
    return _told_apart(list(reversed(distinct.values())))


def _told_apart(policies: Sequence[Policy]) -> list[Policy]:
    """Settings besides lambda and epochs, such as a limit, may make two of one label: those are numbered."""
    labels = [policy.label for policy in policies]
    return [
        policy if labels.count(policy.label) == 1 else replace(policy, label=f"{policy.label} #{number}")
        for policy, number in zip(
            policies, (labels[: place + 1].count(label) for place, label in enumerate(labels)), strict=True
        )
    ]


def _kind(policy: PolicyConfig) -> int:
    protocol = build_policy(policy).protocol
    return 2 if protocol.accepts_stale else 1 if isinstance(protocol, SemiSynchronous) else 0


def _schedule(policy: Policy) -> tuple[Any, ...]:
    """What decides when and how long learners train; policies that agree in it cost the same."""
    protocol = policy.protocol
    settings = [
        (item.name, getattr(protocol, item.name))
        for item in fields(protocol)  # type: ignore[arg-type]
        if item.init and item.name != "timings"  # of constant speeds every measurement is the same
    ]
    return type(protocol).__name__, *settings


def _with_lambda(policy: PolicyConfig, value: float) -> Policy:
    fixed = {"slowest_learner_epochs": value, "schedule": None, "adaptive": None}
    made = build_policy(policy.model_copy(update=fixed))
    return replace(made, label=f"SemiSync λ={value:g}")


def _named(config: ExperimentConfig, source: str, wanted: str) -> PolicyConfig:
    """A policy of the file by its label or name, else one that Metis knows, as it is by default."""
    for policy in config.policy:
        label = policy.label or policy.name
        if wanted.lower() in (label.lower(), slug(label), policy.name):
            return policy
    if wanted in POLICIES:
        return PolicyConfig(name=wanted)
    known = [*(policy.label or policy.name for policy in config.policy), *POLICIES]
    raise ConfigError(f"{source} has no policy '{wanted}' and Metis knows none; {did_you_mean(wanted, known)}")


def _reference(config: ExperimentConfig, semi: Sequence[Forecast]) -> float:
    """The lambda to speak of: the file's, else the middle one."""
    tried = [found.slowest_learner_epochs or 0.0 for found in semi]
    for policy in config.policy:
        own = policy.parameters.get("slowest_learner_epochs")
        if own in tried:
            return float(own)
    return sorted(tried)[len(tried) // 2] if tried else 2.0


# --- learners -------------------------------------------------------------------------------------


def _members(
    config: ExperimentConfig, model_bytes: int, timings: Timings | None, notes: list[str]
) -> tuple[Member, ...]:
    measured: Mapping[LearnerId, Timing] = {} if timings is None else timings.learners
    groups, examples = _seated(config, measured)
    members = tuple(
        _member(name, group, examples[name], model_bytes, measured.get(name)) for name, group in groups.items()
    )
    if timings is not None:
        _tell_timings(list(groups), measured, notes)
    return members


def _seated(
    config: ExperimentConfig, measured: Mapping[LearnerId, Timing]
) -> tuple[dict[LearnerId, LearnerGroup], dict[LearnerId, int]]:
    """Who is in which group and holds how many examples."""
    if config.site is None:
        assignments: Sequence[Assignment] = dry_assignments(config)
        return {assignment.name: assignment.group for assignment in assignments}, {
            assignment.name: len(assignment.indices) for assignment in assignments
        }
    from metis.experiments.site import examples_of, load_site

    site = load_site(config.site.file)
    groups = {name: group for group in config.learners for name in group.learner_names}
    examples = {}
    for name in groups:
        if name in measured:
            examples[name] = measured[name].examples
            continue
        try:
            examples[name] = examples_of(site, name)
        except ConfigError as problem:
            raise ConfigError(
                f"how many examples '{name}' has is not known here: {problem}; take it from there with "
                f"metis probe --site FILE --name {name} --json, and give that file with --timings"
            ) from None
    return groups, examples


def _member(name: LearnerId, group: LearnerGroup, examples: int, model_bytes: int, timing: Timing | None) -> Member:
    link = build_link(group)
    member = Member(
        name,
        examples,
        group.batch_size,
        build_speed(group, name).time_per_batch,
        link.download_time(model_bytes),
        link.upload_time(model_bytes),
        build_power(group),
    )
    if timing is None:
        return member
    member = replace(
        member,
        examples=timing.examples,
        batch_size=timing.batch_size,
        time_per_batch=timing.time_per_batch,
        source=timing.source,
    )
    if timing.exchange is None:
        return member
    return replace(member, download=timing.exchange / 2, upload=timing.exchange / 2)


def _tell_timings(groups: Sequence[str], measured: Mapping[LearnerId, Timing], notes: list[str]) -> None:
    known = [name for name in groups if name in measured]
    if not known:
        raise ConfigError(
            f"the timings are of {listed(list(measured), 3)}, the file's learners are {listed(list(groups), 3)}: "
            "none is the same"
        )
    missing = [name for name in groups if name not in measured]
    if missing:
        notes.append(f"There are no timings of {listed(missing, 3)}; the file's are used.")
    others = [name for name in measured if name not in groups]
    if others:
        notes.append(f"There are timings of {listed(others, 3)}, who are not in the file; they are left out.")


def _assumptions(config: ExperimentConfig, semi: Sequence[Forecast]) -> list[str]:
    """What the file says and a plan of constant speeds leaves out."""
    notes = []
    with_controls = [policy.training.solver == "scaffold" for policy in config.policy]
    if any(with_controls) and not all(with_controls):
        notes.append("All models are as large as those of scaffold; those of the other solvers have half the bytes.")
    if any(policy.compression is not None for policy in config.policy):
        notes.append("Compression is left out: updates count as whole models, in bytes and in the time of transfers.")
    if any(policy.adaptive is not None or policy.schedule is not None for policy in config.policy):
        notes.append("Periods that adapt or follow a schedule are not foreseen; fixed lambdas are shown instead.")
    by_group: dict[str, list[str]] = {}
    for group in config.learners:
        for told, words in (
            (group.jitter > 0, "jitter is left out: the mean counts"),
            (bool(group.drift), "drift is left out: batches take time_per_batch all the time"),
            (group.speed_trace is not None, "of the speed_trace only the first row counts"),
            (group.availability.kind != "always", "absences are left out: everybody is there all the time"),
        ):
            if told:
                by_group.setdefault(words, []).append(group.name)
    notes += [f"{listed(groups, 3)}: {words}." for words, groups in by_group.items()]
    longest = min((_longest(found) for found in semi), default=math.inf)
    capped = [found for found in semi if longest < math.inf and found.round is not None]
    if capped:
        notes.append(f"No period is longer than {seconds(longest)}, which is longest_period.")
    return notes


def _most_local_epochs(found: Forecast) -> float:
    protocol = found.policy.protocol
    most = protocol.max_local_epochs if isinstance(protocol, SemiSynchronous) else None
    return math.inf if most is None else most


def _longest(found: Forecast) -> float:
    protocol = found.policy.protocol
    return protocol.longest_period if isinstance(protocol, SemiSynchronous) else math.inf


# --- the network ------------------------------------------------------------------------------------


def network_bytes(config: ExperimentConfig, source: str) -> int:
    """Bytes of a model; the network is built once for that, the data set need not be there."""
    from metis.learning import NETWORKS, ArrayExamples, TorchEngine, engine_for

    make: Callable[[], Any]
    if config.site is not None:
        from metis.experiments.site import SiteFunction, load_site

        make = SiteFunction(load_site(config.site.file).path, "network")
    else:
        options = network_parameters(config, NETWORKS, source)
        dataset = DATASETS[config.data.dataset]
        images = dataset.read is None and dataset.generate is None
        _, transform = build_augmentation(config.data.augment, dataset.shape)
        one = np.zeros((1, *dataset.shape), np.uint8 if images else np.float32)
        shape = ArrayExamples(one, np.zeros(1, np.int64), transform=transform).input_shape
        outputs = 1 if task_of(config) == "regression" else len(dataset.class_names)
        make = functools.partial(NETWORKS[config.network.name], shape, outputs, **options)
    engine = TorchEngine(make, task_of(config), buffers=config.training.buffers)
    # The largest that a policy of the file sends: SCAFFOLD's control variates travel with the network.
    sizes = [engine_for(engine, build_solver(policy.training)).layout for policy in config.policy]
    return max(4 * layout.size + 8 * layout.counters for layout in sizes)
