"""Writes the generated parts of the reproduction report and of its evidence, and the figures, from experiments/results.

    python docs/reproduction.py
    python docs/reproduction.py runs/paper/small/sweeps/results.json      # first adds the runs of a study to those kept

Nothing is trained. The curves are written by `metis reproduce RESULT --scale decisive`.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metis.errors import ConfigError
from metis.files import write_text
from metis.reproduction.claims import PAPER_WORDS as IN_SENTENCES, Claim, check_claims
from metis.reproduction.curves import (
    STEADY_SECONDS,
    STEADY_WITHIN,
    Steady,
    at_other_targets,
    load_runs,
    target_of,
)
from metis.reproduction.environments import Cell, Environment, load_environments, results_folder
from metis.reproduction.page import PAPER_WORDS, markdown_table
from metis.reproduction.panels import draw_figures
from metis.reproduction.queue import hours_left, queue
from metis.reproduction.schedule import schedule_cell
from metis.reproduction.sheets import cost_sheet
from metis.reproduction.study import joined
from metis.reproduction.tables import ASYNC, RESULTS, Cost, Evidence, MixingTime, cost_table, protocol_of
from metis.reproduction.timings import row_times
from metis.reproduction.verdicts import Ratio, kind_of_data, ours
from metis.runs.run import Run

HERE = Path(__file__).parent
PAGES = (HERE / "reproduction.md", HERE / "reproduction-evidence.md")
FIGURES = HERE / "images" / "reproduction"
MIXING = results_folder() / "mixing-times.json"
# What stands in for data and networks that cannot be had here, or would take too long.
SUBSTITUTES = {
    "CIFAR-100": "20,000 images, ResNet-8",
    "ExtendedMNIST": "MNIST",
    "BrainAge": "public images, one hidden layer",
}
VERDICT_WORDS = ("confirmed", "contradicted", "tie", "undecided")
ENERGIES = ("(by the paper's equation).", "(active time only).", "(idle time charged).")
HEADLINE = "cifar10-heterogeneous-skewed-noniid5"  # contradicts that SemiSync is first of all
SEMISYNC = "SemiSync (λ=2) w/ Momentum"
LOWER_TARGETS = (0.50, 0.52, 0.54, 0.55, 0.56, 0.57)
SLOW_LEARNERS = 5
MANY_POLICIES = 6  # more are nearly all of an environment
OTHER = {"every": "Asked of the mean over the environments", "whole": "Asked of every environment"}
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def gather() -> Evidence:
    """Every kept run of scale `decisive`."""
    environments = load_environments("decisive")
    cells = [cell for one in environments.values() for seeded in one.seeded() for cell in seeded.needed_for(RESULTS)]
    evidence = Evidence("decisive", environments, load_runs(cells, results_folder()))
    if MIXING.exists():
        evidence.mixing_times = [MixingTime(**row) for row in json.loads(MIXING.read_text("utf-8"))]
    return evidence


def summary(evidence: Evidence, claims: list[Claim]) -> str:
    def counted(found: list[Claim]) -> str:
        counts = {word: sum(claim.verdict == word for claim in found) for word in VERDICT_WORDS}
        return ", ".join(f"{count} {word}" for word, count in counts.items() if count)

    energies = [claim for claim in claims if claim.text.endswith(ENERGIES)]
    others = [claim for claim in claims if claim not in energies]
    own = {word: sum(claim.paper == word for claim in claims) for word in ("holds", "fails", "open")}
    contradicted = [claim for claim in claims if claim.verdict == "contradicted"]
    shared = sum(claim.paper == "fails" for claim in contradicted)
    sentences = (
        f"{len(claims)} verdicts: **{counted(claims)}**.",
        f"{len(energies)} of them are about energy, each sentence asked by three definitions ({counted(energies)});",
        f"the other {len(others)}: {counted(others)}.",
        f"The paper's own tables say something about {sum(own.values())} of the {len(claims)}:",
        f"{own['holds']} hold there, {own['fails']} do not, {own['open']} {'is' if own['open'] == 1 else 'are'} open.",
        f"Of the {len(contradicted)} that we contradict, {shared} do not hold in the paper's own tables either.",
        f"{len(evidence.runs)} runs are kept.",
    )
    return " ".join(sentences)


def spread(evidence: Evidence) -> str:
    found = ", ".join(
        f"{one.deviation:.2f} for {kind} ({'assumed' if math.isinf(one.freedom) else f'{one.freedom:.0f}'})"
        for kind, one in ours(evidence).spread.items()
    )
    return (
        f"The spread behind the intervals, a standard deviation of ln(time), is {found}; "
        "in brackets its degrees of freedom."
    )


def claims_part(claims: list[Claim]) -> str:
    """One line a claim: what our runs say of it, and what the paper's own tables do."""
    lines = [
        "| claim | where | here | the number that decides | in the paper's own tables, recomputed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for claim in claims:
        instead = next((words for domain, words in SUBSTITUTES.items() if claim.text.startswith(domain)), "")
        where = claim.where + (f"; here: {instead}" if instead else "")
        marks = list(claim.marks)
        if instead and claim.at_other_target not in ("", claim.verdict):
            marks.append(f"{claim.at_other_target} at the second target")
        verdict = ", ".join([f"**{claim.verdict}**", *marks])
        lines.append(f"| {claim.text} | {where} | {verdict} | {claim.effect or '–'} | {PAPER_WORDS[claim.paper]} |")
    return "\n".join(lines)


def undecided_part(claims: list[Claim], environments: dict[str, Environment]) -> str:
    """Why a claim is undecided, and what would decide it."""
    lines = ["| claim | why it is undecided | what would decide it | command |", "| --- | --- | --- | --- |"]
    hours: dict[str, float] = {}
    for claim in claims:
        if claim.verdict != "undecided":
            continue
        if claim.needs not in hours:
            entries = queue(environments.values(), claim.needs.split(), before_targets=True)
            hours[claim.needs] = hours_left(entries, results_folder())
        needs = claim.open or f"its runs to their end, at most {hours[claim.needs]:.0f} hours of one core"
        only = "".join(f" --environment {name}" for name in claim.environments)
        if len(claim.policies) <= MANY_POLICIES:
            only += "".join(f' --policy "{label}"' for label in claim.policies)
        command = f"metis reproduce {claim.needs} --scale decisive{only}"
        lines.append(f"| {claim.text} | {claim.why} | {needs} | `{command}` |")
    return "\n".join(lines)


def evidence_part(claims: list[Claim]) -> str:
    """The numbers behind each verdict."""
    blocks = []
    rules = {""}  # a rule is said once
    for claim in claims:
        rule = "" if claim.rule in rules else f" *Rule: {claim.rule}*"
        rules.add(claim.rule)
        lines = [f"**{claim.text}** ({claim.where}): {claim.verdict}.{rule}", ""]
        if claim.quote:
            lines.append(f"- The paper: “{claim.quote}”")
        lines += [f"- {part}" for part in claim.parts]
        if claim.other:
            lines.append(f"- {OTHER[claim.reading]}, it would be {claim.other}.")
        if claim.paper:
            lines.append(f"- In the paper's own tables it {IN_SENTENCES[claim.paper]}: {claim.paper_sentence}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def readings_part(claims: list[Claim]) -> str:
    """The claims whose verdict hangs on how general their sentence is."""
    lines = ["| claim | asked of | verdict | by the other reading |", "| --- | --- | --- | --- |"]
    words = {"every": "every environment", "whole": "their mean"}
    for claim in claims:
        if claim.other and claim.other != claim.verdict:
            lines.append(f"| {claim.text} | {words[claim.reading]} | {claim.verdict} | {claim.other} |")
    return "\n".join(lines)


def rows_part() -> str:
    """The published rows with their own times, scheduled without training."""
    lines = [
        "| environment | policy | time per batch (ms) | beside training (s a request) | iterations | published | "
        "parallel time (s) | published |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    environments = load_environments("paper", results=["table2", "table3"], timings="published")
    nominal = load_environments("paper", results=["table2", "table3"])
    for environment, plain in zip(environments.values(), nominal.values(), strict=True):
        for cell, as_stated in zip(environment.cells, plain.cells, strict=True):
            row, times = cell.published, row_times(as_stated)
            if row is None or times is None or protocol_of(cell) != ASYNC:
                continue
            costs = schedule_cell(cell).run.costs
            each = " / ".join(f"{1000 * one.time_per_batch:.0f}" for one in times.values())
            rest = " / ".join(
                f"{one.beside_request:.0f}"
                + (f" + {1000 * one.beside_batch:.0f} ms a batch" if one.beside_batch else "")
                for one in times.values()
            )
            lines.append(
                f"| {environment.paper.cluster} {environment.paper.distribution} | {cell.label} | {each} | {rest} | "
                f"{costs.steps:,} | {row.iterations:,} | {costs.parallel_time:,.0f} | {row.parallel_time:,.0f} |"
            )
    return "\n".join(lines)


def published_times_part(evidence: Evidence) -> str:
    """When policies reach the target if every row takes the times that it took in the paper."""
    timed = load_environments("decisive", results=["table3"], timings="published")
    kept = Evidence(
        "decisive",
        timed,
        load_runs(
            [cell for one in timed.values() for seeded in one.seeded() for cell in seeded.cells], results_folder()
        ),
    )
    lines = [
        "| environment | policy | stated times (s) | the row's own times | the paper's | iterations | the paper's |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for own, plain in zip(timed.values(), evidence.of("table3"), strict=True):
        for cell, as_stated in zip(own.cells, plain.cells, strict=True):
            runs, row = kept.seeds(cell), cell.published
            if not runs or row is None or row.parallel_time is None:
                continue
            costs = runs[min(runs)].costs_at_target
            shown = (
                own.paper.distribution,
                cell.label,
                _times(list(evidence.seeds(as_stated).values())),
                _times(list(runs.values())),
                f"{row.parallel_time:,.0f}",
                "–" if costs is None else f"{costs.steps:,}",
                f"{row.iterations:,}",
            )
            lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines) if len(lines) > 2 else "Not run yet."


def times_part(evidence: Evidence) -> str:
    """When each policy is at the target: the median over seeds, from when to when, and how many got there."""
    environments = evidence.of("table3", "table2")
    labels = list(dict.fromkeys(cell.label for one in environments for cell in one.cells))
    heads = [f"{one.paper.cluster} {one.paper.distribution}, {one.config.evaluation.target:g}" for one in environments]
    lines = [f"| policy | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(environments)]
    for label in labels:
        cells = [next((cell for cell in one.cells if cell.label == label), None) for one in environments]
        shown = ["–" if cell is None else _times(list(evidence.seeds(cell).values())) for cell in cells]
        lines.append(f"| {label} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _times(runs: list[Run]) -> str:
    """A seed that is not at the target is later than those that are, if it went on for longer; else it says nothing."""
    found = sorted(run.costs_at_target.parallel_time for run in runs if run.costs_at_target is not None)
    tried = [run.costs.parallel_time for run in runs if run.costs_at_target is None]
    if not runs:
        return "not run"
    if not found:
        return f"not by {min(tried):,.0f} (0 of {len(runs)})"
    later = [math.inf for time in tried if time >= found[-1]]
    middle = statistics.median([*found, *later])
    shown = "" if math.isinf(middle) else f"**{middle:,.0f}**"
    span = "" if found[0] == found[-1] and shown else f"{found[0]:,.0f} to {found[-1]:,.0f}"
    return f"{', '.join(filter(None, (shown, span)))} ({len(found)} of {len(found) + len(later)})"


def chosen_targets_part(evidence: Evidence) -> str:
    """The targets, and what asynchronous policies have before they hear of the largest slow learner."""
    lines = [
        "| environment | target | second target | the largest slow learner first hands in after | "
        "best of an asynchronous policy until then |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for environment in evidence.environments.values():
        plan, target = environment.plan, environment.config.evaluation.target
        asynchronous = [cell for cell in environment.cells if protocol_of(cell) == ASYNC]
        runs = [run for cell in asynchronous for run in evidence.seeds(cell).values()]
        if plan is None or target is None or not plan.target_fixed or not runs:
            continue
        slowest = max(group.time_per_batch for group in environment.config.learners)
        epochs = float(asynchronous[0].policy.parameters["local_epochs"])
        at = max(
            epochs * -(-learner.examples // learner.batch_size) * slowest
            for learner in runs[0].setting.learners
            if learner.time_per_batch == slowest
        )
        best = max(v for run in runs for p, v in zip(run.history, run.metric_values, strict=True) if p.at < at)
        other = "–" if plan.other_target is None else f"{plan.other_target:g}"
        name = f"{environment.paper.domain}, {environment.paper.cluster} {environment.paper.distribution}"
        mark = "" if best < target else ", **not below the target**"
        lines.append(f"| {name} | {target:g} | {other} | {at:,.0f} s | {best:.3f}{mark} |")
    return "\n".join(lines)


def costs_part(evidence: Evidence) -> str:
    """The tables of the environments that have runs."""
    lines = []
    for environment in evidence.of("table3", "table2"):
        if evidence.cells(environment):
            sheet = cost_sheet(cost_table(environment, evidence))
            lines += [f"**{sheet.title}**", "", *markdown_table(sheet), "", sheet.note, ""]
    return "\n".join(lines).strip() or "No run of Tables 2 and 3 is kept yet."


def targets_part(evidence: Evidence) -> str:
    """When each policy reached the target, and the other one where there is one; one time for each seed."""
    lines = ["| environment | policy | lower target | higher target |", "| --- | --- | --- | --- |"]
    for environment in evidence.environments.values():
        plan = environment.plan
        other = None if plan is None else plan.other_target
        own = environment.config.evaluation.target
        if other is None or own is None:
            continue
        name = f"{environment.paper.domain}, {environment.paper.cluster} {environment.paper.distribution}"
        for cell in environment.cells:
            runs = list(evidence.seeds(cell).values())
            if runs:
                columns = [
                    f"{value:g}: {', '.join(_when(cell, run, value) for run in runs)}" for value in sorted((own, other))
                ]
                lines.append(f"| {name} | {cell.label} | {' | '.join(columns)} |")
    return "\n".join(lines)


def other_targets_part(claims: list[Claim]) -> str:
    """What the same runs decide at the second targets."""
    decided = [claim for claim in claims if claim.at_other_target not in ("", "undecided")]
    open_ = sum(claim.at_other_target == "undecided" for claim in claims)
    lines = ["| claim | verdict | at the second target | numbers there |", "| --- | --- | --- | --- |"]
    for claim in decided:
        numbers = claim.at_other_target_sentence.replace("; ", "<br>")
        lines.append(f"| {claim.text} | {claim.verdict} | {claim.at_other_target} | {numbers} |")
    return "\n".join(
        [*lines, "", f"{open_} other claims are undecided there, as most runs ended at the target proper."]
    )


def _when(cell: Cell, run: Run, value: float) -> str:
    """At which second a run reached a target."""
    first = _first(cell, run, value)
    return f"not by {run.costs.parallel_time:,.0f} s" if first is None else f"{first:,.0f} s"


def _first(
    cell: Cell, run: Run, value: float, seconds: float = STEADY_SECONDS, within: float = STEADY_WITHIN
) -> float | None:
    steady = Steady(target_of(cell, value), seconds=seconds, within=within)
    return next((point.at for point in run.history if steady.note(point.at, point.metrics)), None)


def _cost(cell: Cell, run: Run, value: float, seconds: float, within: float) -> Cost:
    first = _first(cell, run, value, seconds, within)
    return Cost(run.costs.parallel_time, reached=False) if first is None else Cost(first)


def headline_part(evidence: Evidence) -> str:
    """The comparison that decides the headline, by other targets and stricter rules than those it is decided by."""
    environment = evidence.environments[HEADLINE]
    one_round = schedule_cell(_labelled(environment, SEMISYNC), 3).each
    assert one_round is not None
    return _by_rules(
        evidence, environment, (SEMISYNC, "FedAsync"), LOWER_TARGETS, len(environment.cells[1:]) * 3, one_round.seconds
    )


def cifar100_part(evidence: Evidence) -> str:
    """The comparison that contradicts the claim about speed on CIFAR-100, likewise."""
    environment = evidence.environments["cifar100-heterogeneous-power-law-noniid50"]
    own = "SemiSync (λ=0.5) w/ Momentum"
    targets, every = (0.10, 0.15, 0.18, 0.20, 0.21, 0.245), environment.config.evaluation.every_seconds
    return _by_rules(
        evidence, environment, (own, "AsyncFedAvg"), targets, len(environment.cells[1:]) * 2, 5 * float(every)
    )


def _by_rules(
    evidence: Evidence,
    environment: Environment,
    labels: tuple[str, str],
    targets: Sequence[float],
    among: int,
    longer: float,
) -> str:
    """How many times the first policy's time the second takes, and how many seeds brought both there."""
    own, rival = (_labelled(environment, label) for label in labels)
    spread = ours(evidence).spread[kind_of_data(environment)]
    rules = ((STEADY_SECONDS, STEADY_WITHIN), (STEADY_SECONDS, 0.0), (longer, STEADY_WITHIN), (longer, 0.01))
    heads = [f"median of {seconds:.0f} s within {within:g}" for seconds, within in rules]
    lines = [f"| target | {' | '.join(heads)} |", "| ---: |" + " --- |" * len(rules)]
    first, second = evidence.seeds(own), evidence.seeds(rival)
    for value in targets:
        shown = []
        for rule in rules:
            pairs = [
                (_cost(own, first[seed], value, *rule), _cost(rival, second[seed], value, *rule))
                for seed in first
                if seed in second
            ]
            ratio = Ratio.of(pairs, spread)
            words = {"holds": "SemiSync first", "fails": f"{rival.label} first", "tie": "tie", "open": "undecided"}
            said = "undecided" if ratio.kind == "unknown" else words[ratio.above(among=among)]
            number = "" if ratio.kind == "unknown" else f" {ratio.written(among)}"
            both = sum(one.reached and other.reached for one, other in pairs)
            shown.append(f"{said}{number} ({both} of {len(pairs)})")
        lines.append(f"| {value:g} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _labelled(environment: Environment, label: str) -> Cell:
    return next(cell for cell in environment.cells if cell.label == label)


def _same_policy(environment: Environment, label: str) -> Cell:
    """The policy of this name, which has its solver behind it in environments with several."""
    return next(cell for cell in environment.cells if cell.label in (label, f"{label} w/ Momentum"))


def division_part(evidence: Evidence) -> str:
    """The headline's environment with other learners sharing other classes, beside the division that decides it."""
    environment = evidence.environments[HEADLINE]
    source, spread = ours(evidence), ours(evidence).spread[kind_of_data(environment)]
    lines = [
        "| policy | every learner takes the classes of which most is left | over SemiSync's | classes at random | "
        "over SemiSync's |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for table in _kept_study("division"):
        semisync = next(row for row in table["rows"] if row["fixed_lambda"] is not None)
        for row in table["rows"]:
            costs = _study_costs(row, table["until"])
            if not costs:
                continue
            cell = _same_policy(environment, row["label"])
            own = _study_costs(semisync, table["until"])
            pairs = [(own[index], costs[index]) for index in own if index in costs]
            ratios = ["", ""]
            if row is not semisync:
                base = _labelled(environment, SEMISYNC)
                ratios = [source.ratio(base, cell, "parallel_time").times, Ratio.of(pairs, spread).times]
            found = sorted(cost.value for cost in costs.values() if cost.reached)
            missed = [math.inf] * (len(costs) - len(found))
            middle = statistics.median([*found, *missed])
            times = f"not by {table['until']:,.0f}" if math.isinf(middle) else f"**{middle:,.0f}**"
            if len(found) > 1:
                times += f", {found[0]:,.0f} to {found[-1]:,.0f}"
            elif found and math.isinf(middle):
                times += f", {found[0]:,.0f} with one"
            times += f" ({len(found)} of {len(costs)})"
            as_decided = _times(list(evidence.seeds(cell).values()))
            lines.append(f"| {row['label']} | {as_decided} | {ratios[0]} | {times} | {ratios[1]} |")
    return "\n".join(lines) if len(lines) > 2 else "Not run yet."


def _study_costs(row: dict[str, Any], until: float) -> dict[int, Cost]:
    """The parallel time by the number of the seed, of the seeds that were run."""
    return {
        index: Cost(until, reached=False) if time is None else Cost(time)
        for index, (time, best) in enumerate(zip(row["parallel_time"]["values"], row["best"], strict=True))
        if best is not None
    }


def _study_file(name: str) -> Path:
    return HERE.parent / "experiments" / name / "results.json"


def _kept_study(name: str) -> list[dict[str, Any]]:
    """The tables of a study whose results.json is kept with its files."""
    file = _study_file(name)
    tables: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))["conditions"] if file.exists() else []
    return tables


def momentum_part() -> str:
    """What Sync has after the paper's iterations, by what happens to the momentum between tasks."""
    lines = [
        "| Sync on power law data, width 64 | seconds until 0.6 | accuracy after 16,160 iterations |",
        "| --- | ---: | ---: |",
    ]
    for table in _kept_study("momentum"):
        for row in table["rows"]:
            if row["runs"]:
                time = _time(row)
                shown = "not reached" if math.isinf(time) else f"{time:,.0f}"
                lines.append(f"| {row['label']} | {shown} | {row['final'][0]:.3f} |")
    return "\n".join(lines) if len(lines) > 2 else "Not run yet."


def tutorial_part() -> str:
    """What SemiSync has after the paper's iterations with one thing changed in training, at the paper's width."""
    plain = "as in the other experiments"
    tables = {table["condition"]: table for table in _kept_study("tutorial")}
    tables.pop("until-target", None)  # it ends at a target
    final = {row["label"]: row["final"][0] for table in tables.values() for row in table["rows"] if row["runs"]}
    if plain not in final:
        return "Not run yet."
    lines = ["| training, width 64, bf16 | accuracy after 22,500 iterations | difference |", "| --- | ---: | ---: |"]
    for label in sorted(final, key=lambda label: label != plain):
        difference = "" if label == plain else f"{final[label] - final[plain]:+.3f}"
        lines.append(f"| {label} | {final[label]:.4f} | {difference} |")
    return "\n".join(lines)


def width_part(evidence: Evidence) -> str:
    """When policies have the paper's 0.75 at the paper's width, and after how many iterations."""
    environment = evidence.environments["cifar10-heterogeneous-uniform-iid"]
    lines = [
        "| policy | seconds until 0.75 | iterations | the paper's | iterations until 0.66 at width 16 | best |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for table in _kept_study("tutorial"):
        for row in table["rows"] if table["condition"] == "until-target" else ():
            if not row["runs"]:
                continue
            cell = _same_policy(environment, row["label"])
            time, narrow = _time(row), evidence.runs[cell.name].costs_at_target
            shown = (
                row["label"],
                f"not by {table['until']:,.0f}" if math.isinf(time) else f"{time:,.0f}",
                "–" if math.isinf(time) else f"{row['iterations']['mean']:,.0f}",
                "–" if cell.published is None else f"{cell.published.iterations:,}",
                "–" if narrow is None else f"{narrow.steps:,}",
                f"{row['best'][0]:.4f}",
            )
            lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines) if len(lines) > 2 else "Not run yet."


def sweeps_part() -> str:
    """Local epochs and lambda, of the study that is kept.

    In bold what reached the target first of its kind, of those in which the slow learners had handed in by then.
    """
    blocks = []
    for table in _kept_study("sweeps"):
        rows = [row for row in table["rows"] if row["runs"]]
        kinds = {row["label"]: re.split(r"[ ,(]", row["label"])[0] for row in rows}
        heard = [row for row in rows if (row["slow_update_requests"]["mean"] or 0) >= SLOW_LEARNERS]
        first = {
            kind: min((_time(row) for row in heard if kinds[row["label"]] == kind), default=math.inf)
            for kind in dict.fromkeys(kinds.values())
        }
        lines = [
            f"**{table['title']}: until {table['metric']} {table['target']:g}**",
            "",
            "| policy | parallel time (s) | update requests | of slow learners | energy, active | best |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for row in rows:
            time = _time(row)
            shown = "not reached" if math.isinf(time) else f"{time:,.1f}"
            shown = f"**{shown}**" if row in heard and time == first[kinds[row["label"]]] else shown
            others = [
                "–" if row[name]["mean"] is None else f"{row[name]['mean']:,.0f}"
                for name in ("update_requests", "slow_update_requests", "energy_active")
            ]
            lines.append(f"| {row['label']} | {shown} | {' | '.join(others)} | {max(row['best']):.3f} |")
        if rows:
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks) or "Not run yet."


def _time(row: dict[str, Any]) -> float:
    mean = row["parallel_time"]["mean"]
    return math.inf if mean is None else float(mean)


def figures_part(evidence: Evidence) -> str:
    wanted = [
        name
        for name in ("figure2", "figure4", "figure7", "figure8", "figure9", "figure10", "figure11", "figure12")
        if name == "figure2" or any(evidence.cells(one) for one in evidence.of(name)) or name == "figure4"
    ]
    drawn = draw_figures(evidence, wanted, FIGURES)
    lines = []
    for name in wanted:
        for file in drawn.files.get(name, ()):
            if file.suffix == ".svg":
                title = f"Figure {name.removeprefix('figure')}: {RESULTS[name]}"
                lines += [f"**{title}**", "", f"![{title}](images/reproduction/{file.name})", ""]
            else:
                file.unlink()  # the vector graphic prints better
    return "\n".join(lines).strip() or "None yet."


def queue_part(evidence: Evidence) -> str:
    entries = queue(evidence.environments.values(), list(RESULTS), before_targets=True)
    lines = [
        "| environment | runs kept | of | hours of one core left, at most | with as many steps as in the paper |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    total = likely = 0.0
    for name, environment in evidence.environments.items():
        own = [entry for entry in entries if entry.cell.key[0] == name]
        cells = {entry.cell.name: entry.cell for entry in own}
        left = [entry for entry in own if not entry.done(results_folder())]
        hours = hours_left(left, results_folder())
        sooner = hours_left(left, results_folder(), as_published=True)
        total, likely = total + hours, likely + sooner
        kept = sum(cell in evidence.runs for cell in cells)
        waiting = (
            ""
            if environment.plan is None or environment.plan.target_fixed
            else " (only Sync until its target is fixed)"
        )
        lines.append(f"| {name}{waiting} | {kept} | {len(cells)} | {hours:.1f} | {sooner:.1f} |")
    lines.append(
        f"| all | {len(evidence.runs)} | {len({entry.cell.name for entry in entries})} | {total:.0f} | {likely:.0f} |"
    )
    return "\n".join(lines)


def add_study(file: Path) -> None:
    """Add what `metis reproduce STUDY` wrote, here or on another machine, to what is kept of the study."""
    try:
        new = json.loads(file.read_text("utf-8"))
        target = _study_file(new["study"])
        kept = json.loads(target.read_text("utf-8")) if target.exists() else None
        document = joined(kept, new)
    except OSError as problem:
        raise SystemExit(f"error: {file}: {problem.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise SystemExit(f"error: {file} is not the results.json of a study") from None
    except ConfigError as problem:
        raise SystemExit(f"error: {file}: {problem}") from None
    write_text(target, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    for file in sys.argv[1:]:
        add_study(Path(file))
    evidence = gather()
    claims = check_claims(evidence, second=at_other_targets(evidence, RESULTS, results_folder()))
    parts = {
        "summary": summary(evidence, claims),
        "spread": spread(evidence),
        "claims": claims_part(claims),
        "undecided": undecided_part(claims, evidence.environments),
        "evidence": evidence_part(claims),
        "readings": readings_part(claims),
        "rows": rows_part(),
        "sweeps": sweeps_part(),
        "momentum": momentum_part(),
        "tutorial": tutorial_part(),
        "width": width_part(evidence),
        "published_times": published_times_part(evidence),
        "times": times_part(evidence),
        "headline": headline_part(evidence),
        "cifar100": cifar100_part(evidence),
        "division": division_part(evidence),
        "chosen_targets": chosen_targets_part(evidence),
        "costs": costs_part(evidence),
        "targets": targets_part(evidence),
        "other_targets": other_targets_part(claims),
        "figures": figures_part(evidence),
        "queue": queue_part(evidence),
    }
    for page in PAGES:
        text = page.read_text("utf-8")
        page.write_text(PART.sub(lambda found: f"{found[1]}{parts[found[2]]}\n{found[3]}", text), encoding="utf-8")


if __name__ == "__main__":
    main()
