"""Studies of our own: what goes beyond the paper, compared with the paper's policies over several seeds.

A study is a folder of files like those of the paper's experiments, with a table [study] instead of [paper]. Each
policy of each file is run once for each seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from metis.errors import ConfigError
from metis.experiments.config.errors import did_you_mean
from metis.experiments.config.load import Table, read_toml, resolve_config
from metis.reproduction.environments import Cell, Environment, Paper, Scale, checked, environments_folder, merged
from metis.reproduction.schedule import slow_update_requests
from metis.reproduction.tables import COSTS as PAPER_COSTS
from metis.runs.run import Run

STUDIES: dict[str, str] = {
    "adaptive": "Beyond the paper: adaptive periods and FedNova against the best fixed lambda",
    "sweeps": "The paper's choices: local epochs 1 to 32, lambda 0.5 to 4",
    "division": "The main comparison on Skewed & Non-IID(5), with other learners sharing other classes",
    "tutorial": "What the TensorFlow tutorial has and the paper does not mention, one thing at a time",
    "momentum": "Sync on power law data without momentum, with it, and with momentum that is kept between tasks",
    "caps": "Beyond the paper: time and energy with a cap on the local epochs of a period",
}
WITHIN = 1.05  # times the best fixed lambda's time is as good as that

# As in the tables of the paper, with the plain name of CC.
COSTS = {"update_requests" if name == "communication_cost" else name: cost for name, cost in PAPER_COSTS.items()}


class Study(Table):
    """The table [study] of a file."""

    title: str
    distribution: str
    seeds: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    note: str
    # Fixed lambdas of which one is the best in hindsight; by default all that are run.
    sweep: list[float] = Field(default_factory=list)


@dataclass(frozen=True)
class Condition:
    """One file of a study: the same federation and policies for each seed."""

    name: str
    study: Study
    environments: tuple[Environment, ...]  # one for each seed

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(cell for environment in self.environments for cell in environment.cells)


def load_study(name: str, scale: Scale, overrides: Sequence[str] = ()) -> list[Condition]:
    """Every file of a study at one scale, in the order of their names."""
    folder = environments_folder() / name
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise ConfigError(f"there is no study in {folder}")
    conditions = []
    for file in files:
        content = read_toml(file)
        small = content.pop("small", {})
        content = content if scale == "paper" else merged(content, small)
        study: Study = checked(Study, content.pop("study", None), file.name, "study")
        paper = Paper(
            title=study.title,
            domain="",
            cluster="heterogeneous",
            distribution=study.distribution,
            results=[name],
            note=study.note,
        )
        environments = []
        for seed in study.seeds:
            config = resolve_config({**content, "seed": seed}, f"{file.name} ({scale})", overrides, folder=file.parent)
            unpublished = (None,) * len(config.policy)
            environments.append(Environment(f"{name}/{file.stem}/seed-{seed}", scale, paper, config, unpublished))
        conditions.append(Condition(file.stem, study, tuple(environments)))
    return conditions


def condition_table(condition: Condition, runs: Mapping[str, Run]) -> dict[str, Any]:
    """One row per policy: its costs until the target with each seed, compared with those of the best fixed lambda."""
    first, study, seeds = condition.environments[0], condition.study, len(condition.environments)
    rows: list[dict[str, Any]] = []
    for index, cell in enumerate(first.cells):
        own = [runs.get(environment.cells[index].name) for environment in condition.environments]
        costs = [None if run is None else run.costs_at_target for run in own]
        fixed = cell.policy.parameters.get("slowest_learner_epochs") if _plain(cell) else None
        rows.append(
            {
                "label": cell.label,
                "fixed_lambda": fixed,
                "in_sweep": fixed is not None and (not study.sweep or fixed in study.sweep),
                "max_local_epochs": cell.policy.parameters.get("max_local_epochs"),
                "runs": sum(run is not None for run in own),
                "reached": sum(found is not None for found in costs),
                **{key: spread([None if c is None else cost(c) for c in costs]) for key, cost in COSTS.items()},
                "iterations": spread([None if c is None else c.steps for c in costs]),
                "slow_update_requests": spread(
                    [
                        None if c is None or r is None else slow_update_requests(r, c)
                        for r, c in zip(own, costs, strict=True)
                    ]
                ),
                "best": [None if run is None else run.best_metric for run in own],
                "final": [None if run is None else run.final_metric for run in own],
            }
        )
    return {
        "condition": condition.name,
        "title": study.title,
        "distribution": study.distribution,
        "note": study.note,
        "seeds": [environment.config.seed for environment in condition.environments],
        "metric": first.config.evaluation.metric,
        "target": first.config.evaluation.target,
        "until": first.config.stop.seconds,
        "at_target": first.config.stop.at_target,
        **_compared(rows, seeds),
        "rows": rows,
    }


def _compared(rows: Sequence[dict[str, Any]], seeds: int) -> dict[str, str | None]:
    """Compare every row with the best fixed lambda of the sweep, and with the best of all; which these are."""
    best = _fastest([row for row in rows if row["in_sweep"]], seeds)
    of_all = _fastest([row for row in rows if row["fixed_lambda"] is not None], seeds)
    for row in rows:
        row["against_best_fixed"] = None if best is None else _paired(row, best)
        row["against_best_of_all"] = None if of_all is None or of_all is best else _paired(row, of_all)
    return {
        "best_fixed": None if best is None else best["label"],
        "best_of_all": None if of_all is None else of_all["label"],
    }


def joined(kept: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a study with the rows of another, made elsewhere; of two the one with more runs stays."""
    if new["study"] not in STUDIES:
        raise ConfigError(f"there is no study '{new['study']}'; {did_you_mean(str(new['study']), STUDIES)}")
    kept = {**new, "conditions": [], "runs": 0, "wall_seconds": 0.0} if kept is None else kept
    if (kept["study"], kept["scale"]) != (new["study"], new["scale"]):
        raise ConfigError(
            f"a study {new['study']} at scale {new['scale']} cannot be added to one of {kept['study']} at scale "
            f"{kept['scale']}"
        )
    conditions, tables = load_study(new["study"], new["scale"]), []
    for condition in conditions:
        table = condition_table(condition, {})
        made: dict[str, dict[str, Any]] = {row["label"]: row for row in table["rows"]}
        for document in (kept, new):
            for row in (
                row for one in document["conditions"] if one["condition"] == condition.name for row in one["rows"]
            ):
                if row["label"] in made and row["runs"] > made[row["label"]]["runs"]:
                    made[row["label"]] = dict(row)
        rows = list(made.values())
        table |= _compared(rows, len(condition.environments))
        tables.append({**table, "rows": [row for row in rows if row["runs"]]})
    tables = [table for table in tables if table["rows"]]
    runs = sum(row["runs"] for table in tables for row in table["rows"])
    return {
        **new,
        "complete": runs == sum(len(condition.cells) for condition in conditions),
        "runs": runs,
        "wall_seconds": kept["wall_seconds"] + (new["wall_seconds"] if runs > kept["runs"] else 0.0),
        "conditions": tables,
        "verdicts": verdicts(tables),
    }


