"""The tables of the paper from finished runs, published numbers next to ours, as plain values for any report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from metis.core.costs import Costs
from metis.core.events import CommunityPublished, SendTask, UpdateRequest
from metis.reproduction.environments import Cell, Environment, Scale
from metis.reproduction.schedule import CellSchedule, schedule_cell, split_steps
from metis.runs.run import Run

# What can be asked for, in the order of the paper.
RESULTS: dict[str, str] = {
    "table1": "Characteristics of the communication protocols",
    "table2": "CIFAR-10 on a homogeneous cluster: costs until the target accuracy",
    "table3": "CIFAR-10 on a heterogeneous cluster: costs until the target accuracy",
    "figure2": "Active and idle time, 5 fast and 5 slow learners",
    "figure4": "Time to compute the community model, with and without the cache",
    "figure5": "Distributions of the data: CIFAR-10, CIFAR-100, ExtendedMNIST",
    "figure6": "Distributions of the data: BrainAge",
    "figure7": "CIFAR-10 on a homogeneous cluster",
    "figure8": "CIFAR-10 on a heterogeneous cluster",
    "figure9": "CIFAR-100 on a heterogeneous cluster",
    "figure10": "ExtendedMNIST on a heterogeneous cluster",
    "figure11": "BrainAge on a homogeneous cluster",
    "figure12": "BrainAge: each silo alone, the federation, and the centralized model",
}

ENERGIES = ("equation", "active", "idle_charged")
SYNC, ASYNC, SEMISYNC = PROTOCOLS = ("Synchronous", "Asynchronous", "Semi-Synchronous")
# Table 1 of the paper: processing time, communication, energy, idle-free, stale-free.
PUBLISHED_CHARACTERISTICS: dict[str, tuple[str, str, str, bool, bool]] = {
    "Synchronous": ("high", "low", "high", False, True),
    "Asynchronous": ("low", "high", "medium", True, False),
    "Semi-Synchronous": ("low", "low", "low", True, True),
}
IDLE_FREE = 0.01  # of all learners' time after the first round
FREE_RULES = {
    "idle_free": f"less than {IDLE_FREE:.0%} of the time after the first round is idle",
    "stale_free": "no community model is published between a task and the arrival of its update",
}
COSTS_RULE = (
    "In each environment the cost of a protocol is that of its cheapest policy that reached the target, divided by "
    "that of the cheapest protocol, in the geometric mean over the environments. "
    f"Idle-free: {FREE_RULES['idle_free']}. Stale-free: {FREE_RULES['stale_free']}."
)


@dataclass(frozen=True)
class MixingTime:
    """How long one community model takes to compute (Figure 4)."""

    network: str
    parameters: int
    learners: int
    cached: float  # seconds
    full_pass: float


@dataclass
class Evidence:
    """The runs that tables, figures and claims are made from."""

    scale: Scale
    environments: dict[str, Environment]
    runs: dict[str, Run]  # by the name of the cell
    mixing_times: list[MixingTime] = field(default_factory=list)

    def of(self, *results: str) -> list[Environment]:
        """The environments of these results, one result after the other."""
        return [
            environment
            for result in results
            for environment in self.environments.values()
            if result in environment.paper.results
        ]

    def cells(self, environment: Environment) -> list[tuple[Cell, Run]]:
        """The policies of an environment that were run."""
        return [(cell, self.runs[cell.name]) for cell in environment.cells if cell.name in self.runs]

    def seeds(self, cell: Cell) -> dict[int, Run]:
        """The runs of a policy, or of a reference, by their seeds."""
        found = {}
        for environment in cell.environment.seeded():
            of_role = {"policy": environment.cells, "centralized": environment.centralized, "alone": environment.alone}
            for same in of_role[cell.role]:
                if (same.label, same.only) == (cell.label, cell.only) and same.name in self.runs:
                    found[same.config.seed] = self.runs[same.name]
        return found

    def complete(self, environment: Environment) -> bool:
        return all(cell.name in self.runs for cell in environment.cells)

    def cost(self, cell: Cell, name: str) -> float:
        """A cost of a run until the target; infinite if it was not reached."""
        costs = self.runs[cell.name].costs_at_target
        return math.inf if costs is None else COSTS[name](costs)

    def end(self, cell: Cell) -> float:
        """When the budget of a run ended, in seconds."""
        return self.runs[cell.name].costs.parallel_time

    def centralized(self, environment: Environment) -> Run | None:
        return next((self.runs[cell.name] for cell in environment.centralized if cell.name in self.runs), None)

    def alone(self, environment: Environment) -> list[Run]:
        return [self.runs[cell.name] for cell in environment.alone if cell.name in self.runs]


def protocol_of(cell: Cell) -> str:
    """Synchronous, asynchronous or semi-synchronous."""
    names = {"sync_fedavg": SYNC, "semisync_fedavg": SEMISYNC}
    return names.get(cell.policy.name, ASYNC)


def solver_of(cell: Cell) -> str:
    return str(cell.policy.training.solver)


def slowest_learner_epochs(cell: Cell) -> float | None:
    """Lambda, of a semi-synchronous policy."""
    return cell.policy.parameters.get("slowest_learner_epochs")


def distinct_schedules(environment: Environment) -> list[Cell]:
    """One cell for each schedule: the solver does not matter to it."""
    return list({(cell.policy.name, slowest_learner_epochs(cell)): cell for cell in environment.cells}.values())


# --- Tables 2 and 3 ---------------------------------------------------------------------------


def cost_table(environment: Environment, evidence: Evidence) -> dict[str, Any]:
    """One row per policy: costs until the target, the paper's next to ours."""
    cells = evidence.cells(environment)
    rows = [_cost_row(cell, run) for cell, run in cells]
    baseline = next((row for row in rows if row["label"] == "Sync w/ Vanilla" and row["reached"]), None)
    published = next((row["published"] for row in rows if row["label"] == "Sync w/ Vanilla"), None)
    for row in rows:
        row["efficiency"] = {
            kind: quotient(None if baseline is None else baseline["energy"][kind], row["energy"][kind])
            for kind in ENERGIES
        }
        if published and row["published"]:
            row["published"]["efficiency"] = quotient(published.get("energy"), row["published"].get("energy"))
    return {
        "environment": environment.name,
        "title": environment.paper.title,
        "distribution": environment.paper.distribution,
        "note": environment.paper.note,
        "split": len({group.time_per_batch for group in environment.config.learners}) > 1,
        "metric": environment.config.evaluation.metric,
        "target": environment.config.evaluation.target,
        "paper_target": environment.paper_target,
        "rows": rows,
        "missing": [cell.label for cell in environment.cells if cell.name not in evidence.runs],
        "ratios": ratios(environment, evidence),
    }


