"""Runs as tidy tables for other programs: one row per evaluation, learner or sum of costs, with its policy."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from metis.errors import ConfigError, needs_package
from metis.files import replacing
from metis.reporting.summaries import labels
from metis.runs.run import Run

Row: TypeAlias = dict[str, Any]


def write_tables(runs: Sequence[Run], folder: Path, kind: str) -> list[Path]:
    """Write `history`, `learners` and `costs` as csv or parquet; return their paths."""
    if not runs:
        raise ConfigError("a table needs at least one run")
    write: Callable[[Sequence[Row], Path], None] = _write_parquet if kind == "parquet" else write_csv
    tables = {"history": history_rows(runs), "learners": learner_rows(runs), "costs": cost_rows(runs)}
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, rows in tables.items():
        path = folder / f"{name}.{kind}"
        with replacing(path) as new:
            write(rows, new)
        paths.append(path)
    return paths


def history_rows(runs: Sequence[Run]) -> list[Row]:
    """One row per evaluation and policy: the costs until the model was published, and its metrics."""
    return _labelled(runs, Run.to_records)


def learner_rows(runs: Sequence[Run]) -> list[Row]:
    """One row per learner and policy, over the whole run."""
    return _labelled(runs, Run.learners_to_records)


def _labelled(runs: Sequence[Run], rows_of: Callable[[Run], list[Row]]) -> list[Row]:
    """All rows, each starting with the policy, made unique where several runs share it, and the seed."""
    return [
        {"policy": name, "seed": run.setting.seed} | {key: value for key, value in row.items() if key != "policy"}
        for run, name in zip(runs, labels(runs), strict=True)
        for row in rows_of(run)
    ]


def cost_rows(runs: Sequence[Run]) -> list[Row]:
    """One row per policy until the target, if there is one, and one at the end."""
    rows = []
    for run, name in zip(runs, labels(runs), strict=True):
        target = run.setting.target
        sums = [("end", run.costs)] if target is None else [("target", run.costs_at_target), ("end", run.costs)]
        for until, costs in sums:
            energy = None if costs is None else costs.energy
            rows.append(
                {
                    "policy": name,
                    "seed": run.setting.seed,
                    "until": until,
                    "reached": costs is not None,
                    "steps": None if costs is None else costs.steps,
                    "parallel_time": None if costs is None else costs.parallel_time,
                    "cumulative_time": None if costs is None else costs.cumulative_time,
                    "idle_time": None if costs is None else costs.idle_time,
                    "transfer_time": None if costs is None else costs.transfer_time,
                    "update_requests": None if costs is None else costs.update_requests,
                    "refused_updates": None if costs is None else costs.refused,
                    "models_exchanged": None if costs is None else costs.models_exchanged,
                    "bytes_exchanged": None if costs is None else costs.bytes_exchanged,
                    "energy_equation": None if energy is None else energy.equation,
                    "energy_active": None if energy is None else energy.active,
                    "energy_idle_charged": None if energy is None else energy.idle_charged,
                    "energy_unit": run.summary()["energy_unit"],
                    "metric": run.setting.metric,
                    "target": None if target is None else target.value,
                    "final": run.final_metric,
                    "best": run.best_metric,
                    "community_models": run.rounds,
                    "finish_reason": run.finish_reason,
                    "wall_seconds": run.wall_seconds,
                    "community_sha256": run.community_model.sha256(),
                }
            )
    return rows


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Every column that a row has, in the order of their first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row)) or ["policy", "seed"]


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """A heading and one line per row; what is not known is empty."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns_of(rows), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: csv_value(value) for name, value in row.items()} for row in rows)


def csv_value(value: Any) -> Any:
    """A value as every program reads it: empty if unknown or not a number, true and false in lower case."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(value).lower() if isinstance(value, bool) else value


def check_parquet() -> None:
    """Refuse parquet without its package before anything is drawn."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(needs_package("the format parquet", "pyarrow", "tables")) from None


def _write_parquet(rows: Sequence[Row], path: Path) -> None:
    check_parquet()
    import pyarrow
    from pyarrow import parquet

    columns = {}
    for name in columns_of(rows):
        values = [row.get(name) for row in rows]
        # A column without any value is numeric, so that tables of several runs can be joined.
        kind = pyarrow.float64() if all(value is None for value in values) else None
        columns[name] = pyarrow.array(values, type=kind)
    parquet.write_table(pyarrow.table(columns), path)
