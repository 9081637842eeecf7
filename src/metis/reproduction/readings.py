"""Two readings of one sentence of the paper: it holds in every environment, or on the whole, by their geometric mean.

Which of them a claim gets depends on its sentence; what the other would say is always reported beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from metis.reproduction import lookup
from metis.reproduction.environments import Environment
from metis.reproduction.verdicts import Comparison, Finding, Outcome, Part, Ratio, combined

# By what is compared, such as a rival: the comparisons of all environments.
Series: TypeAlias = Mapping[str, Sequence[Comparison]]


def in_general(series: Series, rule: str, least: float = 1.0) -> Finding:
    """Whether each of these ratios is more than `least` on the whole."""
    parts = [_part(words, compared, least, len(series)) for words, compared in series.items()]
    return Finding(parts, f"{rule}, in the geometric mean over the environments", "whole", everywhere(series, least))


def in_every_environment(parts: Sequence[Part], rule: str = "") -> Finding:
    """Parts of which each is about one environment, and what their means would say."""
    series: dict[str, list[Comparison]] = {}
    for part in parts:
        for one in part.compared:
            series.setdefault(one.rival.label, []).append(one)
    means = [mean(compared)[0].above(among=len(series)) for compared in series.values()]
    return Finding(parts, rule, "every", combined(means))


def everywhere(series: Series, least: float = 1.0) -> Outcome:
    """Whether every comparison is more than `least` by itself."""
    every = [one for compared in series.values() for one in compared]
    return combined(replace(one, least=least, among=len(every)).outcome for one in every)


def mean(compared: Iterable[Comparison]) -> tuple[Ratio, dict[str, Ratio]]:
    """Over environments, and for each of them.

    Policies of an environment have its data in common, and Sync is the same by round on both clusters: what has the
    same data is taken to err together.
    """
    found: dict[str, tuple[Environment, list[Ratio]]] = {}
    for one in compared:
        environment = one.own.environment
        found.setdefault(environment.name, (environment, []))[1].append(one.ratio)
    clusters = {environment.paper.cluster for environment, _ in found.values()}
    ratios, data = {}, []
    for environment, several in found.values():
        cluster = f"{environment.paper.cluster} " if len(clusters) > 1 else ""
        ratios[cluster + lookup.where(environment)] = Ratio.on_the_whole(several, [""] * len(several))
        data.append(lookup.where(environment))
    return Ratio.on_the_whole(ratios.values(), data), ratios


def spelled(whole: Ratio, ratios: Mapping[str, Ratio]) -> str:
    """A mean, what it is the mean of, and what is missing."""
    known = ", ".join(f"{where} {ratio.times}" for where, ratio in ratios.items() if ratio.kind != "unknown")
    missing = ", ".join(where for where, ratio in ratios.items() if ratio.kind == "unknown")
    text = f"{whole.times} on the whole" + (f": {known}" if known else "")
    return text + (f"; not run far enough: {missing}" if missing else "")


def _close(
    whole: Ratio, least: float, compared: Iterable[Comparison], *, among: int = 1
) -> tuple[str, str, list[Comparison]]:
    """Why a mean is open, what would decide it, and which comparisons have to be run further for it."""
    further = [one for one in compared if one.ratio.kind != "exact"]
    if whole.kind != "exact":
        return f"the mean over the environments is {whole.times}", "", further
    needed = whole.seeds_to_decide(least, among=among)
    needs = "" if needed is None else f"about {needed / whole.seeds:.1f} times as many seeds"
    return f"the mean over the environments, {whole.times}, is too close to ×{least:g}", needs, further


def _part(words: str, compared: Sequence[Comparison], least: float, among: int) -> Part:
    whole, ratios = mean(compared)
    outcome = whole.above(least, among=among)
    text = f"{words} {spelled(whole, ratios)}".strip()
    size = f"{words} {whole.times}".strip()
    if outcome != "open":
        return Part(outcome, text, compared, size=size)
    why, needs, further = _close(whole, least, compared, among=among)
    return Part(outcome, text, further, f"{words}: {why}" if words else why, needs, size=size)


def within(compared: Sequence[Comparison], low: float, high: float, rule: str) -> Finding:
    """Whether a ratio lies between two on the whole; the other reading asks each environment."""
    whole, ratios = mean(compared)
    outcome = _between(whole, low, high)
    why, needs, further = "", "", list(compared)
    if outcome == "open":
        # Which edge it is too close to; one that only one of two policies reaches is never open.
        edge = low if whole.kind == "unknown" else min((low, high), key=lambda edge: abs(math.log(whole.mean / edge)))
        why, needs, further = _close(whole, edge, compared)
    every = combined(_between(one.ratio, low, high, among=len(compared)) for one in compared)
    part = Part(outcome, spelled(whole, ratios), further, why, needs, size=whole.times)
    return Finding([part], f"{rule}, in the geometric mean over the environments", "whole", every)


def _between(ratio: Ratio, low: float, high: float, *, among: int = 1) -> Outcome:
    above, beyond = ratio.above(low, among=among), ratio.above(high)
    if above == "fails" or beyond == "holds":
        return "fails"
    return "holds" if above == "holds" and beyond == "fails" else "open"
