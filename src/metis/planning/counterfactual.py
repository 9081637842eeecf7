"""What another policy would have cost in a recorded run: the same learners and timings, without weights."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from metis.core.controller import Controller
from metis.core.costs import CostLedger, Costs, Power
from metis.core.events import (
    CommunityPublished,
    Evaluated,
    Finish,
    LearnerId,
    LearnerJoined,
    SendTask,
    UpdateRequest,
)
from metis.core.layers import FedNova
from metis.core.model import Model
from metis.core.policies import POLICIES
from metis.core.policy import Policy
from metis.core.stop import StopRule
from metis.errors import ConfigError, DataError, UnexpectedEvent
from metis.experiments.compose import build_policy, compose
from metis.experiments.config.load import ExperimentConfig, did_you_mean, load_config, read_toml, resolve_config
from metis.experiments.learners import build_power
from metis.planning.advice import names
from metis.planning.forecast import HOUR
from metis.runs.run import CONFIG, SUMMARY
from metis.runs.setting import Setting, exchanged
from metis.runs.trace import EVENTS, measures_of, read_trace, to_record, what_is_wrong
from metis.simulation.loop import Trace
from metis.simulation.recording import recorded_tasks, replay_otherwise

_CONTRADICTIONS = (KeyError, TypeError, AssertionError)  # raised when events contradict each other


@dataclass(frozen=True)
class Recording:
    """A recorded run, and what is known about its learners."""

    folder: Path
    events: Trace
    label: str
    policy: Policy | None  # None if its parameters are not recorded
    fills_the_period: bool
    powers: dict[LearnerId, Power]
    nominal: dict[LearnerId, float]  # time per batch according to the file
    model_bytes: int | None
    refusals_allowed: int
    quorum: int
    update_bytes: int | None = None  # of an update, if updates were compressed; other policies compress likewise

    @property
    def end(self) -> float:
        return self.events[-1][0]

    @property
    def exchange_bytes(self) -> int:
        """Of an update request, both ways; 0 if it is not known."""
        return exchanged(self.model_bytes or 0, self.update_bytes)

    @property
    def watts(self) -> bool:
        return any(power.unit == "watt" for power in self.powers.values())


def load_recording(directory: Path) -> Recording:
    """Read the directory of a run, simulated or deployed; a deployment's state folder has it in `run`."""
    if not directory.is_dir():
        raise ConfigError(
            f"there is no directory {directory}; give the directory of a run, or a controller's state folder"
        )
    folder = next((path for path in (directory, directory / "run") if (path / EVENTS).is_file()), None)
    if folder is None:
        hint = "; it is a comparison: give one of its runs" if (directory / "comparison.json").is_file() else ""
        raise ConfigError(f"{directory} has no {EVENTS}: it is not the directory of a run{hint}")
    events: Trace = list(read_trace(folder / EVENTS))
    if not any(isinstance(item, SendTask) for _, item in events):
        raise ConfigError(f"{folder} cannot be replayed: no task was sent in that run")
    config = load_config(folder / CONFIG) if (folder / CONFIG).is_file() else None
    setting = _setting(folder)
    if config is None and setting is None:
        raise ConfigError(f"{folder} has neither {CONFIG} nor {SUMMARY}, so nothing is known about its learners")
    chosen = None if config is None else build_policy(config.policy[0])
    powers = {} if setting is None else {info.name: info.power for info in setting.learners}
    nominal = {} if setting is None else {info.name: info.time_per_batch for info in setting.learners}
    if config is not None and not powers:
        powers = {name: build_power(group) for group in config.learners for name in group.learner_names}
    deployed = (folder.parent / "controller.db").exists()
    return Recording(
        folder,
        events,
        chosen.label if chosen is not None else setting.label if setting is not None else "recorded",
        chosen,
        chosen.fills_the_period if chosen is not None else bool(setting and setting.fills_the_period),
        powers,
        nominal,
        setting.model_bytes or None if setting is not None else None,
        3 if config is None else config.run.refusals_allowed,
        (config.deployment.minimum or 1) if config is not None and deployed else 0,
        None if setting is None else setting.update_bytes,
    )


