"""A round of ten learners that do nothing, with 25 million parameters: what a simulator costs by itself.

    python benchmarks/round_overhead.py [--learners 10] [--megabytes 100] [--quick] [--no-peers] [--out FOLDER]

The learners give back the model that they got, with Flower as with Metis; what is left is the simulator's own: handing
models out, taking them back, averaging. Metis in-process, where a model need not move, the same with learners that each
make a new model of what they got, and with two worker processes; Flower's simulation on Ray with two CPUs.
Every system has ten tensors of 2.5 million float32. The first round warms up; the median of the others counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from _bench import Report, arguments, median, report
from _peers import Unavailable, ask
from peers import simple

import metis
from metis.core.model import Layout, Model, TensorSpec
from metis.core.policies import sync_fedavg
from metis.learning import Trained


class DoNothing:
    """An engine that gives back what it got, or a copy."""

    def __init__(self, megabytes: float, copies: bool) -> None:
        self._copies = copies
        tensors = simple.layers(megabytes)
        self.layout = Layout(tuple(TensorSpec(name, array.shape) for name, array in tensors.items()))
        self._initial = Model.from_tensors(tensors, self.layout)

    def initial_model(self, seed: int) -> Model:
        return self._initial

    def train(self, community_model: Model, batches: Iterable[Any], *_: Any, **__: Any) -> Trained:
        vector = community_model.vector.copy() if self._copies else community_model.vector
        return Trained(community_model.with_vector(vector), len(list(batches)), 0.0)


def simulate(learners: int, megabytes: float, rounds: int, workers: int, copies: bool = False) -> list[float]:
    federation = metis.Federation(
        engine=DoNothing(megabytes, copies),  # type: ignore[arg-type]  # nobody evaluates
        train=(np.zeros((10, 1), np.float32), np.zeros(10, np.int64)),
        learners=[
            metis.SimulatedLearner(f"learner-{n}", np.array([n % 10]), 1, metis.Speed(0.1)) for n in range(learners)
        ],
        solver=metis.VanillaSGD(0.1),
    )
    moments = [time.perf_counter()]

    def watch(fold: Any) -> None:
        if fold.version >= len(moments):
            moments.append(time.perf_counter())

    federation.simulate(sync_fedavg(local_epochs=1), rounds=rounds + 1, workers=workers, watch=watch)
    return simple.rounds_of(moments)


def measure(sheet: Report, options: Any) -> None:
    learners, megabytes, rounds = (3, 1.0, 2) if options.quick else (options.learners, options.megabytes, 3)
    found = {
        "Metis, in-process": median(simulate(learners, megabytes, 3 * rounds, 0)),
        "Metis, in-process, new models": median(simulate(learners, megabytes, 3 * rounds, 0, copies=True)),
        "Metis, 2 workers": median(simulate(learners, megabytes, rounds, 2)),
    }
    if not options.no_peers:
        spec = {"network": None, "megabytes": megabytes, "learners": learners, "examples": 1, "rounds": rounds}
        try:
            found["Flower's simulation"] = median(ask("flower", "flower_simulation", spec))
        except Unavailable as problem:
            sheet.say(f"Flower was not measured: {problem}")
    mine = min(found["Metis, in-process"], found["Metis, 2 workers"])
    sheet.table([["", "s a round", "times the best of Metis"], *([k, v, f"{v / mine:.1f}"] for k, v in found.items())])
    sheet.figures = {"learners": learners, "megabytes": megabytes, "round_seconds": found}
    if "Flower's simulation" in found:
        times = found["Flower's simulation"] / mine
        sheet.goal(
            f"a round of {learners} do-nothing learners, {megabytes / 4:g} M parameters, against Flower's simulation",
            "at least 20 times less overhead", f"{times:.1f} times less", times >= 20, times / 20,
        )  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--learners", type=int, default=10)
    parser.add_argument("--megabytes", type=float, default=100)
    options = parser.parse_args()
    with report(options, __doc__) as sheet:
        measure(sheet, options)


if __name__ == "__main__":
    main()
