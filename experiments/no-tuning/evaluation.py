"""What came out of the study, as tables in Markdown; from results.jsonl alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from conditions import CONDITIONS, Condition

RULE = "semisync"
WITHIN = 1.05
UNSEEN = 1992  # and later seeds were not used to change the rule
Rows = Mapping[str, Mapping[int, Mapping[str, Any]]]  # of one condition: by contender and seed
# Student's t for 95 %, by degrees of freedom.
_T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776}


def tables(results: Iterable[Mapping[str, Any]], targets: Mapping[str, Any]) -> str:
    """All of them."""
    rows: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
    for row in results:
        rows.setdefault(row["condition"], {}).setdefault(row["contender"], {})[row["seed"]] = row
    conditions = [condition for condition in CONDITIONS if RULE in rows.get(condition.name, {})]
    fresh, old = ([one for one in conditions if one.fresh is which] for which in (True, False))
    parts = []
    for title, some in (("Fresh conditions", fresh), ("The conditions that the rule was found on", old)):
        if some:
            parts += [f"### {title}", times(some, rows, targets), summary(some, rows), costs(some, rows)]
    return "\n\n".join(parts)


def is_lambda(name: str, momentum: bool) -> bool:
    return name.startswith("lambda") and name.endswith("momentum") is momentum


def geometric(rows: Rows, name: str, key: str = "seconds") -> float:
    return statistics.geometric_mean([max(row[key], 1e-9) for row in rows[name].values()])


def best(rows: Rows, chosen: Callable[[str], bool]) -> str | None:
    """The contender with the least mean time, of those that were run with every seed of the rule."""
    names = [name for name in rows if chosen(name) and set(rows[name]) >= set(rows[RULE])]
    return min(names, key=lambda name: geometric(rows, name), default=None)


def ratios(rows: Rows, name: str, key: str = "seconds") -> list[float]:
    """The rule over a contender, seed by seed."""
    return [
        row[key] / max(rows[name][seed][key], 1e-9) for seed, row in sorted(rows[RULE].items()) if seed in rows[name]
    ]


def interval(values: Sequence[float]) -> str:
    """The geometric mean, and between which values it lies with 95 % confidence; of two seeds, both values."""
    mean = statistics.geometric_mean(values)
    if len(values) < 2:
        return f"{mean:.2f}"
    if len(values) == 2:
        return f"{mean:.2f} [{min(values):.2f}, {max(values):.2f}]"
    logs = [math.log(value) for value in values]
    half = _T[len(logs) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{mean:.2f} ({mean * math.exp(-half):.2f}-{mean * math.exp(half):.2f})"


def rivals(rows: Rows) -> dict[str, str | None]:
    """Whom the rule is compared with; best in hindsight where there are several."""
    return {
        "with momentum": best(rows, lambda name: is_lambda(name, True)),
        "plain": best(rows, lambda name: is_lambda(name, False)),
        "adaptive": "adaptive",
        "adaptive, momentum": "adaptive, momentum",
        "sync": best(rows, lambda name: name.startswith("sync ")),
        "fedrec": "fedrec",
        "async": "async",
        "fedbuff": "fedbuff",
        "fedcompass": best(rows, lambda name: name.startswith("fedcompass")),
        "fedqueue": best(rows, lambda name: name.startswith("fedqueue")),
        "first rule": "first rule",
        "second rule": "second rule",
        "all": best(rows, lambda name: not name.startswith(("semisync", "first", "second"))),
    }


def unseen(rows: Rows) -> Rows:
    """Without the two seeds that the rule was changed by."""
    return {
        name: {seed: row for seed, row in own.items() if seed >= UNSEEN}
        for name, own in rows.items()
        if max(own) >= UNSEEN
    }


def over(rows: Rows, name: str | None, base: str) -> str:
    """A contender's time over that of another, with a sign if it was given up."""
    if name is None or name not in rows:
        return "-"
    shared = [seed for seed in rows[name] if seed in rows[base]]
    value = statistics.geometric_mean([rows[name][seed]["seconds"] / rows[base][seed]["seconds"] for seed in shared])
    return f"{'>' if any(rows[name][seed]['given_up'] for seed in shared) else ''}{value:.2f}"


