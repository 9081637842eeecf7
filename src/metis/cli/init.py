"""`metis init`: a first experiment to start from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from metis.cli.options import ForceOption
from metis.cli.output import add, say
from metis.errors import ConfigError

_EXAMPLE = Path(__file__).parents[1] / "experiments" / "example.toml"


def register(app: typer.Typer) -> None:
    add(app, init, "metis init first.toml && metis simulate first.toml")


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    force: ForceOption = False,
) -> None:
    """Write a commented example that runs as it is, on the bundled digits."""
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; give the name of a file, as in {file / 'first.toml'}")
    if file.exists() and not force:
        raise ConfigError(f"{file} exists; choose another name, or overwrite it with --force")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_EXAMPLE.read_text("utf-8").replace("THIS_FILE", file.name), encoding="utf-8")
    say(f"wrote {file}; run it with: metis simulate {shlex.quote(str(file))}")
