"""One policy of one file from its configuration to its result: what `simulate`, `compare` and `resume` share."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from metis import __version__
from metis.cli import report, track
from metis.cli.output import INTERRUPTED, USER_ERROR, note, print_json, stderr, stdout
from metis.errors import ConfigError, LockHeld
from metis.text import json_text

if TYPE_CHECKING:
    from metis.experiments.config.load import ExperimentConfig, PolicyConfig
    from metis.experiments.data import Division
    from metis.experiments.federation import Federation
    from metis.runs.folds import RunFold
    from metis.runs.run import Run

EVENTS, CHECKPOINT, CONFIG = "events.jsonl", "checkpoint.safetensors", "config.toml"
LOCK = "lock"  # locked while a run or a comparison is written; `metis reproduce` locks the same file
_RUN_FILES = (
    EVENTS, "summary.json", "community.safetensors", "best.safetensors", CHECKPOINT, CONFIG, "setting.json",
    "trackers.json",
)  # fmt: skip
_locks: set[int] = set()  # file descriptors of the locks that this process holds
_REPORT_FILES = (
    report.COMPARISON, "report.html", "report.md", "table.tex", "table.md", "summary.csv", "metrics.csv",
    *(f"{name}.{kind}" for name in ("history", "learners", "costs") for kind in ("csv", "parquet")),
    *(f"{name}.{kind}" for name in ("curves", "active_idle", "timeline", "timelines", "data", "tradeoff")
      for kind in ("png", "svg")),
    *(f"{name}.{kind}" for name in ("curves-time", "curves-requests") for kind in ("png", "svg", "pdf")),
)  # fmt: skip


@dataclass
class Job:
    """One policy of one file, and the directory that its run is written to."""

    config: ExperimentConfig  # with this policy only
    source: str
    out: Path
    group: str | None = None  # the comparison that it belongs to

    @property
    def policy(self) -> PolicyConfig:
        return self.config.policy[0]


def jobs_of(config: ExperimentConfig, source: str, out: Callable[[str], Path]) -> list[Job]:
    """One job for each policy of a file; `out` gives the directory for the name of a policy."""
    from metis.experiments.config.load import slug

    return [
        Job(config.model_copy(update={"policy": [policy]}), source, out(slug(policy.label or policy.name)))
        for policy in config.policy
    ]


# --- the file -------------------------------------------------------------------------------------


def load(file: Path, changes: Sequence[str]) -> ExperimentConfig:
    """The experiment, completed by its site file if it has one."""
    from metis.reproduction.environments import load_experiment

    config = load_experiment(file, changes)
    if config.site is None:
        return config
    from metis.experiments.bridges import site_path
    from metis.experiments.site import load_site, settled

    return settled(config, load_site(site_path(config)))


def with_policy(config: ExperimentConfig, source: str, wanted: str | None) -> ExperimentConfig:
    """The experiment with the one policy that is to run."""
    from metis.experiments.config.load import did_you_mean, slug

    labels = [policy.label or policy.name for policy in config.policy]
    if wanted is None:
        if len(config.policy) > 1:
            raise ConfigError(
                f"{source} has {len(labels)} policies; choose one with --policy ({', '.join(labels)}), "
                f"or run all with: metis compare {source}"
            )
        return config
    names = [{label.lower(), slug(label), policy.name} for label, policy in zip(labels, config.policy, strict=True)]
    found = [index for index, known in enumerate(names) if wanted.lower() in known]
    if len(found) != 1:
        reason = f"has no policy '{wanted}'; {did_you_mean(wanted, labels)}"
        if found:
            reason = f"has {len(found)} policies '{wanted}'; use their labels: {', '.join(labels[k] for k in found)}"
        raise ConfigError(f"{source} {reason}")
    return config.model_copy(update={"policy": [config.policy[found[0]]]})


def federation_of(config: ExperimentConfig, source: str, quiet: bool, changes: Sequence[str] = ()) -> Federation:
    """The federation of a file, its data loaded and divided."""
    from metis.experiments.build import build_federation
    from metis.experiments.data import divide

    if not quiet and sys.stderr.isatty():
        what = config.data.dataset if config.site is None else config.site.title
        stderr().print(f"[dim]{escape(source)}: preparing {escape(what)}, {config.learner_count} learners[/]")
    division: Division | None = divide(config, progress=not quiet) if config.site is None else None
    if division is not None and division.dataset.note and not quiet:
        note(f"{config.data.dataset}: {division.dataset.note}")
    if config.site is not None and not quiet:
        note(
            f"a simulation asks {config.site.title} for the data of all {config.learner_count} sites on this "
            "machine; where data may not leave a site, have it return made-up data of the same shapes"
        )
    if config.training.dtype in ("float16", "bfloat16") and not quiet:
        from metis.learning.engine import LOSSY

        note(LOSSY)
    overridden = [change.partition("=")[0].strip() for change in changes]
    return build_federation(config, source=source, division=division, overridden=overridden)


# --- the directory --------------------------------------------------------------------------------


@contextlib.contextmanager
def writing(folder: Path, instead: str = "choose another --out") -> Iterator[None]:
    """Keep other processes from writing to a run or a comparison during the block; makes its folder."""
    from metis.files import take_lock  # which takes longer to import than the help to show

    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = take_lock(folder / LOCK, note=False)
    except LockHeld:
        raise ConfigError(f"{folder} is being written by another process; wait for it, or {instead}") from None
    _locks.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _locks:  # not in a process that was forked meanwhile
            _locks.remove(descriptor)
            os.close(descriptor)


def _leave_locks() -> None:
    """Close the locks of the parent in a process that was forked: one that outlives a killed parent holds none."""
    while _locks:
        os.close(_locks.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks)


@contextlib.contextmanager
def new_folder(folder: Path, force: bool) -> Iterator[None]:
    """An empty folder for a run or a comparison, which no other process writes to; with force what was there goes.

    Only what Metis wrote is removed.
    """
    _refuse_used(folder, force)  # where nothing may be written, there is no lock either
    with writing(folder):
        _refuse_used(folder, force)
        if not force:
            _refuse_interrupted(folder)
        _remove(folder)
        yield


def prepare(job: Job) -> None:
    """Write the configuration of a run to its folder."""
    head = f"# Resolved by metis {__version__} from {job.source}; every default is written out.\n\n"
    (job.out / CONFIG).write_text(head + job.config.to_toml(), encoding="utf-8")


def holds_run(folder: Path) -> bool:
    """Whether a directory is that of a run, finished or not, or the state of a controller."""
    return any((folder / name).is_file() for name in (EVENTS, "community.safetensors", "controller.db"))


def _refuse_used(folder: Path, force: bool) -> None:
    """Refuse a directory that has a finished run, a comparison or something else."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; choose another --out")
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if not found or force:
        return
    from metis.runs.run import is_finished
    from metis.runs.trace import has_events

    for what, there in (("finished run", is_finished(folder)), ("comparison", report.COMPARISON in found)):
        if there:
            raise ConfigError(f"{folder} contains a {what}; choose another --out, or overwrite it with --force")
    if not has_events(folder) and found - {CONFIG, EVENTS, LOCK, "setting.json"}:
        raise ConfigError(
            f"{folder} is not empty and contains no run; choose another --out, or write there with --force"
        )


