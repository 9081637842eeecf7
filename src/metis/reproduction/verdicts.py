"""Comparing costs over seeds: how many times cheaper, with which interval, and what follows from it.

A policy that did not reach the target within its run costs at least what it had cost at the end. So a comparison with
it has a bound, which may decide as well as a number; where nothing reached the target, nothing follows. A bound among
numbers is a censored observation. A tie is shown, too: the interval lies within a factor of 1.25.

Seeds are blocks: a seed divides the data alike for all policies, so that some seeds are slow for all of them. What is
left of ln(time) without the mean of its policy and that of its seed is the spread of a comparison, measured over all
policies of the same domain and the same kind of data, IID or Non-IID, that several seeds brought to the target.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from metis.reproduction.censored import censored_normal
from metis.reproduction.environments import Cell, Environment
from metis.reproduction.schedule import schedule_cell
from metis.reproduction.tables import COSTS, Cost, Evidence, costs_by_seed
from metis.reproduction.timings import timed, training_share
from metis.runs.run import Run

Outcome = Literal["holds", "fails", "tie", "open"]
TIE = 1.05  # of numbers without an interval, as in the paper's tables
EQUIVALENT = 1.25  # of intervals
# Standard deviation of ln(cost) from seed to seed until there are enough runs to say it; about that of BrainAge.
PRIOR_SPREAD = 0.25
_ENOUGH = 6  # degrees of freedom, to measure a spread with
_LEAST_SPREAD = 0.02  # times are those of evaluations: seeds that agree do not mean that there is none


BySeed: TypeAlias = Mapping[int, Cost]


@dataclass(frozen=True)
class Source:
    """Where costs come from: our runs, or the paper's tables."""

    name: str
    costs: Callable[[Cell, str], BySeed]
    spread: Mapping[str, float] = field(default_factory=dict)  # of ln(cost) within a seed, by kind of data

    def ratio(self, own: Cell, rival: Cell, name: str) -> Ratio:
        """How many times the cost of the first the second has."""
        mine, theirs = self.costs(own, name), self.costs(rival, name)
        pairs = [(mine[seed], theirs[seed]) for seed in mine if seed in theirs]
        return Ratio.of(pairs, self.spread.get(kind_of_data(own.environment), 0.0))

    def compare(self, own: Cell, rival: Cell, name: str, *, among: int = 1) -> Comparison:
        """Whether the second's cost is more than the first's, which is one `among` so many questions."""
        return Comparison(own, rival, self.ratio(own, rival, name), among=among)