def _cost_row(cell: Cell, run: Run) -> dict[str, Any]:
    costs = run.costs_at_target
    fast, slow = (None, None) if costs is None else split_steps(run, costs)
    return {
        "label": cell.label,
        "protocol": protocol_of(cell),
        "reached": costs is not None,
        "iterations": None if costs is None else costs.steps,
        "fast": fast,
        "slow": slow,
        "parallel_time": None if costs is None else costs.parallel_time,
        "cumulative_time": None if costs is None else costs.cumulative_time,
        "communication_cost": None if costs is None else costs.update_requests,
        "energy": {kind: None if costs is None else getattr(costs.energy, kind) for kind in ENERGIES},
        "best": run.best_metric,
        "until": run.costs.parallel_time,  # the end of its budget, if the target was not reached
        "wall_seconds": run.wall_seconds,
        "published": None if cell.published is None else cell.published.model_dump(exclude_none=True),
    }


def quotient(above: float | None, below: float | None) -> float | None:
    """None if one of them is missing, or the second is 0."""
    return None if above is None or not below else above / below


def counterparts(environment: Environment) -> list[tuple[Cell, Cell]]:
    """Each semi-synchronous policy with the synchronous one of the same solver, as (sync, semisync)."""
    synchronous = {solver_of(cell): cell for cell in environment.cells if protocol_of(cell) == SYNC}
    return [
        (synchronous[solver_of(cell)], cell)
        for cell in environment.cells
        if protocol_of(cell) == SEMISYNC and solver_of(cell) in synchronous
    ]


def ratios(environment: Environment, evidence: Evidence) -> list[dict[str, Any]]:
    """Sync's cost over that of SemiSync with the same solver: ours, published, and nominal.

    Nominal costs follow from the paper's own numbers of rounds and its nominal times per batch, without training.
    """
    rows = []
    for pair in counterparts(environment):
        ours = [evidence.runs[cell.name].costs_at_target if cell.name in evidence.runs else None for cell in pair]
        nominal = [nominal_schedule(cell) for cell in pair]
        row: dict[str, Any] = {"policy": pair[1].label, "against": pair[0].label}
        for name, cost in COSTS.items():
            # The paper's column EC is active time only in Table 3, and charges Sync's idle time in Table 2.
            column = "energy" if name.startswith("energy") else name
            row[name] = {
                "ours": quotient(*(None if costs is None else cost(costs) for costs in ours)),
                "nominal": quotient(*(None if schedule is None else cost(schedule.run.costs) for schedule in nominal)),
                "published": quotient(*(published_value(cell, column) for cell in pair)),
            }
        rows.append(row)
    return rows


