"""What another policy would have cost in a run that there was: its timings and who was there, without weights."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metis.core.controller import Controller, StopRule
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
from metis.core.model import Model
from metis.core.policies import Policy
from metis.errors import ConfigError, DataError, UnexpectedUpdate
from metis.experiments.build import build_policy, build_power
from metis.experiments.config.load import (
    POLICIES,
    ExperimentConfig,
    did_you_mean,
    load_config,
    read_toml,
    resolve_config,
)
from metis.runs.run import CONFIG, EVENTS, SUMMARY, Setting
from metis.runs.trace import measures_of, read_trace, to_record
from metis.simulation.loop import Course
from metis.simulation.recording import recorded_tasks, replay_otherwise
from metis.text import listed

HOUR = 3600.0
_DAMAGED = (KeyError, TypeError, AssertionError)  # what folding events raises that cannot follow each other


@dataclass(frozen=True)
class Recording:
    """A run as it went, and what is known of its learners besides."""

    folder: Path
    events: Course
    label: str
    policy: Policy | None  # None if the folder does not say with which parameters it was run
    fills_the_period: bool
    powers: dict[LearnerId, Power]
    nominal: dict[LearnerId, float]  # time per batch as the file has it
    model_bytes: int | None
    refusals_allowed: int
    quorum: int
    update_bytes: int | None = None  # of what was handed in, if it was compressed: other policies would do the same

    @property
    def end(self) -> float:
        return self.events[-1][0]

    @property
    def watts(self) -> bool:
        return any(power.unit == "watt" for power in self.powers.values())


def load_recording(place: Path) -> Recording:
    """Read the directory of a run, simulated or deployed; a deployment's state folder has it in `run`."""
    if not place.is_dir():
        raise ConfigError(f"there is no directory {place}; give that of a run, or a controller's state folder")
    folder = next((path for path in (place, place / "run") if (path / EVENTS).is_file()), None)
    if folder is None:
        hint = "; it holds a comparison: give one of its runs" if (place / "comparison.json").is_file() else ""
        raise ConfigError(f"{place} has no {EVENTS}: it is not the directory of a run{hint}")
    events: Course = list(read_trace(folder / EVENTS))
    if not any(isinstance(item, SendTask) for _, item in events):
        raise ConfigError(f"{folder} cannot be replayed: no task was sent in it")
    config = load_config(folder / CONFIG) if (folder / CONFIG).is_file() else None
    setting = _setting(folder)
    if config is None and setting is None:
        raise ConfigError(f"{folder} has neither {CONFIG} nor {SUMMARY}: what its learners are is not known")
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
        chosen.protocol.fills_the_period if chosen is not None else bool(setting and setting.fills_the_period),
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
        raise DataError(f"{folder / SUMMARY} is not the summary of a run: {problem!r}") from problem


def policies_named(recording: Recording, wanted: str | None, changes: Sequence[str]) -> list[Policy]:
    """The policies of a file, one by name, or without either the recorded one; with `key=value` changes."""
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
            raise ConfigError(f"{source} has {len(table)} policies; {changes[0]} would be of which?")
        table = table[0] if isinstance(table, list) and len(table) == 1 else table
    else:
        raise ConfigError(f"there is neither a policy nor a file '{wanted}'; {did_you_mean(wanted, POLICIES)}")
    tables = {
        "learners": [{"name": "any", "batch_size": 1, "time_per_batch": 1.0}],
        "policy": table,
        "stop": {"rounds": 1},
    }
    try:
        resolved = resolve_config(tables, source, [f"policy.{change}" for change in changes])
    except ConfigError as problem:
        raise ConfigError(str(problem).replace("--set policy.", "")) from None  # as it was written here
    for policy in resolved.policy:
        if policy.adaptive is not None:
            raise ConfigError(
                f"{policy.label} cannot be replayed: it chooses its periods from the models, and a record holds none; "
                "take a fixed slowest_learner_epochs, or simulate it"
            )
    return [build_policy(policy) for policy in resolved.policy]


def _config_of(recording: Recording) -> ExperimentConfig:
    if not (recording.folder / CONFIG).is_file():
        raise ConfigError(
            f"{recording.folder} has no {CONFIG}: the parameters of {recording.label} are not known; give --policy"
        )
    return load_config(recording.folder / CONFIG)


def what_if(recording: Recording, policy: Policy) -> Course:
    """The course of this policy on the recorded timings, over the recorded time."""
    controller = Controller(
        policy,
        Model.empty(),
        stop=StopRule(seconds=recording.end) if recording.end > 0 else None,
        learners_expected=None,
        quorum=recording.quorum,
        refusals_allowed=recording.refusals_allowed,
    )
    if recording.policy is not None and _settings(policy) == _settings(recording.policy):
        controller.measures = measures_of(recording.events)  # there are no weights to measure again
    try:
        return replay_otherwise(recording.events, controller, recording.nominal)
    except (*_DAMAGED, UnexpectedUpdate) as problem:
        raise _damage(recording) from problem


def _damage(recording: Recording) -> DataError:
    return DataError(f"{recording.folder / EVENTS} is damaged: its events cannot follow each other")


