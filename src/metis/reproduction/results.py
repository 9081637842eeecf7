"""Reproduce results of the paper, or a study: run what is missing, then write down all there is."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from metis.errors import ConfigError, DataError
from metis.experiments.config.errors import did_you_mean
from metis.reproduction.claims import check_claims
from metis.reproduction.curves import at_other_targets, load_runs
from metis.reproduction.environments import (
    TIMED,
    Cell,
    Environment,
    Scale,
    Timings,
    load_environments,
    results_folder,
)
from metis.reproduction.figures import Drawn
from metis.reproduction.kept import kept, load_finished
from metis.reproduction.mixing import measure_mixing
from metis.reproduction.page import (
    SECOND_LINE,
    markdown_table,
    terminal_claims,
    terminal_sheet,
    verdict_count,
    write_markdown,
    write_paper_report,
)
from metis.reproduction.panels import draw_figures
from metis.reproduction.progress import BoardDisplay
from metis.reproduction.queue import Entry, hours_left, queue
from metis.reproduction.runner import Board, run_cells, run_queue
from metis.reproduction.sheets import characteristics_sheet, cost_sheet, mixing_sheet, ratio_sheet, study_sheet
from metis.reproduction.study import STUDIES, Condition, condition_table, verdicts
from metis.reproduction.study_figures import draw_study
from metis.reproduction.tables import RESULTS, Evidence, MixingTime, characteristics, cost_table
from metis.reproduction.verdicts import Spread, kind_of_data, ours

DOCUMENT, MIXING = "results.json", "mixing-times.json"


@dataclass(frozen=True)
class Request:
    """What to reproduce, and where and how to run it."""

    results: tuple[str, ...]  # of the paper, or one study
    scale: Scale = "small"
    out: Path = Path("runs/paper")
    workers: int | None = None  # by default one for each processor
    dry_run: bool = False  # only show what would be scheduled
    rounds: int | None = None  # of a dry run; by default as many as published
    overrides: tuple[str, ...] = ()
    force: bool = False  # run again what was run with other settings
    policies: tuple[str, ...] = ()  # labels; by default all
    environments: tuple[str, ...] = ()  # names of files; by default all
    curves: Path | None = None  # where the curves of scale `decisive` are kept; by default with the files
    train: bool = True  # else only report what there is
    timings: Timings = "nominal"
    seeds: tuple[int, ...] = ()  # by default all of the plan
    until: float | None = None  # virtual seconds after which a run waits for another turn

    @property
    def folder(self) -> Path:
        return self.out / self.scale

    @property
    def curves_folder(self) -> Path:
        return results_folder() if self.curves is None else self.curves

    @property
    def command_line(self) -> str:
        """What to type to continue or to repeat it."""
        words = ["metis", "reproduce", *self.results, "--scale", self.scale, "--out", str(self.out)]
        words += [] if self.timings == "nominal" else ["--timings", self.timings]
        words += [word for label in self.policies for word in ("--policy", label)]
        words += [word for name in self.environments for word in ("--environment", name)]
        words += [word for seed in self.seeds for word in ("--seed", str(seed))]
        words += [] if self.until is None else ["--until", f"{self.until:g}"]
        words += [] if self.curves is None else ["--curves", str(self.curves)]
        words += [] if self.workers is None else ["--workers", str(self.workers)]
        return shlex.join([*words, *(word for change in self.overrides for word in ("--set", change))])


@dataclass(frozen=True)
class Reproduced:
    """The document for --json, and whether every run that it needs is done."""

    document: Any
    complete: bool = True


def usual_workers(cells: int) -> int:
    """One for each processor that this process may use, but not more than cells."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(processors, cells))


def _run_queue(request: Request, results: Sequence[str], environments: dict[str, Environment], stderr: Console) -> bool:
    """Go on with the queue of scale `decisive`; whether it is empty now."""
    folder = request.curves_folder
    entries = _chosen(request, queue(environments.values(), results))
    if request.until is not None:
        entries = [replace(entry, until=min(entry.until or request.until, request.until)) for entry in entries]
    if request.train and any(not entry.done(folder) for entry in entries):
        with BoardDisplay(stderr) as display:
            run_queue(entries, request.out, folder, request.workers or usual_workers(len(entries)), display)
    left = [entry for entry in entries if not entry.done(folder)]
    if left:
        hours = hours_left(_chosen(request, queue(environments.values(), results, before_targets=True)), folder)
        stderr.print(f"at most {hours:.1f} hours of one core are left; continue with: {escape(request.command_line)}")
    return not left


