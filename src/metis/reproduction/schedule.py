"""The schedule of a cell, known without training anything: the real controller and simulator, no weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from metis.core.controller import Controller
from metis.core.costs import Costs
from metis.core.events import Action, CommunityPublished, Event, SendTask, UpdateRequest
from metis.core.model import Model
from metis.core.stop import StopRule, Target
from metis.experiments.build import build_stop
from metis.experiments.compose import build_policy
from metis.experiments.config.load import METRICS, ExperimentConfig, task_of
from metis.experiments.data import Assignment, dry_assignments
from metis.experiments.learners import build_availability, build_link, build_power, build_speed
from metis.reproduction.environments import Cell
from metis.runs.run import Run
from metis.runs.setting import LearnerInfo, Setting


def dry_run(
    config: ExperimentConfig, stop: StopRule | None = None, assignments: Sequence[Assignment] | None = None
) -> Run:
    """Simulate the file's first policy without training: times, steps and requests are those of a real run."""
    from metis.simulation.pools.dry import DryPool
    from metis.simulation.simulator import Machine, Simulator, present_at_start

    policy = build_policy(config.policy[0])
    assignments = dry_assignments(config) if assignments is None else assignments
    if stop is None:
        stop = replace(build_stop(config), target=None)
    metric = config.evaluation.metric or "accuracy"
    higher = METRICS[task_of(config)][metric]
    target = config.evaluation.target
    learners = [
        LearnerInfo(
            assignment.name,
            len(assignment.indices),
            assignment.group.batch_size,
            build_speed(assignment.group, assignment.name).time_per_batch,
            build_power(assignment.group),
        )
        for assignment in assignments
    ]
    setting = Setting.of(
        policy,
        Model.empty(),
        learners,
        seed=config.seed,
        metric=metric,
        higher_is_better=higher,
        target=None if target is None else Target(metric, target, higher),
        facts={"dataset": config.data.dataset},
    )
    events: list[tuple[float, Event | Action]] = []
    machines = [
        Machine(
            assignment.name,
            len(assignment.indices),
            assignment.group.batch_size,
            build_speed(assignment.group, assignment.name),
            build_availability(assignment.group, assignment.name),
            build_link(assignment.group),
        )
        for assignment in assignments
    ]
    expected = present_at_start(machines, config.seed)
    simulator = Simulator(
        Controller(policy, Model.empty(), stop=stop, learners_expected=expected),
        machines,
        DryPool(),
        lambda now, item: events.append((now, item)),
        seed=config.seed,
        evaluate=False,
        model_bytes=0,
    )
    simulator.run(lambda: None, lambda: None)
    if not simulator.finished:
        raise KeyboardInterrupt
    return Run(setting, events, Model.empty(), 0.0)


@dataclass(frozen=True)
class RoundCosts:
    """What one round costs."""

    steps: int
    update_requests: int
    seconds: float


@dataclass(frozen=True)
class CellSchedule:
    """A cell's schedule up to the published number of rounds, or of update requests if it has no rounds."""

    cell: Cell
    rounds: int | None  # None for asynchronous policies
    batches: dict[str, int]  # in an epoch, by learner
    tasks: dict[str, int]  # steps in a task, by learner: B_k of Eq. 5, or epochs times batches
    first: RoundCosts | None  # the cold start of SemiSync
    each: RoundCosts | None
    run: Run

    @property
    def iterations(self) -> int:
        return self.run.costs.steps

    def by_equation(self) -> dict[str, float] | None:
        """PT = R t_max and EC_semi = R t_max sum eps_k, which charge the cold start a whole period as well.

        Everywhere else it is charged its own length. None for policies without a period.
        """
        if self.first is None or self.each is None or self.rounds is None:
            return None
        time = self.rounds * self.each.seconds
        draw = sum(learner.power.active for learner in self.run.setting.learners)
        return {"parallel_time": time, "energy": time * draw}

    def to_json(self) -> dict[str, Any]:
        costs, published = self.run.costs, self.cell.published
        fast, slow = split_steps(self.run)
        return {
            "environment": self.cell.environment.name,
            "policy": self.cell.label,
            "rounds": self.rounds,
            "batches_per_epoch": self.batches,
            "steps_per_task": self.tasks,
            "cold_start": None if self.first is None else asdict(self.first),
            "round": None if self.each is None else asdict(self.each),
            "iterations": costs.steps,
            "fast": fast,
            "slow": slow,
            "update_requests": costs.update_requests,
            "parallel_time": costs.parallel_time,
            "cumulative_time": costs.cumulative_time,
            "energy": costs.to_json()["energy"],
            "equation": self.by_equation(),
            "published": None if published is None else published.model_dump(exclude_none=True),
        }


