"""`metis reproduce`: the paper's tables and figures, from its own experiments in virtual time."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from metis.core.stop import StopRule
from metis.errors import ConfigError
from metis.experiments.config.load import ExperimentConfig, did_you_mean, resolve_config
from metis.experiments.data import divide
from metis.reporting.console import plain_table
from metis.reproduction.claims import check_claims
from metis.reproduction.environments import SCALES, Cell, Environment, Scale, load_environments
from metis.reproduction.figures import (
    Curve,
    Drawn,
    Holding,
    Panel,
    Silos,
    Timing,
    active_idle_figure,
    age_figure,
    class_figure,
    convergence_figure,
    mixing_figure,
    silos_figure,
)
from metis.reproduction.mixing import measure_mixing
from metis.reproduction.page import (
    characteristics_sheet,
    cost_sheet,
    markdown_table,
    mixing_sheet,
    ratio_sheet,
    study_sheet,
    terminal_claims,
    terminal_sheet,
    verdict_count,
    write_markdown,
    write_paper_report,
)
from metis.reproduction.runner import Board, CellState, kept, load_finished, run_cells
from metis.reproduction.schedule import Plan, dry_run, make_plan
from metis.reproduction.study import STUDIES, condition_table, load_study, verdicts
from metis.reproduction.study_figures import draw_study
from metis.reproduction.tables import (
    RESULTS,
    Evidence,
    MixingTime,
    characteristics,
    cost_table,
    slowest_learner_epochs,
    solver_of,
)
from metis.runs.run import Run
from metis.text import about, number

DOCUMENT, MIXING = "results.json", "mixing-times.json"


def usual_workers(cells: int) -> int:
    """As many as there are processors for this process, but no more than cells."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(processors, cells))


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    results: tuple[str, ...]
    scale: Scale = "small"
    out: Path = Path("runs/paper")
    workers: int | None = None
    dry_run: bool = False
    rounds: int | None = None
    overrides: tuple[str, ...] = ()
    anew: bool = False

    @property
    def command_line(self) -> str:
        """What to type to go on with it, or to repeat it."""
        words = ["metis", "reproduce", *self.results, "--scale", self.scale, "--out", str(self.out)]
        return shlex.join([*words, *(word for change in self.overrides for word in ("--set", change))])


@dataclass(frozen=True)
class Done:
    """The document for --json, and whether everything that was asked for is there."""

    document: Any
    complete: bool = True


def scale_named(name: str) -> Scale:
    """The scale that is called so."""
    for scale in SCALES:
        if scale == name:
            return scale
    raise ConfigError(f"--scale is '{name}', must be one of {', '.join(SCALES)}")


def chosen_results(wanted: Sequence[str]) -> tuple[str, ...]:
    """The results in the order of the paper; an unknown name is an error."""
    for name in wanted:
        if name != "all" and name not in RESULTS:
            raise ConfigError(f"there is no result '{name}'; {did_you_mean(name, [*RESULTS, *STUDIES, 'all', 'list'])}")
    return tuple(RESULTS) if "all" in wanted else tuple(name for name in RESULTS if name in wanted)


def command(request: Request, stdout: Console, stderr: Console) -> Done:
    """Do what was asked for; results go to one console, progress to the other."""
    scale = request.scale
    if request.rounds is not None and not request.dry_run:
        raise ConfigError("--rounds is for --dry-run; how long a run takes is in its file, or --set stop.rounds=...")
    if request.results == ("list",):
        return listing(scale, stdout)
    if set(request.results) & set(STUDIES):
        return run_study(request, stdout, stderr)
    results = chosen_results(request.results)
    environments = load_environments(scale, request.overrides, results=results)
    if request.dry_run:
        made = [(there, [make_plan(cell, request.rounds) for cell in there.cells]) for there in environments.values()]
        for environment, plans in made:
            stdout.print(plan_table(environment, plans))
            stdout.print(share_table(plans))
        return Done([plan.to_json() for _, plans in made for plan in plans])
    return reproduce(request, results, environments, stdout, stderr)