def _chosen(request: Request, entries: Sequence[Entry]) -> list[Entry]:
    wanted = {cell.name for cell in chosen_cells(request, [entry.cell for entry in entries])}
    return [entry for entry in entries if entry.cell.name in wanted]


def chosen_cells(request: Request, cells: Sequence[Cell]) -> list[Cell]:
    """Those that --policy, --environment and --seed name."""
    files = [Path(name).name.removesuffix(".toml").removesuffix(TIMED) for name in request.environments]
    labels = {cell.key[1].casefold(): cell.key[1] for cell in cells}
    filters: tuple[tuple[str, Sequence[str], Callable[[Cell], str]], ...] = (
        ("policy", [labels.get(label.casefold(), label) for label in request.policies], lambda cell: cell.key[1]),
        ("environment", files, _file_of),
        ("seed", [str(seed) for seed in request.seeds], lambda cell: str(cell.config.seed)),
    )
    left = list(cells)
    for option, chosen, of in filters:
        if chosen:
            _check_names(option, chosen, list(dict.fromkeys(map(of, left))))
            left = [cell for cell in left if of(cell) in chosen]
    return left


def _file_of(cell: Cell) -> str:
    """The name of the file that it comes from, without the study, the timings and the seed."""
    return cell.environment.name.partition("/seed-")[0].rpartition("/")[2].removesuffix(TIMED)


def _check_names(option: str, chosen: Sequence[str], allowed: Collection[str]) -> None:
    for name in chosen:
        if name not in allowed:
            if option == "seed" and allowed:
                raise ConfigError(
                    f"--seed {name} is not planned for these results; planned are {', '.join(allowed)}: "
                    "to run another, add it to seeds in the file"
                )
            raise ConfigError(
                f"--{option} {name}: nothing of it is to be run for these results; {did_you_mean(name, allowed)}"
            )


def _run(request: Request, cells: Sequence[Cell], stderr: Console) -> bool:
    """Run what is missing; whether everything is done now."""
    with BoardDisplay(stderr) as display:
        workers = request.workers or usual_workers(len(cells))
        board: Board = run_cells(cells, request.out, workers, display, force=request.force)
    done = board.count("done")
    if done < len(cells):
        stderr.print(f"{done} of {len(cells)} runs are done; continue with: {escape(request.command_line)}")
    return done == len(cells)


def _write(document: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DOCUMENT).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# --- results of the paper ---------------------------------------------------------------------


def reproduce(
    request: Request, results: Sequence[str], environments: dict[str, Environment], stdout: Console, stderr: Console
) -> Reproduced:
    """Run what is missing of some results, then report them together with those of earlier calls."""
    started = time.perf_counter()
    if request.scale == "decisive":
        complete = _run_queue(request, results, environments, stderr)
        seeded = [found for environment in environments.values() for found in environment.seeded()]
        cells = [cell for environment in seeded for cell in environment.needed_for(results)]
        if cells:
            stderr.print(f"reading what is kept in {escape(str(request.curves_folder))} ...")
        evidence = Evidence(request.scale, environments, load_runs(cells, request.curves_folder))
        if cells and not evidence.runs and not request.train:
            raise ConfigError(
                f"{request.curves_folder} has no run of {', '.join(request.results)} with these settings, so that "
                "there is nothing to report"
            )
    else:
        cells = [cell for environment in environments.values() for cell in environment.needed_for(results)]
        complete = _run(request, cells, stderr)
        results, environments, cells = _with_earlier_results(request, results, environments)
        evidence = Evidence(request.scale, environments, load_finished(cells, request.out))
    measured = request.curves_folder if request.scale == "decisive" else request.folder
    if (measured / MIXING).exists() or ("figure4" in results and complete and request.train):
        evidence.mixing_times = _mixing_times(measured, stderr)
    if not evidence.runs and cells:
        return Reproduced({"scale": request.scale, "complete": False, "results": {}, "claims": []}, complete=False)
    figures = request.folder / "figures"

    def left_out(name: str, problem: DataError) -> None:
        stderr.print(f"{name} is left out: {escape(str(problem))}", soft_wrap=True)

    drawn = draw_figures(evidence, results, figures, left_out=None if request.train else left_out)
    second = spread = None
    if request.scale == "decisive":
        second = at_other_targets(evidence, results, request.curves_folder)
        spread = _spread_of_all(request, evidence)
    document = make_document(evidence, results, drawn, complete, second, spread)
    document["command_seconds"] = time.perf_counter() - started
    _write(document, request.folder)
    report = write_paper_report(document, drawn.svg, request.folder, request.command_line)
    write_markdown(document, request.folder)
    show(document, stdout)
    stdout.print(f"report in {report}, figures in {figures}", soft_wrap=True)
    return Reproduced({**document, "report": report.as_posix()}, complete)


