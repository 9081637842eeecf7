"""The command line: `metis simulate | compare | resume | reproduce | data | init | report`.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 2 the user's mistake, 130 interrupted, 1 ours.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from metis import __version__
from metis.cli import (
    certificates as cli_certificates,
    dashboard as cli_dashboard,
    learner as cli_learner,
    plan as cli_plan,
    report as cli_report,
    status as cli_status,
    track as cli_track,
)
from metis.cli.report import COMPARISON, check_folder, planned
from metis.errors import ConfigError, InternalError, MetisError, needs_package
from metis.text import json_text

if TYPE_CHECKING:
    from metis.experiments.config.load import ExperimentConfig, PolicyConfig
    from metis.experiments.data import Division
    from metis.experiments.federation import Federation
    from metis.runs.folds import RunFold
    from metis.runs.run import Run

USER_ERROR, INTERRUPTED, OUR_ERROR = 2, 130, 1
_RUN_FILES = (
    "events.jsonl",
    "summary.json",
    "community.safetensors",
    "checkpoint.safetensors",
    "config.toml",
    "setting.json",
    "trackers.json",
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated learning over learners of different speed: simulate training policies in virtual time, and "
    "compare what they cost in time, communication and energy.",
    epilog="Start here: [bold]metis init first.toml[/], then [bold]metis simulate first.toml[/].",
)
data_app = typer.Typer(no_args_is_help=True, help="Data sets: list them, fetch them, show how one is divided.")
app.add_typer(data_app, name="data")

_debug = False


def _stdout() -> Console:
    # Without a terminal there is no width to keep to, and a table must not be folded to 80 columns.
    return Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 140)


def _stderr() -> Console:
    return Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


# --- errors and exit codes --------------------------------------------------------------------

_Command = TypeVar("_Command", bound=Callable[..., None])


def _guarded(command: _Command) -> _Command:
    """Turn what can go wrong into one clear line and an exit code."""

    @functools.wraps(command)
    def guarded(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except InternalError as problem:
            if _debug:
                raise
            _fail(f"{problem} (this is a mistake in Metis; please report it)", OUR_ERROR)
        except MetisError as problem:
            if _debug:
                raise
            _fail(str(problem), USER_ERROR)
        except KeyboardInterrupt:
            _stderr().print("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader of our output has had enough
            sys.stderr.close()
            raise typer.Exit(0) from None
        except OSError as problem:
            if _debug:
                raise
            place = f"{problem.filename}: " if problem.filename else ""
            _fail(f"{place}{problem.strerror or problem}", USER_ERROR)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as problem:
            if _debug:
                raise
            text = " ".join(str(problem).split()) or type(problem).__name__
            again = shlex.join(["metis", "--debug", *sys.argv[1:]])
            _fail(f"unexpected {type(problem).__name__}: {text}; to see where, run: {again}", OUR_ERROR)

    # A help text is as wide as the terminal, not as the source.
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    guarded.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return guarded  # type: ignore[return-value]


def _fail(message: str, code: int) -> None:
    console = _stderr()
    for line in message.splitlines() or [""]:
        console.print(f"[bold red]error:[/] {escape(line)}")
    raise typer.Exit(code)


# --- options that several commands have -------------------------------------------------------

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The experiment, a TOML file.")]
FilesArgument = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Experiments, TOML files.")]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one key of the file, as in [bold]--set learners.0.count=3[/]. May be repeated.",
    ),
]
OutOption = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where the run is written.")]
WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", min=0, help="Processes that train; 0 trains in this one. The result is the same."),
]
PoolOption = Annotated[
    str | None,
    typer.Option("--pool", metavar="inline|processes|ray", help="Where learners train. The result is the same."),
]
RayAddressOption = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        help="With --pool ray: a running cluster, as in 10.0.0.1:6379 or auto; else RAY_ADDRESS, else this machine.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout and nothing else.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]


def _version(asked: bool) -> None:
    if asked:
        _stdout().print(f"metis {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    global _debug  # noqa: PLW0603  # one process is one command
    _debug = debug


# --- running ----------------------------------------------------------------------------------


@dataclass
class Job:
    """One policy of one file, and the directory that its run is written to."""

    config: ExperimentConfig  # with this policy only
    source: str
    out: Path
    group: str | None = None  # of which comparison it is

    @property
    def policy(self) -> PolicyConfig:
        return self.config.policy[0]


def _jobs(config: ExperimentConfig, source: str, out: Callable[[str], Path]) -> list[Job]:
    from metis.experiments.config.load import slug

    return [
        Job(config.model_copy(update={"policy": [policy]}), source, out(slug(policy.label or policy.name)))
        for policy in config.policy
    ]


def _overrides(
    sets: Sequence[str], workers: int | None, pool: str | None = None, ray_address: str | None = None
) -> list[str]:
    given = {"run.workers": workers, "run.pool": pool, "run.ray_address": ray_address}
    return [*sets, *(f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None)]


def _finished(folder: Path) -> bool:
    """Whether a directory holds a run that came to its end."""
    try:
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
        return bool(summary["finish_reason"] != "interrupted")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _make_room(folder: Path, force: bool) -> None:
    """Refuse to write where something is, unless told to; then take away what an earlier run left."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; choose another --out")
    held = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if held and not force:
        if _finished(folder):
            raise ConfigError(f"{folder} holds a finished run; choose another --out, or overwrite it with --force")
        if (folder / "events.jsonl").exists():
            raise ConfigError(
                f"{folder} holds a run that was cut off; go on with: metis resume {shlex.quote(str(folder))} "
                "(or start anew with --force)"
            )
        if set(held) - {"config.toml"}:
            raise ConfigError(
                f"{folder} is not empty and holds no run; choose another --out, or write there with --force"
            )
    for name in _RUN_FILES:
        (folder / name).unlink(missing_ok=True)


