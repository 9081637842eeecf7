"""`metis plan | probe | replay`: what policies will cost, how fast a machine is, what another policy would have cost.

What takes long to load is loaded when a command runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from metis.cli.options import FileArgument, JsonOption, SetOption
from metis.cli.output import add, note, print_json, stdout
from metis.cli.running import load
from metis.errors import ConfigError
from metis.text import json_text

OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Also write the output to this directory, as text and as JSON."),
]


def register(app: typer.Typer) -> None:
    add(
        app,
        plan,
        "metis plan first.toml",
        "metis plan first.toml --lambda 0.5,1,2 --set learners.1.time_per_batch=0.9",
        "metis plan federation.toml --timings probes",
        "metis plan federation.toml --timings state",
    )
    add(
        app,
        probe,
        "metis probe --site site.py --name north --batch-size 32",
        "metis probe federation.toml --name north --json > probes/north.json",
    )
    add(
        app,
        replay,
        "metis replay runs/first-semisync --policy sync_fedavg local_epochs=4",
        "metis replay state --policy other.toml",
        "metis replay runs/first-semisync update_requests_an_hour=600",
    )


def plan(
    file: FileArgument,
    policy: Annotated[
        list[str],
        typer.Option(
            "--policy",
            metavar="NAME",
            help="A policy of the file, or any that Metis knows. May be repeated; by default one of each kind.",
        ),
    ] = [],  # noqa: B006  # typer wants a list
    lambdas: Annotated[
        str | None,
        typer.Option(
            "--lambda",
            metavar="LIST",
            help="Values of lambda, the epochs of the slowest learner, to try; by default 0.5,1,2,3,4.",
        ),
    ] = None,
    timings: Annotated[
        list[Path],
        typer.Option(
            "--timings",
            metavar="DIR",
            help="Measured timings to use instead of the file's: a run, a state folder, or the output of "
            "[bold]metis probe --json[/]. May be repeated.",
        ),
    ] = [],  # noqa: B006
    set_: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Forecast what policies cost, before anything is trained.

    For synchronous, semi-synchronous (for several lambdas) and asynchronous training: how long a round takes, how long
    each learner waits, its batches and local epochs between two mixings, and update requests, bytes and energy per
    hour. Recommends a lambda and warns about slow learners, slow links and stale models.
    """
    from metis.planning.outlook import make_outlook
    from metis.planning.timings import read_timings
    from metis.reporting.planning import plan_view

    wanted = _numbers(lambdas)
    config = load(file, set_)
    measured = read_timings(timings) if timings else None
    outlook = make_outlook(config, file.name, wanted=policy, lambdas=wanted, timings=measured)
    _show("plan", outlook.to_json(), plan_view, as_json, out)


def probe(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="The experiment; not needed with --site.")] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", "--learner", metavar="NAME", help="Name of the learner that runs on this machine."),
    ] = None,
    site: Annotated[
        Path | None, typer.Option("--site", metavar="FILE", help="The site file, if the experiment does not name one.")
    ] = None,
    batches: Annotated[int, typer.Option("--batches", min=2, help="Number of batches to time, after a warm-up.")] = 20,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", min=1, help="Examples per batch; by default as in the experiment, or 32."),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="Device to train on, such as cuda:0.")] = None,
    set_: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Time a few batches on this machine, with the real network and data of one learner.

    Prints the time per batch, without the warm-up, and the lines to add to the experiment's file. The output of --json
    can be passed to [bold]metis plan --timings[/].
    """
    from metis.planning.probe import probe_config, run_probe
    from metis.reporting.planning import probe_table

    if file is None:
        if site is None:
            raise ConfigError("give a FILE, or a site file with --site")
        config = probe_config(site, name or "site", batch_size or 32)
        if name is None:
            name = "site"
            note(f"using the data that {site} has for '{name}'; choose another learner with --name")
    elif name is None:
        raise ConfigError("give the name of the learner that runs on this machine: --name NAME")
    else:
        config = load(file, set_)
        if batch_size is not None:
            groups = [group.model_copy(update={"batch_size": batch_size}) for group in config.learners]
            config = config.model_copy(update={"learners": groups})
    found = run_probe(config, site, name, batches, device)
    if as_json:
        print_json(found.to_json())
        return
    console = stdout()
    console.print(probe_table(found.to_json()))
    if found.advice:
        console.print(f"\n{found.advice}", markup=False)
    console.print("\nlines for the experiment's file:\n", style="dim")
    console.print(found.snippet(), soft_wrap=True, markup=False)


def replay(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory of a run, or a controller's state folder.")
    ],
    changes: Annotated[list[str], typer.Argument(metavar="KEY=VALUE", help="Parameters of the policy to change.")] = [],  # noqa: B006
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME|FILE",
            help="Another policy, or a file with policies; by default the recorded policy.",
        ),
    ] = None,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Compute what another policy would have cost in a recorded run.

    Plays the policy in virtual time with the recorded timings and presence of the learners, without weights, and shows
    rounds, update requests, bytes, idle time and energy over the same time. Accuracy is not predicted.
    """
    from metis.planning.counterfactual import compare_policies, load_recording, policies_named
    from metis.reporting.planning import replay_view
    from metis.runs.trace import to_line

    for change in changes:
        if not all(change.partition("=")):
            raise ConfigError(f"'{change}' is not a parameter of a policy; write KEY=VALUE, as in local_epochs=4")
    recording = load_recording(folder)
    comparison = compare_policies(recording, policies_named(recording, policy, changes))
    _show("replay", comparison.to_json(), replay_view, as_json, out)
    if out is not None:
        for number, trace in enumerate(comparison.traces, start=1):
            name = "events.jsonl" if len(comparison.traces) == 1 else f"events-{number}.jsonl"
            (out / name).write_text("".join(to_line(*event) + "\n" for event in trace), encoding="utf-8")


def _numbers(text: str | None) -> list[float] | None:
    """The numbers of a comma-separated list."""
    if text is None:
        return None
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--lambda is '{text}'; it must be a comma-separated list of numbers, as in 0.5,1,2"
        ) from None
    if not all(0 < value < math.inf for value in found):
        raise ConfigError(f"--lambda is '{text}'; every number must be finite and greater than 0")
    return found


def _show(
    name: str,
    document: dict[str, Any],
    view: Callable[[dict[str, Any], int], RenderableType],
    as_json: bool,
    out: Path | None,
) -> None:
    """Print a document as tables or as JSON; with --out write both to files."""

    if out is not None:
        if out.exists() and not out.is_dir():
            raise ConfigError(f"--out is {out}, which is a file; choose a directory")
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json_text(document) + "\n", encoding="utf-8")
        text = StringIO()
        Console(file=text, width=_WIDTH, highlight=False, emoji=False).print(view(document, _WIDTH))
        lines: Sequence[str] = [line.rstrip() for line in text.getvalue().splitlines()]
        (out / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if as_json:
        print_json(document)
        return
    console = stdout()
    width = min(console.width, _WIDTH)
    console.print(view(document, width), width=width)
    if out is not None:
        console.print(f"written to {out}", soft_wrap=True, markup=False)


_WIDTH = 100