@dataclass(frozen=True)
class Ratio:
    """The geometric mean over seeds of a quotient of costs, or a bound of it."""

    mean: float = math.nan
    kind: Literal["exact", "at least", "at most", "unknown"] = "unknown"
    seeds: int = 0
    spread: float = 0.0

    @staticmethod
    def of(pairs: Iterable[tuple[Cost, Cost]], spread: float) -> Ratio:
        """Of the second's cost over the first's; pairs in which neither reached the target say nothing.

        Nor do the others, if most pairs are such. Where most are exact, the mean is the likeliest one of a normal
        distribution of which the others are known only on one side: a run that has only begun says nothing, one that
        went on for much longer than the others pulls the mean. Where fewer are, there is a bound of the mean.
        """
        exact, at_least, at_most, silent = list[float](), list[float](), list[float](), 0
        for own, rival in pairs:
            if not own.reached and not rival.reached:
                silent += 1
                continue
            found = at_most if not own.reached else at_least if not rival.reached else exact
            found.append(math.log(rival.value) - math.log(own.value))
        values = exact + at_least + at_most
        if len(values) <= silent:
            return Ratio()
        if spread and len(exact) < len(values) < 2 * len(exact):
            return Ratio._of_censored(exact, at_least, at_most, spread)
        if at_least and at_most:
            return Ratio()
        kind: Literal["exact", "at least", "at most"] = "at least" if at_least else "at most" if at_most else "exact"
        if spread and len(values) > _ENOUGH:
            # A seed has the same division of the data for both, so their quotient spreads less than their costs do.
            spread = max(_wider(len(values) - 1) * statistics.stdev(values) / math.sqrt(2), _LEAST_SPREAD)
        return Ratio(math.exp(statistics.mean(values)), kind, len(values), spread)

    @staticmethod
    def _of_censored(
        exact: Sequence[float], at_least: Sequence[float], at_most: Sequence[float], spread: float
    ) -> Ratio:
        """Of values of ln(quotient), some of which are only known on one side."""
        count = len(exact) + len(at_least) + len(at_most)
        own = count > _ENOUGH  # a spread of their own, as with values that are all exact
        mean, found, certain = censored_normal(exact, at_least, at_most, None if own else spread * math.sqrt(2))
        if own:
            found = max(_wider(count - 1) * found * math.sqrt(count / (count - 1)), _LEAST_SPREAD * math.sqrt(2))
        return Ratio(math.exp(mean), "exact", count, found / math.sqrt(2) * math.sqrt(count / certain))

    @staticmethod
    def on_the_whole(ratios: Iterable[Ratio], groups: Sequence[str] | None = None) -> Ratio:
        """The geometric mean of several, not known if most of them are not.

        Those of the same group err together. Where only one of two policies ever reaches the target, the mean of the
        others is a bound.
        """
        ratios = list(ratios)
        groups = [str(number) for number in range(len(ratios))] if groups is None else groups
        known = [ratio for ratio in ratios if ratio.kind != "unknown"]
        kinds = {ratio.kind for ratio in known} - {"exact"}
        if not known or 2 * len(known) < len(ratios) or len(kinds) > 1:
            return Ratio()
        finite = [ratio for ratio in known if 0 < ratio.mean < math.inf]
        if not finite:
            return known[0]
        errors: dict[str, float] = {}
        for ratio, group in zip(ratios, groups, strict=True):
            if ratio in finite:
                errors[group] = errors.get(group, 0.0) + ratio.error
        count = len(finite)
        mean = math.exp(statistics.mean(math.log(ratio.mean) for ratio in finite))
        spread = math.hypot(*errors.values()) / count * math.sqrt(count / 2)
        return Ratio(mean, kinds.pop() if kinds else "exact", count, spread)

    @property
    def interval(self) -> tuple[float, float]:
        """In which the mean lies with 95 %, by the spread from seed to seed."""
        return self._within(deviations())

    @property
    def error(self) -> float:
        """The standard error of ln(mean)."""
        return self.spread * math.sqrt(2 / self.seeds) if self.seeds else math.inf

    def _within(self, errors: float) -> tuple[float, float]:
        half = errors * self.error
        return self.mean * math.exp(-half), self.mean * math.exp(half)

    def seeds_to_decide(self, least: float = 1.0, *, among: int = 1) -> int | None:
        """How many seeds would decide if mean and spread stayed as they are; None if no number of them would."""
        if self.kind != "exact" or not self.spread:
            return None
        above = math.log(self.mean / least)
        distances = [above / deviations() if above > 0 else -above / deviations(among)]
        if least == 1:
            distances.append((math.log(EQUIVALENT) - abs(above)) / deviations())
        needed = [2 * (self.spread / distance) ** 2 for distance in distances if distance > 0]
        return math.ceil(min(needed)) if needed else None

    def short_of(self, least: float = 1.0, *, among: int = 1) -> float:
        """How many times as far a run that has only a bound must go to decide, if it does not reach the target."""
        low, high = self.interval[0], self._within(deviations(among))[1]
        return least / low if self.kind == "at least" else high / least

    def above(self, least: float = 1.0, *, among: int = 1) -> Outcome:
        """Whether it is more than this; a tie is one of 1.

        It is one `among` so many ratios of which each can contradict a claim, and one would do so by chance if each had
        its own 5 %. All of them are needed to confirm it, which chance does not make easier.
        """
        low = self.interval[0]
        high = self._within(deviations(among))[1]
        exact = self.kind == "exact"
        if exact and least == 1 and self.spread == 0 and abs(math.log(self.mean)) <= math.log(TIE):
            return "tie"
        if self.kind in ("exact", "at least") and low > least:
            return "holds"
        if self.kind in ("exact", "at most") and (high < least or (self.spread == 0 and high <= least)):
            return "fails"
        within = low > 1 / EQUIVALENT and self.interval[1] < EQUIVALENT
        return "tie" if exact and least == 1 and within else "open"

    @property
    def times(self) -> str:
        """With a sign where it is a number."""
        return f"×{self}" if self.kind != "unknown" and 0 < self.mean < math.inf else str(self)

    def __str__(self) -> str:
        if self.kind == "unknown":
            return "not known"
        if not 0 < self.mean < math.inf:
            return "only the first reaches the target" if self.mean else "only the second reaches the target"
        sign = {"exact": "", "at least": "≥ ", "at most": "≤ "}[self.kind]
        low, high = self.interval
        span = "" if self.spread == 0 or self.kind != "exact" else f" [{low:.2f}, {high:.2f}]"
        return f"{sign}{self.mean:.2f}{span}"


