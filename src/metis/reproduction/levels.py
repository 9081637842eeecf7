"""Table 1 of the paper: whether a protocol's costs have the level that it says, by an interval over seeds."""

from __future__ import annotations

import math

from metis.reproduction import lookup
from metis.reproduction.tables import LEVELS_RULE, LOW, MEDIUM, Evidence, characteristics, cheapest_policies, level
from metis.reproduction.verdicts import COLUMN, Finding, Outcome, Part, Source, deviations

_RANGES = {"low": (0.0, LOW), "medium": (LOW, MEDIUM), "high": (MEDIUM, math.inf)}


def table_1(column: str) -> lookup.Check:
    """One column of Table 1: a level for each protocol, or whether it is free of idle time or staleness."""

    def check(evidence: Evidence, source: Source) -> Finding:
        document = characteristics(evidence)
        parts = []
        for row in document["rows"]:
            said = row["published"]["energy" if column.startswith("energy") else column]
            if column in ("idle_free", "stale_free"):
                lookup.ours_only(source)
                found = row[column]
            elif source.name == "ours":
                found = row["ours"][column]["level"]
            else:
                found = row["from_published"]["energy" if source.name == COLUMN else column]["level"]
            if source.name == "ours" and isinstance(found, str):
                relative = row["ours"][column]["relative"]
                error = error_of_level(evidence, source, row["protocol"], column)
                parts.append(_level_part(row["protocol"], said, relative, error, len(document["rows"])))
            else:
                outcome: Outcome = "open" if found is None else lookup.outcome(found == said)
                parts.append(Part(outcome, f"{row['protocol']} {_level(found)} (Table 1: {_level(said)})"))
        return Finding(parts, "" if column in ("idle_free", "stale_free") else LEVELS_RULE)

    return check


def _level_part(protocol: str, said: str, relative: float, error: float, among: int) -> Part:
    """Whether a relative cost, one of so many, has the level said, by its interval."""
    bottom, top = _RANGES[said]
    low, high = (relative * math.exp(sign * deviations() * error) for sign in (-1, 1))
    lowest, highest = (relative * math.exp(sign * deviations(among) * error) for sign in (-1, 1))
    span = f" [{low:.2f}, {high:.2f}]" if error else ""
    text = f"{protocol} {level(relative)} (×{relative:.2f}{span}; Table 1: {said})"
    if bottom <= low and high < top:
        return Part("holds", text)
    if highest < bottom or lowest >= top:
        return Part("fails", text)
    edges = [edge for edge in (bottom, top) if 0 < edge < math.inf]
    edge = min(edges, key=lambda edge: abs(math.log(relative / edge)))
    needed = deviations() if bottom <= relative < top else deviations(among)
    times = (needed * error / math.log(relative / edge)) ** 2 if relative != edge else math.inf
    many = f"about {times:.1f} times" if times < 50 else "more than 50 times"
    return Part(
        "open",
        text,
        why=f"{protocol}: its cost is ×{relative:.2f}{span}, and ×{edge:g} is the edge of {said}",
        needs=f"{many} as many seeds of its cheapest policies",
    )


def error_of_level(evidence: Evidence, source: Source, protocol: str, column: str) -> float:
    """The standard error of ln of a protocol's relative cost: a mean over environments, of which each has its seeds."""
    errors = []
    for policies in cheapest_policies(evidence, column):
        least, _ = min(policies.values(), key=lambda pair: pair[1].value)
        own, spent = policies[protocol]
        errors.append(0.0 if own is least else source.ratio(least, own, column, finished=spent.reached).error)
    return math.hypot(*errors) / len(errors)


def _level(value: object) -> str:
    return {None: "not known", True: "yes", False: "no"}.get(value, str(value))  # type: ignore[call-overload,no-any-return]
