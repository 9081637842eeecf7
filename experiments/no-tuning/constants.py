"""Each constant of `semisync` halved and doubled, and the picture of a probe against a cold start.

    METIS_DATA=... python experiments/no-tuning/constants.py run       # adds to constants.json; about a minute
    METIS_DATA=... python experiments/no-tuning/constants.py table
    METIS_DATA=... python experiments/no-tuning/constants.py picture FILE

Times until the target over those of the rule as it is: the geometric mean over eight conditions, and the worst of them.
A target that is missed counts as the longest time of the condition.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from conditions import BY_NAME, hospitals
from study import FIRST_SEED, TARGETS, horizon

import metis
from metis.core.stop import StopRule, Target

HERE = Path(__file__).resolve().parent
KEPT = HERE / "constants.json"
CONDITIONS = (
    "all-equal-3",
    "skewed-5",
    "learners-3",
    "heart-disease",
    "exchange-1s",
    "unstable",
    "extreme",
    "dropping",
)
CHANGES: dict[str, metis.Layer | None] = {
    "as it is": None,
    "probe of 4 batches": metis.Probe(batches=4),
    "a probe waits 1.5 times as long": metis.Probe(patience=1.5),
    "a probe waits 6 times as long": metis.Probe(patience=6.0),
    "4 batches on average": metis.MeasuredPace(batches=4),
    "16 batches on average": metis.MeasuredPace(batches=16),
    "25 % of these batches where models lead apart": metis.MeasuredPace(apart=0.25),
    "all of these batches where models lead apart": metis.MeasuredPace(apart=1.0),
    "most do 1 batch": metis.MeasuredPace(fewest=1),
    "most do 4 batches": metis.MeasuredPace(fewest=4),
    "most are 40 %": metis.MeasuredPace(share=0.4),
    "most are all": metis.MeasuredPace(share=1.0),
    "at least 1 exchange": metis.MeasuredPace(exchanges=1),
    "at least 4 exchanges": metis.MeasuredPace(exchanges=4),
    "at most 2 epochs": metis.MeasuredPace(epochs=2),
    "at most 8 epochs": metis.MeasuredPace(epochs=8),
    "not waited for beyond 1 period": metis.AcceptLate(beyond=1.0),
    "not waited for beyond 3 periods": metis.AcceptLate(beyond=3.0),
    "equalize 0.25": metis.Differences(equalize=0.25),
    "equalize 1": metis.Differences(equalize=1.0),
    "largest factor 2": metis.Differences(largest=2.0),
    "largest factor 8": metis.Differences(largest=8.0),
    "momentum 0.25": metis.FedAvgM(momentum=0.25),
    "momentum 0.75": metis.FedAvgM(momentum=0.75),  # the way to 1 halved
}


def seconds_of(condition: str, layer: metis.Layer | None, target: dict[str, Any]) -> float:
    own = BY_NAME[condition]
    federation = own.federation(FIRST_SEED)
    end = horizon(own, federation)
    policy = metis.semisync() if layer is None else metis.semisync().with_layers(layer)
    goal = Target(target["metric"], target["target"], target["higher_is_better"])
    rule = StopRule(seconds=end, target=goal)
    run = federation.simulate(policy, rule, evaluate_every=end / own.evaluations, progress=False)
    return end if run.costs_at_target is None else run.costs_at_target.parallel_time


def run() -> None:
    targets = json.loads(TARGETS.read_text("utf-8"))
    known = json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else {}
    for change, layer in CHANGES.items():
        for condition in CONDITIONS:
            times = known.setdefault(change, {})
            if condition not in times:
                times[condition] = round(seconds_of(condition, layer, targets[condition]), 3)
        KEPT.write_text(json.dumps(known, indent=1) + "\n", "utf-8")


def table() -> str:
    known = json.loads(KEPT.read_text("utf-8"))
    lines = ["| | time, mean of eight | worst of eight |", "|---|---:|---:|"]
    for change, times in known.items():
        over = {name: times[name] / known["as it is"][name] for name in times}
        worst = max(over, key=lambda name: over[name])
        where = f" ({BY_NAME[worst].title})" if over[worst] > 1 else ""
        lines.append(f"| {change} | {statistics.geometric_mean(over.values()):.2f} | {over[worst]:.2f}{where} |")
    return "\n".join(lines)


def picture(path: Path) -> None:
    """The first three hours of the eight hospitals: a cold start, and a probe."""
    from metis.reporting.figures import draw_timelines

    runs = [
        hospitals(FIRST_SEED).simulate(policy, seconds=5 * 3600, evaluate_every=3600, progress=False)
        for policy in (metis.semisync_fedavg(0.3), metis.semisync())
    ]
    draw_timelines(runs, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Constants of semisync, halved and doubled.")
    parser.add_argument("what", choices=["run", "table", "picture"])
    parser.add_argument("file", type=Path, nargs="?", default=Path("probe.svg"))
    chosen = parser.parse_args()
    if chosen.what == "run":
        run()
    elif chosen.what == "picture":
        picture(chosen.file)
    else:
        sys.stdout.write(table() + "\n")


if __name__ == "__main__":
    main()
