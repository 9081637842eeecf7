"""The tracker `mlflow`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metis.reporting.trackers.tracker import at_target, flat, read_stored, write_stored
from metis.runs.folds import HistoryPoint, RunFold
from metis.runs.setting import Setting


class MlflowTracker:
    """A run of an MLflow experiment, on a server or in an SQLite file; continued there when the run is resumed."""

    def __init__(self, where: str | None, folder: Path, name: str, group: str | None) -> None:
        self._folder, self._name, self._group = folder, name, group
        self._client: Any = None
        self._run = ""
        self._started = 0.0
        self._known: set[tuple[str, int]] = set()  # what the tracker had before this process
        where = where or os.environ.get("MLFLOW_TRACKING_URI") or "mlflow.db"
        self._file = None if "://" in where or where.startswith("databricks") else Path(where).resolve()
        self.uri = where if self._file is None else f"sqlite:///{self._file}"
        self._address = re.sub(r"//[^/@]*@", "//", self.uri)  # without the password in it

    def begin(self, setting: Setting, config: Mapping[str, Any]) -> None:
        # Only what Metis measured leaves this machine; a server that cannot be reached is given up within a minute.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(tracking_uri=self.uri)
        stored = read_stored(self._folder, "mlflow")
        if stored.get("place") == self._address and self._continue(stored["run"]):
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "metis")
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        tags = {"metis.policy": setting.policy, "metis.group": self._group or self._name}
        self._started = time.time()
        run = self._client.create_run(number, int(1000 * self._started), tags, self._name)
        self._run = run.info.run_id
        facts = {"policy": setting.label, "seed": setting.seed, **dict(flat(setting.facts)), **dict(flat(config))}
        params = [Param(name[:250], str(value)[:6000]) for name, value in facts.items()]
        for first in range(0, len(params), 100):
            self._client.log_batch(self._run, params=params[first : first + 100])
        write_stored(self._folder, "mlflow", {"place": self._address, "run": self._run})

    def _continue(self, run: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            found = self._client.get_run(run)
            self._client.update_run(run, status="RUNNING")
        except MlflowException:  # it was deleted
            return False
        self._run, self._started = run, found.info.start_time / 1000
        for name in found.data.metrics:
            self._known |= {(name, known.step) for known in self._client.get_metric_history(run, name)}
        return True

    def record(self, point: HistoryPoint, fresh: Mapping[str, float]) -> None:
        self._log(point.version, point.at, fresh)

    def _log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        when = int(1000 * (self._started + at))
        metrics = [Metric(name, value, when, step) for name, value in values.items() if (name, step) not in self._known]
        if metrics:
            self._client.log_batch(self._run, metrics=metrics)

    def end(self, fold: RunFold) -> None:
        if fold.costs_at_target is not None:
            self._log(fold.version, fold.now, at_target(fold.costs_at_target))
        self._client.set_tag(self._run, "metis.ended", fold.finish_reason or "interrupted")
        cut_off = fold.finish_reason is None or fold.finish_reason == "interrupted"
        self._client.set_terminated(self._run, "KILLED" if cut_off else "FINISHED")
