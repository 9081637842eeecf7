"""`metis compare | resume`: several policies, seeds and settings side by side, and runs that were interrupted."""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metis.cli import report, running, track
from metis.cli.dashboard import DashboardOption, in_background
from metis.cli.options import (
    FilesArgument,
    ForceOption,
    JsonOption,
    OutOption,
    PoolOption,
    RayAddressOption,
    SetOption,
    WorkersOption,
    overrides,
)
from metis.cli.output import add, note, print_json, stderr, stdout
from metis.cli.running import CHECKPOINT, CONFIG, Job
from metis.errors import ConfigError
from metis.text import json_text, listed, plural

if TYPE_CHECKING:
    from metis.experiments.config.load import ExperimentConfig
    from metis.experiments.federation import Federation
    from metis.experiments.sweep import Axis
    from metis.runs.run import Run

_STOP_IT = "stop it"  # the other process


def register(app: typer.Typer) -> None:
    add(
        app,
        compare,
        "metis compare demo.toml",
        "metis compare demo.toml --target 0.95 --set stop.seconds=120",
        "metis compare lambda1.toml lambda2.toml --out runs/lambdas",
        "metis compare demo.toml --seeds 5 --format latex,pdf",
        "metis compare demo.toml --sweep policy.slowest_learner_epochs=0.5,1,2 training.learning_rate=0.01,0.05",
    )
    add(app, resume, "metis resume runs/first-semisync")


def compare(
    files: FilesArgument,
    set_: SetOption = [],  # noqa: B006  # typer wants a list
    out: OutOption = None,
    target: Annotated[
        float | None, typer.Option("--target", help="Compare the costs until the metric has this value.")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            "--seeds",
            metavar="N|A,B,...",
            help="Run every policy with so many seeds, from the file's on, or with these.",
        ),
    ] = None,
    sweep: Annotated[
        list[str],
        typer.Option(
            "--sweep",
            metavar="KEY=A,B,... ...",
            help="Run every combination of these settings of the file. May be repeated, or followed by more.",
        ),
    ] = [],  # noqa: B006
    format_: Annotated[
        list[str],
        typer.Option(
            "--format",
            metavar="|".join(report.FORMATS),
            help="Also write the results like this; latex, pdf and svg are for a paper. May be given with commas.",
        ),
    ] = [],  # noqa: B006
    workers: WorkersOption = None,
    pool: PoolOption = None,
    ray_address: RayAddressOption = None,
    as_json: JsonOption = False,
    force: ForceOption = False,
    tracking: track.TrackOption = [],  # noqa: B006
    dashboard: DashboardOption = False,
) -> None:
    """Run every policy of one or several files and compare what they cost.

    All start from the same model, on the same data, with the same budget; files that differ in these are refused.
    The table is that of the paper: iterations, parallel time (PT), cumulative time (CT), update requests (CC) and
    energy (EC) by three definitions, until the target is reached, or at the end if there is none. Factors are
    relative to the first policy.

    With several seeds the table has mean and standard deviation. Seeds and settings are run in as many processes as
    there are workers, by default one for each processor. Finished runs are not repeated: the same command continues
    a comparison that was interrupted.
    """
    from metis.experiments.compare import check_comparable
    from metis.experiments.config.errors import ByOption
    from metis.experiments.sweep import parse_seeds

    files, axes = _files_and_axes(files, sweep)
    formats = report.formats_named(format_) if format_ else []
    changes = overrides(set_, workers, pool, ray_address)
    if target is not None:
        changes.append(ByOption("--target", "evaluation.target", target))
    names = _names(files)
    configs = [track.tracked(running.load(file, changes), tracking) for file in files]
    check_comparable(list(zip(names, configs, strict=True)))
    folder = out or Path("runs") / "-".join(file.stem for file in files)
    numbers = parse_seeds(seeds, configs[0])
    jobs: list[Job] = []
    for file, name, config in zip(files, names, configs, strict=True):
        stem = file.stem if name == file.name else f"{file.resolve().parent.name}-{file.stem}"
        prefix = f"{stem}-" if len(files) > 1 else ""
        for variant in _variants(file, config, axes, changes, tracking):
            jobs += running.jobs_of(variant, name, lambda label, prefix=prefix: folder / f"{prefix}{label}")  # type: ignore[misc]
    _distinguish(jobs)
    jobs = _with_seeds(jobs, numbers)
    for job in jobs:
        job.group = folder.resolve().name
    plan = {
        "name": folder.name,
        "finished": False,
        "runs": _folders(jobs, folder),
        **({"seeds": numbers} if len(numbers) > 1 else {}),
        **({"sweep": {axis.path: list(axis.values) for axis in axes}} if axes else {}),
        **({"formats": formats} if formats else {}),
    }
    continued = (folder / report.COMPARISON).exists() and not force
    with contextlib.ExitStack() as held:
        if continued:
            held.enter_context(running.writing(folder))
            if not _continues(folder, jobs):
                raise ConfigError(
                    f"{folder} contains a comparison; choose another --out, overwrite it with --force, or continue an "
                    f"interrupted one with: metis resume {shlex.quote(str(folder))}"
                )
        # Also where each run builds its own: what does not fit the network or the data is said before anything is
        # written.
        federations = {
            name: running.federation_of(config, name, as_json, changes)
            for name, config in zip(names, configs, strict=True)
            if not continued or not _is_study(plan)
        }
        if not continued:
            for name, config in zip(names, configs, strict=True):
                for job in running.jobs_of(config, name, lambda label: folder / label):
                    running.check(federations[name], job)
            held.enter_context(running.new_folder(folder, force))
            for job in jobs:
                with running.new_folder(job.out, force):
                    running.prepare(job)
        _write(folder, plan)
        if len(jobs) == 1 and not as_json:
            note(f"{jobs[0].source} has one policy; add a second [[policy]] table to have something to compare it with")
        held.enter_context(in_background(folder, dashboard, stderr()))
        if _is_study(plan):
            _run_study(jobs, folder, plan, workers, as_json)
        else:
            _run_all(jobs, federations, folder, as_json, formats)


