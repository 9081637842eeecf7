"""`metis compare | resume`: several policies on the same data, and runs that were interrupted."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from metis.text import json_text, plural

if TYPE_CHECKING:
    from metis.experiments.config.load import ExperimentConfig
    from metis.experiments.federation import Federation
    from metis.runs.run import Run


def register(app: typer.Typer) -> None:
    add(
        app,
        compare,
        "metis compare demo.toml",
        "metis compare demo.toml --target 0.95 --set stop.seconds=120",
        "metis compare lambda1.toml lambda2.toml --out runs/lambdas",
    )
    add(app, resume, "metis resume runs/first-semisync-lambda-2")


def compare(
    files: FilesArgument,
    set_: SetOption = [],  # noqa: B006  # typer wants a list
    out: OutOption = None,
    target: Annotated[
        float | None, typer.Option("--target", help="Compare the costs until the metric has this value.")
    ] = None,
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
    """
    from metis.experiments.compare import check_comparable

    changes = overrides(set_, workers, pool, ray_address)
    if target is not None:
        changes.append(f"evaluation.target={target}")
    names = _names(files)
    configs = [track.tracked(running.load(file, changes), tracking) for file in files]
    check_comparable(list(zip(names, configs, strict=True)))
    folder = out or Path("runs") / "-".join(file.stem for file in files)
    jobs: list[Job] = []
    for file, name, config in zip(files, names, configs, strict=True):
        stem = file.stem if name == file.name else f"{file.resolve().parent.name}-{file.stem}"
        prefix = f"{stem}-" if len(files) > 1 else ""
        jobs += running.jobs_of(config, name, lambda label, prefix=prefix: folder / f"{prefix}{label}")  # type: ignore[misc]
    _distinguish(jobs)
    for job in jobs:
        job.group = folder.resolve().name
    if (folder / report.COMPARISON).exists() and not force:
        raise ConfigError(
            f"{folder} contains a comparison; choose another --out, overwrite it with --force, or continue an "
            f"interrupted one with: metis resume {shlex.quote(str(folder))}"
        )
    federations = {
        name: running.federation_of(config, name, as_json, changes) for name, config in zip(names, configs, strict=True)
    }
    for job in jobs:
        running.prepare(job, force)
    _write(folder, {"name": folder.name, "finished": False, "runs": _folders(jobs, folder)})
    if len(jobs) == 1 and not as_json:
        note(f"{jobs[0].source} has one policy; add a second [[policy]] table to have something to compare it with")
    with in_background(folder, dashboard, stderr()):
        _run_all(jobs, federations, folder, as_json)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run or of a comparison.")],
    workers: WorkersOption = None,
    pool: PoolOption = None,
    ray_address: RayAddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a run or a comparison that was interrupted; the result is the same, bit for bit."""
    changes = overrides([], workers, pool, ray_address)
    report.check_folder(folder)
    if (folder / report.COMPARISON).is_file():
        jobs, federations = [], {}
        for name in report.planned(folder):
            config = _configuration(folder / name, changes)
            job = Job(config, _shared(config), folder / name, folder.resolve().name)
            jobs.append(job)
            if job.source not in federations and not running.is_finished(job.out):
                federations[job.source] = running.federation_of(config, str(job.out / CONFIG), as_json)
        _run_all(jobs, federations, folder, as_json)
        return
    if running.is_finished(folder):
        raise ConfigError(f"{folder} contains a finished run; there is nothing to resume")
    job = Job(_configuration(folder, changes), str(folder / CONFIG), folder)
    federation = running.federation_of(job.config, job.source, as_json)
    # Interrupted before the first checkpoint: starting again brings everything back.
    started = (folder / CHECKPOINT).exists()
    running.finish(running.execute(federation, job, resume=started, quiet=as_json), folder, as_json)


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


def _run_all(jobs: Sequence[Job], federations: dict[str, Federation], folder: Path, as_json: bool) -> None:
    """Run what is not finished yet, then print and write the comparison."""
    from metis.experiments.compare import compare as compare_runs
    from metis.reporting.console import comparison_table

    runs: list[Run] = []
    for job in jobs:
        if running.is_finished(job.out):
            runs.append(_loaded(job))
        else:
            resume = (job.out / CHECKPOINT).exists()
            runs.append(running.execute(federations[job.source], job, resume=resume, quiet=as_json))
        if runs[-1].finish_reason == "interrupted":
            break
    interrupted = runs[-1].finish_reason == "interrupted"
    comparison = compare_runs(runs)
    document = {"name": folder.name, "finished": not interrupted, "runs": _folders(jobs, folder), **comparison}
    _write(folder, document)
    (page,) = report.write(runs, folder, folder.name)
    if as_json:
        print_json({**document, "directory": folder.as_posix()})
    else:
        console = stdout()
        console.print(comparison_table(comparison, console.width))
        console.print(f"written to {folder}, report in {page}", soft_wrap=True, markup=False)
    if interrupted:
        left = len(jobs) - len(runs)
        running.interrupted(folder, f" with {plural(left, 'policy', 'policies')} still to run" if left else "")


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
