"""What a quick run must have measured; how large a figure is, is not asked: sizes are tiny, the machine may be busy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


def problems(name: str, folder: Path) -> list[str]:
    """What is missing or wrong in the results of a benchmark, a line each."""
    text, result = (folder / f"{name}.md").read_text("utf-8"), json.loads((folder / f"{name}.json").read_text("utf-8"))
    found = [] if "|---" in text else ["its page has no table"]
    if not (result["load_before"] >= 0 and result["machine"]["torch"]):
        found.append("it does not say on which machine it ran")
    try:
        found += [what for what, fine in CHECKS[name](result["figures"]) if not fine]
    except (KeyError, IndexError, ValueError) as problem:
        found.append(f"a figure is missing: {type(problem).__name__}: {problem}")
    return found


Check = Iterator[tuple[str, bool]]


def _positive(figures: Any) -> bool:
    """All numbers in there, and there are some."""
    numbers = list(_numbers(figures))
    return bool(numbers) and all(number > 0 for number in numbers)


def _numbers(figures: Any) -> Iterator[float]:
    if isinstance(figures, dict):
        figures = list(figures.values())
    if isinstance(figures, list):
        for figure in figures:
            yield from _numbers(figure)
    elif isinstance(figures, (int, float)):
        yield figures


def _mixing(figures: Figures) -> Check:
    yield "a speed is not positive", _positive([figures["metis"], figures["numpy_alone"]])


def _cached_update(figures: Figures) -> Check:
    yield f"drift is {figures['drift']}: float64 does round, but not far", 0 < figures["drift"] < 1e-12


def _sealed(figures: Figures) -> Check:
    yield "a time is not positive", all(_positive(seconds) for seconds in figures["seconds"].values())


def _slow_line(figures: Figures) -> Check:
    yield "a time is not positive", _positive([figures["round"]["seconds"], figures["noticed_seconds"]])
    yield "a round was shorter than the line allows", figures["round"]["seconds"] >= figures["least_seconds"]


def _startup(figures: Figures) -> Check:
    yield "a time is not positive", _positive(figures["seconds"])


def _simulator_overhead(figures: Figures) -> Check:
    yield "a time is not positive", _positive(figures["seconds"])


def _simulator_peers(figures: Figures) -> Check:
    rounds, common = figures["round_seconds"], {"Metis, 2 workers", "Metis, in-process"}
    yield "a way to simulate small models is missing", len(rounds["small 4"].keys() - common) == 1
    yield "a way to simulate medium models is missing", rounds["medium 2"].keys() == common
    yield "a time is not positive", _positive(rounds)


def _round_overhead(figures: Figures) -> Check:
    yield "a time is not positive", _positive(figures["round_seconds"])


def _wire(figures: Figures) -> Check:
    yield "not all of the four transfers were measured", len(figures["transfers"]) == len(figures["latency"]) == 4
    rates = [ways[key] for ways in figures["transfers"].values() for key in ("of_raw_memory", "of_raw_file")]
    yield "a rate is not positive", _positive([rates, figures["bare"]["plain"], figures["bare"]["mTLS"]])


def _wire_learners(figures: Figures) -> Check:
    yield "a time is not positive", _positive(figures)


def _time_to_accuracy(figures: Figures) -> Check:
    yield "a federation has no curve", bool(figures["curves"]) and all(figures["curves"].values())


def _idle_time(figures: Figures) -> Check:
    yield "a share of idle time is not one", all(0 <= idle <= 1 for rows in figures.values() for _, _, idle, _ in rows)


def _controller_memory(figures: Figures) -> Check:
    (size,) = figures["sizes"].values()
    yield "memory was not measured", _positive([row["rss"] for row in size["rounds"]])


def _load(figures: Figures) -> Check:
    for time in ("first", "second"):
        found = figures[time]
        yield f"the {time} time not all of 12 learners handed in", found["joined"] == found["handed_in"] == 12
        yield f"the {time} time there were failures: {found['failures']}", not found["failures"]


def _soak(figures: Figures) -> Check:
    samples = figures["samples"]
    yield f"it ended in round {samples[-1]['round']}", samples[-1]["round"] > 40
    yield "the number of threads grows", samples[-1]["threads"] <= samples[20]["threads"] + 2


def _large_model(figures: Figures) -> Check:
    yield "a policy was not measured", figures["policies"].keys() == {"sync_fedavg", "fedrec"}
    yield "a time is not positive", _positive([found["seconds"] for found in figures["policies"].values()])


def _any_figures(figures: Figures) -> Check:
    yield "nothing was measured", bool(figures)


CHECKS: dict[str, Callable[[Figures], Check]] = {
    "mixing": _mixing,
    "cached_update": _cached_update,
    "sealed": _sealed,
    "simulator_overhead": _simulator_overhead,
    "simulator_peers": _simulator_peers,
    "round_overhead": _round_overhead,
    "wire": _wire,
    "wire_learners": _wire_learners,
    "time_to_accuracy": _time_to_accuracy,
    "idle_time": _idle_time,
    "controller_memory": _controller_memory,
    "simulator_memory": _any_figures,
    "scale": _any_figures,
    "load": _load,
    "soak": _soak,
    "dashboard": _any_figures,
    "private_step": _any_figures,
    "precision": _any_figures,
    "secure_sum": _any_figures,
    "masked_round": _any_figures,
    "large_model": _large_model,
    "slow_line": _slow_line,
    "startup": _startup,
}