def _files_and_axes(files: Sequence[Path], sweep: Sequence[str]) -> tuple[list[Path], list[Axis]]:
    """The files, and the axes of the sweep; KEY=VALUES between the files belong to the sweep."""
    from metis.experiments.sweep import parse_axes

    more = [str(file) for file in files if "=" in file.name and sweep and not file.exists()]
    kept = [file for file in files if str(file) not in more]
    if not kept:
        raise ConfigError("give the file of the experiment before --sweep")
    return kept, parse_axes([*sweep, *more])


def _variants(
    file: Path, config: ExperimentConfig, axes: Sequence[Axis], changes: Sequence[str], tracking: Sequence[str]
) -> list[ExperimentConfig]:
    """The experiment, or one with a single policy for each point of the grid."""
    if not axes:
        return [config]
    from metis.experiments.config.load import read_toml
    from metis.experiments.sweep import variants

    return variants(
        config,
        axes,
        lambda more: track.tracked(running.load(file, [*changes, *more]), tracking),
        numbered=isinstance(read_toml(file).get("policy"), list),
    )


def _with_seeds(jobs: Sequence[Job], seeds: Sequence[int]) -> list[Job]:
    """Each job with each seed, in a directory of its own if there are several."""
    found = []
    for job in jobs:
        for seed in seeds:
            config = job.config.model_copy(update={"seed": seed, "seeds": None})
            out = job.out / f"seed-{seed}" if len(seeds) > 1 else job.out
            found.append(Job(config, job.source, out, job.group))
    return found


def _is_study(plan: Mapping[str, Any]) -> bool:
    return bool(plan.get("seeds") or plan.get("sweep"))


def _continues(folder: Path, jobs: Sequence[Job]) -> bool:
    """Whether the directory has the same comparison, interrupted; what it has of another is never touched."""
    from metis.experiments.compare import differences

    document = report.plan_of(folder)
    if document.get("finished", True) or report.planned(folder) != _folders(jobs, folder):
        return False
    for job in jobs:
        if not (job.out / CONFIG).is_file():
            return False
        before, now = running.load(job.out / CONFIG, []).to_dict(), job.config.to_dict()
        for table in ("run", "deployment"):
            before.pop(table, None), now.pop(table, None)
        for path, _, _ in differences(before, now):
            raise ConfigError(
                f"{folder} contains an interrupted comparison in which {path} is different; choose another --out, "
                "start again with --force, or continue it with: metis resume " + shlex.quote(str(folder))
            )
    return True


