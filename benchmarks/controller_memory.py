"""Memory of the controller while learners exchange models with it, against their number and size.

    python benchmarks/controller_memory.py [--rounds 4] [--policy semisync_fedavg] [--quick] [--out FOLDER]

A controller process and light learners in another one, which make their models up block by block. Semi-synchronous
rounds, so everybody hands in at the same moment. The peak of a round is the kernel's own (VmHWM, set back at the
beginning of each round); its parts are sampled every 10 ms. Idle is the controller that listens and has seen nobody.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from typing import Any

from _bench import Report, arguments, report
from _federation import ControllerUnderTest, LightLearner, Spec, forget_peak, memory_of

PACE = 0.1  # seconds for a batch; an epoch has 10
SIZES = ((10, 10.0), (10, 30.0), (10, 100.0), (30, 10.0), (100, 10.0))  # learners, megabytes


async def watch(controller: ControllerUnderTest) -> list[dict[str, float]]:
    """One row for each round."""
    spec = controller.spec
    learners = [LightLearner(f"learner-{n}", controller.address, spec.layout, pace=PACE) for n in range(spec.learners)]
    running = [asyncio.create_task(learner.run()) for learner in learners]
    rounds: list[dict[str, float]] = []
    version = -1
    while not all(task.done() for task in running):
        newest = max(learner.version for learner in learners)
        if newest > version:
            version = newest
            forget_peak(controller.pid)
            rounds.append({"round": version, "began": time.monotonic(), "rss": 0.0, "anonymous": 0.0, "files": 0.0})
        if rounds:
            now, row = memory_of(controller.pid), rounds[-1]
            row["rss"] = max(row["rss"], now["peak"])
            for part in ("anonymous", "files"):
                row[part] = max(row[part], now[part])
        await asyncio.sleep(0.01)
    for learner in learners:
        assert not learner.failures, learner.failures
    return rounds


def exchange(learners: int, megabytes: float, rounds: int, policy: str, cgroup: str = "") -> dict[str, Any]:
    settings = {"slowest_learner_epochs": 1.0} if policy == "semisync_fedavg" else {"local_epochs": 1}
    with tempfile.TemporaryDirectory() as folder:
        spec = Spec(folder, megabytes, learners, rounds, policy, settings, cgroup=cgroup)
        with ControllerUnderTest(spec) as controller:
            idle = memory_of(controller.pid)
            found = asyncio.run(watch(controller))
    peak = {part: max(row[part] for row in found) for part in ("rss", "anonymous", "files")}
    above = {part: (peak[part] - idle[part]) / megabytes for part in peak}
    return {"idle": idle, "rounds": found, "peak": peak, "above": above, "models_above_idle": above["rss"]}


def measure(sheet: Report, options: Any) -> None:
    sizes, rounds = (((3, 4.0),), 1) if options.quick else (SIZES, options.rounds)
    found = {size: exchange(*size, rounds, options.policy) for size in sizes}
    rows = [["learners x MB", "idle, MB", "peak RSS, MB", "of it anonymous", "of it files", "above idle, in models"]]
    for (learners, megabytes), values in found.items():
        parts = (round(values["peak"][part]) for part in ("rss", "anonymous", "files"))
        above = f"{values['models_above_idle']:.2f}"
        rows.append([f"{learners} x {megabytes:g}", round(values["idle"]["rss"]), *parts, above])
    sheet.table(rows)
    sheet.figures = {"policy": options.policy, "sizes": {f"{n}x{m:g}": values for (n, m), values in found.items()}}
    largest = max(sizes, key=lambda size: size[1])
    above = found[largest]["models_above_idle"]
    sheet.goal(
        "memory of the controller, {} learners x {:g} MB".format(*largest), "under 3 models above idle",
        f"{above:.2f} models", above < 3,
    )  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--policy", default="semisync_fedavg", choices=["semisync_fedavg", "sync_fedavg", "fedrec"])
    options = parser.parse_args()
    with report(options, __doc__) as sheet:
        measure(sheet, options)


if __name__ == "__main__":
    main()
