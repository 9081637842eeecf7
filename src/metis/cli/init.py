"""`metis init`: a first experiment to start from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from metis.cli.options import ForceOption
from metis.cli.output import add, deployed, say
from metis.errors import ConfigError


def register(app: typer.Typer) -> None:
    add(
        app,
        init,
        "metis init first.toml && metis simulate first.toml",
        "metis init second.toml --policy fedasync --solver momentum",
        "metis init --list",
        "metis init federation.toml --from-flower path/to/pyproject.toml",
        "metis init site-policy.toml --site-policy",
    )


def init(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="The file to write.")] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="NAME", help="Write this policy, with all its parameters.")
    ] = None,
    solver: Annotated[
        str | None, typer.Option("--solver", metavar="NAME", help="Write this solver, with all its settings.")
    ] = None,
    list_: Annotated[
        bool,
        typer.Option(
            "--list", help="List the policies, layers, solvers, networks, data sets and engines that a file can name."
        ),
    ] = False,
    from_flower: Annotated[
        Path | None,
        typer.Option("--from-flower", metavar="PYPROJECT", help="Write the federation of this Flower project instead."),
    ] = None,
    site_policy: Annotated[
        bool, typer.Option("--site-policy", help="Write a policy of a site instead, for metis learner --policy.")
    ] = False,
    force: ForceOption = False,
) -> None:
    """Write a commented example that runs as it is, on the bundled digits or with a Flower project."""
    from metis.experiments.example import definitions, example

    if list_:
        for kind, names in definitions().items():
            say(f"{kind}:")
            width = max(map(len, names), default=0)
            for name, line in names.items():
                say(f"  {name:<{width}}  {line}".rstrip())
        return
    if file is None:
        raise ConfigError("give the name of a file, as in metis init first.toml, or --list")
    if str(file) == "-":
        raise ConfigError("'-' is not a file: give the name of one to write, as in metis init first.toml")
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; give the name of a file, as in {file / 'first.toml'}")
    if file.exists() and not force:
        raise ConfigError(f"{file} exists; choose another name, or overwrite it with --force")
    if from_flower is not None:
        if policy is not None or solver is not None or site_policy:
            raise ConfigError("--from-flower takes everything from the project; it goes without other options")
        from metis.flower.project import federation_file

        text = federation_file(from_flower, file)
    elif site_policy:
        if policy is not None or solver is not None:
            raise ConfigError("--site-policy writes what a site allows; it goes without --policy and --solver")
        text = deployed("metis.deployment.learner.site_policy").EXAMPLE
    else:
        text = example(file.name, policy, solver)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    if site_policy:
        say(f"wrote {file}; use it with: metis learner --policy {shlex.quote(str(file))}")
        return
    command = "simulate" if from_flower is None else "compare"
    say(f"wrote {file}; run it with: metis {command} {shlex.quote(str(file))}")