def _setting(folder: Path) -> Setting | None:
    if not (folder / SUMMARY).is_file():
        return None
    try:
        return Setting.from_summary(json.loads((folder / SUMMARY).read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise DataError(f"{folder / SUMMARY} is not the summary of a run: {what_is_wrong(problem)}") from problem


def policies_named(recording: Recording, wanted: str | None, changes: Sequence[str]) -> list[Policy]:
    """A policy by name, those of a file, or without either the recorded one; with `key=value` changes."""
    table: Any
    if wanted is None:
        config = _config_of(recording)
        table = config.policy[0].model_dump(exclude_none=True, exclude={"label", "training"})
        if not changes:
            table["label"] = recording.label
        source = str(recording.folder / CONFIG)
    elif wanted in POLICIES:
        table, source = {"name": wanted}, wanted
    elif Path(wanted).suffix == ".toml" or Path(wanted).exists():
        source = Path(wanted).name
        table = read_toml(Path(wanted)).get("policy")
        if table is None:
            raise ConfigError(f"{source} has no [policy]; choose one of {', '.join(POLICIES)}")
        if changes and isinstance(table, list) and len(table) > 1:
            raise ConfigError(f"{source} has {len(table)} policies, so it is not clear which one {changes[0]} changes")
        table = table[0] if isinstance(table, list) and len(table) == 1 else table
    else:
        raise ConfigError(f"there is no policy and no file '{wanted}'; {did_you_mean(wanted, POLICIES)}")
    tables = {
        "learners": [{"name": "any", "batch_size": 1, "time_per_batch": 1.0}],
        "policy": table,
        "stop": {"rounds": 1},
    }
    try:
        resolved = resolve_config(tables, source, [f"policy.{change}" for change in changes])
    except ConfigError as problem:
        raise ConfigError(str(problem).replace("--set policy.", "")) from None  # as the user wrote it
    for policy in resolved.policy:
        if compose(policy).baseline is not None:
            raise ConfigError(f"{policy.label} cannot be replayed: it is a baseline, in which one learner trains")
        if "adaptive" in policy.layers:
            raise ConfigError(
                f"{policy.label} cannot be replayed: it chooses its periods from the models, which are not recorded; "
                "use a fixed slowest_learner_epochs, or simulate it"
            )
    return [build_policy(policy) for policy in resolved.policy]


def _config_of(recording: Recording) -> ExperimentConfig:
    if not (recording.folder / CONFIG).is_file():
        raise ConfigError(
            f"{recording.folder} has no {CONFIG}, so the parameters of {recording.label} are not known; give --policy"
        )
    return load_config(recording.folder / CONFIG)


def counterfactual_trace(recording: Recording, policy: Policy) -> Trace:
    """The trace of this policy with the recorded timings, over the recorded time."""
    controller = Controller(
        policy,
        Model.empty(),
        stop=StopRule(seconds=recording.end) if recording.end > 0 else None,
        learners_expected=None,
        quorum=recording.quorum,
        refusals_allowed=recording.refusals_allowed,
        exchange_bytes=recording.exchange_bytes,
    )
    if recording.policy is not None and _settings(policy) == _settings(recording.policy):
        controller.measures = measures_of(recording.events)  # without weights nothing can be measured again
    try:
        return replay_otherwise(recording.events, controller, recording.nominal)
    except (*_CONTRADICTIONS, UnexpectedEvent) as problem:
        raise _damaged(recording) from problem


def _damaged(recording: Recording) -> DataError:
    return DataError(f"{recording.folder / EVENTS} is damaged: its events contradict each other")


# --- costs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TraceCosts:
    """What a trace cost until the end of the recording."""

    label: str
    rounds: int
    costs: Costs
    local_epochs: dict[LearnerId, float]  # mean over each learner's updates
    bytes_exchanged: int | None

    @property
    def idle(self) -> float:
        """Share of the time that learners were present."""
        return self._share(math.fsum(learner.idle for learner in self.costs.by_learner.values()))

    @property
    def transfer(self) -> float:
        return self._share(math.fsum(learner.transfer for learner in self.costs.by_learner.values()))

    def _share(self, part: float) -> float:
        present = math.fsum(item.active + item.transfer + item.idle for item in self.costs.by_learner.values())
        return part / present if present else 0.0

    def to_json(self, watts: bool) -> dict[str, Any]:
        energy, factor = self.costs.energy, 1 / HOUR if watts else 1.0
        return {
            "label": self.label,
            "rounds": self.rounds,
            "update_requests": self.costs.update_requests,
            "refused_updates": self.costs.refused,
            "models_exchanged": self.costs.models_exchanged,
            "bytes_exchanged": self.bytes_exchanged,
            "steps": self.costs.steps,
            "idle_share": self.idle,
            "transfer_share": self.transfer,
            "energy": {
                "equation": energy.equation * factor,
                "active": energy.active * factor,
                "idle_charged": energy.idle_charged * factor,
            },
            "learners": [
                {
                    "learner": name,
                    "steps": costs.steps,
                    "update_requests": costs.update_requests,
                    "local_epochs": self.local_epochs.get(name),
                    "active": costs.active,
                    "transfer": costs.transfer,
                    "idle": costs.idle,
                    "away": costs.away,
                }
                for name, costs in self.costs.by_learner.items()
            ],
        }


def trace_costs(recording: Recording, trace: Trace, label: str, fills_the_period: bool) -> TraceCosts:
    """Add up the costs; a task sent at the very end is left out, since nobody worked on it."""
    ledger = CostLedger(recording.powers, recording.model_bytes or 0, fills_the_period, recording.update_bytes)
    batches: dict[LearnerId, int] = {}
    updates: dict[LearnerId, list[int]] = {}
    rounds = 0
    for now, item in trace:
        if isinstance(item, SendTask) and now >= recording.end:
            continue
        ledger.record(now, item)
        match item:
            case LearnerJoined():
                batches[item.learner] = -(-item.examples // item.batch_size)
            case UpdateRequest():
                updates.setdefault(item.learner, []).append(item.steps)
            case CommunityPublished():
                rounds = item.stamp.version
            case _:
                pass
    costs = ledger.costs(recording.end)
    return TraceCosts(
        label,
        rounds,
        costs,
        {name: sum(steps) / len(steps) / batches[name] for name, steps in updates.items()},
        None if recording.model_bytes is None else costs.bytes_exchanged,
    )


@dataclass(frozen=True)
class Counterfactual:
    """The recorded run compared with what other policies would have done in the same time."""

    recording: Recording
    costs: tuple[TraceCosts, ...]  # the recorded one first
    traces: tuple[Trace, ...]  # of the other policies
    reproduced: bool | None  # whether the recorded policy gave the recorded trace; None if it was not replayed
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "directory": self.recording.folder.as_posix(),
            "seconds": self.recording.end,
            "energy_unit": "watt hour" if self.recording.watts else "epsilon second",
            "recorded": self.costs[0].to_json(self.recording.watts),
            "what_if": [found.to_json(self.recording.watts) for found in self.costs[1:]],
            "recorded_course_reproduced": self.reproduced,
            "notes": list(self.notes),
            "accuracy": "not predicted",
        }


def compare_policies(recording: Recording, policies: Sequence[Policy]) -> Counterfactual:
    """Replay each policy and add up the costs of all traces in the same way."""
    try:
        costs = [trace_costs(recording, recording.events, recording.label, recording.fills_the_period)]
    except _CONTRADICTIONS as problem:
        raise _damaged(recording) from problem
    traces = []
    reproduced: bool | None = None
    for policy in policies:
        trace = counterfactual_trace(recording, policy)
        traces.append(trace)
        costs.append(trace_costs(recording, trace, policy.label, policy.fills_the_period))
        if recording.policy is not None and _settings(policy) == _settings(recording.policy):
            reproduced = decisions(trace, recording.end) == decisions(recording.events, recording.end)
    notes = _notes(recording)
    recorded = None if recording.policy is None else recording.policy.wire
    if any(policy.wire not in (None, recorded) for policy in policies):
        notes.append("A different compression is ignored: bytes and transfers are those of the recorded updates.")
    return Counterfactual(recording, tuple(costs), tuple(traces), reproduced, tuple(notes))


def decisions(trace: Trace, end: float) -> list[dict[str, Any]]:
    """Events and actions, without what a replay cannot know: weights, measurements and the end itself."""
    left_out = (Evaluated, Finish)
    kept = [
        to_record(at, item)
        for at, item in trace
        if not isinstance(item, left_out) and not (isinstance(item, SendTask) and at >= end)
    ]
    hidden = ("at", "loss", "reason", "contribution_value")
    return [
        {key: value for key, value in record.items() if key not in hidden}
        for record in kept
        if record.get("event") not in ("deadline_passed", "learners_expected", "stop_rule_changed")
    ]


def _settings(policy: Policy) -> str:
    """What decides the trace: neither how updates travel, nor what comes from the solver, which is not known here."""
    layers = [layer for layer in policy.layers if layer.in_files and layer is not policy.wire]
    chosen = tuple(
        replace(layer, momentum=None, pull=None) if isinstance(layer, FedNova) else layer for layer in layers
    )
    return replace(policy, layers=chosen).identity


def _notes(recording: Recording) -> list[str]:
    tasks = recorded_tasks(recording.events)
    joined = list(dict.fromkeys(item.learner for _, item in recording.events if isinstance(item, LearnerJoined)))
    silent = [name for name in joined if all(task.answer is None for task in tasks.get(name, []))]
    known = [name for name in silent if math.isfinite(recording.nominal.get(name, math.nan))]
    notes = []
    if known:
        notes.append(f"{names(known)} sent no updates; the time per batch of the file is used.")
    unknown = [name for name in silent if name not in known]
    if unknown:
        notes.append(f"{names(unknown)} sent no updates, so the speed is not known: no task is completed here either.")
    failed = sum(task.invalid or type(task.answer).__name__ == "TaskFailed" for mine in tasks.values() for task in mine)
    if failed:
        notes.append(f"{failed} recorded tasks failed or were refused; tasks of another policy are assumed to succeed.")
    return notes
