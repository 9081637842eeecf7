"""Where runs came from: facts, versions, configurations, and the command that repeats them."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from metis.runs.run import CONFIG, Run
from metis.text import listed


def facts(run: Run) -> list[tuple[str, str]]:
    shown = [
        (key.replace("_", " "), _fact(value))
        for key, value in run.setting.facts.items()
        if key not in ("versions", "privacy") and value is not None and value != ""
    ]
    shown.append(("model size", f"{run.setting.model_bytes:,} bytes"))
    if run.setting.update_bytes is not None:
        shown.append(("update size", f"{run.setting.update_bytes:,} bytes"))
    if run.compression_error is not None:
        left = f"{100 * run.compression_error:.2g} % of an update on average, sent with the next"
        shown.append(("left out by compression", left))
    return shown


def _fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_fact(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_fact(inner) for inner in value)
    return str(value)


def provenance(runs: list[Run], names: list[str]) -> list[list[str]]:
    return [
        [
            name,
            run.setting.policy,
            str(run.setting.seed),
            f"{run.rounds:,}",
            run.finish_reason,
            f"{run.wall_seconds:.1f} s",
            run.community_model.sha256(),
        ]
        for run, name in zip(runs, names, strict=True)
    ]


def versions(run: Run) -> str:
    recorded = run.setting.facts.get("versions")
    if isinstance(recorded, dict):
        return ", ".join(f"{name} {release}" for name, release in recorded.items())
    found = [f"Python {platform.python_version()}"]
    for name, distribution in (("metis", "metis-federated"), ("numpy", "numpy"), ("torch", "torch")):
        try:
            found.append(f"{name} {version(distribution)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def configuration_file(run: Run, folder: Path) -> Path | None:
    """Where the configuration of a run is: in its own directory, or in that of the comparison."""
    folders = [folder] if run.folder is None else [run.folder, folder]
    return next((path / CONFIG for path in folders if (path / CONFIG).is_file()), None)


def configurations(files: Sequence[Path | None], names: list[str]) -> list[tuple[str, str]]:
    """The text of each configuration, once for all runs that share it."""
    texts: dict[str, list[str]] = {}
    for file, name in zip(files, names, strict=True):
        if file is not None:
            texts.setdefault(file.read_text(encoding="utf-8", errors="replace"), []).append(name)
    return [("all runs" if len(sharing) == len(names) else listed(sharing), text) for text, sharing in texts.items()]


def repeating(runs: Sequence[Run], files: Sequence[Path | None], folder: Path) -> str | None:
    """The command that runs these configurations again, as seen from the directory of the report."""
    known = list(dict.fromkeys(file for file in files if file is not None))
    if not known or None in files:
        return None
    paths = [shlex.quote(Path(os.path.relpath(file, folder)).as_posix()) for file in known]
    if all(run.setting.real_time for run in runs):
        return "\n".join(f"metis controller {path} --state ANOTHER-FOLDER --identity KIT" for path in paths)
    above = {file.parent.parent for file in known}
    if len(files) > 1 and len(above) == 1 and (above.pop() / "comparison.json").is_file():
        return f"metis compare {' '.join(paths)}"
    return "\n".join(f"metis simulate {path}" for path in paths)  # a comparison might refuse their differences
