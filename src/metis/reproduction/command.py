"""What `metis reproduce` does: list the results, show their schedules, or run and report them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from metis.errors import ConfigError, DataError
from metis.experiments.config.load import did_you_mean
from metis.reporting.console import plain_table
from metis.reproduction.environments import SCALES, TIMINGS, Environment, Scale, Timings, load_environments
from metis.reproduction.results import Reproduced, Request, chosen_cells, reproduce, run_study
from metis.reproduction.schedule import CellSchedule, schedule_cell
from metis.reproduction.study import STUDIES, load_study
from metis.reproduction.tables import RESULTS, slowest_learner_epochs
from metis.text import number

MOST_ROUNDS = 10_000  # of a dry run: more take minutes


def scale_named(name: str) -> Scale:
    """The scale of this name."""
    for scale in SCALES:
        if scale == name:
            return scale
    raise ConfigError(f"--scale is '{name}'; it must be one of {', '.join(SCALES)}")


def timings_named(name: str) -> Timings:
    """The timings of this name."""
    for timings in TIMINGS:
        if timings == name:
            return timings
    raise ConfigError(f"--timings is '{name}'; it must be one of {', '.join(TIMINGS)}")


def chosen_results(wanted: Sequence[str]) -> tuple[str, ...]:
    """The results in the order of the paper; an unknown name is an error."""
    for name in wanted:
        if name == "list":
            raise ConfigError("list is not a result; it stands alone: metis reproduce list")
        if name != "all" and name not in RESULTS:
            raise ConfigError(f"there is no result '{name}'; {did_you_mean(name, [*RESULTS, *STUDIES, 'all', 'list'])}")
    return tuple(RESULTS) if "all" in wanted else tuple(name for name in RESULTS if name in wanted)


def command(request: Request, stdout: Console, stderr: Console) -> Reproduced:
    """Do what the command line asks for; results go to one console, progress to the other."""
    if request.rounds is not None and not request.dry_run:
        raise ConfigError(
            "--rounds needs --dry-run; set the length of a run in its file, or with --set stop.rounds=..."
        )
    if request.rounds is not None and request.rounds > MOST_ROUNDS:
        raise ConfigError(f"--rounds is {request.rounds:,}; it must be at most {MOST_ROUNDS:,}")
    study = bool(set(request.results) & set(STUDIES))
    _check_options(request, study=study)
    if request.until is not None and not 0 < request.until < math.inf:
        raise ConfigError(f"--until is {request.until:g}; it must be a number of virtual seconds above 0")
    if request.results == ("list",):
        return listing(request.scale, stdout)
    if study:
        if len(request.results) > 1:
            raise ConfigError(f"{', '.join(request.results)}: a study cannot be combined with other results")
        conditions = load_study(request.results[0], request.scale, request.overrides)
        if request.dry_run:
            first = [condition.environments[0] for condition in conditions]  # its seeds have the same schedule
            return show_schedules(request, first, stdout, stderr, tasks=False)
        return run_study(request, conditions, stdout, stderr)
    results = chosen_results(request.results)
    environments = load_environments(request.scale, request.overrides, results=results, timings=request.timings)
    _check_runs(request, results, list(environments.values()))
    if request.dry_run:
        return show_schedules(request, list(environments.values()), stdout, stderr)
    return reproduce(request, results, environments, stdout, stderr)


def _check_options(request: Request, *, study: bool) -> None:
    """Refuse options that the scale, a study or a dry run does not have."""
    for_runs = {
        "--seed": request.seeds,
        "--until": request.until is not None,
        "--report-only": not request.train,
    }
    options = {"--policy": request.policies, "--environment": request.environments, **for_runs}
    if request.curves is not None and (study or request.dry_run or request.scale != "decisive"):
        raise ConfigError("--curves says where --scale decisive keeps what its runs measure; nothing else uses it")
    if study and request.timings != "nominal":
        raise ConfigError("a study has no --timings; its files say how long a batch takes")
    if not request.train and request.scale == "decisive":
        chosen = {
            **options,
            "--report-only": False,
            "--set stop...": any(o.startswith("stop.") for o in request.overrides),
        }
        if given := next((name for name, value in chosen.items() if value), None):
            raise ConfigError(f"{given} chooses what is run; --report-only runs nothing, and reports all that is kept")
    if request.dry_run:
        if given := next((name for name, value in for_runs.items() if value), None):
            raise ConfigError(f"{given} says how runs are made; with --dry-run there are none")
    elif study:
        if request.until is not None:
            raise ConfigError("a study has no --until; to end its runs sooner, use --set stop.seconds=...")
        if not request.train:
            raise ConfigError("a study has no --report-only; its last report is in OUT/SCALE/STUDY/results.md")
    elif request.scale != "decisive" and (given := next((name for name, value in options.items() if value), None)):
        raise ConfigError(f"{given} needs --scale decisive; the other scales run everything that a result needs")
    if request.curves is not None and not request.train and not request.curves.is_dir():
        raise ConfigError(f"--curves {request.curves}: there is no such folder, and --report-only runs nothing")


def _check_runs(request: Request, results: Sequence[str], environments: Sequence[Environment]) -> None:
    """Refuse options that change runs where these results have no run that they could change."""
    cells = [cell for environment in environments for cell in environment.needed_for(results)]
    names, have = " and ".join(results), "have" if len(results) > 1 else "has"
    if request.overrides and not cells:
        raise ConfigError(f"--set changes runs, and {names} {have} none")
    if request.timings == "published" and not any(cell.published for cell in cells):
        raise ConfigError(
            f"--timings published: the paper's tables have no rows of {names}, only of table1, table2, table3, figure7 "
            "and figure8"
        )


def listing(scale: Scale, stdout: Console) -> Reproduced:
    """What can be reproduced, and what each result is made from."""
    environments = load_environments(scale).values()
    rows = []
    for name, title in RESULTS.items():
        own = [environment for environment in environments if name in environment.paper.results]
        runs = sum(len(environment.needed_for([name])) for environment in own)
        names = [environment.name for environment in own]
        rows.append({"result": name, "title": title, "environments": names, "runs": runs})
    for name, title in STUDIES.items():
        conditions = load_study(name, scale)
        runs = sum(len(condition.cells) for condition in conditions)
        names = [condition.name for condition in conditions]
        rows.append({"result": name, "title": title, "environments": names, "runs": runs})
    cells = [[str(row["result"]), str(row["title"]), str(row["runs"] or "none")] for row in rows]
    stdout.print(plain_table("Results of the paper, and studies", ["result", "what it shows", "runs"], cells))
    return Reproduced(rows)


# --- dry run ----------------------------------------------------------------------------------


def show_schedules(
    request: Request, environments: Sequence[Environment], stdout: Console, stderr: Console, *, tasks: bool = True
) -> Reproduced:
    """What every cell schedules, without training; what cannot be scheduled without its data is named."""
    if not environments:
        names, verb = " and ".join(request.results), "have" if len(request.results) > 1 else "has"
        raise ConfigError(f"{names} {verb} no runs whose schedules --dry-run could show")
    document = []
    wanted = chosen_cells(request, [cell for environment in environments for cell in environment.cells])
    missing: list[DataError] = []
    for environment in environments:
        try:
            schedules = [schedule_cell(cell, request.rounds) for cell in environment.cells if cell in wanted]
        except DataError as problem:  # who holds how much comes with the data, which is not here
            missing.append(problem)
            stderr.print(f"{environment.name} is left out: {escape(str(problem))}", soft_wrap=True)
            continue
        if schedules:
            stdout.print(schedule_table(environment, schedules))
            if tasks:
                stdout.print(task_table(schedules))
        document += [schedule.to_json() for schedule in schedules]
    if missing and not document:
        raise missing[0]
    if request.timings == "published" and request.rounds is None:
        stdout.print(
            "Iterations, update requests and PT are those of the paper's rows. EC is not: what an asynchronous learner "
            "did beside training for each batch is charged as training.",
            style="dim",
            soft_wrap=True,
        )
    if request.rounds is None and any(not (schedule["published"] or {}).get("iterations") for schedule in document):
        stdout.print(
            f"A row without published iterations goes as far as a run at --scale {request.scale} does.", style="dim"
        )
    return Reproduced(document)


def schedule_table(environment: Environment, schedules: Sequence[CellSchedule]) -> Table:
    """One row per policy: one round, and everything up to the published number of rounds."""
    title = environment.paper.title
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    headings = ("policy", "R", "cold\nstart", "round\nsteps", "round\nCC", "round\ns", "iter.", "iter.\npaper", "fast",
                "slow", "CC", "PT (s)", "PT\npaper", "R t_max", "EC\nequation", "EC\nactive", "EC\n+ idle")  # fmt: skip
    for heading in headings:
        # Digits must not be lost, however narrow the terminal.
        table.add_column(heading, justify="left" if heading == "policy" else "right", overflow="fold")
    for schedule in schedules:
        document = schedule.to_json()
        published = schedule.cell.published
        published_iterations = (
            "" if published is None else "–" if published.iterations is None else f"{published.iterations:,}"
        )
        table.add_row(
            schedule.cell.label,
            "–" if schedule.rounds is None else str(schedule.rounds),
            "–" if schedule.first is None else f"{schedule.first.steps:,}",
            "–" if schedule.each is None else f"{schedule.each.steps:,}",
            "–" if schedule.each is None else str(schedule.each.update_requests),
            "–" if schedule.each is None else f"{schedule.each.seconds:.2f}",
            f"{schedule.iterations:,}",
            published_iterations,
            f"{document['fast']:,}",
            f"{document['slow']:,}",
            f"{document['update_requests']:,}",
            number(document["parallel_time"]),
            "" if published is None else "–" if published.parallel_time is None else number(published.parallel_time),
            "–" if document["equation"] is None else number(document["equation"]["parallel_time"]),
            *(number(document["energy"][kind]) for kind in ("equation", "active", "idle_charged")),
        )
    return table


def task_table(schedules: Sequence[CellSchedule]) -> Table:
    """Batches per epoch and steps per task of each learner; under SemiSync the latter are B_k of Eq. 5."""
    rows = []
    seen: set[tuple[str, float | None]] = set()
    for schedule in schedules:
        key = (schedule.cell.policy.name, slowest_learner_epochs(schedule.cell))
        if key in seen or schedule.rounds is None:
            continue
        seen.add(key)
        name = schedule.cell.label.partition(" w/")[0]
        rows.append([f"{name}: steps per task", *(f"{schedule.tasks[learner]:,}" for learner in schedule.tasks)])
    batches = schedules[0].batches
    rows.insert(0, ["batches per epoch", *(f"{count:,}" for count in batches.values())])
    return plain_table("", ["", *batches], rows)
