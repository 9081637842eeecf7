"""One self-contained page about a run or a comparison of runs: nothing to install, nothing to fetch."""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from metis.core.costs import Costs, Energy
from metis.errors import ConfigError
from metis.files import write_text
from metis.reporting import figures
from metis.runs.folds import Span
from metis.runs.run import CONFIG, Run
from metis.text import factor, listed, metric, number, percent, plural, seconds

REPORT, MARKDOWN = "report.html", "report.md"

# Beyond these the page says how many more there are and where to find them.
_MOST_LEARNERS = 200
_MOST_REFUSALS = 40


@dataclass(frozen=True)
class Cell:
    """One number of a table, with its factor against the first row."""

    value: str
    factor: str = ""
    best: bool = False


@dataclass(frozen=True)
class Row:
    """One policy's line in a table of costs."""

    label: str
    colour: int
    cells: list[Cell]
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """A picture, what it shows in words for those who do not see it, and one sentence that explains it."""

    svg: str
    words: str
    caption: str = ""
    title: str = ""
    colour: int = 0
    size: str = "full"


@dataclass(frozen=True)
class Section:
    """The learners of one policy, or what was refused of them."""

    label: str
    colour: int
    rows: list[list[str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    note: str = ""


def write_report(runs: Sequence[Run], folder: Path, title: str, command: str | None = None) -> Path:
    """Write `report.html` for one run or several, with tables, pictures and how to repeat it; give its path."""
    if not runs:
        raise ConfigError("a report needs at least one run")
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("metis.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = Markup  # only for pictures of our own making; their texts are escaped
    page = environment.get_template("report.html.jinja").render(_contents(list(runs), folder, title, command))
    write_text(folder / REPORT, page)
    return folder / REPORT


def _contents(runs: list[Run], folder: Path, title: str, command: str | None) -> dict[str, Any]:
    names = figures.labels(runs)
    window = figures.timeline_window(runs)
    files = [_configuration_file(run, folder) for run in runs]
    return {
        "title": title,
        "lead": _lead(runs),
        "findings": findings(runs, names),
        "costs": cost_tables(runs, names),
        "metric": _titled(runs[0].setting.metric),
        "unit": energy_unit(runs[0]),
        "relative": energy_unit(runs[0]) != "J",
        "curves": _curves(runs, names),
        "policies": _policies(runs, names),
        "bars": _bars(runs, names),
        "timelines": _timelines(runs, names, window),
        "window": _window(runs, window),
        "hatched": len(runs[0].setting.learners) <= figures.MOST_ROWS,
        "rows": all(figures.rows_drawn(run, window) for run in runs),
        "kinds": [
            kind
            for kind in figures.KIND_COLOURS
            if any(figures.shares(run.costs)[kind] > figures.NOTHING for run in runs)
        ],
        "distribution": _distribution(runs[0]),
        "learners": _learners(runs, names),
        "refusals": _refusals(runs, names),
        "facts": _facts(runs[0]),
        "provenance": _provenance(runs, names),
        "versions": _versions(runs[0]),
        "configurations": _configurations(files, names),
        "command": _repeating(runs, files, folder) if command is None else command,
        "exactly": not any(run.setting.real_time for run in runs),
        "several": len(runs) > 1,
    }


# --- numbers ------------------------------------------------------------------------------------


def energy_unit(run: Run) -> str:
    learners = run.setting.learners
    return "J" if learners and learners[0].power.unit == "watt" else "ε s"


def _titled(name: str) -> str:
    """A metric's name at the start of a line; the usual abbreviations in capitals."""
    return name.upper() if name in ("mae", "mse", "rmse", "auc") else name[:1].upper() + name[1:]


def _colour(index: int) -> int:
    return index % len(figures.POLICY_COLOURS) + 1


# --- words --------------------------------------------------------------------------------------


def _lead(runs: list[Run]) -> str:
    """What was done, in two sentences that need no knowledge."""
    setting = runs[0].setting
    facts = setting.facts
    network = f"the network {facts['network']}" if "network" in facts else "one network"
    data = f"the data set {facts['dataset']}" if "dataset" in facts else "data"
    examples = sum(learner.examples for learner in setting.learners)
    many = len(setting.learners)
    sentence = (
        f"{plural(many, 'learner')} trained {network} together on {data}: each kept its own part of "
        f"{examples:,} training examples to itself and only models were exchanged."
    )
    if many == 1:
        sentence = f"1 learner trained {network} on {data} with {examples:,} training examples."
    times = [learner.time_per_batch for learner in setting.learners if math.isfinite(learner.time_per_batch)]
    if times and max(times) >= 1.05 * min(times) > 0:  # what is measured is never quite the same
        sentence += (
            f" They were not equally fast: a batch took between {seconds(min(times))} and "
            f"{seconds(max(times))}, a ratio of {max(times) / min(times):.3g}."
        )
    if len(runs) > 1:
        sentence += f" The page compares {plural(len(runs), 'training policy', 'training policies')}."
    if differences := _differences(runs):
        sentence += (
            f" The runs are not of one federation: their {listed(differences)} differ, and what is said of the "
            "federation here is of the first. More than the policy makes them come out differently."
        )
    return sentence


def _differences(runs: list[Run]) -> list[str]:
    """In what the runs differ that a comparison of policies holds fixed."""
    simulated = not any(run.setting.real_time for run in runs)  # else time and speed are measured, never the same
    aspects: dict[str, Callable[[Run], Any]] = {
        "learners": lambda run: [
            (info.name, info.examples, info.batch_size, repr(info.time_per_batch) if simulated else "", info.power)
            for info in run.setting.learners
        ],
        "data": lambda run: [run.setting.facts.get(name) for name in ("dataset", "partition", "test_examples")],
        "networks": lambda run: (run.setting.facts.get("network"), run.setting.model_bytes),
    }
    return [name for name, of in aspects.items() if any(of(run) != of(runs[0]) for run in runs[1:])]


def comparable(runs: Sequence[Run]) -> list[Run]:
    """The runs, all held against the first target that one of them has; refuses what one table cannot hold."""
    runs = list(runs)
    for what, of in (("metrics", lambda run: run.setting.metric), ("units of energy", energy_unit)):
        if len(told := list(dict.fromkeys(map(of, runs)))) > 1:
            raise ConfigError(f"the runs have different {what}, {listed(told)}: report them one by one")
    target = next((run.setting.target for run in runs if run.setting.target is not None), None)
    return [
        run
        if run.setting.target == target
        else Run(replace(run.setting, target=target), run.events, run.community_model, run.wall_seconds, run.folder)
        for run in runs
    ]


def findings(runs: list[Run], names: list[str]) -> list[str]:
    """The result in a few sentences."""
    target = runs[0].setting.target
    said: list[str] = []
    if target is None:
        said += [_ending(run, name) for run, name in zip(runs, names, strict=True)]
    else:
        goal = f"{target.metric} {target.value:g}"
        reached = {name: run.costs_at_target for run, name in zip(runs, names, strict=True) if run.costs_at_target}
        if len(runs) > 1 and reached:
            said.append(_least(reached, names[0], f"reached {goal} first, after", "s of parallel time", _parallel_time))
            said.append(_least(reached, names[0], f"needed the fewest update requests to {goal}:", "", _requests))
            said.append(_least_energy(reached, goal))
        elif reached:
            costs = reached[names[0]]
            said.append(
                f"{names[0]} reached {goal} after {number(costs.parallel_time)} s of parallel time and "
                f"{plural(costs.update_requests, 'update request')}."
            )
        missed = [name for name in names if name not in reached]
        if missed:
            said.append(f"{listed(missed)} did not reach {goal} before the run ended.")
        if len(runs) == 1:
            said.append(_ending(runs[0], names[0]))
    waiting = [(figures.shares(run.costs)["idle"], name) for run, name in zip(runs, names, strict=True)]
    most, least = max(waiting)[0], min(waiting)[0]
    if len(runs) > 1 and most - least > 0.01:
        told = {share: [name for other, name in waiting if percent(other) == percent(share)]
                for share in (most, least)}  # fmt: skip
        said.append(
            f"Learners waited for others during {percent(most)} of their time under {listed(told[most])}, "
            f"during {percent(least)} under {listed(told[least])}."
        )
    elif len(runs) == 1:
        said.append(f"Learners waited for others during {percent(most)} of their time.")
    return said


def _parallel_time(costs: Costs) -> float:
    return costs.parallel_time


def _requests(costs: Costs) -> float:
    return costs.update_requests


def _least_energy(reached: dict[str, Costs], goal: str) -> str:
    """Who used the least energy, by each definition: they may well disagree."""
    definitions: tuple[tuple[str, Callable[[Energy], float]], ...] = (
        ("by the paper's equation", lambda energy: energy.equation),
        ("if only training is charged", lambda energy: energy.active),
        ("if waiting is charged too", lambda energy: energy.idle_charged),
    )
    best = []
    for words, value in definitions:
        lowest = min(value(costs.energy) for costs in reached.values())
        names = [name for name, costs in reached.items() if value(costs.energy) == lowest]
        best.append((listed(names), words))
    if len({names for names, _ in best}) == 1:
        return f"{best[0][0]} used the least energy to {goal}, by all three definitions."
    return f"Least energy to {goal}: {listed([f'{names} {words}' for names, words in best])}."


def _least(reached: dict[str, Costs], first: str, what: str, unit: str, value: Callable[[Costs], float]) -> str:
    """Who has the smallest of a cost, and by how much it is below the first row's."""
    lowest = min(value(costs) for costs in reached.values())
    best = [name for name, costs in reached.items() if value(costs) == lowest]
    sentence = f"{listed(best)} {what} {number(lowest)}{' ' if unit else ''}{unit}"
    if first in reached and first not in best and lowest > 0:
        against = value(reached[first])
        sentence += (
            f", against {number(against)}{' s' if unit else ''} of {first} ({against / lowest:.2f} times as much)"
        )
    return sentence + "."


def _ending(run: Run, name: str) -> str:
    costs = run.costs
    came_out = "was not evaluated" if run.final_metric is None else f"ended with {run.setting.metric} "
    if run.final_metric is not None:
        came_out += metric(run.final_metric)
        if run.best_metric is not None and run.best_metric != run.final_metric:
            came_out += f" (best {metric(run.best_metric)})"
    return (
        f"{name} {came_out} after {plural(run.rounds, 'community model')}, {number(costs.parallel_time)} s of "
        f"parallel time and {plural(costs.update_requests, 'update request')}."
    )


# --- tables -------------------------------------------------------------------------------------

_COSTS: tuple[Callable[[Costs], float], ...] = (
    lambda costs: costs.steps,
    lambda costs: costs.parallel_time,
    lambda costs: costs.cumulative_time,
    lambda costs: costs.update_requests,
    lambda costs: costs.energy.equation,
    lambda costs: costs.energy.active,
    lambda costs: costs.energy.idle_charged,
)


def cost_tables(runs: list[Run], names: list[str]) -> list[dict[str, Any]]:
    """The costs until the target, where there is one, and the costs of the whole run."""
    tables = []
    target = runs[0].setting.target
    if target is not None:
        caption = f"Cost until {target.metric} {target.value:g} was first reached"
        tables.append(_cost_table(runs, names, [run.costs_at_target for run in runs], caption))
    tables.append(_cost_table(runs, names, [run.costs for run in runs], "Cost of the whole run"))
    return tables


def _cost_table(runs: list[Run], names: list[str], bills: Sequence[Costs | None], caption: str) -> dict[str, Any]:
    first = bills[0]
    lowest = [min((cost(bill) for bill in bills if bill is not None), default=math.inf) for cost in _COSTS]
    rows = []
    for index, (run, name, bill) in enumerate(zip(runs, names, bills, strict=True)):
        results = [Cell(metric(run.final_metric)), Cell(metric(run.best_metric))]
        if bill is None:
            rows.append(Row(name, _colour(index), results, "not reached"))
            continue
        cells = []
        for cost, least in zip(_COSTS, lowest, strict=True):
            value = cost(bill)
            times = ""
            if first is not None and index > 0 and value > 0 and cost(first) > 0:
                times = factor(cost(first) / value)
            cells.append(Cell(number(value), times, best=len(runs) > 1 and value == least))
        cells.append(Cell(percent(figures.shares(bill)["idle"])))
        rows.append(Row(name, _colour(index), [*cells, *results]))
    return {"caption": caption, "rows": rows, "first": None if first is None or len(runs) == 1 else names[0]}


def _learners(runs: list[Run], names: list[str]) -> list[Section]:
    sections = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        rows = []
        by_learner = run.costs.by_learner
        for learner in run.setting.learners[:_MOST_LEARNERS]:
            row = [learner.name, f"{learner.examples:,}", seconds(learner.time_per_batch)]
            costs = by_learner.get(learner.name)
            if costs is None:
                rows.append([*row, *["–"] * 7])
                continue
            energy = costs.energy
            rows.append(
                [
                    *row,
                    f"{costs.steps:,}",
                    f"{costs.update_requests:,}",
                    number(costs.active),
                    number(costs.idle),
                    number(energy.equation),
                    number(energy.active),
                    number(energy.idle_charged),
                ]
            )
        more = len(run.setting.learners) - len(rows)
        note = f"{more:,} more learners are in the events of the run." if more > 0 else ""
        sections.append(Section(name, _colour(index), rows=rows, note=note))
    return sections


def _refusals(runs: list[Run], names: list[str]) -> list[Section]:
    """What did not count, in words; the same refusal of the same learner is told once, with its number."""
    sections = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        alike: dict[tuple[str, str, str], list[float]] = {}
        for at, refused in run.refused:
            alike.setdefault((refused.learner, refused.kind, refused.reason), []).append(at)
        lines = []
        for (learner, kind, reason), times in alike.items():
            when = f"at {number(times[0])} s"
            if len(times) > 1:
                when = f"{len(times):,} times from {number(times[0])} s to {number(times[-1])} s"
            lines.append(f"{learner}, {when} ({kind}): {reason}")
        lines += [f"{aside.learner}, at {number(at)} s (set aside): {aside.reason}" for at, aside in run.set_aside]
        more = len(lines) - _MOST_REFUSALS
        note = f"{more:,} more are in the events of the run." if more > 0 else ""
        if lines:
            sections.append(Section(name, _colour(index), lines=lines[:_MOST_REFUSALS], note=note))
    return sections


# --- pictures -----------------------------------------------------------------------------------


def _curves(runs: list[Run], names: list[str]) -> list[Chart]:
    setting = runs[0].setting
    better = "higher" if setting.higher_is_better else "lower"
    smooth = " Thin lines are single evaluations, thick ones their running median." if figures.smoothed(runs) else ""
    told = []
    for run, name in zip(runs, names, strict=True):
        told.append(f"{name} {metric(run.final_metric)} at the end, {metric(run.best_metric)} at best")
    over_time = (
        f"How good the community model is ({better} is better) against the time that passes on the clock: "
        f"the curve that gets there further to the left is the faster policy.{smooth}"
    )
    over_requests = (
        "The same against the number of local models that were handed in, which is what communication costs: "
        "further to the left is less traffic."
    )
    words = f"Line chart of {setting.metric} over {{}}. {'; '.join(told)}."
    return [
        Chart(
            figures.curve_svg(runs, "parallel_time", "curve-time"),
            words.format("parallel time in seconds"),
            over_time,
            f"{_titled(setting.metric)} over parallel time",
        ),
        Chart(
            figures.curve_svg(runs, "update_requests", "curve-requests"),
            words.format("update requests"),
            over_requests,
            f"{_titled(setting.metric)} over update requests",
        ),
    ]


def _told_shares(run: Run) -> str:
    return ", ".join(
        f"{kind} {percent(share)}" for kind, share in figures.shares(run.costs).items() if share > figures.NOTHING
    )


def _policies(runs: list[Run], names: list[str]) -> Chart:
    told = "; ".join(f"{name}: {_told_shares(run)}" for run, name in zip(runs, names, strict=True))
    return Chart(
        figures.policies_svg(runs, "policies"),
        f"Bar chart of how all learners together spent their time. {told}.",
        "All learners together: which share of their time they trained and which they waited for others.",
    )


def _alike(runs: list[Run], names: list[str]) -> list[tuple[Run, str, int]]:
    """Runs in which every learner did the same at the same time, as under all asynchronous policies, told once."""
    groups: list[tuple[Run, list[Span], list[str], int]] = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        spans = run.spans()
        for group in groups:
            if group[1] == spans:
                group[2].append(name)
                break
        else:
            groups.append((run, spans, [name], _colour(index)))
    return [(run, listed(sharing), colour) for run, _, sharing, colour in groups]


def _bars(runs: list[Run], names: list[str]) -> list[Chart]:
    until = max(run.costs.parallel_time for run in runs)
    return [
        Chart(
            figures.active_idle_svg(run, until, f"bars-{index}"),
            f"Bar chart of how each learner spent its time under {name}. Together: {_told_shares(run)}.",
            title=f"{name}: {percent(figures.shares(run.costs)['idle'])} idle",
            colour=colour,
        )
        for index, (run, name, colour) in enumerate(_alike(runs, names))
    ]


def _timelines(runs: list[Run], names: list[str], window: float) -> list[Chart]:
    charts = []
    for index, (run, name, colour) in enumerate(_alike(runs, names)):
        remarks = []
        if not figures.rows_drawn(run, window):
            remarks.append("There is too much to show one by one: this is the share of learners in each state.")
        if figures.versions_drawn(run, window):
            remarks.append("Each vertical line is a new community model.")
        elif run.rounds:
            remarks.append(
                "New community models come too often to draw a line for each; "
                "a gap in a bar is where a learner handed in its model and got the next one."
                if figures.rows_drawn(run, window)
                else "New community models come too often to draw a line for each."
            )
        charts.append(
            Chart(
                figures.timeline_svg(run, window, f"timeline-{index}"),
                f"Timeline of {plural(len(run.setting.learners), 'learner')} under {name} over the first "
                f"{number(window)} seconds. Over the whole run: {_told_shares(run)}.",
                " ".join(remarks),
                name,
                colour,
            )
        )
    return charts


def _window(runs: list[Run], window: float) -> str:
    end = max(run.costs.parallel_time for run in runs)
    return f"the first {number(window)} s of {number(end)} s" if window < end else f"all {number(end)} s"


def _distribution(run: Run) -> Chart:
    learners = run.setting.learners
    classes = any(learner.class_counts for learner in learners)
    told = []
    for learner in learners[:10]:
        held = sum(count > 0 for count in learner.class_counts)
        told.append(f"{learner.name} {learner.examples:,}" + (f" of {held} classes" if classes else ""))
    more = f" and {len(learners) - 10:,} more learners" if len(learners) > 10 else ""
    return Chart(
        figures.distribution_svg(run, "data"),
        f"Bar chart of training examples by learner{' and class' if classes else ''}: {', '.join(told)}{more}.",
        "How many training examples each learner holds"
        + (
            ", and of which classes: the more the columns differ, the harder it is to train together."
            if classes
            else "."
        ),
        size="full" if figures.wide(run) else "medium",
    )


# --- where it came from -------------------------------------------------------------------------


def _facts(run: Run) -> list[tuple[str, str]]:
    shown = [
        (key.replace("_", " "), _fact(value))
        for key, value in run.setting.facts.items()
        if key != "versions" and value is not None and value != ""
    ]
    shown.append(("model size", f"{run.setting.model_bytes:,} bytes"))
    if run.setting.update_bytes is not None:
        shown.append(("update size", f"{run.setting.update_bytes:,} bytes"))
    if run.compression_error is not None:
        left = f"{100 * run.compression_error:.2g} % of an update on average, sent with the next"
        shown.append(("left out by compression", left))
    return shown


def _fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_fact(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_fact(inner) for inner in value)
    return str(value)


def _provenance(runs: list[Run], names: list[str]) -> list[list[str]]:
    return [
        [
            name,
            run.setting.policy,
            str(run.setting.seed),
            f"{run.rounds:,}",
            run.finish_reason,
            f"{run.wall_seconds:.1f} s",
            run.community_model.sha256(),
        ]
        for run, name in zip(runs, names, strict=True)
    ]


def _versions(run: Run) -> str:
    recorded = run.setting.facts.get("versions")
    if isinstance(recorded, dict):
        return ", ".join(f"{name} {release}" for name, release in recorded.items())
    found = [f"Python {platform.python_version()}"]
    for name, distribution in (("metis", "metis-federated"), ("numpy", "numpy"), ("torch", "torch")):
        try:
            found.append(f"{name} {version(distribution)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _configuration_file(run: Run, folder: Path) -> Path | None:
    """Where the configuration of a run is: in its own directory, or in that of the comparison."""
    places = [folder] if run.folder is None else [run.folder, folder]
    return next((place / CONFIG for place in places if (place / CONFIG).is_file()), None)


def _configurations(files: Sequence[Path | None], names: list[str]) -> list[tuple[str, str]]:
    """The text of each configuration, told once where runs share it."""
    texts: dict[str, list[str]] = {}
    for file, name in zip(files, names, strict=True):
        if file is not None:
            texts.setdefault(file.read_text(encoding="utf-8", errors="replace"), []).append(name)
    return [("all runs" if len(sharing) == len(names) else listed(sharing), text) for text, sharing in texts.items()]


def _repeating(runs: Sequence[Run], files: Sequence[Path | None], folder: Path) -> str | None:
    """The command that runs these configurations again, as seen from the directory of the report."""
    known = list(dict.fromkeys(file for file in files if file is not None))
    if not known or None in files:
        return None
    paths = [shlex.quote(Path(os.path.relpath(file, folder)).as_posix()) for file in known]
    if all(run.setting.real_time for run in runs):
        return "\n".join(f"metis controller {path} --state ANOTHER-FOLDER --identity KIT" for path in paths)
    above = {file.parent.parent for file in known}
    if len(files) > 1 and len(above) == 1 and (above.pop() / "comparison.json").is_file():
        return f"metis compare {' '.join(paths)}"
    return "\n".join(f"metis simulate {path}" for path in paths)  # a comparison might refuse what they differ in


# --- as text that a repository shows ------------------------------------------------------------

_HEADINGS = ("iterations", "PT (s)", "CT (s)", "CC", "EC, equation", "EC, active", "EC, idle charged", "idle share")
_LEGEND = (
    "PT parallel time, CT cumulative time, CC update requests, EC energy in {unit} by three definitions (the paper's "
    "equation, active time only, idle time charged)."
)


def write_markdown(
    runs: Sequence[Run], folder: Path, title: str, pictures: Sequence[Path] = (), command: str | None = None
) -> Path:
    """Write `report.md`: the same findings, tables and provenance, with links to pictures that lie elsewhere."""
    if not runs:
        raise ConfigError("a report needs at least one run")
    runs = list(runs)
    names = figures.labels(runs)
    files = [_configuration_file(run, folder) for run in runs]
    command = _repeating(runs, files, folder) if command is None else command
    lines = [f"# {_plain(title)}", "", _plain(_lead(runs)), ""]
    lines += [f"- {_plain(finding)}" for finding in findings(runs, names)]
    lines += ["", "## What it cost", ""]
    headings = [*_HEADINGS, *(f"{runs[0].setting.metric}, {which}" for which in ("final", "best"))]
    for table in cost_tables(runs, names):
        lines += [f"{_plain(table['caption'])}:", "", *_markdown_table("policy", headings, map(_cells, table["rows"]))]
        if table["first"]:
            lines += ["", f"× is the cost of {_plain(table['first'])} over the cost of the row: above 1 is cheaper."]
        lines.append("")
    lines += [_LEGEND.format(unit=energy_unit(runs[0])), ""]
    for picture in pictures:
        place = quote(Path(os.path.relpath(picture, folder)).as_posix())
        lines += [f"![{picture.stem.replace('_', ' ')}]({place})", ""]
    lines += ["## How to repeat it", ""]
    if command:
        lines += ["In the folder of this report:", "", "```", command, "```", ""]
    told = [
        (row[0], [f"`{row[1]}`", row[2], row[3], _plain(row[4]), f"`{row[6]}`"]) for row in _provenance(runs, names)
    ]
    columns = ["policy", "seed", "community models", "ended because", "SHA-256 of the final community model"]
    lines += [*_markdown_table("run", columns, told, words={"policy", *columns[3:]}), ""]
    lines += [
        f"- {_plain(name)}: {_plain(value)}" for name, value in [*_facts(runs[0]), ("versions", _versions(runs[0]))]
    ]
    write_text(folder / MARKDOWN, "\n".join(lines) + "\n")
    return folder / MARKDOWN


def _cells(row: Row) -> tuple[str, list[str]]:
    missing = [row.note, *[""] * (len(_HEADINGS) - 1)] if row.note else []
    told = [f"**{cell.value}**" if cell.best else cell.value for cell in row.cells]
    factors = [f" {cell.factor}" if cell.factor else "" for cell in row.cells]
    return row.label, [*missing, *(value + factor for value, factor in zip(told, factors, strict=True))]


def _markdown_table(
    first: str, headings: Sequence[str], rows: Iterable[tuple[str, list[str]]], words: Collection[str] = ()
) -> list[str]:
    """Numbers stand to the right, the columns of words to the left."""
    sides = ("---" if heading in words else "---:" for heading in headings)
    lines = [f"| {first} | {' | '.join(headings)} |", f"| --- | {' | '.join(sides)} |"]
    return [*lines, *(f"| {_plain(name)} | {' | '.join(cells)} |" for name, cells in rows)]


def _plain(text: str) -> str:
    """Text in which no letter means anything to Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>|#$])", r"\\\1", " ".join(text.split()))
