"""How each claim of the paper is checked: against our runs, and by the same rule against the paper's own tables.

Every number in a sentence is computed from runs, from the schedule or from the tables.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from metis.core.stop import StopRule
from metis.reproduction import lookup, readings
from metis.reproduction.environments import varied
from metis.reproduction.schedule import dry_run, rounds_of, schedule_cell
from metis.reproduction.tables import (
    ASYNC,
    PROTOCOLS,
    SEMISYNC,
    SYNC,
    Evidence,
    arithmetic,
    counterparts,
    distinct_schedules,
    idle_share,
    protocol_of,
    slowest_learner_epochs,
    solver_of,
)
from metis.reproduction.verdicts import Comparison, Finding, Outcome, Part, Ratio, Source
from metis.text import plural

# --- what follows from the schedule -------------------------------------------------------------


def iterations_follow(evidence: Evidence, source: Source) -> Finding:
    lookup.ours_only(source)
    rows = arithmetic(lookup.environments(evidence, "table2", "table3"))
    same = sum(row["same"] for row in rows)
    part = Part(lookup.outcome(same == len(rows)), f"{same} of {len(rows)} rows to the digit")
    return Finding([part], note=lookup.BY_CONSTRUCTION)


def no_idle_time(evidence: Evidence, source: Source) -> Finding:
    """Idle shares after the first round, of the schedules; in the tables, of fast learners under SemiSync."""
    environments = lookup.in_tables(evidence, "table3")
    if source.name != "ours":
        trained: dict[str, list[float]] = {SEMISYNC: [], ASYNC: []}
        for environment in environments:
            for cell in (*lookup.pick(environment, SEMISYNC), *lookup.pick(environment, ASYNC)):
                row = cell.published
                if row and row.fast_time and row.parallel_time:
                    share = row.fast_time / row.parallel_time / environment.config.learners[0].count
                    trained[protocol_of(cell)].append(share)
        if not all(trained.values()):
            raise lookup.NoEvidence("the tables do not say")
        said = " and ".join(
            f"{min(values):.0%} to {max(values):.0%} of the time under {words}"
            for words, values in (("SemiSync", trained[SEMISYNC]), ("asynchronous policies", trained[ASYNC]))
        )
        text = f"its fast learners trained for {said}, if cumulative time is training only (CT / PT)"
        return Finding([Part(lookup.outcome(min(min(values) for values in trained.values()) > 0.95), text)])
    shares: dict[str, list[float]] = {protocol: [] for protocol in PROTOCOLS}
    for environment in lookup.in_tables(evidence, "table3", "table2"):
        for cell in distinct_schedules(environment):
            shares[protocol_of(cell)].append(idle_share(schedule_cell(cell, 10).run))
    if not all(shares.values()):
        raise lookup.NoEvidence("not all protocols are there")
    largest = {protocol: max(values) for protocol, values in shares.items()}
    holds = largest[SEMISYNC] < 0.01 and largest[ASYNC] < 0.01 and min(shares[SYNC]) > 0.01
    nominal = all(environment.timings == "nominal" for environment in environments)
    speeds = "constant speeds" if nominal else "the speeds of the paper's rows, which change after the cold start"
    text = (
        f"largest idle share after the first round, with {speeds}: SemiSync {largest[SEMISYNC]:.1%}, "
        f"asynchronous {largest[ASYNC]:.1%}, Sync {min(shares[SYNC]):.0%} to {largest[SYNC]:.0%}"
    )
    return Finding([Part(lookup.outcome(holds), text)], note=lookup.BY_CONSTRUCTION if nominal else "")


def equal_learners(evidence: Evidence, source: Source) -> Finding:
    lookup.ours_only(source)
    per_request = {}
    environment = lookup.environments(evidence, "table2")[0]
    for name, epochs in (("sync_fedavg", None), ("semisync_fedavg", 4.0), ("async_fedavg", None)):
        cell = next(
            cell
            for cell in environment.cells
            if cell.policy.name == name and (epochs is None or slowest_learner_epochs(cell) == epochs)
        )
        config = varied(cell.config, partition={"sizes": "uniform", "classes": "iid"})
        made = [one for one in rounds_of(dry_run(config, StopRule(update_requests=100))) if one.seconds > 0]
        per_request[cell.label.partition(" w/")[0]] = made[-1].steps / made[-1].update_requests
    same = len({round(steps, 6) for steps in per_request.values()}) == 1
    parts = ", ".join(f"{label} {steps:g}" for label, steps in per_request.items())
    text = f"steps for each update request, scheduled: {parts}; no models were compared"
    return Finding([Part(lookup.outcome(same), text)], note=lookup.BY_CONSTRUCTION)


def cache_is_constant(evidence: Evidence, source: Source) -> Finding:
    lookup.ours_only(source)
    if not evidence.mixing_times:
        raise lookup.NoEvidence("not measured yet")
    parts = []
    for network in dict.fromkeys(measured.network for measured in evidence.mixing_times):
        rows = sorted((row for row in evidence.mixing_times if row.network == network), key=lambda row: row.learners)
        times = [row.cached for row in rows]
        flat = max(times) / min(times)
        before, last = rows[-2], rows[-1]
        growth, more = last.full_pass / before.full_pass, last.learners / before.learners
        holds = flat <= 1.1 and 0.75 * more <= growth <= 1.25 * more
        parts.append(
            Part(
                lookup.outcome(holds),
                f"{network}: with the cache ×{flat:.2f} from {rows[0].learners} to {last.learners:,} learners, without "
                f"it ×{growth:.1f} for ×{more:.1f} as many",
            )
        )
    return Finding(parts, "flat within 10 %, and proportional within 25 %")


# --- costs until the target ---------------------------------------------------------------------


def cheapest(result: str, name: str, epochs: float, unit: str = "") -> lookup.Check:
    """Whether SemiSync with Momentum and this lambda costs less than every other policy, in every environment."""

    def check(evidence: Evidence, source: Source) -> Finding:
        parts = []
        environments = lookup.in_tables(evidence, result)
        for environment in environments:
            own = lookup.one(environment, SEMISYNC, "momentum", epochs)
            rivals = [cell for cell in environment.cells if cell is not own]
            words, count = lookup.where(environment), len(environments)
            parts.append(lookup.against(source, own, rivals, name, unit, words, environments=count))
        return readings.in_every_environment(parts, "the closest policies, and their costs over its own")

    return check


def fewer_requests_with(own: float, other: float) -> lookup.Check:
    """Whether SemiSync with Momentum needs fewer requests with the first lambda than with the second, everywhere."""

    def check(evidence: Evidence, source: Source) -> Finding:
        environments = lookup.in_tables(evidence, "table2")
        parts = []
        for environment in environments:
            cell, rival = (lookup.one(environment, SEMISYNC, "momentum", epochs) for epochs in (own, other))
            one = source.compare(cell, rival, "communication_cost", among=len(environments))
            parts.append(Part(one.outcome, f"{lookup.where(environment)} {one.ratio.times}", [one]))
        return readings.in_every_environment(parts, f"update requests with λ={other:g} over those with λ={own:g}")

    return check


def dearer_with(other: float, own: float, name: str) -> lookup.Check:
    """Whether SemiSync with Momentum costs more with the first lambda than with the second, on the whole."""

    def check(evidence: Evidence, source: Source) -> Finding:
        compared = []
        for environment in lookup.in_tables(evidence, "table2"):
            cells = [lookup.one(environment, SEMISYNC, "momentum", epochs) for epochs in (own, other)]
            compared.append(source.compare(cells[0], cells[1], name))
        return readings.in_general({"": compared}, f"the cost with λ={other:g} over that with λ={own:g}")

    return check


def semisync_is_faster(solver: str) -> lookup.Check:
    """Whether SemiSync is before Sync with this solver, on the whole."""

    def check(evidence: Evidence, source: Source) -> Finding:
        compared = [
            source.compare(semi, sync, "parallel_time")
            for environment in lookup.in_tables(evidence, "table2", "table3")
            for sync, semi in counterparts(environment)
            if solver_of(sync) == solver
        ]
        return readings.in_general({"": compared}, "Sync's parallel time over SemiSync's")

    return check


def momentum_is_better(evidence: Evidence, source: Source) -> Finding:
    """Whether Momentum SGD needs less time and fewer requests than each other solver, on the whole."""
    series: dict[str, list[Comparison]] = {}
    for name, words in (("parallel_time", "parallel time"), ("communication_cost", "update requests")):
        for solver, label in (("vanilla", "Vanilla"), ("fedprox", "FedProx")):
            series[f"{words} of {label}"] = [
                source.compare(own, rival, name)
                for environment in lookup.in_tables(evidence, "table2", "table3")
                for own in environment.cells
                for rival in environment.cells
                if (solver_of(own), solver_of(rival)) == ("momentum", solver)
                and own.policy.name == rival.policy.name
                and slowest_learner_epochs(own) == slowest_learner_epochs(rival)
            ]
    return readings.in_general(series, "costs over those with Momentum SGD")


_SAVING_RULE = "at least 30 %, from at least half of the pairs; a larger saving is not held against the claim"


def energy_saving(kind: str) -> lookup.Check:
    """The mean saving of SemiSync against Sync with the same solver; without the target a cost is a bound."""

    def check(evidence: Evidence, source: Source) -> Finding:
        pairs = [pair for one in lookup.in_tables(evidence, "table2", "table3") for pair in counterparts(one)]
        compared = [source.compare(semi, sync, f"energy_{kind}") for sync, semi in pairs]
        ratios = [one.ratio for one in compared]
        known = [ratio for ratio in ratios if ratio.kind != "unknown"]
        exact = [ratio for ratio in known if ratio.kind == "exact"]
        if not exact:
            return Finding([Part("open", f"none of {len(pairs)} pairs has reached the target with both", compared)])
        savings = [1 - 1 / ratio.mean for ratio in exact]
        least = [-math.inf if ratio.kind == "at most" else 1 - 1 / ratio.mean for ratio in known]
        most = [1.0 if ratio.kind == "at least" else 1 - 1 / ratio.mean if ratio.mean else -math.inf for ratio in known]
        # Pairs with the same run of Sync err together: as if there were half as many.
        errors = [(ratio.interval[1] / ratio.mean - 1) / ratio.mean for ratio in exact]
        half = math.sqrt(2 * sum(error**2 for error in errors)) / len(exact)
        outcome: Outcome = "open"
        if len(known) >= len(pairs) / 2:
            holds, fails = statistics.mean(least) - half >= 0.3, statistics.mean(most) + half < 0.3
            outcome = "holds" if holds else "fails" if fails else "open"
        text = f"{statistics.mean(savings):+.0%} on average of {len(exact)} of {len(pairs)} pairs"
        size = f"{statistics.mean(savings):+.0%}" + (f" ± {half:.0%}" if half else "")
        text += (f" (95 %: ± {half:.0%})" if half else "") + f", {min(savings):+.0%} to {max(savings):+.0%}"
        text += f", and {len(known) - len(exact)} with a bound" if len(known) > len(exact) else ""
        bounds = [one for one in compared if one.ratio.kind != "exact"]
        if statistics.mean(least) < 0.3 < statistics.mean(most) and bounds:
            return Finding([Part(outcome, text, bounds, size=size)], _SAVING_RULE)
        why = "30 % is within the interval of the mean" if outcome == "open" else ""
        more = outcome == "holds" and statistics.mean(least) - half > 0.4
        note = f"more than that: {100 * statistics.mean(least):.0f} %" if more else ""
        part = Part(outcome, text, () if outcome == "open" else compared, why=why, size=size)
        return Finding([part], _SAVING_RULE, "whole", note=note)

    return check


def momentum_energy(kind: str) -> lookup.Check:
    def check(evidence: Evidence, source: Source) -> Finding:
        compared = []
        for environment in lookup.in_tables(evidence, "table2", "table3"):
            base, own = lookup.one(environment, SYNC, "vanilla"), lookup.one(environment, SEMISYNC, "momentum", 2)
            compared.append(source.compare(own, base, f"energy_{kind}"))
        # The smallest factor of the paper's tables is 2.7, which it calls 3.
        rule = "energy of Sync w/ Vanilla over that of SemiSync (λ=2) w/ Momentum: 3 to 9, rounded"
        return readings.within(compared, 2.5, 9.5, rule)

    return check


def momentum_fails_on_power_law(evidence: Evidence, source: Source) -> Finding:
    parts = _behind_on_power_law(evidence, source, "momentum", "vanilla")
    return Finding(parts, "not at the target when Sync w/ Vanilla is")


def fedprox_rescues(evidence: Evidence, source: Source) -> Finding:
    parts = _behind_on_power_law(evidence, source, "momentum", "fedprox")
    nothing = all(part.outcome == "fails" for part in _behind_on_power_law(evidence, source, "momentum", "vanilla"))
    note = "there is nothing to rescue" if nothing and parts else ""
    return Finding(parts, "Sync w/ FedProx is at the target when Sync w/ Momentum is not", note=note)


def _behind_on_power_law(evidence: Evidence, source: Source, solver: str, other: str) -> list[Part]:
    """Whether Sync with the first solver is not at the target when Sync with the other is."""
    parts = []
    for environment in lookup.in_tables(evidence, "table2", "table3"):
        if environment.config.partition.sizes != "power_law":
            continue
        cells = [lookup.one(environment, SYNC, name) for name in (solver, other)]
        mine, theirs = (source.costs(cell, "parallel_time") for cell in cells)
        behind = [
            second.reached and second.value < first.value
            for first, second in ((cost, theirs[seed]) for seed, cost in mine.items() if seed in theirs)
            if (second.reached and second.value <= first.value) or (first.reached and first.value <= second.value)
        ]
        outcome: Outcome = "open" if len(set(behind)) != 1 else lookup.outcome(behind[0])
        shown = ", ".join(f"{cell.label} {lookup.amount(source, cell, 'parallel_time', ' s')}" for cell in cells)
        compared = [source.compare(cells[0], cells[1], "parallel_time")]
        parts.append(Part(outcome, f"{environment.paper.cluster}: {shown}", compared))
    return parts


def fedrec_is_fastest(evidence: Evidence, source: Source) -> Finding:
    parts = []
    environments = lookup.environments(evidence, "table3", "figure9", "figure10")
    for environment in environments:
        cells = {cell.policy.name: cell for cell in lookup.pick(environment, ASYNC)}
        if source.name != "ours" and not any(cell.published for cell in cells.values()):
            continue
        own, rivals = cells.pop("fedrec"), list(cells.values())
        words, count = lookup.where(environment), len(environments)
        parts.append(lookup.against(source, own, rivals, "parallel_time", " s", words, environments=count))
    return readings.in_every_environment(parts)


def asynchronous_when_homogeneous(evidence: Evidence, source: Source) -> Finding:
    parts = []
    for environment in lookup.in_tables(evidence, "table2"):
        cells = {cell.policy.name: cell for cell in lookup.pick(environment, ASYNC)}
        fedavg, fedrec, fedasync = (cells[name] for name in ("async_fedavg", "fedrec", "fedasync"))
        one = source.compare(fedavg, fedrec, "parallel_time")
        ratio = one.ratio
        if environment.config.partition.sizes == "power_law":
            rivals, words = [fedrec, fedasync], lookup.where(environment)
            part = lookup.against(source, fedavg, rivals, "parallel_time", " s", words, environments=1)
        else:
            outcome = _comparable(ratio)
            text = f"{lookup.where(environment)}: FedRec over AsyncFedAvg ×{ratio}"
            part = Part(outcome, text, [one], seeds=ratio.seeds)
            if outcome == "open" and ratio.kind == "exact":
                seeds = ratio.seeds_until(lambda one: _comparable(one) != "open")
                part = replace(
                    part,
                    compared=(),
                    why=f"FedRec over AsyncFedAvg is ×{ratio} on skewed data, and comparable ends at ×1.5",
                    needs="" if seeds is None else f"about {plural(seeds, 'seed')} of both on skewed data",
                )
        parts.append(part)
    return Finding(parts, "comparable: within a factor of 1.5")


def _apart(ratio: Ratio) -> float:
    """How far from equal."""
    return abs(math.log(ratio.mean))


def _comparable(ratio: Ratio) -> Outcome:
    """Whether a ratio is within a factor of 1.5."""
    low, high = ratio.interval
    if ratio.kind == "exact" and low > 1 / 1.5 and high < 1.5:
        return "holds"
    apart = (ratio.kind != "at most" and low > 1.5) or (ratio.kind != "at least" and high < 1 / 1.5)
    return "fails" if apart and ratio.kind != "unknown" else "open"


def asynchronous_requests(evidence: Evidence, source: Source) -> Finding:
    """Whether each asynchronous policy needs twice as many requests as SemiSync, on the whole."""
    series: dict[str, list[Comparison]] = {}
    for environment in lookup.in_tables(evidence, "table3"):
        own = lookup.one(environment, SEMISYNC, "momentum", 2)
        for rival in lookup.pick(environment, ASYNC):
            series.setdefault(rival.label, []).append(source.compare(own, rival, "communication_cost"))
    return readings.in_general(series, "update requests over SemiSync's, many more being at least twice as many", 2.0)


def converges_fastest(result: str, epochs: float) -> lookup.Check:
    def check(evidence: Evidence, source: Source) -> Finding:
        lookup.ours_only(source)
        parts = []
        environments = lookup.environments(evidence, result)
        for environment in environments:
            own = lookup.one(environment, SEMISYNC, epochs=epochs)
            rivals = [cell for cell in environment.cells if cell is not own]
            words, count = environment.paper.distribution, len(environments)
            parts.append(lookup.against(source, own, rivals, "parallel_time", " s", words, environments=count))
        return readings.in_every_environment(parts)

    return check


def brainage_beats_sync(name: str, needed: Sequence[float], unit: str = "") -> lookup.Check:
    """Whether SemiSync with each of these lambdas costs less than Sync in every environment of BrainAge."""

    def check(evidence: Evidence, source: Source) -> Finding:
        parts = _against_sync(evidence, source, name, needed, unit)
        return readings.in_every_environment(parts, "Sync's cost over SemiSync's")

    return check


def brainage_requests_comparable(epochs: float) -> lookup.Check:
    """Whether SemiSync with this lambda needs about as many requests as Sync in every environment of BrainAge."""

    def check(evidence: Evidence, source: Source) -> Finding:
        parts = _against_sync(evidence, source, "communication_cost", [epochs], "")
        ratios = [part.compared[0].ratio for part in parts]
        far = max((ratio for ratio in ratios if ratio.kind == "exact"), key=_apart, default=Ratio())
        judged = [
            replace(part, outcome=_comparable(ratio), size=f"Sync {far.times}")
            for part, ratio in zip(parts, ratios, strict=True)
        ]
        return Finding(judged, "Sync's update requests over SemiSync's; comparable: within a factor of 1.5")

    return check


def _against_sync(evidence: Evidence, source: Source, name: str, needed: Sequence[float], unit: str) -> list[Part]:
    """One part for each environment of BrainAge and each of these lambdas."""
    lookup.ours_only(source)
    pairs = {
        f"{environment.paper.distribution} λ={slowest_learner_epochs(cell):g}": (cell, lookup.one(environment, SYNC))
        for environment in lookup.environments(evidence, "figure11")
        for cell in lookup.pick(environment, SEMISYNC)
        if slowest_learner_epochs(cell) in needed
    }
    parts = []
    for words, (cell, sync) in pairs.items():
        one = source.compare(cell, sync, name, among=len(pairs))
        text = f"{words} {lookup.amount(source, cell, name, unit)}, Sync ×{one.ratio}"
        parts.append(Part(one.outcome, text, [one]))
    return parts
