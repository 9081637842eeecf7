"""Table 1 of the paper: whether protocols of different levels cost as much more and less as it says.

The table says low, medium and high, not from where on a cost is one of them. So a level is an order: a protocol with a
higher one costs more than a protocol with a lower one, and two of the same level are closer to each other than to any
other, on the whole.
"""

from __future__ import annotations

import math
from itertools import combinations

from metis.reproduction import lookup, readings
from metis.reproduction.tables import PUBLISHED_CHARACTERISTICS, Evidence, characteristics, cheapest_policies
from metis.reproduction.verdicts import COLUMN, Comparison, Finding, Outcome, Part, Ratio, Source, combined

_RANKS = ("low", "medium", "high")
_COLUMNS = ("parallel_time", "communication_cost", "energy")
_RULE = (
    "in each environment of Table 3 a protocol costs what its cheapest policy does; one with a higher level costs more "
    "than one with a lower level, two of the same level are closer to each other than to the third"
)


def table_1(column: str) -> lookup.Check:
    """One column of Table 1 that has a level for each protocol."""

    def check(evidence: Evidence, source: Source) -> Finding:
        place = next(place for place, name in enumerate(_COLUMNS) if column.startswith(name))
        said = {protocol: str(row[place]) for protocol, row in PUBLISHED_CHARACTERISTICS.items()}
        by = "energy" if source.name == COLUMN else column
        cheapest = cheapest_policies(evidence, by, published=source.name != "ours")
        if not cheapest:
            return Finding([Part("open", "not all policies have been run far enough to say which is the cheapest")])
        apart: dict[str, list[Comparison]] = {}
        alike: dict[str, list[Comparison]] = {}
        for pair in combinations(said, 2):
            below, above = sorted(pair, key=lambda protocol: _RANKS.index(said[protocol]))
            words = f"{above} ({said[above]}) over {below} ({said[below]})"
            series = alike if said[above] == said[below] else apart
            series[words] = [source.compare(cells[below], cells[above], column) for cells in cheapest]
        found = readings.in_general(apart, _RULE)
        means = [readings.mean(compared)[0] for compared in apart.values()]
        parts = list(found.parts)
        everywhere = [found.other or "open"]
        for words, compared in alike.items():
            whole, ratios = readings.mean(compared)
            parts.append(Part(_closer(whole, means), f"{words} {readings.spelled(whole, ratios)}"))
            others = zip(*apart.values(), strict=True)
            everywhere += [
                _closer(one.ratio, [other.ratio for other in those])
                for one, those in zip(compared, others, strict=True)
            ]
        return Finding(parts, found.rule, found.reading, combined(everywhere))

    return check


def _closer(same: Ratio, others: list[Ratio]) -> Outcome:
    """Whether two protocols are closer to each other than others are, by the edges of the intervals."""
    nearest, farthest = _distances(same)
    if all(farthest < _distances(other)[0] for other in others):
        return "holds"
    return "fails" if any(nearest > _distances(other)[1] for other in others) else "open"


def _distances(ratio: Ratio) -> tuple[float, float]:
    """The least and the largest distance from 1 in an interval, in ln; of a bound that is open to one side."""
    if not 0 < ratio.mean < math.inf:
        return math.nan, math.nan
    low, high = (math.log(edge) for edge in ratio.interval)
    low, high = -math.inf if ratio.kind == "at most" else low, math.inf if ratio.kind == "at least" else high
    return (0.0 if low < 0 < high else min(abs(low), abs(high))), max(abs(low), abs(high))


def without(column: str) -> lookup.Check:
    """One column of Table 1 that says which protocols are free of idle time or of staleness."""

    def check(evidence: Evidence, source: Source) -> Finding:
        lookup.ours_only(source)
        document = characteristics(evidence)
        parts = []
        for row in document["rows"]:
            found, said = row[column], row["published"][column]
            outcome = "open" if found is None else lookup.outcome(found == said)
            parts.append(Part(outcome, f"{row['protocol']} {_word(found)} (Table 1: {_word(said)})"))
        return Finding(parts, document["rule_of"][column], note=lookup.BY_CONSTRUCTION)

    return check


def _word(value: bool | None) -> str:
    return {None: "not known", True: "yes", False: "no"}[value]
