"""The machines of a file: speed, availability, link and power of its learners, faults of its controller."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from metis.core.costs import Power
from metis.errors import ConfigError
from metis.experiments.config.load import FaultsConfig, LearnerGroup, did_you_mean
from metis.simulation.availability import (
    Always,
    Availability,
    DailyAvailability,
    RandomAvailability,
    RecordedAvailability,
)
from metis.simulation.link import Link
from metis.simulation.outages import ControllerFaults
from metis.simulation.poisoning import Poison
from metis.simulation.speed import Speed

MEGABIT = 1_000_000 / 8  # bytes


def build_speed(group: LearnerGroup, learner: str) -> Speed:
    """How fast a learner of this group is."""
    if group.speed_trace is None:
        assert group.time_per_batch is not None, "the configuration was checked"
        profile = tuple((at, factor) for at, factor in group.drift)
        return Speed(group.time_per_batch, group.jitter, profile)
    rows = _read_trace(Path(group.speed_trace), ("at", "time_per_batch"), learner)
    if not rows:
        raise ConfigError(f"{group.speed_trace}: there is no row for learner '{learner}'")
    first = rows[0][1]
    for at, seconds in rows:
        if not 0 < seconds < math.inf:
            raise ConfigError(
                f"{group.speed_trace}: time_per_batch is {seconds:g} from second {at:g} on, must be greater than 0"
            )
    try:
        return Speed(first, group.jitter, tuple((at, seconds / first) for at, seconds in rows))
    except ValueError as problem:
        raise ConfigError(f"{group.speed_trace}: {problem}") from None


def build_availability(group: LearnerGroup, learner: str) -> Availability:
    """When a learner of this group is there."""
    settings = group.availability
    if settings.kind == "random":
        assert settings.mean_present is not None and settings.mean_away is not None
        return RandomAvailability(settings.mean_present, settings.mean_away)
    if settings.kind == "daily":
        assert settings.opens is not None and settings.closes is not None
        return DailyAvailability(settings.opens, settings.closes, settings.day_seconds or 86_400.0)
    if settings.kind == "trace":
        assert settings.file is not None
        try:
            return RecordedAvailability(tuple(_read_trace(Path(settings.file), ("leaves", "back"), learner)))
        except ValueError as problem:
            raise ConfigError(f"{settings.file}: {problem}") from None
    return Always()


def build_link(group: LearnerGroup) -> Link:
    """How far a learner of this group is from the controller."""
    network = group.network
    up, down = network.upload_mbps, network.download_mbps
    return Link(
        network.latency,
        math.inf if up is None else up * MEGABIT,
        math.inf if down is None else down * MEGABIT,
        _outages(network.cut_every, network.cut_seconds),
        network.resumed,
    )


def build_faults(faults: FaultsConfig) -> ControllerFaults:
    """What goes wrong at the controller."""
    restarts = _outages(faults.restart_every, faults.restart_seconds)
    if faults.restarts:
        restarts = RecordedAvailability(tuple((begins, begins + seconds) for begins, seconds in faults.restarts))
    return ControllerFaults(faults.write_seconds, _outages(faults.stall_every, faults.stall_seconds), restarts)


def _outages(every: float | None, seconds: float | None) -> Availability:
    return Always() if every is None or seconds is None else RandomAvailability(every, seconds)


def build_power(group: LearnerGroup) -> Power:
    """What the machines of this group draw."""
    if group.watts is not None:
        return Power(group.watts, group.idle_watts, "watt")
    return Power(1.0 if group.epsilon is None else group.epsilon, group.idle_epsilon, "epsilon")


def build_poison(group: LearnerGroup) -> Poison | None:
    """The attack that learners of this group carry out."""
    return None if group.poison is None else Poison(group.poison.attack, group.poison.strength)


def check_traces(learners: Sequence[tuple[str, LearnerGroup]]) -> None:
    """Refuse a trace with a row for a learner that does not use it; groups may share one file."""
    users: dict[str, list[str]] = {}
    for name, group in learners:
        for file in {group.speed_trace, group.availability.file} - {None}:
            users.setdefault(str(file), []).append(name)
    for file, known in users.items():
        try:
            with Path(file).open(newline="", encoding="utf-8-sig") as stream:
                rows = list(csv.reader(stream))
        except (OSError, UnicodeDecodeError, csv.Error) as problem:
            raise ConfigError(f"{file}: cannot be read as CSV: {problem}") from None
        heading = [name.strip() for name in rows[0]] if rows else []
        if "learner" not in heading:
            continue
        column = heading.index("learner")
        for number, row in enumerate(rows[1:], start=2):
            name = row[column].strip() if len(row) > column else ""
            if row and name not in known:
                raise ConfigError(f"{file}: row {number}: there is no learner '{name}'; {did_you_mean(name, known)}")


def _read_trace(path: Path, columns: tuple[str, str], learner: str) -> list[tuple[float, float]]:
    """Two columns of a CSV file; where it has a column `learner`, only that learner's rows."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = names
            if not set(columns) <= set(names):
                raise ConfigError(f"{path}: the first line is '{','.join(names)}', must name {' and '.join(columns)}")
            rows = []
            for row in reader:
                if "learner" in names and (row["learner"] or "").strip() != learner:
                    continue
                try:
                    rows.append((float(row[columns[0]]), float(row[columns[1]])))
                except (TypeError, ValueError):
                    raise ConfigError(
                        f"{path}: line {reader.line_num}: {' and '.join(columns)} must be numbers"
                    ) from None
            return rows
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise ConfigError(f"{path}: cannot be read as CSV: {problem}") from None
