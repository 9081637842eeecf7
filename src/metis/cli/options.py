"""Arguments and options that several commands have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

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
OutOption = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Directory to write the run to.")]
PolicyOption = Annotated[str | None, typer.Option("--policy", help="Which policy, if the file has several.")]
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
        help="With --pool ray: a running cluster, as in 10.0.0.1:6379 or auto; by default RAY_ADDRESS, or this "
        "machine.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout and nothing else.")]
ProxyOption = Annotated[
    str | None,
    typer.Option(
        "--proxy",
        metavar="URL|none",
        help="HTTP proxy on the way to the controller, as in http://proxy.example.org:3128; by default that of the "
        "environment (https_proxy, no_proxy).",
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]


def overrides(
    sets: Sequence[str], workers: int | None, pool: str | None = None, ray_address: str | None = None
) -> list[str]:
    """All options that change the file, as KEY=VALUE."""
    from metis.experiments.config.errors import ByOption

    given = (
        ("--workers", "run.workers", workers),
        ("--pool", "run.pool", pool),
        ("--ray-address", "run.ray_address", ray_address),
    )
    return [*sets, *(ByOption(*change) for change in given if change[2] is not None)]
