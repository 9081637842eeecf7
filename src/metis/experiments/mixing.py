"""How long a community model takes to compute, with the cache and with a full pass (Figure 4), measured here.

One asynchronous update request is timed: the local model of one learner is committed and a community model
published. With the cache that is O(M) for M numbers, whatever the number of learners; a full pass over the latest
models of N learners is O(MN).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from metis.core.community import CachedAverage, FullPass, MemoryStore
from metis.core.model import Layout, Model, TensorSpec
from metis.experiments.results import MixingTime

NETWORKS = (20, 56, 110, 200)  # ResNet-20 ... ResNet-200
LEARNERS = (10, 30, 100, 300, 1000)
_DISTINCT = 16  # models; more learners share them, which bounds memory but is too many for a processor's cache
_REPEATS = 5
_LEAST_SECONDS = 0.05  # of a measurement


def resnet_parameters(depth: int, classes: int = 100) -> int:
    """How many numbers the small-image ResNet of this depth shares."""
    from metis.learning import TorchEngine, cifar_resnet

    return TorchEngine(lambda: cifar_resnet((3, 32, 32), classes, depth)).layout.size


def measure_mixing(
    depths: Sequence[int] = NETWORKS,
    learners: Sequence[int] = LEARNERS,
    tell: Callable[[MixingTime], None] = lambda measured: None,
) -> list[MixingTime]:
    """Measure every size of model with every number of learners; medians of repeated measurements."""
    results = []
    for depth in depths:
        numbers = resnet_parameters(depth)
        models = _models(numbers)
        for count in learners:
            cached, full = _times(models, count)
            results.append(MixingTime(f"ResNet-{depth}", numbers, count, cached, full))
            tell(results[-1])
    return results


def _models(numbers: int) -> list[Model]:
    rng = np.random.default_rng(1990)
    layout = Layout((TensorSpec("weights", (numbers,)),))
    return [Model(layout, rng.standard_normal(numbers, dtype=np.float32)) for _ in range(_DISTINCT)]


def _times(models: Sequence[Model], learners: int) -> tuple[float, float]:
    """Seconds of one update request: with the cache, and with a full pass."""
    names = [f"learner-{number}" for number in range(learners)]

    def local_models() -> Iterator[tuple[str, Model]]:
        number = 0
        while True:  # each learner hands in another model each time
            yield names[number % learners], models[(number * 7 + number // learners) % len(models)]
            number += 1

    # Rebuilding the sum is on its own schedule and would be spread over many requests.
    cache = CachedAverage(models[0], MemoryStore(), rebuild_every=10**9)
    requests = local_models()
    for _ in range(learners):
        learner, model = next(requests)
        cache.commit(learner, model, 100.0, 1, None)
    cache.publish()

    def with_cache() -> None:
        learner, model = next(requests)
        cache.commit(learner, model, 100.0, 1, None)
        cache.publish()

    everyone = FullPass(models[0], MemoryStore())

    def full_pass() -> None:
        for number, name in enumerate(names):
            everyone.commit(name, models[number % len(models)], 100.0, 1, None)
        everyone.publish()

    return _median_seconds(with_cache), _median_seconds(full_pass)


def _median_seconds(work: Callable[[], None]) -> float:
    work()  # warms up
    measured = []
    for _ in range(_REPEATS):
        times = 0
        start = time.perf_counter()
        while True:
            work()
            times += 1
            seconds = time.perf_counter() - start
            if seconds >= _LEAST_SECONDS:
                break
        measured.append(seconds / times)
    return statistics.median(measured)