def _spread_of_all(request: Request, evidence: Evidence) -> Mapping[str, Spread]:
    """From seed to seed, of all runs that are kept: what a claim's verdict is must not depend on what else is asked."""
    everything = load_environments(request.scale, request.overrides, timings=request.timings)
    missing = {name: one for name, one in everything.items() if name not in evidence.environments}
    kinds = {kind_of_data(one) for one in evidence.environments.values()}
    seeded = [found for one in missing.values() if kind_of_data(one) in kinds for found in one.seeded()]
    cells = [cell for environment in seeded for cell in environment.needed_for(RESULTS)]
    runs = load_runs(cells, request.curves_folder)
    whole = Evidence(evidence.scale, evidence.environments | missing, evidence.runs | runs)
    return ours(whole).spread


def _with_earlier_results(
    request: Request, results: Sequence[str], environments: dict[str, Environment]
) -> tuple[list[str], dict[str, Environment], list[Cell]]:
    """The results asked for and those whose runs the folder has from earlier calls: one report shows all of them."""
    cells = [cell for environment in environments.values() for cell in environment.needed_for(results)]
    shown = set(results)
    if not request.overrides and request.timings == "nominal":
        everything = load_environments(request.scale)
        for name in RESULTS:
            needed = [
                cell
                for environment in everything.values()
                if name in environment.paper.results
                for cell in environment.needed_for([name])
            ]
            if needed and all(kept(cell, request.out) for cell in needed):
                shown.add(name)
        environments = {
            name: environment
            for name, environment in everything.items()
            if name in environments or shown & set(environment.paper.results)
        }
        cells = [cell for environment in environments.values() for cell in environment.needed_for(shown)]
    if (request.folder / MIXING).exists():
        shown.add("figure4")
    return [name for name in RESULTS if name in shown], environments, cells


def make_document(
    evidence: Evidence,
    results: Sequence[str],
    drawn: Drawn,
    complete: bool,
    second: Evidence | None = None,
    spread: Mapping[str, Spread] | None = None,
) -> dict[str, Any]:
    """Everything that a report shows, as plain values."""
    claims = [asdict(claim) for claim in check_claims(evidence, second=second, results=results, spread=spread)]
    shown: dict[str, Any] = {}
    for name in results:
        with_runs = [environment for environment in evidence.of(name) if evidence.cells(environment)]
        result: dict[str, Any] = {"title": RESULTS[name], "notes": _notes(name, evidence)}
        if name in ("table2", "table3") and with_runs:
            result["environments"] = [cost_table(environment, evidence) for environment in with_runs]
        elif name == "table1" and with_runs:
            result["characteristics"] = characteristics(evidence)
        elif name == "figure4" and evidence.mixing_times:
            result["mixing_times"] = [asdict(measured) for measured in evidence.mixing_times]
        elif name not in drawn.files:
            continue
        if name in drawn.files:
            result["caption"] = _CAPTIONS.get(name, "")
            result["files"] = [path.as_posix() for path in drawn.files[name]]
        shown[name] = result
    return {
        "scale": evidence.scale,
        "complete": complete,
        "runs": len(evidence.runs),
        "wall_seconds": sum(run.wall_seconds for run in evidence.runs.values()),
        "lead": f"{len(evidence.runs)} runs at {evidence.scale} scale."
        + (f" Of the paper's claims about them: {verdict_count(claims)}." if claims else "")
        + ("" if complete else " Not all runs are done yet."),
        "results": shown,
        "claims": claims,
    }


def _notes(name: str, evidence: Evidence) -> list[str]:
    """The data and network that were used, once for all environments that share them."""
    if name == "figure2":
        return ["Scheduled at the paper's scale without training; Uniform & IID."]
    if name == "figure4":
        return ["Measured on this machine: one update request, from the commit of a local model to the new model."]
    if name in ("table2", "table3"):
        return []
    notes = [environment.paper.note for environment in evidence.of(name)]
    for environment in evidence.of(name):
        notes += [run.setting.facts.get("of_the_data", "") for _, run in evidence.cells(environment)]
    return [note for note in dict.fromkeys(notes) if note]


