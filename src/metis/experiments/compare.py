"""Runs side by side, as in the paper's Tables 2 and 3: what each policy cost for the same result.

Everything here is a pure function of finished runs. A factor is the first row's cost divided by this row's: above 1
is cheaper than the first row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """One row per run: its costs when it reached the target, or at its end if there is no target."""
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
        "at_learners": None if run.at_learners is None else run.at_learners.to_json(),
        "finish_reason": run.finish_reason,
        "wall_seconds": run.wall_seconds,
        "community_sha256": run.community_model.sha256(),
        "directory": None if run.folder is None else run.folder.as_posix(),
    }


def _costs(costs: Costs | None) -> dict[str, Any]:
    """The paper's columns; all None for a run that did not reach the target."""
    columns = (
        "parallel_time",
        "cumulative_time",
        "idle_time",
        "update_requests",
        "models_exchanged",
        "bytes_exchanged",
    )
    energies = ("equation", "active", "idle_charged")
    return {
        "iterations": None if costs is None else costs.steps,
        **{name: None if costs is None else getattr(costs, name) for name in columns},
        "energy": {name: None if costs is None else getattr(costs.energy, name) for name in energies},
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
        for table in ("seed", "seeds", "site", "data", "partition", "learners", "network", "stop", "evaluation"):
            for path, _, _ in differences(first.to_dict().get(table), other.to_dict().get(table), table):
                raise ConfigError(
                    f"{other_name} and {name} differ in {path}; "
                    "a comparison needs the same data, the same start and the same budget"
                )


def differences(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two documents differ, as deep as possible: the path, and what each has there."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**one, **other}:
            yield from differences(one.get(key), other.get(key), f"{path}.{key}" if path else str(key))
    elif one != other:
        yield path, one, other
