"""What the paper claims, checked against runs: confirmed, not confirmed, or not testable here, with the numbers.

Every number of ours in a verdict is computed from runs or from the schedule. A policy whose budget ended before the
time that another needed has not lost against it, and the sentence says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from metis.core.events import CommunityPublished
from metis.core.stop import StopRule
from metis.experiments.config.load import ExperimentConfig, resolve_config
from metis.reproduction.environments import Cell, Environment
from metis.reproduction.schedule import dry_run, make_plan, rounds_of
from metis.reproduction.tables import (
    COSTS,
    ENERGIES,
    LEVELS_RULE,
    PROTOCOLS,
    Evidence,
    arithmetic,
    characteristics,
    counterparts,
    idle_share,
    protocol_of,
    published_value,
    slowest_learner_epochs,
    solver_of,
)
from metis.runs.run import Run

Verdict = Literal["confirmed", "not confirmed", "not testable here", "not run"]


@dataclass(frozen=True)
class Claim:
    """One statement of the paper and what came of it."""

    where: str  # in the paper
    text: str
    verdict: Verdict
    sentence: str


class _Missing(Exception):
    """The runs that a claim is about are not there."""


def check_claims(evidence: Evidence) -> list[Claim]:
    """Every claim, in the order of the paper."""
    claims = []
    for where, text, needs, check in _CLAIMS:
        try:
            holds, sentence = check(evidence)
            claims.append(Claim(where, text, "confirmed" if holds else "not confirmed", sentence))
        except _Missing as missing:
            if reason := str(missing):
                claims.append(Claim(where, text, "not testable here", reason))
            else:
                claims.append(Claim(where, text, "not run", f"make its runs with: metis reproduce {needs}"))
    return claims


# --- what the checks share --------------------------------------------------------------------


def _environments(evidence: Evidence, result: str) -> list[Environment]:
    """The environments of a result, all with their runs."""
    there = evidence.of(result)
    if not there or not all(evidence.complete(environment) for environment in there):
        raise _Missing
    return there


def _run(evidence: Evidence, cell: Cell) -> Run:
    return evidence.runs[cell.name]


def _cost(evidence: Evidence, cell: Cell, name: str) -> float:
    """Until the target; infinite if it was not reached."""
    costs = _run(evidence, cell).costs_at_target
    return math.inf if costs is None else COSTS[name](costs)


def _pick(
    environment: Environment, protocol: str, solver: str | None = None, epochs: float | None = None
) -> list[Cell]:
    return [
        cell
        for cell in environment.cells
        if protocol_of(cell) == protocol
        and (solver is None or solver_of(cell) == solver)
        and (epochs is None or slowest_learner_epochs(cell) == epochs)
    ]


def _one(environment: Environment, protocol: str, solver: str, epochs: float | None = None) -> Cell:
    found = _pick(environment, protocol, solver, epochs)
    if not found:
        raise _Missing(f"{environment.paper.title} has no such policy")
    return found[0]


def _policy(environment: Environment, name: str) -> Cell:
    found = [cell for cell in environment.cells if cell.policy.name == name]
    if not found:
        raise _Missing(f"{environment.paper.title} has no such policy")
    return found[0]


def _short(environment: Environment) -> str:
    return environment.paper.distribution


def _amount(value: float | None, unit: str = "") -> str:
    if value is None or not math.isfinite(value):
        return "target not reached"
    return f"{value:,.0f}{unit}" if abs(value) >= 100 else f"{value:.3g}{unit}"


def _time(evidence: Evidence, cell: Cell) -> str:
    """Until the target, or for how long it was tried."""
    seconds = _cost(evidence, cell, "parallel_time")
    return _amount(seconds, " s") if math.isfinite(seconds) else f"not within {_amount(_end(evidence, cell), ' s')}"


def _end(evidence: Evidence, cell: Cell) -> float:
    """When its budget ended."""
    return _run(evidence, cell).costs.parallel_time


def _list(parts: Sequence[str]) -> str:
    return "; ".join(parts)


def _least(evidence: Evidence, cells: Sequence[Cell], name: str) -> tuple[Cell | None, float]:
    """The cell that paid least until the target; None if nobody reached it."""
    costs = [(_cost(evidence, cell, name), place) for place, cell in enumerate(cells)]
    best, place = min(costs)
    return (None, best) if math.isinf(best) else (cells[place], best)


def _wins(
    evidence: Evidence, result: str, name: str, unit: str, champion: Callable[[Environment], Cell], rivals: str = "all"
) -> tuple[bool, str]:
    """Whether the champion is the cheapest in every environment of a result."""
    holds, parts = True, []
    for environment in _environments(evidence, result):
        own = champion(environment)
        cells = [
            cell for cell in environment.cells if rivals == "all" or protocol_of(cell) in (PROTOCOLS[0], PROTOCOLS[2])
        ]
        if _least(evidence, cells, name)[0] is None:
            raise _Missing(f"nobody reached the target in {environment.paper.title}")
        paid = _cost(evidence, own, name)
        rival, next_best = _least(evidence, [cell for cell in cells if cell is not own], name)
        won = paid < next_best
        holds = holds and won
        other = ", nobody else reached it" if rival is None else f", {rival.label} {_amount(next_best, unit)}"
        ended = name == "parallel_time" and [
            cell.label
            for cell in cells
            if math.isinf(_cost(evidence, cell, name)) and _end(evidence, cell) < min(paid, next_best)
        ]
        short = f" (the budget ended before that for {', '.join(ended)})" if ended else ""
        parts.append(f"{_short(environment)}: {own.label} {_amount(paid, unit)}{other}{short}")
    return holds, _list(parts)


def _semisync_momentum(epochs: float) -> Callable[[Environment], Cell]:
    return lambda environment: _one(environment, PROTOCOLS[2], "momentum", epochs)


# --- the claims -------------------------------------------------------------------------------

Check = Callable[[Evidence], tuple[bool, str]]


def _arithmetic(evidence: Evidence) -> tuple[bool, str]:
    rows = arithmetic([*evidence.of("table2"), *evidence.of("table3")])
    if not rows:
        raise _Missing
    same = sum(row["same"] for row in rows)
    return same == len(rows), f"{same} of {len(rows)} Sync and SemiSync rows have exactly the published iterations"


def _no_idle(evidence: Evidence) -> tuple[bool, str]:
    shares: dict[str, list[float]] = {protocol: [] for protocol in PROTOCOLS}
    cold: list[float] = []
    for result in ("table3", "figure9", "figure10", "table2"):
        for environment in evidence.of(result):
            for cell, run in evidence.cells(environment):
                shares[protocol_of(cell)].append(idle_share(run))
                if protocol_of(cell) == PROTOCOLS[2]:
                    cold.append(idle_share(run, after_first_round=False))
    if not all(shares.values()):
        raise _Missing
    most = {protocol: max(values) for protocol, values in shares.items()}
    holds = most[PROTOCOLS[2]] < 0.01 and most[PROTOCOLS[1]] < 0.01 and min(shares[PROTOCOLS[0]]) > 0.01
    return holds, (
        f"largest idle share after the first round: SemiSync {most[PROTOCOLS[2]]:.1%} (with its cold start up to "
        f"{max(cold):.1%}), asynchronous {most[PROTOCOLS[1]]:.1%}; Sync {min(shares[PROTOCOLS[0]]):.0%} to "
        f"{most[PROTOCOLS[0]]:.0%}. Virtual time with constant speeds; the paper's own CT and PT imply that its fast "
        f"learners were busy {_published_busy(evidence)} of the time under SemiSync"
    )


def _published_busy(evidence: Evidence) -> str:
    """The share of its time that a fast learner trained, from the published cumulative and parallel times."""
    busy = []
    for environment in evidence.of("table3"):
        fast = environment.config.learners[0].count
        for cell in _pick(environment, PROTOCOLS[2]):
            told = cell.published
            if told is not None and told.fast_time and told.parallel_time:
                busy.append(told.fast_time / told.parallel_time / fast)
    return f"{min(busy):.0%} to {max(busy):.0%}" if busy else "an unknown part"


def _homogeneous_uniform(evidence: Evidence) -> tuple[bool, str]:
    there = evidence.of("table2")
    if not there:
        raise _Missing
    facts = []
    for name, epochs in (("sync_fedavg", None), ("semisync_fedavg", 4.0), ("async_fedavg", None)):
        cell = next(
            cell
            for cell in there[0].cells
            if cell.policy.name == name and (epochs is None or slowest_learner_epochs(cell) == epochs)
        )
        config = _with(cell.config, {"partition": {"sizes": "uniform", "classes": "iid"}})
        run = dry_run(config, StopRule(update_requests=10 * config.learner_count))
        made = [made for made in rounds_of(run) if made.seconds > 0]
        seconds = run.costs.parallel_time / run.costs.update_requests
        facts.append((cell.label, made[-1].steps / made[-1].update_requests, seconds))
    steps = {round(per_request, 6) for _, per_request, _ in facts}
    parts = [f"{label} {per_request:g} steps a request" for label, per_request, _ in facts]
    return len(steps) == 1, f"scheduled without training: {', '.join(parts)}"


def _with(config: ExperimentConfig, changes: dict[str, object]) -> ExperimentConfig:
    return resolve_config({**config.to_dict(), **changes}, "a variation")


def _transmission(evidence: Evidence) -> tuple[bool, str]:
    there = evidence.of("table3")
    if not there:
        raise _Missing
    stated = 0.4  # seconds for the 4 MB model, as the paper states it
    parts = []
    for environment in there:
        each = make_plan(_one(environment, PROTOCOLS[2], "momentum", 2)).each
        assert each is not None
        parts.append(f"{_short(environment)} {stated / each.seconds:.1%} of {each.seconds:.1f} s")
    raise _Missing(
        f"the paper's network is not here; the {stated:g} s that it states would be of the nominal synchronization "
        f"period: {', '.join(parts)} (its measured period is 80 s)"
    )


def _semi_faster(evidence: Evidence) -> tuple[bool, str]:
    holds, parts, compared, told = True, list[str](), 0, list[bool]()
    for result in ("table2", "table3"):
        for environment in evidence.of(result):
            for sync, semi in counterparts(environment):
                if sync.name not in evidence.runs or semi.name not in evidence.runs:
                    raise _Missing
                before, after = (published_value(cell, "parallel_time") for cell in (sync, semi))
                if before and after:
                    told.append(after < before)
                slow, quick = (_cost(evidence, cell, "parallel_time") for cell in (sync, semi))
                if math.isinf(quick) and _end(evidence, semi) < slow:
                    outcome = f"{_time(evidence, semi)}, where its budget ended; Sync {_time(evidence, sync)}"
                elif math.isinf(slow) and _end(evidence, sync) < quick:
                    outcome = f"{_time(evidence, semi)}; Sync {_time(evidence, sync)}, where its budget ended"
                else:
                    compared += 1
                    holds = holds and quick < slow
                    outcome = f"{slow / quick:.2g} times" if math.isfinite(slow + quick) else "only SemiSync reached it"
                    if math.isinf(quick):
                        outcome = "only Sync reached it"
                parts.append(f"{environment.paper.cluster} {_short(environment)} {semi.label}: {outcome}")
    if not compared:
        raise _Missing(_list(parts))
    paper = f" The paper's own tables have it in {sum(told)} of {len(told)} pairs." if told else ""
    return holds, f"{compared} of {len(parts)} pairs can be compared: {_list(parts)}.{paper}"


def _energy_saving(evidence: Evidence) -> tuple[bool, str]:
    savings: dict[str, list[float]] = {kind: [] for kind in ENERGIES}
    told = []
    for result in ("table2", "table3"):
        for environment in evidence.of(result):
            for sync, semi in counterparts(environment):
                before, after = published_value(sync, "energy"), published_value(semi, "energy")
                if before and after:
                    told.append(1 - after / before)
                if sync.name not in evidence.runs or semi.name not in evidence.runs:
                    raise _Missing
                for kind in ENERGIES:
                    costs = [_cost(evidence, cell, f"energy_{kind}") for cell in (sync, semi)]
                    if all(map(math.isfinite, costs)):
                        savings[kind].append(1 - costs[1] / costs[0])
    if not all(savings.values()):
        raise _Missing("no pair of policies reached the target" if evidence.runs else "")
    means = {kind: statistics.mean(values) for kind, values in savings.items()}
    names = {"equation": "by the paper's equation", "active": "active time only", "idle_charged": "with idle power"}
    parts = [f"{names[kind]} {means[kind]:+.0%}" for kind in ENERGIES]
    published = f"; the paper's tables {statistics.mean(told):+.0%} on average" if told else ""
    return all(mean >= 0.3 for mean in means.values()), (
        f"mean saving over {len(savings['active'])} pairs: {', '.join(parts)}{published}. Which definition is used "
        "decides it: a fast learner that trains instead of waiting costs energy"
    )


def _momentum_energy(evidence: Evidence) -> tuple[bool, str]:
    holds, parts = True, []
    for result in ("table2", "table3"):
        for environment in evidence.of(result):
            if not evidence.complete(environment):
                raise _Missing
            base = _one(environment, PROTOCOLS[0], "vanilla")
            own = _one(environment, PROTOCOLS[2], "momentum", 2)
            factors = {kind: _factor(evidence, base, own, f"energy_{kind}") for kind in ENERGIES}
            holds = holds and all(factor >= 3 for factor in factors.values())
            told = published_value(base, "energy"), published_value(own, "energy")
            published = f", paper {told[0] / told[1]:.1f}" if told[0] and told[1] else ""
            shown = "/".join(f"{factor:.1f}" for factor in factors.values())
            if math.isinf(factors["active"]):
                shown = "Sync did not reach the target"
            parts.append(f"{environment.paper.cluster} {_short(environment)} {shown}{published}")
    if not parts:
        raise _Missing
    return holds, f"Sync w/ Vanilla over SemiSync (λ=2) w/ Momentum, equation/active/with idle: {_list(parts)}"


def _factor(evidence: Evidence, base: Cell, own: Cell, name: str) -> float:
    before, after = _cost(evidence, base, name), _cost(evidence, own, name)
    if math.isinf(after):
        return 0.0
    return math.inf if math.isinf(before) else before / after


def _momentum_on_power_law(evidence: Evidence) -> tuple[bool, str]:
    holds, parts = True, []
    for result in ("table2", "table3"):
        for environment in evidence.of(result):
            if environment.config.partition.sizes != "power_law":
                continue
            if not evidence.complete(environment):
                raise _Missing
            momentum, prox = (_one(environment, PROTOCOLS[0], solver) for solver in ("momentum", "fedprox"))
            slow, rescued = (_cost(evidence, cell, "parallel_time") for cell in (momentum, prox))
            best = _run(evidence, momentum).best_metric
            holds = holds and math.isinf(slow) and math.isfinite(rescued)
            parts.append(
                f"{environment.paper.cluster}: Sync w/ Momentum {_time(evidence, momentum)} (best "
                f"{'–' if best is None else f'{best:.3f}'}), Sync w/ FedProx {_time(evidence, prox)}"
            )
    if not parts:
        raise _Missing
    return holds, _list(parts)


def _fedrec_wins(evidence: Evidence) -> tuple[bool, str]:
    holds, parts, compared = True, list[str](), 0
    for result in ("table3", "figure9", "figure10"):
        for environment in evidence.of(result):
            if not evidence.complete(environment):
                continue
            cells = _pick(environment, PROTOCOLS[1])
            best, _ = _least(evidence, cells, "parallel_time")
            if best is None:
                parts.append(f"{environment.paper.domain} {_short(environment)}: nobody reached the target")
                continue
            times = {cell.policy.name: _cost(evidence, cell, "parallel_time") for cell in cells}
            holds = holds and times["fedrec"] <= min(times.values())
            compared += 1
            costs = [f"{cell.label} {_time(evidence, cell)}" for cell in cells]
            parts.append(f"{environment.paper.domain} {_short(environment)}: {', '.join(costs)}")
    if not compared:
        raise _Missing(_list(parts))
    return holds, _list(parts)


def _async_homogeneous(evidence: Evidence) -> tuple[bool, str]:
    holds, parts = True, []
    for environment in _environments(evidence, "table2"):
        cells = {name: _policy(environment, name) for name in ("async_fedavg", "fedrec", "fedasync")}
        times = {name: _cost(evidence, cell, "parallel_time") for name, cell in cells.items()}
        if environment.config.partition.sizes == "power_law":
            holds = holds and times["async_fedavg"] < min(times["fedrec"], times["fedasync"])
        else:
            pair = sorted((times["async_fedavg"], times["fedrec"]))
            holds = holds and math.isfinite(pair[1]) and pair[1] <= 1.5 * pair[0]
        shown = ", ".join(f"{cell.label} {_time(evidence, cell)}" for cell in cells.values())
        parts.append(f"{_short(environment)}: {shown}")
    return holds, _list(parts)


def _async_requests(evidence: Evidence) -> tuple[bool, str]:
    holds, parts = True, []
    for environment in _environments(evidence, "table3"):
        own = _cost(evidence, _one(environment, PROTOCOLS[2], "momentum", 2), "communication_cost")
        others = [_cost(evidence, cell, "communication_cost") for cell in _pick(environment, PROTOCOLS[1])]
        if math.isinf(min(own, *others)):
            raise _Missing(f"nobody reached the target in {environment.paper.title}")
        holds = holds and 2 * own <= min(others)
        parts.append(f"{_short(environment)}: SemiSync {_amount(own)}, asynchronous {', '.join(map(_amount, others))}")
    return holds, f"many is read as at least twice as many: {_list(parts)}"


_LEVELS = ("parallel_time", "communication_cost", "energy")


def _table1(evidence: Evidence) -> tuple[bool, str]:
    _environments(evidence, "table1")
    document = characteristics(evidence)
    differing, own = [], 0
    for row in document["rows"]:
        for name in _LEVELS:
            ours, told = row["ours"][name]["level"], row["published"][name]
            if ours != told:
                differing.append(f"{row['protocol']} {name.replace('_', ' ')} {ours or 'not reached'}, paper {told}")
        for name in ("idle_free", "stale_free"):
            if row[name] != row["published"][name]:
                differing.append(
                    f"{row['protocol']} {name.replace('_', '-')} {row[name]}, paper {row['published'][name]}"
                )
        own += sum(row["from_published"][name]["level"] != row["published"][name] for name in _LEVELS)
    count = 5 * len(document["rows"])
    words = f"{count - len(differing)} of {count} entries are the paper's ({count - own} by its own Table 3)"
    return not differing, f"{words}{': ' if differing else ''}{_list(differing)}. Rule: {LEVELS_RULE}"


def _cache(evidence: Evidence) -> tuple[bool, str]:
    if not evidence.mixing_times:
        raise _Missing
    holds, parts = True, []
    for network in dict.fromkeys(measured.network for measured in evidence.mixing_times):
        rows = sorted((row for row in evidence.mixing_times if row.network == network), key=lambda row: row.learners)
        times = [row.cached for row in rows]
        flat = max(times) / min(times)
        before, last = rows[-2], rows[-1]
        growth, more = last.full_pass / before.full_pass, last.learners / before.learners
        holds = holds and flat <= 1.1 and 0.75 * more <= growth <= 1.25 * more
        parts.append(
            f"{network}: cached times for {rows[0].learners} to {last.learners:,} learners differ by {flat - 1:.0%} at "
            f"most, the full pass takes {growth:.1f} times as long for {more:.1f} times as many learners "
            f"({1000 * last.full_pass:.0f} ms against {1000 * last.cached:.1f} ms for {last.learners:,})"
        )
    return holds, _list(parts)


def _curve_wins(result: str, epochs: float) -> Check:
    def check(evidence: Evidence) -> tuple[bool, str]:
        holds, parts = True, []
        for environment in _environments(evidence, result):
            (own,) = _pick(environment, PROTOCOLS[2], epochs=epochs)
            best, _ = _least(evidence, environment.cells, "parallel_time")
            if best is None:
                raise _Missing(f"nobody reached the target in {environment.paper.title}")
            finals = {cell.label: _run(evidence, cell).best_metric or 0.0 for cell in environment.cells}
            holds = holds and best is own
            shown = ", ".join(
                f"{cell.label} {_time(evidence, cell)} (best {finals[cell.label]:.3f})" for cell in environment.cells
            )
            parts.append(f"{_short(environment)}: {shown}")
        return holds, f"time to the target: {_list(parts)}"

    return check


def _early_async(evidence: Evidence) -> tuple[bool, str]:
    holds, parts = True, []
    for environment in _environments(evidence, "figure10"):
        semi = _run(evidence, _pick(environment, PROTOCOLS[2])[0])
        first = next((at for at, item in semi.events if isinstance(item, CommunityPublished) and at > 0), math.nan)
        own = _metric_at(semi, first)
        early = {cell.label: _metric_at(_run(evidence, cell), first) for cell in _pick(environment, PROTOCOLS[1])}
        holds = holds and max(early.values()) > own
        shown = ", ".join(f"{label} {value:.3f}" for label, value in early.items())
        parts.append(
            f"{_short(environment)}, when SemiSync's first round ends ({first:.0f} s): {shown}, SemiSync {own:.3f}"
        )
    return holds, _list(parts)


def _metric_at(run: Run, moment: float) -> float:
    """The last value that was measured until then."""
    values = [value for point, value in zip(run.history, run.metric_values, strict=True) if point.at <= moment]
    return values[-1] if values else math.nan


def _brain_time(evidence: Evidence) -> tuple[bool, str]:
    return _brain(evidence, "parallel_time", " s", (3.0, 4.0))


def _brain_requests(evidence: Evidence) -> tuple[bool, str]:
    return _brain(evidence, "communication_cost", "", (4.0,))


def _brain(evidence: Evidence, name: str, unit: str, needed: Sequence[float]) -> tuple[bool, str]:
    holds, parts = True, []
    for environment in _environments(evidence, "figure11"):
        sync = _cost(evidence, _pick(environment, PROTOCOLS[0])[0], name)
        if math.isinf(min(_cost(evidence, cell, name) for cell in environment.cells)):
            raise _Missing(f"nobody reached the target in {environment.paper.title}")
        shown = [f"Sync {_amount(sync, unit)}"]
        for cell in _pick(environment, PROTOCOLS[2]):
            paid, epochs = _cost(evidence, cell, name), slowest_learner_epochs(cell)
            if epochs in needed:
                holds = holds and paid < sync
            shown.append(f"λ={epochs:g} {_amount(paid, unit)}")
        target = environment.config.evaluation.target
        parts.append(f"{_short(environment)} until MAE {target:g}: {', '.join(shown)}")
    return holds, _list(parts)


def _brain_centralized(evidence: Evidence) -> tuple[bool, str]:
    for environment in _environments(evidence, "figure11"):
        if environment.config.partition.classes != "iid":
            continue
        centralized = evidence.centralized(environment)
        if centralized is None or centralized.best_metric is None:
            raise _Missing
        best = {cell.label: _run(evidence, cell).best_metric or math.inf for cell in environment.cells}
        own = best[_pick(environment, PROTOCOLS[2], epochs=3.0)[0].label]
        shown = ", ".join(f"{label} {value:.2f}" for label, value in best.items())
        return own <= min(best.values()) and own <= 1.05 * centralized.best_metric, (
            f"least MAE: {shown}, centralized {centralized.best_metric:.2f}"
        )
    raise _Missing


def _silos(evidence: Evidence) -> tuple[bool, str]:
    holds, parts = True, []
    for environment in _environments(evidence, "figure12"):
        alone = [run.best_metric for run in evidence.alone(environment) if run.best_metric is not None]
        if len(alone) < len(environment.alone):
            raise _Missing
        federation = min(_run(evidence, cell).best_metric or math.inf for cell in environment.cells)
        centralized = evidence.centralized(environment)
        beaten = sum(federation < value for value in alone)
        holds = holds and beaten == len(alone)
        reference = "" if centralized is None else f", centralized {centralized.best_metric:.2f}"
        parts.append(
            f"{_short(environment)}: federation {federation:.2f}, {len(alone)} silos alone {min(alone):.2f} to "
            f"{max(alone):.2f} ({beaten} of them worse){reference}"
        )
    return holds, f"least MAE in years: {_list(parts)}"


def _never(reason: str) -> Check:
    def check(evidence: Evidence) -> tuple[bool, str]:
        raise _Missing(reason)

    return check


_CLAIMS: tuple[tuple[str, str, str, Check], ...] = (
    (
        "Tables 2 and 3",
        "The iterations of synchronous and semi-synchronous policies follow from the schedule (Eq. 5).",
        "table2 table3",
        _arithmetic,
    ),
    ("Table 1", "The characteristics of the three protocols.", "table1", _table1),
    (
        "Section 4.3, Figure 2",
        "Under semi-synchronous and asynchronous training there is no idle time; synchronous training idles.",
        "table3",
        _no_idle,
    ),
    (
        "Section 4.3",
        "Transmission takes less than 0.5 % of the time of computation (CIFAR-10, heterogeneous).",
        "table3",
        _transmission,
    ),
    (
        "Figure 4",
        "With the cache a community model takes the same time whatever the number of learners; without, it grows.",
        "figure4",
        _cache,
    ),
    (
        "Section 6, CIFAR-10",
        "Equal learners with equal amounts of data: all protocols are equivalent.",
        "table2",
        _homogeneous_uniform,
    ),
    (
        "Table 2, Figure 7",
        "Homogeneous: SemiSync with Momentum (λ=2) reaches the target first.",
        "table2",
        lambda evidence: _wins(evidence, "table2", "parallel_time", " s", _semisync_momentum(2)),
    ),
    (
        "Table 2",
        "Homogeneous: SemiSync with Momentum (λ=4) needs the fewest update requests.",
        "table2",
        lambda evidence: _wins(evidence, "table2", "communication_cost", "", _semisync_momentum(4)),
    ),
    (
        "Table 2",
        "Homogeneous: SemiSync with Momentum (λ=2) needs the least energy (here: active time only).",
        "table2",
        lambda evidence: _wins(evidence, "table2", "energy_active", "", _semisync_momentum(2)),
    ),
    (
        "Figure 7",
        "Homogeneous: AsyncFedAvg and FedRec are comparable on skewed data, AsyncFedAvg is faster on power law.",
        "table2",
        _async_homogeneous,
    ),
    (
        "Table 3, Figure 8",
        "Heterogeneous: SemiSync with Momentum (λ=2) reaches the target first.",
        "table3",
        lambda evidence: _wins(evidence, "table3", "parallel_time", " s", _semisync_momentum(2)),
    ),
    (
        "Table 3",
        "Heterogeneous: SemiSync with Momentum (λ=2) needs the fewest update requests.",
        "table3",
        lambda evidence: _wins(evidence, "table3", "communication_cost", "", _semisync_momentum(2)),
    ),
    (
        "Table 3",
        "Heterogeneous: SemiSync with Momentum (λ=2) needs the least energy (active time only, as in the table).",
        "table3",
        lambda evidence: _wins(evidence, "table3", "energy_active", "", _semisync_momentum(2)),
    ),
    (
        "Table 3",
        "Heterogeneous: SemiSync with Momentum (λ=2) needs the least energy (idle time charged).",
        "table3",
        lambda evidence: _wins(evidence, "table3", "energy_idle_charged", "", _semisync_momentum(2)),
    ),
    (
        "Tables 2 and 3",
        "SemiSync reaches the target before its synchronous counterpart, with any local solver.",
        "table2 table3",
        _semi_faster,
    ),
    (
        "Section 6, costs",
        "SemiSync saves about 40 % energy on average against its synchronous counterpart.",
        "table2 table3",
        _energy_saving,
    ),
    (
        "Section 6, costs",
        "Momentum with SemiSync needs 3 to 9 times less energy than synchronous Vanilla SGD.",
        "table2 table3",
        _momentum_energy,
    ),
    (
        "Section 6, CIFAR-10",
        "Sync with Momentum fails on power law data; FedProx rescues it.",
        "table2 table3",
        _momentum_on_power_law,
    ),
    (
        "Section 6",
        "FedRec is the fastest asynchronous policy on heterogeneous clusters.",
        "table3 figure9 figure10",
        _fedrec_wins,
    ),
    (
        "Figure 8",
        "Asynchronous policies need many more update requests for the same accuracy.",
        "table3",
        _async_requests,
    ),
    (
        "Section 6, CIFAR-10",
        "With Non-IID(5), power law data gives a higher accuracy than skewed data, as its head has 8 classes.",
        "figure7",
        _never("the paper publishes no numbers for power law with Non-IID(5), and it is in neither of its tables"),
    ),
    (
        "Figure 9",
        "CIFAR-100: SemiSync with Momentum (λ=0.5) converges fastest.",
        "figure9",
        _curve_wins("figure9", 0.5),
    ),
    (
        "Figure 10",
        "ExtendedMNIST: SemiSync with Vanilla SGD (λ=1) converges fastest.",
        "figure10",
        _curve_wins("figure10", 1.0),
    ),
    (
        "Figure 10",
        "ExtendedMNIST: at the start of training the asynchronous policies are ahead.",
        "figure10",
        _early_async,
    ),
    ("Figure 11", "BrainAge: SemiSync (λ=3, λ=4) converges faster than Sync.", "figure11", _brain_time),
    ("Figure 11", "BrainAge: SemiSync (λ=4) needs fewer update requests than Sync.", "figure11", _brain_requests),
    (
        "Figure 11",
        "BrainAge, Skewed & IID: SemiSync (λ=3) has the least error, close to that of the centralized model.",
        "figure11",
        _brain_centralized,
    ),
    ("Figure 12", "BrainAge: the federation's model is better than that of any silo alone.", "figure12", _silos),
)
