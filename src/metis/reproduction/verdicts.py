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
from dataclasses import dataclass, field, replace
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
_MANY_SEEDS = 1000
_LEAST_SPREAD = 0.02  # times are those of evaluations: seeds that agree do not mean that there is none


BySeed: TypeAlias = Mapping[int, Cost]


@dataclass(frozen=True)
class Spread:
    """A standard deviation of ln(cost) from seed to seed, and from how many degrees of freedom it is known."""

    deviation: float = 0.0
    freedom: float = math.inf


NO_SPREAD = Spread()


@dataclass(frozen=True)
class Source:
    """Where costs come from: our runs, or the paper's tables."""

    name: str
    costs: Callable[[Cell, str], BySeed]
    spread: Mapping[str, Spread] = field(default_factory=dict)  # within a seed, by kind of data

    def ratio(self, own: Cell, rival: Cell, name: str) -> Ratio:
        """How many times the cost of the first the second has."""
        mine, theirs = self.costs(own, name), self.costs(rival, name)
        pairs = [(mine[seed], theirs[seed]) for seed in mine if seed in theirs]
        return Ratio.of(pairs, self.spread.get(kind_of_data(own.environment), NO_SPREAD))

    def compare(self, own: Cell, rival: Cell, name: str, *, among: int = 1) -> Comparison:
        """Whether the second's cost is more than the first's, which is one `among` so many questions."""
        return Comparison(own, rival, self.ratio(own, rival, name), among=among)


