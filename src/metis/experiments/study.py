"""Studies of our own: what is beyond the paper against the paper's policies, over several seeds.

A study is a folder of files like those of the paper's experiments, with a table [study] instead of [paper]. Each
policy of each file is run once for each seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from metis.core.costs import Costs
from metis.errors import ConfigError
from metis.experiments.cells import Cell, Environment, Paper, Scale, checked, environments_folder, merged
from metis.experiments.config import Table, read_toml, resolve_config
from metis.runs import Run

STUDIES: dict[str, str] = {
    "adaptive": "Beyond the paper: adaptive periods and FedNova against the best fixed lambda, three seeds"
}
WITHIN = 1.05  # times the best fixed lambda's time counts as having found it

COSTS: dict[str, Callable[[Costs], float]] = {
    "parallel_time": lambda costs: costs.parallel_time,
    "update_requests": lambda costs: float(costs.update_requests),
    "energy_equation": lambda costs: costs.energy.equation,
    "energy_active": lambda costs: costs.energy.active,
    "energy_idle_charged": lambda costs: costs.energy.idle_charged,
}


class Study(Table):
    """What a file of a study is about."""

    title: str
    distribution: str
    seeds: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    note: str


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
        content = merged(content, small) if scale == "small" else content
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
    """One row a policy: what the target cost in each seed, and how that compares with the best fixed lambda."""
    first = condition.environments[0]
    rows: list[dict[str, Any]] = []
    for place, cell in enumerate(first.cells):
        own = [runs.get(environment.cells[place].name) for environment in condition.environments]
        costs = [None if run is None else run.costs_at_target for run in own]
        rows.append(
            {
                "label": cell.label,
                "fixed_lambda": cell.policy.parameters.get("slowest_learner_epochs") if _plain(cell) else None,
                "runs": sum(run is not None for run in own),
                "reached": sum(found is not None for found in costs),
                **{key: spread([None if c is None else cost(c) for c in costs]) for key, cost in COSTS.items()},
                "best": [None if run is None else run.best_metric for run in own],
            }
        )
    fixed = [row for row in rows if row["fixed_lambda"] is not None and row["parallel_time"]["mean"] is not None]
    best = min(fixed, key=lambda row: row["parallel_time"]["mean"], default=None)
    for row in rows:
        row["against_best_fixed"] = None if best is None else _paired(row, best)
    return {
        "condition": condition.name,
        "title": condition.study.title,
        "note": condition.study.note,
        "seeds": condition.study.seeds,
        "metric": first.config.evaluation.metric,
        "target": first.config.evaluation.target,
        "best_fixed": None if best is None else best["label"],
        "rows": rows,
    }


def _plain(cell: Cell) -> bool:
    """Whether nothing is put on top of a fixed lambda."""
    return cell.policy.nova is None and cell.policy.adaptive is None and cell.policy.server is None


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and sample deviation over the seeds; both None where not every seed reached the target."""
    known = [value for value in values if value is not None]
    whole = len(known) == len(values) and bool(known)
    return {
        "mean": statistics.mean(known) if whole else None,
        "deviation": statistics.stdev(known) if whole and len(known) > 1 else None,
        "values": list(values),
    }


def _paired(row: Mapping[str, Any], best: Mapping[str, Any]) -> dict[str, Any]:
    """This policy's time over that of the best fixed lambda, seed by seed."""
    pairs = zip(row["parallel_time"]["values"], best["parallel_time"]["values"], strict=True)
    ratios = [mine / theirs for mine, theirs in pairs if mine is not None and theirs]
    whole = len(ratios) == len(row["parallel_time"]["values"])
    mean = statistics.geometric_mean(ratios) if whole and ratios else None
    return {"ratios": ratios, "mean": mean, "within": None if mean is None else mean <= WITHIN}


def verdicts(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence a condition and policy that is not a fixed lambda: did it come within 5 % of the best one?"""
    told = []
    for table in tables:
        for row in table["rows"]:
            if row["fixed_lambda"] is not None or table["best_fixed"] is None:
                continue
            against = row["against_best_fixed"]["mean"]
            if against is None:
                text = f"reached the target in {row['reached']} of {len(table['seeds'])} seeds"
            else:
                word = "within 5 %" if against <= WITHIN else "NOT within 5 %"
                text = f"{against:.2f} times the time of the best fixed ({table['best_fixed']}): {word}"
                text = text if against > 1 / WITHIN else text.replace(word, "better")
            told.append(f"{table['title']}: {row['label']} {text}")
    return told
