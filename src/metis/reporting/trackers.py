"""Where a run is followed besides Metis: a CSV file, TensorBoard, MLflow, Weights & Biases.

A tracker is fed from the same fold of events as everything else, in a thread of its own: a run never waits for one,
and one that fails is left out after a single warning. What it gets cannot change the run.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import netrc
import os
import queue
import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

from metis.core.costs import Costs
from metis.errors import ConfigError, needs_package
from metis.reporting.tables import csv_value
from metis.runs.folds import HistoryPoint, RunFold
from metis.runs.setting import Setting

KEPT = "trackers.json"  # in a run's folder: what names the run elsewhere, so that it goes on there when it is resumed
_PATIENCE = 120.0  # seconds that a tracker may take to end after the run has
_RECENT = 100  # points of the history that may still get another measurement


class Tracker(Protocol):
    """One sink; its methods are called in this order, from one thread, and may raise anything."""

    def begin(self, setting: Setting, config: Mapping[str, Any]) -> None:
        """The run begins, or goes on: then all that was recorded before comes again."""

    def record(self, point: HistoryPoint, fresh: Mapping[str, float]) -> None:
        """A model was measured; `fresh` are the numbers of the point that were not told before."""

    def end(self, fold: RunFold) -> None:
        """The run has ended; without a finish reason it was cut off."""


def scalars(point: HistoryPoint) -> dict[str, float]:
    """All numbers of a point under the names that trackers show, in three groups."""
    energy = point.energy
    return {
        **{f"metrics/{name}": value for name, value in point.metrics.items()},
        "costs/parallel_time": point.at,
        "costs/cumulative_time": point.cumulative_time,
        "costs/idle_time": point.idle_time,
        "costs/update_requests": point.update_requests,
        "costs/steps": point.steps,
        "costs/bytes_exchanged": point.bytes_exchanged,
        "energy/equation": energy.equation,
        "energy/active": energy.active,
        "energy/idle_charged": energy.idle_charged,
    }


def at_target(costs: Costs) -> dict[str, float]:
    """The bill at the target, as a few numbers of the whole run."""
    energy = costs.energy
    return {
        "target/parallel_time": costs.parallel_time,
        "target/cumulative_time": costs.cumulative_time,
        "target/update_requests": costs.update_requests,
        "target/steps": costs.steps,
        "target/energy_equation": energy.equation,
        "target/energy_active": energy.active,
        "target/energy_idle_charged": energy.idle_charged,
    }


def _finite(value: Any) -> Any:
    """Infinities as words: not everybody's JSON knows them."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a configuration with their paths, as in `learners.0.count`."""
    for name, value in document.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{path}.")
        elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
            yield from flat({str(place): item for place, item in enumerate(value)}, f"{path}.")
        else:
            yield path, value


# --- the trackers -------------------------------------------------------------------------------