def listing(scale: Scale, stdout: Console) -> Done:
    """What can be reproduced, and what each result is made of."""
    environments = load_environments(scale).values()
    rows = []
    for name, title in RESULTS.items():
        own = [there for there in environments if name in there.paper.results]
        cells = sum(len(there.needed_for([name])) for there in own)
        rows.append({"result": name, "title": title, "environments": [there.name for there in own], "runs": cells})
    for name, title in STUDIES.items():
        conditions = load_study(name, scale)
        runs = sum(len(condition.cells) for condition in conditions)
        names = [condition.name for condition in conditions]
        rows.append({"result": name, "title": title, "environments": names, "runs": runs})
    cells_of = [[str(row["result"]), str(row["title"]), str(row["runs"] or "none")] for row in rows]
    stdout.print(plain_table("Results of the paper", ["result", "what it is", "runs"], cells_of))
    return Done(rows)


# --- running and telling ----------------------------------------------------------------------


def reproduce(
    request: Request, results: Sequence[str], environments: dict[str, Environment], stdout: Console, stderr: Console
) -> Done:
    """Run what is missing, then tell all that is there."""
    started = time.perf_counter()
    cells = [cell for environment in environments.values() for cell in environment.needed_for(results)]
    folder = request.out / request.scale
    with BoardDisplay(stderr) as display:
        workers = request.workers or usual_workers(len(cells))
        board = run_cells(cells, request.out, workers, display, anew=request.anew)
    complete = board.count("done") == len(cells)
    asked, (results, environments, cells) = len(cells), _with_what_is_kept(request, results, environments)
    evidence = Evidence(request.scale, environments, load_finished(cells, request.out))
    if (folder / MIXING).exists() or ("figure4" in results and complete):
        evidence.mixing_times = _mixing_times(folder, stderr)
    if not complete:
        stderr.print(f"{board.count('done')} of {asked} runs are done; go on with: {escape(request.command_line)}")
    if not evidence.runs and cells:
        return Done({"scale": request.scale, "complete": False, "results": {}, "claims": []}, complete=False)
    drawn = draw_figures(evidence, results, folder / "figures")
    document = make_document(evidence, results, drawn, complete)
    document["command_seconds"] = time.perf_counter() - started
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DOCUMENT).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    report = write_paper_report(document, drawn.svg, folder, request.command_line)
    write_markdown(document, folder)
    show(document, stdout)
    stdout.print(f"report in {report}, figures in {folder / 'figures'}", soft_wrap=True)
    return Done({**document, "report": report.as_posix()}, complete)