def deviations(among: int = 1) -> float:
    """Those of an interval of 95 % for so many numbers together."""
    return statistics.NormalDist().inv_cdf(1 - 0.025 / among)


@dataclass(frozen=True)
class Comparison:
    """Of two policies in an environment."""

    own: Cell
    rival: Cell
    ratio: Ratio  # the rival's cost over its own
    least: float = 1.0
    among: int = 1

    @property
    def outcome(self) -> Outcome:
        return self.ratio.above(self.least, among=self.among)


@dataclass(frozen=True)
class Part:
    """One place in which a claim holds or not, such as an environment."""

    outcome: Outcome
    text: str
    compared: Sequence[Comparison] = ()  # what it follows from
    why: str = ""  # it is open, and what would decide it, where that does not follow from the comparisons
    needs: str = ""
    seeds: int = 0  # that it was decided by, where there are no comparisons

    @property
    def fewest_seeds(self) -> int:
        """Of a comparison that is decided; 0 where that says nothing."""
        return min((one.ratio.seeds for one in self.compared if one.outcome != "open"), default=self.seeds)


@dataclass(frozen=True)
class Finding:
    """What a check found: its parts, and an explanation of how it was decided."""

    parts: Sequence[Part]
    rule: str = ""
    reading: Literal["every", "whole", ""] = ""  # in every environment, or on the whole
    other: Outcome | None = None  # by the other reading

    @property
    def outcome(self) -> Outcome:
        return combined(part.outcome for part in self.parts)

    @property
    def sentence(self) -> str:
        return "; ".join(part.text for part in self.parts)

    @property
    def marks(self) -> list[str]:
        """What a reader of the verdict alone should know."""
        compared = [one for part in self.parts for one in part.compared]
        if self.outcome == "fails" and self.reading == "every":  # one place is enough
            seeds = max((one.ratio.seeds for one in compared if one.outcome == "fails"), default=0)
        else:
            seeds = min((part.fewest_seeds for part in self.parts if part.fewest_seeds), default=0)
        found = ["partly by one seed"] if self.outcome != "open" and seeds == 1 else []
        ties = self.outcome == "holds" and any(part.outcome == "tie" for part in self.parts)
        return [*found, "with a tie"] if ties else found

    @property
    def open(self) -> list[Comparison]:
        """What the other parts still need."""
        return [one for part in self.parts if part.outcome == "open" for one in part.compared if one.outcome == "open"]


def combined(outcomes: Iterable[Outcome]) -> Outcome:
    """What is said to hold everywhere fails in one place; all ties are a tie."""
    found = set(outcomes)
    order: tuple[Outcome, ...] = ("fails", "open", "holds", "tie")
    return next((outcome for outcome in order if outcome in found), "open")


