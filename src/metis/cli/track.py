"""`--track NAME[:WHERE]`: also log a run to a CSV file, TensorBoard, MLflow or Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from metis.cli.output import note

if TYPE_CHECKING:
    from metis.experiments.config.load import ExperimentConfig
    from metis.reporting.trackers.tracking import Tracking

TrackOption = Annotated[
    list[str],
    typer.Option(
        "--track",
        metavar="NAME[:WHERE]",
        help="Also log the run to csv, tensorboard, mlflow or wandb, in addition to run.trackers of the file. WHERE is "
        "a folder, for mlflow a URI or an SQLite file, for wandb a project. May be repeated.",
    ),
]


def tracked(config: ExperimentConfig, track: Sequence[str]) -> ExperimentConfig:
    """The experiment with these trackers added; a tracker that cannot work is refused before anything starts."""
    from metis.reporting.trackers.tracking import make_tracker

    trackers = list(dict.fromkeys([*config.run.trackers, *track]))
    for text in trackers:
        make_tracker(text, Path(), "run")
    return config.model_copy(update={"run": config.run.model_copy(update={"trackers": trackers})})


def following(config: ExperimentConfig, folder: Path, name: str, group: str | None, console: Console) -> Tracking:
    """What feeds the trackers of a run in this folder; a tracker that fails is reported on the console."""
    from metis.reporting.trackers.tracking import Tracking

    document = config.to_dict()
    document["run"].pop("trackers", None)  # an address may hold a password
    return Tracking(
        config.run.trackers,
        folder,
        name=name,
        group=group,
        config=document,
        warn=lambda text: note(text, console),
    )
