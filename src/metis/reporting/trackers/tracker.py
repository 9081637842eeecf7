"""What a tracker is, and what several of them need: names of numbers, a flat configuration, a stored identity."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from metis.core.costs import Costs
from metis.runs.folds import HistoryPoint, RunFold
from metis.runs.setting import Setting

STORED = "trackers.json"  # in a run's folder: the run's identity at each tracker, to continue there when it is resumed
RECENT = 100  # points of the history that may still get another evaluation


class Tracker(Protocol):
    """One sink; its methods are called in this order, from one thread, and may raise anything."""

    def begin(self, setting: Setting, config: Mapping[str, Any]) -> None:
        """The run starts, or is resumed: then everything recorded before comes again."""

    def record(self, point: HistoryPoint, fresh: Mapping[str, float]) -> None:
        """A model was evaluated; `fresh` are the numbers of the point that were not recorded before."""

    def end(self, fold: RunFold) -> None:
        """The run has ended; without a finish reason it was interrupted."""


def scalars(point: HistoryPoint) -> dict[str, float]:
    """All numbers of a point under the names that trackers show, in three groups."""
    energy = point.energy
    return {
        **{f"metrics/{name}": value for name, value in point.metrics.items()},
        "costs/parallel_time": point.at,
        "costs/cumulative_time": point.cumulative_time,
        "costs/idle_time": point.idle_time,
        "costs/update_requests": point.update_requests,
        "costs/steps": point.steps,
        "costs/bytes_exchanged": point.bytes_exchanged,
        "energy/equation": energy.equation,
        "energy/active": energy.active,
        "energy/idle_charged": energy.idle_charged,
    }


def at_target(costs: Costs) -> dict[str, float]:
    """The costs at the target, as a few numbers of the whole run."""
    energy = costs.energy
    return {
        "target/parallel_time": costs.parallel_time,
        "target/cumulative_time": costs.cumulative_time,
        "target/update_requests": costs.update_requests,
        "target/steps": costs.steps,
        "target/energy_equation": energy.equation,
        "target/energy_active": energy.active,
        "target/energy_idle_charged": energy.idle_charged,
    }


def flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a configuration with their paths, as in `learners.0.count`."""
    for name, value in document.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{path}.")
        elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
            yield from flat({str(index): item for index, item in enumerate(value)}, f"{path}.")
        else:
            yield path, value


def read_stored(folder: Path, tracker: str) -> dict[str, str]:
    """What a tracker stored about this run; empty if it did not."""
    try:
        return dict(json.loads((folder / STORED).read_text("utf-8"))[tracker])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


_lock = threading.Lock()


def write_stored(folder: Path, tracker: str, stored: Mapping[str, str]) -> None:
    with _lock:  # trackers of one run start at the same time
        try:
            document = dict(json.loads((folder / STORED).read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            document = {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STORED).write_text(json.dumps({**document, tracker: dict(stored)}, indent=1) + "\n", encoding="utf-8")