def _write_config(job: Job) -> None:
    job.out.mkdir(parents=True, exist_ok=True)
    head = f"# Resolved by metis {__version__} from {job.source}; every default is written out.\n\n"
    (job.out / "config.toml").write_text(head + job.config.to_toml(), encoding="utf-8")


def _execute(federation: Federation, job: Job, *, resume: bool, quiet: bool) -> Run:
    """Run one policy with live progress; an interruption ends it early and is not an error."""
    from metis.experiments.build import build_stop
    from metis.experiments.compose import build_policy, build_solver
    from metis.reporting.console import RunProgress, errors, sentence

    config, stop = job.config, build_stop(job.config)
    policy = build_policy(job.policy)
    console = _stderr()

    def watch(fold: RunFold) -> None:
        progress(fold)
        tracking(fold)

    with (
        cli_track.following(config, job.out, job.out.resolve().name, job.group, console) as tracking,
        RunProgress(console if not quiet else Console(quiet=True), policy.label, stop) as progress,
    ):
        run = federation.simulate(
            policy,
            stop,
            target=config.evaluation.target,
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
            watch=watch,
        )
    if not quiet:
        console.print(escape(sentence(run)))
        for line in errors(run):
            console.print(f"[yellow]note:[/] {escape(line)}")
    return run


def _load(file: Path, changes: Sequence[str]) -> ExperimentConfig:
    """The experiment, with what its site file says if it has one."""
    from metis.reproduction.environments import load_experiment

    config = load_experiment(file, changes)
    if config.site is None:
        return config
    from metis.experiments.site import load_site, settled

    return settled(config, load_site(config.site.file))


def _federation(config: ExperimentConfig, source: str, quiet: bool, changes: Sequence[str] = ()) -> Federation:
    from metis.experiments.build import build_federation
    from metis.experiments.data import divide

    if not quiet and sys.stderr.isatty():
        what = config.data.dataset if config.site is None else Path(config.site.file).name
        _stderr().print(f"[dim]{escape(source)}: preparing {escape(what)}, {config.learner_count} learners[/]")
    division: Division | None = divide(config, progress=not quiet) if config.site is None else None
    if division is not None and division.dataset.note and not quiet:
        _stderr().print(f"[yellow]note:[/] {escape(config.data.dataset)}: {escape(division.dataset.note)}")
    overridden = [change.partition("=")[0].strip() for change in changes]
    return build_federation(config, source=source, division=division, overridden=overridden)