def ours(evidence: Evidence, spread: Mapping[str, float] | None = None) -> Source:
    """Our runs, with every seed that there is; their spread is measured, or given."""

    costs = functools.partial(costs_by_seed, evidence)
    if spread is not None:
        return Source("ours", costs, spread)
    by_data: dict[str, list[Environment]] = {}
    for environment in evidence.environments.values():
        by_data.setdefault(kind_of_data(environment), []).append(environment)
    spread = {data: _spread(evidence, found) or PRIOR_SPREAD for data, found in by_data.items()}
    return Source("ours", costs, spread)


def kind_of_data(environment: Environment) -> str:
    """Where classes are skewed, runs differ more from seed to seed."""
    iid = environment.config.partition.classes == "iid"
    return f"{environment.paper.domain} {'IID' if iid else 'Non-IID'}"


def _spread(evidence: Evidence, environments: Iterable[Environment]) -> float | None:
    """The standard deviation of ln(parallel time) that neither policy nor seed explains; None if few runs say it.

    A time is known only up to the evaluation before it: with long rounds all seeds may reach the target in the same
    one. It is enlarged for how few runs it was measured with, as Student's distribution is wider than the normal one.
    """
    squares, freedom = 0.0, 0
    for environment in environments:
        times = {
            (cell.label, seed): _when(run)
            for cell in environment.cells
            for seed, run in evidence.seeds(cell).items()
            if run.costs_at_target is not None
        }
        left, free = _unexplained({key: at for key, (at, _) in times.items()})
        if free:
            squares += left + free * statistics.mean(width**2 / 12 for _, width in times.values())
            freedom += free
    return _wider(freedom) * math.sqrt(squares / freedom) if freedom >= _ENOUGH else None


def _unexplained(values: Mapping[tuple[str, int], float]) -> tuple[float, int]:
    """Squares of what is left of values by policy and seed without the effects of both, and its degrees of freedom."""
    policies, seeds = (list(dict.fromkeys(key[index] for key in values)) for index in (0, 1))
    design = np.zeros((len(values), len(policies) + len(seeds)))
    for row, (policy, seed) in enumerate(values):
        design[row, policies.index(policy)] = design[row, len(policies) + seeds.index(seed)] = 1.0
    found = np.fromiter(values.values(), np.float64)
    effects, _, rank, _ = np.linalg.lstsq(design, found, rcond=None)
    return float(np.sum((found - design @ effects) ** 2)), len(values) - int(rank)


def _wider(freedom: int) -> float:
    """How much wider than the normal one Student's distribution is, at 95 %: its expansion in 1 / freedom."""
    normal = deviations()
    return 1 + (normal**2 + 1) / (4 * freedom) + (5 * normal**4 + 16 * normal**2 + 3) / (96 * freedom**2)


def _when(run: Run) -> tuple[float, float]:
    """ln of the time at which a run reached its target, and how long before, in ln, it had last been evaluated."""
    assert run.costs_at_target is not None
    reached = run.costs_at_target.parallel_time
    before = max((point.at for point in run.history if 0 < point.at < reached), default=reached / 2)
    return math.log(reached), math.log(reached / before)


COLUMN = "its column EC"


def published(*, column: bool = False) -> Source:
    """The paper's tables; energies follow from the schedule of each row with the times that it took.

    Or, for active time, its column EC, in which Sync's learners are charged for waiting and SemiSync's are not.
    """
    if column:
        return Source(COLUMN, functools.partial(_published_costs, column=True))
    return Source("the paper's tables", _published_costs)


def _published_costs(cell: Cell, name: str, column: bool = False) -> BySeed:
    row = cell.published
    if row is None:
        return {}
    if not row.reached:
        return {0: Cost(math.inf, reached=False)}
    if name in ("parallel_time", "communication_cost"):
        value = getattr(row, name)
        return {} if value is None else {0: Cost(float(value))}
    if row.energy is None:
        return {}
    if column:
        return {0: Cost(row.energy)}
    value = COSTS[name](schedule_cell(timed(cell, "published")).run.costs)
    return {0: Cost(value * training_share(cell) if name == "energy_active" else value)}