COSTS: dict[str, Callable[[Costs], float]] = {
    "parallel_time": lambda costs: costs.parallel_time,
    "communication_cost": lambda costs: float(costs.update_requests),
    "energy_equation": lambda costs: costs.energy.equation,
    "energy_active": lambda costs: costs.energy.active,
    "energy_idle_charged": lambda costs: costs.energy.idle_charged,
}


def published_value(cell: Cell, key: str) -> float | None:
    value = None if cell.published is None else getattr(cell.published, key)
    return None if value is None else float(value)


def nominal_schedule(cell: Cell) -> CellSchedule | None:
    """The schedule of the paper's own number of rounds; None if it is not published."""
    if cell.published is None or cell.published.communication_cost is None:
        return None
    return schedule_cell(cell)


# --- Table 1 ----------------------------------------------------------------------------------


def characteristics(evidence: Evidence) -> dict[str, Any]:
    """Table 1 from the runs of Table 3, and by the same rule from the paper's own numbers."""
    environments = evidence.of("table1")
    ours = _relative_costs(
        environments,
        lambda cell, name: _measured(evidence, cell, name),
        lambda cell, least, name: _by_seed(evidence, cell, least, name),
    )
    published = _relative_costs(environments, _published_cost, lambda cell, least, name: None)
    rows = []
    for protocol in PROTOCOLS:
        # Who waits and who is behind follows from the schedule, which needs no training.
        runs = [
            schedule_cell(cell, 10).run
            for environment in environments
            for cell in distinct_schedules(environment)
            if protocol_of(cell) == protocol
        ]
        idle = [idle_share(run) for run in runs]
        stale = [staleness(run) for run in runs]
        rows.append(
            {
                "protocol": protocol,
                "published": dict(
                    zip(
                        ("parallel_time", "communication_cost", "energy", "idle_free", "stale_free"),
                        PUBLISHED_CHARACTERISTICS[protocol],
                        strict=True,
                    )
                ),
                "ours": ours[protocol],
                "from_published": published[protocol],
                "idle_share": max(idle, default=None),
                "idle_free": all(share < IDLE_FREE for share in idle) if idle else None,
                "staleness": statistics.mean(stale) if stale else None,
                "stale_free": all(value == 0 for value in stale) if stale else None,
            }
        )
    return {
        "rule": COSTS_RULE,
        "rule_of": FREE_RULES,
        "environments": [environment.name for environment in environments],
        "rows": rows,
    }


@dataclass(frozen=True)
class Cost:
    """Of one run: until the target, or if that was not reached until its end, and then it is a lower bound."""

    value: float
    reached: bool = True


def costs_by_seed(evidence: Evidence, cell: Cell, name: str) -> dict[int, Cost]:
    found = {}
    for seed, run in evidence.seeds(cell).items():
        reached = run.costs_at_target
        value = COSTS[name](run.costs if reached is None else reached)
        if value > 0:
            found[seed] = Cost(value, reached is not None)
    return found


def _measured(evidence: Evidence, cell: Cell, name: str) -> Cost | None:
    """The geometric mean over seeds; None if it was not run. It has reached the target if most seeds have.

    A seed that has not reached the target yet counts if it has already cost more than those that have.
    """
    costs = costs_by_seed(evidence, cell, "energy_active" if name == "energy" else name).values()
    reached = [cost.value for cost in costs if cost.reached]
    values = [cost.value for cost in costs if not cost.reached]
    if reached:
        values = [value for value in values if value > statistics.geometric_mean(reached)]
    if not reached + values:
        return None
    return Cost(statistics.geometric_mean(reached + values), reached=len(reached) > len(values))


def _by_seed(evidence: Evidence, cell: Cell, other: Cell, name: str) -> float | None:
    """A policy's cost over another's, as the geometric mean over the seeds with which both reached the target."""
    name = "energy_active" if name == "energy" else name
    mine, theirs = (
        {seed: cost.value for seed, cost in costs_by_seed(evidence, each, name).items() if cost.reached}
        for each in (cell, other)
    )
    ratios = [mine[seed] / theirs[seed] for seed in mine if seed in theirs]
    return statistics.geometric_mean(ratios) if ratios else None


def _published_cost(cell: Cell, name: str) -> Cost | None:
    """As published, energy by the column EC; energies by each definition from the times of the row."""
    if not name.startswith("energy_"):
        value = published_value(cell, name)
    elif published_value(cell, "energy") is None:
        value = None
    else:
        from metis.reproduction.timings import timed

        value = COSTS[name](schedule_cell(timed(cell, "published")).run.costs)
    return Cost(math.inf, reached=False) if value is None else Cost(value)


