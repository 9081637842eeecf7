"""A weighted average of N models of M numbers: against the memory's bandwidth, and against other systems.

    python benchmarks/mixing.py [--quick] [--no-peers] [--out FOLDER]

GB/s count the least traffic that an average needs: every model read once, the result written once. The limit is
measured beside it, a STREAM-like triad (a = b + s c, three arrays of 400 MB) with one thread and with two, before and
after each size. Flower's `aggregate_arrayrecords` and NVFlare's `WeightedAggregationHelper` average the same arrays in
their own environments, with one OpenMP thread and with two, whichever is faster. The best of several repeats counts
everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from _bench import SPENT_BYTES, Report, arguments, best, report
from _peers import Unavailable, ask

from metis.core.mixing import FullPass, MemoryStore
from metis.core.model import Layout, Model, TensorSpec
from metis.kernels import _kernels, use_all_processors

LEARNERS, NUMBERS = (2, 10, 100, 1000), (10**5, 10**6, 10**7, 10**8)
PEERS = {"Flower": ("flower", "flower_mixing"), "NVFlare": ("nvflare", "nvflare_mixing")}


def triad(numbers: int, threads: int, repeats: int) -> float:
    """GB/s."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    a, b, c = (torch.ones(numbers) for _ in range(3))
    seconds = best(lambda: torch.add(b, c, alpha=3.0, out=a), repeats)
    torch.set_num_threads(before)
    return 12 * numbers / seconds / 1e9


def average(learners: int, numbers: int, repeats: int) -> float:
    """Seconds in which the core makes a community model of so many local ones."""
    base = np.random.default_rng(1990).standard_normal(numbers, np.float32)
    layout = Layout((TensorSpec("w", (numbers,)),))
    models = [Model(layout, base * np.float32(1 + n / learners)) for n in range(learners)]
    community = FullPass(models[0], MemoryStore())

    def work() -> None:
        for n, model in enumerate(models):
            community.commit(f"learner-{n:04}", model, 100.0 + n, 1, None)
        community.publish()

    return best(work, repeats, least=0.2)


@contextmanager
def without_compiler() -> Iterator[None]:
    """As in an installation without the extra `fast`."""
    with mock.patch("metis.kernels._kernels", NoKernels()):
        yield


class NoKernels:
    def __call__(self) -> None: ...

    def cache_info(self) -> Any:
        return SimpleNamespace(currsize=0)


def gigabytes(learners: int, numbers: int) -> float:
    return 4 * numbers * (learners + 1) / 1e9


def measure(sheet: Report, quick: bool, peers: bool) -> None:
    most = 4e6 if quick else SPENT_BYTES / 6  # numbers in all: the models, and as much again in the worst peer
    sizes = [(n, m) for m in NUMBERS for n in LEARNERS if n * m <= most]
    repeats = 2 if quick else 3
    ours, numpy_alone, shares = {}, {}, {}
    _kernels()  # loaded once a process has mixed for a while

    def limit() -> dict[int, float]:
        return {threads: triad(10**5 if quick else 10**8, threads, 3) for threads in (1, 2)}

    limits = [limit()]
    for size in sizes:  # what the memory gives changes from minute to minute: what it gave just before and after counts
        ours[size] = gigabytes(*size) / average(*size, repeats)
        limits.append(limit())
        shares[size] = ours[size] / max(limits[-2][2], limits[-1][2])
        if size[1] >= 10**6 or quick:
            with without_compiler():
                numpy_alone[size] = gigabytes(*size) / average(*size, repeats)
    best_limit = {threads: max(found[threads] for found in limits) for threads in (1, 2)}
    sheet.say(f"Triad: up to {best_limit[1]:.1f} GB/s with one thread, {best_limit[2]:.1f} GB/s with two.")
    theirs: dict[str, dict[str, float]] = {}
    asked = {"sizes": sizes, "repeats": repeats}
    for name, (peer, script) in PEERS.items() if peers else ():
        try:
            runs = [ask(peer, script, asked, settings={"OMP_NUM_THREADS": threads}) for threads in ("1", "2")]
            seconds = {size: min(run[size] for run in runs) for size in runs[0]}
            theirs[name] = {size: gigabytes(*map(int, size.split("x"))) / value for size, value in seconds.items()}
        except Unavailable as problem:
            sheet.say(f"{name} was not measured: {problem}")
    head = ["models", "numbers each", "Metis, GB/s", "of the triad (2 threads)", "numpy alone, GB/s"]
    rows = [[*head, *(f"{p}, GB/s" for p in theirs)]]
    for n, m in sizes:
        mine = [ours[n, m], shares[n, m], numpy_alone.get((n, m), "")]
        rows.append([str(n), f"{m:.0e}", *mine, *(theirs[p][f"{n}x{m}"] for p in theirs)])
    sheet.table(rows)
    sheet.figures = {
        "triad": best_limit,
        "of_triad": {f"{n}x{m}": value for (n, m), value in shares.items()},
        "metis": {f"{n}x{m}": value for (n, m), value in ours.items()},
        "numpy_alone": {f"{n}x{m}": value for (n, m), value in numpy_alone.items()},
        "peers": theirs,
    }
    large = max((size for size in sizes if size[0] >= 10), key=lambda size: (size[1], size[0]))
    for size in sorted({large, (2, large[1]), (10, 10**5)}, reverse=True):
        share = shares[size]
        sheet.goal(
            f"full pass mixing, {size[0]} models of {size[1]:.0e} numbers", "at least 0.9 of the triad (2 threads)",
            f"{share:.2f} ({ours[size]:.1f} of {ours[size] / share:.1f} GB/s)", share >= 0.9, share / 0.9,
        )  # fmt: skip
    without = {size: numpy_alone[size] / ours[size] for size in numpy_alone}
    worst = min(without, key=lambda size: without[size])
    sheet.goal(
        "mixing without a compiler, from 1e+06 numbers on", "at least 0.5 of the compiled speed",
        f"{without[worst]:.2f} to {max(without.values()):.2f}", without[worst] >= 0.5, without[worst] / 0.5,
    )  # fmt: skip
    if theirs:
        name = max(theirs, key=lambda p: theirs[p]["{}x{}".format(*large)])
        times = ours[large] / theirs[name]["{}x{}".format(*large)]
        sheet.goal("the same, against the fastest peer", "at least 8 times", f"{times:.1f} times {name}", times >= 8)

    def draw(axes) -> None:
        for label, values in {"Metis": sheet.figures["metis"], **theirs}.items():
            chosen = [m for n, m in sizes if n == 10]
            axes.plot(chosen, [values[f"10x{m}"] for m in chosen], "o-", label=label)
        axes.axhline(best_limit[2], color="grey", linestyle="--", label="triad, 2 threads")
        axes.set(xscale="log", xlabel="numbers in a model", ylabel="GB/s", ylim=0)
        axes.legend(fontsize=8)

    sheet.chart("mixing", draw, "GB/s of a weighted average of 10 models against their size")


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    use_all_processors()  # as the controller and the simulator do
    with report(options, __doc__) as sheet:
        measure(sheet, options.quick, not options.no_peers)


if __name__ == "__main__":
    main()
