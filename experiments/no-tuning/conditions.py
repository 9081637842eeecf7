"""The conditions of the study: one table, each a federation that is made from a seed.

Twelve are those that the rule was found on; the others were not used for that. Most are small on purpose, networks of
one hidden layer on 3,000 digits, so that thousands of runs fit into an hour or two of two processors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from perceptron import Pairs, Perceptron
from torch import nn

import metis
from metis.data import partition
from metis.learning.torch.networks import cifar10_cnn

FAST, SLOW = 0.03, 0.3  # seconds for a batch: the paper's GPU and CPU
ROUNDS = 30  # of Sync with one local epoch: how long a run lasts at most

Make = Callable[[int], metis.Federation]


@dataclass(frozen=True)
class Condition:
    """A federation for each seed; `fresh` ones were not used to find the rule."""

    name: str
    title: str
    fresh: bool
    make: Make
    rounds: int = ROUNDS
    seeds: int = 5
    evaluations: int = 3000  # at most, evenly spread over a run

    def federation(self, seed: int) -> metis.Federation:
        return self.make(seed)


def slowest_epoch(federation: metis.Federation) -> float:
    """Seconds of the longest epoch, with its exchange."""
    size = federation.engine.layout.size * 4
    return max(
        -(-len(one.indices) // one.batch_size) * one.speed.time_per_batch + exchange(one, size)
        for one in federation.learners
    )


def exchange(one: metis.SimulatedLearner, size: int) -> float:
    return one.link.download_time(size) + one.link.upload_time(size)


# --- data -------------------------------------------------------------------------------------------


@functools.cache
def _mnist() -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """MNIST at 14 x 14."""
    data = metis.load_dataset("mnist")

    def halved(images: NDArray[Any]) -> NDArray[Any]:
        small: NDArray[Any] = images.astype(np.float32).reshape(-1, 14, 2, 14, 2).mean((2, 4)) / np.float32(255)
        return small

    return halved(data.x_train), data.y_train, halved(data.x_test[:1000]), data.y_test[:1000]


@functools.cache
def _digits() -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    data = metis.load_dataset("digits")
    return data.x_train / np.float32(16), data.y_train, data.x_test / np.float32(16), data.y_test


@functools.cache
def _cifar() -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The centre of each image, 24 x 24, standardised by itself."""
    data = metis.load_dataset("cifar10")

    def centre(images: NDArray[Any]) -> NDArray[Any]:
        cut = images[:, 4:28, 4:28].astype(np.float32)
        cut -= cut.mean((1, 2, 3), keepdims=True)
        cut /= np.maximum(cut.std((1, 2, 3), keepdims=True), 1e-3)
        return np.ascontiguousarray(cut.transpose(0, 3, 1, 2))

    return centre(data.x_train[:10000]), data.y_train[:10000], centre(data.x_test[:800]), data.y_test[:800]


def _sizes(kind: str, examples: int, learners: int) -> list[int]:
    match kind:
        case "uniform":
            return partition.uniform_sizes(examples, learners)
        case "skewed":
            return partition.skewed_sizes(examples, learners)
        case _:
            return partition.power_law_sizes(examples, learners)


