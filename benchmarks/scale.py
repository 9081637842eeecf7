"""What a task costs besides training, here, in worker processes and on Ray; and a silo of one and of two processes.

    python benchmarks/scale.py [--repeats 3] [--quick] [--out FOLDER]

Part 1: learners that train nothing, for models of several sizes: all the time is overhead. Part 2: learners that really
train a convolutional network, two at a time. Part 3: one learner in one process and in two that train as one, over
gloo. Every process has one torch thread. Parts 2 and 3 want two free processors; the best of several repeats counts.
Ray is measured where it is installed (`pip install '.[ray]'`), with a cluster of two workers on this machine.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _bench import Report, arguments, report

import metis
from metis.core.model import Layout, Model, TensorSpec
from metis.core.policies import sync_fedavg
from metis.learning import Learner, TorchEngine, Trained, cifar10_cnn

SIZES = (10_000, 1_000_000, 25_000_000)
LEARNERS, BATCH = 10, 100
POOLS: dict[str, dict[str, Any]] = {
    "this process": {},
    "2 worker processes": {"workers": 2},
    "Ray, 2 workers": {"pool": "ray", "workers": 2},
}


class Idle:
    """An engine that hands the community model back as it came."""

    def __init__(self, size: int) -> None:
        self.layout = Layout((TensorSpec("w", (size,)),))

    def initial_model(self, seed: int) -> Model:
        return Model(self.layout, np.ones(self.layout.size, np.float32))

    def train(self, model: Model, batches: Iterable[Any], solver: Any, memory: Any = None, seed: int = 0) -> Trained:
        return Trained(model.with_vector(np.array(model.vector)), 1, 0.5)

    def evaluate(self, model: Model, examples: Any, memory: Any = None) -> dict[str, float]:
        return {"accuracy": 0.5}


def federation(engine: Any, shape: tuple[int, ...], examples: int) -> metis.Federation:
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 255, (LEARNERS * examples, *shape), dtype=np.uint8)
    parts = np.array_split(np.arange(len(inputs)), LEARNERS)
    return metis.Federation(
        engine=engine,
        train=(inputs, rng.integers(0, 10, len(inputs))),
        learners=[
            metis.SimulatedLearner(f"learner-{number}", part, BATCH, metis.Speed(0.1))
            for number, part in enumerate(parts)
        ],
        solver=metis.MomentumSGD(0.05, 0.75),
    )


def seconds(setup: metis.Federation, rounds: int, steps: int, options: dict[str, Any]) -> tuple[float, str]:
    """Between the first round, in which workers start, and the last one."""
    marks: list[float] = []

    def watch(fold: Any) -> None:
        if fold.version > len(marks):
            marks.append(time.perf_counter())

    epochs = steps / setup._learners(setup.solver)[0].epoch_steps
    run = setup.simulate(sync_fedavg(local_epochs=epochs), rounds=rounds + 1, watch=watch, **options)
    return marks[-1] - marks[0], run.community_model.sha256()


def overhead(sizes: Sequence[int], repeats: int, tasks: int, options: dict[str, Any]) -> list[float]:
    """Milliseconds a task of learners that train nothing, for every size."""
    row = []
    for size in sizes:
        rounds = max(2, min(tasks, 2_000_000_000 // (4 * size)) // LEARNERS)
        setup = federation(Idle(size), (4,), BATCH)
        best = min(seconds(setup, rounds, 1, options)[0] for _ in range(repeats))
        row.append(1000 * best / (rounds * LEARNERS))
    return row


def pools(sheet: Report, sizes: Sequence[int], tasks: int, steps: int, repeats: int) -> None:
    setup = federation(TorchEngine(cifar10_cnn), (24, 24, 3), BATCH * steps)
    idle, real, hashes = {}, {}, {}
    for name, options in POOLS.items():  # worker processes are forked before Ray is there
        if options.get("pool") == "ray" and importlib.util.find_spec("ray") is None:
            sheet.say("Ray was not measured: it is not installed.")
            continue
        idle[name] = overhead(sizes, repeats, tasks, options)
        spent, shas = zip(*(seconds(setup, 1, steps, options) for _ in range(repeats)), strict=True)
        real[name] = min(spent)
        hashes[name] = set(shas)
    sheet.say("Milliseconds a task of learners that train nothing, by the parameters of the model:")
    sheet.table([["", *(f"{size:,}" for size in sizes)], *([name, *row] for name, row in idle.items())])
    sheet.say(f"{LEARNERS} learners x {steps} steps of {BATCH} examples, the network of CIFAR-10:")
    here = real["this process"]
    sheet.table(
        [["", "s", "times as fast as in this process"], *([name, s, f"{here / s:.2f}"] for name, s in real.items())]
    )
    sheet.figures |= {"task_milliseconds": {name: dict(zip(sizes, row, strict=True)) for name, row in idle.items()}}
    sheet.figures |= {"training_seconds": real}
    if "Ray, 2 workers" in hashes:
        same = hashes["Ray, 2 workers"] == hashes["this process"] and len(hashes["this process"]) == 1
        sheet.goal("Ray pool", "same community_sha256 as inline", "the same" if same else "another", same)


def rank(number: int, size: int, place: str, steps: int, answer: Any) -> None:
    """One process of a silo; the first one says how long a step took, and what of it was adding up."""
    import torch

    from metis.learning.torch.parallel import Ranks

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    engine = TorchEngine(cifar10_cnn)
    examples = metis.learning.ArrayExamples(
        rng.integers(0, 255, (1000, 24, 24, 3), dtype=np.uint8), rng.integers(0, 10, 1000)
    )
    learner = Learner("silo", 0, examples, np.arange(1000), BATCH, metis.MomentumSGD(0.05, 0.75))
    model = engine.initial_model(1)
    if size > 1:
        learner.ranks = engine.ranks = Ranks(number, size, place)
    learner.train(engine, model, 0, 3)
    started = time.perf_counter()
    trained = learner.train(engine, model, 1, steps)
    spent = (time.perf_counter() - started) / steps
    adding = 0.0
    if engine.ranks is not None:
        vector = torch.zeros(engine.layout.size)
        engine.ranks.add_up(vector)
        started = time.perf_counter()
        for _ in range(10):
            engine.ranks.add_up(vector)
        adding = (time.perf_counter() - started) / 10
    if number == 0:
        answer.send((spent, adding, trained.model.vector))
        answer.recv()  # nobody leaves before it has been taken


def silo(sheet: Report, steps: int, repeats: int) -> None:
    context = multiprocessing.get_context("spawn")
    models, rows = [], [["processes", "ms a step", "of it adding up gradients"]]
    for size in (1, 2):
        outcomes = []
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                ours, theirs = context.Pipe()
                processes = [
                    context.Process(target=rank, args=(number, size, str(Path(folder) / "place"), steps, theirs))
                    for number in range(size)
                ]
                for process in processes:
                    process.start()
                outcomes.append(ours.recv())
                ours.send(None)
                for process in processes:
                    process.join()
        spent, adding, vector = min(outcomes, key=lambda outcome: outcome[0])
        models.append(vector)
        rows.append([size, 1000 * spent, 1000 * adding])
        sheet.figures[f"silo_{size}_ms"] = [1000 * spent, 1000 * adding]
    sheet.say(f"One learner, batches of {BATCH}, in processes that train as one:")
    sheet.table(rows)
    sheet.say(f"Largest difference of a weight after {steps} steps: {np.abs(models[0] - models[1]).max():.1e}.")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="of which the best counts")
    options = parser.parse_args()
    tasks, steps, repeats = (10, 2, 1) if options.quick else (200, 15, options.repeats)
    with report(options, __doc__) as sheet:
        pools(sheet, SIZES[:1] if options.quick else SIZES, tasks, steps, repeats)
        silo(sheet, steps, repeats)


if __name__ == "__main__":
    main()
