"""Thousands of rounds with a tiny model: what grows in the controller.

    python benchmarks/soak.py [--rounds 10000] [--quick] [--json FILE]

A controller process (durability "process") and 10 light learners in another one, synchronous rounds with a model of
4 kB. Resident memory, descriptors, threads and the state folder are read a hundred times; the slope of memory is the
least-squares line after the first tenth.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np
from _federation import (
    ControllerUnderTest,
    LightLearner,
    Spec,
    arguments,
    descriptors_of,
    memory_of,
    size_of,
    tell,
    threads_of,
)

LEARNERS = 10


async def soak(controller: ControllerUnderTest, rounds: int) -> list[dict[str, float]]:
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
        await asyncio.sleep(0.02)
    for learner in learners:
        assert not learner.failures and not learner.refused, [*learner.failures, *learner.refused]
    return samples


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=10_000)
    options = parser.parse_args()
    rounds = 60 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        spec = Spec(folder, megabytes=0.004, learners=LEARNERS, rounds=rounds)
        with ControllerUnderTest(spec) as controller:
            samples = asyncio.run(soak(controller, rounds))
        sizes = {path.name: size_of(path) or path.stat().st_size for path in Path(folder).iterdir()}
    late = [sample for sample in samples if sample["round"] >= rounds / 10]
    slopes = {
        name: float(np.polyfit([sample["round"] for sample in late], [sample[name] for sample in late], 1)[0])
        for name in ("rss_kb", "anonymous_kb", "state_kb")
    }
    shown = samples[:: max(1, len(samples) // 10)] + samples[-1:]
    rows = [list(samples[0]), *([round(value) for value in sample.values()] for sample in shown)]
    figures = {"rounds": rounds, "slopes": slopes, "samples": samples, "sizes": sizes}
    tell(rows, figures, options.json)
    print(f"{rounds / samples[-1]['seconds'] * samples[-1]['round'] / rounds:.1f} rounds a second")
    print(f"slope of resident memory after the first tenth: {slopes['rss_kb']:.3f} kB a round (goal: at most 1)")
    print(f"of its anonymous part: {slopes['anonymous_kb']:.3f} kB a round")
    print(f"state folder: {slopes['state_kb']:.1f} kB a round; at the end", end=" ")
    print(", ".join(f"{name} {size / 1000:.0f} kB" for name, size in sorted(sizes.items()) if size > 1000))


if __name__ == "__main__":
    main()