def _refuse_interrupted(folder: Path) -> None:
    from metis.runs.trace import has_events

    if has_events(folder):
        raise ConfigError(
            f"{folder} contains an interrupted run; continue it with: metis resume {shlex.quote(str(folder))} "
            "(or start again with --force)"
        )


def _remove(folder: Path) -> None:
    """Remove what earlier runs, comparisons and reports left in a locked folder, and nothing else."""
    runs = _runs_of(folder)
    for name in runs:
        with writing(folder / name):  # all are asked before anything is removed
            pass
    for name in runs:
        with writing(folder / name):
            _remove(folder / name)
            (folder / name / LOCK).unlink()
        for path in (folder / name, *(folder / above for above in Path(name).parents if above.name)):
            with contextlib.suppress(OSError):  # it has files of somebody else
                path.rmdir()
    if (folder / EVENTS).is_file() or (folder / report.COMPARISON).is_file():  # else files of these names are not ours
        for name in _REPORT_FILES:
            (folder / name).unlink(missing_ok=True)
    for name in _RUN_FILES:
        (folder / name).unlink(missing_ok=True)


def _runs_of(folder: Path) -> list[str]:
    """The runs of a comparison that are there; what its file lists outside of its folder is not one of them."""
    try:
        names = [str(name) for name in json.loads((folder / report.COMPARISON).read_text("utf-8"))["runs"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    found = [name for name in dict.fromkeys(names) if folder.resolve() in (folder / name).resolve().parents]
    return [name for name in found if (folder / name).is_dir()]


def check(federation: Federation, job: Job) -> None:
    """Refuse a policy or a solver that does not fit the federation, before anything is written."""
    from metis.experiments.build import build_stop
    from metis.experiments.compose import build_policy, build_solver

    federation.session(build_policy(job.policy), build_stop(job.config), solver=build_solver(job.policy.training))


# --- the run --------------------------------------------------------------------------------------


def execute(
    federation: Federation, job: Job, *, resume: bool, quiet: bool, alive: Callable[[], None] | None = None
) -> Run:
    """Run one policy with live progress; an interruption ends it early and is not an error.

    `alive` is called after every event and may raise KeyboardInterrupt.
    """
    from metis.experiments.build import build_stop
    from metis.experiments.compose import build_policy, build_solver
    from metis.reporting.console import RunProgress, errors, sentence

    config, stop = job.config, build_stop(job.config)
    policy = build_policy(job.policy)
    console = stderr()

    def watch(fold: RunFold) -> None:
        progress(fold)
        tracking(fold)
        if alive is not None:
            alive()

    with (
        track.following(config, job.out, job.out.resolve().name, job.group, console) as tracking,
        RunProgress(console if not quiet else Console(quiet=True), policy.label, stop) as progress,
    ):
        run = federation.simulate(
            policy,
            stop,
            target=config.evaluation.target,
            patience=config.stop.patience,
            solver=build_solver(job.policy.training),
            evaluate_every=config.evaluation.every_seconds,
            workers=config.run.workers,
            pool=config.run.pool,
            ray_address=config.run.ray_address,
            gpus_per_learner=config.run.gpus_per_learner,
            batched=config.run.batched,
            store=config.run.store,
            refusals_allowed=config.run.refusals_allowed,
            checkpoint_every=config.run.checkpoint_every,
            out=job.out,
            resume=resume,
            overwrite=True,  # by `prepare`, or a run that had no checkpoint yet
            watch=watch,
            progress=False,
        )
    if not quiet:
        console.print(escape(sentence(run)))
        for line in errors(run):
            note(line, console)
    return run


def finish(run: Run, folder: Path, as_json: bool, *, with_report: bool, one_line: bool = False) -> None:
    """Print the costs of a single run; its report has to be asked for: drawing takes longer than a short run."""
    from metis.reporting.console import run_table

    page = report.write([run], folder, report.title_of([run], folder))[0] if with_report else None
    if as_json and one_line:  # the last of the lines that report what happened
        document = {"at": time.time(), "kind": "result", **run.summary(), "directory": folder.as_posix()}
        sys.stdout.write(json_text(document, indent=None) + "\n")
    elif as_json:
        print_json({**run.summary(), "directory": folder.as_posix()})
    else:
        console = stdout()
        console.print(run_table(run))
        shown = f", report in {page}" if page else f"; figures and a report: metis report {shlex.quote(str(folder))}"
        console.print(f"written to {folder}{shown}", soft_wrap=True, markup=False)
    if run.finish_reason == "interrupted":
        interrupted(folder)
    if run.rounds == 0 and run.finish_reason.startswith("no learner"):
        raise typer.Exit(USER_ERROR)  # why is said already, learner by learner


def interrupted(folder: Path, more: str = "") -> None:
    """End the command and say how to continue."""
    stderr().print(f"interrupted{more}; continue with: metis resume {escape(shlex.quote(str(folder)))}")
    raise typer.Exit(INTERRUPTED)