def _print_json(document: Any) -> None:
    sys.stdout.write(json_text(document) + "\n")


def _choose(config: ExperimentConfig, source: str, wanted: str | None) -> ExperimentConfig:
    """The one policy that is to run."""
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
    found = [place for place, known in enumerate(names) if wanted.lower() in known]
    if len(found) != 1:
        reason = f"has no policy '{wanted}'; {did_you_mean(wanted, labels)}"
        if found:
            reason = f"has {len(found)} policies '{wanted}'; use their labels: {', '.join(labels[k] for k in found)}"
        raise ConfigError(f"{source} {reason}")
    return config.model_copy(update={"policy": [config.policy[found[0]]]})


def _finish_single(run: Run, folder: Path, as_json: bool, *, one_line: bool = False) -> None:
    from metis.reporting.console import run_table

    (report,) = cli_report.write([run], folder, cli_report.title_of([run], folder))
    if as_json and one_line:  # the last of the lines that tell what happened
        document = {"at": time.time(), "kind": "result", **run.summary(), "directory": folder.as_posix()}
        sys.stdout.write(json_text(document, indent=None) + "\n")
    elif as_json:
        _print_json({**run.summary(), "directory": folder.as_posix()})
    else:
        console = _stdout()
        console.print(run_table(run))
        console.print(f"written to {folder}, report in {report}", soft_wrap=True, markup=False)
    if run.finish_reason == "interrupted":
        _stderr().print(f"interrupted; go on with: metis resume {escape(shlex.quote(str(folder)))}")
        raise typer.Exit(INTERRUPTED)


@app.command(
    epilog="[bold]metis simulate first.toml[/]\n\n"
    "[bold]metis simulate first.toml --set policy.slowest_learner_epochs=1 --out runs/lambda-1[/]\n\n"
    "[bold]metis simulate demo.toml --policy FedRec --workers 2 --json > fedrec.json[/]"
)
@_guarded
def simulate(
    file: FileArgument,
    set_: SetOption = [],  # noqa: B006  # typer wants a list
    out: OutOption = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Which policy, if the file has several.")] = None,
    workers: WorkersOption = None,
    pool: PoolOption = None,
    ray_address: RayAddressOption = None,
    as_json: JsonOption = False,
    force: ForceOption = False,
    track: cli_track.TrackOption = [],  # noqa: B006
    dashboard: cli_dashboard.DashboardOption = False,
) -> None:
    """Run one policy of an experiment in virtual time.

    The run is written to a directory, by default runs/FILE-POLICY: the events, the resolved configuration, a
    summary, the community model, figures and a report. Ctrl-C keeps the run so far; [bold]metis resume DIR[/]
    goes on with it.
    """
    changes = _overrides(set_, workers, pool, ray_address)
    config = cli_track.tracked(_choose(_load(file, changes), file.name, policy), track)
    (job,) = _jobs(config, file.name, lambda name: out or Path("runs") / f"{file.stem}-{name}")
    federation = _federation(config, file.name, as_json, changes)
    _make_room(job.out, force)
    _write_config(job)
    with cli_dashboard.beside(job.out, dashboard, _stderr()):
        run = _execute(federation, job, resume=False, quiet=as_json)
    _finish_single(run, job.out, as_json)


