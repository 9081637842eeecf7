"""How long a community model takes to compute, with the cache and with a full pass (Figure 4), measured here.

One asynchronous update request is timed: the local model of one learner is committed and a community model
published. With the cache that is O(M) for M numbers, whatever the number of learners; a full pass over the latest
models of N learners is O(MN).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from metis.core.mixing import CachedAverage, FullPass, MemoryStore
from metis.core.model import Layout, Model, TensorSpec
from metis.reproduction.tables import MixingTime

NETWORKS = (20, 56, 110, 200)  # ResNet-20 ... ResNet-200
LEARNERS = (10, 30, 100, 300, 1000)
_DISTINCT = 10  # models; more learners share them, which bounds memory, yet they do not fit in a processor's cache
_CACHED_REPEATS, _FULL_PASS_REPEATS = 41, 3
_MIN_SECONDS = 0.02  # of a measurement


def resnet_parameters(depth: int, classes: int = 100) -> int:
    """How many numbers a model of the small-image ResNet of this depth has."""
    from metis.learning import TorchEngine, cifar_resnet

    return TorchEngine(lambda: cifar_resnet((3, 32, 32), classes, depth)).layout.size


def measure_mixing(
    depths: Sequence[int] = NETWORKS,
    learners: Sequence[int] = LEARNERS,
    report: Callable[[MixingTime], None] = lambda measured: None,
) -> list[MixingTime]:
    """Measure every size of model with every number of learners; medians of repeated measurements."""
    results = []
    for depth in depths:
        numbers = resnet_parameters(depth)
        models = _models(numbers)
        cached = _median_seconds([_cached_request(models, count) for count in learners], _CACHED_REPEATS)
        full = _median_seconds([_full_pass(models, count) for count in learners], _FULL_PASS_REPEATS)
        for count, with_cache, without in zip(learners, cached, full, strict=True):
            results.append(MixingTime(f"ResNet-{depth}", numbers, count, with_cache, without))
            report(results[-1])
    return results


def _models(numbers: int) -> list[Model]:
    rng = np.random.default_rng(1990)
    layout = Layout((TensorSpec("weights", (numbers,)),))
    return [Model(layout, rng.standard_normal(numbers, dtype=np.float32)) for _ in range(_DISTINCT)]


def _cached_request(models: Sequence[Model], learners: int) -> Callable[[], None]:
    """One update request among this many learners: a model is committed and a community model published."""
    # The sum is rebuilt rarely, and its cost would be spread over many requests.
    cache = CachedAverage(models[0], MemoryStore(), rebuild_every=10**9)
    names = [f"learner-{number}" for number in range(learners)]
    requests = itertools.count()
    half = len(models) // 2

    def request() -> None:
        # Each learner sends another model than before. For any multiple of ten learners its old and its new model were
        # last read equally many requests ago, so that the processor's cache helps all sizes equally.
        number = next(requests)
        model = models[(number + number // learners * half) % len(models)]
        cache.commit(names[number % learners], model, 100.0, 1, None)
        cache.publish()

    for number in range(learners):
        cache.commit(names[number], models[(number + half) % len(models)], 100.0, 1, None)
    return request


def _full_pass(models: Sequence[Model], learners: int) -> Callable[[], None]:
    """A community model from the latest models of all learners, without the cache."""
    everyone = FullPass(models[0], MemoryStore())
    names = [f"learner-{number}" for number in range(learners)]

    def request() -> None:
        for number, name in enumerate(names):
            everyone.commit(name, models[number % len(models)], 100.0, 1, None)
        everyone.publish()

    return request


def _median_seconds(works: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    """Seconds of each work. They take turns, each measured relative to its turn, which other programs may slow down."""
    for work in works:
        work()  # warms up
    paces, shares = [], []
    for turn in range(repeats):
        seconds = [0.0] * len(works)
        order = range(len(works)) if turn % 2 else reversed(range(len(works)))
        for index in order:
            times = 0
            start = time.perf_counter()
            while (elapsed := time.perf_counter() - start) < _MIN_SECONDS:
                works[index]()
                times += 1
            seconds[index] = elapsed / times
        paces.append(statistics.mean(seconds))
        shares.append([value / paces[-1] for value in seconds])
    pace = statistics.median(paces)
    return [pace * statistics.median(share[index] for share in shares) for index in range(len(works))]
