"""What the simulator adds to training: a 10-learner CIFAR-10 2-CNN federation against the bare torch loop.

    METIS_DATA=DIR python benchmarks/simulator_overhead.py [--steps 20] [--repeats 3]

Both sides take the same steps on the same batches with one torch thread: gather, scale, random crop to 24x24,
flip, forward, backward, momentum SGD. They alternate, and the best of several repeats counts, because noise of a
shared machine only ever adds. The last figure is wall time inline over wall time with two worker processes.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import metis
from metis.core.policies import sync_fedavg
from metis.data.datasets import find_dataset
from metis.data.partition import iid, uniform_sizes
from metis.learning import ArrayExamples, Learner, cifar10_cnn, cifar_tutorial

LEARNERS, BATCH = 10, 100


def federation() -> metis.Federation:
    import numpy as np

    data = metis.load_dataset("cifar10")
    augment, _ = cifar_tutorial()
    parts = iid(data.y_train, uniform_sizes(len(data.y_train), LEARNERS), np.random.default_rng(1990))
    return metis.Federation(
        network=cifar10_cnn,
        train=ArrayExamples(data.x_train, data.y_train),
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


def clocked(work) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=20, help="steps of each learner")
    arguments.add_argument("--repeats", type=int, default=3)
    options = arguments.parse_args()
    if find_dataset("cifar10") is None:
        print("skipped: CIFAR-10 is not there; get it with: metis data fetch cifar10")
        return
    torch.set_num_threads(1)
    setup = federation()
    learners = setup._learners(setup.solver)
    policy = sync_fedavg(local_epochs=options.steps / learners[0].epoch_steps)

    def simulate(workers: int) -> None:
        run = setup.simulate(policy, rounds=1, workers=workers)
        assert run.costs.steps == LEARNERS * options.steps

    bare_loop(learners[:1], 3)
    setup.simulate(sync_fedavg(local_epochs=1 / 50), rounds=1)
    times: dict[str, list[float]] = {name: [] for name in ("bare", "bare CPU", "inline", "inline CPU", "two workers")}
    for _ in range(options.repeats):
        for name, work in (("bare", lambda: bare_loop(learners, options.steps)), ("inline", lambda: simulate(0))):
            wall, cpu = clocked(work)
            times[name].append(wall)
            times[f"{name} CPU"].append(cpu)
        times["two workers"].append(clocked(lambda: simulate(2))[0])
    best = {name: min(values) for name, values in times.items()}
    print(f"{LEARNERS} learners x {options.steps} steps of {BATCH}, best of {options.repeats}:")
    print(f"simulator inline / bare loop, wall time   {best['inline'] / best['bare']:.3f}")
    print(f"simulator inline / bare loop, CPU time    {best['inline CPU'] / best['bare CPU']:.3f}")
    print(f"inline / two workers, wall time           {best['inline'] / best['two workers']:.2f}")


if __name__ == "__main__":
    main()