def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run or of a comparison.")],
    workers: WorkersOption = None,
    pool: PoolOption = None,
    ray_address: RayAddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a run or a comparison that was interrupted; the result is the same, bit for bit."""
    from metis.runs.run import is_finished

    changes = overrides([], workers, pool, ray_address)
    report.check_folder(folder)
    if (folder / report.COMPARISON).is_file():
        with running.writing(folder, _STOP_IT):
            _resume_comparison(folder, changes, workers, as_json)
        return
    if is_finished(folder):
        raise ConfigError(f"{folder} contains a finished run; there is nothing to resume")
    job = Job(_configuration(folder, changes), str(folder / CONFIG), folder)
    with running.writing(folder, _STOP_IT):
        if is_finished(folder):
            raise ConfigError(f"{folder} contains a finished run; there is nothing to resume")
        federation = running.federation_of(job.config, job.source, as_json)
        # Interrupted before the first checkpoint: starting again brings everything back.
        started = (folder / CHECKPOINT).exists()
        run = running.execute(federation, job, resume=started, quiet=as_json)
        running.finish(run, folder, as_json, with_report=False)


def _resume_comparison(folder: Path, changes: Sequence[str], workers: int | None, as_json: bool) -> None:
    from metis.runs.run import is_finished

    plan = report.plan_of(folder)
    jobs: list[Job] = []
    federations: dict[str, Federation] = {}
    for name in report.planned(folder):
        config = _configuration(folder / name, changes)
        job = Job(config, _shared(config), folder / name, folder.resolve().name)
        jobs.append(job)
        if not _is_study(plan) and job.source not in federations and not is_finished(job.out):
            federations[job.source] = running.federation_of(config, str(job.out / CONFIG), as_json)
    if _is_study(plan):
        kept = {key: value for key, value in plan.items() if key in ("name", "runs", "seeds", "sweep", "formats")}
        _run_study(jobs, folder, kept, workers, as_json)
    else:
        _run_all(jobs, federations, folder, as_json, plan.get("formats", []))


def _configuration(folder: Path, changes: Sequence[str]) -> ExperimentConfig:
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} has no {CONFIG}; a run made from Python is resumed from Python")
    return running.load(folder / CONFIG, changes)


def _shared(config: ExperimentConfig) -> str:
    """What the federation depends on, as a key: configurations that agree in it share one."""
    content = config.to_dict()
    content.pop("policy")
    content["training"] = {
        key: content["training"].get(key) for key in ("task", "device", "dtype", "threads", "buffers")
    }
    return json.dumps(content, sort_keys=True)


def _names(files: Sequence[Path]) -> list[str]:
    """What each file is called: its name, with its folder where two files have the same name."""
    paths = [file.resolve() for file in files]
    for file, path in zip(files, paths, strict=True):
        if paths.count(path) > 1:
            raise ConfigError(f"{file} is given twice; every file of a comparison must be a different one")
    short = [path.name for path in paths]
    longer = [f"{path.parent.name}/{path.name}" for path in paths]
    return [
        name if short.count(name) == 1 else path if longer.count(path) == 1 else whole
        for name, path, whole in zip(short, longer, map(str, paths), strict=True)
    ]


def _distinguish(jobs: Sequence[Job]) -> None:
    """Add the file's name to a policy that two files use, and give each run a directory of its own."""
    labels = [job.policy.label for job in jobs]
    taken: set[str] = set()
    for job in jobs:
        if labels.count(job.policy.label) > 1:
            label = f"{job.policy.label}, {job.source.removesuffix('.toml')}"
            job.config = job.config.model_copy(update={"policy": [job.policy.model_copy(update={"label": label})]})
        name, number = job.out.name, 1
        while job.out.name.casefold() in taken:  # some file systems do not distinguish A from a
            number += 1
            job.out = job.out.with_name(f"{name}-{number}")
        taken.add(job.out.name.casefold())


def _run_all(
    jobs: Sequence[Job], federations: dict[str, Federation], folder: Path, as_json: bool, formats: Sequence[str] = ()
) -> None:
    """Run what is not finished yet, then print and write the comparison."""
    from metis.experiments.compare import compare as compare_runs
    from metis.reporting.console import comparison_table
    from metis.runs.run import is_finished

    runs: list[Run] = []
    for job in jobs:
        if is_finished(job.out):
            runs.append(_loaded(job))
        else:
            with running.writing(job.out, _STOP_IT):
                resume = (job.out / CHECKPOINT).exists()
                runs.append(running.execute(federations[job.source], job, resume=resume, quiet=as_json))
        if runs[-1].finish_reason == "interrupted":
            break
    interrupted = runs[-1].finish_reason == "interrupted"
    comparison = compare_runs(runs)
    document = {"name": folder.name, "finished": not interrupted, "runs": _folders(jobs, folder), **comparison}
    _write(folder, document)
    page, *others = report.write(runs, folder, folder.name, ["html", *formats], everywhere=False)
    if as_json:
        print_json({**document, "directory": folder.as_posix()})
    else:
        console = stdout()
        console.print(comparison_table(comparison, console.width))
        _say_written(folder, page, others)
    if interrupted:
        left = len(jobs) - len(runs)
        running.interrupted(folder, f" with {plural(left, 'policy', 'policies')} still to run" if left else "")