# --- what it cost ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bill:
    """A course up to the end of the recording."""

    label: str
    rounds: int
    costs: Costs
    local_epochs: dict[LearnerId, float]  # mean of what each learner handed in
    bytes_exchanged: int | None

    @property
    def idle(self) -> float:
        """Share of the time that learners were there."""
        return self._share(math.fsum(learner.idle for learner in self.costs.by_learner.values()))

    @property
    def transfer(self) -> float:
        return self._share(math.fsum(learner.transfer for learner in self.costs.by_learner.values()))

    def _share(self, part: float) -> float:
        there = math.fsum(item.active + item.transfer + item.idle for item in self.costs.by_learner.values())
        return part / there if there else 0.0

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


def bill(recording: Recording, course: Course, label: str, fills_the_period: bool) -> Bill:
    """Fold a course; a task sent at the very end is left out, since nobody worked on it."""
    ledger = CostLedger(recording.powers, recording.model_bytes or 0, fills_the_period, recording.update_bytes)
    batches: dict[LearnerId, int] = {}
    handed_in: dict[LearnerId, list[int]] = {}
    rounds = 0
    for now, item in course:
        if isinstance(item, SendTask) and now >= recording.end:
            continue
        ledger.record(now, item)
        match item:
            case LearnerJoined():
                batches[item.learner] = -(-item.examples // item.batch_size)
            case UpdateRequest():
                handed_in.setdefault(item.learner, []).append(item.steps)
            case CommunityPublished():
                rounds = item.stamp.version
            case _:
                pass
    costs = ledger.costs(recording.end)
    return Bill(
        label,
        rounds,
        costs,
        {name: sum(steps) / len(steps) / batches[name] for name, steps in handed_in.items()},
        None if recording.model_bytes is None else costs.bytes_exchanged,
    )


@dataclass(frozen=True)
class Comparison:
    """The recorded run against what other policies would have made of the same time."""

    recording: Recording
    bills: tuple[Bill, ...]  # the recorded one first
    courses: tuple[Course, ...]  # of the others
    reproduced: bool | None  # whether the recorded policy gave the recorded course again; None if it was not asked
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "directory": self.recording.folder.as_posix(),
            "seconds": self.recording.end,
            "energy_unit": "watt hour" if self.recording.watts else "epsilon second",
            "recorded": self.bills[0].to_json(self.recording.watts),
            "what_if": [found.to_json(self.recording.watts) for found in self.bills[1:]],
            "recorded_course_reproduced": self.reproduced,
            "notes": list(self.notes),
            "accuracy": "not predicted",
        }


def compare_policies(recording: Recording, policies: Sequence[Policy]) -> Comparison:
    """Replay each policy and fold all courses alike."""
    try:
        bills = [bill(recording, recording.events, recording.label, recording.fills_the_period)]
    except _DAMAGED as problem:
        raise _damage(recording) from problem
    courses = []
    reproduced: bool | None = None
    for policy in policies:
        course = what_if(recording, policy)
        courses.append(course)
        bills.append(bill(recording, course, policy.label, policy.protocol.fills_the_period))
        if recording.policy is not None and _settings(policy) == _settings(recording.policy):
            reproduced = decisions(course, recording.end) == decisions(recording.events, recording.end)
    notes = _notes(recording)
    recorded = None if recording.policy is None else recording.policy.compression
    if any(policy.compression not in (None, recorded) for policy in policies):
        notes.append("Another compression is left out: bytes and transfers are those of the recorded updates.")
    return Comparison(recording, tuple(bills), tuple(courses), reproduced, tuple(notes))


def decisions(course: Course, end: float) -> list[dict[str, Any]]:
    """What happened and was decided, without what a replay cannot know: weights, measurements and the end itself."""
    left_out = (Evaluated, Finish)
    kept = [
        to_record(at, item)
        for at, item in course
        if not isinstance(item, left_out) and not (isinstance(item, SendTask) and at >= end)
    ]
    hidden = ("at", "loss", "reason", "contribution_value")
    return [
        {key: value for key, value in record.items() if key not in hidden}
        for record in kept
        if record.get("event") not in ("deadline_passed", "learners_expected")
    ]


def _settings(policy: Policy) -> tuple[Any, ...]:
    # Communities are functions with their arguments bound; what they are is in their representation.
    # Of FedNova only what was chosen: the rest is the solver's, which a replay does not know, and changes no course.
    nova = None if policy.nova is None else policy.nova.largest_amplification
    parts = (policy.protocol, policy.community, policy.contribution, nova, policy.server, policy.rate)
    return policy.name, *(repr(part) for part in parts)


def _notes(recording: Recording) -> list[str]:
    tasks = recorded_tasks(recording.events)
    joined = list(dict.fromkeys(item.learner for _, item in recording.events if isinstance(item, LearnerJoined)))
    silent = [name for name in joined if all(task.answer is None for task in tasks.get(name, []))]
    known = [name for name in silent if math.isfinite(recording.nominal.get(name, math.nan))]
    notes = []
    if known:
        notes.append(f"{listed(known, 3)} handed nothing in; the time per batch of the file is used.")
    unknown = [name for name in silent if name not in known]
    if unknown:
        notes.append(f"{listed(unknown, 3)} handed nothing in, so its speed is not known: it ends no task here either.")
    failed = sum(task.invalid or type(task.answer).__name__ == "TaskFailed" for mine in tasks.values() for task in mine)
    if failed:
        notes.append(f"{failed} recorded tasks failed or were refused; another policy's tasks are taken to succeed.")
    return notes