class CsvTracker:
    """`metrics.csv`: one line a measured community model, written as it comes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.csv"
        self._file: IO[str] | None = None
        self._rows: list[dict[str, Any]] = []
        self._starts: list[int] = []
        self._columns: list[str] = []

    def begin(self, setting: Setting, config: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", encoding="utf-8", newline="")

    def record(self, point: HistoryPoint, fresh: Mapping[str, float]) -> None:
        row = {"version": point.version, **scalars(point)}
        versions = [known["version"] for known in self._rows[-_RECENT:]]
        place = len(self._rows)
        if point.version in versions:
            place += versions.index(point.version) - len(versions)
        self._rows[place : place + 1] = [row]
        missing = [name for name in row if name not in self._columns]
        self._columns += missing
        self._write_from(0 if missing else place)

    def _write_from(self, place: int) -> None:
        """Lines from this row on; those before it stand in the file already, if the columns are still the same."""
        assert self._file is not None
        writer = csv.DictWriter(self._file, self._columns, lineterminator="\n")
        if place < len(self._starts):
            self._file.seek(self._starts[place])
            self._file.truncate()
            del self._starts[place:]
        if place == 0:
            self._file.seek(0)
            self._file.truncate()
            writer.writeheader()
        for row in self._rows[place:]:
            self._starts.append(self._file.tell())
            writer.writerow({name: csv_value(value) for name, value in row.items()})
        self._file.flush()

    def end(self, fold: RunFold) -> None:
        assert self._file is not None
        self._file.close()


class TensorBoardTracker:
    """Event files for `tensorboard --logdir`; its relative time is the run's own clock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._started = 0.0

    def begin(self, setting: Setting, config: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer, self._started = EventFileWriter(str(self._folder), flush_secs=5), time.time()
        # Hides what an earlier, cut off attempt at this run left: all of it comes again.
        self._writer.add_event(Event(wall_time=self._started, step=0, session_log=SessionLog(status=SessionLog.START)))
        told = {"policy": setting.policy, "seed": setting.seed, **setting.facts, **dict(flat(config))}
        self._text("configuration", "\n".join(f"    {name} = {value}" for name, value in told.items()))

    def _text(self, name: str, text: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

        tensor = TensorProto(
            dtype="DT_STRING",
            string_val=[text.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag=f"{name}/text_summary", metadata=metadata, tensor=tensor)
        self._writer.add_event(Event(wall_time=self._started, step=0, summary=Summary(value=[value])))

    def record(self, point: HistoryPoint, fresh: Mapping[str, float]) -> None:
        self._scalars(point.version, point.at, fresh)

    def _scalars(self, step: int, at: float, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        told = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=self._started + at, step=step, summary=Summary(value=told)))

    def end(self, fold: RunFold) -> None:
        if fold.costs_at_target is not None:
            self._scalars(fold.version, fold.now, at_target(fold.costs_at_target))
        self._text("ended", fold.finish_reason or "cut off")
        self._writer.close()


class MlflowTracker:
    """A run of an MLflow experiment, at a server or in an SQLite file; goes on there when the run is resumed."""

    def __init__(self, place: str | None, folder: Path, name: str, group: str | None) -> None:
        self._folder, self._name, self._group = folder, name, group
        self._client: Any = None
        self._run = ""
        self._started = 0.0
        self._known: set[tuple[str, int]] = set()  # what the run elsewhere had before this process
        place = place or os.environ.get("MLFLOW_TRACKING_URI") or "mlflow.db"
        self._file = None if "://" in place or place.startswith("databricks") else Path(place).resolve()
        self.uri = place if self._file is None else f"sqlite:///{self._file}"
        self._place = re.sub(r"//[^/@]*@", "//", self.uri)  # a password in it is not written down

    def begin(self, setting: Setting, config: Mapping[str, Any]) -> None:
        # Only what Metis measured leaves this machine; and who cannot be reached is given up within a minute.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(tracking_uri=self.uri)
        kept = read_kept(self._folder, "mlflow")
        if kept.get("place") == self._place and self._go_on(kept["run"]):
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
        write_kept(self._folder, "mlflow", {"place": self._place, "run": self._run})

    def _go_on(self, run: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            found = self._client.get_run(run)
            self._client.update_run(run, status="RUNNING")
        except MlflowException:  # somebody has deleted it
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
        self._client.set_tag(self._run, "metis.ended", fold.finish_reason or "cut off")
        cut_off = fold.finish_reason is None or fold.finish_reason == "interrupted"
        self._client.set_terminated(self._run, "KILLED" if cut_off else "FINISHED")


class WandbTracker:
    """A run of a Weights & Biases project: online if there is a key, else in files that `wandb sync` sends later."""

    def __init__(self, place: str | None, folder: Path, name: str, group: str | None) -> None:
        entity, _, project = (place or os.environ.get("WANDB_PROJECT") or "metis").rpartition("/")
        self._entity, self._project = entity or None, project
        self._folder, self._name, self._group = folder, name, group
        self._run: Any = None
        self._known = -1

    def begin(self, setting: Setting, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        # Only what Metis measured leaves this machine: no console, code, host or hardware; and a button on a web page
        # does not end a federation.
        wanted = {
            "silent": True, "console": "off", "disable_git": True, "disable_code": True, "save_code": False,
            "x_disable_stats": True, "x_disable_meta": True, "x_disable_machine_info": True,
            "x_save_requirements": False, "host": "metis", "stop_fn": lambda: None,
        }  # fmt: skip
        settings = wandb.Settings(**{key: value for key, value in wanted.items() if key in wandb.Settings.model_fields})
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        kept = read_kept(self._folder, "wandb") if mode == "online" else {}
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            entity=self._entity,
            project=self._project,
            name=self._name,
            group=self._group,
            id=kept.get("run"),
            resume="allow" if kept else None,
            mode=mode,
            dir=str(self._folder),
            config={"label": setting.label, "seed": setting.seed, "facts": setting.facts, **config},
            settings=settings,
        )
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")
        if mode == "online":
            self._known = int(self._run.summary.get("version", -1)) if kept else -1
            write_kept(self._folder, "wandb", {"run": self._run.id})

    def record(self, point: HistoryPoint, fresh: Mapping[str, float]) -> None:
        if point.version > self._known:
            self._run.log({"version": point.version, **fresh})

    def end(self, fold: RunFold) -> None:
        if fold.costs_at_target is not None:
            self._run.summary.update(at_target(fold.costs_at_target))
        self._run.summary["ended"] = fold.finish_reason or "cut off"
        self._run.finish(exit_code=1 if fold.finish_reason is None else 0)


def _has_wandb_key() -> bool:
    """Whether W&B could log in without asking anybody."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def read_kept(folder: Path, tracker: str) -> dict[str, str]:
    """What a tracker wrote down of this run; nothing if it did not."""
    try:
        return dict(json.loads((folder / KEPT).read_text("utf-8"))[tracker])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


_kept_lock = threading.Lock()


def write_kept(folder: Path, tracker: str, kept: Mapping[str, str]) -> None:
    with _kept_lock:  # trackers of one run begin at the same time
        try:
            document = dict(json.loads((folder / KEPT).read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            document = {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / KEPT).write_text(json.dumps({**document, tracker: dict(kept)}, indent=1) + "\n", encoding="utf-8")


# --- by name --------------------------------------------------------------------------------------

_PACKAGES = {"csv": None, "tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
TRACKERS = tuple(_PACKAGES)


def make_tracker(text: str, folder: Path, name: str, group: str | None = None) -> Tracker:
    """The tracker that `NAME` or `NAME:PLACE` stands for; its package must be there, nothing is begun yet.

    For csv and tensorboard the place is a folder, in which each run gets one with its group and name; for mlflow it
    is a tracking URI or an SQLite file, for wandb a project.
    """
    kind, _, place = text.partition(":")
    if kind not in _PACKAGES:
        raise ConfigError(f"there is no tracker '{kind}'; allowed: {', '.join(TRACKERS)}, each also as NAME:PLACE")
    package = _PACKAGES[kind]
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(needs_package(f"the tracker {kind}", package, kind))
    below = Path(place, group or "", name) if place else None
    if kind == "csv":
        return CsvTracker(below or folder)
    if kind == "tensorboard":
        return TensorBoardTracker(below or folder / "tensorboard")
    if kind == "mlflow":
        return MlflowTracker(place or None, folder, name, group)
    return WandbTracker(place or None, folder, name, group)


# --- feeding them ---------------------------------------------------------------------------------


class _Sink:
    """One tracker and the thread that feeds it; after a failure it swallows everything."""

    def __init__(self, name: str, tracker: Tracker, problems: deque[str]) -> None:
        self.name = name
        self._problems = problems
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._feed, args=(tracker,), name=f"metis-tracker-{name}", daemon=True)
        self._thread.start()

    def call(self, method: str, *arguments: Any) -> None:
        self._calls.put((method, arguments))

    def _feed(self, tracker: Tracker) -> None:
        failed = False
        while (call := self._calls.get()) is not None:
            method, arguments = call
            if failed:
                continue
            try:
                getattr(tracker, method)(*arguments)
            except (Exception, SystemExit) as problem:  # whatever a library raises is no reason to end a run
                failed = True
                words = " ".join(str(problem).split())
                told = f"{type(problem).__name__}: {words}" if words else type(problem).__name__
                self._problems.append(f"the tracker {self.name} failed and is left out: {told[:300]}")

    def finish(self) -> None:
        self._calls.put(None)

    def wait(self, seconds: float) -> bool:
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()


class Tracking:
    """Feeds trackers while a run goes on: give it as `watch`, inside a `with`.

        with metis.Tracking(["csv", "tensorboard:runs/tb"], "runs/mine") as tracking:
            run = federation.simulate(policy, rounds=10, watch=tracking)

    A tracker is `NAME` or `NAME:PLACE` (csv, tensorboard, mlflow, wandb), or any object with the methods of `Tracker`.
    """

    def __init__(
        self,
        trackers: Sequence[str | Tracker],
        folder: str | Path = ".",
        *,
        name: str | None = None,
        group: str | None = None,
        config: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] | None = None,
        idle_timeout: float = _PATIENCE,
    ) -> None:
        folder = Path(folder)
        name = name or folder.resolve().name
        self._trackers: list[tuple[str, Tracker]] = [
            (text.partition(":")[0], make_tracker(text, folder, name, group))
            if isinstance(text, str)
            else (type(text).__name__, text)
            for text in trackers
        ]
        self._config, self._idle_timeout = _finite(dict(config or {})), idle_timeout
        self._warn = warn or (lambda text: warnings.warn(text, RuntimeWarning, stacklevel=2))
        self._problems: deque[str] = deque()
        self._sinks: list[_Sink] = []
        self._fold: RunFold | None = None
        self._evaluations = -1
        self._points: list[HistoryPoint] = []  # as they were told

    def __enter__(self) -> Tracking:
        return self

    def __call__(self, fold: RunFold) -> None:
        """Tell the trackers what is new; takes no time, and fails only if it is given two runs."""
        if self._fold is None:
            # Not before: threads that are there when worker processes are forked are trouble.
            self._fold = fold
            self._sinks = [_Sink(name, tracker, self._problems) for name, tracker in self._trackers]
            self._tell("begin", fold.setting, self._config)
        elif self._fold is not fold:
            raise ConfigError("one Tracking follows one run; make another for the next")
        if fold.evaluations != self._evaluations:
            self._evaluations = fold.evaluations
            self._tell_points(fold.history)
        self._complain()

    def _tell_points(self, history: Sequence[HistoryPoint]) -> None:
        told = self._points
        for place in range(max(0, len(told) - _RECENT), len(history)):
            point = history[place]
            if place == len(told):
                told.append(point)
                self._tell("record", point, scalars(point))
            elif told[place] is not point:  # measured at another place too
                before, now = scalars(told[place]), scalars(point)
                told[place] = point
                self._tell("record", point, {name: value for name, value in now.items() if before.get(name) != value})

    def _tell(self, method: str, *arguments: Any) -> None:
        for sink in self._sinks:
            sink.call(method, *arguments)

    def _complain(self) -> None:
        while self._problems:
            self._warn(self._problems.popleft())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the trackers end; one that takes too long is left alone."""
        fold = self._fold
        if fold is None:
            return
        self(fold)  # the last measurement comes after the last watch
        self._tell("end", fold)
        for sink in self._sinks:
            sink.finish()
        until = time.monotonic() + self._idle_timeout
        try:
            for sink in self._sinks:
                if not sink.wait(until - time.monotonic()):
                    self._problems.append(
                        f"the tracker {sink.name} does not answer; what it has not taken by now is missing there"
                    )
        except KeyboardInterrupt:
            self._problems.append("not waited for the trackers; what they have not taken by now is missing there")
        self._complain()