def _run_study(jobs: Sequence[Job], folder: Path, plan: dict[str, Any], workers: int | None, as_json: bool) -> None:
    """Run what is not finished yet, several runs at a time, then print and write what came out over the seeds."""
    from metis.experiments.compare import compare as compare_runs
    from metis.experiments.processes import can_fork, processors, run_in_processes
    from metis.reporting.console import StudyProgress, comparison_table, errors, seeds_table
    from metis.runs.run import is_finished
    from metis.runs.seeds import has_seeds, summarise

    left = [job for job in jobs if not is_finished(job.out)]
    settings = jobs[0].config
    parallel = settings.run.workers or processors() if workers is None else workers
    if settings.run.pool == "ray" or not can_fork(settings.training.device):
        parallel = 0
    whole = True
    with StudyProgress(stderr(), len(jobs), len(jobs) - len(left), quiet=as_json) as progress:
        if parallel > 1 and len(left) > 1:
            works = [functools.partial(_work, job) for job in left]
            whole = run_in_processes(works, parallel, progress)
        else:
            for index, job in enumerate(left):
                progress(index, 1)
                try:
                    _work(job, lambda: None, workers=workers)
                except KeyboardInterrupt:
                    whole = False
                    break
    runs = [_loaded(job) for job in jobs if is_finished(job.out)]
    if not whole:
        missing = len(jobs) - len(runs)
        running.interrupted(folder, f" with {plural(missing, 'run')} still to finish")
    document = {**plan, "finished": True, **compare_runs(runs), "summary": summarise(runs)}
    _write(folder, document)
    page, *others = report.write(runs, folder, folder.name, ["html", *plan.get("formats", [])], everywhere=False)
    if as_json:
        print_json({**document, "directory": folder.as_posix()})
        return
    for run in runs:
        for line in errors(run):
            note(f"{run.policy}, seed {run.setting.seed}: {line}")
    console = stdout()
    console.print(seeds_table(runs) if has_seeds(runs) else comparison_table(document, console.width))
    _say_written(folder, page, others)


def _work(job: Job, alive: Callable[[], None], workers: int | None = 0) -> None:
    """One run of a study, without a word; an interruption is raised once the run is saved."""
    config = job.config
    if workers is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"workers": workers})})
    federation = running.federation_of(config, job.source, quiet=True)
    with running.writing(job.out, _STOP_IT):
        resume = (job.out / CHECKPOINT).exists()
        run = running.execute(
            federation, Job(config, job.source, job.out, job.group), resume=resume, quiet=True, alive=alive
        )
    if run.finish_reason == "interrupted":
        raise KeyboardInterrupt


def _say_written(folder: Path, page: Path, others: Sequence[Path]) -> None:
    console = stdout()
    console.print(f"written to {folder}, report in {page}", soft_wrap=True, markup=False)
    if others:
        console.print(f"also written: {listed([path.name for path in others])}", soft_wrap=True, markup=False)


def _folders(jobs: Sequence[Job], folder: Path) -> list[str]:
    return [job.out.relative_to(folder).as_posix() for job in jobs]


def _write(folder: Path, document: dict[str, object]) -> None:
    (folder / report.COMPARISON).write_text(json_text(document) + "\n", encoding="utf-8")


def _loaded(job: Job) -> Run:
    """The finished run of this job, which must have been made with the job's own configuration."""
    from metis.runs.run import Run

    run = Run.load(job.out)
    made, wanted = (run.policy, run.setting.seed), (job.policy.label or job.policy.name, job.config.seed)
    if made != wanted:
        raise ConfigError(
            f"{job.out} contains a run of {made[0]} with seed {made[1]}, but its {CONFIG} says {wanted[0]} with seed "
            f"{wanted[1]}; restore the file, or run the comparison again"
        )
    return run
