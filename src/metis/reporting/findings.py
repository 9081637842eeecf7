"""What came out of runs, in sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from metis.core.costs import Costs, Energy
from metis.errors import ConfigError
from metis.reporting import summaries
from metis.runs.run import Run
from metis.text import listed, metric, number, percent, plural, seconds, size


def energy_unit(run: Run) -> str:
    learners = run.setting.learners
    return "J" if learners and learners[0].power.unit == "watt" else "ε s"


def lead(runs: list[Run]) -> str:
    """What was done, in two sentences for a reader who knows nothing about it."""
    setting = runs[0].setting
    facts = setting.facts
    network = f"the network {facts['network']}" if "network" in facts else "one network"
    data = f"the data set {facts['dataset']}" if "dataset" in facts else "data"
    examples = sum(learner.examples for learner in setting.learners)
    many = len(setting.learners)
    sentence = (
        f"{plural(many, 'learner')} trained {network} together on {data}: each kept its own part of "
        f"{examples:,} training examples to itself and only models were exchanged."
    )
    if many == 1:
        sentence = f"1 learner trained {network} on {data} with {examples:,} training examples."
    times = [learner.time_per_batch for learner in setting.learners if math.isfinite(learner.time_per_batch)]
    if times and max(times) >= 1.05 * min(times) > 0:  # what is measured is never quite the same
        sentence += (
            f" Their speeds differ: a batch took between {seconds(min(times))} and "
            f"{seconds(max(times))}, a ratio of {max(times) / min(times):.3g}."
        )
    if len(runs) > 1:
        sentence += f" This report compares {plural(len(runs), 'training policy', 'training policies')}."
    if differences := _differences(runs):
        sentence += (
            f" The runs do not belong to one federation: their {listed(differences)} differ, and the federation "
            "described here is that of the first. Not only the policy makes the results differ."
        )
    return sentence


def _differences(runs: list[Run]) -> list[str]:
    """What differs between the runs, though a comparison of policies keeps it fixed."""
    simulated = not any(run.setting.real_time for run in runs)  # otherwise times are measured, and never the same
    aspects: dict[str, Callable[[Run], Any]] = {
        "learners": lambda run: [
            (info.name, info.examples, info.batch_size, repr(info.time_per_batch) if simulated else "", info.power)
            for info in run.setting.learners
        ],
        "data": lambda run: [run.setting.facts.get(name) for name in ("dataset", "partition", "test_examples")],
        "networks": lambda run: (run.setting.facts.get("network"), run.setting.model_bytes),
    }
    return [name for name, of in aspects.items() if any(of(run) != of(runs[0]) for run in runs[1:])]


def comparable(runs: Sequence[Run]) -> list[Run]:
    """The runs, all with the first target that one of them has; runs that one table cannot show are refused."""
    runs = list(runs)
    for what, of in (("metrics", lambda run: run.setting.metric), ("units of energy", energy_unit)):
        if len(found := list(dict.fromkeys(map(of, runs)))) > 1:
            raise ConfigError(f"the runs have different {what}, {listed(found)}: report them one by one")
    target = next((run.setting.target for run in runs if run.setting.target is not None), None)
    return [
        run
        if run.setting.target == target
        else Run(replace(run.setting, target=target), run.events, run.community_model, run.wall_seconds, run.folder)
        for run in runs
    ]


def findings(runs: list[Run], names: list[str]) -> list[str]:
    """The result in a few sentences."""
    target = runs[0].setting.target
    sentences: list[str] = []
    if target is None:
        sentences += [_ending(run, name) for run, name in zip(runs, names, strict=True)]
    else:
        goal = f"{target.metric} {target.value:g}"
        reached = {name: run.costs_at_target for run, name in zip(runs, names, strict=True) if run.costs_at_target}
        if len(runs) > 1 and reached:
            sentences.append(
                _least(reached, names[0], f"reached {goal} first, after", "s of parallel time", _parallel_time)
            )
            sentences.append(_least(reached, names[0], f"needed the fewest update requests to {goal}:", "", _requests))
            sentences.append(_least_energy(reached, goal))
        elif reached:
            costs = reached[names[0]]
            sentences.append(
                f"{names[0]} reached {goal} after {number(costs.parallel_time)} s of parallel time and "
                f"{plural(costs.update_requests, 'update request')}."
            )
        missed = [name for name in names if name not in reached]
        if missed:
            sentences.append(f"{listed(missed)} did not reach {goal} before the run ended.")
        if len(runs) == 1:
            sentences.append(_ending(runs[0], names[0]))
    sentences += [_at_learners(run, name) for run, name in zip(runs, names, strict=True) if run.at_learners is not None]
    waiting = [(summaries.shares(run.costs)["idle"], name) for run, name in zip(runs, names, strict=True)]
    most, least = max(waiting)[0], min(waiting)[0]
    if len(runs) > 1 and most - least > 0.01:
        sharing = {share: [name for other, name in waiting if percent(other) == percent(share)]
                for share in (most, least)}  # fmt: skip
        sentences.append(
            f"Learners waited for others during {percent(most)} of their time under {listed(sharing[most])}, "
            f"and during {percent(least)} under {listed(sharing[least])}."
        )
    elif len(runs) == 1:
        sentences.append(f"Learners waited for others during {percent(most)} of their time.")
    return sentences + [_faults(run, name) for run, name in zip(runs, names, strict=True) if any(run.faults.values())]


def _faults(run: Run, name: str) -> str:
    """What went wrong on the way."""
    faults, parts = run.faults, []
    if faults["departures"]:
        parts.append(f"learners left {plural(faults['departures'], 'time')}")
    if faults["cuts"]:
        again = f", so that {size(faults['resent_bytes'])} travelled again" if faults["resent_bytes"] else ""
        parts.append(f"transfers were cut {plural(faults['cuts'], 'time')}{again}")
    share = percent(summaries.shares(run.costs)["transfer"])
    return f"Under {name} {' and '.join(parts)}; transfers took {share} of the time."


def _at_learners(run: Run, name: str) -> str:
    found = run.at_learners
    assert found is not None
    (low, last), (high, first) = found.worst, found.best
    return (
        f"{name} at {plural(len(found.ranked), 'learner')}: {found.metric} {metric(low)} at the worst ({last}), "
        f"{metric(found.median)} in the middle, {metric(high)} at the best ({first}); standard deviation "
        f"{metric(found.deviation)}."
    )


def _parallel_time(costs: Costs) -> float:
    return costs.parallel_time


def _requests(costs: Costs) -> float:
    return costs.update_requests


def _least_energy(reached: dict[str, Costs], goal: str) -> str:
    """Which policy used the least energy, by each definition: they may well disagree."""
    definitions: tuple[tuple[str, Callable[[Energy], float]], ...] = (
        ("by the paper's equation", lambda energy: energy.equation),
        ("if only training is charged", lambda energy: energy.active),
        ("if waiting is charged too", lambda energy: energy.idle_charged),
    )
    best = []
    for words, value in definitions:
        lowest = min(value(costs.energy) for costs in reached.values())
        names = [name for name, costs in reached.items() if value(costs.energy) == lowest]
        best.append((listed(names), words))
    if len({names for names, _ in best}) == 1:
        return f"{best[0][0]} used the least energy to {goal}, by all three definitions."
    return f"Least energy to {goal}: {listed([f'{names} {words}' for names, words in best])}."


def _least(reached: dict[str, Costs], first: str, what: str, unit: str, value: Callable[[Costs], float]) -> str:
    """Which policy has the lowest cost, and how far it is below that of the first row."""
    lowest = min(value(costs) for costs in reached.values())
    best = [name for name, costs in reached.items() if value(costs) == lowest]
    sentence = f"{listed(best)} {what} {number(lowest)}{' ' if unit else ''}{unit}"
    if first in reached and first not in best and lowest > 0:
        against = value(reached[first])
        sentence += f", compared with {number(against)}{' s' if unit else ''} under {first} "
        sentence += f"({against / lowest:.2f} times as much)"
    return sentence + "."


def _ending(run: Run, name: str) -> str:
    costs = run.costs
    came_out = "was not evaluated" if run.final_metric is None else f"ended with {run.setting.metric} "
    if run.final_metric is not None:
        came_out += metric(run.final_metric)
        if run.best_metric is not None and run.best_metric != run.final_metric:
            came_out += f" (best {metric(run.best_metric)})"
    return (
        f"{name} {came_out} after {plural(run.rounds, 'community model')}, {number(costs.parallel_time)} s of "
        f"parallel time and {plural(costs.update_requests, 'update request')}."
    )
