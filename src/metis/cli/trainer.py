"""The child process of a learner or of the controller: `python -m metis.cli.trainer`; see `deployment/trainer/`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis.deployment.storage import choose_from_environment
from metis.deployment.trainer import process as trainer

if TYPE_CHECKING:
    from metis.experiments.silo import TrainingSilo


def build(command: Mapping[str, Any]) -> TrainingSilo:
    """What the command `prepare` asks for: a learner's silo, or the controller's side if it names no learner."""
    from metis.experiments.silo import build_controller_side, build_silo

    site = None if command["site"] is None else Path(command["site"])
    if command["name"] is None:
        return build_controller_side(command["settings"], site, command["device"])
    return build_silo(command["settings"], site, command["name"], command["index"], command["device"])


def group(arguments: Sequence[str]) -> trainer.Group:
    """Of several processes that train as one: `--processes 4` is the first, which starts the others by `--follow`."""
    match arguments:
        case ["--processes", size]:
            return trainer.Group(0, int(size))
        case ["--follow", rank, size, meeting_point]:
            return trainer.Group(int(rank), int(size), meeting_point)
        case _:
            return trainer.Group()


if __name__ == "__main__":
    # Before torch is imported; the settings' threads are set later.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    choose_from_environment()
    trainer.main(build, group(sys.argv[1:]))