CostOf: TypeAlias = Callable[[Cell, str], Cost | None]


def _cheapest(environment: Environment, cost_of: CostOf, name: str) -> dict[str, tuple[Cell, Cost]] | None:
    """Each protocol's cheapest policy, with what it costs or costs at least; None while it is open which that is."""
    found: dict[str, tuple[Cell, Cost]] = {}
    for protocol in PROTOCOLS:
        costs = [(cell, cost_of(cell, name)) for cell in environment.cells if protocol_of(cell) == protocol]
        known = [(cell, cost) for cell, cost in costs if cost is not None]
        if len(known) < len(costs):
            return None
        if known:
            # Of two that cost the same, the one that reached the target.
            found[protocol] = min(known, key=lambda pair: (pair[1].value, not pair[1].reached))
    least = min((cost.value for _, cost in found.values() if cost.reached), default=math.inf)
    return found if all(cost.reached or cost.value >= least for _, cost in found.values()) else None


def cheapest_policies(evidence: Evidence, name: str, *, published: bool = False) -> list[dict[str, Cell]]:
    """For each environment of Table 1 the cheapest policy of each protocol; none while it is open which that is."""
    cost_of: CostOf = _published_cost if published else lambda cell, name: _measured(evidence, cell, name)
    found = [_cheapest(one, cost_of, name) for one in evidence.of("table1")]
    if None in found:
        return []
    return [{protocol: cell for protocol, (cell, _) in one.items()} for one in found if one is not None]


def _relative_costs(
    environments: Sequence[Environment], cost: CostOf, by_seed: Callable[[Cell, Cell, str], float | None]
) -> dict[str, dict[str, Any]]:
    costs_of: dict[str, dict[str, Any]] = {protocol: {} for protocol in PROTOCOLS}
    for name in ("parallel_time", "communication_cost", "energy"):
        relative: dict[str, list[Cost]] = {protocol: [] for protocol in PROTOCOLS}
        cheapest = [_cheapest(environment, cost, name) for environment in environments]
        known = [lowest for lowest in cheapest if lowest is not None]
        for lowest in known if len(known) == len(cheapest) else ():
            cheapest_cell, least = min(lowest.values(), key=lambda pair: pair[1].value)
            for protocol, (cell, spent) in lowest.items():
                paired = by_seed(cell, cheapest_cell, name) if spent.reached else None
                relative[protocol].append(Cost(paired or spent.value / least.value, spent.reached))
        for protocol, costs in relative.items():
            mean = math.exp(statistics.mean(math.log(spent.value) for spent in costs)) if costs else None
            sure = all(spent.reached for spent in costs)
            costs_of[protocol][name] = {"relative": mean if sure else None, "environments": len(costs)}
    return costs_of


def idle_share(run: Run, *, after_first_round: bool = True) -> float:
    """The idle share of all learners' time, by default without the first round."""
    start = next((at for at, item in run.events if isinstance(item, CommunityPublished) and at > 0), 0.0)
    start = start if after_first_round else 0.0
    total = idle = 0.0
    for span in run.spans():
        length = span.end - max(span.start, start)
        if length > 0 and span.kind != "away":
            total += length
            idle += length if span.kind == "idle" else 0.0
    return idle / total if total else 0.0


def staleness(run: Run) -> float:
    """How many versions were published between a task and its update, on average."""
    based_on: dict[str, int] = {}
    version = 0
    behind: list[int] = []
    for _, item in run.events:
        match item:
            case CommunityPublished():
                version = item.stamp.version
            case SendTask():
                based_on[item.learner] = item.task.based_on.version
            case UpdateRequest():
                behind.append(version - based_on[item.learner])
            case _:
                pass
    return statistics.mean(behind) if behind else 0.0


# --- the paper's arithmetic -------------------------------------------------------------------


def arithmetic(environments: Iterable[Environment]) -> list[dict[str, Any]]:
    """The iterations that follow from the schedule and the published rounds, for all Sync and SemiSync rows."""
    rows = []
    for environment in environments:
        for cell in environment.cells:
            published = cell.published
            if published is None or published.iterations is None or protocol_of(cell) == ASYNC:
                continue
            schedule = schedule_cell(cell)
            same = schedule.iterations == published.iterations
            if published.fast is not None:
                same = same and split_steps(schedule.run) == (published.fast, published.slow)
            rows.append(
                {
                    "cell": cell.name,
                    "scheduled": schedule.iterations,
                    "published": published.iterations,
                    "same": same,
                }
            )
    return rows