def _plain(cell: Cell) -> bool:
    """Whether the policy is a fixed lambda without anything else."""
    return not cell.policy.layers and cell.policy.parameters.get("max_local_epochs") is None


def _fastest(rows: Sequence[dict[str, Any]], seeds: int) -> dict[str, Any] | None:
    """The row with the shortest mean time; None before all runs are done, or if none has a mean."""
    if any(row["runs"] < seeds for row in rows):
        return None
    known = [row for row in rows if row["parallel_time"]["mean"] is not None]
    return min(known, key=lambda row: row["parallel_time"]["mean"], default=None)


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean, median and range over the seeds; None unless every seed reached the target."""
    known = [value for value in values if value is not None]
    whole = len(known) == len(values) and bool(known)
    return {
        "mean": statistics.mean(known) if whole else None,
        "deviation": statistics.stdev(known) if whole and len(known) > 1 else None,
        "median": statistics.median(known) if whole else None,
        "range": [min(known), max(known)] if whole else None,
        "values": list(values),
    }


def _paired(row: Mapping[str, Any], best: Mapping[str, Any]) -> dict[str, Any]:
    """The geometric mean over the seeds of each cost, relative to that of another policy."""
    means: dict[str, float | None] = {}
    for key in COSTS:
        pairs = zip(row[key]["values"], best[key]["values"], strict=True)
        ratios = [mine / theirs for mine, theirs in pairs if mine is not None and theirs]
        means[key] = statistics.geometric_mean(ratios) if len(ratios) == len(row[key]["values"]) else None
    mean = means["parallel_time"]
    return {"mean": mean, "within": None if mean is None else mean <= WITHIN, "costs": means}


def verdicts(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each condition and each policy without a fixed lambda: did it come within 5 % of the best one?

    A policy has a verdict once all its seeds and the whole sweep have been run.
    """
    sentences = []
    for table in tables:
        seeds = len(table["seeds"])
        for row in table["rows"]:
            if row["fixed_lambda"] is not None or row["runs"] < seeds or table["best_fixed"] is None:
                continue
            text = _against(row, table["best_fixed"], row["against_best_fixed"], seeds)
            if row["against_best_of_all"] is not None and row["against_best_of_all"]["mean"] is not None:
                wider = row["against_best_of_all"]["mean"]
                text += f"; {wider:.2f} times that of {table['best_of_all']}, which is not in the sweep"
            sentences.append(f"{table['title']}: {row['label']} {text}")
    return sentences


def _against(row: Mapping[str, Any], best: str, against: Mapping[str, Any], seeds: int) -> str:
    ratio = against["mean"]
    if ratio is None:
        return f"reached the target in {row['reached']} of {seeds} seeds"
    if row["max_local_epochs"] is not None:
        costs = against["costs"]
        return (
            f"{ratio:.2f} times the time, {costs['update_requests']:.2f} times the update requests, "
            f"{costs['energy_active']:.2f} times the active energy of {best}"
        )
    word = "better" if ratio <= 1 / WITHIN else "within 5 %" if ratio <= WITHIN else "NOT within 5 %"
    return f"{ratio:.2f} times the time of the best fixed ({best}): {word}"
