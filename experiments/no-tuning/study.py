"""How `semisync` does without parameters, against the best lambda in hindsight and against other policies.

    METIS_DATA=... python experiments/no-tuning/study.py targets     # Sync alone, which fixes the targets
    METIS_DATA=... python experiments/no-tuning/study.py run         # everybody until the target; what is there is kept
    python experiments/no-tuning/study.py table                      # what is there, as Markdown

The target of a condition is fixed before anything else is run: 0.96 times (of an error: 1.04 times) what the better of
Sync with 1 and with 4 local epochs has at the end, the mean of its last three models, over three seeds. The end is 30
rounds of Sync with one epoch (in some conditions fewer). A run then lasts until its first model that reaches the
target; all are measured at the same moments, at most 3,000 in a run.

So that it takes an hour and not a day: a lambda is given up for a seed after 2.5 times the time of the best lambda of
that seed so far, another contender after 6 times the best of all, and on CIFAR-10 everybody after 2.5 times the best of
all (`given_up`: it took longer than `seconds`); and from the third seed on, only lambdas are run that were within 1.35
times the best in the first two.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from conditions import BY_NAME, CONDITIONS, Condition, horizon, longest_exchange, slowest_epoch
from fedcompass import fedcompass
from fedqueue import fedqueue

import metis
from metis.core.stop import StopRule, Target

HERE = Path(__file__).resolve().parent
TARGETS, RESULTS = HERE / "targets.json", HERE / "results.jsonl"
SHARE = 0.96  # of what the better Sync has at the end
LAMBDAS = (0.25, 0.1, 0.5, 0.05, 1.0, 2.0, 4.0)
MOMENTUM = metis.FedAvgM(momentum=0.5)
FIRST_SEED = 1990
RULE = "semisync"


def contenders(federation: metis.Federation) -> dict[str, metis.Policy]:
    """Everybody by name; what a contender needs to know about a condition, it is told."""
    epoch, exchanged = slowest_epoch(federation), longest_exchange(federation)
    sync_seconds = max(0.25 * epoch, 4 * exchanged)
    adaptive = metis.semisync_fedavg(timings="smoothed").with_layers(metis.AdaptivePeriod())
    fixed = {f"lambda {size:g}": metis.semisync_fedavg(size) for size in LAMBDAS}
    return {
        RULE: metis.semisync(),
        **{f"{name}, momentum": policy.with_layers(MOMENTUM) for name, policy in fixed.items()},
        **fixed,
        "adaptive": adaptive,
        "adaptive, momentum": adaptive.with_layers(MOMENTUM),
        "sync 1": metis.sync_fedavg(1),
        "sync 4": metis.sync_fedavg(4),
        "fedrec": metis.fedrec(1),
        "async": metis.async_fedavg(1),
        "fedbuff": metis.fedbuff(1),
        "fedcompass 20-100": fedcompass(),
        "fedcompass 4-20": fedcompass(4, 20),
        "fedqueue": fedqueue(sync_seconds),
        "fedqueue, own rates": fedqueue(sync_seconds, equalize=False),
        "semisync, no momentum": metis.semisync().with_layers(metis.FedAvgM(momentum=0.0)),
        "semisync, fedexp": metis.semisync().with_layers(metis.Differences(extrapolation="fedexp")),
    }


def family(name: str) -> str:
    """Lambdas with and without momentum are compared among themselves."""
    return "lambda, momentum" if name.startswith("lambda") and name.endswith("momentum") else name.partition(" ")[0]


def seeds(condition: Condition) -> range:
    return range(FIRST_SEED, FIRST_SEED + condition.seeds)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# --- targets ----------------------------------------------------------------------------------------


def fix_targets(chosen: Sequence[Condition]) -> None:
    known = json.loads(TARGETS.read_text("utf-8")) if TARGETS.exists() else {}
    for condition in chosen:
        if condition.name in known:
            continue
        began = time.process_time()
        finals: dict[str, list[float]] = {"sync 1": [], "sync 4": []}
        for seed in seeds(condition)[:3]:
            federation = condition.federation(seed)
            end = horizon(condition, federation)
            for name, epochs in (("sync 1", 1), ("sync 4", 4)):
                run = federation.simulate(
                    metis.sync_fedavg(epochs), seconds=end, evaluate_every=end / condition.evaluations, progress=False
                )
                finals[name].append(statistics.mean(row.metrics[federation.metric] for row in run.history[-3:]))
        higher = federation.higher_is_better
        means = [statistics.mean(values) for values in finals.values()]
        target = SHARE * max(means) if higher else (2 - SHARE) * min(means)
        known[condition.name] = {
            "metric": federation.metric,
            "higher_is_better": higher,
            "target": round(target, 4),
            "final": {name: [round(value, 4) for value in values] for name, values in finals.items()},
        }
        TARGETS.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
        took = time.process_time() - began
        say(f"{condition.name}: {federation.metric} {target:.4f} from {means}, {took:.0f} s")


# --- runs -------------------------------------------------------------------------------------------


def results() -> list[dict[str, Any]]:
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    return [json.loads(line) for line in lines]


def run_one(condition: Condition, name: str, seed: int, target: dict[str, Any], limit: float) -> dict[str, Any]:
    federation = condition.federation(seed)
    end = horizon(condition, federation)
    goal = Target(target["metric"], target["target"], target["higher_is_better"])
    began = time.process_time()
    run = federation.simulate(
        contenders(federation)[name],
        StopRule(seconds=min(end, limit), target=goal),
        evaluate_every=end / condition.evaluations,
        progress=False,
    )
    reached = run.costs_at_target
    costs = reached or run.costs
    return {
        "condition": condition.name,
        "contender": name,
        "seed": seed,
        "seconds": round(costs.parallel_time, 6),
        "given_up": reached is None,
        "requests": costs.update_requests,
        "bytes": costs.bytes_exchanged,
        "energy": round(costs.energy.equation, 3),
        "steps": costs.steps,
        "processor": round(time.process_time() - began, 2),
    }


def run_all(chosen: Sequence[Condition], only: Sequence[str], up_to: int) -> None:
    targets = json.loads(TARGETS.read_text("utf-8"))
    done = results()
    known = {(row["condition"], row["contender"], row["seed"]) for row in done}
    for condition, seed in order([one for one in chosen if one.name in targets], up_to):
        names = list(contenders(condition.federation(seed)))
        for name in [name for name in names if not only or name in only or family(name) in only]:
            if (condition.name, name, seed) in known or hopeless(done, condition.name, name, seed):
                continue
            row = run_one(condition, name, seed, targets[condition.name], limit(done, condition.name, name, seed))
            done.append(row)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        say(f"{condition.name} {seed} {time.process_time():.0f} s")


def order(chosen: Sequence[Condition], up_to: int) -> Iterator[tuple[Condition, int]]:
    """Two seeds of every condition, the fresh ones first, then the others."""
    for first, last in ((0, 2), (2, 3), (3, up_to)):
        for condition in sorted(chosen, key=lambda one: (one.seeds, one.fresh), reverse=True):
            for seed in seeds(condition)[first : min(last, up_to)]:
                yield condition, seed


def limit(done: Sequence[dict[str, Any]], condition: str, name: str, seed: int) -> float:
    """When this contender is given up; never, for the rule."""
    if name == RULE:
        return math.inf
    large = BY_NAME[condition].seeds < 5
    own, alike = family(name), name.startswith("lambda") and not large
    times = [
        row["seconds"]
        for row in done
        if (row["condition"], row["seed"]) == (condition, seed)
        and not row["given_up"]
        and (not alike or family(row["contender"]) == own)
    ]
    return (2.5 if alike or large else 6) * min(times, default=math.inf)


def hopeless(done: Sequence[dict[str, Any]], condition: str, name: str, seed: int) -> bool:
    """Whether this lambda was far from the best in the first two seeds."""
    if not name.startswith("lambda") or seed < FIRST_SEED + 2:
        return False
    early = [row for row in done if row["condition"] == condition and row["seed"] < FIRST_SEED + 2]
    own: dict[str, list[float]] = {}
    for row in early:
        if family(row["contender"]) == family(name):
            own.setdefault(row["contender"], []).append(row["seconds"])
    means = {one: statistics.geometric_mean(times) for one, times in own.items()}
    return name in means and means[name] > 1.35 * min(means.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="The study of semisync without parameters.")
    parser.add_argument("what", choices=["targets", "run", "table"])
    parser.add_argument("--condition", action="append", choices=list(BY_NAME), help="only this; may be repeated")
    parser.add_argument("--contender", action="append", default=[], help="only this, or this family; may be repeated")
    parser.add_argument("--seeds", type=int, default=5, help="at most so many")
    chosen = parser.parse_args()
    conditions = [BY_NAME[name] for name in chosen.condition] if chosen.condition else list(CONDITIONS)
    torch.set_num_threads(1)
    if chosen.what == "targets":
        fix_targets(conditions)
    elif chosen.what == "run":
        run_all(conditions, chosen.contender, chosen.seeds)
    else:
        from evaluation import tables

        say(tables(results(), json.loads(TARGETS.read_text("utf-8"))))


if __name__ == "__main__":
    main()