_CAPTIONS = {
    "figure2": "Each learner's time: dark is training, pale and hatched is waiting for others.",
    "figure4": "Both axes are logarithmic.",
    "figure11": "Top: over parallel time; bottom: over federation rounds. Inset: examples by learner; dashed: target.",
    "figure12": "Lowest error of each silo that trains alone (light), and of the federation (hatched).",
    **dict.fromkeys(
        ("figure7", "figure8", "figure9", "figure10"),
        "Top: over parallel time; bottom: over update requests. One seed, the first. Inset: examples by learner and "
        "class; dashed: target. Where models are many, a line is their running median, and thin behind it what each "
        "had. Time ends at three times the median run.",
    ),
}


def show(document: dict[str, Any], stdout: Console) -> None:
    """Print tables and verdicts in a terminal."""
    for result in document["results"].values():
        for table in result.get("environments", ()):
            stdout.print(terminal_sheet(cost_sheet(table)))
            stdout.print(SECOND_LINE, style="dim")
            if table["ratios"]:
                stdout.print(terminal_sheet(ratio_sheet(table)))
        if "characteristics" in result:
            stdout.print(terminal_sheet(characteristics_sheet(result["characteristics"])))
        if "mixing_times" in result:
            stdout.print(terminal_sheet(mixing_sheet(result["mixing_times"])))
    if document["claims"]:
        stdout.print(terminal_claims(document["claims"]))


def _mixing_times(folder: Path, stderr: Console) -> list[MixingTime]:
    """Measured once and kept, like a run."""
    file = folder / MIXING
    if file.exists():
        try:
            return [MixingTime(**row) for row in json.loads(file.read_text("utf-8"))]
        except (ValueError, TypeError):
            raise ConfigError(f"{file} is damaged; delete it to measure again") from None

    def report(measured: MixingTime) -> None:
        stderr.print(
            f"figure4  {measured.network}  {measured.learners:,} learners: {1000 * measured.cached:.2f} ms with the "
            f"cache, {1000 * measured.full_pass:.1f} ms without"
        )

    measured = measure_mixing(report=report)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([asdict(row) for row in measured], indent=1) + "\n", encoding="utf-8")
    return measured


# --- studies ----------------------------------------------------------------------------------


def run_study(request: Request, conditions: Sequence[Condition], stdout: Console, stderr: Console) -> Reproduced:
    """Run what is missing of a study, then report it; its folder is OUT/SCALE/STUDY."""
    (name,) = request.results
    cells = [cell for condition in conditions for cell in condition.cells]
    chosen = chosen_cells(request, cells)
    complete = _run(request, chosen, stderr)
    runs = load_finished(cells, request.out)
    there = {cell.name for cell in chosen} | set(runs)
    shown = {(_file_of(cell), cell.label) for cell in cells if cell.name in there}
    tables = [
        table for table in (_shown(one, condition_table(one, runs), shown) for one in conditions) if table["rows"]
    ]
    sheets, sentences = [study_sheet(table) for table in tables], verdicts(tables)
    document = {
        "study": name,
        "title": STUDIES[name],
        "scale": request.scale,
        "complete": len(runs) == len(cells),
        "runs": len(runs),
        "wall_seconds": sum(run.wall_seconds for run in runs.values()),
        "conditions": tables,
        "verdicts": sentences,
    }
    folder = request.folder / name
    _write(document, folder)
    pictures = draw_study(name, tables, folder)
    lines = [f"# {STUDIES[name]}", "", f"{len(runs)} of {len(cells)} runs at {request.scale} scale.", ""]
    for sheet in sheets:
        lines += [f"## {sheet.title}", "", *markdown_table(sheet), "", sheet.note, "", sheet.foot, ""]
    lines += [f"![{STUDIES[name]}]({path.name})\n" for path in pictures if path.suffix == ".png"]
    if sentences:
        lines += ["## Verdicts", "", *(f"- {sentence}" for sentence in sentences)]
    (folder / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for sheet in sheets:
        stdout.print(terminal_sheet(sheet))
    for sentence in sentences:
        stdout.print(sentence, soft_wrap=True, highlight=False, markup=False)
    figure = f", figure in {pictures[0]}" if pictures else ""
    stdout.print(f"results in {folder / 'results.md'}{figure}", soft_wrap=True)
    return Reproduced(document, complete)


def _shown(condition: Condition, table: dict[str, Any], shown: Collection[tuple[str, str]]) -> dict[str, Any]:
    """Without policies that were neither asked for nor run before."""
    keys = [(_file_of(cell), cell.label) for cell in condition.environments[0].cells]
    return {**table, "rows": [row for row, key in zip(table["rows"], keys, strict=True) if key in shown]}
