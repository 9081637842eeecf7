"""Rounds per second of the simulator, for 10 to 1,000 learners, against other simulators.

    python benchmarks/simulator_peers.py [--sizes small-1000 ...] [--quick] [--no-peers] [--out FOLDER]

Synchronous FedAvg in which every learner takes part in every round, plain SGD, one epoch a round, float32, on the two
cores of the machine. The small network (64-32-10, 2,410 parameters) has 40 examples a learner in batches of 20. The
medium one is pfl's published CIFAR-10 benchmark, scaled to a processor: its network (two convolutions, 1,626,442
parameters, with dropout), 50 examples a learner, batches of 10, cohorts of 10 to 1,000 instead of 50 of 1,000 users.
With 1,000 learners (--sizes medium-1000) a round takes a minute and more: Flower is left out, and what uses one core.
Inputs are random numbers of the right shape, the same for everybody.

Metis: two worker processes, and none (in-process, one thread); the small network also with up to 200 learners trained
as one computation (`batched`), which is not for convolutions. Flower: its simulation on Ray with two CPUs and one CPU
a client, so two clients at a time; the network and the data are made once in each process. pfl: its simulated backend
in one process of one thread, and in two by torchrun. FedJAX: its compiled federated averaging (not torch), with the
threads that its compiler takes. Nobody evaluates. The first round warms up and is left out; the median of the others
counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from _bench import Report, arguments, median, report
from _peers import Unavailable, ask
from peers import simple, task

import metis
from metis.core.policies import sync_fedavg
from metis.learning import ArrayExamples

KINDS: dict[str, dict[str, Any]] = {
    "small": {"examples": 40, "batch_size": 20, "learning_rate": 0.05},
    "medium": {"examples": 50, "batch_size": 10, "learning_rate": 0.01},
}
ROUNDS = {("small", 10): 30, ("small", 100): 10, ("small", 1000): 5, ("medium", 10): 6, ("medium", 100): 2,
          ("medium", 1000): 1}  # fmt: skip
SIZES = {f"{kind}-{learners}": (kind, learners) for kind, learners in ROUNDS}
PEERS = {
    "Flower": ("flower", "flower_simulation", 2),
    "pfl, 2 processes": ("pfl", "pfl_simulation", 2),
    "pfl, 1 process": ("pfl", "pfl_simulation", 1),
    "FedJAX": ("fedjax", "fedjax_simulation", 1),
}


def simulate(kind: str, learners: int, rounds: int, workers: int, batched: int = 1) -> list[float]:
    """Seconds of each round after the first."""
    inputs, targets = simple.examples(task.SHAPES[kind])
    settings = KINDS[kind]
    federation = metis.Federation(
        network=lambda: task.initial(kind),
        train=ArrayExamples(inputs, targets),
        learners=[
            metis.SimulatedLearner(f"learner-{n:04}", part.astype(np.int64), settings["batch_size"], metis.Speed(0.1))
            for n, part in enumerate(simple.parts(learners, settings["examples"]))
        ],
        solver=metis.VanillaSGD(settings["learning_rate"]),
    )
    moments = [time.perf_counter()]

    def watch(fold: Any) -> None:
        if fold.version >= len(moments):
            moments.append(time.perf_counter())

    policy = sync_fedavg(local_epochs=1)
    federation.simulate(policy, rounds=rounds + 1, workers=workers, batched=batched, watch=watch)
    return simple.rounds_of(moments)


def measure(sheet: Report, quick: bool, peers: bool, sizes: Sequence[str]) -> None:
    plan = {("small", 4): 2, ("medium", 2): 1} if quick else {SIZES[size]: ROUNDS[SIZES[size]] for size in sizes}
    names = ["Metis, batched", "Metis, 2 workers", "Metis, in-process", *(PEERS if peers else ())]
    rows: list[list[Any]] = [["network", "learners", *(f"{name}, rounds/s" for name in names)]]
    figures: dict[str, dict[str, float]] = {}
    refused: dict[str, str] = {}
    for (kind, learners), rounds in plan.items():
        long = (kind, learners) == ("medium", 1000)
        found = {"Metis, 2 workers": median(simulate(kind, learners, rounds, 2))}
        if not long:
            found["Metis, in-process"] = median(simulate(kind, learners, rounds, 0))
        if kind == "small":
            found["Metis, batched"] = median(simulate(kind, learners, rounds, 2, batched=200))
        for name, (peer, script, processes) in PEERS.items() if peers else ():
            if long and name not in ("pfl, 2 processes", "FedJAX"):
                continue
            spec = {"network": kind, "learners": learners, "rounds": rounds, "processes": processes, **KINDS[kind]}
            try:
                found[name] = median(ask(peer, script, spec, timeout=600))
            except Unavailable as problem:
                refused[name] = str(problem)
        figures[f"{kind} {learners}"] = found
        rows.append([kind, learners, *(1 / found[name] if name in found else "-" for name in names)])
    sheet.table(rows)
    for name, problem in refused.items():
        sheet.say(f"{name}: where it was not measured: {problem}")
    sheet.figures = {"round_seconds": figures}
    small = [key for key in plan if key[0] == "small"]
    if not small:
        return
    largest = max(small, key=lambda key: key[1])
    found = figures["{} {}".format(*largest)]
    theirs = {name: value for name, value in found.items() if name in PEERS}
    if theirs:
        fastest = min(theirs, key=lambda name: theirs[name])
        mine = min(value for name, value in found.items() if name not in PEERS)
        sheet.goal(
            f"simulator, {largest[1]:,} small learners, against the fastest peer", "at least 3 times as fast",
            f"{theirs[fastest] / mine:.1f} times {fastest}", theirs[fastest] / mine >= 3, theirs[fastest] / mine / 3,
        )  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    usual = [size for size in SIZES if size != "medium-1000"]
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=usual, help="networks and learners")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with report(options, __doc__) as sheet:
        measure(sheet, options.quick, not options.no_peers, options.sizes)


if __name__ == "__main__":
    main()
