"""Runs kept in folders: which are finished, and whether they were made with the settings that a cell has now."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metis.errors import ConfigError
from metis.experiments.compare import differences
from metis.experiments.config.load import ExperimentConfig, SolverConfig, read_toml, resolve_config
from metis.reproduction.environments import Cell
from metis.runs.checkpoint import CHECKPOINT
from metis.runs.run import CONFIG, SUMMARY, Run
from metis.runs.trace import EVENTS


def cell_folder(out: Path, cell: Cell) -> Path:
    """Where the run of a cell is kept."""
    return out / cell.environment.scale / cell.name


def finished(folder: Path) -> bool:
    """Whether a folder has a run that came to its end."""
    try:
        summary = json.loads((folder / SUMMARY).read_text("utf-8"))
        return bool(summary["finish_reason"] != "interrupted")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def kept(cell: Cell, out: Path) -> bool:
    """Whether the cell was run to its end with the settings that it has now."""
    folder = cell_folder(out, cell)
    try:
        same = _settings(folder) == decisive_settings(cell.config)
    except ConfigError:
        return False
    return same and finished(folder)


def load_finished(cells: Sequence[Cell], out: Path) -> dict[str, Run]:
    """The finished runs of these cells, by the names of the cells."""
    return {cell.name: Run.load(cell_folder(out, cell)) for cell in cells if kept(cell, out)}


def check_kept(cells: Sequence[Cell], out: Path, *, force: bool = False) -> None:
    """Refuse cells whose folders have runs with other settings, or with `force` delete those runs."""
    for cell in cells:
        folder, now = cell_folder(out, cell), decisive_settings(cell.config)
        if not (folder / CONFIG).exists() or (then := _settings(folder)) == now:
            continue
        if not force:
            changed = ", ".join(f"{path} was {old}, is {new}" for path, old, new in differences(then, now))
            raise ConfigError(
                f"{folder} was made with other settings ({changed}); choose another --out, or run it again with --force"
            )
        for name in (SUMMARY, EVENTS, CHECKPOINT, CONFIG):
            (folder / name).unlink(missing_ok=True)


def _settings(folder: Path) -> dict[str, Any]:
    """The settings of a kept run; keys that did not exist then have their defaults."""
    content = read_toml(folder / CONFIG)
    try:
        return _decisive(resolve_config(content, CONFIG, folder=folder, elsewhere=True).to_dict())
    except ConfigError:
        return _decisive(content)  # it has keys that no longer exist


def decisive_settings(config: ExperimentConfig) -> dict[str, Any]:
    """The settings of a configuration that decide the result of a run."""
    return _decisive(config.to_dict())


def _decisive(content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide the result of a run: not the path of its data, nor how it is run."""
    decisive = {key: value for key, value in content.items() if key not in ("run", "deployment")}
    decisive["data"] = {key: value for key, value in decisive.get("data", {}).items() if key != "folder"}
    shared = {key: value for key, value in decisive.get("training", {}).items() if key not in SolverConfig.model_fields}
    decisive["training"] = shared
    decisive["learners"] = [_without_folders(group) for group in decisive.get("learners", [])]
    return json.loads(json.dumps(decisive))  # type: ignore[no-any-return]


def _without_folders(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group of learners whose recorded files are named without their folders."""
    group = dict(group)
    if group.get("speed_trace"):
        group["speed_trace"] = Path(group["speed_trace"]).name
    presence = group.get("availability")
    if isinstance(presence, dict) and presence.get("file"):
        group["availability"] = {**presence, "file": Path(presence["file"]).name}
    return group
