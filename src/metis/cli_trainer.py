"""The child process of a learner or of the controller: `python -m metis.cli_trainer`; see `deployment/trainer.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis.deployment import trainer

if TYPE_CHECKING:
    from metis.experiments.site import Silo


def build(command: Mapping[str, Any]) -> Silo:
    """What the command `prepare` asks for: a learner's silo, or the controller's side if it names no learner."""
    from metis.experiments.site import build_controller_side, build_silo

    site = None if command["site"] is None else Path(command["site"])
    if command["name"] is None:
        return build_controller_side(command["settings"], site, command["device"])
    return build_silo(command["settings"], site, command["name"], command["index"], command["device"])


if __name__ == "__main__":
    # Before torch is imported; the settings' threads are set later.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    trainer.main(build)
