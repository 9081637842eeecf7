"""What the simulator adds to training: a 10-learner CIFAR-10 2-CNN federation against the bare torch loop.

    METIS_DATA=DIR python benchmarks/simulator_overhead.py [--steps 15] [--repeats 4] [--quick] [--out FOLDER]

Both sides take the same steps on the same batches with one torch thread: gather, scale, random crop to 24x24,
flip, forward, backward, momentum SGD. They alternate, and the best of several repeats counts, because noise of a
shared machine only ever adds. Without CIFAR-10 the images are random, which takes as long. The last figure is wall
time in-process over wall time with two worker processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _bench import Report, arguments, report
from torch import nn

import metis
from metis.core.policies import sync_fedavg
from metis.data.datasets import find_dataset
from metis.data.partition import iid, uniform_sizes
from metis.learning import ArrayExamples, Learner, cifar10_cnn, cifar_tutorial

LEARNERS, BATCH = 10, 100


def federation() -> metis.Federation:
    rng = np.random.default_rng(1990)
    if find_dataset("cifar10") is None:
        inputs, labels = rng.integers(0, 256, (50_000, 32, 32, 3), np.uint8), rng.integers(0, 10, 50_000)
    else:
        data = metis.load_dataset("cifar10")
        inputs, labels = data.x_train, data.y_train
    augment, _ = cifar_tutorial()
    parts = iid(labels, uniform_sizes(len(labels), LEARNERS), rng)
    return metis.Federation(
        network=cifar10_cnn,
        train=ArrayExamples(inputs, labels),
        learners=[
            metis.SimulatedLearner(f"learner-{number}", part, BATCH, metis.Speed(0.03 if number % 2 else 0.3))
            for number, part in enumerate(parts)
        ],
        solver=metis.MomentumSGD(0.05, 0.75),
        augment=augment,
    )


def bare_loop(learners: list[Learner], steps: int) -> None:
    """What one would write without any federation: the same batches, torch's own optimizer."""
    for learner in learners:
        torch.manual_seed(1990)
        network = cifar10_cnn().to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.75)
        loss_of = nn.CrossEntropyLoss()
        batches = learner.batches(task_number=0)
        for _ in range(steps):
            inputs, targets = next(batches)
            optimizer.zero_grad()
            loss_of(network(inputs), targets).backward()
            optimizer.step()


def clocked(work: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(sheet: Report, steps: int, repeats: int) -> None:
    setup = federation()
    learners = setup._learners(setup.solver)
    policy = sync_fedavg(local_epochs=steps / learners[0].epoch_steps)

    def simulate(workers: int) -> None:
        run = setup.simulate(policy, rounds=1, workers=workers)
        assert run.costs.steps == LEARNERS * steps

    bare_loop(learners[:1], 3)
    setup.simulate(sync_fedavg(local_epochs=1 / 50), rounds=1)
    times: dict[str, list[float]] = {name: [] for name in ("bare", "bare CPU", "inline", "inline CPU", "two workers")}
    for _ in range(repeats):
        for name, work in (("bare", lambda: bare_loop(learners, steps)), ("inline", lambda: simulate(0))):
            wall, cpu = clocked(work)
            times[name].append(wall)
            times[f"{name} CPU"].append(cpu)
        times["two workers"].append(clocked(lambda: simulate(2))[0])
    best = {name: min(values) for name, values in times.items()}
    sheet.figures = {"steps": steps, "seconds": times}
    ratio = best["inline"] / best["bare"]
    sheet.say(f"{LEARNERS} learners x {steps} steps of {BATCH}, best of {repeats}.")
    sheet.table(
        [
            ["", "ratio"],
            ["simulator in-process / bare torch loop, wall time", f"{ratio:.3f}"],
            ["simulator in-process / bare torch loop, CPU time", f"{best['inline CPU'] / best['bare CPU']:.3f}"],
            ["in-process / two worker processes, wall time", f"{best['inline'] / best['two workers']:.2f}"],
        ]
    )
    sheet.goal(
        "simulator over bare loop, 10 learners, 2-CNN", "at most 1.03", f"{ratio:.3f}", ratio <= 1.03, 1.03 / ratio
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=15, help="steps of each learner")
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with report(options, __doc__) as sheet:
        measure(sheet, *((1, 1) if options.quick else (options.steps, options.repeats)))


if __name__ == "__main__":
    main()
