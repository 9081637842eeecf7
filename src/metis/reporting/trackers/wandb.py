"""The tracker `wandb`."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from metis.reporting.trackers.tracker import at_target, read_stored, write_stored
from metis.runs.folds import HistoryPoint, RunFold
from metis.runs.setting import Setting


class WandbTracker:
    """A run of a Weights & Biases project: online if there is a key, otherwise in files for `wandb sync`."""

    def __init__(self, where: str | None, folder: Path, name: str, group: str | None) -> None:
        entity, _, project = (where or os.environ.get("WANDB_PROJECT") or "metis").rpartition("/")
        self._entity, self._project = entity or None, project
        self._folder, self._name, self._group = folder, name, group
        self._run: Any = None
        self._known = -1

    def begin(self, setting: Setting, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        # Only what Metis measured leaves this machine: no console, code, host or hardware; and no button on a web page
        # ends a federation.
        wanted = {
            "silent": True, "console": "off", "disable_git": True, "disable_code": True, "save_code": False,
            "x_disable_stats": True, "x_disable_meta": True, "x_disable_machine_info": True,
            "x_save_requirements": False, "host": "metis", "stop_fn": lambda: None,
        }  # fmt: skip
        settings = wandb.Settings(**{key: value for key, value in wanted.items() if key in wandb.Settings.model_fields})
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        stored = read_stored(self._folder, "wandb") if mode == "online" else {}
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            entity=self._entity,
            project=self._project,
            name=self._name,
            group=self._group,
            id=stored.get("run"),
            resume="allow" if stored else None,
            mode=mode,
            dir=str(self._folder),
            config={"label": setting.label, "seed": setting.seed, "facts": setting.facts, **config},
            settings=settings,
        )
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")
        if mode == "online":
            self._known = int(self._run.summary.get("version", -1)) if stored else -1
            write_stored(self._folder, "wandb", {"run": self._run.id})

    def record(self, point: HistoryPoint, fresh: Mapping[str, float]) -> None:
        if point.version > self._known:
            self._run.log({"version": point.version, **fresh})

    def end(self, fold: RunFold) -> None:
        if fold.costs_at_target is not None:
            self._run.summary.update(at_target(fold.costs_at_target))
        self._run.summary["ended"] = fold.finish_reason or "interrupted"
        self._run.finish(exit_code=1 if fold.finish_reason is None else 0)


def _has_wandb_key() -> bool:
    """Whether W&B can log in without asking for a key."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