def run_study(request: Request, stdout: Console, stderr: Console) -> Done:
    """Run what is missing of a study, then tell all that is there; its folder is OUT/SCALE/STUDY."""
    if len(request.results) > 1:
        raise ConfigError(f"{', '.join(request.results)}: a study is reproduced by itself")
    (name,) = request.results
    conditions = load_study(name, request.scale, request.overrides)
    cells = [cell for condition in conditions for cell in condition.cells]
    if request.dry_run:
        plans = [
            make_plan(cell, request.rounds) for condition in conditions for cell in condition.environments[0].cells
        ]
        for condition in conditions:
            there = condition.environments[0]
            stdout.print(plan_table(there, [plan for plan in plans if plan.cell.environment is there]))
        return Done([plan.to_json() for plan in plans])
    with BoardDisplay(stderr) as display:
        workers = request.workers or usual_workers(len(cells))
        board = run_cells(cells, request.out, workers, display, anew=request.anew)
    complete = board.count("done") == len(cells)
    if not complete:
        stderr.print(f"{board.count('done')} of {len(cells)} runs are done; go on with: {escape(request.command_line)}")
    runs = load_finished(cells, request.out)
    tables = [condition_table(condition, runs) for condition in conditions]
    sheets, told = [study_sheet(table) for table in tables], verdicts(tables)
    document = {
        "study": name,
        "title": STUDIES[name],
        "scale": request.scale,
        "complete": complete,
        "runs": len(runs),
        "wall_seconds": sum(run.wall_seconds for run in runs.values()),
        "conditions": tables,
        "verdicts": told,
    }
    folder = request.out / request.scale / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DOCUMENT).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    pictures = draw_study(name, tables, folder)
    lines = [f"# {STUDIES[name]}", "", f"{len(runs)} of {len(cells)} runs at {request.scale} scale.", ""]
    for sheet in sheets:
        lines += [f"## {sheet.title}", "", *markdown_table(sheet), "", sheet.note, "", sheet.foot, ""]
    lines += [f"![{STUDIES[name]}]({path.name})\n" for path in pictures if path.suffix == ".png"]
    lines += ["## Verdicts", "", *(f"- {line}" for line in told)]
    (folder / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for sheet in sheets:
        stdout.print(terminal_sheet(sheet))
    for line in told:
        stdout.print(line, soft_wrap=True, highlight=False, markup=False)
    drawn = f", figure in {pictures[0]}" if pictures else ""
    stdout.print(f"results in {folder / 'results.md'}{drawn}", soft_wrap=True)
    return Done(document, complete)


def _with_what_is_kept(
    request: Request, results: Sequence[str], environments: dict[str, Environment]
) -> tuple[list[str], dict[str, Environment], list[Cell]]:
    """What was asked for, and what the folder has from earlier calls: one report holds all of it."""
    cells = [cell for environment in environments.values() for cell in environment.needed_for(results)]
    told = set(results)
    if not request.overrides:
        everything = load_environments(request.scale)
        for name in RESULTS:
            there = [environment for environment in everything.values() if name in environment.paper.results]
            needed = [cell for environment in there for cell in environment.needed_for([name])]
            if needed and all(kept(cell, request.out) for cell in needed):
                told.add(name)
        environments = {
            name: there for name, there in everything.items() if name in environments or told & set(there.paper.results)
        }
        cells = [cell for environment in environments.values() for cell in environment.needed_for(told)]
    if (request.out / request.scale / MIXING).exists():
        told.add("figure4")
    return [name for name in RESULTS if name in told], environments, cells


def make_document(evidence: Evidence, results: Sequence[str], drawn: Drawn, complete: bool) -> dict[str, Any]:
    """All that a report holds, as plain values."""
    claims = [asdict(claim) for claim in check_claims(evidence)]
    told: dict[str, Any] = {}
    for name in results:
        there = [environment for environment in evidence.of(name) if evidence.cells(environment)]
        result: dict[str, Any] = {"title": RESULTS[name], "notes": _notes(name, evidence)}
        if name in ("table2", "table3") and there:
            result["environments"] = [cost_table(environment, evidence) for environment in there]
        elif name == "table1" and there:
            result["characteristics"] = characteristics(evidence)
        elif name == "figure4" and evidence.mixing_times:
            result["mixing_times"] = [asdict(measured) for measured in evidence.mixing_times]
        elif name not in drawn.files:
            continue
        if name in drawn.files:
            result["caption"] = _CAPTIONS.get(name, "")
            result["files"] = [path.as_posix() for path in drawn.files[name]]
        told[name] = result
    wall = sum(run.wall_seconds for run in evidence.runs.values())
    verdicts = verdict_count(claims)
    return {
        "scale": evidence.scale,
        "complete": complete,
        "runs": len(evidence.runs),
        "wall_seconds": wall,
        "lead": f"{len(evidence.runs)} runs at {evidence.scale} scale. Of the paper's claims: {verdicts}."
        + ("" if complete else " Not all runs are done yet."),
        "results": told,
        "claims": claims,
    }


def _notes(name: str, evidence: Evidence) -> list[str]:
    """Which data and network it was, said once for all environments that have the same."""
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
    "figure11": "Above over parallel time, below over federation rounds; inset: examples by learner; dashed: target.",
    "figure12": "Least error of each silo that trains alone (light), and of the federation (hatched).",
    **dict.fromkeys(
        ("figure7", "figure8", "figure9", "figure10"),
        "Above over parallel time, below over update requests; inset: examples by learner and class; dashed: target.",
    ),
}