@app.command(
    epilog="[bold]metis compare demo.toml[/]\n\n"
    "[bold]metis compare demo.toml --target 0.95 --set stop.seconds=120[/]\n\n"
    "[bold]metis compare lambda1.toml lambda2.toml --out runs/lambdas[/]"
)
@_guarded
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
    track: cli_track.TrackOption = [],  # noqa: B006
    dashboard: cli_dashboard.DashboardOption = False,
) -> None:
    """Run every policy of one or several files and compare what they cost.

    All start from the same model, on the same data, with the same budget; files that differ in that are refused.
    The table is that of the paper: iterations, parallel time (PT), cumulative time (CT), update requests (CC) and
    energy (EC) in three definitions, until the target is reached, or at the end if there is none. Factors are
    against the first policy.
    """
    from metis.experiments.compare import check_comparable

    changes = _overrides(set_, workers, pool, ray_address)
    if target is not None:
        changes.append(f"evaluation.target={target}")
    configs = [
        (name, cli_track.tracked(_load(file, changes), track)) for name, file in zip(_names(files), files, strict=True)
    ]
    check_comparable(configs)
    folder = out or Path("runs") / "-".join(file.stem for file in files)
    jobs: list[Job] = []
    for file, (name, config) in zip(files, configs, strict=True):
        stem = file.stem if name == file.name else f"{file.resolve().parent.name}-{file.stem}"
        prefix = f"{stem}-" if len(files) > 1 else ""
        jobs += _jobs(config, name, lambda label, prefix=prefix: folder / f"{prefix}{label}")  # type: ignore[misc]
    _tell_apart(jobs)
    for job in jobs:
        job.group = folder.resolve().name
    if (folder / COMPARISON).exists() and not force:
        raise ConfigError(
            f"{folder} holds a comparison; choose another --out, overwrite it with --force, or go on with one "
            f"that was cut off: metis resume {shlex.quote(str(folder))}"
        )
    federations = {name: _federation(config, name, as_json, changes) for name, config in configs}
    for job in jobs:
        _make_room(job.out, force)
        _write_config(job)
    plan = {"name": folder.name, "finished": False, "runs": [job.out.relative_to(folder).as_posix() for job in jobs]}
    (folder / COMPARISON).write_text(json_text(plan) + "\n", encoding="utf-8")
    if len(jobs) == 1 and not as_json:
        note = f"note: {jobs[0].source} has one policy; a second [[policy]] table would give something to compare with"
        _stderr().print(note, markup=False)
    with cli_dashboard.beside(folder, dashboard, _stderr()):
        _run_comparison(jobs, federations, folder, as_json)


def _names(files: Sequence[Path]) -> list[str]:
    """What each file is called: its name, with the folder where two have one name; no file may come twice."""
    places = [file.resolve() for file in files]
    for file, place in zip(files, places, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"{file} is given twice; each file of a comparison must be another one")
    short = [place.name for place in places]
    longer = [f"{place.parent.name}/{place.name}" for place in places]
    ways = zip(short, longer, map(str, places), strict=True)
    return [
        name if short.count(name) == 1 else path if longer.count(path) == 1 else whole for name, path, whole in ways
    ]


def _tell_apart(jobs: Sequence[Job]) -> None:
    """Two files may use one policy: then the file's name tells them apart, and each run has its own directory."""
    labels = [job.policy.label for job in jobs]
    taken: set[str] = set()
    for job in jobs:
        if labels.count(job.policy.label) > 1:
            label = f"{job.policy.label}, {job.source.removesuffix('.toml')}"
            job.config = job.config.model_copy(update={"policy": [job.policy.model_copy(update={"label": label})]})
        name, number = job.out.name, 1
        while job.out.name.casefold() in taken:  # some file systems do not tell A from a
            number += 1
            job.out = job.out.with_name(f"{name}-{number}")
        taken.add(job.out.name.casefold())


def _run_comparison(jobs: Sequence[Job], federations: dict[str, Federation], folder: Path, as_json: bool) -> None:
    """Run what is not finished yet, then tell."""
    from metis.experiments.compare import compare as compare_runs
    from metis.reporting.console import comparison_table

    runs: list[Run] = []
    for job in jobs:
        if _finished(job.out):
            runs.append(_loaded(job))
        else:
            resume = (job.out / "checkpoint.safetensors").exists()
            runs.append(_execute(federations[job.source], job, resume=resume, quiet=as_json))
        if runs[-1].finish_reason == "interrupted":
            break
    interrupted = runs[-1].finish_reason == "interrupted"
    comparison = compare_runs(runs)
    document = {
        "name": folder.name,
        "finished": not interrupted,
        "runs": [job.out.relative_to(folder).as_posix() for job in jobs],
        **comparison,
    }
    (folder / COMPARISON).write_text(json_text(document) + "\n", encoding="utf-8")
    (report,) = cli_report.write(runs, folder, folder.name)
    if as_json:
        _print_json({**document, "directory": folder.as_posix()})
    else:
        console = _stdout()
        console.print(comparison_table(comparison, console.width))
        console.print(f"written to {folder}, report in {report}", soft_wrap=True, markup=False)
    if interrupted:
        left = len(jobs) - len(runs)
        more = f" with {left} policies still to run" if left else ""
        _stderr().print(f"interrupted{more}; go on with: metis resume {escape(shlex.quote(str(folder)))}")
        raise typer.Exit(INTERRUPTED)