def times(some: Sequence[Condition], rows: Mapping[str, Rows], targets: Mapping[str, Any]) -> str:
    head = [
        "condition", "target", "seeds", "best λ with momentum", "**rule** over it", "best λ without", "rule over it",
        "adaptive", "Sync", "FedRec", "AsyncFedAvg", "FedBuff", "FedCompass", "FedQueue", "rule, η of FedExP",
        "rule over best of all",
    ]  # fmt: skip
    lines = []
    for condition in some:
        own = rows[condition.name]
        found = rivals(own)
        base = found["with momentum"]
        if base is None or found["all"] is None:
            continue
        cells = [condition.title, f"{targets[condition.name]['target']:.3f}", str(len(own[RULE]))]
        cells += [base.split(" ")[1].rstrip(","), f"**{interval(ratios(own, base))}**{_lost(own)}"]
        plain = found["plain"]
        cells += ["-", "-"] if plain is None else [plain.split(" ")[1], interval(ratios(own, plain))]
        names = ("adaptive", "sync", "fedrec", "async", "fedbuff", "fedcompass", "fedqueue")
        cells += [over(own, found[name], base) for name in names]
        cells += [over(own, "semisync, fedexp", base)]
        cells += [f"{statistics.geometric_mean(ratios(own, found['all'])):.2f} ({found['all']})"]
        lines.append(cells)
    return table(head, lines)


def _lost(rows: Rows) -> str:
    missed = sum(row["given_up"] for row in rows[RULE].values())
    return f" (target missed {missed} times)" if missed else ""


def summary(some: Sequence[Condition], rows: Mapping[str, Rows]) -> str:
    """Shares within 5 %, the worst, the mean: of the rule, and of what else one could have as a default."""
    head = ["the rule against", "conditions", "within 5 %", "worst", "geometric mean"]
    lines = []
    for rival, title in (
        ("with momentum", "the best λ with the same momentum"),
        ("plain", "the best λ without momentum"),
        ("adaptive, momentum", "adaptive with the same momentum"),
        ("all", "the best of all"),
        ("first rule", "the rule as it was found first"),
        ("second rule", "the rule as it was before the last changes"),
        ("fresh", "the best λ with the same momentum, only seeds that were not looked at"),
    ):
        means = {}
        for condition in some:
            own = rows[condition.name]
            if rival == "fresh":
                own = unseen(own)
            found = rivals(own).get("with momentum" if rival == "fresh" else rival) if own.get(RULE) else None
            if found is not None and found in own:
                means[condition.title] = statistics.geometric_mean(ratios(own, found))
        if means:
            worst = max(means, key=lambda title: means[title])
            near = sum(value <= WITHIN for value in means.values())
            mean = statistics.geometric_mean(means.values())
            lines.append(
                [title, str(len(means)), f"{near} of {len(means)}", f"{means[worst]:.2f} ({worst})", f"{mean:.2f}"]
            )
    return table(head, lines)


def costs(some: Sequence[Condition], rows: Mapping[str, Rows]) -> str:
    """Update requests, bytes and energy until the target, and what they are over those of the best lambda."""
    head = ["condition", "update requests", "over best λ with momentum", "MB", "over it", "energy", "over it"]
    lines = []
    for condition in some:
        own = rows[condition.name]
        base = rivals(own)["with momentum"]
        if base is None:
            continue
        cells = [condition.title]
        for key, scale in (("requests", 1.0), ("bytes", 1e-6), ("energy", 1.0)):
            cells += [f"{scale * geometric(own, RULE, key):,.3g}", interval(ratios(own, base, key))]
        lines.append(cells)
    return table(head, lines)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))
