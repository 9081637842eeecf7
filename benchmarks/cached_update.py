"""One asynchronous update with the cached community model: flat in the number of learners, and how far it drifts.

    python benchmarks/cached_update.py [--quick] [--out FOLDER]

An update is a commit of one learner's new model and the publication of a community model. With the cache that is O(M),
whatever the number of learners N; a full pass over all latest models, O(MN), stands beside it. Measuring is that of
the paper's Figure 4 (`metis.reproduction.mixing`): all N take turns, so that load from outside hits all alike. The
drift is the largest difference between the cached sum after 100,000 updates without any rebuilding, and an exact sum
of the same models, relative to the largest number of the average.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from _bench import Report, arguments, best, report

from metis.core.mixing import CachedAverage, FullPass, MemoryStore
from metis.core.model import Layout, Model, TensorSpec
from metis.kernels import use_all_processors
from metis.reproduction.mixing import _cached_request, _median_seconds, _models

LEARNERS, NUMBERS = (10, 30, 100, 300, 1000), (10**5, 10**6, 10**7)


def full_pass(models: list[Model], learners: int) -> float:
    everyone = FullPass(models[0], MemoryStore())

    def work() -> None:
        for n in range(learners):
            everyone.commit(f"learner-{n}", models[n % len(models)], 100.0, 1, None)
        everyone.publish()

    return best(work, 1)


def drift(updates: int, numbers: int, learners: int = 100) -> float:
    """Relative error of the cached average after so many updates, none of which rebuilt the sum."""
    rng = np.random.default_rng(1990)
    layout = Layout((TensorSpec("w", (numbers,)),))
    models = [Model(layout, rng.standard_normal(numbers, np.float32)) for _ in range(997)]
    cache = CachedAverage(models[0], MemoryStore(), rebuild_every=10**9)
    held: dict[str, tuple[Model, float]] = {}
    for update, model in zip(range(updates), itertools.cycle(models), strict=False):
        learner, value = f"learner-{update % learners}", 1 / (1 + update % 89)  # sums of whole numbers would be exact
        cache.commit(learner, model, value, 1, None)
        held[learner] = (model, value)
    total = math.fsum(value for _, value in held.values())
    columns = np.stack([model.vector.astype(np.float64) * value for model, value in held.values()], axis=1)
    exact = np.array([math.fsum(row) / total for row in columns])
    mean = cache._sum / cache.normalization  # before it is rounded to float32
    return float(np.abs(mean - exact).max() / np.abs(exact).max())


def measure(sheet: Report, quick: bool) -> None:
    learners = (10, 100) if quick else LEARNERS
    repeats = 3 if quick else 41
    rows = [
        ["numbers", *(f"N = {n}, ms" for n in learners), "largest / smallest", f"full pass, N = {learners[-1]}, ms"]
    ]
    spread, cached = {}, {}
    for numbers in (10**4,) if quick else NUMBERS:
        models = _models(numbers)
        seconds = _median_seconds([_cached_request(models, count) for count in learners], repeats)
        spread[numbers], cached[numbers] = max(seconds) / min(seconds), seconds
        full = full_pass(models, learners[-1])
        rows.append([f"{numbers:.0e}", *(1000 * value for value in seconds), f"{spread[numbers]:.3f}", 1000 * full])
    sheet.table(rows)
    updates, size = (2000, 100) if quick else (100_000, 2000)
    error = drift(updates, size)
    sheet.say(f"Drift after {updates:,} updates without rebuilding, {size:,} numbers, 100 learners: {error:.1e}, "
             f"where float32 itself has {np.finfo(np.float32).eps:.1e}.")  # fmt: skip
    sheet.figures = {"learners": learners, "seconds": cached, "spread": spread, "drift": error}
    worst = max(spread.values())
    sheet.goal(
        f"cached update, N from {learners[0]} to {learners[-1]:,}", "flat within 10 %",
        ", ".join(f"{100 * (value - 1):.1f} % at {numbers:.0e}" for numbers, value in spread.items()), worst <= 1.1,
    )  # fmt: skip

    def draw(axes) -> None:
        for numbers, seconds in cached.items():
            axes.plot(learners, [1000 * value for value in seconds], "o-", label=f"{numbers:.0e} numbers")
        axes.set(xscale="log", yscale="log", xlabel="learners", ylabel="ms for an update")
        axes.legend(fontsize=8)

    sheet.chart("cached_update", draw, "Time of a cached update against the number of learners")


def main() -> None:
    options = arguments(__doc__).parse_args()
    use_all_processors()  # as the controller and the simulator do
    with report(options, __doc__) as sheet:
        measure(sheet, options.quick)


if __name__ == "__main__":
    main()