def _loaded(job: Job) -> Run:
    """The finished run of this job, which must have been made with the job's own configuration."""
    from metis.runs.run import Run

    run = Run.load(job.out)
    made, wanted = (run.policy, run.setting.seed), (job.policy.label or job.policy.name, job.config.seed)
    if made != wanted:
        raise ConfigError(
            f"{job.out} holds a run of {made[0]} with seed {made[1]}, but its config.toml says {wanted[0]} with seed "
            f"{wanted[1]}; put the file back, or run the comparison anew"
        )
    return run


@app.command(epilog="[bold]metis resume runs/first-semisync-lambda-2[/]")
@_guarded
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run or of a comparison.")],
    workers: WorkersOption = None,
    pool: PoolOption = None,
    ray_address: RayAddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go on with a run or a comparison that was interrupted; it ends in the same bits."""
    changes = _overrides([], workers, pool, ray_address)
    check_folder(folder)
    if (folder / COMPARISON).is_file():
        jobs, federations = [], {}
        for name in planned(folder):
            _check_config(folder / name)
            config = _load(folder / name / "config.toml", changes)
            job = Job(config, _stem_of(config), folder / name, folder.resolve().name)
            jobs.append(job)
            if job.source not in federations and not _finished(job.out):
                federations[job.source] = _federation(config, str(job.out / "config.toml"), as_json)
        _run_comparison(jobs, federations, folder, as_json)
        return
    if _finished(folder):
        raise ConfigError(f"{folder} holds a finished run; there is nothing to resume")
    _check_config(folder)
    job = Job(_load(folder / "config.toml", changes), str(folder / "config.toml"), folder)
    federation = _federation(job.config, job.source, as_json)
    # Cut off before the first checkpoint: nothing is lost that a fresh start would not bring back.
    started = (folder / "checkpoint.safetensors").exists()
    _finish_single(_execute(federation, job, resume=started, quiet=as_json), folder, as_json)


def _check_config(folder: Path) -> None:
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} has no config.toml; a run made from Python is resumed from Python")


def _stem_of(config: ExperimentConfig) -> str:
    """What the federation depends on, as a key: configurations that agree in it can share one."""
    content = config.to_dict()
    content.pop("policy")
    content["training"] = {
        key: content["training"].get(key) for key in ("task", "device", "dtype", "threads", "buffers")
    }
    return json.dumps(content, sort_keys=True)


# --- a real federation ------------------------------------------------------------------------


@app.command(
    epilog="[bold]metis controller federation.toml --state state --identity kits/controller[/]\n\n"
    "[bold]metis controller federation.toml --state state --insecure --listen 127.0.0.1:7443[/]"
)
@_guarded
def controller(
    file: FileArgument,
    state: Annotated[
        Path, typer.Option("--state", metavar="DIR", help="Where everything is kept that must not be lost.")
    ],
    identity: Annotated[
        Path | None, typer.Option("--identity", metavar="DIR", help="The controller's certificates.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Plain text, on loopback only.")] = False,
    listen: Annotated[str | None, typer.Option("--listen", metavar="HOST:PORT", help="Instead of the file's.")] = None,
    http: Annotated[
        str | None, typer.Option("--http", metavar="HOST:PORT", help="Status and metrics; '' for none.")
    ] = None,
    site: Annotated[
        Path | None, typer.Option("--site", metavar="FILE", help="Site file with the network; else that of [site].")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="To evaluate on, as in cuda:0.")] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Which policy, if the file has several.")] = None,
    set_: SetOption = [],  # noqa: B006  # typer wants a list
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")] = False,
    track: cli_track.TrackOption = [],  # noqa: B006
    dashboard: cli_dashboard.DashboardOption = False,
) -> None:
    """Run a real federation: wait for its learners, train, and end with the community model.

    Stop it with SIGTERM or Ctrl-C, or kill it: the same command goes on where it was. [bold]metis status DIR[/]
    shows it from another terminal. The results are in DIR/run, as those of a simulation.
    """
    from metis.experiments.config.load import load_config

    cli_controller = _deployed("metis.cli.controller")
    config = cli_track.tracked(_choose(load_config(file, set_), file.name, policy), track)
    if site is None and config.site is not None:
        site = file.parent / config.site.file
    report = cli_controller.Reporter(_stderr(), as_json)
    name = state.resolve().name
    with (
        cli_dashboard.beside(state, dashboard, _stderr()),
        cli_track.following(config, state / "run", name, None, _stderr()) as tracking,
    ):
        run = cli_controller.run_controller(
            config,
            state,
            identity=identity,
            insecure=insecure,
            listen=listen,
            http=http,
            site=site,
            device=device,
            report=report,
            watch=tracking,
        )
    if run is not None:
        _finish_single(run, state / "run", as_json, one_line=True)


def _deployed(module: str) -> Any:
    """A part that needs the extra `deploy`; without it one sentence, not a traceback."""
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as problem:
        if problem.name is None or problem.name.startswith("metis"):
            raise
        raise ConfigError(needs_package("a real federation", problem.name, "deploy")) from None


# --- data -------------------------------------------------------------------------------------


@data_app.command("list")
@_guarded
def data_list(as_json: JsonOption = False) -> None:
    """The data sets that can be named in a file, and where they are."""
    from metis.data.datasets import DATASETS, find_dataset
    from metis.reporting.console import plain_table

    rows = []
    for name, source in DATASETS.items():
        place = find_dataset(name)
        rows.append(
            {
                "name": name,
                "title": source.title,
                "shape": "x".join(map(str, source.shape)),
                "task": source.task,
                "classes": len(source.class_names),
                "train": source.train,
                "test": source.test,
                "bundled": source.bundled,
                "file": None if place is None else str(place),
            }
        )
    if as_json:
        _print_json(rows)
        return
    cells = [
        [
            str(row["name"]),
            str(row["title"]),
            str(row["shape"]),
            "regression" if row["task"] == "regression" else str(row["classes"]),
            f"{row['train']:,}",
            f"{row['test']:,}",
            "in the package" if row["bundled"] else str(row["file"] or f"metis data fetch {row['name']}"),
        ]
        for row in rows
    ]
    headings = ["name", "what it is", "example", "classes", "train", "test", "where"]
    _stdout().print(plain_table("Data sets", headings, cells))


@data_app.command("fetch", epilog="[bold]metis data fetch cifar10 --folder data[/]")
@_guarded
def data_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of [bold]metis data list[/].")],
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Where to; by default the cache.")
    ] = None,
) -> None:
    """Download a data set, check it, and keep it as one npz file."""
    from metis.data.datasets import fetch_dataset, find_dataset

    place = find_dataset(name, folder)
    if place is not None:
        _stdout().print(f"{name} is there already: {place}", soft_wrap=True, markup=False)
        return
    place = fetch_dataset(name, folder, progress=sys.stderr.isatty())
    _stdout().print(f"{name} is in {place}", soft_wrap=True, markup=False)


@data_app.command("show", epilog="[bold]metis data show first.toml --set partition.sizes=power_law[/]")
@_guarded
def data_show(
    file: FileArgument,
    set_: SetOption = [],  # noqa: B006  # typer wants a list
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The picture, a png, svg or pdf file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """How many examples of which class, or range of the target, each learner holds.

    As a table and as a picture, as in the paper's Figure 5.
    """
    from metis.experiments.data import divide
    from metis.reporting.console import partition_table
    from metis.reporting.figures import partition_figure
    from metis.reproduction.environments import load_experiment

    config = load_experiment(file, set_)
    division = divide(config, progress=not as_json)
    names = [assignment.name for assignment in division.assignments]
    document: dict[str, Any] = {"dataset": config.data.dataset}
    ranges = division.dataset.task == "regression"
    if ranges:
        counts, edges = division.counts_by_range()
        labels = [f"{low:.3g} to {high:.3g}" for low, high in itertools.pairwise(edges)]
        document |= {"ranges": labels, "edges": edges.tolist()}
    else:
        counts, labels = division.counts, [str(name) for name in division.dataset.class_names]
        document["classes"] = labels
    if as_json:
        _print_json({**document, "learners": names, "counts": counts.tolist()})
    else:
        console = _stdout()
        console.print(partition_table(counts, names, labels, console.width, ranges=ranges))
    picture = out or Path("runs") / f"{file.stem}-partition.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    partition_figure(counts, names, labels, picture, "range of the target" if ranges else "class")
    if not as_json:
        _stdout().print(f"picture in {picture}", soft_wrap=True, markup=False)


# --- the paper --------------------------------------------------------------------------------


@app.command(
    epilog="[bold]metis reproduce list[/]\n\n"
    "[bold]metis reproduce table3 --scale small[/]\n\n"
    "[bold]metis reproduce table2 table3 --scale paper --dry-run[/]"
)
@_guarded
def reproduce(
    results: Annotated[list[str], typer.Argument(metavar="RESULT...", help="table1 ... figure12, all, or list.")],
    scale: Annotated[str, typer.Option("--scale", help="small takes minutes, paper days without a GPU.")] = "small",
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the runs and the report are kept.")] = Path(
        "runs/paper"
    ),
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Cells that run at the same time; by default the processors.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train nothing; print what every cell schedules, round by round.")
    ] = False,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="With --dry-run: up to so many rounds, not the published.")
    ] = None,
    set_: SetOption = [],  # noqa: B006  # typer wants a list
    force: Annotated[bool, typer.Option("--force", help="Run anew what was run with other settings.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Reproduce tables and figures of the paper, with the published numbers beside ours.

    Runs every policy of the experiments that a result needs, in virtual time. Finished runs are kept in DIR and
    used again; a run that was cut off goes on where it was. It ends with one report, DIR/SCALE/report.html.
    """
    from metis.cli import reproduce as cli_reproduce

    quiet = Console(quiet=True)
    done = cli_reproduce.command(
        cli_reproduce.Request(
            results=tuple(results),
            scale=cli_reproduce.scale_named(scale),
            out=out,
            workers=workers,
            dry_run=dry_run,
            rounds=rounds,
            overrides=tuple(set_),
            anew=force,
        ),
        quiet if as_json else _stdout(),
        quiet if as_json else _stderr(),
    )
    if as_json:
        _print_json(done.document)
    if not done.complete:
        raise typer.Exit(INTERRUPTED)


