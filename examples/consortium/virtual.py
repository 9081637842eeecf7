"""The same consortium in virtual time, with many seeds: the controller of the core, lines that are cut, no processes.

    python examples/consortium/virtual.py --seeds 1000 --workers 2
    python examples/consortium/virtual.py --seeds 20 --train

Who is cut off trains on and hands in when the line is back. Without --train there are no weights, only time. Cuts come
from the same seeds as those of processes.py; times of batches vary by a tenth.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from case import BATCH, FAULTS, HOUR, PACES, POLICIES, SHORTER, TARGET, median, table

from metis.core.controller import Controller
from metis.core.costs import CostLedger
from metis.core.events import (
    CommunityPublished,
    LearnerJoined,
    SendTask,
    UpdateCommitted,
    UpdateRefused,
    UpdateRequest,
)
from metis.core.model import Model
from metis.core.solvers import Solver
from metis.core.stop import StopRule
from metis.experiments.compose import policy_and_solver
from metis.experiments.config.load import load_config
from metis.experiments.deploy import deployed
from metis.experiments.site import load_site
from metis.learning.engine import ENGINES, Engine, EngineJob
from metis.learning.learner import Learner
from metis.simulation.loop import ScheduledEvent, play
from metis.simulation.speed import Speed

HERE = Path(__file__).resolve().parent
EXCHANGE = 30 / 3600 * HOUR  # of the model, each way: half a minute
RECONNECTING = 10 / 3600 * HOUR  # after all connections were reset
JITTER = 0.1  # standard deviation of the logarithm of a batch's time


class Line:
    """When one site can be reached."""

    def __init__(self, seed: int, site: str) -> None:
        self._cuts = self._spans(seed, site)
        self._known: list[tuple[float, float]] = []
        self._first = FAULTS.first_reset(seed)

    def _spans(self, seed: int, site: str) -> Iterator[tuple[float, float]]:
        now = 0.0
        for well, _ in FAULTS.cuts(seed, site):
            yield now + well, now + well + FAULTS.cut
            now += well + FAULTS.cut

    def through(self, at: float) -> float:
        """When something passes that is sent now."""
        while not self._known or self._known[-1][0] <= at:
            self._known.append(next(self._cuts))
        for begins, ends in reversed(self._known):
            if begins <= at < ends:
                return ends
        since = (at - self._first) % FAULTS.reset if at >= self._first else math.inf
        return at + RECONNECTING - since if since < RECONNECTING else at

    def cuts(self, until: float) -> int:
        self.through(until)
        return sum(1 for _ in takewhile(lambda span: span[0] < until, self._known))


class Site:
    """One hospital: how long a task takes it, and what comes of it."""

    def __init__(self, name: str, seed: int, train: Callable[[SendTask, int], Model]) -> None:
        self.name, self.line = name, Line(seed, name)
        self._speed = Speed(PACES[name], JITTER)
        self._draw = np.random.default_rng([seed, *name.encode()])
        self._train = train

    def work(self, action: SendTask, now: float) -> ScheduledEvent:
        task = action.task
        begins = self.line.through(now) + EXCHANGE
        # A task that could not be sent at once is sent later, for what is left of its time.
        left = max(0.0, task.budget.seconds - (begins - EXCHANGE - now))
        spent = self._speed.spend(replace(task.budget, seconds=left), begins, self._draw)
        arrives = self.line.through(begins + spent.seconds) + EXCHANGE
        local_model = self._train(action, spent.steps)
        update = UpdateRequest(
            self.name, task.number, spent.steps, spent.seconds, spent.time_per_batch, local_model
        )  # fmt: skip
        return ScheduledEvent(arrives, update)


def run(policy: str, seed: int, rounds: int, train: bool = False) -> dict[str, Any]:
    """One federation; `train` with real weights."""
    config = load_config(HERE / "federation.toml")
    (table_of,) = [each for each in deployed(config).policy if each.name == policy]
    chosen, solver = policy_and_solver(table_of)
    engine, examples, test = _hospitals()
    learners = _learners(seed, solver)

    def trained(action: SendTask, steps: int) -> Model:
        learner = learners[action.learner]
        return learner.train(engine, action.community_model, action.task.number, steps).model if train else initial

    sites = {name: Site(name, seed, trained) for name in PACES}
    initial = engine.initial_model(seed) if train else Model.empty()
    controller = Controller(chosen, initial, stop=StopRule(rounds=rounds), learners_expected=len(sites))
    ledger = CostLedger({}, 0, chosen.fills_the_period)
    joins = [ScheduledEvent(0.0, LearnerJoined(name, len(examples[name]), BATCH)) for name in sites]
    now, committed, late, reached = 0.0, 0, 0, None
    for now, item in play(controller, joins, lambda action, at: sites[action.learner].work(action, at)):
        ledger.record(now, item)
        committed += isinstance(item, UpdateCommitted)
        late += isinstance(item, UpdateRefused)
        if train and reached is None and isinstance(item, CommunityPublished):
            accuracy = engine.evaluate(item.community_model, test)["accuracy"]
            reached = now if accuracy >= TARGET else None
    costs = ledger.costs(now)
    return {
        "seed": seed,
        "policy": policy,
        "rounds": controller.community.stamp.version,
        "seconds": now,
        "idle": costs.idle_time / (now * len(sites)),
        "transfer": costs.transfer_time / (now * len(sites)),
        "committed": committed,
        "late": late,
        "cuts": sum(site.line.cuts(now) for site in sites.values()),
        "to_target": reached,
    }


# --- what the hospitals have: site.py, loaded once a process ------------------------------------------


@functools.cache
def _hospitals() -> tuple[Engine, dict[str, Any], Any]:
    """The engine, the training examples of each, and the test examples."""
    site = load_site(HERE / "site.py")
    assert site.test_data is not None
    engine = ENGINES.named("hospital")(EngineJob())
    return engine, {name: site.training_data(name) for name in PACES}, site.test_data()


def _learners(seed: int, solver: Solver) -> dict[str, Learner]:
    _, examples, _ = _hospitals()
    return {
        name: Learner(name, index, own, np.arange(len(own)), BATCH, solver, seed)
        for index, (name, own) in enumerate(examples.items())
    }


# --- many seeds ---------------------------------------------------------------------------------------


def _job(job: tuple[str, int, int, bool]) -> dict[str, Any]:
    return run(*job)


def shown(results: list[dict[str, Any]], rounds: int) -> str:
    """A row a policy: medians, and the worst of what must not be bad in any seed."""
    rows = []
    for policy, label in POLICIES.items():
        runs = [result for result in results if result["policy"] == policy]
        reached = [result["to_target"] for result in runs if result["to_target"] is not None]
        times, idle = [result["seconds"] for result in runs], [result["idle"] for result in runs]
        updates = sum(result["committed"] + result["late"] for result in runs)
        rows.append(
            [
                label,
                f"{sum(result['rounds'] >= rounds * SHORTER.get(policy, 1) for result in runs)} of {len(runs)}",
                f"{median(times) / HOUR:.1f} h ({min(times) / HOUR:.1f} to {max(times) / HOUR:.1f})",
                f"{median(reached) / HOUR:.1f} h ({len(reached)} of {len(runs)})" if reached else "-",
                f"{median(idle):.1%}, at most {max(idle):.1%}",
                f"{sum(result['cuts'] for result in runs):,}",
                f"{updates:,}",
                f"{sum(result['late'] for result in runs) / updates:.1%}",
            ]
        )
    head = ["policy", "runs complete", "time", f"to accuracy {TARGET}", "idle", "cuts", "updates", "of these late"]
    return table(head, rows)


def ratios(results: list[dict[str, Any]]) -> str:
    """How much longer waiting for everybody takes, seed by seed."""
    lines = []
    sync, *others = POLICIES
    for key, words in (("seconds", "the same rounds"), ("to_target", f"accuracy {TARGET}")):
        taken = {(result["policy"], result["seed"]): result[key] for result in results}
        for other in others:
            if key == "seconds" and other in SHORTER:
                continue
            seeds = sorted({seed for _, seed in taken if taken.get((sync, seed)) and taken.get((other, seed))})
            factors = [taken[sync, seed] / taken[other, seed] for seed in seeds]
            if factors:
                spread = f"{min(factors):.1f} to {max(factors):.1f} over {len(factors)} seeds"
                longer = f"Sync takes {median(factors):.1f} times as long as {POLICIES[other]}"
                lines.append(f"{words}: {longer} ({spread})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Eight hospitals in virtual time, over lines that are cut.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many, from 1 on")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--train", action="store_true", help="with real weights, for the time to an accuracy")
    parser.add_argument("--out", type=Path, help="also write all results to this file, a JSON object a line")
    chosen = parser.parse_args()
    jobs = [
        (policy, seed, chosen.rounds * SHORTER.get(policy, 1), chosen.train)
        for seed in range(1, chosen.seeds + 1)
        for policy in POLICIES
    ]  # fmt: skip
    with multiprocessing.Pool(chosen.workers) as pool:
        results = list(pool.imap(_job, jobs, chunksize=8))
    if chosen.out is not None:
        chosen.out.write_text("".join(json.dumps(result) + "\n" for result in results), encoding="utf-8")
    print(shown(results, chosen.rounds))
    print(ratios(results))
    if any(result["rounds"] < chosen.rounds * SHORTER.get(result["policy"], 1) for result in results):
        sys.exit("a run is not complete")


if __name__ == "__main__":
    main()