def show(document: dict[str, Any], stdout: Console) -> None:
    """Tables and verdicts for a terminal."""
    for result in document["results"].values():
        for table in result.get("environments", ()):
            stdout.print(terminal_sheet(cost_sheet(table)))
            if table["ratios"]:
                stdout.print(terminal_sheet(ratio_sheet(table)))
        if "characteristics" in result:
            stdout.print(terminal_sheet(characteristics_sheet(result["characteristics"])))
        if "mixing_times" in result:
            stdout.print(terminal_sheet(mixing_sheet(result["mixing_times"])))
    stdout.print(terminal_claims(document["claims"]))


def _mixing_times(folder: Path, stderr: Console) -> list[MixingTime]:
    """Measured once and kept, like a run."""
    file = folder / MIXING
    if file.exists():
        try:
            return [MixingTime(**row) for row in json.loads(file.read_text("utf-8"))]
        except (ValueError, TypeError):
            raise ConfigError(f"{file} is damaged; delete it to measure again") from None

    def tell(measured: MixingTime) -> None:
        stderr.print(
            f"figure4  {measured.network}  {measured.learners:,} learners: {1000 * measured.cached:.2f} ms with the "
            f"cache, {1000 * measured.full_pass:.1f} ms without"
        )

    measured = measure_mixing(tell=tell)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([asdict(row) for row in measured], indent=1) + "\n", encoding="utf-8")
    return measured


# --- figures ----------------------------------------------------------------------------------


def draw_figures(evidence: Evidence, results: Sequence[str], folder: Path) -> Drawn:
    """Every figure that was asked for and whose runs are there."""
    drawn = Drawn()
    for name in ("figure7", "figure8", "figure9", "figure10", "figure11"):
        panels = [_panel(evidence, there) for there in evidence.of(name) if evidence.cells(there)]
        if name in results and panels:
            second = "rounds" if name == "figure11" else "update_requests"
            drawn.add(name, folder, lambda panels=panels, second=second: convergence_figure(panels, second))  # type: ignore[misc]
    if "figure2" in results:
        timelines = _idle_panels()
        drawn.add("figure2", folder, lambda: active_idle_figure(timelines))
    if "figure4" in results and evidence.mixing_times:
        timings = _timings(evidence.mixing_times)
        drawn.add("figure4", folder, lambda: mixing_figure(timings))
    if "figure5" in results:
        classes = _class_holdings(evidence.scale)
        drawn.add("figure5", folder, lambda: class_figure(classes))
    if "figure6" in results:
        ages = [_age_holding(there) for there in evidence.of("figure6")]
        drawn.add("figure6", folder, lambda: age_figure(ages))
    silos = [_silos(evidence, there) for there in evidence.of("figure12") if evidence.alone(there)]
    if "figure12" in results and silos:
        drawn.add("figure12", folder, lambda: silos_figure(silos))
    return drawn


def _panel(evidence: Evidence, environment: Environment) -> Panel:
    centralized = evidence.centralized(environment)
    curves = [
        Curve(cell.label, run, cell.policy.name, solver_of(cell), slowest_learner_epochs(cell))
        for cell, run in evidence.cells(environment)
    ]
    title = environment.paper.distribution
    return Panel(title, curves, None if centralized is None else centralized.best_metric)


