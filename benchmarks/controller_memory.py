"""Memory of the controller while ten learners exchange large models with it.

    python benchmarks/controller_memory.py [--learners 10] [--megabytes 100] [--rounds 6] [--policy semisync_fedavg]
                                           [--quick] [--json FILE]

A controller process and light learners in another one, which make their models up block by block. Semi-synchronous
rounds, so everybody hands in at the same moment. The peak of a round is the kernel's own (VmHWM, set back at the
beginning of each round); its parts are sampled every 10 ms. Idle is the controller that listens and has seen nobody.
"""

from __future__ import annotations

import asyncio
import tempfile
import time

from _federation import ControllerUnderTest, LightLearner, Spec, arguments, forget_peak, memory_of, tell

PACE = 0.2  # seconds for a batch; an epoch has 10


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
            row["seconds"] = time.monotonic() - row["began"]
            row["rss"] = max(row["rss"], now["peak"])
            for part in ("anonymous", "files"):
                row[part] = max(row[part], now[part])
        await asyncio.sleep(0.01)
    for learner in learners:
        assert not learner.failures, learner.failures
    return rounds


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--learners", type=int, default=10)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--policy", default="semisync_fedavg", choices=["semisync_fedavg", "sync_fedavg", "fedrec"])
    options = parser.parse_args()
    if options.quick:
        options.learners, options.megabytes, options.rounds = 3, 4.0, 1
    settings = {"slowest_learner_epochs": 2.0} if options.policy == "semisync_fedavg" else {"local_epochs": 1}
    with tempfile.TemporaryDirectory() as folder:
        spec = Spec(folder, options.megabytes, options.learners, options.rounds, options.policy, settings)
        with ControllerUnderTest(spec) as controller:
            idle = memory_of(controller.pid)
            rounds = asyncio.run(watch(controller))
    rows = [["MB", "seconds", "RSS", "anonymous", "files", "RSS above idle / model"]]
    rows.append(["idle", "", *(round(idle[part]) for part in ("rss", "anonymous", "files")), ""])
    above = [(row["rss"] - idle["rss"]) / options.megabytes for row in rounds]
    for row, models in zip(rounds, above, strict=True):
        parts = (round(row[part]) for part in ("rss", "anonymous", "files"))
        rows.append([f"round {row['round']:.0f}", f"{row['seconds']:.1f}", *parts, f"{models:.2f}"])
    tell(rows, {"idle": idle, "rounds": rounds, "models_above_idle": max(above)}, options.json)
    print(f"{options.learners} learners x {options.megabytes:g} MB: at most {max(above):.2f} models (goal: under 3)")


if __name__ == "__main__":
    main()
