"""Runs side by side, as in the paper's Tables 2 and 3: what each policy paid for the same result.

Everything here is a pure function over finished runs. A factor is the first row's cost over this row's: above 1
is cheaper than the first row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from metis.core.costs import Costs
from metis.errors import ConfigError
from metis.experiments.config.load import ExperimentConfig
from metis.runs.run import Run

# The costs that are compared, as paths into a row.
COSTS = (
    "iterations",
    "parallel_time",
    "cumulative_time",
    "update_requests",
    "bytes_exchanged",
    "energy.equation",
    "energy.active",
    "energy.idle_charged",
)


def compare(runs: Sequence[Run]) -> dict[str, Any]:
    """One row a run: its costs when it reached the target, or at its end if there is no target."""
    if not runs:
        raise ConfigError("there is nothing to compare: give at least one run")
    setting = runs[0].setting
    rows = [_row(run) for run in runs]
    for row in rows:
        row["factors"] = _factors(rows[0], row)
    target = setting.target
    return {
        "target": None if target is None else {"metric": target.metric, "value": target.value},
        "metric": setting.metric,
        "higher_is_better": setting.higher_is_better,
        "energy_unit": runs[0].summary()["energy_unit"],
        "baseline": runs[0].policy,
        "compressed": any(run.setting.update_bytes is not None for run in runs),
        "rows": rows,
    }


def _row(run: Run) -> dict[str, Any]:
    target = run.setting.target
    costs = run.costs if target is None else run.costs_at_target
    reached = None if target is None else costs is not None
    rounds: int | None = run.rounds
    if target is not None:
        rounds = next((point.version for point in run.history if target.reached_by(point.metrics)), None)
    return {
        "label": run.policy,
        "policy": run.setting.policy,
        "seed": run.setting.seed,
        "reached": reached,
        "rounds": rounds,
        **_costs(costs),
        "compression_error": run.compression_error,
        "final": run.final_metric,
        "best": run.best_metric,
        "finish_reason": run.finish_reason,
        "wall_seconds": run.wall_seconds,
        "community_sha256": run.community_model.sha256(),
        "directory": None if run.folder is None else run.folder.as_posix(),
    }


def _costs(costs: Costs | None) -> dict[str, Any]:
    """The paper's columns; all None for a run that did not reach the target."""
    energy = None if costs is None else costs.energy
    return {
        "iterations": None if costs is None else costs.steps,
        "parallel_time": None if costs is None else costs.parallel_time,
        "cumulative_time": None if costs is None else costs.cumulative_time,
        "idle_time": None if costs is None else costs.idle_time,
        "update_requests": None if costs is None else costs.update_requests,
        "models_exchanged": None if costs is None else costs.models_exchanged,
        "bytes_exchanged": None if costs is None else costs.bytes_exchanged,
        "energy": {
            "equation": None if energy is None else energy.equation,
            "active": None if energy is None else energy.active,
            "idle_charged": None if energy is None else energy.idle_charged,
        },
    }


def value_at(row: Mapping[str, Any], path: str) -> float | None:
    """The cost at a path such as `energy.active`."""
    value: Any = row
    for name in path.split("."):
        value = value[name]
    return None if value is None else float(value)


def _factors(first: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, float | None]:
    factors: dict[str, float | None] = {}
    for path in COSTS:
        base, own = value_at(first, path), value_at(row, path)
        factors[path] = None if base is None or own is None or own == 0 else base / own
    return factors


def check_comparable(configs: Sequence[tuple[str, ExperimentConfig]]) -> None:
    """Refuse files that differ in more than the policy and its training: same data, same start, same budget."""
    name, first = configs[0]
    for other_name, other in configs[1:]:
        for table in ("seed", "site", "data", "partition", "learners", "network", "stop", "evaluation"):
            ours, theirs = first.to_dict().get(table), other.to_dict().get(table)
            if ours != theirs:
                raise ConfigError(
                    f"{other_name} and {name} differ in {_first_difference(table, ours, theirs)}; "
                    "a comparison needs the same data, the same start and the same budget"
                )


def _first_difference(path: str, ours: Any, theirs: Any) -> str:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {**ours, **theirs}:
            if ours.get(key) != theirs.get(key):
                return _first_difference(f"{path}.{key}", ours.get(key), theirs.get(key))
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for place, (own, their) in enumerate(zip(ours, theirs, strict=True)):
            if own != their:
                return _first_difference(f"{path}.{place}", own, their)
    return path
