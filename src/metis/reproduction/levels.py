"""Table 1 of the paper: whether protocols of different levels cost as much more and less as it says.

The table says low, medium and high, not from where on a cost is one of them. So a level is an order: a protocol with a
higher one costs more than a protocol with a lower one, on the whole. Two of the same level are shown, not judged.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

from metis.reproduction import lookup
from metis.reproduction.tables import PUBLISHED_CHARACTERISTICS, Evidence, characteristics, cheapest_policies
from metis.reproduction.verdicts import COLUMN, Finding, Part, Ratio, Source

_RANKS = ("low", "medium", "high")
_COLUMNS = ("parallel_time", "communication_cost", "energy")
_RULE = (
    "in each environment a protocol costs what its cheapest policy does; a protocol with a higher level costs more "
    "than one with a lower level, in the geometric mean over the environments"
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
        judged = sum(_higher(said, *pair) for pair in permutations(said, 2))
        parts = []
        for above, below in permutations(said, 2):
            same = said[above] == said[below] and above > below
            if not same and not _higher(said, above, below):
                continue
            compared = [source.compare(cells[below], cells[above], column) for cells in cheapest]
            ratios = {lookup.where(one.own.environment): one.ratio for one in compared}
            whole = Ratio.on_the_whole(ratios.values())
            part = lookup.on_the_whole(whole, ratios, compared, among=judged)
            text = f"{above} ({said[above]}) over {below} ({said[below]}) ×{whole}"
            # What is not judged decides nothing beside what is.
            parts.append(Part("tie", text) if same else replace(part, text=text))
        return Finding(parts, _RULE)

    return check


def _higher(said: dict[str, str], one: str, other: str) -> bool:
    return _RANKS.index(said[one]) > _RANKS.index(said[other])


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
        return Finding(parts, document["rule_of"][column])

    return check


def _word(value: bool | None) -> str:
    return {None: "not known", True: "yes", False: "no"}[value]