_KNOWN: dict[tuple[str, int | None], CellSchedule] = {}  # claims ask for the same schedules many times


def schedule_cell(cell: Cell, rounds: int | None = None) -> CellSchedule:
    """Schedule a cell for `rounds`, or as long as the paper's run took: R = CC / learners, else U = CC."""
    key = json.dumps([cell.name, cell.config.to_dict()], sort_keys=True, default=str), rounds
    if key not in _KNOWN:
        _KNOWN[key] = _schedule(cell, rounds)
    return _KNOWN[key]


def _schedule(cell: Cell, rounds: int | None) -> CellSchedule:
    config = cell.config
    assignments = dry_assignments(config)
    learners, published = len(assignments), cell.published
    cost = None if published is None else published.communication_cost
    has_rounds = build_policy(cell.policy).protocol.has_rounds
    if has_rounds:
        if rounds is None and cost is not None:
            rounds = cost // learners
        stop = None if rounds is None else StopRule(rounds=rounds)
    else:
        requests = rounds * learners if rounds is not None else cost
        stop = None if requests is None else StopRule(update_requests=requests)
    run = dry_run(config, stop, assignments)
    sent: dict[str, list[int]] = {assignment.name: [] for assignment in assignments}
    for _, item in run.events:
        if isinstance(item, SendTask) and item.task.budget.steps is not None:
            sent[item.learner].append(item.task.budget.steps)
    made = rounds_of(run) if has_rounds else []
    cold_start = cell.policy.name == "semisync_fedavg"
    return CellSchedule(
        cell,
        run.rounds if has_rounds else None,
        {assignment.name: -(-len(assignment.indices) // assignment.group.batch_size) for assignment in assignments},
        {name: steps[-1] for name, steps in sent.items() if steps},
        made[0] if made and cold_start else None,
        made[-1] if made and (len(made) > 1 or not cold_start) else None,
        run,
    )


_PLANNED: dict[str, int] = {}  # the same for every seed and solver


def planned_steps(cell: Cell) -> int:
    """Local steps of a run to its end, if it does not reach the target sooner."""
    content = cell.config.to_dict()
    tables = [content[name] for name in ("stop", "learners", "partition", "data")]
    policy = [cell.policy.name, cell.policy.parameters, cell.only, cell.role]
    key = json.dumps([tables, policy], sort_keys=True, default=str)
    if key not in _PLANNED:
        assignments = dry_assignments(cell.config)
        if cell.only is not None:
            assignments = assignments[cell.only : cell.only + 1]
        _PLANNED[key] = dry_run(cell.config, assignments=assignments).costs.steps
    return _PLANNED[key]


def rounds_of(run: Run) -> list[RoundCosts]:
    """Steps, requests and time of each community model that was mixed from updates."""
    made: list[RoundCosts] = []
    steps = requests = 0
    since = 0.0
    for now, item in run.events:
        if isinstance(item, UpdateRequest):
            steps, requests = steps + item.steps, requests + 1
        elif isinstance(item, CommunityPublished) and requests:
            made.append(RoundCosts(steps, requests, now - since))
            steps, requests, since = 0, 0, now
    return made


def split_steps(run: Run, costs: Costs | None = None) -> tuple[int, int]:
    """Steps of the fast learners, with the shortest time per batch, and of the slow ones; by default at the end."""
    costs = run.costs if costs is None else costs
    fast = _fast_learners(run)
    fast_steps = sum(learner.steps for name, learner in costs.by_learner.items() if name in fast)
    return fast_steps, costs.steps - fast_steps


def slow_update_requests(run: Run, costs: Costs) -> int:
    """Those of the learners that do not have the shortest time per batch."""
    fast = _fast_learners(run)
    return sum(learner.update_requests for name, learner in costs.by_learner.items() if name not in fast)


def _fast_learners(run: Run) -> set[str]:
    shortest = min(learner.time_per_batch for learner in run.setting.learners)
    return {learner.name for learner in run.setting.learners if learner.time_per_batch == shortest}