def _idle_panels() -> list[tuple[str, Run]]:
    """Figure 2 needs no training: what the schedule leaves idle, at the paper's scale."""
    environments = load_environments("paper", results=["figure8", "figure9"])
    panels = []
    for domain, network in (("CIFAR-10", "2-CNN CIFAR-10"), ("CIFAR-100", "ResNet-50 CIFAR-100")):
        config = next(there for there in environments.values() if there.paper.domain == domain).config
        for title, policy in (
            ("Sync", {"name": "sync_fedavg", "local_epochs": 4.0}),
            ("SemiSync (λ=2)", {"name": "semisync_fedavg", "slowest_learner_epochs": 2.0, "timings": "cold_start"}),
        ):
            changed = _changed(config, partition={"sizes": "uniform", "classes": "iid"}, policy=[policy])
            # As long as five synchronous rounds: long enough to see the cold start and the rhythm after it.
            rounds = 5 if title == "Sync" else 10
            panels.append((f"{network}\n{title}", dry_run(changed, StopRule(rounds=rounds))))
    return panels


def _changed(config: ExperimentConfig, **tables: Any) -> ExperimentConfig:
    return resolve_config({**config.to_dict(), **tables}, "a variation")


def _timings(measured: Sequence[MixingTime]) -> list[Timing]:
    timings = []
    for network in dict.fromkeys(row.network for row in measured):
        rows = sorted((row for row in measured if row.network == network), key=lambda row: row.learners)
        timings.append(
            Timing(
                network,
                [row.learners for row in rows],
                [row.cached for row in rows],
                [row.full_pass for row in rows],
            )
        )
    return timings


def _class_holdings(scale: Scale) -> list[Holding]:
    """The three distributions that the paper shows: not all of them are trained on."""
    environments = load_environments(scale, results=["figure8", "figure9", "figure10"])
    holdings = []
    for domain, partition, title in (
        ("CIFAR-10", {"sizes": "uniform", "classes": "non_iid", "classes_per_learner": 5}, "Uniform & Non-IID(5)"),
        ("CIFAR-100", {"sizes": "skewed", "classes": "non_iid", "classes_per_learner": 50}, "Skewed & Non-IID(50)"),
        ("ExtendedMNIST", {"sizes": "power_law", "classes": "iid"}, "Power Law & IID"),
    ):
        config = next(there for there in environments.values() if there.paper.domain == domain).config
        division = divide(_changed(config, partition=partition))
        shown = "MNIST for ExtendedMNIST" if config.data.dataset == "mnist" else domain
        names = [assignment.name for assignment in division.assignments]
        holdings.append(Holding(f"{shown}\n{title}", names, division.counts))
    return holdings


def _age_holding(environment: Environment) -> Holding:
    division = divide(environment.config)
    ages = [division.dataset.y_train[assignment.indices] for assignment in division.assignments]
    return Holding(
        environment.paper.distribution, [assignment.name for assignment in division.assignments], targets=ages
    )


def _silos(evidence: Evidence, environment: Environment) -> Silos:
    alone = {run.setting.learners[0].name: run.best_metric for run in evidence.alone(environment)}
    together = {cell.label.removesuffix(" w/ Vanilla"): run.best_metric for cell, run in evidence.cells(environment)}
    centralized = evidence.centralized(environment)
    return Silos(
        environment.paper.distribution,
        str(environment.config.evaluation.metric),
        {name: value for name, value in alone.items() if value is not None},
        {name: value for name, value in together.items() if value is not None},
        None if centralized is None else centralized.best_metric,
    )


# --- the plan of a dry run --------------------------------------------------------------------


