"""Thousands of rounds with a tiny model: what grows in the controller.

    python benchmarks/soak.py [--rounds 10000] [--seconds 480] [--quick] [--out FOLDER]

A controller process (durability "process") and 10 light learners in another one, synchronous rounds with a model of
4 kB. Resident memory, descriptors, threads and the state folder are read a hundred times; the slope of memory is the
least-squares line after the first tenth. A soak that does not get through its rounds in the time is ended there.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np
from _bench import Report, arguments, report
from _federation import ControllerUnderTest, LightLearner, Spec, descriptors_of, memory_of, size_of, threads_of

LEARNERS = 10


async def soak(controller: ControllerUnderTest, rounds: int, seconds: float) -> list[dict[str, float]]:
    layout = controller.spec.layout
    learners = [LightLearner(f"learner-{n}", controller.address, layout) for n in range(LEARNERS)]
    running = [asyncio.create_task(learner.run()) for learner in learners]
    began, samples, every = time.monotonic(), [], max(1, rounds // 100)
    while not all(task.done() for task in running):
        version = min(learner.version for learner in learners)
        if version >= every * (len(samples) + 1) and version < rounds:
            samples.append(
                {
                    "round": version,
                    "seconds": time.monotonic() - began,
                    "rss_kb": memory_of(controller.pid)["rss"] * 1000,
                    "anonymous_kb": memory_of(controller.pid)["anonymous"] * 1000,
                    "descriptors": descriptors_of(controller.pid),
                    "threads": threads_of(controller.pid),
                    "state_kb": size_of(Path(controller.spec.folder)) / 1000,
                }
            )
        if time.monotonic() - began > seconds:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(0.02)
    for learner in learners:
        assert not learner.failures and not learner.refused, [*learner.failures, *learner.refused]
    return samples


def measure(sheet: Report, rounds: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spec = Spec(folder, megabytes=0.004, learners=LEARNERS, rounds=rounds)
        with ControllerUnderTest(spec) as controller:
            samples = asyncio.run(soak(controller, rounds, seconds))
        sizes = {path.name: size_of(path) or path.stat().st_size for path in Path(folder).iterdir()}
    last = samples[-1]
    late = [sample for sample in samples if sample["round"] >= last["round"] / 10]
    slopes = {
        name: float(np.polyfit([sample["round"] for sample in late], [sample[name] for sample in late], 1)[0])
        for name in ("rss_kb", "anonymous_kb", "state_kb")
    }
    shown = samples[:: max(1, len(samples) // 10)] + samples[-1:]
    sheet.table([list(samples[0]), *([round(value) for value in sample.values()] for sample in shown)])
    sheet.figures = {"rounds": last["round"], "asked": rounds, "slopes": slopes, "samples": samples, "sizes": sizes}
    through = "all" if last["round"] >= 0.98 * rounds else f"{last['round']:,} (then the time was over)"
    sheet.say(
        f"{through} of {rounds:,} rounds, {last['round'] / last['seconds']:.1f} a second. Slopes after the first "
        f"tenth: resident memory {slopes['rss_kb']:.3f} kB a round, of it anonymous {slopes['anonymous_kb']:.3f}; "
        f"state folder {slopes['state_kb']:.1f} kB a round."
    )
    sheet.goal(
        f"soak, {last['round']:,} rounds: slope of the controller's memory", "at most 1 kB a round",
        f"{slopes['rss_kb']:.3f} kB", slopes["rss_kb"] <= 1,
    )  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=480.0, help="the longest that it may take")
    options = parser.parse_args()
    with report(options, __doc__) as sheet:
        measure(sheet, 60 if options.quick else options.rounds, options.seconds)


if __name__ == "__main__":
    main()
