"""How each claim of the paper is checked against runs: whether it holds, and a sentence with the numbers.

Every number of ours in a sentence is computed from runs or from the schedule. A policy whose budget ended before the
time that another needed has not lost against it, and the sentence says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from metis.core.events import CommunityPublished
from metis.core.stop import StopRule
from metis.reproduction.environments import Cell, Environment, varied
from metis.reproduction.schedule import dry_run, rounds_of, schedule_cell
from metis.reproduction.tables import (
    ASYNC,
    ENERGIES,
    LEVELS_RULE,
    PROTOCOLS,
    SEMISYNC,
    SYNC,
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

Check = Callable[[Evidence], tuple[bool, str]]


class MissingEvidence(Exception):
    """A claim cannot be checked; the message says why, or is empty if its runs have not been made."""


# --- helpers ----------------------------------------------------------------------------------


def _environments(evidence: Evidence, result: str) -> list[Environment]:
    """The environments of a result, if all their runs are there."""
    environments = evidence.of(result)
    if not environments or not all(evidence.complete(environment) for environment in environments):
        raise MissingEvidence
    return environments


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
        raise MissingEvidence(f"{environment.paper.title} does not have this policy")
    return found[0]


def _amount(value: float | None, unit: str = "") -> str:
    if value is None or not math.isfinite(value):
        return "target not reached"
    return f"{value:,.0f}{unit}" if abs(value) >= 100 else f"{value:.3g}{unit}"


def _time(evidence: Evidence, cell: Cell) -> str:
    """Until the target, or how long it was tried."""
    seconds = evidence.cost(cell, "parallel_time")
    return _amount(seconds, " s") if math.isfinite(seconds) else f"not within {_amount(evidence.end(cell), ' s')}"


def _cheapest(evidence: Evidence, cells: Sequence[Cell], name: str) -> tuple[Cell | None, float]:
    """The cell with the lowest cost until the target; None if none reached it."""
    best = min(cells, key=lambda cell: evidence.cost(cell, name))
    cost = evidence.cost(best, name)
    return (None, cost) if math.isinf(cost) else (best, cost)


def _no_target(environment: Environment) -> MissingEvidence:
    return MissingEvidence(f"no policy reached the target in {environment.paper.title}")


# --- checks -----------------------------------------------------------------------------------


def iterations_follow(evidence: Evidence) -> tuple[bool, str]:
    rows = arithmetic(evidence.of("table2", "table3"))
    if not rows:
        raise MissingEvidence
    same = sum(row["same"] for row in rows)
    return same == len(rows), f"{same} of {len(rows)} Sync and SemiSync rows have exactly the published iterations"


def no_idle_time(evidence: Evidence) -> tuple[bool, str]:
    shares: dict[str, list[float]] = {protocol: [] for protocol in PROTOCOLS}
    cold: list[float] = []
    for environment in evidence.of("table3", "figure9", "figure10", "table2"):
        for cell, run in evidence.cells(environment):
            shares[protocol_of(cell)].append(idle_share(run))
            if protocol_of(cell) == SEMISYNC:
                cold.append(idle_share(run, after_first_round=False))
    if not all(shares.values()):
        raise MissingEvidence
    largest = {protocol: max(values) for protocol, values in shares.items()}
    holds = largest[SEMISYNC] < 0.01 and largest[ASYNC] < 0.01 and min(shares[SYNC]) > 0.01
    return holds, (
        f"largest idle share after the first round: SemiSync {largest[SEMISYNC]:.1%} (with its cold start up to "
        f"{max(cold):.1%}), asynchronous {largest[ASYNC]:.1%}; Sync {min(shares[SYNC]):.0%} to "
        f"{largest[SYNC]:.0%}. Virtual time with constant speeds; the paper's own CT and PT imply that its fast "
        f"learners were busy {_published_busy(evidence)} of the time under SemiSync"
    )


def _published_busy(evidence: Evidence) -> str:
    """The share of the time that fast learners trained, from the published cumulative and parallel times."""
    busy = []
    for environment in evidence.of("table3"):
        fast = environment.config.learners[0].count
        for cell in _pick(environment, SEMISYNC):
            published = cell.published
            if published is not None and published.fast_time and published.parallel_time:
                busy.append(published.fast_time / published.parallel_time / fast)
    return f"{min(busy):.0%} to {max(busy):.0%}" if busy else "an unknown part"


def equal_learners(evidence: Evidence) -> tuple[bool, str]:
    environments = evidence.of("table2")
    if not environments:
        raise MissingEvidence
    per_request = {}
    for name, epochs in (("sync_fedavg", None), ("semisync_fedavg", 4.0), ("async_fedavg", None)):
        cell = next(
            cell
            for cell in environments[0].cells
            if cell.policy.name == name and (epochs is None or slowest_learner_epochs(cell) == epochs)
        )
        config = varied(cell.config, partition={"sizes": "uniform", "classes": "iid"})
        run = dry_run(config, StopRule(update_requests=10 * config.learner_count))
        made = [made for made in rounds_of(run) if made.seconds > 0]
        per_request[cell.label] = made[-1].steps / made[-1].update_requests
    parts = [f"{label} {steps:g} steps per request" for label, steps in per_request.items()]
    return len(
        {round(steps, 6) for steps in per_request.values()}
    ) == 1, f"scheduled without training: {', '.join(parts)}"


def transmission(evidence: Evidence) -> tuple[bool, str]:
    environments = evidence.of("table3")
    if not environments:
        raise MissingEvidence
    stated = 0.4  # seconds for the model of 4 MB, according to the paper
    parts = []
    for environment in environments:
        each = schedule_cell(_one(environment, SEMISYNC, "momentum", 2)).each
        assert each is not None
        parts.append(f"{environment.paper.distribution} {stated / each.seconds:.1%} of {each.seconds:.1f} s")
    raise MissingEvidence(
        f"the paper's network is not available here; the {stated:g} s that it states are, relative to the nominal "
        f"synchronization period: {', '.join(parts)} (its measured period is 80 s)"
    )


def cheapest(result: str, name: str, epochs: float, unit: str = "") -> Check:
    """Whether SemiSync with Momentum and this lambda is the cheapest policy in every environment of a result."""

    def check(evidence: Evidence) -> tuple[bool, str]:
        holds, parts = True, []
        for environment in _environments(evidence, result):
            own, cells = _one(environment, SEMISYNC, "momentum", epochs), environment.cells
            if _cheapest(evidence, cells, name)[0] is None:
                raise _no_target(environment)
            cost = evidence.cost(own, name)
            rival, next_best = _cheapest(evidence, [cell for cell in cells if cell is not own], name)
            holds = holds and cost < next_best
            other = ", no other policy reached it" if rival is None else f", {rival.label} {_amount(next_best, unit)}"
            ended = name == "parallel_time" and [
                cell.label
                for cell in cells
                if math.isinf(evidence.cost(cell, name)) and evidence.end(cell) < min(cost, next_best)
            ]
            short = f" (the budget ended before that for {', '.join(ended)})" if ended else ""
            parts.append(f"{environment.paper.distribution}: {own.label} {_amount(cost, unit)}{other}{short}")
        return holds, "; ".join(parts)

    return check


def semisync_is_faster(evidence: Evidence) -> tuple[bool, str]:
    holds, parts, compared, published = True, list[str](), 0, list[bool]()
    for environment in evidence.of("table2", "table3"):
        for sync, semi in counterparts(environment):
            if sync.name not in evidence.runs or semi.name not in evidence.runs:
                raise MissingEvidence
            before, after = (published_value(cell, "parallel_time") for cell in (sync, semi))
            if before and after:
                published.append(after < before)
            slow, quick = (evidence.cost(cell, "parallel_time") for cell in (sync, semi))
            if math.isinf(quick) and evidence.end(semi) < slow:
                outcome = f"{_time(evidence, semi)}, where its budget ended; Sync {_time(evidence, sync)}"
            elif math.isinf(slow) and evidence.end(sync) < quick:
                outcome = f"{_time(evidence, semi)}; Sync {_time(evidence, sync)}, where its budget ended"
            else:
                compared += 1
                holds = holds and quick < slow
                who = "Sync" if math.isinf(quick) else "SemiSync"
                outcome = f"{slow / quick:.2g} times" if math.isfinite(slow + quick) else f"only {who} reached it"
            parts.append(f"{environment.paper.cluster} {environment.paper.distribution} {semi.label}: {outcome}")
    if not compared:
        raise MissingEvidence("; ".join(parts))
    paper = f" In the paper's own tables it is so in {sum(published)} of {len(published)} pairs." if published else ""
    return holds, f"{compared} of {len(parts)} pairs can be compared: {'; '.join(parts)}.{paper}"


def energy_saving(evidence: Evidence) -> tuple[bool, str]:
    savings: dict[str, list[float]] = {kind: [] for kind in ENERGIES}
    of_paper = []
    for environment in evidence.of("table2", "table3"):
        for sync, semi in counterparts(environment):
            before, after = published_value(sync, "energy"), published_value(semi, "energy")
            if before and after:
                of_paper.append(1 - after / before)
            if sync.name not in evidence.runs or semi.name not in evidence.runs:
                raise MissingEvidence
            for kind in ENERGIES:
                costs = [evidence.cost(cell, f"energy_{kind}") for cell in (sync, semi)]
                if all(map(math.isfinite, costs)):
                    savings[kind].append(1 - costs[1] / costs[0])
    if not all(savings.values()):
        raise MissingEvidence("in no pair did both policies reach the target" if evidence.runs else "")
    means = {kind: statistics.mean(values) for kind, values in savings.items()}
    names = {"equation": "by the paper's equation", "active": "active time only", "idle_charged": "with idle power"}
    parts = [f"{names[kind]} {means[kind]:+.0%}" for kind in ENERGIES]
    published = f"; the paper's tables {statistics.mean(of_paper):+.0%} on average" if of_paper else ""
    return all(mean >= 0.3 for mean in means.values()), (
        f"mean saving over {len(savings['active'])} pairs: {', '.join(parts)}{published}. Which definition is used "
        "decides it: a fast learner that trains instead of waiting costs energy"
    )


def momentum_energy(evidence: Evidence) -> tuple[bool, str]:
    holds, parts = True, []
    for environment in evidence.of("table2", "table3"):
        if not evidence.complete(environment):
            raise MissingEvidence
        base, own = _one(environment, SYNC, "vanilla"), _one(environment, SEMISYNC, "momentum", 2)
        factors = {kind: _factor(evidence, base, own, f"energy_{kind}") for kind in ENERGIES}
        holds = holds and all(factor >= 3 for factor in factors.values())
        before, after = published_value(base, "energy"), published_value(own, "energy")
        published = f", paper {before / after:.1f}" if before and after else ""
        shown = "/".join(f"{factor:.1f}" for factor in factors.values())
        if math.isinf(factors["active"]):
            shown = "Sync did not reach the target"
        parts.append(f"{environment.paper.cluster} {environment.paper.distribution} {shown}{published}")
    if not parts:
        raise MissingEvidence
    return holds, f"Sync w/ Vanilla over SemiSync (λ=2) w/ Momentum, equation/active/with idle: {'; '.join(parts)}"


def _factor(evidence: Evidence, base: Cell, own: Cell, name: str) -> float:
    before, after = evidence.cost(base, name), evidence.cost(own, name)
    if math.isinf(after):
        return 0.0
    return math.inf if math.isinf(before) else before / after


def momentum_on_power_law(evidence: Evidence) -> tuple[bool, str]:
    holds, parts = True, []
    for environment in evidence.of("table2", "table3"):
        if environment.config.partition.sizes != "power_law":
            continue
        if not evidence.complete(environment):
            raise MissingEvidence
        momentum, prox = (_one(environment, SYNC, solver) for solver in ("momentum", "fedprox"))
        slow, rescued = (evidence.cost(cell, "parallel_time") for cell in (momentum, prox))
        best = evidence.runs[momentum.name].best_metric
        holds = holds and math.isinf(slow) and math.isfinite(rescued)
        parts.append(
            f"{environment.paper.cluster}: Sync w/ Momentum {_time(evidence, momentum)} (best "
            f"{'–' if best is None else f'{best:.3f}'}), Sync w/ FedProx {_time(evidence, prox)}"
        )
    if not parts:
        raise MissingEvidence
    return holds, "; ".join(parts)


def fedrec_is_fastest(evidence: Evidence) -> tuple[bool, str]:
    holds, parts, compared = True, list[str](), 0
    for environment in evidence.of("table3", "figure9", "figure10"):
        if not evidence.complete(environment):
            continue
        cells = _pick(environment, ASYNC)
        best, _ = _cheapest(evidence, cells, "parallel_time")
        if best is None:
            parts.append(f"{environment.paper.domain} {environment.paper.distribution}: no policy reached the target")
            continue
        times = {cell.policy.name: evidence.cost(cell, "parallel_time") for cell in cells}
        holds = holds and times["fedrec"] <= min(times.values())
        compared += 1
        costs = [f"{cell.label} {_time(evidence, cell)}" for cell in cells]
        parts.append(f"{environment.paper.domain} {environment.paper.distribution}: {', '.join(costs)}")
    if not compared:
        raise MissingEvidence("; ".join(parts))
    return holds, "; ".join(parts)


def asynchronous_when_homogeneous(evidence: Evidence) -> tuple[bool, str]:
    holds, parts = True, []
    for environment in _environments(evidence, "table2"):
        by_name = {cell.policy.name: cell for cell in _pick(environment, ASYNC)}
        cells = [by_name[name] for name in ("async_fedavg", "fedrec", "fedasync") if name in by_name]
        if len(cells) < 3:
            raise MissingEvidence(f"{environment.paper.title} does not have these policies")
        fedavg, fedrec, fedasync = (evidence.cost(cell, "parallel_time") for cell in cells)
        if environment.config.partition.sizes == "power_law":
            holds = holds and fedavg < min(fedrec, fedasync)
        else:
            holds = holds and max(fedavg, fedrec) <= 1.5 * min(fedavg, fedrec) < math.inf
        shown = ", ".join(f"{cell.label} {_time(evidence, cell)}" for cell in cells)
        parts.append(f"{environment.paper.distribution}: {shown}")
    return holds, "; ".join(parts)


def asynchronous_requests(evidence: Evidence) -> tuple[bool, str]:
    holds, parts = True, []
    for environment in _environments(evidence, "table3"):
        own = evidence.cost(_one(environment, SEMISYNC, "momentum", 2), "communication_cost")
        others = [evidence.cost(cell, "communication_cost") for cell in _pick(environment, ASYNC)]
        if math.isinf(min(own, *others)):
            raise _no_target(environment)
        holds = holds and 2 * own <= min(others)
        parts.append(
            f"{environment.paper.distribution}: SemiSync {_amount(own)}, asynchronous {', '.join(map(_amount, others))}"
        )
    return holds, f"taking many more as at least twice as many: {'; '.join(parts)}"


_LEVELS = ("parallel_time", "communication_cost", "energy")


def characteristics_agree(evidence: Evidence) -> tuple[bool, str]:
    _environments(evidence, "table1")
    document = characteristics(evidence)
    differing, own = [], 0
    for row in document["rows"]:
        for name in _LEVELS:
            ours, theirs = row["ours"][name]["level"], row["published"][name]
            if ours != theirs:
                differing.append(f"{row['protocol']} {name.replace('_', ' ')} {ours or 'not reached'}, paper {theirs}")
        for name in ("idle_free", "stale_free"):
            if row[name] != row["published"][name]:
                differing.append(
                    f"{row['protocol']} {name.replace('_', '-')} {row[name]}, paper {row['published'][name]}"
                )
        own += sum(row["from_published"][name]["level"] != row["published"][name] for name in _LEVELS)
    count = 5 * len(document["rows"])
    words = (
        f"{count - len(differing)} of {count} entries agree with the paper ({count - own} if its own Table 3 is used)"
    )
    return not differing, f"{words}{': ' if differing else ''}{'; '.join(differing)}. Rule: {LEVELS_RULE}"


def cache_is_constant(evidence: Evidence) -> tuple[bool, str]:
    if not evidence.mixing_times:
        raise MissingEvidence
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
    return holds, "; ".join(parts)


def converges_fastest(result: str, epochs: float) -> Check:
    def check(evidence: Evidence) -> tuple[bool, str]:
        holds, parts = True, []
        for environment in _environments(evidence, result):
            (own,) = _pick(environment, SEMISYNC, epochs=epochs)
            best, _ = _cheapest(evidence, environment.cells, "parallel_time")
            if best is None:
                raise _no_target(environment)
            holds = holds and best is own
            shown = ", ".join(
                f"{cell.label} {_time(evidence, cell)} (best {evidence.runs[cell.name].best_metric or 0.0:.3f})"
                for cell in environment.cells
            )
            parts.append(f"{environment.paper.distribution}: {shown}")
        return holds, f"time to the target: {'; '.join(parts)}"

    return check


def asynchronous_lead_early(evidence: Evidence) -> tuple[bool, str]:
    holds, parts = True, []
    for environment in _environments(evidence, "figure10"):
        semi = evidence.runs[_pick(environment, SEMISYNC)[0].name]
        first = next((at for at, item in semi.events if isinstance(item, CommunityPublished) and at > 0), math.nan)
        own = _metric_at(semi, first)
        early = {cell.label: _metric_at(evidence.runs[cell.name], first) for cell in _pick(environment, ASYNC)}
        holds = holds and max(early.values()) > own
        shown = ", ".join(f"{label} {value:.3f}" for label, value in early.items())
        parts.append(
            f"{environment.paper.distribution}, when SemiSync's first round ends ({first:.0f} s): {shown}, "
            f"SemiSync {own:.3f}"
        )
    return holds, "; ".join(parts)


def _metric_at(run: Run, moment: float) -> float:
    """The last value measured until then."""
    return [math.nan, *(v for point, v in zip(run.history, run.metric_values, strict=True) if point.at <= moment)][-1]


def brainage_beats_sync(name: str, needed: Sequence[float], unit: str = "") -> Check:
    """Whether SemiSync with each of these lambdas costs less than Sync in every environment of BrainAge."""

    def check(evidence: Evidence) -> tuple[bool, str]:
        holds, parts = True, []
        for environment in _environments(evidence, "figure11"):
            sync = evidence.cost(_pick(environment, SYNC)[0], name)
            if _cheapest(evidence, environment.cells, name)[0] is None:
                raise _no_target(environment)
            shown = [f"Sync {_amount(sync, unit)}"]
            for cell in _pick(environment, SEMISYNC):
                cost, epochs = evidence.cost(cell, name), slowest_learner_epochs(cell)
                if epochs in needed:
                    holds = holds and cost < sync
                shown.append(f"λ={epochs:g} {_amount(cost, unit)}")
            target = environment.config.evaluation.target
            parts.append(f"{environment.paper.distribution} until MAE {target:g}: {', '.join(shown)}")
        return holds, "; ".join(parts)

    return check


def brainage_error(evidence: Evidence) -> tuple[bool, str]:
    for environment in _environments(evidence, "figure11"):
        if environment.config.partition.classes != "iid":
            continue
        centralized = evidence.centralized(environment)
        if centralized is None or centralized.best_metric is None:
            raise MissingEvidence
        best = {cell.label: evidence.runs[cell.name].best_metric or math.inf for cell in environment.cells}
        own = best[_pick(environment, SEMISYNC, epochs=3.0)[0].label]
        shown = ", ".join(f"{label} {value:.2f}" for label, value in best.items())
        return own <= min(best.values()) and own <= 1.05 * centralized.best_metric, (
            f"lowest MAE: {shown}, centralized {centralized.best_metric:.2f}"
        )
    raise MissingEvidence


def federation_beats_silos(evidence: Evidence) -> tuple[bool, str]:
    holds, parts = True, []
    for environment in _environments(evidence, "figure12"):
        alone = [run.best_metric for run in evidence.alone(environment) if run.best_metric is not None]
        if len(alone) < len(environment.alone):
            raise MissingEvidence
        federation = min(evidence.runs[cell.name].best_metric or math.inf for cell in environment.cells)
        centralized = evidence.centralized(environment)
        beaten = sum(federation < value for value in alone)
        holds = holds and beaten == len(alone)
        reference = "" if centralized is None else f", centralized {centralized.best_metric:.2f}"
        parts.append(
            f"{environment.paper.distribution}: federation {federation:.2f}, {len(alone)} silos alone {min(alone):.2f} "
            f"to {max(alone):.2f} ({beaten} of them worse){reference}"
        )
    return holds, f"lowest MAE in years: {'; '.join(parts)}"


def not_testable(reason: str) -> Check:
    def check(evidence: Evidence) -> tuple[bool, str]:
        raise MissingEvidence(reason)

    return check