def share_table(made: Sequence[Plan]) -> Table:
    """Of each learner: batches an epoch and steps a task, which are B_k of Eq. 5 under SemiSync."""
    rows = []
    seen: set[tuple[str, float | None]] = set()
    for plan in made:
        key = (plan.cell.policy.name, slowest_learner_epochs(plan.cell))
        if key in seen or plan.rounds is None:
            continue
        seen.add(key)
        name = plan.cell.label.partition(" w/")[0]
        rows.append([f"{name}: steps a task", *(f"{plan.tasks[learner]:,}" for learner in plan.tasks)])
    batches = made[0].batches
    rows.insert(0, ["batches an epoch", *(f"{count:,}" for count in batches.values())])
    return plain_table("", ["", *batches], rows)


def plan_table(environment: Environment, made: Sequence[Plan]) -> Table:
    """One row a policy: a round, and everything up to the published number of rounds."""
    title = environment.paper.title
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    headings = ("policy", "R", "cold\nstart", "round\nsteps", "round\nCC", "round\ns", "iter.", "iter.\npaper", "fast",
                "slow", "CC", "PT (s)", "EC\nequation", "EC\nactive", "EC\n+ idle")  # fmt: skip
    for heading in headings:
        # Digits must not be lost, however narrow the terminal.
        table.add_column(heading, justify="left" if heading == "policy" else "right", overflow="fold")
    for plan in made:
        document = plan.to_json()
        published = plan.cell.published
        told = "" if published is None else "–" if published.iterations is None else f"{published.iterations:,}"
        table.add_row(
            plan.cell.label,
            "–" if plan.rounds is None else str(plan.rounds),
            "–" if plan.first is None else f"{plan.first.steps:,}",
            "–" if plan.each is None else f"{plan.each.steps:,}",
            "–" if plan.each is None else str(plan.each.update_requests),
            "–" if plan.each is None else f"{plan.each.seconds:.2f}",
            f"{plan.iterations:,}",
            told,
            f"{document['fast']:,}",
            f"{document['slow']:,}",
            f"{document['update_requests']:,}",
            number(document["parallel_time"]),
            *(number(document["energy"][kind]) for kind in ("equation", "active", "idle_charged")),
        )
    return table


class BoardDisplay:
    """Shows the cells on their way: a live table in a terminal, else a line when a cell ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._told: set[str] = set()
        self._told_at = time.monotonic()

    def __enter__(self) -> BoardDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *problem: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, board: Board) -> None:
        ended = [state for state in board.states if state.status == "done" and not state.kept]
        fresh = [state for state in ended if state.cell.name not in self._told]
        for state in fresh:
            self._told.add(state.cell.name)
            self._console.print(f"{self._place(board)}  {escape(_words(state))}  {_left(board)}", highlight=False)
        if self._live is not None:
            self._live.update(self._picture(board), refresh=True)
        elif not fresh and time.monotonic() - self._told_at > 60:
            going = "; ".join(_words(state) for state in board.states if state.status == "running")
            self._console.print(f"{self._place(board)}  {escape(going)}  {_left(board)}", highlight=False)
        else:
            if fresh:
                self._told_at = time.monotonic()
            return
        self._told_at = time.monotonic()

    def _place(self, board: Board) -> str:
        return f"[{board.count('done')}/{len(board.states)}]".replace("[", "\\[")

    def _picture(self, board: Board) -> Table:
        table = Table.grid(padding=(0, 2))
        for state in board.states:
            if state.status == "running":
                share = min(1.0, state.steps / state.planned_steps) if state.planned_steps else 0.0
                bar = "█" * round(20 * share) + "░" * (20 - round(20 * share))
                table.add_row(Text(bar, style="cyan"), Text(_words(state)))
        table.add_row(Text(f"{board.count('done')} of {len(board.states)} cells"), Text(_left(board), style="dim"))
        return table


def _words(state: CellState) -> str:
    metric = "" if state.metric is None else f"  {state.metric:.3f}"
    return f"{state.cell.name}  t={state.at:.0f} s  {state.steps:,} steps{metric}"


def _left(board: Board) -> str:
    left = board.seconds_left
    return "" if left is None else f"(at most {about(left)} left)"