# --- files ------------------------------------------------------------------------------------


@app.command(epilog="[bold]metis init first.toml && metis simulate first.toml[/]")
@_guarded
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")],
    force: ForceOption = False,
) -> None:
    """Write a commented example that runs as it is, on the bundled digits."""
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; name a file, as in {file / 'first.toml'}")
    if file.exists() and not force:
        raise ConfigError(f"{file} exists; choose another name, or overwrite it with --force")
    text = (Path(__file__).parents[1] / "experiments" / "example.toml").read_text("utf-8")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text.replace("THIS_FILE", file.name), encoding="utf-8")
    text = f"wrote {file}; run it with: metis simulate {shlex.quote(str(file))}"
    _stdout().print(text, soft_wrap=True, markup=False)


app.command(epilog=cli_report.EXAMPLES)(_guarded(cli_report.report))
app.command(epilog=cli_learner.EXAMPLES)(_guarded(cli_learner.learner))
app.command(epilog=cli_status.EXAMPLES)(_guarded(cli_status.status))
app.add_typer(cli_certificates.commands(_guarded), name="certificates")
app.command(epilog=cli_dashboard.EXAMPLES)(_guarded(cli_dashboard.dashboard))
cli_plan.register(app, _guarded)


def main() -> None:
    """The entry point `metis`."""
    app(prog_name="metis")


if __name__ == "__main__":
    main()