@dataclass(frozen=True)
class Ratio:
    """The geometric mean over seeds of a quotient of costs, or a bound of it."""

    mean: float = math.nan
    kind: Literal["exact", "at least", "at most", "unknown"] = "unknown"
    seeds: int = 0
    spread: float = 0.0  # of each of the two, so that of the quotient is √2 times as much
    freedom: float = math.inf

    @staticmethod
    def of(pairs: Iterable[tuple[Cost, Cost]], spread: Spread) -> Ratio:
        """Of the second's cost over the first's; pairs in which neither reached the target say nothing.

        Nor do the others, if most pairs are such. Where most are exact, the mean is the likeliest one of a normal
        distribution of which the others are known only on one side: a run that has only begun says nothing, one that
        went on for much longer than the others pulls the mean. Where fewer are, there is a bound of the mean, to which
        every run contributes as far as it went.
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
        deviation, freedom = spread.deviation, spread.freedom
        if deviation and len(exact) < len(values) < 2 * len(exact):
            return Ratio._of_censored(exact, at_least, at_most, spread)
        if at_least and at_most:
            return Ratio()
        kind: Literal["exact", "at least", "at most"] = "at least" if at_least else "at most" if at_most else "exact"
        if deviation and len(values) > _ENOUGH:
            # A seed has the same division of the data for both, so their quotient spreads less than their costs do.
            deviation = max(statistics.stdev(values) / math.sqrt(2), _LEAST_SPREAD)
            freedom = len(values) - 1
        return Ratio(math.exp(statistics.mean(values)), kind, len(values), deviation, freedom)

    @staticmethod
    def _of_censored(
        exact: Sequence[float], at_least: Sequence[float], at_most: Sequence[float], spread: Spread
    ) -> Ratio:
        """Of values of ln(quotient), some of which are only known on one side.

        They have a spread of their own, as values that are all exact, if they say as much as enough of those: a run
        that has only begun adds nothing.
        """
        mean, own, certain = censored_normal(exact, at_least, at_most)
        freedom = certain - 1
        if freedom < _ENOUGH - 1e-3:
            mean, own, certain = censored_normal(exact, at_least, at_most, spread.deviation * math.sqrt(2))
            freedom = spread.freedom
        else:
            own = max(own * math.sqrt(certain / freedom), _LEAST_SPREAD * math.sqrt(2))
        count = len(exact) + len(at_least) + len(at_most)
        return Ratio(math.exp(mean), "exact", count, own / math.sqrt(2) * math.sqrt(count / certain), freedom)

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
        freedoms: dict[str, float] = {}
        for ratio, group in zip(ratios, groups, strict=True):
            if ratio in finite:
                errors[group] = errors.get(group, 0.0) + ratio.error
                freedoms[group] = min(freedoms.get(group, math.inf), ratio.freedom)
        count = len(finite)
        mean = math.exp(statistics.mean(math.log(ratio.mean) for ratio in finite))
        whole = math.hypot(*errors.values())
        # Of a sum of variances that are known from few values each (Satterthwaite); that some may be the same pooled
        # one makes little difference, as that has many.
        few = sum(error**4 / freedoms[group] for group, error in errors.items())
        spread, freedom = whole / count * math.sqrt(count / 2), whole**4 / few if few else math.inf
        return Ratio(mean, kinds.pop() if kinds else "exact", count, spread, freedom)

    @property
    def interval(self) -> tuple[float, float]:
        """In which the mean lies with 95 %, by the spread from seed to seed."""
        return self._within()

    @property
    def error(self) -> float:
        """The standard error of ln(mean)."""
        return self.spread * math.sqrt(2 / self.seeds) if self.seeds else math.inf

    def _within(self, among: int = 1) -> tuple[float, float]:
        half = deviations(among, self.freedom) * self.error
        return self.mean * math.exp(-half), self.mean * math.exp(half)

    def seeds_to_decide(self, least: float = 1.0, *, among: int = 1) -> int | None:
        """How many seeds would decide if mean and spread stayed as they are; None if no number of them would."""
        return self.seeds_until(lambda ratio: ratio.above(least, among=among) != "open")

    def seeds_until(self, decided: Callable[[Ratio], bool]) -> int | None:
        if self.kind != "exact" or not self.spread:
            return None
        return next((seeds for seeds in range(1, _MANY_SEEDS) if decided(self.with_seeds(seeds))), None)

    def with_seeds(self, seeds: int) -> Ratio:
        """The same mean and spread by so many seeds."""
        return replace(self, seeds=seeds, freedom=seeds - 1 if seeds > _ENOUGH else self.freedom)

    def short_of(self, least: float = 1.0, *, among: int = 1) -> float:
        """How many times as far a run that has only a bound must go to decide, if it does not reach the target."""
        low, high = self.interval[0], self._within(among)[1]
        return least / low if self.kind == "at least" else high / least

    def above(self, least: float = 1.0, *, among: int = 1) -> Outcome:
        """Whether it is more than this; a tie is one of 1.

        It is one `among` so many ratios of which each can contradict a claim, and one would do so by chance if each had
        its own 5 %. All of them are needed to confirm it, which chance does not make easier.
        """
        low = self.interval[0]
        high = self._within(among)[1]
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
        return self.written()

    def written(self, among: int = 1) -> str:
        """With a sign where it is a number, and the interval that holds for so many numbers together."""
        number = self._number(among)
        return f"×{number}" if self.kind != "unknown" and 0 < self.mean < math.inf else number

    def __str__(self) -> str:
        return self._number()

    def _number(self, among: int = 1) -> str:
        if self.kind == "unknown":
            return "not known"
        if not 0 < self.mean < math.inf:
            return "only the first reaches the target" if self.mean else "only the second reaches the target"
        sign = {"exact": "", "at least": "≥ ", "at most": "≤ "}[self.kind]
        low, high = self._within(among)
        span = "" if self.spread == 0 or self.kind != "exact" else f" [{low:.2f}, {high:.2f}]"
        return f"{sign}{self.mean:.2f}{span}"


def deviations(among: int = 1, freedom: float = math.inf) -> float:
    """Those of an interval of 95 % for so many numbers together; more if the deviation is known from few values.

    Student's distribution, by its expansion in 1 / freedom, which is good to one percent from six on.
    """
    z = statistics.NormalDist().inv_cdf(1 - 0.025 / among)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


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
    size: str = ""  # of the effect, where it is not that of one comparison

    @property
    def decided_by(self) -> list[int]:
        """The seeds of each comparison that is decided."""
        found = [one.ratio.seeds for one in self.compared if one.outcome != "open"]
        return found or ([self.seeds] if self.seeds else [])


@dataclass(frozen=True)
class Finding:
    """What a check found: its parts, and an explanation of how it was decided."""

    parts: Sequence[Part]
    rule: str = ""
    reading: Literal["every", "whole", ""] = ""  # in every environment, or on the whole
    other: Outcome | None = None  # by the other reading
    note: str = ""  # that a reader of the verdict alone should know

    @property
    def outcome(self) -> Outcome:
        return combined(part.outcome for part in self.parts)

    @property
    def sentence(self) -> str:
        return "; ".join(part.text for part in self.parts)

    @property
    def marks(self) -> list[str]:
        """What a reader of the verdict alone should know."""
        seeds = [seeds for part in self.parts for seeds in part.decided_by]
        if self.outcome == "fails" and self.reading == "every":  # one place is enough
            compared = [one for part in self.parts for one in part.compared]
            seeds = [max((one.ratio.seeds for one in compared if one.outcome == "fails"), default=0)]
        elif self.reading == "whole":  # a mean is of all of them
            seeds = [one.ratio.seeds for part in self.parts for one in part.compared if one.ratio.kind != "unknown"]
        found = []
        if self.outcome != "open" and 1 in seeds:
            found.append("by one seed" if set(seeds) == {1} else "partly by one seed")
        ties = self.outcome == "holds" and any(part.outcome == "tie" for part in self.parts)
        return [*found, *(["with a tie"] if ties else []), *([self.note] if self.note else [])]

    @property
    def effect(self) -> str:
        """The number that decides: of what contradicts, the clearest; else of what is closest to contradicting.

        One that contradicts as one among many has the interval that holds for all of them.
        """
        parts = [part for part in self.parts if part.outcome == self.outcome] or self.parts
        sizes = [part.size for part in parts if part.size]
        if sizes:
            return sizes[0]
        known = [one for part in parts for one in part.compared if one.ratio.kind != "unknown"]
        if self.outcome != "tie":
            known = [one for one in known if one.outcome == self.outcome] or known
        if not known:
            return ""
        if self.outcome == "open":  # a bound says less
            known = [one for one in known if one.ratio.kind == "exact"] or known
        # What fails does so by the upper end of its interval, what holds by the lower.
        end = 1 if self.outcome == "fails" else 0
        one = min(known, key=lambda one: one.ratio.interval[end] / one.least)
        ratio = one.ratio.written(one.among if self.outcome == "fails" else 1)
        return f"{one.rival.label} {ratio}, {one.own.environment.paper.distribution}"

    @property
    def open(self) -> list[Comparison]:
        """What the other parts still need."""
        return [one for part in self.parts if part.outcome == "open" for one in part.compared if one.outcome == "open"]


def combined(outcomes: Iterable[Outcome]) -> Outcome:
    """What is said to hold everywhere fails in one place; all ties are a tie."""
    found = set(outcomes)
    order: tuple[Outcome, ...] = ("fails", "open", "holds", "tie")
    return next((outcome for outcome in order if outcome in found), "open")


def ours(evidence: Evidence, spread: Mapping[str, Spread] | None = None) -> Source:
    """Our runs, with every seed that there is; their spread is measured, or given."""

    costs = functools.partial(costs_by_seed, evidence)
    if spread is not None:
        return Source("ours", costs, spread)
    by_data: dict[str, list[Environment]] = {}
    for environment in evidence.environments.values():
        by_data.setdefault(kind_of_data(environment), []).append(environment)
    spread = {data: _spread(evidence, found) or Spread(PRIOR_SPREAD) for data, found in by_data.items()}
    return Source("ours", costs, spread)


def kind_of_data(environment: Environment) -> str:
    """Where classes are skewed, runs differ more from seed to seed."""
    iid = environment.config.partition.classes == "iid"
    return f"{environment.paper.domain} {'IID' if iid else 'Non-IID'}"


def _spread(evidence: Evidence, environments: Iterable[Environment]) -> Spread | None:
    """That of ln(parallel time) which neither policy nor seed explains; None if few runs say it.

    A time is known only up to the evaluation before it: with long rounds all seeds may reach the target in the same
    one.
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
    return Spread(math.sqrt(squares / freedom), freedom) if freedom >= _ENOUGH else None


def _unexplained(values: Mapping[tuple[str, int], float]) -> tuple[float, int]:
    """Squares of what is left of values by policy and seed without the effects of both, and its degrees of freedom."""
    policies, seeds = (list(dict.fromkeys(key[index] for key in values)) for index in (0, 1))
    design = np.zeros((len(values), len(policies) + len(seeds)))
    for row, (policy, seed) in enumerate(values):
        design[row, policies.index(policy)] = design[row, len(policies) + seeds.index(seed)] = 1.0
    found = np.fromiter(values.values(), np.float64)
    effects, _, rank, _ = np.linalg.lstsq(design, found, rcond=None)
    return float(np.sum((found - design @ effects) ** 2)), len(values) - int(rank)


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