def _parts(
    labels: NDArray[Any], kind: str, learners: int, classes: int | None, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    sizes = _sizes(kind, len(labels), learners)
    if classes is None:
        return partition.iid(labels, sizes, rng)
    counts = np.bincount(labels)
    return partition.non_iid(labels, sizes, partition.classes_per_learner(sizes, list(counts), classes), rng)


def model_of(
    train: tuple[NDArray[Any], NDArray[Any]],
    test: tuple[NDArray[Any], NDArray[Any]],
    outputs: int,
    hidden: int,
    network: Callable[[], nn.Module] | None = None,
) -> dict[str, Any]:
    """One hidden layer in NumPy, or a network of PyTorch, with its examples."""
    if network is not None:
        return {"network": network, "train": train, "test": test}
    engine = Perceptron(math.prod(train[0].shape[1:]), outputs, hidden)
    return {"engine": engine, "train": Pairs(*train), "test": Pairs(*test)}


# --- federations ------------------------------------------------------------------------------------


def digits_of(
    data: str = "mnist",
    kind: str = "uniform",
    classes: int | None = None,
    examples: int = 3000,
    batch: int = 20,
    speeds: Sequence[float] | Callable[[np.random.Generator], Sequence[float]] = (FAST,) * 5 + (SLOW,) * 5,
    network: Callable[[], nn.Module] | None = None,
    solver: Any = None,
    change: Callable[[list[metis.SimulatedLearner]], list[metis.SimulatedLearner]] = lambda learners: learners,
    hidden: int = 32,
) -> Make:
    """Digits over learners with these speeds, the largest share to the first learner, the next to one of the others."""

    def make(seed: int) -> metis.Federation:
        rng = np.random.default_rng(seed)
        x, y, x_test, y_test = {"mnist": _mnist, "digits": _digits, "cifar": _cifar}[data]()
        kept = rng.permutation(len(y))[:examples]
        x, y = x[kept], y[kept]
        paces = list(speeds(rng) if callable(speeds) else speeds)
        parts = _parts(y, kind, len(paces), classes, rng)
        half = -(-len(paces) // 2)
        ranks = [rank // 2 if rank % 2 == 0 else half + rank // 2 for rank in range(len(paces))]
        learners = [
            metis.SimulatedLearner(
                f"site-{rank:03}",
                parts[rank],
                batch_size=batch,
                speed=metis.Speed(paces[own]),
                power=_power(paces[own]),
            )
            for rank, own in enumerate(ranks)
        ]
        return metis.Federation(
            **model_of((x, y), (x_test, y_test), 10, hidden, network),
            learners=change(learners),
            solver=solver or metis.MomentumSGD(0.05, 0.75),
            seed=seed,
        )

    return make


def _power(pace: float) -> metis.Power:
    return metis.Power(2.0 if pace <= FAST else 1.0)


def cnn() -> nn.Module:
    return cifar10_cnn((3, 24, 24), 10, width=8)


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(196, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def each(**settings: Any) -> Callable[[list[metis.SimulatedLearner]], list[metis.SimulatedLearner]]:
    return lambda learners: [replace(one, **settings) for one in learners]


def of(index: int, **settings: Any) -> Callable[[list[metis.SimulatedLearner]], list[metis.SimulatedLearner]]:
    """One learner is different; its speed by a function of the old one."""

    def change(learners: list[metis.SimulatedLearner]) -> list[metis.SimulatedLearner]:
        own = {key: value(learners[index]) if callable(value) else value for key, value in settings.items()}
        return [replace(one, **own) if rank == index else one for rank, one in enumerate(learners)]

    return change


def slower_from(second: float, factor: float) -> Callable[[metis.SimulatedLearner], metis.Speed]:
    return lambda one: metis.Speed(one.speed.time_per_batch, profile=((second, factor),))


def late_laptop(learners: list[metis.SimulatedLearner]) -> list[metis.SimulatedLearner]:
    """The last one is ten times slower than a slow one and joins after 6 s; the largest is away from 10 s to 20 s."""
    first = replace(learners[0], availability=metis.RecordedAvailability(((10.0, 20.0),)))
    last = replace(learners[-1], speed=metis.Speed(10 * SLOW), availability=metis.RecordedAvailability(((0.0, 6.0),)))
    return [first, *learners[1:-1], last]


def hospitals(seed: int) -> metis.Federation:
    """Eight: one with 200 batches of 60 s an epoch, seven with 20 of 40 s."""
    rng = np.random.default_rng(seed)
    x, y, x_test, y_test = _mnist()
    sizes = [2000] + [200] * 7
    kept = rng.permutation(len(y))[: sum(sizes)]
    x, y = x[kept], y[kept]
    parts = partition.dirichlet(y, sizes, 1.0, rng)
    learners = [
        metis.SimulatedLearner(f"hospital-{k}", part, 10, metis.Speed(40.0 if k else 60.0))
        for k, part in enumerate(parts)
    ]
    return metis.Federation(
        **model_of((x, y), (x_test, y_test), 10, 32),
        learners=learners,
        solver=metis.MomentumSGD(0.02, 0.75),
        seed=seed,
    )


def table_of_sites(dataset: str, speeds: Sequence[float], batch: int, hidden: int, solver: Any) -> Make:
    """One learner for each site of a table, the largest the first."""

    def make(seed: int) -> metis.Federation:
        data = metis.load_dataset(dataset)
        parts, names = partition.natural(data.silos)
        order = sorted(range(len(parts)), key=lambda k: -len(parts[k]))
        mean, deviation = data.x_train.mean(0), data.x_train.std(0) + 1e-6
        regression = data.task == "regression"
        y_train, y_test = data.y_train, data.y_test
        if regression:
            centre, width = y_train.mean(), y_train.std()
            y_train, y_test = (y_train - centre) / width, (y_test - centre) / width
        learners = [
            metis.SimulatedLearner(names[k], parts[k], batch, metis.Speed(speeds[rank % len(speeds)]))
            for rank, k in enumerate(order)
        ]
        return metis.Federation(
            **model_of(
                ((data.x_train - mean) / deviation, y_train),
                ((data.x_test - mean) / deviation, y_test),
                1 if regression else 2,
                hidden,
            ),
            learners=learners,
            solver=solver,
            task="regression" if regression else "classification",
            seed=seed,
        )

    return make


def tcga(seed: int) -> metis.Federation:
    made = metis.flamby_federation("tcga_brca", speeds=(SLOW, FAST, 0.1), seed=seed)
    made.solver = metis.VanillaSGD(0.01)  # a tenth of the benchmark's, with which its metric jumps from round to round
    return made


def lognormal(learners: int, spread: float) -> Callable[[np.random.Generator], list[float]]:
    return lambda rng: [float(pace) for pace in 0.1 * np.exp(spread * rng.standard_normal(learners))]


def daily(learners: list[metis.SimulatedLearner]) -> list[metis.SimulatedLearner]:
    """A day lasts 40 s here; every other learner is there from 8 to 18 o'clock."""
    office = metis.DailyAvailability(8, 18, day=40.0)
    return [replace(one, availability=office) if rank % 2 else one for rank, one in enumerate(learners)]


def seconds_of(exchanged: float) -> metis.Link:
    return metis.Link(latency=exchanged / 2)


CONDITIONS = (
    # --- those that the rule was found on ---
    Condition("uniform-iid", "Uniform & IID", False, digits_of()),
    Condition("skewed-5", "Skewed & Non-IID(5)", False, digits_of(kind="skewed", classes=5)),
    Condition("power-3", "Power Law & Non-IID(3)", False, digits_of(kind="power_law", classes=3)),
    Condition(
        "slowdown", "the largest learner slows down tenfold", False,
        digits_of(kind="skewed", classes=5, change=of(0, speed=slower_from(4.0, 10.0))),
    ),
    Condition(
        "late-joiner", "a very slow late joiner", False, digits_of(kind="skewed", classes=5, change=late_laptop)
    ),
    Condition(
        "exchange-1s", "an exchange of 1 s", False,
        digits_of(kind="skewed", classes=5, change=each(link=seconds_of(1.0))),
    ),
    Condition("hospitals", "eight hospitals, one with ten times the data", False, hospitals),
    Condition(
        "ms-batches", "batches of 2 ms, exchanges of 50 ms", False,
        digits_of(kind="skewed", classes=5, speeds=(0.002,) * 5 + (0.004,) * 5, change=each(link=seconds_of(0.05))),
    ),
    Condition(
        "learners-100", "100 learners, log-normal speeds", False, digits_of(batch=10, speeds=lognormal(100, 1.0))
    ),
    Condition(
        "laptop", "a laptop 100 times slower", False,
        digits_of(kind="skewed", classes=5, speeds=(FAST,) * 9 + (100 * FAST,)), rounds=8,
    ),
    Condition(
        "digits", "the digits, Power Law & Non-IID(3)", False,
        digits_of("digits", "power_law", 3, examples=1437, solver=metis.MomentumSGD(0.02, 0.9)),
    ),
    Condition(
        "brain-age", "brain age at 23 sites", False,
        table_of_sites("fcon1000_brain_age", (FAST, SLOW), 4, 16, metis.MomentumSGD(0.003, 0.75)),
    ),
    # --- fresh ones ---
    Condition("learners-3", "3 learners, 1 : 3 : 20", True, digits_of(classes=5, speeds=(0.03, 0.1, 0.6))),
    Condition(
        "heart-disease", "heart disease, 4 hospitals", True,
        table_of_sites("heart_disease", (SLOW, FAST), 8, 16, metis.MomentumSGD(0.003, 0.75)),
    ),
    Condition("tcga-brca", "TCGA-BRCA, 6 regions", True, tcga),
    Condition(
        "batchnorm", "BatchNorm, Skewed & Non-IID(5)", True,
        digits_of(kind="skewed", classes=5, network=normed),
    ),
    Condition(
        "adamw", "AdamW, Power Law & Non-IID(3)", True,
        digits_of(kind="power_law", classes=3, solver=metis.AdamW(0.002)),
    ),
    Condition(
        "unstable", "a learning rate at the edge, Skewed & Non-IID(3)", True,
        digits_of(kind="skewed", classes=3, solver=metis.MomentumSGD(0.3, 0.9)),
    ),
    Condition("daily", "half are there by day only", True, digits_of(kind="skewed", classes=5, change=daily)),
    Condition(
        "dropping", "learners drop out and come back", True,
        digits_of(kind="skewed", classes=5, change=each(availability=metis.RandomAvailability(8.0, 4.0))),
    ),
    Condition("all-equal", "8 equal learners, IID", True, digits_of(speeds=(0.1,) * 8)),
    Condition("all-equal-3", "8 equal learners, Non-IID(3)", True, digits_of(speeds=(0.1,) * 8, classes=3)),
    Condition(
        "huge-exchange", "batches of 0.1 s, exchanges of a minute", True,
        digits_of(kind="skewed", classes=5, speeds=(0.1,) * 8, change=each(link=seconds_of(60.0))),
    ),
    Condition(
        "extreme", "speeds from 1 to 1,000, Non-IID(5)", True,
        digits_of(kind="skewed", classes=5, speeds=[0.01 * 1000 ** (k / 9) for k in range(10)]), rounds=12,
    ),
    Condition(
        "tiny", "150 digits at 5 learners", True,
        digits_of("digits", "power_law", examples=150, batch=5, speeds=(0.03, 0.03, 0.3, 0.3, 0.3)),
    ),
    Condition("one", "one learner", True, digits_of(examples=1000, speeds=(0.1,))),
    Condition(
        "learners-200", "200 learners, log-normal speeds, Non-IID(5)", True,
        digits_of(batch=5, examples=2000, classes=5, speeds=lognormal(200, 1.0)), rounds=60,
    ),
    Condition(
        "cifar-uniform", "CIFAR-10 CNN, Uniform & IID", True,
        digits_of("cifar", examples=1000, batch=10, network=cnn), rounds=25, seeds=2, evaluations=100,
    ),
    Condition(
        "cifar-skewed", "CIFAR-10 CNN, Skewed & Non-IID(5)", True,
        digits_of("cifar", "skewed", 5, 1000, 10, network=cnn), rounds=25, seeds=2, evaluations=100,
    ),
    Condition(
        "cifar-power", "CIFAR-10 CNN, Power Law & Non-IID(3)", True,
        digits_of("cifar", "power_law", 3, 1000, 10, network=cnn), rounds=25, seeds=2, evaluations=100,
    ),
)  # fmt: skip

BY_NAME = {condition.name: condition for condition in CONDITIONS}


def horizon(condition: Condition, federation: metis.Federation) -> float:
    """Seconds of virtual time that a run may take."""
    return condition.rounds * slowest_epoch(federation)


def longest_exchange(federation: metis.Federation) -> float:
    size = federation.engine.layout.size * 4
    return max((exchange(one, size) for one in federation.learners), default=0.0)
